"""The tables of a trace: headings, names, and columns of text, for a terminal and for a page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lflops import units
from lflops.report.lines.text import counted, plain, shortened
from lflops.trace_analysis.collectives import CollectiveTimes, RankSkew
from lflops.trace_analysis.operators import ShapeTimes, SpanTimes
from lflops.trace_analysis.sentences import CAUSES, STATES, kernel_name, launches, nanoseconds, shapes_text, share
from lflops.trace_analysis.summary import TraceSummary
from lflops.traces.device_states import DeviceTimeline

_OPERATOR = 24


class TraceTable(NamedTuple):
    """One table."""

    heading: str
    names: Sequence[str]  # one a row
    columns: Mapping[str, Sequence[str]]  # the cells of each row, by heading
    notes: tuple[str, ...] = ()  # lines below it
    total: int | None = None  # how many rows there are, where only some are listed

    @property
    def left_out(self) -> int:
        return 0 if self.total is None else self.total - len(self.names)


def tables(summary: TraceSummary, top: int) -> Iterator[TraceTable]:
    """All tables of a trace, with at most `top` rows each."""
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


def _of_host(summary: TraceSummary, top: int) -> Iterator[TraceTable]:
    has_device = summary.device is not None
    if summary.operators:
        yield _operators(summary, top)
    if any(row.flops for row in summary.shapes):
        yield shapes_table(summary.shapes, top)
    for heading, rows in (("modules", summary.modules), ("scopes", summary.scopes)):
        if rows:
            yield _spans(heading, rows, top, has_device=has_device)
    if summary.collectives:
        yield _collectives(summary.collectives, top)


def _timeline(summary: TraceSummary, device: DeviceTimeline) -> TraceTable:
    """The states of each device, a column each; with several devices all of them together first."""
    rows = {"all devices": device} if len(summary.devices) > 1 else {}
    rows |= {f"device {each.device}": each.timeline for each in summary.devices}
    columns: dict[str, list[str]] = {}
    for name, row in rows.items():
        columns[name] = [nanoseconds(getattr(row, state)) for state in STATES] + [nanoseconds(row.window)]
        columns["share" if len(rows) == 1 else f"share of {name}"] = [share(getattr(row, state), row.window) for state in STATES] + [
            "100 %"
        ]
    hidden = (("communication", device.overlapped_communication, device.communication), ("copies", device.overlapped_copies, device.copies))
    notes = tuple(f"{label}: {nanoseconds(whole)} in all, {share(part, whole)} of it hidden" for label, part, whole in hidden if whole)
    return TraceTable("timeline", [*STATES.values(), "window"], columns, notes)


def _idle(summary: TraceSummary, device: DeviceTimeline) -> TraceTable:
    rows = sorted(summary.idle.items(), key=lambda row: -row[1])
    columns = {
        "time": [nanoseconds(time) for _, time in rows],
        "share of idle": [share(time, device.idle) for _, time in rows],
        "share of window": [share(time, device.window) for _, time in rows],
    }
    return TraceTable("idle, lost to", [CAUSES[cause].label for cause, _ in rows], columns, tuple(launches(summary)))


def _streams(summary: TraceSummary, device: DeviceTimeline, top: int) -> TraceTable:
    rows = summary.streams[:top]
    several = len(summary.devices) > 1
    columns = {
        "busy": [nanoseconds(row.busy) for row in rows],
        "share of window": [share(row.busy, device.window / len(summary.devices)) for row in rows],
        "kernels": [units.count(row.kernels) for row in rows],
        "copies": [units.count(row.copies) for row in rows],
    }
    names = [f"device {row.device}, stream {row.stream}" if several else f"stream {row.stream}" for row in rows]
    return TraceTable("streams", names, columns, total=len(summary.streams))


def _steps(summary: TraceSummary, top: int) -> TraceTable:
    rows = summary.steps[:top]
    columns = {"time": [nanoseconds(row.end - row.start) for row in rows]}
    known = [row.device for row in rows]
    for state, name in sorted(STATES.items(), key=lambda state: state[0] != "computing" and state[0] != "idle"):
        if any(row is not None and getattr(row, state) for row in known):
            columns[name] = [units.UNKNOWN if row is None else share(getattr(row, state), row.window) for row in known]
    return TraceTable("steps", [row.name for row in rows], columns, total=len(summary.steps))


def _categories(summary: TraceSummary) -> TraceTable:
    whole = sum(row.device for row in summary.categories)
    columns = {
        "time": [nanoseconds(row.device) for row in summary.categories],
        "share": [share(row.device, whole) for row in summary.categories],
        "calls": [units.count(row.calls) for row in summary.categories],
    }
    notes: tuple[str, ...] = ()
    computing = sum(row.device for row in summary.precisions)
    if computing:
        parts = [f"{share(row.device, computing)} {row.precision or 'of unknown precision'}" for row in summary.precisions]
        cores = sum(row.tensor_cores for row in summary.precisions)
        notes = (f"precision of kernels: {', '.join(parts)}; {share(cores, computing)} on tensor cores by their names",)
    return TraceTable("device's work by category", [row.category for row in summary.categories], columns, notes)


def _kernels(summary: TraceSummary, top: int) -> TraceTable:
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
    return TraceTable("kernels", names, columns, total=len(summary.kernels))


def _operators(summary: TraceSummary, top: int) -> TraceTable:
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
    return TraceTable("operators", names, columns, total=len(summary.operators))


def shapes_table(found: Sequence[ShapeTimes], top: int, *, roof: bool = False) -> TraceTable:
    """Make the table of what ran with which shapes, how fast, and how near to the roof."""
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
    return TraceTable("operators with their shapes", names, columns, total=len(found))


def _spans(heading: str, found: Sequence[SpanTimes], top: int, *, has_device: bool) -> TraceTable:
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
    return TraceTable(heading, names, columns, total=len(found))


def _collectives(found: Sequence[CollectiveTimes], top: int) -> TraceTable:
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
    return TraceTable("collectives", names, columns, total=len(found))


def ranks_tables(skew: RankSkew, top: int) -> Iterator[TraceTable]:
    """Who comes last and who waits, and the collectives that ranks wait in."""
    ranks = sorted(skew.ranks, key=lambda rank: -skew.last[rank])[:top]
    calls = sum(row.calls for row in skew.collectives)
    columns = {
        "comes last": [share(skew.last[rank], calls) for rank in ranks],
        "waits": [nanoseconds(skew.waiting[rank]) for rank in ranks],
    }
    yield TraceTable("ranks", [f"rank {rank}" for rank in ranks], columns, total=len(skew.ranks))
    rows = skew.collectives[:top]
    columns = {
        "calls": [units.count(row.calls) for row in rows],
        "transfer": [nanoseconds(row.transfer) for row in rows],
        "waited": [nanoseconds(sum(row.waiting.values())) for row in rows],
        "skew": [nanoseconds(row.skew_median) for row in rows],
        "at most": [nanoseconds(row.skew_longest) for row in rows],
        "group": [shortened(plain(row.group), _OPERATOR) or units.UNKNOWN for row in rows],
    }
    notes = (f"{counted(skew.unmatched, 'collective')} only in the trace of one rank",) if skew.unmatched else ()
    yield TraceTable("collectives of all ranks", [row.kind for row in rows], columns, notes, len(skew.collectives))
