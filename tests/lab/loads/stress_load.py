"""What the stress does to its tables: pgbench scripts, and maintenance beside them.

The scripts hold many small and some large changes with random ids; inserts and deletes of equal ranges
balance, so that tables neither fill up nor run empty.
"""

import re
import subprocess
import threading

from tests.lab.install import program
from tests.lab.loads.stress_tables import fill
from tests.lab.server.cluster import ServerError

# What a statement may meet because others work beside it, and because the server is killed under it.
RACES = re.compile(
    r"deadlock detected|due to lock timeout|tuple concurrently (updated|deleted)|could not serialize"
    r"|(relation|index|table|database|prepared transaction) .* does not exist|could not open relation with OID"
    r"|could not find tuple for|cache lookup failed for (relation|index)|is being accessed by other users|already exists"
    r"|is not a BRIN index|cannot REINDEX|invalid index")
GONE = re.compile(r"server closed the connection|terminating connection|connection to server|database system is"
                  r"|server process|could not receive|could not send|SSL|no connection to the server|administrator command"
                  r"|perhaps the backend died|Run was aborted|could not create connection")

LARGE = ("_bulk", "_sparse", "_rollback", "_copy")


def scripts(table, copy_file):
    """{name: (weight, pgbench script)} for one table."""
    t, few, bulk, rows = table.name, 6, table.bulk, table.rows
    at, hot = f"\\set s random(1, {rows})", f"\\set s random(1, {min(rows, 80)})"
    count, number = f"\\set c random(1, {few})", "\\set r random(1, 1000000000)"
    many = f"\\set c random({bulk // 3}, {bulk})"
    span = "id BETWEEN :s AND :s + :c"
    update = f"{table.update_keys(':r')} WHERE {span};" if table.keys_change else \
        f"UPDATE {t} SET pad = pad || 'x' WHERE {span};"
    conditions = [condition for index in table.indexes for condition in index.conditions]
    scan = "".join(f"\\{'elif' if turn else 'if'} :i = {turn}\nSELECT count(pad) FROM {t} WHERE {fill(text, n=':n')};\n"
                   for turn, text in enumerate(conditions))
    found = {
        "insert": (4, f"{at}\n{count}\n{number}\n{table.insert(':s', ':c', ':r')};"),
        "insert_bulk": (2, f"{at}\n{many}\n{number}\n{table.insert(':s', ':c', ':r')};"),
        "delete": (3, f"{at}\n{count}\nDELETE FROM {t} WHERE {span};"),
        "delete_bulk": (2, f"{at}\n{many}\nDELETE FROM {t} WHERE {span};"),
        "delete_sparse": (1, f"{at}\n{many}\n\\set m random(2, 5)\nDELETE FROM {t} WHERE {span} AND id % :m = 0;"),
        "update_pad": (3, f"{hot}\n{count}\nUPDATE {t} SET pad = left('u' || pad, 1500) WHERE {span};"),
        "update_keys": (4, f"{at}\n{count}\n{number}\n{update}"),
        "update_keys_bulk": (1, f"{at}\n{many}\n{number}\n{update}"),
        "scan": (3, f"\\set n random(0, 1000000)\n\\set i random(0, {len(conditions) - 1})\n"
                    "\\set bitmap random(:least, 1)\n\\set plain 1 - :bitmap\nBEGIN;\nSET LOCAL enable_seqscan = off;\n"
                    "SET LOCAL enable_bitmapscan = :bitmap;\nSET LOCAL enable_indexscan = :plain;\n"
                    f"SET LOCAL enable_indexonlyscan = :plain;\n{scan}\\endif\nCOMMIT;"),
        "lock": (2, f"{hot}\n\\set k random(1, 4)\nBEGIN;\n" + "".join(
            f"\\{'elif' if turn else 'if'} :k = {turn + 1}\nSELECT id FROM {t} WHERE id BETWEEN :s AND :s + 2 FOR {kind};\n"
            for turn, kind in enumerate(("KEY SHARE", "SHARE", "NO KEY UPDATE SKIP LOCKED", "UPDATE SKIP LOCKED")))
            + "\\endif\nSAVEPOINT a;\n"
            f"SELECT id FROM {t} WHERE id = :s FOR KEY SHARE;\nUPDATE {t} SET pad = 'locked' WHERE id = :s + 1;\n"
            "\\if :k = 1\n\\sleep 20 ms\n\\endif\n\\if :k = 2\nROLLBACK TO a;\n\\endif\nCOMMIT;"),
        "savepoints": (2, f"{at}\n{count}\n{number}\nBEGIN;\nSAVEPOINT a;\n{table.insert(':s', ':c', ':r')};\nSAVEPOINT b;\n"
                          f"{update}\nROLLBACK TO b;\nDELETE FROM {t} WHERE {span};\n\\if :c > 3\nROLLBACK TO a;\n\\endif\n"
                          f"{table.insert(':s', 1, ':r')};\nCOMMIT;"),
        "rollback": (1, f"{at}\n{many}\n{number}\nBEGIN;\n{table.insert(':s', ':c', ':r')};\n{update}\n"
                        "SELECT nextval('stress_sequence');\nROLLBACK;"),
        "hold": (0.2, f"BEGIN ISOLATION LEVEL REPEATABLE READ;\nDECLARE c CURSOR FOR SELECT id, pad FROM {t};\nFETCH 9 FROM c;\n"
                      "SELECT nextval('stress_sequence');\n\\sleep 900 ms\nFETCH 9 FROM c;\nCOMMIT;"),
    }
    if not table.unique:
        found["copy"] = (2, f"{at}\n{many}\nCOPY {t} FROM '{copy_file}' WHERE id BETWEEN :s AND :s + :c;")
    return {f"{t}_{name}": script for name, script in found.items()}


class Maintenance(threading.Thread):
    """One session's worth of VACUUM, CHECKPOINT, REINDEX and the like, one after the other, until stopped."""

    def __init__(self, server, tables, rng, prepared):
        super().__init__(daemon=True)
        self.server, self.tables, self.rng, self.prepared = server, tables, rng, prepared
        self.halt, self.crashing, self.errors, self.done = threading.Event(), False, [], {}

    def run(self):
        while not self.halt.wait(self.rng.uniform(0.02, 0.4)):
            weights = [weight for weight, _ in ACTIONS]
            action = self.rng.choices([action for _, action in ACTIONS], weights)[0]
            self.act(action)

    def act(self, action):
        """One action; an error that neither a race nor a crash explains is kept."""
        table = self.rng.choice(self.tables)
        statements = action(self, table)
        if not statements:
            return
        database = "other" if self.rng.random() < 0.15 and action not in GLOBAL else "postgres"
        options = "-c lock_timeout=2s -c statement_timeout=60s" + \
            (" -c wal_consistency_checking=" if self.rng.random() < 0.6 else "")
        try:
            said = subprocess.run(
                [program("psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", self.server.dsn(database)],
                input=";\n".join(statements) + ";\n", env=dict(self.server.environment(), PGOPTIONS=options),
                capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            self.errors.append(f"no answer: {statements}")
            return
        self.done[action.__name__] = self.done.get(action.__name__, 0) + (said.returncode == 0)
        errors = [line for line in said.stderr.splitlines() if re.search("ERROR|FATAL|PANIC|error:", line)]
        if "due to statement timeout" in said.stderr and any(
                name == table.name for name, _ in half_evacuated(self.server, database, check=False)):
            return
        if any(not RACES.search(line) and not (self.crashing and GONE.search(line)) for line in errors):
            self.errors.append(f"{statements}\n{said.stderr}")

    def index(self, table, methods=None):
        """One of a table's indexes that is not a constraint."""
        found = [index for index in table.indexes if index.definition and (not methods or index.method in methods)]
        return self.rng.choice(found) if found else None


def checkpoint(work, table):
    return ["CHECKPOINT"]


def vacuum(work, table):
    options = {"FREEZE": "", "INDEX_CLEANUP": work.rng.choice(["ON", "OFF", "AUTO"]), "TRUNCATE": "",
               "DISABLE_PAGE_SKIPPING": "", "PARALLEL": work.rng.choice("02"), "ANALYZE": ""}
    chosen = [f"{name} {value}" for name, value in options.items() if work.rng.random() < 0.25]
    return [f"VACUUM {'(' + ', '.join(chosen) + ') ' if chosen else ''}{table.name}"]


def tide(work, table):
    """Half of the ids go and are vacuumed away: pages of every kind run empty."""
    start = work.rng.randrange(table.rows // 2)
    return [f"DELETE FROM {table.name} WHERE id BETWEEN {start} AND {start + table.rows // 2}",
            f"VACUUM (INDEX_CLEANUP ON) {table.name}"] + \
        ([table.insert(start, table.rows // 3, work.rng.randrange(10**9))] if work.rng.random() < 0.7 else [])


def index_functions(work, table):
    """The functions that work on one index."""
    index = work.index(table, ("gin", "brin"))
    if not index:
        return []
    if index.method == "gin":
        return [f"SELECT gin_clean_pending_list('{index.name}')"]
    block = work.rng.randrange(2000)
    return [f"SELECT brin_desummarize_range('{index.name}', n) FROM generate_series({block}, {block} + 20) n",
            work.rng.choice([f"SELECT brin_summarize_new_values('{index.name}')",
                             f"SELECT brin_summarize_range('{index.name}', {block})"])]


def reindex(work, table):
    index = work.index(table)
    return [f"REINDEX {work.rng.choice(['INDEX CONCURRENTLY', 'INDEX'])} {index.name}"] if index else []


def reindex_table(work, table):
    return [f"REINDEX TABLE {table.name}"]


def recreate_index(work, table):
    """Built anew in a transaction, sometimes in vain, sometimes with other workers and memory."""
    index = work.index(table)
    if not index:
        return []
    return ["BEGIN", f"SET LOCAL maintenance_work_mem = '{work.rng.choice(['1MB', '64MB'])}'",
            f"SET LOCAL max_parallel_maintenance_workers = {work.rng.choice([0, 2])}",
            f"DROP INDEX {index.name}",
            index.create(table.name),
            work.rng.choice(["COMMIT", "COMMIT", "ROLLBACK"])]


def another_index(work, table):
    """An index that comes and goes; CONCURRENTLY, it may stay behind unfinished and is dropped by a later one."""
    index = work.index(table)
    if not index:
        return []
    name = f"{table.name}_more"
    return [f"DROP INDEX IF EXISTS {name}",
            index.create(table.name, name, work.rng.choice(["CONCURRENTLY ", ""]))]


def drop_invalid(work, table):
    """What an interrupted CONCURRENTLY leaves."""
    return ["SELECT format('DROP INDEX IF EXISTS %s', indexrelid::regclass) FROM pg_index WHERE NOT indisvalid "
            "\\gexec\nSELECT 1"]


def truncate(work, table):
    return ["BEGIN", f"TRUNCATE {table.name}", table.insert(1, table.rows // 3, work.rng.randrange(10**9)),
            work.rng.choice(["COMMIT", "ROLLBACK"])]


def rewrite(work, table):
    return [work.rng.choice([f"VACUUM FULL {table.name}", f"CLUSTER {table.name} USING {table.name}_id"])]


def make_and_drop(work, table):
    """A table of a moment, committed or not."""
    name = f"moment_{work.rng.randrange(10**6)}"
    return ["BEGIN", f"CREATE TABLE {name} AS SELECT * FROM {table.name} LIMIT 400",
            *(f"CREATE INDEX ON {name} USING {index.method} {index.definition}" for index in table.indexes
              if index.definition and not index.unique), work.rng.choice(["COMMIT", "ROLLBACK"]),
            f"DROP TABLE IF EXISTS {name}"]


def move(work, table):
    """To the other tablespace, table or index."""
    index, space = work.index(table), work.rng.choice(["pg_default", "stress_space"])
    return [f"ALTER INDEX {index.name} SET TABLESPACE {space}" if index and work.rng.random() < 0.6
            else f"ALTER TABLE {table.name} SET TABLESPACE {space}"]


def options(work, table):
    """Options that later inserts and splits heed."""
    index = work.index(table, ("gin", "btree", "hash", "gist", "spgist"))
    if not index:
        return []
    if index.method == "gin":
        return [f"ALTER INDEX {index.name} SET (fastupdate = {work.rng.choice(['on', 'off'])})"]
    return [f"ALTER INDEX {index.name} SET (fillfactor = {work.rng.choice([30, 60, 100])})"]


def logged(work, table):
    return [f"ALTER TABLE su SET {work.rng.choice(['LOGGED', 'UNLOGGED'])}"]


def prepare(work, table):
    """A prepared transaction that blocks nobody: new rows where no constraint makes others wait."""
    if table.unique or table.persistence:
        return []
    gid = f"s{next(work.prepared)}"
    return ["BEGIN", table.insert(work.rng.randrange(table.rows), 20, work.rng.randrange(10**9)), "SAVEPOINT a",
            table.insert(work.rng.randrange(table.rows), 20, work.rng.randrange(10**9)), f"PREPARE TRANSACTION '{gid}'"]


def resolve(work, table):
    """All but the two youngest end, one way or the other."""
    return [f"SELECT format('%s PREPARED %L', '{work.rng.choice(['COMMIT', 'ROLLBACK'])}', gid) FROM pg_prepared_xacts "
            "WHERE database = current_database() ORDER BY prepared DESC OFFSET 2 \\gexec\nSELECT 1"]


def databases(work, table):
    """A database copied by its WAL, dropped by a later call."""
    return ["DROP DATABASE IF EXISTS passing", "CREATE DATABASE passing TEMPLATE template0 STRATEGY wal_log"]


def switch(work, table):
    return ["SELECT pg_switch_wal()"]


def wide_rows(work, table):
    """Large objects and a value of many chunks."""
    return [f"SELECT lo_from_bytea(0, decode(repeat(md5('{work.rng.random()}'), 4000), 'hex'))",
            "SELECT lo_unlink(loid) FROM (SELECT DISTINCT loid FROM pg_largeobject ORDER BY loid OFFSET 5) x"]


ACTIONS = ((10, checkpoint), (20, vacuum), (12, tide), (14, index_functions), (8, reindex), (2, reindex_table),
           (6, recreate_index), (5, another_index), (3, drop_invalid), (3, truncate), (2, rewrite), (4, make_and_drop),
           (4, move), (3, options), (1, logged), (8, prepare), (7, resolve), (1, databases), (2, switch), (2, wide_rows))
GLOBAL = (checkpoint, databases, switch)


def leave_prepared(server, tables, name):
    """Two prepared transactions for each table whose rows nobody has to wait for."""
    for table in tables:
        if table.unique or table.persistence:
            continue
        for number in range(2):
            server.psql(f"BEGIN; {table.insert(table.rows, 30, number)}; SAVEPOINT a; {table.insert(1, 5, number)}; "
                        f"ROLLBACK TO a; PREPARE TRANSACTION '{name}-{table.name}-{number}'")


def lock_old_version(server):
    """A lock of a row that is being updated is put on its new version, too."""
    with server.session() as one, server.session() as other:
        one.run("BEGIN")
        one.run("UPDATE so SET pad = 'new' WHERE id = (SELECT min(id) FROM so)")
        other.run("SELECT id FROM so WHERE id = (SELECT min(id) FROM so) FOR KEY SHARE")
        one.run("COMMIT")


def resolve_all(server):
    """No prepared transaction is left, in either database."""
    for number, (gid, database) in enumerate(server.psql("SELECT gid, database FROM pg_prepared_xacts ORDER BY 1")):
        server.psql(f"{'ROLLBACK' if number % 2 else 'COMMIT'} PREPARED '{gid}'", database)


def half_evacuated(server, database="postgres", check=True):
    """(table, index) of the BRIN indexes in which a page is to become one of the range map, and the backend that moved its
    tuples elsewhere was cancelled or died.

    Such a page keeps BRIN_EVACUATE_PAGE.  An insert that changes one of its tuples to one of the same size then goes round
    in brininsert (brin.c) for ever, as it was seen to do in 18.6: it asks for an update in place, which brin_doupdate
    (brin_pageops.c) refuses because of the flag.  Only the map's next extension goes on with the page.
    """
    # Two bytes of flags and two of type, little-endian, end a page (brin_page.h).
    return server.psql(
        "SELECT DISTINCT indrelid::regclass, indexrelid::regclass FROM pg_index JOIN pg_class c ON c.oid = indexrelid "
        "JOIN pg_am a ON a.oid = relam, generate_series(0, pg_relation_size(c.oid) / 8192 - 1) block, "
        "get_raw_page(indexrelid::regclass::text, block::int) page "
        "WHERE amname = 'brin' AND substr(page, 8191) = '\\x93f0' AND get_byte(page, 8188) & 1 = 1", database, check=check)


def finish_evacuations(server):
    """Make such indexes anew, while nobody works; returns their names."""
    found = [(database, index) for database in ("postgres", "other") for _, index in half_evacuated(server, database)]
    if found:
        resolve_all(server)     # they would keep REINDEX waiting
    for database, index in found:
        server.psql(f"REINDEX INDEX {index}", database)
    return found


def kill_tuples(table):
    """Scans mark the index tuples of dead rows, and rows like them then need the room."""
    first, last = table.rows // 4, table.rows // 2
    conditions = [condition for index in table.indexes for condition in index.conditions if "ARRAY(" not in condition]
    scans = [f"SELECT count(pad) FROM {table.name} WHERE {fill(condition, n=n)}" for condition in conditions
             for n in (range(20) if "$n" in condition else [0])]
    return ["VACUUM " + table.name, table.insert(first, last - first, 3),
            f"DELETE FROM {table.name} WHERE id BETWEEN {first} AND {last}",
            "SET enable_seqscan = off; SET enable_bitmapscan = off; " + "; ".join(scans),
            *[table.insert(first, last - first, 3)] * 3]


def finale(table, kill):
    """What no round may lack, without luck: the table's pages run empty, are vacuumed and fill again."""
    half = table.rows // 2
    made = [table.insert(half // 3, half, 1), f"VACUUM {table.name}",
            f"DELETE FROM {table.name} WHERE id BETWEEN {half // 3} AND {half + half // 2}",
            # Pages that the first deletes, the second finds free.
            *[f"VACUUM (INDEX_CLEANUP ON) {table.name}", table.insert(1, 1, 4)] * 2,
            table.insert(half // 2, half, 2)]
    for index in table.indexes:
        if index.method == "brin":
            made += [f"REINDEX INDEX {index.name}", f"SELECT brin_desummarize_range('{index.name}', 8)",
                     f"SELECT brin_summarize_range('{index.name}', 8)"]
        if index.method == "gin":
            made.append(f"SELECT gin_clean_pending_list('{index.name}')")
    return made + (kill_tuples(table) if kill else [])


class Clients:
    """pgbench on one database, with scripts of its own weights."""

    def __init__(self, server, database, directory, weights, clients, seconds, variables, seed):
        self.server, self.said = server, ""
        files = [argument for name, value in variables.items() for argument in ("-D", f"{name}={value}")]
        files += [argument for name, weight in weights.items() for argument in ("-f", f"{directory / name}.sql@{weight}")]
        self.process = server.pgbench_start("-n", "-c", clients, "-j", 1, "-T", seconds, f"--random-seed={seed}", *files,
                                            database=database)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        self.said = self.process.stdout.read()

    def wait(self, crashed):
        """Wait for the end; an error that neither a race nor a crash explains is raised."""
        self.process.wait(timeout=300)
        self.reader.join(60)
        self.process.stdout.close()
        errors = [line for line in self.said.splitlines() if re.search("error|ERROR|FATAL|PANIC", line)]
        bad = [line for line in errors if not RACES.search(line) and not (crashed and GONE.search(line))]
        if bad:
            raise ServerError("pgbench: " + "\n".join(bad[:20]))

    def end(self):
        """Let go at once."""
        self.process.terminate()
