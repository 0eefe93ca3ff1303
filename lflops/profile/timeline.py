"""One step of one rank on a time axis: modules, operators and kernels.

All times are integer nanoseconds since the step began.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

from lflops.profile.module_names import ancestry
from lflops.profile.records import Count

Step = TypeVar("Step")

# Number of ranks whose timelines a merged profile has: the first ranks.
MOST_RANKS = 8

# Number of timelines of one rank: the step of median length, and the first others.
MOST_STEPS = 4

# Number of slices of modules, and of operators and kernels each, in a timeline: the longest.
MOST_SLICES, MOST_WORK = 2_000, 1_500


class ModuleSlice(Struct, frozen=True, array_like=True, gc=False):
    """The time in which a module or its submodules ran.

    Attributes:
        phase: One of `PHASES`, or a phase of the step outside modules, such as `data`.
        depth: Number of slices around it; 0 is a phase.
        lane: Number of its thread. The slices of a lane are nested.
    """

    fqn: str
    phase: str
    start: Count
    length: Count
    depth: Count
    lane: Count = 0


class TimedWork(Struct, frozen=True, array_like=True, gc=False):
    """An operator on a thread, or a kernel on a stream.

    Attributes:
        lane: Number of the thread or the stream.
    """

    name: str
    start: Count
    length: Count
    lane: Count = 0


Source = Literal["traced", "module_timing"]


class StepTimeline(Struct, frozen=True, kw_only=True):
    """One step of one rank.

    Attributes:
        source: Whether it is a traced step or a module-timing step. Only a traced step has
            operators and kernels.
        length: Length of the step.
        left_out: Number of shorter slices, operators and kernels that were left out.
        step: The number of the step, as in `Step.index`; of a traced step, its number among the
            traced steps.
    """

    rank: Count = 0
    step: Count | None = None
    source: Source
    length: Count
    slices: tuple[ModuleSlice, ...]
    operators: tuple[TimedWork, ...] = ()
    kernels: tuple[TimedWork, ...] = ()
    left_out: tuple[Count, Count, Count] = (0, 0, 0)


class SelfTime(NamedTuple):
    """A time range in which one row was the innermost row that ran."""

    fqn: str
    phase: str
    start: int
    end: int


def nested(stretches: Iterable[SelfTime], lane: int = 0) -> Iterator[ModuleSlice]:
    """Nest the self times of one thread, in the order of time, into slices of modules.

    A slice ends where a module runs that is not below it, so two consecutive calls of a module are
    one slice. In backward, the engine's own time between two modules ends no slice.
    """
    # The outermost first.
    open_slices: list[SelfTime] = []
    for stretch in _without_engine(stretches):
        path = ancestry(stretch.fqn)[::-1]
        common = _common_depth(open_slices, path, stretch.phase)
        while len(open_slices) > common:
            yield _slice(open_slices.pop(), len(open_slices), lane)
        open_slices = [each._replace(end=max(each.end, stretch.end)) for each in open_slices]
        open_slices += [stretch._replace(fqn=row) for row in path[common:]]
    while open_slices:
        yield _slice(open_slices.pop(), len(open_slices), lane)


def _common_depth(open_slices: Sequence[SelfTime], path: Sequence[str], phase: str) -> int:
    """Return how many of the open slices continue."""
    depth = 0
    for each, row in zip(open_slices, path, strict=False):
        if each.fqn != row or each.phase != phase:
            break
        depth += 1
    return depth


def _without_engine(stretches: Iterable[SelfTime]) -> Iterator[SelfTime]:
    """Drop the root's self time in backward that is between two modules."""
    given = list(stretches)
    for number, each in enumerate(given):
        around = [*given[max(number - 1, 0) : number], *given[number + 1 : number + 2]]
        is_between = len(around) == 2 and all(
            other.fqn and other.phase == "backward" for other in around
        )
        if each.fqn or each.phase != "backward" or not is_between:
            yield each


def _slice(stretch: SelfTime, depth: int, lane: int) -> ModuleSlice:
    length = stretch.end - stretch.start
    return ModuleSlice(stretch.fqn, stretch.phase, stretch.start, length, depth, lane)


def longest(
    source: Source,
    length: int,
    slices: Iterable[ModuleSlice],
    operators: Iterable[TimedWork] = (),
    kernels: Iterable[TimedWork] = (),
    *,
    step: int | None = None,
) -> StepTimeline:
    """Make a timeline of the longest slices, operators and kernels, in the order of time.

    A slice is never kept without the slices around it, which are at least as long.
    """
    modules = sorted(slices, key=lambda each: (-each.length, each.depth, each.start))
    kept = sorted(modules[:MOST_SLICES], key=lambda each: (each.lane, each.start, each.depth))
    kept_operators, dropped_operators = _longest_work(operators)
    kept_kernels, dropped_kernels = _longest_work(kernels)
    return StepTimeline(
        source=source,
        step=step,
        length=length,
        slices=tuple(kept),
        operators=kept_operators,
        kernels=kept_kernels,
        left_out=(len(modules) - len(kept), dropped_operators, dropped_kernels),
    )


def median_first(steps: Sequence[Step], length: Callable[[Step], float]) -> list[Step]:
    """Choose the steps that get a timeline: the one of median length, then the first others."""
    by_length = sorted(steps, key=length)
    median = by_length[(len(by_length) - 1) // 2]
    others = [step for step in steps if step is not median]
    return [median, *others[: MOST_STEPS - 1]]


def _longest_work(works: Iterable[TimedWork]) -> tuple[tuple[TimedWork, ...], int]:
    """Return the longest work in the order of time, and how many others there were."""
    ordered = sorted(works, key=lambda work: (-work.length, work.start))
    kept = sorted(ordered[:MOST_WORK], key=lambda work: (work.lane, work.start))
    return tuple(kept), len(ordered) - len(kept)
