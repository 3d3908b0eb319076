"""Patroni with etcd: a cluster bootstrapped from a backup, a replica made from it, and a Walrider standby through a switchover.

What it does not try: failover of a leader that died, Patroni's synchronous mode, pause, several etcd servers.
"""

import re
from contextlib import ExitStack

import pytest

from tests.lab.server import tools
from tests.lab.server.patroni import Etcd, Member
from tests.lab.server.pgbackrest import Repository
from tests.lab.standby import standby
from tests.lab.walrider import binary

pytestmark = pytest.mark.skipif(not tools.has("pgbackrest"), reason="the recipe restores with pgBackRest, which is not there")


def script(path, restore, replay):
    """The script of docs/operations.md, with these options."""
    path.write_text(f"#!/bin/sh\nset -e\nmkdir -p -m 0700 {restore[0]}\n"
                    f"{tools.program('pgbackrest')} --config={restore[1]} --stanza=main --pg1-path={restore[0]} {restore[2]} restore\n"
                    f"{binary()} replay -D {restore[0]} {replay} || test $? -eq 3\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("replay", ["", pytest.param("--no-promote", marks=pytest.mark.skipif(
    not tools.LONG, reason="make test-tools runs it"))], ids=["we_promote", "postgres_promotes"])
def test_cluster(work, replay):
    """Custom bootstrap to a time, a replica by create_replica_methods, and `walrider standby` follows the switchover to it."""
    with ExitStack() as stack:
        repository = Repository(work, "zst")
        with repository.server:
            repository.fill()
        etcd = Etcd(work)
        stack.callback(etcd.close)

        def member(name, **options):
            push = f"{tools.program('pgbackrest')} --config={repository.config} --stanza=main --pg1-path={work / name} archive-push %p"
            made = Member(work, etcd, name, parameters={"archive_mode": "on", "archive_command": push}, **options)
            stack.callback(made.close)
            return made.start()

        restore = f"--type=time --target='{repository.target}' --target-action=promote"
        first = member("first", bootstrap={"method": "walrider", "walrider": {
            "command": script(work / "bootstrap.sh", (work / "first", repository.config, restore), replay),
            "no_params": True, "keep_existing_recovery_conf": True}})
        first.wait_for("primary")
        primary = first.server()
        primary.psql("INSERT INTO t VALUES (0, 'first write')")
        assert primary.psql("SELECT count(*), count(*) FILTER (WHERE id = -1) FROM t") == [["20001", "0"]]
        timeline = primary.value("SELECT timeline_id FROM pg_control_checkpoint()")
        assert timeline == "2"
        primary.switch_wal()
        archived = "SELECT last_archived_wal ~ '^00000002[0-9A-F]{16}$' FROM pg_stat_archiver"
        standby.wait_for(lambda: primary.value(archived) == "t", first.log_tail)

        second = member("second", create={"create_replica_methods": ["walrider"], "walrider": {
            "command": script(work / "replica.sh", (work / "second", repository.config, "--type=standby"), ""), "no_params": True}})
        second.wait_for("replica")
        assert "replica has been created using walrider" in second.log.read_text(), second.log_tail()
        standby.wait_streaming(primary, "second")

        copy = primary.basebackup(work / "copy", wal="stream")
        (copy / "standby.signal").touch()
        with open(copy / "postgresql.auto.conf", "a") as conf:
            conf.write(f"primary_conninfo = 'host=127.0.0.1,127.0.0.1 port={first.port},{second.port} user=postgres "
                       "target_session_attrs=read-write'\nprimary_slot_name = ''\n")
        with standby.Walrider(copy).start() as ours:
            standby.wait_streaming(primary, "bank")         # Patroni's scope is the server's cluster_name
            first.switch_to(second)
            second.wait_for("primary")
            new = second.server()
            new.psql("INSERT INTO t VALUES (-2, 'after the switchover')")
            standby.wait_position(new, name="bank")
            assert ours.status()["timeline"] == 3, ours.status()
            assert re.search(r"[Tt]imeline", ours.log_text())
            ours.stop()
