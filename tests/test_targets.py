"""Recovery targets: we stop where stock PostgreSQL stops, and PostgreSQL agrees when it takes over."""

import pytest

from tests.lab.loads import load
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster
from tests.lab.walrider import replay, walrider

CASES = [
    ("lsn", "btree", True), ("lsn", "btree", False), ("lsn", "promoted", True),
    ("time", "locks", True), ("time", "locks", False),
    ("xid", "tablespaces", True), ("xid", "tablespaces", False), ("xid", "leave_prepared_late", True),
    ("name", "leave_prepared_early", True), ("name", "crash_in_record", True),
    ("immediate", None, True),
]


def value_of(fixture, kind, place):
    """The target's value as the user would write it."""
    if kind == "immediate":
        return None
    mark = fixture.target(place)
    return {"lsn": mark["lsn"], "time": mark["commit_time"], "xid": mark["xid"], "name": mark["name"]}[kind]


def outcome(server):
    """What a user sees after promotion: contents, open transactions, and where recovery stopped."""
    stopped = recovery.recover_and_promote(server, recovery_target_action="promote")
    prepared = server.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1")
    serves = server.psql("CREATE TABLE after_promotion (id int); INSERT INTO after_promotion VALUES (1) RETURNING id")
    server.psql("DROP TABLE after_promotion")
    return dict(stop=stopped["stop"], contents=load.contents(server), prepared=prepared, serves=serves,
                timeline=server.value("SELECT timeline_id FROM pg_control_checkpoint()"))


@pytest.mark.parametrize("kind, place, inclusive", CASES)
def test_target(plain, work, kind, place, inclusive):
    """The same stop, the same rows."""
    value = value_of(plain, kind, place)
    reference = recovery.prepare(plain.backup, plain.archive, work / "stock", plain.directory,
                                 target=(kind, value), inclusive=inclusive)
    with reference:
        wanted = outcome(reference)
    assert wanted["stop"], "the reference did not stop at its target"

    ours = plain.copy(work / "ours")
    option = ["--target-immediate"] if kind == "immediate" else [f"--target-{kind}", value]
    result = replay(ours, plain.archive, *option, *([] if inclusive else ["--target-exclusive"])).expect()
    assert result.json["end_reason"] == "target"
    assert (ours / "recovery.signal").exists()
    server = PgCluster(ours)
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        assert outcome(server) == wanted


def test_target_from_configuration(plain, work):
    """recovery_target_name and recovery.signal in the directory; no option on the command line."""
    mark = plain.target("catalogs")
    ours = plain.copy(work / "ours")
    settings = recovery.restore_settings(plain.archive, target=("name", "catalogs"))
    (ours / "postgresql.auto.conf").open("a").write(settings + "\n")
    (ours / "recovery.signal").touch()
    result = walrider("replay", "--data-dir", ours).expect()
    assert result.json["end_reason"] == "target"
    server = PgCluster(ours)
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        recovery.recover_and_promote(server, recovery_target_action="promote")
        assert int(server.value("SELECT count(*) FROM ledger")) == mark["ledger"]


def test_timeline_can_be_chosen(plain, work):
    """--target-timeline 1 ends where timeline 1 was left."""
    ours = plain.copy(work / "ours")
    result = replay(ours, plain.archive, "--target-timeline", "1", "--target-name", "concurrent").expect()
    assert (result.json["end_reason"], result.json["timeline"]) == ("target", 1)


def test_target_never_reached(plain, work):
    """PostgreSQL makes this an error too: recovery ended before the configured target."""
    ours = plain.copy(work / "ours")
    result = replay(ours, plain.archive, "--target-name", "no_such_point")
    assert result.code == 1
    assert "target" in result.stderr


@pytest.mark.parametrize("option", [("--target-lsn", "nonsense"), ("--target-time", "yesterdayish"),
                                    ("--target-xid", "-3"), ("--target-timeline", "zero")], ids=" ".join)
def test_nonsense_is_usage(plain, work, option):
    """Refused before anything is touched."""
    ours = plain.copy(work / "ours")
    result = replay(ours, plain.archive, *option)
    assert result.code == 2
    assert (ours / "backup_label").exists()


def test_two_targets_are_usage(plain, work):
    """As for PostgreSQL: at most one."""
    ours = plain.copy(work / "ours")
    assert replay(ours, plain.archive, "--target-xid", "700", "--target-immediate").code == 2
