"""A primary on which all kinds of things change, and readers of its standby who would notice what is not whole.

Each writer and each reader is a thread with a connection of its own.  What holds in every snapshot: all money is there, whichever
way it is counted; each branch has what its history says; each document has the checksum of its text.
"""

import random
import threading
import time

import psycopg

from tests.lab.server.cluster import ServerError

ACCOUNTS, BRANCHES, DOCUMENTS = 4000, 10, 200
START = 1000
TABLES = f"""
CREATE TABLE branches (id int PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE accounts (id int PRIMARY KEY, branch int NOT NULL REFERENCES branches, balance bigint NOT NULL, filler text,
                       code int, tags int[], place point, name text);
CREATE INDEX ON accounts (balance, id);
CREATE INDEX ON accounts (branch);
CREATE INDEX ON accounts USING hash (code);
CREATE INDEX ON accounts USING gin (tags) WITH (gin_pending_list_limit = 64);
CREATE INDEX ON accounts USING gist (place);
CREATE INDEX ON accounts USING spgist (name);
CREATE TABLE history (branch int NOT NULL REFERENCES branches, delta bigint NOT NULL);
CREATE TABLE documents (id int PRIMARY KEY, sum text NOT NULL, body text NOT NULL);
ALTER TABLE documents ALTER body SET STORAGE EXTERNAL;
CREATE TABLE queue (id bigserial PRIMARY KEY, v text);
CREATE INDEX ON queue USING gin ((ARRAY[1, id::int % 50])) WITH (fastupdate = off);
INSERT INTO branches SELECT g, 0 FROM generate_series(0, {BRANCHES - 1}) g;
INSERT INTO accounts SELECT g, g % {BRANCHES}, {START}, repeat('f', 60), 7 * g, ARRAY[g % {BRANCHES}, {BRANCHES} + g % 97], point(g, g % 89), 'n' || g
  FROM generate_series(1, {ACCOUNTS}) g;
INSERT INTO documents SELECT g, md5(b), b FROM (SELECT g, repeat(md5(g::text), 200) b FROM generate_series(1, {DOCUMENTS}) g) d;
VACUUM (FREEZE, ANALYZE);
"""
# In one snapshot each; what they must return.
MONEY = "SELECT sum(balance)::bigint FROM accounts"
WAYS = {"sequential": "SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off; SET LOCAL enable_bitmapscan = off",
        "index": "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_indexonlyscan = off",
        "index only": "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_indexscan = on",
        "bitmap": "SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off"}
BY_INDEX = "SELECT sum(balance)::bigint FROM accounts WHERE balance > -1000000000"
# By an index of few keys: posting lists, which entries of new versions split.
BY_BRANCH = "SELECT sum(balance)::bigint FROM accounts WHERE branch >= 0"
BY_TAG = f"SELECT sum(balance)::bigint FROM accounts WHERE tags && ARRAY{list(range(BRANCHES))}"
BY_PLACE = "SELECT sum(balance)::bigint FROM accounts WHERE place <@ box '((-1, -1), (1e6, 1e6))'"
BY_NAME = "SELECT sum(balance)::bigint FROM accounts WHERE name ^@ 'n'"
CODES = 50
BY_CODE = (f"SELECT sum(n)::int FROM generate_series(1, {CODES}) g, LATERAL (SELECT count(*) n FROM accounts WHERE code = 7 * g) c")
ENTRIES = "SELECT count(*) FROM accounts WHERE id > 0"
BRANCH = ("SELECT count(*) FROM branches b WHERE balance <> (SELECT coalesce(sum(delta), 0) FROM history h WHERE h.branch = b.id)")
QUEUE = "SELECT (SELECT count(*) FROM queue WHERE id > 0) - (SELECT count(v) FROM queue)"
# Each of whose rows has the key 1: an entry with a posting tree, when there are enough.
QUEUE_BY_KEY = ("SELECT (SELECT count(*) FROM queue WHERE ARRAY[1, id::int % 50] @> ARRAY[1]) - (SELECT count(v) FROM queue)")
DOCUMENT = "SELECT count(*) FROM documents WHERE md5(body) <> sum"


# What a conflict with replay ends in, or with another writer.
CANCELLED = (psycopg.errors.QueryCanceled, psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)


def connect(server, **settings):
    """A connection that commits each statement by itself. Nothing is prepared: the plan of a statement that is stays what it was, whatever
    way is asked for later."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return psycopg.connect(server.dsn(), autocommit=True, options=options, prepare_threshold=None)


class Crowd:
    """Threads that work until they are told to stop; the first failure is raised then."""

    def __init__(self, seed):
        self.seed, self.stop, self.threads, self.failure = seed, threading.Event(), [], None
        self.counts, self.conflicts = {}, {}

    def add(self, name, server, work, **settings):
        """`work(connection, rng)` again and again, on another connection where it was lost."""
        def run():
            rng = random.Random(f"{self.seed}/{name}")
            try:
                while not self.stop.is_set():
                    self.session(name, server, work, settings, rng)
            except BaseException as error:      # noqa: BLE001 - raised by `__exit__`
                self.failure = self.failure or error
                self.stop.set()
        self.threads.append(threading.Thread(target=run, name=name))

    def session(self, name, server, work, settings, rng):
        """As long as the connection lasts: a conflict with replay ends it where it does nothing just then."""
        lost = False
        try:
            with connect(server, **settings) as connection:
                try:
                    while not self.stop.is_set() and not connection.closed:
                        work(connection, rng)
                        self.counts[name] = self.counts.get(name, 0) + 1
                finally:
                    # Looked at here: `with` closes it after any error.
                    lost = connection.closed
        except (psycopg.Error, ServerError) as error:
            # Of a server that has died, connecting again tells.
            if not (isinstance(error, CANCELLED) or "conflict with recovery" in str(error) or lost):
                raise
            self.conflicts[name] = self.conflicts.get(name, 0) + 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        if kind is None and self.failure:
            raise self.failure


def transfer(connection, rng):
    """Money moves, at times in many subtransactions; the history's foreign key and the branch's update meet in a multixact."""
    subtransactions = rng.choice([0, 0, 0, 3, 80])
    with connection.transaction():
        for step in range(max(1, subtransactions)):
            one, other = rng.randrange(1, ACCOUNTS + 1), rng.randrange(1, ACCOUNTS + 1)
            amount = rng.randrange(1, 100)
            if subtransactions:
                connection.execute("SAVEPOINT s")
            for account, delta in sorted(((one, -amount), (other, amount))):
                connection.execute("UPDATE accounts SET balance = balance + %s WHERE id = %s", (delta, account))
            if subtransactions and rng.random() < 0.3:
                connection.execute("ROLLBACK TO SAVEPOINT s")


def branch(connection, rng):
    """A branch and its history; row locks that others share."""
    number, delta = rng.randrange(BRANCHES), rng.randrange(-50, 50)
    with connection.transaction():
        connection.execute("SELECT FROM branches WHERE id = %s FOR KEY SHARE", (number,))
        connection.execute("INSERT INTO history VALUES (%s, %s)", (number, delta))
        connection.execute("UPDATE branches SET balance = balance + %s WHERE id = %s", (delta, number))


def document(connection, rng):
    """A long text changes, out of line."""
    body = f"{rng.random()}" * rng.randrange(100, 800)
    connection.execute("UPDATE documents SET body = %(body)s, sum = md5(%(body)s) WHERE id = %(id)s",
                       dict(body=body, id=rng.randrange(1, DOCUMENTS + 1)))


def bulk(connection, rng):
    """Many rows come by COPY and go; now and then a file goes with them."""
    with connection.cursor() as cursor:
        with cursor.copy("COPY queue (v) FROM STDIN") as copy:
            for _ in range(rng.randrange(50, 800)):
                copy.write_row([f"{rng.random()}"])
    chosen = rng.random()
    if chosen < 0.1:
        connection.execute("DELETE FROM queue")
        connection.execute("VACUUM (TRUNCATE on) queue")
    elif chosen < 0.6:
        connection.execute("DELETE FROM queue WHERE id %% %s = 0", (rng.randrange(2, 5),))
    elif chosen < 0.7:
        connection.execute("TRUNCATE queue")
    elif chosen < 0.8:
        connection.execute("CREATE TABLE IF NOT EXISTS passing AS SELECT * FROM queue")
        connection.execute("DROP TABLE passing")
    elif chosen < 0.9:
        connection.execute("REINDEX TABLE queue")


def prepared(connection, rng):
    """Two phases, and either end."""
    name = f"p{rng.randrange(1 << 60)}"
    account = rng.randrange(1, ACCOUNTS + 1)
    connection.execute("BEGIN")
    connection.execute("UPDATE accounts SET balance = balance + 7 WHERE id = %s", (account,))
    connection.execute("UPDATE accounts SET balance = balance - 7 WHERE id = %s", (account,))
    connection.execute(f"PREPARE TRANSACTION '{name}'")
    connection.execute(f"{rng.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{name}'")


def vacuum(connection, rng):
    """Dead rows go, the visibility map is set, rows are frozen, checkpoints bring images."""
    table = rng.choice(["accounts", "history", "documents", "queue", "branches"])
    connection.execute(f"VACUUM ({rng.choice(['FREEZE, ', '', ''])}TRUNCATE {rng.choice(['on', 'off'])}) {table}")
    if rng.random() < 0.2:
        connection.execute("CHECKPOINT")
    time.sleep(0.1)


def database(connection, rng):
    """A database comes and goes, with all its files."""
    connection.execute("DROP DATABASE IF EXISTS passing")
    connection.execute(f"CREATE DATABASE passing STRATEGY {rng.choice(['wal_log', 'wal_log', 'file_copy'])}")
    time.sleep(rng.uniform(0, 1))


WRITERS = {"transfer": transfer, "transfer 2": transfer, "branch": branch, "branch 2": branch, "document": document, "bulk": bulk,
           "prepared": prepared, "vacuum": vacuum, "database": database}


class Backlog:
    """Writers that wait while the standby has too much to replay: it would fill the disk."""

    def __init__(self, most):
        self.most, self.is_short = most, threading.Event()
        self.is_short.set()

    def look(self, connection, _rng):
        """Work for a thread of its own, on the primary."""
        behind = connection.execute("SELECT max(pg_current_wal_lsn() - replay_lsn) FROM pg_stat_replication").fetchone()[0]
        if behind is None or behind < self.most:
            self.is_short.set()
        else:
            self.is_short.clear()
        time.sleep(0.5)

    def bounded(self, writes):
        """The same work, while there is not too much."""
        def run(connection, rng):
            if self.is_short.wait(0.5):
                writes(connection, rng)
        return run


def write(crowd, server, around=lambda writes: writes):
    """All kinds of writers join the crowd; what each does is handed to `around` first."""
    for name, writes in WRITERS.items():
        crowd.add(name, server, around(writes), synchronous_commit="off")


def in_a_snapshot(connection, way, query, expected):
    """One query."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute(WAYS[way])
        found = connection.execute(query).fetchone()[0]
    assert found == expected, f"{way}: {query}: {found}, not {expected}"


def look(connection, rng):
    """One of the invariants, one of the ways."""
    query, expected = rng.choice([(MONEY, ACCOUNTS * START), (BY_INDEX, ACCOUNTS * START), (BY_BRANCH, ACCOUNTS * START), (ENTRIES, ACCOUNTS), (BRANCH, 0),
                                  (DOCUMENT, 0), (QUEUE, 0), (BY_TAG, ACCOUNTS * START), (BY_PLACE, ACCOUNTS * START), (BY_NAME, ACCOUNTS * START),
                                  (BY_CODE, CODES), (QUEUE_BY_KEY, 0)])
    in_a_snapshot(connection, rng.choice(list(WAYS)), query, expected)


def stay(connection, rng):
    """The same snapshot for a while sees the same."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        rows = "SELECT count(*), coalesce(sum(hashtext(q::text)), 0) FROM queue q"
        first = connection.execute(rows).fetchone()
        for _ in range(5):
            time.sleep(rng.random() * 0.3)
            money, now = connection.execute(MONEY).fetchone()[0], connection.execute(rows).fetchone()
            assert money == ACCOUNTS * START and now == first, f"a snapshot that was held: {money} in all; {now}, before that {first}"


def visit(server):
    """Work for a thread that is in the database that goes, if there is one."""
    def run(_connection, rng):
        time.sleep(rng.uniform(0, 0.1))
        try:
            with psycopg.connect(server.dsn("passing"), autocommit=True) as guest:
                guest.execute("SELECT count(*) FROM pg_class")
                time.sleep(rng.uniform(0, 0.5))
                guest.execute("SELECT count(*) FROM pg_attribute")
        except psycopg.OperationalError:
            # It is gone, or not there yet.  A server that died, others notice.
            pass
    return run


def hold_back(server):
    """Work for a thread that pauses replay for a moment, so that there is a backlog."""
    def run(_connection, rng):
        server.psql("SELECT pg_wal_replay_pause()")
        time.sleep(rng.uniform(0.05, 0.4))
        server.psql("SELECT pg_wal_replay_resume()")
        time.sleep(rng.uniform(0.05, 0.4))
    return run
