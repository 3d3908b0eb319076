"""What the documents name is there: files, links, crates, functions."""

import re

import pytest

from tests.lab.as_user import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Decisions and releases tell of their time, and of what has gone since.
OF_THEIR_TIME = [*ROOT.glob("docs/decisions/*.md"), ROOT / "CHANGELOG.md"]
SOURCES = {path: path.read_text() for path in (ROOT / "crates").glob("**/*.rs")}


def code(text):
    """What stands in backquotes."""
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Links to files, but not to places in the web."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in OF_THEIR_TIME],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_ours_are_there(document):
    """Paths from the root on, as far as they are written out."""
    tops = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
    paths = [name for name in code(document.read_text()) if re.fullmatch(rf"(?:{tops})/[\w./-]+", name)]
    made = ("target/", "demo-report/")
    assert not [path for path in paths if not path.startswith(made) and not (ROOT / path).exists()]


def test_the_map_leads_to_files():
    """The table of where each thing is: paths below crates/, or beside the one before."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Where each thing is"):text.index("Outside `crates/`")]
    missing = []
    for row in re.findall(r"^\| .* \| (.*) \|$", table, re.M):
        before = ROOT / "crates"
        for name in code(row):
            if not re.search(r"\.rs$|/", name):
                continue
            near = [ROOT / "crates" / name, *(folder / name for folder in (before, *before.parents[:2]))]
            found = next((path for path in near if path.exists()), None)
            missing += [name] if found is None else []
            before = before if found is None else found if found.is_dir() else found.parent
    assert not missing


def test_every_crate_is_in_the_map():
    """Its row among the crates, and at least one thing to be found there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    crates = {path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml")}
    rows = set(re.findall(r"^\| `([\w-]+)` \|", text, re.M))
    assert crates <= rows
    assert not [crate for crate in crates - {"seed"} if f"`{crate}/src/" not in text]


def test_the_map_says_what_each_crate_uses():
    """Its column: the crates of ours that each depends on, but for layout, which all use but seed."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    told = {crate: uses.split(", ") if uses.strip() else []
            for crate, uses in re.findall(r"^\| `([\w-]+)` \| ([\w, -]*) \| .* \| .* \|$", text, re.M)}
    for manifest in (ROOT / "crates").glob("*/Cargo.toml"):
        crate = manifest.parent.name
        (dependencies,) = re.findall(r"^\[dependencies\]\n(.*?)(?:^\[|\Z)", manifest.read_text() + "\n", re.M | re.S) or [""]
        used = sorted(re.findall(r"^walrider-([\w-]+)", dependencies, re.M))
        assert ("layout" in used) == (crate not in ("layout", "seed")), crate
        assert told[crate] == [name for name in used if name != "layout"], crate


def test_what_the_map_calls_by_name_is_there():
    """`Type::function`: the type, and a function of that name, in one file."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = {tuple(name.split("::")) for name in code(text) if re.fullmatch(r"[A-Z]\w+::[a-z_]\w*", name)}

    def is_there(kind, function):
        return any(re.search(rf"\b(?:impl|trait)\b[^\n]*\b{kind}\b", source) and re.search(rf"\bfn {function}\b", source)
                   for source in SOURCES.values())

    assert names and not [name for name in names if not is_there(*name)]
