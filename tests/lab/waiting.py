"""Waiting for what another process does."""

import time


class NotYet(AssertionError):
    """It did not come in time."""


def wait_for(condition, what, timeout=60, every=0.02):
    """Poll until `condition()` is true; returns what it returned. `what` says what is waited for, or finds out."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise NotYet(f"after {timeout} s not yet: {what() if callable(what) else what}")
        time.sleep(every)
    return found
