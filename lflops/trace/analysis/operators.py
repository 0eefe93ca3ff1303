"""Sum the times of a trace's operators, modules and scopes.

A module or scope includes the kernels that are launched while it runs. If Python stacks were
recorded, a module has the name of its class and a number, for example `Linear_3`. If lflops added
the modules to the trace, a module has its name in the model. If the trace has sequence numbers, a
backward node belongs to the module that created the node in forward.
"""

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct

from lflops.analysis.roofline import bound_of
from lflops.hardware.chips import Hardware
from lflops.profile.series import grouped, multiplied, ratio, sums
from lflops.trace.analysis.categories import Category, category_of_operator
from lflops.trace.analysis.host_walk import HostWalk, OperatorSums, SpanSums
from lflops.trace.analysis.operator_cost import (
    Argument,
    TracedCost,
    arguments,
    cost_of,
    precision_of,
)

MULTIPLYING: frozenset[Category] = frozenset({"gemm", "convolution", "attention"})
"""Categories of operators that mainly perform multiply-accumulates."""

_NUMBER = re.compile(r"(?<![A-Za-z])\d+")


class OperatorTimes(Struct, frozen=True, kw_only=True):
    """Inclusive times and self times of all calls of one operator, in nanoseconds."""

    name: str
    category: Category
    calls: int
    host: int
    self_host: int
    device: int
    self_device: int


class ShapeTimes(Struct, frozen=True, kw_only=True):
    """The calls of one operator whose inputs have the same shapes, dtypes and values.

    Only calls with known FLOPs are included. `None` means unknown.

    Attributes:
        shapes: Shape of each input: a list of shapes for a list of tensors, `None` for other
            inputs.
        types: torch's names of the element types.
        precision: Name in `hardware.DTYPES`; TF32 if a kernel's name shows it.
        calls: Number of calls. Calls inside another operator with known FLOPs are left out.
        device: Inclusive device time in nanoseconds.
        flops: FLOPs of all calls, without work that a mask skips.
        flops_per_second: FLOPs divided by the device time.
        roof_seconds: Minimum time on the chip: the time for the FLOPs at peak rate, or for the
            bytes at full bandwidth, whichever is longer.
        bound: Resource that determines `roof_seconds`.
        share: `roof_seconds` divided by the device time; above 1 if data stayed in a cache.
    """

    name: str
    category: Category
    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    precision: str | None
    calls: int
    device: int
    macs: int
    flops: int
    bytes_moved: int | None
    intensity: float | None
    flops_per_second: float | None
    roof_seconds: float | None
    bound: Literal["compute", "memory"] | None
    share: float | None


class UnsupportedTraceOperator(Struct, frozen=True, kw_only=True):
    """An operator that multiplies matrices, but whose FLOPs the trace does not show."""

    name: str
    calls: int
    self_device: int


class SpanTimes(Struct, frozen=True, kw_only=True):
    """Nanoseconds spent in modules or scopes whose names differ only in numbers.

    Attributes:
        name: The name. If there are several instances, a star replaces each number, for example
            `layers.*.mlp`.
        phase: Phase of the modules or scopes; `forward` if the trace does not show it.
        instances: Number of different names.
        device: Time of the kernels launched inside.
        self_device: Like `device`, but for a module without its inner modules, and for a scope
            without its inner scopes.
        host: Inclusive host time.
    """

    kind: Literal["module", "scope"]
    name: str
    phase: str
    instances: int
    calls: int
    device: int
    self_device: int
    host: int


def operators(host: HostWalk) -> tuple[OperatorTimes, ...]:
    """Sum the times of operators by name. The longest self time comes first."""
    rows = []
    for name, found in grouped(host.operators.values(), attrgetter("name")).items():
        times = sums(found, "calls", "host", "self_host", "device", "self_device")
        rows.append(OperatorTimes(name=name, category=category_of_operator(name), **times))
    return tuple(sorted(rows, key=lambda row: (-row.self_device, -row.self_host, row.name)))


def precision(operator: OperatorSums) -> str | None:
    """Return the precision in which an operator multiplies, or `None` if it is unknown."""
    by_inputs = precision_of(operator.inputs)
    if by_inputs == "fp32" and operator.has_tf32:
        return "tf32"
    return by_inputs


def shapes(host: HostWalk, chip: Hardware | None) -> tuple[ShapeTimes, ...]:
    """Return the operators with known FLOPs, in one row for each name and inputs.

    The longest device time comes first.
    """
    rows = []
    for operator in host.operators.values():
        cost = cost_of(operator.name, operator.inputs)
        if operator.counted_calls and cost is not None:
            rows.append(_shape(operator, cost, chip))
    return tuple(sorted(rows, key=lambda row: (-row.device, -row.flops, row.name)))


def _shape(operator: OperatorSums, cost: TracedCost, chip: Hardware | None) -> ShapeTimes:
    calls = operator.counted_calls
    seconds = operator.counted_device / 1e9
    flops = cost.executed_flops * calls
    moved = multiplied(cost.bytes_moved, calls)
    dtype = precision(operator)
    roof = None
    bound: Literal["compute", "memory"] | None = None
    compute_seconds = _compute_seconds(flops, dtype, chip)
    memory_seconds = _memory_seconds(moved, chip)
    if compute_seconds is not None and memory_seconds is not None:
        roof = max(compute_seconds, memory_seconds)
        if roof:
            bound = bound_of(compute_seconds, memory_seconds)
    given: Sequence[Argument] = ()
    if operator.inputs is not None:
        given = arguments(operator.inputs) or ()
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
        intensity=ratio(flops, moved),
        flops_per_second=ratio(flops, seconds),
        roof_seconds=roof,
        bound=bound,
        share=ratio(roof, seconds),
    )


def _compute_seconds(flops: int, dtype: str | None, chip: Hardware | None) -> float | None:
    if chip is None:
        return None
    if not flops:
        return 0.0
    return ratio(flops, chip.peak_flops_per_second.get(dtype or ""))


def _memory_seconds(moved: int | None, chip: Hardware | None) -> float | None:
    if chip is None or chip.bandwidth_bytes_per_second is None or moved is None:
        return None
    return moved / chip.bandwidth_bytes_per_second


def unsupported(host: HostWalk) -> tuple[UnsupportedTraceOperator, ...]:
    """Return the operators that multiply matrices, but whose FLOPs are unknown.

    No total of FLOPs includes them. The longest device self time comes first.
    """
    has_device = any(each.device for each in host.operators.values())
    missing: dict[str, list[OperatorSums]] = {}
    for operator in host.operators.values():
        if _is_unsupported(operator, has_device=has_device):
            missing.setdefault(operator.name, []).append(operator)
    rows = []
    for name, found in missing.items():
        totals = sums(found, "calls", "unsupported_device")
        row = UnsupportedTraceOperator(
            name=name, calls=totals["calls"], self_device=totals["unsupported_device"]
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.self_device, row.name)))


def _is_unsupported(operator: OperatorSums, *, has_device: bool) -> bool:
    if category_of_operator(operator.name) not in MULTIPLYING:
        return False
    if has_device:
        return operator.unsupported_device > 0
    if operator.has_operators or operator.counted_calls:
        return False
    return cost_of(operator.name, operator.inputs) is None


def span_times(host: HostWalk, kind: Literal["module", "scope"]) -> tuple[SpanTimes, ...]:
    """Return the times of all modules or of all scopes. The longest device time comes first."""
    spans = [each for each in host.spans.values() if each.kind == kind]
    rows = []
    for (pattern, phase), found in grouped(spans, _pattern_and_phase).items():
        row = SpanTimes(
            kind=kind,
            name=pattern if len(found) > 1 else found[0].name,
            phase=phase,
            instances=len(found),
            **sums(found, "calls", "device", "self_device", "host"),
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.device, -row.host, row.name)))


def _pattern_and_phase(span: SpanSums) -> tuple[str, str]:
    return _NUMBER.sub("*", span.name), span.phase
