"""A profile in a few sentences: what the step reached, which rank is slow, where most of the rest went, and the outliers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.outliers import Doubt
from lflops.analyze.speed.budget import IN_MODULES, Budget
from lflops.profile.module_names import ancestry
from lflops.profile.notes import are_times_far_off
from lflops.report.lines.budget import advice, what_it_is
from lflops.report.lines.ranks import slowest_rank
from lflops.report.lines.text import plain

__all__ = ["first_steps", "modules_of_part", "verdict"]

_MOST = 0.6
"""A part is mostly in a module that has this share of it."""
_LISTED = 3
_LARGE_PHASE = 0.1
_OUTLIERS = 2
_REMEASURE = "If it was measured, measure it again on an idle machine: lflops hardware --measure."
_FIRST = 2
_NO_WORK = ("data", "transfer", "clip", "optimizer", "other")
"""Phases that are no work of the model's modules."""


def verdict(analysis: Analysis) -> tuple[str, ...]:
    """The sentences, the most important first."""
    lost = _largest_first([*slowest_rank(analysis), *_lost(analysis)])
    return (*_reached(analysis), *lost, *_outliers(analysis))


def _reached(analysis: Analysis) -> Iterator[str]:
    run, reached = analysis.profile.run, analysis.utilization
    one = "step" if run.kind == "training" else "pass"
    seconds = analysis.step_times.seconds
    if reached.mfu is not None:
        yield f"{units.percent(reached.mfu)} MFU."
        if reached.mfu > 1:
            yield f"No step can exceed the peak, so the peak of {reached.hardware} is too low here. {_REMEASURE}"
    elif seconds is not None:
        yield f"A {one} takes {units.duration(seconds.median)}."
    elif analysis.profile.is_counted:
        yield from _planned(analysis)


def _planned(analysis: Analysis) -> Iterator[str]:
    """Of a count or an estimate: the least time, whether it fits, and the work where nothing else is known."""
    bound, room = analysis.lower_bound, analysis.room
    if bound is not None:
        yield f"A step takes at least {units.duration(bound.seconds)} on {bound.hardware}."
    if room is not None:
        need = f"{units.size(room.needed_bytes)} of {units.size(room.usable_bytes)}"
        yield {"fits": f"It fits: {need}.", "tight": f"It is tight: {need}.", "does not fit": f"It does not fit: {need}."}[room.verdict]
    if bound is None and room is None:
        yield f"A step has {units.count(sum(counts.macs for counts in analysis.totals.values()))} MACs. Nothing was timed."


def first_steps(analysis: Analysis) -> Iterator[str]:
    """What to do first: the largest part of the step that is no useful work, with what shortens it, and slow modules."""
    parts = [(name, share) for name, share in _lost_parts(analysis)[:_FIRST] if share >= _LARGE_PHASE]
    lost = [(share, f"{_lost_part(analysis, name, share)} {advice(name)}.") for name, share in parts]
    yield from _largest_first([*slowest_rank(analysis), *lost])
    yield from _outliers(analysis)


def _largest_first(sentences: Iterable[tuple[float, str]]) -> list[str]:
    """The sentences in the falling order of their shares of the step."""
    return [each for _, each in sorted(sentences, key=lambda sentence: -sentence[0])]


def _lost(analysis: Analysis) -> Iterator[tuple[float, str]]:
    parts = _lost_parts(analysis)
    if analysis.budget is None:
        parts = [(name, share) for name, share in parts if share >= _LARGE_PHASE and name in ("data", "transfer")]
    else:
        parts = parts[:1]
    yield from ((share, _lost_part(analysis, name, share)) for name, share in parts)


def _lost_parts(analysis: Analysis) -> list[tuple[str, float]]:
    """Parts of the budget that are no useful work; without a budget, phases that are no work of the model. The largest first."""
    if analysis.budget is not None:
        parts = {name: share for name, share in analysis.budget.parts.items() if name != "useful"}
    else:
        clean = analysis.step_times
        step = clean.seconds.median if clean.seconds else 0.0
        parts = {name: seconds.median / step for name, seconds in clean.phases.items() if name in _NO_WORK} if step else {}
    return sorted(parts.items(), key=lambda part: -part[1])


def _lost_part(analysis: Analysis, name: str, share: float) -> str:
    """A sentence, as `59.3 % of the step is memory-bound work, mostly in blocks.*.norm`."""
    budget = analysis.budget
    is_doubtful = name in IN_MODULES and are_times_far_off(analysis.profile.notes)
    where = "" if is_doubtful or budget is None else _mostly_in(analysis, budget, name)
    return f"{units.percent(share)} of the step is {what_it_is(analysis.profile, budget, name)}{where}."


def _mostly_in(analysis: Analysis, budget: Budget, part: str) -> str:
    """The innermost modules that have most of a part."""
    name = _innermost(analysis, budget, part)
    return f", mostly in {plain(name)}" if name else ""


def _innermost(analysis: Analysis, budget: Budget, part: str) -> str:
    shares: defaultdict[str, float] = defaultdict(float)
    for module, parts in budget.modules.items():
        for above in ancestry(module) if part in IN_MODULES else ():
            shares[analysis.patterns.get(above, above)] += parts[part]
    most = [name for name, share in shares.items() if name and share >= _MOST * shares[""]]
    return max(most, key=lambda name: name.count("."), default="")


def modules_of_part(analysis: Analysis, budget: Budget, part: str) -> list[tuple[str, float]]:
    """The modules, repeated ones as their pattern, with the largest shares of the step in a part of its budget."""
    shares: defaultdict[str, float] = defaultdict(float)
    for module, parts in budget.modules.items():
        if part in IN_MODULES and parts[part]:
            shares[analysis.patterns.get(module, module)] += parts[part]
    return sorted(shares.items(), key=lambda item: -item[1])[:_LISTED]


_DOUBT: Mapping[Doubt, str] = {
    "busy": "other processes used the CPU",
    "few_steps": "too few steps were timed by module; active=8 in the schedule times enough",
    "varied": "the steps timed by module vary too much",
    "scaled": "timing the modules changed their times too much",
}


def _outliers(analysis: Analysis) -> Iterator[str]:
    if analysis.outliers_doubt and not analysis.outliers:
        yield f"Cannot tell whether a module is slow among its equals: {_DOUBT[analysis.outliers_doubt]}."
    for each in analysis.outliers[:_OUTLIERS]:
        ratio = f"{each.seconds / each.usual_seconds:.1f}× as long as the {each.others} others like it"
        yield f"{plain(each.module)} takes {ratio}: {units.duration(each.excess)} more a step."
