"""Giving up directories whose files the run no longer needs."""

import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tests.lab.as_user import SCRATCH_PREFIX

_numbers = itertools.count()


def throw_away(directory):
    """Free its name and its space now; the empty files go when the run's scratch directory does.

    For up to five minutes ext4 looks at each inode that was deleted before it takes one for a new file (recently_deleted,
    fs/ext4/ialloc.c).  A data directory has a thousand files, and the tests make thousands of them: to remove each at once took a third of
    the processors' time.  Where inodes are few, or there is no such scratch directory, it is removed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return
    scratch = Path(tempfile.gettempdir())
    left = os.statvfs(directory)
    is_removed_later = scratch in directory.absolute().parents and scratch.name.startswith(SCRATCH_PREFIX)
    if not is_removed_later or left.f_favail < left.f_files / 4:
        shutil.rmtree(directory, ignore_errors=True)
        return
    gone = directory.with_name(f"{directory.name}.trash-{os.getpid()}-{next(_numbers)}")
    directory.rename(gone)
    for path, _, names in os.walk(gone):
        for name in names:
            file = os.path.join(path, name)
            found = os.lstat(file)
            if found.st_nlink > 1:
                os.unlink(file)
            elif stat.S_ISREG(found.st_mode) and found.st_size:
                os.truncate(file, 0)
