/*-------------------------------------------------------------------------
 *
 * pgoutput.c
 *	  walrider_pgoutput: an output plugin that sends what pgoutput sends,
 *	  less what a subscriber does nothing with.
 *
 * A library of its own, since a slot names its plugin by the library.  It
 * needs nothing else of Walrider, and does nothing where no slot names it.
 *
 * pgoutput already leaves out plain transactions without a published change.
 * It cannot do so where a transaction's first message goes out before its
 * changes are looked at: with prepared transactions, and with those that are
 * streamed while they run.  We call its callbacks and stand where its messages
 * leave, in the context's write functions.  There the first message waits
 * until another one follows it; if none does, the last one is dropped too.
 *
 * What the subscriber has been told of a transaction must be known when the
 * transaction ends: the end of a prepared transaction that the subscriber
 * does not have is an error there.  In one session a hash table knows.  After
 * a restart we let the server decode again what had been prepared before,
 * write nothing of it, and look whether anything would have been written, with
 * the publications that the subscriber had named by then.  A file in the
 * slot's directory has those.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "libpq/libpq.h"
#include "libpq/pqformat.h"
#include "nodes/makefuncs.h"
#include "replication/logical.h"
#include "replication/logicalproto.h"
#include "replication/origin.h"
#include "replication/output_plugin.h"
#include "replication/reorderbuffer.h"
#include "replication/snapbuild.h"
#include "replication/walsender_private.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "wishes.h"

#if PG_VERSION_NUM < 170006 || PG_VERSION_NUM >= 190000
#error "walrider_pgoutput supports PostgreSQL 17, from 17.6 on, and 18"
#endif

#if PG_VERSION_NUM >= 180000
PG_MODULE_MAGIC_EXT(.name = "walrider_pgoutput", .version = "0.2");
#else
PG_MODULE_MAGIC;
#endif

/*
 * While a transaction is decoded of which nothing is sent, a keepalive goes
 * out as often.  The sender does not know the subscriber's
 * wal_receiver_timeout, and its own wal_sender_timeout, by which the server
 * sends keepalives, may be much longer.
 */
#define KEEPALIVE_INTERVAL_MS 100

/* What becomes of a message that pgoutput writes now. */
typedef enum Fate
{
	FATE_SEND,
	FATE_OPEN,					/* send it, after the one that waits */
	FATE_JUDGE,					/* drop it, and note that there was one */
	FATE_DROP
} Fate;

/*
 * A prepared or streamed transaction, until it ends; or a subtransaction of a
 * streamed one of which something was sent.  Not in txn->output_plugin_private:
 * pgoutput would take that for its own.
 */
typedef struct Known
{
	TransactionId xid;			/* key */
	bool		sent;			/* the subscriber knows of it */
	bool		own;			/* of a streamed one: not by subtransactions alone */
	bool		prepared;		/* `sent` is final */
} Known;

typedef struct Wrapper
{
	/* How the server writes */
	LogicalOutputPluginWriterPrepareWrite prepare_write;
	LogicalOutputPluginWriterWrite write;
	LogicalOutputPluginWriterUpdateProgress update_progress;

	HTAB	   *known;			/* of Known */

	void	   *stock;			/* pgoutput's own data */
	List	   *wishes;			/* of Wish, by position; the last is today's */

	/* The prepared or streamed transaction being decoded; NULL: a plain one */
	ReorderBufferTXN *txn;
	Known	   *top;			/* its entry */
	bool		streaming;		/* a chunk of it */
	bool		open;			/* its BEGIN PREPARE or STREAM START is out */
	bool		judging;		/* it was prepared in an earlier session */

	Fate		fate;
	bool		wrote;			/* something was sent since this was reset */
	bool		stale;			/* caches may be those of an older snapshot */

	bool		busy;			/* something was sent since sent_at */
	TimestampTz sent_at;
} Wrapper;

static OutputPluginCallbacks stock;
static Wrapper *my = NULL;

static Known *
Find(TransactionId xid)
{
	return hash_search(my->known, &xid, HASH_FIND, NULL);
}

static Known *
Enter(TransactionId xid)
{
	bool		found;
	Known	   *known = hash_search(my->known, &xid, HASH_ENTER, &found);

	if (!found)
		known->sent = known->own = known->prepared = false;
	return known;
}

static void
Forget(TransactionId xid)
{
	hash_search(my->known, &xid, HASH_REMOVE, NULL);
}

static void
ForgetSubtransactions(ReorderBufferTXN *txn)
{
	dlist_iter	iter;

	dlist_foreach(iter, &txn->subtxns)
		Forget(dlist_container(ReorderBufferTXN, node, iter.cur)->xid);
}

/*
 * Whether an earlier session decided what the subscriber has of this
 * transaction.  Then the server skipped its PREPARE in this one.  What was
 * prepared before the slot knew of two phases is not such a transaction: its
 * PREPARE is sent when it commits, each time that it is decoded.
 */
static bool
WasPrepared(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	return rbtxn_skip_prepared(txn) &&
		txn->final_lsn >= ctx->slot->data.two_phase_at;
}

/* ----------
 * What leaves
 * ----------
 */

/*
 * STREAM START, in pgoutput's words.  It cannot write this itself: that it is
 * the first, for which the subscriber makes a file or a worker, it takes from
 * the transaction's flag, which is set by chunks of which nothing was sent.
 */
static void
WriteStreamStart(LogicalDecodingContext *ctx, XLogRecPtr lsn, TransactionId xid)
{
	ReorderBufferTXN *txn = my->txn;
	bool		first = !my->top->sent;
	bool		has_origin = first && txn->origin_id != InvalidRepOriginId;
	char	   *origin;

	my->prepare_write(ctx, lsn, xid, !has_origin);
	logicalrep_write_stream_start(ctx->out, txn->xid, first);
	if (has_origin && replorigin_by_oid(txn->origin_id, true, &origin))
	{
		my->write(ctx, lsn, xid, false);
		my->prepare_write(ctx, lsn, xid, true);
		logicalrep_write_origin(ctx->out, origin, InvalidXLogRecPtr);
	}
	my->write(ctx, lsn, xid, true);
}

static void
PrepareWrite(LogicalDecodingContext *ctx, XLogRecPtr lsn, TransactionId xid, bool last_write)
{
	if (my->fate == FATE_OPEN)
	{
		my->fate = FATE_SEND;	/* also what is written here */
		if (my->streaming)
			WriteStreamStart(ctx, lsn, xid);
		else
			stock.begin_prepare_cb(ctx, my->txn);
		my->top->sent = my->open = true;
	}

	if (my->fate == FATE_SEND)
	{
		my->prepare_write(ctx, lsn, xid, last_write);
		my->wrote = my->busy = true;
		return;
	}

	resetStringInfo(ctx->out);
	if (my->fate == FATE_JUDGE)
		my->top->sent = true;
}

static void
Write(LogicalDecodingContext *ctx, XLogRecPtr lsn, TransactionId xid, bool last_write)
{
	if (my->fate == FATE_SEND)
		my->write(ctx, lsn, xid, last_write);
}

/*
 * A keepalive amid a transaction.  It says no more than the sender's last
 * one, but the subscriber sees that the link is alive.
 */
static void
KeepAlive(void)
{
	TimestampTz now = GetCurrentTimestamp();
	StringInfoData message;

	if (my->busy)
	{
		my->busy = false;
		my->sent_at = now;
		return;
	}
	if (!TimestampDifferenceExceeds(my->sent_at, now, KEEPALIVE_INTERVAL_MS))
		return;
	my->sent_at = now;

	/* What waits in the socket is as good. */
	if (pq_is_send_pending())
		return;

	initStringInfo(&message);
	pq_sendbyte(&message, 'k');
	pq_sendint64(&message, MyWalSnd->sentPtr);	/* only we change it */
	pq_sendint64(&message, now);
	pq_sendbyte(&message, 0);
	pq_putmessage_noblock('d', message.data, message.len);
	pfree(message.data);

	/* If the connection is gone, the server's next write finds out. */
	(void) pq_flush_if_writable();
}

/*
 * The server sends a keepalive at the end of a transaction that was skipped
 * if synchronous commits may wait for it.
 */
static void
UpdateProgress(LogicalDecodingContext *ctx, XLogRecPtr lsn, TransactionId xid, bool skipped)
{
	if (ctx->end_xact)
	{
		/* A position long past, that was reported in its time. */
		if (my->judging)
			return;
		if (my->fate == FATE_DROP)
			skipped = true;
	}
	my->update_progress(ctx, lsn, xid, skipped);
	if (!ctx->end_xact)
		KeepAlive();
}

/* ----------
 * Beginnings and ends
 * ----------
 */

/*
 * What an earlier session decided, we decide again on what the catalogs were
 * then.  Caches follow the catalogs in the order of commits, and have come
 * further: they are emptied, so that they fill by the transaction's snapshot,
 * and emptied again before anything else uses them.  That also makes pgoutput
 * forget that it described relations in messages that we dropped.
 */
static void
RefreshCaches(bool refresh)
{
	if (refresh || my->stale)
		InvalidateSystemCaches();
	my->stale = refresh;
}

/*
 * So that the verdict can be the same, a transaction that catalogs were changed
 * beside has to be sent with what they were at its beginning, too.
 */
static bool
NeedsOwnCatalogs(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	return ctx->slot->data.two_phase &&
		(txn->ninvalidations_distributed > 0 || rbtxn_distr_inval_overflowed(txn));
}

/*
 * Let pgoutput work with the options that it had when this was prepared.
 * What is older than the file is taken to have had today's.
 */
static void
ChooseOptions(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	ListCell   *cell;

	ctx->output_plugin_private = my->stock;
	if (!my->judging)
		return;
	foreach(cell, my->wishes)
	{
		Wish	   *wish = lfirst(cell);

		if (wish->since <= txn->final_lsn)
			ctx->output_plugin_private = wish->stock;
	}
}

static void
BeginTxn(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, bool streaming)
{
	my->txn = txn;
	my->top = Enter(txn->xid);
	my->streaming = streaming;
	my->open = false;
	my->judging = WasPrepared(ctx, txn);
	ChooseOptions(ctx, txn);
	RefreshCaches(my->judging || NeedsOwnCatalogs(ctx, txn));
}

static void
EndTxn(LogicalDecodingContext *ctx)
{
	ctx->output_plugin_private = my->stock;
	my->txn = NULL;
	my->top = NULL;
	my->streaming = my->open = my->judging = false;
}

static void
begin_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	EndTxn(ctx);
	RefreshCaches(false);
	my->fate = FATE_SEND;
	stock.begin_cb(ctx, txn);
}

static void
commit_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	my->fate = FATE_SEND;
	stock.commit_cb(ctx, txn, commit_lsn);
}

static void
begin_prepare_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	BeginTxn(ctx, txn, false);
}

/* Also where a concurrent abort cut it short: its end is decoded all the same. */
static void
prepare_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr prepare_lsn)
{
	Known	   *known = Enter(txn->xid);

	known->prepared = true;
	if (!WasPrepared(ctx, txn))
	{
		my->fate = known->sent ? FATE_SEND : FATE_DROP;
		stock.prepare_cb(ctx, txn, prepare_lsn);
	}
	EndTxn(ctx);
}

static void
commit_prepared_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	Known	   *known = Find(txn->xid);

	EndTxn(ctx);
	my->fate = known == NULL || known->sent ? FATE_SEND : FATE_DROP;
	stock.commit_prepared_cb(ctx, txn, commit_lsn);
	Forget(txn->xid);
}

/*
 * The server does not decode a transaction for its rollback, so that one
 * prepared in an earlier session is not judged.  A subscriber ignores the
 * rollback of a transaction that it does not have.
 */
static void
rollback_prepared_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn,
					 XLogRecPtr prepare_end_lsn, TimestampTz prepare_time)
{
	Known	   *known = Find(txn->xid);

	EndTxn(ctx);
	my->fate = known == NULL || known->sent || !known->prepared ? FATE_SEND : FATE_DROP;
	stock.rollback_prepared_cb(ctx, txn, prepare_end_lsn, prepare_time);
	Forget(txn->xid);
}

/* pgoutput has to know that changes belong to a chunk, whatever is sent of it. */
static void
stream_start_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	BeginTxn(ctx, txn, true);
	my->fate = FATE_DROP;
	stock.stream_start_cb(ctx, txn);
}

static void
stream_stop_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	my->fate = my->open ? FATE_SEND : FATE_DROP;
	stock.stream_stop_cb(ctx, txn);
	EndTxn(ctx);
}

static void
stream_abort_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr abort_lsn)
{
	ReorderBufferTXN *toptxn = rbtxn_get_toptxn(txn);
	Known	   *known = Find(txn->xid);

	EndTxn(ctx);
	my->fate = known != NULL && known->sent ? FATE_SEND : FATE_DROP;
	stock.stream_abort_cb(ctx, txn, abort_lsn);
	if (txn == toptxn)
		ForgetSubtransactions(txn);
	Forget(txn->xid);
}

static void
stream_commit_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	Known	   *known = Find(txn->xid);

	EndTxn(ctx);
	my->fate = known != NULL && known->sent ? FATE_SEND : FATE_DROP;
	stock.stream_commit_cb(ctx, txn, commit_lsn);
	ForgetSubtransactions(txn);
	Forget(txn->xid);
}

/* Whether anything that was sent of it still counts. */
static bool
AnythingLeft(ReorderBufferTXN *txn, Known *known)
{
	dlist_iter	iter;

	if (known->own)
		return true;
	dlist_foreach(iter, &txn->subtxns)
	{
		if (Find(dlist_container(ReorderBufferTXN, node, iter.cur)->xid) != NULL)
			return true;
	}
	return false;
}

/*
 * If all that was sent was rolled back since, to a savepoint, the subscriber
 * is told to abort instead.  It would prepare an empty transaction, and after
 * a restart we could not know: what was rolled back is not decoded again.
 */
static void
stream_prepare_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr prepare_lsn)
{
	Known	   *known = Enter(txn->xid);

	EndTxn(ctx);
	my->judging = WasPrepared(ctx, txn);
	if (!my->judging && known->sent && !AnythingLeft(txn, known))
	{
		my->fate = FATE_SEND;
		stock.stream_abort_cb(ctx, txn, txn->end_lsn);
		known->sent = false;
	}
	known->prepared = true;
	my->fate = known->sent && !my->judging ? FATE_SEND : FATE_DROP;
	stock.stream_prepare_cb(ctx, txn, prepare_lsn);
	ForgetSubtransactions(txn);
	EndTxn(ctx);
}

/* ----------
 * Changes: of whatever pgoutput writes here something is published.
 * ----------
 */

/* Returns false if the change makes no difference. */
static bool
BeforeChange(void)
{
	my->wrote = false;
	if (my->txn == NULL)
		my->fate = FATE_SEND;
	else if (my->judging)
	{
		my->fate = FATE_JUDGE;
		return !my->top->sent;
	}
	else
		my->fate = my->open ? FATE_SEND : FATE_OPEN;
	return true;
}

/* An abort of this subtransaction alone concerns the subscriber from now on. */
static void
AfterChange(TransactionId xid)
{
	if (!my->streaming || !my->wrote)
		return;
	if (xid == my->txn->xid)
		my->top->own = true;
	else
		Enter(xid)->sent = true;
}

static void
change_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn,
		  Relation relation, ReorderBufferChange *it)
{
	if (!BeforeChange())
		return;
	stock.change_cb(ctx, txn, relation, it);
	AfterChange(it->txn->xid);
}

static void
truncate_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn,
			int nrelations, Relation relations[], ReorderBufferChange *it)
{
	if (!BeforeChange())
		return;
	stock.truncate_cb(ctx, txn, nrelations, relations, it);
	AfterChange(it->txn->xid);
}

/* pgoutput gives those of subtransactions the transaction's own xid. */
static void
message_cb(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr message_lsn,
		   bool transactional, const char *prefix, Size sz, const char *text)
{
	if (!transactional)
		my->fate = FATE_SEND;	/* where it is read, between transactions */
	else if (!BeforeChange())
		return;
	stock.message_cb(ctx, txn, message_lsn, transactional, prefix, sz, text);
	if (transactional)
		AfterChange(txn->xid);
}

/* ----------
 * The session
 * ----------
 */

static void
ForgetWrapper(void *arg)
{
	my = NULL;
}

/*
 * Where decoding starts: what ended before it is skipped.  The snapshot
 * builder does not say, but answers for each position.
 */
static XLogRecPtr
StartOfDecoding(SnapBuild *builder)
{
	XLogRecPtr	low = 0;
	XLogRecPtr	high = PG_UINT64_MAX;

	while (low < high)
	{
		XLogRecPtr	middle = low + (high - low) / 2;

		if (SnapBuildXactNeedsSkip(builder, middle))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static const char *
OptionGiven(List *options, const char *name)
{
	ListCell   *cell;

	foreach(cell, options)
	{
		DefElem    *option = lfirst(cell);

		if (strcmp(option->defname, name) == 0 && option->arg != NULL)
			return strVal(option->arg);
	}
	return "";
}

/* pgoutput's data for an earlier wish.  It parses its options at startup only. */
static void *
StockWith(LogicalDecodingContext *ctx, OutputPluginOptions *opt, Wish *wish)
{
	List	   *today = ctx->output_plugin_options;
	bool		streaming = ctx->streaming;
	bool		twophase_opt_given = ctx->twophase_opt_given;
	List	   *options = NIL;
	ListCell   *cell;
	void	   *data;

	foreach(cell, today)
	{
		DefElem    *option = lfirst(cell);

		if (strcmp(option->defname, "publication_names") != 0 &&
			strcmp(option->defname, "messages") != 0)
			options = lappend(options, option);
	}
	options = lappend(options, makeDefElem("publication_names",
										   (Node *) makeString(pstrdup(wish->publications)), -1));
	if (wish->messages[0] != '\0')
		options = lappend(options, makeDefElem("messages",
											   (Node *) makeString(pstrdup(wish->messages)), -1));

	ctx->output_plugin_options = options;
	stock.startup_cb(ctx, opt, false);
	data = ctx->output_plugin_private;

	ctx->output_plugin_options = today;
	ctx->output_plugin_private = my->stock;
	ctx->streaming = streaming;
	ctx->twophase_opt_given = twophase_opt_given;
	return data;
}

/*
 * Note from where on what is prepared is sent by today's options.  Earlier
 * sessions that started no earlier do not count: the subscriber has kept
 * nothing of what they sent, or it would not ask for it.  Entries for WAL that
 * is not decoded again are left out.  Functions of SQL, which look at a slot,
 * are no subscriber, and leave the file as it is.
 */
static void
RememberOptions(LogicalDecodingContext *ctx, OutputPluginOptions *opt, XLogRecPtr start)
{
	Wish	   *today;
	List	   *wishes = ReadWishes(ctx);
	bool		changed = false;
	ListCell   *cell;

	today = MakeWish(start, OptionGiven(ctx->output_plugin_options, "publication_names"),
					 OptionGiven(ctx->output_plugin_options, "messages"));
	while (wishes != NIL && ((Wish *) llast(wishes))->since >= start)
	{
		wishes = list_delete_last(wishes);
		changed = true;
	}
	if (wishes == NIL ||
		strcmp(((Wish *) llast(wishes))->publications, today->publications) != 0 ||
		strcmp(((Wish *) llast(wishes))->messages, today->messages) != 0)
	{
		wishes = lappend(wishes, today);
		changed = true;
	}
	while (list_length(wishes) > 1 &&
		   ((Wish *) lsecond(wishes))->since <= ctx->slot->data.restart_lsn)
	{
		wishes = list_delete_first(wishes);
		changed = true;
	}
	if (changed && ctx->update_progress != NULL)
		WriteWishes(ctx, wishes);

	foreach(cell, wishes)
	{
		Wish	   *wish = lfirst(cell);

		wish->stock = lnext(wishes, cell) == NULL ? my->stock : StockWith(ctx, opt, wish);
	}
	my->wishes = wishes;
}

/*
 * A subscription copies its tables through slots of its own, which always
 * name pgoutput.
 */
static void
CheckTrusted(void)
{
	const char *setting = GetConfigOption("output_plugin_libraries", true, false);
	List	   *names = NIL;
	ListCell   *cell;

	if (setting == NULL || !SplitGUCList(pstrdup(setting), ',', &names))
		return;
	foreach(cell, names)
	{
		if (strcmp(lfirst(cell), "pgoutput") == 0)
			return;
	}
	ereport(WARNING,
			(errmsg("subscriptions cannot copy their tables from this server"),
			 errdetail("They do so through slots with the output plugin \"%s\", which \"%s\" does not name.",
					   "pgoutput", "output_plugin_libraries"),
			 errhint("Set %s = '%s' and reload the configuration.",
					 "output_plugin_libraries", "pgoutput, walrider_pgoutput")));
}

static void
startup_cb(LogicalDecodingContext *ctx, OutputPluginOptions *opt, bool is_init)
{
	SnapBuild  *builder = ctx->snapshot_builder;
	MemoryContextCallback *callback;
	XLogRecPtr	start = StartOfDecoding(builder);
	HASHCTL		ctl = {0};

	stock.startup_cb(ctx, opt, is_init);
	if (is_init)
	{
		CheckTrusted();
		return;
	}

	my = MemoryContextAllocZero(ctx->context, sizeof(Wrapper));
	callback = MemoryContextAllocZero(ctx->context, sizeof(MemoryContextCallback));
	callback->func = ForgetWrapper;
	MemoryContextRegisterResetCallback(ctx->context, callback);

	ctl.keysize = sizeof(TransactionId);
	ctl.entrysize = sizeof(Known);
	ctl.hcxt = ctx->context;
	my->known = hash_create("walrider_pgoutput transactions", 32, &ctl,
							HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	my->stock = ctx->output_plugin_private;
	my->sent_at = GetCurrentTimestamp();
	my->prepare_write = ctx->prepare_write;
	my->write = ctx->write;
	my->update_progress = ctx->update_progress;
	ctx->prepare_write = PrepareWrite;
	ctx->write = Write;
	if (ctx->update_progress != NULL)	/* else SQL functions */
		ctx->update_progress = UpdateProgress;

	/*
	 * The server decodes at its commit what was prepared before this
	 * position.  For it those are transactions that were prepared before the
	 * slot knew of two phases; for us, also those of earlier sessions.  Only
	 * in memory: the slot's own position tells the two apart.
	 */
	if (ctx->slot->data.two_phase)
		SnapBuildSetTwoPhaseAt(builder, Max(start, SnapBuildGetTwoPhaseAt(builder)));
	if (ctx->slot->data.two_phase || ctx->twophase_opt_given)
		RememberOptions(ctx, opt, start);
}

void
_PG_output_plugin_init(OutputPluginCallbacks *cb)
{
	LogicalOutputPluginInit init;

	init = (LogicalOutputPluginInit)
		load_external_function("$libdir/pgoutput", "_PG_output_plugin_init", false, NULL);
	if (init == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("library \"%s\" is not an output plugin", "$libdir/pgoutput"),
				 errhint("Install the server's own \"%s\" again.", "pgoutput")));
	init(cb);
	stock = *cb;

	cb->startup_cb = startup_cb;
	cb->begin_cb = begin_cb;
	cb->change_cb = change_cb;
	cb->truncate_cb = truncate_cb;
	cb->message_cb = message_cb;
	cb->commit_cb = commit_cb;
	cb->begin_prepare_cb = begin_prepare_cb;
	cb->prepare_cb = prepare_cb;
	cb->commit_prepared_cb = commit_prepared_cb;
	cb->rollback_prepared_cb = rollback_prepared_cb;
	cb->stream_start_cb = stream_start_cb;
	cb->stream_stop_cb = stream_stop_cb;
	cb->stream_abort_cb = stream_abort_cb;
	cb->stream_prepare_cb = stream_prepare_cb;
	cb->stream_commit_cb = stream_commit_cb;
	cb->stream_change_cb = change_cb;
	cb->stream_message_cb = message_cb;
	cb->stream_truncate_cb = truncate_cb;
}
