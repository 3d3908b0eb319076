"""A Patroni cluster of our own: etcd and its members, on free ports below one directory."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress

from tests.lab import install
from tests.lab.server import cluster, tools
from tests.lab.server.cluster import free_port
from tests.lab.standby import standby


def start(argv, log, env=None):
    """A process in the background that ends with us."""
    with open(log, "a") as output:
        return subprocess.Popen([str(part) for part in argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                env=dict(os.environ, **(env or {})), preexec_fn=cluster._quit_with_parent)


class Etcd:
    """One etcd server."""

    def __init__(self, directory):
        self.port, peer = free_port(), free_port()
        url, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self.log = directory / "etcd.log"
        self.process = start([tools.program("patroni", "etcd"), "--data-dir", directory / "etcd", "--listen-client-urls", url,
                              "--advertise-client-urls", url, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
                              "--initial-cluster", f"default={peers}", "--unsafe-no-fsync"], self.log)
        standby.wait_for(lambda: ask(f"{url}/health")[0] == 200, lambda: f"etcd: {self.log.read_text()[-2000:]}")

    def close(self):
        """Stop it."""
        self.process.terminate()
        self.process.wait(30)


def ask(url, body=None):
    """(status code, text) of an answer, (0, reason) where nobody answers."""
    try:
        data = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Member:
    """Patroni and the server that it runs."""

    def __init__(self, directory, etcd, name, bootstrap=None, create=None, parameters=None):
        self.name, self.rest, self.port = name, free_port(), free_port()
        self.data_dir, self.log = directory / name, directory / f"{name}.patroni.log"
        self.sockets = cluster.socket_directory()
        postgresql = {"data_dir": str(self.data_dir), "bin_dir": str(install.bindir()), "listen": f"127.0.0.1:{self.port}",
                      "connect_address": f"127.0.0.1:{self.port}", "pgpass": str(directory / f"{name}.pgpass"),
                      "pg_hba": [f"{where} {database} all {address} trust" for database in ("all", "replication")
                                 for where, address in (("local", ""), ("host", "127.0.0.1/32"))],
                      "authentication": {user: {"username": "postgres"} for user in ("superuser", "replication")},
                      "parameters": {"unix_socket_directories": self.sockets, "wal_keep_size": "64MB", **(parameters or {})},
                      **(create or {})}
        conf = {"scope": "bank", "name": name, "etcd3": {"host": f"127.0.0.1:{etcd.port}"},
                "restapi": {"listen": f"127.0.0.1:{self.rest}", "connect_address": f"127.0.0.1:{self.rest}"},
                "bootstrap": {"dcs": {"ttl": 20, "loop_wait": 1, "retry_timeout": 5}, **(bootstrap or {})},
                "postgresql": postgresql}
        self.config = directory / f"{name}.json"
        self.config.write_text(json.dumps(conf, indent=1))      # JSON is YAML
        self.process = None

    def start(self):
        """Run Patroni."""
        path = f"{tools.directory('patroni')}/python:{os.environ.get('PYTHONPATH', '')}"
        self.process = start([sys.executable, "-m", "patroni", self.config], self.log, {"PYTHONPATH": path})
        return self

    def log_tail(self):
        """The end of Patroni's log."""
        return self.log.read_text(errors="replace")[-4000:]

    def wait_for(self, what, timeout=60):
        """Wait until its REST interface answers 200 to /primary or /replica."""
        standby.wait_for(lambda: ask(f"http://127.0.0.1:{self.rest}/{what}")[0] == 200,
                         lambda: f"{self.name} is {what}\n{self.log_tail()}", timeout, every=0.1)

    def server(self):
        """The server, to be asked; Patroni stops it."""
        server = cluster.PgCluster(self.data_dir)
        server.port, server.sockets = self.port, self.sockets
        return server

    def switch_to(self, other):
        """Make another member the leader."""
        code, text = ask(f"http://127.0.0.1:{self.rest}/switchover", {"leader": self.name, "candidate": other.name})
        assert code == 200, (code, text, self.log_tail())

    def close(self):
        """Stop Patroni, which stops its server; and the server if it did not."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(FileNotFoundError, ProcessLookupError, IndexError):
            standby.adopt(self.data_dir).kill()
