/*-------------------------------------------------------------------------
 *
 * walrider.h
 *	  What the parts of the early stream share.
 *
 * walrider.c	the module: settings, shared memory, what a commit does
 * stream.c		the procedure that takes a walsender over, and its loop
 * walbuf.c		how far WAL is inserted, and reading it
 * replies.c	what the standby says: positions, feedback
 * lag.c		the lag columns of pg_stat_replication
 * stats.c		walrider.stat_early_stream
 *
 * Early redo on a hot standby is apart: redo.h.
 *
 *-------------------------------------------------------------------------
 */
#ifndef WALRIDER_H
#define WALRIDER_H

#include "access/xlogdefs.h"
#include "datatype/timestamp.h"
#include "lib/stringinfo.h"
#include "port/atomics.h"
#include "storage/procnumber.h"

/* Settings */
extern bool walrider_early;
extern int	walrider_max_ahead;		/* kB */
extern int	walrider_poll_interval; /* us */
extern int	walrider_poll_duration; /* ms */

/* What one sender did.  Only the sender writes, anybody reads. */
typedef struct StreamCounters
{
	pg_atomic_uint64 early;		/* 1: WAL that is not flushed is sent */
	pg_atomic_uint64 told;		/* walEnd of the last message */
	pg_atomic_uint64 sent_bytes;
	pg_atomic_uint64 early_bytes;	/* of these, not flushed when sent */
	pg_atomic_uint64 max_ahead_bytes;	/* furthest past the flush position */
	pg_atomic_uint64 buffers_bytes; /* read from the WAL buffers */
	pg_atomic_uint64 disk_bytes;	/* read from files */
	pg_atomic_uint64 disk_reads;
	pg_atomic_uint64 wal_messages;
	pg_atomic_uint64 keepalives;
	pg_atomic_uint64 replies;
	pg_atomic_uint64 coalesced; /* flushes told by WAL that was sent anyway */
	pg_atomic_uint64 blocked;	/* waits for the socket to take more */
	pg_atomic_uint64 sleeps;	/* waits for anything to happen */
	pg_atomic_uint64 polls;		/* short waits while WAL is coming in */
	pg_atomic_uint64 commit_wakeups;	/* sleeps that a commit ended */
} StreamCounters;

/*
 * One for each walsender, at the same index as its WalSnd.  No locks: pid
 * says whether the rest is meant, and a latch that is set once too often does
 * no harm.
 */
typedef struct EarlySender
{
	pg_atomic_uint32 pid;		/* 0: none */
	pg_atomic_uint32 sleeping;	/* 1: a commit is to set the latch */
	ProcNumber	procno;			/* whose latch */
	StreamCounters counters;
} EarlySender;

typedef struct EarlyShared
{
	pg_atomic_uint64 commits;	/* that are about to insert their record */
	EarlySender senders[FLEXIBLE_ARRAY_MEMBER];
} EarlyShared;

extern EarlyShared *Early;		/* NULL before AttachEarlySenders */
extern EarlySender *MyEarlySender;
extern bool commitsTell;		/* preloaded: commits count and wake */

extern void AttachEarlySenders(void);
extern void ClaimEarlySender(void);

static inline void
CountUp(pg_atomic_uint64 *counter, uint64 by)
{
	pg_atomic_write_u64(counter, pg_atomic_read_u64(counter) + by);
}

/* walbuf.c */
extern bool FindInsertResult(void);
extern bool KnowsInsertResult(void);
extern XLogRecPtr GetInsertedRecPtr(void);
extern void InitWalRead(TimeLineID tli);
extern void ReadWal(char *buf, XLogRecPtr startptr, Size count);

/* pace.c */
extern int	EarlyPause(void);
extern void NoteEarly(bool all, TimestampTz now);
extern void NoteFlush(XLogRecPtr flushed, TimestampTz now);
extern int	ExpectWalIn(TimestampTz lastNews);

/* replies.c */
extern void InitReplies(void);
extern void ConfirmFlushed(void);
extern bool ProcessRepliesIfAny(XLogRecPtr sentPtr);

extern bool replyRequested;		/* the standby wants a keepalive */
extern bool copyDoneReceived;	/* the standby ended the stream */

/* lag.c */
typedef enum LagHead
{
	LAG_WRITE,
	LAG_FLUSH,
	LAG_APPLY,
	NUM_LAG_HEADS
} LagHead;

extern void InitLag(void);
extern void NoteSent(XLogRecPtr lsn, TimestampTz now);
extern TimeOffset LagOf(LagHead head, XLogRecPtr lsn, TimestampTz now);

/* redo.c: early redo on a standby, where the extension was built with it */
extern void InitRedo(void);
extern void RequestRedoShared(void);
extern void AttachRedoShared(void);

#endif							/* WALRIDER_H */
