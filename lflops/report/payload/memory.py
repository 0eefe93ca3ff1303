"""Build the data of the page's Memory view (live bytes over a step) and of its Timeline view."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis
from lflops.hardware.chips import Hardware
from lflops.memory.peak import fold_storages, usable_bytes
from lflops.profile.profile import Memory, Moment, Profile
from lflops.profile.records import ByCategory, Phase
from lflops.profile.series import extremes
from lflops.profile.timeline import ModuleSlice, StepTimeline
from lflops.report.payload.columns import Columns, Value, exact, lists
from lflops.report.text import savings

POINTS: Final = 2_000
"""Maximum number of points in a chart of memory over time."""


class LiveMemoryShown(Struct, frozen=True, kw_only=True):
    """A chart of live bytes over time, in which the peak is marked.

    The x-axis has either the operators of a step, or the events (allocations and frees) that a
    memory allocator recorded. The peak is the point with the most live bytes. But if the allocator
    ran out of memory, the peak is the request that failed.

    Attributes:
        operators: Number of all operators or events, including those without a point.
        peak_bytes: Live bytes at the peak.
        peak: Index of the peak in `points`. `None` if it is not one of the points.
        chip: Name of the chip. `None` if the memory of the chip is unknown.
        capacity_bytes: Memory of the chip that a process can use. `None` if unknown.
        points: A table of at most `POINTS` operators or events with their live bytes. It also has a
            column for each category of memory that ever has bytes.
        categories: Names of the columns of categories. The first is drawn at the bottom.
        by_category: Live bytes of each category at the peak.
    """

    operators: int
    peak_bytes: Value
    peak: int | None
    chip: str | None
    capacity_bytes: float | None
    points: Columns
    categories: tuple[str, ...]
    by_category: list[tuple[str, Value]]


def chip_memory(chip: Hardware | None) -> tuple[str, float] | tuple[None, None]:
    """Return a chip's name and its bytes that a process can use; two `None` if they are unknown."""
    usable = None if chip is None else usable_bytes(chip)
    if chip is None or usable is None:
        return None, None
    return chip.name, usable


_HOLDERS = 24
"""Maximum number of modules that are listed with the bytes of their tensors at the peak."""

_STACKED = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
"""The categories of memory in the order in which they are stacked, the first at the bottom.

Categories of tensors that live long come first.
"""


class MemoryShown(LiveMemoryShown, frozen=True, kw_only=True):
    """The Memory view: the live bytes before each operator of a step.

    In a long step, groups of consecutive operators are combined. In each group, only the operators
    with the fewest and the most live bytes have points. The peak is reached while an operator runs,
    so it is drawn halfway between this operator and the next one.

    Attributes:
        rank: The shown rank, which has the largest peak. `None` if no rank reported this peak.
        modules: Modules whose tensors are alive at the peak, with the bytes of these tensors, the
            most bytes first. Identical modules, such as the layers of a transformer, are one entry.
        more: Number of modules that are left out of `modules`, and their bytes.
        largest: Number of storages in `alive` before storages of identical modules are combined.
        alive: The largest storages that are alive at the peak. The storages of identical modules
            are one entry, and its `pattern` is the name of these modules with `*` for the index,
            such as `layers.*`.
        savings: Ways to lower the peak. Each has a description, the maximum bytes that it saves,
            and its cost as text.
    """

    source: str
    rank: int | None
    modules: Columns
    more: tuple[int, Value]
    largest: int
    alive: Columns
    savings: list[tuple[str, Value, str]]


class _Point(Struct, frozen=True):
    at: float
    operator: str
    module: str
    phase: Phase
    live: int
    parts: ByCategory


def memory(analysis: Analysis) -> MemoryShown | None:
    """Return the data of the Memory view, or `None` if memory was not counted."""
    profile = analysis.profile
    counted = profile.memory
    if counted is None or not counted.timeline:
        return None
    chip, capacity = chip_memory(profile.run.hardware)
    points = list(_points(counted, analysis.peak_moment))
    parts = [point.parts for point in points]
    categories = []
    for name in _STACKED:
        if any(getattr(part, name) for part in parts):
            categories.append(name)
    by_category = []
    for name in _STACKED:
        if counted.by_category.get(name):
            by_category.append((name, exact(counted.by_category[name])))
    listed = analysis.holders[:_HOLDERS]
    others = analysis.holders[_HOLDERS:]
    return MemoryShown(
        source=counted.source,
        rank=_rank_of_peak(profile, counted.peak_bytes),
        operators=counted.timeline[-1].index + 1,
        peak_bytes=exact(counted.peak_bytes),
        peak=_index_of_peak(points),
        chip=chip,
        capacity_bytes=capacity,
        points=lists(points, ("at", "operator", "module", "phase", "live"))
        | lists(parts, categories),
        categories=tuple(categories),
        by_category=by_category,
        modules=lists(listed, ("name", "modules", "bytes")),
        more=(len(others), exact(sum(holder.bytes for holder in others))),
        largest=len(counted.alive),
        alive=lists(
            fold_storages(counted, analysis.patterns),
            ("category", "operator", "module", "pattern", "phase", "number", "each_bytes"),
        ),
        savings=[(what, exact(nbytes), cost) for what, nbytes, cost in savings(analysis)],
    )


def _rank_of_peak(profile: Profile, peak_bytes: int) -> int | None:
    for rank in profile.ranks:
        if rank.peak_bytes == peak_bytes:
            return rank.rank
    return None


def _index_of_peak(points: Sequence[_Point]) -> int | None:
    """Return the index of the peak in the points, or `None` if it is not among them.

    The peak is the only point whose position is not a whole number.
    """
    for index, point in enumerate(points):
        if point.at % 1:
            return index
    return None


def _points(counted: Memory, reached: Moment | None) -> Iterator[_Point]:
    """Yield the points of the chart in the order of the operators.

    `reached` is the operator that reached the peak. Its own point has the bytes that were alive
    before it ran, so the peak is an additional point between this operator and the next one.
    """
    peaks = []
    live = []
    for index, moment in enumerate(counted.timeline):
        live.append(moment.live_bytes)
        if moment is reached:
            peaks.append(index)
    for index in extremes(live, POINTS - 1, peaks or [0]):
        moment = counted.timeline[index]
        point = _Point(
            at=moment.index,
            operator=moment.operator,
            module=moment.module,
            phase=moment.phase,
            live=moment.live_bytes,
            parts=moment.by_category,
        )
        yield point
        if moment is reached:
            yield replace(
                point,
                at=moment.index + 0.5,
                live=counted.peak_bytes,
                parts=ByCategory.of(counted.by_category),
            )


class RankTimeline(Struct, frozen=True, kw_only=True):
    """The timeline of one step of a rank. All times are nanoseconds since the step began.

    Attributes:
        step: Number of the step. If the step was traced, its number among the traced steps.
        source: Whether the step was a traced step or a module-timing step.
        length: Duration of the step.
        names: Names of modules, operators and kernels. To save space, the tables have a column
            `name` with indices into this list.
        slices: Time ranges in which a module or phase ran.
        left_out: Number of slices, of operators and of kernels that are left out because they are
            too short.
    """

    rank: int
    step: int | None
    source: str
    length: int
    names: list[str]
    slices: Columns
    operators: Columns
    kernels: Columns
    left_out: tuple[int, int, int]


class TimelineShown(Struct, frozen=True, kw_only=True):
    """The data of the Timeline view, which is stored separately from the payload of the window.

    Attributes:
        ranks: One or several steps of each rank. The step with the median duration comes first.
        memory_at: Estimated time of each point of the Memory view, in nanoseconds since the first
            step in `ranks` began. `None` if the times are unknown.
    """

    ranks: tuple[RankTimeline, ...]
    memory_at: list[int] | None


def timeline(analysis: Analysis, memory: MemoryShown | None) -> TimelineShown | None:
    """Return the data of the Timeline view, or `None` if no step has a timeline."""
    steps = analysis.profile.timelines
    if not steps:
        return None
    return TimelineShown(
        ranks=tuple(map(_of_rank, steps)), memory_at=_memory_at(analysis, steps[0], memory)
    )


def _of_rank(step: StepTimeline) -> RankTimeline:
    numbers: dict[str, int] = {}

    def columns(rows: Sequence[Struct], fields: tuple[str, ...], name: str = "name") -> Columns:
        names: list[Value] = []
        for row in rows:
            names.append(numbers.setdefault(getattr(row, name), len(numbers)))
        return {"name": names} | lists(rows, fields)

    work = ("start", "length", "lane")
    slices = columns(step.slices, ("phase", "start", "length", "depth", "lane"), "fqn")
    operators = columns(step.operators, work)
    kernels = columns(step.kernels, work)
    return RankTimeline(
        rank=step.rank,
        step=step.step,
        source=step.source,
        length=step.length,
        names=list(numbers),
        slices=slices,
        operators=operators,
        kernels=kernels,
        left_out=step.left_out,
    )


_UPDATE = ("", "optimizer")


class _Anchor(NamedTuple):
    """An operator of the counting step, and the time when a timed step reached the operator.

    In the counting step, lflops counts operators and memory.

    Attributes:
        number: The number of the operator in the counting step.
        at: The time in nanoseconds since the timed step began.
    """

    number: int
    at: int


def _memory_at(
    analysis: Analysis, step: StepTimeline, memory: MemoryShown | None
) -> list[int] | None:
    """Estimate the time of each point of the Memory view, in nanoseconds since a timed step began.

    Memory is counted in a step that is not timed, so the times come from the timed step `step`. If
    a module ran equally often in both steps, the beginning and the end of each run are known in
    both steps and serve as anchors. The operators between two anchors are spaced evenly.
    """
    counted = analysis.profile.memory
    if memory is None or counted is None:
        return None
    anchors = [
        _Anchor(0, 0),
        *_increasing(sorted(_anchors(counted.timeline, step))),
        _Anchor(memory.operators + 1, step.length),
    ]
    if len(anchors) == 2:
        return None
    positions = memory.points["at"]
    if not isinstance(positions, list):
        return []
    found = []
    number = 0
    for at in positions:
        position = float(at or 0)
        while number + 2 < len(anchors) and anchors[number + 1].number <= position:
            number += 1
        before = anchors[number]
        after = anchors[number + 1]
        share = (position - before.number) / max(after.number - before.number, 1)
        found.append(round(before.at + min(share, 1.0) * (after.at - before.at)))
    return found


def _anchors(moments: Iterable[Moment], step: StepTimeline) -> Iterator[_Anchor]:
    """Yield anchors: where modules that ran equally often in both steps begin and end.

    `moments` are the operators of the counting step, and `step` is the timed step.
    """
    counted: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key, moments_of_key in groupby(moments, lambda moment: _key(moment.module, moment.phase)):
        run = list(moments_of_key)
        counted.setdefault(key, []).append((run[0].index, run[-1].index + 1))
    timed: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for each in _innermost(step.slices):
        ends = (each.start, each.start + each.length)
        timed.setdefault(_key(each.fqn, each.phase), []).append(ends)
    if _UPDATE in timed:
        # If the optimizer calls a closure, the optimizer has two slices: a short slice before the
        # closure, and a longer slice with the work.
        longest_first = sorted(timed[_UPDATE], key=lambda ends: ends[0] - ends[1])
        timed[_UPDATE] = sorted(longest_first[: len(counted.get(_UPDATE, ()))])
    for key in counted.keys() & timed.keys():
        if len(counted[key]) == len(timed[key]):
            for (first, end), (start, stop) in zip(counted[key], timed[key], strict=True):
                yield _Anchor(first, start)
                yield _Anchor(end, stop)


def _key(module: str, phase: str) -> tuple[str, str]:
    """Return a key to find the same module and phase in the counting step and in the timed step.

    The time of the optimizer step is not divided among modules, so all its operators have one key.
    """
    return _UPDATE if phase == "optimizer" else (module, phase)


def _innermost(slices: Sequence[ModuleSlice]) -> Iterator[ModuleSlice]:
    """Yield the slices that contain no other slices.

    `slices` must be sorted by lane (the number of the thread) and by time.
    """
    for each, following in pairwise(slices):
        if following.lane != each.lane or following.depth <= each.depth:
            yield each
    yield from slices[-1:]


def _increasing(anchors: Sequence[_Anchor]) -> Iterator[_Anchor]:
    """Yield the longest sequence of anchors that have the same order in both steps.

    The other anchors are dropped, because modules may run in a different order in the two steps.
    """
    # A chain is a sequence of anchors that have the same order in both steps. An anchor is stored
    # by its index. For each length, `ends` has the anchor that ends a chain of this length at the
    # earliest time, and `moments` has this time.
    ends: list[int] = []
    moments: list[int] = []
    # For each anchor, the previous anchor in its chain, or -1 if the anchor is the first.
    before: list[int] = []
    for number, anchor in enumerate(anchors):
        length = bisect_left(moments, anchor.at)
        before.append(ends[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        moments[length : length + 1] = [anchor.at]
    kept = []
    number = ends[-1] if ends else -1
    while number >= 0:
        kept.append(anchors[number])
        number = before[number]
    yield from reversed(kept)
