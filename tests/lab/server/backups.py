"""Base backups: what PostgreSQL's own program says of them, and how they are unpacked without us."""

import shutil
import subprocess

from tests.lab import install
from tests.lab.server.cluster import copy_tree, run

# What packs an archive, by the programs of that name; one that is not there is left out.
ENDINGS = {"gzip": "gz", "lz4": "lz4", "zstd": "zst"}
MARKER = "walrider.restoring"     # in a directory that walrider restore has not completed
FORMATS = ["plain", "tar", *(name for name in ENDINGS if shutil.which(name))]


def pack_all(directory, forms=FORMATS):
    """Beside the backup `tar` of a directory, the same one packed in each of these ways."""
    for form in forms[2:]:
        copy_tree(directory / "tar", directory / form)
        for archive in list((directory / form).glob("*.tar")):
            with open(f"{archive}.{ENDINGS[form]}", "wb") as out:
                subprocess.run([form, "-c", archive], stdout=out, check=True)
            archive.unlink()


def refuses(data_dir):
    """What PostgreSQL says that does not start on it."""
    done = subprocess.run([install.program("postgres"), "-D", data_dir], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr


def kept_out(data_dir):
    """No server starts: there is no control file yet, nor perhaps PG_VERSION or postgresql.conf, or a line says why not."""
    said = refuses(data_dir)
    reasons = "could not find the database system", "PG_VERSION", "postgresql.conf", "walrider_was_interrupted"
    assert any(reason in said for reason in reasons), said


def verify(backup, *options):
    """pg_verifybackup."""
    done = subprocess.run([str(part) for part in (install.program("pg_verifybackup"), *options, backup)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def extract(archive, target):
    """Unpack an archive into a directory."""
    target.mkdir(exist_ok=True)
    run(["tar", "-xf", archive, "-C", target])
    target.chmod(0o700)
    return target
