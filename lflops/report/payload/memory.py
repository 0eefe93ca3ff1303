"""The page's Memory view: live bytes through the step, and what is alive at the peak."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from lflops.analyze.analysis import Analysis
from lflops.analyze.memory.peak import fold_storages
from lflops.hardware.chips import Hardware
from lflops.profile.model import Memory, Moment
from lflops.profile.records import ByCategory, Phase
from lflops.profile.series import extremes
from lflops.report.lines.text import savings
from lflops.report.payload.columns import Columns, Value, exact, lists

POINTS: Final = 2_000  # the most points that are drawn


class LiveMemoryShown(Struct, frozen=True, kw_only=True):
    """Live bytes over time, and the categories at one moment."""

    operators: int  # how many moments there are before some are chosen: operators of a step, or entries of an allocator's record
    peak_bytes: Value  # the bytes at the moment that is marked
    peak: int | None  # the index in `points` of the moment that is marked
    chip: str | None  # the chip's name, where its memory is known
    capacity_bytes: float | None
    points: Columns  # at most `POINTS` moments with the bytes alive; categories that ever hold bytes have columns
    categories: tuple[str, ...]  # the names of those columns, the lowest of the stack first
    by_category: list[tuple[str, Value]]  # the bytes at the moment that is marked


def chip_memory(chip: Hardware | None) -> tuple[str, float] | tuple[None, None]:
    """A chip's name and the bytes of its memory, where they are known."""
    return (None, None) if chip is None or chip.memory_bytes is None else (chip.name, chip.memory_bytes)


_HOLDERS = 24
_STACKED = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
"""From the bottom: what stays, then what comes and goes."""


class MemoryShown(LiveMemoryShown, frozen=True, kw_only=True):
    """A step's live memory before each operator: the extremes of equal buckets, and the peak half an operator after the one of it."""

    source: str
    rank: int | None  # of several ranks, the one with the largest peak, whose memory this is
    modules: Columns  # those that hold the peak, the most bytes first; repeated ones together
    more: tuple[int, Value]  # how many modules are left out, and their bytes
    largest: int  # how many of the largest storages at the peak are listed
    alive: Columns  # the largest storages, those of repeated modules together; `pattern` is the module's name with `*` for repeats
    savings: list[tuple[str, Value, str]]  # what would lower the peak: what to do, the most bytes that it saves, and its cost


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
        rank=next((rank.rank for rank in profile.ranks if rank.peak_bytes == counted.peak_bytes), None),
        operators=counted.timeline[-1].index + 1,
        peak_bytes=exact(counted.peak_bytes),
        peak=next((index for index, point in enumerate(points) if point.at % 1), None),
        chip=chip,
        capacity_bytes=capacity,
        points=lists(points, ("at", "operator", "module", "phase", "live")) | lists(parts, categories),
        categories=tuple(categories),
        by_category=[(name, exact(nbytes)) for name in _STACKED if (nbytes := counted.by_category.get(name))],
        modules=lists(analysis.holders[:_HOLDERS], ("name", "modules", "bytes")),
        more=(len(analysis.holders[_HOLDERS:]), exact(sum(each.bytes for each in analysis.holders[_HOLDERS:]))),
        largest=len(counted.alive),
        alive=lists(
            fold_storages(counted, analysis.patterns), ("category", "operator", "module", "pattern", "phase", "number", "each_bytes")
        ),
        savings=[(what, exact(nbytes), cost) for what, nbytes, cost in savings(analysis)],
    )


def _points(counted: Memory, reached: Moment | None) -> Iterator[_Point]:
    """In the order of the operators; the peak itself lies between the operator that reached it and the next."""
    peak = next((index for index, moment in enumerate(counted.timeline) if moment is reached), 0)
    for each in extremes([moment.live_bytes for moment in counted.timeline], POINTS - 1, [peak]):
        moment = counted.timeline[each]
        yield _Point(moment.index, moment.operator, moment.module, moment.phase, moment.live_bytes, moment.by_category)
        if moment is reached:
            parts = ByCategory(**{name: counted.by_category.get(name, 0) for name in ByCategory._fields})
            yield _Point(moment.index + 0.5, moment.operator, moment.module, moment.phase, counted.peak_bytes, parts)
