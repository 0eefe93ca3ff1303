"""Reads a trace file into a `RecordedTrace`.

Of each event what the analysis needs, with times in whole nanoseconds.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from lflops.trace.analysis.event_stream import TraceStream
from lflops.trace.annotate import MODULE
from lflops.trace.files import as_trace
from lflops.trace.recorded import (
    STEP,
    Collective,
    DeviceEvent,
    Inputs,
    MemoryPeak,
    OperatorCall,
    RecordedTrace,
    RuntimeCall,
    Span,
    microseconds,
    span,
)

_FRAME = "nn.Module: "
_COLLECTIVE = "nccl:"
_NOTHING = Raw(b"{}")
_ABSENT = Raw(b"")
_EMPTY = Raw(b"[]")

_RUNTIME = (
    *(
        "cuda_runtime",
        "cuda_driver",
        "runtime",
        "xpu_runtime",
        "xpu_driver",
        "mtia_runtime",
        "glow_runtime",
        "hpu_op",
    ),
    *("privateuse1_runtime", "privateuse1_driver"),
)
_WORK: Mapping[str, Literal["kernel", "copy", "fill"]] = {
    **dict.fromkeys(("kernel", "Kernel", "mtia_ccp_events"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), "copy"),
    **dict.fromkeys(("gpu_memset", "Memset"), "fill"),
}
# of these kinds of events the name and the thread are needed
_NAMED = frozenset("XBi")
_Shapes, _Types = (
    list[list[int | list[int]]],
    list[str | list[str]],
    # of the inputs of an operator; values are like types
)

_ASCEND = "Ascend Hardware"
"""The process of a trace whose slices are what an Ascend device did. They have no category."""

# begin the types of its tasks in which nothing is computed
_ASCEND_WAITS = ("EVENT_", "NOTIFY_")

_SKIPPED = {
    *(
        "ac2g",
        "async_cpu_gpu",
        "async_gpu",
        "fwdbwd",
        "gpu_user_annotation",
        "gpu_annotation",
        "cuda_sync",
        "overhead",
    ),
    *("Trace", "python_frame", "async_task", ""),
}
"""Arrows, copies of what the host's events say, and what is drawn and not measured."""


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str | None = ""
    name: str | None = None
    ts: Raw = _ABSENT
    dur: Raw = _ABSENT
    pid: int | str | None = None
    tid: int | str | None = None
    args: Raw = _NOTHING


class _CollectiveArgs(Struct, gc=False):
    """The fields by which newer torch describes a collective."""

    collective: str | None = field(default=None, name="Collective name")
    in_elements: int | None = field(default=None, name="In msg nelems")
    out_elements: int | None = field(default=None, name="Out msg nelems")
    group_size: int | None = field(default=None, name="Group size")
    dtype: str = ""
    group: str = field(default="", name="Process Group Name")
    ranks: str = field(default="", name="Process Group Ranks")

    def value(self) -> Collective | None:
        if self.collective is None:
            return None
        return Collective(
            self.collective,
            self.in_elements,
            self.out_elements,
            self.dtype,
            self.group_size,
            self.group,
            self.ranks,
        )


class _WorkArgs(_CollectiveArgs, gc=False):
    device: int | None = None
    stream: int | None = None
    correlation: int = 0
    external: int = field(default=0, name="External id")


class _AscendArgs(Struct, gc=False):
    """The args of a slice of an Ascend device, and of the event that names its process."""

    name: str = ""
    task: str = field(default="", name="Task Type")
    stream: int | None = field(default=None, name="Physic Stream Id")


class _RuntimeArgs(Struct, gc=False):
    correlation: int = 0


class _OperatorArgs(Struct, gc=False):
    external: int = field(default=0, name="External id")
    sequence: int = field(default=-1, name="Sequence number")
    forward_thread: int = field(default=0, name="Fwd thread id")
    shapes: Raw = field(default=_ABSENT, name="Input Dims")
    types: Raw = field(default=_ABSENT, name="Input type")
    values: Raw = field(default=_EMPTY, name="Concrete Inputs")


class _MemoryArgs(Struct, gc=False):
    allocated: int = field(default=0, name="Total Allocated")
    reserved: int = field(default=0, name="Total Reserved")
    device: int = field(default=-1, name="Device Id")
    device_type: int = field(default=0, name="Device Type")


class _SliceArgs(Struct, gc=False):
    module: str = ""
    phase: str = "forward"


def _described(name: str, args: _OperatorArgs) -> Collective | None:
    if args.shapes is _ABSENT:
        return None
    try:
        shapes = msgspec.json.decode(args.shapes, type=list[list[int]])
        types = msgspec.json.decode(args.types, type=list[str])
    except msgspec.MsgspecError:
        return None
    if not shapes or len(set(types)) != 1:
        return None
    return Collective(
        name.removeprefix(_COLLECTIVE), sum(map(prod, shapes)), None, types[0], None, "", ""
    )


def read_trace(path: Path) -> RecordedTrace:
    """Read one file, packed or not.

    A `ProfileError` names a file that cannot be read, or is no trace.
    """
    trace = RecordedTrace(file=str(path))
    stream = TraceStream(path, _Event)
    reader = _Reader(trace, stream.skip)
    with as_trace(path):
        for events in stream.portions():
            reader.add(events)
        reader.finish()
        if not trace.events:
            raise ValueError(stream.damage or "it has no events")
    header = stream.header
    trace.rank = header.rank(path)
    if header.distributed:
        trace.world_size, trace.groups = header.distributed.world_size, header.distributed.groups
    trace.devices = {device.id: device.name for device in header.devices if device.name}
    trace.damaged, trace.damage = stream.damaged, stream.damage
    return trace


class _Reader:
    """Fills a trace."""

    def __init__(self, trace: RecordedTrace, skip: Callable[[Exception], None]) -> None:
        self._trace, self._skip = trace, skip
        self._unread: Counter[str] = Counter()
        self._threads: dict[tuple[Any, Any], int] = {}
        self._names: dict[str, str] = {}
        self._inputs: dict[Inputs, Inputs] = {}
        self._begun: dict[
            tuple[Any, Any], list[_Event]
            # events of which only the begin has been read, by thread
        ] = {}
        self._unsorted: dict[
            int | str | None, list[DeviceEvent]
            # slices without a category, by process
        ] = {}
        # slices without a category that are no work of an Ascend device
        self._uncategorised = 0
        self._ascend: set[int | str | None] = set()
        self._takers: dict[str, Callable[[_Event], None]] = {
            "cpu_op": self._operator,
            "Operator": self._operator,
            **{category: partial(self._device, kind) for category, kind in _WORK.items()},
            "": self._without_category,
            "user_annotation": self._annotation,
            "python_function": self._frame,
            MODULE: self._slice,
            **dict.fromkeys(_RUNTIME, self._runtime),
        }

    def add(self, events: list[_Event]) -> None:
        self._trace.events += len(events)
        for event in events:
            try:
                self._add(event)
            except (msgspec.MsgspecError, ValueError) as error:
                self._trace.events -= 1
                self._skip(error)

    def _add(self, event: _Event) -> None:
        category = event.cat or ""
        if not event.ph or (event.ph in _NAMED and None in {event.name, event.pid, event.tid}):
            raise ValueError("an event has no `ph`, `name`, `pid` or `tid`")
        if event.ph == "B":
            self._begun.setdefault((event.pid, event.tid), []).append(event)
        elif event.ph == "E" and (begun := self._begun.get((event.pid, event.tid))):
            opened = begun.pop()
            # a pair is one event
            self._trace.events -= 1
            self._add(
                replace(opened, ph="X", dur=microseconds(span(event.ts)[0] - span(opened.ts)[0]))
            )
        elif event.ph == "M" and event.name == "process_name":
            if msgspec.json.decode(event.args, type=_AscendArgs).name == _ASCEND:
                self._ascend.add(event.pid)
        elif event.ph == "X":
            taker = self._takers.get(category)
            if taker is not None:
                taker(event)
            elif category not in _SKIPPED:
                self._unread[category] += 1
        elif category == "cpu_instant_event":
            self._instant(event)

    def finish(self) -> None:
        """All events have been added: what had no category is a device's where its process is one."""
        for process in self._ascend:
            self._trace.work += self._unsorted.get(process, [])
        # they name this reader, so only the garbage collector would free all that it has read
        self._takers.clear()
        if (
            unsorted := 0
            if self._ascend
            else sum(map(len, self._unsorted.values())) + self._uncategorised
        ):
            self._unread["none"] += unsorted
        for begun in self._begun.values():
            self._unread.update(event.cat or "begun, and not ended" for event in begun)
        self._trace.unread = dict(self._unread)
        on_host = [
            each
            for each in self._trace.on_host()
            if not isinstance(each, Span) or each.kind != "slice"
        ]
        self._trace.first = min((each.start for each in on_host), default=0)
        self._trace.last = max((each.end for each in on_host), default=0)

    def _without_category(self, event: _Event) -> None:
        """A slice of a process that may be an Ascend device; only the whole trace tells."""
        args = msgspec.json.decode(event.args, type=_AscendArgs)
        if args.task.startswith(_ASCEND_WAITS) or not args.task:
            self._uncategorised += 1
            return
        start, end = self._times(event)
        stream = (
            args.stream
            if args.stream is not None
            else event.tid
            if isinstance(event.tid, int)
            else 0
        )
        kind: Literal["copy", "kernel"] = (
            "copy" if "MEMCPY" in args.task or "SDMA" in args.task else "kernel"
        )
        self._unsorted.setdefault(event.pid, []).append(
            DeviceEvent(kind, self._name(event), 0, stream, start, end, 0, 0, None)
        )

    def _name(self, event: _Event) -> str:
        name = event.name or ""
        return self._names.setdefault(name, name)

    def _thread(self, event: _Event) -> int:
        return self._threads.setdefault((event.pid, event.tid), len(self._threads))

    def _times(self, event: _Event) -> tuple[int, int]:
        """Start and end; an event of negative length, which a clock that is set back makes, has none."""
        start, end = span(event.ts, event.dur)
        if end < start:
            self._trace.negative += 1
            end = start
        return start, end

    def _device(self, kind: Literal["kernel", "copy", "fill"], event: _Event) -> None:
        args = msgspec.json.decode(event.args, type=_WorkArgs)
        start, end = self._times(event)
        device = (
            args.device
            if args.device is not None
            else event.pid
            if isinstance(event.pid, int)
            else 0
        )
        stream = (
            args.stream
            if args.stream is not None
            else event.tid
            if isinstance(event.tid, int)
            else 0
        )
        self._trace.work.append(
            DeviceEvent(
                kind,
                self._name(event),
                device,
                stream,
                start,
                end,
                args.correlation,
                args.external,
                args.value(),
            )
        )

    def _runtime(self, event: _Event) -> None:
        correlation = msgspec.json.decode(event.args, type=_RuntimeArgs).correlation
        start, end = self._times(event)
        self._trace.runtime.append(
            RuntimeCall(self._name(event), self._thread(event), start, end, correlation)
        )

    def _operator(self, event: _Event) -> None:
        name, thread = self._name(event), self._thread(event)
        if name.startswith(STEP):
            self._trace.spans.append(Span("step", name, thread, *self._times(event)))
            return
        args = msgspec.json.decode(event.args, type=_OperatorArgs)
        inputs = None
        if args.shapes is not _ABSENT:
            if args.types is _ABSENT:
                raise ValueError("an operator has `Input Dims` and no `Input type`")
            found = Inputs(bytes(args.shapes), bytes(args.types), bytes(args.values))
            if found not in self._inputs:
                for text, kind in zip(found, (_Shapes, _Types, _Types), strict=True):
                    msgspec.json.decode(text, type=kind)
            inputs = self._inputs.setdefault(found, found)
        collective = (
            msgspec.json.decode(event.args, type=_CollectiveArgs).value()
            if name == "record_param_comms"
            else None
        )
        start, end = self._times(event)
        self._trace.operators.append(
            OperatorCall(
                name,
                thread,
                start,
                end,
                args.external,
                inputs,
                args.sequence,
                args.forward_thread,
                collective,
            )
        )

    def _annotation(self, event: _Event) -> None:
        start, end = self._times(event)
        name = self._name(event)
        named = Span(
            "step" if name.startswith(STEP) else "scope", name, self._thread(event), start, end
        )
        if name.startswith(_COLLECTIVE):
            named.collective = _described(name, msgspec.json.decode(event.args, type=_OperatorArgs))
        self._trace.spans.append(named)

    def _frame(self, event: _Event) -> None:
        """A frame of the Python stack; only those of modules are kept."""
        self._trace.has_stack = True
        if (event.name or "").startswith(_FRAME):
            start, end = self._times(event)
            self._trace.spans.append(
                Span("module", self._name(event), self._thread(event), start, end)
            )

    def _slice(self, event: _Event) -> None:
        args = msgspec.json.decode(event.args, type=_SliceArgs)
        start, end = self._times(event)
        self._trace.spans.append(
            Span("slice", args.module, self._thread(event), start, end, args.phase)
        )

    def _instant(self, event: _Event) -> None:
        if event.name != "[memory]":
            return
        args = msgspec.json.decode(event.args, type=_MemoryArgs)
        if args.device_type and args.device >= 0:
            peak = self._trace.memory.get(args.device, MemoryPeak(0, 0))
            self._trace.memory[args.device] = MemoryPeak(
                max(peak.allocated, args.allocated), max(peak.reserved, args.reserved)
            )
