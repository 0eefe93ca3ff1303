"""A trace on a terminal: the verdict, the device's timeline, what its idle time is lost to, steps, categories and kernels."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.trace.categories import Category
from lflops.analyze.trace.collectives import CollectiveTimes
from lflops.analyze.trace.kernels import KernelTimes
from lflops.analyze.trace.modules import SpanTimes
from lflops.analyze.trace.operators import ShapeTimes
from lflops.analyze.trace.rank_skew import RankSkew
from lflops.analyze.trace.summary import TraceSummary
from lflops.analyze.trace.timeline import DeviceTimeline
from lflops.report.lines.text import plain, shortened
from lflops.report.lines.trace_summary import (
    CAUSES,
    STATES,
    facts,
    kernel_name,
    launches,
    nanoseconds,
    ranks_verdict,
    remarks,
    shapes_text,
    share,
    verdict,
)
from lflops.report.terminal.tables import FittedTable, margin, text

__all__ = ["render_ranks", "render_trace", "render_trace_roofline"]

_NAME, _OPERATOR = 28, 24
_OVER = 1.05

_NOT_COMPUTING: frozenset[Category] = frozenset({"communication", "copy", "fill"})


def render_trace(summary: TraceSummary, *, top: int) -> RenderableType:
    """One trace as text for a terminal; tables have at most `top` rows."""
    blocks = [_header(summary), *_tables(summary, top)]
    below = list(remarks(summary))
    if below:
        table = margin()
        for label, value in below:
            table.add_row(label, text(value))
        blocks.append(table)
    return Group(*(part for block in blocks[:-1] for part in (block, "")), blocks[-1])


def _header(summary: TraceSummary) -> RenderableType:
    table = margin()
    for label, value in facts(summary):
        table.add_row(label, text(value))
    return Group(*(text(sentence, "bold" if index == 0 else "") for index, sentence in enumerate(verdict(summary))), "", table)


def _tables(summary: TraceSummary, top: int) -> Iterator[RenderableType]:
    device = summary.device
    if device is not None:
        yield _timeline(summary, device)
        if summary.idle:
            yield _idle(summary, device)
        if len(summary.streams) > 1:
            yield _streams(summary, device, top)
    if summary.steps:
        yield _steps(summary, top)
    if summary.categories:
        yield _categories(summary)
        yield _kernels(summary, top)
    yield from _of_host(summary, top)


def _of_host(summary: TraceSummary, top: int) -> Iterator[RenderableType]:
    """What launched the work: operators, modules, scopes, collectives."""
    has_device = summary.device is not None
    if summary.operators:
        yield _operators(summary, top)
    if any(row.flops for row in summary.shapes):
        yield _shapes(summary.shapes, top)
    for heading, rows in (("modules", summary.modules), ("scopes", summary.scopes)):
        if rows:
            yield _spans(heading, rows, top, has_device=has_device)
    if summary.collectives:
        yield _collectives(summary.collectives, top)


def _timeline(summary: TraceSummary, device: DeviceTimeline) -> RenderableType:
    """The states of each device, a column each; with several devices all of them together first."""
    rows = {"all devices": device} if len(summary.devices) > 1 else {}
    rows |= {f"device {each.device}": each.timeline for each in summary.devices}
    columns: dict[str, list[str]] = {}
    for name, row in rows.items():
        columns[name] = [nanoseconds(getattr(row, state)) for state in STATES] + [nanoseconds(row.window)]
        columns["share" if len(rows) == 1 else f"share of {name}"] = [share(getattr(row, state), row.window) for state in STATES] + [
            "100 %"
        ]
    shown: list[RenderableType] = [FittedTable("timeline", [*STATES.values(), "window"], columns, room=_NAME)]
    for label, hidden, whole in (
        ("communication", device.overlapped_communication, device.communication),
        ("copies", device.overlapped_copies, device.copies),
    ):
        if whole:
            shown.append(text(f"{label}: {nanoseconds(whole)} in all, {share(hidden, whole)} of it hidden"))
    return Group(*shown)


def _idle(summary: TraceSummary, device: DeviceTimeline) -> RenderableType:
    rows = sorted(summary.idle.items(), key=lambda row: -row[1])
    columns = {
        "time": [nanoseconds(time) for _, time in rows],
        "share of idle": [share(time, device.idle) for _, time in rows],
        "share of window": [share(time, device.window) for _, time in rows],
    }
    table = FittedTable("idle, lost to", [CAUSES[cause][0] for cause, _ in rows], columns, room=_NAME)
    below = margin()
    for label, value in launches(summary):
        below.add_row(label, text(value))
    return Group(table, below)


def _streams(summary: TraceSummary, device: DeviceTimeline, top: int) -> RenderableType:
    rows = summary.streams[:top]
    several = len(summary.devices) > 1
    columns = {
        "busy": [nanoseconds(row.busy) for row in rows],
        "share of window": [share(row.busy, device.window / len(summary.devices)) for row in rows],
        "kernels": [units.count(row.kernels) for row in rows],
        "copies": [units.count(row.copies) for row in rows],
    }
    names = [f"device {row.device}, stream {row.stream}" if several else f"stream {row.stream}" for row in rows]
    return _cut(FittedTable("streams", names, columns, room=_NAME), len(rows), len(summary.streams), "streams")


def _steps(summary: TraceSummary, top: int) -> RenderableType:
    rows = summary.steps[:top]
    columns = {"time": [nanoseconds(row.end - row.start) for row in rows]}
    known = [row.device for row in rows]
    for state, name in sorted(STATES.items(), key=lambda state: state[0] != "computing" and state[0] != "idle"):
        if any(row is not None and getattr(row, state) for row in known):
            columns[name] = [units.UNKNOWN if row is None else share(getattr(row, state), row.window) for row in known]
    return _cut(FittedTable("steps", [row.name for row in rows], columns, room=_NAME), len(rows), len(summary.steps), "steps")


def _categories(summary: TraceSummary) -> RenderableType:
    whole = sum(row.device for row in summary.categories)
    columns = {
        "time": [nanoseconds(row.device) for row in summary.categories],
        "share": [share(row.device, whole) for row in summary.categories],
        "calls": [units.count(row.calls) for row in summary.categories],
    }
    shown: list[RenderableType] = [
        FittedTable("device's work by category", [row.category for row in summary.categories], columns, room=_NAME)
    ]
    computing = sum(row.device for row in summary.precisions)
    if computing:
        parts = [f"{share(row.device, computing)} {row.precision or 'of unknown precision'}" for row in summary.precisions]
        cores = sum(row.tensor_cores for row in summary.precisions)
        shown.append(text(f"precision of kernels: {', '.join(parts)}; {share(cores, computing)} on tensor cores by their names"))
    return Group(*shown)


def _kernels(summary: TraceSummary, top: int) -> RenderableType:
    rows = summary.kernels[:top]
    whole = sum(row.device for row in summary.kernels)
    cores: Mapping[bool | None, str] = {True: "yes", False: "no", None: units.UNKNOWN}
    columns = {
        "time": [nanoseconds(row.device) for row in rows],
        "share": [share(row.device, whole) for row in rows],
        "calls": [units.count(row.calls) for row in rows],
        "median": [nanoseconds(row.median) for row in rows],
        "precision": [row.precision or units.UNKNOWN for row in rows],
        "tensor cores": [cores[row.tensor_cores] for row in rows],
        "operator": [
            shortened(plain(row.operators[0].removeprefix("aten::")), _OPERATOR) if row.operators else units.UNKNOWN for row in rows
        ],
    }
    names = [kernel_name(row.name) for row in rows]
    return _cut(FittedTable("kernels", names, columns, room=_room(names)), len(rows), len(summary.kernels), "kernels")


def _operators(summary: TraceSummary, top: int) -> RenderableType:
    """By their own time on the device, or on the host where no device worked."""
    rows = summary.operators[:top]
    columns: dict[str, list[str]] = {}
    if summary.device is not None:
        whole = sum(row.own_device for row in summary.operators)
        columns["device, own"] = [nanoseconds(row.own_device) for row in rows]
        columns["share"] = [share(row.own_device, whole) for row in rows]
        columns["device"] = [nanoseconds(row.device) for row in rows]
    columns |= {
        "calls": [units.count(row.calls) for row in rows],
        "host, own": [nanoseconds(row.own_host) for row in rows],
        "host": [nanoseconds(row.host) for row in rows],
        "category": [row.category for row in rows],
    }
    names = [row.name.removeprefix("aten::") for row in rows]
    return _cut(FittedTable("operators", names, columns, room=_room(names)), len(rows), len(summary.operators), "operators")


def _shapes(found: Sequence[ShapeTimes], top: int, *, roof: bool = False) -> RenderableType:
    """What ran with which shapes, how fast, and how near to the roof."""
    rows = found[:top]
    columns: dict[str, list[str]] = {}
    if any(row.device for row in rows):
        columns["device"] = [nanoseconds(row.device) for row in rows]
        columns["FLOP/s"] = [units.count(row.flops_per_second) for row in rows]
    columns["calls"] = [units.count(row.calls) for row in rows]
    if any(row.share is not None for row in rows) or roof:
        columns["of the roof"] = [units.percent(row.share) for row in rows]
        columns["bound by"] = [row.bound or units.UNKNOWN for row in rows]
    columns["precision"] = [row.precision or units.UNKNOWN for row in rows]
    if roof:
        columns["FLOPs/byte"] = [units.count(row.intensity) for row in rows]
        columns["at the roof"] = [units.duration(row.roof_seconds) for row in rows]
    columns["FLOPs"] = [units.count(row.flops) for row in rows]
    columns["bytes moved"] = [units.size(row.bytes_moved) for row in rows]
    names = [shapes_text(row) for row in rows]
    return _cut(FittedTable("operators with their shapes", names, columns, room=_room(names)), len(rows), len(found), "lines")


def _spans(heading: str, found: Sequence[SpanTimes], top: int, *, has_device: bool) -> RenderableType:
    """Modules or scopes, with all below them and without."""
    rows = found[:top]
    columns: dict[str, list[str]] = {}
    if has_device:
        columns["device"] = [nanoseconds(row.device) for row in rows]
        columns["device, own"] = [nanoseconds(row.own_device) for row in rows]
    columns["calls"] = [units.count(row.calls) for row in rows]
    if any(row.phase != "forward" for row in found):
        columns["phase"] = [row.phase for row in rows]
    columns["host"] = [nanoseconds(row.host) for row in rows]
    names = [f"{row.name} ×{row.instances}" if row.instances > 1 else row.name for row in rows]
    return _cut(FittedTable(heading, names, columns, room=_room(names)), len(rows), len(found), heading)


def _collectives(found: Sequence[CollectiveTimes], top: int) -> RenderableType:
    rows = found[:top]
    columns = {
        "time": [nanoseconds(row.device) for row in rows],
        "exposed": [share(row.exposed, row.device) for row in rows],
        "calls": [units.count(row.calls) for row in rows],
        "bytes": [units.size(row.bytes) for row in rows],
        "bus": [units.quantity(row.bus_bytes_per_second, "B/s") for row in rows],
        "algorithm": [units.quantity(row.algorithmic_bytes_per_second, "B/s") for row in rows],
        "ranks": [units.UNKNOWN if row.group_size is None else str(row.group_size) for row in rows],
        "group": [shortened(plain(row.group), _OPERATOR) or units.UNKNOWN for row in rows],
    }
    names = [row.kind for row in rows]
    return _cut(FittedTable("collectives", names, columns, room=_room(names)), len(rows), len(found), "collectives")


def render_ranks(skew: RankSkew, *, top: int) -> RenderableType:
    """How several ranks wait for each other."""
    ranks = sorted(skew.ranks, key=lambda rank: -skew.last[rank])[:top]
    calls = sum(row.calls for row in skew.collectives)
    blocks: list[RenderableType] = [text(ranks_verdict(skew), "bold")]
    if calls:
        columns = {
            "comes last": [share(skew.last[rank], calls) for rank in ranks],
            "waits": [nanoseconds(skew.waiting[rank]) for rank in ranks],
        }
        blocks += [
            "",
            _cut(FittedTable("ranks", [f"rank {rank}" for rank in ranks], columns, room=_NAME), len(ranks), len(skew.ranks), "ranks"),
        ]
        rows = skew.collectives[:top]
        columns = {
            "calls": [units.count(row.calls) for row in rows],
            "transfer": [nanoseconds(row.transfer) for row in rows],
            "waited": [nanoseconds(sum(row.waiting.values())) for row in rows],
            "skew": [nanoseconds(row.skew_median) for row in rows],
            "at most": [nanoseconds(row.skew_longest) for row in rows],
            "group": [shortened(plain(row.group), _OPERATOR) or units.UNKNOWN for row in rows],
        }
        table = FittedTable("collectives of all ranks", [row.kind for row in rows], columns, room=_NAME)
        blocks += ["", _cut(table, len(rows), len(skew.collectives), "collectives")]
    if skew.unmatched:
        blocks.append(text(f"{skew.unmatched} collectives are in the trace of one rank alone", "dim"))
    return Group(*blocks)


def render_trace_roofline(summary: TraceSummary, *, top: int) -> RenderableType:
    """The chip's roofs, and the operators of a trace below them, those first that would win the most time."""
    chip = summary.hardware
    rows = sorted(summary.shapes, key=lambda row: -(row.device / 1e9 - (row.roof_seconds or 0.0)) if row.roof_seconds is not None else 0.0)
    table = margin()
    for label, value in facts(summary):
        table.add_row(label, text(value))
    if chip is None:
        table.add_row("roof", text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow"))
    else:
        bandwidth = units.quantity(chip.bandwidth_bytes_per_second, "B/s")
        for dtype in dict.fromkeys(row.precision for row in rows if row.macs and row.precision in chip.peak_flops_per_second):
            peak = units.quantity(chip.peak_flops_per_second[dtype or ""], "FLOP/s")
            table.add_row("roof", text(f"{peak} in {dtype}, {bandwidth}: {chip.name}"))
    blocks: list[RenderableType] = [table, ""]
    blocks.append(_shapes(rows, top, roof=True) if rows else text("no shapes were recorded: record with record_shapes=True", "yellow"))
    if any((row.share or 0.0) > _OVER for row in rows):
        blocks.append(text("over its roof: usually its data stayed in the cache", "dim"))
    return Group(*blocks)


def _operator(row: KernelTimes) -> str:
    """The operator that most of the kernel's time was launched by."""
    return shortened(plain(row.operators[0].removeprefix("aten::")), _OPERATOR) if row.operators else units.UNKNOWN


def _room(names: Sequence[str]) -> int:
    return min(max(map(len, names), default=_NAME), _NAME)


def _cut(table: RenderableType, shown: int, of: int, what: str) -> RenderableType:
    """The table, and how many rows are not in it."""
    return table if shown == of else Group(table, text(f"{of - shown} more {what} (--top {of} shows them)", "dim"))
