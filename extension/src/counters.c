/*-------------------------------------------------------------------------
 *
 * counters.c
 *	  walrider.stat_redo: what the startup process and its workers did.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "funcapi.h"
#include "storage/shmem.h"
#include "utils/tuplestore.h"

#include "redo.h"
#include "walrider.h"

/* Each row has one writer, and anybody reads; rows of two writers are in cache lines apart. */
typedef struct ProcessCounters
{
	pg_atomic_uint64 counters[NUM_REDO_COUNTERS];
	char		padding[PG_CACHE_LINE_SIZE];
} ProcessCounters;

typedef struct RedoShared
{
	pg_atomic_uint32 active;
	ProcessCounters processes[2 + MAX_REDO_WORKERS];	/* the startup process is the first, the raiser the last */
} RedoShared;

static RedoShared *Redo = NULL;
static int	my_row = 0;

PG_FUNCTION_INFO_V1(walrider_stat_get_redo);

Size
CountersSharedSize(void)
{
	return sizeof(RedoShared);
}

void
AttachCountersShared(void)
{
	bool		found;

	Redo = ShmemInitStruct("walrider redo", sizeof(RedoShared), &found);
	if (found)
		return;
	pg_atomic_init_u32(&Redo->active, 0);
	for (int p = 0; p < lengthof(Redo->processes); p++)
		for (int i = 0; i < NUM_REDO_COUNTERS; i++)
			pg_atomic_init_u64(&Redo->processes[p].counters[i], 0);
}

/* This process is not the startup process. */
void
CountAs(int row)
{
	my_row = row;
}

void
CountRedo(RedoCounter counter, uint64 by)
{
	CountUp(&Redo->processes[my_row].counters[counter], by);
}

void
SetRedoActive(bool active)
{
	pg_atomic_write_u32(&Redo->active, active);
}

static uint64
CountOf(RedoCounter counter)
{
	uint64		sum = 0;

	for (int p = 0; p < lengthof(Redo->processes); p++)
		sum += pg_atomic_read_u64(&Redo->processes[p].counters[counter]);
	return sum;
}

static uint64
WorkersVisits(void)
{
	return CountOf(REDO_VISITS) - pg_atomic_read_u64(&Redo->processes[0].counters[REDO_VISITS]);
}

/* When the startup process ends: the counters go with the shared memory. */
void
SayRedoSummary(int code, Datum arg)
{
	ereport(LOG,
			(errmsg("walrider redid " UINT64_FORMAT " of " UINT64_FORMAT " records early, in " UINT64_FORMAT " slices",
					CountOf(REDO_EARLY), CountOf(REDO_RECORDS), CountOf(REDO_SLICES)),
			 errdetail_log("skipped " UINT64_FORMAT ", in place " UINT64_FORMAT ", partial " UINT64_FORMAT
						   ", horizon " UINT64_FORMAT ", cleanup lock " UINT64_FORMAT ", entry first " UINT64_FORMAT
						   ", refused " UINT64_FORMAT ", visits " UINT64_FORMAT ", barriers " UINT64_FORMAT
						   ", minRecoveryPoint " UINT64_FORMAT ", held " UINT64_FORMAT ", by workers " UINT64_FORMAT
						   ", us waited for them " UINT64_FORMAT,
						   CountOf(REDO_SKIPPED), CountOf(REDO_IN_PLACE), CountOf(REDO_PARTIAL),
						   CountOf(REDO_PRUNE_HORIZON), CountOf(REDO_CLEANUP_LOCK), CountOf(REDO_ENTRY_FIRST),
						   CountOf(REDO_REFUSED), CountOf(REDO_VISITS), CountOf(REDO_BARRIERS),
						   CountOf(REDO_MIN_RECOVERY), CountOf(REDO_HELD), WorkersVisits(), CountOf(REDO_WAIT_TIME))));
}

Datum
walrider_stat_get_redo(PG_FUNCTION_ARGS)
{
	TupleDesc	tupdesc;
	Datum		values[3 + NUM_REDO_COUNTERS];
	bool		nulls[3 + NUM_REDO_COUNTERS] = {0};
	int			n = 0;

	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	if (Redo == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("walrider must be loaded via \"shared_preload_libraries\"")));

	values[n++] = BoolGetDatum(pg_atomic_read_u32(&Redo->active) != 0 && RecoveryInProgress());
	values[n++] = Int32GetDatum(RunningWorkers());
	for (int i = 0; i < REDO_WAIT_TIME; i++)
		values[n++] = Int64GetDatum((int64) CountOf(i));
	values[n++] = Int64GetDatum((int64) WorkersVisits());
	values[n++] = Float8GetDatum((double) CountOf(REDO_WAIT_TIME) / 1000.0);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(tupdesc, values, nulls)));
}
