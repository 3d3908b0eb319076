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

/* In us; a read of a page that is in the kernel's cache takes 5 to 10. */
#define SLOW_READ 32

/* So many reads are to be timed before they say something. */
#define LEAST_TIMED 16

/* What is taken for longer than this: 14 bits of a page's hash choose what is timed. */
#define MAX_TIME 10000

/* Reads that were not asked for: their number in the upper bits, their time in us in the others. */
#define TIME_BITS 40
#define ONE_READ (UINT64CONST(1) << TIME_BITS)

/*
 * Guesses say where pages were last seen in shared buffers, by the hash of what
 * they are.  ReadRecentBuffer checks them under the pin, so that it does not
 * matter who writes one when.  They save most look-ups in the mapping table.
 */
typedef struct BuffersShared
{
	pg_atomic_uint64 timed;
	Buffer		guesses[BUFFER_GUESSES];
} BuffersShared;

static BuffersShared *Buffers = NULL;

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
	if (found)
		return;
	pg_atomic_init_u64(&Buffers->timed, 0);
	memset(Buffers->guesses, 0, sizeof(Buffers->guesses));
}

static Buffer *
GuessOf(const SlicePage *page)
{
	return &Buffers->guesses[page->hash % BUFFER_GUESSES];
}

static void
RememberBuffer(const SlicePage *page)
{
	if (*GuessOf(page) != page->recent)
		*GuessOf(page) = page->recent;
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

/* Where the page seems to be, or InvalidBuffer.  Not locked: it may change any time, and only costs a look-up then. */
Buffer
GuessBuffer(const SlicePage *page)
{
	Buffer		guess = *GuessOf(page);
	BufferTag	tag;

	if (!BufferIsValid(guess))
		return InvalidBuffer;
	InitBufferTag(&tag, &page->rlocator, page->forknum, page->blkno);
	return BufferTagsEqual(&GetBufferDescriptor(guess - 1)->tag, &tag) ? guess : InvalidBuffer;
}

/*
 * While reads take long, ask the kernel for the pages that seem not to be in
 * shared buffers; but for one of so many that timing its read costs what asking
 * for all of them does, about 1 us each.
 */
void
AskForPages(Slice *slice)
{
	uint32		time = TimeOfRead();

	if (time < SLOW_READ)
		return;
	for (SliceIndex i = 1; i <= slice->npages; i++)
	{
		SlicePage  *page = &slice->pages[i];

		if (page->first == 0 || page->added || BufferIsValid(GuessBuffer(page)))
			continue;
		page->asked = page->hash / BUFFER_GUESSES % time != 0;
		if (!page->asked)
			continue;
		page->recent = PrefetchSharedBuffer(smgropen(page->rlocator, INVALID_PROC_NUMBER), page->forknum,
											page->blkno).recent_buffer;
		if (BufferIsValid(page->recent))
			RememberBuffer(page);
	}
}

/*
 * Guess where pages are that are visited next.  Each would wait for memory
 * three times: it is asked for in three passes over all of them.
 */
void
GuessBuffers(Slice *slice, SliceIndex first, SliceIndex last, bool index)
{
	for (SliceIndex i = first; i <= last; i++)
		if (IsToBeVisited(&slice->pages[i], index))
			pg_prefetch_mem(GuessOf(&slice->pages[i]));
	for (SliceIndex i = first; i <= last; i++)
	{
		SlicePage  *page = &slice->pages[i];
		Buffer		guess;

		if (IsToBeVisited(page, index) && BufferIsValid(guess = *GuessOf(page)))
			pg_prefetch_mem(GetBufferDescriptor(guess - 1));
	}
	for (SliceIndex i = first; i <= last; i++)
	{
		SlicePage  *page = &slice->pages[i];
		Buffer		guess;
		char	   *there;

		if (!IsToBeVisited(page, index) || !BufferIsValid(guess = GuessBuffer(page)))
			continue;
		page->recent = guess;
		there = BufferGetPage(guess);
		pg_prefetch_mem(there);
		pg_prefetch_mem(there + 64);
		pg_prefetch_mem(slice->records[slice->changes[page->next].record].decoded);
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
	RememberBuffer(page);
	if (mode == RBM_NORMAL && !page->asked && pgBufferUsage.shared_blks_read != before)
	{
		INSTR_TIME_SET_CURRENT(end);
		INSTR_TIME_SUBTRACT(end, begin);
		pg_atomic_fetch_add_u64(&Buffers->timed, ONE_READ + (uint64) INSTR_TIME_GET_MICROSEC(end));
	}
	return page->recent;
}
