/*-------------------------------------------------------------------------
 *
 * pace.c
 *	  When WAL that is not flushed goes, and how often to look for it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "replication/walsender_private.h"
#include "utils/timestamp.h"

#include "walrider.h"

/* If commits do not tell: look this often, this long after the last news. */
#define UNTOLD_POLL_INTERVAL 1000	/* us */
#define UNTOLD_POLL_DURATION 1000	/* ms */

/* Where flushes tell of WAL, look once in so many of them for what they do not. */
#define FLUSHES_PER_LOOK 8

/* Nothing waits longer than this, in microseconds. */
#define MAX_INTERVAL 1000000

static TimestampTz nextEarly;	/* until then, WAL that is not flushed does not go by itself */
static int64 earlyInterval;		/* between it and the message before, in microseconds */

/* Between two flushes, in microseconds: the least of late, and the mean */
static int64 leastBetween,
			meanBetween;
static bool commitsWait;		/* some have told since the flush before the last */
static int	flushesAlone;		/* how many of the last had no WAL behind them, up to a bound */

/* Whether this time is still to come; if it is farther away than it ever was, the clock was set back. */
static bool
IsAhead(TimestampTz time, TimestampTz now, int64 us)
{
	return now < time && time - now <= us;
}

/*
 * The time between two looks, in microseconds.
 *
 * Where flushes come about as often as we would look, and find commits that
 * wait for the next one, they take along all that there is soon enough, and
 * looking in between only costs.  It is done a few flushes later, if there is
 * none: one may get stuck.
 */
static int64
LookInterval(void)
{
	if (flushesAlone < FLUSHES_PER_LOOK / 2 && meanBetween <= 2 * walrider_poll_interval)
		return Max(walrider_poll_interval, FLUSHES_PER_LOOK * meanBetween);
	return walrider_poll_interval;
}

/* How long WAL has to wait if something that was sent is not flushed yet, in microseconds. */
int
EarlyPause(void)
{
	TimestampTz now = GetCurrentTimestamp();

	return IsAhead(nextEarly, now, earlyInterval) ? (int) (nextEarly - now) : 0;
}

/*
 * WAL goes, all that there is or not: the rest does not wait.
 *
 * Where flushes come one right after the other, and the standby confirms WAL
 * more quickly than they do, nothing is won by sending more before the next
 * one begins, that is, before this one is told.  Otherwise it is, but not for
 * every reply of the standby, which wakes us.  Where no commit waits, the WAL
 * writer flushes, and takes the buffers away: do not wait for that.
 */
void
NoteEarly(bool all, TimestampTz now)
{
	TimeOffset	lag = MyWalSnd->flushLag;

	earlyInterval = LookInterval();
	if (commitsWait && lag >= 0 && lag < leastBetween && meanBetween < 2 * leastBetween)
		earlyInterval = Min(Max(earlyInterval, 2 * meanBetween), MAX_INTERVAL);
	nextEarly = all ? now + earlyInterval : 0;
}

/* A flush is told. */
void
NoteFlush(XLogRecPtr flushed, TimestampTz now)
{
	static TimestampTz before = 0;
	static uint64 seen = 0;
	uint64		commits = pg_atomic_read_u64(&Early->commits);

	if (before != 0 && now > before)
	{
		leastBetween = Min(now - before, leastBetween + leastBetween / 8 + 1);
		meanBetween += (now - before - meanBetween) / 8;
	}
	before = now;
	commitsWait = commits != seen;
	seen = commits;
	if (KnowsInsertResult() && GetInsertedRecPtr() > flushed)
		flushesAlone = 0;
	else if (flushesAlone < FLUSHES_PER_LOOK)
		flushesAlone++;
	nextEarly = 0;
}

/*
 * How soon WAL is to be expected, in microseconds; 0: not before somebody
 * says so.
 *
 * Nobody says when a record is inserted.  If commits tell that they are about
 * to, look until that shows, and once more for those that came together.  If
 * they do not, look as long as WAL keeps coming.  What was inserted between
 * two looks goes in one message, so the interval also bounds their number.
 */
int
ExpectWalIn(TimestampTz lastNews)
{
	TimestampTz now = GetCurrentTimestamp();
	int64		duration = walrider_poll_duration * INT64CONST(1000);
	int64		untold = UNTOLD_POLL_DURATION * INT64CONST(1000);

	if (commitsTell)
	{
		static uint64 seen = 0;
		static XLogRecPtr before = InvalidXLogRecPtr;
		static TimestampTz until = 0;
		uint64		commits = pg_atomic_read_u64(&Early->commits);
		XLogRecPtr	inserted = GetInsertedRecPtr();
		TimestampTz shortly = now + walrider_poll_interval;

		if (commits != seen)
			until = inserted > before ? shortly : now + duration;
		else if (inserted > before)
			until = Min(until, shortly);
		seen = commits;
		before = inserted;
		return IsAhead(until, now, Max(duration, walrider_poll_interval)) ? (int) LookInterval() : 0;
	}

	if (IsAhead(lastNews + duration, now, duration))
		return walrider_poll_interval;
	return IsAhead(lastNews + untold, now, untold) ? UNTOLD_POLL_INTERVAL : 0;
}
