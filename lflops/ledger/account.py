"""Define the ledger as a value: seconds of a run by category, its slow steps and its starts."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Literal

from msgspec import Struct

from lflops.display import Displayed
from lflops.profile.series import summed

CATEGORIES = {
    "start_up": "start-up",
    "warm_up": "warm-up",
    "training": "training",
    "slow": "slow steps",
    "compilation": "compilation",
    "validation": "validation",
    "inference": "inference without gradients (rollout, evaluation or generation)",
    "test": "test",
    "predict": "predict",
    "checkpoint_save": "saving checkpoints",
    "checkpoint_load": "loading checkpoints",
    "between_epochs": "between epochs",
    "logging": "logging",
    "gc": "Python's garbage collector",
    "lflops": "lflops itself",
    "after_run": "after the run",
    "down": "down until the restart",
    "repeated": "work lost in a restart",
}
"""The categories of a run's time and their labels.

`training` is divided by phase and `slow` by cause, as in `training/forward` and `slow/loader`.
"""

NO_LOSS = {"training", "warm_up"}
"""Categories of time that is not lost."""

CAUSES = {
    "loader": "waiting for the data loader",
    "gc": "Python's garbage collector",
    "compilation": "compilation",
    "checkpoint": "a checkpoint",
    "validation": "a validation",
    "inference": "inference without gradients",
    "logging": "logging",
    "allocator_retry": "the CUDA allocator freed its cache and tried again",
    "not_scheduled": "the process was not running: other processes used its cores, or it was "
    "stopped",
    "swap": "memory was read from disk (major page faults)",
    "other_rank": "waiting for another rank",
    "larger_batch": "a larger batch",
    "unknown": "unknown",
}
"""The causes of slow steps and their labels."""


class SlowStep(Struct, frozen=True, kw_only=True, tag_field="kind", tag="slow"):
    """A step that took longer than is usual for its batch size.

    Attributes:
        end: Seconds from the beginning of the process to the end of the step.
        seconds: Duration of the step.
        usual: Median duration of steps with a similar batch size, in seconds.
        cost: Extra seconds of this step.
        cause: One of `CAUSES`.
        phase: The phase or category with the largest part of the cost.
    """

    step: int
    end: float
    seconds: float
    usual: float
    cost: float
    cause: str
    phase: str


class StepGroup(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="steps"
):
    """Consecutive steps of one mode. In a short run, each step is a group.

    Attributes:
        first: Number of the first step, as counted by the loggers.
        last: Number of the last step.
        spent: Seconds in each phase, summed over the steps of the group.
        between: Seconds in each category, such as validation, during the steps and directly before
            them. Not included in `spent`.
        longest: Seconds of the longest step.
        steps: The number of steps.
        mode: "profiled" if lflops counted, timed or traced the steps.
        start: Index, in `Ledger.starts`, of the start in which the steps ran.
    """

    first: int
    last: int
    spent: Mapping[str, float]
    between: Mapping[str, float] = {}
    longest: float
    steps: int = 1
    mode: Literal["unprofiled", "profiled", "warm_up"] = "unprofiled"
    start: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of all steps of the group."""
        return sum(self.spent.values())


def in_pairs(groups: Sequence[StepGroup]) -> list[StepGroup]:
    """Join neighbouring groups of the same mode in pairs."""
    joined: list[StepGroup] = []
    for _, neighbours in groupby(groups, key=lambda group: group.mode):
        same = list(neighbours)
        for place in range(0, len(same) - 1, 2):
            joined.append(_joined(same[place], same[place + 1]))
        if len(same) % 2:
            joined.append(same[-1])
    return joined


def _joined(first: StepGroup, second: StepGroup) -> StepGroup:
    return StepGroup(
        first=first.first,
        last=second.last,
        spent=summed([*first.spent.items(), *second.spent.items()]),
        between=summed([*first.between.items(), *second.between.items()]),
        longest=max(first.longest, second.longest),
        steps=first.steps + second.steps,
        mode=first.mode,
    )


_CLASSES_PER_E = 100
"""Number of duration classes per factor of e.

With this number, the middle of a class differs from any duration in the class by at most 0.5 %.
"""


def duration_class(seconds: float) -> int:
    """Return the class of a duration, for counting durations."""
    return round(_CLASSES_PER_E * math.log(max(seconds, 1e-9)))


def percentile(durations: Mapping[int, int], share: float) -> float | None:
    """Return the duration in seconds that the given share of the steps does not exceed.

    `durations` has the number of steps in each class. The result is at most 0.5 % off. It is `None`
    if there are no steps.
    """
    wanted = share * sum(durations.values())
    counted = 0
    for each in sorted(durations):
        counted += durations[each]
        if counted >= wanted:
            return math.exp(each / _CLASSES_PER_E)
    return None


class Span(Struct, frozen=True, kw_only=True):
    """A part of a run.

    Attributes:
        begin: Unix time in seconds.
        seconds: Duration of the span: the sum of `spent`.
        steps: Steps done by the end of the span, as counted by the loggers.
        spent: Seconds by category.
        memory: Resident memory of the process in bytes, or `None` if it was not read.
    """

    begin: float
    seconds: float
    steps: int
    spent: Mapping[str, float]
    memory: int | None = None


class Start(Struct, frozen=True, kw_only=True):
    """One start of a run's process, from its beginning to the last moment in its file.

    Attributes:
        begin: Unix time in seconds.
        seconds: Duration in seconds.
        first_step: Steps that earlier starts had done, as counted by the loggers; 0 if unknown.
        last_step: Steps done when the process ended.
        ended: "finished", the class of the exception that ended it, "exit" if the program did not
            close its run, "killed", or "running".
    """

    begin: float
    seconds: float
    first_step: int
    last_step: int
    ended: str


class Ledger(Struct, Displayed, frozen=True, kw_only=True):
    """Every second of a run, by category.

    `monitor.ledger` is the ledger of a running run; `lflops.load_run` reads a folder.

    Attributes:
        seconds: Seconds by category, which add up to `total`. Some categories are divided by phase
            or cause after a slash.
        total: Seconds from the beginning of the first process to the end of the last process.
        steps: Number of steps that the run has done.
        slow_steps: The costliest slow steps in chronological order.
        starts: The starts of the run's process in chronological order; more than one if the run
            was resumed.
        spans: Parts of the run: recent ones are short, earlier ones long.
        step_groups: All steps of all starts, in the order in which they ran.
        durations: The number of unprofiled steps in each duration class; see `percentile`.
        rank: Rank of the process.
        ranks: Number of ranks.
        others: Number of starts of other runs in the same folder, such as earlier runs or other
            loops.
    """

    seconds: Mapping[str, float]
    total: float
    steps: int
    slow_steps: tuple[SlowStep, ...]
    starts: tuple[Start, ...]
    spans: tuple[Span, ...]
    step_groups: tuple[StepGroup, ...] = ()
    durations: Mapping[int, int] = {}
    rank: int = 0
    ranks: int = 1
    others: int = 0

    def by_group(self) -> dict[str, float]:
        """Return the seconds by category without phases and causes, largest first."""
        totals = summed((group_of(name), value) for name, value in self.seconds.items())
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def unprofiled(self) -> list[StepGroup]:
        """The steps that lflops only timed, without the warm-up."""
        return [group for group in self.step_groups if group.mode == "unprofiled"]


def group_of(category: str) -> str:
    """Return the category without its phase or cause."""
    return category.partition("/")[0]


QUARTERS = 4
"""Memory grows if it increases from each quarter of the last start to the next quarter."""

GROWN = 0.1
"""Memory must grow by at least this share from the first quarter to the last quarter."""

LEAST_GROWN = 1 << 28
"""Memory must grow by at least this many bytes from the first quarter to the last quarter."""

FEWEST_SPANS = 20
"""Growth is computed only if memory is known for at least this many spans."""

GROWING = {"start_up", "warm_up", "compilation"}
"""Categories in which memory grows in any run."""


def memory_growth(ledger: Ledger) -> float | None:
    """Return the growth of the process's memory over its last start, in bytes per hour.

    Returns `None` if memory does not grow, or if it is known for too few spans.
    """
    last_begin = ledger.starts[-1].begin
    spans = []
    for span in ledger.spans:
        is_steady = span.begin >= last_begin and span.spent.keys().isdisjoint(GROWING)
        if is_steady and span.memory is not None:
            spans.append(span)
    if len(spans) < FEWEST_SPANS:
        return None
    begin = spans[0].begin
    seconds = spans[-1].begin + spans[-1].seconds - begin
    quarters: list[list[int]] = [[] for _ in range(QUARTERS)]
    for span in spans:
        middle = span.begin + span.seconds / 2 - begin
        place = int(middle / seconds * QUARTERS)
        quarters[min(max(place, 0), QUARTERS - 1)].append(span.memory or 0)
    if not all(quarters):
        return None
    usual = [median(quarter) for quarter in quarters]
    grown = usual[-1] - usual[0]
    is_growing = sorted(set(usual)) == usual
    if not is_growing or grown < max(GROWN * usual[0], LEAST_GROWN):
        return None
    hours = seconds * (1 - 1 / QUARTERS) / 3600
    return grown / hours
