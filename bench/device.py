"""A volume that limits requests: ext4 on a loop device of its own, which root makes and the bench's own user asks for.

    python3 -m bench.device [--image DIR] -- COMMAND ...    run COMMAND with such a device, where the machine allows one

The limits are those of version 1 of control groups (blkio.throttle), set for this device in the group that everything is in: there
they hold for reads and for writes, those of the system's write-back too, each on its own.  Each request can take a while besides, many
of them side by side, as on a network (delayed_file.c).
"""

import json
import os
import shutil
import signal
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from socket import AF_UNIX, socket

from tests.lab.as_user import find_user

VARIABLE = "WALRIDER_BENCH_DEVICE"
THROTTLE = Path("/sys/fs/cgroup/blkio")
IMAGES = Path("/dev/shm")
SECTOR = 512
SOURCE = Path(__file__).with_name("delayed_file.c")


class Device:
    """Root's side: at most one image, its loop device, its file system."""

    def __init__(self, images, user):
        self.directory = Path(tempfile.mkdtemp(prefix="walrider-volume-", dir=images))
        self.mount_point = Path(tempfile.mkdtemp(prefix="walrider-volume-", dir="/var/tmp"))
        self.user, self.loop, self.server = user, None, None
        self.delay = self.directory / "delay"
        self.set_delay(0)

    def about(self):
        """What it is, in words."""
        return f"ext4 on a loop device, its image on {_run('stat', '-f', '-c', '%T', self.directory)}"

    def fresh(self, size, delays):
        """A new, empty file system of so many bytes that belongs to the user; `delays`: its requests can take a while."""
        self.close()
        image = self.directory / "image"
        with open(image, "wb") as file:
            file.truncate(size)
        if delays:
            self.loop = _run("losetup", "--direct-io=on", "--find", "--show", self.delayed(image))
        else:
            self.loop = _run("losetup", "--find", "--show", image)
        # All of its tables now: what is written later would count as the measured side's.
        _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", self.loop)
        _run("mount", "-o", "noatime", self.loop, self.mount_point)
        os.chown(self.mount_point, self.user.pw_uid, self.user.pw_gid)
        return dict(path=str(self.mount_point), name=Path(self.loop).name)

    def delayed(self, image):
        """The image as a file whose requests take a while."""
        program, shown = self.directory / "delayed_file", self.directory / "shown"
        if not program.exists():
            _run("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, SOURCE)
        shown.touch()
        self.server = subprocess.Popen([program, image, shown, self.delay])
        while not os.path.ismount(shown):
            if self.server.poll() is not None:
                raise OSError("no file by FUSE")
            time.sleep(0.01)
        return shown

    def forget(self):
        """Everything written, nothing cached."""
        _run("umount", self.mount_point)
        _run("mount", "-o", "noatime", self.loop, self.mount_point)

    def set_delay(self, microseconds):
        """How long each request takes at least."""
        with open(self.delay, "r+b" if self.delay.exists() else "wb") as file:
            file.write(struct.pack("=I", microseconds))

    def limit(self, requests, size, microseconds):
        """So many requests and bytes a second, reading and writing; 0 is no limit. Each takes so long besides."""
        self.set_delay(microseconds)
        numbers = Path(f"/sys/block/{Path(self.loop).name}/dev").read_text().strip()
        for direction in ("read", "write"):
            for what, value in (("iops", requests), ("bps", size)):
                (THROTTLE / f"blkio.throttle.{direction}_{what}_device").write_text(f"{numbers} {value}")

    def close(self):
        """No image, no device, no limit."""
        if self.loop:
            self.limit(0, 0, 0)
            if os.path.ismount(self.mount_point):
                _run("umount", self.mount_point)
            _run("losetup", "--detach", self.loop)
            self.loop = None
        if self.server:
            if os.path.ismount(self.directory / "shown"):
                _run("umount", self.directory / "shown")
            self.server.wait()
            self.server = None
        for name in ("image", "shown"):
            (self.directory / name).unlink(missing_ok=True)

    def remove(self):
        """Nothing is left of it."""
        self.close()
        shutil.rmtree(self.directory)
        self.mount_point.rmdir()


class Volume:
    """The user's side. Without a device it is a directory of the machine's own, and knows neither limits nor counts."""

    def __init__(self, directory):
        self.address = os.environ.get(VARIABLE)
        self.path, self.name = Path(directory), None

    @property
    def can_limit(self):
        """Whether there is a device."""
        return self.address is not None

    def about(self):
        """What it is, in words."""
        return self._ask("about") if self.can_limit else "a directory of the machine's own disk"

    def fresh(self, size, delays=False):
        """An empty volume; returns its directory. `delays`: its requests can take a while."""
        if self.can_limit:
            made = self._ask("fresh", size, int(delays))
            self.path, self.name = Path(made["path"]), made["name"]
        self.path.mkdir(exist_ok=True)
        return self.path

    def forget(self):
        """Nothing of it is cached; what the machine's own directory has cached stays."""
        if self.can_limit:
            self._ask("forget")

    def sync(self):
        """All that was written is on it; the machine's own disk has others' writes to do as well."""
        if self.can_limit:
            _run("sync", "--file-system", self.path)

    def limit(self, requests=0, size=0, microseconds=0):
        """So many requests and bytes a second, and how long each takes at least."""
        if self.can_limit:
            self._ask("limit", requests, size, microseconds)

    def counts(self):
        """Requests and bytes since it was made, from /sys/block; empty without a device.

        What reached the device as one request because neighbours were merged on the way counts as many times as the limit sees it.
        """
        if not self.can_limit:
            return {}
        fields = [int(word) for word in Path(f"/sys/block/{self.name}/stat").read_text().split()]
        return dict(read_requests=fields[0] + fields[1], read_bytes=fields[2] * SECTOR,
                    write_requests=fields[4] + fields[5], write_bytes=fields[6] * SECTOR)

    def _ask(self, what, *arguments):
        with socket(AF_UNIX) as connection:
            connection.connect(self.address)
            connection.sendall(json.dumps([what, *arguments]).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        if "error" in answer:
            raise OSError(f"{what} {arguments}: {answer['error']}")
        return answer["done"]


def _run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def serve(device, address):
    """Answer the user's requests, one at a time."""
    allowed = dict(about=device.about, fresh=device.fresh, forget=device.forget, limit=device.limit)

    class Handler(socketserver.StreamRequestHandler):
        """A request is a line: the name of what to do, and its numbers."""

        def handle(self):
            what, *numbers = json.loads(self.rfile.readline())
            try:
                answer = dict(done=allowed[what](*map(int, numbers)))
            except OSError as error:
                answer = dict(error=str(error))
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    server = socketserver.UnixStreamServer(address, Handler)
    os.chown(address, device.user.pw_uid, device.user.pw_gid)
    os.chmod(address, 0o600)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(images, command):
    """Run a command, with a device if root calls and the machine has limits."""
    if os.geteuid() != 0 or not (THROTTLE / "blkio.throttle.read_iops_device").exists() or not shutil.which("losetup"):
        print("no devices with limits here: root, loop devices and cgroup v1's blkio are needed", file=sys.stderr)
        return subprocess.run(command).returncode
    user = find_user()
    with tempfile.TemporaryDirectory(prefix="walrider-volume-") as directory:
        os.chmod(directory, 0o711)
        device, address = Device(images, user), f"{directory}/socket"
        server = serve(device, address)
        try:
            child = subprocess.Popen(command, env=dict(os.environ, **{VARIABLE: address}))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda received, _frame: child.send_signal(received))
            return child.wait()
        finally:
            server.shutdown()
            device.remove()


if __name__ == "__main__":
    arguments, images = sys.argv[1:], IMAGES
    if arguments[:1] == ["--image"] and len(arguments) > 1:
        images, arguments = Path(arguments[1]), arguments[2:]
    if len(arguments) < 2 or arguments[0] != "--":
        sys.exit(__doc__)
    sys.exit(main(images, arguments[1:]))
