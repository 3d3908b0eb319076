"""Early redo with AddressSanitizer and UndefinedBehaviorSanitizer in the library, on an ordinary server: `make readable-asan`.

They see the extension's C, and what is copied or moved by memcpy and memmove in the engine's redo. Not seen: accesses within
shared memory, which is one block to them, and the rest of the server.
"""

import os
import subprocess

import pytest

from tests.lab import extension, install
from tests.lab.oracle.compare import compare
from tests.lab.standby import readable

FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined"


def runtime():
    """What has to be there before the server's own memory functions."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    return os.path.realpath(found)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_pages(variant, work, workers):
    """Of every load; a report ends the process that it is about, and stands in the server's log."""
    library = work / "sanitized.so"
    extension.build(install.major(), cflags=FLAGS, into=library)
    stock = readable.catch_up(variant, readable.prepare(variant, work / "stock"))
    server = readable.prepare(variant, work / "early")
    # The server frees nothing when it ends.
    server.own_environment = {"LD_PRELOAD": runtime(), "ASAN_OPTIONS": "detect_leaks=0",
                              "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    readable.catch_up(variant, server, **{**readable.EARLY, "shared_preload_libraries": library, "walrider.redo_workers": workers,
                                          "walrider.redo_slice": 1000})
    compare(server.data_dir, stock.data_dir)
    assert readable.summary(server)["early"] > 10000
    assert not server.log_matches("Sanitizer|runtime error"), server.log_tail()
