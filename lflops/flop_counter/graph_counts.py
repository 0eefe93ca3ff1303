"""Count the work of compiled graphs after the step.

For each recorded call of a graph, the operators of the graph run again on fake tensors. The work of
each operator is added to the module that the operator came from.

These graphs are the graphs that Dynamo passed to its backend, so no user code runs. Tensors that a
graph received are replaced by fake tensors of the same shape. Small integer tensors are replaced by
copies of their values, because the amount of work may depend on the values. If the backward of a
graph ran in the step, it also runs here. Recomputation is counted in the same way as without
torch.compile.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from lflops.attribution.module_tracker import ModuleTracker
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.compiled_regions import (
    GivenTensor,
    RegionCall,
    module_of_region,
    number_of_region,
)
from lflops.flop_counter.dispatch_mode import OperatorCounter
from lflops.flop_counter.known_values import KnownValues
from lflops.flop_counter.totals import Counts, Resolved, Totals, Transfers
from lflops.inputs.tensors import changed, tensors_in
from lflops.model.module_tree import ModuleTree, names_in_tree
from lflops.profile.notes import Note
from lflops.profile.records import Phase
from lflops.torch_private.dispatch_modes import on_stack, without_modes
from lflops.torch_private.dynamo import MODULES, CapturedGraph
from lflops.torch_private.operators import HigherOrderOperator
from lflops.torch_private.tensors import fake_mode

COMPILED = "torch.compile"
"""The operator name for the work of a graph that cannot be assigned to single operators."""

PHASES_OF_BACKWARD = frozenset({"backward", "recompute"})

INLINED = frozenset({"wrap", "wrap_activation_checkpoint", "hints_wrapper"})
"""Higher-order operators that only run a graph, which is their first argument."""


class UncountableError(Exception):
    """The work of a graph cannot be counted.

    For example, the work depends on values that were not recorded, or an operator cannot run on
    fake tensors.
    """


def count_graph(
    call: RegionCall, tree: ModuleTree, *, traffic: bool = True
) -> tuple[Totals, Counter[str]]:
    """Return the work of one graph call, and the number of calls of each module in the graph.

    Raises:
        UncountableError: The work cannot be determined.
    """
    if call.graph is None:
        raise UncountableError("the graph was compiled before lflops started")
    if call.given is None:
        raise UncountableError("a tensor of an unknown class was passed to the graph")
    scopes = ModuleTracker(tree)
    options = CountOptions(traffic=traffic, memory=False, fake=True, scratch=False)
    counter = OperatorCounter(scopes, options)
    with _settings_of(call), contextlib.ExitStack() as undo:
        mode = fake_mode()
        passed, leaves = _stand_ins(call, mode)
        undo.enter_context(mode)
        undo.enter_context(on_stack(KnownValues()))
        run = _GraphRun(call, scopes, _names_of_modules(call, tree))
        scopes.begin()
        try:
            forward = undo.enter_context(contextlib.ExitStack())
            forward.callback(counter.start_on_this_thread())
            scopes.enter_name(id(run), call.fqn)
            out = run.graph(call.graph, passed)
            scopes.leave_scope(id(run))
            forward.close()
            if call.went_backward:
                _go_backward(out, leaves, counter)
        except UncountableError:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise UncountableError(f"{type(error).__name__}: {first_line}") from error
    return counter.total(), run.calls


@contextlib.contextmanager
def _settings_of(call: RegionCall) -> Iterator[None]:
    """Return a context manager that sets grad mode and autocast as they were in a graph call.

    It also turns torch's dispatch modes off. On exit, it restores all settings and the state of the
    random number generator.
    """
    generator = torch.get_rng_state()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_rng_state, generator)
        undo.enter_context(without_modes())
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.set_grad_enabled(call.grad))
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device in {"cpu", "cuda"} | call.autocast.keys():
            is_on = device in call.autocast
            if is_on or torch.is_autocast_enabled(device):
                dtype = call.autocast.get(device)
                undo.enter_context(
                    torch.autocast(device, dtype, enabled=is_on, cache_enabled=False)
                )
        yield


def _stand_ins(call: RegionCall, mode: Any) -> tuple[list[Any], list[Tensor]]:
    """Return the graph's arguments as fake tensors, and the leaf tensors that need a gradient."""
    passed: list[Any] = []
    leaves: list[Tensor] = []
    with mode:
        for place, (value, first_place) in enumerate(zip(call.given or (), call.same, strict=True)):
            is_repeated = first_place != place
            passed.append(passed[first_place] if is_repeated else _stand_in(value, leaves))
    return passed, leaves


def _stand_in(given: Any, leaves: list[Tensor]) -> Any:
    if not isinstance(given, GivenTensor):
        return given
    if given.values is not None:
        with without_modes():
            return _empty_like(given).copy_(given.values)
    tensor = _empty_like(given)
    if not given.requires_grad:
        return tensor
    leaves.append(tensor.requires_grad_())
    with torch.enable_grad():
        # The graph may write to its arguments. Torch forbids this for leaves, so a tensor that was
        # not a leaf is copied.
        return tensor if given.is_leaf else tensor.clone()


def _empty_like(given: GivenTensor) -> Tensor:
    return torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)


def _go_backward(out: Any, leaves: Sequence[Tensor], counter: OperatorCounter) -> None:
    results = [each for each in tensors_in(out) if each.requires_grad and each.grad_fn is not None]
    gradients = [torch.empty_like(each, requires_grad=False) for each in results]
    with contextlib.ExitStack() as undo:
        undo.callback(counter.start_on_this_thread())
        if results and leaves:
            torch.autograd.grad(results, list(leaves), gradients, allow_unused=True)


def _names_of_modules(call: RegionCall, tree: ModuleTree) -> dict[str, str | None]:
    """Map each module name in the graph to the name in the model, or to `None` if ambiguous."""
    names: dict[tuple[str, str], None] = {}
    for modules in _stacks(call.graph):
        for _, name, class_name in modules:
            names[name, class_name] = None
    owners = set()
    for value in call.given or ():
        if isinstance(value, GivenTensor) and value.owner is not None:
            owners.add(value.owner)
    fqns = names_in_tree(list(names), call.fqn, tree, frozenset(owners))
    return {name: fqn for (name, _), fqn in zip(names, fqns, strict=True)}


def _stacks(graph: Any) -> Iterator[tuple[tuple[str, str, str], ...]]:
    """Yield, for each node of a graph and its subgraphs, the modules that the node came from.

    The modules are nested, and the outermost module comes first. Each module is a tuple: a key that
    identifies the module call, the module's name in the graph, and its class name.
    """
    for node in graph.graph.nodes:
        yield node.meta[MODULES]
    for attribute in graph.attributes.values():
        if isinstance(attribute, CapturedGraph):
            yield from _stacks(attribute)


class _GraphRun:
    """Runs a graph node by node, and marks each node's module as running.

    In this way, the work of each node is added to the module that the node came from.

    Attributes:
        calls: The number of calls of each module so far.
    """

    def __init__(
        self, call: RegionCall, scopes: ModuleTracker, fqns: Mapping[str, str | None]
    ) -> None:
        """Prepare the run.

        Args:
            call: The recorded call of the graph that runs again.
            scopes: Tracks the running module.
            fqns: For each module name in the graph, the module's name in the model, or `None` if
                the name is ambiguous.
        """
        self.calls: Counter[str] = Counter()
        self._base = call.fqn
        self._fqns = fqns
        self._decisions = iter(call.decisions)
        self._scopes = scopes
        self._called: set[str] = set()

    def graph(self, graph: CapturedGraph, args: Sequence[Any]) -> Any:
        """Run a graph and return its output."""
        values: dict[fx.Node, Any] = {}
        given = iter(args)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = graph.attributes[str(node.target)]
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            else:
                positional, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with self._within(node):
                    values[node] = self._node(node, positional, named)
        return None

    @contextlib.contextmanager
    def _within(self, node: fx.Node) -> Iterator[None]:
        modules = node.meta[MODULES]
        fqn = self._base
        for key, name, _ in modules:
            module_fqn = self._fqns.get(name)
            if module_fqn is None:
                continue
            fqn = module_fqn
            if key not in self._called and fqn != self._base:
                self._called.add(key)
                self.calls[fqn] += 1
        if not modules or fqn == self._scopes.running():
            yield
            return
        self._scopes.enter_name(id(node), fqn)
        try:
            yield
        finally:
            self._scopes.leave_scope(id(node))

    def _node(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function":
            raise UncountableError(f"the graph calls the module {node.target}")
        target: Any = node.target
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(target, list(args), kwargs)
        return target(*args, **kwargs)

    def _higher_order(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = target.name()
        run = getattr(self, f"_{name}", None)
        if run is not None:
            return run(*args, **kwargs)
        if name in INLINED:
            return self.graph(args[0], args[1:])
        args, kwargs = changed((args, kwargs), CapturedGraph, CapturedGraph.module)
        return target(*args, **kwargs)

    def _tag_activation_checkpoint(self, graph: CapturedGraph, *args: Any, **_: Any) -> Any:
        if graph.chooses:
            raise UncountableError("a user function selects which operators are recomputed")
        if not torch.is_grad_enabled():
            return self.graph(graph, args)

        def run(*operands: Any) -> Any:
            return self.graph(graph, operands)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    def _invoke_subgraph(self, graph: CapturedGraph, _name: Any, *args: Any, **_: Any) -> Any:
        return self.graph(graph, args)

    def _cond(
        self, condition: Any, yes: CapturedGraph, no: CapturedGraph, operands: Any = ()
    ) -> Any:
        recorded = next(self._decisions, None)
        is_true = bool(condition) if recorded is None else recorded
        return self.graph(yes if is_true else no, operands)

    def _while_loop(
        self, condition: CapturedGraph, body: CapturedGraph, carried: Any, further: Any = ()
    ) -> Any:
        recorded_trips = next(self._decisions, None)
        for trip in itertools.count():
            # The condition is counted even if its result was recorded.
            continues = self.graph(condition, (*carried, *further))
            if recorded_trips is not None:
                continues = trip < recorded_trips
            if not continues:
                break
            carried = self.graph(body, (*carried, *further))
        return carried

    def _map_impl(self, body: CapturedGraph, mapped: Any, further: Any = ()) -> Any:
        results = []
        for trip in range(len(mapped[0])):
            operands = [values[trip] for values in mapped]
            results.append(self.graph(body, (*operands, *further)))
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    def _scan(self, body: CapturedGraph, carried: Any, scanned: Any, further: Any = ()) -> Any:
        number = len(carried)
        results = []
        for trip in range(len(scanned[0])):
            operands = [values[trip] for values in scanned]
            out = self.graph(body, (*carried, *operands, *further))
            carried = out[:number]
            results.append(out[number:])
        return (*carried, *(torch.stack(parts) for parts in zip(*results, strict=True)))


def resolve(
    totals: Totals, regions: Sequence[RegionCall], tree: ModuleTree, *, traffic: bool = True
) -> Resolved:
    """Return the work of a step, including the whole work of its compiled graphs.

    The dispatch mode sees only some operators of a compiled graph. Their work is replaced by the
    work that `count_graph` counts.

    Args:
        totals: The work that the dispatch mode saw. Operators in a graph are listed under the
            separate name of the graph call.
        regions: The recorded calls of graphs.
        tree: The modules of the model.
        traffic: Whether to count bytes.
    """
    outside, inside = _divided(totals)
    resolved = Resolved(outside)
    unknown: Counter[str] = Counter()
    different: defaultdict[str, _Difference] = defaultdict(_Difference)
    for number, call in enumerate(regions):
        seen = inside.pop(number, Totals())
        if not call.is_one_node:
            phases = {phase for _, _, phase, _ in seen.op_counts}
            call.went_backward |= "backward" in phases
        resolved.is_memory_known &= call.sees_all
        try:
            counted, calls = count_graph(call, tree, traffic=traffic)
        except UncountableError as error:
            resolved.totals.merge(_as_seen(seen, call))
            if not call.sees_all:
                unknown[str(error)] += 1
            continue
        is_used = _merge_counted(resolved, different[call.fqn], call, seen, counted)
        if is_used and call.phase == "forward":
            resolved.calls.update(calls)
    for seen in inside.values():
        resolved.totals.merge(_as_seen(seen, None))
    for reason, number in unknown.items():
        note = Note(code="compiled_unsupported", subject=reason, values={"calls": number})
        resolved.notes.append(note)
    for fqn, difference in different.items():
        if not difference.seen:
            continue
        values = {"seen": difference.seen, "counted": difference.counted}
        resolved.notes.append(Note(code="compiled_differs", subject=fqn, values=values))
    return resolved


@dataclass
class _Difference:
    """Two sums of MACs that should be equal but are not, for a note in the profile.

    The sums include only graph calls in which the dispatch mode saw more MACs than `count_graph`
    counted.

    Attributes:
        seen: The MACs that the dispatch mode saw while the graphs ran.
        counted: The MACs that were counted from the graphs.
    """

    seen: int = 0
    counted: int = 0


def _merge_counted(
    resolved: Resolved, difference: _Difference, call: RegionCall, seen: Totals, counted: Totals
) -> bool:
    """Add the work of one graph call to the result.

    Normally, this is the work that `count_graph` counted (`counted`). But if the dispatch mode saw
    all operators of the graph and their MACs differ, it is the work that the mode saw (`seen`).

    Return whether `counted` was added.
    """
    if call.phase != "forward":
        counted = _in_phase(counted, call.phase)
    macs_seen = _macs(seen, of_backward=False)
    macs_counted = _macs(counted, of_backward=False)
    if call.sees_all and macs_seen != macs_counted:
        resolved.totals.merge(_as_seen(seen, call))
        return False
    if macs_seen > macs_counted:
        difference.seen += macs_seen
        difference.counted += macs_counted
    else:
        _add_recompute(counted, seen, call.fqn)
    resolved.totals.merge(counted)
    return True


def _in_phase(totals: Totals, of_call: Phase) -> Totals:
    """Return a copy of `totals` in which the forward work is moved to the phase `of_call`.

    A compiled graph may be called outside forward, for example in the optimizer step.
    """

    def place(fqn: str, phase: Phase) -> tuple[str, Phase]:
        if phase == "forward":
            return fqn, of_call
        return fqn, phase

    return totals.moved(place)


def _divided(totals: Totals) -> tuple[Totals, dict[int, Totals]]:
    """Return the work of a step outside compiled graphs, and the work in each graph call.

    The second result is keyed by the index of the graph call.
    """
    outside = Totals()
    inside: defaultdict[int, Totals] = defaultdict(Totals)

    def part_of(fqn: str, phase: Phase) -> tuple[Totals, str, Phase]:
        number = number_of_region(fqn)
        part = outside if number is None else inside[number]
        return part, fqn, phase

    outside.merge_without_modules(totals)
    totals.add_to(part_of)
    return outside, dict(inside)


def _as_seen(seen: Totals, call: RegionCall | None) -> Totals:
    """Return the work that the dispatch mode saw in a graph, as work of the calling module.

    If the mode may not have seen all operators of the graph, the graph is listed as unsupported. If
    `call` is `None`, the graph is never listed.
    """
    moved = seen.moved(lambda fqn, phase: (module_of_region(fqn), phase))
    if call is not None and not call.sees_all:
        phases: list[Phase] = [call.phase]
        if call.went_backward:
            phases.append("backward")
        for phase in phases:
            moved.unsupported[call.fqn, COMPILED, phase].add(Transfers(1, call.bytes))
    return moved


def _add_recompute(counted: Totals, seen: Totals, fqn: str) -> None:
    """Add the matmuls that a compiled graph recomputes to the counted work.

    If the dispatch mode saw more MACs in backward than `count_graph` counted, the compiler has
    decided to recompute matmuls. The difference is added as recomputation.
    """
    macs = _macs(seen, of_backward=True) - _macs(counted, of_backward=True)
    if macs <= 0:
        return
    macs_of_dtypes = Counter[Any]()
    for (_, _, phase, dtype), counts in seen.op_counts.items():
        if phase in PHASES_OF_BACKWARD:
            macs_of_dtypes[dtype] += counts.macs
    dtype = macs_of_dtypes.most_common(1)[0][0]
    recompute = Counts(calls=1, macs=macs, executed_macs=macs, flops=2 * macs)
    counted.op_counts[fqn, COMPILED, "recompute", dtype].add(recompute)


def _macs(totals: Totals, *, of_backward: bool) -> int:
    macs = 0
    for (_, _, phase, _), counts in totals.op_counts.items():
        if (phase in PHASES_OF_BACKWARD) == of_backward:
            macs += counts.macs
    return macs
