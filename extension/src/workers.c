/*-------------------------------------------------------------------------
 *
 * workers.c
 *	  Early redo by several processes: a slice's pages are claimed in chunks.
 *
 * The startup process, the leader, gives a slice out and goes on to walk the
 * one before, or to plan the one behind.  Workers claim chunks of its pages
 * meanwhile: first those of heaps and maps, and when all of these are done,
 * those of indexes.  When the leader needs the slice, it claims chunks, too,
 * until there are none, and waits for the last ones of the others.
 *
 * Stage, number of chunks and the next chunk are in one atomic word, so that
 * a claim is of the stage that it says, however long the claimer slept before.
 * What else describes a stage is written before that word, and stays as it is
 * until the last claimed chunk is done.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <dlfcn.h>

#include "access/xlog.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "portability/instr_time.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#if PG_VERSION_NUM >= 180000
#include "storage/aio_subsys.h"
#endif
#include "storage/bufmgr.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/s_lock.h"
#include "storage/shmem.h"
#include "storage/smgr.h"
#include "tcop/tcopprot.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/wait_event.h"

#include "redo.h"

/* Pages that are claimed together: for the last ones of a stage everybody waits. */
#define CHUNK 8

/* So often a process that finds nothing to claim looks again before it sleeps. */
#define SPINS 2000

#define CLAIM_BITS 20
#define CLAIM_MASK ((1 << CLAIM_BITS) - 1)
#define NEXT_OF(claim) ((uint32) (claim) & CLAIM_MASK)
#define CHUNKS_OF(claim) ((uint32) ((claim) >> CLAIM_BITS) & CLAIM_MASK)
#define STAGE_OF(claim) ((claim) >> (2 * CLAIM_BITS))

typedef struct RedoWork
{
	pg_atomic_uint64 claim;		/* stage, chunks, the next chunk */
	pg_atomic_uint32 ndone;		/* chunks of this stage */
	pg_atomic_uint32 busy;		/* the slice is not done yet */
	pg_atomic_uint32 nworkers;	/* that are there */
	Slice	   *slice;
	bool		indexes;		/* the stage is that of index pages */
	uint32		nends;			/* records so far that may have removed files */
	ConditionVariable given_out;
	ConditionVariable done;
} RedoWork;

int			walrider_redo_workers = -1;

static RedoWork *Work = NULL;
static char *decode_buffer = NULL;
static Slice *slices = NULL;
static bool is_worker = false;

PGDLLEXPORT void walrider_redo_worker_main(Datum arg);

/* What pg_stat_activity shows of a process that waits for the others. */
uint32
RedoWaitEvent(void)
{
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("WalriderRedo");
	return event;
}

/* How many are wanted: all cores but the leader's. */
int
WantedWorkers(void)
{
	static int	wanted = -1;

	if (!early_redo_at_start)
		return 0;
	if (walrider_redo_workers >= 0)
		return walrider_redo_workers;
	if (wanted < 0)
		wanted = Min(Max((int) sysconf(_SC_NPROCESSORS_ONLN) - 1, 0), DEFAULT_REDO_WORKERS);
	return wanted;
}

/* With workers, what they look at is in shared memory: slices, and the reader's decoded records. */
Size
WorkersSharedSize(void)
{
	return MAXALIGN(sizeof(RedoWork)) +
		(WantedWorkers() > 0 ? NUM_SLICES * MAXALIGN(sizeof(Slice)) + DECODED_SIZE(MAX_RAISE_BY) : 0);
}

void
AttachWorkersShared(void)
{
	bool		found;
	char	   *shared = ShmemInitStruct("walrider redo workers", WorkersSharedSize(), &found);

	Work = (RedoWork *) shared;
	if (WantedWorkers() > 0)
	{
		slices = (Slice *) (shared + MAXALIGN(sizeof(RedoWork)));
		decode_buffer = shared + MAXALIGN(sizeof(RedoWork)) + NUM_SLICES * MAXALIGN(sizeof(Slice));
	}
	if (found)
		return;
	memset(Work, 0, sizeof(RedoWork));
	pg_atomic_init_u64(&Work->claim, 0);
	pg_atomic_init_u32(&Work->ndone, 0);
	pg_atomic_init_u32(&Work->busy, 0);
	pg_atomic_init_u32(&Work->nworkers, 0);
	ConditionVariableInit(&Work->given_out);
	ConditionVariableInit(&Work->done);
	for (int i = 0; slices != NULL && i < NUM_SLICES; i++)
		memset(&slices[i], 0, sizeof(Slice));
}

Slice *
SharedSlice(int number)
{
	return slices == NULL ? NULL : &slices[number];
}

int
RunningWorkers(void)
{
	return pg_atomic_read_u32(&Work->nworkers);
}

/*
 * Have records decoded to where workers see them, if there are any, in so many
 * bytes, which may become more once the next record is replayed.  At first the
 * queue is empty but for the one that is being replayed.  That one stays where
 * it is for its caller, and becomes one of its own for the queue, which would
 * not find it in the buffer.
 */
void
GiveDecodedRoom(XLogReaderState *reader, Size size)
{
	static char *previous = NULL;
	static XLogRecPtr caller = InvalidXLogRecPtr;

	/* The main loop looks at its record once more behind its redo, also where this is called twice in that. */
	if (previous != NULL && reader->record->lsn != caller)
	{
		pfree(previous);
		previous = NULL;
	}
	if (BROKEN(18))
		return;
	/* Memory that is not touched costs nothing. */
	if (decode_buffer == NULL)
		decode_buffer = MemoryContextAllocHuge(TopMemoryContext, DECODED_SIZE(MAX_RAISE_BY));
	if (reader->decode_buffer == decode_buffer)
	{
		/* Never less: records may be anywhere in it. */
		reader->decode_buffer_size = Max(reader->decode_buffer_size, size);
		return;
	}

	if (!reader->record->oversized)
	{
		DecodedXLogRecord *from = reader->record;
		DecodedXLogRecord *copy = MemoryContextAlloc(TopMemoryContext, from->size);
		ptrdiff_t	by = (char *) copy - (char *) from;

		memcpy(copy, from, from->size);
		copy->oversized = true;
		if (copy->main_data != NULL)
			copy->main_data += by;
		for (int id = 0; id <= copy->max_block_id; id++)
		{
			DecodedBkpBlock *block = &copy->blocks[id];

			if (block->in_use && block->has_image)
				block->bkp_image += by;
			if (block->in_use && block->has_data)
				block->data += by;
		}
		reader->record = reader->decode_queue_head = reader->decode_queue_tail = copy;
	}
	if (reader->free_decode_buffer)
	{
		previous = reader->decode_buffer;
		caller = reader->record->lsn;
	}
	reader->decode_buffer = reader->decode_buffer_head = reader->decode_buffer_tail = decode_buffer;
	reader->decode_buffer_size = size;
	reader->free_decode_buffer = false;
}

/* Behind a record that may have removed files: workers close those that they have open. */
void
CloseWorkersFiles(void)
{
	Work->nends++;
}

static void
BeginStage(bool indexes)
{
	uint64		stage = STAGE_OF(pg_atomic_read_u64(&Work->claim)) + 1;
	uint64		chunks = (Work->slice->npages + CHUNK - 1) / CHUNK;

	Work->indexes = indexes;
	pg_atomic_write_u32(&Work->ndone, 0);
	pg_atomic_write_membarrier_u64(&Work->claim, stage << (2 * CLAIM_BITS) | chunks << CLAIM_BITS);
	if (pg_atomic_read_u32(&Work->nworkers) > 0)
		ConditionVariableBroadcast(&Work->given_out);
}

void
GiveOut(Slice *slice)
{
	Assert(pg_atomic_read_u32(&Work->busy) == 0);
	Work->slice = slice;
	pg_atomic_write_u32(&Work->busy, 1);
	/* Heap pages and maps before the index entries that point to them. */
	BeginStage(BROKEN(9));
}

/*
 * A page cannot be read, say.  Its changes are left for the walk: the leader
 * meets the same trouble, and reports it as the server does.
 */
static void
ForgetError(void)
{
	HOLD_INTERRUPTS();
	EmitErrorReport();
	FlushErrorState();
	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	pgstat_report_wait_end();
#if PG_VERSION_NUM >= 180000
	pgaio_error_cleanup();
#endif
	UnlockBuffers();
	ReleaseAuxProcessResources(false);
	smgrdestroyall();
	RESUME_INTERRUPTS();
}

static void
VisitAsWorker(SliceIndex first, SliceIndex last)
{
	static uint32 nends = 0;
	MemoryContext context = CurrentMemoryContext;

	/* No slice is out while such a record is replayed. */
	if (nends != Work->nends && !BROKEN(17))
	{
		nends = Work->nends;
		smgrdestroyall();
	}
	PG_TRY();
	{
		VisitPages(Work->slice, first, last, Work->indexes);
	}
	PG_CATCH();
	{
		/* It is that of errors now. */
		MemoryContextSwitchTo(context);
		ForgetError();
		LeavePages(Work->slice, first, last);
	}
	PG_END_TRY();
}

/* Claim a chunk and do it.  Returns whether there was one. */
static bool
DoChunk(void)
{
	uint64		claim = pg_atomic_read_u64(&Work->claim);
	SliceIndex	first,
				last;

	if (NEXT_OF(claim) >= CHUNKS_OF(claim))
		return false;
	/* Workers get some, and are long at it. */
	if (BROKEN(16) && !is_worker)
		pg_usleep(1000);
	claim = pg_atomic_fetch_add_u64(&Work->claim, 1);
	if (NEXT_OF(claim) >= CHUNKS_OF(claim))
		return false;

	first = 1 + NEXT_OF(claim) * CHUNK;
	last = Min(first + CHUNK - 1, Work->slice->npages);
	if (is_worker && (BROKEN(15) || BROKEN(16)))
		pg_usleep(BROKEN(16) ? 100000 : 5000);
	if (BROKEN(16))
		CHECK_FOR_INTERRUPTS();
	if (is_worker)
		VisitAsWorker(first, last);
	else
		VisitPages(Work->slice, first, last, Work->indexes);

	if (pg_atomic_add_fetch_u32(&Work->ndone, 1) < CHUNKS_OF(claim))
		return true;

	/* The last one of its stage. */
	if (BROKEN(8) || BROKEN(9) || BROKEN(10))
		pg_usleep(20000);
	if (Work->indexes == BROKEN(9))
		BeginStage(!BROKEN(9));
	else
	{
		pg_atomic_write_membarrier_u32(&Work->busy, 0);
		ConditionVariableSignal(&Work->done);
	}
	return true;
}

/* Is there something to claim, or was there soon? */
static bool
SpinFor(bool (*happened) (void))
{
	for (int i = 0; i < SPINS; i++)
	{
		if (happened())
			return true;
		SPIN_DELAY();
	}
	return false;
}

static bool
IsToBeClaimed(void)
{
	uint64		claim = pg_atomic_read_u64(&Work->claim);

	return NEXT_OF(claim) < CHUNKS_OF(claim);
}

static bool
IsDoneOrToBeClaimed(void)
{
	return pg_atomic_read_u32(&Work->busy) == 0 || IsToBeClaimed();
}

/* The leader: do what is left of the slice that was given out, and wait for the others. */
void
FinishGivenOut(void)
{
	while (pg_atomic_read_u32(&Work->busy) != 0)
	{
		instr_time	begin,
					end;

		if (DoChunk())
			continue;
		if (BROKEN(15))
			break;
		INSTR_TIME_SET_CURRENT(begin);
		if (!SpinFor(IsDoneOrToBeClaimed))
		{
			/* Woken for the end; for a stage that begins it looks again. */
			ConditionVariablePrepareToSleep(&Work->done);
			if (!IsDoneOrToBeClaimed())
				(void) ConditionVariableTimedSleep(&Work->done, 1, RedoWaitEvent());
			ConditionVariableCancelSleep();
		}
		INSTR_TIME_SET_CURRENT(end);
		INSTR_TIME_SUBTRACT(end, begin);
		CountRedo(REDO_WAIT_TIME, INSTR_TIME_GET_MICROSEC(end));
	}
	pg_read_barrier();
}

static void
Leave(int code, Datum arg)
{
	pg_atomic_fetch_sub_u32(&Work->nworkers, 1);
}

/* A process of early redo's begins; its counters are in this row. */
void
BeginRedoProcess(int row)
{
	pqsignal(SIGTERM, BROKEN(16) ? die : SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();

	/* No database: it is for signals, barriers of other processes among them, and for pg_stat_activity. */
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	CountAs(row);
}

/*
 * Between ConditionVariablePrepareToSleep and ConditionVariableCancelSleep: a
 * second at most.  ConditionVariableTimedSleep would not end when the server is
 * to stop, which waits for this process.
 */
void
AwaitSignal(void)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 1000, RedoWaitEvent());
	ResetLatch(MyLatch);
}

void
walrider_redo_worker_main(Datum arg)
{
	BeginRedoProcess(1 + DatumGetInt32(arg));
	CreateAuxProcessResourceOwner();
	is_worker = true;
	pg_atomic_fetch_add_u32(&Work->nworkers, 1);
	before_shmem_exit(Leave, 0);

	/* Of a primary there is nothing to redo: go for good. */
	while (RecoveryInProgress())
	{
		/* Between chunks nobody waits for this process. */
		if (ShutdownRequestPending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();

		if (DoChunk() || SpinFor(IsToBeClaimed))
			continue;
		ConditionVariablePrepareToSleep(&Work->given_out);
		if (!IsToBeClaimed() && !ShutdownRequestPending)
			AwaitSignal();
		ConditionVariableCancelSleep();
	}
	proc_exit(0);
}

/* A process loads the library that the server has preloaded, by whichever path. */
static void
RegisterProcess(const char *function, const char *type, const char *name, int arg)
{
	BackgroundWorker worker = {0};
	Dl_info		library;

	if (dladdr((void *) walrider_redo_worker_main, &library) == 0)
		elog(ERROR, "walrider does not find its library");
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_ConsistentState;
	worker.bgw_restart_time = 5;
	strlcpy(worker.bgw_library_name, library.dli_fname, MAXPGPATH);
	strlcpy(worker.bgw_function_name, function, BGW_MAXLEN);
	strlcpy(worker.bgw_type, type, BGW_MAXLEN);
	strlcpy(worker.bgw_name, name, BGW_MAXLEN);
	worker.bgw_main_arg = Int32GetDatum(arg);
	RegisterBackgroundWorker(&worker);
}

void
RegisterRedoProcesses(void)
{
	RegisterProcess("walrider_raiser_main", "walrider raiser", "walrider raiser", 0);
	for (int i = 0; i < WantedWorkers(); i++)
		RegisterProcess("walrider_redo_worker_main", "walrider redo worker", psprintf("walrider redo worker %d", i + 1), i);
}
