/*-------------------------------------------------------------------------
 *
 * lag.c
 *	  How long ago the WAL was sent that the standby reports on: the lag
 *	  columns of pg_stat_replication.
 *
 * A ring of (position, time) with a reader for each of the three positions,
 * as walsender.c has one.  The time is that of the sending, not that of the
 * flush, which may be still to come.
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

static Sample samples[NUM_SAMPLES];
static int	head;				/* next to be written */
static int	tail[NUM_LAG_HEADS];	/* next to be read */

void
InitLag(void)
{
	head = 0;
	memset(tail, 0, sizeof(tail));
}

/* WAL up to this position is on its way. */
void
NoteSent(XLogRecPtr lsn, TimestampTz now)
{
	int			next = (head + 1) % NUM_SAMPLES;

	for (int i = 0; i < NUM_LAG_HEADS; i++)
	{
		/*
		 * Full, because the standby is far behind: the newest sample gives
		 * way.  The time of the samples before it is what counts by then.
		 */
		if (next == tail[i])
		{
			next = head;
			head = (head + NUM_SAMPLES - 1) % NUM_SAMPLES;
			break;
		}
	}
	samples[head].lsn = lsn;
	samples[head].time = now;
	head = next;
}

/*
 * How long ago what the standby reports was sent, in microseconds; -1 if it
 * reports nothing new.  A standby that stands still has the lag of the oldest
 * WAL that it has not confirmed, which grows.
 */
TimeOffset
LagOf(LagHead reader, XLogRecPtr lsn, TimestampTz now)
{
	TimestampTz sent = 0;

	while (tail[reader] != head && samples[tail[reader]].lsn <= lsn)
	{
		sent = samples[tail[reader]].time;
		tail[reader] = (tail[reader] + 1) % NUM_SAMPLES;
	}
	if (sent == 0 && tail[reader] != head)
		sent = samples[tail[reader]].time;
	return sent == 0 || sent > now ? -1 : now - sent;
}
