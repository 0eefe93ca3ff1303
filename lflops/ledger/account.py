"""Define the ledger that users read: seconds of a run by category, slow steps and starts.

A start is one process of the run. A run that was resumed from a checkpoint has several starts. If
`trainer.test` follows `trainer.fit` in one process, it is a separate start of the same run. The
number of steps that a run has done is the step on the x-axis of its loggers.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Literal

from msgspec import Struct

from lflops.display import Displayed
from lflops.profile.series import sum_known, summed

CATEGORIES = {
    "start_up": "start-up",
    "warm_up": "warm-up",
    "training": "training",
    "slow": "slow steps",
    "compilation": "compilation",
    "validation": "validation",
    "inference": "inference without gradients (rollout, evaluation or generation)",
    "test": "test",
    "predict": "prediction",
    "checkpoint_save": "saving checkpoints",
    "checkpoint_load": "loading checkpoints",
    "between_epochs": "between epochs",
    "logging": "logging",
    "gc": "Python's garbage collector",
    "lflops": "lflops itself",
    "after_run": "after training",
    "down": "stopped until the restart",
    "repeated": "work lost in a restart",
}
"""The categories of a run's time, with their labels for reports.

Two categories are divided further: `training` by phase, as in `training/forward`, and `slow` by the
cause of the slow step, as in `slow/loader`.
"""

NO_LOSS = {"training", "warm_up"}
"""Categories that do not count as lost time. The time in all other categories is lost."""

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
"""The causes of slow steps, with their labels for reports."""


class SlowStep(Struct, frozen=True, kw_only=True, tag_field="kind", tag="slow"):
    """A step that took longer than is usual for its batch size.

    Attributes:
        step: Number of the step, from 0.
        end: Seconds from the beginning of the start (process) to the end of the step.
        seconds: Duration of the step.
        usual: Median duration of steps with a similar batch size, in seconds.
        cost: Lost time in seconds: the time by which the step exceeded `usual`. If validation or
            something else interrupted the step, the duration of the interruption.
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
    """Consecutive steps of the same mode. The ledger keeps only sums over these steps.

    A short run has one group per step. In a long run, neighbouring groups are joined.

    Attributes:
        first: Number of the first step. Steps are numbered from 0, as in profiled windows.
        last: Number of the last step.
        spent: Seconds in each phase, summed over the steps of the group.
        between: Seconds in each category outside the phases of the steps, such as validation. The
            time between two steps belongs to the later step.
        longest: Seconds of the longest step.
        steps: The number of steps.
        elements: Number of elements of the tensors in the batches of all steps, or `None` if it is
            unknown.
        mode: "warm_up" for the first steps of a start (process), "profiled" if lflops counted,
            timed or traced the steps, otherwise "unprofiled".
        start: Index in `Ledger.starts` of the start (process) in which the steps ran.
    """

    first: int
    last: int
    spent: Mapping[str, float]
    between: Mapping[str, float] = {}
    longest: float
    steps: int = 1
    elements: int | None = None
    mode: Literal["unprofiled", "profiled", "warm_up"] = "unprofiled"
    start: int = 0

    @property
    def seconds(self) -> float:
        """Total duration of the steps, in seconds."""
        return sum(self.spent.values())


def in_pairs(groups: Sequence[StepGroup]) -> list[StepGroup]:
    """Join neighbouring groups of the same mode in pairs, which about halves their number."""
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
        elements=sum_known((first.elements, second.elements)),
        mode=first.mode,
    )


_CLASSES_PER_E = 100
"""Number of duration classes between a duration and e (2.718) times this duration.

A duration class is a bin of a histogram of step durations. With this number of classes, the middle
of a class differs from any duration in the class by at most 0.5 %.
"""


def duration_class(seconds: float) -> int:
    """Return the number of the histogram bin to which a duration belongs."""
    return round(_CLASSES_PER_E * math.log(max(seconds, 1e-9)))


def percentile(durations: Mapping[int, int], share: float) -> float | None:
    """Return the duration in seconds that the given share of the steps does not exceed.

    The error of the result is at most 0.5 %. Returns `None` if there are no steps.

    Args:
        durations: Histogram of the durations: the number of steps in each `duration_class`.
        share: The share of the steps, such as 0.5 for the median.
    """
    wanted = share * sum(durations.values())
    counted = 0
    for each in sorted(durations):
        counted += durations[each]
        if counted >= wanted:
            return math.exp(each / _CLASSES_PER_E)
    return None


class Span(Struct, frozen=True, kw_only=True):
    """A section of a run, from a few seconds to a few hours long.

    Attributes:
        begin: Unix time at which the span begins, in seconds.
        seconds: Duration of the span: the sum of `spent`.
        steps: Number of steps that the run has done by the end of the span.
        spent: Seconds by category.
        memory: Resident memory of the process in bytes, or `None` if it was not read.
    """

    begin: float
    seconds: float
    steps: int
    spent: Mapping[str, float]
    memory: int | None = None


class Start(Struct, frozen=True, kw_only=True):
    """One process of a run. A run that was resumed has several starts.

    Attributes:
        begin: Unix time at which the account of this start begins, in seconds. Usually, this is the
            beginning of the process.
        seconds: Seconds from `begin` to the last entry in the ledger file.
        first_step: Number of steps that the run had done before this start. 0 if unknown.
        last_step: Number of steps that the run had done when this start ended.
        ended: How the process ended: "finished", the class name of an exception, "exit" if the
            program ended without closing the run, or "killed". "running" if it has not ended.
    """

    begin: float
    seconds: float
    first_step: int
    last_step: int
    ended: str


class Ledger(Struct, Displayed, frozen=True, kw_only=True):
    """The time account of a run: every second belongs to one category.

    `monitor.ledger` is the ledger of the current run. `lflops.load_run` reads the ledger of a
    finished run from its folder.

    Attributes:
        seconds: Seconds by category, which add up to `total`. Some categories are divided by phase
            or by cause, as in `training/forward` and `slow/loader`.
        total: Seconds from the beginning of the first process to the end of the last process.
        steps: Number of steps that the run has done.
        slow_steps: The slow steps with the highest cost, in chronological order.
        starts: The processes of the run in chronological order. There are several if the run was
            resumed.
        spans: Consecutive sections of the run. Recent sections are shorter than earlier sections.
        step_groups: All steps of all starts, in the order in which they ran.
        durations: Histogram of the durations of unprofiled steps: the number of steps in each
            duration class. `percentile` reads it.
        rank: Rank of the process.
        ranks: Number of ranks.
        device: Type of the device on which the model was trained, such as "cuda". Empty if unknown.
            On a device other than the CPU, the times of phases are those of the host, which
            launches kernels and does not wait for them.
        others: Number of processes of other runs whose ledgers are in the same folder, such as
            earlier runs.
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
    device: str = ""
    others: int = 0

    @property
    def counted_steps(self) -> int:
        """Number of steps whose times are in the ledger, at least 1.

        `steps` may also include the steps of an earlier run that was continued in a new folder.
        """
        return sum(group.steps for group in self.step_groups) or max(self.steps, 1)

    def by_group(self) -> dict[str, float]:
        """Return the seconds by category, largest first, without the division by phase and cause.

        For example, `training` contains the seconds of `training/forward` and `training/backward`.
        """
        totals = summed((group_of(name), value) for name, value in self.seconds.items())
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model runs on a CPU, so that the host's times are the times of the work."""
        return self.device in {"", "cpu"}

    @property
    def unprofiled(self) -> list[StepGroup]:
        """The groups of unprofiled steps. Warm-up steps are not included."""
        return [group for group in self.step_groups if group.mode == "unprofiled"]


def group_of(category: str) -> str:
    """Return the category without its phase or cause: `training` for `training/forward`."""
    return category.partition("/")[0]


QUARTERS = 4
"""Number of sections of the last start (process) that are compared to find growing memory.

Memory grows if its median increases from each of these quarters to the next.
"""

GROWN = 0.1
"""Smallest growth of the memory that is reported, as a share of the memory in the first quarter.

The growth is measured from the first to the last quarter.
"""

LEAST_GROWN = 1 << 28
"""Smallest growth of the memory that is reported, in bytes.

The growth is measured from the first to the last quarter.
"""

FEWEST_SPANS = 20
"""Smallest number of spans (sections of a run) from whose memory the growth is computed."""

GROWING = {"start_up", "warm_up", "compilation"}
"""Categories in which memory grows in any run. Spans with time in these categories are left out."""


def memory_growth(ledger: Ledger) -> float | None:
    """Return how fast the memory of the run's last process grows, in bytes per hour.

    Returns `None` if memory does not grow, or if too few spans (sections of the run) have a known
    memory.
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
    # The time from the middle of the first quarter to the middle of the last quarter.
    hours = seconds * (1 - 1 / QUARTERS) / 3600
    return grown / hours
