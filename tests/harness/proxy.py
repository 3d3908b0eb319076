"""A TCP proxy on loopback with a delay, a throttle, silence and cuts, for tests of what networks do.

It runs in a process of its own, so that the test's interpreter lock delays nobody; `Proxy` starts it and tells it what to do.
A delay is exact and pipelined: every chunk leaves when it is due, however many are on their way.
"""

import collections
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

CHUNK = 64 << 10
# Bytes on their way in one direction: 10 ms at 1 GB/s; beyond it the sender waits, as with a full window.
IN_FLIGHT = 16 << 20
# time.sleep wakes up this much late; the rest is spun away.
SLEEP_LATE = 0.0002


def sleep_until(due):
    """Sleep, exactly."""
    while (left := due - time.monotonic()) > 0:
        if left > SLEEP_LATE:
            time.sleep(left - SLEEP_LATE)


class Weather:
    """What all connections share: how the network behaves at the moment."""

    def __init__(self):
        self.delay = dict(up=0.0, down=0.0)             # seconds, one way; up is towards the server
        self.rate = dict(up=None, down=None)            # bytes per second
        self.flowing = threading.Event()
        self.flowing.set()
        self.refusing = False
        self.bytes = dict(up=0, down=0)


class Direction:
    """Bytes from one socket to the other."""

    def __init__(self, weather, name, source, target, end):
        self.weather, self.name, self.source, self.target, self.end = weather, name, source, target, end
        self.queue, self.queued, self.closing = collections.deque(), 0, False
        self.changed = threading.Condition()
        for work in (self.read, self.write):
            threading.Thread(target=work, daemon=True).start()

    def read(self):
        """Take chunks, stamped with when they are due."""
        try:
            while chunk := self.source.recv(CHUNK):
                with self.changed:
                    self.changed.wait_for(lambda: self.queued < IN_FLIGHT)
                    self.queue.append((time.monotonic() + self.weather.delay[self.name], chunk))
                    self.queued += len(chunk)
                    self.changed.notify_all()
        except OSError:
            pass
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def write(self):
        """Send each chunk when it is due; when nothing more comes, end the connection."""
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.queue or self.closing)
                    if not self.queue:
                        break
                    due, chunk = self.queue[0]
                sleep_until(due)
                self.send(chunk)
                with self.changed:
                    self.queue.popleft()
                    self.queued -= len(chunk)
                    self.changed.notify_all()
        except OSError:
            pass
        self.end()

    def send(self, chunk):
        """At the rate that is allowed."""
        for at in range(0, len(chunk), CHUNK):
            rate = self.weather.rate[self.name]
            step = min(CHUNK, max(1, int(rate / 100))) if rate else CHUNK
            for begin in range(0, len(chunk), step):
                self.weather.flowing.wait()
                part = chunk[begin:begin + step]
                self.target.sendall(part)
                self.weather.bytes[self.name] += len(part)
                if rate:
                    time.sleep(len(part) / rate)


class Server:
    """Accepts connections and obeys commands."""

    def __init__(self, host, port):
        self.address = (host, port)
        self.weather = Weather()
        self.connections = set()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def accept(self):
        """For ever."""
        while True:
            client, _ = self.listener.accept()
            if self.weather.refusing:
                self.reset(client)
                continue
            try:
                server = socket.create_connection(self.address, timeout=10)
            except OSError:
                self.reset(client)
                continue
            server.settimeout(None)
            pair = (client, server)
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.add(pair)
            close = lambda pair=pair: self.close(pair)
            Direction(self.weather, "up", client, server, close)
            Direction(self.weather, "down", server, client, close)

    def close(self, pair):
        """An orderly end of both."""
        self.connections.discard(pair)
        for end in pair:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    @staticmethod
    def reset(end):
        """An end by RST."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            # Only the last close sends it; the threads that hold the socket are woken first.
            end.shutdown(socket.SHUT_RD)
        except OSError:
            pass
        end.close()

    def obey(self, delay=None, rate=None, flowing=None, refusing=None, cut=False):
        """One command; answers with what was seen so far."""
        if delay is not None:
            self.weather.delay.update(delay)
        if rate is not None:
            self.weather.rate.update(rate)
        if refusing is not None:
            self.weather.refusing = refusing
        cut_now = list(self.connections) if cut else []
        for pair in cut_now:
            self.connections.discard(pair)
            for end in pair:
                self.reset(end)
        if flowing is not None:
            (self.weather.flowing.set if flowing else self.weather.flowing.clear)()
        return dict(cut=len(cut_now), connections=len(self.connections), bytes=self.weather.bytes)

    def run(self):
        """Until standard input ends."""
        threading.Thread(target=self.accept, daemon=True).start()
        print(json.dumps(dict(port=self.listener.getsockname()[1])), flush=True)
        for line in sys.stdin:
            print(json.dumps(self.obey(**json.loads(line))), flush=True)
        os._exit(0)


class Proxy:
    """A proxy in front of a server that listens on 127.0.0.1; connect to `port` instead."""

    def __init__(self, port):
        self.process = subprocess.Popen([sys.executable, "-m", "tests.harness.proxy", str(port)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = json.loads(self.process.stdout.readline())["port"]

    def tell(self, **command):
        """Send a command, wait until it is done."""
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def delay(self, up_ms=0.0, down_ms=0.0):
        """One way, for what arrives from now on; up is towards the server."""
        self.tell(delay=dict(up=up_ms / 1000, down=down_ms / 1000))

    def throttle(self, up=None, down=None):
        """Bytes per second of each connection; None: no limit."""
        self.tell(rate=dict(up=up, down=down))

    def cut(self, refuse=False):
        """Reset all connections; with `refuse`, those to come as well, until `restore`. Returns how many were cut."""
        return self.tell(cut=True, refusing=refuse)["cut"]

    def silence(self):
        """Nothing passes any more, and nobody is told."""
        self.tell(flowing=False)

    def restore(self):
        """Everything passes again, what was held back too."""
        self.tell(flowing=True, refusing=False)

    def state(self):
        """`connections` there are now, and `bytes` that passed up and down."""
        return self.tell()

    def close(self):
        """End it and all its connections."""
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


if __name__ == "__main__":
    Server("127.0.0.1", int(sys.argv[1])).run()
