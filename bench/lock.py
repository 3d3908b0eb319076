"""A lock for a machine on which several people work: whoever measures is alone."""

import fcntl
from contextlib import contextmanager


class MachineLock:
    """A file that is locked shared for work and exclusively for a measurement; without a file nothing is locked."""

    def __init__(self, path):
        self.path = path

    @contextmanager
    def _held(self, how):
        if self.path is None:
            yield lambda: None
            return
        with open(self.path) as file:
            def take_turns():
                fcntl.flock(file, fcntl.LOCK_UN)
                fcntl.flock(file, how)

            fcntl.flock(file, how)
            yield take_turns

    def shared(self):
        """Beside others' work, not beside a measurement."""
        return self._held(fcntl.LOCK_SH)

    def exclusive(self):
        """For a measurement; gives a function that lets others in between two long ones."""
        return self._held(fcntl.LOCK_EX)
