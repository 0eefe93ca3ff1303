"""The kernels of a trace: by name, by category, by precision."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec import Struct

from lflops.profile.series import grouped
from lflops.trace_analysis.categories import CATEGORIES, Category, category_of_kernel, precision_by_name, tensor_cores_by_name
from lflops.trace_analysis.host_walk import HostWalk
from lflops.trace_analysis.operator_cost import precision_of
from lflops.traces.device_states import communicates
from lflops.traces.recorded import DeviceWork


class KernelTimes(Struct, frozen=True, kw_only=True):
    """All calls of one kernel, in nanoseconds, and the operators that launched it, those with the most time first."""

    name: str
    category: Category
    precision: str | None
    tensor_cores: bool | None  # whether it runs on tensor or matrix cores; `None` where its name does not tell
    calls: int
    device: int
    median: int
    longest: int
    operators: tuple[str, ...]


class CategoryTimes(Struct, frozen=True, kw_only=True):
    """The device's work of one category; nanoseconds. Work that overlaps counts as often as it runs."""

    category: Category
    device: int
    calls: int


class PrecisionTimes(Struct, frozen=True, kw_only=True):
    """The computing kernels of one precision, which is `None` where neither the inputs nor the names tell; nanoseconds."""

    precision: str | None
    device: int
    calls: int
    tensor_cores: int  # in kernels whose names tell that they run on tensor or matrix cores


def _operator(walk: HostWalk, work: DeviceWork) -> str | None:
    launch = walk.launch(work)
    return launch.operator.name if launch is not None and launch.operator is not None else None


def _category(walk: HostWalk, work: DeviceWork) -> Category:
    return category_of_kernel(work, _operator(walk, work))


def _precision(walk: HostWalk, work: DeviceWork) -> str | None:
    """By the kernel's name for TF32, which the inputs do not tell, else by the operator's inputs, else by the name."""
    by_name = precision_by_name(work.name)
    launch = walk.launch(work)
    by_inputs = precision_of(launch.operator.inputs) if launch is not None and launch.operator is not None else None
    return by_name if by_inputs is None or (by_name == "tf32" and by_inputs == "fp32") else by_inputs


def kernels(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[KernelTimes, ...]:
    """The kernels by name, those with the most time first."""
    rows = [_kernel(name, found, walk) for name, found in grouped(work, attrgetter("name")).items()]
    return tuple(sorted(rows, key=lambda row: (-row.device, row.name)))


def _kernel(name: str, found: Sequence[DeviceWork], walk: HostWalk) -> KernelTimes:
    times = [each.end - each.start for each in found]
    by_operator: defaultdict[str, int] = defaultdict(int)
    by_category: defaultdict[Category, int] = defaultdict(int)
    by_precision: defaultdict[str | None, int] = defaultdict(int)
    for each, took in zip(found, times, strict=True):
        operator = _operator(walk, each)
        if operator is not None:
            by_operator[operator] += took
        by_category[_category(walk, each)] += took
        by_precision[_precision(walk, each)] += took
    computes = found[0].kind == "kernel" and not communicates(found[0])
    return KernelTimes(
        name=name,
        category=max(by_category, key=lambda category: by_category[category]),
        precision=max(by_precision, key=lambda precision: by_precision[precision]) if computes else None,
        tensor_cores=tensor_cores_by_name(name) if computes else None,
        calls=len(found),
        device=sum(times),
        median=round(statistics.median(times)),
        longest=max(times),
        operators=tuple(sorted(by_operator, key=lambda operator: -by_operator[operator])),
    )


def by_category(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[CategoryTimes, ...]:
    """The work by category, the most time first."""
    groups = grouped(work, lambda each: _category(walk, each))
    rows = (
        CategoryTimes(category=category, device=sum(each.end - each.start for each in groups[category]), calls=len(groups[category]))
        for category in CATEGORIES
        if category in groups
    )
    return tuple(sorted(rows, key=lambda row: -row.device))


def by_precision(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[PrecisionTimes, ...]:
    """The kernels by precision, the most time first; copies, fills and communication are left out."""
    computing = (each for each in work if each.kind == "kernel" and _category(walk, each) != "communication")
    rows = (
        PrecisionTimes(
            precision=precision,
            device=sum(each.end - each.start for each in found),
            calls=len(found),
            tensor_cores=sum(each.end - each.start for each in found if tensor_cores_by_name(each.name)),
        )
        for precision, found in grouped(computing, lambda each: _precision(walk, each)).items()
    )
    return tuple(sorted(rows, key=lambda row: -row.device))
