"""The time of compiled regions by module.

The kernels of each region, tied to the calls of its graph.

On the host, a call lasts from the end of the one before it to its own end: that is the generated
code that gets it ready, and the kernel. On a device it is the kernel alone.

    region     |                                                    |
    events         cpp_fused_gelu_1      aten::addmm
    belongs to |    gelu's modules   |     addmm's module   | nobody |

A kernel is the n-th call of its name if it is the n-th event of its name, and there are as many
calls as events. Otherwise all of that name stay unassigned. Whose nodes a kernel computes is in the
record of its graph:

    cpp_fused_gelu_1:3        mul_2, erf, mul_4     nodes of `blocks.0`
    extern_kernels.addmm:4    addmm_1               a node of `blocks.0.b`

A module has the name by which the compiled function reaches it, as `L['self'].blocks.0`. Which row
that is depends on the module that runs: a graph may be compiled once and run for each of twelve
blocks.
"""

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from lflops.errors import CountError
from lflops.profile.records import CompiledCode, CompiledKernel, ModulePhase
from lflops.profile.series import grouped, summed


class Share(NamedTuple):
    """A part of a kernel."""

    # its number among the graph's modules; -1 for code of the compiled function itself
    module: int
    # whether its nodes are of the forward pass, so that a graph of backward computes them again
    is_of_forward: bool
    # of the kernel's time, by the bytes that its nodes move. All parts of a kernel add up to 1
    share: float


class KernelCall(NamedTuple):
    """A call of a kernel."""

    # in generated code, as `cpp_fused_gelu_1` or `extern_kernels.mm`
    name: str
    # what Kineto calls it, as `cpp_fused_gelu_1` or `aten::mm`
    event: str
    # empty where nothing was recorded of its nodes
    shares: tuple[Share, ...]
    # read and written; `None` where that is not known
    bytes_moved: int | None


@dataclass(frozen=True, kw_only=True)
class GraphKernels:
    """A compiled graph."""

    modules: tuple[
        tuple[str, str], ...
        # the name and the class of each module that has nodes in it
    ]
    # in the order of generated code
    calls: tuple[KernelCall, ...]

    @classmethod
    def of(
        cls, calls: Sequence[str], nodes: Mapping[str, Sequence[str]], record: Mapping[str, Any]
    ) -> "GraphKernels | None":
        """Read a record.

        `calls` are the kernels in their order, each with its number: `extern_kernels.mm:7`; `nodes`
        are the names of each call's nodes. The record has the modules; by node its module, bytes
        and torch's tag of its pass; of each kernel its bytes, its nodes, and whether it is a
        library's. `None` where there is no record.
        """
        if not record or not calls:
            return None
        about: Mapping[str, Sequence[Any]] = record["nodes"]
        moved = _bytes_of_calls(
            {call: frozenset(nodes.get(call, ())) for call in calls}, record["kernels"]
        )
        return cls(
            modules=tuple((name, kind) for name, kind in record["modules"]),
            calls=tuple(
                KernelCall(
                    name := call.rpartition(":")[0],
                    _event(name),
                    _shares([about[node] for node in nodes.get(call, ()) if node in about]),
                    moved.get(call),
                )
                for call in calls
            ),
        )


# a graph without a record
UNKNOWN = GraphKernels(modules=(), calls=())


def _shares(nodes: Sequence[Sequence[Any]]) -> tuple[Share, ...]:
    """The share of a kernel that each module has.

    Where the bytes of no node are known, nodes have equal parts.
    """
    known = all(moved is not None for _, moved, _ in nodes) and any(moved for _, moved, _ in nodes)
    parts = summed(
        ((module, tag == "is_forward"), moved if known else 1) for module, moved, tag in nodes
    )
    total = sum(parts.values())
    return tuple(Share(*key, part / total) for key, part in parts.items() if part)


def _bytes_of_calls(
    nodes: Mapping[str, frozenset[str]], kernels: Sequence[tuple[int | None, Sequence[str], bool]]
) -> dict[str, int]:
    """Bytes that each call reads and writes: a call may be several of the scheduler's kernels.

    A call with an unknown one is left out.
    """
    sums: dict[str, int] = {}
    unknown: set[str] = set()
    for moved, names, of_library in kernels:
        of_kernel = frozenset(names)
        calls = {call: own for call, own in nodes.items() if (_event(call) != call) == of_library}
        exact = [call for call, own in calls.items() if own == of_kernel]
        whole = [call for call, own in calls.items() if own > of_kernel]
        views_left_out = (
            [call for call, own in calls.items() if own and own < of_kernel] if of_library else []
        )
        fitting = exact or views_left_out or whole
        if not fitting:
            continue
        call = min(fitting, key=lambda each: len(nodes[each]))
        if moved is None:
            unknown.add(call)
        else:
            sums[call] = sums.get(call, 0) + moved
    return {call: moved for call, moved in sums.items() if call not in unknown}


def _event(name: str) -> str:
    """The name that Kineto has for a kernel of generated code."""
    parts = name.removeprefix("torch.ops.").split(".")
    if parts[0] == "extern_kernels":
        return f"aten::{parts[1]}"
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else name


class CompileTracking:
    """Records every graph that is compiled between `start` and `stop`.

    It changes inductor's settings, and restores them.

    The settings are those of the process: the first user sets them and the last restores them.
    """

    _lock = threading.Lock()
    _users = 0
    _restore: Callable[[], None] | None = None

    def __init__(self) -> None:
        # why no graph is recorded; `None` while they are
        self.refusal: str | None = None
        self._runs = False

    def start(self) -> None:
        """Begin to record; where this torch does not offer what that takes, `refusal` says so."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
            self.refusal = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """End it, if it has begun; what is compiled by now keeps its record."""
        with self._lock:
            if not self._runs:
                return
            self._runs = False
            CompileTracking._users -= 1
            if not CompileTracking._users and CompileTracking._restore is not None:
                restore, CompileTracking._restore = CompileTracking._restore, None
                restore()


def recorded_graphs(keys: Iterable[str]) -> dict[str, GraphKernels]:
    """The graphs with these keys that have a record."""
    try:
        from lflops.torch_private.inductor import compiled_graphs
    except CountError:
        return {}
    found = (
        (graph.key, GraphKernels.of(graph.calls, graph.nodes, graph.record))
        for graph in compiled_graphs(keys)
    )
    return {key: kernels for key, kernels in found if kernels is not None}


_OF_GRAPH = re.compile(r"^graph_\d+_")


@dataclass(slots=True)
class RegionEvent:
    """A kernel, or another operator, right below a region."""

    name: str
    # nanoseconds since 1970, as `end`
    start: int
    end: int
    # nanoseconds of the device for it
    device: int = 0


@dataclass(kw_only=True)
class Region:
    """One run of a compiled graph."""

    # of the graph
    key: str
    start: int
    end: int
    # the index of the recorded batch
    batch: int
    # the module and phase that ran it: of a backward, those that built it
    running: ModulePhase
    # what ran right below it, in order
    events: list[RegionEvent] = field(default_factory=list)
    # Names and nanoseconds of the device's kernels that no such event launched, in order.
    kernels: list[tuple[str, int]] = field(default_factory=list)


@dataclass(kw_only=True)
class CompiledTimes:
    """What ran in compiled regions."""

    # the sums over all batches
    code: CompiledCode
    # Nanoseconds by batch, running module and phase, and by the module and phase that they belong
    # to.
    host: list[dict[ModulePhase, dict[ModulePhase, float]]]
    # the same of the device
    device: list[dict[ModulePhase, dict[ModulePhase, float]]]


@dataclass(slots=True)
class _Kernel:
    """A kernel's part in one module and phase."""

    calls: int = 0
    host: float = 0.0
    device: float = 0.0
    moved: float | None = 0.0


Rows = Callable[
    [GraphKernels, str], Sequence[str | None]
    # the rows of a graph's modules while a module runs
]


def times_of(
    regions: Iterable[Region],
    graphs: Mapping[str, GraphKernels],
    rows: Rows,
    *,
    batches: int,
    device: bool,
) -> CompiledTimes:
    """Divide compiled regions over modules."""
    sums = _Sums(batches)
    keys: set[str] = set()
    for region in regions:
        keys.add(region.key)
        graph = graphs.get(region.key, UNKNOWN)
        sums.add(region, graph, rows(graph, region.running.fqn))
    return sums.times(len(keys), sum(key not in graphs for key in keys), device=device)


class _Sums:
    def __init__(self, batches: int) -> None:
        self._host: list[dict[ModulePhase, dict[ModulePhase, float]]] = [{} for _ in range(batches)]
        self._device: list[dict[ModulePhase, dict[ModulePhase, float]]] = [
            {} for _ in range(batches)
        ]
        self._kernels: dict[tuple[str, ModulePhase, int], _Kernel] = {}
        self._regions = 0
        self._all: Counter[str] = Counter()
        self._unassigned: defaultdict[str, float] = defaultdict(float)
        self._split: defaultdict[str, float] = defaultdict(float)

    def add(self, region: Region, graph: GraphKernels, rows: Sequence[str | None]) -> None:
        """Add a region: what is between kernels belongs to the next one, what comes after the last to none."""
        self._regions += 1
        self._all["host"] += region.end - region.start
        calls, at = (
            _matched([_OF_GRAPH.sub("", event.name) for event in region.events], graph.calls),
            region.start,
        )
        for event, call in zip(region.events, calls, strict=True):
            self._all["device"] += event.device
            self._call(
                region,
                call,
                rows,
                event.end - (min(at, event.start) if call is None else at),
                event.device,
            )
            at = event.end
        self._unassigned["host"] += region.end - at
        launched = {
            id(call)
            for event, call in zip(region.events, calls, strict=True)
            if call is not None and event.device
        }
        without = [call for call in graph.calls if id(call) not in launched]
        for (_, took), call in zip(
            region.kernels,
            _matched([name for name, _ in region.kernels], without, by_name=True),
            strict=True,
        ):
            self._all["device"] += took
            self._call(region, call, rows, 0, took)

    def _call(
        self,
        region: Region,
        call: KernelCall | None,
        rows: Sequence[str | None],
        host: int,
        device: int,
    ) -> None:
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
            kernel.moved = (
                None
                if kernel.moved is None or call.bytes_moved is None
                else kernel.moved + call.bytes_moved * share
            )
            if modules > 1:
                self._split["host"] += host * share
                self._split["device"] += device * share

    def times(self, graphs: int, unrecorded: int, *, device: bool) -> CompiledTimes:
        kernels = tuple(
            CompiledKernel(
                name=name,
                module=row,
                phase=phase,  # type: ignore[arg-type]
                modules=modules,
                calls=each.calls,
                host_seconds=each.host / 1e9,
                device_seconds=each.device / 1e9 if device else None,
                bytes_moved=None if each.moved is None else round(each.moved),
            )
            for (name, (row, phase), modules), each in sorted(
                self._kernels.items(), key=lambda item: -max(item[1].device, item[1].host)
            )
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


def _matched(
    names: Sequence[str], calls: Sequence[KernelCall], *, by_name: bool = False
) -> list[KernelCall | None]:
    """The call of each event: the n-th of its name, if there are as many of both."""
    of_name = grouped(calls, attrgetter("name" if by_name else "event"))
    counts, seen = Counter(names), Counter[str]()
    matched: list[KernelCall | None] = []
    for name in names:
        fitting = of_name.get(name, [])
        matched.append(fitting[seen[name]] if len(fitting) == counts[name] else None)
        seen[name] += 1
    return matched


def _owners(
    call: KernelCall | None, running: ModulePhase, rows: Sequence[str | None]
) -> Mapping[tuple[str | None, str], float]:
    """The rows and phases that a call's time belongs to, with their shares.

    Code of the compiled function is the running module's.
    """
    # A graph of forward may have nodes of backward: the compiler computes ahead what saves memory.
    # They run in forward.
    if call is None or not call.shares:
        return {(None, running.phase): 1.0}
    owners: defaultdict[tuple[str | None, str], float] = defaultdict(float)
    for module, is_of_forward, share in call.shares:
        row = running.fqn if module < 0 else rows[module]
        phase = "recompute" if running.phase == "backward" and is_of_forward else running.phase
        owners[row, phase] += share
    return owners
