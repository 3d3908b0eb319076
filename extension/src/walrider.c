/*-------------------------------------------------------------------------
 *
 * walrider.c
 *	  The module: settings, shared memory, and what a commit does for
 *	  senders that sleep.
 *
 * Shared memory holds one EarlySender per walsender.  With
 * shared_preload_libraries = 'walrider' it is made at server start, and every
 * commit wakes the senders that sleep; without, the first sender makes it out
 * of what the server reserves for such cases, and a sender that sleeps hears
 * of a commit when it is flushed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "access/xlog.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "tcop/utility.h"
#include "utils/guc.h"

#include "walrider.h"

#if PG_VERSION_NUM < 170000 || PG_VERSION_NUM >= 190000
#error "walrider supports PostgreSQL 17 and 18"
#endif

#if PG_VERSION_NUM >= 180000
PG_MODULE_MAGIC_EXT(.name = "walrider", .version = "0.2");
#else
PG_MODULE_MAGIC;
#endif

bool		walrider_early = true;
int			walrider_max_ahead = 16 * 1024;
int			walrider_poll_interval = 500;
int			walrider_poll_duration = 5;

EarlyShared *Early = NULL;
EarlySender *MyEarlySender = NULL;
bool		commitsTell = false;

#define NUM_COUNTERS (sizeof(StreamCounters) / sizeof(pg_atomic_uint64))

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;
static ProcessUtility_hook_type prev_ProcessUtility = NULL;

static Size
EarlySharedSize(void)
{
	return add_size(offsetof(EarlyShared, senders),
					mul_size(max_wal_senders, sizeof(EarlySender)));
}

/* Find our shared memory, making it if nobody has yet. */
void
AttachEarlySenders(void)
{
	EarlyShared *shared;
	bool		found;

	if (Early != NULL)
		return;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("walrider early streams", EarlySharedSize(), &found);
	if (!found)
	{
		pg_atomic_init_u64(&shared->commits, 0);
		for (int i = 0; i < max_wal_senders; i++)
		{
			EarlySender *sender = &shared->senders[i];
			pg_atomic_uint64 *counters = (pg_atomic_uint64 *) &sender->counters;

			pg_atomic_init_u32(&sender->pid, 0);
			pg_atomic_init_u32(&sender->sleeping, 0);
			sender->procno = INVALID_PROC_NUMBER;
			for (int c = 0; c < NUM_COUNTERS; c++)
				pg_atomic_init_u64(&counters[c], 0);
		}
	}
	LWLockRelease(AddinShmemInitLock);
	Early = shared;
}

static void
ReleaseEarlySender(int code, Datum arg)
{
	pg_atomic_write_u32(&MyEarlySender->sleeping, 0);
	pg_atomic_write_u32(&MyEarlySender->pid, 0);
	MyEarlySender = NULL;
}

/* Take the EarlySender of this walsender. */
void
ClaimEarlySender(void)
{
	pg_atomic_uint64 *counters;

	AttachEarlySenders();
	MyEarlySender = &Early->senders[MyWalSnd - WalSndCtl->walsnds];

	counters = (pg_atomic_uint64 *) &MyEarlySender->counters;
	for (int c = 0; c < NUM_COUNTERS; c++)
		pg_atomic_write_u64(&counters[c], 0);
	MyEarlySender->procno = MyProcNumber;
	pg_atomic_write_u32(&MyEarlySender->sleeping, 0);
	pg_atomic_write_membarrier_u32(&MyEarlySender->pid, MyProcPid);
	before_shmem_exit(ReleaseEarlySender, 0);
}

/*
 * In every backend, when it is about to commit: its record will be in the
 * buffers in a moment, and a sender that sleeps has to be up by then.  A sender
 * that is awake sees the count, so this costs a busy system little.
 */
static void
TellSenders(void)
{
	if (Early == NULL)
		return;

	/* A full barrier: a sender that goes to sleep now sees it, or we see its flag. */
	pg_atomic_fetch_add_u64(&Early->commits, 1);

	for (int i = 0; i < max_wal_senders; i++)
	{
		EarlySender *sender = &Early->senders[i];

		if (pg_atomic_read_u32(&sender->sleeping) != 0 &&
			pg_atomic_exchange_u32(&sender->sleeping, 0) != 0)
			SetLatch(&GetPGProcByNumber(sender->procno)->procLatch);
	}
}

static void
walrider_xact_callback(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_PRE_COMMIT && event != XACT_EVENT_PRE_PREPARE)
		return;

	/* Only what is flushed at once is worth it: see RecordTransactionCommit. */
	if (XactLastRecEnd != InvalidXLogRecPtr &&
		synchronous_commit != SYNCHRONOUS_COMMIT_OFF &&
		TransactionIdIsValid(GetTopTransactionIdIfAny()))
		TellSenders();
}

/* What ends a prepared transaction has no callback. */
static void
walrider_ProcessUtility(PlannedStmt *pstmt, const char *queryString, bool readOnlyTree,
						ProcessUtilityContext context, ParamListInfo params,
						QueryEnvironment *queryEnv, DestReceiver *dest, QueryCompletion *qc)
{
	if (IsA(pstmt->utilityStmt, TransactionStmt))
	{
		TransactionStmtKind kind = ((TransactionStmt *) pstmt->utilityStmt)->kind;

		if (kind == TRANS_STMT_COMMIT_PREPARED || kind == TRANS_STMT_ROLLBACK_PREPARED)
			TellSenders();
	}

	(prev_ProcessUtility ? prev_ProcessUtility : standard_ProcessUtility)
		(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest, qc);
}

static void
walrider_shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(EarlySharedSize());
#ifdef WALRIDER_EARLY_REDO
	RequestRedoShared();
#endif
}

static void
walrider_shmem_startup(void)
{
	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	/* After a crash the postmaster makes shared memory again. */
	Early = NULL;
	AttachEarlySenders();
#ifdef WALRIDER_EARLY_REDO
	AttachRedoShared();
#endif
}

void
_PG_init(void)
{
	DefineCustomBoolVariable("walrider.early",
							 "Sends WAL to the standby before it is flushed.",
							 "If off, a stream sends flushed WAL only.",
							 &walrider_early,
							 true,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);
	DefineCustomIntVariable("walrider.max_ahead",
							"Sets how far past the flush position WAL is sent.",
							"The standby holds that much in memory.",
							&walrider_max_ahead,
							16 * 1024, 128, 1024 * 1024,
							PGC_USERSET, GUC_UNIT_KB,
							NULL, NULL, NULL);
	DefineCustomIntVariable("walrider.poll_interval",
							"Sets the time, in microseconds, between two looks for new WAL while there is some.",
							NULL,
							&walrider_poll_interval,
							500, 10, 10000,
							PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("walrider.poll_duration",
							"Sets how long a sender looks for new WAL after it saw some, before it sleeps.",
							NULL,
							&walrider_poll_duration,
							5, 0, 1000,
							PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
#ifdef WALRIDER_EARLY_REDO
	InitRedo();
#endif
	MarkGUCPrefixReserved("walrider");

	if (process_shared_preload_libraries_in_progress)
	{
		prev_shmem_request_hook = shmem_request_hook;
		shmem_request_hook = walrider_shmem_request;
		prev_shmem_startup_hook = shmem_startup_hook;
		shmem_startup_hook = walrider_shmem_startup;
		RegisterXactCallback(walrider_xact_callback, NULL);
		prev_ProcessUtility = ProcessUtility_hook;
		ProcessUtility_hook = walrider_ProcessUtility;
		commitsTell = true;
	}
}
