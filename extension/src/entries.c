/*-------------------------------------------------------------------------
 *
 * entries.c
 *	  Index entries: which records bring them, and what they wait for.
 *
 * A record goes early that adds an entry to one leaf and leaves all as it is
 * that leads there.  Pages keep the order of their own changes, so that a
 * scan meets a leaf that it could have met, with entries of transactions
 * that still run for it: it looks up their heap tuples, and sees none.  What
 * was there it finds where it was.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/gin_private.h"
#include "access/ginxlog.h"
#include "access/gistxlog.h"
#include "access/hash_xlog.h"
#include "access/itup.h"
#include "access/nbtxlog.h"
#include "access/rmgr.h"
#include "access/spgist_private.h"
#include "access/spgxlog.h"

#include "redo.h"
#include "walrider_redo.h"

static bool
AddsGinItems(const DecodedXLogRecord *decoded)
{
	const DecodedBkpBlock *block = &decoded->blocks[0];
	uint16		flags;
	IndexTupleData entry;

	if (decoded->main_data_len < sizeof(ginxlogInsert))
		return false;
	flags = ((const ginxlogInsert *) decoded->main_data)->flags;
	if ((flags & GIN_INSERT_ISLEAF) == 0)
		return false;
	if ((flags & GIN_INSERT_ISDATA) != 0)
		return true;

	/* An entry that leads to a posting tree comes after that.  An image does not tell. */
	if (!block->has_data || block->data_len < offsetof(ginxlogInsertEntry, tuple) + sizeof(entry))
		return false;
	memcpy(&entry, block->data + offsetof(ginxlogInsertEntry, tuple), sizeof(entry));
	return !GinIsPostingTree(&entry) || BROKEN(19);
}

/* The record adds an entry to a leaf, and changes nothing that leads there. */
bool
AddsEntry(const DecodedXLogRecord *decoded)
{
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;

	switch (decoded->header.xl_rmid)
	{
		case RM_BTREE_ID:
			/* Deduplication neither adds nor removes an entry: scans have copied theirs, or come later. */
			return info == XLOG_BTREE_INSERT_LEAF || info == XLOG_BTREE_INSERT_POST || info == XLOG_BTREE_DEDUP;
		case RM_HASH_ID:
			/* Of the metapage it changes the number of tuples, for which no scan asks. */
			return info == XLOG_HASH_INSERT;
		case RM_GIN_ID:
			return info == XLOG_GIN_INSERT && AddsGinItems(decoded);
		case RM_GIST_ID:
			{
				const gistxlogPageUpdate *xlrec = (const gistxlogPageUpdate *) decoded->main_data;

				/*
				 * Scans compare an inner page's LSN with its child's NSN, so
				 * that no inner page may be ahead.  What goes to one replaces
				 * a tuple, or names the child that was split (gistplacetopage
				 * and its callers).
				 */
				return info == XLOG_GIST_PAGE_UPDATE && decoded->main_data_len >= sizeof(*xlrec) &&
					xlrec->ntodelete == 0 && xlrec->ntoinsert == 1 && decoded->max_block_id == 0;
			}
		case RM_SPGIST_ID:
			{
				const spgxlogAddLeaf *xlrec = (const spgxlogAddLeaf *) decoded->main_data;

				/* To a chain that begins where it began. */
				return info == XLOG_SPGIST_ADD_LEAF && decoded->main_data_len >= sizeof(*xlrec) &&
					!xlrec->newPage && xlrec->offnumParent == InvalidOffsetNumber;
			}
		default:
			return false;
	}
}

static bool
HasBlock(const BlockBits *bits, BlockNumber blkno)
{
	return (pg_atomic_read_u32(unconstify(pg_atomic_uint32 *, &bits->words[(blkno & 0xFFFF) / 32])) >> blkno % 32 & 1) != 0;
}

/* Not all changes of this heap block went early. */
static bool
IsWaitedFor(const Slice *slice, BlockNumber blkno)
{
	return HasBlock(&slice->waits, blkno) || (slice->any_before && HasBlock(&slice->waits_before, blkno));
}

/*
 * An index entry must not come before its heap tuple.  A reader that finds a
 * block behind the end of the heap takes it for corruption; and where a prune
 * waits for somebody, the tuple that was there before would be taken for what
 * the entry is about.  An image does not tell which entry is new.
 */
bool
EntryWaits(const Slice *slice, const DecodedXLogRecord *decoded, uint8 block_id)
{
	const DecodedBkpBlock *block = &decoded->blocks[block_id];
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;
	const char *from = block->data;
	Size		len = block->has_data ? block->data_len : 0;
	Size		at = 0;
	ItemPointerData tid;

	if (!(slice->any_waits || slice->any_before) || BROKEN(8))
		return false;
	switch (decoded->header.xl_rmid)
	{
		case RM_BTREE_ID:
			if (info == XLOG_BTREE_DEDUP && !block->apply_image)
				return false;
			/* Before the entry is where it splits the posting list that it falls into. */
			if (info == XLOG_BTREE_INSERT_POST)
				at = sizeof(uint16);
			break;
		case RM_HASH_ID:
			if (block_id != 0)
				return false;
			break;
		case RM_GIST_ID:
			break;
		case RM_SPGIST_ID:
			/* Beside an image, too. */
			from = decoded->main_data;
			len = decoded->main_data_len;
			at = sizeof(spgxlogAddLeaf) + offsetof(SpGistLeafTupleData, heapPtr);
			break;
		case RM_GIN_ID:
			return walrider_gin_items_wait((const uint8_t *) from, len,
										   (((const ginxlogInsert *) decoded->main_data)->flags & GIN_INSERT_ISDATA) != 0,
										   (const uint32_t *) &slice->waits,
										   slice->any_before ? (const uint32_t *) &slice->waits_before : NULL);
		default:
			return false;
	}
	if (len < at + sizeof(tid))
		return true;
	memcpy(&tid, from + at, sizeof(tid));
	return IsWaitedFor(slice, ItemPointerGetBlockNumberNoCheck(&tid));
}
