/*
 * A TCP proxy on loopback in front of the port of its only argument: delay, throttle, silence and cuts.  See proxy.py, which
 * builds and drives it.
 *
 * It says its own port on standard output, and then takes a line at a time on standard input, until that ends:
 *   UP_US DOWN_US UP_RATE DOWN_RATE FLOWING REFUSING CUT
 * delays in microseconds, bytes per second of a connection (0: no limit), whether anything passes, whether new connections are
 * reset, and whether all that there are are reset now.  It answers how many it has reset, how many there are, and how many
 * bytes have passed up (to the server) and down.
 *
 * A delay is exact and pipelined: every chunk leaves when it is due, however many are on their way.  It is one process and one
 * thread without locks, and never spins: what it takes of the processor, what is measured through it lacks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (64 << 10)
/* Bytes on their way in one direction: 10 ms at 1 GB/s; beyond it the sender waits, as with a full window. */
#define IN_FLIGHT (16 << 20)
#define MAX_CONNECTIONS 64

enum { UP, DOWN };

struct chunk
{
	struct chunk *next;
	int64_t due;				/* ns */
	size_t length, sent;
	char data[];
};

struct direction
{
	struct chunk *first, **last;
	size_t queued;
	int64_t next;				/* ns: not before, for the rate */
	bool ended;					/* nothing more comes */
	bool blocked;				/* the target takes no more */
};

/* sockets[UP] is the client's, where what goes up comes from; sockets[DOWN] the server's. */
struct connection
{
	int sockets[2];
	struct direction directions[2];
};

static struct connection *connections[MAX_CONNECTIONS];
static int count;

static int64_t delay[2], rate[2], passed[2];
static int flowing = 1, refusing;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void hang_up(int fd, bool with_reset)
{
	struct linger linger = {1, 0};

	if (with_reset)
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
	else
		shutdown(fd, SHUT_RDWR);
	close(fd);
}

static void end(int number, bool with_reset)
{
	struct connection *connection = connections[number];

	for (int way = UP; way <= DOWN; way++)
	{
		struct chunk *chunk, *next;

		for (chunk = connection->directions[way].first; chunk; chunk = next)
		{
			next = chunk->next;
			free(chunk);
		}
		hang_up(connection->sockets[way], with_reset);
	}
	free(connection);
	connections[number] = connections[--count];
}

static void begin(int listener, const struct sockaddr_in *server)
{
	struct connection *connection;
	int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC), to = -1, on = 1;

	if (client < 0)
		return;
	if (refusing || count == MAX_CONNECTIONS ||
		(to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0 ||
		connect(to, (const struct sockaddr *) server, sizeof *server) < 0)
	{
		hang_up(client, true);
		if (to >= 0)
			close(to);
		return;
	}
	connection = calloc(1, sizeof *connection);
	if (!connection)
		fail("memory");
	connection->sockets[UP] = client;
	connection->sockets[DOWN] = to;
	for (int way = UP; way <= DOWN; way++)
	{
		connection->directions[way].last = &connection->directions[way].first;
		fcntl(connection->sockets[way], F_SETFL, O_NONBLOCK);
		setsockopt(connection->sockets[way], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	}
	connections[count++] = connection;
}

/* Takes what has come, stamped with when it is due. */
static void take(struct connection *connection, int way)
{
	static char buffer[CHUNK];
	struct direction *direction = &connection->directions[way];
	ssize_t got = recv(connection->sockets[way], buffer, sizeof buffer, 0);
	struct chunk *chunk;

	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0)
	{
		direction->ended = true;
		return;
	}
	chunk = malloc(sizeof *chunk + (size_t) got);
	if (!chunk)
		fail("memory");
	*chunk = (struct chunk) {.due = now() + delay[way], .length = (size_t) got};
	memcpy(chunk->data, buffer, (size_t) got);
	*direction->last = chunk;
	direction->last = &chunk->next;
	direction->queued += chunk->length;
}

/* Sends what is due, at the rate that is allowed.  False: the connection is over. */
static bool give(struct connection *connection, int way)
{
	struct direction *direction = &connection->directions[way];
	struct chunk *chunk;

	while (flowing && (chunk = direction->first) && chunk->due <= now() && direction->next <= now())
	{
		size_t part = chunk->length - chunk->sent;
		ssize_t put;

		if (rate[way] && part > (size_t) rate[way] / 100 + 1)
			part = (size_t) rate[way] / 100 + 1;
		put = send(connection->sockets[!way], chunk->data + chunk->sent, part, MSG_NOSIGNAL);
		direction->blocked = put < 0 && errno == EAGAIN;
		if (direction->blocked || (put < 0 && errno == EINTR))
			break;
		if (put < 0)
			return false;
		passed[way] += put;
		if (rate[way])
			direction->next = now() + put * INT64_C(1000000000) / rate[way];
		chunk->sent += (size_t) put;
		if (chunk->sent == chunk->length)
		{
			direction->queued -= chunk->length;
			direction->first = chunk->next;
			if (!direction->first)
				direction->last = &direction->first;
			free(chunk);
		}
	}
	return direction->first || !direction->ended;
}

/* Obeys what has come on standard input.  False: it has ended. */
static bool obey(void)
{
	static char line[256];
	static size_t length;
	ssize_t got = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
	char *newline;

	if (got <= 0)
		return got < 0 && errno == EINTR;
	length += (size_t) got;
	line[length] = 0;
	while ((newline = strchr(line, '\n')))
	{
		int cut, done = 0;

		if (sscanf(line, "%ld %ld %ld %ld %d %d %d", &delay[UP], &delay[DOWN], &rate[UP], &rate[DOWN], &flowing, &refusing, &cut) != 7)
		{
			fprintf(stderr, "not a command: %s\n", line);
			exit(1);
		}
		delay[UP] *= 1000;
		delay[DOWN] *= 1000;
		for (; cut && count > 0; done++)
			end(count - 1, true);
		printf("%d %d %ld %ld\n", done, count, passed[UP], passed[DOWN]);
		fflush(stdout);
		length -= (size_t) (newline + 1 - line);
		memmove(line, newline + 1, length + 1);
	}
	return length < sizeof line - 1;
}

/* Waits for any socket that is to be read or written, a command, a client, or for what is due next. */
static void wait_for(struct pollfd *polled, int listener)
{
	int64_t due = INT64_MAX, left;
	struct timespec timeout;

	polled[0] = (struct pollfd) {.fd = STDIN_FILENO, .events = POLLIN};
	polled[1] = (struct pollfd) {.fd = listener, .events = POLLIN};
	for (int number = 0; number < count; number++)
	{
		struct connection *connection = connections[number];
		struct pollfd *ends = polled + 2 + 2 * number;

		ends[UP] = ends[DOWN] = (struct pollfd) {.fd = -1};
		for (int way = UP; way <= DOWN; way++)
		{
			struct direction *direction = &connection->directions[way];

			if (!direction->ended && direction->queued < IN_FLIGHT)
				ends[way].events |= POLLIN;
			if (!flowing || !direction->first)
				continue;
			if (direction->blocked)
				ends[!way].events |= POLLOUT;
			else
			{
				int64_t at = direction->first->due > direction->next ? direction->first->due : direction->next;

				due = at < due ? at : due;
			}
		}
		/* One that is not waited for would say that it is closed, again and again. */
		for (int way = UP; way <= DOWN; way++)
			ends[way].fd = ends[way].events ? connection->sockets[way] : -1;
	}
	left = due == INT64_MAX ? 0 : due - now();
	left = left < 0 ? 0 : left;
	timeout = (struct timespec) {left / 1000000000, left % 1000000000};
	if (ppoll(polled, 2 + 2 * (nfds_t) count, due == INT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR)
		fail("ppoll");
}

int main(int argc, char **argv)
{
	static struct pollfd polled[2 + 2 * MAX_CONNECTIONS];
	struct sockaddr_in server = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, own = server;
	socklen_t length = sizeof own;
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	server.sin_port = htons((uint16_t) (argc == 2 ? atoi(argv[1]) : 0));
	if (listener < 0 || bind(listener, (struct sockaddr *) &own, sizeof own) < 0 || listen(listener, 64) < 0 ||
		getsockname(listener, (struct sockaddr *) &own, &length) < 0)
		fail("listen");
	/* Otherwise the kernel adds 50 us to every wait. */
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	printf("%d\n", ntohs(own.sin_port));
	fflush(stdout);

	for (;;)
	{
		int known = count;

		wait_for(polled, listener);
		for (int number = known - 1; number >= 0; number--)
		{
			struct connection *connection = connections[number];
			struct pollfd *ends = polled + 2 + 2 * number;
			bool over = false;

			for (int way = UP; way <= DOWN; way++)
			{
				if ((ends[way].events & POLLIN) && ends[way].revents)
					take(connection, way);
				if (ends[!way].revents & (POLLOUT | POLLERR | POLLHUP))
					connection->directions[way].blocked = false;
				over |= !give(connection, way);
			}
			if (over)
				end(number, false);
		}
		if (polled[1].revents)
			begin(listener, &server);
		if (polled[0].revents && !obey())
			return 0;
	}
}
