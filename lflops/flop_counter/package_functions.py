"""Functions of other packages that the dispatcher does not see.

Watched while a step is counted, and then as they were.

A package's own function, in C++ or launching Triton, shows no operator. While a count is running
those in `formulas.table.FUNCTIONS` are wrapped, in the modules in which their callers look them up.
Triton tells of each launch, so that one without a formula is listed.
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
    """How many functions with a formula this thread is within: what they launch is theirs."""

    depth = 0


_LOCK = threading.RLock()
_COVERED = _Covered()
# the counts that are running
_COUNTS: list[object] = []
_undo = CleanupStack()


def watch(count: object) -> None:
    """Watch the functions of the packages that are loaded, until `unwatch`.

    Counts that overlap share the wraps.
    """
    with _LOCK:
        _COUNTS.append(count)
        if len(_COUNTS) == 1:
            _install()


def unwatch(count: object) -> None:
    """End that for one count. It can be called again."""
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
        function = (
            vars(owner).get(last) if owner is not None and hasattr(owner, "__dict__") else None
        )
        if callable(function):
            wrapped = _wrapper(name, function, entry)
            with contextlib.suppress(
                AttributeError,
                TypeError,
                # where it cannot be set, the function stays unseen
            ):
                replace_attribute(_undo, owner, last, wrapped)
    _watch_triton()


def _watchers() -> list[Any]:
    """The modes of this thread that count.

    Within an operator with a formula none is on the stack, so nothing counts twice.
    """
    return [mode for mode in open_modes() if hasattr(mode, "see_function")]


def _wrapper(name: str, function: Callable[..., Any], entry: FunctionFormula) -> Callable[..., Any]:
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
                watcher.see_function(
                    operator, given, {}, out, again_in_backward=entry.again_in_backward
                )
        return out

    return watched_function


def _calls(
    entry: FunctionFormula, function: Any, args: Any, kwargs: Any
) -> Iterator[tuple[Any, ...]]:
    """The arguments in their order; one call for each tensor of the lists, if there are lists."""
    given = _in_order(function, args, kwargs)
    place = entry.tensors_at
    if place is None or len(given) <= place:
        yield given
        return
    for tensors in zip(*given[place], strict=False):
        # The parameter is the second: of an update its row is the owner.
        yield (*given[:place], list(tensors), *given[place + 1 :])


def _in_order(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Positional arguments, then those by keyword where the function's signature has them.

    A function in C++ has none.
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
    parameters = list(inspect.signature(entry.formula).parameters.values())
    takes_all = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        given = args if takes_all else args[: len(names)]
        reads = [
            entry.reads == {"*"} or (place < len(names) and names[place] in entry.reads)
            for place in range(len(given))
        ]
        found = entry.formula(
            *(_given(each, read=read) for each, read in zip(given, reads, strict=True))
        )
        return found if isinstance(found, Cost) else Cost(found)

    return cost


def _given(value: Any, *, read: bool) -> Any:
    """Make of an argument what a formula gets.

    The shape of a tensor, and of what has a size as tensors have.
    """
    if isinstance(value, Tensor):
        return (
            values_or_shape(value)
            if read and not value.is_floating_point() and value.dim() == 1
            else shapes(value)
        )
    if isinstance(value, list):
        return [_given(each, read=False) for each in value]
    size = getattr(value, "size", None)
    return (
        tuple(size())
        if callable(size) and not isinstance(value, type) and hasattr(value, "dtype")
        else value
    )


def _watch_triton() -> None:
    """Have Triton tell of each launch, where it is loaded.

    By its list of hooks, or by its only one in older releases.
    """
    triton: Any = sys.modules.get("triton")
    knobs = getattr(getattr(triton, "knobs", None), "runtime", None)
    if knobs is None:
        knobs = getattr(getattr(triton, "compiler", None), "CompiledKernel", None)
    if knobs is None or not hasattr(knobs, "launch_enter_hook"):
        return
    before = knobs.launch_enter_hook
    if hasattr(before, "add") and hasattr(before, "remove"):
        _undo.add(_remove_from, before)
        before.add(_launched)
    elif before is None:
        # one that is there is somebody's profiler
        _undo.add(setattr, knobs, "launch_enter_hook", None)
        knobs.launch_enter_hook = _launched


def _remove_from(hooks: Any) -> None:
    # it was removed before
    with contextlib.suppress(KeyError, ValueError):
        hooks.remove(_launched)


def _launched(metadata: Any) -> None:
    if _COVERED.depth:
        return
    watchers = _watchers()
    if watchers:
        known = (
            metadata.get()
            if hasattr(metadata, "get") and not isinstance(metadata, dict)
            else metadata
        )
        name = known.get("name", "kernel") if isinstance(known, dict) else "kernel"
        operator = Operator.of_function(f"triton::{name}", None)
        for watcher in watchers:
            watcher.see_function(operator, (), {}, None, again_in_backward=False)
