/*
 * recorder LOG DIRECTORY COMMAND...: runs a command and writes down, in the order in which they took effect, all calls of it and
 * of its children that change what is on the file system of DIRECTORY, with their data, and what is sent over sockets.
 *
 * By ptrace, which a preloaded library cannot replace: part of the calls do not go through libc.  A filter stops the threads at
 * these calls alone, and one is let through at a time: so the order of the log is that of the effects.  Data is read back from
 * the file behind the call.  Calls that failed changed nothing and are not there.  A call that changes files in a way that is
 * not understood here is written down as UNKNOWN: who reads the log must not go on.
 *
 * The log is a sequence of `struct entry`, each with its two names and its data behind; powercut.py reads it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "traced.h"

enum operation
{
	CREATE = 1,	/* inode `a` as name `one` of directory `b` */
	TRUNCATE,	/* inode `a`, to length `at` */
	WRITE,		/* inode `a`, data from `at` on */
	ALLOCATE,	/* inode `a`, `at` to `b`; mode `c` */
	FSYNC,		/* inode `a`; `b` is 1 for fdatasync */
	SYNC,		/* everything */
	RENAME,		/* name `one` of directory `a` becomes `two` of `b` */
	LINK,		/* inode `a` is also `one` of directory `b` */
	UNLINK,		/* name `one` of directory `b` goes, a file or a directory */
	MKDIR,		/* inode `a` as name `one` of directory `b` */
	SYMLINK,	/* `one` of directory `b` leads to the data */
	SEND,		/* over a socket */
	UNKNOWN,	/* system call number `a` */
};

struct entry
{
	uint32_t operation;
	uint16_t one, two;			/* bytes of the names behind this */
	uint64_t a, b, c;
	int64_t at;
	uint64_t length;			/* bytes of data behind the names */
};

/* What names a directory's entry: the directory's inode, 0 if it is on another file system or not there. */
struct place
{
	uint64_t directory;
	char name[NAME_MAX + 1];
	char path[PATH_MAX + 64];
};

/* The call that is let through. */
struct call
{
	pid_t thread;
	long number;
	uint64_t args[6];
	struct place one, two;
	int existed;
};

static const long watched[] = {
#ifdef __NR_open
	__NR_open, __NR_creat, __NR_rename, __NR_link, __NR_symlink, __NR_unlink, __NR_mkdir, __NR_rmdir,
#endif
#ifdef __NR_renameat
	__NR_renameat,
#endif
	__NR_openat, __NR_openat2, __NR_renameat2, __NR_linkat, __NR_symlinkat, __NR_unlinkat, __NR_mkdirat,
	__NR_write, __NR_writev, __NR_pwrite64, __NR_pwritev, __NR_pwritev2, __NR_copy_file_range, __NR_sendfile, __NR_splice,
	__NR_ftruncate, __NR_truncate, __NR_fallocate, __NR_fsync, __NR_fdatasync, __NR_sync, __NR_syncfs,
	__NR_ioctl, __NR_mmap, __NR_io_uring_setup, __NR_sendto, __NR_sendmsg,
};
#define WATCHED (sizeof watched / sizeof watched[0])
#define OWN "/proc/self/"

static FILE *out;
static dev_t device;

static void put(struct entry entry, const char *one, const char *two, const void *data)
{
	entry.one = (uint16_t) (one ? strlen(one) : 0);
	entry.two = (uint16_t) (two ? strlen(two) : 0);
	if (fwrite(&entry, sizeof entry, 1, out) != 1 || fwrite(one ? one : "", 1, entry.one, out) != entry.one ||
		fwrite(two ? two : "", 1, entry.two, out) != entry.two || fwrite(data ? data : "", 1, entry.length, out) != entry.length)
		die("the log");
}

static void unknown(const struct call *call)
{
	put((struct entry) {.operation = UNKNOWN, .a = (uint64_t) call->number}, NULL, NULL, NULL);
}

/* What a thread's descriptor is; 0 if it is none. */
static int stat_fd(pid_t thread, uint64_t fd, struct stat *found)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/fd/%d", thread, (int) fd);
	return stat(path, found) == 0;
}

static int is_ours(const struct stat *found)
{
	return found->st_dev == device && (S_ISREG(found->st_mode) || S_ISDIR(found->st_mode));
}

/* Up to `length` bytes of a thread's memory; how many. */
static size_t peek(pid_t thread, uint64_t at, void *data, size_t length)
{
	size_t got = 0;

	/* By pages: what is behind a string's end may not be mapped. */
	while (got < length)
	{
		size_t page = 4096 - (at + got) % 4096;
		struct iovec mine = {(char *) data + got, page < length - got ? page : length - got};
		struct iovec theirs = {(void *) (uintptr_t) (at + got), mine.iov_len};
		ssize_t now = process_vm_readv(thread, &mine, 1, &theirs, 1, 0);

		if (now <= 0)
			break;
		got += (size_t) now;
	}
	return got;
}

static void read_string(pid_t thread, uint64_t at, char text[PATH_MAX])
{
	size_t got = peek(thread, at, text, PATH_MAX - 1);

	text[got] = 0;
}

/* The place that a path names, as the thread sees it. */
static void find_place(pid_t thread, uint64_t directory, uint64_t path, struct place *place)
{
	char text[PATH_MAX], *slash;
	struct stat found;
	size_t length;

	read_string(thread, path, text);
	length = strlen(text);
	while (length > 1 && text[length - 1] == '/')
		text[--length] = 0;
	/* Its own descriptors, by which it reaches the directory, are not ours. */
	if (strncmp(text, OWN, strlen(OWN)) == 0)
		snprintf(place->path, sizeof place->path, "/proc/%d/%s", thread, text + strlen(OWN));
	else if (text[0] == '/')
		snprintf(place->path, sizeof place->path, "%s", text);
	else if ((int) directory == AT_FDCWD)
		snprintf(place->path, sizeof place->path, "/proc/%d/cwd/%s", thread, text);
	else
		snprintf(place->path, sizeof place->path, "/proc/%d/fd/%d/%s", thread, (int) directory, text);
	slash = strrchr(place->path, '/');
	snprintf(place->name, sizeof place->name, "%s", slash + 1);
	*slash = 0;
	place->directory = stat(place->path[0] ? place->path : "/", &found) == 0 && found.st_dev == device ? found.st_ino : 0;
	*slash = '/';
}

static uint64_t open_flags(const struct call *call)
{
	struct {uint64_t flags, mode, resolve;} how = {0};

	switch (call->number)
	{
#ifdef __NR_open
		case __NR_open: return call->args[1];
		case __NR_creat: return O_CREAT | O_TRUNC;
#endif
		case __NR_openat: return call->args[2];
		case __NR_openat2: peek(call->thread, call->args[2], &how, sizeof how); return how.flags;
	}
	return 0;
}

static int is_open(long number)
{
#ifdef __NR_open
	if (number == __NR_open || number == __NR_creat)
		return 1;
#endif
	return number == __NR_openat || number == __NR_openat2;
}

/* Before a call: whether it has to be waited for; what will not be there any more, or is, behind it. */
static int prepare(struct call *call)
{
	const uint64_t *args = call->args;
	struct stat found;

	if (is_open(call->number))
	{
		if (!(open_flags(call) & (O_CREAT | O_TRUNC)))
			return 0;
#ifdef __NR_open
		if (call->number == __NR_open || call->number == __NR_creat)
			find_place(call->thread, (uint64_t) AT_FDCWD, args[0], &call->one);
		else
#endif
			find_place(call->thread, args[0], args[1], &call->one);
		call->existed = lstat(call->one.path, &found) == 0;
		return 1;
	}
	switch (call->number)
	{
#ifdef __NR_open
		case __NR_rename:
		case __NR_link:
			find_place(call->thread, (uint64_t) AT_FDCWD, args[0], &call->one);
			find_place(call->thread, (uint64_t) AT_FDCWD, args[1], &call->two);
			return 1;
		case __NR_symlink:
			find_place(call->thread, (uint64_t) AT_FDCWD, args[1], &call->one);
			return 1;
		case __NR_unlink:
		case __NR_rmdir:
		case __NR_mkdir:
			find_place(call->thread, (uint64_t) AT_FDCWD, args[0], &call->one);
			return 1;
#endif
#ifdef __NR_renameat
		case __NR_renameat:
#endif
		case __NR_renameat2:
		case __NR_linkat:
			find_place(call->thread, args[0], args[1], &call->one);
			find_place(call->thread, args[2], args[3], &call->two);
			return 1;
		case __NR_symlinkat:
			find_place(call->thread, args[1], args[2], &call->one);
			return 1;
		case __NR_unlinkat:
		case __NR_mkdirat:
		case __NR_truncate:
			find_place(call->thread, call->number == __NR_truncate ? (uint64_t) AT_FDCWD : args[0],
					   call->number == __NR_truncate ? args[0] : args[1], &call->one);
			return 1;
		case __NR_mmap:
			return (args[3] & MAP_SHARED) && (args[2] & PROT_WRITE) && stat_fd(call->thread, args[4], &found) && is_ours(&found);
		case __NR_ioctl:
			return args[1] == FICLONE || args[1] == FICLONERANGE;
		case __NR_sync:
		case __NR_io_uring_setup:
			return 1;
		case __NR_sendto:
		case __NR_sendmsg:
			return 1;
		case __NR_copy_file_range:
		case __NR_splice:
			return stat_fd(call->thread, args[2], &found) && is_ours(&found);
		case __NR_write:
			return stat_fd(call->thread, args[0], &found) && (is_ours(&found) || S_ISSOCK(found.st_mode));
	}
	return stat_fd(call->thread, args[0], &found) && (is_ours(&found) || S_ISSOCK(found.st_mode));
}

/* Where a thread's descriptor stands. */
static int64_t position(pid_t thread, uint64_t fd)
{
	char path[64];
	long long at = -1;
	FILE *info;

	snprintf(path, sizeof path, "/proc/%d/fdinfo/%d", thread, (int) fd);
	if (!(info = fopen(path, "r")) || fscanf(info, "pos: %lld", &at) != 1)
		die(path);
	fclose(info);
	return at;
}

/* What was written, read back. */
static void put_data(const struct call *call, uint64_t fd, int64_t at, uint64_t length)
{
	char path[64], *data = malloc(length + 1);
	struct stat found;
	uint64_t got = 0;
	int file;

	snprintf(path, sizeof path, "/proc/%d/fd/%d", call->thread, (int) fd);
	if (!data || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0 || fstat(file, &found) < 0)
		die(path);
	while (got < length)
	{
		ssize_t now = pread(file, data + got, length - got, at + (int64_t) got);

		if (now <= 0)
			die("what was written");
		got += (uint64_t) now;
	}
	close(file);
	put((struct entry) {.operation = WRITE, .a = found.st_ino, .at = at, .length = length}, NULL, NULL, data);
	free(data);
}

static void put_sent(const struct call *call, uint64_t at, uint64_t length)
{
	char *data = malloc(length + 1);

	if (!data || peek(call->thread, at, data, length) != length)
		die("what was sent");
	put((struct entry) {.operation = SEND, .length = length}, NULL, NULL, data);
	free(data);
}

/* From several parts. */
static void put_gathered(const struct call *call, uint64_t parts, uint64_t count)
{
	struct iovec part;

	for (uint64_t i = 0; i < count; i++)
	{
		if (peek(call->thread, parts + i * sizeof part, &part, sizeof part) != sizeof part)
			die("what was sent");
		put_sent(call, (uint64_t) (uintptr_t) part.iov_base, part.iov_len);
	}
}

static void put_opened(const struct call *call, uint64_t fd)
{
	struct stat found;

	if (!stat_fd(call->thread, fd, &found))
		die("a file that was opened");
	if (!is_ours(&found))
		return;
	if ((open_flags(call) & __O_TMPFILE) || S_ISDIR(found.st_mode))
		unknown(call);
	else if (!call->existed)
		put((struct entry) {.operation = CREATE, .a = found.st_ino, .b = call->one.directory, .c = found.st_mode & 07777},
			call->one.name, NULL, NULL);
	else if (open_flags(call) & O_TRUNC)
		put((struct entry) {.operation = TRUNCATE, .a = found.st_ino}, NULL, NULL, NULL);
}

static void put_place(enum operation operation, const struct place *place)
{
	struct stat found;

	if (!place->directory)
		return;
	if (operation == UNLINK)
		found.st_ino = 0;
	else if (lstat(place->path, &found) < 0)
		die(place->path);
	put((struct entry) {.operation = operation, .a = found.st_ino, .b = place->directory, .c = found.st_mode & 07777},
		place->name, NULL, NULL);
}

static void put_symlink(const struct call *call)
{
	char target[PATH_MAX];

	read_string(call->thread, call->args[0], target);
	if (call->one.directory)
		put((struct entry) {.operation = SYMLINK, .b = call->one.directory, .length = strlen(target)}, call->one.name, NULL, target);
}

/* A change of a file by its descriptor, or of an entry of a directory; `result` is not negative. */
static void finish(const struct call *call, int64_t result)
{
	const uint64_t *args = call->args;
	struct stat found;

	if (is_open(call->number))
		return put_opened(call, (uint64_t) result);
	switch (call->number)
	{
#ifdef __NR_open
		case __NR_rename:
#endif
#ifdef __NR_renameat
		case __NR_renameat:
#endif
		case __NR_renameat2:
			if (!call->one.directory && !call->two.directory)
				return;
			if (!call->one.directory || !call->two.directory || (call->number == __NR_renameat2 && (args[4] & ~RENAME_NOREPLACE)))
				return unknown(call);
			return put((struct entry) {.operation = RENAME, .a = call->one.directory, .b = call->two.directory},
					   call->one.name, call->two.name, NULL);
#ifdef __NR_open
		case __NR_link:
#endif
		case __NR_linkat:
			return put_place(LINK, &call->two);
#ifdef __NR_open
		case __NR_unlink:
		case __NR_rmdir:
#endif
		case __NR_unlinkat:
			return put_place(UNLINK, &call->one);
#ifdef __NR_open
		case __NR_mkdir:
#endif
		case __NR_mkdirat:
			return put_place(MKDIR, &call->one);
#ifdef __NR_open
		case __NR_symlink:
#endif
		case __NR_symlinkat:
			return put_symlink(call);
		case __NR_sync:
			return put((struct entry) {.operation = SYNC}, NULL, NULL, NULL);
		case __NR_sendto:
			return put_sent(call, args[1], (uint64_t) result);
		case __NR_truncate:
			if (stat(call->one.path, &found) < 0)
				die("a file that was cut");
			if (is_ours(&found))
				put((struct entry) {.operation = TRUNCATE, .a = found.st_ino, .at = (int64_t) args[1]}, NULL, NULL, NULL);
			return;
		case __NR_mmap:
		case __NR_ioctl:
		case __NR_splice:
		case __NR_io_uring_setup:
		case __NR_sendmsg:
			return unknown(call);
		case __NR_copy_file_range:
			if (args[3])
				return unknown(call);
			return put_data(call, args[2], position(call->thread, args[2]) - result, (uint64_t) result);
	}
	if (!stat_fd(call->thread, args[0], &found))
		die("a file that was written to");
	if (S_ISSOCK(found.st_mode) && call->number == __NR_writev)
		return put_gathered(call, args[1], args[2]);
	if (S_ISSOCK(found.st_mode))
		return call->number == __NR_write ? put_sent(call, args[1], (uint64_t) result) : unknown(call);
	switch (call->number)
	{
		case __NR_write:
		case __NR_writev:
		case __NR_sendfile:
			return put_data(call, args[0], position(call->thread, args[0]) - result, (uint64_t) result);
		case __NR_pwritev2:
			if (args[5] || (int64_t) args[3] == -1)
				return unknown(call);
			/* fallthrough */
		case __NR_pwrite64:
		case __NR_pwritev:
			return put_data(call, args[0], (int64_t) args[3], (uint64_t) result);
		case __NR_ftruncate:
			return put((struct entry) {.operation = TRUNCATE, .a = found.st_ino, .at = (int64_t) args[1]}, NULL, NULL, NULL);
		case __NR_fallocate:
			return put((struct entry) {.operation = ALLOCATE, .a = found.st_ino, .at = (int64_t) args[2], .b = args[2] + args[3],
									   .c = args[1]}, NULL, NULL, NULL);
		case __NR_fsync:
		case __NR_fdatasync:
			return put((struct entry) {.operation = FSYNC, .a = found.st_ino, .b = call->number == __NR_fdatasync}, NULL, NULL, NULL);
		case __NR_syncfs:
			return put((struct entry) {.operation = SYNC}, NULL, NULL, NULL);
	}
	unknown(call);
}

static struct call busy;		/* thread 0: none */
static pid_t *waiting;
static size_t waiters, room;

/* A thread is before a call: lets it through, or remembers it. */
static void enter(pid_t thread)
{
	struct ptrace_syscall_info info;

	if (busy.thread)
	{
		if (waiters == room && !(waiting = realloc(waiting, (room = room * 2 + 16) * sizeof *waiting)))
			die("memory");
		waiting[waiters++] = thread;
		return;
	}
	if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) < 0)
		return;
	memset(&busy, 0, sizeof busy);
	busy.number = (long) info.seccomp.nr;
	memcpy(busy.args, info.seccomp.args, sizeof busy.args);
	busy.thread = thread;
	if (prepare(&busy))
		return resume(PTRACE_SYSCALL, thread, 0);
	busy.thread = 0;
	resume(PTRACE_CONT, thread, 0);
}

static void next(void)
{
	busy.thread = 0;
	while (!busy.thread && waiters)
	{
		pid_t thread = waiting[0];

		memmove(waiting, waiting + 1, --waiters * sizeof *waiting);
		enter(thread);
	}
}

static void leave(pid_t thread)
{
	struct ptrace_syscall_info info;

	if (thread == busy.thread && ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) >= 0 &&
		info.op == PTRACE_SYSCALL_INFO_EXIT && info.exit.rval >= 0)
		finish(&busy, info.exit.rval);
	resume(PTRACE_CONT, thread, 0);
	if (thread == busy.thread)
		next();
}

static void forget(pid_t thread)
{
	for (size_t i = 0; i < waiters; i++)
		if (waiting[i] == thread)
			memmove(waiting + i, waiting + i + 1, (--waiters - i) * sizeof *waiting);
	if (busy.thread == thread)
		next();
}

/* Until all are gone; the status of the command. */
static int watch(void)
{
	static char seen[1 << 22];
	int status, result = 0;

	for (;;)
	{
		pid_t thread = waitpid(-1, &status, __WALL);

		if (thread < 0 && errno == EINTR)
			continue;
		if (thread < 0)
			return result;
		if (WIFEXITED(status) || WIFSIGNALED(status))
		{
			if (thread == program)
				result = status;
			seen[thread] = 0;
			forget(thread);
		}
		else if (status >> 16 == PTRACE_EVENT_SECCOMP)
			enter(thread);
		else if (WSTOPSIG(status) == (SIGTRAP | 0x80))
			leave(thread);
		else if (status >> 16 || (WSTOPSIG(status) == SIGSTOP && !seen[thread]))
			resume(PTRACE_CONT, thread, 0);
		else
			resume(thread == busy.thread ? PTRACE_SYSCALL : PTRACE_CONT, thread, WSTOPSIG(status));
		if (WIFSTOPPED(status))
			seen[thread] = 1;
	}
}

int main(int count, char **args)
{
	struct stat found;
	sigset_t blocked;
	int status;

	if (count < 4)
		return fprintf(stderr, "usage: recorder LOG DIRECTORY COMMAND...\n"), 125;
	if (!(out = fopen(args[1], "wbe")) || stat(args[2], &found) < 0)
		die(args[1]);
	device = found.st_dev;
	sigprocmask(SIG_SETMASK, NULL, &blocked);
	start(args + 3, watched, WATCHED, &blocked);
	status = watch();
	if (fclose(out) != 0)
		die("the log");
	return code_of(status);
}
