"""Two runs on a terminal.

The changes in words, a table of the step and its phases, a table of the modules that changed.
"""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analysis.compare.compared_run import Change
from lflops.analysis.compare.diff import Diff, Limit, ModuleDiff
from lflops.analysis.compare.significance import CHANGED
from lflops.report.diff import headline, interval, module_name, reason, signed
from lflops.report.terminal.tables import MARGIN, FittedTable, margin, prose, text

_LONG_NAME = 40


def render_diff(
    diff: Diff,
    limits: Iterable[Limit] = (),
    faults: Iterable[tuple[str, str]] = (),
    *,
    everything: bool = False,
) -> RenderableType:
    """Two runs for a terminal, with limits of the second, labels and sentences of faults.

    By `everything` also what did not change.
    """
    rows: list[tuple[str, RenderableType]] = []
    for fact, sides in diff.facts.items():
        before, after = (units.UNKNOWN if side is None else str(side) for side in sides)
        rows.append((fact.replace("_", " "), text(f"{before} → {after}", "yellow")))
    rows += [("changed", prose(line)) for line in headline(diff)]
    rows += [(label, prose(said)) for label, said in faults]
    for limit in limits:
        status, style = (
            ("cannot tell", "yellow")
            if limit.doubt
            else ("limit broken", "red")
            if limit.broken
            else ("limit held", "")
        )
        rows.append(
            (
                status,
                prose(
                    _limit(limit, diff) + (f": {reason(limit.doubt, diff)}" if limit.doubt else ""),
                    style,
                ),
            )
        )
    changed = [
        each
        for each in diff.modules
        if each.news.verdict in CHANGED or each.own.differs or None in (each.before, each.after)
    ]
    listed = diff.modules if everything else changed
    return Group(margin(rows), "", _run(diff), *(("", _modules(listed)) if listed else ()))


def _run(diff: Diff) -> FittedTable:
    root = diff.modules[0].inclusive
    times = {"median step": diff.step} | {f"  {name}": phase for name, phase in diff.phases.items()}
    figures: list[tuple[str, Change, Callable[[float | None], str]]] = [
        ("samples/s", diff.samples_per_second, units.rate),
        ("tokens/s", diff.tokens_per_second, units.rate),
        ("MFU", diff.mfu, units.of_peak),
        ("peak live memory", diff.peak_bytes, units.size),
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
        ("parameters", root.parameters, units.count),
    ]
    rows = [
        (
            name,
            units.duration(time.before),
            units.duration(time.after),
            signed(time.ratio),
            interval(time) if time is not diff.step else "",
        )
        for name, time in times.items()
    ]
    known = [each for each in figures if (each[1].before, each[1].after) != (None, None)]
    rows += [
        (name, unit(change.before), unit(change.after), _signed(change), "")
        for name, change, unit in known
    ]
    names, *columns = zip(*rows, strict=True)
    return FittedTable(
        "the run",
        names,
        dict(zip(("before", "after", "change", "beyond the whole"), columns, strict=True)),
        room=MARGIN,
    )


def _modules(modules: Sequence[ModuleDiff]) -> FittedTable:
    names = [module_name(module) for module in modules]
    times = [module.news for module in modules]
    columns = {
        "time before": [units.duration(time.before) for time in times],
        "after": [units.duration(time.after) for time in times],
        "change": [signed(time.ratio) for time in times],
        "judged": [_verdict(module) for module in modules],
        "beyond the whole": [interval(time) for time in times],
        "own MACs": [_signed(module.own.macs) for module in modules],
        "own FLOPs": [_signed(module.own.flops) for module in modules],
        "own params": [_signed(module.own.parameters) for module in modules],
        "peak": [_signed(module.peak_bytes) for module in modules],
        "time a MAC": [signed(time.per_mac) for time in times],
    }
    return FittedTable(
        "module", names, columns, room=max(MARGIN, min(max(map(len, names)), _LONG_NAME))
    )


def _verdict(module: ModuleDiff) -> str:
    if module.before is None or module.after is None:
        return "added" if module.before is None else "removed"
    return module.news.verdict or ("other work" if module.own.differs else units.UNKNOWN)


def _limit(limit: Limit, diff: Diff) -> str:
    if limit.name == "max_regress":
        bounds = "" if diff.step.low is None else f" ({interval(diff.step)})"
        return f"the step takes {signed(diff.step.ratio)}{bounds}; the limit is +{units.percent(limit.allowed)}"
    if limit.name == "min_mfu":
        return f"MFU is {units.percent(limit.found)}; the least is {units.percent(limit.allowed)}"
    return (
        f"peak live memory is {units.size(limit.found)}; the limit is {units.size(limit.allowed)}"
    )


def _signed(change: Change) -> str:
    return "0 %" if change.before == change.after == 0 else signed(change.ratio)
