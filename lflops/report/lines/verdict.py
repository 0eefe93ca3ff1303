"""A profile in a few sentences: what the step reached, where most of the rest went, and the outliers."""

from collections import defaultdict
from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.speed.budget import IN_MODULES, Budget
from lflops.profile.module_names import ancestry
from lflops.profile.notes import are_times_far_off
from lflops.report.lines.budget import what_it_is
from lflops.report.lines.text import plain

__all__ = ["modules_of_part", "verdict"]

_MOST = 0.6
"""A part is mostly in a module that has this share of it."""
_LISTED = 3
_LARGE_PHASE = 0.1
_OUTLIERS = 2


def verdict(analysis: Analysis) -> tuple[str, ...]:
    """The sentences, the most important first."""
    return (*_reached(analysis), *_lost(analysis), *_outliers(analysis))


def _reached(analysis: Analysis) -> Iterator[str]:
    run, reached = analysis.profile.run, analysis.utilization
    one = "step" if run.kind == "training" else "pass"
    seconds = analysis.step_times.seconds
    if reached.mfu is not None:
        yield f"{units.percent(reached.mfu)} MFU."
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


def _lost(analysis: Analysis) -> Iterator[str]:
    """The largest part of the budget that is no useful work; without a budget, phases that are no work of the model."""
    budget = analysis.budget
    if budget is not None:
        parts = {name: share for name, share in budget.parts.items() if name != "useful"}
        if parts:
            name = max(parts, key=lambda part: parts[part])
            is_doubtful = name in IN_MODULES and are_times_far_off(analysis.profile.notes)
            where = "" if is_doubtful else _mostly_in(analysis, budget, name)
            yield f"{units.percent(parts[name])} of the step {what_it_is(analysis.profile, budget, name)}{where}."
        return
    clean = analysis.step_times
    if clean.seconds is None or not clean.seconds.median:
        return
    phases = {name: seconds.median / clean.seconds.median for name, seconds in clean.phases.items()}
    for name in ("data", "transfer"):
        if phases.get(name, 0.0) >= _LARGE_PHASE:
            yield f"{units.percent(phases[name])} of the step {'is the wait for data' if name == 'data' else 'is the transfer of batches'}."


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


def _outliers(analysis: Analysis) -> Iterator[str]:
    if are_times_far_off(analysis.profile.notes):
        return
    for each in analysis.outliers[:_OUTLIERS]:
        ratio = f"{each.seconds / each.usual_seconds:.1f}× as long as the {each.others} others like it"
        yield f"{plain(each.module)} takes {ratio}: {units.duration(each.excess)} a step."
