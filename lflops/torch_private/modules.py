"""Modules: the registries of children, buffers and global hooks, and whether they are compiled."""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.error_guard import CleanupStack, unguarded, wrap
from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch._C._dynamo import eval_frame
    from torch.jit import _recursive
    from torch.jit._recursive import get_hook_stubs
    from torch.nn.modules import module as module_of_torch
    from torch.nn.modules.module import (
        _global_forward_hooks,
        _global_forward_hooks_always_called,
        _global_forward_hooks_with_kwargs,
        _global_forward_pre_hooks,
    )
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_NAMES = vars(module_of_torch)
_CALL, _WRAPPED_CALL = nn.Module._call_impl, nn.Module._wrapped_call_impl
"""As they are when lflops is imported: a user may replace them later."""


def child_modules(module: nn.Module) -> Iterable[tuple[str, nn.Module | None]]:
    """The registered children with repetitions, which `named_children` leaves out."""
    return module._modules.items()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own registry of buffers.

    `named_buffers` leaves out those that are still `None`.
    """
    return module._buffers


def self_parts(module: nn.Module) -> tuple[list[Any], ...]:
    """The registered children, and the parameters, by no method of the module's class.

    None of a module that is not whole.
    """
    registries = (vars(module).get(name, {}) for name in ("_modules", "_parameters"))
    return tuple(
        [part for part in registry.values() if part is not None] for registry in registries
    )


def packed_parameters(module: nn.Module) -> list[Tensor]:
    """The weights and biases of a quantized module, which are inside of objects of C++ and not among its parameters."""
    return [
        tensor
        for value in vars(module).values()
        if isinstance(value, torch.ScriptObject)
        for tensor in _unpacked(value)
    ]


def _unpacked(packed: Any) -> list[Tensor]:
    """The tensors that an object holds; a recurrent cell holds further objects."""
    if packed._has_method("unpack"):
        tensors = packed.unpack()
        return [
            each.detach()
            for each in (tensors if isinstance(tensors, tuple | list) else [tensors])
            if isinstance(each, Tensor)
        ]
    state = packed.__getstate__() if packed._has_method("__getstate__") else ()
    inner = state[0][-1] if state and isinstance(state[0], tuple) else ()
    return [
        tensor
        for each in inner
        if isinstance(each, torch.ScriptObject)
        for tensor in _unpacked(each)
    ]


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs it under torch.compile."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; the module itself where it is no wrapper."""
    return getattr(module, "_orig_mod", module)


def compiles_its_hooks(module: nn.Module) -> bool:
    """Whether the module was compiled in place, so that a hook on it becomes part of what is compiled."""
    return module._compiled_call_impl is not None


def without_global_hooks(
    function: Any, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Any:
    """A method of `nn.Module` in which torch's global hooks, the user's among them, are not there, but these of ours are."""
    # It is torch's own code, with registries of ours in place of torch's. So a call takes as long
    # as one with global hooks, and neither the user's hooks nor other threads have any part in it.
    # `after` takes keyword arguments and is always called.
    registries: dict[str, Any] = {
        name: None if value is None else type(value)()
        for name, value in _NAMES.items()
        if name.startswith("_global_")
    }
    if before is not None:
        registries["_global_forward_pre_hooks"][0] = before
    if after is not None:
        registries["_global_forward_hooks"][1] = after
        registries["_global_forward_hooks_with_kwargs"][1] = registries[
            "_global_forward_hooks_always_called"
        ][1] = True
    function = inspect.unwrap(function)
    apart = FunctionType(
        function.__code__,
        {**_NAMES, **registries},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    apart.__kwdefaults__ = function.__kwdefaults__
    return apart


class InternalModule(nn.Module):
    """A module of ours for trials in the user's process.

    Making and calling it runs no global hook, but those of `hooked`.
    """

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        # past the user's hooks on that
        self._modules.update(children)

    @classmethod
    def hooked(
        cls, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        """From here on, call these for each module of the class."""
        cls._call_impl = without_global_hooks(_CALL, before, after)  # type: ignore[method-assign]

    __call__ = _WRAPPED_CALL


def compilations() -> int:
    """How many graphs torch.compile has compiled in this process.

    It does not load torch.compile.
    """
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else loaded.counters["stats"]["unique_graphs"]


def graph_breaks() -> int:
    """In how many places torch.compile has left its graphs in this process.

    It does not load torch.compile.
    """
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else sum(loaded.counters["graph_break"].values())


def compile_seconds() -> float:
    """How long torch.compile has compiled in this process. It does not load torch.compile."""
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    return (
        0.0
        if loaded is None
        else sum(loaded.compilation_time_metrics.get("_compile.compile_inner", ()))
    )


class Compilations:
    """Tells when torch.compile begins to compile something, anywhere in the process, and when it has ended, if that is asked for."""

    def __init__(
        self, tell: Callable[[], None], tell_end: Callable[[], None] = lambda: None
    ) -> None:
        self._tell, self._tell_end = (
            (lambda *_: tell()),
            (lambda *_: tell_end()),
            # torch says what it compiles
        )
        self._heard, self._heard_end = self._tell, self._tell_end

    @property
    def listens(self) -> bool:
        return self._heard in self._handler.start_callbacks if self._handler is not None else False

    def listen(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Listen from here on, if torch.compile is loaded."""
        self.stop()
        self._heard, self._heard_end = guard(self._tell), guard(self._tell_end)
        self.listen_again()

    def listen_again(self) -> None:
        """To be called now and then, because torch.compile may be loaded later, and torch.compiler.reset() ends it."""
        handler = self._handler
        if handler is not None and self._heard not in handler.start_callbacks:
            handler.register_start_callback(self._heard)
            handler.register_end_callback(self._heard_end)

    def stop(self) -> None:
        if self.listens:
            self._handler.remove_start_callback(self._heard)
        if self._handler is not None and self._heard_end in self._handler.end_callbacks:
            self._handler.remove_end_callback(self._heard_end)

    @property
    def _handler(self) -> Any:
        """What torch.compile calls as it begins and ends to compile.

        `None` where it is not loaded.
        """
        return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def remove_hook(hook: Callable[..., Any], owner: nn.Module | Optimizer | None = None) -> None:
    """Remove a hook wherever torch has it.

    A handle would be lost in an interrupt right after the hook was installed.
    """
    for registry in _registries(owner):
        for number in [number for number, each in list(registry.items()) if each is hook]:
            registry.pop(number, None)
            for marks in (_global_forward_hooks_with_kwargs, _global_forward_hooks_always_called):
                # torch leaves the first of these
                marks.pop(number, None)


def is_called_last(hook: Callable[..., Any]) -> bool:
    """Whether a global hook on the ends of optimizers' steps is the last one.

    It alone may add and remove such hooks as it is called.
    """
    return next(reversed(_global_optimizer_post_hooks.values()), None) is hook


def call_last(hook: Callable[..., Any]) -> None:
    """Let it be the last one from here on, until another one is added.

    To be called while none of them runs.
    """
    for number in [number for number, each in _global_optimizer_post_hooks.items() if each is hook]:
        _global_optimizer_post_hooks[number] = _global_optimizer_post_hooks.pop(number)


def _registries(owner: nn.Module | Optimizer | None) -> tuple[dict[int, Any], ...]:
    if isinstance(owner, nn.Module):
        return owner._forward_pre_hooks, owner._forward_hooks
    if isinstance(owner, Optimizer):
        return owner._optimizer_step_pre_hooks, owner._optimizer_step_post_hooks
    return (
        _global_forward_pre_hooks,
        _global_forward_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


def never_compiled(function: Callable[..., Any], *, within: bool = True) -> None:
    """Let dynamo never look into calls of a function, and `within` not into what it calls."""
    # Code that dynamo does not compile runs under its eye all the same: of a module that is
    # compiled in place, the hooks do. It costs a call nothing, and adds no frame, as
    # `torch.compiler.disable` does.
    skip, usual = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    eval_frame.set_code_exec_strategy(
        function.__code__, eval_frame._FrameExecStrategy(skip, skip if within else usual)
    )


class HiddenHooks:
    """Takes global module hooks off whenever torch.compile begins to compile, and puts them back when it has ended.

    Dynamo would compile them with the modules. A module that is called on another thread meanwhile
    is not hooked.
    """

    def __init__(self, hooks: Iterable[Callable[..., Any]]) -> None:
        self._hooks = {id(each) for each in hooks}
        self._registries: list[dict[int, Any]] = [_global_forward_pre_hooks, _global_forward_hooks]  # type: ignore[list-item,unused-ignore]
        self._before: list[dict[int, Any]] = []
        self._compilations = Compilations(self._hide, self._show)

    def start(self) -> None:
        """Begin, if torch.compile is loaded."""
        self._compilations.listen(unguarded)

    def stop(self) -> None:
        """End: hooks that are hidden stay off. It can be called again."""
        self._before.clear()
        self._compilations.stop()

    def _hide(self) -> None:
        if not self._before:
            self._before.extend(dict(each) for each in self._registries)
            for each in self._registries:
                for number in [number for number, hook in each.items() if id(hook) in self._hooks]:
                    del each[number]

    def _show(self) -> None:
        for each, was in zip(self._registries, self._before, strict=False):
            now = dict(each)
            # users' hooks are called in their order, ours among them
            each.clear()
            each.update(
                {
                    number: hook
                    for number, hook in was.items()
                    if number in now or id(hook) in self._hooks
                }
                | now
            )
        self._before.clear()


def scripted_without(undo: CleanupStack, is_ours: Callable[[Any], bool]) -> None:
    """Let TorchScript not see these hooks of modules, which it would compile, until `undo` is closed."""

    def stubs(call: Callable[..., Any], module: nn.Module) -> Any:
        hooks = module._forward_pre_hooks
        module._forward_pre_hooks = OrderedDict(
            each for each in hooks.items() if not is_ours(each[1])
        )
        try:
            return call(module)
        finally:
            module._forward_pre_hooks = hooks

    wrap(undo, _recursive, get_hook_stubs.__name__, stubs)
