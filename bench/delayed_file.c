/*
 * A file whose reads and writes take a while, as those of a volume at the other end of a network do.
 *
 *     delayed_file BACKING TARGET DELAY
 *
 * TARGET, an empty file, shows BACKING by FUSE (linux/fuse.h).  Each read, write and fsync waits for as many microseconds as the 32 bits
 * in the file DELAY say at the time; up to THREADS of them wait side by side.  Ends when TARGET is unmounted.  bench/device.py puts a
 * loop device on TARGET.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define THREADS 128
#define MAX_PAGES 64
#define MAX_WRITE (MAX_PAGES * 4096)

static int	device, backing;
static const volatile uint32_t *delay;

static void
fail(const char *what)
{
	perror(what);
	exit(1);
}

static void
answer(const struct fuse_in_header *request, int error, const void *data, size_t len)
{
	struct fuse_out_header header = {.len = sizeof(header) + len, .error = -error, .unique = request->unique};
	struct iovec parts[] = {{&header, sizeof(header)}, {(void *) data, len}};

	/* ENOENT: whoever asked no longer waits. */
	if (writev(device, parts, len ? 2 : 1) < 0 && errno != ENOENT && errno != ENODEV)
		fail("answer");
}

static void
answer_attributes(const struct fuse_in_header *request)
{
	struct fuse_attr_out out = {.attr_valid = 3600};
	struct stat about;

	if (fstat(backing, &about) != 0)
		fail("fstat");
	out.attr = (struct fuse_attr) {.ino = 1, .size = about.st_size, .blocks = about.st_blocks, .mode = S_IFREG | 0600, .nlink = 1,
		.blksize = 4096};
	answer(request, 0, &out, sizeof(out));
}

static void
wait_a_while(void)
{
	if (*delay > 0)
		usleep(*delay);
}

static void
serve(const struct fuse_in_header *request, const void *body, char *data)
{
	switch (request->opcode)
	{
		case FUSE_INIT:
			{
				struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_readahead = MAX_WRITE,
					.flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_MAX_PAGES,
					.max_background = 4 * THREADS, .congestion_threshold = 4 * THREADS, .max_write = MAX_WRITE, .time_gran = 1,
					.max_pages = MAX_PAGES};

				answer(request, 0, &out, sizeof(out));
				break;
			}
		case FUSE_GETATTR:
		case FUSE_SETATTR:
			answer_attributes(request);
			break;
		case FUSE_OPEN:
			{
				struct fuse_open_out out = {0};

				answer(request, 0, &out, sizeof(out));
				break;
			}
		case FUSE_READ:
			{
				const struct fuse_read_in *in = body;
				ssize_t		got;

				wait_a_while();
				got = in->size <= MAX_WRITE ? pread(backing, data, in->size, in->offset) : -1;
				answer(request, got < 0 ? EIO : 0, data, got < 0 ? 0 : got);
				break;
			}
		case FUSE_WRITE:
			{
				const struct fuse_write_in *in = body;
				struct fuse_write_out out = {.size = in->size};

				wait_a_while();
				if (pwrite(backing, in + 1, in->size, in->offset) != (ssize_t) in->size)
					answer(request, EIO, NULL, 0);
				else
					answer(request, 0, &out, sizeof(out));
				break;
			}
		case FUSE_FSYNC:
			wait_a_while();
			answer(request, 0, NULL, 0);
			break;
		case FUSE_FLUSH:
		case FUSE_RELEASE:
			answer(request, 0, NULL, 0);
			break;
		case FUSE_FORGET:
		case FUSE_BATCH_FORGET:
		case FUSE_INTERRUPT:
			break;
		default:
			answer(request, ENOSYS, NULL, 0);
	}
}

static void *
work(void *unused)
{
	size_t		size = MAX_WRITE + 4096 + sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in);
	char	   *request = malloc(size), *data = malloc(MAX_WRITE);

	if (request == NULL || data == NULL)
		fail("memory");
	for (;;)
	{
		ssize_t		got = read(device, request, size);

		if (got < 0 && errno == ENODEV)
			exit(0);			/* unmounted */
		if (got < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
			fail("read /dev/fuse");
		if (got >= (ssize_t) sizeof(struct fuse_in_header))
			serve((struct fuse_in_header *) request, request + sizeof(struct fuse_in_header), data);
	}
	return unused;
}

int
main(int argc, char **argv)
{
	char		options[64];
	int			control;

	if (argc != 4)
		return 2;
	if ((backing = open(argv[1], O_RDWR)) < 0 || (device = open("/dev/fuse", O_RDWR)) < 0 || (control = open(argv[3], O_RDONLY)) < 0)
		fail("open");
	delay = mmap(NULL, sizeof(*delay), PROT_READ, MAP_SHARED, control, 0);
	if (delay == MAP_FAILED)
		fail("mmap");
	snprintf(options, sizeof(options), "fd=%d,rootmode=100600,user_id=0,group_id=0", device);
	if (mount("delayed", argv[2], "fuse", MS_NOSUID | MS_NODEV, options) != 0)
		fail("mount");
	for (int number = 1; number < THREADS; number++)
	{
		pthread_t	thread;

		if (pthread_create(&thread, NULL, work, NULL) != 0)
			fail("thread");
	}
	work(NULL);
	return 0;
}
