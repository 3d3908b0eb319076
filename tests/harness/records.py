"""Every record type of the resource managers that Walrider replays, as pg_waldump names them.

Read off the *_identify functions in PostgreSQL 18.6, src/backend/access/rmgrdesc/.
"""

ALL = {
    "XLOG": ["CHECKPOINT_SHUTDOWN", "CHECKPOINT_ONLINE", "NOOP", "NEXTOID", "SWITCH", "BACKUP_END",
             "PARAMETER_CHANGE", "RESTORE_POINT", "FPW_CHANGE", "END_OF_RECOVERY", "OVERWRITE_CONTRECORD",
             "FPI", "FPI_FOR_HINT", "CHECKPOINT_REDO"],
    "Transaction": ["COMMIT", "PREPARE", "ABORT", "COMMIT_PREPARED", "ABORT_PREPARED", "ASSIGNMENT",
                    "INVALIDATION"],
    "Storage": ["CREATE", "TRUNCATE"],
    "CLOG": ["ZEROPAGE", "TRUNCATE"],
    "Database": ["CREATE_FILE_COPY", "CREATE_WAL_LOG", "DROP"],
    "Tablespace": ["CREATE", "DROP"],
    "MultiXact": ["ZERO_OFF_PAGE", "ZERO_MEM_PAGE", "CREATE_ID", "TRUNCATE_ID"],
    "RelMap": ["UPDATE"],
    "Standby": ["LOCK", "RUNNING_XACTS", "INVALIDATIONS"],
    "Heap2": ["REWRITE", "PRUNE_ON_ACCESS", "PRUNE_VACUUM_SCAN", "PRUNE_VACUUM_CLEANUP", "VISIBLE",
              "MULTI_INSERT", "MULTI_INSERT+INIT", "LOCK_UPDATED", "NEW_CID"],
    "Heap": ["INSERT", "INSERT+INIT", "DELETE", "UPDATE", "UPDATE+INIT", "HOT_UPDATE", "HOT_UPDATE+INIT",
             "TRUNCATE", "HEAP_CONFIRM", "LOCK", "INPLACE"],
    "Btree": ["INSERT_LEAF", "INSERT_UPPER", "INSERT_META", "SPLIT_L", "SPLIT_R", "INSERT_POST", "DEDUP",
              "DELETE", "UNLINK_PAGE", "UNLINK_PAGE_META", "NEWROOT", "MARK_PAGE_HALFDEAD", "VACUUM",
              "REUSE_PAGE", "META_CLEANUP"],
    "Sequence": ["LOG"],
    "CommitTs": ["ZEROPAGE", "TRUNCATE"],
    "ReplicationOrigin": ["SET", "DROP"],
    "LogicalMessage": ["MESSAGE"],
}

IMPOSSIBLE = {
    ("XLOG", "NOOP"):
        "no caller writes it: XLOG_NOOP appears only in xlog_redo (xlog.c), decode.c and xlogdesc.c",
    ("Heap", "HOT_UPDATE+INIT"):
        "log_heap_update (heapam.c) sets the init bit only where the new tuple is alone on its page; "
        "a HOT update leaves the old tuple on the same page",
}


def expected():
    """The (resource manager, type) pairs that the mixed load must make."""
    return {(rmgr, kind) for rmgr, kinds in ALL.items() for kind in kinds} - set(IMPOSSIBLE)


def missing(types):
    """Which expected pairs a `wal stats --json` list of types lacks."""
    return sorted(expected() - {(entry["rmgr"], entry["type"]) for entry in types if entry["count"] > 0})


def foreign(types):
    """Which resource managers outside of this table a list of types has."""
    return sorted({entry["rmgr"] for entry in types} - set(ALL))


def waldump_types(text):
    """`pg_waldump --stats=record` as the list that `wal stats --json` gives under "types"."""
    types = []
    for line in text.splitlines():
        words = line.replace("(", " ").replace(")", " ").split()
        if len(words) >= 9 and "/" in words[0]:
            name, kind = words[0].split("/", 1)
            types.append({"rmgr": name, "type": kind, "count": int(words[1]), "record_bytes": int(words[3]),
                          "fpi_bytes": int(words[5]), "total_bytes": int(words[7])})
    return types
