"""Two runs of a model, module by module: what changed in their work, and in the time that the same work takes."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from lflops.analyze.compare.matching import ModuleNode, Pair, matched
from lflops.analyze.compare.module_pair import Change, ModuleFigures, ModulePair, ModuleSide
from lflops.analyze.compare.significance import NEWS, CommonFactor, Judge, Timing, Verdict, judge_of, judge_of_steps, timed
from lflops.analyze.speed.step_times import StepTimes, step_times
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import Profile
from lflops.profile.records import PHASES, Phase

__all__ = ["FACTS", "Diff", "ModuleDiff", "diff", "peak", "phases_of"]

FACTS = ("kind", "device_name", "dtype", "precision", "strategy", "world_size", "samples_per_step", "tokens_per_step", "accumulation")
"""Of a run: what is told where two differ in it."""

_Fact = str | int | None


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
    own: ModuleFigures
    inclusive: ModuleFigures
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
        facts: What differs in the circumstances of the runs, as device, dtype or samples a step: before and after. The same of
            `phases` that ran: what only one run has, as an optimizer, is in no figure.
        whole: What happened to all modules alike, as on a slower machine; it is taken out of their times before they are judged.
        step: Of the clean steps; judged as it is, with nothing taken out.
        phases: As the steps tell them; judged as the modules are.
        mfu: A share of 1.
        samples_per_second: Of the clean steps. So is `tokens_per_second`.
        peak_bytes: The most bytes alive.
        modules: Those before in their order, the root first, then what was added.
    """

    facts: Mapping[str, tuple[_Fact, _Fact]]
    whole: CommonFactor | None
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
    steps' spread decides, as noise is none (the docstring of `significance` says how). An estimate, or a count, has no times: only its
    work and
    its memory are compared.

    Args:
        before: A profile.
        after: Another one, of the same model or of what became of it.
    """
    pairs = matched(before, after)
    phases = _shared(phases_of(before), phases_of(after))
    both = [ModulePair(ModuleSide.of(before, one, phases), ModuleSide.of(after, other, phases)) for one, other in pairs]
    judge = _judge(both)
    first, second = step_times(before), step_times(after)
    return Diff(
        facts={name: (one, other) for name, one, other in _facts(before, after) if one != other},
        whole=judge.whole if judge else None,
        step=judge_of_steps(None, first.seconds, times=1).timing(timed([first.seconds]), timed([second.seconds])),
        phases=_phases(first, second, judge),
        mfu=Change(before=utilization(before).mfu, after=utilization(after).mfu),
        samples_per_second=Change(before=first.samples_per_second, after=second.samples_per_second),
        tokens_per_second=Change(before=first.tokens_per_second, after=second.tokens_per_second),
        peak_bytes=Change(before=peak(before), after=peak(after)),
        modules=_modules(pairs, both, judge),
    )


def _judge(both: Sequence[ModulePair]) -> Judge | None:
    """What the times are judged by, as the modules' own ones tell it."""
    times = [module.times(own=True) for module in both if module.same_work(own=True)]
    known = [(first, second) for first, second in times if first and second]
    root = both[0].times(own=False)[0]
    return judge_of(known, step=root.seconds if root else 0.0, times=2 * len(known))


def _modules(pairs: Sequence[Pair], both: Sequence[ModulePair], judge: Judge | None) -> tuple[ModuleDiff, ...]:
    """From below upwards: of an inclusive time only what no module below explains is news."""
    explained: dict[ModuleNode | None, float] = {}
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
                peak_bytes=sides.change(ModuleSide.peak),
            )
        )
    return tuple(reversed(made))


def _news(time: Timing) -> float:
    """The seconds that are."""
    return time.lost if time.verdict in NEWS and time.lost is not None else 0.0


def _phases(before: StepTimes, after: StepTimes, judge: Judge | None) -> dict[str, Timing]:
    names = dict.fromkeys([*before.phases, *after.phases])
    of_steps = judge_of_steps(judge, before.seconds, times=len(names))
    return {name: of_steps.timing(timed([before.phases.get(name)]), timed([after.phases.get(name)])) for name in names}


def peak(profile: Profile) -> int | None:
    """The most bytes alive."""
    return profile.memory.peak_bytes if profile.memory else profile.modules[""].peak_bytes


def phases_of(profile: Profile) -> tuple[Phase, ...]:
    """Those in which anything ran."""
    return tuple(phase for phase in PHASES if profile.modules[""].work(phase).calls)


def _shared(before: Sequence[Phase], after: Sequence[Phase]) -> tuple[Phase, ...]:
    """Those of both. Of two runs that go backward, that only one of them recomputes is what changed."""
    shared = {*before} & {*after}
    if "backward" in shared:
        shared.add("recompute")
    return tuple(phase for phase in PHASES if phase in shared)


def _facts(before: Profile, after: Profile) -> Iterator[tuple[str, _Fact, _Fact]]:
    yield from ((fact, getattr(before.run, fact), getattr(after.run, fact)) for fact in FACTS)
    if before.cells and after.cells:
        one, other = (", ".join(phase for phase in phases_of(profile) if phase != "recompute") for profile in (before, after))
        yield "phases", one, other
