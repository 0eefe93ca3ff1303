"""Divide the time of compiled regions among modules.

torch.compile turns the operators of several modules into a graph, and generates code that calls a
few kernels. A region is one run of such a graph. The trace shows the kernels of a region, but not
their modules. The modules are known for each kernel call in the generated code. So each kernel in
the trace is matched with a call in the generated code.

On the host, the time of a call lasts from the end of the previous call to its own end. This
includes the generated code that prepares the call, and the kernel itself if it runs on the CPU. On
a device, only the time of the kernel counts.

    region     |                                                    |
    events         cpp_fused_gelu_1      aten::addmm
    belongs to |    gelu's modules   |     addmm's module   | none  |

The n-th event with a certain name in the trace is matched with the n-th call of that name in the
generated code. If there are more or fewer events than calls, all events of that name stay
unassigned.

The record of a graph is made when the graph is compiled. It contains the operators of the graph
(its nodes) that each kernel computes:

    cpp_fused_gelu_1:3        mul_2, erf, mul_4     nodes of `blocks.0`
    extern_kernels.addmm:4    addmm_1               a node of `blocks.0.b`

The number after the colon counts the calls of a graph. It distinguishes calls of the same kernel.

A graph names a module by its path from the compiled function, for example `L['self'].blocks.0`. The
module's name in the profile also depends on the module that runs the graph, because a graph may be
compiled once and run for each of twelve blocks.
"""

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from lflops.errors import CountError
from lflops.model.module_tree import ModuleTree, names_in_tree
from lflops.profile.records import CompiledCode, CompiledKernel, ModulePhase
from lflops.profile.series import grouped

_GRAPH_PREFIX = re.compile(r"^graph_\d+_")


class Share(NamedTuple):
    """The share of a kernel's time that belongs to one module.

    Attributes:
        module: Index of the module in the graph's list of modules; -1 for code of the compiled
            function itself.
        is_of_forward: Whether the module's nodes (operators) in the kernel belong to forward. In a
            backward graph, such nodes are recomputed.
        share: The share, proportional to the bytes that the nodes move. The shares of a kernel add
            up to 1.
    """

    module: int
    is_of_forward: bool
    share: float


class KernelCall(NamedTuple):
    """A call of a kernel in generated code.

    Attributes:
        name: Name in the generated code, for example `cpp_fused_gelu_1` or `extern_kernels.mm`.
        event: Kineto's name, for example `cpp_fused_gelu_1` or `aten::mm`.
        shares: Shares of the modules; empty if the nodes of the call are unknown.
        bytes_moved: Bytes read and written, or `None` if unknown.
    """

    name: str
    event: str
    shares: tuple[Share, ...]
    bytes_moved: int | None


@dataclass(frozen=True, kw_only=True)
class GraphKernels:
    """The kernel calls of a compiled graph, and its modules.

    Attributes:
        modules: Name and class of each module with nodes in the graph. A node is an operator.
        calls: Kernel calls in the order of the generated code.
    """

    modules: tuple[tuple[str, str], ...]
    calls: tuple[KernelCall, ...]

    @classmethod
    def of(
        cls, calls: Sequence[str], nodes: Mapping[str, Sequence[str]], record: Mapping[str, Any]
    ) -> "GraphKernels | None":
        """Parse the record of a graph; return `None` if there is no record.

        Args:
            calls: The kernel calls in the generated code in order, for example
                `extern_kernels.mm:7`. The number distinguishes calls of the same kernel.
            nodes: For each call, the names of the graph's nodes that it computes.
            record: Mapping with the keys `modules`, `nodes` and `kernels`. For each node, `nodes`
                has the index of its module, the bytes that it moves, and torch's tag that shows
                whether it belongs to forward. For each kernel, `kernels` has the bytes that it
                moves, the names of its nodes, and whether it is a library kernel.
        """
        if not record or not calls:
            return None
        known_nodes: Mapping[str, Sequence[Any]] = record["nodes"]
        nodes_of_call = {}
        for call in calls:
            nodes_of_call[call] = frozenset(nodes.get(call, ()))
        moved = _bytes_of_calls(nodes_of_call, record["kernels"])
        kernel_calls = []
        for call in calls:
            name = call.rpartition(":")[0]
            found = []
            for node in nodes.get(call, ()):
                if node in known_nodes:
                    found.append(known_nodes[node])
            kernel_calls.append(KernelCall(name, _event(name), _shares(found), moved.get(call)))
        modules = tuple((name, class_name) for name, class_name in record["modules"])
        return cls(modules=modules, calls=tuple(kernel_calls))


UNKNOWN = GraphKernels(modules=(), calls=())
"""A graph without a record, for example because it was compiled before recording began."""


def _shares(nodes: Sequence[Sequence[Any]]) -> tuple[Share, ...]:
    """Return how a kernel's time is divided among the modules whose nodes it computes.

    A node is an operator of the graph. The shares are proportional to the bytes that the nodes move
    or, if these are unknown, to the number of nodes.
    """
    sizes = [moved for _, moved, _ in nodes]
    has_bytes = None not in sizes and any(sizes)
    parts: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for module, moved, tag in nodes:
        parts[module, tag == "is_forward"] += moved if has_bytes else 1
    total = sum(parts.values())
    shares = []
    for (module, is_of_forward), part in parts.items():
        if part:
            shares.append(Share(module, is_of_forward, part / total))
    return tuple(shares)


def _bytes_of_calls(
    nodes: Mapping[str, frozenset[str]], kernels: Sequence[tuple[int | None, Sequence[str], bool]]
) -> dict[str, int]:
    """Return the bytes that each kernel call reads and writes, without calls with unknown bytes.

    Inductor's scheduler reports the bytes of its kernels, and one call may run several of them.

    Args:
        nodes: For each call, the names of its nodes, the operators of the graph.
        kernels: For each kernel of the scheduler, its bytes, the names of its nodes, and whether it
            is a library kernel.
    """
    sums: dict[str, int] = {}
    unknown: set[str] = set()
    for moved, names, is_library in kernels:
        call = _call_of_kernel(frozenset(names), nodes, is_library=is_library)
        if call is None:
            continue
        if moved is None:
            unknown.add(call)
        else:
            sums[call] = sums.get(call, 0) + moved
    for call in unknown:
        sums.pop(call, None)
    return sums


def _call_of_kernel(
    kernel: frozenset[str], nodes: Mapping[str, frozenset[str]], *, is_library: bool
) -> str | None:
    """Find the call in the generated code that runs a kernel of Inductor's scheduler.

    The call and the kernel are compared by their nodes, the operators of the graph that they
    compute. There are three cases, in order of preference:

    * The call has exactly the kernel's nodes.
    * For library kernels only: The call lacks some of the nodes, because its list of nodes may lack
      views.
    * The call has additional nodes, because one call may run several kernels.
    """
    equal = []
    smaller = []
    larger = []
    for call, own in nodes.items():
        is_library_call = _event(call) != call
        if is_library_call != is_library:
            continue
        if own == kernel:
            equal.append(call)
        elif own > kernel:
            larger.append(call)
        elif own and own < kernel and is_library:
            smaller.append(call)
    fitting = equal or smaller or larger
    return min(fitting, key=lambda call: len(nodes[call]), default=None)


def _event(name: str) -> str:
    """Return the name that Kineto records for a kernel with this name in the generated code."""
    parts = name.removeprefix("torch.ops.").split(".")
    if parts[0] == "extern_kernels":
        return f"aten::{parts[1]}"
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else name


class CompileTracking:
    """Records the nodes and kernels of every graph that is compiled between `start` and `stop`.

    These records are needed to divide the time of compiled code among modules.

    Recording changes settings of Inductor, which are the same for the whole process. The first
    instance that starts recording changes them, and the last instance that stops restores them.

    Attributes:
        refusal: Reason why no graph is recorded, or `None`.
    """

    _lock = threading.Lock()
    _users = 0
    _restore: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.refusal: str | None = None
        self._runs = False

    def start(self) -> None:
        """Start recording.

        If this version of torch does not support recording, `refusal` has the reason.
        """
        try:
            from lflops.torch_private.self_check import check_inductor

            check_inductor()
            from lflops.torch_private.inductor import record_graphs

            with self._lock:
                if CompileTracking._restore is None:
                    CompileTracking._restore = record_graphs()
                CompileTracking._users += 1
                self._runs = True
        except CountError as error:
            self.refusal = str(error)
        except Exception as error:  # noqa: BLE001 - no error may end the training run
            self.refusal = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Stop recording. Graphs that have already been compiled keep their record."""
        with self._lock:
            if not self._runs:
                return
            self._runs = False
            CompileTracking._users -= 1
            restore = CompileTracking._restore
            if not CompileTracking._users and restore is not None:
                CompileTracking._restore = None
                restore()


def recorded_graphs(keys: Iterable[str]) -> dict[str, GraphKernels]:
    """Return the graphs with the given keys, without graphs whose compilation was not recorded."""
    try:
        from lflops.torch_private.inductor import compiled_graphs
    except CountError:
        return {}
    found = {}
    for graph in compiled_graphs(keys):
        kernels = GraphKernels.of(graph.calls, graph.nodes, graph.record)
        if kernels is not None:
            found[graph.key] = kernels
    return found


@dataclass(slots=True)
class RegionEvent:
    """A kernel or operator that a region called directly, as the trace records it on the host.

    A region is one run of a compiled graph.

    Attributes:
        start: Start in nanoseconds since 1970.
        end: End in nanoseconds since 1970.
        device: Total time of the device work that it launched, in nanoseconds.
    """

    name: str
    start: int
    end: int
    device: int = 0


@dataclass(kw_only=True)
class Region:
    """One run of a compiled graph.

    Attributes:
        key: Key of the graph.
        batch: Index of the recorded batch.
        running: The module that called the compiled graph, and the phase of this call. For a
            backward graph, it is the module whose forward built the graph's autograd node.
        events: Kernels and operators that the region called directly on the host, in order.
        kernels: Names and durations (nanoseconds) of the device kernels that the region launched
            itself, in order. Kernels that one of the `events` launched are not included.
    """

    key: str
    start: int
    end: int
    batch: int
    running: ModulePhase
    events: list[RegionEvent] = field(default_factory=list)
    kernels: list[tuple[str, int]] = field(default_factory=list)


_Times = dict[ModulePhase, dict[ModulePhase, float]]
"""How the time of each compiled module is divided, in nanoseconds.

The outer key is the compiled module that ran, and its phase. The inner key is the module inside the
compiled module to which the time belongs, and the phase of this work.
"""


@dataclass(kw_only=True)
class CompiledTimes:
    """Times of all compiled regions. A region is one run of a compiled graph.

    Attributes:
        code: For the profile: how many graphs and regions ran, and times summed over all batches.
        host: For each batch, how the host time is divided among modules.
        device: For each batch, how the device time is divided among modules.
    """

    code: CompiledCode
    host: list[_Times]
    device: list[_Times]


@dataclass(slots=True)
class _Kernel:
    """The part of a compiled kernel's times and bytes that belongs to one module.

    Times are in nanoseconds.

    Attributes:
        calls: Number of calls of the kernel.
        host: The module's share of the host time of these calls.
        device: The module's share of the device time of these calls.
        moved: The module's share of the bytes read and written, or `None` if unknown.
    """

    calls: int = 0
    host: float = 0.0
    device: float = 0.0
    moved: float | None = 0.0


Rows = Callable[[GraphKernels, str], Sequence[str | None]]
"""Function that finds the names in the profile for the modules of a graph.

It is called with the graph and the name of the module that runs the graph. A name is `None` if it
is unknown.
"""


def divided_among_modules(
    regions: Sequence[Region],
    device_times: Sequence[dict[ModulePhase, float]],
    tree: ModuleTree,
    *,
    device: bool,
) -> CompiledTimes:
    """Divide the time of compiled regions among modules. A region is one run of a compiled graph.

    In `device_times`, the whole time of a region belongs to the module that ran it. This function
    moves the time to the modules inside the graph.

    Args:
        regions: The compiled regions.
        device_times: Device nanoseconds of each batch. This function changes them.
        tree: The modules.
        device: Whether a device was recorded.
    """
    graphs = recorded_graphs(region.key for region in regions)

    def rows(graph: GraphKernels, running: str) -> Sequence[str | None]:
        return names_in_tree(graph.modules, running, tree)

    times = times_of(regions, graphs, rows, batches=len(device_times), device=device)
    for batch, divided in zip(device_times, times.device, strict=True):
        for running, by_module in divided.items():
            for key, took in by_module.items():
                batch[running] = batch.get(running, 0) - took
                batch[key] = batch.get(key, 0) + took
    return times


def times_of(
    regions: Iterable[Region],
    graphs: Mapping[str, GraphKernels],
    rows: Rows,
    *,
    batches: int,
    device: bool,
) -> CompiledTimes:
    """Divide the time of compiled regions among modules, using the records of their graphs.

    A region is one run of a compiled graph.
    """
    sums = _Sums(batches)
    keys: set[str] = set()
    for region in regions:
        keys.add(region.key)
        graph = graphs.get(region.key, UNKNOWN)
        sums.add(region, graph, rows(graph, region.running.fqn))
    unrecorded = len(keys - graphs.keys())
    return sums.times(len(keys), unrecorded, device=device)


class _Totals:
    """Totals of either the host times or the device times of compiled regions, in nanoseconds.

    Attributes:
        times: For each batch, how the time is divided among modules.
        all: Total time of all regions.
        unassigned: Time that is assigned to no module.
        divided: Time of kernels that compute nodes of several modules.
    """

    def __init__(self, batches: int) -> None:
        self.times: list[_Times] = [{} for _ in range(batches)]
        self.all = 0
        self.unassigned = 0.0
        self.divided = 0.0

    def add(self, region: Region, key: ModulePhase, took: float) -> None:
        by_module = self.times[region.batch].setdefault(region.running, {})
        by_module[key] = by_module.get(key, 0.0) + took


class _Sums:
    """Adds up the host and device times of compiled regions by module."""

    def __init__(self, batches: int) -> None:
        self._host = _Totals(batches)
        self._device = _Totals(batches)
        self._kernels: dict[tuple[str, ModulePhase, int], _Kernel] = {}
        self._regions = 0

    def add(self, region: Region, graph: GraphKernels, fqns: Sequence[str | None]) -> None:
        """Add the times of a region.

        Host time between two kernels belongs to the second kernel. Host time after the last kernel
        is not assigned to any module.

        Args:
            region: The region.
            graph: The record of the region's graph.
            fqns: For each module of the graph, its name in the profile; `None` if unknown.
        """
        self._regions += 1
        self._host.all += region.end - region.start
        names = [_GRAPH_PREFIX.sub("", event.name) for event in region.events]
        calls = _matched(names, graph.calls, "event")
        # Two different calls may be equal, so calls are compared by identity.
        launched: set[int] = set()
        previous_end = region.start
        for event, call in zip(region.events, calls, strict=True):
            start = min(previous_end, event.start) if call is None else previous_end
            previous_end = event.end
            self._device.all += event.device
            self._add_call(region, call, fqns, event.end - start, event.device)
            if call is not None and event.device:
                launched.add(id(call))
        self._host.unassigned += region.end - previous_end
        without_event = [call for call in graph.calls if id(call) not in launched]
        kernel_names = [name for name, _ in region.kernels]
        kernel_calls = _matched(kernel_names, without_event, "name")
        for (_, took), call in zip(region.kernels, kernel_calls, strict=True):
            self._device.all += took
            self._add_call(region, call, fqns, 0, took)

    def _add_call(
        self,
        region: Region,
        call: KernelCall | None,
        fqns: Sequence[str | None],
        host: int,
        device: int,
    ) -> None:
        """Add the host time and device time of one kernel call of a region, in nanoseconds."""
        shares = _time_shares(call, region.running, fqns)
        modules = len({fqn for fqn, _ in shares})
        for (fqn, phase), share in shares.items():
            if fqn is None or call is None:
                self._host.unassigned += host * share
                self._device.unassigned += device * share
                continue
            key = ModulePhase(fqn, phase)
            self._host.add(region, key, host * share)
            self._device.add(region, key, device * share)
            if modules > 1:
                self._host.divided += host * share
                self._device.divided += device * share
            kernel = self._kernels.setdefault((call.name, key, modules), _Kernel())
            kernel.calls += 1
            kernel.host += host * share
            kernel.device += device * share
            if kernel.moved is None or call.bytes_moved is None:
                kernel.moved = None
            else:
                kernel.moved += call.bytes_moved * share

    def times(self, graphs: int, unrecorded: int, *, device: bool) -> CompiledTimes:
        """Return the results.

        Args:
            graphs: Number of graphs that ran.
            unrecorded: Number of these graphs that have no record.
            device: Whether a device was recorded.
        """
        timed_on: Literal["device", "host"] = "host"
        side = self._host
        if device and self._device.all:
            timed_on = "device"
            side = self._device
        code = CompiledCode(
            graphs=graphs,
            unrecorded_graphs=unrecorded,
            regions=self._regions,
            timed_on=timed_on,
            seconds=side.all / 1e9,
            unassigned_seconds=max(side.unassigned, 0.0) / 1e9,
            divided_seconds=side.divided / 1e9,
            kernels=self._compiled_kernels(device=device),
        )
        return CompiledTimes(code=code, host=self._host.times, device=self._device.times)

    def _compiled_kernels(self, *, device: bool) -> tuple[CompiledKernel, ...]:
        """Return the kernels, sorted in descending order by the longer of their two times."""
        largest_first = sorted(
            self._kernels.items(), key=lambda item: -max(item[1].device, item[1].host)
        )
        kernels = []
        for (name, (fqn, phase), modules), kernel in largest_first:
            compiled = CompiledKernel(
                name=name,
                module=fqn,
                phase=phase,  # type: ignore[arg-type]
                modules=modules,
                calls=kernel.calls,
                host_seconds=kernel.host / 1e9,
                device_seconds=kernel.device / 1e9 if device else None,
                bytes_moved=None if kernel.moved is None else round(kernel.moved),
            )
            kernels.append(compiled)
        return tuple(kernels)


def _matched(
    names: Sequence[str], calls: Sequence[KernelCall], field: Literal["name", "event"]
) -> list[KernelCall | None]:
    """Return, for each event, the call that it belongs to, or `None` if that is unknown.

    Among the events and calls with the same name, the n-th event belongs to the n-th call. If their
    numbers differ, the result is `None` for all events with that name.

    Args:
        names: The names of the events.
        calls: The calls of kernels in the generated code.
        field: Which of a call's two names to compare: the name in the generated code, or the name
            that Kineto records.
    """
    calls_by_name: dict[str, list[KernelCall]] = grouped(calls, attrgetter(field))
    numbers = Counter(names)
    seen: Counter[str] = Counter()
    matched: list[KernelCall | None] = []
    for name in names:
        fitting = calls_by_name.get(name, [])
        matched.append(fitting[seen[name]] if len(fitting) == numbers[name] else None)
        seen[name] += 1
    return matched


def _time_shares(
    call: KernelCall | None, running: ModulePhase, fqns: Sequence[str | None]
) -> Mapping[tuple[str | None, str], float]:
    """Return the share of a kernel call's time that belongs to each module and phase.

    A call computes nodes (operators) of the graph, which may belong to several modules. The module
    is `None` if it is unknown. Code of the compiled function itself belongs to the module that runs
    the graph.

    The phase is the phase in which the graph runs, with one exception: nodes of forward in a
    backward graph count as recompute. A forward graph may contain nodes of backward, which the
    compiler computes early to save memory. They count as forward.

    Args:
        call: The kernel call; `None` if it is unknown.
        running: The module and phase that run the graph.
        fqns: For each module of the graph, its name in the profile; `None` if unknown.
    """
    if call is None or not call.shares:
        return {(None, running.phase): 1.0}
    time_shares: defaultdict[tuple[str | None, str], float] = defaultdict(float)
    for module, is_of_forward, share in call.shares:
        fqn = running.fqn if module < 0 else fqns[module]
        is_recompute = running.phase == "backward" and is_of_forward
        phase = "recompute" if is_recompute else running.phase
        time_shares[fqn, phase] += share
    return time_shares
