"""Base backups from `walrider standby --listen`: pg_basebackup takes them, pg_verifybackup accepts them, PostgreSQL and Walrider start on
them, and what is in them is what the primary has.

Not tried here: backups larger than memory, disks that fail meanwhile, hundreds of tablespaces.
"""

import json
import shutil
import signal
import subprocess
import threading
import time

import pytest

from tests.lab import install
from tests.lab.certificates import certificate
from tests.lab.loads.commit import TABLE
from tests.lab.server.backups import extract, verify
from tests.lab.server.cluster import PgCluster, controldata, free_port, parse_lsn, run
from tests.lab.standby import standby
from tests.lab.standby.relay import LOOPBACK, ask, wait_replayed
from tests.lab.standby.standby import LOCALLY, Walrider, clone, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

QUICK = ("--restartpoint-wal", "4MB", "--restartpoint-interval", "1s", "--wal-keep", "0")
# Neither changes without WAL on a primary, nor is told by it in the same order.
MAY_DIFFER = {"control", "backup-remains"}


class Serving(Walrider):
    """`walrider standby --listen`; `serves` is its port."""

    def __init__(self, data_dir, *options):
        port = free_port()
        access = data_dir.with_name(f"{data_dir.name}.access.toml")
        access.write_text(LOOPBACK)
        super().__init__(data_dir, "--listen", f"127.0.0.1:{port}", "--access", access, "--status-interval", "1s", *options)
        self.serves = port

    def restartpoint(self, primary):
        """Have one made that is newer than all so far."""
        first = self.status()["replay"]["restartpoints"]
        primary.psql("CHECKPOINT", options=LOCALLY)
        primary.psql("SELECT pg_switch_wal(); SELECT txid_current()", options=LOCALLY)
        wait_for(lambda: self.status()["replay"]["restartpoints"] > first, self.status)


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


@pytest.fixture
def serving(table, work):
    """A standby that serves, with frequent restartpoints."""
    with Serving(clone(table, work / "serving"), *QUICK).start() as serving:
        wait_streaming(table)
        yield serving


@pytest.fixture
def load(table):
    """pgbench as fast as it goes, with relations that come and go, until it is told to end; commits wait for nobody."""
    for setting in ("synchronous_commit = local", "wal_keep_size = '4GB'", "max_wal_size = '1GB'"):
        table.psql(f"ALTER SYSTEM SET {setting}", options=LOCALLY)
    table.psql("SELECT pg_reload_conf()", options=LOCALLY)
    table.pgbench("-i", "-s", "5", "-q")
    table.psql("CREATE UNLOGGED TABLE u AS SELECT 1 AS x")
    over = threading.Event()
    bench = table.pgbench_start("-n", "-c", "2", "-T", "300")

    def churn():
        number = 0
        while not over.is_set():
            number += 1
            table.psql(f"CREATE TABLE c{number} AS SELECT i, repeat('c', 100) FROM generate_series(1, 3000) i; "
                       f"CREATE INDEX ON c{number} (i); DELETE FROM c{number} WHERE i > 1000; VACUUM c{number}")
            if number > 3:
                table.psql(f"DROP TABLE c{number - 3}")
            if number % 5 == 0:
                table.psql("CHECKPOINT")
    thread = threading.Thread(target=churn)
    thread.start()

    def end():
        over.set()
        bench.send_signal(signal.SIGTERM)
        bench.communicate()
        thread.join()
    yield end
    if not over.is_set():
        end()


def take(serving, target, *options, wal="stream", check=True, timeout=120):
    """pg_basebackup."""
    command = [install.program("pg_basebackup"), "-h", "127.0.0.1", "-p", serving.serves, "-U", "postgres", "-D", target, "-X", wal,
               "-c", "fast", "--no-sync", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
    if check:
        assert done.returncode == 0, f"{done.stderr}\n{serving.log_tail()}"
        assert "warning" not in done.stderr.lower(), done.stderr
    return done


def unpacked(work):
    """A directory of what pg_basebackup --format=tar left, as plain format would have it."""
    backup, target = work / "backup", work / "unpacked"
    if int(install.major()) >= 18:
        verify(backup, "-n")
    extract(backup / "base.tar", target)
    if (backup / "pg_wal.tar").exists():
        extract(backup / "pg_wal.tar", target / "pg_wal")
    shutil.copy(backup / "backup_manifest", target)
    return target


def label(data_dir):
    """The lines of backup_label."""
    return dict(line.split(": ", 1) for line in (data_dir / "backup_label").read_text().splitlines())


def follow(primary, data_dir, name="replica", **settings):
    """PostgreSQL on a backup, as a standby of the primary that has replayed all there is."""
    standby.point(data_dir, primary.port, name)
    server = PgCluster(data_dir)
    start_primary(server, hot_standby="on", **settings)
    wait_replayed(server, primary.wal_end())
    return server


def same_rows(primary, server):
    """Sums over all that pgbench has written."""
    for name in ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history", "t"):
        query = f"SELECT count(*), coalesce(sum(hashtext(x::text)), 0) FROM {name} x"
        assert server.psql(query) == primary.psql(query), name


def same_pages(primary, directories):
    """Stop the primary; each standby stops once it has all; their directories have the same pages as the primary's."""
    primary.psql("VACUUM; CHECKPOINT")
    primary.stop()
    final = parse_lsn(primary.controldata()["Latest checkpoint location"])
    for stop in directories.values():
        stop(final)
    for directory in directories:
        result = walrider("compare", directory, primary.data_dir)
        differs = {kind for kind in ("page", "checksum", "partial-page", "missing-file", "directory", "slru", "file", "tablespace-shared")
                   if result.json["classes"].get(kind)}
        assert not differs, (directory, differs, result.json["first"])
        assert result.json["pages"] > 1000


def stopper(server):
    """Stops a hot standby that has replayed up to there."""
    def stop(final):
        wait_for(lambda: parse_lsn(server.value("SELECT pg_last_wal_replay_lsn()")) > final, server.log_tail)
        server.psql("CHECKPOINT")
        server.stop()
    return stop


@pytest.mark.parametrize("form,wal", [("plain", "none"), ("plain", "stream"), ("plain", "fetch"), ("tar", "stream"), ("tar", "fetch")])
def test_backups_under_load(table, serving, load, work, form, wal):
    """Taken while the standby replays at full speed; PostgreSQL follows the primary with it, and has its rows and pages."""
    time.sleep(1)
    options = ["-Ft"] if form == "tar" else []
    take(serving, work / "backup", *options, "-P", wal=wal)
    data_dir = unpacked(work) if form == "tar" else work / "backup"
    verify(data_dir, *(["-n"] if wal == "none" else []))
    said = label(data_dir)
    assert said["BACKUP METHOD"] == "streamed" and said["BACKUP FROM"] == "standby" and said["START TIMELINE"] == "1", said
    assert said["LABEL"] == "pg_basebackup base backup"
    manifest = json.loads((work / "backup" / "backup_manifest").read_text())
    control = controldata(data_dir)
    needed = manifest["WAL-Ranges"]
    assert [(one["Timeline"], one["End-LSN"]) for one in needed] == [(1, control["Minimum recovery ending location"])]
    assert said["START WAL LOCATION"].startswith(needed[0]["Start-LSN"] + " ")
    names = {one["Path"] for one in manifest["Files"]}
    assert not [name for name in names if "walrider" in name or name.startswith(("postmaster", "pg_replslot/", "pg_subtrans/"))]
    unlogged = table.value("SELECT pg_relation_filepath('u')")
    assert f"{unlogged}_init" in names and unlogged not in names
    load()
    with follow(table, data_dir) as server:
        same_rows(table, server)
        same_pages(table, {data_dir: stopper(server)})


@pytest.mark.every_major
def test_a_backup_is_promoted(table, serving, load, work):
    """Recovery of it alone, with the WAL that came along, ends after all that the primary had committed before it ended."""
    take(serving, work / "backup", wal="stream")
    (work / "backup" / "standby.signal").unlink()
    (work / "backup" / "recovery.signal").touch()
    load()
    with PgCluster(work / "backup") as server:
        start_primary(server, restore_command="false", synchronous_standby_names="")
        wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)
        assert server.value("SELECT timeline_id FROM pg_control_checkpoint()") == "2"
        assert server.value("SELECT count(*) FROM pgbench_accounts") == "500000"
        sums = [server.value(f"SELECT sum({column}) FROM {name}") for name, column in
                (("pgbench_accounts", "abalance"), ("pgbench_tellers", "tbalance"), ("pgbench_branches", "bbalance"), ("pgbench_history", "delta"))]
        assert len(set(sums)) == 1, sums
        server.psql("CREATE EXTENSION IF NOT EXISTS amcheck; SELECT bt_index_check(c.oid, true) FROM pg_class c "
                    "JOIN pg_index i ON i.indexrelid = c.oid JOIN pg_am a ON a.oid = c.relam "
                    "WHERE a.amname = 'btree' AND c.relpersistence = 'p'")
        server.psql("INSERT INTO u VALUES (2)")
        assert server.value("SELECT count(*) FROM u") == "1"


def test_walrider_follows_with_a_backup(table, serving, load, work):
    """A standby of a standby, made of its backup, streaming from it; and another of that one."""
    # Its WAL is only here, and would go with the next restartpoint.
    ask(serving, "CREATE_REPLICATION_SLOT second PHYSICAL RESERVE_WAL")
    take(serving, work / "second", wal="none")
    standby.point(work / "second", serving.serves, "second", "second")
    with Serving(work / "second", *QUICK).start() as second:
        wait_for(lambda: second.status()["consistent"], lambda: f"{second.status()}\n{second.log_tail()}\n{serving.log_tail()}")
        take(second, work / "third", wal="stream")
        verify(work / "third")
        load()
        with follow(table, work / "third") as server:
            same_rows(table, server)
            stop = stopper(server)

            def stop_walrider(final):
                wait_for(lambda: second.position("replayed") > final, second.status)
                second.stop()
            same_pages(table, {work / "third": stop, work / "second": stop_walrider})


def test_as_the_manual_says(table, serving, work):
    """With -R and a new slot: PostgreSQL starts on it and streams from the standby."""
    take(serving, work / "backup", "-R", "-C", "-S", "replica3")
    verify(work / "backup", "-i", "postgresql.auto.conf")
    assert serving.status()["slots"]["replica3"]["restart_lsn"] is not None
    with PgCluster(work / "backup") as server:
        start_primary(server, hot_standby="on")
        table.psql("INSERT INTO t (v) VALUES ('x')", options=LOCALLY)
        wait_replayed(server, table.wal_end())
        assert server.value("SELECT v FROM t") == "x"
        assert serving.status()["slots"]["replica3"]["active"]


def test_as_soon_as_it_is_consistent(table, load, work):
    """The standby's own directory is a backup that has just become consistent; nothing of it was written, and pg_control says so."""
    data_dir = clone(table, work / "serving")
    with Serving(data_dir, "--restartpoint-interval", "1h").start() as serving:
        wait_for(lambda: take(serving, work / "backup", check=False).returncode == 0, serving.log_tail)
        verify(work / "backup")
        end = controldata(work / "backup")["Minimum recovery ending location"]
        before = controldata(data_dir)
        assert parse_lsn(end) > parse_lsn(before["Latest checkpoint location"])
        load()
        with follow(table, work / "backup") as server:
            same_rows(table, server)
            same_pages(table, {work / "backup": stopper(server)})


def test_the_end_covers_the_backup_that_it_is_of(table, work):
    """Replay has passed the end of the standby's own backup and written nothing: its pg_control says less than must be replayed."""
    data_dir = clone(table, work / "serving")
    with Serving(data_dir, "--restartpoint-interval", "1h").start() as serving:
        wait_streaming(table)
        table.psql("INSERT INTO t (v) SELECT repeat('w', 100) FROM generate_series(1, 1000)", options=LOCALLY)
        wait_for(lambda: serving.status()["consistent"], serving.status)
        replayed = serving.position("replayed")
        take(serving, work / "backup")
        minimum = lambda directory: parse_lsn(controldata(directory)["Minimum recovery ending location"])
        assert minimum(data_dir) < replayed <= minimum(work / "backup")
        with follow(table, work / "backup") as server:
            assert server.value("SELECT count(*) FROM t") == "1000"


def test_tablespaces(table, serving, work):
    """Each has an archive; plain with a mapping, tar with tablespace_map."""
    there = work / "there"
    for place in ("of_primary", "of_standby"):
        (work / place).mkdir()
    # On one host, the standby's must be another place by the same name, or it is refused.
    serving.process.send_signal(signal.SIGSTOP)
    there.symlink_to(work / "of_primary")
    table.psql(f"CREATE TABLESPACE s LOCATION '{there}'", options=LOCALLY)
    number = table.value("SELECT oid FROM pg_tablespace WHERE spcname = 's'")
    link = table.data_dir / "pg_tblspc" / number
    link.unlink()
    link.symlink_to(work / "of_primary")
    there.unlink()
    there.symlink_to(work / "of_standby")
    serving.process.send_signal(signal.SIGCONT)
    table.psql("CREATE TABLE x TABLESPACE s AS SELECT i FROM generate_series(1, 100000) i", options=LOCALLY)
    wait_position(table, timeout=60)
    serving.restartpoint(table)
    take(serving, work / "plain", "-T", f"{there}={work / 'mapped'}", wal="none")
    verify(work / "plain", "-n")
    assert (work / "plain" / "pg_tblspc" / number).resolve() == (work / "mapped").resolve()
    assert list((work / "mapped").glob("PG_*/*/*"))
    take(serving, work / "backup", "-Ft", wal="fetch")
    tar = unpacked(work)
    assert (tar / "tablespace_map").read_text() == f"{number} {there}\n"
    moved = extract(work / "backup" / f"{number}.tar", work / "moved")
    (tar / "tablespace_map").write_text(f"{number} {moved}\n")
    for name, data_dir in (("a", work / "plain"), ("b", tar)):
        with follow(table, data_dir, name) as server:
            assert server.psql("SELECT count(*), sum(i) FROM x") == table.psql("SELECT count(*), sum(i) FROM x")


@pytest.mark.parametrize("options", [["--manifest-checksums", kind] for kind in ("none", "crc32c", "sha224", "sha256", "sha384", "sha512")]
                         + [["--manifest-force-encode"], ["--no-manifest"]], ids=lambda options: "-".join(options).strip("-"))
def test_manifests(serving, work, options):
    """Of each kind that there is."""
    take(serving, work / "backup", *options)
    if "--no-manifest" in options:
        assert not (work / "backup" / "backup_manifest").exists()
        return
    verify(work / "backup")
    one = json.loads((work / "backup" / "backup_manifest").read_text())["Files"][0]
    assert ("Checksum" in one) == ("none" not in options) and ("Path" in one) == ("--manifest-force-encode" not in options)
    with open(work / "backup" / "global" / "1262", "r+b") as file:
        file.write(b"damage")
    done = run([install.program("pg_verifybackup"), work / "backup"], check=False)
    assert (done.returncode != 0) == ("none" not in options)


@pytest.mark.skipif(not install.has_tls(), reason="this PostgreSQL has no TLS")
def test_encrypted(table, work):
    """What is sent goes through TLS, more than fits its buffers."""
    certificate(work, "server", "localhost")
    serving = Serving(clone(table, work / "serving"), "--tls-certificate", work / "server.crt", "--tls-key", work / "server.key")
    serving.data_dir.with_name("serving.access.toml").write_text('[[allow]]\nfrom = ["loopback"]\ntls = "require"\nmethod = "trust"\n')
    with serving.start():
        wait_streaming(table)
        take(serving, work / "backup", "-d", "sslmode=require")
        verify(work / "backup")


def test_what_is_refused(serving, work):
    """With PostgreSQL's words where it has some, and what to do."""
    for options, said in {
        ("-Ft", "--compress=server-gzip"): "gzip compression is not supported by this standby",
        ("-t", "blackhole"): 'target "blackhole" is not supported by this standby',
        ("-l", "x" * 1025): "backup label too long (max 1024 bytes)",
    }.items():
        wal = "fetch" if "-t" in options else "stream"
        command = [install.program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(serving.serves), "-U", "postgres", "-X", wal, *options]
        if "-t" not in options:
            command += ["-D", str(work / "backup")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and said in done.stderr, done.stderr
        shutil.rmtree(work / "backup", ignore_errors=True)
    take(serving, work / "backup")
    done = take(serving, work / "more", "-i", work / "backup" / "backup_manifest", check=False)
    assert "incremental backups are not supported by this standby" in done.stderr, done.stderr
    take(serving, work / "gzip", "-Ft", "--compress=client-gzip", wal="none")


def test_slowly_and_given_up(table, serving, work):
    """A client that goes away in the middle leaves nothing held; a slow one has its WAL held meanwhile."""
    command = [install.program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(serving.serves), "-U", "postgres", "-D", str(work / "killed"),
               "-X", "none", "--max-rate", "256k"]
    slow = subprocess.Popen(command)
    started = lambda: "base backup" in serving.log_text()
    wait_for(started, serving.log_tail)
    first = sorted(file.name for file in (serving.data_dir / "pg_wal").glob("0*"))[0]
    for _ in range(2):
        table.psql("INSERT INTO t (v) SELECT repeat('w', 100) FROM generate_series(1, 10000)", options=LOCALLY)
        serving.restartpoint(table)
    assert slow.poll() is None and (serving.data_dir / "pg_wal" / first).exists()
    slow.kill()
    slow.wait()

    def gone():
        table.psql("INSERT INTO t (v) VALUES ('x')", options=LOCALLY)
        serving.restartpoint(table)
        return not (serving.data_dir / "pg_wal" / first).exists()
    wait_for(gone, lambda: sorted((serving.data_dir / "pg_wal").iterdir()), every=0.5)
    take(serving, work / "backup")
    verify(work / "backup")
    # One that does not read, when the standby is stopped.
    stuck = subprocess.Popen([*command[:-1], "32k", "-D", str(work / "stuck")])
    wait_for(lambda: serving.log_text().count("begins at") >= 3, serving.log_tail)
    stuck.send_signal(signal.SIGSTOP)
    serving.stop()
    stuck.kill()
    stuck.wait()


def test_prepared_transactions(table, serving, work):
    """One begun after the backup's start and prepared before the next restartpoint is prepared in the copy, whatever file it got; one
    that was prepared before, and is committed meanwhile, is committed."""
    table.psql("BEGIN; INSERT INTO t (v) VALUES ('old'); PREPARE TRANSACTION 'old'", options=LOCALLY)
    serving.restartpoint(table)
    slow = subprocess.Popen([install.program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(serving.serves), "-U", "postgres",
                             "-D", str(work / "backup"), "-X", "stream", "--max-rate", "8M"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: "base backup" in serving.log_text(), serving.log_tail)
    slow.send_signal(signal.SIGSTOP)
    table.psql("BEGIN; INSERT INTO t (v) VALUES ('new'); PREPARE TRANSACTION 'new'", options=LOCALLY)
    table.psql("COMMIT PREPARED 'old'", options=LOCALLY)
    serving.restartpoint(table)
    files = lambda: sorted(file.name for file in (serving.data_dir / "pg_twophase").iterdir())
    wait_for(files, "a file of the transaction")
    assert not (work / "backup" / "backup_manifest").exists(), "it was to last longer"
    slow.send_signal(signal.SIGCONT)
    assert slow.wait(120) == 0, slow.stderr.read()
    verify(work / "backup")
    assert files() and not list((work / "backup" / "pg_twophase").iterdir())
    with follow(table, work / "backup") as server:
        assert server.psql("SELECT v FROM t") == [["old"]]
        table.stop()
        server.psql("ALTER SYSTEM SET synchronous_standby_names = ''")
        server.psql("SELECT pg_promote()")
        assert server.psql("SELECT gid FROM pg_prepared_xacts") == [["new"]]
        server.psql("COMMIT PREPARED 'new'", options=LOCALLY)
        assert server.value("SELECT count(*) FROM t") == "2"


def test_promoted_meanwhile(table, serving, work):
    """The backup ends with an error, and the promotion does not wait for it."""
    slow = subprocess.Popen([install.program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(serving.serves), "-U", "postgres",
                             "-D", str(work / "backup"), "-X", "none", "--max-rate", "512k"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: "base backup" in serving.log_text(), serving.log_tail)
    serving.promote()
    assert slow.wait(60) != 0
    assert "error" in slow.stderr.read()
    with serving.serve() as promoted:
        assert promoted.value("SELECT count(*) FROM t") == "0"


def test_not_consistent_yet(table, work):
    """Its own backup's WAL is not there yet."""
    table.basebackup(work / "serving", wal="none")
    standby.point(work / "serving", table.port)
    table.stop()
    with Serving(work / "serving").start() as serving:
        def said():
            done = take(serving, work / "backup", wal="none", check=False)
            assert done.returncode != 0
            return done.stderr if "starting up" not in done.stderr else None
        said = wait_for(said, serving.log_tail)
        assert "the database system is not yet accepting connections" in said, said
        assert "Consistent recovery state has not been yet reached." in said
        start_primary(table)
        wait_streaming(table)
        wait_for(lambda: serving.status()["consistent"], serving.status)
        take(serving, work / "later")
        verify(work / "later")


def test_without_full_page_writes(table, serving, work):
    """The backup could have torn pages that nothing repairs."""
    refused = lambda: take(serving, work / "backup", wal="none", check=False).stderr
    table.psql("ALTER SYSTEM SET full_page_writes = off", options=LOCALLY)
    table.psql("SELECT pg_reload_conf(); SELECT pg_sleep(0.5); INSERT INTO t (v) VALUES ('x')", options=LOCALLY)
    wait_for(lambda: "was replayed since last restartpoint" in refused(), refused, every=0.5)
    table.psql("ALTER SYSTEM SET full_page_writes = on", options=LOCALLY)
    table.psql("SELECT pg_reload_conf(); SELECT pg_sleep(0.5); INSERT INTO t (v) VALUES ('x')", options=LOCALLY)
    serving.restartpoint(table)
    shutil.rmtree(work / "backup", ignore_errors=True)
    take(serving, work / "backup")
    verify(work / "backup")


def test_damaged_pages(table, serving, work):
    """A page with a wrong checksum is told, and the backup fails, unless asked not to look."""
    table.psql("INSERT INTO t (v) SELECT repeat('w', 1000) FROM generate_series(1, 1000)", options=LOCALLY)
    path = table.value("SELECT pg_relation_filepath('t')")
    wait_position(table)
    serving.restartpoint(table)
    table.psql("CHECKPOINT", options=LOCALLY)
    serving.restartpoint(table)
    with open(serving.data_dir / path, "r+b") as file:
        for block in (3, 7):
            file.seek(block * 8192 + 5000)
            file.write(b"damage")
    done = take(serving, work / "backup", wal="none", check=False)
    assert done.returncode != 0, done.stderr
    for said in (f'checksum verification failed in file "{path}", block 3', "has a total of 2 checksum verification failures",
                 "2 total checksum verification failures", "checksum verification failure"):
        assert said in done.stderr, done.stderr
    take(serving, work / "blind", "--no-verify-checksums", wal="none")
