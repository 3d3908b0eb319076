"""`walrider standby` over TLS: the primary proves who it is, the standby too, and the password is seen nowhere.

The PostgreSQL 17 under `.pg/` has TLS, the 18 has none: `make test` runs these with its part for 17.
"""

import json
import os
import signal
import socket
import ssl
import struct
import threading

import pytest

from tests.lab.certificates import certificate
from tests.lab.loads.bank import PROMISING
from tests.lab.server import early_primary
from tests.lab.server.cluster import PgCluster, copy_tree
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

pytestmark = pytest.mark.every_major

HOST = "primary.test"
SECRET = "open:sesame"
HBA = """
local all,replication postgres trust
hostssl postgres,replication trusted 127.0.0.1/32 trust
hostssl replication certified 127.0.0.1/32 cert
hostssl postgres,replication scram 127.0.0.1/32 scram-sha-256
"""


@pytest.fixture
def files(work):
    """Certificates: of an authority and of another, of the primary, of its standby and of a stranger."""
    directory = work / "tls"
    directory.mkdir()
    for name in ("ours", "theirs"):
        certificate(directory, name, f"Authority {name}")
    certificate(directory, "server", "ignored.test", "ours", f"subjectAltName=DNS:{HOST}")
    certificate(directory, "client", "certified", "ours")
    certificate(directory, "another", "another", "ours")
    certificate(directory, "stranger", "certified", "theirs")
    return directory


@pytest.fixture
def primary(primary_template, work, files):
    """A primary whose commits wait for a standby named `walrider`, and which talks to nobody over TCP without TLS."""
    with PgCluster(copy_tree(primary_template, work / "primary")) as server:
        server.configure(f"ssl = on\nssl_cert_file = '{files}/server.crt'\nssl_key_file = '{files}/server.key'\n"
                         f"ssl_ca_file = '{files}/ours.crt'\n")
        (server.data_dir / "pg_hba.conf").write_text(HBA)
        standby.start_primary(server)
        server.psql("CREATE ROLE trusted LOGIN REPLICATION; CREATE ROLE certified LOGIN REPLICATION; "
                    f"CREATE ROLE scram LOGIN REPLICATION PASSWORD '{SECRET}'; CREATE TABLE t (v text)", options=LOCALLY)
        yield server


class Follower(Walrider):
    """A standby, and how it connects to a primary that is known as HOST."""

    def __init__(self, primary, work, *options):
        super().__init__(standby.clone(primary, work / "ours"), "--log-level", "debug", *options)
        self.primary = primary
        # Its connection before the last change.
        self.left = None

    def connect_with(self, more, host=HOST, port=None):
        """Connect anew, in this way."""
        with open(self.data_dir / "postgresql.auto.conf", "a") as conf:
            conf.write(f"primary_conninfo = 'host={host} hostaddr=127.0.0.1 port={port or self.primary.port} "
                       f"application_name={standby.NAME} {more}'\n")
        if self.process:
            self.left = (standby.replication(self.primary) or {}).get("pid")
            self.send_signal(signal.SIGHUP)
        return self

    def is_refused(self, why):
        """It says why, and does not stream."""
        wait_for(lambda: why in ((self.status()["last_error"] or {}).get("message") or ""),
                 lambda: f"{why!r}: {self.status()['last_error']}\n{self.log_tail()}", 20)
        assert why in self.log_text()
        assert standby.replication(self.primary) is None and not self.status()["connected_since"]

    def is_accepted(self, user):
        """It streams, encrypted, as this user, and commits are acknowledged at every level; the row of pg_stat_ssl."""
        wait_for(lambda: self.left is None or (standby.replication(self.primary) or {}).get("pid") != self.left, self.log_tail)
        row = wait_streaming(self.primary)
        for level in PROMISING:
            self.primary.psql(f"INSERT INTO t VALUES ('{level}')", options=f"-c synchronous_commit={level}", timeout=30)
        found = self.primary.json("SELECT to_json(s) FROM (SELECT usename, ssl, version, client_dn FROM pg_stat_ssl "
                                  f"JOIN pg_stat_replication USING (pid) WHERE pid = {row['pid']}) s")
        assert found["ssl"] and found["version"] == "TLSv1.3" and found["usename"] == user, found
        return found

    def takes_over(self):
        """The primary dies, and nothing is missing."""
        self.primary.psql("INSERT INTO t SELECT repeat('x', 100) FROM generate_series(1, 50000)", timeout=60)
        rows = self.primary.value("SELECT count(*) FROM t")
        self.primary.kill()
        self.promote()
        with self.serve() as promoted:
            assert promoted.value("SELECT count(*) FROM t") == rows

    def said(self):
        """All that it shows of itself."""
        process = "".join(open(f"/proc/{self.process.pid}/{name}").read() for name in ("cmdline", "environ", "comm"))
        return process + json.dumps(self.status()) + self.get("/metrics")[1] + self.log_text()


def test_early(primary, work, files):
    """The early stream is encrypted like any other."""
    primary.psql("CREATE EXTENSION walrider; GRANT EXECUTE ON PROCEDURE walrider.stream_wal TO trusted", options=LOCALLY)
    with Follower(primary, work, *early_primary.EARLY) as follower:
        follower.connect_with(f"user=trusted sslmode=verify-full sslrootcert={files}/ours.crt").start()
        follower.is_accepted("trusted")
        primary.psql("INSERT INTO t SELECT repeat('x', 100) FROM generate_series(1, 50000)", timeout=60)
        assert follower.status()["early"] is True and early_primary.sender(primary)["early_bytes"] > 0
        follower.takes_over()


def test_the_primary_proves_who_it_is(primary, work, files):
    """verify-full: neither another host's certificate nor another authority's will do."""
    right = f"user=trusted sslmode=verify-full sslrootcert={files}/ours.crt"
    with Follower(primary, work).connect_with(right, host="wrong.test") as follower:
        follower.start()
        follower.is_refused(f'server certificate for "{HOST}" does not match host name "wrong.test"')
        follower.connect_with(right)
        follower.is_accepted("trusted")
        follower.connect_with(f"user=trusted sslmode=verify-full sslrootcert={files}/theirs.crt")
        follower.is_refused("not signed by an authority in sslrootcert")
        follower.connect_with(f"user=trusted sslmode=verify-full sslrootcert={files}/none.crt")
        follower.is_refused(f'root certificate file "{files}/none.crt" does not exist')
        follower.connect_with("user=trusted sslmode=disable")
        follower.is_refused("no encryption")
        follower.connect_with(right)
        follower.is_accepted("trusted")
        primary.configure("ssl = off")
        primary.psql("SELECT pg_reload_conf(); SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        follower.is_refused("server does not support SSL, but SSL was required")
        primary.configure("ssl = on")
        primary.psql("SELECT pg_reload_conf()")
        follower.is_accepted("trusted")
        follower.takes_over()


def test_the_standby_proves_who_it_is(primary, work, files):
    """A client certificate of the primary's authority and with the user's name, its key readable by the owner alone."""
    def showing(name):
        return (f"user=certified sslmode=verify-full sslrootcert={files}/ours.crt "
                f"sslcert={files}/{name}.crt sslkey={files}/{name}.key")
    with Follower(primary, work).connect_with(showing("none")) as follower:
        follower.start()
        follower.is_refused("connection requires a valid client certificate")
        follower.connect_with(showing("another"))
        follower.is_refused('certificate authentication failed for user "certified"')
        follower.connect_with(showing("stranger"))
        follower.is_refused("alert")
        (files / "client.key").chmod(0o640)
        follower.connect_with(showing("client"))
        follower.is_refused("has group or world access")
        (files / "client.key").chmod(0o600)
        assert follower.is_accepted("certified")["client_dn"] == "/CN=certified"
        follower.takes_over()


class Middleman:
    """Ends TLS with a certificate of its own and begins it anew towards the server: whoever verifies no certificate falls for it."""

    SSL_REQUEST = struct.pack("!ii", 8, 80877103)

    def __init__(self, port, files):
        self.port_of_server = port
        self.inner = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.inner.check_hostname, self.inner.verify_mode = False, ssl.CERT_NONE
        self.outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.outer.load_cert_chain(files / "stranger.crt", files / "stranger.key")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """One thread for each connection."""
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return      # closed
            threading.Thread(target=self.carry, args=[client], daemon=True).start()

    def carry(self, client):
        """In both directions in turn, until either ends."""
        try:
            with client, socket.create_connection(("127.0.0.1", self.port_of_server)) as server:
                assert client.recv(8) == self.SSL_REQUEST
                client.sendall(b"S")
                server.sendall(self.SSL_REQUEST)
                assert server.recv(1) == b"S"
                with self.outer.wrap_socket(client, server_side=True) as client, self.inner.wrap_socket(server) as server:
                    for end in (client, server):
                        end.settimeout(0.01)
                    while self.pass_on(client, server) and self.pass_on(server, client):
                        pass
        except OSError:
            pass

    @staticmethod
    def pass_on(source, target):
        """What has come; false at the end."""
        try:
            chunk = source.recv(65536)
        except socket.timeout:
            return True
        target.settimeout(30)
        target.sendall(chunk)
        target.settimeout(0.01)
        return bool(chunk)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.listener.close()


def test_a_password_for_this_server_alone(primary, work, files, monkeypatch):
    """SCRAM bound to the channel, with the password of ~/.pgpass: somebody in the middle is found out even where no certificate
    is verified; and nothing that the standby shows has the password."""
    home, escaped = work / "home", SECRET.replace(":", "\\:")
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    passwords = home / ".pgpass"

    def write(password, mode=0o600):
        passwords.unlink(missing_ok=True)
        with os.fdopen(os.open(passwords, os.O_CREAT | os.O_WRONLY, mode), "w") as file:
            file.write(f"elsewhere.test:*:*:*:not-this-one\n{HOST}:*:replication:scram:{password}\n")

    bound = "user=scram sslmode=require channel_binding=require"
    write(escaped, 0o644)
    with Middleman(primary.port, files) as middleman, Follower(primary, work).connect_with(bound) as follower:
        follower.start()
        follower.is_refused("no password supplied")
        assert f'password file "{passwords}" has group or world access' in follower.log_text()
        write("wr0ng")
        follower.is_refused('password authentication failed for user "scram"')
        write(escaped)
        follower.is_accepted("scram")
        follower.connect_with("user=scram sslmode=require channel_binding=disable", port=middleman.port)
        follower.is_accepted("scram")       # it falls for it
        assert follower.status()["primary"] == f"{HOST}:{middleman.port}"
        follower.connect_with(bound, port=middleman.port)
        follower.is_refused("SCRAM channel binding check failed")
        follower.connect_with("user=trusted sslmode=require channel_binding=require", port=middleman.port)
        follower.is_refused("server authenticated client without channel binding")
        follower.connect_with(bound)
        follower.is_accepted("scram")
        for word in (SECRET, escaped, "sesame", "wr0ng", "not-this-one"):
            assert word not in follower.said()
        follower.takes_over()


def test_a_target(primary, files, work):
    """`walrider logical apply` connects so to its target: that proves who it is, SCRAM is bound to the channel; a target that another
    authority has signed, and a wrong password, are refused with nothing applied."""
    conf = "wal_level = logical\nmax_prepared_transactions = 0\n"
    with PgCluster.init(work / "publisher", conf=conf).start() as publisher:
        publisher.psql("CREATE TABLE applied (id int PRIMARY KEY)")
        primary.psql("CREATE TABLE applied (id int PRIMARY KEY); ALTER ROLE scram SUPERUSER", options=LOCALLY)
        publisher.psql("CREATE PUBLICATION p FOR TABLE applied")
        publisher.psql("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        publisher.psql("INSERT INTO applied VALUES (1)")
        end = publisher.value("SELECT pg_current_wal_insert_lsn()")

        def apply(authority, password=SECRET):
            target = (f"host={HOST} hostaddr=127.0.0.1 port={primary.port} dbname=postgres user=scram sslmode=verify-full "
                      f"sslrootcert={files}/{authority}.crt channel_binding=require password={password}")
            return walrider("logical", "apply", "--source", publisher.dsn(), "--target", target, "-S", "s", "-P", "p", "--jobs", 2,
                            "--until", end, timeout=60)

        assert "certificate" in apply("theirs").expect(1).stderr
        assert "password authentication failed" in apply("ours", "wrong").expect(1).stderr
        assert primary.value("SELECT count(*) FROM applied") == "0"
        apply("ours").expect()
        assert primary.value("SELECT count(*) FROM applied") == "1"


def test_a_logical_slot(primary, files):
    """`walrider logical stream` connects in the same way: the primary proves who it is, SCRAM is bound to the channel."""
    primary.stop()
    primary.configure("wal_level = logical")
    standby.start_primary(primary)
    primary.psql("CREATE PUBLICATION p FOR TABLE t", options=LOCALLY)
    primary.psql("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    primary.psql("INSERT INTO t VALUES ('x')", options=LOCALLY)
    end = primary.value("SELECT pg_current_wal_insert_lsn()")
    primary.psql("SELECT pg_log_standby_snapshot()")

    def stream(authority):
        conninfo = (f"host={HOST} hostaddr=127.0.0.1 port={primary.port} dbname=postgres user=scram sslmode=verify-full "
                    f"sslrootcert={files}/{authority}.crt channel_binding=require")
        return walrider("logical", "stream", "-d", conninfo, "-S", "s", "-P", "p", "--no-loop", "-E", end,
                        env={"PGPASSWORD": SECRET}, timeout=60)

    assert '"new":{"v":"x"}' in stream("ours").expect().stdout
    assert "certificate" in stream("theirs").expect(1).stderr
