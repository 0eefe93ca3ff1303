"""The dispatch mode: it sees every operator that runs on its thread once, below autograd and above the kernels."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lflops.collect.attribution.python_stack import sums_gradients
from lflops.collect.counting.accumulator import Given, OperatorAccumulator
from lflops.collect.counting.compiled_regions import row_of_region
from lflops.collect.counting.cpu_kernels import SCRATCH
from lflops.collect.counting.live_memory import LiveMemory
from lflops.collect.counting.operators import Kind, Operator, is_sharded, known_operators
from lflops.collect.counting.traffic import tensors_of
from lflops.collect.torch_private.dispatch_modes import OwnMode, end_mode, is_tracing, on_stack, push_mode, route_higher_order_operators
from lflops.collect.torch_private.modules import never_compiled
from lflops.collect.torch_private.operators import call_without_overrides, decompose, nested_kernel, python_kernel, run_kernel
from lflops.collect.torch_private.tensors import NEEDS_VALUES, PLAIN, FakeTensor, has_torch_function, is_overridden, without_overrides
from lflops.profile.records import Phase

FREE, DECOMPOSED, UNCOUNTED = Kind.FREE, Kind.DECOMPOSED, Kind.UNCOUNTED
"""Aliases, because looking a member up on an enumeration is slow, and every operator asks."""

DECIDES = frozenset({"cond", "while_loop", "while_loop_stack_output"})  # those of which values decide what they call, and how often
CONSTRUCTS = "empty"  # the operator by which a tensor's constructor gets memory
ADD = "add"  # the operator by which autograd adds up the gradients of a tensor that is used more than once


class RealParameterError(Exception):
    """An operator took a real parameter and a fake tensor: its fake gradient would be written to the real parameter."""


class OperatorCounter(OperatorAccumulator):
    """An accumulator that puts a dispatch mode on a thread."""

    def mode(self) -> "CountingMode":
        """A mode that counts on the thread that it is put on."""
        return CountingMode(self)

    def follow(self) -> Callable[[], None]:
        """Count on this thread too; call the returned function to end that."""
        mode = self.mode()
        push_mode(mode)
        return lambda: end_mode(mode)


class CountingMode(OwnMode):
    """Reports the operators of one thread to an accumulator."""

    supports_higher_order_operators = True  # torch 2.8 does not ask: `route_higher_order_operators`

    def __init__(self, counter: OperatorAccumulator) -> None:
        super().__init__()
        route_higher_order_operators(type(self))
        never_compiled(type(self).__torch_dispatch__)
        self._counter = counter
        self._scopes = counter.scopes
        self._current, self._current_of_view = counter.scopes.current, counter.scopes.current_of_view
        self._memory = counter.memory
        self._partial_tensors = counter.partial_tensors
        self._fake = counter.fake
        self._operators = known_operators()
        self._calls_of_regions = () if counter.regions is None else counter.regions.calls
        self.is_off = False
        self._fail = counter.guard(_raise)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile and run under the mode as without it."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0911 - a call costs
        kwargs = kwargs or {}
        if self.is_off:
            return function(*args, **kwargs)
        for kind in types:
            if issubclass(kind, FakeTensor):
                if not self._fake:
                    return function(*args, **kwargs)  # somebody's shape inference
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                # A wrapper class: the operators on the tensors inside of it are the ones that run.
                return self._run_sharded(function, args, kwargs) if any(map(is_sharded, types)) else NotImplemented
        if self._fake:
            _refuse_real_parameters(args)
        if (self._fake and is_tracing()) or (self._partial_tensors.active and self._counter.infers_shapes(args, kwargs)):
            return function(*args, **kwargs)
        known = self._operators.get(id(function))  # its own hash is written in Python
        operator = known[1] if known is not None else self._new_operator(function)
        if operator.runs_as_it_is and not (operator.has_nested_kernel and nested_kernel(function, args)):
            if has_torch_function(args) or (operator.takes_lists and is_overridden(args)):
                return self._run_overridden(operator, function, args, kwargs)
            return self._run(operator, operator.run, args, kwargs)
        return self._run_otherwise(operator, function, args, kwargs)

    def _new_operator(self, function: Any) -> Operator:
        self._operators[id(function)] = (function, operator := Operator(function))
        return operator

    def _run_otherwise(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may have others within it: these are seen."""
        if operator.is_control_flow and not self._fake and not is_tracing():
            return self._run_control_flow(function, args, kwargs)
        if operator.kind is DECOMPOSED or (operator.has_nested_kernel and nested_kernel(function, args)):
            with on_stack(self):
                return decompose(function, args, kwargs)
        with without_overrides():
            kernel = python_kernel(function, args, kwargs) if operator.kind is UNCOUNTED else None
        if kernel is None and is_overridden(args):
            return self._run_overridden(operator, function, args, kwargs)
        return self._run(operator, function, args, kwargs, kernel)

    def see_function(self, operator: Operator, args: Any, kwargs: Any, out: Any, *, again_in_backward: bool) -> None:
        """Report a function of a package that ran on this thread, and that shows no operator."""
        row, phase = self._scopes.current(args)
        if phase == "backward" and again_in_backward:
            phase = "recompute"
        self._counter.record(operator, row, phase, (args, kwargs, out))

    def see_constructed(self, args: tuple[Any, ...], tensor: Any) -> None:
        """Report the memory of a tensor that a subclass's constructor made. An alias of another tensor has no new memory."""
        memory = self._memory
        if memory is None or self.is_off or any(isinstance(each, Tensor) for each in args):
            return
        try:
            with without_overrides():
                row, phase = self._scopes.current()
                memory.before(CONSTRUCTS, row, phase)
                memory.after(CONSTRUCTS, row, phase, tensor)
        except BaseException as error:  # noqa: BLE001 - the guard raises it, or has ended the count
            self._fail(error)

    def _run_sharded(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on sharded tensors. It arrives a second time, and is then left to DTensor."""
        if self._counter.in_sharded_operator:
            return NotImplemented
        known = self._operators.get(id(function))
        operator = known[1] if known is not None else self._new_operator(function)

        def run() -> Any:
            with on_stack(self):
                return function(*args, **kwargs)

        return self._counter.run_sharded(operator, function, run, args, kwargs)

    def _run_control_flow(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run `torch.cond` or a loop, and see the operators of what it calls."""
        row, phase = self._scopes.current(args)
        regions = self._counter.regions
        place = None if regions is None or function.name() not in DECIDES else regions.decide(row, phase)
        calls: Counter[int] = Counter()

        def seen(part: Any, number: int) -> Any:
            def run(*operands: Any) -> Any:
                calls[number] += 1
                with on_stack(self):
                    return part(*operands)

            return run

        out = function(*(seen(each, number) if callable(each) else each for number, each in enumerate(args)), **kwargs)
        if regions is not None:  # of a condition and two branches the second is the one for yes; of a loop it is the body
            regions.decided(row, place, calls[1])
        return out

    def _run_overridden(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose arguments have a `__torch_function__`: without a count, it is not called for operators."""
        call = call_without_overrides(function)
        with without_overrides():
            return self._run(operator, call, args, kwargs)

    def _run(self, operator: Operator, function: Any, args: Any, kwargs: Any, kernel: Any = None) -> Any:  # noqa: C901 - a call costs
        """Run an operator and report it. A small model's step is thousands of these, so that each call in here is seen in its time."""
        counter, memory, is_view = self._counter, self._memory, operator.is_view
        try:
            row, phase = self._current_of_view(args) if is_view and not operator.waits else self._current(args)
            if operator.waits:
                counter.wait(row, phase)
            if not is_view:
                if memory is not None:
                    memory.before(operator.name, row_of_region(row) if self._calls_of_regions else row, phase)
            elif phase == "optimizer":
                counter.see_view(args)
        except BaseException as error:  # noqa: BLE001 - the guard raises it, or has ended the count
            self._fail(error)
            is_view = True
        if is_view:
            return function(*args, **kwargs)
        out = function(*args, **kwargs) if kernel is None else self._run_inside(operator, function, kernel, args, kwargs)
        try:
            if self._partial_tensors.active and not counter.in_sharded_operator:
                self._partial_tensors.follow(operator, row, args, kwargs, out)
            if operator.kind is not FREE and kernel is None:
                counter.record(operator, row, phase, (args, kwargs, out))
            if memory is not None and operator.is_birth:
                self._see_storages(memory, operator, row, phase, (args, kwargs, out))
        except BaseException as error:  # noqa: BLE001 - the same
            self._fail(error)
        return out

    def _see_storages(self, memory: LiveMemory, operator: Operator, row: str, phase: Phase, given: Given) -> None:
        counter, name, (args, kwargs, out) = self._counter, operator.name, given
        if self._calls_of_regions:
            row = row_of_region(row)
        if not operator.makes_storage:
            memory.filled(name, row, phase, tensors_of((kwargs["out"],)))
        elif name == ADD and phase == "backward" and not counter.in_sharded_operator and sums_gradients(args, kwargs):
            memory.after_sum(name, row, phase, out, args[0])
        else:
            memory.after(name, counter.owner(row, phase) if phase == "optimizer" else row, phase, out)
            if name in SCRATCH and counter.scratch:
                memory.scratch(name, row, phase, SCRATCH[name](args))

    def _run_inside(self, operator: Operator, function: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that is written in Python, and see the operators that it calls."""

        def run() -> Any:
            try:
                with on_stack(self):
                    return run_kernel(function, kernel, args, kwargs)
            except NEEDS_VALUES:
                if not self._fake:
                    raise
            return function(*args, **kwargs)  # it says itself what its results look like

        return self._counter.run_inside(operator, self._scopes.current(args), run, args, kwargs)


def _raise(error: BaseException) -> None:
    raise error


def _refuse_real_parameters(args: Any) -> None:
    for each in args:
        if type(each) in PLAIN and each.requires_grad:
            raise RealParameterError
        if isinstance(each, list):
            _refuse_real_parameters(each)
