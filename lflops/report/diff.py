"""Describe the comparison of two runs in sentences.

The first sentences say whether the step became slower or faster. The other sentences say which
modules, phases or amounts of work changed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
from lflops.profile.module_names import last_part
from lflops.report.text import phase_label, times_mark

_LISTED = 5
"""Maximum number of changes that get a sentence each. All other changes share one sentence."""

_NAMED = 3
"""Maximum number of modules that are listed by name."""

_SMALL_CHANGE = 0.1
"""A change of the step time by at least this share is never called unchanged.

If such a change is within the noise, the report says that it cannot tell whether the step changed.
"""

_MULTIPLE = 2.0
"""Smallest ratio that is written as a multiple, such as 4.0× instead of +300 %."""

_SAME = "as fast as before"


def headline(diff: Diff) -> tuple[str, ...]:
    """Return the comparison as sentences.

    A change of the MACs comes first, unless the batch size explains it. Then come the verdict on
    the step time, and the changes of modules and phases, the largest first. The last sentences are
    about work, memory, and added, removed and renamed modules.
    """
    found = causes(diff)
    batch = batch_change(diff)
    timed = [cause for cause in found if cause.seconds is not None]
    of_causes = [_cause(cause) for cause in timed[:_LISTED]]
    of_causes += _smaller_changes(timed[_LISTED:])
    of_whole = list(_whole(diff, found))
    largest = 0.0
    if timed:
        largest = abs(timed[0].seconds or 0.0)
    if _change_of_all_modules(diff) > largest:
        changes = [*of_whole, *of_causes]
    else:
        changes = [*of_causes, *of_whole]
    work = _work(diff, batch)
    macs = diff.modules[0].inclusive.macs
    if macs.differs and macs.before is not None and macs.after is not None:
        # Counts have no noise, so they come before times.
        sentences = [*work, _verdict(diff), *_batch(diff, batch), *changes]
    else:
        sentences = [_verdict(diff), *_batch(diff, batch), *changes, *work]
    return (*sentences, *_memory(diff), *_names(diff, found))


def _module_with(diff: Diff, added: float) -> str:
    """Return the name of the innermost module whose MACs changed by `added`, the step's change.

    Return the empty string if there is no such module below the root.
    """
    found = ""
    for module in diff.modules[1:]:
        macs = module.inclusive.macs
        here = (macs.after or 0) - (macs.before or 0)
        is_deeper = module.name.count(".") >= found.count(".")
        if here == added and is_deeper:
            found = module.name
    return found


def _change_of_all_modules(diff: Diff) -> float:
    """Estimate by how many seconds the step changed because of a common change of all modules.

    In a common change, all modules become slower or faster by about the same ratio, for example
    because the machine is slower.
    """
    if diff.whole is None:
        return 0.0
    return abs(diff.whole.ratio - 1) * (diff.step.before or 0.0)


def is_news(diff: Diff) -> bool:
    """Return whether a time changed by more than noise, or the work, memory or modules changed."""
    if diff.step.verdict in CHANGED or causes(diff) or diff.peak_bytes.differs:
        return True
    if _is_uniform_change(diff):
        return True
    return any(module.self_work.differs or is_renamed(module) for module in diff.modules)


def _verdict(diff: Diff) -> str:
    step = diff.step
    if step.before is None or step.after is None:
        return "Times are not compared: one of the two runs has no times."
    times = f"{units.duration(step.before)} before, {units.duration(step.after)} after"
    if step.verdict is None:
        why = reason(step.caveat, diff) if step.caveat else "one of the two times is 0"
        return f"Cannot tell whether the step is slower or faster, because {why}: {times}."
    if step.verdict != "same":
        return f"The step is {_pace(step.ratio)} ({interval(step)}): {times}."
    if abs((step.ratio or 1.0) - 1) >= _SMALL_CHANGE:
        return (
            "Cannot tell whether the step is slower or faster, because two runs of the same code "
            f"can differ by this much ({interval(step)}): {times}."
        )
    return (
        "The step takes as long as before, within the usual difference between two runs of the "
        f"same code ({interval(step)}): {times}."
    )


def reason(caveat: Caveat, diff: Diff) -> str:
    """Explain why it is unknown whether a time changed, such as `too few steps were timed`."""
    if caveat == "few_steps":
        return "too few steps were timed"
    if caveat == "varied":
        return "the steps vary too much"
    before, after = diff.cpu_lost
    return (
        "other processes took CPU time from the steps: "
        f"{units.percent(before)} in the first run, {units.percent(after)} in the second run"
    )


def _batch(diff: Diff, batch: BatchChange | None) -> Iterator[str]:
    if batch is None:
        return
    sizes = f"{units.count(batch.before)} to {units.count(batch.after)}"
    work = ""
    if batch.explains_work:
        work = ", and the work changed in proportion"
    sentence = f"The batch went from {sizes} samples per step{work}."
    if diff.step.ratio is not None:
        sentence += f" A sample takes {_amount(diff.step.ratio / batch.ratio)} time."
    yield sentence


def _cause(cause: DiffCause) -> str:
    return f"{_named(cause)} {_change(cause)}{_cost(cause.seconds)}."


def _change(cause: DiffCause) -> str:
    """Describe the change of a module or phase, such as `was added` or `is 12 % slower`."""
    if cause.kind in ("added", "removed"):
        return f"was {cause.kind}"
    if cause.kind == "work":
        if cause.ratio is None:
            return "does different work"
        if cause.ratio >= _MULTIPLE:
            return f"does {cause.ratio:.1f}× as much work"
        return f"does {_amount(cause.ratio)} work"
    bounds = ""
    if cause.low is not None and cause.high is not None:
        bounds = f" ({signed(cause.low)} to {signed(cause.high)})"
    if cause.kind == "phase":
        return f"takes {_pace(cause.ratio, _TAKES)}{bounds}"
    return f"is {_pace(cause.ratio)}{bounds}"


def _named(cause: DiffCause) -> str:
    if cause.kind == "phase":
        return phase_label(cause.name)
    return f"{cause.name}{times_mark(cause.modules)}"


def _cost(seconds: float | None) -> str:
    if seconds is None:
        return ""
    sign = "+" if seconds > 0 else "−"
    return f": {sign}{units.duration(abs(seconds))} per step"


def _smaller_changes(causes: Sequence[DiffCause]) -> Iterator[str]:
    """Yield one sentence about all the changes that are too small to get a sentence each."""
    if not causes:
        return
    together = sum(cause.seconds or 0.0 for cause in causes)
    changes = "1 smaller change is" if len(causes) == 1 else f"{len(causes)} smaller changes are"
    yield f"{changes} not listed{_cost(together)} in total."


def _whole(diff: Diff, found: Sequence[DiffCause]) -> Iterator[str]:
    """Yield sentences about all modules together.

    They say that modules cannot be compared and why, that no module changed, or that all modules
    became slower or faster by about the same ratio.
    """
    if diff.step.before is None or diff.step.after is None:
        return
    if diff.unreliable:
        runs = " and ".join(diff.unreliable)
        yield f"Modules are not compared: module times are unreliable in the run {runs}."
        return
    if diff.whole is None:
        yield (
            "Modules are not compared: too few modules were timed in both runs with the same work."
        )
        return
    undecided = sum(module.news.caveat == "busy" for module in diff.modules)
    if undecided:
        yield (
            f"Cannot tell whether {undecided} modules are slower or faster, because "
            f"{reason('busy', diff)}."
        )
    elif not any(cause.kind in ("slower", "faster", "work") for cause in found):
        yield "No module became slower or faster than the others by more than noise."
    if _is_uniform_change(diff):
        yield (
            f"All other modules are {_pace(diff.whole.ratio)} (the median of {diff.whole.modules} "
            "modules with the same work): the second run used a different machine, or the load "
            "of the machine changed."
        )


def _is_uniform_change(diff: Diff) -> bool:
    """Return whether all modules became slower or faster by about the same ratio.

    The change must be larger than its measurement error.
    """
    whole = diff.whole
    if whole is None or diff.unreliable:
        return False
    return abs(whole.ratio - 1) >= whole.error and _pace(whole.ratio) != _SAME


def _work(diff: Diff, batch: BatchChange | None) -> Iterator[str]:
    """Yield a sentence about the work: MACs, FLOPs and bytes.

    There is none if a change of the batch size explains the change of the work.
    """
    root = diff.modules[0].inclusive
    change = _change_of_work(diff)
    if root.macs.before is None or root.macs.after is None:
        yield "Work is not compared: the work of one of the two runs was not counted."
    elif change is None:
        is_elsewhere = any(module.self_work.differs for module in diff.modules)
        if is_elsewhere or diff.added or diff.removed:
            yield "The total work is the same, but the work of some modules changed."
        else:
            yield "The work is the same, to the last FLOP and byte."
    elif batch is None or not batch.explains_work:
        yield change


def _memory(diff: Diff) -> Iterator[str]:
    """Yield a sentence about how the peak of live memory changed, if it did."""
    peak = diff.peak_bytes
    if peak.differs:
        sizes = f"{units.size(peak.before)} to {units.size(peak.after)}"
        yield f"Peak live memory went from {sizes} ({signed(peak.ratio)})."


def _change_of_work(diff: Diff) -> str | None:
    """Return a sentence about how the work of a step changed, or `None` if it did not.

    The sentence names the first total that changed: the MACs, the FLOPs or the bytes moved. For the
    MACs, it also names the module with the whole change, if there is one.
    """
    root = diff.modules[0].inclusive
    totals: list[tuple[str, Change, Callable[[float | None], str]]] = [
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
    ]
    for name, change, text in totals:
        if change.differs:
            amounts = f"{text(change.before)} to {text(change.after)}"
            where = ""
            if name == "MACs":
                where = _module_with(diff, (change.after or 0) - (change.before or 0))
            place = f", and the whole change is in {where}" if where else ""
            return f"The {name} of a step went from {amounts} ({signed(change.ratio)}){place}."
    return None


def _names(diff: Diff, found: Sequence[DiffCause]) -> Iterator[str]:
    """Yield sentences with the names of added, removed and renamed modules.

    An added or removed module whose time is known is left out, because `headline` has another
    sentence about it.
    """
    for kind in ("added", "removed"):
        untimed = []
        for cause in found:
            if cause.kind == kind and cause.seconds is None:
                untimed.append(_named(cause))
        if untimed:
            yield f"Modules {kind}: {_first(untimed)}."
    renamed = []
    for module in diff.modules:
        if is_renamed(module):
            renamed.append(module_name(module))
    if renamed:
        yield f"Modules renamed: {_first(renamed)}."


def module_name(module: ModuleDiff) -> str:
    """Return the name of a module in the second run. For a renamed module, return `old → new`."""
    names = [module.before, module.after] if is_renamed(module) else [module.name]
    return " → ".join(name or module.kind or "the whole model" for name in names)


def is_renamed(module: ModuleDiff) -> bool:
    """Return whether the last part of a module's name changed, such as `mlp` in `layers.3.mlp`."""
    if not module.before or not module.after:
        return False
    return last_part(module.before) != last_part(module.after)


def interval(time: Timing) -> str:
    """Format the confidence interval of a change in time, such as `−2 % to +5 %`."""
    if time.low is None or time.high is None:
        return units.UNKNOWN
    return f"{signed(time.low)} to {signed(time.high)}"


def signed(ratio: float | None) -> str:
    """Format a ratio as a change with its sign, such as `+12 %`, or a large ratio as `×14`."""
    if ratio is None:
        return units.UNKNOWN
    if ratio >= 10:
        return f"×{units.count(round(ratio))}"
    shown = units.percent(ratio - 1)
    return f"+{shown}" if ratio > 1 and shown[0].isdecimal() else shown


class _Comparative(NamedTuple):
    """The words that compare two times, for sentences with one verb."""

    same: str
    multiple: str
    more: str
    less: str


_IS = _Comparative(same=_SAME, multiple="as slow", more="slower", less="faster")
_TAKES = _Comparative(same="as long as before", multiple="as long", more="longer", less="less time")


def _pace(ratio: float | None, words: _Comparative = _IS) -> str:
    """Describe the ratio of two times, such as `12 % slower` or `4.0× as slow`."""
    if ratio is None:
        return units.UNKNOWN
    if ratio >= _MULTIPLE:
        multiple = f"{ratio:.1f}" if ratio < 10 else units.count(round(ratio))
        return f"{multiple}× {words.multiple}"
    shown = units.percent(abs(ratio - 1))
    if shown in {"0 %", "<0.1 %"}:
        return words.same
    return f"{shown} {words.more if ratio > 1 else words.less}"


def _amount(ratio: float) -> str:
    shown = units.percent(abs(ratio - 1))
    if shown in {"0 %", "<0.1 %"}:
        return "the same"
    return f"{shown} {'more' if ratio > 1 else 'less'}"


def _first(names: Sequence[str]) -> str:
    """List the first names, such as `a, b, c and 4 more`."""
    more = ""
    if len(names) > _NAMED:
        more = f" and {len(names) - _NAMED} more"
    return f"{', '.join(names[:_NAMED])}{more}"
