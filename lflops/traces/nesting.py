"""The walk over nested slices, for Kineto's events in memory and for those of a file.

What begins on a thread within another slice is inside of it:

    aten::linear [ aten::addmm [ cudaLaunchKernel ] ]      stack at the launch: linear, addmm
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Slice(Protocol):
    """Anything from one moment to another, in nanoseconds."""

    @property
    def start(self) -> int:
        """Its first moment."""

    @property
    def end(self) -> int:
        """Its last moment."""


Opened = TypeVar("Opened", bound=Slice)
Sliced = TypeVar("Sliced", bound=Slice)


@dataclass(slots=True)
class SliceTimes:
    """All slices of one name; nanoseconds, inclusive and own, of the host and of the device's work that was launched in them."""

    name: str
    calls: int = 0
    host: int = 0
    own_host: int = 0
    device: int = 0
    own_device: int = 0


def outer_first(slices: Iterable[Sliced], opened: list[Opened], *, may_cross: bool = True) -> Iterator[Sliced]:
    """The slices of one thread in the order of time, the outer ones first.

    `opened` is the stack of the slices around the one that comes: those that have ended are taken from it. The caller appends what is to be
    around the next ones. A slice that ends after the innermost one around it is inside of that if it `may_cross`, and else of none that it
    crosses.
    """
    for each in sorted(slices, key=lambda each: (each.start, -each.end)):
        start, last = each.start, each.start if may_cross else each.end
        while opened and (opened[-1].end <= start or opened[-1].end < last):
            opened.pop()
        yield each
