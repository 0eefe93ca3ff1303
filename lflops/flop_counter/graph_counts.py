"""What compiled graphs do, counted after the step.

Their operators run on fake tensors, each in the row of its module.

The graphs are those that dynamo handed to its backend. No code of the user's runs. What a graph was
given is stood in for by fake tensors of the same shape, and small tensors of integers by copies. A
graph whose backward ran goes backward here as well, so what is recomputed is seen as it is without
torch.compile.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from lflops.attribution.module_tracker import ModuleTracker
from lflops.flop_counter.accumulator import Extent
from lflops.flop_counter.compiled_regions import (
    GivenTensor,
    RegionCall,
    number_of_region,
    row_of_region,
)
from lflops.flop_counter.dispatch_mode import OperatorCounter
from lflops.flop_counter.known_values import KnownValues
from lflops.flop_counter.totals import Counts, Resolved, Totals, Transfers
from lflops.inputs.tensors import changed, tensors_in
from lflops.model.module_tree import ModuleTree, rows_of
from lflops.profile.notes import Note
from lflops.profile.records import Phase
from lflops.torch_private.dispatch_modes import on_stack, without_modes
from lflops.torch_private.dynamo import MODULES, CapturedGraph
from lflops.torch_private.operators import HigherOrderOperator
from lflops.torch_private.tensors import fake_mode

# the name under which a graph of unknown work is listed
COMPILED = "torch.compile"
PHASES_OF_BACKWARD = frozenset({"backward", "recompute"})

INLINED = frozenset(
    {"wrap", "wrap_activation_checkpoint", "hints_wrapper"}
    # operators that run the graph that is their first argument
)


class UncountableError(Exception):
    """What a graph does depends on values that were not seen, or is done by an operator that cannot run on fake tensors."""


def count_graph(
    call: RegionCall, tree: ModuleTree, *, traffic: bool = True
) -> tuple[Totals, Counter[str]]:
    """Count what a call of a graph did, and which modules it called.

    An `UncountableError` where that cannot be known.
    """
    if call.graph is None:
        raise UncountableError("it was compiled before lflops watched")
    if call.given is None:
        raise UncountableError("it was given tensors of an unknown class")
    scopes = ModuleTracker(tree)
    counter = OperatorCounter(
        scopes, Extent(traffic=traffic, memory=False, fake=True, scratch=False)
    )
    with _apart_from_training(call), contextlib.ExitStack() as undo:
        mode = fake_mode()
        passed, leaves = _stand_ins(call, mode)
        undo.enter_context(mode)
        undo.enter_context(on_stack(KnownValues()))
        run = _Run(call, scopes, _rows_of_modules(call, tree))
        scopes.begin()
        try:
            forward = undo.enter_context(contextlib.ExitStack())
            forward.callback(counter.follow())
            scopes.enter_row(id(run), call.row)
            out = run.graph(call.graph, passed)
            scopes.leave_scope(id(run))
            forward.close()
            if call.went_backward:
                _go_backward(out, leaves, counter)
        except UncountableError:
            raise
        except Exception as error:
            raise UncountableError(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
    return counter.total(), run.calls


@contextlib.contextmanager
def _apart_from_training(call: RegionCall) -> Iterator[None]:
    """The settings under which the graph ran, none of the user's modes, and unchanged random numbers afterwards."""
    generator = torch.get_rng_state()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_rng_state, generator)
        undo.enter_context(without_modes())
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.set_grad_enabled(call.grad))
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device in {"cpu", "cuda"} | call.autocast.keys():
            on = device in call.autocast
            if on or torch.is_autocast_enabled(device):
                undo.enter_context(
                    torch.autocast(
                        device, call.autocast.get(device), enabled=on, cache_enabled=False
                    )
                )
        yield


def _stand_ins(call: RegionCall, mode: Any) -> tuple[list[Any], list[Tensor]]:
    """A fake tensor for each argument that is one; and the leaves, which get a gradient."""
    passed: list[Any] = []
    leaves: list[Tensor] = []
    with mode:
        for place, (each, same) in enumerate(zip(call.given or (), call.same, strict=True)):
            passed.append(_stand_in(each, leaves) if same == place else passed[same])
    return passed, leaves


def _stand_in(each: Any, leaves: list[Tensor]) -> Any:
    if not isinstance(each, GivenTensor):
        return each
    if each.values is not None:
        with without_modes():
            return torch.empty_strided(
                each.shape, each.stride, dtype=each.dtype, device=each.device
            ).copy_(each.values)
    made = torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=each.device)
    if not each.requires_grad:
        return made
    leaves.append(made.requires_grad_())
    with torch.enable_grad():
        # it may be written to, which a leaf may not
        return made if each.is_leaf else made.clone()


def _go_backward(out: Any, leaves: Sequence[Tensor], counter: OperatorCounter) -> None:
    results = [each for each in tensors_in(out) if each.requires_grad and each.grad_fn is not None]
    gradients = [torch.empty_like(each, requires_grad=False) for each in results]
    with contextlib.ExitStack() as undo:
        undo.callback(counter.follow())
        if results and leaves:
            torch.autograd.grad(results, list(leaves), gradients, allow_unused=True)


def _rows_of_modules(call: RegionCall, tree: ModuleTree) -> dict[str, str | None]:
    names = dict.fromkeys(
        (name, kind) for modules in _stacks(call.graph) for _, name, kind in modules
    )
    owners = frozenset(
        each.owner
        for each in call.given or ()
        if isinstance(each, GivenTensor) and each.owner is not None
    )
    return {
        name: row
        for (name, _), row in zip(names, rows_of(list(names), call.row, tree, owners), strict=True)
    }


def _stacks(graph: Any) -> Iterator[tuple[tuple[str, str, str], ...]]:
    for node in graph.graph.nodes:
        yield node.meta[MODULES]
    for each in graph.attributes.values():
        if isinstance(each, CapturedGraph):
            yield from _stacks(each)


class _Run:
    def __init__(
        self, call: RegionCall, scopes: ModuleTracker, rows: Mapping[str, str | None]
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._base, self._rows = (
            call.row,
            rows,
            # the row of the compiled function, and those of the modules that its graph names
        )
        self._decisions = iter(call.decisions)
        self._scopes = scopes
        self._called: set[str] = set()

    def graph(self, graph: CapturedGraph, args: Sequence[Any]) -> Any:
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
        rows = [(key, row) for key, name, _ in modules if (row := self._rows.get(name)) is not None]
        for key, row in rows:
            if key not in self._called and row != self._base:
                self._called.add(key)
                self.calls[row] += 1
        row = rows[-1][1] if rows else self._base
        if not modules or row == self._scopes.running():
            yield
            return
        self._scopes.enter_row(id(node), row)
        try:
            yield
        finally:
            self._scopes.leave_scope(id(node))

    def _node(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function":
            raise UncountableError(f"it calls the module {node.target}")
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
            raise UncountableError("its user chooses what is recomputed")
        if not torch.is_grad_enabled():
            return self.graph(graph, args)
        return checkpoint(
            lambda *each: self.graph(graph, each),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
        )

    def _invoke_subgraph(self, graph: CapturedGraph, _name: Any, *args: Any, **_: Any) -> Any:
        return self.graph(graph, args)

    def _cond(
        self, condition: Any, yes: CapturedGraph, no: CapturedGraph, operands: Any = ()
    ) -> Any:
        seen = next(self._decisions, None)
        return self.graph(yes if (bool(condition) if seen is None else seen) else no, operands)

    def _while_loop(
        self, condition: CapturedGraph, body: CapturedGraph, carried: Any, further: Any = ()
    ) -> Any:
        seen = next(self._decisions, None)
        for trip in itertools.count():
            answer = self.graph(condition, (*carried, *further))
            if not (answer if seen is None else trip < seen):
                break
            carried = self.graph(body, (*carried, *further))
        return carried

    def _map_impl(self, body: CapturedGraph, mapped: Any, further: Any = ()) -> Any:
        results = [
            self.graph(body, (*(each[trip] for each in mapped), *further))
            for trip in range(len(mapped[0]))
        ]
        return tuple(torch.stack(each) for each in zip(*results, strict=True))

    def _scan(self, body: CapturedGraph, carried: Any, scanned: Any, further: Any = ()) -> Any:
        number, results = len(carried), []
        for trip in range(len(scanned[0])):
            out = self.graph(body, (*carried, *(each[trip] for each in scanned), *further))
            carried = out[:number]
            results.append(out[number:])
        return (*carried, *(torch.stack(each) for each in zip(*results, strict=True)))


def resolve(
    totals: Totals, regions: Sequence[RegionCall], tree: ModuleTree, *, traffic: bool = True
) -> Resolved:
    """Count the graphs, whose calls have a separate row each, and put them in the place of those of their operators that were seen."""
    outside, inside = _divided(totals)
    resolved = Resolved(outside)
    unknown: Counter[str] = Counter()
    different: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number, call in enumerate(regions):
        seen = inside.pop(number, Totals())
        call.went_backward |= not call.is_one_node and any(
            phase == "backward" for _, _, phase, _ in seen.op_counts
        )
        resolved.is_memory_known &= call.sees_all
        try:
            found, calls = count_graph(call, tree, traffic=traffic)
        except UncountableError as error:
            resolved.totals.merge(_as_seen(seen, call))
            if not call.sees_all:
                unknown[str(error)] += 1
            continue
        at = call.phase
        if at != "forward":
            found = found.moved(
                lambda row, phase, at=at: (row, at if phase == "forward" else phase)  # type: ignore[misc]
            )
        macs, most = _macs(seen, of_backward=False), _macs(found, of_backward=False)
        if call.sees_all and macs != most:
            resolved.totals.merge(_as_seen(seen, call))
            continue
        if macs > most:
            different[call.row][0] += macs
            different[call.row][1] += most
        else:
            _add_recompute(found, seen, call.row)
        resolved.totals.merge(found)
        if call.phase == "forward":
            resolved.calls.update(calls)
    for rest in inside.values():
        resolved.totals.merge(_as_seen(rest, None))
    resolved.notes += [
        Note(code="compiled_unsupported", subject=why, values={"calls": calls})
        for why, calls in unknown.items()
    ]
    for row, (macs, most) in different.items():
        resolved.notes.append(
            Note(code="compiled_differs", subject=row, values={"seen": macs, "counted": most})
        )
    return resolved


def _divided(totals: Totals) -> tuple[Totals, dict[int, Totals]]:
    """Divide the sums: what was seen outside of compiled graphs, and in each call of one."""
    outside = Totals()
    inside: defaultdict[int, Totals] = defaultdict(Totals)

    def part_of(row: str, phase: Phase) -> tuple[Totals, str, Phase]:
        number = number_of_region(row)
        return outside if number is None else inside[number], row, phase

    outside.merge_without_modules(totals)
    totals.add_to(part_of)
    return outside, dict(inside)


def _as_seen(seen: Totals, call: RegionCall | None) -> Totals:
    """Count what was seen of a graph, in the row that called it. What was not seen is listed."""
    found = seen.moved(lambda row, phase: (row_of_region(row), phase))
    if call is not None and not call.sees_all:
        for phase in (call.phase, "backward") if call.went_backward else (call.phase,):
            found.unsupported[call.row, COMPILED, phase].add(Transfers(1, call.bytes))
    return found


def _add_recompute(found: Totals, seen: Totals, row: str) -> None:
    """Add the products that ran in backward, and that are not in the graph.

    Compiled code computes them again.
    """
    macs = _macs(seen, of_backward=True) - _macs(found, of_backward=True)
    if macs > 0:
        dtypes = Counter[Any]()
        for (_, _, phase, dtype), counts in seen.op_counts.items():
            dtypes[dtype] += counts.macs if phase in PHASES_OF_BACKWARD else 0
        cell = found.op_counts[row, COMPILED, "recompute", dtypes.most_common(1)[0][0]]
        cell.add(Counts(calls=1, macs=macs, executed_macs=macs, flops=2 * macs))


def _macs(totals: Totals, *, of_backward: bool) -> int:
    return sum(
        counts.macs
        for (_, _, phase, _), counts in totals.op_counts.items()
        if (phase in PHASES_OF_BACKWARD) == of_backward
    )
