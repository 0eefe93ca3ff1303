"""The ledger as a value.

The seconds of a run by category, its slow steps, and the starts that it was made in.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from lflops.profile.series import summed

_NAMES = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, str]]
)

CATEGORIES = _NAMES["categories"]
"""The categories, and how they are called.

`training` is divided by phase and `slow` by cause: `training/forward`, `slow/loader`.
"""

# what is not lost of a run's time
NO_LOSS = {"training", "warm_up"}
# the causes of slow steps, and what each means
CAUSES = _NAMES["causes"]


class SlowStep(Struct, frozen=True, kw_only=True, tag_field="kind", tag="slow"):
    """A step that took longer than is usual for its size."""

    step: int
    # seconds from the begin of its start to the end of the step
    end: float
    seconds: float
    # seconds that such a step takes, a median
    usual: float
    # seconds that it took longer
    cost: float
    # one of `CAUSES`
    cause: str
    # the phase, or the category, that most of the cost was in
    phase: str


class Span(Struct, frozen=True, kw_only=True):
    """A part of a run."""

    # Unix time in seconds
    begin: float
    # how long it is. `spent` adds up to it
    seconds: float
    # how many steps were done by its end, as the loggers count
    steps: int
    spent: Mapping[str, float]
    memory: int | None = (
        # bytes of the process in main memory at its end; `None` where that was not read
        None
    )


class Start(Struct, frozen=True, kw_only=True):
    """One start of a run's process, from the begin of the process to its last moment in the file."""

    # Unix time in seconds
    begin: float
    seconds: float
    # how many steps earlier starts had done, as the loggers count
    first_step: int
    # how many were done when it ended
    last_step: int
    # "finished", the class of the exception that ended it, "exit" of a program that did not close
    # its run, "killed", or "running".
    ended: str


class Ledger(Struct, frozen=True, kw_only=True):
    """Every second of a run, by category.

    `monitor.ledger` has that of a running one; `lflops.load_run` reads a folder.

    Attributes:
        seconds: By category; a category is divided by phase or cause after a slash. The sum is
            `total`.
        total: Seconds from the begin of the first process to the end of the last.
        steps: How many steps the run has done.
        slow_steps: The costliest ones, in the order in which they happened.
        starts: The starts of its process, one after the other. More than one is a run that was
            resumed.
        spans: The run in parts, fine lately and coarse before.
        rank: Of the process.
        ranks: How many there are.
        others: Starts of other runs, earlier ones or other loops, that are in the same folder.
    """

    seconds: Mapping[str, float]
    total: float
    steps: int
    slow_steps: tuple[SlowStep, ...]
    starts: tuple[Start, ...]
    spans: tuple[Span, ...]
    rank: int = 0
    ranks: int = 1
    others: int = 0

    def by_group(self) -> dict[str, float]:
        """Seconds by category, without phases and causes, the most first."""
        return dict(
            sorted(
                summed((group_of(name), value) for name, value in self.seconds.items()).items(),
                key=lambda item: -item[1],
            )
        )


def group_of(category: str) -> str:
    """The category without its phase or cause."""
    return category.partition("/")[0]


QUARTERS, GROWN, LEAST_GROWN = 4, 0.1, 1 << 28
"""Memory creeps where each quarter of the last start has more than the one before, and the last this share and so many bytes more."""

FEWEST_SPANS = 20
# in which memory grows in any run
GROWING = {"start_up", "warm_up", "compilation"}


def memory_growth(ledger: Ledger) -> float | None:
    """Bytes an hour by which the process grows, from the first to the last quarter of its last start.

    `None` where it does not.
    """
    usable = (
        one
        for one in ledger.spans
        if one.begin >= ledger.starts[-1].begin and one.spent.keys().isdisjoint(GROWING)
    )
    spans = [one for one in usable if one.memory is not None]
    if len(spans) < FEWEST_SPANS:
        return None
    begin, end = spans[0].begin, spans[-1].begin + spans[-1].seconds
    quarters: list[list[int]] = [[] for _ in range(QUARTERS)]
    for each in spans:
        place = int((each.begin + each.seconds / 2 - begin) / (end - begin) * QUARTERS)
        quarters[min(max(place, 0), QUARTERS - 1)].append(each.memory or 0)
    if not all(quarters):
        return None
    usual = [median(each) for each in quarters]
    grown = usual[-1] - usual[0]
    creeps = sorted(set(usual)) == usual and grown >= max(GROWN * usual[0], LEAST_GROWN)
    return grown / ((end - begin) * (1 - 1 / QUARTERS)) * 3600 if creeps else None
