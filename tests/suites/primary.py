"""A primary under PostgreSQL's own tests, and all that is known of it when it stops.

A run's directory holds
    primary/     the primary, stopped cleanly
    backup/      its base backup, taken before the tests
    archive/     every WAL segment up to the shutdown checkpoint
    SUITE/       pg_regress's output of each suite
    dumps/       the primary's contents, see `dump`
    load.json    what there is to know of the WAL
"""

import json
import re
import time
from pathlib import Path

from tests.lab import install
from tests.lab.server.cluster import PgCluster, ServerError, parse_lsn, run

from . import source
from .variants import unexplained

LEFT_OPEN = "left_open"     # the database with the prepared transactions that no suite leaves

# Prepared with subtransactions, row locks of several holders, and an index of each kind changed.
LEAVE_PREPARED = """
CREATE TABLE pending (id int PRIMARY KEY, t text, p point, a int[]);
CREATE INDEX ON pending USING hash (t);
CREATE INDEX ON pending USING gist (p);
CREATE INDEX ON pending USING spgist (p);
CREATE INDEX ON pending USING gin (a);
CREATE INDEX ON pending USING brin (id);
INSERT INTO pending SELECT g, 'committed ' || g, point(g, g), ARRAY[g, g % 10] FROM generate_series(1, 500) g;
BEGIN;
INSERT INTO pending SELECT g, 'first ' || g, point(g, -g), ARRAY[g] FROM generate_series(501, 1000) g;
SAVEPOINT s; UPDATE pending SET t = 'updated' WHERE id <= 20; RELEASE s;
SAVEPOINT s; DELETE FROM pending WHERE id BETWEEN 21 AND 40; ROLLBACK TO s;
SELECT count(*) FROM (SELECT FROM pending WHERE id BETWEEN 100 AND 120 FOR KEY SHARE) locked;
PREPARE TRANSACTION 'first';
BEGIN;
SELECT count(*) FROM (SELECT FROM pending WHERE id BETWEEN 110 AND 130 FOR KEY SHARE) locked;
INSERT INTO pending SELECT g, 'second ' || g, point(-g, g), ARRAY[g] FROM generate_series(1001, 1500) g;
CREATE TABLE made_by_second (id int);
PREPARE TRANSACTION 'second';
"""

# A sequence's WAL is ahead of it by what it may hand out without WAL; setting it to where it stands logs just that.
SET_SEQUENCES = """
DO $$DECLARE s oid; BEGIN
    FOR s IN SELECT oid FROM pg_class WHERE relkind = 'S' AND relpersistence <> 't' LOOP
        EXECUTE format('SELECT setval(%s, last_value, is_called) FROM %s', s, s::regclass);
    END LOOP;
END$$"""


class Load:
    """The WAL of a run, and what must come of it."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.backup, self.archive = self.directory / "backup", self.directory / "archive"
        self.dumps = self.directory / "dumps"
        self.suites = {}            # name: {"passed": number, "failed": [names]}
        self.start_lsn = self.final_checkpoint = None

    def save(self):
        """Write load.json, for `read`."""
        (self.directory / "load.json").write_text(json.dumps(dict(
            suites=self.suites, start_lsn=self.start_lsn, final_checkpoint=self.final_checkpoint), indent=1))

    @classmethod
    def read(cls, directory):
        """A run of earlier."""
        self = cls(directory)
        vars(self).update(json.loads((self.directory / "load.json").read_text()))
        return self

    def wal_bytes(self):
        """How much WAL there is behind the backup."""
        return parse_lsn(self.final_checkpoint) - parse_lsn(self.start_lsn)


class SuiteFailure(AssertionError):
    """A suite did not run as it should: its WAL is not the load that it is meant to be."""


class Primary:
    """The server under test load, from initdb to its stop."""

    def __init__(self, directory, variant):
        self.directory, self.variant = Path(directory), variant
        self.load = Load(directory)
        self.broken = []            # what failed without a known reason
        archive = self.load.archive
        self.server = PgCluster.init(
            self.directory / "primary", archive, checksums=variant.checksums,
            conf=variant.conf() + f"archive_command = 'test ! -e {archive}/%f && ln %p {archive}/%f'\n")

    def start(self):
        """Start it and take the base backup."""
        self.server.start()
        self.server.basebackup(self.load.backup)
        self.load.start_lsn = self.server.lsn()

    def run(self, suite):
        """One suite, `regression`, `isolation` or `contrib`, with or without images; returns (passed, failed)."""
        images = "all" if suite in self.variant.images else ""
        self.server.psql(f"ALTER SYSTEM SET wal_consistency_checking = '{images}'")
        self.server.psql("SELECT pg_reload_conf()")
        before = set(self.load.suites)
        if suite == "contrib":
            for module in self.variant.contrib:
                self.contrib(module)
        else:
            getattr(self, suite)()
        if self.broken:
            raise SuiteFailure("\n".join(self.broken))
        new = [outcome for name, outcome in self.load.suites.items() if name not in before]
        return sum(outcome["passed"] for outcome in new), sum(len(outcome["failed"]) for outcome in new)

    # The suites

    def regression(self, schedule="parallel_schedule"):
        """src/test/regress."""
        tests = source.tree() / "src/test/regress"
        self.regress("regress/pg_regress", "regression", tests, "regression",
                            f"--schedule={tests / schedule}", "--max-concurrent-tests=20")

    def isolation(self):
        """src/test/isolation, with what its Makefile adds where prepared transactions are allowed."""
        tests = source.tree() / "src/test/isolation"
        self.regress("isolation/pg_isolation_regress", "isolation", tests, "isolation_regression",
                            f"--schedule={tests / 'isolation_schedule'}",
                            "prepared-transactions", "prepared-transactions-cic")

    def contrib(self, module):
        """contrib/MODULE: the tests that its Makefile names, in databases of their own, which stay."""
        tests = source.tree() / "contrib" / module
        made = re.sub(r"\\\n", " ", (tests / "Makefile").read_text())
        for variable, program in (("REGRESS", "regress/pg_regress"), ("ISOLATION", "isolation/pg_isolation_regress")):
            names = re.search(rf"^{variable} = (.*)$", made, re.M)
            if names:
                loaded = re.findall(r"--load-extension=\w+", "".join(re.findall(rf"^{variable}_OPTS .*$", made, re.M)))
                suite = f"{module} isolation" if variable == "ISOLATION" else module
                self.regress(program, suite, tests, suite.replace(" ", "_") + "_regression", *loaded, *names[1].split())

    def regress(self, program, suite, tests, database, *arguments):
        """One run of pg_regress against the server; only the failures that have a reason may be."""
        output = self.directory / suite.replace(" ", "-")
        output.mkdir()
        done = run([source.program(program), f"--bindir={install.bindir()}", f"--dlpath={source.libraries()}",
                    f"--inputdir={tests}", f"--expecteddir={tests}", f"--outputdir={output}",
                    f"--host={self.server.sockets}", f"--port={self.server.port}", "--user=postgres",
                    f"--dbname={database}", *arguments], check=False, cwd=tests, env=self.server.environment())
        (output / "tests.out").write_text(done.stdout + done.stderr)
        results = re.findall(r"^(not )?ok \d+\s+[-+] (\S+)", done.stdout, re.M)
        failed = [name for bad, name in results if bad]
        self.load.suites[suite] = dict(passed=len(results) - len(failed), failed=failed)
        wrong = unexplained(suite, failed, len(results))
        if self.server.log_matches("was terminated by signal.*"):
            wrong = "the server crashed"
        if wrong or done.returncode not in (0, 1) or not results or "Bail out" in done.stdout:
            self.broken.append(f"{suite}: {wrong or done.stdout[-2000:] + done.stderr[-2000:]}\n"
                               f"{differences(output)}")

    # The end

    def finish(self):
        """Prepared transactions left open, contents noted, stopped, all WAL archived."""
        self.server.psql(f"CREATE DATABASE {LEFT_OPEN}")
        self.server.psql(LEAVE_PREPARED, LEFT_OPEN)
        self.settle()
        dump(self.server, self.load.dumps)
        self.server.stop("fast")
        self.server.complete_archive()
        self.load.final_checkpoint = self.server.controldata()["Latest checkpoint location"]
        self.load.save()
        return self.load

    def settle(self):
        """From here on nothing changes by itself: no autovacuum, sequences logged as they are."""
        self.server.configure("autovacuum = off", "postgresql.auto.conf")
        self.server.psql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 300
        while self.server.value("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'autovacuum%'") != "0":
            if time.monotonic() > deadline:
                raise ServerError("autovacuum does not end")
            time.sleep(0.1)
        for database in databases(self.server):
            self.server.psql(SET_SEQUENCES, database)

def differences(output, lines=60):
    """The beginning of what a suite printed otherwise."""
    file = output / "regression.diffs"
    return "\n".join(file.read_text(errors="replace").splitlines()[:lines]) if file.exists() else ""


def databases(server):
    """Every database but the templates."""
    return [row[0] for row in server.psql("SELECT datname FROM pg_database WHERE datallowconn AND NOT datistemplate")]


def dump(server, directory):
    """Contents as files, byte for byte the same wherever the contents are: a pg_dumpall, and the catalogs of each
    database.  Unlogged tables are dumped without their rows, which no recovery brings back."""
    directory.mkdir()
    options = ["--no-sync", "--no-unlogged-table-data", "--restrict-key=walrider"]
    statistics = run([install.program("pg_dumpall"), "--help"]).stdout
    both = ["--statistics"] if "--statistics " in statistics else []
    env = server.environment()
    run([install.program("pg_dumpall"), *options, *both, "-f", directory / "all.sql"], env=env)
    for database in databases(server):
        run([install.program("pg_dump"), *options, "--schema=pg_catalog", "-f", directory / f"catalogs-{database}.sql",
             database], env=env)
    return directory
