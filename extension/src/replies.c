/*-------------------------------------------------------------------------
 *
 * replies.c
 *	  What the standby says while it is streamed to.
 *
 * Its positions go where a stock walsender puts them: MyWalSnd, from where
 * synchronous replication and pg_stat_replication take them, and the slot.
 * They may be ahead of what this server has flushed.  Synchronous replication
 * does not mind, a commit waits for the local flush first; but nothing else
 * may be told that WAL is safe which this server could still lose.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xlog.h"
#include "libpq/libpq.h"
#include "libpq/pqformat.h"
#include "libpq/protocol.h"
#include "miscadmin.h"
#include "replication/slot.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/timestamp.h"

#include "walrider.h"

bool		replyRequested = false;
bool		copyDoneReceived = false;

static StringInfoData message;

void
InitReplies(void)
{
	initStringInfo(&message);
	InitLag();
}

/*
 * The slot keeps what the standby lacks and what this server may send again.
 * Either may have moved: the standby's flush position, or ours.
 *
 * What the standby has flushed may be in its early log only.  Its segments
 * follow once it knows that we have flushed the same, and if it stops before,
 * it asks from there: so a segment, and as much as may be ahead, stays.  Not
 * where logical walsenders wait for the slot (synchronized_standby_slots): on a
 * quiet server they would wait for ever.
 */
void
ConfirmFlushed(void)
{
	ReplicationSlot *slot = MyReplicationSlot;
	XLogRecPtr	lsn = MyWalSnd->flush;
	uint64		stays = wal_segment_size + walrider_max_ahead * (uint64) 1024;
	bool		changed = false;

	if (slot == NULL || lsn == InvalidXLogRecPtr)
		return;
	if (SlotExistsInSyncStandbySlots(NameStr(slot->data.name)))
		stays = 0;
	lsn = Min(lsn, GetFlushRecPtr(NULL));

	SpinLockAcquire(&slot->mutex);
	if (slot->data.restart_lsn != InvalidXLogRecPtr && lsn > slot->data.restart_lsn)
		lsn = Max(slot->data.restart_lsn, lsn > stays ? lsn - stays : 1);
	if (slot->data.restart_lsn != lsn)
	{
		changed = true;
		slot->data.restart_lsn = lsn;
	}
	SpinLockRelease(&slot->mutex);

	/* Not saved now, as in PhysicalConfirmReceivedLocation: a checkpoint does. */
	if (changed)
	{
		ReplicationSlotMarkDirty();
		ReplicationSlotsComputeRequiredLSN();
		PhysicalWakeupLogicalWalSnd();
	}
}

/* Standby status update */
static void
ProcessStatusUpdate(XLogRecPtr sentPtr)
{
	static XLogRecPtr lastWrite,
				lastFlush,
				lastApply;

	XLogRecPtr	write = pq_getmsgint64(&message);
	XLogRecPtr	flush = pq_getmsgint64(&message);
	XLogRecPtr	apply = pq_getmsgint64(&message);
	TimestampTz replyTime = pq_getmsgint64(&message);
	TimestampTz now = GetCurrentTimestamp();
	TimeOffset	writeLag,
				flushLag,
				applyLag;
	bool		idle;

	replyRequested |= pq_getmsgbyte(&message) != 0;

	/*
	 * Only what was sent on this connection can be confirmed.  A standby that
	 * holds WAL which this server lost in a crash must not release commits
	 * that have other bytes at the same positions.
	 */
	write = Min(write, sentPtr);
	flush = Min(flush, sentPtr);
	apply = Min(apply, sentPtr);

	writeLag = LagOf(LAG_WRITE, write, now);
	flushLag = LagOf(LAG_FLUSH, flush, now);
	applyLag = LagOf(LAG_APPLY, apply, now);

	/* Everything done, and for the second time: forget the old lags. */
	idle = apply == sentPtr && flush == sentPtr &&
		write == lastWrite && flush == lastFlush && apply == lastApply;
	lastWrite = write;
	lastFlush = flush;
	lastApply = apply;

	SpinLockAcquire(&MyWalSnd->mutex);
	MyWalSnd->write = write;
	MyWalSnd->flush = flush;
	MyWalSnd->apply = apply;
	if (writeLag != -1 || idle)
		MyWalSnd->writeLag = writeLag;
	if (flushLag != -1 || idle)
		MyWalSnd->flushLag = flushLag;
	if (applyLag != -1 || idle)
		MyWalSnd->applyLag = applyLag;
	MyWalSnd->replyTime = replyTime;
	SpinLockRelease(&MyWalSnd->mutex);

	SyncRepReleaseWaiters();

	ConfirmFlushed();
}

/*
 * Whether the standby's xmin can be meant: not in the future, and not so old
 * that it has wrapped around.
 */
static bool
IsRecentXid(TransactionId xid, uint32 epoch)
{
	FullTransactionId next = ReadNextFullTransactionId();
	uint32		nextEpoch = EpochFromFullTransactionId(next);
	TransactionId nextXid = XidFromFullTransactionId(next);

	if (xid > nextXid)
		epoch++;
	return epoch == nextEpoch && TransactionIdPrecedesOrEquals(xid, nextXid);
}

/* An xmin of the slot moves forward, or is set or unset. */
static bool
AdvanceSlotXmin(TransactionId *xmin, TransactionId *effective, TransactionId to)
{
	if (TransactionIdIsNormal(*xmin) && TransactionIdIsNormal(to) &&
		!TransactionIdPrecedes(*xmin, to))
		return false;
	*xmin = *effective = to;
	return true;
}

/* Hot standby feedback */
static void
ProcessFeedback(void)
{
	TimestampTz replyTime = pq_getmsgint64(&message);
	TransactionId xmin = pq_getmsgint(&message, 4);
	uint32		epoch = pq_getmsgint(&message, 4);
	TransactionId catalogXmin = pq_getmsgint(&message, 4);
	uint32		catalogEpoch = pq_getmsgint(&message, 4);
	ReplicationSlot *slot = MyReplicationSlot;

	SpinLockAcquire(&MyWalSnd->mutex);
	MyWalSnd->replyTime = replyTime;
	SpinLockRelease(&MyWalSnd->mutex);

	if ((TransactionIdIsNormal(xmin) && !IsRecentXid(xmin, epoch)) ||
		(TransactionIdIsNormal(catalogXmin) && !IsRecentXid(catalogXmin, catalogEpoch)))
		return;

	/* With a slot the slot holds the xmins, otherwise this process does. */
	if (slot != NULL)
	{
		bool		changed;

		SpinLockAcquire(&slot->mutex);
		MyProc->xmin = InvalidTransactionId;
		changed = AdvanceSlotXmin(&slot->data.xmin, &slot->effective_xmin, xmin);
		changed |= AdvanceSlotXmin(&slot->data.catalog_xmin, &slot->effective_catalog_xmin, catalogXmin);
		SpinLockRelease(&slot->mutex);
		if (changed)
		{
			ReplicationSlotMarkDirty();
			ReplicationSlotsComputeRequiredXmin(false);
		}
	}
	else if (TransactionIdIsNormal(catalogXmin) &&
			 (!TransactionIdIsNormal(xmin) || TransactionIdPrecedes(catalogXmin, xmin)))
		MyProc->xmin = catalogXmin;
	else
		MyProc->xmin = xmin;
}

static void
ProcessCopyData(XLogRecPtr sentPtr)
{
	char		type = pq_getmsgbyte(&message);

	CountUp(&MyEarlySender->counters.replies, 1);
	switch (type)
	{
		case 'r':
			ProcessStatusUpdate(sentPtr);
			break;
		case 'h':
			ProcessFeedback();
			break;
		default:
			ereport(COMMERROR,
					(errcode(ERRCODE_PROTOCOL_VIOLATION),
					 errmsg("unexpected message type \"%c\"", type)));
			proc_exit(0);
	}
}

static void
ConnectionLost(void)
{
	ereport(COMMERROR,
			(errcode(ERRCODE_PROTOCOL_VIOLATION),
			 errmsg("unexpected EOF on standby connection")));
	proc_exit(0);
}

/* Read what the standby has sent, without waiting.  True if that was anything. */
bool
ProcessRepliesIfAny(XLogRecPtr sentPtr)
{
	bool		received = false;

	while (!copyDoneReceived)
	{
		unsigned char type;
		int			maxlen;
		int			r;

		pq_startmsgread();
		r = pq_getbyte_if_available(&type);
		if (r < 0)
			ConnectionLost();
		if (r == 0)
		{
			pq_endmsgread();
			break;
		}

		switch (type)
		{
			case PqMsg_CopyData:
			case PqMsg_CopyDone:
			case PqMsg_Terminate:
				/* No message of a standby is longer than a few dozen bytes. */
				maxlen = PQ_SMALL_MESSAGE_LIMIT;
				break;
			default:
				ereport(FATAL,
						(errcode(ERRCODE_PROTOCOL_VIOLATION),
						 errmsg("invalid standby message type \"%c\"", type)));
		}

		resetStringInfo(&message);
		if (pq_getmessage(&message, maxlen))
			ConnectionLost();

		if (type == PqMsg_Terminate)
			proc_exit(0);
		if (type == PqMsg_CopyDone)
			copyDoneReceived = true;
		else
			ProcessCopyData(sentPtr);
		received = true;
	}
	return received;
}
