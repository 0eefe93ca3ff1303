"""A trace as sentences, the verdict first, and as tables.

Headings, names, and columns of text, for a terminal and for a page.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from lflops import units
from lflops.profile.records import TimingStats
from lflops.report.text import counted, kernel_name, plain, shortened
from lflops.trace.analysis.collectives import Clock, CollectiveTimes, RankSkew
from lflops.trace.analysis.idle import Cause
from lflops.trace.analysis.operators import ShapeTimes, SpanTimes
from lflops.trace.analysis.summary import TraceSummary
from lflops.trace.device_states import DeviceTimeline


class IdleCause(Struct, frozen=True, forbid_unknown_fields=True):
    """What idle time is lost to: a row of `sentences.toml`, which explains the fields."""

    label: str
    when: str
    next: str = ""


class _Words(Struct, forbid_unknown_fields=True):
    states: dict[str, str]
    causes: dict[Cause, IdleCause]


_WORDS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Words)
STATES, CAUSES = _WORDS.states, _WORDS.causes

_HOST: frozenset[Cause] = frozenset({"launching", "operators", "python"})
_SMALL, _LARGE, _MOST = 0.01, 0.05, 0.6


def nanoseconds(value: int | None) -> str:
    """A time, as `34.89 ms`."""
    if value is not None and 0 < value < 1000:
        return f"{value} ns"
    return units.duration(None if value is None else value / 1e9)


def share(part: float, whole: float) -> str:
    """A part of a whole, as `62.0 %`."""
    return units.percent(part / whole if whole else None)


def shapes_text(row: ShapeTimes) -> str:
    """An operator with the shapes of its tensors, as `mm 8944×1024 1024×2816`."""
    groups = [(shape, len(list(same))) for shape, same in itertools.groupby(row.shapes) if shape]
    shapes = (
        _shape_text(shape) if number == 1 else f"{number} of {_shape_text(shape)}"
        for shape, number in groups
    )
    return " ".join(
        [plain(row.name.removeprefix("aten::").removeprefix("_scaled_dot_product_")), *shapes]
    )


def _shape_text(shape: Any) -> str:
    if isinstance(shape[0], tuple):
        return f"[{', '.join(map(_shape_text, shape[:2]))}{', …' if len(shape) > 2 else ''}]"
    return "×".join(map(str, shape))


def verdict(summary: TraceSummary) -> Iterator[str]:
    """Say what the device did, and what to do about it."""
    device = summary.device
    if device is None:
        yield "The trace has no work of a device: all times are the host's."
        return
    yield _states(summary, device)
    idle = device.idle
    if idle > _LARGE * device.window and summary.idle:
        most = max(summary.idle, key=lambda cause: summary.idle[cause])
        if CAUSES[most].next:
            yield f"To shorten the idle time: {CAUSES[most].next}."
    if summary.step is not None and summary.steps:
        yield _step(summary, summary.step)
    elif summary.before_device and summary.before_device > _LARGE * summary.recorded:
        yield f"Before the window the host ran {nanoseconds(summary.before_device)} without any work of the device."


def _states(summary: TraceSummary, device: DeviceTimeline) -> str:
    several = len(summary.devices) > 1
    who = f"The {len(summary.devices)} GPUs compute" if several else "The GPU computes"
    parts = [
        f"{who} {share(device.computing, device.window)} of {'their ' if several else ''}{nanoseconds(device.window)}"
    ]
    if device.exposed_communication > _SMALL * device.window:
        parts.append(
            f"only communicate{'' if several else 's'} {share(device.exposed_communication, device.window)}"
        )
    if device.exposed_copies > _SMALL * device.window:
        parts.append(
            f"only cop{'y' if several else 'ies'} {share(device.exposed_copies, device.window)}"
        )
    if not device.idle:
        return f"{', '.join(parts)}, and {'are' if several else 'is'} never idle."
    where = ""
    if summary.idle:
        most = max(summary.idle, key=lambda cause: summary.idle[cause])
        host = sum(lost for cause, lost in summary.idle.items() if cause in _HOST)
        spread = summary.idle[most] < _MOST * device.idle and host > summary.idle[most]
        where = ", mostly while the host prepares launches" if spread else ""
        where = where or f", mostly {CAUSES[most].when}"
    return f"{', '.join(parts)}, and {'are' if several else 'is'} idle {share(device.idle, device.window)}{where}."


def _step(summary: TraceSummary, step: TimingStats) -> str:
    known = [each.device for each in summary.steps if each.device is not None]
    computing = share(sum(each.computing for each in known), sum(each.window for each in known))
    if step.n == 1:
        text = f"The step takes {units.duration(step.median)}; the device computes in {computing} of it."
    else:
        spread = f"median of {step.n}, quartiles {units.duration(step.low)} and {units.duration(step.high)}"
        text = f"A step takes {units.duration(step.median)} ({spread}); the device computes in {computing} of it."
    before = summary.before_device or 0
    if before > _LARGE * sum(each.end - each.start for each in summary.steps):
        text += f" From the first step's start to its first work on the device pass {nanoseconds(before)}."
    return text


def facts(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Label and value of each line above the tables."""
    yield (
        "trace",
        f"{plain(PurePath(summary.file).name)}, {counted(summary.events, 'event')} in {nanoseconds(summary.recorded)}",
    )
    if summary.rank is not None:
        yield (
            "rank",
            f"{summary.rank}"
            + (f" of {summary.world_size}" if summary.world_size is not None else ""),
        )
    for each in summary.devices:
        name = (
            f"{plain(each.name)} (device {each.device})"
            if each.name
            else f"device {each.device}, of unknown name"
        )
        memory = each.memory
        peak = (
            f"; allocator's peak {units.size(memory.allocated)}, reserved {units.size(memory.reserved)}"
            if memory
            else ""
        )
        yield "device", f"{name}{peak}"
    yield from _utilization(summary)


def _utilization(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    found = summary.utilization
    if found is None:
        return
    over = f"over {counted(found.steps, 'step')}" if found.steps else "over the window"
    rate = f"{units.quantity(found.flops_per_second, 'FLOP/s')} in counted products, {over}"
    if found.mfu is None:
        yield "rate", f"{rate}; no peak is known for an MFU: give --hardware NAME"
        return
    others = {"HFU": found.hfu, "executed": found.executed}
    hfu = "".join(
        f", {name} {units.of_peak(share)}"
        for name, share in others.items()
        if share is not None
        and abs(share - (found.hfu if name == "executed" and found.hfu else found.mfu))
        >= _SMALL * found.mfu
    )
    peak = f"{units.quantity(found.peak_flops_per_second, 'FLOP/s')} in {found.precision} ({plain(found.hardware or '')})"
    yield "MFU", f"{units.of_peak(found.mfu)} of {peak}: {rate}{hfu}"


def launches(summary: TraceSummary) -> Iterator[str]:
    """Lines about launches and the queue."""
    found = summary.launches
    if found is not None:
        high, longest = nanoseconds(found.high), nanoseconds(found.longest)
        yield f"launches: {units.count(found.calls)}, each call {nanoseconds(found.call_median)} (median)"
        yield f"from a call to its work: {nanoseconds(found.median)} (median), a tenth over {high}, at most {longest}"
        if found.shorter_than_launch:
            yield f"shorter than the call that launched it: {counted(found.shorter_than_launch, 'kernel')}"
    for each in summary.devices:
        if each.queue is not None:
            device = f" of device {each.device}" if len(summary.devices) > 1 else ""
            empty = share(each.queue.empty, each.timeline.window)
            yield f"queue{device}: {each.queue.mean:.1f} deep in the mean, {each.queue.largest} at most, empty {empty} of the window"


def ranks_verdict(skew: RankSkew) -> str:
    """Who comes last to the collectives of several ranks."""
    calls = sum(row.calls for row in skew.collectives)
    if not calls:
        return f"The traces of {len(skew.ranks)} ranks have no collective in common."
    rank = max(skew.last, key=lambda each: skew.last[each])
    waited = max(skew.waiting, key=lambda each: skew.waiting[each])
    return (
        f"Rank {rank} comes last to {skew.last[rank]} of {counted(calls, 'collective')}; rank {waited} waits the longest, "
        f"{nanoseconds(skew.waiting[waited])}, and the transfers take {nanoseconds(skew.transfer)}."
    )


def clock_lines(clocks: Sequence[Clock]) -> Iterator[str]:
    """Say by how much each rank was moved to be on the first one's clock."""
    for clock in clocks:
        rank = "a trace without a rank" if clock.rank is None else f"rank {clock.rank}"
        if clock.moved is None:
            yield f"{rank} is on its own clock: it has no collective in common with the ranks before it"
        else:
            moved = f"{'-' if clock.moved < 0 else ''}{nanoseconds(abs(clock.moved))}"
            yield f"{rank} is moved by {moved}: so {counted(clock.collectives, 'collective')} in common end together"


def remarks(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """Label and sentence of each remark; one without a label goes on with the one above."""
    if summary.left_out.calls:
        yield (
            "left out",
            f"{counted(summary.left_out.calls, 'kernel')} of {nanoseconds(summary.left_out.device)}, launched before the recording began",
        )
    for each in summary.unsupported:
        time = f", {nanoseconds(each.self_device)} of the device" if each.self_device else ""
        yield (
            "not counted",
            f"{plain(each.name)}, {counted(each.calls, 'call')}{time}: shapes were not recorded, or do not tell",
        )
    if summary.utilization is not None and any(
        row.name == "CompiledFunctionBackward" for row in summary.operators
    ):
        yield (
            "compiled",
            "backward is compiled: what it computes again is in the MFU, because a trace does not show which part that is",
        )
    if summary.has_stack:
        yield (
            "recording",
            "with Python's stack, which slows the host down: without it the device is less idle",
        )
    if summary.negative:
        yield "clock", f"{counted(summary.negative, 'event')} of negative length, taken as 0"
    if summary.unlaunched:
        yield (
            "no launch",
            f"{counted(summary.unlaunched, 'kernel')} or copies, whose call is not in the trace: in no operator",
        )
    if summary.damaged:
        yield (
            "left out",
            f"{counted(summary.damaged, 'event')} that cannot be read: {plain(summary.damage)}",
        )
    for category, number in summary.unread.items():
        yield "not read", f"{counted(number, 'event')} of the unknown category {plain(category)!r}"


_OPERATOR = 24


class TraceTable(NamedTuple):
    """One table."""

    heading: str
    # one a row
    names: Sequence[str]
    # the cells of each row, by heading
    columns: Mapping[str, Sequence[str]]
    # lines below it
    notes: tuple[str, ...] = ()
    # how many rows there are, where only some are listed
    total: int | None = None

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
        columns[name] = [nanoseconds(getattr(row, state)) for state in STATES] + [
            nanoseconds(row.window)
        ]
        shares = [share(getattr(row, state), row.window) for state in STATES]
        columns["share" if len(rows) == 1 else f"share of {name}"] = [*shares, "100 %"]
    hidden = (
        ("communication", device.overlapped_communication, device.communication),
        ("copies", device.overlapped_copies, device.copies),
    )
    notes = tuple(
        f"{label}: {nanoseconds(whole)} in all, {share(part, whole)} of it hidden"
        for label, part, whole in hidden
        if whole
    )
    return TraceTable("timeline", [*STATES.values(), "window"], columns, notes)


def _idle(summary: TraceSummary, device: DeviceTimeline) -> TraceTable:
    rows = sorted(summary.idle.items(), key=lambda row: -row[1])
    columns = {
        "time": [nanoseconds(time) for _, time in rows],
        "share of idle": [share(time, device.idle) for _, time in rows],
        "share of window": [share(time, device.window) for _, time in rows],
    }
    return TraceTable(
        "idle, lost to",
        [CAUSES[cause].label for cause, _ in rows],
        columns,
        tuple(launches(summary)),
    )


def _streams(summary: TraceSummary, device: DeviceTimeline, top: int) -> TraceTable:
    rows = summary.streams[:top]
    several = len(summary.devices) > 1
    columns = {
        "busy": [nanoseconds(row.busy) for row in rows],
        "share of window": [share(row.busy, device.window / len(summary.devices)) for row in rows],
        "kernels": [units.count(row.kernels) for row in rows],
        "copies": [units.count(row.copies) for row in rows],
    }
    names = [
        f"device {row.device}, stream {row.stream}" if several else f"stream {row.stream}"
        for row in rows
    ]
    return TraceTable("streams", names, columns, total=len(summary.streams))


def _steps(summary: TraceSummary, top: int) -> TraceTable:
    rows = summary.steps[:top]
    columns = {"time": [nanoseconds(row.end - row.start) for row in rows]}
    known = [row.device for row in rows]
    for state, name in sorted(
        STATES.items(), key=lambda state: state[0] != "computing" and state[0] != "idle"
    ):
        if any(row is not None and getattr(row, state) for row in known):
            columns[name] = [
                units.UNKNOWN if row is None else share(getattr(row, state), row.window)
                for row in known
            ]
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
        parts = [
            f"{share(row.device, computing)} {row.precision or 'of unknown precision'}"
            for row in summary.precisions
        ]
        cores = sum(row.tensor_cores for row in summary.precisions)
        notes = (
            f"precision of kernels: {', '.join(parts)}; {share(cores, computing)} on tensor cores by their names",
        )
    return TraceTable(
        "device's work by category", [row.category for row in summary.categories], columns, notes
    )


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
            shortened(plain(row.operators[0].removeprefix("aten::")), _OPERATOR)
            if row.operators
            else units.UNKNOWN
            for row in rows
        ],
    }
    names = [kernel_name(row.name) for row in rows]
    return TraceTable("kernels", names, columns, total=len(summary.kernels))


def _operators(summary: TraceSummary, top: int) -> TraceTable:
    rows = summary.operators[:top]
    columns: dict[str, list[str]] = {}
    if summary.device is not None:
        whole = sum(row.self_device for row in summary.operators)
        columns["device, own"] = [nanoseconds(row.self_device) for row in rows]
        columns["share"] = [share(row.self_device, whole) for row in rows]
        columns["device"] = [nanoseconds(row.device) for row in rows]
    columns |= {
        "calls": [units.count(row.calls) for row in rows],
        "host, own": [nanoseconds(row.self_host) for row in rows],
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
        columns["device, own"] = [nanoseconds(row.self_device) for row in rows]
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
    notes = (
        (f"{counted(skew.unmatched, 'collective')} only in the trace of one rank",)
        if skew.unmatched
        else ()
    )
    yield TraceTable(
        "collectives of all ranks",
        [row.kind for row in rows],
        columns,
        notes,
        len(skew.collectives),
    )
