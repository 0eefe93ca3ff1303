"""Install hooks that call listeners when modules and optimizer steps begin and end.

A listener is an object with the methods of `ModuleListener` or `OptimizerListener`.

    with CleanupStack() as undo:
        install_hooks(undo, listener)
        model(x)    # listener.enter_module(model, args) … listener.leave_module(model, …, output)

The hooks are torch's global hooks for all modules, so nothing is stored on a module or an
optimizer. Leaving the `with` block removes the hooks, even after an error or an interrupt.
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
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lflops.error_guard import CleanupStack, ErrorGuard, Guard, unguarded
from lflops.model.compile_guard import hide_hook_warning, uncompiled
from lflops.model.module_tree import ModuleTree
from lflops.torch_private.modules import (
    HiddenHooks,
    is_compiled_in_place,
    never_compiled,
    remove_hook,
    scripted_without,
)


class ModuleListener(Protocol):
    """An object whose methods are called when a module or scope is entered or left.

    Attributes:
        home: Identifier of the thread on which the hooks were installed.
    """

    home: int

    @property
    def tree(self) -> ModuleTree:
        """The modules that this listener follows.

        Torch's global hooks run for all modules, so `enter_module` and `leave_module` are also
        called for modules outside this tree.
        """

    def follows_this_thread(self) -> bool:
        """Return whether scopes of the current thread should be reported to this listener."""

    def enter_module(self, module: nn.Module, args: Any, /) -> None:
        """Handle the start of a module's forward."""

    def leave_module(self, module: nn.Module, /, *values: Any) -> None:
        """Handle the end of a module's forward.

        `values` are the arguments, the keyword arguments and the output. After an exception, torch
        omits the keyword arguments.
        """

    def enter_scope(self, key: int, name: str, /) -> None:
        """Handle the start of an `lflops.scope`, which `key` identifies until its end."""

    def leave_scope(self, key: int, /) -> None:
        """Handle the end of the scope that was entered with the same key."""


class OptimizerListener(Protocol):
    """An object whose methods are called when an optimizer step begins or ends."""

    def enter_step(self, optimizer: Optimizer, /) -> None:
        """Handle the start of an optimizer step."""

    def leave_step(self, optimizer: Optimizer, /) -> None:
        """Handle the end of an optimizer step. An exception in the closure also ends the step."""

    def enter_closure(self, key: int, /) -> None:
        """Handle the start of a step's closure.

        Forward and backward inside the closure do not count as work of the optimizer.
        """

    def leave_closure(self, key: int, /) -> None:
        """Handle the end of a step's closure. The optimizer step itself continues."""


LISTENERS: list[ModuleListener] = []
"""All listeners that are installed at the moment, on any thread.

`lflops.scope` calls their methods `enter_scope` and `leave_scope`.
"""


def install_hooks(
    undo: CleanupStack,
    listener: ModuleListener,
    steps: OptimizerListener | None = None,
    *,
    guard: Guard = unguarded,
) -> None:
    """Report calls of modules and scopes to `listener`, and any optimizer steps to `steps`.

    The hooks are removed when `undo` is closed. While they are installed, they are hidden from
    torch.compile, so that they do not become part of compiled code. `guard` handles the errors of
    the listeners, so that these errors do not reach the code that calls the module.
    """
    if listener.tree.compiled:
        hide_hook_warning(undo)
    enters = guard(listener.enter_module)
    leaves = guard(listener.leave_module)
    hidden = HiddenHooks((enters, leaves))
    never_compiled(enters)
    never_compiled(leaves)
    # Recomputation that stops early leaves forward with an exception, so the hook must be called
    # after exceptions too.
    register_leaves = partial(register_module_forward_hook, with_kwargs=True, always_call=True)
    _hook(undo, None, (register_module_forward_pre_hook, enters), (register_leaves, leaves))
    undo.add(hidden.stop)
    hidden.start()
    if steps is not None:
        begins = guard(partial(_enter_step, steps))
        ends = guard(lambda optimizer, *_: steps.leave_step(optimizer))
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
    """Register hooks on `owner`, or globally if it is `None`, until `undo` is closed.

    Each hook comes with the function that registers it. The removal of all hooks is added to `undo`
    before the first hook is registered, so that no hook remains after an interrupt.
    """
    for _, hook in hooks:
        undo.add(remove_hook, hook, owner)
    for register, hook in hooks:
        register(hook)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a part of a step. Reports then show this part below the module that was running.

    Does nothing while torch.compile compiles the code, or if nothing is being profiled.

    Raises:
        ValueError: The name is empty or contains a dot.
    """
    if not isinstance(name, str) or not name or "." in name:  # type: ignore[redundant-expr,unused-ignore]
        raise ValueError(f"scope: name={name!r}: pass a name that is not empty and has no dots")
    if torch.compiler.is_compiling():
        yield
        return
    listeners = [listener for listener in LISTENERS if listener.follows_this_thread()]
    # This list exists until the scope is left, so its id identifies the scope.
    key = id(listeners)
    for listener in listeners:
        listener.enter_scope(key, name)
    try:
        yield
    finally:
        for listener in listeners:
            listener.leave_scope(key)


def _forget(listener: ModuleListener) -> None:
    LISTENERS[:] = [other for other in LISTENERS if other is not listener]


@contextlib.contextmanager
def after_each_call(module: nn.Module, action: Callable[[], None]) -> Iterator[None]:
    """Inside the `with` block, run `action` after each call of `module`."""
    handle = module.register_forward_hook(uncompiled(lambda *_: action()))
    try:
        yield
    finally:
        handle.remove()


HOOKS = {"_forward_pre_hooks", "_forward_hooks"}
"""The attributes of a module that hold its forward hooks."""


class _ModelHook(partial[None]):
    """A hook on a user's module. Copies and pickles of the module do not contain the hook.

    A copy or pickle contains a function that does nothing instead, so it can be loaded without
    lflops.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the hook as a built-in function that accepts any arguments and returns `None`."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def hook_models(
    undo: CleanupStack,
    models: Iterable[nn.Module],
    before: Callable[..., None],
    after: Callable[..., None] | None = None,
) -> None:
    """Run hooks before and after each call of the given modules, until `undo` is closed.

    The hooks receive the arguments of torch's forward hooks. `before` runs before the user's hooks,
    so the time of the user's hooks counts as forward. `after` is not called if the call raises an
    exception. Both must do nothing while Dynamo compiles the calling code (see `unless_compiled`).
    A module that was compiled in place gets no hooks, because a new hook would make torch compile
    the module again. `undo` holds only weak references to the modules, so it does not keep them
    alive.
    """
    scripted_without(undo, lambda each: isinstance(each, _ModelHook))
    before = _ModelHook(before)
    if after is not None:
        after = _ModelHook(after)
    for module in itertools.filterfalse(is_compiled_in_place, models):
        if type(module) not in copyreg.dispatch_table:
            undo.add(_reduce_as_before, type(module))
            copyreg.pickle(type(module), _reduced)
        undo.add(_remove_if_alive, before, ref(module))
        module.register_forward_pre_hook(before, prepend=True)
        if after is not None:
            undo.add(_remove_if_alive, after, ref(module))
            module.register_forward_hook(after)


def unless_compiled(action: Callable[..., None], guard: ErrorGuard) -> Callable[..., None]:
    """Return a hook that runs an action, but does nothing while Dynamo compiles the calling code.

    `guard` handles the errors of the action, so they do not reach the user's code.
    """

    def hook(*args: Any) -> None:
        if is_compiling():
            return
        try:
            action(*args)
        except BaseException as error:
            if not guard.contains(error):
                raise

    return hook


def _reduced(module: nn.Module) -> Any:
    """Return what `copy` and `pickle` need to copy a module, without the hooks of lflops.

    This function is registered in `copyreg` for the module's class while a module of that class has
    an lflops hook. Without it, the pickle would contain the hook, and loading it with
    `weights_only=True` would fail.
    """
    function, args, state, *more = cast("tuple[Any, ...]", module.__reduce_ex__(2))
    if isinstance(state, dict):
        for name in HOOKS & state.keys():
            users_hooks: OrderedDict[Any, Any] = OrderedDict()
            for key, hook in state[name].items():
                if not isinstance(hook, _ModelHook):
                    users_hooks[key] = hook
            state = state | {name: users_hooks}
    return function, args, state, *more


def _reduce_as_before(kind: type[nn.Module]) -> None:
    if copyreg.dispatch_table.get(kind) is _reduced:
        del copyreg.dispatch_table[kind]


def _remove_if_alive(hook: Callable[..., Any], module: "ref[nn.Module]") -> None:
    alive = module()
    if alive is not None:
        remove_hook(hook, alive)


def hook_optimizers(
    undo: CleanupStack,
    before: Callable[..., None],
    after: Callable[..., None] | None,
    only: Optimizer | None = None,
) -> None:
    """Run hooks before and after each step of all optimizers, until `undo` is closed.

    The hooks must do nothing while Dynamo compiles the calling code (see `unless_compiled`). If
    `only` is passed, the hooks are called for that optimizer alone.
    """
    register_before: Any = register_optimizer_step_pre_hook
    register_after: Any = register_optimizer_step_post_hook
    if only is not None:
        register_before = only.register_step_pre_hook
        register_after = only.register_step_post_hook
    hooks = [(register_before, before)]
    if after is not None:
        hooks.append((register_after, after))
    _hook(undo, only, *hooks)


def _enter_step(steps: OptimizerListener, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Report the start of an optimizer step, and return new arguments for `optimizer.step`.

    In the new arguments, a wrapper around the closure reports the closure's start and end. Without
    a closure, the function returns `None`, and torch keeps the original arguments.
    """
    steps.enter_step(optimizer)
    positional = args[1] if len(args) > 1 else None
    closure = kwargs.get("closure", positional)
    if closure is None:
        return None

    def wrapped() -> Any:
        steps.enter_closure(id(closure))
        try:
            result = closure()
        except BaseException:
            # The exception also ends the step, and torch calls no hook in this case.
            steps.leave_step(optimizer)
            raise
        steps.leave_closure(id(closure))
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs
