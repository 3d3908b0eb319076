/*-------------------------------------------------------------------------
 *
 * redo.h
 *	  Early redo on a hot standby: what its parts share.
 *
 * The startup process replays one record after the other.  Early redo has it
 * look at some thousand decoded records first, a slice, and change the pages
 * that they are about page by page, as far as a reader cannot tell.  Then
 * PostgreSQL's own loop walks the slice, finds most of it done, and does the
 * rest: commits, files, locks, and every page that could not go early.
 *
 * redo.c		the hook: when a slice begins, the walk, settings, counters
 * plan.c		a slice: which change of which page may go early
 * visit.c		a page: its changes, one after the other
 *
 * docs/readable.md has the rules, and why each holds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef WALRIDER_REDO_EXTENSION_H
#define WALRIDER_REDO_EXTENSION_H

#include "access/xlogreader.h"
#include "port/atomics.h"
#include "storage/block.h"
#include "storage/buf.h"
#include "storage/relfilelocator.h"

/* The one minor version whose sources the rules were checked against. */
#define EARLY_REDO_VERSION 180006

#define MAX_SLICE		8192	/* records */
#define MAX_SLICE_WAL	(1024 * 1024)	/* what is planned is to be in the cache yet when it is done */
#define MAX_CHANGES		(2 * MAX_SLICE) /* few have more */
#define MAX_EARLY_BLOCKS 4		/* of a record: both versions' pages and maps */
#define MAX_PAGES		(4 * MAX_SLICE)
#define PAGE_TABLE		(2 * MAX_PAGES) /* a power of two */

/* A test breaks one of the rules of docs/readable.md, to see that others notice. */
#ifndef WALRIDER_BREAK
#define WALRIDER_BREAK	0
#endif
#define BROKEN(rule)	(WALRIDER_BREAK == (rule))
#define LEAVES_SOME		(BROKEN(12) || BROKEN(100)) /* changes are left to the walk now and then, which breaks none */

/* Numbers of records, changes and pages in a slice; 0 is none. */
typedef uint32 SliceIndex;

/* One block of a record that may go early. */
typedef struct Change
{
	SliceIndex	record;
	SliceIndex	page;
	SliceIndex	next;			/* of the same page */
	SliceIndex	after;			/* not before this record was walked */
	uint8		block_id;
	bool		done;
} Change;

typedef struct SlicePage
{
	RelFileLocator rlocator;
	ForkNumber	forknum;
	BlockNumber blkno;
	SliceIndex	first,
				last;			/* changes */
	SliceIndex	next;			/* the first change that is not done */
	SliceIndex	barrier;		/* the last record in place so far */
	Buffer		recent;			/* where it was seen, or InvalidBuffer */
	bool		checked;		/* it lies within its file */
	bool		missing;		/* it does not: its changes go in place */
	bool		index;			/* has entries that point to a heap */
} SlicePage;

typedef struct SliceRecord
{
	DecodedXLogRecord *decoded;
	SliceIndex	change;			/* the first one */
	uint8		nchanges;		/* 0: to be walked in any case */
} SliceRecord;

/* Why a record did not go early, or a slice ended. */
typedef enum RedoCounter
{
	REDO_SLICES,
	REDO_RECORDS,				/* in slices */
	REDO_EARLY,					/* of these, all changes early */
	REDO_SKIPPED,				/* of these, never seen by the main loop */
	REDO_IN_PLACE,				/* changed pages, in place */
	REDO_PARTIAL,				/* of these, the rest of a record */
	REDO_PRUNE_HORIZON,			/* prunes that a snapshot may need */
	REDO_CLEANUP_LOCK,			/* pages that somebody had pinned */
	REDO_ENTRY_FIRST,			/* index entries whose heap page waits */
	REDO_REFUSED,				/* changes that the engine would not do */
	REDO_VISITS,				/* of pages */
	REDO_BARRIERS,				/* slices ended by a record that nothing may pass */
	REDO_MIN_RECOVERY,			/* writes of minRecoveryPoint */
	NUM_REDO_COUNTERS
} RedoCounter;

/* In the startup process alone. */
typedef struct Slice
{
	SliceIndex	nrecords;		/* records[1 .. nrecords], and so on */
	SliceIndex	nchanges;
	SliceIndex	npages;
	TransactionId maxxid;
	bool		ended;			/* by a record that nothing may pass */
	uint32		generation;		/* of what is in the table */
	bool		any_waits;
	SliceRecord records[MAX_SLICE + 1];
	Change		changes[MAX_CHANGES + 1];
	SlicePage	pages[MAX_PAGES + 1];
	struct
	{
		uint32		generation;
		SliceIndex	page;
	}			table[PAGE_TABLE];

	/* By the low bits of their numbers: heap blocks not all of whose changes go early. */
	uint8		waits[65536];
} Slice;

/* redo.c */
extern int	walrider_redo_slice;	/* records */
extern void CountRedo(RedoCounter counter, uint64 by);

/* plan.c */
extern bool MayChangeTimeline(const DecodedXLogRecord *decoded);
extern bool PlanSlice(Slice *slice, XLogReaderState *reader);
extern SlicePage *FindSlicePage(Slice *slice, const RelFileLocator *rlocator, ForkNumber forknum,
								BlockNumber blkno, bool create);
extern void RememberBuffer(SlicePage *page, Buffer buffer);
extern void HeapBlockWaits(Slice *slice, BlockNumber blkno);
extern void AllHeapBlocksWait(Slice *slice);

/* visit.c */
extern void VisitPage(Slice *slice, SlicePage *page, SliceIndex walked);
extern void FinishChange(Slice *slice, Change *change);

#endif							/* WALRIDER_REDO_EXTENSION_H */
