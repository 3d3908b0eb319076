"""Receives a primary's WAL into a directory, and knows when each byte of it was there."""

import ctypes
import os
import select
import socket
import struct
import subprocess
import threading
import time

from tests.lab.install import program
from tests.lab.server.cluster import parse_lsn

SEGMENT = 16 << 20
PAGE = 8192


def file_name(timeline, number):
    """Name of a segment of 16 MB."""
    return f"{timeline:08X}{number >> 8:08X}{number & 0xFF:08X}"


class Connection:
    """A replication connection: as much of the protocol as receiving WAL takes (its versions 3.0 and 3.2 agree there)."""

    def __init__(self, server, **options):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(f"{server.sockets}/.s.PGSQL.{server.port}")
        options = {"user": "postgres", "replication": "true", **options}
        options = b"".join(f"{part}\0".encode() for option in options.items() for part in option) + b"\0"
        self.socket.sendall(struct.pack("!II", 8 + len(options), 3 << 16) + options)
        self.stream = self.socket.makefile("rb", 1 << 20)
        self.until(b"Z")

    def message(self):
        """The next message: its type and body."""
        kind, length = struct.unpack("!cI", self.stream.read(5))
        body = self.stream.read(length - 4)
        if kind == b"E":
            raise RuntimeError(body.replace(b"\0", b" ").decode(errors="replace"))
        return kind, body

    def until(self, wanted):
        """Messages up to one of a type."""
        messages = []
        while not messages or messages[-1][0] != wanted:
            messages.append(self.message())
        return messages

    def send(self, query):
        """A simple query."""
        self.socket.sendall(b"Q" + struct.pack("!I", len(query) + 5) + query.encode() + b"\0")

    def identify(self):
        """Timeline and position of the server."""
        self.send("IDENTIFY_SYSTEM")
        row = next(body for kind, body in self.until(b"Z") if kind == b"D")
        values, at = [], 2
        for _ in range(struct.unpack("!H", row[:2])[0]):
            length = max(0, struct.unpack("!i", row[at:at + 4])[0])
            values.append(row[at + 4:at + 4 + length].decode())
            at += 4 + length
        return int(values[1]), parse_lsn(values[2])


class Receiver:
    """Writes WAL as pg_receivewal does. `arrived`: (end, time just before the write up to there): after the write this
    process may have to wait for the processor that the follower was woken on."""

    def __init__(self, server, directory):
        self.directory = directory
        self.arrived = []
        self.file = None
        self.connection = Connection(server)
        self.timeline, position = self.connection.identify()
        position -= position % SEGMENT
        self.connection.send(f"START_REPLICATION PHYSICAL {position >> 32:X}/{position & 0xFFFFFFFF:X}")
        self.connection.until(b"W")
        self.thread = threading.Thread(target=self.receive, daemon=True)
        self.thread.start()

    def receive(self):
        """Until the connection ends."""
        try:
            while True:
                kind, body = self.connection.message()
                if kind == b"d" and body[:1] == b"w":
                    start, _, _ = struct.unpack("!QQQ", body[1:25])
                    self.write(start, memoryview(body)[25:])
        except (OSError, struct.error):
            pass    # closed

    def write(self, start, data):
        """Append to the segment at hand."""
        while data:
            number, offset = divmod(start, SEGMENT)
            path = self.directory / file_name(self.timeline, number)
            if self.file is None:
                self.file = os.open(f"{path}.partial", os.O_CREAT | os.O_RDWR, 0o600)
                os.pwrite(self.file, bytes(SEGMENT), 0)
            part = data[:SEGMENT - offset]
            now = time.time()
            os.pwrite(self.file, part, offset)
            start, data = start + len(part), data[len(part):]
            self.arrived.append((start, now))
            if start % SEGMENT == 0:
                os.close(self.file)
                self.file = None
                os.rename(f"{path}.partial", path)

    def stop(self):
        """Close the connection."""
        self.connection.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()


class Observer:
    """Lets pg_receivewal write, and looks how far it is whenever inotify says that it has written."""

    IN_MODIFY, IN_CREATE, IN_MOVED_TO = 2, 0x100, 0x80

    def __init__(self, server, directory):
        self.directory = directory
        self.arrived = []
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.inotify = self.libc.inotify_init1(os.O_NONBLOCK)
        self.libc.inotify_add_watch(self.inotify, os.fsencode(directory), self.IN_MODIFY)
        timeline, self.position = Connection(server).identify()
        self.timeline, self.position = timeline, self.position - self.position % SEGMENT
        self.process = subprocess.Popen([program("pg_receivewal"), "-D", directory, "--synchronous", "--no-loop"],
                                        env=server.environment(), stderr=subprocess.DEVNULL)
        self.stopping = False
        self.thread = threading.Thread(target=self.observe, daemon=True)
        self.thread.start()
        time.sleep(1)

    def observe(self):
        """Note how far the WAL goes each time that something was written."""
        while not self.stopping:
            if select.select([self.inotify], [], [], 0.2)[0]:
                os.read(self.inotify, 1 << 16)
                now = time.time()
                end = self.end()
                if end > self.position:
                    self.position = end
                    self.arrived.append((end, now))

    def rest_of_page(self, position):
        """What stands from there to the end of the page, without the zeros behind it."""
        name = self.directory / file_name(self.timeline, position // SEGMENT)
        for path in (f"{name}.partial", name):
            try:
                with open(path, "rb", buffering=0) as file:
                    return os.pread(file.fileno(), PAGE - position % PAGE, position % SEGMENT).rstrip(b"\0")
            except FileNotFoundError:
                pass
        return b""

    def end(self):
        """Where zeros begin: the last eight bytes of pgbench's commit records are never all zeros."""
        position = self.position
        while True:
            # The next page, or, behind a switch, the next segment.
            ahead = [(position // size + 1) * size for size in (PAGE, SEGMENT)]
            used = [start for start in ahead if self.rest_of_page(start)]
            if not used:
                return position + (len(self.rest_of_page(position)) + 7) // 8 * 8
            position = used[0]

    def stop(self):
        """End both."""
        self.process.terminate()
        self.process.wait()
        self.stopping = True
        self.thread.join()
