"""What a trace recorded, as a value: work of devices, calls of the host, and the spans that were named.

All times are nanoseconds.

A file has microseconds as decimal text. They never become floats: Kineto's times begin with the
quarter, and from its 51st day on floats of them lie 1/1024 µs from each other. What is computed
from them is off by a nanosecond, and a slice would end before one that it contains.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from itertools import chain
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Raw, Struct

STEP, NODE = "ProfilerStep#", "autograd::engine::evaluate_function: "
"""Begin the names of the profiler's steps, and of the nodes of backward."""


class Collective(Struct, frozen=True, gc=False):
    """What a communication kernel was launched for, as the trace names it."""

    name: str
    in_elements: int | None
    out_elements: int | None
    dtype: str
    group_size: int | None
    group: str
    ranks: str


class DeviceEvent(Struct, gc=False):
    """One kernel, copy or fill."""

    kind: Literal["kernel", "copy", "fill"]
    name: str
    device: int
    stream: int
    start: int
    end: int
    # the number of the runtime call that launched it
    correlation: int
    # the number of the operator that launched it, in traces that tell it; 0 is none
    external: int
    collective: Collective | None = None


class RuntimeCall(Struct, gc=False):
    """A call of the device's library on the host."""

    external: ClassVar[int] = 0
    spans_threads: ClassVar[bool] = False
    name: str
    thread: int
    start: int
    end: int
    correlation: int


class Inputs(NamedTuple):
    """The inputs of an operator, as JSON text."""

    shapes: bytes
    types: bytes
    values: bytes


class OperatorCall(Struct, gc=False):
    """A call of an operator on the host."""

    name: str
    thread: int
    start: int
    end: int
    external: int
    # `None` where shapes were not recorded
    inputs: Inputs | None = None
    sequence: int = (
        -1
        # of a node of backward, and of the operator that it is the backward of; -1 is none
    )
    forward_thread: int = (
        # of a node of backward: torch's number of the thread of its forward; 0 is none
        0
    )
    collective: Collective | None = None
    spans_threads: bool = (
        # whether it ended on another thread, so that nothing is inside of it
        False
    )


class Span(Struct, gc=False):
    """A named stretch of time on a thread.

    A step, a scope of `record_function`, a module frame of `with_stack`, or a slice of lflops.
    """

    kind: Literal["step", "scope", "module", "slice"]
    name: str
    thread: int
    start: int
    end: int
    # of a slice of lflops
    phase: str = "forward"
    # of the scope of a collective, where it tells its message
    collective: Collective | None = None
    # as of an operator; read of events in memory alone, as the next
    external: int = 0
    spans_threads: bool = False


HostItem = Span | OperatorCall | RuntimeCall


class MemoryPeak(Struct, frozen=True):
    """The largest numbers of bytes that the allocator of a device reported."""

    allocated: int
    reserved: int


class RecordedTrace(Struct, kw_only=True):
    """One file, or what Kineto has in memory, read."""

    work: list[DeviceEvent] = []
    runtime: list[RuntimeCall] = []
    operators: list[OperatorCall] = []
    spans: list[Span] = []
    file: str = ""
    # from the file; `None` where it does not tell
    rank: int | None = None
    world_size: int | None = None
    # how many process groups there are; `None` where it does not tell
    groups: int | None = None
    # the names by the devices' numbers
    devices: dict[int, str] = {}
    memory: dict[int, MemoryPeak] = {}
    # whether Python's frames were recorded
    has_stack: bool = False
    # how many events had a negative length; they are taken as 0 ns long
    negative: int = 0
    # events of a kind that nothing here knows, by category
    unread: dict[str, int] = {}
    # how many events are left out because they cannot be read
    damaged: int = 0
    # what is wrong with the first of them
    damage: str = ""
    events: int = 0
    # the recording's first and last moment on the host; both 0 without an event
    first: int = 0
    last: int = 0

    def on_host(self) -> Iterator[HostItem]:
        """All that the host did.

        Of what begins and ends at once, a span is around an operator, and an operator around a
        call.
        """
        return chain(self.spans, self.operators, self.runtime)


ZERO = Raw(b"0.000")

_EXACT = Context(prec=60)
# microseconds: 30 000 years
_LARGEST = Decimal(10) ** 18


def span(ts: Raw, dur: Raw = ZERO) -> tuple[int, int]:
    """Start and end of an event in nanoseconds, from the JSON texts of its `ts` and `dur`.

    Without `dur` it has no length.
    """
    # Fractions of a nanosecond are rounded at both ends, so that an event inside of another one
    # stays inside. A `ValueError` says which of them is no number of microseconds.
    start, length = _as_kineto_writes(bytes(ts)), _as_kineto_writes(bytes(dur))
    if start is not None and length is not None:
        return start, start + length
    begin, took = (
        _decimal(bytes(each).strip(b'"'))
        for each in (ts, dur)
        # some profilers write a text
    )
    return _rounded(begin), _rounded(_EXACT.add(begin, took))


def microseconds(nanoseconds: int) -> Raw:
    """The JSON text of a time, exact: microseconds with three places, as Kineto writes them."""
    whole, places = divmod(abs(nanoseconds), 1000)
    return Raw(b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", whole, places))


def _as_kineto_writes(text: bytes) -> int | None:
    """Nanoseconds, where the text has exactly three places.

    This is four times as fast as a decimal.
    """
    if text[-4:-3] != b"." or len(text) > 22:
        return None
    digits = text[:-4] + text[-3:]
    return int(digits) if digits.isdigit() else None


def _decimal(text: bytes) -> Decimal:
    try:
        value = Decimal(text.decode())
    except (InvalidOperation, UnicodeDecodeError):
        value = _LARGEST
    if not value.is_finite() or value.copy_abs() >= _LARGEST:
        raise ValueError(
            f"a time of {text[:40].decode(errors='replace') or 'nothing'}: `ts` and `dur` are numbers of microseconds below 1e18"
        )
    return value


def _rounded(value: Decimal) -> int:
    return int(_EXACT.to_integral_value(_EXACT.scaleb(value, 3)))


class Slice(Protocol):
    """Anything from one moment to another, in nanoseconds."""

    @property
    def start(self) -> int:
        """Its first moment."""

    @property
    def end(self) -> int:
        """Its last moment."""


Opened = TypeVar("Opened", bound=Slice)
Sliced = TypeVar("Sliced", bound=Slice)


@dataclass(slots=True)
class SliceTimes:
    """All slices of one name.

    Nanoseconds, inclusive and own, of the host and of the device's work that was launched in them.
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
    """The slices of one thread in the order of time, the outer ones first."""
    # `opened` is the stack of the slices around the one that comes: those that have ended are taken
    # from it. The caller appends what is to be around the next ones. A slice that ends after the
    # innermost one around it is inside of that if it `may_cross`, and else of none that it crosses.
    for each in sorted(slices, key=lambda each: (each.start, -each.end)):
        start, last = each.start, each.start if may_cross else each.end
        while opened and (opened[-1].end <= start or opened[-1].end < last):
            opened.pop()
        yield each
