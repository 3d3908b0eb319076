/*-------------------------------------------------------------------------
 *
 * wishes.c
 *	  The file in a slot's directory that says what its subscriber had
 *	  subscribed to.
 *
 * It goes with the slot, and nothing else looks at it.  It is written only
 * where the subscriber asks for something else than before, and before
 * anything is sent by that.  Big-endian: a CRC of what follows, and for each
 * wish its position and two strings that end with a zero.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "libpq/pqformat.h"
#include "port/pg_crc32c.h"
#include "replication/slot.h"
#include "storage/fd.h"

#include "wishes.h"

static char *
WishesPath(LogicalDecodingContext *ctx, const char *suffix)
{
	return psprintf("pg_replslot/%s/walrider_pgoutput%s",
					NameStr(ctx->slot->data.name), suffix);
}

Wish *
MakeWish(XLogRecPtr since, const char *publications, const char *messages)
{
	Wish	   *wish = palloc0(sizeof(Wish));

	wish->since = since;
	wish->publications = pstrdup(publications);
	wish->messages = pstrdup(messages);
	return wish;
}

/* A damaged file is no reason to stop; what it decides may concern nobody. */
List *
ReadWishes(LogicalDecodingContext *ctx)
{
	char	   *path = WishesPath(ctx, "");
	List	   *wishes = NIL;
	StringInfoData data;
	char		block[1024];
	size_t		got;
	pg_crc32c	crc;
	FILE	   *file = AllocateFile(path, PG_BINARY_R);

	if (file == NULL)
	{
		if (errno != ENOENT)
			ereport(ERROR,
					(errcode_for_file_access(),
					 errmsg("could not open file \"%s\": %m", path)));
		return NIL;
	}
	initStringInfo(&data);
	while ((got = fread(block, 1, sizeof(block), file)) > 0)
		appendBinaryStringInfo(&data, block, got);
	if (ferror(file))
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not read file \"%s\": %m", path)));
	FreeFile(file);

	INIT_CRC32C(crc);
	if (data.len > sizeof(uint32))
		COMP_CRC32C(crc, data.data + sizeof(uint32), data.len - sizeof(uint32));
	FIN_CRC32C(crc);
	if (data.len < sizeof(uint32) || pq_getmsgint(&data, sizeof(uint32)) != crc)
	{
		ereport(WARNING,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("file \"%s\" is damaged", path),
				 errdetail("Transactions prepared before now are taken to have been published by today's publications.")));
		return NIL;
	}
	while (data.cursor < data.len)
	{
		XLogRecPtr	since = pq_getmsgint64(&data);
		const char *publications = pq_getmsgrawstring(&data);
		const char *messages = pq_getmsgrawstring(&data);

		wishes = lappend(wishes, MakeWish(since, publications, messages));
	}
	return wishes;
}

void
WriteWishes(LogicalDecodingContext *ctx, List *wishes)
{
	char	   *path = WishesPath(ctx, "");
	char	   *fresh = WishesPath(ctx, ".new");
	StringInfoData data;
	ListCell   *cell;
	pg_crc32c	crc;
	FILE	   *file;

	initStringInfo(&data);
	pq_sendint32(&data, 0);
	foreach(cell, wishes)
	{
		Wish	   *wish = lfirst(cell);

		pq_sendint64(&data, wish->since);
		appendBinaryStringInfo(&data, wish->publications, strlen(wish->publications) + 1);
		appendBinaryStringInfo(&data, wish->messages, strlen(wish->messages) + 1);
	}
	INIT_CRC32C(crc);
	COMP_CRC32C(crc, data.data + sizeof(uint32), data.len - sizeof(uint32));
	FIN_CRC32C(crc);
	crc = pg_hton32(crc);
	memcpy(data.data, &crc, sizeof(crc));

	/* durable_rename makes the file durable before it has its name. */
	file = AllocateFile(fresh, PG_BINARY_W);
	if (file == NULL ||
		fwrite(data.data, 1, data.len, file) != data.len ||
		FreeFile(file) != 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", fresh)));
	durable_rename(fresh, path, ERROR);
}
