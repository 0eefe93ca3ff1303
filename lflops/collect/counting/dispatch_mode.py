"""The dispatch mode: every operator that runs on a thread passes through here once, above the kernels and below autograd."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lflops.collect.counting.accumulator import Call, OperatorAccumulator
from lflops.collect.counting.operators import Kind, Operator, known_operators
from lflops.collect.counting.sharded_ops import is_sharded
from lflops.collect.torch_private.dispatch_modes import TorchDispatchMode, pop_mode, push_mode, route_higher_order_operators
from lflops.collect.torch_private.operators import decompose, nested_kernel
from lflops.collect.torch_private.tensors import PLAIN, FakeTensor

__all__ = ["CountingMode", "OperatorCounter", "RealParameterError"]

FREE, DECOMPOSED = Kind.FREE, Kind.DECOMPOSED
"""By names of this module: an enumeration takes its time to give one of its own, and every operator asks."""


class RealParameterError(Exception):
    """A tensor that has memory and wants a gradient met a fake one: the gradient would be fake, and written to it."""


class OperatorCounter(OperatorAccumulator):
    """Adds up what modes on the threads' stacks tell it of."""

    def follow(self) -> Callable[[], None]:
        """Count on this thread too, until what is returned is called."""
        mode = CountingMode(self)
        push_mode(mode)
        return lambda: pop_mode(mode)


class CountingMode(TorchDispatchMode):
    """Feeds a counter. Each thread that is counted has one of its own."""

    supports_higher_order_operators = True  # torch 2.8 does not ask: `route_higher_order_operators`

    def __init__(self, counter: OperatorAccumulator) -> None:
        """Belong to a counter."""
        super().__init__()  # type: ignore[no-untyped-call]
        route_higher_order_operators(type(self))
        self._counter = counter
        self._scopes = counter.scopes
        self._memory = counter.memory
        self._parts = counter.parts
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
                # A wrapper: what it does with the tensors inside is what runs here.
                return self._run_spread(function, args, kwargs) if any(map(is_sharded, types)) else NotImplemented
        if self._fake:
            _refuse_real_parameters(args)
        if self._parts.awake and self._counter.works_out_shapes(args, kwargs):
            return function(*args, **kwargs)
        known = self._operators.get(id(function))  # its own hash is written in Python
        if known is None:
            known = self._learn(function)
        operator = known[1]
        if operator.kind is DECOMPOSED or (operator.has_nested_kernel and nested_kernel(function, args)):
            push_mode(self)
            try:
                return decompose(function, args, kwargs)
            finally:
                pop_mode(self)
        return self._run(operator, function, args, kwargs)

    def _learn(self, function: Any) -> tuple[Any, Operator]:
        known = self._operators[id(function)] = (function, Operator(function))
        return known

    def _run_spread(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors that are spread over ranks, which comes here again and is then left to them."""
        operator = (self._operators.get(id(function)) or self._learn(function))[1]
        if self._counter.is_within_spread:
            return NotImplemented

        def run() -> Any:
            push_mode(self)
            try:
                return function(*args, **kwargs)
            finally:
                pop_mode(self)

        return self._counter.run_spread(operator, function, run, args, kwargs)

    def _run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        row, phase = self._scopes.current(args)
        if operator.kind is FREE and not operator.makes_storage:
            if phase == "optimizer":
                self._counter.pass_by(args)
            return function(*args, **kwargs)
        if self._memory is not None:
            self._memory.before(operator.name, row, phase)
        out = function(*args, **kwargs)
        if self._parts.awake and not self._counter.is_within_spread:
            self._parts.follow(operator, row, args, kwargs, out)
        if operator.kind is not FREE:
            self._counter.record(Call(operator, row, phase, args, kwargs, out))
        if self._memory is not None and operator.makes_storage:
            self._memory.after(operator.name, self._counter.owner(row, phase), phase, out)
        return out


def _refuse_real_parameters(args: Any) -> None:
    """See that no tensor that wants a gradient has been left real; that others are does no harm.

    Raises:
        RealParameterError: One has.
    """
    for each in args:
        if type(each) in PLAIN and each.requires_grad:
            raise RealParameterError
        if isinstance(each, list):
            _refuse_real_parameters(each)
