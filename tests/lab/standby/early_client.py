"""A client of walrider.stream_wal() on a raw socket: what Walrider's standby does, without it and one step at a time."""

import select
import socket
import struct
import threading
import time
from contextlib import suppress

from tests.lab.server.cluster import format_lsn

PROTOCOL = 196608                       # 3.0
EPOCH = 946684800                       # of PostgreSQL's timestamps, in Unix seconds
COMMANDS = "CALL walrider.stream_wal('{}', {}, {})"


class Refused(RuntimeError):
    """An error of the server's."""

    def __init__(self, body):
        self.fields = {part[:1].decode(): part[1:].decode() for part in body.split(b"\0") if part}
        super().__init__(f"{self.fields.get('S')}: {self.fields.get('C')}: {self.fields.get('M')}")

    @property
    def sqlstate(self):
        return self.fields["C"]

    @property
    def message(self):
        return self.fields["M"]


class Closed(RuntimeError):
    """The server closed the connection."""


def now():
    """As PostgreSQL sends times."""
    return int((time.time() - EPOCH) * 1e6)


class EarlyClient:
    """A replication connection without a password, and the stream on it."""

    def __init__(self, server, user="postgres", database="postgres", replication="database", options="",
                 application_name="early"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{server.sockets}/.s.PGSQL.{server.port}")
        self._open(connection)
        parameters = dict(user=user, database=database, application_name=application_name)
        if replication:
            parameters["replication"] = replication
        if options:
            parameters["options"] = options
        self._startup(parameters)
        self._until_ready()

    def _open(self, connection):
        """Nothing was said yet."""
        self.socket = connection
        self.buffer = bytearray()
        self.notices = []
        self.sending = threading.Lock()

    def _startup(self, parameters):
        """The first packet."""
        body = b"".join(f"{key}\0{value}\0".encode() for key, value in parameters.items()) + b"\0"
        self.socket.sendall(struct.pack("!II", len(body) + 8, PROTOCOL) + body)

    # Messages

    def _send(self, tag, body=b""):
        with self.sending:
            self.socket.sendall(tag + struct.pack("!I", len(body) + 4) + body)

    def _take(self):
        """A whole message out of the buffer, or None."""
        if len(self.buffer) < 5:
            return None
        length = struct.unpack_from("!I", self.buffer, 1)[0]
        if len(self.buffer) < length + 1:
            return None
        tag, body = bytes(self.buffer[:1]), bytes(self.buffer[5:length + 1])
        del self.buffer[:length + 1]
        return tag, body

    def _next(self, timeout=60):
        """The next message; None after `timeout` seconds without one."""
        deadline = time.monotonic() + timeout
        while True:
            if message := self._take():
                if message[0] == b"N":
                    self.notices.append(Refused(message[1]))
                    continue
                if message[0] == b"E":
                    raise Refused(message[1])
                return message
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self.socket], [], [], left)[0]:
                return None
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:        # it went without reading our last answer; what it said before is there
                continue
            if not data:
                raise Closed("the server closed the connection")
            self.buffer += data

    def _until_ready(self):
        """Everything up to ReadyForQuery; the rows in between."""
        rows = []
        while True:
            message = self._next()
            assert message, "no answer within a minute"
            if message[0] == b"D":
                rows.append(self._row(message[1]))
            elif message[0] == b"Z":
                return rows

    @staticmethod
    def _row(body):
        count, at, row = struct.unpack_from("!H", body)[0], 2, []
        for _ in range(count):
            length = struct.unpack_from("!i", body, at)[0]
            at += 4
            row.append(None if length < 0 else body[at:at + length].decode())
            at += max(length, 0)
        return row

    # What one does with it

    def query(self, sql):
        """The rows of a statement; an error raises Refused, and the connection can be used again."""
        self._send(b"Q", sql.encode() + b"\0")
        try:
            return self._until_ready()
        except Refused:
            self._until_ready()
            raise

    def stream(self, start, timeline=1, slot=None):
        """Call the procedure; returns when the stream has begun."""
        slot = f"'{slot}'" if slot else "NULL"
        self._send(b"Q", COMMANDS.format(format_lsn(start), timeline, slot).encode() + b"\0")
        try:
            tag, body = self._next()
        except Refused:
            self._until_ready()
            raise
        assert (tag, body) == (b"W", b"\0\0\0"), (tag, body)
        return self

    def receive(self, timeout=60):
        """The next message of the stream as a dict, None after `timeout`. Ends with Closed, or `kind` "end" before it."""
        message = self._next(timeout)
        if message is None:
            return None
        tag, body = message
        if tag != b"d":
            return dict(kind="end", tag=tag, body=body)
        if body[:1] == b"w":
            start, end, sent = struct.unpack_from("!QQq", body, 1)
            return dict(kind="wal", start=start, wal_end=end, time=sent, data=body[25:], at=time.monotonic())
        assert body[:1] == b"k", body
        end, sent, reply = struct.unpack("!QqB", body[1:])
        return dict(kind="keepalive", wal_end=end, time=sent, reply=bool(reply), at=time.monotonic())

    def status(self, write, flush=None, apply=None, reply=False):
        """A standby status update."""
        flush = write if flush is None else flush
        apply = flush if apply is None else apply
        self._send(b"d", b"r" + struct.pack("!QQQqB", write, flush, apply, now(), reply))

    def feedback(self, xmin, epoch=0, catalog_xmin=0, catalog_epoch=0):
        """Hot standby feedback."""
        self._send(b"d", b"h" + struct.pack("!qIIII", now(), xmin, epoch, catalog_xmin, catalog_epoch))

    def copy_done(self):
        """End the stream in good order."""
        self._send(b"c")

    def close(self):
        """Hang up."""
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


class Follower(threading.Thread):
    """A client that streams in the background, keeps what came and confirms it.

    `answer` turns (received, wal_end) into the (write, flush, apply) to report, or None for no reply; it may change while
    the stream runs.
    """

    def __init__(self, server, start, timeline=1, slot=None, answer=None, **connection):
        super().__init__(daemon=True)
        self.client = EarlyClient(server, **connection)
        self.start_lsn = self.received = start
        self.answer = answer or self.everything
        self.wal = bytearray()
        self.messages = []              # dicts without the bytes
        self.wal_end = 0
        self.error = None
        self.ended = False              # in good order
        self.stopping = False
        self.changed = threading.Condition()
        self.client.stream(start, timeline, slot)
        super().start()

    @staticmethod
    def everything(received, wal_end):
        """As a standby that replays at once, and never behind the horizon."""
        return received, received, min(received, wal_end)

    @staticmethod
    def nothing(_received, _wal_end):
        """Silence."""
        return None

    def run(self):
        try:
            while not self.stopping:
                message = self.client.receive(0.2)
                if message is None:
                    continue
                if message["kind"] == "end":
                    self.ended |= message["tag"] == b"C"
                    continue
                self._keep(message)
                if positions := self.answer(self.received, self.wal_end):
                    with suppress(BrokenPipeError, ConnectionResetError):
                        self.client.status(*positions)
        except Closed:
            pass
        except (Refused, OSError, AssertionError) as error:
            self.error = error
        with self.changed:
            self.changed.notify_all()

    def _keep(self, message):
        with self.changed:
            assert message["wal_end"] >= self.wal_end, "walEnd went back"
            self.wal_end = message["wal_end"]
            if message["kind"] == "wal":
                assert message["start"] == self.received, "a gap"
                data = message.pop("data")
                self.wal += data
                self.received += len(data)
                message["length"] = len(data)
            self.messages.append(message)
            self.changed.notify_all()

    def wait(self, condition, what, timeout=60):
        """Until `condition(self)` holds."""
        with self.changed:
            done = self.changed.wait_for(lambda: condition(self) or not self.is_alive(), timeout)
        assert condition(self), f"{what}: received {format_lsn(self.received)}, walEnd {format_lsn(self.wal_end)}, " \
                                f"error {self.error}, {'ended' if done else 'waited in vain'}"
        return self

    def wait_flushed(self, lsn, timeout=60):
        """Until WAL up to here is there and known to be flushed."""
        return self.wait(lambda it: it.received >= lsn and it.wal_end >= lsn, f"WAL up to {format_lsn(lsn)}", timeout)

    def wait_end(self, timeout=60):
        """Until the connection is over."""
        self.join(timeout)
        assert not self.is_alive(), "the stream goes on"
        return self

    def close(self):
        """Hang up."""
        self.stopping = True
        self.join(10)
        self.client.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()
