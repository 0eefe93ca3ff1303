"""The lines above a table: what was profiled, what ran in each phase, and what stands beside the totals."""

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from lflops import units
from lflops.analyze.modules.tree import WorkCounts, totals
from lflops.analyze.modules.uncounted import uncounted_operators
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import Profile
from lflops.profile.queries import pattern
from lflops.report.lines.budget import budget_table
from lflops.report.lines.notes import sentence
from lflops.report.lines.ranks import ranks
from lflops.report.lines.times import times
from lflops.report.lines.unsharded_work import whole_macs
from lflops.report.terminal.fitted_table import FittedTable
from lflops.report.terminal.text import MARGIN, margin, text

__all__ = ["apart", "facts", "head"]

_KINDS = {
    "count": "counted on one pass",
    "measure": "counted on one pass, timed on others",
    "estimate": "estimated: nothing ran",
    "training": "training",
}
_LISTED = 12


def head(profile: Profile) -> Group:
    """What was profiled, how long it took, what that went to, the totals, and their ledger."""
    took, spent = times(profile), utilization(profile).budget
    lines = [each for each in (took, budget_table(profile, spent) if spent else None) if each]
    return Group(_what(profile), "", *(part for each in lines for part in (each, "")), _totals(profile), "", _apart(profile))


def facts(profile: Profile) -> list[tuple[str, str]]:
    """What was profiled, on what, and its parameters: labels and values."""
    run = profile.run
    when = [f"{name} {at}" for name, at in (("step", run.step), ("window", run.window)) if at is not None]
    ranks = _counted(run.world_size, "rank") if run.world_size > 1 else None
    # Positional inputs are named by their number, which would read as one more size.
    shapes = [f"{'' if name.isdecimal() else name} {'×'.join(map(str, shape)) or 'scalar'}".strip() for name, shape in run.shapes.items()]
    batch = [_counted(n, unit) for n, unit in ((run.samples_per_step, "sample"), (run.tokens_per_step, "token")) if n is not None]
    return [
        ("profiled", _listed(_root(profile), _passes(profile), *when, "partial" if run.partial else None)),
        ("device", _listed(f"{run.device_name} on {run.host}", run.dtype, run.precision, ranks)),
        ("created", run.created.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")),
        ("inputs", _listed(*shapes, *batch)),
        ("parameters", _listed(*_parameters(profile))),
    ]


def _what(profile: Profile) -> Table:
    table = margin()
    for label, value in facts(profile):
        table.add_row(label, text(value))
    return table


def _root(profile: Profile) -> str:
    """What was profiled: where the root is no module, the kinds of those right below it."""
    kinds = list(dict.fromkeys(module.kind for name, module in profile.modules.items() if name and "." not in name))
    if kind := profile.modules[""].kind:
        return kind
    named = [*kinds[:_LISTED], *([f"{len(kinds) - _LISTED} more kinds"] if len(kinds) > _LISTED else [])]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def _passes(profile: Profile) -> str:
    """How it was profiled. A root that ran otherwise than once was counted over as many passes."""
    if profile.run.kind == "training" and profile.run.stage not in {None, "train"}:
        return f"training, {profile.run.stage}"
    calls = profile.modules[""].calls
    if profile.run.kind != "count" or calls == 1:
        return _KINDS[profile.run.kind]
    return f"counted, {units.count(calls)} forward passes added up" if calls else "counted"


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) or units.UNKNOWN


def _parameters(profile: Profile) -> list[str]:
    root = profile.modules[""]
    parts = [f"{units.count(root.parameters)} in {units.size(root.parameter_bytes)}"]
    if root.trainable_parameters != root.parameters:
        share = root.trainable_parameters / root.parameters
        parts.append(
            f"{units.count(root.trainable_parameters)} trainable in {units.size(root.trainable_parameter_bytes)} ({units.percent(share)})"
        )
    elif root.parameters:
        parts.append("all trainable")
    if len(root.dtypes) == 1:
        parts.append(f"all {next(iter(root.dtypes))}")
    else:
        parts += [f"{units.count(share.parameters)} {dtype} in {units.size(share.bytes)}" for dtype, share in root.dtypes.items()]
    if root.local_parameters != root.parameters:
        parts.append(f"{units.count(root.local_parameters)} in {units.size(root.local_parameter_bytes)} on this rank")
    return parts


def _totals(profile: Profile) -> FittedTable:
    """What ran in each phase."""
    ran: dict[str, WorkCounts] = {phase: figures for phase, figures in totals(profile).items() if figures != WorkCounts()}
    if not ran and not profile.is_counted:
        return FittedTable(
            "totals", ["all"], {name: [units.UNKNOWN] for name in ("MACs", "FLOPs", "bytes moved", "operator calls")}, room=MARGIN
        )
    ran = ran or {"forward": WorkCounts()}
    if len(ran) > 1:
        ran["all"] = sum(ran.values(), WorkCounts())
    columns = {"MACs": [units.count(figures.macs) for figures in ran.values()]}
    if whole := whole_macs(profile):
        known: dict[str, int | None] = dict(whole)
        known["all"] = None if None in whole.values() else sum(filter(None, whole.values()))
        columns["MACs of model"] = [units.count(known.get(phase, 0)) for phase in ran]
    if any(figures.executed_macs != figures.macs for figures in ran.values()):
        columns["executed MACs"] = [units.count(figures.executed_macs) for figures in ran.values()]
    columns["FLOPs"] = [units.count(figures.flops) for figures in ran.values()]
    columns["bytes moved"] = [units.size(figures.bytes_moved) for figures in ran.values()]
    columns["operator calls"] = [units.count(figures.calls) for figures in ran.values()]
    return FittedTable("totals", list(ran), columns, room=MARGIN)


def _apart(profile: Profile) -> Table:
    table, above = margin(), ""
    for label, value, is_doubt in apart(profile):
        table.add_row("" if label == above else label, text(value, "yellow" if is_doubt else ""))
        above = label
    return table


def apart(profile: Profile) -> Iterator[tuple[str, str, bool]]:
    """What stands beside the totals: memory, what is in none of them, and what a reader has to know.

    Yields:
        A label, a value, and whether it takes something from the figures' worth.
    """
    yield "peak live memory", _memory(profile), False
    for label, value in ranks(profile):
        yield label, value, False
    if profile.is_counted:
        for line, is_doubt in _ledger(profile):
            yield "not counted", line, is_doubt
    if profile.uncalled and profile.is_counted:
        yield "never called", _never_called(profile), True
    for note in profile.notes:
        yield "note", sentence(note), True


def _ledger(profile: Profile) -> Iterator[tuple[str, bool]]:
    lines = uncounted_operators(profile)
    if not lines:
        yield "nothing: every operator that ran has a formula", False
    longest = max((len(line.operator) for line in lines[:_LISTED]), default=0)
    for line in lines[:_LISTED]:
        place = _counted(len(line.modules), "module") if len(line.modules) > 1 else line.modules[0] or "the root"
        took = "" if line.seconds is None else f", {units.duration(line.seconds)}"
        yield f"{line.operator:<{longest}}  {_counted(line.calls, 'call')} in {place}, {units.size(line.bytes)}{took}", True
    if left := lines[_LISTED:]:
        calls, moved = _counted(sum(line.calls for line in left), "call"), units.size(sum(line.bytes for line in left))
        yield f"and {_counted(len(left), 'more operator')}  {calls}, {moved}", True


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return units.size(profile.modules[""].peak_bytes)
    largest = sorted(profile.memory.by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{category.replace('_', ' ')} {units.size(held)}" for category, held in largest if held)
    return units.size(profile.memory.peak_bytes) + (f": {parts}" if parts else "")


def _never_called(profile: Profile) -> str:
    """The uppermost names, those that differ in numbers alone as one; those below them are only numbered."""
    uncalled = set(profile.uncalled)
    top = [name for name in profile.uncalled if not name or name.rpartition(".")[0] not in uncalled]
    alike: dict[str, list[str]] = {}
    for name in top:
        alike.setdefault(pattern(name), []).append(name)
    said = []
    for shape, names in alike.items():
        # A pattern without a word in it would say nothing.
        spelled = len(names) == 1 or set(shape) <= {"*", "."}
        said += [name or profile.modules[""].kind or "all of it" for name in names] if spelled else [f"{shape} ×{len(names)}"]
    below = len(uncalled) - len(top)
    ends = [
        f"{len(said) - _LISTED} more" if len(said) > _LISTED else "",
        f"{below} below {'it' if len(top) == 1 else 'them'}" if below else "",
    ]
    return " and ".join([", ".join(said[:_LISTED]), *filter(None, ends)])


def _counted(number: int, noun: str) -> str:
    return f"{units.count(number)} {noun}" if number == 1 else f"{units.count(number)} {noun}s"
