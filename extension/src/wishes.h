/*-------------------------------------------------------------------------
 *
 * wishes.h
 *	  What a slot's subscriber has subscribed to, and from where on.
 *
 *-------------------------------------------------------------------------
 */
#ifndef WALRIDER_WISHES_H
#define WALRIDER_WISHES_H

#include "replication/logical.h"

/*
 * What the subscriber had subscribed to when it was sent what was prepared
 * from this position on, up to that of the next entry.  Of the options only
 * those that decide whether anything is published.
 */
typedef struct Wish
{
	XLogRecPtr	since;
	const char *publications;
	const char *messages;		/* empty: not given */
	void	   *stock;			/* pgoutput's own data, with these options */
} Wish;

extern Wish *MakeWish(XLogRecPtr since, const char *publications, const char *messages);
extern List *ReadWishes(LogicalDecodingContext *ctx);
extern void WriteWishes(LogicalDecodingContext *ctx, List *wishes);

#endif
