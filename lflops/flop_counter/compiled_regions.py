"""Record the calls of compiled graphs (regions) in a counting step.

In a counting step, compiled code still runs compiled. The dispatch mode does not see the operators
that run in generated kernels, so it cannot count a compiled graph. Instead, each call of a graph is
recorded here: the shapes and dtypes of its arguments and torch's settings, but no tensors. After
the step, `graph_counts.py` uses these records to run the graphs again on fake tensors and to count
their operators.

The dispatch mode may still see some operators of a graph. The work of these operators is not added
to the module that calls the graph, but recorded under a separate name. This name consists of the
module's name, `MARK`, and the index of the call.
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
from lflops.profile.module_names import name_below
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

# The character before the index in the separate name of a graph call. No module name contains it.
MARK = "\0"
SEES_ALL = frozenset({"eager", "aot_eager", "aot_eager_decomp_partition"})
"""Backends of torch.compile without generated kernels, so the dispatch mode sees all operators."""
ONE_NODE = "CompiledFunctionBackward"
"""The name of the single autograd node that runs the whole backward of a compiled graph."""


class GivenTensor(NamedTuple):
    """The properties of a tensor that was passed to a graph. The tensor itself is not kept.

    Attributes:
        shape: Shape of the tensor.
        stride: Strides of the tensor.
        dtype: Dtype of the tensor.
        device: Device of the tensor.
        requires_grad: Whether the tensor requires a gradient.
        is_leaf: Whether the tensor is a leaf.
        values: A host copy of the values if the tensor is small and holds integers or booleans,
            else `None`.
        owner: The module that owns the tensor if it is a parameter of the model, else `None`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    values: Tensor | None
    owner: str | None


@dataclass
class RegionCall:
    """One call of a compiled graph.

    Attributes:
        graph: The graph, or `None` if it is unknown.
        scope: The separate name of the call, under which the dispatch mode records the operators
            that it sees in the graph.
        fqn: The module that called the graph.
        phase: The phase in which the graph was called.
        given: The arguments of the call, where a `GivenTensor` replaces each tensor. `None` if an
            argument is a tensor of a class that no fake tensor can represent.
        same: For each argument, the position of the first argument that is the same object. It
            differs from the argument's own position only if an object is passed more than once.
        grad: Whether gradients were enabled.
        autocast: The autocast dtype of each device type for which autocast was enabled.
        bytes: The total bytes of the tensors that the graph received and returned.
        decisions: The decision of each control-flow operator in the graph, in order: 1 or 0 for the
            branch of a condition, or the number of iterations of a loop. A decision is recorded
            only if the dispatch mode sees the operator.
        went_backward: Whether the backward of the graph ran.
        is_one_node: Whether autograd has a single node for the whole graph. If not, autograd has
            one node for each operator, and the dispatch mode sees all operators of the backward.
    """

    graph: "CapturedGraph | None"
    scope: str
    fqn: str
    phase: Phase
    given: list[Any] | None
    same: list[int]
    grad: bool
    autocast: dict[str, torch.dtype]
    bytes: int = 0
    decisions: list[int] = field(default_factory=list)
    went_backward: bool = False
    is_one_node: bool = True

    @property
    def sees_all(self) -> bool:
        """Return whether the dispatch mode saw all operators of the graph."""
        return not self.is_one_node or (self.graph is not None and self.graph.backend in SEES_ALL)


def module_of_region(fqn: str) -> str:
    """Return the module that called a compiled graph, given the separate name of the call.

    If `fqn` is not the separate name of a call, return `fqn`.
    """
    return fqn.partition(MARK)[0].rstrip(".") if MARK in fqn else fqn


def number_of_region(fqn: str) -> int | None:
    """Return the index of a graph call, given the separate name of the call.

    If `fqn` is not the separate name of a call, return `None`.
    """
    if MARK not in fqn:
        return None
    return int(fqn.partition(MARK)[2].partition(".")[0])


class CompiledRegions:
    """Records the calls of compiled graphs on the threads that are counted.

    `guard` keeps errors in lflops from reaching the code that calls the graphs.
    """

    def __init__(self, scopes: ModuleTracker, guard: Guard = unguarded) -> None:
        self.calls: list[RegionCall] = []
        self._scopes = scopes
        self._handles: list[Any] = []
        # Tensors and their host copies, keyed by the tensor's id and version. The tensor is kept
        # alive, so that no other tensor gets its id.
        self._values: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        # The running graph calls, keyed by their separate names.
        self._open: dict[str, RegionCall] = {}
        self._guard = guard

    def start(self) -> None:
        """Start recording calls, including calls of code that is compiled later."""
        _REPLACED.add(self)

    def stop(self) -> None:
        """Stop recording.

        A second call does nothing.
        """
        _REPLACED.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._values.clear()
        self._open.clear()

    def decide(self, scope: str, phase: Phase) -> int | None:
        """Reserve an entry in a graph call's `decisions`, and return the index of the entry.

        Call this before a control-flow operator such as `torch.cond` runs, so that nested operators
        get later entries. Return `None` in backward, and if `scope` is not the name of a running
        graph call.
        """
        call = self._open.get(scope)
        if call is None or phase == "backward":
            return None
        call.decisions.append(-1)
        return len(call.decisions) - 1

    def decided(self, scope: str, place: int | None, decision: int) -> None:
        """Write a control-flow decision to the entry that `decide` reserved.

        `place` is the result of `decide`. If it is `None`, nothing is written.
        """
        call = self._open.get(scope)
        if call is not None and place is not None:
            call.decisions[place] = decision

    def begins(self, graph: "CapturedGraph | None", args: tuple[Any, ...]) -> Any:
        """Record the start of a graph call. Pass the result to `ends` after the call."""
        return self._guard(self._begins)(graph, args)

    def ends(self, begun: Any, out: Any = None) -> None:
        """Record the end of a graph call.

        Args:
            begun: The value that `begins` returned.
            out: The result of the graph call, or `None` after an exception.
        """
        self._guard(self._ends)(begun, out)

    def _begins(
        self, graph: "CapturedGraph | None", args: tuple[Any, ...]
    ) -> tuple[RegionCall, int] | None:
        """Record the start of a graph call, and return the call and a sequence number.

        The sequence number is the number of the next autograd node. The call creates the nodes with
        this number and higher numbers. Return `None` if the call is not recorded.
        """
        if not self._scopes.follows_this_thread():
            return None
        try:
            call = self._begin(graph, args)
            first = next_sequence_number()
        except Exception:  # noqa: BLE001 - a call that cannot be recorded is listed as unknown
            self.calls.append(RegionCall(None, "", "", "other", None, [], grad=False, autocast={}))
            return None
        self._scopes.enter_name(id(call), call.scope)
        self._open[call.scope] = call
        return call, first

    def _ends(self, begun: tuple[RegionCall, int] | None, out: Any = None) -> None:
        if begun is None:
            return
        call, first = begun
        try:
            if out is not None:
                self._watch_backward(call, first, out)
        except Exception:  # noqa: BLE001 - the call's work is unknown then, and the step continues
            call.given = None
        self._open.pop(call.scope, None)
        self._scopes.leave_scope(id(call))

    def _begin(self, graph: "CapturedGraph | None", args: tuple[Any, ...]) -> RegionCall:
        _, phase = self._scopes.current(args)
        fqn = self._scopes.running()
        name = f"{MARK}{len(self.calls)}"
        first_places: dict[int, int] = {}
        same = []
        for place, arg in enumerate(args):
            same.append(first_places.setdefault(id(arg), place))
        tensors = list(tensors_in(args))
        autocast = {}
        for device in {tensor.device.type for tensor in tensors}:
            if torch.is_autocast_enabled(device):
                autocast[device] = torch.get_autocast_dtype(device)
        given = None
        if all(map(_has_fake_equivalent, args)):
            given = [self._given(arg) for arg in args]
        call = RegionCall(
            graph=graph,
            scope=name_below(fqn, name),
            fqn=fqn,
            phase=phase,
            given=given,
            same=same,
            grad=torch.is_grad_enabled(),
            autocast=autocast,
            bytes=sum(map(_bytes, tensors)),
        )
        self.calls.append(call)
        return call

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = None
        if isinstance(value, torch.nn.Parameter):
            owner = self._scopes.tree.owner(value)
        has_integers = not value.is_floating_point() and not value.is_complex()
        is_copied = has_integers and not value.is_meta and value.numel() <= LARGEST
        return GivenTensor(
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.requires_grad,
            is_leaf=value.is_leaf,
            values=self._copy(value) if is_copied else None,
            owner=owner or None,
        )

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a host copy of a tensor's values.

        If several graphs receive the same tensor, its values are copied only once.
        """
        key = (id(tensor), version_of(tensor))
        known = self._values.get(key)
        if known is not None:
            return known[1]
        with without_modes():
            copy = tensor.detach().cpu().clone()
        self._values[key] = (tensor, copy)
        return copy

    def _watch_backward(self, call: RegionCall, first: int, out: Any) -> None:
        """Install hooks that record whether the backward of a finished graph call runs.

        Args:
            call: The graph call.
            first: The sequence number of the first autograd node that the call may have created.
            out: The result of the call.
        """
        results = list(tensors_in(out))
        call.bytes += sum(map(_bytes, results))

        def ran(_: object) -> None:
            call.went_backward = True

        nodes = _nodes_since(nodes_of(results), first)
        compiled = [node for node in nodes if node_name(node) == ONE_NODE]
        call.is_one_node = bool(compiled) or not nodes
        self._handles += [node.register_prehook(ran) for node in compiled]


class _Replaced:
    """Wraps all compiled functions of the process while there are listeners.

    A listener is the `CompiledRegions` of a running count. Each wrapper calls the compiled function
    and reports the call to all listeners.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[CompiledRegions] = []
        self._functions: dict[str, tuple[CompiledCode, Any, Any]] = {}
        # When a compilation ends, the new functions are wrapped before they run.
        self._compilations = Compilations(lambda: None, self._replace)

    def add(self, listener: CompiledRegions) -> None:
        with self._lock:
            self._listeners.append(listener)
            self._compilations.listen_again()
        self._replace()

    def remove(self, listener: CompiledRegions) -> None:
        """Stop reporting calls to a listener. After the last listener, restore all functions."""
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

        # An error here would end the user's compilation.
        with contextlib.suppress(Exception), self._lock:
            for code in dynamo.compiled_code():
                if code.name not in self._functions:
                    function = code.function
                    ours = dynamo.excluded(
                        self._recorded(function, dynamo.graph_of(code, function))
                    )
                    self._functions[code.name] = (code, function, ours)
                    code.replace(ours)

    def _recorded(self, function: Any, graph: "CapturedGraph | None") -> Any:
        """Return a function that calls a compiled function and reports the call."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            begun = [(listener, listener.begins(graph, args)) for listener in self._listeners]
            out = None
            try:
                out = function(*args, **kwargs)
            finally:
                for listener, call in reversed(begun):
                    listener.ends(call, out)
            return out

        return recorded


_REPLACED = _Replaced()


def _nodes_since(nodes: Iterable[Any], first: int) -> list[Any]:
    """Return the autograd nodes whose sequence number is at least `first`.

    A call of a compiled graph has created these nodes. The search starts at `nodes` and follows the
    edges that backward follows. It does not go beyond a node that runs the whole backward of a
    compiled graph (`ONE_NODE`).
    """

    def is_new(node: Any) -> bool:
        return first <= sequence_number(node) < ACCUMULATES_GRADIENT

    def is_passed(node: Any) -> bool:
        return is_new(node) and node_name(node) != ONE_NODE

    return [node for node in nodes_behind(nodes, is_passed) if is_new(node)]


def _has_fake_equivalent(value: Any) -> bool:
    """Return true if a value is not a tensor, or is a tensor that a fake tensor can represent."""
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
