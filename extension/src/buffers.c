/*-------------------------------------------------------------------------
 *
 * buffers.c
 *	  Where a slice's pages are in shared buffers, and reading those that are not.
 *
 * The kernel can be asked for pages ahead, as recovery_prefetch does.  Of a
 * page that it has in its cache that costs a look-up and a system call, in the
 * startup process, and brings nothing.  So all processes time their reads, and
 * pages are asked for while those that were not take long.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "executor/instrument.h"
#include "portability/instr_time.h"
#include "storage/buf_internals.h"
#include "storage/bufmgr.h"
#include "storage/shmem.h"
#include "storage/smgr.h"

#include "redo.h"

#define BUFFER_GUESSES (1 << 18)
#define GUESS_AHEAD 8

/* In us; a read of a page that is in the kernel's cache takes 5 to 10. */
#define SLOW_READ 32

/* So many reads are to be timed before they say something. */
#define LEAST_TIMED 16

/* What is taken for longer than this: 14 bits of a page's hash choose what is timed. */
#define MAX_TIME 10000

/* Reads that were not asked for: their number in the upper bits, their time in us in the others. */
#define TIME_BITS 40
#define ONE_READ (UINT64CONST(1) << TIME_BITS)

typedef struct BuffersShared
{
	pg_atomic_uint64 timed;
} BuffersShared;

static BuffersShared *Buffers = NULL;

/*
 * Where pages were last seen in shared buffers, by the hash of what they are:
 * a guess, which ReadRecentBuffer checks under the pin.  It saves most look-ups
 * in the mapping table.
 */
static Buffer guesses[BUFFER_GUESSES];

Size
BuffersSharedSize(void)
{
	return sizeof(BuffersShared);
}

void
AttachBuffersShared(void)
{
	bool		found;

	Buffers = ShmemInitStruct("walrider buffers", sizeof(BuffersShared), &found);
	if (!found)
		pg_atomic_init_u64(&Buffers->timed, 0);
}

/* In the startup process, when a slice is done: workers have read pages, too. */
void
RememberBuffer(const SlicePage *page)
{
	if (BufferIsValid(page->recent))
		guesses[page->hash % BUFFER_GUESSES] = page->recent;
}

/* What a read takes that was not asked for, in us: what it took before, until there is something to go by. */
static uint32
TimeOfRead(void)
{
	static uint32 time = 4 * SLOW_READ;
	uint64		timed = pg_atomic_read_u64(&Buffers->timed);
	uint64		nreads = timed >> TIME_BITS;

	if (nreads >= LEAST_TIMED)
	{
		time = Min(timed % ONE_READ / nreads, MAX_TIME);
		pg_atomic_write_u64(&Buffers->timed, 0);
	}
	return time;
}

/*
 * Guess where the page is.  Where it seems not to be there, it is asked for if
 * that pays; but for one of so many that timing its read costs what asking for
 * all of them does, about 1 us each.
 */
static void
FindBuffer(SlicePage *page, uint32 time)
{
	Buffer		guess = guesses[page->hash % BUFFER_GUESSES];

	if (BufferIsValid(guess))
	{
		BufferDesc *desc = GetBufferDescriptor(guess - 1);
		BufferTag	tag;

		/* Not locked: it may change any time, and only costs us the look-up then. */
		InitBufferTag(&tag, &page->rlocator, page->forknum, page->blkno);
		if (BufferTagsEqual(&desc->tag, &tag))
		{
			page->recent = guess;
			return;
		}
	}
	page->asked = time >= SLOW_READ && page->hash / BUFFER_GUESSES % time != 0;
	if (page->asked)
		page->recent = PrefetchSharedBuffer(smgropen(page->rlocator, INVALID_PROC_NUMBER), page->forknum,
											page->blkno).recent_buffer;
}

/* Of all pages that are to be visited; each would wait for memory twice, so that it is asked for some pages ahead. */
void
FindBuffers(Slice *slice)
{
	uint32		time = TimeOfRead();

	for (SliceIndex i = 1; i <= slice->npages; i++)
	{
		SlicePage  *page = &slice->pages[i];

		if (i + 2 * GUESS_AHEAD <= slice->npages)
			pg_prefetch_mem(&guesses[slice->pages[i + 2 * GUESS_AHEAD].hash % BUFFER_GUESSES]);
		if (i + GUESS_AHEAD <= slice->npages)
		{
			Buffer		guess = guesses[slice->pages[i + GUESS_AHEAD].hash % BUFFER_GUESSES];

			if (BufferIsValid(guess))
				pg_prefetch_mem(GetBufferDescriptor(guess - 1));
		}
		if (page->first != 0 && !page->added)
			FindBuffer(page, time);
	}
}

/* Pinned, and locked if the mode says so. */
Buffer
ReadSlicePage(SlicePage *page, ReadBufferMode mode)
{
	int64		before = pgBufferUsage.shared_blks_read;
	instr_time	begin,
				end;

	INSTR_TIME_SET_CURRENT(begin);
	page->recent = ReadBufferWithoutRelcache(page->rlocator, page->forknum, page->blkno, mode, NULL, true);
	if (mode == RBM_NORMAL && !page->asked && pgBufferUsage.shared_blks_read != before)
	{
		INSTR_TIME_SET_CURRENT(end);
		INSTR_TIME_SUBTRACT(end, begin);
		pg_atomic_fetch_add_u64(&Buffers->timed, ONE_READ + (uint64) INSTR_TIME_GET_MICROSEC(end));
	}
	return page->recent;
}
