/*-------------------------------------------------------------------------
 *
 * control.c
 *	  minRecoveryPoint, ahead of pages that are redone early.
 *
 * A page on disk must not be past it.  XLogFlush raises it when a page is
 * written, but no further than what is replayed, so that it has to be there
 * before a page is ahead of that.  Nothing lowers it before recovery ends, and
 * it must not be past the end of WAL then: what is decoded will be replayed,
 * whatever happens.  To do it rarely, some MB are decoded ahead; a worker does
 * it while half of them are left, and the startup process if there is none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog_internal.h"
#include "access/xlogrecovery.h"
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "miscadmin.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"

#include "redo.h"

typedef struct ControlShared
{
	pg_atomic_uint64 raised;	/* as far as we know; 0: not known */
	pg_atomic_uint64 wanted;	/* a worker is to raise it to there */
	TimeLineID	tli;			/* of what is wanted */
} ControlShared;

static ControlShared *Control = NULL;
static ControlFileData *ControlFile = NULL;

/* In the startup process. */
static uint64 raise_by;			/* bytes */

Size
ControlSharedSize(void)
{
	return sizeof(ControlShared);
}

void
AttachControlShared(void)
{
	bool		found;

	Control = ShmemInitStruct("walrider control", sizeof(ControlShared), &found);
	if (!found)
	{
		pg_atomic_init_u64(&Control->raised, InvalidXLogRecPtr);
		pg_atomic_init_u64(&Control->wanted, InvalidXLogRecPtr);
	}

	/* ShmemInitStruct refuses another size. */
	ControlFile = ShmemInitStruct("Control File", sizeof(ControlFileData), &found);
	if (!found || ControlFile->pg_control_version != PG_CONTROL_VERSION)
		elog(FATAL, "walrider does not find the control file in shared memory");
}

/* Early redo begins: what was known may be of another server's life. */
void
BeginRaising(XLogReaderState *reader)
{
	raise_by = WantedWorkers() > 0 ? RAISE_BY_WORKER : RAISE_BY;
	ShareDecodedRecords(reader, DECODED_SIZE(raise_by));
	pg_atomic_write_u64(&Control->wanted, InvalidXLogRecPtr);
	pg_atomic_write_u64(&Control->raised, InvalidXLogRecPtr);
}

static void
Raise(XLogRecPtr to, TimeLineID tli)
{
	LWLockAcquire(ControlFileLock, LW_EXCLUSIVE);

	/* A worker may come too late, when recovery has ended. */
	if (ControlFile->state != DB_IN_ARCHIVE_RECOVERY)
		pg_atomic_write_u64(&Control->wanted, InvalidXLogRecPtr);
	else
	{
		if (ControlFile->minRecoveryPoint < to)
		{
			ControlFile->minRecoveryPoint = to;
			ControlFile->minRecoveryPointTLI = tli;
			update_controlfile(DataDir, ControlFile, true);
			CountRedo(REDO_MIN_RECOVERY, 1);
		}
		if (pg_atomic_read_u64(&Control->raised) < ControlFile->minRecoveryPoint)
			pg_atomic_write_u64(&Control->raised, ControlFile->minRecoveryPoint);
	}
	LWLockRelease(ControlFileLock);
}

/* A worker is asked to raise it. */
bool
IsRaiseWanted(void)
{
	return pg_atomic_read_u64(&Control->wanted) > pg_atomic_read_u64(&Control->raised);
}

void
RaiseAsWanted(void)
{
	XLogRecPtr	to = pg_atomic_read_u64(&Control->wanted);

	pg_read_barrier();
	Raise(to, Control->tli);
}

/* How far it can be raised: the last decoded record may change the timeline, which counts up to its beginning. */
static XLogRecPtr
DecodedTo(XLogReaderState *reader)
{
	return MayChangeTimeline(reader->decode_queue_tail) ? reader->decode_queue_tail->lsn : reader->decode_queue_tail->next_lsn;
}

static void
DecodeTo(XLogReaderState *reader, XLogRecPtr to)
{
	while (reader->decode_queue_tail->next_lsn < to &&
		   !MayChangeTimeline(reader->decode_queue_tail) && XLogReadAhead(reader, true) != NULL)
		;
}

/*
 * Before a planned slice is done.  Returns whether it is there: for little WAL
 * it is not worth an fsync.
 */
bool
RaiseMinRecoveryPoint(XLogReaderState *reader, const Slice *planned)
{
	XLogRecPtr	needed = planned->records[planned->nrecords].decoded->next_lsn;
	XLogRecPtr	raised = pg_atomic_read_u64(&Control->raised);
	TimeLineID	tli;

	if (BROKEN(4))
		return true;
	(void) GetCurrentReplayRecPtr(&tli);
	if (needed <= raised)
	{
		/* A bit at a time, so that workers do not wait for long. */
		DecodeTo(reader, Min(needed + raise_by, reader->decode_queue_tail->next_lsn + 2 * MAX_SLICE_WAL));
		if (RunningWorkers() > 0 && !IsRaiseWanted() && raised - needed < raise_by / 2 && DecodedTo(reader) > raised)
		{
			Control->tli = tli;
			pg_atomic_write_membarrier_u64(&Control->wanted, DecodedTo(reader));
			WakeWorker();
		}
		return true;
	}

	/* The worker is late: give the next one more time. */
	if (IsRaiseWanted() && raise_by < MAX_RAISE_BY)
	{
		raise_by *= 2;
		ShareDecodedRecords(reader, DECODED_SIZE(raise_by));
	}
	DecodeTo(reader, needed + raise_by);
	if (DecodedTo(reader) - planned->start < (uint64) walrider_redo_least_wal * 1024)
		return false;
	/* All of the slice is there: it ends before what may change the timeline. */
	Raise(Max(needed, DecodedTo(reader)), tli);
	return true;
}
