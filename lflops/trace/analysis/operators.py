"""The operators of a trace.

Times, calls, and by the shapes of their inputs what they computed and how near to the chip's roof.

Modules and scopes by the spans around the operators: a frame of a module has the class and a
number, as `Linear_3`; a slice of lflops has the module's name. Backward is in the module whose
forward made the node, where the trace has the numbers that tell. All times are of launches inside,
so a module's time is its kernels'.
"""

import re
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.profile.series import grouped, sums
from lflops.trace.analysis.categories import Category, category_of_operator
from lflops.trace.analysis.host_walk import HostWalk, OperatorSums
from lflops.trace.analysis.operator_cost import TracedCost, arguments, cost_of, precision_of

MULTIPLYING: frozenset[Category] = frozenset({"gemm", "convolution", "attention"})
"""Categories of operators whose work is multiply-accumulates."""


class OperatorTimes(Struct, frozen=True, kw_only=True):
    """All calls of one operator; nanoseconds, inclusive and its own."""

    name: str
    category: Category
    calls: int
    host: int
    self_host: int
    device: int
    self_device: int


class ShapeTimes(Struct, frozen=True, kw_only=True):
    """All counted calls of one operator with inputs of one set of shapes. `None` is unknown."""

    name: str
    category: Category
    shapes: tuple[
        Any, ...
        # of each input; of a list of tensors, a list; of what is no tensor, `None`
    ]
    # of the elements, by torch's names
    types: tuple[str, ...]
    # as `hardware.DTYPES` call it; TF32 where a kernel's name says so
    precision: str | None
    # the number of calls; calls inside of another counted operator are that one's
    calls: int
    # nanoseconds of the device, with all below it
    device: int
    # of all calls; `flops` without what a mask leaves out
    macs: int
    flops: int
    bytes_moved: int | None
    intensity: float | None
    # of the device's time
    flops_per_second: float | None
    roof_seconds: (
        float | None
        # what the chip needs at least for the FLOPs at its peak, or for the bytes at its bandwidth
    )
    # which of the two takes longer
    bound: Literal["compute", "memory"] | None
    share: (
        float | None
        # `roof_seconds` over the device's time; over 1 where data stayed in a cache
    )


class UnsupportedTraceOperator(Struct, frozen=True, kw_only=True):
    """An operator that multiplies and whose inputs do not tell how much, or were not recorded.

    Nanoseconds of self time.
    """

    name: str
    calls: int
    self_device: int


def operators(walk: HostWalk) -> tuple[OperatorTimes, ...]:
    """Sum the operators by name, the most self time first.

    The device's, or the host's where no device worked.
    """
    times = "calls", "host", "self_host", "device", "self_device"
    rows = [
        OperatorTimes(name=name, category=category_of_operator(name), **sums(found, *times))
        for name, found in grouped(walk.operators.values(), attrgetter("name")).items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.self_device, -row.self_host, row.name)))


def shapes(walk: HostWalk, chip: Hardware | None) -> tuple[ShapeTimes, ...]:
    """The counted operators by their inputs, the most of the device's time first, or the most FLOPs."""
    counted = (
        (each, cost_of(each.name, each.inputs))
        for each in walk.operators.values()
        if each.counted_calls
    )
    rows = [_shape(each, cost, chip) for each, cost in counted if cost is not None]
    return tuple(sorted(rows, key=lambda row: (-row.device, -row.flops, row.name)))


def precision(operator: OperatorSums) -> str | None:
    """The precision that an operator multiplies in."""
    by_inputs = precision_of(operator.inputs)
    return "tf32" if by_inputs == "fp32" and operator.has_tf32 else by_inputs


def _shape(operator: OperatorSums, cost: TracedCost, chip: Hardware | None) -> ShapeTimes:
    calls, seconds = operator.counted_calls, operator.counted_device / 1e9
    flops = cost.executed_flops * calls
    moved = None if cost.bytes_moved is None else cost.bytes_moved * calls
    dtype = precision(operator)
    compute, memory = _roof(flops, moved, dtype, chip)
    roof = None if compute is None or memory is None else max(compute, memory)
    given = (arguments(operator.inputs) if operator.inputs is not None else None) or ()
    return ShapeTimes(
        name=operator.name,
        category=category_of_operator(operator.name),
        shapes=tuple(argument.shape for argument in given),
        types=tuple(argument.type for argument in given),
        precision=dtype,
        calls=calls,
        device=operator.counted_device,
        macs=cost.macs * calls,
        flops=flops,
        bytes_moved=moved,
        intensity=flops / moved if moved else None,
        flops_per_second=flops / seconds if seconds else None,
        roof_seconds=roof,
        bound=None
        if compute is None or memory is None or not roof
        else "compute"
        if compute >= memory
        else "memory",
        share=roof / seconds if roof is not None and seconds else None,
    )


def _roof(
    flops: int, moved: int | None, dtype: str | None, chip: Hardware | None
) -> tuple[float | None, float | None]:
    if chip is None:
        return None, None
    peak = chip.peak_flops_per_second.get(dtype or "")
    bandwidth = chip.bandwidth_bytes_per_second
    compute = 0.0 if not flops else flops / peak if peak else None
    return compute, None if moved is None or bandwidth is None else moved / bandwidth


def unsupported(walk: HostWalk) -> tuple[UnsupportedTraceOperator, ...]:
    """Operators that multiply and are in no total, the most time first."""
    has_device = any(each.device for each in walk.operators.values())

    def is_missing(operator: OperatorSums) -> bool:
        if category_of_operator(operator.name) not in MULTIPLYING:
            return False
        if has_device:
            return operator.unsupported_device > 0
        return (
            not operator.has_operators
            and not operator.counted_calls
            and cost_of(operator.name, operator.inputs) is None
        )

    rows = grouped(filter(is_missing, walk.operators.values()), attrgetter("name"))
    found = (
        UnsupportedTraceOperator(
            name=name,
            calls=sum(each.calls for each in group),
            self_device=sum(each.unsupported_device for each in group),
        )
        for name, group in rows.items()
    )
    return tuple(sorted(found, key=lambda row: (-row.self_device, row.name)))


_NUMBER = re.compile(r"(?<![A-Za-z])\d+")


class SpanTimes(Struct, frozen=True, kw_only=True):
    """Modules or scopes of one name but for its numbers; nanoseconds."""

    kind: Literal["module", "scope"]
    # with a star in place of each number, where there are several
    name: str
    # as lflops names it; forward also stands for what has none
    phase: str
    # how many different names it stands for
    instances: int
    calls: int
    # of the kernels that were launched inside, with all below it
    device: int
    # the same without what is below it
    self_device: int
    # inclusive
    host: int


def span_times(walk: HostWalk, kind: Literal["module", "scope"]) -> tuple[SpanTimes, ...]:
    """The modules or the scopes, the most of the device's time first, or of the host's."""
    spans = (each for each in walk.spans.values() if each.kind == kind)
    rows = (
        SpanTimes(
            kind=kind,
            name=pattern if len(found) > 1 else found[0].name,
            phase=phase,
            instances=len(found),
            **sums(found, "calls", "device", "self_device", "host"),
        )
        for (pattern, phase), found in grouped(
            spans, lambda each: (_NUMBER.sub("*", each.name), each.phase)
        ).items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.device, -row.host, row.name)))
