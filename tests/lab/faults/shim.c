/*
 * For LD_PRELOAD: makes the disk under a directory slow, stuck or full, and the clock wrong, without privileges and while a
 * program runs.
 *
 * $SHIM_CONTROL is a directory.  Its file `switches` is mapped: a switch that is off costs a look into memory, so that what is
 * measured with this library is what there is without it.  See struct switches.
 * $SHIM_KILL_AT is a number: of the calls that make or order what is durable (fsync, rename, unlink), the one of this number
 * kills the process instead.  With 0, the file `calls` gets a line with the path for each, in this order.
 * $SHIM_KILL_BEFORE is the end of a path: the first of these calls for such a path kills the process instead.
 * Only files whose path contains $SHIM_PATH are meant, if it is set.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) \
	({ \
		static __typeof__(&name) found; \
		if (!found) \
			found = (__typeof__(&name)) dlsym(RTLD_NEXT, #name); \
		found; \
	})

/* shim.py writes it. */
struct switches
{
	_Atomic int64_t fsync_us;	/* fsync, fdatasync and sync_file_range take that much longer */
	_Atomic int64_t fsync_hold; /* they wait until this is 0 */
	_Atomic int64_t full;		/* "no space left": 1 wherever a file would be written to or made, 2 only where one would be made
								 * or made longer, as on a real disk that has no block left */
	_Atomic int64_t clock_s;	/* gettimeofday is ahead by this */
	_Atomic int64_t held;		/* so many wait because of fsync_hold */
	_Atomic int64_t read_us;	/* reads of relations take that much longer */
	_Atomic int64_t write_us;	/* so do writes of WAL */
	_Atomic int64_t data_write_us;	/* and those of relations */
};

static const char *control_path(char *buffer, size_t size, const char *file)
{
	const char *control = getenv("SHIM_CONTROL");
	return control && snprintf(buffer, size, "%s/%s", control, file) < (int) size ? buffer : NULL;
}

/* A path may lead through a descriptor: /proc/self/fd/N/... */
static int is_meant(const char *path)
{
	const char *wanted = getenv("SHIM_PATH");
	const char *below;
	char link[64], name[4096];
	ssize_t length;
	int fd;

	if (!wanted || strstr(path, wanted))
		return 1;
	if (sscanf(path, "/proc/self/fd/%d", &fd) != 1)
		return 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	length = readlink(link, name, sizeof name - 1);
	below = strchr(path + strlen("/proc/self/fd/"), '/');
	if (length < 0 || length + strlen(below ? below : "") >= sizeof name)
		return 0;
	strcpy(name + length, below ? below : "");
	return strstr(name, wanted) != NULL;
}

/* Whether it is a file that is meant, with `within` in its path. */
static int fd_is_within(int fd, const char *within)
{
	char link[64], path[4096];
	ssize_t length;

	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	length = readlink(link, path, sizeof path - 1);
	if (length < 0)
		return 0;
	path[length] = 0;
	return path[0] == '/' && strstr(path, within) && is_meant(path);
}

static int fd_is_meant(int fd)
{
	return fd_is_within(fd, "");
}

/* Never returns without: a disk that obeys nothing would make tests pass. */
static struct switches *switches(void)
{
	static struct switches none;
	static struct switches *_Atomic mapped;
	struct switches *known = mapped;
	char path[4096];
	int saved = errno, fd;

	if (known)
		return known;
	if (!getenv("SHIM_CONTROL"))
		return mapped = &none;
	known = MAP_FAILED;
	if (control_path(path, sizeof path, "switches") && (fd = REAL(open)(path, O_RDWR | O_CLOEXEC)) >= 0)
	{
		known = mmap(NULL, sizeof *known, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
	}
	if (known == MAP_FAILED)
	{
		perror("the shim's switches");
		abort();
	}
	errno = saved;
	return mapped = known;
}

static void pause_for(int64_t us)
{
	struct timespec left = {us / 1000000, us % 1000000 * 1000};

	while (nanosleep(&left, &left) < 0)
		;
}

static void slow(int fd)
{
	struct switches *now = switches();
	int saved = errno;

	if ((now->fsync_us || now->fsync_hold) && fd_is_meant(fd))
	{
		now->held++;
		while (now->fsync_hold)
			pause_for(2000);
		now->held--;
		if (now->fsync_us)
			pause_for(now->fsync_us);
	}
	errno = saved;
}

static void slow_within(int fd, int64_t us, const char *within)
{
	if (us && fd_is_within(fd, within))
		pause_for(us);
}

static void slow_read(int fd)
{
	slow_within(fd, switches()->read_us, "/base/");
}

static void slow_write(int fd)
{
	slow_within(fd, switches()->write_us, "/pg_wal/");
	slow_within(fd, switches()->data_write_us, "/base/");
}

/* Whether a write up to `end` fails. */
static int is_full(int fd, off_t end)
{
	int64_t full = switches()->full;
	struct stat found;

	if (!full || !fd_is_meant(fd))
		return 0;
	if (full == 2 && (fstat(fd, &found) < 0 || end <= found.st_size))
		return 0;
	errno = ENOSPC;
	return 1;
}

/* As much from the file's position on; what has none is no file. */
static int is_full_here(int fd, off_t length)
{
	off_t at = switches()->full ? lseek(fd, 0, SEEK_CUR) : -1;

	return at >= 0 && is_full(fd, at + length);
}

static int cannot_make(const char *path, int flags)
{
	if (!(flags & O_CREAT) || !switches()->full || !is_meant(path) || access(path, F_OK) == 0)
		return 0;
	errno = ENOSPC;
	return 1;
}

static off_t length_of(const struct iovec *parts, int count)
{
	off_t length = 0;

	for (int i = 0; i < count; i++)
		length += (off_t) parts[i].iov_len;
	return length;
}

static atomic_long calls;

static void step(const char *path)
{
	const char *last = getenv("SHIM_KILL_AT"), *ending = getenv("SHIM_KILL_BEFORE");
	char log[4096], line[4096];
	int fd, length;

	if (ending && strlen(path) >= strlen(ending) && strcmp(path + strlen(path) - strlen(ending), ending) == 0)
		raise(SIGKILL);
	if (!last)
		return;
	if (atomic_fetch_add(&calls, 1) + 1 == atol(last))
		raise(SIGKILL);
	if (atol(last) == 0 && control_path(log, sizeof log, "calls")
		&& (fd = REAL(open)(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) >= 0)
	{
		length = snprintf(line, sizeof line, "%s\n", path);
		if (REAL(write)(fd, line, length) != length)
			abort();
		close(fd);
	}
}

static void step_fd(int fd)
{
	char link[64], path[4000];
	ssize_t length;

	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	length = readlink(link, path, sizeof path - 1);
	path[length < 0 ? 0 : length] = 0;
	step(path);
}

int fsync(int fd) { step_fd(fd); slow(fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { step_fd(fd); slow(fd); return REAL(fdatasync)(fd); }
int rename(const char *from, const char *to) { step(to); return REAL(rename)(from, to); }
int unlink(const char *path) { step(path); return REAL(unlink)(path); }

int sync_file_range(int fd, off_t from, off_t length, unsigned flags)
{
	slow(fd);
	return REAL(sync_file_range)(fd, from, length, flags);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	int result = REAL(gettimeofday)(now, zone);

	now->tv_sec += switches()->clock_s;
	return result;
}

ssize_t write(int fd, const void *data, size_t length)
{
	return is_full_here(fd, (off_t) length) ? -1 : REAL(write)(fd, data, length);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
	return is_full_here(fd, length_of(parts, count)) ? -1 : REAL(writev)(fd, parts, count);
}

#define PWRITE(name) \
	ssize_t name(int fd, const void *data, size_t length, off_t at) \
	{ slow_write(fd); return is_full(fd, at + (off_t) length) ? -1 : REAL(name)(fd, data, length, at); }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name) \
	ssize_t name(int fd, const struct iovec *parts, int count, off_t at) \
	{ slow_write(fd); return is_full(fd, at + length_of(parts, count)) ? -1 : REAL(name)(fd, parts, count, at); }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PREAD(name) \
	ssize_t name(int fd, void *data, size_t length, off_t at) \
	{ slow_read(fd); return REAL(name)(fd, data, length, at); }
PREAD(pread)
PREAD(pread64)

#define PREADV(name) \
	ssize_t name(int fd, const struct iovec *parts, int count, off_t at) \
	{ slow_read(fd); return REAL(name)(fd, parts, count, at); }
PREADV(preadv)
PREADV(preadv64)

#define FALLOCATE(name) \
	int name(int fd, int mode, off_t at, off_t length) \
	{ return is_full(fd, at + length) ? -1 : REAL(name)(fd, mode, at, length); }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

#define POSIX_FALLOCATE(name) \
	int name(int fd, off_t at, off_t length) \
	{ return is_full(fd, at + length) ? ENOSPC : REAL(name)(fd, at, length); }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)

#define OPEN(name) \
	int name(const char *path, int flags, ...) \
	{ \
		va_list rest; \
		mode_t mode; \
		va_start(rest, flags); \
		mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
		va_end(rest); \
		return cannot_make(path, flags) ? -1 : REAL(name)(path, flags, mode); \
	}
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
	int name(int directory, const char *path, int flags, ...) \
	{ \
		va_list rest; \
		mode_t mode; \
		va_start(rest, flags); \
		mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
		va_end(rest); \
		return path[0] == '/' && cannot_make(path, flags) ? -1 : REAL(name)(directory, path, flags, mode); \
	}
OPENAT(openat)
OPENAT(openat64)
