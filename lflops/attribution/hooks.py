"""Every hook that lflops installs on modules and optimizers, and the listeners that they call.

    with CleanupStack() as undo:
        install_hooks(undo, listener)
        model(x)        # listener.enter_module(model, args) … listener.leave_module(model, …, output)

Those for all modules are torch's global hooks: nothing is written on a module or an optimizer.
Leaving the `with` removes them, also by an error or an interrupt.
"""

import contextlib
import copyreg
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.model.compile_guard import uncompiled, unremark_hooks
from lflops.model.module_tree import ModuleTree
from lflops.torch_private.modules import (
    HiddenHooks,
    compiles_its_hooks,
    never_compiled,
    remove_hook,
    scripted_without,
)


class ModuleListener(Protocol):
    """Follows the modules and scopes of one thread, and of the threads that it starts."""

    # the thread on which the hooks were installed
    home: int

    @property
    def tree(self) -> ModuleTree:
        """The modules that it follows; it is called for all others too."""

    def follows_this_thread(self) -> bool:
        """Whether scopes of this thread concern it."""

    def enter_module(self, module: nn.Module, args: Any, /) -> None:
        """A module's forward begins."""

    def leave_module(self, module: nn.Module, /, *values: Any) -> None:
        """It ends.

        The values are its arguments, keyword arguments and output; after an exception, torch leaves
        out the second.
        """

    def enter_scope(self, key: int, name: str, /) -> None:
        """A `lflops.scope` of that name begins."""

    def leave_scope(self, key: int, /) -> None:
        """The scope that was entered by the same key ends."""


class OptimizerListener(Protocol):
    """Follows the steps of all optimizers."""

    def enter_step(self, optimizer: Optimizer, /) -> None:
        """A step begins."""

    def leave_step(self, optimizer: Optimizer, /) -> None:
        """It ends, and with it its own closure that an exception left."""

    def enter_closure(self, key: int, /) -> None:
        """The closure that was given to a step begins.

        The forward and backward in it are no work of the optimizer.
        """

    def leave_closure(self, key: int, /) -> None:
        """The closure ends, and its step goes on."""


LISTENERS: list[
    ModuleListener
    # those whose hooks are installed, of all threads; `lflops.scope` calls them
] = []


def install_hooks(
    undo: CleanupStack,
    listener: ModuleListener,
    steps: OptimizerListener | None = None,
    *,
    guard: Guard = unguarded,
) -> None:
    """Call the listener for every module and scope, and `steps` for optimizers, until `undo` is closed."""
    # What is compiled meanwhile is compiled without the hooks. `guard` keeps our errors from the
    # code that calls a module.
    if listener.tree.compiled:
        unremark_hooks(undo)
    enters, leaves = guard(listener.enter_module), guard(listener.leave_module)
    hidden = HiddenHooks((enters, leaves))
    for hook in (enters, leaves):
        never_compiled(hook)
    # always_call: early-stopped recomputation leaves forward by an exception
    calls_always = partial(register_module_forward_hook, with_kwargs=True, always_call=True)
    _hook(undo, None, (register_module_forward_pre_hook, enters), (calls_always, leaves))
    undo.add(hidden.stop)
    hidden.start()
    if steps is not None:
        begins, ends = (
            guard(partial(_enter_step, steps)),
            guard(lambda optimizer, *_: steps.leave_step(optimizer)),
        )
        _hook(
            undo,
            None,
            (register_optimizer_step_pre_hook, begins),
            (register_optimizer_step_post_hook, ends),
        )
    undo.add(_forget, listener)
    LISTENERS.append(listener)


def _hook(
    undo: CleanupStack,
    owner: nn.Module | Optimizer | None,
    *hooks: tuple[Callable[[Any], object], Callable[..., Any]],
) -> None:
    """Register hooks on an owner, or for all, until `undo` is closed.

    An interrupt in between leaves none.
    """
    for _, hook in hooks:
        undo.add(remove_hook, hook, owner)
    for register, hook in hooks:
        register(hook)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a part of a step that is no module: it becomes a row under the module that is running.

    Under `torch.compiler.is_compiling()`, and where nothing is being profiled, it does nothing.

    Raises:
        ValueError: The name is empty or has a dot in it.
    """
    if not isinstance(name, str) or not name or "." in name:  # type: ignore[redundant-expr,unused-ignore]
        raise ValueError(f"scope: name={name!r} cannot be: give a name without dots")
    if torch.compiler.is_compiling():
        yield
        return
    listeners = [each for each in LISTENERS if each.follows_this_thread()]
    key = id(listeners)
    for each in listeners:
        each.enter_scope(key, name)
    try:
        yield
    finally:
        for each in listeners:
            each.leave_scope(key)


def _forget(listener: ModuleListener) -> None:
    LISTENERS[:] = [each for each in LISTENERS if each is not listener]


@contextlib.contextmanager
def after_each_call(module: nn.Module, action: Callable[[], None]) -> Iterator[None]:
    """Run the action after each call of this one module; all others run without a hook."""
    handle = module.register_forward_hook(uncompiled(lambda *_: action()))
    try:
        yield
    finally:
        handle.remove()


# attributes of a module
HOOKS = {"_forward_pre_hooks", "_forward_hooks"}


class _ModelHook(partial[None]):
    """A hook on a user's own module.

    What is copied or pickled with the module in its place does nothing, and needs no lflops to
    load.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """A function of Python's own that takes any arguments, and returns `None`."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def hook_models(
    undo: CleanupStack, models: Iterable[nn.Module], action: Callable[..., None]
) -> None:
    """Run an action before each call of these modules alone, with what torch gives such a hook, until `undo` is closed."""
    # `undo` keeps no module alive. One that was compiled in place gets no hook: hooks are compiled
    # with it, so it would be compiled anew.
    scripted_without(undo, lambda each: isinstance(each, _ModelHook))
    hook = _ModelHook(_unless_compiled, action)
    for module in itertools.filterfalse(compiles_its_hooks, models):
        if type(module) not in copyreg.dispatch_table:
            undo.add(_reduce_as_before, type(module))
            copyreg.pickle(type(module), _reduced)
        undo.add(_remove_if_alive, hook, ref(module))
        module.register_forward_pre_hook(hook)


def _unless_compiled(action: Callable[..., None], *given: Any) -> None:
    """Run an action, of which dynamo compiles nothing into a graph."""
    if not torch.compiler.is_compiling():
        action(*given)


def _reduced(module: nn.Module) -> Any:
    """What a module is copied and pickled by while one of its class is hooked.

    As ever, without our hooks.
    """
    # So it can be loaded with weights alone allowed, too, which refuses what a hook is pickled as.
    function, given, state, *more = cast("tuple[Any, ...]", module.__reduce_ex__(2))
    if isinstance(state, dict):
        for name in HOOKS & state.keys():
            theirs = OrderedDict(
                each for each in state[name].items() if not isinstance(each[1], _ModelHook)
            )
            state = state | {name: theirs}
    return function, given, state, *more


def _reduce_as_before(kind: type[nn.Module]) -> None:
    if copyreg.dispatch_table.get(kind) is _reduced:
        del copyreg.dispatch_table[kind]


def _remove_if_alive(hook: Callable[..., Any], module: "ref[nn.Module]") -> None:
    if (alive := module()) is not None:
        remove_hook(hook, alive)


def hook_optimizers(
    undo: CleanupStack,
    before: Callable[..., None],
    after: Callable[..., None] | None,
    only: Optimizer | None = None,
) -> None:
    """Run an action before each step of all optimizers, or of only one, and perhaps another after it, until `undo` is closed."""
    before, after = (
        partial(_unless_compiled, before),
        None if after is None else partial(_unless_compiled, after),
    )
    registers: tuple[Any, Any] = (
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
    if only is not None:
        registers = (only.register_step_pre_hook, only.register_step_post_hook)
    _hook(undo, only, (registers[0], before), *(() if after is None else ((registers[1], after),)))


def _enter_step(steps: OptimizerListener, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Begin a step.

    Returns its arguments with the closure wrapped; `None`, which changes nothing, where there is no
    closure.
    """
    steps.enter_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def wrapped() -> Any:
        steps.enter_closure(id(closure))
        try:
            result = closure()
        except BaseException:
            steps.leave_step(
                optimizer
                # the exception leaves the step as well, and torch calls no hook then
            )
            raise
        steps.leave_closure(id(closure))
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs
