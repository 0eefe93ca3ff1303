"""What the operators of a pass add up to, by row and phase, from all threads."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lflops.collect.attribution.module_tracker import ModuleTracker
from lflops.collect.counting.collectives import collective_of
from lflops.collect.counting.live_memory import LiveMemory
from lflops.collect.counting.operators import FOREACH, Kind, Operator, first_tensor
from lflops.collect.counting.optimizer_owners import StepOwners
from lflops.collect.counting.partial_tensors import PartialTensors
from lflops.collect.counting.sharded_ops import unsharded_cost
from lflops.collect.counting.totals import Totals
from lflops.collect.counting.traffic import bytes_moved, size, tensors_of
from lflops.collect.inputs.tensors import tensors_in
from lflops.profile.records import ModulePhase, Phase

__all__ = ["Call", "Extent", "OperatorAccumulator"]

FUSED = "_fused_"
COLLECTIVE, UNCOUNTED = Kind.COLLECTIVE, Kind.UNCOUNTED
"""By names of this module: an enumeration takes its time to give one of its own, and every operator asks."""


class ThreadTotals(threading.local):
    """This thread's sums; and on what kind of device an operator on tensors that are spread over ranks is running, if one is."""

    def __init__(self) -> None:
        """Begin a thread with none."""
        self.tally: Totals | None = None
        self.spread: str | None = None


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


class OperatorAccumulator:
    """Collects what operators do, by row and phase, from all threads, as the modes on their stacks tell of them.

    Args:
        scopes: Tells which row and phase is running.
        extent: What to collect.

    Attributes:
        parts: The plain tensors that are only parts of what the model works on.
    """

    def __init__(self, scopes: ModuleTracker, extent: Extent) -> None:
        """Begin with nothing."""
        self.scopes = scopes
        self.memory = LiveMemory(extent.round_to) if extent.memory else None
        self.fake = extent.fake
        self._traffic = extent.traffic
        self._local = ThreadTotals()
        self._tallies: list[Totals] = []
        self._step: StepOwners | None = None
        self._optimizers: dict[int, Optimizer] = {}
        self.parts = PartialTensors(scopes.tree)

    def total(self) -> Totals:
        """The sums of all threads."""
        total = Totals()
        for tally in self._tallies:
            total.merge(tally)
        return total

    def optimizer_state(self) -> Iterator[Tensor]:
        """The state of every optimizer that made a step."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                yield from tensors_in(state)

    @property
    def is_within_spread(self) -> bool:
        """Whether an operator on tensors that are spread over ranks is running on this thread."""
        return self._local.spread is not None

    def works_out_shapes(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator within one on tensors that are spread over ranks is no part of it, but asks what its parts will look like."""
        if self._local.spread in (None, "meta"):
            return False
        on = [tensor.device for tensor in tensors_of((*args, *kwargs.values()))] or [torch.device(kwargs.get("device") or "cpu")]
        return any(device.type == "meta" for device in on)

    def run_spread(self, operator: Operator, function: Any, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors that are spread over ranks: what it runs here is local work, its own shapes tell the whole."""
        mine, local, (row, phase) = self._tally(), self._local, self.scopes.current(args)
        self.parts.note((*args, *kwargs.values()))
        part = local.tally = Totals()
        local.spread = tensors_of((*args, *kwargs.values()))[0].device.type
        try:
            out = run()
        finally:
            local.tally, local.spread = mine, None
            mine.merge(part)
        self.parts.note(out)
        mine.tell_whole(part, ModulePhase(self.owner(row, phase), phase), unsharded_cost(operator, function, args, kwargs, out))
        return out

    def _tally(self) -> Totals:
        tally = self._local.tally
        if tally is None:
            tally = self._local.tally = Totals()
            self._tallies.append(tally)
        return tally

    def record(self, call: Call) -> None:
        """Add one call."""
        tally = self._tally()
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

    def _add(self, tally: Totals, call: Call, row: str) -> None:
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
        if cost.macs and self.parts.awake and not self._local.spread and self.parts.among((args, kwargs)):
            tally.whole_is_unknown(row, phase, cost)

    def _add_step(self, tally: Totals, call: Call) -> None:
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


def _add_uncounted(tally: Totals, call: Call) -> None:
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
