"""Access dispatch modes, and the stack of active modes of each thread."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch._C import DisableTorchFunction
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _python_dispatch._disable_current_modes
)
"""Returns a context in which no dispatch mode receives the operators that run."""


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Return a context in which lflops can run its own small tests (trials) of torch.

    The trials run in the user's process. Inside the context, no mode, default device or
    saved-tensor hook of the user is active on this thread. Gradients are recorded, and autocast on
    the CPU is off. Settings of the whole process (the default dtype, anomaly mode, deterministic
    algorithms) are not changed, because other threads may be training. Therefore a trial sets the
    dtype of its tensors explicitly, and calls only operators that these settings do not affect.
    """
    with (
        DisableTorchFunction(),
        without_modes(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(torch.autocast("cpu", enabled=False))
        # Only the innermost hooks are called, so these hooks replace the user's hooks. If torch
        # forbids such hooks, there are none to replace.
        with contextlib.suppress(RuntimeError):
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


class InternalMode(TorchDispatchMode):
    """Base class of the dispatch modes of lflops.

    `without_own_modes` uses this class to distinguish them from the user's modes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def record_constructed(self, args: tuple[Any, ...], tensor: Any) -> None:
        """Record a new tensor of a subclass.

        Constructors of subclasses run without the modes of lflops, so the mode did not receive the
        operator that created the tensor.
        """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return `False`, so that torch adds no wrapper around the mode's `__torch_dispatch__`.

        The wrapper would prevent dynamo from compiling this method. But it would also load dynamo
        and double the cost of each operator.
        """
        return False


def open_modes() -> list[Any]:
    """Return the modes on this thread's stack, the innermost last.

    While a mode handles an operator, it is not on the stack.
    """
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def route_higher_order_operators(kind: type[TorchDispatchMode]) -> None:
    """Let a mode class receive higher-order operators, such as `torch.cond`.

    Newer versions of torch do this by themselves. In torch 2.8, a rule must be registered with each
    operator for this mode class.
    """
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        for each in torch._ops._higher_order_ops.values():
            each.python_key_table.setdefault(
                kind,
                lambda mode, *args, _of=each, **kwargs: mode.__torch_dispatch__(
                    _of, (), args, kwargs
                ),
            )


def can_stay_compiled() -> bool:
    """Return whether compiled code can stay compiled while a mode is active.

    In newer versions of torch, a mode has a setting that makes torch.compile ignore the mode. In
    older versions, compiled code runs without compilation while a mode is active.
    """
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def is_tracing() -> bool:
    """Return whether operators are being traced into a graph.

    For example, `torch.cond` traces its backward into a graph.
    """
    proxies: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies._CURRENT_MAKE_FX_TRACER is not None


def push_mode(mode: TorchDispatchMode) -> None:
    """Put a mode on top of this thread's stack.

    The mode's `__enter__` is not used. It would also notify dynamo of the mode, and dynamo would
    then not compile some frames.
    """
    _python_dispatch._push_mode(mode)


@contextlib.contextmanager
def on_stack(mode: TorchDispatchMode) -> Iterator[None]:
    """Put a mode on top of this thread's stack with `push_mode`, inside the context."""
    push_mode(mode)
    try:
        yield
    finally:
        _pop_mode(mode)


@contextlib.contextmanager
def without_own_modes() -> Iterator[list[InternalMode]]:
    """Remove the modes of lflops from this thread's stack inside the context, and yield them.

    All other modes stay on the stack.
    """
    before = open_modes()
    own = [mode for mode in before if isinstance(mode, InternalMode)]
    if not own:
        yield own
        return
    for mode in own:
        _pop_mode(mode)
    try:
        yield own
    finally:
        lowest = before.index(own[0])
        for _ in range(lowest, len(open_modes())):
            _python_dispatch._pop_mode()
        for mode in before[lowest:]:
            _python_dispatch._push_mode(mode)


def end_mode(mode: Any) -> None:
    """Remove a mode permanently. A second call does nothing.

    After a backward pass, torch restores the stack of modes from before the pass, so a mode that
    was removed during backward comes back. Therefore the mode is also marked as off and does
    nothing from then on. `sweep_modes` removes it again after the pass.
    """
    mode.is_off = True
    sweep_modes()


def sweep_modes() -> None:
    """Remove from this thread's stack the modes that `end_mode` has marked as off."""
    for mode in open_modes():
        if getattr(mode, "is_off", False):
            _pop_mode(mode)


def _pop_mode(mode: TorchDispatchMode) -> None:
    """Remove a mode from this thread's stack, even if other modes are on top of it."""
    above = []
    top = _python_dispatch._pop_mode()
    while top is not mode:
        above.append(top)
        top = _python_dispatch._pop_mode()
    for each in reversed(above):
        _python_dispatch._push_mode(each)
