"""Describe a straggler: a rank that the other ranks wait for, and the place in which it is slow."""

from typing import Literal

from msgspec import Struct

from lflops.profile.records import RankComparison, RankWait
from lflops.ranks.significant_delay import SignificantDelay

Cause = Literal["work", "chip", "thread", "preempted"]
"""The reason why a rank takes longer.

It has more work, it has another chip, another thread of its process computes, or the system gave
its core to another process.
"""


class Straggler(Struct, frozen=True, kw_only=True):
    """A straggler: one rank and the place in which it takes longer than the other ranks.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules;
            `layers.*.mlp` means several modules together.
        phase: One of `PHASES`, `data`, `transfer`, `clip`, `validation`, `checkpoint`. `all` means
            everything that the rank's device does, and `stage` means the rank's part of a pipeline.
        modules: Number of modules.
        seconds_lost: Mean cost per step.
        pattern: `steady` if the rank is slow in nearly every step, `intermittent` if it is slow in
            some steps.
        slow_steps: Number of steps in which the rank is slow; `None` if single steps are unknown.
        steps: Number of compared steps; `None` if single steps are unknown.
        seconds: Median time of the slow rank.
        usual: Median time of the other ranks.
        cause: The reason, if it is known.
        work_ratio: Ratio of the rank's work to the work of the other ranks, if more work is the
            cause.
        since: First slow step, if the rank was not slow before.
        is_whole_phase: Whether the place is forward or backward as a whole, because no
            module-timing step shows the module.
        until: Last step in which the rank was slow, if it is not slow any more.
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
        """Ratio of the slow rank's time to the time of the other ranks.

        `None` if the other ranks take no time, or if the rank is slow in only some steps.
        """
        if not self.usual or self.pattern != "steady":
            return None
        return self.seconds / self.usual


class Stragglers(Struct, frozen=True, kw_only=True):
    """The time that a run loses because its ranks are not equally fast.

    Attributes:
        rows: The stragglers, the most expensive first.
        waits: The places where ranks wait for another rank, the longest wait first.
        lost_share: Share by which a step would be shorter if all ranks were as fast as the median
            rank; `None` if unknown.
        step_seconds: Median time of a compared step; `None` if ranks were not compared.
        too_few_steps: Number of compared steps, if there are too few to flag a rank.
        is_alternating: Whether ranks alternate: every rank is late in some steps, and no single
            rank is slow.
        lengths_differ: Whether ranks alternate because the sizes of their batches differ.
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


def straggler_of(found: SignificantDelay, compared: RankComparison) -> Straggler:
    """Return the straggler with this delay."""
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
