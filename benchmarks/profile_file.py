"""Measure the size of a large model's profile, and the time to save and to load it.

The profile has 5,000 modules and 45,000 cells, with a time for each module and phase.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

from lflops.profile.json_file import load, save
from tests.support.profile_builders import profile_of

MODULES = 5_000
REPEATS = 11


def median_seconds(action: Callable[[], object]) -> float:
    """Return the median seconds of a call, including garbage collection and freeing its result."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Measure, and write the table."""
    profile = profile_of(MODULES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.profile.json"
        save_seconds = median_seconds(lambda: save(profile, path))
        load_seconds = median_seconds(lambda: load(path))
        size = path.stat().st_size
    lines = [
        f"{len(profile.modules):,} modules, {len(profile.op_counts):,} cells, a time in every work: {size / 1e6:.1f} MB. Medians of {REPEATS}.",
        "",
        "| | seconds |",
        "|---|--:|",
        f"| save | {save_seconds:.3f} |",
        f"| load, and check that it adds up | {load_seconds:.3f} |",
    ]
    record("profile_file.py", "A large profile's file", lines)


if __name__ == "__main__":
    main()
