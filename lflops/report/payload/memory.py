"""The page's Memory view.

Live bytes through the step, what is alive at the peak; and its Timeline: one step of each rank in
time.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.hardware.chips import Hardware
from lflops.memory.peak import fold_storages
from lflops.profile.profile import Memory, Moment
from lflops.profile.records import ByCategory, Phase
from lflops.profile.series import extremes, gathered
from lflops.profile.timeline import ModuleSlice, StepTimeline
from lflops.report.payload.columns import Columns, Value, exact, lists
from lflops.report.text import savings

# the most points that are drawn
POINTS: Final = 2_000


class LiveMemoryShown(Struct, frozen=True, kw_only=True):
    """Live bytes over time, and the categories at one moment."""

    # how many moments there are before some are chosen: operators of a step, or entries of an
    # allocator's record
    operators: int
    # the bytes at the moment that is marked
    peak_bytes: Value
    # the index in `points` of the moment that is marked
    peak: int | None
    # the chip's name, where its memory is known
    chip: str | None
    capacity_bytes: float | None
    # at most `POINTS` moments with the bytes alive; categories that ever hold bytes have columns
    points: Columns
    # the names of those columns, the lowest of the stack first
    categories: tuple[str, ...]
    # the bytes at the moment that is marked
    by_category: list[tuple[str, Value]]


def chip_memory(chip: Hardware | None) -> tuple[str, float] | tuple[None, None]:
    """A chip's name and the bytes of its memory, where they are known."""
    return (
        (None, None)
        if chip is None or chip.memory_bytes is None
        else (chip.name, chip.memory_bytes)
    )


_HOLDERS = 24
_STACKED = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
"""From the bottom: what stays, then what comes and goes."""


class MemoryShown(LiveMemoryShown, frozen=True, kw_only=True):
    """A step's live memory before each operator.

    The extremes of equal buckets, and the peak half an operator after the one of it.
    """

    source: str
    # of several ranks, the one with the largest peak, whose memory this is
    rank: int | None
    # those that hold the peak, the most bytes first; repeated ones together
    modules: Columns
    # how many modules are left out, and their bytes
    more: tuple[int, Value]
    # how many of the largest storages at the peak are listed
    largest: int
    # the largest storages, those of repeated modules together; `pattern` is the module's name with
    # `*` for repeats
    alive: Columns
    savings: list[
        tuple[str, Value, str]
        # what would lower the peak: what to do, the most bytes that it saves, and its cost
    ]


class _Point(Struct, frozen=True):
    at: float
    operator: str
    module: str
    phase: Phase
    live: int
    parts: ByCategory


def memory(analysis: Analysis) -> MemoryShown | None:
    """The view; `None` where memory was not counted."""
    profile = analysis.profile
    counted = profile.memory
    if counted is None or not counted.timeline:
        return None
    chip, capacity = chip_memory(profile.run.hardware)
    points = list(_points(counted, analysis.peak_moment))
    parts = [point.parts for point in points]
    categories = [each for each in _STACKED if any(getattr(part, each) for part in parts)]
    return MemoryShown(
        source=counted.source,
        rank=next(
            (rank.rank for rank in profile.ranks if rank.peak_bytes == counted.peak_bytes), None
        ),
        operators=counted.timeline[-1].index + 1,
        peak_bytes=exact(counted.peak_bytes),
        peak=next((index for index, point in enumerate(points) if point.at % 1), None),
        chip=chip,
        capacity_bytes=capacity,
        points=lists(points, ("at", "operator", "module", "phase", "live"))
        | lists(parts, categories),
        categories=tuple(categories),
        by_category=[
            (name, exact(nbytes)) for name in _STACKED if (nbytes := counted.by_category.get(name))
        ],
        modules=lists(analysis.holders[:_HOLDERS], ("name", "modules", "bytes")),
        more=(
            len(analysis.holders[_HOLDERS:]),
            exact(sum(each.bytes for each in analysis.holders[_HOLDERS:])),
        ),
        largest=len(counted.alive),
        alive=lists(
            fold_storages(counted, analysis.patterns),
            ("category", "operator", "module", "pattern", "phase", "number", "each_bytes"),
        ),
        savings=[(what, exact(nbytes), cost) for what, nbytes, cost in savings(analysis)],
    )


def _points(counted: Memory, reached: Moment | None) -> Iterator[_Point]:
    """In the order of the operators.

    The peak itself lies between the operator that reached it and the next.
    """
    peak = next((index for index, moment in enumerate(counted.timeline) if moment is reached), 0)
    for each in extremes([moment.live_bytes for moment in counted.timeline], POINTS - 1, [peak]):
        moment = counted.timeline[each]
        yield _Point(
            moment.index,
            moment.operator,
            moment.module,
            moment.phase,
            moment.live_bytes,
            moment.by_category,
        )
        if moment is reached:
            parts = ByCategory(
                **{name: counted.by_category.get(name, 0) for name in ByCategory._fields}
            )
            yield _Point(
                moment.index + 0.5,
                moment.operator,
                moment.module,
                moment.phase,
                counted.peak_bytes,
                parts,
            )


class RankTimeline(Struct, frozen=True, kw_only=True):
    """One step of one rank; times are nanoseconds since it began."""

    rank: int
    source: str
    length: int
    # those of modules, operators and kernels, to which the columns `name` refer
    names: list[str]
    slices: Columns
    operators: Columns
    kernels: Columns
    left_out: tuple[
        int, int, int
        # the number of slices, operators and kernels that are too short to be listed
    ]


class TimelineShown(Struct, frozen=True, kw_only=True):
    """What the view needs next to the payload of its window."""

    # those whose step is known
    ranks: tuple[RankTimeline, ...]
    # When each point of the view Memory was, in nanoseconds of the first of these ranks; `None` if
    # that is unknown
    memory_at: list[int] | None


def timeline(analysis: Analysis, memory: MemoryShown | None) -> TimelineShown | None:
    """The view; `None` if no step has a timeline."""
    steps = analysis.profile.timelines
    if not steps:
        return None
    return TimelineShown(
        ranks=tuple(map(_of_rank, steps)), memory_at=_memory_at(analysis, steps[0], memory)
    )


def _of_rank(step: StepTimeline) -> RankTimeline:
    numbers: dict[str, int] = {}

    def columns(rows: Sequence[Struct], fields: tuple[str, ...], name: str = "name") -> Columns:
        table: Columns = {
            "name": [numbers.setdefault(getattr(row, name), len(numbers)) for row in rows]
        }
        return table | {field: [getattr(row, field) for row in rows] for field in fields}

    work = ("start", "length", "lane")
    slices = columns(step.slices, ("phase", *work[:2], "depth", "lane"), "row")
    operators, kernels = columns(step.operators, work), columns(step.kernels, work)
    return RankTimeline(
        rank=step.rank,
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
    """An operator of the counted step whose moment in the timed step is known."""

    number: int
    at: int


def _memory_at(
    analysis: Analysis, step: StepTimeline, memory: MemoryShown | None
) -> list[int] | None:
    """When the points of the memory were in a step that ran the same modules.

    The step whose memory was counted was not timed.
    """
    # A module that ran as often in both is an anchor. Between two anchors operators are spaced
    # evenly.
    counted = analysis.profile.memory
    if memory is None or counted is None:
        return None
    anchors = [
        _Anchor(0, 0),
        *_increasing(sorted(_anchors(counted.timeline, step))),
        _Anchor(memory.operators + 1, step.length),
    ]
    found, number = [], 0
    for at in memory.points["at"] if isinstance(memory.points["at"], list) else ():
        position = float(at or 0)
        while number + 2 < len(anchors) and anchors[number + 1].number <= position:
            number += 1
        before, after = anchors[number], anchors[number + 1]
        share = (position - before.number) / max(after.number - before.number, 1)
        found.append(round(before.at + min(share, 1.0) * (after.at - before.at)))
    return found if len(anchors) > 2 else None


def _anchors(moments: Iterable[Moment], step: StepTimeline) -> Iterator[_Anchor]:
    """Beginnings and ends of modules that ran as often in the counted step as in the timed one."""
    runs = (
        (key, list(run))
        for key, run in groupby(moments, lambda moment: _key(moment.module, moment.phase))
    )
    counted = gathered((key, (run[0].index, run[-1].index + 1)) for key, run in runs)
    timed = gathered(
        (_key(each.row, each.phase), (each.start, each.start + each.length))
        for each in _innermost(step.slices)
    )
    if updates := timed.get(
        _UPDATE
        # an optimizer that calls a closure runs before it too, and computes nothing there
    ):
        timed[_UPDATE] = sorted(
            sorted(updates, key=lambda ends: ends[0] - ends[1])[: len(counted.get(_UPDATE, ()))]
        )
    for key in counted.keys() & timed.keys():
        if len(counted[key]) == len(timed[key]):
            for (first, end), (start, stop) in zip(counted[key], timed[key], strict=True):
                yield _Anchor(first, start)
                yield _Anchor(end, stop)


def _key(row: str, phase: str) -> tuple[str, str]:
    """A module and phase; an optimizer's step is not divided over modules in time."""
    return _UPDATE if phase == "optimizer" else (row, phase)


def _innermost(slices: Sequence[ModuleSlice]) -> Iterator[ModuleSlice]:
    """The slices that no other is within; they are sorted by lane and time."""
    for each, following in pairwise([*slices, None]):
        if each is not None and (
            following is None or following.lane != each.lane or following.depth <= each.depth
        ):
            yield each


def _increasing(anchors: Sequence[_Anchor]) -> Iterator[_Anchor]:
    """The most anchors of these that are in the same order in both steps.

    Modules may have run in another order.
    """
    ends: list[
        int
        # the number of the anchor that a chain of each length ends with, and its moment
    ] = []
    moments: list[int] = []
    before: list[int] = []
    for number, anchor in enumerate(anchors):
        length = bisect_left(moments, anchor.at)
        before.append(ends[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        moments[length : length + 1] = [anchor.at]
    kept, number = [], ends[-1] if ends else -1
    while number >= 0:
        kept.append(anchors[number])
        number = before[number]
    yield from reversed(kept)
