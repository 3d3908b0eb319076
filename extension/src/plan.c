/*-------------------------------------------------------------------------
 *
 * plan.c
 *	  A slice: which change of which page may go early.
 *
 * Early means before the records that precede it in the slice.  A reader must
 * not be able to tell: it sees by its snapshot, and what a snapshot shows is
 * decided by commits, which are walked.  What a reader goes by without a
 * snapshot stays in place: tree structure, visibility maps, multixacts.  A
 * record in place is a barrier for its pages: what comes after it on them
 * waits until it has been walked.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>
#include <unistd.h>

#include "access/heapam_xlog.h"
#include "access/htup_details.h"
#include "access/rmgr.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog_internal.h"
#include "access/xlogutils.h"
#include "catalog/pg_control.h"
#include "common/hashfn.h"
#include "port/pg_bitutils.h"
#include "replication/walreceiver.h"
#include "storage/bufmgr.h"
#include "storage/fd.h"
#include "storage/procarray.h"
#include "storage/smgr.h"
#include "storage/standbydefs.h"

#include "redo.h"

/* The last record of all those planned so far that makes a multixact. */
static XLogRecPtr last_multixact = InvalidXLogRecPtr;

/* A slice has room for one more record, of as many blocks as there can be. */
static bool
HasRoom(const Slice *slice)
{
	return slice->nrecords < Min(walrider_redo_slice, MAX_SLICE) &&
		slice->nchanges + MAX_EARLY_BLOCKS <= MAX_CHANGES &&
		slice->npages + XLR_MAX_BLOCK_ID + 1 <= (slice->mask + 1) / 2;
}

/* The record may change the timeline: read no further before it was replayed (xlogprefetcher.c). */
bool
MayChangeTimeline(const DecodedXLogRecord *decoded)
{
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;

	return decoded->header.xl_rmid == RM_XLOG_ID &&
		(info == XLOG_CHECKPOINT_SHUTDOWN || info == XLOG_END_OF_RECOVERY);
}

/*
 * Nothing may pass this one: it makes, drops or truncates files, takes a lock
 * that a reader of the files would wait for, or is one that recovery itself
 * looks at.  The slice ends before it.
 */
bool
EndsSlice(const DecodedXLogRecord *decoded)
{
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;

	if (BROKEN(3))
		return MayChangeTimeline(decoded);

	/* Storage that is changed in ways that the record's blocks do not tell (xlogrecord.h). */
	if (decoded->header.xl_rmid > RM_MAX_BUILTIN_ID || (decoded->header.xl_info & XLR_SPECIAL_REL_UPDATE) != 0)
		return true;

	switch (decoded->header.xl_rmid)
	{
		case RM_SMGR_ID:
		case RM_DBASE_ID:
		case RM_TBLSPC_ID:
		case RM_RELMAP_ID:
			return true;
		case RM_XLOG_ID:

			/*
			 * Checkpoints are where restartpoints are made, which are to find
			 * all before them on the pages.
			 */
			return info != XLOG_FPI && info != XLOG_FPI_FOR_HINT && info != XLOG_NEXTOID && info != XLOG_NOOP;
		case RM_STANDBY_ID:
			return info == XLOG_STANDBY_LOCK;
		case RM_XACT_ID:
			switch (info & XLOG_XACT_OPMASK)
			{
				case XLOG_XACT_COMMIT:
				case XLOG_XACT_COMMIT_PREPARED:
				case XLOG_XACT_ABORT:
				case XLOG_XACT_ABORT_PREPARED:
					{
						bool		commits = (info & XLOG_XACT_OPMASK) == XLOG_XACT_COMMIT ||
							(info & XLOG_XACT_OPMASK) == XLOG_XACT_COMMIT_PREPARED;
						Size		fixed = commits ? MinSizeOfXactCommit : MinSizeOfXactAbort;
						uint32		xinfo;

						if ((decoded->header.xl_info & XLOG_XACT_HAS_INFO) == 0)
							return false;
						if (decoded->main_data_len < fixed + sizeof(xinfo))
							return true;
						memcpy(&xinfo, decoded->main_data + fixed, sizeof(xinfo));
						return (xinfo & (XACT_XINFO_HAS_RELFILELOCATORS | XACT_XINFO_HAS_AE_LOCKS)) != 0;
					}
				default:
					return false;
			}
		default:
			return false;
	}
}

void
SetBlock(BlockBits *bits, BlockNumber blkno)
{
	pg_atomic_uint32 *word = &bits->words[(blkno & 0xFFFF) / 32];
	uint32		bit = (uint32) 1 << blkno % 32;

	if ((pg_atomic_read_u32(word) & bit) == 0)
		pg_atomic_fetch_or_u32(word, bit);
}

void
HeapBlockWaits(Slice *slice, BlockNumber blkno)
{
	SetBlock(&slice->waits, blkno);
	slice->any_waits = true;
}

void
AllHeapBlocksWait(Slice *slice)
{
	for (int i = 0; i < lengthof(slice->waits.words); i++)
		pg_atomic_write_u32(&slice->waits.words[i], PG_UINT32_MAX);
	slice->any_waits = true;
}

static inline uint32
HashPage(const RelFileLocator *rlocator, ForkNumber forknum, BlockNumber blkno)
{
	return murmurhash32(rlocator->relNumber ^ murmurhash32(blkno ^ ((uint32) forknum << 30)));
}

/* How many blocks a fork has, or 0; what was found is good for one plan. */
static BlockNumber
CountBlocks(Slice *slice, const RelFileLocator *rlocator, ForkNumber forknum)
{
	SMgrRelation *known = &slice->relations[rlocator->relNumber % KNOWN_RELATIONS];

	if (*known == NULL || !RelFileLocatorEquals((*known)->smgr_rlocator.locator, *rlocator))
		*known = smgropen(*rlocator, INVALID_PROC_NUMBER);
	if ((*known)->smgr_cached_nblocks[forknum] == InvalidBlockNumber && !smgrexists(*known, forknum))
		return 0;
	return smgrnblocks(*known, forknum);
}

SlicePage *
FindSlicePage(Slice *slice, const RelFileLocator *rlocator, ForkNumber forknum, BlockNumber blkno, bool create)
{
	uint32		hash = HashPage(rlocator, forknum, blkno);
	uint32		at = hash;
	SlicePage  *page;

	for (;; at++)
	{
		at &= slice->mask;
		if (slice->table[at].generation != slice->generation)
			break;
		page = &slice->pages[slice->table[at].page];
		if (page->hash == hash && page->blkno == blkno && page->forknum == forknum && RelFileLocatorEquals(page->rlocator, *rlocator))
			return page;
	}
	if (!create)
		return NULL;

	slice->table[at].generation = slice->generation;
	slice->table[at].page = ++slice->npages;
	page = &slice->pages[slice->npages];
	memset(page, 0, sizeof(*page));
	page->rlocator = *rlocator;
	page->forknum = forknum;
	page->blkno = blkno;
	page->hash = hash;
	page->recent = InvalidBuffer;
	page->free_bytes = -1;
	return page;
}

/* Once; by the process that has the page. */
void
ListPage(Slice *slice, SlicePage *page)
{
	if (page->listed)
		return;
	page->listed = true;
	slice->listed[pg_atomic_fetch_add_u32(&slice->nlisted, 1)] = page - slice->pages;
}

SliceIndex
NumListed(const Slice *slice)
{
	return pg_atomic_read_u32(unconstify(pg_atomic_uint32 *, &slice->nlisted));
}

/* Its pages are an index's: no index entry points to them. */
static bool
IsOfIndex(const DecodedXLogRecord *decoded)
{
	switch (decoded->header.xl_rmid)
	{
		case RM_BTREE_ID:
		case RM_HASH_ID:
		case RM_GIN_ID:
		case RM_GIST_ID:
		case RM_SPGIST_ID:
		case RM_BRIN_ID:
			return true;
		default:
			return false;
	}
}

/* It stays in place: what follows on its pages waits for it. */
static void
StayInPlace(Slice *slice, SliceRecord *record)
{
	DecodedXLogRecord *decoded = record->decoded;

	for (int id = 0; id <= decoded->max_block_id; id++)
	{
		DecodedBkpBlock *block = &decoded->blocks[id];
		SlicePage  *page;

		if (!block->in_use)
			continue;
		page = FindSlicePage(slice, &block->rlocator, block->forknum, block->blkno, true);
		page->barrier = slice->nrecords;
		ListPage(slice, page);
		if (block->forknum == MAIN_FORKNUM && !IsOfIndex(decoded))
			HeapBlockWaits(slice, block->blkno);
	}
}

/* The file is to have this block.  Returns false if too many files grow. */
static bool
Grow(Slice *slice, const RelFileLocator *rlocator, BlockNumber blkno)
{
	int			i = 0;

	while (i < slice->ngrown && !RelFileLocatorEquals(slice->grown[i].rlocator, *rlocator))
		i++;
	if (i == MAX_GROWN)
		return false;
	if (i == slice->ngrown)
	{
		slice->ngrown++;
		slice->grown[i].rlocator = *rlocator;
		slice->grown[i].nblocks = 0;
	}
	slice->grown[i].nblocks = Max(slice->grown[i].nblocks, blkno + 1);
	return true;
}

/* Many pages at a time, where redo adds one. */
static void
GrowFiles(Slice *slice)
{
	for (int i = 0; i < slice->ngrown; i++)
		UnlockReleaseBuffer(XLogReadBufferExtended(slice->grown[i].rlocator, MAIN_FORKNUM, slice->grown[i].nblocks - 1,
												   RBM_ZERO_AND_LOCK, InvalidBuffer));
}

/*
 * The page of a block, if it lies within its file, or can be made to: a page
 * that the record fills as a whole is added to the file, as redo would.  It is
 * new until it is filled, which any reader of a heap takes for empty; an index
 * is never extended.
 */
static SlicePage *
UsablePage(Slice *slice, DecodedBkpBlock *block, bool fills)
{
	SlicePage  *page;

	if (!block->in_use || block->forknum != MAIN_FORKNUM || (block->has_image && !block->apply_image && !BROKEN(13)))
		return NULL;
	page = FindSlicePage(slice, &block->rlocator, block->forknum, block->blkno, true);
	if (page->checked || page->missing)
		return page->missing ? NULL : page;

	if (block->blkno >= CountBlocks(slice, &block->rlocator, MAIN_FORKNUM))
	{
		if (!fills || BROKEN(8) || !Grow(slice, &block->rlocator, block->blkno))
		{
			page->missing = true;
			return NULL;
		}
		page->added = true;
	}
	page->checked = true;
	return page;
}

static void
AddChange(Slice *slice, SliceRecord *record, SlicePage *page, uint8 block_id)
{
	Change	   *change = &slice->changes[++slice->nchanges];

	change->record = slice->nrecords;
	change->page = page - slice->pages;
	change->next = 0;
	change->after = BROKEN(5) ? 0 : page->barrier;
	change->block_id = block_id;
	change->left = false;
	if (page->first == 0)
		page->first = page->next = slice->nchanges;
	else
		slice->changes[page->last].next = slice->nchanges;
	page->last = slice->nchanges;
	if (record->nchanges++ == 0)
		record->change = slice->nchanges;
}

/* The page of a visibility map, of which bits are cleared; it is never made here. */
static SlicePage *
UsableMap(Slice *slice, DecodedBkpBlock *block)
{
	SlicePage  *page;

	if (block->has_image && !block->apply_image)
		return NULL;
	page = FindSlicePage(slice, &block->rlocator, VISIBILITYMAP_FORKNUM, block->blkno, true);
	if (!page->checked && !page->missing)
	{
		page->checked = block->blkno < CountBlocks(slice, &block->rlocator, VISIBILITYMAP_FORKNUM);
		page->missing = !page->checked;
	}
	return page->checked ? page : NULL;
}

/*
 * All blocks of a record, or none.  A bit of a map that is still set would have
 * an index-only scan take an entry's tuple for visible to all: entries come
 * after all maps, and wait where a map has to.
 */
static bool
PlanBlocks(Slice *slice, SliceRecord *record, bool fills)
{
	DecodedXLogRecord *decoded = record->decoded;
	SlicePage  *pages[MAX_EARLY_BLOCKS];
	bool		map_waits = false;

	if (decoded->max_block_id >= MAX_EARLY_BLOCKS)
		return false;
	for (int id = 0; id <= decoded->max_block_id; id++)
	{
		DecodedBkpBlock *block = &decoded->blocks[id];

		pages[id] = NULL;
		if (!block->in_use)
			continue;
		pages[id] = block->forknum == VISIBILITYMAP_FORKNUM ? UsableMap(slice, block)
			: UsablePage(slice, block, fills && id == 0);
		if (pages[id] == NULL)
			return false;
		map_waits |= pages[id]->forknum == VISIBILITYMAP_FORKNUM && pages[id]->barrier != 0;
	}

	for (int id = decoded->max_block_id; id >= 0; id--)
		if (pages[id] != NULL)
			AddChange(slice, record, pages[id], id);
	if (map_waits)
		for (int id = 0; id <= decoded->max_block_id; id++)
			if (pages[id] != NULL && pages[id]->forknum == MAIN_FORKNUM)
				HeapBlockWaits(slice, pages[id]->blkno);
	return true;
}

/* The block is there, and of a visibility map.  Records of servers before 18.6 clear bits without naming it. */
static bool
NamesMap(const DecodedXLogRecord *decoded, int block_id)
{
	return block_id <= decoded->max_block_id && decoded->blocks[block_id].in_use &&
		decoded->blocks[block_id].forknum == VISIBILITYMAP_FORKNUM;
}

/*
 * The new version has a multixact for those who had locked the old one.  Most
 * often it is a plain xid, of who waited for the row and locked it before it
 * was updated.
 */
static bool
NewVersionHasMultixact(const DecodedXLogRecord *decoded)
{
	const xl_heap_update *xlrec = (const xl_heap_update *) decoded->main_data;
	const DecodedBkpBlock *block = &decoded->blocks[0];
	Size		at = 0;
	xl_heap_header header;

	if (!TransactionIdIsValid(xlrec->new_xmax))
		return false;
	if (xlrec->flags & XLH_UPDATE_PREFIX_FROM_OLD)
		at += sizeof(uint16);
	if (xlrec->flags & XLH_UPDATE_SUFFIX_FROM_OLD)
		at += sizeof(uint16);
	/* Where there is an image alone, nothing says so. */
	if (!block->has_data || block->data_len < at + SizeOfHeapHeader)
		return true;
	memcpy(&header, block->data + at, SizeOfHeapHeader);
	return (header.t_infomask & HEAP_XMAX_IS_MULTI) != 0;
}

static bool
PlanHeap(Slice *slice, SliceRecord *record)
{
	DecodedXLogRecord *decoded = record->decoded;
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;
	bool		fills = (info & XLOG_HEAP_INIT_PAGE) != 0 || decoded->blocks[0].apply_image;

	/*
	 * A multixact makes the record one in place: a reader that meets it asks
	 * for its members, which come with a record that is walked.
	 */
	switch (info & XLOG_HEAP_OPMASK)
	{
		case XLOG_HEAP_INSERT:
			if ((((xl_heap_insert *) decoded->main_data)->flags & XLH_INSERT_ALL_VISIBLE_CLEARED) &&
				!NamesMap(decoded, HEAP_INSERT_BLKREF_VM))
				return false;
			return PlanBlocks(slice, record, fills);
		case XLOG_HEAP_DELETE:
			{
				xl_heap_delete *xlrec = (xl_heap_delete *) decoded->main_data;

				if ((xlrec->flags & XLH_DELETE_IS_SUPER) || (xlrec->infobits_set & XLHL_XMAX_IS_MULTI) ||
					((xlrec->flags & XLH_DELETE_ALL_VISIBLE_CLEARED) && !NamesMap(decoded, HEAP_DELETE_BLKREF_VM)))
					return false;
				return PlanBlocks(slice, record, false);
			}
		case XLOG_HEAP_LOCK:
			{
				xl_heap_lock *xlrec = (xl_heap_lock *) decoded->main_data;

				if (((xlrec->infobits_set & XLHL_XMAX_IS_MULTI) && !BROKEN(10)) ||
					((xlrec->flags & XLH_LOCK_ALL_FROZEN_CLEARED) && !NamesMap(decoded, HEAP_LOCK_BLKREF_VM)))
					return false;
				return PlanBlocks(slice, record, false);
			}
		case XLOG_HEAP_UPDATE:
		case XLOG_HEAP_HOT_UPDATE:
			{
				xl_heap_update *xlrec = (xl_heap_update *) decoded->main_data;

				if (((xlrec->old_infobits_set & XLHL_XMAX_IS_MULTI) || NewVersionHasMultixact(decoded)) && !BROKEN(10))
					return false;
				if ((xlrec->flags & (XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED | XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED)) &&
					!NamesMap(decoded, HEAP_UPDATE_BLKREF_VM_NEW) && !NamesMap(decoded, HEAP_UPDATE_BLKREF_VM_OLD))
					return false;

				/*
				 * The old version may say where the new one is before that is
				 * there.  Its xmax runs until the walk, so that nobody's
				 * snapshot leads there.
				 */
				return PlanBlocks(slice, record, fills);
			}
		default:
			return false;
	}
}

/*
 * Snapshots that are held or will be taken need nothing that is older.  The
 * server's own horizon is the oldest of every backend's xmin, of what is known
 * to run on the primary, and of slots: what ResolveRecoveryConflictWithSnapshot
 * looks for cannot precede it, and it does not go back.
 */
static bool
IsNeededByNobody(TransactionId conflict_horizon, TransactionId *oldest)
{
	if (!TransactionIdIsValid(*oldest))
		*oldest = GetOldestNonRemovableTransactionId(NULL);
	return TransactionIdPrecedes(conflict_horizon, *oldest) || BROKEN(6);
}

static bool
PlanHeap2(Slice *slice, SliceRecord *record, TransactionId *oldest)
{
	DecodedXLogRecord *decoded = record->decoded;
	uint8		info = decoded->header.xl_info & ~XLR_INFO_MASK;

	switch (info & XLOG_HEAP_OPMASK)
	{
		case XLOG_HEAP2_MULTI_INSERT:
			if ((((xl_heap_multi_insert *) decoded->main_data)->flags & XLH_INSERT_ALL_FROZEN_SET) ||
				((((xl_heap_multi_insert *) decoded->main_data)->flags & XLH_INSERT_ALL_VISIBLE_CLEARED) &&
				 !NamesMap(decoded, HEAP_MULTI_INSERT_BLKREF_VM)))
				return false;
			return PlanBlocks(slice, record, (info & XLOG_HEAP_INIT_PAGE) != 0 || decoded->blocks[0].apply_image);
		case XLOG_HEAP2_PRUNE_ON_ACCESS:
		case XLOG_HEAP2_PRUNE_VACUUM_SCAN:
		case XLOG_HEAP2_PRUNE_VACUUM_CLEANUP:
			{
				uint8		flags = ((xl_heap_prune *) decoded->main_data)->flags;
				TransactionId horizon;

				/* Of catalogs, slots of logical decoding have a say, too. */
				if (flags & XLHP_IS_CATALOG_REL)
					return false;
				/* Freezing may leave a multixact of fewer members, which was made for that. */
				if ((flags & XLHP_HAS_FREEZE_PLANS) && last_multixact > slice->replayed && !BROKEN(10))
					return false;
				if (flags & XLHP_HAS_CONFLICT_HORIZON)
				{
					memcpy(&horizon, decoded->main_data + SizeOfHeapPrune, sizeof(horizon));
					if (!IsNeededByNobody(horizon, oldest))
					{
						CountRedo(REDO_PRUNE_HORIZON, 1);
						return false;
					}
				}
				return PlanBlocks(slice, record, false);
			}
		default:
			return false;
	}
}

/* Its pages come in the stage of indexes. */
static bool
PlanEntry(Slice *slice, SliceRecord *record)
{
	if (!AddsEntry(record->decoded) || !PlanBlocks(slice, record, false))
		return false;
	for (SliceIndex i = 0; i < record->nchanges; i++)
		slice->pages[slice->changes[record->change + i].page].index = true;
	return true;
}

static bool
PlanRecord(Slice *slice, SliceRecord *record, TransactionId *oldest)
{
	DecodedXLogRecord *decoded = record->decoded;

	/*
	 * Consistency checks compare a page with its image of that record alone.
	 * What is oversized is freed by the reader when it was walked.
	 */
	if (decoded->oversized || ((decoded->header.xl_info & XLR_CHECK_CONSISTENCY) && !BROKEN(13)))
		return false;
	switch (decoded->header.xl_rmid)
	{
		case RM_HEAP_ID:
			return PlanHeap(slice, record);
		case RM_HEAP2_ID:
			return PlanHeap2(slice, record, oldest);
		default:
			return PlanEntry(slice, record);
	}
}

/*
 * Ask the kernel for the WAL of the next slices.  Its own reading ahead is by
 * some 100 kB, and slices are decoded in bursts: each would wait for the disk,
 * which has nothing to do in between.  No more than is there: the rest of a
 * segment that is being received may be of an old one, and what follows one
 * from an archive has not been asked for.
 */
static void
AskForWal(XLogReaderState *reader)
{
#ifdef USE_POSIX_FADVISE
	static XLogRecPtr asked = 0;
	XLogRecPtr	next = reader->NextRecPtr;
	XLogRecPtr	received = GetWalRcvFlushRecPtr(NULL, NULL);
	XLogRecPtr	end = received > next ? received :
		WalRcvStreaming() ? next : next - XLogSegmentOffset(next, wal_segment_size) + wal_segment_size;
	XLogRecPtr	from = Max(asked, next);

	end = Min(end, next + WAL_AHEAD);
	while (reader->seg.ws_tli != 0 && from + WAL_ASKED_AT_ONCE <= end)
	{
		uint32		offset = XLogSegmentOffset(from, wal_segment_size);
		uint32		size = Min(end - from, wal_segment_size - offset);
		XLogSegNo	segment;
		char		path[MAXPGPATH];
		int			file;

		XLByteToSeg(from, segment, wal_segment_size);
		XLogFilePath(path, reader->seg.ws_tli, segment, wal_segment_size);
		if ((file = BasicOpenFile(path, O_RDONLY | PG_BINARY)) < 0)
			return;				/* its reader will say why */
		/* Of a larger piece Linux reads the beginning alone (force_page_cache_ra). */
		for (uint32 at = 0; at < size; at += WAL_ASKED_AT_ONCE)
			(void) posix_fadvise(file, offset + at, Min(size - at, WAL_ASKED_AT_ONCE), POSIX_FADV_WILLNEED);
		close(file);
		asked = from = from + size;
	}
#endif
}

/*
 * Plan what follows a record, as far as it is there without waiting.  Returns
 * whether anything can go early.
 */
bool
PlanSlice(Slice *slice, XLogReaderState *reader, DecodedXLogRecord *last)
{
	TransactionId oldest = InvalidTransactionId;

	AskForWal(reader);
	slice->generation++;
	slice->nrecords = slice->nchanges = slice->npages = slice->nplanned = 0;
	pg_atomic_write_u32(&slice->nlisted, 0);
	slice->maxxid = InvalidTransactionId;
	slice->start = last->next_lsn;
	slice->replayed = reader->record->lsn;
	slice->mask = pg_nextpower2_32(Max(4 * Min(walrider_redo_slice, MAX_SLICE), 1024)) - 1;
	memset(slice->relations, 0, sizeof(slice->relations));
	slice->ended = false;
	slice->any_before = false;
	slice->ngrown = 0;
	if (slice->any_waits)
		memset(&slice->waits, 0, sizeof(slice->waits));
	slice->any_waits = false;

	while (HasRoom(slice) && last->next_lsn - slice->start < MAX_SLICE_WAL)
	{
		DecodedXLogRecord *decoded = last->next;
		SliceRecord *record;

		if (decoded == NULL)
		{
			if (MayChangeTimeline(last) || XLogReadAhead(reader, true) == NULL)
				break;
			decoded = last->next;
		}
		if (EndsSlice(decoded))
		{
			slice->ended = true;
			break;
		}

		record = &slice->records[++slice->nrecords];
		record->decoded = decoded;
		record->change = 0;
		record->nchanges = record->nleft = 0;
		if (TransactionIdIsValid(decoded->header.xl_xid) &&
			(!TransactionIdIsValid(slice->maxxid) || TransactionIdFollows(decoded->header.xl_xid, slice->maxxid)))
			slice->maxxid = decoded->header.xl_xid;
		if (decoded->header.xl_rmid == RM_MULTIXACT_ID)
			last_multixact = Max(last_multixact, decoded->lsn);
		if (decoded->max_block_id >= 0 && !PlanRecord(slice, record, &oldest))
			StayInPlace(slice, record);
		slice->nplanned += record->nchanges > 0;
		last = decoded;
	}
	GrowFiles(slice);
	AskForPages(slice);
	return slice->nchanges > 0;
}

/* Index entries wait for the heap pages of the records that clear bits of this map. */
static void
HoldEntriesOfMap(Slice *slice, const SlicePage *map)
{
	for (SliceIndex at = map->first; at != 0; at = slice->changes[at].next)
	{
		DecodedXLogRecord *decoded = slice->records[slice->changes[at].record].decoded;

		for (int id = 0; id <= decoded->max_block_id; id++)
			if (decoded->blocks[id].in_use && decoded->blocks[id].forknum == MAIN_FORKNUM)
				SetBlock(&slice->waits_before, decoded->blocks[id].blkno);
	}
	slice->any_before = true;
}

/*
 * The slice is given out before the one before it is walked.  Pages of which
 * that walk has something left to do are left alone until then, and so are
 * index entries that point to them.
 */
void
HoldBack(Slice *slice, const Slice *before)
{
	if (BROKEN(14))
		return;
	memcpy(&slice->waits_before, &before->waits, sizeof(slice->waits_before));
	slice->any_before = before->any_waits;

	for (SliceIndex i = 0; i < NumListed(before); i++)
	{
		const SlicePage *page = &before->pages[before->listed[i]];
		SlicePage  *same;

		if (page->next == 0 && page->barrier == 0)
			continue;
		same = FindSlicePage(slice, &page->rlocator, page->forknum, page->blkno, false);
		if (same == NULL || same->first == 0)
			continue;
		same->held = true;
		ListPage(slice, same);
		if (same->forknum == VISIBILITYMAP_FORKNUM)
			HoldEntriesOfMap(slice, same);
	}
}
