"""One step of one rank in time: slices of modules, operators and kernels.

All times are integer nanoseconds since the step began.
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Literal, NamedTuple

from msgspec import Struct

from lflops.profile.module_names import ancestry
from lflops.profile.records import Count

# a merged profile has the timelines of so many ranks, the first ones
MOST_RANKS = 8

MOST_SLICES, MOST_WORK = 2_000, 1_500
"""A timeline has so many slices of modules, operators and kernels at most, each the longest of their kind."""


class ModuleSlice(Struct, frozen=True, array_like=True, gc=False):
    """A module with all modules below it, from its first to its last moment.

    Attributes:
        phase: One of `PHASES`, or a phase of the step outside of modules, as `data`.
        depth: How many slices it is within; 0 is a phase.
        lane: Slices of one lane are nested; each of several threads has its lane.
    """

    row: str
    phase: str
    start: Count
    length: Count
    depth: Count
    lane: Count = 0


class TimedWork(Struct, frozen=True, array_like=True, gc=False):
    """An operator on a thread, or a kernel on a stream.

    `lane` is the number of the thread or the stream.
    """

    name: str
    start: Count
    length: Count
    lane: Count = 0


Source = Literal["traced", "module_timing"]


class StepTimeline(Struct, frozen=True, kw_only=True):
    """One step of one rank.

    Attributes:
        source: Whether it is a traced step or one with hooks on its modules. Only a traced step has
            operators and kernels.
        length: Of the step.
        left_out: The number of shorter slices, operators and kernels that are not in it.
    """

    rank: Count = 0
    source: Source
    length: Count
    slices: tuple[ModuleSlice, ...]
    operators: tuple[TimedWork, ...] = ()
    kernels: tuple[TimedWork, ...] = ()
    left_out: tuple[Count, Count, Count] = (0, 0, 0)


class SelfTime(NamedTuple):
    """A stretch in which one row was the innermost one that ran."""

    row: str
    phase: str
    start: int
    end: int


def nested(stretches: Iterable[SelfTime], lane: int = 0) -> Iterator[ModuleSlice]:
    """Slices of modules, each around those of the modules below it, of the stretches of one thread in the order of time."""
    # A slice ends where its module is followed by one that is not below it. So two calls of a
    # module in a row are one slice. In backward, the engine's own time between two nodes ends none.
    # the outermost first
    open_slices: list[SelfTime] = []
    for stretch in _without_engine(stretches):
        path = ancestry(stretch.row)[::-1]
        goes_on = (
            (each.row, each.phase) == (row, stretch.phase)
            for each, row in zip(open_slices, path, strict=False)
        )
        common = sum(takewhile(bool, goes_on))
        while len(open_slices) > common:
            yield _slice(open_slices.pop(), len(open_slices), lane)
        open_slices = [each._replace(end=max(each.end, stretch.end)) for each in open_slices]
        open_slices += [stretch._replace(row=row) for row in path[common:]]
    while open_slices:
        yield _slice(open_slices.pop(), len(open_slices), lane)


def _without_engine(stretches: Iterable[SelfTime]) -> Iterator[SelfTime]:
    """The stretches without those of the root in backward that are between two modules."""
    given = list(stretches)
    for before, each, after in zip([None, *given], given, [*given[1:], None], strict=False):
        phases = {each.phase, before and before.phase, after and after.phase}
        is_between = (
            before is not None
            and before.row
            and after is not None
            and after.row
            and phases == {"backward"}
        )
        if each.row or not is_between:
            yield each


def _slice(stretch: SelfTime, depth: int, lane: int) -> ModuleSlice:
    return ModuleSlice(
        stretch.row, stretch.phase, stretch.start, stretch.end - stretch.start, depth, lane
    )


def longest(
    source: Source,
    length: int,
    slices: Iterable[ModuleSlice],
    operators: Iterable[TimedWork] = (),
    kernels: Iterable[TimedWork] = (),
) -> StepTimeline:
    """A timeline of the longest slices, operators and kernels, in the order of time.

    The slice around one is no shorter.
    """
    modules = sorted(slices, key=lambda each: (-each.length, each.depth, each.start))
    works = [
        sorted(each, key=lambda work: (-work.length, work.start)) for each in (operators, kernels)
    ]
    return StepTimeline(
        source=source,
        length=length,
        slices=tuple(
            sorted(modules[:MOST_SLICES], key=lambda each: (each.lane, each.start, each.depth))
        ),
        operators=tuple(sorted(works[0][:MOST_WORK], key=lambda work: (work.lane, work.start))),
        kernels=tuple(sorted(works[1][:MOST_WORK], key=lambda work: (work.lane, work.start))),
        left_out=(
            max(len(modules) - MOST_SLICES, 0),
            max(len(works[0]) - MOST_WORK, 0),
            max(len(works[1]) - MOST_WORK, 0),
        ),
    )
