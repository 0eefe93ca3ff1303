"""Define the dispatch mode that receives every operator of a thread.

The mode sits between autograd and the kernels, and receives each call of an operator once.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lflops.attribution.python_stack import sums_gradients
from lflops.flop_counter.accumulator import CallArgs, OperatorAccumulator
from lflops.flop_counter.compiled_regions import module_of_region
from lflops.flop_counter.cpu_kernels import SCRATCH
from lflops.flop_counter.live_memory import LiveMemory
from lflops.flop_counter.operators import Kind, Operator, classify, known_operators
from lflops.flop_counter.sharded_tensors import is_sharded
from lflops.flop_counter.traffic import tensors_of
from lflops.profile.records import Phase
from lflops.torch_private.dispatch_modes import (
    InternalMode,
    end_mode,
    is_tracing,
    on_stack,
    push_mode,
    route_higher_order_operators,
)
from lflops.torch_private.distributed import infers_sharding
from lflops.torch_private.modules import never_compiled
from lflops.torch_private.operators import (
    call_without_overrides,
    decompose,
    nested_kernel,
    python_kernel,
    run_kernel,
)
from lflops.torch_private.tensors import (
    ASKS_FOR_DEVICE,
    NEEDS_VALUES,
    PLAIN,
    FakeTensor,
    fake_device,
    has_torch_function,
    is_overridden,
    without_overrides,
)

FREE = Kind.FREE
DECOMPOSED = Kind.DECOMPOSED
UNSUPPORTED = Kind.UNSUPPORTED
"""`FREE`, `DECOMPOSED` and `UNSUPPORTED` are aliases of members of `Kind`.

Attribute access on an enumeration is slow, and this code runs for every operator.
"""

DECIDES = frozenset({"cond", "while_loop", "while_loop_stack_output"})
"""Control-flow operators in which tensor values decide which function runs and how often."""

CONSTRUCTS = "empty"
"""The operator name to record for memory that the constructor of a tensor subclass allocates.

In fact, no operator allocates this memory.
"""

ADD = "add"
"""The operator with which autograd adds the gradients of a tensor that is used several times."""


class RealParameterError(Exception):
    """An operator received a real parameter while the count runs on fake tensors.

    Backward would then write a fake gradient to the real parameter.
    """


class OperatorCounter(OperatorAccumulator):
    """Counts the operators that run on one or more threads.

    Each thread has its own dispatch mode, which reports the thread's operators to this counter.
    """

    def mode(self) -> "CountingMode":
        """Return a new dispatch mode that reports operators to this counter.

        The mode counts on a thread while it is on the thread's stack of dispatch modes.
        """
        return CountingMode(self)

    def start_on_this_thread(self) -> Callable[[], None]:
        """Start counting on this thread, and return the function that stops it."""
        mode = self.mode()
        push_mode(mode)
        return lambda: end_mode(mode)


class CountingMode(InternalMode):
    """Reports the operators of one thread to an accumulator.

    Attributes:
        supports_higher_order_operators: Whether torch sends higher-order operators to the mode.
            torch 2.8 does not read this attribute and needs `route_higher_order_operators`.
        is_off: Whether counting has ended. Torch may still keep the mode on the stack for a while.
    """

    supports_higher_order_operators = True

    def __init__(self, counter: OperatorAccumulator) -> None:
        super().__init__()
        route_higher_order_operators(type(self))
        never_compiled(type(self).__torch_dispatch__)
        self.is_off = False
        self._counter = counter
        self._scopes = counter.scopes
        self._current = counter.scopes.current
        self._current_of_view = counter.scopes.current_of_view
        self._memory = counter.memory
        self._partial_tensors = counter.partial_tensors
        self._fake = counter.fake
        self._operators = known_operators()
        self._calls_of_regions = () if counter.regions is None else counter.regions.calls
        self._fail = counter.guard(_raise)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile and run in the same way as without the mode."""
        return True

    def __torch_dispatch__(  # noqa: C901, PLR0911 - helper functions would be slow
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            return function(*args, **kwargs)
        if function is ASKS_FOR_DEVICE and self._fake and type(args[0]) is FakeTensor:
            return fake_device(args[0])
        for kind in types:
            if issubclass(kind, FakeTensor):
                if not self._fake:
                    # Shape inference by torch or by the user is not counted.
                    return function(*args, **kwargs)
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                # If a class wraps other tensors, the operators on the wrapped tensors are counted.
                if any(map(is_sharded, types)):
                    return self._run_sharded(function, args, kwargs)
                return NotImplemented
        if self._fake:
            _refuse_real_parameters(args)
            if is_tracing():
                return function(*args, **kwargs)
        if self._partial_tensors.active and self._infers_shapes(args, kwargs):
            return function(*args, **kwargs)
        # The key is the id, because the operator's `__hash__` is written in Python and slow.
        known = self._operators.get(id(function))
        operator = known[1] if known is not None else self._new_operator(function)
        if operator.is_single_kernel and not (
            operator.has_nested_kernel and nested_kernel(function, args)
        ):
            if has_torch_function(args) or (operator.has_list_argument and is_overridden(args)):
                return self._run_overridden(operator, function, args, kwargs)
            return self._run(operator, operator.run, args, kwargs)
        return self._run_composite(operator, function, args, kwargs)

    def _infers_shapes(self, args: Any, kwargs: Any) -> bool:
        """Return whether DTensor makes this call only to infer the shape of a result."""
        if self._counter.infers_shapes(args, kwargs):
            return True
        return self._fake and self._counter.in_sharded_operator and infers_sharding()

    def _new_operator(self, function: Any) -> Operator:
        operator = classify(function)
        self._operators[id(function)] = (function, operator)
        return operator

    def _run_composite(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may call other operators, and count the called operators."""
        if operator.is_control_flow and not self._fake and not is_tracing():
            return self._run_control_flow(function, args, kwargs)
        if operator.kind is DECOMPOSED or (
            operator.has_nested_kernel and nested_kernel(function, args)
        ):
            with on_stack(self):
                return decompose(function, args, kwargs)
        kernel = None
        if operator.kind is UNSUPPORTED:
            with without_overrides():
                kernel = python_kernel(function, args, kwargs)
        if kernel is None and is_overridden(args):
            return self._run_overridden(operator, function, args, kwargs)
        return self._run(operator, function, args, kwargs, kernel)

    def record_function(
        self, operator: Operator, args: Any, kwargs: Any, out: Any, *, again_in_backward: bool
    ) -> None:
        """Record a call of another package's function on this thread.

        The function calls no operator, so the mode does not receive the call. If
        `again_in_backward` is true, a call of the function in backward counts as recomputation.
        """
        fqn, phase = self._scopes.current(args)
        if phase == "backward" and again_in_backward:
            phase = "recompute"
        self._counter.record(operator, fqn, phase, (args, kwargs, out))

    def record_constructed(self, args: tuple[Any, ...], tensor: Any) -> None:
        """Record the memory of a tensor that a subclass's constructor created.

        If the constructor received another tensor, the new tensor uses the memory of the other
        tensor, so nothing is recorded.
        """
        memory = self._memory
        if memory is None or self.is_off or any(isinstance(value, Tensor) for value in args):
            return
        try:
            with without_overrides():
                fqn, phase = self._scopes.current()
                memory.before(CONSTRUCTS, fqn, phase)
                memory.after(CONSTRUCTS, fqn, phase, tensor)
        except BaseException as error:  # noqa: BLE001 - the guard handles it
            self._fail(error)

    def _run_sharded(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on sharded tensors.

        While the operator runs, the mode receives the same operator again. For this second call, it
        returns `NotImplemented`, so that DTensor runs the operator on the local tensors.
        """
        if self._counter.in_sharded_operator:
            return NotImplemented
        known = self._operators.get(id(function))
        operator = known[1] if known is not None else self._new_operator(function)

        def run() -> Any:
            with on_stack(self):
                return function(*args, **kwargs)

        return self._counter.run_sharded(operator, function, run, args, kwargs)

    def _run_control_flow(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run `torch.cond` or a loop, and count the operators of the functions that it calls."""
        fqn, phase = self._scopes.current(args)
        regions = self._counter.regions
        decision = None
        if regions is not None and function.name() in DECIDES:
            decision = regions.decide(fqn, phase)
        calls: Counter[int] = Counter()

        def counted(part: Any, number: int) -> Any:
            def run(*operands: Any) -> Any:
                calls[number] += 1
                with on_stack(self):
                    return part(*operands)

            return run

        parts = list(args)
        for number, arg in enumerate(args):
            if callable(arg):
                parts[number] = counted(arg, number)
        out = function(*parts, **kwargs)
        if regions is not None:
            # The second argument is the true branch of a condition, or the body of a loop. The
            # number of its calls is the decision.
            regions.decided(fqn, decision, calls[1])
        return out

    def _run_overridden(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors with a `__torch_function__`, without calling that method.

        Normally, torch calls `__torch_function__` only before autograd. If a dispatch mode calls an
        operator, torch would call the method again, so the method is disabled here.
        """
        call = call_without_overrides(function)
        with without_overrides():
            return self._run(operator, call, args, kwargs)

    def _run(  # noqa: C901, PLR0912 - helper functions would be slow
        self, operator: Operator, function: Any, args: Any, kwargs: Any, kernel: Any = None
    ) -> Any:
        """Run an operator and report the call to the counter.

        A step of a small model calls thousands of operators, so each Python call in this method
        makes a counting step slower. Errors in the code of lflops go to the guard, which raises
        them or ends the count. Errors in the operator are raised as usual.
        """
        counter = self._counter
        memory = self._memory
        is_view = operator.is_view
        try:
            if operator.synchronizes:
                fqn, phase = self._current(args)
                counter.wait(fqn, phase)
            elif is_view:
                fqn, phase = self._current_of_view(args)
            else:
                fqn, phase = self._current(args)
            if is_view:
                if phase == "optimizer":
                    counter.follow_view(args)
            elif memory is not None:
                memory_fqn = module_of_region(fqn) if self._calls_of_regions else fqn
                memory.before(operator.name, memory_fqn, phase)
        except BaseException as error:  # noqa: BLE001 - the guard handles it
            self._fail(error)
            # From here on, treat the operator like a view, which is run but not recorded.
            is_view = True
        if is_view:
            return function(*args, **kwargs)
        if kernel is None:
            out = function(*args, **kwargs)
        else:
            out = self._run_inside(operator, function, kernel, args, kwargs)
        try:
            if self._partial_tensors.active and not counter.in_sharded_operator:
                self._partial_tensors.follow(operator, fqn, args, kwargs, out)
            if operator.kind is not FREE and kernel is None:
                counter.record(operator, fqn, phase, (args, kwargs, out))
            if memory is not None and phase == "optimizer" and not operator.is_foreach:
                if operator.kind is FREE:
                    counter.follow_free_call(args)
                memory.ran_for(counter.owner(fqn, phase))
            if memory is not None and operator.allocates:
                self._see_storages(memory, operator, fqn, phase, (args, kwargs, out))
        except BaseException as error:  # noqa: BLE001 - the guard handles it
            self._fail(error)
        return out

    def _see_storages(
        self, memory: LiveMemory, operator: Operator, fqn: str, phase: Phase, call: CallArgs
    ) -> None:
        """Record the storages that an operator may have allocated."""
        args, kwargs, out = call
        counter = self._counter
        name = operator.name
        if self._calls_of_regions:
            fqn = module_of_region(fqn)
        if not operator.makes_storage:
            memory.filled(name, fqn, phase, tensors_of((kwargs["out"],)))
            return
        if (
            name == ADD
            and phase == "backward"
            and not counter.in_sharded_operator
            and sums_gradients(args, kwargs)
        ):
            memory.after_sum(name, fqn, phase, out, args[0])
            return
        if phase == "optimizer" and operator.is_foreach and isinstance(out, list | tuple):
            for tensor, owner in zip(out, counter.owners(out), strict=True):
                memory.after(name, owner, phase, tensor)
            return
        owner = counter.owner(fqn, phase) if phase == "optimizer" else fqn
        memory.after(name, owner, phase, out)
        if name in SCRATCH and counter.scratch:
            memory.scratch(name, fqn, phase, SCRATCH[name](args))

    def _run_inside(
        self, operator: Operator, function: Any, kernel: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an operator whose kernel is written in Python.

        The operators that the kernel calls are counted, instead of the operator itself.
        """

        def run() -> Any:
            try:
                with on_stack(self):
                    return run_kernel(function, kernel, args, kwargs)
            except NEEDS_VALUES:
                if not self._fake:
                    raise
            # The operator's own fake kernel gives the shapes of the results.
            return function(*args, **kwargs)

        return self._counter.run_inside(operator, self._scopes.current(args), run, args, kwargs)


def _raise(error: BaseException) -> None:
    raise error


def _refuse_real_parameters(args: Any) -> None:
    for value in args:
        if type(value) in PLAIN and value.requires_grad:
            raise RealParameterError
        if isinstance(value, list):
            _refuse_real_parameters(value)
