"""What the page's two drawings of live memory have in common: that of a step, and that of a CUDA snapshot."""

from typing import Final

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.report.payload.columns import Columns, Value

__all__ = ["POINTS", "LiveMemoryShown", "chip_memory"]

POINTS: Final = 2_000
"""The most points that are drawn."""


class LiveMemoryShown(Struct, frozen=True, kw_only=True):
    """Live bytes over time, and the categories at one moment.

    Attributes:
        operators: How many moments there are before some are chosen: operators of a step, or entries of an allocator's record; `None`
            where an older file does not say it.
        peak_bytes: The bytes at the moment that is marked.
        peak: The index in `points` of the moment that is marked.
        chip: The chip's name, where its memory is known.
        points: At most `POINTS` moments with the bytes alive; categories that ever hold bytes have columns.
        categories: The names of those columns, the lowest of the stack first.
        by_category: The bytes at the moment that is marked.
    """

    operators: int | None
    peak_bytes: Value
    peak: int | None
    chip: str | None
    capacity_bytes: float | None
    points: Columns
    categories: tuple[str, ...]
    by_category: list[tuple[str, Value]]


def chip_memory(chip: Hardware | None) -> tuple[str, float] | tuple[None, None]:
    """A chip's name and the bytes of its memory, where they are known."""
    return (None, None) if chip is None or chip.memory_bytes is None else (chip.name, chip.memory_bytes)
