"""What a step's look at its batch takes.

To find its tensors, and to know whether a batch of the same shapes was seen before.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from results import record

from lflops.monitoring.window.step_timer import FastPathSteps

ITEMS = 20_000


@dataclass
class Batch:
    """Two tensors, and the data set that they were taken from."""

    x: torch.Tensor
    y: torch.Tensor
    dataset: list[tuple[int, str]]


class Graph:
    """The same as a plain object."""

    def __init__(self, dataset: list[tuple[int, str]]) -> None:
        """Make a batch."""
        self.x, self.y, self.dataset = torch.zeros(8, 4), torch.zeros(8), dataset


def batches() -> dict[str, Any]:
    """A batch of each kind."""
    items = [(number, str(number)) for number in range(ITEMS)]
    return {
        "a pair of tensors": (torch.zeros(8, 4), torch.zeros(8)),
        "a dict of 20 tensors": {f"input_{number}": torch.zeros(8, 4) for number in range(20)},
        "a list of 5,000 small tensors": [torch.zeros(2) for _ in range(5_000)],
        f"a dataclass with a data set of {ITEMS:,} items": Batch(
            torch.zeros(8, 4), torch.zeros(8), items
        ),
        f"a plain object with a data set of {ITEMS:,} items": Graph(items),
    }


def looks(batch: Any, times: int) -> tuple[float, float]:
    """Seconds of the first look, and the median of those that follow."""
    plain = FastPathSteps(time.perf_counter, ())
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        plain.note(batch)
        seconds.append(time.perf_counter() - start)
        plain.take()
    return seconds[0], median(seconds[1:])


def main() -> None:
    """Measure each kind of batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"Time of `FastPathSteps.note` for one batch object: its first look, and the median of {asked.times} looks after that. A step of the",
        "training makes one such look.",
        "",
        "| batch | first look | each further look |",
        "|---|--:|--:|",
    ]
    for name, batch in batches().items():
        first, further = looks(batch, asked.times)
        lines.append(f"| {name} | {first * 1e6:,.1f} µs | {further * 1e6:,.1f} µs |")
    lines += [
        "",
        "Before mappings, sequences and dataclasses alone were read, and remembered, each further look took 1.6 µs, 9.2 µs, 1.6 ms,",
        "152 ms and 252 ms in this order.",
    ]
    record("batch_look.py", "A step's look at its batch", lines)


if __name__ == "__main__":
    main()
