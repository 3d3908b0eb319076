"""Archives from which something is missing, or in which a file is damaged: made of links to a fixture's files."""

import shutil


def archive_of_links(fixture, target, skip=()):
    """An archive whose files are links to the fixture's, without those named in `skip`."""
    target.mkdir()
    for file in fixture.archive.iterdir():
        if file.name not in skip:
            (target / file.name).symlink_to(file)
    return target


def own(path):
    """Replace a link by a copy that may be damaged."""
    source = path.resolve()
    path.unlink()
    shutil.copy(source, path)
    path.chmod(0o600)
    return path


def middle_segment(fixture):
    """A segment of timeline 1 in the middle of the load, full of records: no switch ends it early, and no record that
    is longer than a segment runs through it."""
    def is_full(segment):
        contents = segment.read_bytes()
        continued = int.from_bytes(contents[16:20], "little")       # xlp_rem_len
        return any(contents[-4096:]) and continued < len(contents) // 4

    full = [segment for segment in fixture.segments() if segment.name.startswith("00000001") and is_full(segment)]
    return full[len(full) // 2].name
