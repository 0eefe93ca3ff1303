"""Write the sentences and tables about a trace that the terminal and the HTML page share."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from lflops import units
from lflops.profile.module_names import plain
from lflops.profile.records import TimingStats
from lflops.report.text import counted, kernel_name, shortened, times_mark
from lflops.trace.analysis.collectives import CollectiveTimes, RankSkew
from lflops.trace.analysis.merge import Clock
from lflops.trace.analysis.operators import ShapeTimes, SpanTimes
from lflops.trace.analysis.steps import device_timelines
from lflops.trace.analysis.suggestions import (
    CAUSES,
    LARGE,
    LOSSES,
    SMALL,
    losses,
    main_cause,
    suggestions,
)
from lflops.trace.analysis.summary import DeviceSummary, TraceSummary
from lflops.trace.analysis.text import nanoseconds, share, short_operator_name
from lflops.trace.analysis.utilization import TraceUtilization
from lflops.trace.device_states import DeviceTimeline, total

STATES = {
    "computing": "computing",
    "exposed_communication": "communicating only",
    "exposed_copies": "copying only",
    "idle": "idle",
}
"""Label of each device state, keyed by its field in `DeviceTimeline`."""

CAUSE_LABELS: dict[str, str] = {cause: words.label for cause, words in CAUSES.items()}
"""Label of each cause of idle time."""

_SHORT_NAME = 24
"""Maximum width of operator and group names outside the first column of a table."""


def shapes_text(row: ShapeTimes) -> str:
    """Format an operator with its tensor shapes, for example `mm 8944×1024 1024×2816`."""
    name = short_operator_name(row.name).removeprefix("_scaled_dot_product_")
    parts = [plain(name)]
    for shape, equal in itertools.groupby(row.shapes):
        if not shape:
            continue
        number = len(list(equal))
        text = _shape_text(shape)
        parts.append(text if number == 1 else f"{number} of {text}")
    return " ".join(parts)


def _shape_text(shape: Any) -> str:
    is_list_of_tensors = isinstance(shape[0], tuple)
    if not is_list_of_tensors:
        return "×".join(map(str, shape))
    shown = ", ".join(map(_shape_text, shape[:2]))
    return f"[{shown}, …]" if len(shape) > 2 else f"[{shown}]"


def verdict(summary: TraceSummary) -> Iterator[str]:
    """Yield sentences about what the device did, and how to reduce the time without computing."""
    yield states_sentence(summary)
    for suggestion in suggestions(summary):
        yield suggestion.sentence
        if suggestion.evidence:
            yield suggestion.evidence
    yield from step_sentences(summary)


def step_sentences(summary: TraceSummary) -> Iterator[str]:
    """Yield sentences about the duration of a step, and about the time before the first work."""
    if summary.device is None:
        return
    if summary.step is not None and summary.steps:
        yield from _step_sentences(summary, summary.step)
    elif summary.before_device and summary.before_device > LARGE * summary.recorded:
        yield f"The host ran for {nanoseconds(summary.before_device)} before the first device work."


def states_sentence(summary: TraceSummary) -> str:
    """Return a sentence with the share of time in each device state. Computing comes last."""
    device = summary.device
    if device is None:
        return "The trace contains no device work: all times are host times."
    number = len(summary.devices)
    gpus = "the GPU's" if number == 1 else f"the {number} GPUs'"
    of_whole = f" of {gpus} {nanoseconds(device.window)}"
    parts: list[str] = []
    for state, time in losses(device):
        because = ""
        if state == "idle" and not parts:
            because = _when_idle(summary)
        parts.append(f"{share(time, device.window)}{of_whole} is {LOSSES[state]}{because}")
        of_whole = ""
    computing = f"{share(device.computing, device.window)}{of_whole} is computing"
    return f"{'; '.join([*parts, computing])}."


def _when_idle(summary: TraceSummary) -> str:
    """Return a clause with the main cause of the idle time; empty if no cause is known."""
    return f", mostly {main_cause(summary).when}" if summary.idle else ""


def _step_sentences(summary: TraceSummary, step: TimingStats) -> Iterator[str]:
    device = total(device_timelines(summary.steps))
    computing = share(device.computing, device.window)
    median = units.duration(step.median)
    if step.n == 1:
        yield f"The step takes {median}; the device computes for {computing} of this time."
    else:
        quartiles = f"quartiles {units.duration(step.low)} and {units.duration(step.high)}"
        yield (
            f"A step takes {median} (median of {step.n} steps, {quartiles}); "
            f"the device computes for {computing} of this time."
        )
    before = summary.before_device or 0
    if before <= LARGE * summary.steps_time:
        return
    if summary.left_out.device > before / 2:
        kernels = counted(summary.left_out.calls, "kernel")
        yield (
            "When the first step starts, the device still runs work that was launched before the "
            f"recording began: {kernels}, {nanoseconds(summary.left_out.device)}. This work is "
            "left out of all figures."
        )
    else:
        yield f"The first device work begins {nanoseconds(before)} after the first step starts."


def file_name(summary: TraceSummary) -> str:
    """Return the name of the trace's file, without its folder."""
    return plain(PurePath(summary.file).name)


def facts(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line above the tables."""
    events = counted(summary.events, "event")
    yield "trace", f"{file_name(summary)}, {events} in {nanoseconds(summary.recorded)}"
    if summary.rank is not None and summary.world_size is not None:
        yield "rank", f"{summary.rank} ({counted(summary.world_size, 'rank')} in total)"
    elif summary.rank is not None:
        yield "rank", str(summary.rank)
    for device in summary.devices:
        yield "device", _device_fact(device)
    if summary.utilization is not None:
        yield _utilization_fact(summary.utilization)


def _device_fact(device: DeviceSummary) -> str:
    if device.name:
        name = f"{plain(device.name)} (device {device.device})"
    else:
        name = f"device {device.device} (unknown name)"
    if device.memory is None:
        return name
    allocated = units.size(device.memory.allocated)
    reserved = units.size(device.memory.reserved)
    return f"{name}; memory peaks: {allocated} allocated, {reserved} reserved"


def _utilization_fact(found: TraceUtilization) -> tuple[str, str]:
    over = f"over {counted(found.steps, 'step')}" if found.steps else "over the analyzed time"
    speed = units.quantity(found.flops_per_second, "FLOP/s")
    rate = f"{speed} in matmuls with known FLOPs, {over}"
    if found.mfu is None:
        return "rate", f"{rate}; no MFU, because the chip's peak is unknown: pass --hardware NAME"
    shown = [rate]
    if found.hfu is not None and _differs(found.hfu, found.mfu, found.mfu):
        shown.append(f"HFU {units.of_peak(found.hfu)}")
    expected = found.hfu or found.mfu
    if found.executed is not None and _differs(found.executed, expected, found.mfu):
        shown.append(f"executed {units.of_peak(found.executed)}")
    peak = units.quantity(found.peak_flops_per_second, "FLOP/s")
    chip = f"{peak} in {found.precision} ({plain(found.hardware or '')})"
    return "MFU", f"{units.of_peak(found.mfu)} of {chip}: {', '.join(shown)}"


def _differs(value: float, other: float, scale: float) -> bool:
    return abs(value - other) >= SMALL * scale


def launches(summary: TraceSummary) -> Iterator[str]:
    """Yield lines about kernel launches and the launch queue."""
    found = summary.launches
    if found is not None:
        call = nanoseconds(found.call_median)
        yield f"launches: {units.count(found.calls)}; median duration of a launch call {call}"
        yield (
            "delay from a launch call to the start of its kernel: median "
            f"{nanoseconds(found.median)}, "
            f"90th percentile {nanoseconds(found.high)}, maximum {nanoseconds(found.longest)}"
        )
        if found.shorter_than_launch:
            number = units.count(found.shorter_than_launch)
            yield f"kernels shorter than their launch call: {number}"
    several = len(summary.devices) > 1
    for each in summary.devices:
        if each.queue is None:
            continue
        device = ""
        if several:
            device = f" of device {each.device}"
        empty = share(each.queue.empty, each.timeline.window)
        yield (
            f"launch queue{device}: mean length {each.queue.mean:.1f}, "
            f"maximum length {each.queue.largest}, empty for {empty} of the time"
        )


def ranks_verdict(skew: RankSkew) -> str:
    """Return a sentence with the rank that arrives last most often and the rank that waits most."""
    calls = skew.calls
    if not calls:
        return f"The traces of {len(skew.ranks)} ranks have no collective in common."
    last = max(skew.last, key=lambda rank: skew.last[rank])
    waiting = max(skew.waiting, key=lambda rank: skew.waiting[rank])
    return (
        f"Rank {last} arrives last at {skew.last[last]} of {counted(calls, 'collective')}; "
        f"rank {waiting} waits the longest, {nanoseconds(skew.waiting[waiting])} in total; "
        f"the transfers take {nanoseconds(skew.transfer)} in total."
    )


def clock_lines(clocks: Sequence[Clock]) -> Iterator[str]:
    """Yield a line for each rank with the shift of its times to the clock of the first rank."""
    for clock in clocks:
        rank = "a trace without a rank" if clock.rank is None else f"rank {clock.rank}"
        if clock.moved is None:
            yield (
                f"{rank}: the clock is not aligned with the clocks of other ranks, because no "
                "collective is in this trace and in the trace of an aligned rank"
            )
            continue
        sign = "-" if clock.moved < 0 else ""
        collectives = counted(clock.collectives, "shared collective")
        yield (
            f"{rank}: {sign}{nanoseconds(abs(clock.moved))} is added to all times, so that "
            f"{collectives} end at about the same time on all ranks"
        )


def remarks(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Yield the label and the sentence of each remark below the tables."""
    if summary.left_out.calls:
        kernels = counted(summary.left_out.calls, "kernel")
        time = nanoseconds(summary.left_out.device)
        yield "left out", f"launched before the recording began: {kernels}, {time}"
    for each in summary.unsupported:
        parts = [plain(each.name), counted(each.calls, "call")]
        if each.self_device:
            parts.append(f"{nanoseconds(each.self_device)} on the device")
        sentence = (
            f"{', '.join(parts)}: the FLOPs are unknown, because the shapes were not recorded or "
            "are not sufficient"
        )
        yield "not counted", sentence
    if summary.utilization is not None and _has_compiled_backward(summary):
        sentence = (
            "backward is compiled, so the trace does not show which work is recomputed: the MFU "
            "includes recomputed work"
        )
        yield ("compiled", sentence)
    if summary.has_stack:
        sentence = (
            "the recording of Python stacks slows the host: without stacks, the device is idle "
            "less often"
        )
        yield "recording", sentence
    if summary.negative:
        events = counted(summary.negative, "event")
        yield "clock", f"{events} with a negative duration, which is treated as 0"
    if summary.unlaunched:
        work = counted(summary.unlaunched, "device event")
        yield "no launch", f"{work} without a recorded launch: this time belongs to no operator"
    if summary.damaged:
        events = counted(summary.damaged, "event")
        yield "left out", f"{events} that cannot be read; first error: {plain(summary.damage)}"
    for category, number in summary.unread.items():
        yield "not read", f"{counted(number, 'event')} of the unknown category {plain(category)!r}"


def _has_compiled_backward(summary: TraceSummary) -> bool:
    return any(row.name == "CompiledFunctionBackward" for row in summary.operators)


@dataclass
class TraceTable:
    """One table, as text.

    Attributes:
        heading: The table's title.
        total: Number of all rows, also of rows that are not listed; `None` if all rows are listed.
        names: First cell of each row.
        columns: For each column heading, the cells of the column, in the order of `names`.
        notes: Lines below the table.
    """

    heading: str
    total: int | None = None
    names: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, cells: dict[str, str]) -> None:
        """Append a row. `cells` has a text for each column heading of the table."""
        self.names.append(name)
        for heading, cell in cells.items():
            self.columns.setdefault(heading, []).append(cell)

    @property
    def left_out(self) -> int:
        """Number of rows that are not listed."""
        if self.total is None:
            return 0
        return self.total - len(self.names)


def tables(summary: TraceSummary, top: int) -> Iterator[TraceTable]:
    """Yield all tables of a trace, with at most `top` rows each."""
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
    yield from _host_tables(summary, top)


def _host_tables(summary: TraceSummary, top: int) -> Iterator[TraceTable]:
    has_device = summary.device is not None
    if summary.operators:
        yield _operators(summary, top)
    if any(row.flops for row in summary.shapes):
        yield shapes_table(summary.shapes, top)
    if summary.modules:
        yield _spans("modules", summary.modules, top, has_device=has_device)
    if summary.scopes:
        yield _spans("scopes", summary.scopes, top, has_device=has_device)
    if summary.collectives:
        yield _collectives(summary.collectives, top)


def _timeline(summary: TraceSummary, device: DeviceTimeline) -> TraceTable:
    """Return the table of device states, with a column for each device and one for their sum."""
    timelines = {}
    if len(summary.devices) > 1:
        timelines["all devices"] = device
    for each in summary.devices:
        timelines[f"device {each.device}"] = each.timeline
    table = TraceTable("timeline", names=[*STATES.values(), "total"])
    for name, timeline in timelines.items():
        times = []
        shares = []
        for time in timeline.by_state().values():
            times.append(nanoseconds(time))
            shares.append(share(time, timeline.window))
        share_heading = "share" if len(timelines) == 1 else f"share of {name}"
        table.columns[name] = [*times, nanoseconds(timeline.window)]
        table.columns[share_heading] = [*shares, "100 %"]
    for label, overlapped, whole in (
        ("communication", device.overlapped_communication, device.communication),
        ("copies", device.overlapped_copies, device.copies),
    ):
        if whole:
            hidden = share(overlapped, whole)
            table.notes.append(
                f"{label}: {nanoseconds(whole)} in total, {hidden} of it overlaps with computing"
            )
    return table


def _idle(summary: TraceSummary, device: DeviceTimeline) -> TraceTable:
    table = TraceTable("idle time by cause", notes=list(launches(summary)))
    for cause, time in sorted(summary.idle.items(), key=lambda item: -item[1]):
        cells = {
            "time": nanoseconds(time),
            "share of idle": share(time, device.idle),
            "share of total": share(time, device.window),
        }
        table.add(CAUSES[cause].label, cells)
    return table


def _streams(summary: TraceSummary, device: DeviceTimeline, top: int) -> TraceTable:
    table = TraceTable("streams", len(summary.streams))
    number_of_devices = len(summary.devices)
    window = device.window / number_of_devices
    for row in summary.streams[:top]:
        name = f"stream {row.stream}"
        if number_of_devices > 1:
            name = f"device {row.device}, {name}"
        cells = {
            "busy": nanoseconds(row.busy),
            "share of total": share(row.busy, window),
            "kernels": units.count(row.kernels),
            "copies": units.count(row.copies),
        }
        table.add(name, cells)
    return table


_STEP_STATES = ("computing", "idle", "exposed_communication", "exposed_copies")


def _steps(summary: TraceSummary, top: int) -> TraceTable:
    rows = summary.steps[:top]
    timelines = device_timelines(rows)
    table = TraceTable("steps", len(summary.steps))
    states = []
    for state in _STEP_STATES:
        if any(map(attrgetter(state), timelines)):
            states.append(state)
    for row in rows:
        cells = {"time": nanoseconds(row.duration)}
        for state in states:
            cells[STATES[state]] = units.UNKNOWN
            if row.device is not None:
                cells[STATES[state]] = share(getattr(row.device, state), row.device.window)
        table.add(row.name, cells)
    return table


def _categories(summary: TraceSummary) -> TraceTable:
    table = TraceTable("device time by category")
    whole = summary.work_time
    for row in summary.categories:
        cells = {
            "time": nanoseconds(row.device),
            "share": share(row.device, whole),
            "calls": units.count(row.calls),
        }
        table.add(row.category, cells)
    computing = sum(row.device for row in summary.precisions)
    if computing:
        parts = []
        on_tensor_cores = 0
        for precision in summary.precisions:
            name = precision.precision or "unknown"
            parts.append(f"{share(precision.device, computing)} {name}")
            on_tensor_cores += precision.tensor_cores
        table.notes.append(
            f"kernel time by precision: {', '.join(parts)}; "
            f"{share(on_tensor_cores, computing)} on tensor cores (inferred from kernel names)"
        )
    return table


def _kernels(summary: TraceSummary, top: int) -> TraceTable:
    table = TraceTable("kernels", len(summary.kernels))
    whole = summary.work_time
    tensor_cores = {True: "yes", False: "no", None: units.UNKNOWN}
    for row in summary.kernels[:top]:
        operator = units.UNKNOWN
        if row.operators:
            operator = shortened(plain(short_operator_name(row.operators[0])), _SHORT_NAME)
        cells = {
            "time": nanoseconds(row.device),
            "share": share(row.device, whole),
            "calls": units.count(row.calls),
            "median": nanoseconds(row.median),
            "precision": row.precision or units.UNKNOWN,
            "tensor cores": tensor_cores[row.tensor_cores],
            "operator": operator,
        }
        table.add(kernel_name(row.name), cells)
    return table


def _operators(summary: TraceSummary, top: int) -> TraceTable:
    table = TraceTable("operators", len(summary.operators))
    whole = sum(row.self_device for row in summary.operators)
    for row in summary.operators[:top]:
        cells = {}
        if summary.device is not None:
            cells["device, self"] = nanoseconds(row.self_device)
            cells["share"] = share(row.self_device, whole)
            cells["device"] = nanoseconds(row.device)
        cells["calls"] = units.count(row.calls)
        cells["host, self"] = nanoseconds(row.self_host)
        cells["host"] = nanoseconds(row.host)
        cells["category"] = row.category
        table.add(short_operator_name(row.name), cells)
    return table


def shapes_table(found: Sequence[ShapeTimes], top: int, *, roof: bool = False) -> TraceTable:
    """Return the table of operators with their shapes, speed and share of the roofline.

    `roof` adds the columns of `lflops roofline`.
    """
    rows = found[:top]
    table = TraceTable("operators with their shapes", len(found))
    has_device = any(row.device for row in rows)
    has_roofline = roof or any(row.share is not None for row in rows)
    for row in rows:
        cells = {}
        if has_device:
            cells["device"] = nanoseconds(row.device)
            cells["FLOP/s"] = units.count(row.flops_per_second)
        cells["calls"] = units.count(row.calls)
        if has_roofline:
            cells["of roofline"] = units.percent(row.share)
            cells["bound by"] = row.bound or units.UNKNOWN
        cells["precision"] = row.precision or units.UNKNOWN
        if roof:
            cells["FLOPs/byte"] = units.count(row.intensity)
            cells["roofline time"] = units.duration(row.roof_seconds)
        cells["FLOPs"] = units.count(row.flops)
        cells["bytes moved"] = units.size(row.bytes_moved)
        table.add(shapes_text(row), cells)
    return table


def _spans(heading: str, found: Sequence[SpanTimes], top: int, *, has_device: bool) -> TraceTable:
    table = TraceTable(heading, len(found))
    has_phases = any(row.phase != "forward" for row in found)
    for row in found[:top]:
        cells = {}
        if has_device:
            cells["device"] = nanoseconds(row.device)
            cells["device, self"] = nanoseconds(row.self_device)
        cells["calls"] = units.count(row.calls)
        if has_phases:
            cells["phase"] = row.phase
        cells["host"] = nanoseconds(row.host)
        table.add(f"{row.name}{times_mark(row.instances)}", cells)
    return table


def _group_name(group: str) -> str:
    return shortened(plain(group), _SHORT_NAME) or units.UNKNOWN


def _collectives(found: Sequence[CollectiveTimes], top: int) -> TraceTable:
    table = TraceTable("collectives", len(found))
    for row in found[:top]:
        cells = {
            "time": nanoseconds(row.device),
            "exposed": share(row.exposed, row.device),
            "calls": units.count(row.calls),
            "bytes": units.size(row.bytes),
            "busbw": units.quantity(row.bus_bytes_per_second, "B/s"),
            "algbw": units.quantity(row.algorithmic_bytes_per_second, "B/s"),
            "ranks": units.UNKNOWN if row.group_size is None else str(row.group_size),
            "group": _group_name(row.group),
        }
        table.add(row.kind, cells)
    return table


def ranks_tables(skew: RankSkew, top: int) -> Iterator[TraceTable]:
    """Yield the table of ranks, and the table of collectives in which ranks wait."""
    calls = skew.calls
    ranks = TraceTable("ranks", len(skew.ranks))
    for rank in sorted(skew.ranks, key=lambda rank: -skew.last[rank])[:top]:
        cells = {
            "arrives last": share(skew.last[rank], calls),
            "waits": nanoseconds(skew.waiting[rank]),
        }
        ranks.add(f"rank {rank}", cells)
    yield ranks

    collectives = TraceTable("collectives of all ranks", len(skew.collectives))
    for row in skew.collectives[:top]:
        cells = {
            "calls": units.count(row.calls),
            "transfer": nanoseconds(row.transfer),
            "waited": nanoseconds(sum(row.waiting.values())),
            "skew, median": nanoseconds(row.skew_median),
            "skew, maximum": nanoseconds(row.skew_longest),
            "group": _group_name(row.group),
        }
        collectives.add(row.kind, cells)
    if skew.unmatched:
        unmatched = counted(skew.unmatched, "collective")
        collectives.notes.append(f"{unmatched} in the trace of only one rank")
    yield collectives
