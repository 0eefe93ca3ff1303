"""Count functions of other packages that run kernels without calling a torch operator.

A function that is written in C++, or that launches a Triton kernel, may call no operator, so the
dispatch mode does not see it. For a counting step, the functions in `formulas.table.FUNCTIONS` are
replaced by wrappers that record each call. They are replaced in the modules in which their callers
look them up, and are restored afterwards. All other Triton kernels have no formula. A hook reports
their launches, and they are listed as unsupported.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lflops.error_guard import CleanupStack, replace_attribute
from lflops.flop_counter.operator_costs import shapes, values_or_shape
from lflops.flop_counter.operators import Operator
from lflops.formulas.table import FUNCTIONS, Cost, FunctionFormula
from lflops.torch_private.dispatch_modes import open_modes


class _Covered(threading.local):
    """Counts the running package functions that have a formula, separately on each thread.

    The cost of such a function includes the Triton kernels that it launches, so they are not
    recorded.

    Attributes:
        depth: The number of nested calls of these functions. 0 means that no such function is
            running.
    """

    depth = 0


_LOCK = threading.RLock()
_COVERED = _Covered()
_COUNTS: list[object] = []
"""The `Counting` objects that are counting at the moment."""

_undo = CleanupStack()


def watch(count: object) -> None:
    """Record the calls of package functions for a `Counting` object, until `unwatch` is called.

    The functions in `FUNCTIONS` are wrapped if their package is loaded. Counts that overlap share
    the wrappers.
    """
    with _LOCK:
        _COUNTS.append(count)
        if len(_COUNTS) == 1:
            _install()


def unwatch(count: object) -> None:
    """Stop recording calls for one `Counting` object.

    After the last object, restore the original functions of the packages. A second call does
    nothing.
    """
    with _LOCK:
        _COUNTS[:] = [each for each in _COUNTS if each is not count]
        if not _COUNTS:
            _undo.close()


def _install() -> None:
    for name, entry in FUNCTIONS.items():
        module_name, _, path = name.partition(":")
        owner = sys.modules.get(module_name)
        *parents, last = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        attributes = getattr(owner, "__dict__", {})
        function = attributes.get(last)
        if callable(function):
            wrapped = _wrapper(name, function, entry)
            # If the attribute cannot be set, the function is not counted.
            with contextlib.suppress(AttributeError, TypeError):
                replace_attribute(_undo, owner, last, wrapped)
    _watch_triton()


def _watchers() -> list[Any]:
    """Return the active counting modes of this thread.

    While an operator with a formula runs, no counting mode is active. So package functions that the
    operator calls are not counted in addition to the operator.
    """
    return [mode for mode in open_modes() if hasattr(mode, "record_function")]


def _wrapper(name: str, function: Callable[..., Any], entry: FunctionFormula) -> Callable[..., Any]:
    """Return a function that calls a package's function and records the call."""
    operator = Operator.of_function(name.replace(":", "."), _cost_of(entry))

    @functools.wraps(function)
    def watched_function(*args: Any, **kwargs: Any) -> Any:
        watchers = _watchers()
        if not watchers:
            return function(*args, **kwargs)
        _COVERED.depth += 1
        try:
            out = function(*args, **kwargs)
        finally:
            _COVERED.depth -= 1
        for watcher in watchers:
            for given in _calls(entry, function, args, kwargs):
                watcher.record_function(
                    operator, given, {}, out, again_in_backward=entry.again_in_backward
                )
        return out

    return watched_function


def _calls(
    entry: FunctionFormula, function: Any, args: Any, kwargs: Any
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each call to count, in the order of the function's parameters.

    A fused optimizer function receives a list of lists of tensors, for example
    `[gradients, parameters, states]`. It is counted as one call for each parameter. Any other
    function is counted as one call.
    """
    ordered = _in_order(function, args, kwargs)
    place = entry.tensors_at
    if place is None or len(ordered) <= place:
        yield ordered
        return
    for tensors in zip(*ordered[place], strict=False):
        # `tensors` has the tensors of one parameter: its gradient, the parameter and its states. So
        # the work of this call is added to the module that owns the parameter.
        yield (*ordered[:place], list(tensors), *ordered[place + 1 :])


def _in_order(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return positional and keyword arguments in the order of the function's signature.

    A function that is written in C++ may have no signature. In this case, the keyword arguments
    follow the positional arguments.
    """
    if not kwargs:
        return tuple(args)
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return (*args, *kwargs.values())
    bound.apply_defaults()
    return bound.args


def _cost_of(entry: FunctionFormula) -> Callable[[Any, Any, Any], Cost]:
    """Return a cost function that calls the formula of `entry` with shapes instead of tensors."""
    parameters = list(inspect.signature(entry.formula).parameters.values())
    takes_all = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    reads_all = entry.reads == {"*"}

    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        operands = []
        passed = args if takes_all else args[: len(names)]
        for place, value in enumerate(passed):
            is_read = reads_all or (place < len(names) and names[place] in entry.reads)
            operands.append(_operand(value, read=is_read))
        return Cost.of(entry.formula(*operands))

    return cost


def _operand(value: Any, *, read: bool) -> Any:
    """Convert an argument of a package function to the argument that its formula receives.

    A tensor, or another object with a `size()` and a dtype, is converted to its shape. If `read` is
    true, a one-dimensional tensor of integers is converted to its values instead.
    """
    if isinstance(value, Tensor):
        if read and not value.is_floating_point() and value.dim() == 1:
            return values_or_shape(value)
        return shapes(value)
    if isinstance(value, list):
        return [_operand(part, read=False) for part in value]
    size = getattr(value, "size", None)
    is_like_tensor = callable(size) and hasattr(value, "dtype") and not isinstance(value, type)
    return tuple(size()) if size is not None and is_like_tensor else value


def _watch_triton() -> None:
    """Register a hook that Triton calls before each launch, if Triton is loaded.

    Newer releases of Triton have a list of such hooks. Older releases have a single hook, which is
    registered only if it is not in use.
    """
    triton: Any = sys.modules.get("triton")
    owner = getattr(getattr(triton, "knobs", None), "runtime", None)
    if owner is None:
        owner = getattr(getattr(triton, "compiler", None), "CompiledKernel", None)
    if owner is None or not hasattr(owner, "launch_enter_hook"):
        return
    before = owner.launch_enter_hook
    if hasattr(before, "add") and hasattr(before, "remove"):
        _undo.add(_remove_from, before)
        before.add(_launched)
    elif before is None:
        # If a hook were already set, it would belong to a profiler.
        _undo.add(setattr, owner, "launch_enter_hook", None)
        owner.launch_enter_hook = _launched


def _remove_from(hooks: Any) -> None:
    # Other code may already have removed the hook.
    with contextlib.suppress(KeyError, ValueError):
        hooks.remove(_launched)


def _launched(metadata: Any) -> None:
    """Record the launch of a Triton kernel as an unsupported operator.

    A launch inside a package function with a formula is not recorded.
    """
    if _COVERED.depth:
        return
    watchers = _watchers()
    if not watchers:
        return
    if not isinstance(metadata, dict) and hasattr(metadata, "get"):
        metadata = metadata.get()
    name = metadata.get("name", "kernel") if isinstance(metadata, dict) else "kernel"
    operator = Operator.of_function(f"triton::{name}", None)
    for watcher in watchers:
        watcher.record_function(operator, (), {}, None, again_in_backward=False)
