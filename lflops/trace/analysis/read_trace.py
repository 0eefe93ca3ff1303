"""Read a trace file of torch.profiler into a `RecordedTrace`, with times in integer nanoseconds."""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from lflops.trace.annotate import MODULE
from lflops.trace.event_stream import TraceStream
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
    extent,
    microseconds,
    span,
)

_FRAME = "nn.Module: "
_COLLECTIVE = "nccl:"
_NOTHING = Raw(b"{}")
_ABSENT = Raw(b"")
_EMPTY = Raw(b"[]")

_RUNTIME = frozenset(
    {
        "cuda_runtime",
        "cuda_driver",
        "runtime",
        "xpu_runtime",
        "xpu_driver",
        "mtia_runtime",
        "glow_runtime",
        "hpu_op",
        "privateuse1_runtime",
        "privateuse1_driver",
    }
)
_WorkKind = Literal["kernel", "copy", "fill"]
_WORK: dict[str, _WorkKind] = {
    "kernel": "kernel",
    "Kernel": "kernel",
    "mtia_ccp_events": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "fill",
    "Memset": "fill",
}

_SKIPPED = frozenset(
    {
        "ac2g",
        "async_cpu_gpu",
        "async_gpu",
        "fwdbwd",
        "gpu_user_annotation",
        "gpu_annotation",
        "cuda_sync",
        "overhead",
        "Trace",
        "python_frame",
        "async_task",
    }
)
"""Categories of events that are skipped, because lflops computes no times from them.

Trace viewers draw these events. Examples are arrows between events, and copies of host events on
the track of a device.
"""

_NAMED = frozenset("XBi")
"""Types of events (`ph`) that must have a name, a process and a thread.

An event of these types that lacks one of the three counts as damaged.

`X` is a complete event, `B` is the beginning of an event, and `i` is an instant.
"""

_Shapes = list[list[int | list[int]]]
_Texts = list[str | list[str]]
"""JSON type of two fields of a recorded operator: the dtypes and the values of its inputs.

Each list has one text for each input. If an input is a list of tensors, it has a list of texts.
"""

_ASCEND = "Ascend Hardware"
"""Name that a trace gives to the process that contains the work of an Ascend device.

The events of this process have no category.
"""
_ASCEND_WAITS = ("EVENT_", "NOTIFY_")
"""Tasks of an Ascend device compute nothing if their type begins with one of these prefixes."""


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
    """The arguments (`args`) of an event in which newer versions of torch describe a collective."""

    collective: str | None = field(default=None, name="Collective name")
    in_elements: int | None = field(default=None, name="In msg nelems")
    out_elements: int | None = field(default=None, name="Out msg nelems")
    group_size: int | None = field(default=None, name="Group size")
    dtype: str = ""
    group: str = field(default="", name="Process Group Name")
    ranks: str = field(default="", name="Process Group Ranks")

    def value(self) -> Collective | None:
        """Return the collective, or `None` if the event does not belong to a collective."""
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
    """The arguments (`args`) of an event that names a process, or of an event without a category.

    Attributes:
        name: Name of the process, if the event names one.
        task: Type of the task, if the event is a task of an Ascend device; otherwise empty.
    """

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


def read_trace(path: Path) -> RecordedTrace:
    """Read one trace file, compressed or not.

    Raises:
        ProfileError: The file cannot be read, or it is not a trace.
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
        trace.world_size = header.distributed.world_size
        trace.groups = header.distributed.groups
    trace.devices = {device.id: device.name for device in header.devices if device.name}
    trace.damaged = stream.damaged
    trace.damage = stream.damage
    return trace


class _Reader:
    """Adds the events of a trace file to a `RecordedTrace`."""

    def __init__(self, trace: RecordedTrace, skip: Callable[[Exception], None]) -> None:
        """Prepare to add events to `trace`. `skip` receives the error of each damaged event."""
        self._trace = trace
        self._skip = skip
        self._unread: Counter[str] = Counter()
        # Values that many events share are stored only once.
        self._threads: dict[tuple[Any, Any], int] = {}
        self._names: dict[str, str] = {}
        self._inputs: dict[Inputs, Inputs] = {}
        # Events that have begun but not ended yet, by process and thread.
        self._begun: dict[tuple[Any, Any], list[_Event]] = {}
        # Events without a category that might be work of an Ascend device, by process. A later
        # event shows whether the process is such a device. Other events without a category are only
        # counted.
        self._without_category: dict[int | str | None, list[DeviceEvent]] = {}
        self._number_uncategorised = 0
        self._ascend: set[int | str | None] = set()

    def add(self, events: list[_Event]) -> None:
        """Add events to the trace. Damaged events are skipped."""
        self._trace.events += len(events)
        for event in events:
            try:
                self._add(event)
            except (msgspec.MsgspecError, ValueError) as error:
                self._trace.events -= 1
                self._skip(error)

    def _add(self, event: _Event) -> None:
        lacks_name = event.name is None or event.pid is None or event.tid is None
        if not event.ph or (lacks_name and event.ph in _NAMED):
            raise ValueError("an event has no `ph`, `name`, `pid` or `tid`")
        if event.ph == "X":
            self._add_slice(event)
        elif event.ph == "B":
            self._begun.setdefault((event.pid, event.tid), []).append(event)
        elif event.ph == "E" and self._begun.get((event.pid, event.tid)):
            begun = self._begun[event.pid, event.tid].pop()
            # The beginning and the end of a slice count as one event.
            self._trace.events -= 1
            duration = span(event.ts)[0] - span(begun.ts)[0]
            self._add(replace(begun, ph="X", dur=microseconds(duration)))
        elif event.ph == "M" and event.name == "process_name":
            if msgspec.json.decode(event.args, type=_AscendArgs).name == _ASCEND:
                self._ascend.add(event.pid)
        elif event.cat == "cpu_instant_event" and event.name == "[memory]":
            self._add_memory(event)

    def _add_slice(self, event: _Event) -> None:
        category = event.cat or ""
        if category in {"cpu_op", "Operator"}:
            self._add_operator(event)
        elif category in _RUNTIME:
            self._add_runtime_call(event)
        elif category in _WORK:
            self._add_work(_WORK[category], event)
        elif category == "python_function":
            self._add_frame(event)
        elif category == "user_annotation":
            self._add_annotation(event)
        elif category == MODULE:
            self._add_module_slice(event)
        elif not category:
            self._add_without_category(event)
        elif category not in _SKIPPED:
            self._unread[category] += 1

    def finish(self) -> None:
        """Complete the trace after all events have been added."""
        if self._ascend:
            for process in self._ascend:
                self._trace.work += self._without_category.get(process, [])
        else:
            number = sum(map(len, self._without_category.values())) + self._number_uncategorised
            if number:
                self._unread["none"] += number
        for begun in self._begun.values():
            for event in begun:
                self._unread[event.cat or "started, but not ended"] += 1
        self._trace.unread = dict(self._unread)
        # lflops itself added the module slices to the file. They may lie outside the recording.
        recorded = [item for item in self._trace.on_host() if not _is_module_slice(item)]
        self._trace.first, self._trace.last = extent(recorded)

    def _name(self, event: _Event) -> str:
        name = event.name or ""
        return self._names.setdefault(name, name)

    def _thread(self, event: _Event) -> int:
        return self._threads.setdefault((event.pid, event.tid), len(self._threads))

    def _times(self, event: _Event) -> tuple[int, int]:
        """Return the start and the end of an event.

        A duration is negative if the system's clock was set back. It is treated as 0, and counted.
        """
        start, end = span(event.ts, event.dur)
        if end < start:
            self._trace.negative += 1
            end = start
        return start, end

    def _add_work(self, kind: _WorkKind, event: _Event) -> None:
        args = msgspec.json.decode(event.args, type=_WorkArgs)
        start, end = self._times(event)
        work = DeviceEvent(
            kind=kind,
            name=self._name(event),
            device=_number(args.device, event.pid),
            stream=_number(args.stream, event.tid),
            start=start,
            end=end,
            correlation=args.correlation,
            external=args.external,
            collective=args.value(),
        )
        self._trace.work.append(work)

    def _add_without_category(self, event: _Event) -> None:
        """Store an event without a category until it is known whether it is device work.

        The event is device work if its process is an Ascend device. The event that names the
        process can come later in the trace.
        """
        args = msgspec.json.decode(event.args, type=_AscendArgs)
        if not args.task or args.task.startswith(_ASCEND_WAITS):
            self._number_uncategorised += 1
            return
        start, end = self._times(event)
        is_copy = "MEMCPY" in args.task or "SDMA" in args.task
        work = DeviceEvent(
            kind="copy" if is_copy else "kernel",
            name=self._name(event),
            device=0,
            stream=_number(args.stream, event.tid),
            start=start,
            end=end,
            correlation=0,
            external=0,
        )
        self._without_category.setdefault(event.pid, []).append(work)

    def _add_runtime_call(self, event: _Event) -> None:
        correlation = msgspec.json.decode(event.args, type=_RuntimeArgs).correlation
        start, end = self._times(event)
        call = RuntimeCall(self._name(event), self._thread(event), start, end, correlation)
        self._trace.runtime.append(call)

    def _add_operator(self, event: _Event) -> None:
        name = self._name(event)
        if name.startswith(STEP):
            self._add_span("step", name, event)
            return
        args = msgspec.json.decode(event.args, type=_OperatorArgs)
        collective = None
        if name == "record_param_comms":
            collective = msgspec.json.decode(event.args, type=_CollectiveArgs).value()
        thread = self._thread(event)
        inputs = self._shared_inputs(args)
        start, end = self._times(event)
        call = OperatorCall(
            name=name,
            thread=thread,
            start=start,
            end=end,
            external=args.external,
            inputs=inputs,
            sequence=args.sequence,
            forward_thread=args.forward_thread,
            collective=collective,
        )
        self._trace.operators.append(call)

    def _shared_inputs(self, args: _OperatorArgs) -> Inputs | None:
        """Return an operator's inputs. Calls with equal inputs share one object, to save memory."""
        if args.shapes is _ABSENT:
            return None
        if args.types is _ABSENT:
            raise ValueError("an operator has `Input Dims` and no `Input type`")
        inputs = Inputs(bytes(args.shapes), bytes(args.types), bytes(args.values))
        if inputs not in self._inputs:
            msgspec.json.decode(inputs.shapes, type=_Shapes)
            msgspec.json.decode(inputs.types, type=_Texts)
            msgspec.json.decode(inputs.values, type=_Texts)
            self._inputs[inputs] = inputs
        return self._inputs[inputs]

    def _add_span(
        self,
        kind: Literal["step", "scope", "module", "slice"],
        name: str,
        event: _Event,
        phase: str = "forward",
        collective: Collective | None = None,
    ) -> None:
        start, end = self._times(event)
        thread = self._thread(event)
        self._trace.spans.append(Span(kind, name, thread, start, end, phase, collective))

    def _add_annotation(self, event: _Event) -> None:
        name = self._name(event)
        if name.startswith(STEP):
            self._add_span("step", name, event)
        elif name.startswith(_COLLECTIVE):
            args = msgspec.json.decode(event.args, type=_OperatorArgs)
            self._add_span("scope", name, event, collective=_collective_of_scope(name, args))
        else:
            self._add_span("scope", name, event)

    def _add_frame(self, event: _Event) -> None:
        """Add a frame of the Python stack if it belongs to a module."""
        self._trace.has_stack = True
        if (event.name or "").startswith(_FRAME):
            self._add_span("module", self._name(event), event)

    def _add_module_slice(self, event: _Event) -> None:
        args = msgspec.json.decode(event.args, type=_SliceArgs)
        self._add_span("slice", args.module, event, phase=args.phase)

    def _add_memory(self, event: _Event) -> None:
        args = msgspec.json.decode(event.args, type=_MemoryArgs)
        if args.device_type and args.device >= 0:
            peak = self._trace.memory.get(args.device, MemoryPeak(0, 0))
            self._trace.memory[args.device] = MemoryPeak(
                allocated=max(peak.allocated, args.allocated),
                reserved=max(peak.reserved, args.reserved),
            )


def _number(recorded: int | None, viewer: int | str | None) -> int:
    """Return the number of a device or stream.

    Args:
        recorded: The number in the event's arguments, or `None` if it is missing.
        viewer: The event's process or thread, by which trace viewers sort events. If `recorded` is
            `None`, this number is returned instead, or 0 if it is not a number.
    """
    if recorded is not None:
        return recorded
    return viewer if isinstance(viewer, int) else 0


def _is_module_slice(item: object) -> bool:
    return isinstance(item, Span) and item.kind == "slice"


def _collective_of_scope(name: str, args: _OperatorArgs) -> Collective | None:
    """Return the collective that runs inside a scope; `None` if the size of its message is unknown.

    The size of the message follows from the shapes and dtypes of the scope's inputs.
    """
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
        name=name.removeprefix(_COLLECTIVE),
        in_elements=sum(map(prod, shapes)),
        out_elements=None,
        dtype=types[0],
        group_size=None,
        group="",
        ranks="",
    )
