"""What Walrider refuses, and that it says what to do and changes nothing."""

import os
import shutil
import subprocess

import pytest

from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster
from tests.lab.walrider import DIFFERENT, binary, replay, walrider

def test_failures_have_one_form(plain, work):
    """`walrider: error: …` on stderr, and with --json an object that has the same message and the code, of every command."""
    empty, nothing = work / "empty", work / "nothing"
    empty.mkdir()
    for args, code in [(("replay", "-D", nothing), 1), (("compare", empty, plain.stock), 2), (("wal", "stats", empty), 2),
                       (("wal", "dump", empty), 2), (("status", "-D", nothing, "--json"), 4)]:
        result = walrider(*args).expect(code)
        assert result.json["schema_version"] == 1, result
        error = result.json["error"]
        assert result.stderr.endswith(f"walrider: error: {error['message']}\n") and error["lsn"] is None, result
        banner, *more = result.stderr.splitlines()
        assert not more if args[0] != "replay" else banner.startswith("walrider: replay 0."), result
        assert error["code"] == code, result
    for args in [("promote", "-D", empty), ("stop", "-D", empty), ("reload", "-D", empty), ("standby", "-D", empty)]:
        assert walrider(*args).expect(1).stderr.startswith("walrider: error: "), args


def test_compare_cannot_read_the_control_file(plain, work):
    """That is no wrong usage: the directory is one, and this user may not read it."""
    ours = plain.copy(work / "ours")
    control = ours / "global" / "pg_control"
    control.chmod(0)
    result = walrider("compare", ours, plain.stock)
    control.chmod(0o600)
    refused(result, "global/pg_control", "Permission denied")


def test_a_repository_is_no_archive(plain, work):
    """--wal with a repository of pgBackRest: it says what that is and what to do, and changes nothing."""
    ours = plain.copy(work / "ours")
    archived = work / "archive" / "18-1" / "0000000100000000" / f"000000010000000000000001-{'ab' * 20}.gz"
    archived.parent.mkdir(parents=True)
    archived.touch()
    (work / "archive" / "archive.info").touch()
    refused(replay(ours, work / "archive"), "a repository of pgBackRest", "archive-get")
    assert (ours / "backup_label").exists() and not (ours / "recovery.signal").exists()


def refused(result, *words, code=1):
    """Exit code, and a message with these words."""
    assert result.code == code, result
    assert "panicked" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    return result


def untouched(data_dir):
    """The backup is still one: nothing was begun."""
    assert (data_dir / "backup_label").exists()
    assert not (data_dir / "backup_label.old").exists()
    assert not (data_dir / "postmaster.pid").exists()


def test_running_server(plain, work):
    """A server is running on the directory."""
    with PgCluster.init(work / "live") as server:
        server.start()
        pid = str(server.process.pid)
        refused(replay(server.data_dir, plain.archive), "postmaster.pid", pid)
        assert server.value("SELECT 1") == "1"
        assert (server.data_dir / "postmaster.pid").read_text().startswith(pid)


def test_stock_refuses_while_we_work(plain, work):
    """Our lock file keeps PostgreSQL away."""
    ours = plain.copy(work / "ours")
    process = subprocess.Popen([binary(), "replay", "--data-dir", ours, "--wal", plain.archive, "--follow"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not (ours / "postmaster.pid").exists():
            assert process.poll() is None, process.stderr.read()
        server = PgCluster(ours)
        server.launch()
        assert server.wait_end(60) != 0
        assert "postmaster.pid" in server.log_tail()
    finally:
        process.kill()
        process.wait()


def test_incremental_backup(plain, work):
    """Only pg_combinebackup can make it whole."""
    ours = plain.copy(work / "ours")
    label = ours / "backup_label"
    label.write_text(label.read_text() + "INCREMENTAL FROM LSN: 0/2000028\nINCREMENTAL FROM TLI: 1\n")
    refused(replay(ours, plain.archive), "incremental", "pg_combinebackup")
    untouched(ours)


def test_logical_slot(work):
    """Conflicts would have to invalidate it."""
    with PgCluster.init(work / "primary", work / "archive", conf="wal_level = logical\n") as server:
        server.start()
        server.psql("SELECT pg_create_logical_replication_slot('subscriber', 'pgoutput')")
        server.stop()
        server.complete_archive()
        (server.data_dir / "standby.signal").touch()
        refused(replay(server.data_dir, server.archive), "subscriber", "logical")


@pytest.mark.parametrize("major", ["16", "99"])
def test_version(plain, work, major):
    """A directory of a major version we do not know."""
    ours = plain.copy(work / "ours")
    (ours / "PG_VERSION").write_text(major + "\n")
    refused(replay(ours, plain.archive), major)
    untouched(ours)


def test_not_a_data_directory(plain, work):
    """No PG_VERSION at all, and no directory at all."""
    (work / "empty").mkdir()
    refused(replay(work / "empty", plain.archive), "empty")
    refused(replay(work / "nowhere", plain.archive), "nowhere")


def test_system_identifier(plain, work):
    """WAL of another cluster: the identifier stands in each segment's first page."""
    ours, foreign = plain.copy(work / "ours"), work / "foreign"
    foreign.mkdir()
    for segment in plain.segments():
        data = bytearray(segment.read_bytes())
        data[24:32] = (int(plain.info["system_identifier"]) ^ 1).to_bytes(8, "little")
        (foreign / segment.name).write_bytes(data)
    result = replay(ours, foreign)
    assert result.code in (1, 4)
    assert plain.info["system_identifier"] in result.stderr
    untouched(ours)


def test_missing_wal(plain, work):
    """The segment that the backup starts with is not there; nor is any, as where an archive is not mounted."""
    ours, nothing = plain.copy(work / "ours"), work / "nothing"
    nothing.mkdir()
    result = replay(ours, nothing)
    assert result.code == 1 and "has no WAL: is the archive mounted" in result.stderr, result
    untouched(ours)
    shutil.copy(plain.segments()[-1], nothing)
    first = next(line for line in (ours / "backup_label").read_text().splitlines() if line.startswith("START WAL"))
    segment = first.split("file ")[1].rstrip(")")
    result = replay(ours, nothing)
    assert result.code in (1, 4)
    assert segment in result.stderr
    untouched(ours)
    replay(ours, plain.archive).expect()


@pytest.mark.parametrize("without", ["nothing", "BACKUP METHOD"])
def test_wal_ends_before_the_backup_does(plain, work, without):
    """Not consistent: PostgreSQL would refuse to serve it, and so do we, until there is more WAL. Without the label's line that says that
    the end of the backup is in the WAL, it was promoted."""
    ours, short = plain.copy(work / "ours"), work / "short"
    lines = (ours / "backup_label").read_text().splitlines(keepends=True)
    (ours / "backup_label").write_text("".join(line for line in lines if not line.startswith(without)))
    short.mkdir()
    label = (ours / "backup_label").read_text()
    start = label.split("file ")[1][:24]
    data = bytearray((plain.archive / start).read_bytes())
    position = int(label.split("CHECKPOINT LOCATION: ")[1].split()[0].split("/")[1], 16) % len(data)
    length = int.from_bytes(data[position:position + 4], "little")      # xl_tot_len of the checkpoint record
    cut = position + (length + 7 & ~7)
    data[cut:] = bytes(len(data) - cut)
    (short / start).write_bytes(data)
    result = replay(ours, short, "--promote")
    assert result.code in (1, 4), result
    assert "consisten" in result.stderr or "backup" in result.stderr
    replay(ours, plain.archive).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_root(plain, work):
    """As PostgreSQL's own tools: the directory's owner, never root.

    The launcher tells how it went where root called it (as_user.refused_as_root); others are root in a user
    namespace of their own.
    """
    told = os.environ.get("WALRIDER_AS_ROOT")
    if told:
        code, said = told.split(":", 1)
    else:
        ours = plain.copy(work / "ours")
        done = subprocess.run(["unshare", "--user", "--map-root-user", binary(), "replay", "--data-dir", str(ours),
                               "--wal", str(plain.archive)], capture_output=True, text=True)
        code, said = done.returncode, done.stderr
        untouched(ours)
    assert int(code) == 1
    assert "root" in said


def test_unreadable_relation(plain, work):
    """No permission on a relation that the WAL changes: the file is named, and nothing is lost."""
    ours = plain.copy(work / "ours")
    victim = max((path for path in (ours / "base" / "5").iterdir() if path.name.isdigit()
                  and int(path.name) > 16384), key=lambda path: path.stat().st_size)
    victim.chmod(0)
    result = replay(ours, plain.archive)
    victim.chmod(0o600)
    refused(result, victim.name)
    replay(ours, plain.archive).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_file_size_limit(plain, work):
    """`ulimit -f`: a write that fails, as on a full disk, and not the end by SIGXFSZ; the same command completes later."""
    ours = plain.copy(work / "ours")
    limit = max(path.stat().st_size for path in (ours / "base" / "5").iterdir()) // 2
    refused(replay(ours, plain.archive, file_size_limit=limit), "File too large")
    replay(ours, plain.archive).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


@pytest.mark.parametrize("arguments", [(), ("replay",), ("replay", "--no-such-option"), ("fly",),
                                       ("replay", "--data-dir"), ("compare", "only-one")], ids=lambda a: " ".join(a) or "none")
def test_usage(arguments):
    """Exit 2 and a hint."""
    result = walrider(*arguments)
    assert result.code == 2
    assert result.stderr.strip()
    if "--json" in result.command:
        assert result.json["error"]["code"] == 2 and result.stderr.startswith("walrider: error: ")


def test_compare_sees_a_difference(plain, work):
    """One byte of one tuple: file, block and offset are named, exit 5."""
    ours = plain.copy(work / "ours")
    replay(ours, plain.archive).expect()
    recovery.pin_tablespaces(ours)
    victim = max((path for path in (ours / "base" / "5").iterdir() if path.name.isdigit()),
                 key=lambda path: path.stat().st_size)
    with open(victim, "r+b") as file:
        file.seek(8192 * 3 + 8191)
        byte = file.read(1)[0]
        file.seek(8192 * 3 + 8191)
        file.write(bytes([byte ^ 0x55]))
    result = walrider("compare", ours, plain.stock).expect(DIFFERENT)
    assert result.json["differences"] >= 1
    assert victim.name in str(result.json["first"][0])
