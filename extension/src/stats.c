/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  walrider.stat_early_stream: what each sender did.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "replication/walsender.h"
#include "utils/pg_lsn.h"
#include "utils/tuplestore.h"

#include "walrider.h"

PG_FUNCTION_INFO_V1(walrider_stat_get_early_stream);

Datum
walrider_stat_get_early_stream(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	AttachEarlySenders();

	for (int i = 0; i < max_wal_senders; i++)
	{
		StreamCounters counters = Early->senders[i].counters;
		uint32		pid = pg_atomic_read_u32(&Early->senders[i].pid);
		pg_atomic_uint64 *rest[] = {
			&counters.sent_bytes, &counters.early_bytes, &counters.max_ahead_bytes,
			&counters.buffers_bytes, &counters.disk_bytes, &counters.disk_reads,
			&counters.wal_messages, &counters.keepalives, &counters.replies,
			&counters.coalesced, &counters.blocked, &counters.sleeps,
			&counters.polls, &counters.commit_wakeups
		};
		Datum		values[3 + lengthof(rest)];
		bool		nulls[3 + lengthof(rest)] = {0};

		if (pid == 0)
			continue;

		values[0] = Int32GetDatum((int32) pid);
		values[1] = BoolGetDatum(pg_atomic_read_u64(&counters.early) != 0);
		values[2] = LSNGetDatum(pg_atomic_read_u64(&counters.told));
		nulls[2] = pg_atomic_read_u64(&counters.told) == InvalidXLogRecPtr;
		for (int c = 0; c < lengthof(rest); c++)
			values[3 + c] = Int64GetDatum((int64) pg_atomic_read_u64(rest[c]));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

#ifndef WALRIDER_EARLY_REDO
PG_FUNCTION_INFO_V1(walrider_stat_get_redo);

Datum
walrider_stat_get_redo(PG_FUNCTION_ARGS)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("walrider was built without early redo")));
}
#endif
