/*-------------------------------------------------------------------------
 *
 * visit.c
 *	  A page: its changes, one after the other, by the engine's redo.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam_xlog.h"
#include "access/rmgr.h"
#include "access/xlog.h"
#include "access/xlogutils.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"

#include "redo.h"
#include "walrider_redo.h"

typedef enum ApplyResult
{
	APPLIED,
	NOTHING_TO_APPLY,			/* the page has it already */
	LEFT						/* for the walk */
} ApplyResult;

static bool
IsPrune(const DecodedXLogRecord *decoded)
{
	return decoded->header.xl_rmid == RM_HEAP2_ID &&
		(decoded->header.xl_info & XLOG_HEAP_OPMASK) != XLOG_HEAP2_MULTI_INSERT;
}

/* No reader may have the page pinned. */
static bool
NeedsCleanupLock(const DecodedXLogRecord *decoded)
{
	return IsPrune(decoded) && (((xl_heap_prune *) decoded->main_data)->flags & XLHP_CLEANUP_LOCK) != 0;
}

/* The change makes the page out of nothing. */
static bool
Fills(const DecodedXLogRecord *decoded, uint8 block_id)
{
	return decoded->blocks[block_id].apply_image || (decoded->blocks[block_id].flags & BKPBLOCK_WILL_INIT) != 0;
}

/* Redo one change of a page that is locked exclusively. */
static ApplyResult
Apply(const DecodedXLogRecord *decoded, uint8 block_id, Page page, int64 *free_bytes)
{
	WalriderBlock blocks[MAX_EARLY_BLOCKS];
	WalriderRecord record;
	int			nblocks = 0;
	int64		free_now = -1;
	int			result;

	for (int id = 0; id <= decoded->max_block_id && id < MAX_EARLY_BLOCKS; id++)
	{
		const DecodedBkpBlock *block = &decoded->blocks[id];
		WalriderBlock *to = &blocks[nblocks];

		if (!block->in_use)
			continue;
		to->tablespace = block->rlocator.spcOid;
		to->database = block->rlocator.dbOid;
		to->relation = block->rlocator.relNumber;
		to->block = block->blkno;
		to->id = id;
		to->fork = block->forknum;
		to->will_init = (block->flags & BKPBLOCK_WILL_INIT) != 0;
		to->has_image = block->has_image;
		to->image_info = block->bimg_info;
		to->has_data = block->has_data;
		to->hole_offset = block->hole_offset;
		to->hole_len = block->hole_length;
		to->image = (const uint8_t *) block->bkp_image;
		to->image_len = block->has_image ? block->bimg_len : 0;
		to->data = (const uint8_t *) block->data;
		to->data_len = block->has_data ? block->data_len : 0;
		nblocks++;
	}
	record.begin = decoded->lsn;
	record.end = decoded->next_lsn;
	record.prev = decoded->header.xl_prev;
	record.total_len = decoded->header.xl_tot_len;
	record.xid = decoded->header.xl_xid;
	record.toplevel_xid = decoded->toplevel_xid;
	record.origin = decoded->record_origin;
	record.info = decoded->header.xl_info;
	record.rmgr = decoded->header.xl_rmid;
	record.main_data = (const uint8_t *) decoded->main_data;
	record.main_len = decoded->main_data_len;
	record.blocks = blocks;
	record.nblocks = nblocks;

	result = walrider_redo_block(&record, block_id, (uint8_t *) page, PG_VERSION_NUM / 10000,
								 XLogHintBitIsNeeded(), &free_now);
	if (result == WALRIDER_REDO_REFUSED)
		return LEFT;

	/*
	 * The page may be half changed, and is not to be seen or written.  The
	 * server's redo ends so, too; a copy to go back to would cost a quarter of
	 * the time.
	 */
	if (result < 0)
		elog(PANIC, "walrider could not redo block %d of the record at %X/%X; with walrider.early_redo = off the server tries it alone",
			 block_id, LSN_FORMAT_ARGS(decoded->lsn));
	if (free_now >= 0)
		*free_bytes = free_now;
	return result == WALRIDER_REDO_CHANGED ? APPLIED : NOTHING_TO_APPLY;
}

/* The page, pinned and locked; InvalidBuffer if its change must wait for the walk. */
static Buffer
LockPage(SlicePage *page, const DecodedXLogRecord *decoded, uint8 block_id)
{
	bool		fills = Fills(decoded, block_id);
	Buffer		buffer = BufferIsValid(page->recent) ? page->recent : GuessBuffer(page);

	if (BufferIsValid(buffer) && ReadRecentBuffer(page->rlocator, page->forknum, page->blkno, buffer))
	{
		LockBuffer(buffer, BUFFER_LOCK_EXCLUSIVE);
		return buffer;
	}

	/*
	 * What fills a page does not read it: after a crash it may be torn.  A
	 * prune that fills one may have to leave it to a reader.
	 */
	if (fills && NeedsCleanupLock(decoded))
		return InvalidBuffer;
	buffer = ReadSlicePage(page, fills ? RBM_ZERO_AND_LOCK : RBM_NORMAL);
	if (!fills)
		LockBuffer(buffer, BUFFER_LOCK_EXCLUSIVE);
	return buffer;
}

/* It was left for the walk. */
static void
ChangeIsDone(Slice *slice, Change *change)
{
	change->left = false;
	slice->records[change->record].nleft--;
}

/*
 * Do the changes of a page from its next one on, up to the first that has to
 * wait for a record that is not walked yet.
 */
void
VisitPage(Slice *slice, SlicePage *page, SliceIndex walked)
{
	Change	   *change = &slice->changes[page->next];
	DecodedXLogRecord *decoded;
	Buffer		buffer;
	bool		dirty = false;
	bool		left = false;
	int64		free_bytes = -1;

	if (page->next == 0 || change->after > walked)
		return;
	decoded = slice->records[change->record].decoded;
	if (EntryWaits(slice, decoded, change->block_id))
	{
		CountRedo(REDO_ENTRY_FIRST, 1);
		page->held = slice->any_before;
		return;
	}
	buffer = LockPage(page, decoded, change->block_id);
	if (!BufferIsValid(buffer))
	{
		HeapBlockWaits(slice, page->blkno);
		return;
	}
	CountRedo(REDO_VISITS, 1);

	START_CRIT_SECTION();
	for (;;)
	{
		ApplyResult result;

		if (EntryWaits(slice, decoded, change->block_id))
		{
			CountRedo(REDO_ENTRY_FIRST, 1);
			page->held = slice->any_before;
			left = true;
			break;
		}

		/* Nobody waits here for readers: the walk does, and cancels them when it is time. */
		if (NeedsCleanupLock(decoded) && !IsBufferCleanupOK(buffer) && !BROKEN(7))
		{
			CountRedo(REDO_CLEANUP_LOCK, 1);
			left = true;
			break;
		}
		/* A test has any change left now and then. */
		if (LEAVES_SOME && !Fills(decoded, change->block_id) &&
			murmurhash32((uint32) decoded->lsn ^ change->block_id) % 8 == 0)
		{
			left = true;
			break;
		}
		result = Apply(decoded, change->block_id, BufferGetPage(buffer), &free_bytes);
		if (result == LEFT)
		{
			CountRedo(REDO_REFUSED, 1);
			left = true;
			break;
		}
		dirty |= result == APPLIED;
		if (change->left)
			ChangeIsDone(slice, change);
		page->next = change->next;
		if (page->next == 0)
			break;
		change = &slice->changes[page->next];
		if (change->after > walked)
			break;
		decoded = slice->records[change->record].decoded;
	}
	if (dirty)
		MarkBufferDirty(buffer);
	END_CRIT_SECTION();
	UnlockReleaseBuffer(buffer);

	if (left && !page->index)
		HeapBlockWaits(slice, page->blkno);
	if (left && page->forknum == VISIBILITYMAP_FORKNUM)
		AllHeapBlocksWait(slice);
	TellFreeSpace(page, free_bytes);
}

bool
IsToBeVisited(const SlicePage *page, bool index)
{
	return page->next != 0 && page->index == index && !page->held;
}

/* Of some pages of the slice, those of indexes, or the others. */
void
VisitPages(Slice *slice, SliceIndex first, SliceIndex last, bool index)
{
	GuessBuffers(slice, first, last, index);
	for (SliceIndex i = first; i <= last; i++)
	{
		SlicePage  *page = &slice->pages[i];

		if (!IsToBeVisited(page, index))
			continue;
		VisitPage(slice, page, 0);
		if (page->next != 0 || page->free_bytes >= 0)
			ListPage(slice, page);
	}
}

/* The slice before has been walked: do what was held back for that. */
void
VisitHeld(Slice *slice)
{
	slice->any_before = false;
	for (int index = 0; index <= 1; index++)
		for (SliceIndex i = 0; i < NumListed(slice); i++)
		{
			SlicePage  *page = &slice->pages[slice->listed[i]];

			if (!page->held || page->index != (index != 0))
				continue;
			page->held = false;
			CountRedo(REDO_HELD, 1);
			VisitPage(slice, page, 0);
		}
}

/* The slice is done: what is left is for the walk. */
void
FindLeft(Slice *slice)
{
	SliceIndex	nrecords = 0;

	for (SliceIndex i = 0; i < NumListed(slice); i++)
	{
		SlicePage  *page = &slice->pages[slice->listed[i]];

		RecordFreeSpace(page);
		for (SliceIndex at = page->next; at != 0; at = slice->changes[at].next)
		{
			slice->changes[at].left = true;
			nrecords += slice->records[slice->changes[at].record].nleft++ == 0;
		}
	}
	CountRedo(REDO_EARLY, slice->nplanned - nrecords);
}

/* These pages were not visited, whatever the reason: entries that point to them wait. */
void
LeavePages(Slice *slice, SliceIndex first, SliceIndex last)
{
	for (SliceIndex i = first; i <= last; i++)
	{
		SlicePage  *page = &slice->pages[i];

		if (page->next == 0)
			continue;
		ListPage(slice, page);
		if (page->index)
			continue;
		if (page->forknum == VISIBILITYMAP_FORKNUM)
			AllHeapBlocksWait(slice);
		else
			HeapBlockWaits(slice, page->blkno);
	}
}

/*
 * A record that was done on one of its pages is not for the server's redo any
 * more: that restores images and fills pages whatever their LSN, and would
 * take back what came after.  Do the rest of it, which must not fail.
 */
void
FinishChange(Slice *slice, Change *change)
{
	SlicePage  *page = &slice->pages[change->page];
	DecodedXLogRecord *decoded = slice->records[change->record].decoded;
	Buffer		buffer = LockPage(page, decoded, change->block_id);
	int64		free_bytes = -1;
	ApplyResult result;

	Assert(!IsPrune(decoded));	/* those have one page */
	Assert(&slice->changes[page->next] == change);
	START_CRIT_SECTION();
	result = Apply(decoded, change->block_id, BufferGetPage(buffer), &free_bytes);
	if (result == LEFT)
		elog(PANIC, "walrider could not redo block %d of the record at %X/%X", change->block_id,
			 LSN_FORMAT_ARGS(decoded->lsn));
	if (result == APPLIED)
		MarkBufferDirty(buffer);
	END_CRIT_SECTION();
	UnlockReleaseBuffer(buffer);

	ChangeIsDone(slice, change);
	page->next = change->next;
	TellFreeSpace(page, free_bytes);
	RecordFreeSpace(page);
}
