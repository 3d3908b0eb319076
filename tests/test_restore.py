"""`walrider restore` and `walrider backup roll`: from a base backup to a directory that PostgreSQL takes over, and to another backup.

Not tried here: WAL larger than memory, full disks (test_restore_interrupted.py has them), a store that somebody else has made
(test_archive_stores.py), incremental backups (`backup`'s own tests).
"""

import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import install
from tests.lab.faults.objects import ObjectStore
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.backups import FORMATS, MARKER, extract, kept_out, pack_all, verify
from tests.lab.server.cluster import PgCluster, controldata, copy_tree
from tests.lab.waiting import wait_for
from tests.lab.walrider import CORRUPT, FAILED, USAGE, start, walrider

SUMS = "SELECT count(*), sum(hashtext(x::text)) FROM {} x"


@dataclass
class Archived:
    """Backups of one moment, the WAL after it, and what stock PostgreSQL made of both."""

    directory: Path
    final_checkpoint: str
    # What the tables had at the restore point.
    half: dict

    @property
    def wal(self):
        return self.directory / "wal"

    @property
    def stock(self):
        return self.directory / "stock"

    @property
    def space(self):
        """Where the tablespace is."""
        return self.directory / "space"

    def backup(self, form):
        """One of the backups."""
        return self.directory / form

    def mapped(self, form, new):
        """Options: the tablespace goes elsewhere."""
        old = self.directory / "plain.space" if form == "plain" else self.space
        return "--tablespace-mapping", f"{old}={new}"

    def restore(self, form, data_dir, *options, **kwargs):
        """`walrider restore` of one of them, its tablespace beside it."""
        return walrider("restore", "--backup", self.backup(form), "--wal", self.wal, "-D", data_dir,
                        *self.mapped(form, f"{data_dir}.space"), *options, **kwargs)


@pytest.fixture(scope="session")
def archived(scratch):
    """Tables in two tablespaces, one of them more than a page of each map; backups; changes, a restore point, changes."""
    directory = scratch / "r"
    directory.mkdir()
    (directory / "space").mkdir()
    with PgCluster.init(directory / "primary", directory / "wal", wal_segsize_mb=1, conf="autovacuum = off\nwal_keep_size = 0\n") as server:
        server.start()
        server.psql(f"CREATE TABLESPACE s LOCATION '{directory}/space'")
        server.psql("CREATE TABLE a AS SELECT g AS id, repeat('a', 90) AS v FROM generate_series(1, 20000) g; CREATE INDEX ON a (id); "
                    "CREATE TABLE b TABLESPACE s AS SELECT g AS id, g % 7 AS v FROM generate_series(1, 5000) g; "
                    "CREATE UNLOGGED TABLE u AS SELECT 1 AS x; CREATE TABLE gone AS SELECT 1 AS x")
        server.basebackup(directory / "plain", f"--tablespace-mapping={directory}/space={directory}/plain.space")
        server.basebackup(directory / "tar", "-Ft", "--manifest-checksums=SHA256", wal="stream")
        server.psql("UPDATE a SET v = 'half' WHERE id % 3 = 0; UPDATE b SET v = v + 1; DROP TABLE gone; CHECKPOINT; "
                    "INSERT INTO b SELECT g, 0 FROM generate_series(1, 3000) g")
        half = {name: server.psql(SUMS.format(name)) for name in "ab"}
        server.psql("SELECT pg_create_restore_point('half')")
        server.psql("CREATE TABLE late TABLESPACE s AS SELECT g FROM generate_series(1, 9000) g; DELETE FROM a WHERE id > 15000; "
                    "VACUUM a; UPDATE b SET v = -1 WHERE id < 100")
        server.stop()
        server.complete_archive()
        final_checkpoint = server.controldata()["Latest checkpoint location"]
    pack_all(directory)
    archived = Archived(directory, final_checkpoint, half)
    recovery.stock_replay(archived.backup("plain"), archived.wal, archived.stock, final_checkpoint)
    return archived


def rows_at_half(archived, server):
    """All that was there at the restore point, and nothing later."""
    for name, rows in archived.half.items():
        assert server.psql(SUMS.format(name)) == rows, name
    assert server.value("SELECT to_regclass('late') IS NULL AND to_regclass('gone') IS NULL") == "t"


@pytest.mark.every_major
@pytest.mark.parametrize("form", FORMATS)
def test_equal_to_stock(archived, work, form):
    """However the backup lies there, what comes of it and its WAL is what PostgreSQL makes of them."""
    result = archived.restore(form, work / "ours").expect()
    assert result.json["end_reason"] == "end_of_wal" and result.json["checkpoint_lsn"] == archived.final_checkpoint
    assert result.json["backup"]["verified"] and result.json["backup"]["files"] > 900
    assert os.readlink(next((work / "ours/pg_tblspc").iterdir())) == f"{work}/ours.space"
    compared = compare(work / "ours", archived.stock)
    assert compared["relations"] > 200
    for name in (MARKER, "backup_label", "tablespace_map", "backup_manifest"):
        assert not (work / "ours" / name).exists(), name
    assert {oct((work / "ours" / name).stat().st_mode & 0o777) for name in ("", "base", "global", "pg_wal")} == {"0o700"}
    assert {oct((work / "ours" / name).stat().st_mode & 0o777) for name in ("PG_VERSION", "global/pg_control")} == {"0o600"}


def test_memory_is_kept(work):
    """A table grows past the memory. Each partition that its end had passed kept as much as its largest piece of WAL: restore took twice
    what `--memory` says. Replay is tried as well, with all put apart. One load; random updates are not tried here.
    """
    memory, room = 128 << 20, 24 << 20
    with PgCluster.init(work / "primary", work / "wal", conf="autovacuum = off\nmax_wal_size = 4GB\n") as server:
        server.start()
        server.basebackup(work / "backup")
        server.psql("CREATE TABLE grows AS SELECT g AS id, repeat('x', 90) AS v FROM generate_series(1, 2500000) g")
        server.psql("CREATE INDEX ON grows (id)")
        rows = server.value("SELECT count(*) FROM grows")
        server.stop()
        server.complete_archive()
    ours, options = work / "ours", ("--wal", work / "wal", "--memory", str(memory), "--jobs", "2")
    restored = walrider("restore", "--backup", work / "backup", "-D", ours, "--spill-always", *options).expect()
    assert restored.json["spilled_bytes"] > 0 and restored.json["peak_memory_bytes"] < memory + room, restored.json
    copy_tree(work / "backup", work / "copy")
    replayed = walrider("replay", "--data-dir", work / "copy", "--spill-always", *options).expect()
    assert replayed.json["peak_memory_bytes"] < memory + room, replayed.json
    compare(work / "copy", ours)
    # Relations fit into memory: they come when a little of the WAL is put apart, and the rest is replayed as it is without that.
    early = walrider("restore", "--backup", work / "backup", "-D", work / "early", *options).expect()
    assert early.json["write_bytes_per_second"] > 0 and early.json["peak_memory_bytes"] < memory + room, early.json
    compare(work / "early", ours)
    server = PgCluster(ours)
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start()
        assert server.value("SELECT count(*) FROM grows") == rows


def test_relations_that_do_not_fit_come_for_images(passes, work):
    """Most of the WAL is images: to put all of it apart took longer than to write the pages twice. Whether relations come before the end
    depends on how quick the disk is; that it is asked, and the pages, do not. With more threads to put WAL apart the answer is another: two here. How long it takes is measured in docs/restore-speed.md."""
    ours = work / "ours"
    done = walrider("restore", "--backup", passes.backup, "--wal", passes.archive, "-D", ours, "--memory", "64MB",
                    "--jobs", "2").expect().json
    assert done["write_bytes_per_second"] > 0 and done["unpacked_at_lsn"], done
    recovery.pin_tablespaces(ours)
    compare(ours, passes.stock)


def test_to_a_target(archived, work):
    """With --promote it is a primary's; PostgreSQL starts, and has the rows of that moment."""
    result = archived.restore("tar", work / "ours", "--target-name", "half", "--promote").expect()
    assert result.json["end_reason"] == "target" and result.json["promoted"]["timeline"] == 2
    server = PgCluster(work / "ours")
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start()
        rows_at_half(archived, server)
        assert server.value("SELECT count(*) FROM u") == "0"


def test_without_an_archive(archived, work):
    """Its own WAL alone, that it came with: replay ends where the backup does, and PostgreSQL goes on from there."""
    result = walrider("restore", "--backup", archived.backup("tar"), "-D", work / "ours", *archived.mapped("tar", work / "s")).expect()
    assert result.json["end_reason"] == "end_of_wal"
    assert (work / "ours" / "pg_wal").stat().st_mode & 0o777 == 0o700
    server = PgCluster(work / "ours")
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start()
        assert server.value("SELECT count(*) FROM gone") == "1"


def flip(path, at=-100):
    """One bit."""
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)


def add_member(path, name, kind=tarfile.REGTYPE, target=""):
    """Put one behind backup_label, which takes two blocks."""
    old = path.read_bytes()
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    path.write_bytes(old[:1024] + member.tobuf(tarfile.USTAR_FORMAT) + old[1024:])


def cut(path, by):
    """The last bytes are missing."""
    os.truncate(path, path.stat().st_size - by)


# What is done to which file, and what is said then.
PLAIN_DAMAGE = {
    "bit": ("global/1262", flip, "global/1262"),
    "short": ("global/1262", lambda path: cut(path, 512), "global/1262"),
    "missing": ("global/1262", Path.unlink, "global/1262"),
    "surplus": ("base/1/77777", Path.touch, "base/1/77777"),
    "link": ("base/1/77777", lambda path: path.symlink_to("/etc/passwd"), "base/1/77777"),
    "no control file": ("global/pg_control", Path.unlink, "global/pg_control"),
    "manifest": ("backup_manifest", lambda path: flip(path, 1000), "backup_manifest"),
    "of a server": ("postmaster.pid", Path.touch, "postmaster.pid"),
}
TAR_DAMAGE = {
    "short": ("base.tar", lambda path: cut(path, 1 << 20), "base.tar"),
    "no end": ("base.tar", lambda path: cut(path, 1024), "base.tar"),
    "other tablespace": ("77777.tar", lambda path: path.write_bytes(bytes(1024)), "77777.tar"),
    "surplus": ("notes", Path.touch, "notes"),
    "way out": ("base.tar", lambda path: add_member(path, "base/../../x"), "base/../../x"),
    "absolute": ("base.tar", lambda path: add_member(path, f"{path.parent.parent}/x"), "leads out of the data directory"),
    "link": ("base.tar", lambda path: add_member(path, "base/x", tarfile.SYMTYPE, "/tmp"), "base/x"),
    "device": ("base.tar", lambda path: add_member(path, "base/x", tarfile.CHRTYPE), "base/x"),
    "long name": ("base.tar", lambda path: add_member(path, "base/x", tarfile.GNUTYPE_LONGNAME), "base/x"),
}


@pytest.mark.parametrize("form, damage", [("plain", PLAIN_DAMAGE), ("tar", TAR_DAMAGE)], ids=["plain", "tar"])
def test_damage_is_told(archived, work, form, damage):
    """What is wrong is named, and what is there until then is no directory that a server starts on."""
    backup = copy_tree(archived.backup(form), work / "backup")
    for what, (name, break_it, said) in damage.items():
        path = backup / name
        contents = path.read_bytes() if path.exists() else None
        break_it(path)
        result = walrider("restore", "--backup", backup, "--wal", archived.wal, "-D", work / "ours", *archived.mapped(form, work / "s"))
        assert result.code == CORRUPT and said in result.stderr, (what, result.code, result.stderr)
        if (work / "ours").exists():
            kept_out(work / "ours")
        assert not (work / "x").exists(), what
        path.unlink(missing_ok=True)
        if contents is not None:
            path.write_bytes(contents)
        for directory in ("ours", "s"):
            shutil.rmtree(work / directory, ignore_errors=True)


def test_packed_again(archived, work):
    """An archive that somebody has made of the unpacked directory has tablespace_map anywhere: that was seen when all was replayed."""
    backup = copy_tree(archived.backup("tar"), work / "backup")
    with tarfile.open(backup / "base.tar") as old:
        members = [(member, old.extractfile(member).read() if member.isreg() else b"") for member in old]
    with tarfile.open(backup / "base.tar", "w", format=tarfile.USTAR_FORMAT) as new:
        for member, contents in sorted(members, key=lambda one: one[0].name == "tablespace_map"):
            new.addfile(member, io.BytesIO(contents))
    result = walrider("restore", "--backup", backup, "--wal", archived.wal, "-D", work / "ours").expect(CORRUPT)
    assert '"tablespace_map"' in result.stderr and "pg_basebackup's archive begins with it" in result.stderr, result.stderr
    kept_out(work / "ours")


def test_damage_within_a_packed_one(archived, work):
    """Members that come out whole do not make up for a trailer that does not fit them."""
    backup = copy_tree(archived.backup("gzip"), work / "backup")
    flip(backup / "base.tar.gz", -5)
    result = walrider("restore", "--backup", backup, "--wal", archived.wal, "-D", work / "ours", *archived.mapped("gzip", work / "s"))
    assert result.code == CORRUPT and "base.tar.gz" in result.stderr, result.stderr


def test_without_a_manifest(archived, work):
    """Only if that is asked for."""
    backup = copy_tree(archived.backup("plain"), work / "backup")
    (backup / "backup_manifest").unlink()
    arguments = ("restore", "--backup", backup, "--wal", archived.wal, "-D", work / "ours", *archived.mapped("plain", work / "s"))
    assert "--no-manifest" in walrider(*arguments).stderr
    assert not (work / "ours").exists()
    assert not walrider(*arguments, "--no-manifest").expect().json["backup"]["verified"]
    compare(work / "ours", archived.stock)


@pytest.fixture
def store(archived):
    """An object store with the backups in archives."""
    store = ObjectStore()
    for form in ("tar", FORMATS[-1]):
        store.objects.update((f"{form}/{file.name}", file.read_bytes()) for file in archived.backup(form).iterdir())
    yield store
    store.close()


def from_store(archived, store, form, data_dir, *options):
    """`walrider restore` of a backup there."""
    return walrider("restore", "--backup", store.url(form), "--wal", archived.wal, "-D", data_dir,
                    *archived.mapped(form, f"{data_dir}.space"), *options, env=store.environment)


@pytest.mark.parametrize("form", ["tar", FORMATS[-1]])
def test_from_an_object_store(archived, work, store, form):
    """It comes in several parts at once, again where a connection is lost, and verified."""
    store.cuts, store.gathered = 3, 4 if form == "tar" else 0
    result = from_store(archived, store, form, work / "ours").expect()
    assert result.json["backup"]["verified"] and store.cuts == 0
    compare(work / "ours", archived.stock)
    if form == "tar":
        assert store.most >= store.gathered
        # Once for what is no relation, which is little, and once for all.
        parts = -(-len(store.objects["tar/base.tar"]) // (4 << 20))
        assert len(store.asked("GET", "tar/base.tar")) <= 3 * parts + 3
    walrider("backup", "roll", "--backup", store.url(form), "--wal", archived.wal, "--target-name", "half", "--out", work / "new", "--format",
             "tar", env=store.environment).expect()
    assert (work / "new/base.tar").exists() and not (work / "new.rolling").exists()


def test_what_an_object_store_lacks(archived, work, store):
    """What is not there, or must not be read, is told apart from damage."""
    ours, other = work / "ours", FORMATS[-1]
    assert "has no base.tar" in from_store(archived, store, "nothing", ours).expect(FAILED).stderr
    store.objects["tar/notes"] = b""
    assert "notes" in from_store(archived, store, "tar", ours).expect(CORRUPT).stderr
    del store.objects["tar/notes"]
    manifest = store.objects.pop("tar/backup_manifest")
    assert "--no-manifest" in from_store(archived, store, "tar", ours).expect(FAILED).stderr
    store.objects["tar/backup_manifest"] = manifest
    assert not ours.exists()
    for form, refused in (("tar", "pg_wal.tar"), (other, "base.tar")):
        store.refused = refused
        result = from_store(archived, store, form, ours).expect(FAILED)
        assert refused in result.stderr and store.url(form) in result.stderr, result.stderr
        if ours.exists():
            kept_out(ours)
            shutil.rmtree(ours)
            shutil.rmtree(f"{ours}.space")
    store.refused = None
    store.flip("tar/base.tar", len(store.objects["tar/base.tar"]) // 2)
    result = from_store(archived, store, "tar", ours).expect(CORRUPT)
    assert "backup_manifest says" in result.stderr, result.stderr
    kept_out(ours)
    store.status = 403
    assert store.url("tar") in from_store(archived, store, "tar", ours).expect(FAILED).stderr
    assert "ftp:// is not known" in walrider("restore", "--backup", "ftp://x/y", "-D", ours, "--wal", archived.wal).expect(FAILED).stderr


@pytest.mark.parametrize("when", ["early", "late"])
def test_killed(archived, work, when):
    """What is left is refused by all, until --start-over has removed it: before the control file is there, and while relations come."""
    ours = work / "ours"
    arguments = ("restore", "--backup", archived.backup("plain"), "--wal", archived.wal, "-D", ours,
                 *archived.mapped("plain", work / "s"))
    process = start(*arguments)
    early = (ours / "base").exists
    wait_for(early if when == "early" else lambda: any((ours / "base/5").glob("[0-9]*")), lambda: process.poll(), every=0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert (ours / MARKER).exists() and (work / "s" / MARKER).exists()
    assert when == "early" or (ours / "global/pg_control").exists()
    kept_out(ours)
    assert walrider("replay", "-D", ours, "--wal", archived.wal).code == FAILED
    again = walrider(*arguments)
    assert again.code == FAILED and "--start-over" in again.stderr
    # What is not ours stays, whatever is asked for.
    (work / "s" / MARKER).rename(work / "marker")
    (work / "s" / "mine").touch()
    assert walrider(*arguments, "--start-over").code == FAILED and (work / "s" / "mine").exists()
    (work / "marker").rename(work / "s" / MARKER)
    walrider(*arguments, "--start-over").expect()
    compare(ours, archived.stock)
    again = walrider(*arguments, "--start-over")
    assert again.code == FAILED and "walrider replay" in again.stderr


def test_what_is_refused_before_anything_is_made(archived, work):
    """Mistakes of the command line."""
    ours, space = work / "ours", archived.mapped("tar", work / "s")
    arguments = ["restore", "--backup", archived.backup("tar"), "-D", ours, "--wal"]
    for options, said in [
        ([archived.wal], "is not empty"),
        ([archived.wal, "--tablespace-mapping", f"/nowhere={work}/s"], "/nowhere"),
        ([archived.wal, *archived.mapped("tar", ours / "s")], "is used, too"),
        ([work / "nothing", *space], "--wal"),
    ]:
        result = walrider(*arguments, *options)
        assert result.code == FAILED and said in result.stderr, (options, result.stderr)
        assert not ours.exists(), options
    assert walrider(*arguments, archived.wal, "--tablespace-mapping", "s=t").code == USAGE
    (work / "empty").mkdir()
    result = walrider("restore", "--backup", work / "empty", "-D", ours, "--wal", archived.wal, "--no-manifest")
    assert result.code == FAILED and "no base backup" in result.stderr


@pytest.mark.every_major
@pytest.mark.parametrize("form", ["plain", "gzip"])
def test_roll(archived, work, form):
    """A backup of the restore point: pg_verifybackup accepts it, PostgreSQL gets there with it alone, and with the rest of the WAL to
    where it gets from the old one."""
    options = ["--tablespace-mapping", f"{archived.directory}/plain.space={work}/s"] if form == "plain" else \
        ["--format", "tar", "--compress", form, "--manifest-checksums", "sha512"]
    result = walrider("backup", "roll", "--backup", archived.backup(form), "--wal", archived.wal,
                      "--target-name", "half", "--out", work / "new", "--label", "rolled", *options).expect()
    assert not Path(f"{work}/new.rolling").exists()
    new = work / "new"
    if form != "plain":
        assert sorted(path.name.split(".tar")[0] for path in new.iterdir())[-2:] == ["backup_manifest", "base"]
        if int(install.major()) >= 18:
            verify(new, "-n")
        new = unpack_by_hand(new, work)
    else:
        verify(new)
    label = dict(line.split(": ", 1) for line in (new / "backup_label").read_text().splitlines())
    assert (label["BACKUP FROM"], label["LABEL"]) == ("standby", "rolled")
    assert label["START WAL LOCATION"].startswith(result.json["start_lsn"] + " ")
    assert controldata(new)["Minimum recovery ending location"] == result.json["end_lsn"]
    assert not (new / "recovery.signal").exists() and "recovery_target" not in (new / "postgresql.auto.conf").read_text()
    chained = walrider("restore", "--backup", work / "new", "--wal", archived.wal, "-D", work / "chained", "--tablespace-mapping",
                       f"{work / 's' if form == 'plain' else archived.space}={work}/chained.space").expect()
    assert chained.json["checkpoint_lsn"] == archived.final_checkpoint
    compare(work / "chained", archived.stock)
    server = PgCluster(new)
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start()
        rows_at_half(archived, server)


def unpack_by_hand(backup, work):
    """As the manual says: archives where they belong."""
    (work / "tars").mkdir()
    for archive in backup.glob("*.tar.*"):
        with open(work / "tars" / archive.stem, "wb") as out:
            subprocess.run(["gzip", "-dc", archive], stdout=out, check=True)
    data_dir = extract(work / "tars" / "base.tar", work / "by_hand")
    oid, location = (data_dir / "tablespace_map").read_text().split()
    assert Path(location).name == "space"
    extract(work / "tars" / f"{oid}.tar", work / "by_hand.space")
    (data_dir / "pg_tblspc" / oid).symlink_to(work / "by_hand.space")
    shutil.copy(backup / "backup_manifest", data_dir)
    verify(data_dir)
    # A server would make the link anew, to where the tablespace was.
    (data_dir / "tablespace_map").unlink()
    return data_dir


def test_roll_to_the_end(archived, work):
    """The WAL ends with a shutdown checkpoint: the new backup begins and ends there. Restored without more WAL, it was said to be
    inconsistent, "at least to" where it stood."""
    walrider("backup", "roll", "--backup", archived.backup("tar"), "--wal", archived.wal, "--out", work / "new", "--format", "tar").expect()
    restored = walrider("restore", "--backup", work / "new", "--wal", archived.wal, "-D", work / "ours", "--tablespace-mapping",
                        f"{archived.space}={work}/ours.space").expect()
    assert restored.json["checkpoint_lsn"] == archived.final_checkpoint
    compare(work / "ours", archived.stock)
    server = PgCluster(work / "ours")
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start()
        assert server.value("SELECT count(*) > 8000 FROM late") == "t"


def test_roll_is_interrupted(archived, work):
    """Nothing has the name of the new backup before it is complete; what is left is removed when asked for."""
    arguments = ("backup", "roll", "--backup", archived.backup("tar"), "--wal", archived.wal, "--out", work / "new", "--format", "tar",
                 "--compress", FORMATS[-1])
    process = start(*arguments)
    wait_for((work / "new.rolling/data/base").exists, lambda: process.poll())
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert not (work / "new").exists()
    assert "--start-over" in walrider(*arguments).stderr
    # Another one that is asked to start over keeps off one that is at work.
    shutil.rmtree(work / "new.rolling")
    process = start(*arguments)
    wait_for((work / "new.rolling/data/base").exists, lambda: process.poll())
    process.send_signal(signal.SIGSTOP)
    result = walrider(*arguments, "--start-over")
    assert result.code == FAILED and "another walrider backup roll is at work" in result.stderr, result
    process.kill()
    process.wait(60)
    # As a shell completes the name of a directory.
    (work / "new").mkdir()
    arguments = [f"{word}/" if word == work / "new" else word for word in arguments]
    walrider(*arguments, "--start-over").expect()
    assert not (work / "new.rolling").exists()
    with open(work / "base.tar", "wb") as out:
        subprocess.run([FORMATS[-1], "-dc", next((work / "new").glob("base.tar.*"))], stdout=out, check=True)
    extract(work / "base.tar", work / "ours")
    # So that whoever starts on it makes durable what tar has unpacked.
    assert controldata(work / "ours")["Database cluster state"] == "in archive recovery"
    assert walrider(*arguments).code == FAILED
    plain = [word for word in arguments if word not in ("--format", "tar")]
    assert walrider(*plain).code == USAGE


def test_roll_says_where_tablespaces_are(archived, work):
    """Links of a plain backup lead to its own copies. Archives that said so made a server that started on them write there."""
    command = ["backup", "roll", "--backup", archived.backup("plain"), "--wal", archived.wal, "--out", work / "new", "--format", "tar"]
    copy = f"{archived.directory}/plain.space"
    result = walrider(*command)
    assert result.code == FAILED and f"--tablespace-mapping {copy}=DIR" in result.stderr, result
    result = walrider(*command, "--tablespace-mapping", f"{copy}=/s", "--tablespace-mapping", "/other=/t")
    assert result.code == FAILED and "no tablespace at \"/other\"" in result.stderr, result
    walrider(*command, "--tablespace-mapping", f"{copy}={work}/s").expect()
    extract(work / "new" / "base.tar", work / "ours")
    (line,) = (work / "ours" / "tablespace_map").read_text().splitlines()
    assert line.endswith(f" {work}/s"), line
    assert not (work / "s").exists()


def test_roll_warns_where_images_are_missing(archived, work):
    """With full_page_writes = off, a record clears a bit of a visibility map that a later one truncates. PostgreSQL 18.6 PANICs on the new backup:
    the page is not there, and the truncation does not make it forgotten. It is said, and restore gets through."""
    with PgCluster.init(work / "primary") as server:
        server.configure("full_page_writes = off\nautovacuum = off\nwal_keep_size = 1GB\n")
        server.start()
        server.basebackup(work / "backup")
        for sql in ("CREATE TABLE t AS SELECT i FROM generate_series(1, 5000) i", "VACUUM FREEZE t", "CHECKPOINT", "DELETE FROM t", "VACUUM t"):
            server.psql(sql)
        assert server.psql("SELECT pg_relation_size('t'), pg_relation_size('t', 'vm')") == [["0", "0"]]
        server.stop("immediate")
        result = walrider("backup", "roll", "--backup", work / "backup", "--wal", server.data_dir / "pg_wal", "--out", work / "new").expect()
    assert "full_page_writes was off" in result.stderr, result
    walrider("restore", "--backup", work / "new", "--wal", work / "new/pg_wal", "-D", work / "restored", "--promote").expect()
    with PgCluster(work / "restored") as server:
        server.start()
        assert server.value("SELECT count(*) FROM t") == "0"
    result = walrider("backup", "roll", "--backup", archived.backup("tar"), "--wal", archived.wal, "--out", work / "other", "--format", "tar").expect()
    assert "full_page_writes" not in result.stderr, result


@pytest.mark.parametrize("form", ["plain", "tar"])
def test_a_leftover_in_a_backup(work, form):
    """A restore that was stopped at its very end left its file, and the server that ran there since has it in its backups: they are whole."""
    with PgCluster.init(work / "primary") as server:
        server.configure("wal_keep_size = 1GB\n")
        server.start()
        (server.data_dir / MARKER).touch()
        server.basebackup(work / "backup", "-F", form)
        server.stop()
        command = ["restore", "--backup", work / "backup", "--wal", server.data_dir / "pg_wal", "-D", work / "ours"]
        walrider(*command).expect()
    assert (work / "ours/PG_VERSION").exists() and not (work / "ours" / MARKER).exists()


def test_a_plain_backup_lacks_its_tablespace(archived, work):
    """It was copied without: that is not an empty tablespace, also where no manifest tells."""
    backup = copy_tree(archived.backup("plain"), work / "backup")
    (backup / "backup_manifest").unlink()
    (link,) = (backup / "pg_tblspc").iterdir()
    link.unlink()
    link.symlink_to(work / "nowhere")
    result = walrider("restore", "--backup", backup, "--no-manifest", "--wal", archived.wal, "-D", work / "ours",
                      "--tablespace-mapping", f"{work}/nowhere={work}/s")
    assert result.code == CORRUPT and f"\"{work}/nowhere\", which is no directory" in result.stderr, result
    assert not (work / "ours").exists()


def test_roll_has_put_a_tablespace(archived, work):
    """A tablespace that is unpacked does not say any more whose it is: it is emptied by hand, which is said before anything is removed."""
    command = ["backup", "roll", "--backup", archived.backup("plain"), "--wal", archived.wal, "--out", work / "new"]
    # Refused before anything is done: that leaves nothing in the way.
    assert "is not empty" in walrider(*command).stderr
    command += ["--tablespace-mapping", f"{archived.directory}/plain.space={work}/s"]
    result = walrider(*command, "--target-name", "never")
    assert result.code == FAILED and "before the configured recovery target" in result.stderr, result
    result = walrider(*command, "--start-over")
    assert result.code == FAILED and f'"{work}/s" is where' in result.stderr and (work / "new.rolling/data/base").exists(), result
    shutil.rmtree(work / "s")
    walrider(*command, "--start-over").expect()
    verify(work / "new")


@pytest.mark.every_major
def test_summarizer_goes_on(archived, work):
    """The WAL that a backup brings ends before what replay puts into pg_wal. The summarizer waited for ever for what is between them, and
    all later WAL was kept for it."""
    archived.restore("tar", work / "ours", "--promote").expect()
    segments = sorted({int(path.name[8:], 16) for path in (work / "ours/pg_wal").iterdir() if len(path.name) == 24})
    assert segments == list(range(segments[0], segments[-1] + 1)), segments
    server = PgCluster(work / "ours")
    server.configure("archive_mode = off\nsummarize_wal = on\nwal_keep_size = 0", "postgresql.auto.conf")
    with server:
        server.start()
        server.psql("CREATE TABLE more AS SELECT 1 AS x; CHECKPOINT")
        wait_for(lambda: server.value("SELECT count(*) > 0 FROM pg_available_wal_summaries() WHERE tli = 2") == "t", "a summary")


def test_roll_over_timelines(plain, work):
    """To the first record after a promotion: the manifest and pg_wal tell of both timelines, and PostgreSQL finds its way."""
    plain.point(work / "new")
    links = [link for link in (plain.backup / "pg_tblspc").iterdir() if link.is_symlink()]
    mapping = [word for link in links for word in ("--tablespace-mapping", f"{os.readlink(link)}={work}/{link.name}")]
    # Where the record is that begins it, before any checkpoint there.
    switched = (plain.archive / "00000002.history").read_text().split()[1]
    walrider("backup", "roll", "--backup", plain.backup, "--wal", plain.archive, "--target-lsn", switched, "--out", work / "new",
             "--no-manifest", *mapping).expect()
    verify(work / "new")
    manifest = json.loads((work / "new/backup_manifest").read_text())
    assert [one["Timeline"] for one in manifest["WAL-Ranges"]] == [2, 1]
    assert (work / "new/pg_wal/00000002.history").exists()
    server = PgCluster(work / "new")
    server.configure("archive_mode = off", "postgresql.auto.conf")
    with server:
        server.start(**recovery.SERVE_SETTINGS)
        assert server.value("SELECT timeline_id FROM pg_control_checkpoint()") == "2"
