"""A power cut, simulated: a real run is recorded call by call, and what a disk may hold after a cut is made of the record.

`Recorder` runs a command under `recorder.c`.  The record that comes back is complete: played onto what was there at the start, it
has to give what is there at the end, byte for byte and name for name, or `Record` refuses it.

`Record.image` is what is left when the power goes at one moment of the record.  The model, with the choices that each image's
seed makes:

- The start is durable.  What a later call did is durable once it was synced; before, it may be there or not.
- *Data.*  The pieces of a file, of 512 bytes or of 4 kB, reach the disk each for itself, in any order, each as it was after any of
  the writes since the last fsync or fdatasync.  A piece that did not arrive is what it was, or zero where the file has grown.
- *Length.*  As it was when last synced, or after any of the calls since, whatever became of the data.
- *Names.*  Creating, renaming, linking and removing is durable after an fsync of the directory (of both, where there are two: of
  either, here).  What is not may be there or not, a rename as a whole, in one of three ways: `journal`, in the order of the calls,
  and whatever is synced makes all earlier calls durable (ext4 and xfs); `directory`, in order within each directory; `name`, each
  for itself, in order only where it is about the same name.  In the last two an fsync of a file may make durable that it was
  created, or not.
- A file has the mode that it was created with.  At the start each has one name.

Not modelled: media that fail, writes that reach other places than they should, an fsync that fails or lies.
"""

import os
import random
import stat
import struct
import subprocess
from dataclasses import dataclass, replace, field
from pathlib import Path

SOURCE = Path(__file__).with_name("recorder.c")
ENTRY = struct.Struct("=IHHQQQqQ")
(CREATE, TRUNCATE, WRITE, ALLOCATE, FSYNC, SYNC, RENAME, LINK, UNLINK, MKDIR, SYMLINK, SEND, UNKNOWN) = range(1, 14)
NAMES = ("create truncate write allocate fsync sync rename link unlink mkdir symlink send unknown").split()
KEEP_SIZE = 1
PIECES = (512, 4096)
ORDERS = ("journal", "directory", "name")


class File:
    """A regular file: what is durable, and what was done to it since, as (place, data, None) or (length, nothing, length)."""

    def __init__(self, mode, data=b"", number=0):
        self.mode, self.durable, self.number, self.pending = mode, data, number, []

    def write(self, at, data):
        """Data from a place on."""
        self.pending.append((at, data, None))

    def truncate(self, length):
        """A length."""
        self.pending.append((length, b"", length))

    def size(self):
        """As the programs see it."""
        size = len(self.durable)
        for at, data, length in self.pending:
            size = max(size, at + len(data)) if length is None else length
        return size

    def sync(self):
        """What was done is durable."""
        if self.pending:
            now = bytearray(self.durable)
            for at, data, length in self.pending:
                end = at + len(data)
                now.extend(bytes(max(0, end - len(now))))
                now[at:end if length is None else None] = data
            self.durable, self.pending = bytes(now), []

    def cut(self, arrives, piece):
        """Each piece and length has arrived after a call, or not.  A length that arrives is that of all calls before."""
        size = kept_size = len(self.durable)
        shortest = None         # since a length arrived
        now, kept = bytearray(self.durable), bytearray(self.durable)
        for at, data, length in self.pending:
            before, end = size, at + len(data)
            for buffer in (now, kept):
                buffer.extend(bytes(max(0, end - len(buffer))))
            if length is None:
                size = max(size, end)
                now[at:end] = data
            else:
                size = length
                now[length:] = bytes(len(now) - length)
                shortest = length if shortest is None else min(shortest, length)
            if size != before and arrives():
                kept_size = size
                if shortest is not None:
                    kept[shortest:] = bytes(len(kept) - shortest)
                    shortest = None
            for start in range(at // piece * piece, end, piece):
                if arrives():
                    kept[start:start + piece] = now[start:start + piece]
        del kept[kept_size:]
        self.durable, self.pending = bytes(kept), []


class Directory:
    """A directory: its entries as they are, and those that are durable."""

    def __init__(self, mode, entries=None, number=0):
        self.mode, self.now, self.durable, self.number = mode, entries or {}, dict(entries or {}), number


@dataclass
class Link:
    """A symbolic link."""

    target: str


@dataclass
class Change:
    """What one call did to names: each of (directory, name, what it is now or None)."""

    entries: list
    keys: set = field(init=False)

    def __post_init__(self):
        self.keys = {(id(directory), name) for directory, name, _ in self.entries}

    def touches(self, directory):
        """Whether it is about a name of this directory."""
        return any(entry[0] is directory for entry in self.entries)

    def apply(self):
        """It is durable."""
        for directory, name, what in self.entries:
            if what is None:
                directory.durable.pop(name, None)
            else:
                directory.durable[name] = what


def read_tree(path):
    """What is below a path; all of it is durable."""
    status = os.lstat(path)
    mode = status.st_mode & 0o7777
    if stat.S_ISLNK(status.st_mode):
        return Link(os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return Directory(mode, {name: read_tree(os.path.join(path, name)) for name in sorted(os.listdir(path))}, status.st_ino)
    assert stat.S_ISREG(status.st_mode), f"{path} is neither a file nor a directory nor a link"
    with open(path, "rb") as file:
        return File(mode, file.read(), status.st_ino)


def copy(tree, numbers):
    """A tree of its own, its files and directories by their inode numbers."""
    if isinstance(tree, Link):
        return tree
    if isinstance(tree, Directory):
        made = Directory(tree.mode, {name: copy(what, numbers) for name, what in tree.durable.items()})
    else:
        made = File(tree.mode, tree.durable)
    numbers[tree.number] = made
    return made


def write_tree(tree, path, made=None):
    """Make what is durable of a tree; `made` are the files that have a name already."""
    made = {} if made is None else made
    if isinstance(tree, Link):
        os.symlink(tree.target, path)
    elif isinstance(tree, Directory):
        os.mkdir(path, tree.mode)
        for name, what in tree.durable.items():
            write_tree(what, os.path.join(path, name), made)
    elif id(tree) in made:
        os.link(made[id(tree)], path)
    else:
        made[id(tree)] = path
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, tree.mode)
        try:
            view = memoryview(tree.durable)
            while view:
                view = view[os.write(handle, view):]
        finally:
            os.close(handle)


def differences(one, other, path=""):
    """Where the durable contents of two trees differ."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, Link):
        return [] if one == other else [f"{path}: leads to {one.target}, {other.target}"]
    if isinstance(one, File):
        return [] if one.durable == other.durable else [f"{path}: {len(one.durable)} bytes, {len(other.durable)}"]
    return [found for name in sorted(set(one.durable) | set(other.durable))
            for found in differences(one.durable.get(name), other.durable.get(name), f"{path}/{name}")]


@dataclass
class Call:
    """An entry of the record."""

    operation: int
    one: str
    two: str
    a: int
    b: int
    c: int
    at: int
    data: bytes

    def __str__(self):
        return f"{NAMES[self.operation - 1]} {self.one} {self.two} at {self.at}, {len(self.data)} bytes of inode {self.a}"


def read_calls(path):
    """The entries that `recorder.c` wrote."""
    text, at, calls = Path(path).read_bytes(), 0, []
    while at < len(text):
        operation, one, two, a, b, c, offset, length = ENTRY.unpack_from(text, at)
        at += ENTRY.size
        ends = at + one, at + one + two, at + one + two + length
        calls.append(Call(operation, os.fsdecode(text[at:ends[0]]), os.fsdecode(text[ends[0]:ends[1]]), a, b, c, offset,
                          text[ends[1]:ends[2]]))
        at = ends[2]
    return calls


class Simulation:
    """The file system while the record is played: what is durable, and what is on its way."""

    def __init__(self, start, order="journal", created_with_file=True):
        self.numbers = {}
        self.root = copy(start, self.numbers)
        self.order, self.created_with_file = order, created_with_file
        self.changes = []       # of names, not durable yet

    def play(self, call):
        """One call; what is not below the start, it does not touch."""
        if call.operation == UNKNOWN:
            raise AssertionError(f"system call {call.a} is one that the recorder does not understand")
        subject = self.numbers.get(call.a)
        directory = self.numbers.get(call.b)
        if call.operation in (WRITE, TRUNCATE, ALLOCATE) and isinstance(subject, File):
            self._data(call, subject)
        elif call.operation in (FSYNC, SYNC):
            self._sync(call, subject)
        elif call.operation == CREATE:
            self._make(call, directory, File(call.c))
        elif call.operation == MKDIR:
            self._make(call, directory, Directory(call.c))
        elif call.operation == LINK and directory is not None:
            self._change((directory, call.one, subject))
        elif call.operation == SYMLINK and directory is not None:
            self._change((directory, call.one, Link(os.fsdecode(call.data))))
        elif call.operation == UNLINK and directory is not None:
            self._change((directory, call.one, None))
        elif call.operation == RENAME and (subject is not None or directory is not None):
            what = subject.now[call.one]
            if not (call.two in directory.now and directory.now[call.two] is what):     # else it does nothing
                self._change((subject, call.one, None), (directory, call.two, what))

    def _make(self, call, directory, what):
        # A number that was another file's is this one's now, below the start or not.
        self.numbers.pop(call.a, None)
        if directory is not None:
            self.numbers[call.a] = what
            self._change((directory, call.one, what))

    @staticmethod
    def _data(call, file):
        if call.operation == WRITE:
            file.write(call.at, call.data)
        elif call.operation == TRUNCATE:
            file.truncate(call.at)
        elif call.c & ~KEEP_SIZE:
            raise AssertionError(f"fallocate with mode {call.c} is not understood")
        elif not call.c and call.b > file.size():
            file.truncate(call.b)

    def _change(self, *entries):
        for directory, name, what in entries:
            if what is None:
                del directory.now[name]
            else:
                directory.now[name] = what
        self.changes.append(Change(list(entries)))

    def _sync(self, call, subject):
        if call.operation == SYNC:
            for what in self.numbers.values():
                if isinstance(what, File):
                    what.sync()
            self._settle(lambda _: True)
            return
        if isinstance(subject, File):
            subject.sync()
        if subject is None:
            return
        if self.order == "journal":
            self._settle(lambda _: True)
        elif isinstance(subject, Directory):
            self._settle(lambda change: change.touches(subject))
        elif self.created_with_file and not call.b:
            self._settle(lambda change: len(change.entries) == 1 and change.entries[0][2] is subject)

    def _settle(self, is_synced):
        """Makes changes durable, and those that they follow from."""
        kept, settled, needed = [], [], set()
        for change in reversed(self.changes):
            if is_synced(change) or change.keys & needed:
                needed |= change.keys
                settled.append(change)
            else:
                kept.append(change)
        for change in reversed(settled):
            change.apply()
        self.changes = kept[::-1]

    def cut(self, rng, piece):
        """The power goes: some of what was on its way arrives."""
        chance = lambda: rng.choice([0, 0.1, 0.5, 0.9, 1])
        share = chance()
        arrives = lambda: rng.random() < share
        missing = set()         # names, or directories, or anything at all
        for change in self.changes:
            keys = dict(journal={None}, directory={id(entry[0]) for entry in change.entries}, name=change.keys)[self.order]
            if not keys & missing and arrives():
                change.apply()
            else:
                missing |= keys
        for file in {id(what): what for what in self._files(self.root)}.values():
            if file.pending:
                likely = chance()
                file.cut(lambda: rng.random() < likely, piece)

    def _files(self, tree):
        if isinstance(tree, File):
            yield tree
        elif isinstance(tree, Directory):
            for what in tree.durable.values():
                yield from self._files(what)


@dataclass
class Cut:
    """A moment and the choices of the disk; the same for the same record and seed."""

    seed: str
    step: int
    steps: int
    order: str
    piece: int
    created_with_file: bool

    def __str__(self):
        return f"cut {self.seed}: before call {self.step} of {self.steps}, names by {self.order}, pieces of {self.piece}, " \
               f"{'with' if self.created_with_file else 'without'} the name of a new file"


class Record:
    """A run that was recorded: how it began, and what it did."""

    def __init__(self, start, log, end):
        """Reads a record, and tries that it is all there."""
        self.start, self.calls = start, read_calls(log)
        whole = Simulation(start)
        for call in self.calls:
            whole.play(call)
        whole.play(Call(SYNC, "", "", 0, 0, 0, 0, b""))
        differ = differences(whole.root, read_tree(end))
        assert not differ, f"the record of {len(self.calls)} calls does not give what is there at the end: {differ[:20]}"
        self.turns = self._where(FSYNC, SYNC, CREATE, UNLINK, MKDIR, SYMLINK)
        self.marks = self._where(RENAME, LINK)

    def counts(self):
        """How many of each there are."""
        return {name: sum(call.operation == number for call in self.calls) for number, name in enumerate(NAMES, 1)}

    def _where(self, *operations):
        return [number for number, call in enumerate(self.calls) if call.operation in operations] or [0]

    def choose(self, seed, journaled=False):
        """A moment and choices; `journaled`: of a disk whose names are as durable as those of a journal, on which PostgreSQL relies.  A third of the moments are anywhere, a third by calls that make or order what is durable, and a third
        close to a rename, which decides something: most of a record is data."""
        rng = random.Random(seed)
        near = rng.choice([range(len(self.calls) + 1), self.turns, self.marks])
        step = rng.choice(near) + (rng.randint(-12, 2) if near is self.marks else rng.choice([0, 1]))
        step = min(max(step, 0), len(self.calls))
        cut = Cut(seed, step, len(self.calls), rng.choice(ORDERS), rng.choice(PIECES), rng.random() < 0.5)
        return replace(cut, order="journal", created_with_file=True) if journaled else cut

    def image(self, cut, path):
        """Make the directory that is left."""
        left = Simulation(self.start, cut.order, cut.created_with_file)
        for call in self.calls[:cut.step]:
            left.play(call)
        left.cut(random.Random(f"{cut.seed} {cut.step}"), cut.piece)
        write_tree(left.root, path)
        return Path(path)

    def forget_syncs(self, name):
        """Leave out what synced the files below an entry of the directory, to see that it is missed."""
        whole = Simulation(self.start)
        for call in self.calls:
            whole.play(call)
        top = whole.root.now[name]
        numbers = {id(what): number for number, what in whole.numbers.items()}
        below = {numbers.get(id(file)) for file in whole._files(top)}
        self.calls = [call for call in self.calls if call.operation != FSYNC or call.a not in below]

    def sent(self, cut):
        """What went out over sockets before the cut."""
        return [call.data for call in self.calls[:cut.step] if call.operation == SEND]


class Recorder:
    """The program that records, built where it is used."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True)
        self.program, self.log = self.directory / "recorder", self.directory / "log"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", str(self.program), str(SOURCE)], check=True)

    def command(self, data_dir, *command):
        """What runs a command and records it.  The directory as it is now is the start."""
        self.data_dir, self.start = Path(data_dir), read_tree(data_dir)
        return [str(self.program), str(self.log), str(data_dir), *map(str, command)]

    def record(self):
        """What the command did, which has ended."""
        return Record(self.start, self.log, self.data_dir)
