/*
 * jitter COMMAND...: runs a command whose threads are held up at random before system calls, so that they meet in orders which are rare
 * on a machine with few processors: one sleeps between what it was told and what it makes of it, for as long as others take for all they do.
 *
 * JITTER_SEED chooses how often, how long, and which threads most of all; without it, the clock does.  JITTER_LOG is a file to which the
 * seed of each run is added.  JITTER_PROGRAM goes in front of the command: so this is a program that can stand in the place of another.
 *
 * The same seed does not give the same order: what the system does by itself is different each time.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include "traced.h"

#define MICROSECOND INT64_C(1000)
#define MILLISECOND INT64_C(1000000)
#define MOST_THREADS (1 << 22)
/* What a run is held up in all, of all its threads together: a test waits so long, and not longer. */
#define MOST_HELD (5 * 1000 * MILLISECOND)

static const long watched[] = {
	__NR_openat, __NR_close, __NR_read, __NR_write, __NR_readv, __NR_writev, __NR_pread64, __NR_pwrite64, __NR_preadv, __NR_pwritev,
	__NR_lseek, __NR_fstat, __NR_newfstatat, __NR_statx, __NR_ftruncate, __NR_fallocate, __NR_fsync, __NR_fdatasync, __NR_sync_file_range,
	__NR_fadvise64, __NR_copy_file_range, __NR_renameat, __NR_renameat2, __NR_unlinkat, __NR_mkdirat, __NR_linkat, __NR_futex, __NR_sched_yield,
	__NR_madvise, __NR_munmap, __NR_sendto, __NR_recvfrom,
#ifdef __NR_open
	__NR_open, __NR_rename, __NR_unlink, __NR_mkdir,
#endif
};
#define WATCHED (sizeof watched / sizeof watched[0])

struct held
{
	pid_t thread;
	int64_t until;
};

static struct held *held;
static size_t count_held, room;
static int64_t left = MOST_HELD;
static uint64_t state;

/* How this run is: one of so many calls waits at most so long, in two ways; one of so many threads far more often. */
static struct
{
	uint64_t often, seldom, slow;
	int64_t briefly, long_;
} manner;

static int64_t now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000 * MILLISECOND + at.tv_nsec;
}

/* xorshift64*: below `end`. */
static uint64_t below(uint64_t end)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return (state * UINT64_C(0x2545F4914F6CDD1D) >> 32) % end;
}

static void choose(void)
{
	const char *given = getenv("JITTER_SEED"), *log = getenv("JITTER_LOG");
	uint64_t seed = given ? strtoull(given, NULL, 10) : ((uint64_t) now() ^ ((uint64_t) getpid() << 40)) >> 8;

	state = seed * UINT64_C(0x9E3779B97F4A7C15) | 1;
	for (int i = 0; i < 8; i++)
		below(1);
	manner.often = (uint64_t[]) {2, 8, 32, 128}[below(4)];
	manner.seldom = (uint64_t[]) {50, 200, 1000, 5000}[below(4)];
	manner.slow = (uint64_t[]) {2, 4, 8}[below(3)];
	manner.briefly = (int64_t[]) {20, 100, 500}[below(3)] * MICROSECOND;
	manner.long_ = (int64_t[]) {2, 10, 50}[below(3)] * MILLISECOND;
	if (log)
	{
		char line[64];
		int length = snprintf(line, sizeof line, "%d %llu\n", getpid(), (unsigned long long) seed);
		int file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);

		if (file < 0 || write(file, line, (size_t) length) != length)
			die(log);
		close(file);
	}
}

static int64_t time_for(pid_t thread)
{
	uint64_t slow = (uint64_t) thread % manner.slow == 0 ? 8 : 1;

	if (left > 0 && below(manner.seldom) < slow)
		return (int64_t) below((uint64_t) manner.long_);
	return below(manner.often) < slow ? (int64_t) below((uint64_t) manner.briefly) : 0;
}

/* A thread is before a call. */
static void enter(pid_t thread)
{
	int64_t wait = time_for(thread);

	if (wait == 0)
		return resume(PTRACE_CONT, thread, 0);
	left -= wait;
	if (count_held == room && !(held = realloc(held, (room = room * 2 + 16) * sizeof *held)))
		die("memory");
	held[count_held++] = (struct held) {thread, now() + wait};
}

static void forget(pid_t thread)
{
	for (size_t i = 0; i < count_held; i++)
		if (held[i].thread == thread)
			held[i--] = held[--count_held];
}

/* Lets go those whose time is over; when the next one's is. */
static int64_t let_go(void)
{
	int64_t time = now(), next = INT64_MAX;

	for (size_t i = 0; i < count_held; i++)
	{
		if (held[i].until <= time)
		{
			pid_t thread = held[i].thread;

			held[i--] = held[--count_held];
			resume(PTRACE_CONT, thread, 0);
		}
		else if (held[i].until < next)
			next = held[i].until;
	}
	return next;
}

/* Until all are gone; the status of the command. */
static int watch(const sigset_t *children)
{
	static char seen[MOST_THREADS];
	int status, result = 0;

	for (;;)
	{
		pid_t thread = waitpid(-1, &status, __WALL | WNOHANG);

		if (thread < 0 && errno == EINTR)
			continue;
		if (thread < 0)
			return result;
		if (thread == 0)
		{
			int64_t next = let_go(), wait = next == INT64_MAX ? 1000 * MILLISECOND : next - now();
			struct timespec time = {wait / (1000 * MILLISECOND), wait % (1000 * MILLISECOND)};

			if (wait > 0)
				sigtimedwait(children, NULL, &time);
			continue;
		}
		if (WIFEXITED(status) || WIFSIGNALED(status))
		{
			if (thread == program)
				result = status;
			seen[thread] = 0;
			forget(thread);
		}
		else if (status >> 16 == PTRACE_EVENT_SECCOMP)
			enter(thread);
		else if (status >> 16 || (WSTOPSIG(status) == SIGSTOP && !seen[thread]))
			resume(PTRACE_CONT, thread, 0);
		else
			resume(PTRACE_CONT, thread, WSTOPSIG(status));
		if (WIFSTOPPED(status))
			seen[thread] = 1;
		let_go();
	}
}

int main(int count, char **args)
{
	char *in_front = getenv("JITTER_PROGRAM");
	sigset_t children, before;

	if (!in_front && count < 2)
		return fprintf(stderr, "usage: jitter COMMAND...\n"), 125;
	if (in_front)
		args[0] = in_front;
	choose();
	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	sigprocmask(SIG_BLOCK, &children, &before);
	start(args + !in_front, watched, WATCHED, &before);
	return code_of(watch(&children));
}
