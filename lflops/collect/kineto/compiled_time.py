"""The time of compiled regions by module: the kernels of each region, tied to the calls of its graph.

On the host, a call lasts from the end of the one before it to its own end: that is the generated code that gets it ready, and the kernel.
On a device it is the kernel alone.

    region     |                                                    |
    events         cpp_fused_gelu_1      aten::addmm
    belongs to |    gelu's modules   |     addmm's module   | nobody |

A kernel is the n-th call of its name if it is the n-th event of its name, and there are as many calls as events. Otherwise all of that
name stay unassigned.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

from lflops.collect.kineto.compiled_graph import GraphKernels, KernelCall
from lflops.profile.records import CompiledCode, CompiledKernel, ModulePhase, Phase
from lflops.profile.series import grouped

_OF_GRAPH = re.compile(r"^graph_\d+_")


class RegionEvent(NamedTuple):
    """A kernel, or another operator, right below a region."""

    name: str
    start: int  # nanoseconds since 1970, as `end`
    end: int
    device: int = 0  # nanoseconds of the device for it


@dataclass(kw_only=True)
class Region:
    """One run of a compiled graph."""

    key: str  # of the graph
    start: int
    end: int
    batch: int  # the index of the recorded batch
    running: ModulePhase  # the module and phase that ran it: of a backward, those that built it
    events: list[RegionEvent] = field(default_factory=list)  # what ran right below it, in order
    # Names and nanoseconds of the device's kernels that no such event launched, in order.
    kernels: list[tuple[str, int]] = field(default_factory=list)


@dataclass(kw_only=True)
class CompiledTimes:
    """What ran in compiled regions."""

    code: CompiledCode  # the sums over all batches
    # Nanoseconds by batch, running module and phase, and by the module and phase that they belong to.
    host: list[dict[ModulePhase, dict[ModulePhase, float]]]
    device: list[dict[ModulePhase, dict[ModulePhase, float]]]  # the same of the device


@dataclass(slots=True)
class _Kernel:
    """A kernel's part in one module and phase."""

    calls: int = 0
    host: float = 0.0
    device: float = 0.0
    moved: float | None = 0.0


Rows = Callable[[GraphKernels, str], Sequence[str | None]]  # the rows of a graph's modules while a module runs


def times_of(regions: Iterable[Region], graphs: Mapping[str, GraphKernels], rows: Rows, *, batches: int, device: bool) -> CompiledTimes:
    """Divide compiled regions over modules."""
    sums = _Sums(batches)
    keys: set[str] = set()
    for region in regions:
        keys.add(region.key)
        graph = graphs.get(region.key)
        if graph is None:
            sums.unassigned(region.end - region.start, sum(each.device for each in region.events) + sum(took for _, took in region.kernels))
        else:
            sums.add(region, graph, rows(graph, region.running.row))
    return sums.times(len(keys), sum(key not in graphs for key in keys), device=device)


class _Sums:
    def __init__(self, batches: int) -> None:
        self._host: list[dict[ModulePhase, dict[ModulePhase, float]]] = [{} for _ in range(batches)]
        self._device: list[dict[ModulePhase, dict[ModulePhase, float]]] = [{} for _ in range(batches)]
        self._kernels: dict[tuple[str, ModulePhase, int], _Kernel] = {}
        self._regions = 0
        self._all: Counter[str] = Counter()
        self._unassigned: defaultdict[str, float] = defaultdict(float)
        self._split: defaultdict[str, float] = defaultdict(float)

    def unassigned(self, host: int, device: int) -> None:
        """Add a region of which nothing is known."""
        self._regions += 1
        for name, took in (("host", host), ("device", device)):
            self._all[name] += took
            self._unassigned[name] += took

    def add(self, region: Region, graph: GraphKernels, rows: Sequence[str | None]) -> None:
        """Add a region: what is between kernels belongs to the next one, what comes after the last to none."""
        self._regions += 1
        self._all["host"] += region.end - region.start
        calls, at = _matched([_OF_GRAPH.sub("", event.name) for event in region.events], graph.calls), region.start
        for event, call in zip(region.events, calls, strict=True):
            self._all["device"] += event.device
            self._call(region, call, rows, event.end - (min(at, event.start) if call is None else at), event.device)
            at = event.end
        self._unassigned["host"] += region.end - at
        launched = {id(call) for event, call in zip(region.events, calls, strict=True) if call is not None and event.device}
        without = [call for call in graph.calls if id(call) not in launched]
        for (_, took), call in zip(region.kernels, _matched([name for name, _ in region.kernels], without, by_name=True), strict=True):
            self._all["device"] += took
            self._call(region, call, rows, 0, took)

    def _call(self, region: Region, call: KernelCall | None, rows: Sequence[str | None], host: int, device: int) -> None:
        owners = _owners(call, region.running, rows)
        modules = len({row for row, _ in owners})
        for (row, phase), share in owners.items():
            if row is None or call is None:
                self._unassigned["host"] += host * share
                self._unassigned["device"] += device * share
                continue
            key = ModulePhase(row, phase)
            for sums, took in ((self._host, host), (self._device, device)):
                by_module = sums[region.batch].setdefault(region.running, {})
                by_module[key] = by_module.get(key, 0.0) + took * share
            kernel = self._kernels.setdefault((call.name, key, modules), _Kernel())
            kernel.calls += 1
            kernel.host += host * share
            kernel.device += device * share
            kernel.moved = None if kernel.moved is None or call.bytes_moved is None else kernel.moved + call.bytes_moved * share
            if modules > 1:
                self._split["host"] += host * share
                self._split["device"] += device * share

    def times(self, graphs: int, unrecorded: int, *, device: bool) -> CompiledTimes:
        kernels = tuple(
            CompiledKernel(
                name=name,
                module=row,
                phase=phase,
                modules=modules,
                calls=each.calls,
                host_seconds=each.host / 1e9,
                device_seconds=each.device / 1e9 if device else None,
                bytes_moved=None if each.moved is None else round(each.moved),
            )
            for (name, (row, phase), modules), each in sorted(self._kernels.items(), key=lambda item: -max(item[1].device, item[1].host))
        )
        on: Literal["device", "host"] = "device" if device and self._all["device"] else "host"
        code = CompiledCode(
            graphs=graphs,
            unrecorded_graphs=unrecorded,
            regions=self._regions,
            timed_on=on,
            seconds=self._all[on] / 1e9,
            unassigned_seconds=max(self._unassigned[on], 0.0) / 1e9,
            divided_seconds=self._split[on] / 1e9,
            kernels=kernels,
        )
        return CompiledTimes(code=code, host=self._host, device=self._device)


def _matched(names: Sequence[str], calls: Sequence[KernelCall], *, by_name: bool = False) -> list[KernelCall | None]:
    """The call of each event: the n-th of its name, if there are as many of both."""
    of_name = grouped(calls, attrgetter("name" if by_name else "event"))
    counts, seen = Counter(names), Counter[str]()
    matched: list[KernelCall | None] = []
    for name in names:
        fitting = of_name.get(name, [])
        matched.append(fitting[seen[name]] if len(fitting) == counts[name] else None)
        seen[name] += 1
    return matched


def _owners(call: KernelCall | None, running: ModulePhase, rows: Sequence[str | None]) -> Mapping[tuple[str | None, Phase], float]:
    """The rows and phases that a call's time belongs to, with their shares. Code of the compiled function is the running module's.

    A graph of forward may have nodes of backward: the compiler computes ahead what saves memory. They run in forward.
    """
    if call is None or not call.shares:
        return {(None, running.phase): 1.0}
    owners: defaultdict[tuple[str | None, Phase], float] = defaultdict(float)
    for module, is_of_forward, share in call.shares:
        row = running.row if module < 0 else rows[module]
        phase: Phase = "recompute" if running.phase == "backward" and is_of_forward else running.phase
        owners[row, phase] += share
    return owners
