/*
 * walrider_redo.h
 *	  Redo of one block of a WAL record on its page, by the engine.
 *
 * The structs mirror those of crates/redo-c/src/lib.rs, where the rules for callers are.
 */
#ifndef WALRIDER_REDO_H
#define WALRIDER_REDO_H

#include <stddef.h>
#include <stdint.h>

typedef struct WalriderBlock
{
	uint32_t	tablespace;
	uint32_t	database;
	uint32_t	relation;
	uint32_t	block;
	uint8_t		id;
	uint8_t		fork;
	uint8_t		will_init;
	uint8_t		has_image;
	uint8_t		image_info;
	uint8_t		has_data;
	uint16_t	hole_offset;
	uint16_t	hole_len;
	const uint8_t *image;
	size_t		image_len;
	const uint8_t *data;
	size_t		data_len;
} WalriderBlock;

typedef struct WalriderRecord
{
	uint64_t	begin;
	uint64_t	end;
	uint64_t	prev;
	uint32_t	total_len;
	uint32_t	xid;
	uint32_t	toplevel_xid;
	uint16_t	origin;
	uint8_t		info;
	uint8_t		rmgr;
	const uint8_t *main_data;
	size_t		main_len;
	const WalriderBlock *blocks;
	size_t		nblocks;
} WalriderRecord;

#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(WalriderBlock) == 64 && sizeof(WalriderRecord) == 72,
			   "the structs of lib.rs");
#endif

/* What walrider_redo_block answers. */
#define WALRIDER_REDO_PANIC		(-3)	/* the page may be half changed */
#define WALRIDER_REDO_FAILED	(-2)	/* the page may be half changed */
#define WALRIDER_REDO_REFUSED	(-1)	/* the page is as it was */
#define WALRIDER_REDO_SKIPPED	0	/* the page has the change, or needs none */
#define WALRIDER_REDO_CHANGED	1	/* mark the buffer dirty */

/*
 * major is 17 or 18.  *free_bytes becomes what a heap page now has free, for the free space map, or -1 if the map is not
 * to be told.
 */
extern int	walrider_redo_block(const WalriderRecord *record, uint8_t block_id, uint8_t *page, uint32_t major,
								int hint_bits_are_logged, int64_t *free_bytes);

/* The block of a heap's free space map that says how much a block of it has free. */
extern uint32_t walrider_free_space_block(uint32_t heap_block);

/* Has that block, page, say that the heap's block has so many bytes free; answers as walrider_redo_block. */
extern int	walrider_record_free_space(uint8_t *page, uint32_t heap_block, size_t free_bytes);

/*
 * Whether an item that an insertion into a leaf of GIN brings (XLOG_GIN_INSERT's block data, of a posting tree or of the
 * entries) is in a heap block whose bit is set in waits or waits_before; 1 also if the data does not tell.  Both have 65536
 * bits, one for each value of the low 16 bits of a block's number, in words, the lowest bits first; waits_before may be null.
 */
extern int	walrider_gin_items_wait(const uint8_t *data, size_t data_len, int of_posting_tree, const uint32_t *waits,
									const uint32_t *waits_before);

#endif							/* WALRIDER_REDO_H */
