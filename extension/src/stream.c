/*-------------------------------------------------------------------------
 *
 * stream.c
 *	  walrider.stream_wal(): takes a walsender over and streams WAL.
 *
 * To the standby it is START_REPLICATION PHYSICAL, with two differences: the
 * WAL of a message may be ahead of what this server has flushed, and walEnd,
 * also that of keepalives, is the flush position.  What is behind walEnd can
 * be lost by a crash of this server and be rewritten with other contents;
 * the standby must not replay it, until a later walEnd covers it.
 *
 * The process has no transaction while it streams, and never comes back:
 * every error ends the connection, as does the end of the stream.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>
#ifdef __linux__
#include <sys/timerfd.h>
#include <time.h>
#endif
#include <unistd.h>

#include "access/timeline.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "libpq/libpq.h"
#include "libpq/libpq-be.h"
#include "libpq/pqformat.h"
#include "libpq/protocol.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "replication/slot.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "tcop/cmdtag.h"
#include "tcop/dest.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/ps_status.h"
#include "utils/resowner.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "walrider.h"

/* As in walsender.c */
#define MAX_SEND_SIZE (XLOG_BLCKSZ * 16)

/* 'w', dataStart, walEnd, sendtime */
#define WAL_HEADER_SIZE (1 + 3 * sizeof(int64))

/*
 * Where a message begins in output.  libpq copies it behind the five bytes
 * that precede it on the wire, between two large allocations, which begin at
 * the same place of a page; and what "rep movsb" of some processors copies to
 * a place a few bytes further in a page takes ten times as long (glibc bug
 * 30994).
 */
#define MESSAGE_START 128

#define STATS_FLUSH_INTERVAL 1000	/* ms */

PG_FUNCTION_INFO_V1(walrider_stream_wal);

static volatile sig_atomic_t gotStopping = false;
static volatile sig_atomic_t gotLastCycle = false;

static StringInfoData output;
static XLogRecPtr sentPtr;		/* up to here WAL is sent */
static XLogRecPtr toldPtr;		/* walEnd of the last message */
static TimestampTz lastProcessing;	/* when replies were last looked for */
static TimestampTz lastReply;	/* when there was one */
static bool waitingForPing;		/* a keepalive asked for a reply since */
static TimestampTz lastNews;	/* when there was something to send */
static WaitEventSet *waitSet;
static int	socketPos;			/* in waitSet */
#ifdef __linux__
static int	timer;
#endif

/*
 * SIGTERM means two things here.  A walsender that is to stop streaming, so
 * that the checkpointer can write its last record, gets
 * PROCSIG_WALSND_INIT_STOPPING; HandleWalSndInitStopping (walsender.c), which
 * does not know that this one is streaming, makes that a SIGTERM from the
 * process to itself.  From anybody else it is the end.
 */
static void
TerminateHandler(int signo, siginfo_t *info, void *context)
{
	int			save_errno = errno;

	if (info->si_code == SI_USER && info->si_pid == MyProcPid)
	{
		gotStopping = true;
		SetLatch(MyLatch);
	}
	else
		die(signo);
	errno = save_errno;
}

/* SIGUSR2: the last record is written; send it and go. */
static void
LastCycleHandler(SIGNAL_ARGS)
{
	gotLastCycle = true;
	SetLatch(MyLatch);
}

static void
SetSignalHandlers(void)
{
	struct sigaction act;

	memset(&act, 0, sizeof(act));
	act.sa_sigaction = TerminateHandler;
	act.sa_flags = SA_SIGINFO | SA_RESTART;
	sigemptyset(&act.sa_mask);
	if (sigaction(SIGTERM, &act, NULL) != 0)
		elog(ERROR, "could not install a signal handler: %m");
	pqsignal(SIGUSR2, LastCycleHandler);
}

/* As WalSndShutdown: the other end is gone. */
static void
EndConnection(void)
{
	if (whereToSendOutput == DestRemote)
		whereToSendOutput = DestNone;
	proc_exit(0);
}

/* Whether WAL is sent that is not flushed. */
static bool
IsEarly(void)
{
	return walrider_early && KnowsInsertResult();
}

/*
 * How far WAL may be sent.  The standby keeps in memory what it may not
 * replay yet, so there is a bound to that.
 */
static XLogRecPtr
SendLimit(XLogRecPtr flushed)
{
	XLogRecPtr	limit;

	if (!IsEarly())
		return flushed;

	limit = GetInsertedRecPtr();
	if (limit <= flushed)
		return flushed;
	if (limit - flushed > walrider_max_ahead * (uint64) 1024)
	{
		limit = flushed + walrider_max_ahead * (uint64) 1024;
		limit -= limit % XLOG_BLCKSZ;
	}
	return limit;
}

/*
 * How long WAL that is not flushed has to wait, in microseconds; 0: it may go
 * by itself.  It waits if such WAL has just gone and is not flushed yet: what
 * backends insert while a flush is under way is flushed by the next one, and
 * can go when that begins.
 */
static int
EarlyWait(XLogRecPtr flushed)
{
	return flushed > toldPtr || flushed >= sentPtr ? 0 : EarlyPause();
}

/*
 * How far WAL is to be sent now.  A new flush position has to be told, and
 * takes along all that there is.
 */
static XLogRecPtr
SendNow(XLogRecPtr flushed)
{
	return EarlyWait(flushed) > 0 ? flushed : SendLimit(flushed);
}

/* Is there anything that the standby is to hear now? */
static bool
HasNews(void)
{
	XLogRecPtr	flushed = GetFlushRecPtr(NULL);

	return flushed > toldPtr || SendNow(flushed) > sentPtr;
}

static void
BeginMessage(void)
{
	resetStringInfo(&output);
	output.len = MESSAGE_START;
}

static void
SendMessage(XLogRecPtr walEnd, TimestampTz now)
{
	const char *message = output.data + MESSAGE_START;

	pq_putmessage_noblock(PqMsg_CopyData, message, output.len - MESSAGE_START);
	if (walEnd > toldPtr)
	{
		if (message[0] == 'w')
			CountUp(&MyEarlySender->counters.coalesced, 1);
		/* The standby may have confirmed it before. */
		ConfirmFlushed();
		NoteFlush(walEnd, now);
	}
	toldPtr = walEnd;
	pg_atomic_write_u64(&MyEarlySender->counters.told, walEnd);
}

static void
SendKeepalive(bool requestReply)
{
	XLogRecPtr	flushed = GetFlushRecPtr(NULL);
	TimestampTz now = GetCurrentTimestamp();

	BeginMessage();
	pq_sendbyte(&output, 'k');
	pq_sendint64(&output, flushed);
	pq_sendint64(&output, now);
	pq_sendbyte(&output, requestReply);
	SendMessage(flushed, now);
	CountUp(&MyEarlySender->counters.keepalives, 1);

	if (requestReply)
		waitingForPing = true;
}

/* Send the next WAL, up to limit.  False if there is more. */
static bool
SendWal(XLogRecPtr limit)
{
	StreamCounters *counters = &MyEarlySender->counters;
	XLogRecPtr	startptr = sentPtr;
	XLogRecPtr	endptr = startptr + MAX_SEND_SIZE;
	XLogRecPtr	flushed;
	TimestampTz now;
	Size		nbytes;
	uint64		header[3];
	char	   *message;

	/*
	 * The limit is the end of a record or a page boundary.  A record is split
	 * at page boundaries only, as walreceivers expect.
	 */
	if (limit <= endptr)
		endptr = limit;
	else
		endptr -= endptr % XLOG_BLCKSZ;
	nbytes = endptr - startptr;

	BeginMessage();
	enlargeStringInfo(&output, WAL_HEADER_SIZE + nbytes);
	message = output.data + MESSAGE_START;
	ReadWal(message + WAL_HEADER_SIZE, startptr, nbytes);

	/* Read last, so that the standby may replay as much as possible. */
	flushed = GetFlushRecPtr(NULL);
	now = GetCurrentTimestamp();

	message[0] = 'w';
	header[0] = pg_hton64(startptr);
	header[1] = pg_hton64(flushed);
	header[2] = pg_hton64(now);
	memcpy(message + 1, header, sizeof(header));
	output.len += WAL_HEADER_SIZE + nbytes;
	SendMessage(flushed, now);

	sentPtr = endptr;
	SpinLockAcquire(&MyWalSnd->mutex);
	MyWalSnd->sentPtr = sentPtr;
	SpinLockRelease(&MyWalSnd->mutex);
	NoteSent(sentPtr, now);

	NoteEarly(endptr == limit, now);

	CountUp(&counters->wal_messages, 1);
	CountUp(&counters->sent_bytes, nbytes);
	if (endptr > flushed)
	{
		uint64		ahead = endptr - flushed;

		CountUp(&counters->early_bytes, Min(ahead, nbytes));
		if (ahead > pg_atomic_read_u64(&counters->max_ahead_bytes))
			pg_atomic_write_u64(&counters->max_ahead_bytes, ahead);
	}

	if (update_process_title)
	{
		char		activity[50];

		snprintf(activity, sizeof(activity), "streaming %X/%X", LSN_FORMAT_ARGS(sentPtr));
		set_ps_display(activity);
	}
	return endptr == limit;
}

/* Send one message, if there is anything to say.  True if that was all. */
static bool
SendNews(void)
{
	XLogRecPtr	flushed = GetFlushRecPtr(NULL);
	XLogRecPtr	limit = SendNow(flushed);
	bool		caughtUp = true;

	if (limit > sentPtr)
		caughtUp = SendWal(limit);
	else if (flushed > toldPtr)
		SendKeepalive(false);
	else
		return true;

	lastNews = GetCurrentTimestamp();
	return caughtUp;
}

/* The server stops: once the standby has everything, the stream ends. */
static void
FinishIfReplicated(void)
{
	XLogRecPtr	replicated = MyWalSnd->flush != InvalidXLogRecPtr ? MyWalSnd->flush : MyWalSnd->write;

	if (sentPtr == GetFlushRecPtr(NULL) && replicated == sentPtr &&
		toldPtr == sentPtr && !pq_is_send_pending())
	{
		QueryCompletion qc;

		pq_putemptymessage(PqMsg_CopyDone);
		SetQueryCompletion(&qc, CMDTAG_COPY, 0);
		EndCommand(&qc, DestRemote, false);
		pq_flush();
		proc_exit(0);
	}
	if (!waitingForPing)
		SendKeepalive(true);
}

/* The standby ended the stream: say so too, once what was sent before is on its way. */
static void
FinishAsAsked(void)
{
	static bool said = false;

	if (!said)
	{
		pq_putmessage_noblock(PqMsg_CopyDone, NULL, 0);
		pq_putmessage_noblock(PqMsg_CommandComplete, "CALL", sizeof("CALL"));
		said = true;
	}
	if (pq_flush_if_writable() != 0)
		EndConnection();
	if (!pq_is_send_pending())
		proc_exit(0);
}

/* wal_sender_timeout: ask for a reply after half of it, give up after all. */
static void
CheckTimeout(void)
{
	if (wal_sender_timeout <= 0)
		return;

	if (lastProcessing >= TimestampTzPlusMilliseconds(lastReply, wal_sender_timeout))
	{
		/* It would not get there. */
		ereport(COMMERROR,
				(errmsg("terminating walsender process due to replication timeout")));
		EndConnection();
	}
	if (!waitingForPing &&
		lastProcessing >= TimestampTzPlusMilliseconds(lastReply, wal_sender_timeout / 2))
	{
		SendKeepalive(true);
		if (pq_flush_if_writable() != 0)
			EndConnection();
	}
}

static long
ComputeSleepTime(void)
{
	int			until = waitingForPing ? wal_sender_timeout : wal_sender_timeout / 2;

	if (wal_sender_timeout <= 0)
		return 10000;
	return TimestampDifferenceMilliseconds(GetCurrentTimestamp(),
										   TimestampTzPlusMilliseconds(lastReply, until));
}

/*
 * A wait event set as FeBeWaitSet, and a timer: times between two looks for
 * WAL are shorter than the millisecond that WaitEventSetWait knows.
 */
static void
InitWaitSet(void)
{
	waitSet = CreateWaitEventSet(NULL, 4);
	socketPos = AddWaitEventToSet(waitSet, WL_SOCKET_READABLE, MyProcPort->sock, NULL, NULL);
	AddWaitEventToSet(waitSet, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(waitSet, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
#ifdef __linux__
	timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	if (timer < 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not create a timer: %m")));
	AddWaitEventToSet(waitSet, WL_SOCKET_READABLE, timer, NULL, NULL);
#endif
}

#ifdef __linux__
/* In microseconds; nobody sets it back. */
static int64
MonotonicTime(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64CONST(1000000) + now.tv_nsec / 1000;
}
#endif

/* Wait for the socket, the latch, or the time in microseconds if it is not 0. */
static void
Wait(uint32 socketEvents, int us)
{
	long		timeout = ComputeSleepTime();
	WaitEvent	event;

#ifdef __linux__
	static int64 armedUntil = 0;	/* 0: not armed */
	int64		now = MonotonicTime();
	int64		wanted = us > 0 ? now + us : 0;

	/*
	 * Programming the timer is what costs in a virtual machine.  So one that
	 * goes off too early is left as it is: that is a look more, and then it
	 * is set.  Setting it also forgets that it has expired.
	 */
	if (armedUntil != 0 ? now >= armedUntil || (wanted != 0 && wanted < armedUntil) : wanted != 0)
	{
		struct itimerspec at = {.it_value = {us / 1000000, us % 1000000 * 1000L}};

		if (timerfd_settime(timer, 0, &at, NULL) != 0)
			elog(ERROR, "could not set a timer: %m");
		armedUntil = wanted;
	}
#else
	if (us > 0)
		timeout = Min(timeout, (us + 999) / 1000);
#endif
	ModifyWaitEvent(waitSet, socketPos, socketEvents, NULL);
	WaitEventSetWait(waitSet, timeout, &event, 1, WAIT_EVENT_WAL_SENDER_MAIN);
}

/*
 * How long to wait until the next look for WAL, in microseconds; 0: until
 * somebody says that there is some.
 */
static int
LookAgainIn(void)
{
	int			us;

	if (!IsEarly())
		return 0;

	us = EarlyWait(GetFlushRecPtr(NULL));
	return us > 0 ? us : ExpectWalIn(lastNews);
}

/*
 * Everything is sent: wait for a flush (the condition variable of
 * walsenders), for a commit that is about to be flushed (TellSenders), for
 * the standby, a signal, or the time to look again.
 */
static void
WaitForNews(void)
{
	StreamCounters *counters = &MyEarlySender->counters;
	pg_atomic_uint32 *sleeping = &MyEarlySender->sleeping;
	int			us = LookAgainIn();
	bool		flagged = us == 0 && IsEarly();

	ConditionVariablePrepareToSleep(&WalSndCtl->wal_flush_cv);
	if (flagged)
	{
		/* From here on commits set the latch; those before are counted. */
		pg_atomic_exchange_u32(sleeping, 1);
		us = LookAgainIn();
	}

	/* What came before we were in the list woke nobody. */
	if (!HasNews())
	{
		CountUp(us > 0 ? &counters->polls : &counters->sleeps, 1);
		Wait(WL_SOCKET_READABLE, us);
	}

	ConditionVariableCancelSleep();
	if (pg_atomic_read_u32(sleeping) != 0)
		pg_atomic_write_u32(sleeping, 0);
	else if (flagged)
		CountUp(&counters->commit_wakeups, 1);
}

static void
ProcessInterruptsOfStream(void)
{
	CHECK_FOR_INTERRUPTS();

	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
		/* It is a setting, too; the file's value is not for us. */
		ExitOnAnyError = true;
		SyncRepInitConfig();
		pg_atomic_write_u64(&MyEarlySender->counters.early, IsEarly());
	}

	/* From here on nothing writes WAL but the checkpointer, which waits for this. */
	if (gotStopping)
		WalSndSetState(WALSNDSTATE_STOPPING);
}

static void
StreamLoop(void)
{
	TimestampTz lastStats = 0;

	lastReply = GetCurrentTimestamp();

	for (;;)
	{
		bool		caughtUp = false;

		ResetLatch(MyLatch);
		ProcessInterruptsOfStream();

		lastProcessing = GetCurrentTimestamp();
		if (ProcessRepliesIfAny(sentPtr))
		{
			lastReply = lastProcessing;
			waitingForPing = false;
		}
		if (copyDoneReceived)
			FinishAsAsked();

		/* One message at a time, so that our buffer stays small. */
		if (!pq_is_send_pending() && !copyDoneReceived)
		{
			if (replyRequested)
				SendKeepalive(false);
			replyRequested = false;
			caughtUp = SendNews();
		}
		if (pq_flush_if_writable() != 0)
			EndConnection();

		if (caughtUp && !pq_is_send_pending())
		{
			if (MyWalSnd->state == WALSNDSTATE_CATCHUP)
			{
				ereport(DEBUG1,
						(errmsg_internal("\"%s\" has now caught up with upstream server",
										 application_name)));
				WalSndSetState(WALSNDSTATE_STREAMING);
			}
			if (gotLastCycle)
				FinishIfReplicated();
		}
		CheckTimeout();

		if (TimestampDifferenceExceeds(lastStats, lastProcessing, STATS_FLUSH_INTERVAL))
		{
			pgstat_report_stat(true);
			lastStats = lastProcessing;
		}

		if (pq_is_send_pending())
		{
			CountUp(&MyEarlySender->counters.blocked, 1);
			Wait(WL_SOCKET_WRITEABLE | (copyDoneReceived ? 0 : WL_SOCKET_READABLE), 0);
		}
		else if (caughtUp)
			WaitForNews();
	}
}

/* Refuse what START_REPLICATION refuses, and what only it can do. */
static void
CheckStart(XLogRecPtr start, TimeLineID timeline)
{
	TimeLineID	currentTLI;
	XLogRecPtr	flushed;
	XLogSegNo	segno;

	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("recovery is in progress"),
				 errdetail("Only a primary has WAL that is not flushed yet."),
				 errhint("Use START_REPLICATION to stream from a standby.")));
	/* As in StartReplication: it may have been promoted since the connection was made. */
	am_cascading_walsender = false;

	flushed = GetFlushRecPtr(&currentTLI);
	if (timeline != currentTLI)
	{
		if (!tliInHistory(timeline, readTimeLineHistory(currentTLI)))
			ereport(ERROR,
					(errmsg("requested timeline %u is not in this server's history", timeline)));
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("requested timeline %u is not the current timeline %u of this server",
						timeline, currentTLI),
				 errhint("Use START_REPLICATION to stream an earlier timeline.")));
	}
	if (start > flushed)
		ereport(ERROR,
				(errmsg("requested starting point %X/%X is ahead of the WAL flush position of this server %X/%X",
						LSN_FORMAT_ARGS(start), LSN_FORMAT_ARGS(flushed))));

	errno = ENOENT;
	XLByteToSeg(start, segno, wal_segment_size);
	CheckXLogRemoved(segno, currentTLI);
}

/* End the transaction of the CALL, so that it holds up neither VACUUM nor anybody's locks. */
static void
LeaveTransaction(void)
{
	SPI_connect_ext(SPI_OPT_NONATOMIC);
	SPI_commit();
	SPI_finish();
	CommitTransactionCommand();
	disable_all_timeouts(false);

	/* What there is outside of transactions */
	CurrentResourceOwner = AuxProcessResourceOwner;
	MemoryContextSwitchTo(AllocSetContextCreate(TopMemoryContext, "early stream", ALLOCSET_DEFAULT_SIZES));
}

/*
 * The xmin of hot standby feedback is for all databases, not only for the
 * one that this connection had to name (see InitWalSender).
 */
static void
ShowXminToAll(void)
{
	LWLockAcquire(ProcArrayLock, LW_EXCLUSIVE);
	MyProc->statusFlags |= PROC_AFFECTS_ALL_HORIZONS;
	ProcGlobal->statusFlags[MyProc->pgxactoff] = MyProc->statusFlags;
	LWLockRelease(ProcArrayLock);
}

/*
 * walrider.stream_wal(start pg_lsn, timeline int, slot name)
 */
Datum
walrider_stream_wal(PG_FUNCTION_ARGS)
{
	CallContext *context = (CallContext *) fcinfo->context;
	XLogRecPtr	start;
	TimeLineID	timeline;
	char	   *slot;
	StringInfoData buf;

	if (!am_walsender)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("walrider.stream_wal() can only be called on a replication connection"),
				 errhint("Connect with replication=database.")));
	if (context == NULL || !IsA(context, CallContext) || context->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("walrider.stream_wal() cannot run inside a transaction block")));
	if (!has_rolreplication(GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to stream WAL"),
				 errdetail("Only roles with the %s attribute may stream WAL.", "REPLICATION")));
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("start and timeline must not be null")));
	start = PG_GETARG_LSN(0);
	timeline = PG_GETARG_INT32(1);
	slot = PG_ARGISNULL(2) ? NULL : MemoryContextStrdup(TopMemoryContext, NameStr(*PG_GETARG_NAME(2)));

	ereport(log_replication_commands ? LOG : DEBUG1,
			(errmsg("received replication command: %s", debug_query_string)));
	CheckStart(start, timeline);

	if (!FindInsertResult())
		ereport(WARNING,
				(errmsg("WAL cannot be sent before it is flushed"),
				 errdetail("The shared memory of this server is not what walrider was built for."),
				 errhint("Rebuild walrider against this server.")));
	AttachEarlySenders();

	if (slot != NULL)
	{
#if PG_VERSION_NUM >= 180000
		ReplicationSlotAcquire(slot, true, true);
#else
		ReplicationSlotAcquire(slot, true);
#endif
		if (SlotIsLogical(MyReplicationSlot))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("cannot use a logical replication slot for physical replication")));
	}

	/* From here on there is no way back. */
	ExitOnAnyError = true;
	ClaimEarlySender();
	pg_atomic_write_u64(&MyEarlySender->counters.early, IsEarly());
	LeaveTransaction();
	SetSignalHandlers();
	InitWaitSet();
	ShowXminToAll();
	InitWalRead(timeline);
	InitReplies();
	initStringInfo(&output);

	WalSndSetState(WALSNDSTATE_CATCHUP);
	pq_beginmessage(&buf, PqMsg_CopyBothResponse);
	pq_sendbyte(&buf, 0);
	pq_sendint16(&buf, 0);
	pq_endmessage(&buf);
	pq_flush();

	sentPtr = start;
	SpinLockAcquire(&MyWalSnd->mutex);
	MyWalSnd->sentPtr = sentPtr;
	SpinLockRelease(&MyWalSnd->mutex);
	SyncRepInitConfig();

	StreamLoop();
	pg_unreachable();
}
