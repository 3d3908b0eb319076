"""The seed of all random choices, as `crates/seed` has it: WALRIDER_SEED, of this moment where that is `random`, or always the same."""

import os
import time

FIXED = 1


def seed():
    """The seed. One that was drawn here is that of the programs which we start, too."""
    wanted = os.environ.get("WALRIDER_SEED") or FIXED
    if wanted == "random":
        os.environ["WALRIDER_SEED"] = wanted = str(time.time_ns() % 1_000_000)
    return int(wanted)
