"""Define the stragglers of a run, and convert delays of ranks to stragglers."""

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.records import RankComparison, RankDelay, RankWait, Straggler
from lflops.ranks.significant_delay import SignificantDelay


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
