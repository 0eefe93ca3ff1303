"""One module in two runs: its figures on either side, and how they differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from lflops.analyze.compare.matching import ModuleNode
from lflops.analyze.compare.significance import Judge, Timed, Timing, timed, uncompared
from lflops.profile.model import ModuleProfile, Profile, Work
from lflops.profile.records import Phase

__all__ = ["TIMED", "Change", "ModuleFigures", "ModulePair", "ModuleSide"]

TIMED: tuple[Phase, ...] = ("forward", "backward", "recompute")
"""The phases whose times are compared."""


class Change(Struct, frozen=True, kw_only=True, gc=False):
    """A figure before and after; `None` where it is unknown, or the module is not there."""

    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The figure after over that before."""
        return None if self.after is None or not self.before else self.after / self.before

    @property
    def differs(self) -> bool:
        """Whether it changed; of what is unknown nobody knows."""
        return self.before is not None and self.after is not None and self.before != self.after


class ModuleFigures(Struct, frozen=True, kw_only=True):
    """Work of the phases that both runs have, together, and the time of forward, backward and recompute.

    Attributes:
        macs: Multiply-accumulates of contractions.
        flops: 2 x MACs and everything else.
        bytes_moved: The least traffic.
        parameters: Distinct ones.
        time: Judged where MACs and FLOPs of each of these phases are the same; where the MACs differ it is compared a MAC, and not judged.
    """

    macs: Change
    flops: Change
    bytes_moved: Change
    parameters: Change
    time: Timing

    @property
    def differs(self) -> bool:
        """Whether the work or the parameters do."""
        return any(change.differs for change in (self.macs, self.flops, self.bytes_moved, self.parameters))


class ModuleSide(NamedTuple):
    """A module in one of the runs: its rows, the outermost first, and the phases that are looked at."""

    rows: Sequence[ModuleProfile]
    phases: Sequence[Phase]
    counted: bool

    @classmethod
    def of(cls, profile: Profile, place: ModuleNode | None, phases: Sequence[Phase]) -> "ModuleSide | None":
        """The side of a place. Without a cell nothing was counted."""
        return None if place is None else cls([profile.modules[name] for name in place.names], phases, bool(profile.cells))

    def works(self, *, own: bool, timed_ones: bool = False) -> list[tuple[Phase, Work]]:
        """Of the outermost row, or of each."""
        phases = [phase for phase in self.phases if phase in TIMED or not timed_ones]
        return [(phase, row.work(phase)) for row in (self.rows if own else self.rows[:1]) for phase in phases]

    def work(self, field: str, *, own: bool, timed_ones: bool = False) -> int | None:
        """A count of all its phases, or of those that have times."""
        counts: Iterable[int] = (getattr(work, _named(field, own=own)) for _, work in self.works(own=own, timed_ones=timed_ones))
        return sum(counts) if self.counted else None

    def timed_work(self, *, own: bool) -> Counter[tuple[Phase, str]]:
        """MACs and FLOPs of each phase that has times."""
        counts: Counter[tuple[Phase, str]] = Counter()
        for phase, work in self.works(own=own, timed_ones=True):
            counts.update({(phase, field): getattr(work, _named(field, own=own)) for field in ("macs", "flops")})
        return counts

    def time(self, *, own: bool) -> Timed | None:
        """Of the phases that ran."""
        works = [work for _, work in self.works(own=own, timed_ones=True)]
        ran = [(getattr(work, _named("seconds", own=own)), getattr(work, _named("calls", own=own))) for work in works]
        return timed([seconds for seconds, calls in ran if seconds is not None or calls])

    def parameters(self, *, own: bool) -> int:
        """Distinct ones."""
        return sum(row.own_parameters for row in self.rows) if own else self.rows[0].parameters

    def peak(self) -> int | None:
        """The most bytes alive."""
        return self.rows[0].peak_bytes


class ModulePair(NamedTuple):
    """A module in both runs, or in one of them."""

    before: ModuleSide | None
    after: ModuleSide | None

    def change(self, figure: Callable[[ModuleSide], float | None]) -> Change:
        """A figure of both sides."""
        first, second = (None if side is None else figure(side) for side in self)
        return Change(before=first, after=second)

    def times(self, *, own: bool) -> tuple[Timed | None, Timed | None]:
        """Of both sides."""
        first, second = (None if side is None else side.time(own=own) for side in self)
        return first, second

    def same_work(self, *, own: bool) -> bool:
        """Whether MACs and FLOPs of each phase that has times are known to be the same."""
        if self.before is None or self.after is None or not (self.before.counted and self.after.counted):
            return False
        return self.before.timed_work(own=own) == self.after.timed_work(own=own)

    def figures(self, judge: Judge | None, explained: float = 0.0, *, own: bool) -> ModuleFigures:
        """Its work and its time; this is judged where it can be."""
        first, second = self.times(own=own)
        if judge and self.same_work(own=own):
            time = judge.timing(first, second, explained)
        else:
            time = uncompared(first, second, self.change(partial(ModuleSide.work, field="macs", own=own, timed_ones=True)).ratio)
        work = {field: self.change(partial(ModuleSide.work, field=field, own=own)) for field in ("macs", "flops", "bytes_moved")}
        return ModuleFigures(**work, parameters=self.change(partial(ModuleSide.parameters, own=own)), time=time)


def _named(field: str, *, own: bool) -> str:
    return f"own_{field}" if own else field
