"""Two runs on a terminal: the changes in words, then tables of the step and of changed modules."""

from collections.abc import Iterable, Mapping, Sequence

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
    """Draw a comparison.

    Args:
        diff: The comparison.
        limits: Limits of the second run, with their results.
        faults: Labels and sentences about issues of both runs.
        everything: Whether to list unchanged modules too.
    """
    rows: list[tuple[str, RenderableType]] = []
    for fact, (before, after) in diff.facts.items():
        change = f"{_fact(before)} → {_fact(after)}"
        rows.append((fact.replace("_", " "), text(change, "yellow")))
    rows += [("changed", prose(line)) for line in headline(diff)]
    rows += [(label, prose(sentence)) for label, sentence in faults]
    rows += [_limit_row(limit, diff) for limit in limits]
    parts: list[RenderableType] = [margin(rows), "", _run(diff)]
    modules = [module for module in diff.modules if everything or _is_changed(module)]
    if modules:
        parts += ["", _modules(modules)]
    return Group(*parts)


def _fact(value: object) -> str:
    return units.UNKNOWN if value is None else str(value)


def _is_changed(module: ModuleDiff) -> bool:
    is_in_both = module.before is not None and module.after is not None
    return not is_in_both or module.news.verdict in CHANGED or module.self_work.differs


def _limit_row(limit: Limit, diff: Diff) -> tuple[str, RenderableType]:
    sentence = _limit(limit, diff)
    if limit.caveat:
        return "cannot tell", prose(f"{sentence}: {reason(limit.caveat, diff)}", "yellow")
    if limit.is_broken:
        return "limit broken", prose(sentence, "red")
    return "limit held", prose(sentence)


def _limit(limit: Limit, diff: Diff) -> str:
    if limit.name == "max_regress":
        bounds = "" if diff.step.low is None else f" ({interval(diff.step)})"
        allowed = units.percent(limit.allowed)
        return f"the step takes {signed(diff.step.ratio)}{bounds}; the limit is +{allowed}"
    if limit.name == "min_mfu":
        found = units.percent(limit.found)
        return f"MFU is {found}; the minimum is {units.percent(limit.allowed)}"
    peak = units.size(limit.found)
    return f"peak live memory is {peak}; the limit is {units.size(limit.allowed)}"


def _run(diff: Diff) -> FittedTable:
    root = diff.modules[0].inclusive
    names = []
    cells: dict[str, list[str]] = {"before": [], "after": [], "change": [], "beyond the whole": []}

    def add(name: str, *row: str) -> None:
        names.append(name)
        for column, cell in zip(cells.values(), row, strict=True):
            column.append(cell)

    times = {"median step": diff.step} | {f"  {name}": time for name, time in diff.phases.items()}
    for name, time in times.items():
        beyond = "" if time is diff.step else interval(time)
        add(
            name,
            units.duration(time.before),
            units.duration(time.after),
            signed(time.ratio),
            beyond,
        )
    for name, change, unit in (
        ("samples/s", diff.samples_per_second, units.rate),
        ("tokens/s", diff.tokens_per_second, units.rate),
        ("MFU", diff.mfu, units.of_peak),
        ("peak live memory", diff.peak_bytes, units.size),
        ("MACs", root.macs, units.count),
        ("FLOPs", root.flops, units.count),
        ("bytes moved", root.bytes_moved, units.size),
        ("parameters", root.parameters, units.count),
    ):
        if change.before is not None or change.after is not None:
            add(name, unit(change.before), unit(change.after), _signed(change), "")
    return FittedTable("the run", names, cells, room=MARGIN)


def _modules(modules: Sequence[ModuleDiff]) -> FittedTable:
    names = [module_name(module) for module in modules]
    times = [module.news for module in modules]
    columns: Mapping[str, Sequence[str]] = {
        "time before": [units.duration(time.before) for time in times],
        "after": [units.duration(time.after) for time in times],
        "change": [signed(time.ratio) for time in times],
        "judged": list(map(_verdict, modules)),
        "beyond the whole": list(map(interval, times)),
        "own MACs": [_signed(module.self_work.macs) for module in modules],
        "own FLOPs": [_signed(module.self_work.flops) for module in modules],
        "own params": [_signed(module.self_work.parameters) for module in modules],
        "peak": [_signed(module.peak_bytes) for module in modules],
        "time a MAC": [signed(time.per_mac) for time in times],
    }
    longest = min(max(map(len, names)), _LONG_NAME)
    return FittedTable("module", names, columns, room=max(MARGIN, longest))


def _verdict(module: ModuleDiff) -> str:
    if module.before is None:
        return "added"
    if module.after is None:
        return "removed"
    return module.news.verdict or ("other work" if module.self_work.differs else units.UNKNOWN)


def _signed(change: Change) -> str:
    return "0 %" if change.before == change.after == 0 else signed(change.ratio)
