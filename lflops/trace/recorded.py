"""Define the contents of a recorded trace: device work, host calls and named spans.

All times are integers in nanoseconds. Anything with a start and an end is called a slice.

A trace file has microseconds as decimal text. This text is never converted to a float, because
floats are not precise enough: Kineto counts time from the start of a quarter of the year, and after
the 51st day, neighboring floats are 1/1024 µs apart. Times computed from such floats would be wrong
by a nanosecond, and a slice could end before a slice that it contains.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from itertools import chain
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Raw, Struct

from lflops.intervals import Intervals, joined

STEP = "ProfilerStep#"
"""Prefix of the names of events that record the steps of the profiler."""
NODE = "autograd::engine::evaluate_function: "
"""Prefix of the names of events that record backward nodes (nodes of autograd)."""


class Collective(Struct, frozen=True, gc=False):
    """The message that a collective sends, as the trace records it.

    Attributes:
        in_elements: Number of elements of the input, or `None` if unknown.
        out_elements: Number of elements of the result, or `None` if unknown.
        group: Name of the process group; empty if unknown.
        ranks: The ranks of the process group, as text; empty if unknown.
    """

    name: str
    in_elements: int | None
    out_elements: int | None
    dtype: str
    group_size: int | None
    group: str
    ranks: str


class DeviceEvent(Struct, gc=False):
    """A kernel, copy or fill on a device, also called device work.

    Attributes:
        correlation: Number that the device work shares with the runtime call that launched it.
        external: Number that the device work shares with the operator that launched it; 0 if the
            trace does not record this number.
    """

    kind: Literal["kernel", "copy", "fill"]
    name: str
    device: int
    stream: int
    start: int
    end: int
    correlation: int
    external: int
    collective: Collective | None = None

    @property
    def duration(self) -> int:
        return self.end - self.start


class RuntimeCall(Struct, gc=False):
    """A call of the device's runtime or driver on the host."""

    # The other types of `HostItem` have these two fields as well.
    external: ClassVar[int] = 0
    spans_threads: ClassVar[bool] = False
    name: str
    thread: int
    start: int
    end: int
    correlation: int

    @property
    def duration(self) -> int:
        return self.end - self.start


class Inputs(NamedTuple):
    """The inputs of an operator, as JSON text."""

    shapes: bytes
    types: bytes
    values: bytes


class OperatorCall(Struct, gc=False):
    """A call of an operator on the host.

    Attributes:
        external: Number that the operator shares with the device work that it launched; 0 if the
            trace does not record this number.
        inputs: The operator's inputs, or `None` if shapes were not recorded.
        sequence: Sequence number, which a backward node shares with its forward operator; -1 if
            there is none.
        forward_thread: For a backward node, torch's number of the thread that ran forward; 0 if
            there is none.
        spans_threads: Whether the call ended on another thread than it began on. If so, it contains
            no other calls.
    """

    name: str
    thread: int
    start: int
    end: int
    external: int
    inputs: Inputs | None = None
    sequence: int = -1
    forward_thread: int = 0
    collective: Collective | None = None
    spans_threads: bool = False

    @property
    def duration(self) -> int:
        return self.end - self.start


class Span(Struct, gc=False):
    """A step, scope or module on a thread, from its start to its end.

    Attributes:
        kind: `step` is a step of the profiler. `scope` is a scope of `record_function`. `module` is
            a call of a module in the Python stack (recorded by `with_stack`). `slice` is a call of
            a module that lflops added to the trace.
        phase: Phase of the module, if the kind is `slice`.
        collective: The message, if the span is the scope of a collective and the trace records it.
        external: Number that the span shares with the device work that it launched. It is set only
            for events in memory, not for events that are read from a file.
        spans_threads: Whether the span ended on another thread than it began on. It is set only for
            events in memory.
    """

    kind: Literal["step", "scope", "module", "slice"]
    name: str
    thread: int
    start: int
    end: int
    phase: str = "forward"
    collective: Collective | None = None
    external: int = 0
    spans_threads: bool = False

    @property
    def duration(self) -> int:
        return self.end - self.start


HostItem = Span | OperatorCall | RuntimeCall
"""Anything with a start and an end that a trace records on the host."""


class MemoryPeak(Struct, frozen=True):
    """The largest values, in bytes, that a device's allocator reported."""

    allocated: int
    reserved: int


class RecordedTrace(Struct, kw_only=True):
    """The content of a trace file, or of the events that Kineto holds in memory.

    Attributes:
        rank: Rank from the file's header or from its name, or `None` if unknown.
        groups: Number of process groups, or `None` if unknown.
        devices: Device names by device number.
        has_stack: Whether Python frames were recorded.
        negative: Number of events with a negative duration, which is treated as 0.
        unread: Number of events of unknown categories, by category.
        damaged: Number of events left out because they cannot be read.
        damage: Error of the first damaged event.
        first: Start of the first event on the host; 0 if there are no events.
        last: End of the last event on the host; 0 if there are no events.
    """

    work: list[DeviceEvent] = []
    runtime: list[RuntimeCall] = []
    operators: list[OperatorCall] = []
    spans: list[Span] = []
    file: str = ""
    rank: int | None = None
    world_size: int | None = None
    groups: int | None = None
    devices: dict[int, str] = {}
    memory: dict[int, MemoryPeak] = {}
    has_stack: bool = False
    negative: int = 0
    unread: dict[str, int] = {}
    damaged: int = 0
    damage: str = ""
    events: int = 0
    first: int = 0
    last: int = 0

    def steps(self) -> list[Span]:
        """Return the profiler's steps in the order of the trace."""
        return [span for span in self.spans if span.kind == "step"]

    def on_host(self) -> Iterator[HostItem]:
        """Yield everything that the trace records on the host.

        Spans come first, then operators, then runtime calls. So if two of these have the same start
        and end, the outer one comes before the inner one.
        """
        return chain(self.spans, self.operators, self.runtime)


ZERO = Raw(b"0.000")

_EXACT = Context(prec=60)
_LARGEST = Decimal(10) ** 18
"""Upper limit of a time in microseconds: 30,000 years."""


def span(ts: Raw, dur: Raw = ZERO) -> tuple[int, int]:
    """Return start and end in nanoseconds from the JSON text of an event's `ts` and `dur`.

    The start and the end are rounded to whole nanoseconds, not the duration. So if an event is
    inside another event, it stays inside that event.

    Raises:
        ValueError: A text is not a number of microseconds.
    """
    start = _parse_kineto_time(bytes(ts))
    length = _parse_kineto_time(bytes(dur))
    if start is not None and length is not None:
        return start, start + length
    exact_start = _parse_decimal(bytes(ts))
    exact_length = _parse_decimal(bytes(dur))
    return _rounded(exact_start), _rounded(_EXACT.add(exact_start, exact_length))


def microseconds(nanoseconds: int) -> Raw:
    """Return a time as JSON text in microseconds with three decimal places, as Kineto writes it."""
    whole, places = divmod(abs(nanoseconds), 1000)
    sign = b"-" if nanoseconds < 0 else b""
    return Raw(b"%b%d.%03d" % (sign, whole, places))


def _parse_kineto_time(text: bytes) -> int | None:
    """Parse microseconds with exactly three decimal places into nanoseconds.

    Returns `None` for text in another format. This function is four times as fast as `Decimal`.
    """
    if text[-4:-3] != b"." or len(text) > 22:
        return None
    digits = text[:-4] + text[-3:]
    return int(digits) if digits.isdigit() else None


def _parse_decimal(text: bytes) -> Decimal:
    # Some profilers write times as strings.
    text = text.strip(b'"')
    try:
        value = Decimal(text.decode())
    except (InvalidOperation, UnicodeDecodeError):
        value = _LARGEST
    if not value.is_finite() or value.copy_abs() >= _LARGEST:
        shown = text[:40].decode(errors="replace") or "nothing"
        raise ValueError(
            f"invalid time {shown}: `ts` and `dur` must be numbers of microseconds below 1e18"
        )
    return value


def _rounded(value: Decimal) -> int:
    return int(_EXACT.to_integral_value(_EXACT.scaleb(value, 3)))


class Slice(Protocol):
    """Anything with a start and an end, in nanoseconds."""

    @property
    def start(self) -> int:
        """Start in nanoseconds."""

    @property
    def end(self) -> int:
        """End in nanoseconds."""


def extent(slices: Collection[Slice]) -> tuple[int, int]:
    """Return the earliest start and the latest end of slices; both are 0 if there are none."""
    start = min((each.start for each in slices), default=0)
    end = max((each.end for each in slices), default=0)
    return start, end


def covered(slices: Iterable[Slice]) -> Intervals:
    """Return the intervals in which at least one of the slices runs."""
    return joined((each.start, each.end) for each in slices)


Opened = TypeVar("Opened", bound=Slice)
Sliced = TypeVar("Sliced", bound=Slice)


@dataclass(slots=True)
class SliceTimes:
    """Totals of all slices with the same name, such as all calls of an operator.

    Times are in nanoseconds. Device times are the times of the device work that was launched inside
    the slices. Fields with the prefix `self_` leave out the time of inner slices; the other fields
    include it.
    """

    name: str
    calls: int = 0
    host: int = 0
    self_host: int = 0
    device: int = 0
    self_device: int = 0


def outer_first(
    slices: Iterable[Sliced], opened: list[Opened], *, may_cross: bool = True
) -> Iterator[Sliced]:
    """Yield the slices of a thread in order of start, outer slices before inner slices.

    Args:
        slices: Slices of one thread.
        opened: Stack of the slices around the slice that is yielded. This function removes slices
            that have ended. The caller appends each slice that can contain the next slices.
        may_cross: Whether a slice that begins inside another slice, but ends later than the other
            slice, counts as inside the other slice.
    """
    # Sorting by the end first is faster than one key of two values, because sorting is stable.
    by_end = sorted(slices, key=attrgetter("end"), reverse=True)
    for each in sorted(by_end, key=attrgetter("start")):
        must_contain = each.start if may_cross else each.end
        while opened and (opened[-1].end <= each.start or opened[-1].end < must_contain):
            opened.pop()
        yield each
