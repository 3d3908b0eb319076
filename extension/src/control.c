/*-------------------------------------------------------------------------
 *
 * control.c
 *	  minRecoveryPoint, ahead of pages that are redone early.
 *
 * A page on disk must not be past it.  XLogFlush raises it when a page is
 * written, but no further than what is replayed, so that it has to be there
 * before a page is ahead of that.  Nothing lowers it before recovery ends, and
 * it must not be past the end of WAL then: what is decoded will be replayed,
 * whatever happens.  To do it rarely, some MB are decoded ahead, and it is done
 * while half of them are left.
 *
 * Nobody waits for the fsync who does not write such a page.  A process of its
 * own, the raiser, holds ControlFileLock from before it says that
 * minRecoveryPoint is there until pg_control is on disk; who writes a page past
 * what it knows takes that lock first (UpdateMinRecoveryPoint, xlog.c).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>
#include <unistd.h>

#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xlogrecovery.h"
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/condition_variable.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/wait_event.h"

#include "redo.h"

typedef struct ControlShared
{
	pg_atomic_uint64 raised;	/* as far as we know; 0: not known */
	slock_t		mutex;			/* for the next two */
	XLogRecPtr	wanted;			/* it is to be raised to there */
	TimeLineID	tli;			/* of what is wanted */
	pg_atomic_uint32 nraisers;	/* that are there: 1 or none */
	ConditionVariable asked;
	ConditionVariable answered;
} ControlShared;

static ControlShared *Control = NULL;
static ControlFileData *ControlFile = NULL;

/* In the startup process. */
static uint64 raise_by;			/* bytes */
static XLogRecPtr more_from;	/* it is more from there on */

PGDLLEXPORT void walrider_raiser_main(Datum arg);

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
		memset(Control, 0, sizeof(ControlShared));
		pg_atomic_init_u64(&Control->raised, InvalidXLogRecPtr);
		pg_atomic_init_u32(&Control->nraisers, 0);
		SpinLockInit(&Control->mutex);
		ConditionVariableInit(&Control->asked);
		ConditionVariableInit(&Control->answered);
	}

	/* ShmemInitStruct refuses another size. */
	ControlFile = ShmemInitStruct("Control File", sizeof(ControlFileData), &found);
	if (!found || ControlFile->pg_control_version != PG_CONTROL_VERSION)
		elog(FATAL, "walrider does not find the control file in shared memory");
}

/* How far it is to be raised, and of which timeline that is. */
static XLogRecPtr
Wanted(TimeLineID *tli)
{
	XLogRecPtr	wanted;

	SpinLockAcquire(&Control->mutex);
	wanted = Control->wanted;
	*tli = Control->tli;
	SpinLockRelease(&Control->mutex);
	return wanted;
}

static void
SetWanted(XLogRecPtr to, TimeLineID tli)
{
	SpinLockAcquire(&Control->mutex);
	Control->wanted = to;
	Control->tli = tli;
	SpinLockRelease(&Control->mutex);
}

static bool
IsWanted(void)
{
	TimeLineID	tli;

	return Wanted(&tli) > pg_atomic_read_u64(&Control->raised);
}

static bool
IsRaiserThere(void)
{
	return pg_atomic_read_u32(&Control->nraisers) > 0;
}

static uint64
LeastWal(void)
{
	return (uint64) walrider_redo_least_wal * 1024;
}

/* So much from now on, and room for what is decoded for it. */
static void
RaiseBy(XLogReaderState *reader, uint64 by)
{
	raise_by = Min(by, MAX_RAISE_BY);
	more_from = reader->record->lsn + RAISES_BEFORE_MORE * raise_by;
	GiveDecodedRoom(reader, DECODED_SIZE(raise_by));
}

/* Early redo begins: what was known may be of another server's life. */
void
BeginRaising(XLogReaderState *reader)
{
	RaiseBy(reader, Max(LEAST_RAISE_BY, LeastWal()));
	SetWanted(InvalidXLogRecPtr, 0);
	pg_atomic_write_u64(&Control->raised, InvalidXLogRecPtr);
}

/*
 * As the server writes it, but for its fsync: that would make the file's times
 * durable, too, by a commit of the file system's journal, for which others wait.
 * It is open before it is written, so that no error goes unseen.
 */
static void
WriteControlFile(void)
{
	int			file = BasicOpenFile(XLOG_CONTROL_FILE, O_RDWR | PG_BINARY);

	if (file < 0)
		ereport(PANIC,
				(errcode_for_file_access(), errmsg("could not open file \"%s\": %m", XLOG_CONTROL_FILE)));
	update_controlfile(DataDir, ControlFile, false);
	pgstat_report_wait_start(WAIT_EVENT_CONTROL_FILE_SYNC_UPDATE);
	if (pg_fdatasync(file) != 0)
		ereport(PANIC,
				(errcode_for_file_access(), errmsg("could not fdatasync file \"%s\": %m", XLOG_CONTROL_FILE)));
	pgstat_report_wait_end();
	(void) close(file);
}

static void
Raise(XLogRecPtr to, TimeLineID tli)
{
	LWLockAcquire(ControlFileLock, LW_EXCLUSIVE);

	/* The raiser may come too late, when recovery has ended. */
	if (ControlFile->state != DB_IN_ARCHIVE_RECOVERY)
		SetWanted(InvalidXLogRecPtr, 0);
	else
	{
		bool		writes = ControlFile->minRecoveryPoint < to;

		if (writes)
		{
			ControlFile->minRecoveryPoint = to;
			ControlFile->minRecoveryPointTLI = tli;
		}
		if (pg_atomic_read_u64(&Control->raised) < ControlFile->minRecoveryPoint)
			pg_atomic_write_u64(&Control->raised, ControlFile->minRecoveryPoint);
		ConditionVariableSignal(&Control->answered);
		if (BROKEN(41))
		{
			LWLockRelease(ControlFileLock);
			pg_usleep(300000);
			LWLockAcquire(ControlFileLock, LW_EXCLUSIVE);
		}
		if (writes)
		{
			WriteControlFile();
			CountRedo(REDO_MIN_RECOVERY, 1);
		}
	}
	LWLockRelease(ControlFileLock);
}

static void
AskRaiser(XLogRecPtr to, TimeLineID tli)
{
	SetWanted(to, tli);
	ConditionVariableSignal(&Control->asked);
}

/* Have it raised, and wait.  Returns whether pages may be redone up to what is needed. */
static bool
RaiseNow(XLogRecPtr to, XLogRecPtr needed, TimeLineID tli)
{
	if (IsRaiserThere())
	{
		AskRaiser(to, tli);
		ConditionVariablePrepareToSleep(&Control->answered);
		while (pg_atomic_read_u64(&Control->raised) < needed && IsWanted() && IsRaiserThere())
			(void) ConditionVariableTimedSleep(&Control->answered, 100, RedoWaitEvent());
		ConditionVariableCancelSleep();
	}
	if (pg_atomic_read_u64(&Control->raised) < needed)
		Raise(to, tli);
	return pg_atomic_read_u64(&Control->raised) >= needed;
}

/*
 * Where the record before it ends.  A record never begins with the header of a
 * page, but that may be where a timeline ends: past it minRecoveryPoint would
 * not be on that timeline any more, and the server would not start.
 */
static XLogRecPtr
EndBefore(const DecodedXLogRecord *record)
{
	uint32		header =
		XLogSegmentOffset(record->lsn, wal_segment_size) < XLOG_BLCKSZ ? SizeOfXLogLongPHD : SizeOfXLogShortPHD;

	return record->lsn % XLOG_BLCKSZ == header ? record->lsn - header : record->lsn;
}

/* How far it can be raised: the last decoded record may change the timeline, which counts up to its beginning. */
static XLogRecPtr
DecodedTo(XLogReaderState *reader)
{
	DecodedXLogRecord *tail = reader->decode_queue_tail;

	return MayChangeTimeline(tail) ? EndBefore(tail) : tail->next_lsn;
}

static void
DecodeTo(XLogReaderState *reader, XLogRecPtr to)
{
	while (reader->decode_queue_tail->next_lsn < to &&
		   !MayChangeTimeline(reader->decode_queue_tail) && XLogReadAhead(reader, true) != NULL)
		;
}

/*
 * Before a planned slice is done.  Returns whether it may be: for little WAL
 * minRecoveryPoint is not worth an fsync.
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
	if (raise_by < LeastWal())
		RaiseBy(reader, LeastWal());
	else if (raise_by < RAISE_BY && needed >= more_from)
		RaiseBy(reader, 2 * raise_by);
	if (needed <= raised)
	{
		/* A bit at a time, so that workers do not wait for long. */
		DecodeTo(reader, Min(needed + raise_by, reader->decode_queue_tail->next_lsn + 2 * MAX_SLICE_WAL));
		if (raised - needed < raise_by / 2 && DecodedTo(reader) > raised && IsRaiserThere() && !IsWanted())
			AskRaiser(DecodedTo(reader), tli);
		return true;
	}

	/* The raiser is late: give the next one more time. */
	if (IsWanted() && raise_by < MAX_RAISE_BY)
		RaiseBy(reader, 2 * raise_by);
	DecodeTo(reader, needed + raise_by);
	if (DecodedTo(reader) - planned->start < LeastWal())
		return false;
	/* All of the slice is there: it ends before what may change the timeline. */
	return RaiseNow(Max(needed, DecodedTo(reader)), needed, tli);
}

static void
LeaveRaiser(int code, Datum arg)
{
	pg_atomic_fetch_sub_u32(&Control->nraisers, 1);
}

void
walrider_raiser_main(Datum arg)
{
	BeginRedoProcess(1 + MAX_REDO_WORKERS);
	pg_atomic_fetch_add_u32(&Control->nraisers, 1);
	before_shmem_exit(LeaveRaiser, 0);

	/* Of a primary there is nothing to raise: go for good. */
	while (RecoveryInProgress())
	{
		TimeLineID	tli;
		XLogRecPtr	to = Wanted(&tli);

		if (ShutdownRequestPending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();
		if (to > pg_atomic_read_u64(&Control->raised))
		{
			Raise(to, tli);
			continue;
		}
		ConditionVariablePrepareToSleep(&Control->asked);
		if (!IsWanted() && !ShutdownRequestPending)
			AwaitSignal();
		ConditionVariableCancelSleep();
	}
	proc_exit(0);
}
