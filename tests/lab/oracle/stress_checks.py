"""What must hold after a round of the stress: no byte differs from stock's replay, and PostgreSQL goes on with ours."""

from dataclasses import replace

from tests.lab import install
from tests.lab.loads import load, stress_load
from tests.lab.loads.stress_tables import TABLES, fill
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, run
from tests.lab.walrider import DIFFERENT, DONE, walrider

# What each access method's load is for; a session of rounds that lacks one has not tested it.
REQUIRED = {
    "heap": ("Heap/HOT_UPDATE", "Heap/LOCK", "Heap2/MULTI_INSERT", "Heap2/PRUNE_ON_ACCESS", "Heap2/PRUNE_VACUUM_SCAN",
             "Heap2/PRUNE_VACUUM_CLEANUP", "Heap2/LOCK_UPDATED", "MultiXact/CREATE_ID", "Transaction/PREPARE",
             "Transaction/COMMIT_PREPARED", "Transaction/ABORT_PREPARED", "Storage/TRUNCATE", "Sequence/LOG"),
    "btree": ("Btree/SPLIT_L", "Btree/SPLIT_R", "Btree/INSERT_POST", "Btree/DEDUP", "Btree/DELETE", "Btree/VACUUM",
              "Btree/MARK_PAGE_HALFDEAD", "Btree/UNLINK_PAGE", "Btree/REUSE_PAGE"),
    "hash": ("Hash/INSERT", "Hash/ADD_OVFL_PAGE", "Hash/SPLIT_ALLOCATE_PAGE", "Hash/SPLIT_PAGE", "Hash/SPLIT_COMPLETE",
             "Hash/SPLIT_CLEANUP", "Hash/SQUEEZE_PAGE", "Hash/MOVE_PAGE_CONTENTS", "Hash/DELETE", "Hash/VACUUM_ONE_PAGE"),
    "gin": ("Gin/INSERT", "Gin/SPLIT", "Gin/VACUUM_PAGE", "Gin/VACUUM_DATA_LEAF_PAGE", "Gin/DELETE_PAGE",
            "Gin/CREATE_PTREE", "Gin/INSERT_LISTPAGE", "Gin/DELETE_LISTPAGE", "Gin/UPDATE_META_PAGE"),
    "gist": ("Gist/PAGE_UPDATE", "Gist/PAGE_SPLIT", "Gist/PAGE_DELETE", "Gist/DELETE", "Gist/PAGE_REUSE"),
    "spgist": ("SPGist/ADD_LEAF", "SPGist/MOVE_LEAFS", "SPGist/ADD_NODE", "SPGist/SPLIT_TUPLE", "SPGist/PICKSPLIT",
               "SPGist/VACUUM_LEAF", "SPGist/VACUUM_ROOT", "SPGist/VACUUM_REDIRECT"),
    "brin": ("BRIN/CREATE_INDEX", "BRIN/INSERT", "BRIN/UPDATE", "BRIN/SAMEPAGE_UPDATE", "BRIN/REVMAP_EXTEND",
             "BRIN/DESUMMARIZE"),
    "bloom": ("Generic/Generic",),
}
INDEXES_OFF = "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off;"


def expected(methods):
    """The record types that the load must make."""
    return {name for method in methods for name in REQUIRED[method]}


def chosen_tables(methods):
    """The tables of these access methods; of the one that has all of them, the indexes that are wanted."""
    found = []
    for table in TABLES:
        if not table.method or table.method in methods:
            found.append(replace(table, indexes=tuple(index for index in table.indexes
                                                      if index.method in methods or index.method == "btree")))
    return tuple(found)


def methods_of(tables):
    """The access methods that these tables' indexes have."""
    return sorted({"heap"} | {index.method for table in tables for index in table.indexes})


def compare_strictly(ours, stock, info):
    """Without masks: only the free space map may differ, and only where PostgreSQL itself leaves it to luck."""
    result = walrider("compare", ours, stock, "--strict")
    settings = info["options"]["settings"]
    lucky = {"fsm-hint"} if info["options"]["checksums"] or settings["wal_log_hints"] == "on" else set()
    counted = {name for name, count in result.json["classes"].items() if count}
    # `first` has some of them only.
    if result.json["differences"] > sum(result.json["classes"].get(name, 0) for name in lucky) or "masked" in counted:
        raise AssertionError(f"compare --strict: {result.json['classes']}\n{result.json['first'][:10]}")


def compare_interrupted(ours, stock):
    """After a recovery that was killed and begun again, on WAL without images: all but what such a recovery loses.

    It meets pages from its own future, and what depends on whether a page needed redo is then not done again: free space
    is not noted; and on 17, which clears bits of the visibility map whatever that page's LSN, but sets them only on a page
    that is older, bits stay cleared.  PostgreSQL's own recovery, killed in the same way, loses the same, which is safe.
    """
    lost = ("_fsm", "_vm") if install.major() == "17" else ("_fsm",)
    result = walrider("compare", ours, stock, "--first", "1000000")
    bad = [entry for entry in result.json["first"]
           if entry["class"] != "page" or not entry["file"].split(".")[0].endswith(lost)]
    assert result.code in (DONE, DIFFERENT) and bad == [] and len(result.json["first"]) == result.json["differences"], bad[:10]
    return result.json["pages"]


def take_over(data_dir, archive):
    """Stock PostgreSQL, started on a replayed directory and promoted at the end of WAL."""
    server = PgCluster(data_dir)
    server.configure(recovery.restore_settings(archive) + "\narchive_mode = off", "postgresql.auto.conf")
    (data_dir / "recovery.signal").touch()
    recovery.recover_and_promote(server, wal_consistency_checking="", shared_buffers="128MB",
                                 max_prepared_transactions="60")
    return server


def hand_over(data_dir, archive, info, rng):
    """Contents, prepared transactions, indexes, maps and checksums; returns how many queries were compared."""
    if info["options"]["checksums"]:
        run([install.program("pg_checksums"), "--check", "-D", data_dir])
    with take_over(data_dir, archive) as server:
        found = load.contents(server)
        differing = [(database, name) for database, tables in info["expected"].items() for name in tables
                     if found[database].get(name) != tables[name]]
        assert found == info["expected"], f"contents differ: {differing}"
        open_now = sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts"))
        assert open_now == info["left_open"]
        stress_load.resolve_all(server)
        compared = sum(check_indexes(server, database, info, rng) for database in ("postgres", "other"))
        run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--parent-check", "--no-dependent-toast",
             "--install-missing"], env=server.environment())
        for database in ("postgres", "other"):
            check_maps(server, database)
        server.psql("VACUUM; CHECKPOINT")
    return compared


def check_maps(server, database):
    """The visibility map claims nothing that is not so; GIN trees are in order, where amcheck can tell."""
    for function in ("pg_check_visible", "pg_check_frozen"):
        bad = server.psql(f"SELECT c.oid::regclass, x.* FROM pg_class c, {function}(c.oid) x "
                          "WHERE c.relkind IN ('r', 'm', 't') AND c.relpersistence = 'p'", database)
        assert bad == [], f"{database}: {function}: {bad[:10]}"
    if server.psql("SELECT 1 FROM pg_proc WHERE proname = 'gin_index_check'", database):
        server.psql("SELECT gin_index_check(c.oid) FROM pg_class c JOIN pg_am a ON a.oid = c.relam "
                    "JOIN pg_index i ON i.indexrelid = c.oid WHERE a.amname = 'gin' AND i.indisvalid "
                    "AND c.relkind = 'i' AND c.relpersistence = 'p'", database)


def check_indexes(server, database, info, rng):
    """Every condition answered by its index alone and by reading the table; the same rows must come."""
    script, expected = "", []
    for table in chosen_tables(info["methods"]):
        if table.persistence or table.name not in info["tables"]:
            continue
        for index in table.indexes:
            for condition in index.conditions:
                where = fill(condition, n=rng.randrange(10**6))
                query = f"SELECT count(*), md5(string_agg(ctid::text, ',' ORDER BY ctid)) FROM {table.name} WHERE {where}"
                script += f"""BEGIN;
                    UPDATE pg_index SET indisvalid = false
                    WHERE indrelid = '{table.name}'::regclass AND indexrelid <> '{index.name}'::regclass;
                    SET LOCAL enable_seqscan = off; SET LOCAL max_parallel_workers_per_gather = 0;
                    \\echo @plan
                    EXPLAIN (COSTS OFF) {query};
                    \\echo @index
                    {query};
                    ROLLBACK; BEGIN; {INDEXES_OFF.replace('SET ', 'SET LOCAL ')}
                    \\echo @table
                    {query};
                    ROLLBACK;
                    \\echo @end
                    """
                expected.append((index.name, where))
    rows = [row[0] if len(row) == 1 else tuple(row) for row in server.psql(script, database)]
    answers = split_at(rows, "@plan")
    assert len(answers) == len(expected)
    for (name, where), lines in zip(expected, answers):
        plan, by_index, by_table = lines[:lines.index("@index")], lines[lines.index("@index") + 1], \
            lines[lines.index("@table") + 1]
        assert any(str(line).rstrip().endswith(f" {name}") or f" {name} on " in str(line) for line in plan), \
            f"{name} is not used for {where}: {plan}"
        assert by_index == by_table, f"{database}: {name}: {where}: by index {by_index}, by table {by_table}"
    return len(expected)


def split_at(rows, mark):
    """The rows between marks."""
    parts = []
    for row in rows:
        if row == mark:
            parts.append([])
        elif parts:
            parts[-1].append(row)
    return parts
