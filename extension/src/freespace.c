/*-------------------------------------------------------------------------
 *
 * freespace.c
 *	  What a page has free goes to the free space map.
 *
 * Workers do that, too, where the map's page is in shared buffers.  It may have
 * to be read, or made, elsewhere: that is left to the startup process, and to
 * the server's function.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/buf_internals.h"
#include "storage/bufmgr.h"
#include "storage/freespace.h"

#include "redo.h"
#include "walrider_redo.h"

/* Where leaves of maps were last seen by this process: guesses, which ReadRecentBuffer checks. */
static Buffer leaves[64];

static Buffer
LookUpBuffer(BufferTag *tag)
{
	uint32		hash = BufTableHashCode(tag);
	LWLock	   *lock = BufMappingPartitionLock(hash);
	int			id;

	LWLockAcquire(lock, LW_SHARED);
	id = BufTableLookup(tag, hash);
	LWLockRelease(lock);
	return id < 0 ? InvalidBuffer : id + 1;
}

/* The map's page, pinned, or InvalidBuffer. */
static Buffer
FindLeaf(const SlicePage *page, BlockNumber blkno)
{
	Buffer	   *leaf = &leaves[(page->rlocator.relNumber + blkno) % lengthof(leaves)];
	BufferTag	tag;

	if (BufferIsValid(*leaf) && ReadRecentBuffer(page->rlocator, FSM_FORKNUM, blkno, *leaf))
		return *leaf;
	InitBufferTag(&tag, &page->rlocator, FSM_FORKNUM, blkno);
	*leaf = LookUpBuffer(&tag);
	return BufferIsValid(*leaf) && ReadRecentBuffer(page->rlocator, FSM_FORKNUM, blkno, *leaf) ? *leaf : InvalidBuffer;
}

/* As XLogRecordPageWithFreeSpace, of a map's page that is there.  Returns whether it is. */
static bool
RecordInLeaf(const SlicePage *page, Size free_bytes)
{
	Buffer		leaf = FindLeaf(page, walrider_free_space_block(page->blkno));
	int			result;

	if (!BufferIsValid(leaf))
		return false;
	LockBuffer(leaf, BUFFER_LOCK_EXCLUSIVE);
	result = walrider_record_free_space((uint8_t *) BufferGetPage(leaf), page->blkno, free_bytes);
	if (result == WALRIDER_REDO_CHANGED)
		MarkBufferDirty(leaf);
	UnlockReleaseBuffer(leaf);
	return result >= 0;
}

/* Behind a visit; -1: nothing to tell. */
void
TellFreeSpace(SlicePage *page, int64 free_bytes)
{
	if (free_bytes >= 0 && page->forknum == MAIN_FORKNUM && !page->index)
		page->free_bytes = RecordInLeaf(page, free_bytes) ? -1 : (int) free_bytes;
}

/* What is still to be told, by the startup process. */
void
RecordFreeSpace(SlicePage *page)
{
	if (page->free_bytes < 0)
		return;
	XLogRecordPageWithFreeSpace(page->rlocator, page->blkno, page->free_bytes);
	page->free_bytes = -1;
}
