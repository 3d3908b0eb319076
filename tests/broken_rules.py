"""Each rule of docs/readable.md is broken on purpose, in a library built for it, and a test must see that: `make planted-readable`.

Not tried: rules that say when early redo may begin (1), and what the end of recovery needs (2): `test_readable.py` has those.
"""

from contextlib import contextmanager

import psycopg
import pytest

from tests.lab import extension, install
from tests.lab.seed import seed
from tests.lab.server.cluster import ServerError
from tests.lab.standby import readable
from tests.lab.waiting import NotYet

READ = {3: "files come and go between slices", 6: "a prune waits for snapshots", 8: "an index entry comes after its heap tuple",
        9: "a map's bit is cleared before the entry comes", 10: "a multixact is not met before it is there"}
REPLAYED = {5: "what follows a record in place waits for it", 12: "a record half done is not done again",
            14: "what the slice before has left to do is done first"}
SEEN = (AssertionError, ServerError, psycopg.Error)


def broken(rule, work):
    """The library without this rule."""
    library = work / "broken.so"
    extension.build(install.major(), cflags=f"-DWALRIDER_BREAK={rule}", into=library)
    return {"shared_preload_libraries": library, "walrider.redo_workers": 2}


@contextmanager
def noticed(rule, what, *kinds):
    """What is inside fails. That something took too long says nothing: a rule that is broken on purpose may cost time."""
    with pytest.raises(kinds or SEEN) as seen:
        yield
    assert not isinstance(seen.value, NotYet), seen.value
    print(f"rule {rule}, {what}: {str(seen.value)[:300]}")


@pytest.mark.parametrize("rule", READ)
def test_readers_notice(rule, primary_template, work):
    """Within a minute, or in one of three tries."""
    def tries():
        for number in range(3):
            readable.watched(primary_template, work / str(number), 60, f"{seed()}/{rule}/{number}", hot_standby_feedback="off",
                             max_standby_streaming_delay="3s", **{"walrider.redo_slice": 4000}, **broken(rule, work))
    for number in range(3):
        (work / str(number)).mkdir()
    with noticed(rule, READ[rule]):
        tries()


@pytest.mark.parametrize("rule", REPLAYED)
def test_pages_differ(rule, plain, work):
    """Or the server ends."""
    with noticed(rule, REPLAYED[rule]):
        readable.same_pages(plain, work, **broken(rule, work))


def test_pages_are_past_the_minimum(plain, work, rng):
    """Rule 4: minRecoveryPoint goes before."""
    with noticed(4, "minRecoveryPoint goes before", AssertionError):
        readable.killed(plain, work, 30, rng, **broken(4, work))
