"""A TCP proxy on loopback with a delay, a throttle, silence and cuts, for tests of what networks do: drives `proxy.c`."""

import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("proxy.c")


class Proxy:
    """A proxy in front of a server that listens on 127.0.0.1; connect to `port` instead."""

    def __init__(self, port):
        self.delays, self.rates, self.flowing, self.refusing = (0, 0), (0, 0), True, False
        with tempfile.TemporaryDirectory() as scratch:
            program = Path(scratch) / "proxy"
            subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE)], check=True)
            self.process = subprocess.Popen([str(program), str(port)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = int(self.process.stdout.readline())

    def tell(self, cut=False):
        """Have it do as this says, wait until it does; how many connections were cut, and the state."""
        words = (*self.delays, *self.rates, self.flowing, self.refusing, cut)
        self.process.stdin.write(" ".join(str(int(word)) for word in words) + "\n")
        self.process.stdin.flush()
        done, connections, up, down = map(int, self.process.stdout.readline().split())
        return done, dict(connections=connections, bytes=dict(up=up, down=down))

    def delay(self, up_ms=0.0, down_ms=0.0):
        """One way, for what arrives from now on; up is towards the server."""
        self.delays = (round(up_ms * 1000), round(down_ms * 1000))
        self.tell()

    def throttle(self, up=None, down=None):
        """Bytes per second of each connection; None: no limit."""
        self.rates = (up or 0, down or 0)
        self.tell()

    def cut(self, refuse=False):
        """Reset all connections; with `refuse`, those to come as well, until `restore`. Returns how many were cut."""
        self.refusing = refuse
        return self.tell(cut=True)[0]

    def silence(self):
        """Nothing passes any more, and nobody is told."""
        self.flowing = False
        self.tell()

    def restore(self):
        """Everything passes again, what was held back too."""
        self.flowing, self.refusing = True, False
        self.tell()

    def state(self):
        """`connections` there are now, and `bytes` that passed up and down."""
        return self.tell()[1]

    def close(self):
        """End it and all its connections."""
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()
