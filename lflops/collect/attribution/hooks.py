"""Every hook that lflops installs on modules and optimizers, and the listeners that they call.

    with installed_hooks(listener):
        model(x)        # listener.enter_module(model, args) … listener.leave_module(model, …, output)

The hooks are torch's global ones: nothing is written on a module or an optimizer. Leaving the `with` removes them, also by an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lflops.collect.model.compile_guard import uncompiled, unremarked_hooks
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.modules import compiles_its_hooks, remove_hook

__all__ = ["LISTENERS", "ModuleListener", "OptimizerListener", "after_each_call", "around_each_call", "around_each_step", "installed_hooks"]


class ModuleListener(Protocol):
    """Follows the modules and scopes of one thread, and of the threads that it starts.

    Attributes:
        home: The thread on which the hooks were installed.
    """

    home: int

    @property
    def tree(self) -> ModuleTree:
        """The modules that it follows; it is called for all others too."""

    def follows_this_thread(self) -> bool:
        """Whether scopes of this thread concern it."""

    def enter_module(self, module: nn.Module, args: Any, /) -> None:
        """A module's forward begins."""

    def leave_module(self, module: nn.Module, /, *values: Any) -> None:
        """It ends. The values are its arguments, keyword arguments and output; after an exception, torch leaves out the second."""

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
        """The closure that was given to a step begins: the forward and backward in it are no work of the optimizer."""

    def leave_closure(self, key: int, /) -> None:
        """The closure ends, and its step goes on."""


LISTENERS: list[ModuleListener] = []
"""Those whose hooks are installed, of all threads; `lflops.scope` calls them."""


@contextlib.contextmanager
def installed_hooks(listener: ModuleListener, steps: OptimizerListener | None = None, *, eager: bool = False) -> Iterator[None]:
    """Call the listener for every module and scope until the `with` is left.

    Args:
        listener: Its methods become the hooks themselves, so a call costs nothing more.
        steps: Is called for the steps of optimizers.
        eager: Whether compiled functions run eagerly meanwhile, so that torch.compile meets none of the hooks.
    """
    compiled = listener.tree.compiled
    guarded: Callable[..., Any] = (lambda hook: hook) if eager else partial(uncompiled, compiled=compiled)
    with contextlib.ExitStack() as hooks:
        if compiled:
            hooks.enter_context(unremarked_hooks())
        hooks.callback(remove_hook, register_module_forward_pre_hook(guarded(listener.enter_module)))
        # always_call: early-stopped recomputation leaves forward by an exception
        after = register_module_forward_hook(guarded(listener.leave_module), with_kwargs=True, always_call=True)
        hooks.callback(remove_hook, after)
        if steps is not None:
            hooks.callback(register_optimizer_step_pre_hook(partial(_enter_step, steps)).remove)
            hooks.callback(register_optimizer_step_post_hook(lambda optimizer, *_: steps.leave_step(optimizer)).remove)
        LISTENERS.append(listener)
        hooks.callback(LISTENERS.remove, listener)
        yield


@contextlib.contextmanager
def after_each_call(module: nn.Module, action: Callable[[], None]) -> Iterator[None]:
    """Run the action after each call of this one module; all others run without a hook."""
    handle = module.register_forward_hook(uncompiled(lambda *_: action()))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def around_each_call(module: nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Run an action before each call of this one module, and one behind it with the output. It gets one separate hook, and nothing else.

    A module that was compiled in place gets none: hooks are compiled with it, so it would be compiled anew.
    """
    with contextlib.ExitStack() as hooks:
        if not compiles_its_hooks(module):
            hooks.callback(module.register_forward_pre_hook(lambda *_: before()).remove)
            hooks.callback(module.register_forward_hook(lambda _module, _args, output: after(output)).remove)
        yield


@contextlib.contextmanager
def around_each_step(optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Run an action before each step of this one optimizer, and one behind it."""
    with contextlib.ExitStack() as hooks:
        hooks.callback(optimizer.register_step_pre_hook(lambda *_: before()).remove)
        hooks.callback(optimizer.register_step_post_hook(lambda *_: after()).remove)
        yield


def _enter_step(steps: OptimizerListener, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Begin a step. Returns its arguments with the closure wrapped; `None`, which changes nothing, where there is no closure."""
    steps.enter_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def wrapped() -> Any:
        steps.enter_closure(id(closure))
        try:
            result = closure()
        except BaseException:
            steps.leave_step(optimizer)  # the exception leaves the step as well, and torch calls no hook then
            raise
        steps.leave_closure(id(closure))
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs
