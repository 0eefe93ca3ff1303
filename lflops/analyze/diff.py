"""Two runs of a model, module by module: what changed in their work, and in the time that the same work takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from lflops.analyze.judging import NEWS, Judge, Timed, Timing, Verdict, Whole, judge_of, judge_of_steps, timed, uncompared
from lflops.analyze.matching import Pair, Place, matched
from lflops.analyze.pace import Pace, pace
from lflops.analyze.utilization import utilization
from lflops.observations import PHASES, Phase
from lflops.profile import ModuleProfile, Profile

__all__ = ["Change", "Diff", "Figures", "ModuleDiff", "diff"]

_TIMED: tuple[Phase, ...] = ("forward", "backward", "recompute")
_FACTS = ("kind", "device_name", "dtype", "precision", "strategy", "world_size", "samples_per_step", "tokens_per_step", "accumulation")


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


class Figures(Struct, frozen=True, kw_only=True):
    """Work of all phases together, and the time of forward, backward and recompute.

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


class ModuleDiff(Struct, frozen=True, kw_only=True):
    """A module in both runs, or in one of them.

    Attributes:
        before: Its name; `None` where it was added. A wrapper and what it wraps are one module, with the wrapper's name.
        after: Its name; `None` where it was removed.
        kind: Its class: after, where it is there.
        own: Itself, without what is below it.
        inclusive: With all below it. Its time is judged by what no module below explains.
        peak_bytes: The most bytes alive while it ran.
    """

    before: str | None
    after: str | None
    kind: str
    own: Figures
    inclusive: Figures
    peak_bytes: Change

    @property
    def name(self) -> str:
        """After, or before where it was removed."""
        return (self.before if self.after is None else self.after) or ""

    @property
    def news(self) -> Timing:
        """Its own time where that is slower or faster, else the inclusive one."""
        return self.own.time if self.own.time.verdict in NEWS else self.inclusive.time


class Diff(Struct, frozen=True, kw_only=True):
    """What changed from one run to another. `None` is unknown.

    Attributes:
        facts: What differs in the circumstances of the runs, as device, dtype or samples a step: before and after.
        whole: What happened to all modules alike, as on a slower machine; it is taken out of their times before they are judged.
        step: Of the clean steps; judged as it is, with nothing taken out.
        phases: As the steps tell them; judged as the modules are.
        mfu: A share of 1.
        samples_per_second: Of the clean steps. So is `tokens_per_second`.
        peak_bytes: The most bytes alive.
        modules: Those before in their order, the root first, then what was added.
    """

    facts: Mapping[str, tuple[str | int | None, str | int | None]]
    whole: Whole | None
    step: Timing
    phases: Mapping[str, Timing]
    mfu: Change
    samples_per_second: Change
    tokens_per_second: Change
    peak_bytes: Change
    modules: tuple[ModuleDiff, ...]

    @property
    def slower(self) -> tuple[ModuleDiff, ...]:
        """The modules that are, beyond the whole run and the noise; what loses the most first."""
        return self._judged("slower")

    @property
    def faster(self) -> tuple[ModuleDiff, ...]:
        """The modules that are; what wins the most first."""
        return self._judged("faster")

    @property
    def added(self) -> tuple[ModuleDiff, ...]:
        """The modules that are only in the second run."""
        return tuple(module for module in self.modules if module.before is None)

    @property
    def removed(self) -> tuple[ModuleDiff, ...]:
        """The modules that are only in the first run."""
        return tuple(module for module in self.modules if module.after is None)

    def _judged(self, verdict: Verdict) -> tuple[ModuleDiff, ...]:
        found = [module for module in self.modules if module.news.verdict == verdict]
        return tuple(sorted(found, key=lambda module: -abs(module.news.lost or 0.0)))


def diff(before: Profile, after: Profile) -> Diff:
    """Compare two runs.

    Modules are matched by name, across wrappers and renames. Work is exact, so whatever differs in it is told. A time is judged only where
    the work is the same: the median ratio over the modules is taken out first, as a slower machine is no news, then an interval from the
    steps' spread decides, as noise is none (`lflops/analyze/judging.py` says how). An estimate, or a count, has no times: only its work and
    its memory are compared.

    Args:
        before: A profile.
        after: Another one, of the same model or of what became of it.
    """
    pairs = matched(before, after)
    both = [_Both(_Side.of(before, one), _Side.of(after, other)) for one, other in pairs]
    judge = _judge(both)
    first, second = pace(before), pace(after)
    return Diff(
        facts={fact: (one, other) for fact in _FACTS if (one := getattr(before.run, fact)) != (other := getattr(after.run, fact))},
        whole=judge.whole if judge else None,
        step=judge_of_steps(None, first.seconds, times=1).timing(timed([first.seconds]), timed([second.seconds])),
        phases=_phases(first, second, judge),
        mfu=Change(before=utilization(before).mfu, after=utilization(after).mfu),
        samples_per_second=Change(before=first.samples_per_second, after=second.samples_per_second),
        tokens_per_second=Change(before=first.tokens_per_second, after=second.tokens_per_second),
        peak_bytes=Change(before=_peak(before), after=_peak(after)),
        modules=_modules(pairs, both, judge),
    )


class _Side(NamedTuple):
    """A module in one of the runs: its rows, the outermost first."""

    rows: Sequence[ModuleProfile]
    counted: bool

    @classmethod
    def of(cls, profile: Profile, place: Place | None) -> "_Side | None":
        """The side of a place. Without a cell nothing was counted."""
        return None if place is None else cls([profile.modules[name] for name in place.names], bool(profile.cells))

    def work(self, field: str, phases: Iterable[Phase], *, own: bool) -> int | None:
        """A count: that of the outermost row, or the rows' own ones together."""
        if not self.counted:
            return None
        rows, field = (self.rows, f"own_{field}") if own else (self.rows[:1], field)
        counts: Iterable[int] = (getattr(row.work(phase), field) for row in rows for phase in phases)
        return sum(counts)

    def time(self, *, own: bool) -> Timed | None:
        """Of the phases that ran."""
        rows, prefix = (self.rows, "own_") if own else (self.rows[:1], "")
        works = [row.work(phase) for row in rows for phase in _TIMED]
        ran = [(getattr(work, f"{prefix}seconds"), getattr(work, f"{prefix}calls")) for work in works]
        return timed([seconds for seconds, calls in ran if seconds is not None or calls])

    def parameters(self, *, own: bool) -> int:
        """Distinct ones."""
        return sum(row.own_parameters for row in self.rows) if own else self.rows[0].parameters

    def peak(self) -> int | None:
        """The most bytes alive."""
        return self.rows[0].peak_bytes


class _Both(NamedTuple):
    """A module in both runs, or in one of them."""

    before: _Side | None
    after: _Side | None

    def change(self, figure: Callable[[_Side], float | None]) -> Change:
        """A figure of both sides."""
        first, second = (None if side is None else figure(side) for side in self)
        return Change(before=first, after=second)

    def times(self, *, own: bool) -> tuple[Timed | None, Timed | None]:
        """Of both sides."""
        first, second = (None if side is None else side.time(own=own) for side in self)
        return first, second

    def same_work(self, *, own: bool) -> bool:
        """Whether MACs and FLOPs of each timed phase are known to be the same."""
        works = [self.change(partial(_Side.work, field=field, phases=[phase], own=own)) for phase in _TIMED for field in ("macs", "flops")]
        return all(work.before is not None and work.before == work.after for work in works)

    def figures(self, judge: Judge | None, explained: float = 0.0, *, own: bool) -> Figures:
        """Its work and its time; this is judged where it can be."""
        first, second = self.times(own=own)
        if judge and self.same_work(own=own):
            time = judge.timing(first, second, explained)
        else:
            time = uncompared(first, second, self.change(partial(_Side.work, field="macs", phases=_TIMED, own=own)).ratio)
        work = {field: self.change(partial(_Side.work, field=field, phases=PHASES, own=own)) for field in ("macs", "flops", "bytes_moved")}
        return Figures(**work, parameters=self.change(partial(_Side.parameters, own=own)), time=time)


def _judge(both: Sequence[_Both]) -> Judge | None:
    """What the times are judged by, as the modules' own ones tell it."""
    times = [module.times(own=True) for module in both if module.same_work(own=True)]
    known = [(first, second) for first, second in times if first and second]
    root = both[0].times(own=False)[0]
    return judge_of(known, step=root.seconds if root else 0.0, times=2 * len(known))


def _modules(pairs: Sequence[Pair], both: Sequence[_Both], judge: Judge | None) -> tuple[ModuleDiff, ...]:
    """From below upwards: of an inclusive time only what no module below explains is news."""
    explained: dict[Place | None, float] = {}
    made = []
    for (one, other), sides in reversed(list(zip(pairs, both, strict=True))):
        own = sides.figures(judge, own=True)
        inside = _news(own.time) + sum(explained[child] for child in (one.below if one else ()))
        inclusive = sides.figures(judge, inside, own=False)
        explained[one] = _news(inclusive.time) or inside
        made.append(
            ModuleDiff(
                before=one.names[0] if one else None,
                after=other.names[0] if other else None,
                kind=other.kind if other else one.kind if one else "",
                own=own,
                inclusive=inclusive,
                peak_bytes=sides.change(_Side.peak),
            )
        )
    return tuple(reversed(made))


def _news(time: Timing) -> float:
    """The seconds that are."""
    return time.lost if time.verdict in NEWS and time.lost is not None else 0.0


def _phases(before: Pace, after: Pace, judge: Judge | None) -> dict[str, Timing]:
    names = dict.fromkeys([*before.phases, *after.phases])
    of_steps = judge_of_steps(judge, before.seconds, times=len(names))
    return {name: of_steps.timing(timed([before.phases.get(name)]), timed([after.phases.get(name)])) for name in names}


def _peak(profile: Profile) -> int | None:
    return profile.memory.peak_bytes if profile.memory else profile.modules[""].peak_bytes
