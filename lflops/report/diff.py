"""Two runs compared, in sentences: the verdict on the step first, then what it comes from."""

from collections.abc import Callable, Iterator, Sequence

from lflops import units
from lflops.analysis.compare.compared_run import Change
from lflops.analysis.compare.diff import (
    BatchChange,
    Diff,
    DiffCause,
    ModuleDiff,
    batch_change,
    causes,
)
from lflops.analysis.compare.significance import CHANGED, Caveat, Timing

_LISTED = 5
_NAMED = 3
# of the step: so much is not the same, however wide the interval is
_NO_SMALL_CHANGE = 0.1
# from this ratio on a change reads as a multiple: 4.0 times, and not 300 % more
_TIMES = 2.0


def headline(diff: Diff) -> tuple[str, ...]:
    """The verdict on the step, then a sentence for each change, the largest first."""
    found, batch = causes(diff), batch_change(diff)
    timed = [cause for cause in found if cause.seconds is not None]
    several, whole = (
        [*map(_cause, timed[:_LISTED]), *_others(timed[_LISTED:])],
        [*_whole(diff, found)],
    )
    most = abs(timed[0].seconds or 0.0) if timed else 0.0
    is_first = (
        diff.whole is not None and abs(diff.whole.ratio - 1) * (diff.step.before or 0.0) > most
    )
    largest_first = (*whole, *several) if is_first else (*several, *whole)
    return (
        _verdict(diff),
        *_batch(diff, batch),
        *largest_first,
        *_work(diff, batch),
        *_names(diff, found),
    )


def is_news(diff: Diff) -> bool:
    """Whether anything changed beyond noise: a time, the work, the memory or the modules."""
    step = diff.step.verdict in CHANGED or bool(causes(diff))
    return (
        step
        or diff.peak_bytes.differs
        or any(module.self_work.differs or is_renamed(module) for module in diff.modules)
    )


def _verdict(diff: Diff) -> str:
    step = diff.step
    if step.before is None or step.after is None:
        return "Times are not compared: one of the two runs has none."
    went = f"{units.duration(step.before)} before, {units.duration(step.after)} after"
    if step.verdict == "same" and abs((step.ratio or 1.0) - 1) >= _NO_SMALL_CHANGE:
        as_much = f"two runs of the same code differ as much ({interval(step)})"
        return f"Cannot tell whether the step is slower or faster, because {as_much}: {went}."
    if step.verdict == "same":
        return f"The step takes as long as before, as far as two runs of the same code do ({interval(step)}): {went}."
    if step.verdict is None:
        why = reason(step.caveat, diff) if step.caveat else "one of its times is 0"
        return f"Cannot tell whether the step is slower or faster, because {why}: {went}."
    return f"The step is {_pace(step.ratio)} ({interval(step)}): {went}."


def reason(caveat: Caveat, diff: Diff) -> str:
    if caveat == "busy":
        before, after = map(units.percent, diff.cpu_lost)
        return f"other processes took a part of the CPU time that the step needed, {before} before and {after} after"
    return "too few steps were timed" if caveat == "few_steps" else "the steps vary too much"


def _batch(diff: Diff, batch: BatchChange | None) -> Iterator[str]:
    if batch is None:
        return
    per_sample = diff.step.ratio / batch.ratio if diff.step.ratio is not None else None
    cost = "" if per_sample is None else f" A sample takes {_share(per_sample)} time."
    work = ", and the work with it" if batch.explains_work else ""
    yield f"The batch went from {units.count(batch.before)} to {units.count(batch.after)} samples a step{work}.{cost}"


def _cause(cause: DiffCause) -> str:
    name, cost = _named(cause), _cost(cause.seconds)
    if cause.kind == "work":
        if cause.ratio is None:
            return f"{name} does other work{cost}."
        more = (
            f"{cause.ratio:.1f}× the work"
            if cause.ratio >= _TIMES
            else f"{_share(cause.ratio)} work"
        )
        return f"{name} does {more}{cost}."
    if cause.kind in ("added", "removed"):
        return f"{name} was {cause.kind}{cost}."
    bounds = (
        ""
        if cause.low is None or cause.high is None
        else f" ({signed(cause.low)} to {signed(cause.high)})"
    )
    return f"{name} is {_pace(cause.ratio)}{bounds}{cost}."


def _named(cause: DiffCause) -> str:
    return f"{cause.name} ×{cause.modules}" if cause.modules > 1 else cause.name


def _cost(seconds: float | None) -> str:
    return (
        ""
        if seconds is None
        else f": {'+' if seconds > 0 else '−'}{units.duration(abs(seconds))} a step"
    )


def _others(causes: Sequence[DiffCause]) -> Iterator[str]:
    if causes:
        together = sum(cause.seconds or 0.0 for cause in causes)
        several = "1 more change is" if len(causes) == 1 else f"{len(causes)} more changes are"
        yield f"{several} smaller, together{_cost(together)[1:]}."


def _whole(diff: Diff, found: Sequence[DiffCause]) -> Iterator[str]:
    if diff.step.before is None or diff.step.after is None:
        return
    if diff.unreliable:
        runs = " and ".join(diff.unreliable)
        yield f"Modules are not judged: the profile {runs} says that its modules' times are no measure."
    elif diff.whole is None:
        yield "Modules are not judged: those with times and the same work in both runs are too few."
    else:
        if doubtful := sum(module.news.caveat == "busy" for module in diff.modules):
            yield f"Cannot tell of {doubtful} modules whether they are slower or faster: {reason('busy', diff)}."
        elif not any(cause.kind in ("slower", "faster", "work") for cause in found):
            yield "No module is slower or faster than the others, beyond the noise."
        if abs(diff.whole.ratio - 1) >= diff.whole.error and _pace(diff.whole.ratio) != _SAME:
            median = f"the median of {diff.whole.modules} with the same work"
            yield f"All other modules are {_pace(diff.whole.ratio)}, {median}: the machine was another one, or busier or idler."


def _work(diff: Diff, batch: BatchChange | None) -> Iterator[str]:
    root = diff.modules[0].inclusive
    totals: list[tuple[str, Change, Callable[[float | None], str]]] = [
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
    ]
    changed = next((each for each in totals if each[1].differs), None)
    if root.macs.before is None or root.macs.after is None:
        yield "Work is not compared: one of the two runs has only times."
    elif changed and not (batch and batch.explains_work):
        name, change, unit = changed
        yield f"The {name} of a step went from {unit(change.before)} to {unit(change.after)}, {signed(change.ratio)}."
    elif not changed:
        moved = (
            any(module.self_work.differs for module in diff.modules) or diff.added or diff.removed
        )
        yield (
            "The total work is the same, but not module by module."
            if moved
            else "The work is the same, to the last FLOP and byte."
        )
    if diff.peak_bytes.differs:
        peak = diff.peak_bytes
        yield f"Peak live memory went from {units.size(peak.before)} to {units.size(peak.after)}, {signed(peak.ratio)}."


def _names(diff: Diff, found: Sequence[DiffCause]) -> Iterator[str]:
    for kind in ("added", "removed"):
        if untimed := [
            _named(cause) for cause in found if cause.kind == kind and cause.seconds is None
        ]:
            yield f"{kind.capitalize()}: {_few(untimed)}."
    if renamed := [module_name(module) for module in diff.modules if is_renamed(module)]:
        yield f"Renamed: {_few(renamed)}."


def module_name(module: ModuleDiff) -> str:
    """The name after; both names where the module itself was renamed."""
    shown = [module.before, module.after] if is_renamed(module) else [module.name]
    return " → ".join(name or module.kind or "all of it" for name in shown)


def is_renamed(module: ModuleDiff) -> bool:
    """Whether the last part of its name is another one."""
    if not module.before or not module.after:
        return False
    return module.before.rpartition(".")[2] != module.after.rpartition(".")[2]


def interval(time: Timing) -> str:
    """The interval of a time's ratio, as what it adds."""
    return (
        units.UNKNOWN
        if time.low is None or time.high is None
        else f"{signed(time.low)} to {signed(time.high)}"
    )


def signed(ratio: float | None) -> str:
    """Write what a ratio adds, with its sign; a large one as a multiple."""
    if ratio is not None and ratio >= 10:
        return f"×{units.count(round(ratio))}"
    shown = units.percent(None if ratio is None else ratio - 1)
    return f"+{shown}" if ratio is not None and ratio > 1 and shown[0].isdecimal() else shown


_SAME = "as fast as before"


def _pace(ratio: float | None) -> str:
    if ratio is None:
        return units.UNKNOWN
    if ratio >= _TIMES:
        return f"{ratio:.1f}× as slow" if ratio < 10 else f"{units.count(round(ratio))}× as slow"
    shown = units.percent(abs(ratio - 1))
    return _SAME if shown in {"0 %", "<0.1 %"} else f"{shown} {'slower' if ratio > 1 else 'faster'}"


def _share(ratio: float) -> str:
    shown = units.percent(abs(ratio - 1))
    return (
        "the same" if shown in {"0 %", "<0.1 %"} else f"{shown} {'more' if ratio > 1 else 'less'}"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
