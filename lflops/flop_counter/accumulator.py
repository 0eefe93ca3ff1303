"""Adds up what operators do, by row and phase, on all threads.

An optimizer's by the module whose parameter it works on.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lflops.attribution.module_tracker import ModuleTracker
from lflops.attribution.python_stack import in_communication_hook
from lflops.error_guard import Guard, unguarded
from lflops.flop_counter.compiled_regions import CompiledRegions
from lflops.flop_counter.live_memory import LONGEST_TIMELINE, AllocationLog, LiveMemory, Survivors
from lflops.flop_counter.operator_costs import masked_scores
from lflops.flop_counter.operators import (
    Kind,
    KnownCost,
    Operator,
    PartialTensors,
    first_tensor,
    logical_cost,
)
from lflops.flop_counter.totals import DenseMasks, Totals, Transfers
from lflops.flop_counter.traffic import bytes_moved, collective_of, is_deferred, size, tensors_of
from lflops.inputs.tensors import tensors_in
from lflops.model.module_tree import ModuleTree
from lflops.profile.records import ModulePhase, Phase
from lflops.torch_private.autograd import current_node, node_name
from lflops.torch_private.tensors import PLAIN, FakeTensor, local_part


class StepOwners:
    """The rows that own the tensors of one optimizer step.

    Parameters, gradients and state are known by identity. Intermediate results are not. A step goes
    through its parameters in order, one by one or as lists. So an unknown tensor has the row of the
    last known one, and an unknown list the rows of the last known list of its length.
    """

    def __init__(self, optimizer: Optimizer, tree: ModuleTree) -> None:
        self.optimizer = optimizer
        self._tree = tree
        self._rows: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._states = 0
        # the row of the last operator
        self.last = ""
        self._lists: dict[int, list[str]] = {}
        self._register()

    def gradients(self) -> Iterator[Tensor]:
        yield from (
            parameter.grad for parameter in self._parameters() if parameter.grad is not None
        )

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """The tensors of the optimizer's state, with the rows of their parameters."""
        for parameter in self._parameters():
            row = self._tree.owner(parameter)
            state = self.optimizer.state.get(parameter, {})
            for value in state.values() if isinstance(state, dict) else [state]:
                yield from (
                    (tensor, row)
                    for tensor in ([value] if isinstance(value, Tensor) else tensors_in(value))
                )

    def one(self, args: Any) -> str:
        """The row of an operator on single tensors."""
        for each in args:
            known = self._rows.get(id(each))
            if known is not None and known[0]() is each:
                self.last = known[1]
                return known[1]
        if len(self.optimizer.state) != self._states and any(
            isinstance(each, Tensor) for each in args
        ):
            # the first step makes the state
            self._register()
            return self.one(args)
        for each in args:
            if isinstance(each, list | tuple):
                return self.one(each)
        return self.last

    def each(self, tensors: list[Tensor], results: Any) -> list[str]:
        """The rows of an operator on lists, element by element. Its results get the same rows."""
        rows = [self._row(each) for each in tensors]
        known = self._lists.get(len(rows), [self.last] * len(rows))
        rows_or_last = [
            row if row is not None else before for row, before in zip(rows, known, strict=True)
        ]
        if any(row is not None for row in rows):
            self._lists[len(rows)] = rows_or_last
        for result, row in zip(results or (), rows_or_last, strict=False):
            if isinstance(result, Tensor):
                self._add(result, row)
        return rows_or_last

    def _known(self, value: Any) -> str | None:
        """The row of a tensor.

        An id is valid only as long as its tensor is alive, and this keeps none alive.
        """
        known = self._rows.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def _row(self, tensor: Tensor) -> str | None:
        if (known := self._known(tensor)) is None and len(self.optimizer.state) != self._states:
            # the first step makes the state
            self._register()
            known = self._known(tensor)
        return known

    def _register(self) -> None:
        self._states = len(self.optimizer.state)
        for parameter in self._parameters():
            row = self._tree.owner(parameter)
            self._add(parameter, row)
            if parameter.grad is not None:
                self._add(parameter.grad, row)
        for tensor, row in self.states():
            self._add(tensor, row)

    def _add(self, tensor: Tensor, row: str) -> None:
        local = (
            tensor if type(tensor) in PLAIN else local_part(tensor)
            # the tensor that operators see
        )
        known = self._rows.get(id(local))
        if known is None or known[0]() is not local:
            self._rows[id(local)] = (weakref.ref(local), row)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


WHOLLY_OPERATORS = frozenset(
    f"torch_nn::_linear_cross_entropy_batch_chunked{kind}" for kind in ("", "_no_reduction")
)
"""Operators that are known to compute nothing but by the operators inside of them."""
REPEATED_IN_BACKWARD = frozenset({"torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"})
"""Operators whose backward makes forward's products again, because those are too large to be kept."""
# in a call's signature: strides follow
STRIDES = object()
SHAPED = frozenset(
    (*PLAIN, FakeTensor)
    # classes of tensors that have nothing but a shape that a cost may depend on
)
NUMBERS = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
"""Classes of all other arguments that calls of one cost may have."""


Given = tuple[
    Any, Any, Any
    # the arguments of a finished call, its keyword arguments, and what it returned
]

COUNTED, COLLECTIVE, UNCOUNTED = Kind.COUNTED, Kind.COLLECTIVE, Kind.UNCOUNTED
"""Aliases, because looking a member up on an enumeration is slow, and every operator asks."""


class ThreadTotals(threading.local):
    """This thread's sums; the device type of the sharded operator that it is running, if any.

    And the products to be repeated, if any.
    """

    def __init__(self) -> None:
        self.totals: Totals | None = None
        self.sharded_on: str | None = None
        self.products: Counter[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What to collect besides MACs and FLOPs, which are always counted."""

    traffic: bool = True
    memory: bool = True
    # Whether the counted operators run on fake tensors. If not, fake tensors are someone's shape
    # inference, and not counted.
    fake: bool = False
    # the size of each tensor is rounded up to a multiple of so many bytes
    round_to: int = 1
    # where allocations and frees are written in their order
    log: AllocationLog | None = None
    # the most operators of the memory's timeline; of more the extremes are kept
    moments: int = LONGEST_TIMELINE
    # memory for gradients that no module holds
    gradients: tuple[Tensor, ...] = ()
    # Whether the CPU's kernels run, whose scratch memory is known: it is not if fake tensors stand
    # for another device's
    scratch: bool = True
    # Storages that the last step left, and that the next one begins with. Without a list, none are
    # looked for.
    survivors: Survivors | None = None
    # tensors in the host's memory, which the device does not hold
    host: tuple[Tensor, ...] = ()


class OperatorAccumulator:
    """Adds up the calls that the dispatch modes of all threads report, by row and phase."""

    def __init__(self, scopes: ModuleTracker, extent: Extent) -> None:
        # knows which row and phase is running
        self.scopes = scopes
        # keeps errors of the modes from the code that they count
        self.guard: Guard = unguarded
        self.memory = (
            LiveMemory(extent.round_to, extent.log, extent.moments, extent.survivors, extent.host)
            if extent.memory
            else None
        )
        if self.memory is not None:
            self.memory.hold(extent.gradients, "gradients", "")
        self.fake, self.scratch = extent.fake, extent.scratch
        # whether bytes are counted
        self.counts_traffic = extent.traffic
        self._local = ThreadTotals()
        self._threads: list[Totals] = []
        self._step: StepOwners | None = None
        self._optimizers: dict[int, Optimizer] = {}
        self._repeated: dict[
            str, Counter[Any]
            # operator to products that its backward makes again
        ] = {}
        self.regions: CompiledRegions | None = (
            # the calls of compiled graphs, where these are written down
            None
        )
        self.partial_tensors = PartialTensors(
            scopes.tree
            # the plain tensors that are parts of sharded ones
        )

    def total(self) -> Totals:
        total = Totals()
        for totals in self._threads:
            total.merge(totals)
        return total

    def optimizer_state(self) -> Iterator[Tensor]:
        """The state of every optimizer that made a step."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                yield from tensors_in(state)

    @property
    def in_sharded_operator(self) -> bool:
        return self._local.sharded_on is not None

    def infers_shapes(self, args: Any, kwargs: Any) -> bool:
        """Whether a call inside a sharded operator only infers the shapes of the local parts, on the meta device."""
        if self._local.sharded_on in (None, "meta"):
            return False
        devices = [tensor.device for tensor in tensors_of((*args, *kwargs.values()))] or [
            torch.device(kwargs.get("device") or "cpu")
        ]
        return any(device.type == "meta" for device in devices)

    def run_sharded(
        self, operator: Operator, function: Any, run: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """Run an operator on sharded tensors.

        The operators inside it are the local work, its own shapes give the logical work.
        """
        totals, thread, (row, phase) = self._totals(), self._local, self.scopes.current(args)
        self.partial_tensors.add_local_parts((*args, *kwargs.values()))
        local = thread.totals = Totals()
        thread.sharded_on = tensors_of((*args, *kwargs.values()))[0].device.type
        try:
            out = run()
        finally:
            thread.totals, thread.sharded_on = totals, None
            totals.merge(local)
        self.partial_tensors.add_local_parts(out)
        totals.add_logical(
            local,
            ModulePhase(self.owner(row, phase), phase),
            logical_cost(operator, function, args, kwargs, out),
        )
        return out

    def run_inside(
        self,
        operator: Operator,
        place: tuple[str, Phase],
        run: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run an operator without a formula whose kernel calls others: these are counted.

        If none of them computes, it is unsupported.
        """
        totals, thread, name = self._totals(), self._local, operator.name
        inside = thread.totals = Totals()
        outer, thread.products = (
            thread.products,
            Counter() if name in REPEATED_IN_BACKWARD else None,
        )
        try:
            out = run()
        except BaseException:
            totals.merge(inside)
            raise
        finally:
            products, thread.products, thread.totals = thread.products, outer, totals
        if products:
            self._repeated.setdefault(name, Counter()).update(products)
        if inside.unsupported or any(counts.flops for counts in inside.op_counts.values()):
            totals.merge(inside)
            totals.counted_inside[name] += name not in WHOLLY_OPERATORS
        else:
            _add_unsupported(totals, operator, *place, (args, kwargs, out))
        return out

    def _is_repeated(self, operator: Operator, args: Any) -> bool:
        """Whether a product in backward is one that forward made inside of the operator whose gradient this is."""
        node = current_node()
        name = "" if node is None else node_name(node)
        products = next(
            (
                products
                for operator, products in self._repeated.items()
                if operator.replace("::", "_") in name
            ),
            None,
        )
        key = _shapes(operator, args)
        if not products or not products[key]:
            return False
        products[key] -= 1
        return True

    def _totals(self) -> Totals:
        totals = self._local.totals
        if totals is None:
            totals = self._local.totals = Totals()
            self._threads.append(totals)
        return totals

    def record(self, operator: Operator, row: str, phase: Phase, given: Given) -> None:
        totals, kind = self._local.totals or self._totals(), operator.kind
        if phase == "optimizer" and kind is COUNTED:
            if (owners := self._step) is None or owners.optimizer is not self.scopes.stepping():
                owners = self._owners()
            if (
                owners is not None
                and operator.is_on_lists
                and given[0]
                and isinstance(given[0][0], list)
            ):
                self._add_each(totals, operator, owners, given)
            else:
                self._add(
                    totals, operator, row if owners is None else owners.one(given[0]), phase, given
                )
            return
        if (
            phase == "backward"
            and kind is not COLLECTIVE
            and self.scopes.writes_gradient()
            and in_communication_hook()
        ):
            row, phase = "", "other"
            totals.calls_in_hooks += 1
        if kind is COLLECTIVE:
            collective, group, group_size, payload = collective_of(operator.name, *given)
            totals.collectives[row, phase, collective, group, group_size].add(Transfers(1, payload))
            self.wait(
                "" if phase == "backward" and is_deferred(operator.name, *given[:2]) else row, phase
            )
        elif kind is UNCOUNTED:
            _add_unsupported(totals, operator, row, phase, given)
        else:
            self._step = None
            self._add(totals, operator, row, phase, given)

    def wait(self, row: str, phase: Phase) -> None:
        """Note that ranks wait for each other there.

        What backward begins may be awaited at its end, in the root.
        """
        waits = self._totals().waits
        waits.add(ModulePhase(row, phase))
        if phase == "backward":
            waits.add(ModulePhase("", phase))

    def _add(  # noqa: C901
        self, totals: Totals, operator: Operator, row: str, phase: Phase, given: Given
    ) -> None:
        known, key, (args, kwargs, out) = None, None, given
        if operator.is_pure:
            try:
                values = args if args and out is args[0] else (*args, out)
                if operator.is_by_size and (
                    not kwargs or NUMBERS.issuperset(map(type, kwargs.values()))
                ):
                    key = _sizes(self.counts_traffic, values)
                else:
                    key = _signature(
                        [self.counts_traffic],
                        (*args, *kwargs, *kwargs.values(), out) if kwargs else values,
                        {},
                    )
                known = operator.costs.get(key)
            except (RuntimeError, TypeError):
                # a nested tensor has no shape
                key = None
        try:
            cost, moved, dtype, is_all = known or self._cost(operator, key, given)
        except Exception as error:  # noqa: BLE001 - a user's formula must not stop the run that it counts
            totals.failures[operator.name] = f"{type(error).__name__}: {error}"
            _add_unsupported(totals, operator, row, phase, given)
            return
        # as `Totals.add` does, with fewer steps
        if is_all:
            cell = totals.op_counts[row, operator.name, phase, dtype]
            cell.calls += 1
            cell.flops += cost.other_flops
            cell.bytes_moved += moved
            return
        if cost.macs and self._local.products is not None:
            self._local.products[_shapes(operator, args)] += 1
        if (
            cost.macs
            and self._repeated
            and phase == "backward"
            and self._is_repeated(operator, args)
        ):
            phase = "recompute"
        totals.add((row, operator.name, phase, dtype), cost, moved)
        if cost.recompute is not None:
            totals.add((row, operator.name, "recompute", dtype), cost.recompute, 0)
        if cost.is_upper_bound:
            totals.upper_bounds[operator.name] += 1
        if (
            phase == "forward"
            and cost.macs
            and (scores := masked_scores(operator.name, args, kwargs)) is not None
        ):
            totals.dense_masks[operator.name].add(DenseMasks(1, *scores))
        if (
            cost.macs
            and self.partial_tensors.active
            and not self._local.sharded_on
            and self.partial_tensors.in_any((args, kwargs))
        ):
            totals.add_unknown_logical(row, phase, cost)

    def _cost(self, operator: Operator, key: Any, given: Given) -> KnownCost:
        """Compute what a call costs, and keep it for all of that key in this process.

        `None` is the key of one that has none like it.
        """
        args, kwargs, out = given
        cost = operator.cost(args, kwargs, out)
        moved = bytes_moved(operator, args, kwargs, out) if self.counts_traffic else 0
        dtype = _dtype(args, out) if cost.macs else _dtype(out, args)
        known = KnownCost(
            cost, moved, dtype, not (cost.macs or cost.recompute is not None or cost.is_upper_bound)
        )
        if key is not None:
            # a training may have ever new shapes
            if len(operator.costs) >= 1000:
                operator.costs.clear()
            operator.costs[key] = known
        return known

    def _add_each(
        self, totals: Totals, operator: Operator, owners: StepOwners, given: Given
    ) -> None:
        """Add a call on lists inside an optimizer's step, each element to the row that owns its parameter."""
        args, kwargs, out = given
        for index, owner in enumerate(owners.each(args[0], out)):
            part = [_element(each, index) for each in args]
            keywords = {name: _element(each, index) for name, each in kwargs.items()}
            self._add(totals, operator, owner, "optimizer", (part, keywords, _element(out, index)))

    def see_view(self, args: Any) -> None:
        """Note the owner of a view in an optimizer's step: the next operators work on it."""
        if (owners := self._owners()) is not None:
            owners.one(args)

    def owner(self, row: str, phase: Phase) -> str:
        """The row that owns the results of the last call.

        In an optimizer's step, that of the parameter.
        """
        return row if phase != "optimizer" or self._step is None else self._step.last

    def _owners(self) -> StepOwners | None:
        optimizer, step = self.scopes.stepping(), self._step
        if step is not None and step.optimizer is optimizer:
            return step
        if optimizer is None:
            return None
        self._optimizers[id(optimizer)] = optimizer
        owners = StepOwners(
            optimizer,
            self.scopes.tree,
            # anew for each step, because each backward makes new gradients
        )
        if self.memory is not None:
            self.memory.relabel(owners.gradients(), "gradients")
            self.memory.add_earlier(owners.states(), "optimizer_state")
        self._step = owners
        return owners


def _signature(found: list[Any], values: Iterable[Any], places: dict[int, int]) -> tuple[Any, ...]:
    """What equal calls have in common.

    The shapes of tensors, which of these are the same one, and all other values themselves.

    A `TypeError` for a value that may decide something else. None is kept alive.
    """
    for value in values:
        kind = type(value)
        if kind in SHAPED:
            if (place := places.get(id(value))) is not None:
                found.append(place)
                continue
            places[id(value)] = len(places)
            if value.is_contiguous():
                found += value.shape, value.dtype
            elif value.layout is torch.strided:
                found += value.shape, value.dtype, STRIDES, value.stride()
            else:
                raise TypeError(value.layout)
        elif kind in NUMBERS:
            found.append(value)
        elif kind is list or kind is tuple:
            found.append(_signature([], value, places))
        else:
            raise TypeError(kind)
    return tuple(found)


def _sizes(first: Any, values: Iterable[Any]) -> tuple[Any, ...]:
    """The same, for operators that are by size.

    Only the bytes of a tensor without gaps, and no other values.
    """
    found: list[Any] = [first]
    seen: list[int] = []
    for value in values:
        kind = type(value)
        if kind in SHAPED and value.is_contiguous():
            if (number := id(value)) not in seen:
                seen.append(number)
                found += value.nbytes, value.dtype
            else:
                found.append(seen.index(number))
        elif kind not in NUMBERS:
            return _signature([first], values, {})
    return tuple(found)


def _shapes(operator: Operator, args: Any) -> tuple[Any, ...]:
    """What two calls have in common that make the same product."""
    return (operator.name, *(tuple(each.shape) for each in args if isinstance(each, Tensor)))


def _add_unsupported(
    totals: Totals, operator: Operator, row: str, phase: Phase, given: Given
) -> None:
    args, kwargs, out = given
    moved = sum(map(size, tensors_of((*args, *kwargs.values(), out))))
    totals.unsupported[row, operator.name, phase].add(Transfers(1, moved))


def _dtype(first: Any, second: Any) -> torch.dtype | None:
    """The dtype of the first tensor.

    Pass the operands of a contraction first, the results of any other operator.
    """
    tensor = first_tensor((first, second))
    return None if tensor is None else tensor.dtype


def _element(value: Any, index: int) -> Any:
    """The list with one parameter's tensor, of a list of tensors; any other value itself."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [value[index]] if index < len(value) else []
    return value
