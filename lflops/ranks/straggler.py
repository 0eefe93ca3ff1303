"""Describe a straggler: a rank that the other ranks wait for, and the place in which it is slow.

A place is a module in a phase, or a phase of the step outside modules.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.records import RankComparison, RankDelay, RankWait
from lflops.ranks.significant_delay import SignificantDelay

Cause = Literal["work", "chip", "thread", "preempted"]
"""The reason why a rank takes longer.

The rank has more work (`work`), it runs on a different chip (`chip`), another thread of its process
was computing (`thread`), or the operating system gave its CPU core to another process
(`preempted`).
"""


class Straggler(Struct, frozen=True, kw_only=True):
    """A straggler: a rank that the other ranks wait for, and the place in which it is slow.

    A place is a module in a phase, or a phase of the step outside modules.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules;
            `layers.*.mlp` means several modules together.
        phase: One of `PHASES`, or `data`, `transfer`, `clip`, `validation` or `checkpoint`. `all`
            means everything that the rank's device does, and `stage` means the rank's part of a
            pipeline.
        modules: Number of modules that `module` stands for.
        seconds_lost: Cost in seconds per step: the extra time that makes the other ranks wait.
        pattern: `steady` if the rank is slow in nearly every step, `intermittent` if it is slow in
            some steps.
        slow_steps: Number of steps in which the rank is slow; `None` if the times of single steps
            are unknown.
        steps: Number of compared steps; `None` if the times of single steps are unknown.
        seconds: Median time of the slow rank in this place.
        usual: Median time of the other ranks in this place.
        cause: The reason why the rank is slow; `None` if unknown.
        work_ratio: Ratio of the rank's work to the work of the other ranks; `None` unless `cause`
            is `work`.
        since: Index of the first slow step; `None` unless the rank became slow during the run.
        until: Index of the last step for which the rank was reported as slow; `None` if the rank is
            still slow.
        is_whole_phase: Whether the place is the whole forward or backward pass, because
            module-timing steps do not show the slow module.
    """

    module: str
    phase: str
    modules: int
    slow_rank: int
    seconds_lost: float
    pattern: Literal["steady", "intermittent"]
    slow_steps: int | None
    steps: int | None
    seconds: float
    usual: float
    cause: Cause | None = None
    work_ratio: float | None = None
    since: int | None = None
    until: int | None = None
    is_whole_phase: bool = False

    @property
    def ratio(self) -> float | None:
        """Ratio of `seconds` to `usual`.

        `None` if the other ranks take no time, or if the rank is slow in only some steps.
        """
        if not self.usual or self.pattern != "steady":
            return None
        return self.seconds / self.usual


class Stragglers(Struct, frozen=True, kw_only=True):
    """The time that a run loses because its ranks are not equally fast.

    Attributes:
        rows: The stragglers, sorted by cost in descending order.
        waits: The places (modules in a phase) where ranks wait for another rank, sorted by waiting
            time in descending order.
        lost_share: Share by which a step would be shorter if the last rank arrived at each
            collective together with the median rank. `None` if unknown.
        step_seconds: Median time of a compared step; `None` if ranks were not compared.
        too_few_steps: Number of compared steps if there are too few to flag a rank; otherwise
            `None`.
        is_alternating: Whether different ranks are late in different steps, so that no single rank
            is slow. In this case, `rows` is empty.
        lengths_differ: Whether different ranks are late because their batches differ in size.
        busy_machine: Whether ranks are late because other programs use their processors.
    """

    rows: tuple[Straggler, ...] = ()
    waits: tuple[RankWait, ...] = ()
    lost_share: float | None = None
    step_seconds: float | None = None
    too_few_steps: int | None = None
    is_alternating: bool = False
    lengths_differ: bool = False
    busy_machine: bool = False

    @property
    def worst_share(self) -> float | None:
        """Share of a step that the worst straggler costs; `None` without a straggler."""
        if not self.rows or not self.step_seconds:
            return None
        return self.rows[0].seconds_lost / self.step_seconds


def in_module_of(row: Straggler, place: Straggler | RankDelay) -> Straggler:
    """Return a copy of `row` with the module and the phase of `place`."""
    return replace(
        row, module=place.module, phase=place.phase, modules=place.modules, is_whole_phase=False
    )


def straggler_of(found: SignificantDelay, compared: RankComparison) -> Straggler:
    """Convert a significant delay in the comparison `compared` to a `Straggler` without a cause."""
    delay = found.delay
    are_steps_known = not compared.from_quartiles
    return Straggler(
        module=delay.module,
        phase=delay.phase,
        modules=delay.modules,
        slow_rank=delay.rank,
        seconds_lost=found.seconds,
        pattern=found.pattern,
        slow_steps=found.slow_steps if are_steps_known else None,
        steps=compared.steps if are_steps_known else None,
        seconds=delay.seconds,
        usual=delay.usual,
    )
