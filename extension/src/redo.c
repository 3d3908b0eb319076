/*-------------------------------------------------------------------------
 *
 * redo.c
 *	  Early redo on a hot standby: the hook, the walk, settings, counters.
 *
 * Each resource manager's rm_redo is ours, which calls the server's.  Behind
 * a record that is not in a slice, a slice begins: it is planned, what may go
 * early is done, and what is done is taken out of the queue of decoded
 * records, so that the main loop never sees it.  What is left of the slice is
 * walked: the main loop calls for one record after the other.
 *
 * All of it is the startup process's.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/rmgr.h"
#include "access/transam.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xlogprefetcher.h"
#include "access/xlogrecovery.h"
#include "access/xlogutils.h"
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/tuplestore.h"

#include "redo.h"
#include "walrider.h"

/* Fewer records than this are not worth a slice. */
#define LEAST_SLICE 64

/* minRecoveryPoint is raised by about so much WAL at a time: each time costs an fsync. */
#define RAISE_BY (8 * 1024 * 1024)

/* What the decoded records of that much WAL need, and a slice beside it. */
#define DECODE_BUFFER "24MB"

/* So many pages ahead the memory of a page is asked for. */
#define FETCH_AHEAD 4
#ifdef __GNUC__
#define pg_prefetch_mem(a) __builtin_prefetch(a)
#else
#define pg_prefetch_mem(a) ((void) 0)
#endif

/* Only the startup process writes, anybody reads. */
typedef struct RedoShared
{
	pg_atomic_uint32 active;
	pg_atomic_uint64 counters[NUM_REDO_COUNTERS];
} RedoShared;

int			walrider_redo_slice = 4000;
static bool walrider_early_redo = false;
static int	walrider_redo_least_wal = 4096; /* kB */

static RedoShared *Redo = NULL;
static ControlFileData *ControlFile = NULL;
static void (*server_redo[RM_MAX_BUILTIN_ID + 1]) (XLogReaderState *record);

static Slice *slice = NULL;
static SliceIndex walking;		/* the record whose call comes next, 0: none */
static bool attached;			/* nobody else holds on to decoded records */
static XLogRecPtr raised;		/* minRecoveryPoint, as far as we know */
static XLogRecPtr looked;		/* to here there was too little for a slice */

PG_FUNCTION_INFO_V1(walrider_stat_get_redo);

void
CountRedo(RedoCounter counter, uint64 by)
{
	CountUp(&Redo->counters[counter], by);
}

/* Why there is no early redo now; NULL: there may be. */
static const char *
WhyNot(void)
{
	if (!walrider_early_redo)
		return "walrider.early_redo is off";
	if (!InArchiveRecovery)
		return "this is crash recovery";
	if (standbyState == STANDBY_DISABLED)
		return "hot_standby is off";
	if (recoveryTarget != RECOVERY_TARGET_UNSET)
		return "there is a recovery target";
	if (recovery_min_apply_delay > 0)
		return "recovery_min_apply_delay is set";
	/* The prefetcher holds on to a decoded record, which must not be taken out of the queue. */
	if (recovery_prefetch != RECOVERY_PREFETCH_OFF)
		return "recovery_prefetch is not off";
	return NULL;
}

/* Say once what changed. */
static void
SayWhether(const char *why_not)
{
	static const char *said = "";

	if (why_not == said)
		return;
	said = why_not;
	pg_atomic_write_u32(&Redo->active, why_not == NULL);
	if (why_not == NULL)
		ereport(LOG, (errmsg("walrider redoes pages early")));
	else if (walrider_early_redo)
		ereport(LOG, (errmsg("walrider redoes no pages early: %s", why_not)));
}

/*
 * A page on disk must not be past minRecoveryPoint.  XLogFlush raises it when
 * a page is written, but no further than what is replayed, so that it has to
 * be there before a page is ahead of that.  Nothing lowers it before recovery
 * ends, and it must not be past the end of WAL then: what is decoded will be
 * replayed, whatever happens.  Returns whether it is there: for little WAL it
 * is not worth an fsync.
 */
static bool
RaiseMinRecoveryPoint(XLogReaderState *reader)
{
	XLogRecPtr	needed = slice->records[slice->nrecords].decoded->next_lsn;
	XLogRecPtr	to;
	TimeLineID	tli;

	if (needed <= raised || BROKEN(4))
		return true;

	/* Decode further, to do it rarely. */
	while (reader->decode_queue_tail->next_lsn < needed + RAISE_BY &&
		   !MayChangeTimeline(reader->decode_queue_tail) && XLogReadAhead(reader, true) != NULL)
		;

	/* The last one may be the one that changes the timeline: up to its beginning this one counts. */
	to = Max(needed, reader->decode_queue_tail->lsn);
	if (to - reader->EndRecPtr < (uint64) walrider_redo_least_wal * 1024)
		return false;
	(void) GetCurrentReplayRecPtr(&tli);

	LWLockAcquire(ControlFileLock, LW_EXCLUSIVE);
	if (ControlFile->minRecoveryPoint < to)
	{
		ControlFile->minRecoveryPoint = to;
		ControlFile->minRecoveryPointTLI = tli;
		update_controlfile(DataDir, ControlFile, true);
		CountRedo(REDO_MIN_RECOVERY, 1);
	}
	raised = ControlFile->minRecoveryPoint;
	LWLockRelease(ControlFileLock);
	return true;
}

static bool
IsDone(const SliceRecord *record)
{
	for (SliceIndex i = 0; i < record->nchanges; i++)
		if (!slice->changes[record->change + i].done)
			return false;
	return record->nchanges > 0;
}

/*
 * Take what is done behind `from` out of the queue, up to what is not, which
 * the walk comes to next.  The last record stays: the end of WAL is taken from
 * it.  Releasing a record frees all up to the one that is next in the queue.
 */
static void
SkipDone(DecodedXLogRecord *from)
{
	SliceIndex	next = walking;

	while (next < slice->nrecords && IsDone(&slice->records[next]))
		next++;
	CountRedo(REDO_SKIPPED, next - walking);
	from->next = slice->records[next].decoded;
	walking = next;
}

/* When the startup process ends: the counters go with the shared memory. */
static void
SaySummary(int code, Datum arg)
{
	ereport(LOG,
			(errmsg("walrider redid " UINT64_FORMAT " of " UINT64_FORMAT " records early, in " UINT64_FORMAT " slices",
					pg_atomic_read_u64(&Redo->counters[REDO_EARLY]), pg_atomic_read_u64(&Redo->counters[REDO_RECORDS]),
					pg_atomic_read_u64(&Redo->counters[REDO_SLICES])),
			 errdetail_log("skipped " UINT64_FORMAT ", in place " UINT64_FORMAT ", partial " UINT64_FORMAT
						   ", horizon " UINT64_FORMAT ", cleanup lock " UINT64_FORMAT ", entry first " UINT64_FORMAT
						   ", refused " UINT64_FORMAT ", visits " UINT64_FORMAT ", barriers " UINT64_FORMAT
						   ", minRecoveryPoint " UINT64_FORMAT,
						   pg_atomic_read_u64(&Redo->counters[REDO_SKIPPED]),
						   pg_atomic_read_u64(&Redo->counters[REDO_IN_PLACE]),
						   pg_atomic_read_u64(&Redo->counters[REDO_PARTIAL]),
						   pg_atomic_read_u64(&Redo->counters[REDO_PRUNE_HORIZON]),
						   pg_atomic_read_u64(&Redo->counters[REDO_CLEANUP_LOCK]),
						   pg_atomic_read_u64(&Redo->counters[REDO_ENTRY_FIRST]),
						   pg_atomic_read_u64(&Redo->counters[REDO_REFUSED]),
						   pg_atomic_read_u64(&Redo->counters[REDO_VISITS]),
						   pg_atomic_read_u64(&Redo->counters[REDO_BARRIERS]),
						   pg_atomic_read_u64(&Redo->counters[REDO_MIN_RECOVERY]))));
}

static void
VisitPages(bool index)
{
	for (SliceIndex i = 1; i <= slice->npages; i++)
	{
		SlicePage  *page = &slice->pages[i];

		if (i + FETCH_AHEAD <= slice->npages)
		{
			SlicePage  *later = &slice->pages[i + FETCH_AHEAD];

			if (later->next != 0 && later->index == index && BufferIsValid(later->recent))
			{
				char	   *there = BufferGetPage(later->recent);

				pg_prefetch_mem(there);
				pg_prefetch_mem(there + 64);
				pg_prefetch_mem(slice->records[slice->changes[later->next].record].decoded);
			}
		}
		if (page->next != 0 && page->index == index)
			VisitPage(slice, page, 0);
	}
}

/*
 * The gain is that a page is looked up, pinned and locked once for several
 * records.  Where each has a page of its own, as in COPY, there is none: leave
 * it alone for a while, longer each time.
 */
static void
SeeWhetherItPays(void)
{
	static uint64 leave = 0;
	SliceIndex	touched = 0;

	for (SliceIndex i = 1; i <= slice->npages; i++)
		touched += slice->pages[i].first != 0;
	if (walrider_redo_least_wal == 0 || slice->nchanges >= touched + touched / 2)
		leave = 0;
	else
	{
		leave = leave == 0 ? RAISE_BY : Min(2 * leave, 16 * RAISE_BY);
		looked = slice->records[slice->nrecords].decoded->next_lsn + leave;
	}
}

static void
BeginSlice(XLogReaderState *reader)
{
	const char *why_not;

	/* Of a standby that is on its way there is nothing to say yet. */
	if (!reachedConsistency || (standbyState != STANDBY_DISABLED && standbyState != STANDBY_SNAPSHOT_READY))
		return;
	why_not = WhyNot();
	SayWhether(why_not);
	if (why_not != NULL)
	{
		attached = false;
		return;
	}
	if (!attached)
	{
		/* The prefetcher may still hold one that was decoded for it. */
		if (reader->record->next != NULL || reader->decode_queue_tail != reader->record)
			return;
		if (slice == NULL)
		{
			slice = MemoryContextAllocExtended(TopMemoryContext, sizeof(Slice), MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
			before_shmem_exit(SaySummary, 0);
		}
		attached = true;
		raised = InvalidXLogRecPtr;
	}
	if (reader->EndRecPtr < looked || GetRecoveryPauseState() != RECOVERY_NOT_PAUSED)
		return;
	if (!PlanSlice(slice, reader) || slice->nrecords < LEAST_SLICE || !RaiseMinRecoveryPoint(reader))
	{
		looked = slice->nrecords > 0 ? slice->records[slice->nrecords].decoded->next_lsn : reader->EndRecPtr;
		return;
	}

	/* What the main loop does for each record, for those that it will not see. */
	if (TransactionIdIsValid(slice->maxxid))
		AdvanceNextFullTransactionIdPastXid(slice->maxxid);

	/* Heap pages before the index entries that point to them. */
	VisitPages(BROKEN(9));
	if (BROKEN(9))
		pg_usleep(20000);
	VisitPages(!BROKEN(9));
	if (BROKEN(8))
		pg_usleep(20000);

	CountRedo(REDO_SLICES, 1);
	CountRedo(REDO_RECORDS, slice->nrecords);
	if (slice->ended)
		CountRedo(REDO_BARRIERS, 1);
	for (SliceIndex i = 1; i <= slice->nrecords; i++)
		if (IsDone(&slice->records[i]))
			CountRedo(REDO_EARLY, 1);

	walking = 1;
	SkipDone(reader->record);
	SeeWhetherItPays();
}

/* The changes of its pages that waited for this record, or for one before, can be done now. */
static void
Resume(SliceIndex walked)
{
	DecodedXLogRecord *decoded = slice->records[walked].decoded;

	for (int id = 0; id <= decoded->max_block_id; id++)
	{
		DecodedBkpBlock *block = &decoded->blocks[id];
		SlicePage  *page;

		if (!block->in_use)
			continue;
		page = FindSlicePage(slice, &block->rlocator, block->forknum, block->blkno, false);
		if (page != NULL)
			VisitPage(slice, page, walked);
	}
}

/* The record's turn has come. */
static void
Walk(XLogReaderState *reader)
{
	SliceIndex	at = walking;
	SliceRecord *record = &slice->records[at];
	int			ndone = 0;

	if (record->decoded != reader->record)
		elog(PANIC, "walrider lost its place: record at %X/%X, expected %X/%X",
			 LSN_FORMAT_ARGS(reader->record->lsn), LSN_FORMAT_ARGS(record->decoded->lsn));

	for (int i = 0; i < record->nchanges; i++)
		ndone += slice->changes[record->change + i].done;

	if (ndone == 0)
	{
		server_redo[reader->record->header.xl_rmid] (reader);
		for (int i = 0; i < record->nchanges; i++)
		{
			Change	   *change = &slice->changes[record->change + i];

			change->done = true;
			slice->pages[change->page].next = change->next;
		}
		if (reader->record->max_block_id >= 0)
			CountRedo(REDO_IN_PLACE, 1);
	}
	else if (ndone < record->nchanges && BROKEN(12))
		server_redo[reader->record->header.xl_rmid] (reader);
	else if (ndone < record->nchanges)
	{
		for (int i = 0; i < record->nchanges; i++)
			if (!slice->changes[record->change + i].done)
				FinishChange(slice, &slice->changes[record->change + i]);
		CountRedo(REDO_PARTIAL, 1);
	}

	if (at == slice->nrecords)
	{
		walking = 0;
		return;
	}
	walking = at + 1;
	if (reader->record->max_block_id >= 0 && ndone < Max(record->nchanges, 1))
		Resume(at);
	SkipDone(reader->record);
}

static void
walrider_redo(XLogReaderState *reader)
{
	if (walking != 0)
		Walk(reader);
	else
		server_redo[reader->record->header.xl_rmid] (reader);

	/* Also in a walk: the setting may be back by its end, and the prefetcher has a record by then. */
	if (recovery_prefetch != RECOVERY_PREFETCH_OFF)
		attached = false;
	if (walking == 0)
		BeginSlice(reader);
}

void
RequestRedoShared(void)
{
	RequestAddinShmemSpace(sizeof(RedoShared));
}

void
AttachRedoShared(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	Redo = ShmemInitStruct("walrider redo", sizeof(RedoShared), &found);
	if (!found)
	{
		pg_atomic_init_u32(&Redo->active, 0);
		for (int i = 0; i < NUM_REDO_COUNTERS; i++)
			pg_atomic_init_u64(&Redo->counters[i], 0);
	}

	/* ShmemInitStruct refuses another size. */
	ControlFile = ShmemInitStruct("Control File", sizeof(ControlFileData), &found);
	LWLockRelease(AddinShmemInitLock);
	if (!found || ControlFile->pg_control_version != PG_CONTROL_VERSION)
		elog(FATAL, "walrider does not find the control file in shared memory");
}

/* Settings, and the hook where the server is one that we know. */
void
InitRedo(void)
{
	DefineCustomBoolVariable("walrider.early_redo",
							 "Redoes pages of a hot standby ahead of the record that is replayed.",
							 "recovery_prefetch must be off.",
							 &walrider_early_redo,
							 false,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomIntVariable("walrider.redo_slice",
							"Sets how many records are looked at together.",
							NULL,
							&walrider_redo_slice,
							4000, LEAST_SLICE, MAX_SLICE,
							PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("walrider.redo_least_wal",
							"Sets how much WAL has to be waiting before pages are redone early.",
							"Less is not worth the write of pg_control that goes before.",
							&walrider_redo_least_wal,
							4096, 0, 1024 * 1024,
							PGC_SIGHUP, GUC_UNIT_KB,
							NULL, NULL, NULL);

	if (!process_shared_preload_libraries_in_progress)
		return;
	if (PG_VERSION_NUM != EARLY_REDO_VERSION ||
		strtol(GetConfigOption("server_version_num", false, false), NULL, 10) != EARLY_REDO_VERSION)
	{
		if (walrider_early_redo)
			ereport(LOG, (errmsg("walrider redoes no pages early: it knows PostgreSQL %d.%d, this is %s",
								 EARLY_REDO_VERSION / 10000, EARLY_REDO_VERSION % 10000,
								 GetConfigOption("server_version", false, false))));
		return;
	}
	for (int i = 0; i <= RM_MAX_BUILTIN_ID; i++)
	{
		server_redo[i] = RmgrTable[i].rm_redo;
		RmgrTable[i].rm_redo = walrider_redo;
	}
	if (walrider_early_redo)
	{
		/* Where nothing else is set. */
		SetConfigOption("recovery_prefetch", "off", PGC_POSTMASTER, PGC_S_DYNAMIC_DEFAULT);
		SetConfigOption("wal_decode_buffer_size", DECODE_BUFFER, PGC_POSTMASTER, PGC_S_DYNAMIC_DEFAULT);
	}
}

Datum
walrider_stat_get_redo(PG_FUNCTION_ARGS)
{
	TupleDesc	tupdesc;
	Datum		values[1 + NUM_REDO_COUNTERS];
	bool		nulls[1 + NUM_REDO_COUNTERS] = {0};

	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	if (Redo == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("walrider must be loaded via \"shared_preload_libraries\"")));

	values[0] = BoolGetDatum(pg_atomic_read_u32(&Redo->active) != 0 && RecoveryInProgress());
	for (int i = 0; i < NUM_REDO_COUNTERS; i++)
		values[1 + i] = Int64GetDatum((int64) pg_atomic_read_u64(&Redo->counters[i]));
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(tupdesc, values, nulls)));
}
