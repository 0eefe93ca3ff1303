"""Access internals of modules: children, buffers, packed parameters, hooks, and compilation."""

import contextlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.error_guard import CleanupStack, unguarded, wrap
from lflops.garbage import SearchTimeout, alive
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
_CALL = nn.Module._call_impl
_WRAPPED_CALL = nn.Module._wrapped_call_impl
"""`_CALL` and `_WRAPPED_CALL` are the methods of `nn.Module` at the time when lflops is imported.

They are saved here because a user may replace the methods of `nn.Module` later.
"""


def child_modules(module: nn.Module) -> Iterable[tuple[str, nn.Module | None]]:
    """Return the children of a module by name.

    Unlike in `named_children`, a child with two names is included twice, and children that are
    `None` are also included.
    """
    return module._modules.items()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module by name.

    Unlike `named_buffers`, this includes `None` entries.
    """
    return module._buffers


def self_parts(module: nn.Module) -> tuple[list[Any], ...]:
    """Return the children and the parameters of a module, as two lists.

    No method of the module's class is called, because the user may have overridden it. Both lists
    are empty if the module is not initialized.
    """
    attributes = vars(module)
    children = _without_none(attributes.get("_modules", {}))
    parameters = _without_none(attributes.get("_parameters", {}))
    return children, parameters


def _without_none(named: Mapping[str, Any]) -> list[Any]:
    return [value for value in named.values() if value is not None]


def packed_parameters(module: nn.Module) -> list[Tensor]:
    """Return the weights and biases of a quantized module, which are packed in C++ objects."""
    parameters = []
    for value in vars(module).values():
        if isinstance(value, torch.ScriptObject):
            parameters += _unpacked(value)
    return parameters


def _unpacked(packed: Any) -> list[Tensor]:
    """Return the tensors in a C++ object with packed parameters.

    The object of a recurrent cell contains further such objects.
    """
    tensors: list[Tensor] = []
    if packed._has_method("unpack"):
        unpacked = packed.unpack()
        values = unpacked if isinstance(unpacked, tuple | list) else [unpacked]
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value.detach())
        return tensors
    state = packed.__getstate__() if packed._has_method("__getstate__") else ()
    if state and isinstance(state[0], tuple):
        for inner in state[0][-1]:
            if isinstance(inner, torch.ScriptObject):
                tensors += _unpacked(inner)
    return tensors


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling the module runs it under torch.compile."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper that `torch.compile` made.

    Any other module is returned unchanged.
    """
    return getattr(module, "_orig_mod", module)


def compiled_wrapper(module: nn.Module) -> nn.Module:
    """Return the wrapper that `torch.compile(module)` has returned, if there is one.

    Otherwise, the module itself is returned. Hooks must be registered on the wrapper: hooks on the
    module inside it would cause a new compilation.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None or is_compiled(module):
        return module
    with contextlib.suppress(SearchTimeout):
        wrapper: nn.Module
        for wrapper in alive({eval_frame.OptimizedModule}):
            if wrapper._orig_mod is module:
                return wrapper
    return module


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether the module was compiled in place, so that hooks on it are compiled with it."""
    return module._compiled_call_impl is not None


def without_global_hooks(
    function: Any, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Any:
    """Return a copy of a method of `nn.Module` that calls only the given global hooks.

    The copy has torch's code but separate registries of global hooks. So a call of the copy takes
    as long as a call with global hooks, but it runs none of the user's global hooks. The given
    hooks run only in calls of the copy, not in modules that other threads call.

    Args:
        function: The method.
        before: Hook that is called before forward.
        after: Hook that is called after forward, even after an exception. It also receives the
            keyword arguments of forward.
    """
    registries: dict[str, Any] = {}
    for name, value in _NAMES.items():
        if name.startswith("_global_"):
            registries[name] = None if value is None else type(value)()
    if before is not None:
        registries["_global_forward_pre_hooks"][0] = before
    if after is not None:
        registries["_global_forward_hooks"][1] = after
        registries["_global_forward_hooks_with_kwargs"][1] = True
        registries["_global_forward_hooks_always_called"][1] = True
    function = inspect.unwrap(function)
    isolated = FunctionType(
        function.__code__,
        {**_NAMES, **registries},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    isolated.__kwdefaults__ = function.__kwdefaults__
    return isolated


class InternalModule(nn.Module):
    """A module that lflops uses for its own small tests (trials) in the user's process.

    Creating and calling it does not run the user's global hooks. It runs only the hooks that are
    passed to `hooked`.
    """

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        # `add_module` would run the user's global registration hooks.
        self._modules.update(children)

    @classmethod
    def hooked(
        cls, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        """Make all modules of this class call the given hooks before and after forward."""
        cls._call_impl = without_global_hooks(_CALL, before, after)  # type: ignore[method-assign]

    __call__ = _WRAPPED_CALL


def compilations() -> int:
    """Return the number of graphs that torch.compile has compiled in this process.

    The function does not load torch.compile.
    """
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    graphs: int = loaded.counters["stats"]["unique_graphs"]
    return graphs


def graph_breaks() -> int:
    """Return the number of graph breaks of torch.compile in this process.

    The function does not load torch.compile.
    """
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    return sum(loaded.counters["graph_break"].values())


def compile_seconds() -> float:
    """Return the seconds that torch.compile has spent compiling in this process.

    The function does not load torch.compile.
    """
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0.0
    return float(sum(loaded.compilation_time_metrics.get("_compile.compile_inner", ())))


class Compilations:
    """Calls functions when torch.compile starts and ends compiling, anywhere in the process."""

    def __init__(
        self, on_start: Callable[[], None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        # Torch passes a description of the compilation to both functions, which they do not need.
        self._on_start: Callable[..., None] = lambda *_: on_start()
        self._on_end: Callable[..., None] = lambda *_: on_end()
        self._guarded_start: Callable[..., None] = self._on_start
        self._guarded_end: Callable[..., None] = self._on_end

    @property
    def listens(self) -> bool:
        """Return whether torch.compile will call the functions."""
        handler = self._handler
        return handler is not None and self._guarded_start in handler.start_callbacks

    def listen(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Register the functions with torch.compile, if it is loaded.

        Args:
            guard: Wraps each function before it is registered, for example to handle its errors.
        """
        self.stop()
        self._guarded_start = guard(self._on_start)
        self._guarded_end = guard(self._on_end)
        self.listen_again()

    def listen_again(self) -> None:
        """Register the functions again, if they are not registered.

        Call this from time to time, because torch.compile may be loaded later, and
        `torch.compiler.reset()` removes the registration.
        """
        handler = self._handler
        if handler is not None and self._guarded_start not in handler.start_callbacks:
            handler.register_start_callback(self._guarded_start)
            handler.register_end_callback(self._guarded_end)

    def stop(self) -> None:
        """Unregister the functions.

        A second call does nothing.
        """
        handler = self._handler
        if handler is None:
            return
        if self._guarded_start in handler.start_callbacks:
            handler.remove_start_callback(self._guarded_start)
        if self._guarded_end in handler.end_callbacks:
            handler.remove_end_callback(self._guarded_end)

    @property
    def _handler(self) -> Any:
        """The registry of torch.compile's callbacks, or `None` if torch.compile is not loaded."""
        return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def remove_hook(hook: Callable[..., Any], owner: nn.Module | Optimizer | None = None) -> None:
    """Remove a hook from a module or an optimizer, or remove a global hook if `owner` is `None`.

    The hook is found without the handle that torch returned for it, because an interrupt (Ctrl-C)
    right after the registration would lose the handle.
    """
    for registry in _registries(owner):
        for number, each in list(registry.items()):
            if each is hook:
                registry.pop(number, None)
                # The handle's `remove` would leave the first of these two entries in place.
                _global_forward_hooks_with_kwargs.pop(number, None)
                _global_forward_hooks_always_called.pop(number, None)


def is_called_last(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is the last of the global hooks that run after an optimizer step.

    Only the last hook may register or remove such hooks while it runs, because torch is iterating
    over them.
    """
    return next(reversed(_global_optimizer_post_hooks.values()), None) is hook


def call_last(hook: Callable[..., Any]) -> None:
    """Make a hook the last of the global hooks that run after an optimizer step.

    Do not call this while one of these hooks runs.
    """
    hooks = _global_optimizer_post_hooks
    for number, each in list(hooks.items()):
        if each is hook:
            hooks[number] = hooks.pop(number)


def hooks_before_forward(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._forward_pre_hooks.values()]


def hooks_after_forward(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._forward_hooks.values()]


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that run when backward has computed the gradient of a parameter."""
    before: dict[int, Any] = parameter._backward_hooks or {}
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [*before.values(), *after.values()]


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
    """Prevent dynamo from compiling a function.

    Dynamo compiles all code that a compiled module calls, including hooks. Unlike
    `torch.compiler.disable`, this function adds no wrapper, so calls are not slower.

    Args:
        function: The function.
        within: Whether the functions that it calls are not compiled either.
    """
    skip = eval_frame._FrameAction.SKIP
    in_callees = skip if within else eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, in_callees)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


class HiddenHooks:
    """Removes global module hooks while torch.compile compiles, and restores them afterwards.

    Otherwise, dynamo would compile the hooks together with the modules. If another thread calls a
    module during a compilation, the module runs without the hooks.
    """

    def __init__(self, hooks: Iterable[Callable[..., Any]]) -> None:
        self._hooks = {id(each) for each in hooks}
        self._registries: list[dict[int, Any]] = [_global_forward_pre_hooks, _global_forward_hooks]  # type: ignore[list-item,unused-ignore]
        self._before: list[dict[int, Any]] = []
        self._compilations = Compilations(self._hide, self._show)

    def start(self) -> None:
        """Hide the hooks during each compilation from now on, if torch.compile is loaded."""
        self._compilations.listen(unguarded)

    def stop(self) -> None:
        """Stop hiding the hooks in further compilations.

        If a compilation is running, the hooks that were hidden for it are not restored. A second
        call does nothing.
        """
        self._before.clear()
        self._compilations.stop()

    def _hide(self) -> None:
        if self._before:
            return
        for registry in self._registries:
            self._before.append(dict(registry))
            for number, hook in list(registry.items()):
                if id(hook) in self._hooks:
                    del registry[number]

    def _show(self) -> None:
        for registry, before in zip(self._registries, self._before, strict=False):
            now = dict(registry)
            # The user's hooks keep their order, with the hidden hooks in between.
            registry.clear()
            for number, hook in before.items():
                if number in now or id(hook) in self._hooks:
                    registry[number] = hook
            registry.update(now)
        self._before.clear()


def scripted_without(undo: CleanupStack, is_ours: Callable[[Any], bool]) -> None:
    """Hide some hooks of modules from TorchScript, until `undo` is closed.

    Otherwise, TorchScript would compile the hooks.

    Args:
        undo: Ends the hiding when it is closed.
        is_ours: Returns whether a hook must be hidden.
    """

    def visible(hooks: dict[int, Callable[..., Any]]) -> Any:
        return OrderedDict((number, hook) for number, hook in hooks.items() if not is_ours(hook))

    def stubs(call: Callable[..., Any], module: nn.Module) -> Any:
        before = module._forward_pre_hooks
        after = module._forward_hooks
        module._forward_pre_hooks = visible(before)
        module._forward_hooks = visible(after)
        try:
            return call(module)
        finally:
            module._forward_pre_hooks = before
            module._forward_hooks = after

    wrap(undo, _recursive, get_hook_stubs.__name__, stubs)
