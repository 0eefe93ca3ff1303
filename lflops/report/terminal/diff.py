"""Draw the comparison of two runs: sentences, then tables of the step and of changed modules."""

from collections.abc import Iterable

from rich.console import Group, RenderableType

from lflops import units
from lflops.analysis.compare.compared_run import Change
from lflops.analysis.compare.diff import Diff, Limit, ModuleDiff
from lflops.analysis.compare.significance import CHANGED, Timing
from lflops.report.diff import headline, interval, module_name, reason, signed
from lflops.report.terminal.tables import MARGIN, FittedTable, margin, prose, prose_rows, text
from lflops.report.text import phase_label

_LONG_NAME = 40

_RELATIVE = "vs. all modules"
"""Heading of the column with the confidence interval of the change of each module's time.

If all modules became slower or faster by about the same ratio, the column shows the change relative
to this ratio.
"""


def render_diff(
    diff: Diff,
    limits: Iterable[Limit] = (),
    issues: Iterable[tuple[str, str]] = (),
    *,
    everything: bool = False,
) -> RenderableType:
    """Draw a comparison.

    Args:
        diff: The comparison.
        limits: The limits that the second run was checked against, with the results.
        issues: A label and a sentence about each issue that at least one of the runs has.
        everything: Whether to list unchanged modules, too.
    """
    rows: list[tuple[str, RenderableType]] = []
    for fact, (before, after) in diff.facts.items():
        change = f"{_fact(before)} → {_fact(after)}"
        rows.append((fact.replace("_", " "), text(change, "yellow")))
    for line in headline(diff):
        rows.append(("changed", prose(line)))
    rows += prose_rows(issues)
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
        return "limit violated", prose(sentence, "red")
    return "within limit", prose(sentence)


def _limit(limit: Limit, diff: Diff) -> str:
    if limit.name == "max_regress":
        bounds = ""
        if diff.step.low is not None:
            bounds = f" ({interval(diff.step)})"
        allowed = units.percent(limit.allowed)
        return (
            f"the step time changed by {signed(diff.step.ratio)}{bounds}; the limit is +{allowed}"
        )
    if limit.name == "min_mfu":
        found = units.percent(limit.found)
        return f"MFU is {found}; the minimum is {units.percent(limit.allowed)}"
    peak = units.size(limit.found)
    return f"peak live memory is {peak}; the limit is {units.size(limit.allowed)}"


def _run(diff: Diff) -> FittedTable:
    root = diff.modules[0].inclusive
    rows = [("median step", _times(diff.step) | {_RELATIVE: ""})]
    for name, time in diff.phases.items():
        cells = _times(time) | {_RELATIVE: interval(time)}
        rows.append((f"  {phase_label(name)}", cells))
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
            cells = {
                "before": unit(change.before),
                "after": unit(change.after),
                "change": _signed(change),
                _RELATIVE: "",
            }
            rows.append((name, cells))
    return FittedTable.of_rows("the run", rows, room=MARGIN)


def _times(time: Timing) -> dict[str, str]:
    return {
        "before": units.duration(time.before),
        "after": units.duration(time.after),
        "change": signed(time.ratio),
    }


def _modules(modules: Iterable[ModuleDiff]) -> FittedTable:
    rows = []
    longest = 0
    for module in modules:
        name = module_name(module)
        longest = max(longest, len(name))
        time = module.news
        work = module.self_work
        cells = {
            "time": "self" if time is work.time else "all",
            "before": units.duration(time.before),
            "after": units.duration(time.after),
            "change": signed(module.time_ratio),
            "verdict": _verdict(module),
            _RELATIVE: interval(time),
            "self MACs": _signed_macs(module),
            "self FLOPs": _signed(work.flops),
            "self params": _signed(work.parameters),
            "peak": _signed(module.peak_bytes),
            "time per MAC": signed(time.per_mac),
        }
        rows.append((name, cells))
    return FittedTable.of_rows("module", rows, room=max(MARGIN, min(longest, _LONG_NAME)))


def _signed_macs(module: ModuleDiff) -> str:
    change = module.self_work.macs
    is_same = change.before == change.after
    return _signed(change) if is_same else signed(module.macs_ratio)


def _verdict(module: ModuleDiff) -> str:
    if module.before is None:
        return "added"
    if module.after is None:
        return "removed"
    if module.news.verdict is not None:
        return module.news.verdict
    return "work differs" if module.self_work.differs else units.UNKNOWN


def _signed(change: Change) -> str:
    return "0 %" if change.before == change.after == 0 else signed(change.ratio)
