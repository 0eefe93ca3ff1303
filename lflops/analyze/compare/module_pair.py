"""One module in two runs: its figures on either side, and how they differ."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from lflops.analyze.compare.compared_run import TIMED, ComparedRun
from lflops.analyze.compare.significance import Judge, Measured, Timing, total, unjudged
from lflops.profile.records import Phase


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
        """Whether it changed; not where a side is unknown."""
        return self.before is not None and self.after is not None and self.before != self.after


class ModuleFigures(Struct, frozen=True, kw_only=True):
    """Work of the phases that both runs have, together, and the time of forward, backward and recompute.

    The time is judged where MACs and FLOPs of each of these phases are the same; where the MACs differ it is compared a MAC, not judged.
    """

    macs: Change
    flops: Change
    bytes_moved: Change
    parameters: Change
    time: Timing

    @property
    def differs(self) -> bool:
        """Whether the work or the parameters do."""
        return self.macs.differs or self.flops.differs or self.bytes_moved.differs or self.parameters.differs


class SharedPhases:
    """A run's columns in the phases that both runs have, each summed or collected once for all modules."""

    def __init__(self, run: ComparedRun, phases: Sequence[Phase]) -> None:
        timed = [phase for phase in phases if phase in TIMED]

        def columns(phases: Sequence[Phase], field: str) -> list[Sequence[Any]]:
            return [run.columns[f"{phase}.{field}"] for phase in phases]

        def sums(phases: Sequence[Phase], field: str) -> list[int]:
            return [sum(values) for values in zip(*columns(phases, field), strict=True)] if phases else [0] * len(run.names)

        self.run = run
        self.counted = run.figures.counted
        self.work: dict[str, list[int]] = {}
        self.timed_work: dict[str, list[tuple[int, ...]]] = {}
        self.times: dict[str, list[list[tuple[float | None, float | None]]]] = {}
        for own in ("", "own_"):
            if self.counted:
                self.work |= {own + field: sums(phases, own + field) for field in ("macs", "flops", "bytes_moved")}
                self.work[f"{own}timed_macs"] = sums(timed, f"{own}macs")
                both = [*columns(timed, f"{own}macs"), *columns(timed, f"{own}flops")]
                self.timed_work[own] = list(zip(*both, strict=True)) if both else [()] * len(run.names)
            self.times[own] = [[] for _ in run.names]
            for phase in timed:
                seconds, errors, calls = (run.columns[f"{phase}.{own}{field}"] for field in ("seconds", "error", "calls"))
                for times, each, error, ran in zip(self.times[own], seconds, errors, calls, strict=True):
                    if each is not None or (ran and phase != "recompute"):  # a fused attention's is within backward
                        times.append((each, error))


class ModuleSide(NamedTuple):
    """A module in one of the runs."""

    of: SharedPhases  # the run
    rows: Sequence[int]  # of it and of what it wraps, the outermost first, as positions in columns. Inclusive is that of the first.

    def work(self, field: str) -> int | None:
        """A count of all phases, as `macs` or `own_macs`."""
        return self._sum(self.of.work[field], own=field.startswith("own_")) if self.of.counted else None

    def timed_work(self, *, own: bool) -> tuple[int, ...]:
        """The MACs and the FLOPs of each phase that has times."""
        work = self.of.timed_work["own_" if own else ""]
        if not own or len(self.rows) == 1:
            return work[self.rows[0]]
        return tuple(sum(each) for each in zip(*(work[row] for row in self.rows), strict=True))

    def time(self, *, own: bool) -> Measured | None:
        """Add up the phases that ran."""
        times = self.of.times["own_" if own else ""]
        if not own or len(self.rows) == 1:
            return total(times[self.rows[0]])
        return total([each for row in self.rows for each in times[row]])

    def in_phase(self, phase: Phase, field: str, *, own: bool) -> float | None:
        """Its `seconds`, or its `macs`, in one phase."""
        if field == "macs" and not self.of.counted:
            return None
        column = self.of.run.columns[f"{phase}.{'own_' if own else ''}{field}"]
        return None if own and any(column[row] is None for row in self.rows) else self._sum(column, own=own)

    def parameters(self, *, own: bool) -> int:
        """Distinct ones."""
        parameters: int = self._sum(self.of.run.columns["own_parameters" if own else "parameters"], own=own)
        return parameters

    def peak(self) -> int | None:
        peak: int | None = self.of.run.columns["peak_bytes"][self.rows[0]]
        return peak

    def _sum(self, column: Sequence[Any], *, own: bool) -> Any:
        return sum(column[row] for row in self.rows) if own and len(self.rows) > 1 else column[self.rows[0]]


class ModulePair(NamedTuple):
    """A module in both runs, or in one of them."""

    before: ModuleSide | None
    after: ModuleSide | None

    def change(self, figure: Callable[[ModuleSide], float | None]) -> Change:
        before, after = self
        return Change(before=None if before is None else figure(before), after=None if after is None else figure(after))

    def times(self, *, own: bool) -> tuple[Measured | None, Measured | None]:
        before, after = self
        return None if before is None else before.time(own=own), None if after is None else after.time(own=own)

    def same_work(self, *, own: bool) -> bool:
        """Whether MACs and FLOPs of each phase that has times are known to be the same."""
        if self.before is None or self.after is None or not (self.before.of.counted and self.after.of.counted):
            return False
        return self.before.timed_work(own=own) == self.after.timed_work(own=own)

    def figures(self, judge: Judge | None, explained: float = 0.0, *, own: bool) -> ModuleFigures:
        """Its work and its time, which is judged where it can be."""
        prefix = "own_" if own else ""
        first, second = self.times(own=own)
        if judge and self.same_work(own=own):
            time = judge.timing(first, second, explained)
        else:
            macs = self.change(lambda side: side.work(f"{prefix}timed_macs")).ratio
            time = judge.cost(first, second, macs) if judge and own else unjudged(first, second, macs)
        work = {field: self.change(partial(ModuleSide.work, field=prefix + field)) for field in ("macs", "flops", "bytes_moved")}
        return ModuleFigures(**work, parameters=self.change(partial(ModuleSide.parameters, own=own)), time=time)
