"""The kernels of a compiled graph: whose nodes each of them computes.

    cpp_fused_gelu_1:3        mul_2, erf, mul_4     nodes of `blocks.0`
    extern_kernels.addmm:4    addmm_1               a node of `blocks.0.b`

A module has the name by which the compiled function reaches it, as `L['self'].blocks.0`. Which row that is depends on the module that
runs: a graph may be compiled once and run for each of twelve blocks.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lflops.errors import CountError
from lflops.profile.series import summed


class Share(NamedTuple):
    """A part of a kernel."""

    module: int  # its number among the graph's modules; -1 for code of the compiled function itself
    is_of_forward: bool  # whether its nodes are of the forward pass, so that a graph of backward computes them again
    share: float  # of the kernel's time, by the bytes that its nodes move. All parts of a kernel add up to 1


class KernelCall(NamedTuple):
    """A call of a kernel."""

    name: str  # in generated code, as `cpp_fused_gelu_1` or `extern_kernels.mm`
    event: str  # what Kineto calls it, as `cpp_fused_gelu_1` or `aten::mm`
    shares: tuple[Share, ...]  # empty where nothing was recorded of its nodes
    bytes_moved: int | None  # read and written; `None` where that is not known


@dataclass(frozen=True, kw_only=True)
class GraphKernels:
    """A compiled graph."""

    modules: tuple[tuple[str, str], ...]  # the name and the class of each module that has nodes in it
    calls: tuple[KernelCall, ...]  # in the order of generated code

    @classmethod
    def of(cls, calls: Sequence[str], nodes: Mapping[str, Sequence[str]], record: Mapping[str, Any]) -> "GraphKernels | None":
        """Read a record.

        Args:
            calls: The kernels in their order, each with its number: `extern_kernels.mm:7`.
            nodes: The names of the nodes of each call.
            record: The modules; by node its module, bytes and torch's tag of its pass; of each kernel its bytes, its nodes, and whether it
                is a library's.

        Returns:
            `None` where the graph has no record.
        """
        if not record or not calls:
            return None
        about: Mapping[str, Sequence[Any]] = record["nodes"]
        moved = _bytes_of_calls({call: frozenset(nodes.get(call, ())) for call in calls}, record["kernels"])
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


def _shares(nodes: Sequence[Sequence[Any]]) -> tuple[Share, ...]:
    """What each module has of a kernel. Where the bytes of no node are known, nodes have equal parts."""
    known = all(moved is not None for _, moved, _ in nodes) and any(moved for _, moved, _ in nodes)
    parts = summed(((module, tag == "is_forward"), moved if known else 1) for module, moved, tag in nodes)
    total = sum(parts.values())
    return tuple(Share(*key, part / total) for key, part in parts.items() if part)


def _bytes_of_calls(nodes: Mapping[str, frozenset[str]], kernels: Sequence[tuple[int | None, Sequence[str], bool]]) -> dict[str, int]:
    """What each call reads and writes: a call may be several of the scheduler's kernels. A call with an unknown one is left out."""
    sums: dict[str, int] = {}
    unknown: set[str] = set()
    for moved, names, of_library in kernels:
        of_kernel = frozenset(names)
        calls = {call: own for call, own in nodes.items() if (_event(call) != call) == of_library}
        exact = [call for call, own in calls.items() if own == of_kernel]
        whole = [call for call, own in calls.items() if own > of_kernel]
        views_left_out = [call for call, own in calls.items() if own and own < of_kernel] if of_library else []
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
    """Records every graph that is compiled between `start` and `stop`. It changes inductor's settings, and restores them.

    The settings are those of the process: the first user sets them and the last restores them.
    """

    _lock = threading.Lock()
    _users = 0
    _restore: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.refusal: str | None = None  # why no graph is recorded; `None` while they are
        self._runs = False

    def start(self) -> None:
        """Begin to record; where this torch does not offer what that takes, `refusal` says so."""
        try:
            from lflops.collect.torch_private.self_check import check_inductor

            check_inductor()
            from lflops.collect.torch_private.inductor import record_graphs

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
        from lflops.collect.torch_private.inductor import compiled_graphs
    except CountError:
        return {}
    found = ((graph.key, GraphKernels.of(graph.calls, graph.nodes, graph.record)) for graph in compiled_graphs(keys))
    return {key: kernels for key, kernels in found if kernels is not None}
