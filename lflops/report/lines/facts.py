"""What was profiled, and what a reader of its totals has to know: memory, ranks, uncounted operators, uncalled modules, notes."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.profile.model import Profile
from lflops.profile.module_names import fold_repeats
from lflops.report.lines.notes import sentence
from lflops.report.lines.ranks import ranks
from lflops.report.lines.text import counted

__all__ = ["facts", "remarks", "uncounted"]

_KINDS = {
    "count": "counted on one pass",
    "measure": "counted on one pass, timed on others",
    "estimate": "estimated: nothing ran",
    "training": "training",
}
_LISTED = 12


def facts(profile: Profile) -> list[tuple[str, str]]:
    """What was profiled, on what, and its parameters: labels and values."""
    run = profile.run
    when = [f"{name} {at}" for name, at in (("step", run.step), ("window", run.window)) if at is not None]
    ranks = counted(run.world_size, "rank") if run.world_size > 1 else None
    # Positional inputs are named by their number, which would read as one more size.
    shapes = [f"{'' if name.isdecimal() else name} {'×'.join(map(str, shape)) or 'scalar'}".strip() for name, shape in run.shapes.items()]
    units_of_batch = ((run.samples_per_step, "sample"), (run.tokens_per_step, "token"))
    batch = [f"{n:,} {unit}{'' if n == 1 else 's'}" for n, unit in units_of_batch if n is not None]
    return [
        ("profiled", _listed(_root(profile), _passes(profile), *when, "partial" if run.partial else None)),
        ("device", _listed(_device(profile), run.dtype, run.precision, ranks)),
        ("created", run.created.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")),
        ("inputs", "; ".join(_listed(*part) for part in (shapes, batch) if part) or units.UNKNOWN),
        ("parameters", _listed(*_parameters(profile))),
    ]


def _device(profile: Profile) -> str:
    """What the figures are of: an estimate ran on no device, and its figures are those of the chip that it was asked for."""
    run = profile.run
    if run.kind != "estimate":
        return f"{run.device_name} on {run.host}"
    return f"{run.hardware.name if run.hardware else 'no device'}, estimated on {run.host}"


def _root(profile: Profile) -> str:
    """The root's class; where the root is no module, the classes directly below it."""
    kinds = list(dict.fromkeys(module.kind for name, module in profile.modules.items() if name and "." not in name))
    if kind := profile.modules[""].kind:
        return kind
    named = [*kinds[:_LISTED], *([f"{len(kinds) - _LISTED} more kinds"] if len(kinds) > _LISTED else [])]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def _passes(profile: Profile) -> str:
    """How it was profiled. A root with another number of calls than one was counted over as many passes."""
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


def remarks(analysis: Analysis) -> Iterator[tuple[str, str, bool]]:
    """Memory, ranks, what no total includes, and the notes.

    Yields:
        A label, a value, and whether it makes the figures less reliable.
    """
    profile = analysis.profile
    yield "peak live memory", _memory(profile), False
    run = profile.run
    if run.allocated_bytes is not None:
        yield "allocator's peak", f"{units.size(run.allocated_bytes)}, reserved {units.size(run.reserved_bytes)}", False
    for label, value in ranks(analysis):
        yield label, value, False
    if profile.is_counted:
        for line, is_doubt in uncounted(analysis):
            yield "not counted", line, is_doubt
    if analysis.uncalled and profile.is_counted:
        yield "never called", _never_called(analysis), True
    for note in profile.notes:
        yield "note", sentence(note), True


def uncounted(analysis: Analysis, most: int = _LISTED) -> Iterator[tuple[str, bool]]:
    """A line for each operator without a formula, and whether it makes the totals less reliable; the first few, then the others."""
    rows = analysis.uncounted
    if not rows:
        yield "nothing: every operator that ran has a formula", False
    longest = max((len(row.operator) for row in rows[:most]), default=0)
    for row in rows[:most]:
        where = counted(len(row.modules), "module") if len(row.modules) > 1 else row.modules[0] or "the root"
        took = "" if row.seconds is None else f", {units.duration(row.seconds)}"
        yield f"{row.operator:<{longest}}  {counted(row.calls, 'call')} in {where}, {units.size(row.bytes)}{took}", True
    if left := rows[most:]:
        calls, moved = counted(sum(row.calls for row in left), "call"), units.size(sum(row.bytes for row in left))
        yield f"and {counted(len(left), 'more operator')}  {calls}, {moved}", True


def _memory(profile: Profile) -> str:
    if profile.memory is None:
        return units.size(profile.modules[""].peak_bytes)
    largest = sorted(profile.memory.by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{category.replace('_', ' ')} {units.size(held)}" for category, held in largest if held)
    return units.size(profile.memory.peak_bytes) + (f": {parts}" if parts else "")


def _never_called(analysis: Analysis) -> str:
    """The uppermost modules, repeated ones as their pattern; those below them only as a number."""
    uncalled = set(analysis.uncalled)
    top = [name for name in analysis.uncalled if not name or name.rpartition(".")[0] not in uncalled]
    labels: list[str] = []
    for label, names in fold_repeats(top, lambda name: (name,), analysis.patterns):
        is_spelled_out = len(names) == 1 or set(label) <= {"*", "."}  # a pattern without a word in it would say nothing
        kind = analysis.profile.modules[""].kind
        labels += [name or kind or "all of it" for name in names] if is_spelled_out else [f"{label} ×{len(names)}"]
    below = len(uncalled) - len(top)
    ends = [
        f"{len(labels) - _LISTED} more" if len(labels) > _LISTED else "",
        f"{below} below {'it' if len(top) == 1 else 'them'}" if below else "",
    ]
    return " and ".join([", ".join(labels[:_LISTED]), *filter(None, ends)])
