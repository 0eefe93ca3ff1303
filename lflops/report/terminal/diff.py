"""Two runs on a terminal: the changes in words, a table of the step and its phases, a table of the modules that changed."""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.compare.diff import Diff, ModuleDiff
from lflops.analyze.compare.module_pair import Change
from lflops.analyze.compare.regression_limits import Limit
from lflops.analyze.compare.significance import CHANGED, Timing
from lflops.report.terminal.tables import MARGIN, FittedTable, margin, text

__all__ = ["headline", "render_diff"]

_LISTED = 3
_LONG_NAME = 40
_OF_MODULES = {"forward", "backward"}
"""Phases that the modules' times show more exactly."""


def render_diff(diff: Diff, limits: Iterable[Limit] = (), *, everything: bool = False) -> RenderableType:
    """Two runs as text for a terminal.

    Args:
        diff: What changed.
        limits: The limits that the second run is checked against.
        everything: List every module, not only those that changed.
    """
    table = margin()
    for fact, (before, after) in diff.facts.items():
        table.add_row(fact.replace("_", " "), text(f"{_named(before)} → {_named(after)}", "yellow"))
    for i, line in enumerate(headline(diff)):
        table.add_row("" if i else "changed", text(line))
    for limit in limits:
        table.add_row("limit broken" if limit.broken else "limit held", text(_limit(limit, diff), "red" if limit.broken else ""))
    listed = [module for module in diff.modules if everything or _is_listed(module)]
    return Group(table, "", _run(diff), *(("", _modules(listed)) if listed else ()))


def headline(diff: Diff) -> tuple[str, ...]:
    """A sentence for each change, the most important first."""
    return (*_times(diff), *_work(diff), *_modules_added_or_removed(diff))


def _times(diff: Diff) -> Iterator[str]:
    for verdict, modules in (("slower", diff.slower), ("faster", diff.faster)):
        for module in modules[:_LISTED]:
            yield f"{_name(module)} is {_much(module.news)} {verdict} than the rest of the run{_a_step(module.news)}"
        if len(modules) > _LISTED:
            yield f"{len(modules) - _LISTED} more modules are {verdict}, by less"
    if diff.whole is None and diff.step.ratio is None:
        yield "times are not compared: one of the two has none"
    elif diff.whole is None:
        yield f"the step is {_pace(diff.step.ratio)}; modules are not judged: those that did the same work in both are too few"
    else:
        if not (diff.slower or diff.faster):
            yield "no module is slower or faster than the rest of the run, beyond the noise"
        median_of = diff.whole.modules
        yield f"the whole run is {_pace(diff.whole.ratio)}, as the median of {median_of} modules; what one does beyond that is its own"
    for name, phase in diff.phases.items():
        if phase.verdict in CHANGED and not (diff.whole and name in _OF_MODULES):
            yield f"{name} is {_much(phase)} {phase.verdict}{' than the rest of the run' if diff.whole else ''}{_a_step(phase)}"


def _work(diff: Diff) -> Iterator[str]:
    root = diff.modules[0].inclusive
    totals: list[tuple[str, Change, Callable[[float | None], str]]] = [
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
    ]
    changed = next((each for each in totals if each[1].differs), None)
    if root.macs.before is None or root.macs.after is None:
        yield "work is not compared: one of the two has times alone"
    elif changed:
        name, change, unit = changed
        yield f"{name} went from {unit(change.before)} to {unit(change.after)}, {_signed(change)}"
    else:
        moved = any(module.own.differs for module in diff.modules) or diff.added or diff.removed
        yield "the work is the same in all, and not module by module" if moved else "the work is the same, to the last FLOP and byte"
    if diff.peak_bytes.differs:
        peak = diff.peak_bytes
        yield f"peak live memory went from {units.size(peak.before)} to {units.size(peak.after)}, {_signed(peak)}"


def _modules_added_or_removed(diff: Diff) -> Iterator[str]:
    for verb, modules in (("added", diff.added), ("removed", diff.removed)):
        if top := _uppermost(modules):
            below = f", {len(modules)} modules with what is below" if len(modules) > len(top) else ""
            yield f"{verb}: {_few([_name(module) for module in top])}{below}"
    if renamed := [module for module in diff.modules if _is_renamed(module)]:
        yield f"renamed: {_few([_name(module) for module in renamed])}"


def _run(diff: Diff) -> FittedTable:
    """The step, its phases and the work of the whole model."""
    root = diff.modules[0].inclusive
    times = {"step": diff.step} | {f"  {name}": phase for name, phase in diff.phases.items()}
    figures: list[tuple[str, Change, Callable[[float | None], str]]] = [
        ("samples/s", diff.samples_per_second, units.count),
        ("tokens/s", diff.tokens_per_second, units.count),
        ("MFU", diff.mfu, units.percent),
        ("peak live memory", diff.peak_bytes, units.size),
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
        ("parameters", root.parameters, units.count),
    ]
    shown = [(name, change, unit) for name, change, unit in figures if change.before is not None or change.after is not None]
    return FittedTable(
        "the run",
        [*times, *(name for name, _, _ in shown)],
        {
            "before": [*(units.duration(time.before) for time in times.values()), *(unit(change.before) for _, change, unit in shown)],
            "after": [*(units.duration(time.after) for time in times.values()), *(unit(change.after) for _, change, unit in shown)],
            "change": [*(_percent(time.ratio) for time in times.values()), *(_signed(change) for _, change, _ in shown)],
            "beyond the whole": [*(_interval(time) if name != "step" else "" for name, time in times.items()), *("" for _ in shown)],
        },
        room=MARGIN,
    )


def _modules(modules: list[ModuleDiff]) -> FittedTable:
    """Each module's own time where that changed, else the inclusive one; and its own work."""
    names = [_name(module) for module in modules]
    times = [module.news for module in modules]
    columns = {
        "time before": [units.duration(time.before) for time in times],
        "after": [units.duration(time.after) for time in times],
        "change": [_percent(time.ratio) for time in times],
        "judged": [_verdict(module) for module in modules],
        "beyond the whole": [_interval(time) for time in times],
        "own MACs": [_signed(module.own.macs) for module in modules],
        "own FLOPs": [_signed(module.own.flops) for module in modules],
        "own params": [_signed(module.own.parameters) for module in modules],
        "peak": [_signed(module.peak_bytes) for module in modules],
        "time a MAC": [_percent(time.per_mac) for time in times],
    }
    return FittedTable("module", names, columns, room=max(MARGIN, min(max(map(len, names)), _LONG_NAME)))


def _is_listed(module: ModuleDiff) -> bool:
    return module.news.verdict in CHANGED or module.own.differs or module.before is None or module.after is None


def _verdict(module: ModuleDiff) -> str:
    if module.before is None or module.after is None:
        return "added" if module.before is None else "removed"
    return module.news.verdict or ("other work" if module.own.differs else units.UNKNOWN)


def _limit(limit: Limit, diff: Diff) -> str:
    if limit.name == "max_regress":
        return f"the step takes {_percent(diff.step.ratio)} ({_interval(diff.step)}), +{units.percent(limit.allowed)} are allowed"
    if limit.name == "min_mfu":
        return f"MFU is {units.percent(limit.found)}, {units.percent(limit.allowed)} at least are asked for"
    return f"peak live memory is {units.size(limit.found)}, {units.size(limit.allowed)} are allowed"


def _uppermost(modules: Iterable[ModuleDiff]) -> list[ModuleDiff]:
    listed = list(modules)
    names = {module.name for module in listed}
    return [module for module in listed if module.name.rpartition(".")[0] not in names]


def _few(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _name(module: ModuleDiff) -> str:
    """The name after; both names where the module itself was renamed."""
    shown = [module.before, module.after] if _is_renamed(module) else [module.name]
    return " → ".join(name or module.kind or "all of it" for name in shown)


def _is_renamed(module: ModuleDiff) -> bool:
    if not module.before or not module.after:
        return False
    return module.before.rpartition(".")[2] != module.after.rpartition(".")[2]


def _named(fact: str | int | None) -> str:
    return units.UNKNOWN if fact is None else str(fact)


def _pace(ratio: float | None) -> str:
    if ratio is None:
        return units.UNKNOWN
    shown = units.percent(abs(ratio - 1))
    return "as fast as before" if shown in {"0 %", "<0.1 %"} else f"{shown} {'slower' if ratio > 1 else 'faster'}"


def _much(time: Timing) -> str:
    return f"{units.percent(None if time.beyond is None else abs(time.beyond - 1))} ({_interval(time)})"


def _a_step(time: Timing) -> str:
    return "" if time.lost is None else f": {units.duration(abs(time.lost))} a step {'lost' if time.lost > 0 else 'won'}"


def _interval(time: Timing) -> str:
    return units.UNKNOWN if time.low is None or time.high is None else f"{_percent(time.low)} to {_percent(time.high)}"


def _signed(change: Change) -> str:
    return "0 %" if change.before == change.after == 0 else _percent(change.ratio)


def _percent(ratio: float | None) -> str:
    """What a ratio adds, with its sign."""
    shown = units.percent(None if ratio is None else ratio - 1)
    return f"+{shown}" if ratio is not None and ratio > 1 and shown[0].isdecimal() else shown
