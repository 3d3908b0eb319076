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
 * redo.c		the hook: when a slice begins, the walk, settings
 * plan.c		a slice: which change of which page may go early
 * buffers.c	where pages are in shared buffers, and reading those that are not
 * entries.c	index entries: which records bring them, what they wait for
 * visit.c		a page: its changes, one after the other
 * freespace.c	what it has free, in the free space map
 * workers.c	several processes: chunks of a slice's pages are claimed
 * control.c	minRecoveryPoint, ahead of pages
 * counters.c	walrider.stat_redo
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
#include "storage/bufmgr.h"
#include "storage/relfilelocator.h"

/* The one minor version whose sources the rules were checked against. */
#define EARLY_REDO_VERSION 180006

#define MAX_SLICE		8192	/* records */
#define MAX_SLICE_WAL	(1024 * 1024)	/* what is planned is to be in the cache yet when it is done */
#define WAL_AHEAD		(8 * MAX_SLICE_WAL) /* what is decoded at once, and more */
#define WAL_ASKED_AT_ONCE (128 * 1024)
#define MAX_CHANGES		(2 * MAX_SLICE) /* few have more */
#define MAX_EARLY_BLOCKS 4		/* of a record: both versions' pages and maps */
#define PAGE_TABLE		(4 * MAX_SLICE) /* a power of two, as is what is used of it */
#define MAX_PAGES		(PAGE_TABLE / 2)
#define KNOWN_RELATIONS 16
#define MAX_GROWN		16
#define NUM_SLICES		2		/* one is walked, one is given out */

#define MAX_REDO_WORKERS 16
#define DEFAULT_REDO_WORKERS 4	/* at most, and a core is the leader's */

/*
 * minRecoveryPoint is raised by about so much WAL at a time: each time costs a
 * write of pg_control.  What is decoded for it is the better the sooner it is
 * used, and its memory costs when it is touched first.  So it is little at first,
 * more when so many times that much has been replayed, and most only if that
 * write is late.
 */
#define LEAST_RAISE_BY	(1024 * 1024)
#define RAISE_BY		(4 * 1024 * 1024)
#define MAX_RAISE_BY	(16 * 1024 * 1024)
#define RAISES_BEFORE_MORE 32

/* What the decoded records of so much WAL need: one of 54 bytes, which locks a row, takes some 170. */
#define DECODED_SIZE(wal) (4 * (wal))

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
	bool		left;			/* for the walk; known when the slice is done */
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
	uint32		hash;
	Buffer		recent;			/* where it was seen, or InvalidBuffer */
	int			free_bytes;		/* for the free space map; -1: nothing to tell */
	bool		asked;			/* the kernel was asked to read it */
	bool		checked;		/* it lies within its file */
	bool		missing;		/* it does not: its changes go in place */
	bool		added;			/* to its file, when the plan is made */
	bool		index;			/* has entries that point to a heap */
	bool		held;			/* until the slice before has been walked */
	bool		listed;			/* the startup process has to look at it again */
} SlicePage;

typedef struct SliceRecord
{
	DecodedXLogRecord *decoded;
	SliceIndex	change;			/* the first one */
	uint8		nchanges;		/* 0: to be walked in any case */
	uint8		nleft;			/* of its changes, for the walk */
} SliceRecord;

#ifdef __GNUC__
#define pg_prefetch_mem(a) __builtin_prefetch(a)
#else
#define pg_prefetch_mem(a) ((void) 0)
#endif

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
	REDO_HELD,					/* visits that waited for the walk of the slice before */
	REDO_WAIT_TIME,				/* us, the leader's, for workers */
	NUM_REDO_COUNTERS
} RedoCounter;

/*
 * A bit for each block, by the low 16 bits of its number.  What several
 * processes look up for each index entry is to be in few cache lines.
 */
typedef struct BlockBits
{
	pg_atomic_uint32 words[65536 / 32];
} BlockBits;

/* The startup process's; while it is given out, the pages are those of the processes that claim them. */
typedef struct Slice
{
	SliceIndex	nrecords;		/* records[1 .. nrecords], and so on */
	SliceIndex	nchanges;
	SliceIndex	npages;
	SliceIndex	nplanned;		/* records with changes */
	TransactionId maxxid;
	XLogRecPtr	start;
	XLogRecPtr	replayed;		/* the record that was replayed when it was planned */
	bool		ended;			/* by a record that nothing may pass */
	uint32		generation;		/* of what is in the table */
	uint32		mask;			/* of what is used of the table */
	struct SMgrRelationData *relations[KNOWN_RELATIONS];

	/* Files that grow, to so many blocks. */
	int			ngrown;
	struct
	{
		RelFileLocator rlocator;
		BlockNumber nblocks;
	}			grown[MAX_GROWN];
	bool		any_waits;

	/*
	 * Pages that have a barrier, changes that are not done, or free space to
	 * tell.  They are few, and the others are in the caches of the processes
	 * that changed them: the startup process looks at these alone.
	 */
	pg_atomic_uint32 nlisted;
	SliceIndex	listed[MAX_PAGES];
	SliceRecord records[MAX_SLICE + 1];
	Change		changes[MAX_CHANGES + 1];
	SlicePage	pages[MAX_PAGES + 1];
	struct
	{
		uint32		generation;
		SliceIndex	page;
	}			table[PAGE_TABLE];

	/* Heap blocks not all of whose changes go early; set by all processes. */
	BlockBits	waits;

	/* The same of the slice before, until that has been walked. */
	BlockBits	waits_before;
	bool		any_before;
} Slice;

/* redo.c */
extern int	walrider_redo_slice;	/* records */
extern int	walrider_redo_least_wal;	/* kB */
extern bool early_redo_at_start;

/* control.c */
extern Size ControlSharedSize(void);
extern void AttachControlShared(void);
extern void BeginRaising(XLogReaderState *reader);
extern bool RaiseMinRecoveryPoint(XLogReaderState *reader, const Slice *planned);

/* counters.c */
extern Size CountersSharedSize(void);
extern void AttachCountersShared(void);
extern void CountAs(int row);
extern void CountRedo(RedoCounter counter, uint64 by);
extern void SetRedoActive(bool active);
extern void SayRedoSummary(int code, Datum arg);

/* plan.c */
extern bool MayChangeTimeline(const DecodedXLogRecord *decoded);
extern bool EndsSlice(const DecodedXLogRecord *decoded);
extern bool PlanSlice(Slice *slice, XLogReaderState *reader, DecodedXLogRecord *last);
extern void HoldBack(Slice *slice, const Slice *before);
extern SlicePage *FindSlicePage(Slice *slice, const RelFileLocator *rlocator, ForkNumber forknum,
								BlockNumber blkno, bool create);
extern SliceIndex NumListed(const Slice *slice);
extern void ListPage(Slice *slice, SlicePage *page);
extern void SetBlock(BlockBits *bits, BlockNumber blkno);
extern void HeapBlockWaits(Slice *slice, BlockNumber blkno);
extern void AllHeapBlocksWait(Slice *slice);

/* buffers.c */
extern Size BuffersSharedSize(void);
extern void AttachBuffersShared(void);
extern void AskForPages(Slice *slice);
extern Buffer GuessBuffer(const SlicePage *page);
extern void GuessBuffers(Slice *slice, SliceIndex first, SliceIndex last, bool index);
extern Buffer ReadSlicePage(SlicePage *page, ReadBufferMode mode);

/* entries.c */
extern bool AddsEntry(const DecodedXLogRecord *decoded);
extern bool EntryWaits(const Slice *slice, const DecodedXLogRecord *decoded, uint8 block_id);

/* visit.c */
extern void VisitPage(Slice *slice, SlicePage *page, SliceIndex walked);
extern bool IsToBeVisited(const SlicePage *page, bool index);
extern void VisitPages(Slice *slice, SliceIndex first, SliceIndex last, bool index);
extern void VisitHeld(Slice *slice);
extern void FindLeft(Slice *slice);
extern void LeavePages(Slice *slice, SliceIndex first, SliceIndex last);
extern void FinishChange(Slice *slice, Change *change);

/* freespace.c */
extern void TellFreeSpace(SlicePage *page, int64 free_bytes);
extern void RecordFreeSpace(SlicePage *page);

/* workers.c */
extern int	walrider_redo_workers;
extern int	WantedWorkers(void);
extern int	RunningWorkers(void);
extern uint32 RedoWaitEvent(void);
extern void BeginRedoProcess(int row);
extern void AwaitSignal(void);
extern void RegisterRedoProcesses(void);
extern Size WorkersSharedSize(void);
extern void AttachWorkersShared(void);
extern Slice *SharedSlice(int number);
extern void GiveDecodedRoom(XLogReaderState *reader, Size size);
extern void CloseWorkersFiles(void);
extern void GiveOut(Slice *slice);
extern void FinishGivenOut(void);

#endif							/* WALRIDER_REDO_EXTENSION_H */
