"""Sum device work by stream, kernel, category and precision.

Device work is everything that a device runs: kernels, copies and fills.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from lflops.intervals import lengths_inside
from lflops.profile.series import grouped, summed
from lflops.trace.analysis.categories import (
    CATEGORIES,
    Category,
    category_of_kernel,
    narrow_formats,
    precision_by_name,
    tensor_cores_by_name,
)
from lflops.trace.analysis.host_walk import HostWalk, OperatorSums
from lflops.trace.analysis.operator_cost import precision_of
from lflops.trace.device_states import communicates
from lflops.trace.recorded import DeviceEvent, covered

Key = TypeVar("Key")


class StreamTimes(Struct, frozen=True, kw_only=True):
    """Busy time of one stream of a device, and how many kernels and copies it ran.

    Attributes:
        busy: Nanoseconds in which the stream runs work. Time in which several kernels run counts
            once.
    """

    device: int
    stream: int
    busy: int
    kernels: int
    copies: int


class KernelTimes(Struct, frozen=True, kw_only=True):
    """Times of all calls of one kernel, in nanoseconds.

    Attributes:
        tensor_cores: Whether the kernel runs on tensor or matrix cores; `None` if its name does not
            show it.
        device: Total time of all calls.
        operators: The operators that launched the kernel, sorted by their share of `device`; the
            largest comes first.
    """

    name: str
    category: Category
    precision: str | None
    tensor_cores: bool | None
    calls: int
    device: int
    median: int
    longest: int
    operators: tuple[str, ...]


class CategoryTimes(Struct, frozen=True, kw_only=True):
    """Number and total time, in nanoseconds, of the kernels, copies and fills of one category.

    If several of them run at the same time, the shared time counts once for each of them.
    """

    category: Category
    device: int
    calls: int


class PrecisionTimes(Struct, frozen=True, kw_only=True):
    """Number and total time, in nanoseconds, of the kernels of one precision.

    Kernels of collectives are left out.

    Attributes:
        precision: The precision, or `None` if neither the operators' inputs nor the names of the
            kernels show it.
        tensor_cores: Time in kernels that run on tensor or matrix cores, judged by their names.
    """

    precision: str | None
    device: int
    calls: int
    tensor_cores: int


class ClassifiedWork(NamedTuple):
    """A kernel, copy or fill, with its category and precision.

    Attributes:
        operator: Name of the operator that launched the work, or `None` if unknown.
        precision: The precision, or `None` if unknown.
    """

    event: DeviceEvent
    operator: str | None
    category: Category
    precision: str | None


def classified(work: Iterable[DeviceEvent], host: HostWalk) -> list[ClassifiedWork]:
    """Return the operator, category and precision of each kernel, copy and fill."""
    found = []
    for event in work:
        operator = host.launch(event).operator
        name = None if operator is None else operator.name
        category = category_of_kernel(event, name)
        by_inputs = None
        if operator is not None:
            by_inputs = _by_inputs(operator, category)
        precision = _precision(event.name, category, by_inputs)
        found.append(ClassifiedWork(event, name, category, precision))
    return found


def _by_inputs(operator: OperatorSums, category: Category) -> str | None:
    """Return the precision of an operator's inputs, or `None` if it is unknown.

    For a matmul that is not one of torch's operators, the precision is unknown, because its inputs
    do not show it: an operand may be packed into a tensor of another dtype.
    """
    is_custom_matmul = category == "gemm" and not operator.name.startswith("aten::")
    if is_custom_matmul:
        return None
    return precision_of(operator.inputs)


def _precision(kernel: str, category: Category, by_inputs: str | None) -> str | None:
    """Return a kernel's precision, or `None` if it is unknown.

    The precision of the operator's inputs, `by_inputs`, is more reliable than the kernel's name.
    The name is used only if `by_inputs` is `None`, and in two cases that only the name shows: fp32
    inputs are multiplied in TF32, or the operands of a matmul have at most 8 bits.
    """
    by_name = precision_by_name(kernel)
    is_tf32 = by_name == "tf32" and by_inputs == "fp32"
    is_narrow = category in _MATMULS and narrow_formats(kernel) is not None
    if by_inputs is None or is_tf32 or is_narrow:
        return by_name
    return by_inputs


_MATMULS = {"gemm", "convolution", "attention"}
"""Categories of work that multiplies matrices."""


def streams(work: Iterable[DeviceEvent], start: int, end: int) -> tuple[StreamTimes, ...]:
    """Return the busy time and the number of kernels and copies of each stream between two times.

    The streams are sorted by device. On each device, the stream with the longest busy time comes
    first.
    """
    inside = [each for each in work if each.end > start and each.start < end]
    by_stream: dict[tuple[int, int], list[DeviceEvent]] = grouped(
        inside, attrgetter("device", "stream")
    )
    rows = []
    for (device, stream), found in by_stream.items():
        kinds = Counter(map(attrgetter("kind"), found))
        row = StreamTimes(
            device=device,
            stream=stream,
            busy=lengths_inside(covered(found), [(start, end)])[0],
            kernels=kinds["kernel"],
            copies=kinds["copy"],
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (row.device, -row.busy, row.stream)))


def kernels(work: Iterable[ClassifiedWork]) -> tuple[KernelTimes, ...]:
    """Sum the times of kernels, copies and fills by name. The longest total time comes first."""
    by_name = grouped(work, lambda each: each.event.name)
    rows = []
    for name, found in by_name.items():
        rows.append(_kernel(name, found))
    return tuple(sorted(rows, key=lambda row: (-row.device, row.name)))


def _kernel(name: str, found: Sequence[ClassifiedWork]) -> KernelTimes:
    first = found[0].event
    times = [each.event.duration for each in found]
    operators = _times_by(found, "operator")
    operators.pop(None, None)
    precision = None
    tensor_cores = None
    if first.kind == "kernel" and not communicates(first):
        precision = _largest(_times_by(found, "precision"))
        tensor_cores = tensor_cores_by_name(name)
    return KernelTimes(
        name=name,
        category=_largest(_times_by(found, "category")),
        precision=precision,
        tensor_cores=tensor_cores,
        calls=len(found),
        device=sum(times),
        median=round(statistics.median(times)),
        longest=max(times),
        operators=tuple(sorted(operators, key=lambda operator: -operators[operator])),
    )


def _times_by(found: Iterable[ClassifiedWork], field: str) -> dict[Any, int]:
    return summed((getattr(each, field), each.event.duration) for each in found)


def _device_time(found: Iterable[ClassifiedWork]) -> int:
    return sum(each.event.duration for each in found)


def _largest(times: Mapping[Key, int]) -> Key:
    return max(times, key=lambda key: times[key])


def by_category(work: Iterable[ClassifiedWork]) -> tuple[CategoryTimes, ...]:
    """Sum the times of kernels, copies and fills by category. The longest total comes first."""
    rows = []
    for category, found in grouped(work, attrgetter("category")).items():
        device = _device_time(found)
        rows.append(CategoryTimes(category=category, device=device, calls=len(found)))
    return tuple(sorted(rows, key=lambda row: (-row.device, CATEGORIES.index(row.category))))


def by_precision(work: Iterable[ClassifiedWork]) -> tuple[PrecisionTimes, ...]:
    """Sum the times of kernels by precision. The longest total time comes first.

    Kernels of collectives are left out.
    """
    computing = []
    for each in work:
        if each.event.kind == "kernel" and each.category != "communication":
            computing.append(each)
    rows = []
    for precision, found in grouped(computing, attrgetter("precision")).items():
        on_tensor_cores = [each for each in found if tensor_cores_by_name(each.event.name)]
        row = PrecisionTimes(
            precision=precision,
            device=_device_time(found),
            calls=len(found),
            tensor_cores=_device_time(on_tensor_cores),
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.device))
