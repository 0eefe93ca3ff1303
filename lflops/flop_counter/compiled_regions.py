"""Compiled code in a counted step.

Each call of a compiled graph, with the inputs that it was given.

Compiled code runs compiled. The dispatch mode sees only those of its operators that are no
generated kernels. So the calls are written down here, without their tensors, and afterwards
`graph_counts.py` counts the operators of their graphs.

While a graph runs, the row is a separate one below the row that calls it. Its name has a mark that
no module's name has.
"""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lflops.attribution.module_tracker import ModuleTracker
from lflops.error_guard import Guard, unguarded
from lflops.flop_counter.known_values import LARGEST
from lflops.inputs.tensors import nodes_of, tensors_in
from lflops.profile.records import Phase
from lflops.torch_private.autograd import (
    ACCUMULATES_GRADIENT,
    next_sequence_number,
    node_name,
    nodes_behind,
    sequence_number,
)
from lflops.torch_private.dispatch_modes import without_modes
from lflops.torch_private.modules import Compilations
from lflops.torch_private.tensors import PLAIN, version_of

if TYPE_CHECKING:
    from lflops.torch_private.dynamo import CapturedGraph, CompiledCode

MARK = "\0"
SEES_ALL = frozenset({"eager", "aot_eager", "aot_eager_decomp_partition"})
"""Backends that generate no kernels: the dispatch mode sees all of their operators."""
# the autograd node of a compiled graph
ONE_NODE = "CompiledFunctionBackward"


class GivenTensor(NamedTuple):
    """What is kept of a tensor that a graph was given."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    values: (
        Tensor | None
        # a copy on the host, of a small tensor of integers or truth values; else `None`
    )
    # the row that counts it, if it is a parameter of the tree
    owner: str | None


@dataclass
class RegionCall:
    """One call of a compiled graph."""

    # `None` if it is not known
    graph: "CapturedGraph | None"
    # its separate row
    scope: str
    # the row that called it
    row: str
    # in which it was called
    phase: Phase
    given: (
        list[Any] | None
        # what it was given, in order; `None` where a tensor is of a class that cannot be stood in for
    )
    # for each of these, the place of the first that is the same object
    same: list[int]
    grad: bool
    # the dtype by device type, where autocast was on
    autocast: dict[str, torch.dtype]
    # of the tensors that it was given and that it returned
    bytes: int = 0
    # What its control flow did, in order: which branch, or how many trips. Only seen with some
    # backends.
    decisions: list[int] = field(default_factory=list)
    # whether its autograd node ran
    went_backward: bool = False
    # whether autograd has one node for it. If not, the operators of backward are seen one by one
    is_one_node: bool = True

    @property
    def sees_all(self) -> bool:
        """Whether the dispatch mode saw all of its operators."""
        return not self.is_one_node or (self.graph is not None and self.graph.backend in SEES_ALL)


def row_of_region(row: str) -> str:
    """The row that called a compiled graph, for the graph's own row; any other row itself."""
    return row.partition(MARK)[0].rstrip(".") if MARK in row else row


def number_of_region(row: str) -> int | None:
    """The number of the call whose own row it is, among the calls of a step.

    `None` for any other row.
    """
    return int(row.partition(MARK)[2].partition(".")[0]) if MARK in row else None


class CompiledRegions:
    """Writes down the calls of compiled graphs on the threads that are counted.

    `guard` keeps our errors from the code that calls them.
    """

    def __init__(self, scopes: ModuleTracker, guard: Guard = unguarded) -> None:
        self.calls: list[RegionCall] = []
        self._scopes = scopes
        self._handles: list[Any] = []
        self._values: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._open: dict[str, RegionCall] = {}
        self._guard = guard

    def start(self) -> None:
        """Write down each call of compiled code, also of code that is compiled from here on."""
        _REPLACED.add(self)

    def stop(self) -> None:
        """End that. It can be called again."""
        _REPLACED.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._values.clear()
        self._open.clear()

    def decide(self, scope: str, phase: Phase) -> int | None:
        """Keep a place for what control flow does in a graph.

        `None` outside of graphs, and in backward.
        """
        call = self._open.get(scope)
        if call is None or phase == "backward":
            return None
        call.decisions.append(-1)
        return len(call.decisions) - 1

    def decided(self, scope: str, place: int | None, what: int) -> None:
        call = self._open.get(scope)
        if call is not None and place is not None:
            call.decisions[place] = what

    def begins(self, graph: "CapturedGraph | None", args: tuple[Any, ...]) -> Any:
        """A call of a graph begins. Returns what `ends` takes."""
        return self._guard(self._begins)(graph, args)

    def ends(self, begun: Any, out: Any = None) -> None:
        """It ends, with what it returns; by an exception, with nothing."""
        self._guard(self._ends)(begun, out)

    def _begins(
        self, graph: "CapturedGraph | None", args: tuple[Any, ...]
    ) -> tuple[RegionCall, int] | None:
        """Write down a call that begins.

        Returns it, with the number of the autograd node that comes next.
        """
        if not self._scopes.follows_this_thread():
            return None
        try:
            call, first = self._begin(graph, args), next_sequence_number()
        except Exception:  # noqa: BLE001 - what cannot be written down is listed as unknown
            self.calls.append(RegionCall(None, "", "", "other", None, [], grad=False, autocast={}))
            return None
        self._scopes.enter_row(id(call), call.scope)
        self._open[call.scope] = call
        return call, first

    def _ends(self, begun: tuple[RegionCall, int] | None, out: Any = None) -> None:
        if begun is not None:
            call, first = begun
            try:
                if out is not None:
                    self._hear_backward(call, first, out)
            except Exception:  # noqa: BLE001 - its work is unknown then, and the user's step goes on
                call.given = None
            self._open.pop(call.scope, None)
            self._scopes.leave_scope(id(call))

    def _begin(self, graph: "CapturedGraph | None", args: tuple[Any, ...]) -> RegionCall:
        _, phase = self._scopes.current(args)
        row = self._scopes.running()
        scope = f"{row}.{MARK}{len(self.calls)}" if row else f"{MARK}{len(self.calls)}"
        places: dict[int, int] = {}
        same = [places.setdefault(id(each), place) for place, each in enumerate(args)]
        devices = {each.device.type for each in tensors_in(args)}
        call = RegionCall(
            graph=graph,
            scope=scope,
            row=row,
            phase=phase,
            given=[self._given(each) for each in args]
            if all(map(_can_be_stood_in_for, args))
            else None,
            same=same,
            grad=torch.is_grad_enabled(),
            autocast={
                each: torch.get_autocast_dtype(each)
                for each in devices
                if torch.is_autocast_enabled(each)
            },
            bytes=sum(map(_bytes, tensors_in(args))),
        )
        self.calls.append(call)
        return call

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = self._scopes.tree.owner(value) if isinstance(value, torch.nn.Parameter) else None
        return GivenTensor(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_leaf,
            None
            if value.is_meta
            or value.is_floating_point()
            or value.is_complex()
            or value.numel() > LARGEST
            else self._copy(value),
            owner or None,
        )

    def _copy(self, tensor: Tensor) -> Tensor:
        """Its values. A tensor that several graphs are given is copied once."""
        key = (id(tensor), version_of(tensor))
        known = self._values.get(key)
        if known is None:
            with without_modes():
                known = self._values[key] = (tensor, tensor.detach().cpu().clone())
        return known[1]

    def _hear_backward(self, call: RegionCall, first: int, out: Any) -> None:
        results = list(tensors_in(out))
        call.bytes += sum(map(_bytes, results))

        def ran(_: object) -> None:
            call.went_backward = True

        nodes = _nodes_since(nodes_of(results), first)
        compiled = [node for node in nodes if node_name(node) == ONE_NODE]
        call.is_one_node = bool(compiled) or not nodes
        self._handles += [node.register_prehook(ran) for node in compiled]


class _Replaced:
    """The compiled functions of the process, replaced while anybody writes their calls down."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[CompiledRegions] = []
        self._functions: dict[str, tuple[CompiledCode, Any, Any]] = {}
        self._compilations = Compilations(
            lambda: None,
            self._replace,
            # before the code that was compiled runs
        )

    def add(self, listener: CompiledRegions) -> None:
        with self._lock:
            self._listeners.append(listener)
            self._compilations.listen_again()
        self._replace()

    def remove(self, listener: CompiledRegions) -> None:
        """The last one puts all functions back."""
        with self._lock:
            self._listeners[:] = [each for each in self._listeners if each is not listener]
            if self._listeners:
                return
            self._compilations.stop()
            for code, function, ours in self._functions.values():
                if code.function is ours:
                    code.replace(function)
            self._functions.clear()

    def _replace(self) -> None:
        from lflops.torch_private import dynamo

        # called out of the user's compilation
        with contextlib.suppress(Exception), self._lock:
            for code in dynamo.compiled_code():
                if code.name not in self._functions:
                    function = code.function
                    ours = dynamo.excluded(self._hearing(function, dynamo.graph_of(code, function)))
                    self._functions[code.name] = (code, function, ours)
                    code.replace(ours)

    def _hearing(self, function: Any, graph: "CapturedGraph | None") -> Any:
        def heard(*args: Any, **kwargs: Any) -> Any:
            begun = [(each, each.begins(graph, args)) for each in self._listeners]
            out = None
            try:
                out = function(*args, **kwargs)
            finally:
                for each, call in reversed(begun):
                    each.ends(call, out)
            return out

        return heard


_REPLACED = _Replaced()


def _nodes_since(nodes: Iterable[Any], first: int) -> list[Any]:
    """The autograd nodes from that number on that these lead to, as far as the graph's own node, where it has one."""

    def is_new(node: Any) -> bool:
        return first <= sequence_number(node) < ACCUMULATES_GRADIENT

    return [
        node
        for node in nodes_behind(nodes, lambda node: is_new(node) and node_name(node) != ONE_NODE)
        if is_new(node)
    ]


def _can_be_stood_in_for(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    return (
        type(value) in PLAIN
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
