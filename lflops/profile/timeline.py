"""Define the timeline of a step on one rank: when its modules, operators and kernels ran.

All times are integer nanoseconds since the step began. A slice is a time range in which a module or
one of its submodules ran.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

from lflops.profile.module_names import ancestry
from lflops.profile.records import Count

Step = TypeVar("Step")

# Maximum number of ranks whose timelines are in a merged profile. The first ranks are chosen.
MOST_RANKS = 8

# Maximum number of steps of a rank that have a timeline: the step with the median length, and the
# first of the other steps.
MOST_STEPS = 4

# Maximum number of module slices in a timeline. The longest slices are kept.
MOST_SLICES = 2_000

# Maximum number of operators in a timeline, and also of kernels. The longest ones are kept.
MOST_WORK = 1_500


class ModuleSlice(Struct, frozen=True, array_like=True, gc=False):
    """A time range in which a module or its submodules ran.

    Attributes:
        fqn: Name of the module.
        phase: One of `PHASES`, or a phase of the step outside modules, such as `data`.
        start: Nanoseconds from the beginning of the step to the beginning of the slice.
        length: Duration in nanoseconds.
        depth: Number of slices that contain this slice; 0 for the root or a phase outside modules.
        lane: Number of the thread. Two slices of one thread are disjoint, or one contains the
            other.
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
        name: Name of the operator or kernel in the trace, such as `aten::addmm`.
        start: Nanoseconds from the beginning of the step.
        length: Duration in nanoseconds.
        lane: Number of the thread or the stream.
    """

    name: str
    start: Count
    length: Count
    lane: Count = 0


Source = Literal["traced", "module_timing"]


class StepTimeline(Struct, frozen=True, kw_only=True):
    """The timeline of one step of one rank.

    Attributes:
        rank: The rank. 0 if the profile is not merged from ranks.
        step: Number of the step, as in `Step.index`. For a traced step, its position among the
            traced steps.
        source: Whether the step is a traced step or a module-timing step. Only a traced step has
            operators and kernels.
        length: Duration of the step in nanoseconds.
        slices: The time ranges of modules and phases, sorted by lane and then by start.
        operators: The operators that no other operator calls, sorted by lane and then by start.
        kernels: The kernels, copies and fills on the device, sorted by lane and then by start.
        left_out: The number of slices, the number of operators and the number of kernels that were
            left out so that the timeline stays small. The shortest are left out.
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
    """A time range in which one module ran, but none of its submodules.

    Attributes:
        fqn: Name of the module.
        phase: The phase of the step.
        start: Nanoseconds from the beginning of the step to the beginning of the range.
        end: Nanoseconds from the beginning of the step to the end of the range.
    """

    fqn: str
    phase: str
    start: int
    end: int


def nested(self_times: Iterable[SelfTime], lane: int = 0) -> Iterator[ModuleSlice]:
    """Convert the self times of one thread into nested slices of modules.

    The slice of a module ends when a module outside it runs. So two consecutive calls of a module
    are one slice. In backward, the time of the autograd engine between two modules does not end a
    slice.

    Args:
        self_times: The self times in chronological order.
        lane: Number of the thread.
    """
    # The slices that have not ended, with the outermost slice first.
    open_slices: list[SelfTime] = []
    for time in _without_engine(self_times):
        path = ancestry(time.fqn)[::-1]
        common = _common_depth(open_slices, path, time.phase)
        while len(open_slices) > common:
            ended = open_slices.pop()
            yield _slice(ended, len(open_slices), lane)
        for depth, outer in enumerate(open_slices):
            open_slices[depth] = outer._replace(end=max(outer.end, time.end))
        open_slices += [time._replace(fqn=fqn) for fqn in path[common:]]
    while open_slices:
        ended = open_slices.pop()
        yield _slice(ended, len(open_slices), lane)


def _common_depth(open_slices: Sequence[SelfTime], path: Sequence[str], phase: str) -> int:
    """Return how many of the open slices also contain the next self time.

    The slices are compared from the outermost to the innermost, until one does not contain the self
    time.

    Args:
        open_slices: The slices that have not ended, with the outermost first.
        path: The names of the next module and of all modules above it, with the root first.
        phase: The phase of the next self time.
    """
    depth = 0
    for each, fqn in zip(open_slices, path, strict=False):
        if each.fqn != fqn or each.phase != phase:
            break
        depth += 1
    return depth


def _without_engine(self_times: Iterable[SelfTime]) -> Iterator[SelfTime]:
    """Drop each self time of the root between two modules in backward.

    The autograd engine runs in this time, not the root.
    """
    times = list(self_times)
    for number, time in enumerate(times):
        is_first_or_last = number in {0, len(times) - 1}
        if time.fqn or time.phase != "backward" or is_first_or_last:
            yield time
            continue
        before = times[number - 1]
        after = times[number + 1]
        if not _is_module_in_backward(before) or not _is_module_in_backward(after):
            yield time


def _is_module_in_backward(time: SelfTime) -> bool:
    return time.fqn != "" and time.phase == "backward"


def _slice(time: SelfTime, depth: int, lane: int) -> ModuleSlice:
    return ModuleSlice(time.fqn, time.phase, time.start, time.end - time.start, depth, lane)


def longest(
    source: Source,
    length: int,
    slices: Iterable[ModuleSlice],
    operators: Iterable[TimedWork] = (),
    kernels: Iterable[TimedWork] = (),
    *,
    step: int | None = None,
) -> StepTimeline:
    """Make a timeline of the longest slices, operators and kernels, in chronological order.

    If a slice is kept, the slices that contain it are kept too, because they are at least as long.
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
    """Return the steps that get a timeline: at most `MOST_STEPS`.

    The step with the median length comes first. The first of the other steps follow.
    """
    by_length = sorted(steps, key=length)
    median = by_length[(len(by_length) - 1) // 2]
    others = [step for step in steps if step is not median]
    return [median, *others[: MOST_STEPS - 1]]


def _longest_work(works: Iterable[TimedWork]) -> tuple[tuple[TimedWork, ...], int]:
    """Return the longest operators or kernels, and the number of operators or kernels left out.

    The result is sorted by lane (the thread or stream), then by time.
    """
    ordered = sorted(works, key=lambda work: (-work.length, work.start))
    kept = sorted(ordered[:MOST_WORK], key=lambda work: (work.lane, work.start))
    return tuple(kept), len(ordered) - len(kept)
