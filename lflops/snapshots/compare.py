"""Two snapshots compared: what there is more and less of at the second one's peak, by category and by line of code."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from lflops import units
from lflops.snapshots.explain import ExplainedMemory
from lflops.snapshots.holders import Category, StackHolder


class HolderChange(Struct, frozen=True, kw_only=True):
    """Allocations of one category by one line of code, at each peak; 0 is none."""

    category: Category
    line: str
    count: tuple[int, int]
    bytes: tuple[int, int]

    @property
    def change(self) -> int:
        """How many bytes more."""
        return self.bytes[1] - self.bytes[0]


class MemoryDiff(Struct, frozen=True, kw_only=True):
    """Two snapshots, before and after. Each is taken at its peak, or where memory ran out."""

    requested_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]
    ran_out: tuple[bool, bool]
    by_category: Mapping[Category, tuple[int, int]]
    holders: tuple[HolderChange, ...]  # those that differ, the largest change first


def compare(before: ExplainedMemory, after: ExplainedMemory) -> MemoryDiff:
    """Match the holders of two snapshots by category and line."""
    pair = before, after
    first, second = ({(each.category, each.line): each for each in side.holders} for side in pair)
    rows = (_change(*key, first.get(key), second.get(key)) for key in first | second)
    return MemoryDiff(
        requested_bytes=(before.requested_bytes, after.requested_bytes),
        reserved_bytes=(before.reserved_bytes, after.reserved_bytes),
        ran_out=(before.ran_out, after.ran_out),
        by_category={name: (nbytes, after.by_category[name]) for name, nbytes in before.by_category.items()},
        holders=tuple(sorted((row for row in rows if row.change), key=lambda row: (-abs(row.change), row.line))),
    )


def _change(category: Category, line: str, before: StackHolder | None, after: StackHolder | None) -> HolderChange:
    none = StackHolder(category=category, line=line, count=0, bytes=0)
    first, second = before or none, after or none
    return HolderChange(category=category, line=line, count=(first.count, second.count), bytes=(first.bytes, second.bytes))


_LISTED = 12


def compared_lines(diff: MemoryDiff) -> Iterator[str]:
    """The comparison in sentences: the peak, the categories, then the lines of code that hold more and those that hold less."""
    moments = " → ".join("ran out of memory" if each else "peak" for each in diff.ran_out)
    yield f"requested {_sides(diff.requested_bytes)}, reserved {_sides(diff.reserved_bytes)} ({moments})"
    yield ""
    yield "by category"
    for category, sides in sorted(diff.by_category.items(), key=lambda item: -abs(item[1][1] - item[1][0])):
        if any(sides):
            yield f"  {_signed(sides[1] - sides[0]):>12}  {category.replace('_', ' ')}, {_sides(sides)}"
    for title, sign in (("grew", 1), ("went", -1)):
        rows = [row for row in diff.holders if row.change * sign > 0]
        if rows:
            yield ""
            yield f"{title}, by line of code"
        for row in rows[:_LISTED]:
            count = f"{row.count[0]} → {row.count[1]} ×"
            yield f"  {_signed(row.change):>12}  {row.category.replace('_', ' ')}, {count} {row.line or 'no stack'}"
        if len(rows) > _LISTED:
            yield f"  {_signed(sum(row.change for row in rows[_LISTED:])):>12}  {len(rows) - _LISTED} more lines"


def _sides(sides: tuple[int, int]) -> str:
    return f"{units.size(sides[0])} → {units.size(sides[1])}"


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ''}{units.size(abs(nbytes))}"
