"""Add up the work of operators (MACs, FLOPs and bytes) on all threads, by module and phase.

A phase is a part of a step, such as forward or backward. The work of the optimizer's step is added
to the module that owns the updated parameter.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lflops.attribution.module_tracker import ModuleTracker
from lflops.attribution.python_stack import in_communication_hook
from lflops.error_guard import Guard, unguarded
from lflops.flop_counter.attention_masks import masked_scores
from lflops.flop_counter.compiled_regions import CompiledRegions
from lflops.flop_counter.live_memory import AllocationLog, LiveMemory, Survivors
from lflops.flop_counter.memory_record import LONGEST_TIMELINE, MemoryRecord
from lflops.flop_counter.operators import Kind, KnownCost, Operator, first_tensor
from lflops.flop_counter.optimizer_owners import StepOwners
from lflops.flop_counter.sharded_tensors import PartialTensors, logical_cost
from lflops.flop_counter.totals import DenseMasks, Totals, Transfers
from lflops.flop_counter.traffic import bytes_moved, collective_of, is_deferred, size, tensors_of
from lflops.inputs.batch_size import Lookup, lookup_of
from lflops.inputs.tensors import tensors_in
from lflops.profile.records import ModulePhase, Phase
from lflops.torch_private.autograd import current_node, node_name
from lflops.torch_private.tensors import PLAIN, FakeTensor

WHOLLY_OPERATORS = frozenset(
    {
        "torch_nn::_linear_cross_entropy_batch_chunked",
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    }
)
"""Operators that do all their work by calling other operators.

If these other operators are counted, no work is missing. So the profile needs no note about the
call.
"""

REPEATED_IN_BACKWARD = frozenset({"torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"})
"""Operators that run the matmuls of their forward pass again in backward.

The results of these matmuls are too large to keep until backward.
"""

STRIDES = object()
"""A marker that `_signature` puts before the strides of a tensor that is not contiguous.

`_signature` returns the key under which the cost of a call is cached.
"""

SHAPED = frozenset((*PLAIN, FakeTensor))
"""Tensor classes for which shape, dtype and strides are enough to determine a call's cost."""

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
"""Classes of arguments, other than tensors, that the key from `_signature` can contain."""

EMBEDDING = "embedding"
"""The name of the operator that looks up the embeddings of ids in a table."""

MOST_KNOWN_COSTS = 1_000
"""Maximum number of costs that are cached for one operator.

Without a limit, the cache would grow without end if shapes change in every step of a training run.
"""

CallArgs = tuple[Any, Any, Any]
"""The positional arguments, the keyword arguments and the result of a finished call."""

COUNTED = Kind.COUNTED
COLLECTIVE = Kind.COLLECTIVE
UNSUPPORTED = Kind.UNSUPPORTED
"""`COUNTED`, `COLLECTIVE` and `UNSUPPORTED` are aliases of members of `Kind`.

Attribute access on an enumeration is slow, and this code runs for every operator.
"""


class ThreadTotals(threading.local):
    """The running sums of the current thread.

    Attributes:
        totals: The sums, or `None` if the thread has not recorded anything yet.
        sharded_on: If an operator on sharded tensors is running, the device type of its tensors,
            for example `cuda`. Otherwise `None`.
        matmuls: How often the running operator has called each matmul, keyed by the matmul's name
            and shapes. `None` if the running operator does not repeat its matmuls in backward.
    """

    def __init__(self) -> None:
        self.totals: Totals | None = None
        self.sharded_on: str | None = None
        self.matmuls: Counter[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CountOptions:
    """Data to collect in addition to MACs and FLOPs, which are always counted.

    Attributes:
        traffic: Whether to count the bytes that operators move.
        memory: Whether to record when the memory of tensors is allocated and freed.
        fake: Whether the counted operators run on fake tensors. If false, an operator on fake
            tensors only infers shapes and is not counted.
        round_to: The size of each tensor is rounded up to a multiple of this number of bytes.
        log: Receives each allocation and each free of memory, in the order in which they happen.
            `None` if no caller needs the log.
        moments: Maximum number of operators in the memory timeline. In a longer timeline, operators
            are dropped, but the highest and lowest points are kept.
        gradients: The gradient buckets of DDP, which belong to no module. They are part of the live
            memory from the start.
        scratch: Whether to add the scratch memory of CPU kernels. Pass false if fake tensors on the
            CPU represent tensors on another device, because its kernels need other scratch memory.
        survivors: The storages that were alive at the end of the previous step, or `None` if no
            caller needs them. After this step, the list contains the storages that are alive then.
        host: Tensors in host memory, which take no device memory.
        records: A list to which the count appends its `MemoryRecord`, or `None` if no caller needs
            the record.
    """

    traffic: bool = True
    memory: bool = True
    fake: bool = False
    round_to: int = 1
    log: AllocationLog | None = None
    moments: int = LONGEST_TIMELINE
    gradients: tuple[Tensor, ...] = ()
    scratch: bool = True
    survivors: Survivors | None = None
    host: tuple[Tensor, ...] = ()
    records: list[MemoryRecord] | None = None


class OperatorAccumulator:
    """Adds up the work of all operators, by module and phase.

    A dispatch mode on each thread reports the calls of operators to the accumulator.

    Attributes:
        scopes: Tracks which module and phase are running.
        guard: Keeps errors in the dispatch modes from reaching the code being counted.
        memory: Records allocations and frees, or `None` if they are not recorded.
        fake: Whether the counted operators run on fake tensors.
        scratch: Whether the scratch memory of CPU kernels is added.
        counts_traffic: Whether bytes are counted.
        regions: Records the calls of compiled graphs, or `None` if they are not recorded.
        partial_tensors: The plain tensors that hold one rank's part of a sharded tensor.
        lookups: The sizes and strides of the tensors of ids that embeddings received. By these, the
            input that contains the tokens is found.
    """

    def __init__(self, scopes: ModuleTracker, options: CountOptions) -> None:
        self.scopes = scopes
        self.guard: Guard = unguarded
        self.memory: LiveMemory | None = None
        if options.memory:
            self.memory = LiveMemory(
                options.round_to, options.log, options.moments, options.survivors, options.host
            )
            self.memory.hold(options.gradients, "gradients", "")
            if options.records is not None:
                options.records.append(self.memory.record)
        self.fake = options.fake
        self.scratch = options.scratch
        self.counts_traffic = options.traffic
        self.regions: CompiledRegions | None = None
        self.partial_tensors = PartialTensors(scopes.tree)
        self.lookups: set[Lookup] = set()
        self._local = ThreadTotals()
        self._threads: list[Totals] = []
        self._step: StepOwners | None = None
        self._optimizers: dict[int, Optimizer] = {}
        # The matmuls of forward that backward repeats, keyed by the operator that called them.
        self._repeated: dict[str, Counter[Any]] = {}

    def total(self) -> Totals:
        """Return the sums of all threads."""
        total = Totals()
        for totals in self._threads:
            total.merge(totals)
        return total

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that made a step, in the order of their first step."""
        return list(self._optimizers.values())

    def optimizer_state(self) -> Iterator[Tensor]:
        """Yield the state of every optimizer that made a step."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                yield from tensors_in(state)

    @property
    def in_sharded_operator(self) -> bool:
        """Return whether this thread is running an operator on sharded tensors."""
        return self._local.sharded_on is not None

    def infers_shapes(self, args: Any, kwargs: Any) -> bool:
        """Return whether DTensor makes this call only to infer the shape of a result.

        While an operator on sharded tensors runs, DTensor also calls operators on the meta device.
        These calls must not be counted.
        """
        if self._local.sharded_on in (None, "meta"):
            return False
        tensors = tensors_of((*args, *kwargs.values()))
        if not tensors:
            return torch.device(kwargs.get("device") or "cpu").type == "meta"
        return any(tensor.device.type == "meta" for tensor in tensors)

    def run_sharded(
        self, operator: Operator, function: Any, run: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """Run an operator on sharded tensors and count its local and logical work.

        The local work is the work of this rank: the sum over the operators that DTensor calls on
        this rank's parts of the tensors. The logical work is the work of one call on the whole
        (unsharded) tensors.
        """
        totals = self._totals()
        thread = self._local
        fqn, phase = self.scopes.current(args)
        values = (*args, *kwargs.values())
        self.partial_tensors.add_local_parts(values)
        local = Totals()
        thread.totals = local
        thread.sharded_on = tensors_of(values)[0].device.type
        try:
            out = run()
        finally:
            thread.totals = totals
            thread.sharded_on = None
            totals.merge(local)
        self.partial_tensors.add_local_parts(out)
        logical = logical_cost(operator, function, args, kwargs, out)
        totals.add_logical(local, ModulePhase(self.owner(fqn, phase), phase), logical)
        return out

    def run_inside(
        self,
        operator: Operator,
        place: tuple[str, Phase],
        run: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run an operator without a formula and count the operators that its kernel calls.

        `place` is the module and the phase of the operator. If the kernel calls only operators
        without arithmetic, such as copies, the operator itself is listed as unsupported.
        """
        totals = self._totals()
        thread = self._local
        name = operator.name
        outer_matmuls = thread.matmuls
        inside = Totals()
        thread.totals = inside
        matmuls: Counter[Any] | None = Counter() if name in REPEATED_IN_BACKWARD else None
        thread.matmuls = matmuls
        try:
            out = run()
        except BaseException:
            totals.merge(inside)
            raise
        finally:
            thread.matmuls = outer_matmuls
            thread.totals = totals
        if matmuls:
            self._repeated.setdefault(name, Counter()).update(matmuls)
        computes = any(counts.flops for counts in inside.op_counts.values())
        if computes or inside.unsupported:
            totals.merge(inside)
            if name not in WHOLLY_OPERATORS:
                totals.counted_inside[name] += 1
        else:
            _add_unsupported(totals, operator, *place, (args, kwargs, out))
        return out

    def _is_repeated(self, operator: Operator, args: Any) -> bool:
        """Return whether a matmul in backward repeats a matmul of forward.

        This is the case if the running autograd node belongs to an operator that repeats its
        matmuls in backward, and if that operator called a matmul with the same shapes in forward.
        Each matmul of forward counts as repeated only once.
        """
        node = current_node()
        if node is None:
            return False
        name = node_name(node)
        for outer, matmuls in self._repeated.items():
            if outer.replace("::", "_") in name:
                key = _shapes(operator, args)
                if not matmuls[key]:
                    return False
                matmuls[key] -= 1
                return True
        return False

    def _totals(self) -> Totals:
        totals = self._local.totals
        if totals is None:
            totals = Totals()
            self._local.totals = totals
            self._threads.append(totals)
        return totals

    def record(self, operator: Operator, fqn: str, phase: Phase, call: CallArgs) -> None:
        """Add a finished call of an operator to the sums."""
        totals = self._local.totals or self._totals()
        kind = operator.kind
        if phase == "optimizer" and kind is COUNTED:
            owners = self._step
            if owners is None or owners.optimizer is not self.scopes.stepping():
                owners = self._owners()
            args = call[0]
            if owners is None:
                self._add(totals, operator, fqn, phase, call)
            elif operator.is_foreach and args and isinstance(args[0], list):
                self._add_each(totals, operator, owners, call)
            else:
                self._add(totals, operator, owners.one(args), phase, call)
            return
        if (
            phase == "backward"
            and kind is not COLLECTIVE
            and self.scopes.writes_gradient()
            and in_communication_hook()
        ):
            fqn = ""
            phase = "other"
            totals.calls_in_hooks += 1
        if kind is COLLECTIVE:
            name, group, group_size, payload = collective_of(operator.name, *call)
            totals.collectives[fqn, phase, name, group, group_size].add(Transfers(1, payload))
            is_awaited_by_root = phase == "backward" and is_deferred(operator.name, *call[:2])
            self.wait("" if is_awaited_by_root else fqn, phase)
        elif kind is UNSUPPORTED:
            _add_unsupported(totals, operator, fqn, phase, call)
        else:
            self._step = None
            if operator.name == EMBEDDING:
                self.lookups.add(lookup_of(call[0][1]))
            self._add(totals, operator, fqn, phase, call)

    def wait(self, fqn: str, phase: Phase) -> None:
        """Record that ranks may wait for each other in a module and phase.

        In backward, the wait is also recorded for the model itself (the root module): a collective
        may start in a layer's backward, although the ranks wait for it only at the end of backward.
        """
        waits = self._totals().waits
        waits.add(ModulePhase(fqn, phase))
        if phase == "backward":
            waits.add(ModulePhase("", phase))

    def _add(  # noqa: C901, PLR0912 - helper functions would be slow
        self, totals: Totals, operator: Operator, fqn: str, phase: Phase, call: CallArgs
    ) -> None:
        args, kwargs, out = call
        known = None
        signature = None
        if operator.is_pure:
            traffic = self.counts_traffic
            # An in-place operator returns its first argument.
            values = args if args and out is args[0] else (*args, out)
            try:
                if operator.cost_depends_only_on_bytes and (
                    not kwargs or NUMBERS.issuperset(map(type, kwargs.values()))
                ):
                    signature = _sizes(traffic, values)
                elif kwargs:
                    values = (*args, *kwargs, *kwargs.values(), out)
                    signature = _signature([traffic], values, {})
                else:
                    signature = _signature([traffic], values, {})
                known = operator.costs.get(signature)
            except (RuntimeError, TypeError):
                # A nested tensor has no shape.
                signature = None
        try:
            cost, moved, dtype, is_simple = known or self._cost(operator, signature, call)
        except Exception as error:  # noqa: BLE001 - a user's formula must not end the run
            totals.failures[operator.name] = f"{type(error).__name__}: {error}"
            _add_unsupported(totals, operator, fqn, phase, call)
            return
        if is_simple:
            # This does the same as `Totals.add` in less time.
            counts = totals.op_counts[fqn, operator.name, phase, dtype]
            counts.calls += 1
            counts.flops += cost.other_flops
            counts.bytes_moved += moved
            return
        macs = cost.macs
        local = self._local
        if macs and local.matmuls is not None:
            local.matmuls[_shapes(operator, args)] += 1
        if macs and self._repeated and phase == "backward" and self._is_repeated(operator, args):
            phase = "recompute"
        totals.add((fqn, operator.name, phase, dtype), cost, moved)
        if cost.recompute is not None:
            totals.add((fqn, operator.name, "recompute", dtype), cost.recompute, 0)
        if cost.is_upper_bound:
            totals.upper_bounds[operator.name] += 1
        if macs and phase == "forward":
            scores = masked_scores(operator.name, args, kwargs)
            if scores is not None:
                totals.dense_masks[operator.name].add(DenseMasks(1, *scores))
        partial_tensors = self.partial_tensors
        if (
            macs
            and partial_tensors.active
            and not local.sharded_on
            and partial_tensors.in_any((args, kwargs))
        ):
            totals.add_unknown_logical(fqn, phase, cost)

    def _cost(self, operator: Operator, signature: Any, call: CallArgs) -> KnownCost:
        """Compute the cost of a call, and cache it for later calls with the same signature.

        A signature of `None` means that the cost of the call depends on more than the shapes and
        numbers among its arguments. In this case, the cost is not cached.
        """
        args, kwargs, out = call
        cost = operator.cost(args, kwargs, out)
        moved = 0
        if self.counts_traffic:
            moved = bytes_moved(operator, args, kwargs, out)
        dtype = _dtype(args, out) if cost.macs else _dtype(out, args)
        is_simple = not (cost.macs or cost.recompute is not None or cost.is_upper_bound)
        known = KnownCost(cost, moved, dtype, is_simple)
        if signature is not None:
            if len(operator.costs) >= MOST_KNOWN_COSTS:
                operator.costs.clear()
            operator.costs[signature] = known
        return known

    def _add_each(
        self, totals: Totals, operator: Operator, owners: StepOwners, call: CallArgs
    ) -> None:
        """Add the work of one optimizer call on lists of tensors, such as `_foreach_add_`.

        The work on each list element is added to the module that owns the element's parameter.
        """
        args, kwargs, out = call
        for index, owner in enumerate(owners.each(args[0], out)):
            one_args = [_element(value, index) for value in args]
            one_kwargs = {name: _element(value, index) for name, value in kwargs.items()}
            one_call = (one_args, one_kwargs, _element(out, index))
            self._add(totals, operator, owner, "optimizer", one_call)

    def follow_view(self, args: Any) -> None:
        """Assign the next operators of an optimizer's step to the module of a viewed tensor.

        Call this when an optimizer's step creates a view, for example of a parameter. The next
        operators work on this view.

        Args:
            args: The arguments of the operator that creates the view.
        """
        owners = self._owners()
        if owners is not None:
            owners.one(args)

    def follow_free_call(self, args: Any) -> None:
        """Assign the next operators of an optimizer's step to the module of a call without cost.

        Call this when an operator that costs nothing, such as `zeros_like`, runs in an optimizer's
        step. Its module is the module that owns its arguments. The assignment holds for the next
        operators if they receive only tensors with an unknown owner.

        Args:
            args: The arguments of the operator that costs nothing.
        """
        owners = self._owners()
        if owners is not None:
            owners.follow(args)

    def owner(self, fqn: str, phase: Phase) -> str:
        """Return the module that owns the results of the last operator.

        In an optimizer's step, this is the module of the updated parameter. In other phases, it is
        `fqn`, the module that called the operator.
        """
        return fqn if phase != "optimizer" or self._step is None else self._step.last

    def owners(self, results: Sequence[Tensor]) -> list[str]:
        """Return the module that owns each result of an operator on lists of tensors.

        In an optimizer's step, this is the module of the updated parameter. Otherwise, it is the
        root module (the empty name).
        """
        step = self._step
        if step is None:
            return [""] * len(results)
        return [step.owner_of(result) for result in results]

    def _owners(self) -> StepOwners | None:
        """Return the owners of the tensors in the running optimizer step.

        Return `None` if no optimizer step is running.

        Each step creates a new `StepOwners`, because each backward pass creates new gradients.
        """
        optimizer = self.scopes.stepping()
        step = self._step
        if step is not None and step.optimizer is optimizer:
            return step
        if optimizer is None:
            return None
        self._optimizers[id(optimizer)] = optimizer
        owners = StepOwners(optimizer, self.scopes.tree)
        if self.memory is not None:
            self.memory.relabel(owners.gradients(), "gradients")
            self.memory.add_earlier(owners.states(), "optimizer_state")
        self._step = owners
        return owners


def _signature(found: list[Any], values: Iterable[Any], places: dict[int, int]) -> tuple[Any, ...]:
    """Return a key under which the cost of a call is cached. Calls with the same key cost the same.

    The key contains the shapes, dtypes and strides of all tensors, and the values of all other
    arguments. If a tensor occurs again, the key contains only its number among the distinct tensors
    of the call. The key keeps no tensor alive.

    Args:
        found: The first elements of the key. This list is extended.
        values: The arguments and results of the call.
        places: The numbers of the distinct tensors seen so far, keyed by the tensors' ids.

    Raises:
        TypeError: A value has a class or a layout that may affect the cost in other ways.
    """
    for value in values:
        kind = type(value)
        if kind in SHAPED:
            place = places.get(id(value))
            if place is not None:
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
    """Return a cache key for a call whose cost depends only on the sizes of its tensors in bytes.

    The key contains the bytes and dtypes of contiguous tensors. Arguments of the classes in
    `NUMBERS` are left out. If there is any other argument, such as a tensor that is not contiguous,
    `_signature` computes the key instead.

    Args:
        first: The first element of the key.
        values: The arguments and results of the call.
    """
    found: list[Any] = [first]
    seen: list[int] = []
    for value in values:
        kind = type(value)
        if kind in SHAPED and value.is_contiguous():
            number = id(value)
            if number in seen:
                found.append(seen.index(number))
            else:
                seen.append(number)
                found += value.nbytes, value.dtype
        elif kind not in NUMBERS:
            return _signature([first], values, {})
    return tuple(found)


def _shapes(operator: Operator, args: Any) -> tuple[Any, ...]:
    """Return a key that identifies a matmul: the operator's name and the shapes of its tensors."""
    shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
    return (operator.name, *shapes)


def _add_unsupported(
    totals: Totals, operator: Operator, fqn: str, phase: Phase, call: CallArgs
) -> None:
    args, kwargs, out = call
    moved = sum(map(size, tensors_of((*args, *kwargs.values(), out))))
    totals.unsupported[fqn, operator.name, phase].add(Transfers(1, moved))


def _dtype(first: Any, second: Any) -> torch.dtype | None:
    """Return the dtype of the first tensor found in `first`, or else in `second`.

    The dtype of a matmul is the dtype of its arguments, so pass the arguments first. The dtype of
    any other operator is the dtype of its results, so pass the results first.
    """
    tensor = first_tensor((first, second))
    return None if tensor is None else tensor.dtype


def _element(value: Any, index: int) -> Any:
    """Return an argument of a call on lists of tensors, reduced to the list elements at `index`.

    A list of tensors is reduced to a list with only the tensor at `index`. Any other value is
    returned unchanged.
    """
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [value[index]] if index < len(value) else []
    return value
