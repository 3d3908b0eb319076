/*-------------------------------------------------------------------------
 *
 * redo.c
 *	  Early redo on a hot standby: the hook, the walk, settings.
 *
 * Each resource manager's rm_redo is ours, which calls the server's.  Behind
 * a record that is not in a slice, a slice begins: it is planned, what may go
 * early is done, and what is done is taken out of the queue of decoded
 * records, so that the main loop never sees it.  What is left of the slice is
 * walked: the main loop calls for one record after the other.
 *
 * All of it is the startup process's, but for the pages, which are changed by
 * workers, too, if there are any.  Then the slice behind is planned before,
 * and given out while this one is walked.
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
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "redo.h"
#include "walrider.h"

/* Fewer records than this are not worth a slice. */
#define LEAST_SLICE 64

int			walrider_redo_slice = 4000;
bool		early_redo_at_start;
static bool walrider_early_redo = false;
int			walrider_redo_least_wal = 1024; /* kB */

static void (*server_redo[RM_MAX_BUILTIN_ID + 1]) (XLogReaderState *record);

static Slice *slices[NUM_SLICES];
static Slice *given = NULL;		/* given out */
static Slice *slice = NULL;		/* that is walked, or was last */
static SliceIndex walking;		/* its record whose call comes next, 0: none */
static bool attached;			/* nobody else holds on to decoded records */
static XLogRecPtr looked;		/* to here there was too little for a slice */

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
	if (recoveryTarget != RECOVERY_TARGET_UNSET && !BROKEN(1))
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
	SetRedoActive(why_not == NULL);
	if (why_not == NULL)
		ereport(LOG, (errmsg_plural("walrider redoes pages early, with %d worker",
									"walrider redoes pages early, with %d workers", WantedWorkers(), WantedWorkers())));
	else if (walrider_early_redo)
		ereport(LOG, (errmsg("walrider redoes no pages early: %s", why_not)));
}

static bool
IsDone(const SliceRecord *record)
{
	return record->nchanges > 0 && record->nleft == 0;
}

/*
 * Take what is done behind this record out of the queue, up to what is not, which
 * the walk comes to next.  The last record stays: the end of WAL is taken from
 * it.  Releasing a record frees all up to the one that is next in the queue.
 */
static void
SkipDone(XLogReaderState *reader)
{
	DecodedXLogRecord *from = reader->record;
	SliceIndex	next = walking;

	while (next < slice->nrecords && IsDone(&slice->records[next]))
		next++;
	CountRedo(REDO_SKIPPED, next - walking);
	from->next = slice->records[next].decoded;
	walking = next;

	/* One that is not in the buffer frees nothing there: do so for what was taken out behind it. */
	if (from->oversized)
	{
		DecodedXLogRecord *first = from->next;

		while (first != NULL && first->oversized)
			first = first->next;
		if (first == NULL)
			reader->decode_buffer_tail = reader->decode_buffer;
		reader->decode_buffer_head = first != NULL ? (char *) first : reader->decode_buffer;
	}
}

/* May a slice begin now?  Of a standby that is on its way there is nothing to say yet. */
static bool
MayBegin(XLogReaderState *reader)
{
	const char *why_not;

	if (!reachedConsistency || (standbyState != STANDBY_DISABLED && standbyState != STANDBY_SNAPSHOT_READY))
		return false;
	why_not = WhyNot();
	SayWhether(why_not);
	if (why_not != NULL)
	{
		attached = false;
		return false;
	}
	if (!attached)
	{
		/* The prefetcher may still hold one that was decoded for it. */
		if (reader->record->next != NULL || reader->decode_queue_tail != reader->record)
			return false;
		if (slices[0] == NULL)
		{
			for (int i = 0; i < (WantedWorkers() > 0 ? NUM_SLICES : 1); i++)
				slices[i] = WantedWorkers() > 0 ? SharedSlice(i)
					: MemoryContextAllocExtended(TopMemoryContext, sizeof(Slice), MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
			before_shmem_exit(SayRedoSummary, 0);
		}
		BeginRaising(reader);
		attached = true;
	}
	return GetRecoveryPauseState() == RECOVERY_NOT_PAUSED;
}

/* The slice behind a record, if one may begin there and is worth it. */
static Slice *
Plan(XLogReaderState *reader, DecodedXLogRecord *last)
{
	Slice	   *planned = given == slices[0] ? slices[1] : slices[0];

	if (last->next_lsn < looked)
		return NULL;
	if (PlanSlice(planned, reader, last) && planned->nrecords >= LEAST_SLICE && RaiseMinRecoveryPoint(reader, planned))
		return planned;
	looked = planned->nrecords > 0 ? planned->records[planned->nrecords].decoded->next_lsn : last->next_lsn;
	return NULL;
}

static void
Begin(Slice *planned)
{
	/* What the main loop does for each record, for those that it will not see. */
	if (TransactionIdIsValid(planned->maxxid) && !BROKEN(2))
		AdvanceNextFullTransactionIdPastXid(planned->maxxid);
	given = planned;
	GiveOut(planned);
}

static void
BeginSlice(XLogReaderState *reader)
{
	Slice	   *behind = NULL;

	if (given == NULL)
	{
		Slice	   *planned = MayBegin(reader) ? Plan(reader, reader->record) : NULL;

		if (planned == NULL)
			return;
		Begin(planned);
	}
	if (RunningWorkers() > 0 && !given->ended && MayBegin(reader))
		behind = Plan(reader, given->records[given->nrecords].decoded);
	FinishGivenOut();
	VisitHeld(given);

	slice = given;
	given = NULL;
	if (behind != NULL)
	{
		HoldBack(behind, slice);
		Begin(behind);
	}

	FindLeft(slice);
	CountRedo(REDO_SLICES, 1);
	CountRedo(REDO_RECORDS, slice->nrecords);
	if (slice->ended)
		CountRedo(REDO_BARRIERS, 1);

	walking = 1;
	SkipDone(reader);
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
		{
			VisitPage(slice, page, walked);
			RecordFreeSpace(page);
		}
	}
}

/* The record's turn has come. */
static void
Walk(XLogReaderState *reader)
{
	SliceIndex	at = walking;
	SliceRecord *record = &slice->records[at];
	int			nleft = record->nleft;

	if (record->decoded != reader->record)
		elog(PANIC, "walrider lost its place: record at %X/%X, expected %X/%X",
			 LSN_FORMAT_ARGS(reader->record->lsn), LSN_FORMAT_ARGS(record->decoded->lsn));

	if (nleft == record->nchanges)
	{
		server_redo[reader->record->header.xl_rmid] (reader);
		for (int i = 0; i < record->nchanges; i++)
		{
			Change	   *change = &slice->changes[record->change + i];

			change->left = false;
			slice->pages[change->page].next = change->next;
		}
		record->nleft = 0;
		if (reader->record->max_block_id >= 0)
			CountRedo(REDO_IN_PLACE, 1);
	}
	else if (nleft > 0 && BROKEN(12))
		server_redo[reader->record->header.xl_rmid] (reader);
	else if (nleft > 0)
	{
		for (int i = 0; i < record->nchanges; i++)
			if (slice->changes[record->change + i].left)
				FinishChange(slice, &slice->changes[record->change + i]);
		CountRedo(REDO_PARTIAL, 1);
	}

	if (at == slice->nrecords)
	{
		walking = 0;
		return;
	}
	walking = at + 1;
	if (reader->record->max_block_id >= 0 && (nleft > 0 || record->nchanges == 0))
		Resume(at);
	SkipDone(reader);
}

static void
walrider_redo(XLogReaderState *reader)
{
	if (walking != 0)
		Walk(reader);
	else
	{
		server_redo[reader->record->header.xl_rmid] (reader);
		if (EndsSlice(reader->record))
			CloseWorkersFiles();
	}

	/* Also in a walk: the setting may be back by its end, and the prefetcher has a record by then. */
	if (recovery_prefetch != RECOVERY_PREFETCH_OFF)
		attached = false;
	if (walking == 0)
	{
		/* What is read ahead has nothing to do with the record that "WAL redo at" names. */
		ErrorContextCallback *of_record = error_context_stack;

		error_context_stack = of_record->previous;
		BeginSlice(reader);
		error_context_stack = of_record;
	}
}

void
RequestRedoShared(void)
{
	RequestAddinShmemSpace(CountersSharedSize());
	RequestAddinShmemSpace(ControlSharedSize());
	RequestAddinShmemSpace(BuffersSharedSize());
	RequestAddinShmemSpace(WorkersSharedSize());
}

void
AttachRedoShared(void)
{
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	AttachCountersShared();
	AttachControlShared();
	AttachBuffersShared();
	AttachWorkersShared();
	LWLockRelease(AddinShmemInitLock);
}

/* Settings, and the hook where the server is one that we know. */
static bool
KnowsServer(void)
{
	return PG_VERSION_NUM == EARLY_REDO_VERSION &&
		strtol(GetConfigOption("server_version_num", false, false), NULL, 10) == EARLY_REDO_VERSION;
}

/* Says, at the start and at each reload, why nothing comes of the setting. */
static bool
CheckEarlyRedo(bool *newval, void **extra, GucSource source)
{
	if (*newval && !IsUnderPostmaster && !KnowsServer())
		ereport(LOG, (errmsg("walrider redoes no pages early: it knows PostgreSQL %d.%d, this is %s",
							 EARLY_REDO_VERSION / 10000, EARLY_REDO_VERSION % 10000,
							 GetConfigOption("server_version", false, false))));
	return true;
}

void
InitRedo(void)
{
	DefineCustomBoolVariable("walrider.early_redo",
							 "Redoes pages of a hot standby ahead of the record that is replayed.",
							 "recovery_prefetch must be off.",
							 &walrider_early_redo,
							 false,
							 PGC_SIGHUP, 0,
							 CheckEarlyRedo, NULL, NULL);
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
							1024, 0, MAX_RAISE_BY / 1024,
							PGC_SIGHUP, GUC_UNIT_KB,
							NULL, NULL, NULL);

	if (!process_shared_preload_libraries_in_progress)
		return;

	DefineCustomIntVariable("walrider.redo_workers",
							"Sets how many processes change pages beside the startup process.",
							"-1: one for each core but one, at most four.",
							&walrider_redo_workers,
							-1, -1, MAX_REDO_WORKERS,
							PGC_POSTMASTER, 0,
							NULL, NULL, NULL);

	if (!KnowsServer())
		return;
	for (int i = 0; i <= RM_MAX_BUILTIN_ID; i++)
	{
		server_redo[i] = RmgrTable[i].rm_redo;
		RmgrTable[i].rm_redo = walrider_redo;
	}
	early_redo_at_start = walrider_early_redo;
	if (early_redo_at_start)
	{
		/* Where nothing else is set. */
		SetConfigOption("recovery_prefetch", "off", PGC_POSTMASTER, PGC_S_DYNAMIC_DEFAULT);
		RegisterRedoProcesses();
	}
}
