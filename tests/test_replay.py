"""Walrider's directory is stock PostgreSQL's directory, and PostgreSQL takes it over."""

import pytest

from tests.lab import install
from tests.lab.loads import load
from tests.lab.oracle import records
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, parse_lsn, run
from tests.lab.walrider import binary, replay, walrider

pytestmark = pytest.mark.every_major


def finish_and_open(data_dir, archive):
    """Start stock PostgreSQL on a replayed directory, promoted at the end of WAL."""
    server = PgCluster(data_dir)
    server.configure(recovery.restore_settings(archive), "postgresql.auto.conf")
    server.configure("archive_mode = off", "postgresql.auto.conf")
    (data_dir / "standby.signal").unlink(missing_ok=True)
    (data_dir / "recovery.signal").touch()
    recovery.recover_and_promote(server)
    return server


def test_every_record_type_is_made(mixed):
    """Each type of docs/records.md is made by the step it names, and the WAL holds no other."""
    steps = records.types_by_step(mixed.archive, mixed.info["targets"])
    found = records.types_between(mixed.archive)
    made = [row for row in records.table() if row.maker and "::" not in row.maker]
    assert [row for row in made if (row.rmgr, row.name) not in steps.get(row.maker, ())] == []
    assert found - {(row.rmgr, row.name) for row in made} == set()


def test_stats_are_those_of_pg_waldump(variant):
    """Counts and bytes of each type, over both timelines."""
    ours = {(entry["rmgr"], entry["type"]): entry
            for entry in walrider("wal", "stats", variant.archive).expect().json["types"] if entry["count"]}
    theirs = records.waldump_types(variant.archive)
    assert sorted(ours) == sorted(theirs)
    for key, entry in theirs.items():
        for field in ("count", "record_bytes", "fpi_bytes", "total_bytes"):
            assert ours[key][field] == entry[field], (key, field)


def test_dump_is_that_of_pg_waldump(mixed):
    """Line by line, of every record type that there is."""
    for segments in records.timelines(mixed.archive):
        ours = run([binary(), "wal", "dump", *segments]).stdout.splitlines()
        theirs = records.waldump(segments).splitlines()
        assert len(ours) == len(theirs) > 100
        assert next(((a, b) for a, b in zip(ours, theirs) if a != b), None) is None


def test_replay_equals_stock(variant, work):
    """Page by page, to the end of the WAL."""
    ours = variant.copy(work / "ours")
    result = replay(ours, variant.archive).expect()
    recovery.pin_tablespaces(ours)
    assert result.json["end_reason"] == "end_of_wal"
    assert result.json["checkpoint_lsn"] == variant.info["final_checkpoint"]
    assert result.json["timeline"] == variant.info["timeline"]
    compared = compare(ours, variant.stock)
    # Nothing was left out because its name was not understood, in tablespaces as elsewhere.
    files = [file for pattern in ("base/*/*", "global/*", "pg_tblspc/*/*/*/*") for file in variant.stock.glob(pattern)]
    relations = {(file.parent, file.name.partition("_")[0].partition(".")[0]) for file in files
                 if file.name[0].isdigit()}
    assert "other" not in compared["classes"] and compared["relations"] == len(relations), len(relations)
    assert any("pg_tblspc" in str(directory) for directory, _ in relations)


@pytest.mark.parametrize("options", [("--jobs", "1"), ("--jobs", "5"), ("--memory", "64MB")], ids=" ".join)
def test_options_change_nothing(mixed, work, options):
    """However many workers and however little memory."""
    ours = mixed.copy(work / "ours")
    replay(ours, mixed.archive, *options).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, mixed.stock)


def test_every_image_is_ours(mixed, work):
    """wal_consistency_checking's images are the pages we make."""
    result = replay(mixed.copy(work / "ours"), mixed.archive, "--verify-images").expect()
    assert result.json["images_verified"] > 10000
    assert result.json["image_differences"] == 0


def test_postgresql_takes_over(variant, work):
    """Contents, prepared transactions, indexes and checksums as on the primary."""
    ours = variant.copy(work / "ours")
    replay(ours, variant.archive).expect()
    if variant.info["options"]["checksums"]:
        run([install.program("pg_checksums"), "--check", "-D", ours])
    with finish_and_open(ours, variant.archive) as server:
        assert load.contents(server) == variant.info["expected"]
        open_now = sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts"))
        assert open_now == sorted(variant.info["left_open"])
        run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--no-dependent-toast",
             "--install-missing"], env=server.environment())
        server.psql(f"COMMIT PREPARED '{open_now[0]}'; ROLLBACK PREPARED '{open_now[1]}'")
        assert [int(server.value(f"SELECT count(*) FROM pending_{name}")) for name in ("early", "late")] == [51, 0]
        bad = server.psql("SELECT c.oid::regclass, x.* FROM pg_class c, pg_check_visible(c.oid) x "
                          "WHERE c.relkind IN ('r', 'm', 't') AND c.relpersistence = 'p'")
        assert bad == []
        assert server.value("SELECT count(*) FROM unlogged_late") == "0"
        server.psql("INSERT INTO base VALUES (-9999, 1, 'written after the hand-over'); VACUUM; CHECKPOINT")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_continue_a_standby(plain, work, mode):
    """A stock standby stopped on the way, cleanly or not, and continued by us.

    It is stopped before the load copies databases by file: a standby that dies after CREATE_FILE_COPY and
    before its next restartpoint copies the source again later than the primary did (dbase_redo,
    dbcommands.c), and what it then copies is not what an uninterrupted recovery has.
    """
    partial = work / "partial"
    partial.mkdir()
    before = parse_lsn(plain.target("prepared")["lsn"])
    known = [segment for segment in plain.segments() if parse_lsn(
        f"{segment.name[8:16]}/{int(segment.name[16:], 16) << 24:X}") + (16 << 20) <= before]
    for segment in known:
        (partial / segment.name).symlink_to(segment)
    ours = work / "ours"
    server = recovery.prepare(plain.backup, partial, ours, plain.directory, signal="standby.signal")
    with server:
        server.launch(hot_standby="off", log_min_messages="debug1")
        while f'restored log file "{known[-1].name}"' not in server.log_tail(2000):
            assert server.process.poll() is None, server.log_tail()
        server.stop(mode)
    plain.point(ours)
    replay(ours, plain.archive).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_configuration_of_the_directory(plain, work):
    """Without options: restore_command and standby.signal as a backup tool left them."""
    ours = plain.copy(work / "ours")
    (ours / "postgresql.auto.conf").open("a").write(recovery.restore_settings(plain.archive) + "\n")
    (ours / "standby.signal").touch()
    walrider("replay", "--data-dir", ours).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_wal_in_pg_wal(plain, work):
    """A backup made with -X fetch needs nothing but itself."""
    ours = plain.copy(work / "ours")
    for file in plain.archive.iterdir():
        if len(file.name) == 24 or file.name.endswith(".history"):
            (ours / "pg_wal" / file.name).write_bytes(file.read_bytes())
    result = replay(ours, ours / "pg_wal").expect()
    assert result.json["timeline"] == plain.info["timeline"]
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_replaying_twice_changes_nothing(plain, work):
    """The same command on its own result."""
    ours = plain.copy(work / "ours")
    replay(ours, plain.archive).expect()
    again = replay(ours, plain.archive).expect()
    assert again.json["checkpoint_lsn"] == plain.info["final_checkpoint"]
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_stock_continues_where_we_stopped(plain, work):
    """Half by us, half by stock: no difference."""
    ours = plain.copy(work / "ours")
    middle = plain.target("tablespaces")
    replay(ours, plain.archive, "--target-lsn", middle["lsn"]).expect()
    auto_conf = ours / "postgresql.auto.conf"
    kept = [line for line in auto_conf.read_text().splitlines() if not line.startswith("recovery_target")]
    auto_conf.write_text("\n".join(kept) + "\n")
    server = PgCluster(ours)
    server.configure(recovery.restore_settings(plain.archive, target=("lsn", plain.info["final_checkpoint"]),
                                               action="shutdown"), "postgresql.auto.conf")
    with server:
        recovery.finish_stock(server, plain.info["final_checkpoint"])
    compare(ours, plain.stock)
