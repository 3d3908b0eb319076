/*-------------------------------------------------------------------------
 *
 * lag.c
 *	  How long ago the WAL was sent that the standby reports on: the lag
 *	  columns of pg_stat_replication.
 *
 * A ring of (position, time) for each of the three positions, so that one
 * that is far behind does not hold up the others.  The time is that of the
 * sending, not that of the flush, which may be still to come.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "walrider.h"

#define NUM_SAMPLES 8192

typedef struct Sample
{
	XLogRecPtr	lsn;
	TimestampTz time;
} Sample;

typedef struct Ring
{
	Sample		samples[NUM_SAMPLES];
	int			head;			/* next to be written */
	int			tail;			/* next to be read */
} Ring;

static Ring rings[NUM_LAG_HEADS];

void
InitLag(void)
{
	for (int i = 0; i < NUM_LAG_HEADS; i++)
		rings[i].head = rings[i].tail = 0;
}

/* WAL up to this position is on its way. */
void
NoteSent(XLogRecPtr lsn, TimestampTz now)
{
	for (int i = 0; i < NUM_LAG_HEADS; i++)
	{
		Ring	   *ring = &rings[i];
		int			at = ring->head;
		int			next = (at + 1) % NUM_SAMPLES;

		/*
		 * Full, because the standby is far behind: the newest sample gives
		 * way.  The time of the samples before it is what counts by then.
		 */
		if (next == ring->tail)
			at = (at + NUM_SAMPLES - 1) % NUM_SAMPLES;
		else
			ring->head = next;
		ring->samples[at].lsn = lsn;
		ring->samples[at].time = now;
	}
}

/*
 * How long ago what the standby reports was sent, in microseconds; -1 if it
 * reports nothing new.  A standby that stands still has the lag of the oldest
 * WAL that it has not confirmed, which grows.
 */
TimeOffset
LagOf(LagHead reader, XLogRecPtr lsn, TimestampTz now)
{
	Ring	   *ring = &rings[reader];
	TimestampTz sent = 0;

	while (ring->tail != ring->head && ring->samples[ring->tail].lsn <= lsn)
	{
		sent = ring->samples[ring->tail].time;
		ring->tail = (ring->tail + 1) % NUM_SAMPLES;
	}
	if (sent == 0 && ring->tail != ring->head)
		sent = ring->samples[ring->tail].time;
	return sent == 0 || sent > now ? -1 : now - sent;
}
