/*-------------------------------------------------------------------------
 *
 * walbuf.c
 *	  How far WAL is inserted, and reading it before it is flushed.
 *
 * XLogCtl->logInsertResult (xlog.c, since 17) is the position up to which
 * every insertion is complete; WaitXLogInsertionsToFinish advances it when
 * somebody is about to write WAL.  XLogFlush calls that before it takes
 * WALWriteLock, so it covers the commits that wait for a running fsync as
 * well.  The server's WALReadFromBuffers reads up to there, without locks.
 *
 * The bytes before it do not change any more.  It stands at the end of a
 * record or on a page boundary: an insertion in progress is advertised by the
 * start of its record or of the page that it waits for (GetXLogBuffer).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>

#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xlogreader.h"
#include "access/xlogutils.h"
#include "miscadmin.h"
#include "storage/fd.h"
#include "storage/shmem.h"

#include "walrider.h"

static pg_atomic_uint64 *insertResult = NULL;
static XLogReaderState *walreader = NULL;
static TimeLineID walTLI;

/*
 * Whether this is XLogCtlData.pages: page buffers, xlblocks and XLogCacheBlck
 * follow each other, and four known positions stand before them.
 */
static bool
IsPagesField(const uint64 *field, const char *base, Size size)
{
	const char *pages = (const char *) (uintptr_t) field[0];
	const char *xlblocks = (const char *) (uintptr_t) field[1];
	int			lastBlock;
	XLogRecPtr	wroteBefore,
				flushedBefore;
	uint64		inserted,
				wrote,
				flushed;

	memcpy(&lastBlock, &field[2], sizeof(lastBlock));
	if (lastBlock != XLOGbuffers - 1)
		return false;
	/* XLOGShmemInit: xlblocks first, the buffers last, aligned */
	if (pages < base || pages + (Size) XLOGbuffers * XLOG_BLCKSZ > base + size ||
		(uintptr_t) pages % XLOG_BLCKSZ != 0)
		return false;
	if (xlblocks <= (const char *) &field[2] ||
		xlblocks + XLOGbuffers * sizeof(uint64) > pages)
		return false;

	flushedBefore = GetFlushRecPtr(NULL);
	wroteBefore = GetXLogWriteRecPtr();
	inserted = pg_atomic_read_u64((pg_atomic_uint64 *) &field[-4]);
	wrote = pg_atomic_read_u64((pg_atomic_uint64 *) &field[-3]);
	flushed = pg_atomic_read_u64((pg_atomic_uint64 *) &field[-2]);
	return wroteBefore <= wrote && wrote <= GetXLogWriteRecPtr() &&
		flushedBefore <= flushed && flushed <= GetFlushRecPtr(NULL) &&
		wroteBefore <= inserted && inserted <= GetXLogInsertRecPtr() &&
		field[-1] % XLOG_BLCKSZ == 0;
}

/*
 * Find logInsertResult.  XLogCtlData is private to xlog.c, but its place in
 * shared memory is known, and its fields show what they are.  False if there
 * is not exactly one place that looks like it.
 */
bool
FindInsertResult(void)
{
	Size		size = XLOGShmemSize();
	bool		found;
	char	   *base = ShmemInitStruct("XLOG Ctl", size, &found);
	uint64	   *words = (uint64 *) base;
	uint64	   *hit = NULL;

	if (!found)
		elog(ERROR, "\"XLOG Ctl\" is not in shared memory");

	/* The struct ends where xlblocks begins, long before the buffers. */
	for (Size i = 4; (i + 3) * sizeof(uint64) <= size - (Size) XLOGbuffers * (XLOG_BLCKSZ + sizeof(uint64)); i++)
	{
		if (!IsPagesField(&words[i], base, size))
			continue;
		if (hit != NULL)
			return false;
		hit = &words[i];
	}
#ifdef WALRIDER_BLIND			/* for tests: as if it were not to be found */
	hit = NULL;
#endif
	if (hit == NULL)
		return false;
	insertResult = (pg_atomic_uint64 *) &hit[-4];
	return true;
}

bool
KnowsInsertResult(void)
{
	return insertResult != NULL;
}

/* How far WAL is inserted completely; only if that is known. */
XLogRecPtr
GetInsertedRecPtr(void)
{
	return pg_atomic_read_u64(insertResult);
}

/* XLogReaderRoutine->segment_open callback */
static void
OpenSegment(XLogReaderState *state, XLogSegNo nextSegNo, TimeLineID *tli_p)
{
	char		path[MAXPGPATH];

	XLogFilePath(path, walTLI, nextSegNo, state->segcxt.ws_segsize);
	*tli_p = walTLI;
	state->seg.ws_file = BasicOpenFile(path, O_RDONLY | PG_BINARY);
	if (state->seg.ws_file >= 0)
		return;

	if (errno == ENOENT)
	{
		char		fname[MAXFNAMELEN];

		XLogFileName(fname, walTLI, nextSegNo, state->segcxt.ws_segsize);
		errno = ENOENT;
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("requested WAL segment %s has already been removed", fname)));
	}
	ereport(ERROR,
			(errcode_for_file_access(),
			 errmsg("could not open file \"%s\": %m", path)));
}

void
InitWalRead(TimeLineID tli)
{
	walTLI = tli;
	walreader = XLogReaderAllocate(wal_segment_size, NULL,
								   XL_ROUTINE(.segment_open = OpenSegment,
											  .segment_close = wal_segment_close),
								   NULL);
	if (walreader == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory"),
				 errdetail("Failed while allocating a WAL reading processor.")));
}

/*
 * Read WAL that is inserted completely.
 *
 * A page that is not in the buffers was written before its buffer was taken
 * for another one.  So what the buffers lack is in the file as far as the
 * write position goes; behind it there may be pages that are only in the
 * buffers, and the file holds old bytes in their place.
 */
void
ReadWal(char *buf, XLogRecPtr startptr, Size count)
{
	while (count > 0)
	{
		Size		got = WALReadFromBuffers(buf, startptr, count, walTLI);
		XLogRecPtr	written;
		XLogSegNo	segno;
		WALReadError errinfo;

		CountUp(&MyEarlySender->counters.buffers_bytes, got);
		buf += got;
		startptr += got;
		count -= got;
		if (count == 0)
			break;

		written = GetXLogWriteRecPtr();
		if (written <= startptr)
			elog(ERROR, "WAL at %X/%X is neither in the WAL buffers nor written, written is %X/%X",
				 LSN_FORMAT_ARGS(startptr), LSN_FORMAT_ARGS(written));
		got = Min(count, written - startptr);
		if (!WALRead(walreader, buf, startptr, got, walTLI, &errinfo))
			WALReadRaiseError(&errinfo);

		/* The segment may have been recycled meanwhile. */
		XLByteToSeg(startptr, segno, wal_segment_size);
		CheckXLogRemoved(segno, walTLI);

		CountUp(&MyEarlySender->counters.disk_bytes, got);
		CountUp(&MyEarlySender->counters.disk_reads, 1);
		buf += got;
		startptr += got;
		count -= got;
	}
}
