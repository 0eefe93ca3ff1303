"""The dispatch mode: every operator that runs on a thread passes through here once, above the kernels and below autograd."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lflops.collect.counting.collectives import collective_of
from lflops.collect.counting.memory import LiveMemory
from lflops.collect.counting.operators import FOREACH, Kind, Operator, first_tensor, known_operators
from lflops.collect.counting.owners import StepOwners
from lflops.collect.counting.tally import Tally
from lflops.collect.counting.traffic import bytes_moved, size, tensors_of
from lflops.collect.refusals import refuse_real_parameters
from lflops.collect.scopes import Scopes
from lflops.collect.tensors import tensors_in
from lflops.collect.torch_compat import (
    FakeTensor,
    TorchDispatchMode,
    decompose,
    hear_of_higher_order,
    kernel_for_sequences,
    pop_mode,
    push_mode,
)
from lflops.observations import Phase

__all__ = ["CountingMode", "Extent", "OperatorCounter"]


FUSED = "_fused_"
FREE, COLLECTIVE, DECOMPOSED, UNCOUNTED = Kind.FREE, Kind.COLLECTIVE, Kind.DECOMPOSED, Kind.UNCOUNTED
"""By names of this module: an enumeration takes its time to give one of its own, and every operator asks."""
MODEL_PHASES = ("forward", "backward", "recompute")


class ThreadTally(threading.local):
    """This thread's sums."""

    def __init__(self) -> None:
        """Begin a thread with none."""
        self.tally: Tally | None = None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What to collect beside MACs and FLOPs, which are always counted.

    Attributes:
        fake: Whether fake tensors are what runs, rather than somebody's way to work out shapes.
        round_to: Bytes of which every tensor's memory is a whole number.
    """

    traffic: bool = True
    memory: bool = True
    fake: bool = False
    round_to: int = 1


class Call(NamedTuple):
    """One operator that has run."""

    operator: Operator
    row: str
    phase: Phase
    args: Any
    kwargs: Any
    out: Any


class OperatorCounter:
    """Collects what operators do, by row and phase, from all threads; `modes` on their stacks feed it.

    Args:
        scopes: Tells which row and phase is running.
        extent: What to collect.

    Attributes:
        sharded: Whether the model's own work is done on parts of its tensors, so that the whole cannot be read from it.
    """

    def __init__(self, scopes: Scopes, extent: Extent) -> None:
        """Begin with nothing."""
        self.scopes = scopes
        self.memory = LiveMemory(extent.round_to) if extent.memory else None
        self.fake = extent.fake
        self._traffic = extent.traffic
        self._local = ThreadTally()
        self._tallies: list[Tally] = []
        self._step: StepOwners | None = None
        self._optimizers: dict[int, Optimizer] = {}
        self.sharded = False

    def total(self) -> Tally:
        """The sums of all threads."""
        total = Tally()
        for tally in self._tallies:
            total.merge(tally)
        return total

    def optimizer_state(self) -> Iterator[Tensor]:
        """The state of every optimizer that made a step."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                yield from tensors_in(state)

    def follow(self) -> Callable[[], None]:
        """Count on this thread too, until what is returned is called."""
        mode = CountingMode(self)
        push_mode(mode)
        return lambda: pop_mode(mode)

    def note_wrapper(self, kind: type) -> None:
        """Note whether an operator on tensors that wrap others is one on parts of the model's."""
        if kind.__name__ == "DTensor" and not self.sharded:
            self.sharded = self.scopes.current()[1] in MODEL_PHASES

    def record(self, call: Call) -> None:
        """Add one call."""
        tally = self._local.tally
        if tally is None:
            tally = self._local.tally = Tally()
            self._tallies.append(tally)
        kind = call.operator.kind
        if kind is COLLECTIVE:
            collective, group, group_size, carried = collective_of(call.operator.name, call.args, call.kwargs, call.out)
            sums = tally.collectives[call.row, call.phase, collective, group, group_size]
            sums[0] += 1
            sums[1] += carried
        elif kind is UNCOUNTED:
            _add_uncounted(tally, call)
        elif call.phase == "optimizer":
            self._add_step(tally, call)
        else:
            self._step = None
            self._add(tally, call, call.row)

    def _add(self, tally: Tally, call: Call, row: str) -> None:
        operator, _, phase, args, kwargs, out = call
        try:
            cost = operator.cost(args, kwargs, out)
            moved = bytes_moved(operator, args, kwargs, out) if self._traffic else 0
        except Exception as error:  # noqa: BLE001 - a formula, a user's perhaps, must not stop the run that it is to count
            tally.failures[operator.name] = f"{type(error).__name__}: {error}"
            _add_uncounted(tally, call)
            return
        dtype = _dtype(args, out) if cost.macs else _dtype(out, args)
        tally.add((row, operator.name, phase, dtype), cost, moved)
        if cost.recompute is not None:
            tally.add((row, operator.name, "recompute", dtype), cost.recompute, 0)

    def _add_step(self, tally: Tally, call: Call) -> None:
        """Inside an optimizer's step the row is the owner of the parameter; an operator on lists is one on each element."""
        owners = self._owners()
        operator, _, phase, args, kwargs, out = call
        if owners is None:
            self._add(tally, call, call.row)
        elif args and isinstance(args[0], list) and operator.name.startswith((FOREACH, FUSED)):
            for place, row in enumerate(owners.each(args[0], out)):
                part = [_element(each, place) for each in args]
                keywords = {name: _element(each, place) for name, each in kwargs.items()}
                self._add(tally, Call(operator, row, phase, part, keywords, _element(out, place)), row)
        else:
            self._add(tally, call, owners.one(args))

    def pass_by(self, args: Any) -> None:
        """Note a view in an optimizer's step: what follows works on what it looks at."""
        owners = self._owners()
        if owners is not None:
            owners.one(args)

    def owner(self, row: str, phase: Phase) -> str:
        """Whose the results of the operator just added are: in an optimizer's step the parameter's."""
        return row if phase != "optimizer" or self._step is None else self._step.last

    def _owners(self) -> StepOwners | None:
        optimizer = self.scopes.steps.current
        if optimizer is not None and (self._step is None or self._step.optimizer is not optimizer):
            self._step = self._begin_step(optimizer)
        return None if optimizer is None else self._step

    def _begin_step(self, optimizer: Optimizer) -> StepOwners:
        """The gradients are what the last backward made, so they are looked up for each step."""
        self._optimizers[id(optimizer)] = optimizer
        owners = StepOwners(optimizer, self.scopes.tree)
        if self.memory is not None:
            self.memory.relabel(owners.gradients(), "gradients")
            self.memory.find(owners.states(), "optimizer_state")
        return owners


class CountingMode(TorchDispatchMode):
    """Feeds a counter. Each thread that is counted has one of its own."""

    supports_higher_order_operators = True  # torch 2.8 does not ask: `hear_of_higher_order`

    def __init__(self, counter: OperatorCounter) -> None:
        """Belong to a counter."""
        super().__init__()  # type: ignore[no-untyped-call]
        hear_of_higher_order(type(self))
        self._counter = counter
        self._scopes = counter.scopes
        self._memory = counter.memory
        self._fake = counter.fake
        self._operators = known_operators()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped in a frame that dynamo skips: that loads dynamo, and costs as much again on every operator."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and add what it did."""
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, FakeTensor):
                if not self._fake:
                    return function(*args, **kwargs)  # not a run, but somebody working out shapes
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                self._counter.note_wrapper(kind)
                return NotImplemented  # a wrapper: what it does with the tensors inside is what runs here
        if self._fake:
            refuse_real_parameters(args)
        known = self._operators.get(id(function))  # its own hash is written in Python
        if known is None:
            known = self._operators[id(function)] = (function, Operator(function))
        operator = known[1]
        if operator.kind is DECOMPOSED or (operator.takes_sequences and kernel_for_sequences(function, args)):
            push_mode(self)
            try:
                return decompose(function, args, kwargs)
            finally:
                pop_mode(self)
        return self._run(operator, function, args, kwargs)

    def _run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        row, phase = self._scopes.current(args)
        if operator.kind is FREE and not operator.makes_storage:
            if phase == "optimizer":
                self._counter.pass_by(args)
            return function(*args, **kwargs)
        if self._memory is not None:
            self._memory.before(operator.name, row, phase)
        out = function(*args, **kwargs)
        if operator.kind is not FREE:
            self._counter.record(Call(operator, row, phase, args, kwargs, out))
        if self._memory is not None and operator.makes_storage:
            self._memory.after(operator.name, self._counter.owner(row, phase), phase, out)
        return out


def _add_uncounted(tally: Tally, call: Call) -> None:
    sums = tally.uncounted[call.row, call.operator.name, call.phase]
    sums[0] += 1
    sums[1] += sum(map(size, tensors_of((*call.args, *call.kwargs.values(), call.out))))


def _dtype(first: Any, second: Any) -> torch.dtype | None:
    """Of the first tensor: a contraction's operands come first, other operators' results."""
    tensor = first if isinstance(first, Tensor) else first_tensor((first, second))
    return None if tensor is None else tensor.dtype


def _element(value: Any, place: int) -> Any:
    """The part of a list of tensors that is one parameter's, kept a list."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [value[place]] if place < len(value) else []
    return value
