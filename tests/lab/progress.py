"""A progress bar on standard error, only where that is a terminal; lines with WALRIDER_VERBOSE=1."""

import os
import sys
import time


class Progress:
    """`update` as often as you like; it draws ten times a second at most."""

    WIDTH = 30

    def __init__(self, title, quiet=False):
        self.title = title
        self.live = not quiet and sys.stderr.isatty()
        self.begun = time.monotonic()
        self.drawn = 0.0

    def update(self, done, total, note=""):
        """Draw the bar at done/total."""
        now = time.monotonic()
        if os.environ.get("WALRIDER_VERBOSE") == "1":
            print(f"{self.title}: {now - self.begun:.1f} s {note}", file=sys.stderr)
        if not self.live or now - self.drawn < 0.1:
            return
        self.drawn = now
        share = min(1.0, done / total) if total else 0.0
        filled = round(share * self.WIDTH)
        sys.stderr.write(f"\r\x1b[K{self.title:<22} [{'#' * filled}{'.' * (self.WIDTH - filled)}] "
                         f"{share:4.0%} {now - self.begun:5.1f} s  {note}")
        sys.stderr.flush()

    def done(self, note=""):
        """Replace the bar by one line."""
        if self.live:
            sys.stderr.write(f"\r\x1b[K{self.title:<22} {time.monotonic() - self.begun:.1f} s  {note}\n")
            sys.stderr.flush()
