"""What the page's Memory shows: the way of the live bytes through the step, and what is alive at the peak."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from lflops.analyze.memory.peak import alike, holders, peak_moment
from lflops.profile.downsample import extremes
from lflops.profile.model import Memory, Profile
from lflops.profile.records import ByCategory, Phase
from lflops.report.payload.columns import Columns, Value, exact

__all__ = ["MemoryShown", "memory"]

_POINTS = 2_000
_HOLDERS = 24
_STACKED = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
"""From the bottom: what stays, then what comes and goes."""


class MemoryShown(Struct, frozen=True, kw_only=True):
    """A step's live memory.

    Attributes:
        rank: Of several ranks the one that it is of, whose peak is the largest.
        operators: How many the step has; `None` where an older file does not say it.
        points: Bytes alive before each operator, at most 2,000 of them: the extremes of equal stretches. Beside these the peak itself, half
            an operator behind the one that reaches it. The categories of which there ever is anything have columns, the lowest first.
        peak: The place of the peak in them.
        by_category: The peak, in the same order.
        modules: Who holds the peak, the most first; those of one pattern together.
        more: How many are left out of these, and their bytes.
        largest: How many of the largest storages at the peak are told of.
        alive: These, with those together that are alike.
    """

    source: str
    rank: int | None
    operators: int | None
    peak_bytes: Value
    peak: int | None
    chip: str | None
    capacity_bytes: float | None
    allocator_peak_bytes: Value
    reserved_bytes: Value
    points: Columns
    categories: tuple[str, ...]
    by_category: list[tuple[str, Value]]
    modules: Columns
    more: tuple[int, Value]
    largest: int
    alive: Columns


class _Point(Struct, frozen=True):
    at: float
    operator: str
    module: str
    phase: Phase
    live: int
    parts: ByCategory | None


def memory(profile: Profile) -> MemoryShown | None:
    """What is shown of it; `None` where it was not counted."""
    found, chip = profile.memory, profile.run.hardware
    if found is None or not found.timeline:
        return None
    points = list(_points(found))
    parts = [point.parts for point in points if point.parts is not None]
    categories = [each for each in _STACKED if any(getattr(part, each) for part in parts)] if len(parts) == len(points) else []
    held = holders(found.by_module)
    return MemoryShown(
        source=found.source,
        rank=_whose(profile, found),
        operators=None if (last := found.timeline[-1].index) is None else last + 1,
        peak_bytes=exact(found.peak_bytes),
        peak=next((place for place, point in enumerate(points) if point.at % 1), None),
        chip=chip.name if chip and chip.memory_bytes is not None else None,
        capacity_bytes=chip.memory_bytes if chip else None,
        allocator_peak_bytes=exact(found.allocator_peak_bytes),
        reserved_bytes=exact(found.reserved_bytes),
        points=_columns(points, ("at", "operator", "module", "phase", "live")) | _columns(parts, categories),
        categories=tuple(categories),
        by_category=[(name, exact(nbytes)) for name in _STACKED if (nbytes := found.by_category.get(name))],
        modules=_columns(held[:_HOLDERS], ("name", "modules", "bytes")),
        more=(len(held[_HOLDERS:]), exact(sum(each.bytes for each in held[_HOLDERS:]))),
        largest=len(found.alive),
        alive=_columns(alike(found.alive), ("category", "operator", "module", "phase", "number", "each_bytes")),
    )


def _points(found: Memory) -> Iterator[_Point]:
    """In the order of the operators. What was alive at the peak lies between what was before and behind the operator that reached it."""
    reached = peak_moment(found)
    place = next((place for place, moment in enumerate(found.timeline) if moment is reached), 0)
    for each in extremes([moment.live_bytes for moment in found.timeline], _POINTS - 1, [place]):
        moment = found.timeline[each]
        at = each if moment.index is None else moment.index
        yield _Point(at, moment.operator, moment.module, moment.phase, moment.live_bytes, moment.by_category)
        if moment is reached:
            parts = moment.by_category and ByCategory(**{name: found.by_category.get(name, 0) for name in ByCategory._fields})
            yield _Point(at + 0.5, moment.operator, moment.module, moment.phase, found.peak_bytes, parts)


def _columns(rows: Sequence[Struct | ByCategory], fields: Iterable[str]) -> Columns:
    return {field: [exact(getattr(row, field)) for row in rows] for field in fields}


def _whose(profile: Profile, found: Memory) -> int | None:
    """A merged profile has the memory of the first rank that has the largest peak."""
    return next((rank.rank for rank in profile.ranks if rank.peak_bytes == found.peak_bytes), None)
