"""The tables of the suites: which are run, under which settings, and which of their tests fail for a known reason."""

from dataclasses import dataclass

from tests.lab import install

from . import source

# What every primary is set to, besides tests.lab.server.cluster's settings.  A suite writes gigabytes of WAL: segments are
# linked into the archive, not copied, and so must not be used again; see Primary.
SETTINGS = """
wal_recycle = off
wal_init_zero = off
max_prepared_transactions = 20
max_locks_per_transaction = 128
max_wal_size = 2GB
checkpoint_timeout = 1h
synchronize_seqscans = off
autovacuum_naptime = 10s
"""

# contrib modules whose tests write WAL worth replaying: index access methods and operator classes, heap surgery.
CONTRIB = ("amcheck", "bloom", "btree_gin", "btree_gist", "citext", "cube", "earthdistance", "hstore", "intarray", "isn",
           "lo", "ltree", "pageinspect", "pg_freespacemap", "pg_surgery", "pg_trgm", "pg_visibility", "pgrowlocks",
           "pgstattuple", "seg", "tablefunc", "tcn", "unaccent")


@dataclass(frozen=True)
class Variant:
    """One primary, one WAL, and how it is replayed."""

    name: str
    about: str
    settings: str = ""
    checksums: bool = True
    suites: tuple = ("regression",)
    contrib: tuple = ()
    images: tuple = ()              # suites that run with wal_consistency_checking = all
    compression: str = None         # wal_compression, which the server must have been built with
    replays: tuple = ()             # options of further replays of the same WAL

    def runs_here(self):
        """Whether the server at hand can be set so."""
        return self.compression is None or self.compression in install.compressions()

    def disk_bytes(self):
        """What it takes to run: the WAL, and a few directories of less than a gigabyte."""
        return (13 if self.images else 5) << 30

    def conf(self):
        """The primary's settings."""
        compression = f"wal_compression = {self.compression}\n" if self.compression else ""
        return SETTINGS + compression + self.settings


BOTH = ("regression", "isolation")
JOBS = tuple(("--jobs", str(jobs)) for jobs in (1, 2, 4))
LITTLE = ("--memory", "64MB")

# The isolation tests fill some large tables over and over: with images, only compressed.
VARIANTS = {variant.name: variant for variant in (
    Variant("default", "page checksums; the image of every page that the regression tests change is in the WAL",
            suites=BOTH, images=("regression",), replays=(*JOBS, LITTLE)),
    Variant("isolation", "the images of the isolation tests, in pglz", suites=("isolation",), images=("isolation",),
            compression="pglz"),
    Variant("contrib", "contrib's index access methods and operator classes", suites=(), contrib=CONTRIB,
            images=("contrib",)),
    Variant("plain", "WAL as a default server writes it", suites=BOTH, replays=(*JOBS, LITTLE)),
    Variant("pglz", "full-page images in pglz", compression="pglz"),
    Variant("lz4", "full-page images in lz4", compression="lz4"),
    Variant("zstd", "full-page images in zstd", compression="zstd"),
    Variant("no-checksums", "no page checksums: the free space map is determined, too", checksums=False),
    Variant("checkpoints", "a checkpoint every 30 s or 64 MB: full-page images all the way",
            settings="max_wal_size = 64MB\nmin_wal_size = 32MB\ncheckpoint_timeout = 30s\n"),
    Variant("no-full-page-writes", "no full-page images: every change to a page by redo",
            settings="full_page_writes = off\n", checksums=False),
    Variant("logical", "wal_level = logical, commit timestamps, logical decoding", suites=BOTH,
            contrib=("test_decoding",), images=("regression", "contrib"),
            settings="wal_level = logical\ntrack_commit_timestamp = on\nmax_replication_slots = 4\n"
            "logical_decoding_work_mem = 64kB\n"),
)}

PSQL = "psql after a failed COPY"
CRASH = "a crash or an endless loop; its statement is left out (source.LEFT_OUT)"

# Debian has the tests of the newest minor, the server may be of an earlier one, which fails the tests of what was fixed
# in between.  (server, tests, suite): the tests that fail, and what was fixed.
EXPECTED_FAILURES = {
    ("17.10", "17.11", "regression"): {
        "money": "money divided by -1", "rangetypes": "permission on a range's subtype",
        "unicode": "composition of Hangul", "encoding": "checks of multibyte characters",
        "copy": PSQL, "copyselect": PSQL, "copy2": PSQL, "alter_table": PSQL, "privileges": PSQL, "rowsecurity": PSQL,
        "generated": PSQL, "psql": "short tables, BEGIN ATOMIC", "triggers": "cascades of contrib/spi's refint",
        "join": "plans of outer joins", "window": "plans of windows", "partition_prune": "plans of default partitions",
        "gist": "index-only scans of domains", "rules": "names of rules", "stats_ext": "owner of rebuilt statistics",
        "jsonb_jsonpath": "precision in jsonpath", "sqljson": CRASH, "sqljson_queryfuncs": "coercion to a length",
        "sqljson_jsontable": "coercion to a length", "hash_part": CRASH, "indexing": "exclusion constraints attached",
        "xml": "not PostgreSQL, but its libxml2: namespaces",
    },
    ("17.10", "17.11", "isolation"): {
        "pub-concurrent-drop": "tables dropped under a publication", "drop-owned-grant": "DROP OWNED beside GRANT",
    },
    ("17.10", "17.11", "btree_gist"): {"float4": "NaN in indexes", "float8": "NaN in indexes"},
    ("17.10", "17.11", "ltree"): {"ltree": "comparison of long paths"},
    ("17.10", "17.11", "seg"): {"seg": "output of uncertain bounds"},
    ("17.10", "17.11", "pg_surgery"): {"heap_surgery": CRASH},
}


def unexplained(suite, failed, tests):
    """Those of a suite's failed tests, of so many, that nothing explains.

    Where a later minor's tests are not in the table yet, one in eight may fail for what it fixed.
    """
    server, of = install.version(), source.version()
    known = EXPECTED_FAILURES.get((server, of, suite), {})
    left = [name for name in failed if name not in known]
    later = server != of and not any(key[:2] == (server, of) for key in EXPECTED_FAILURES)
    return [] if later and len(left) * 8 <= tests else left
