"""Profilers that each leave one change behind, to check that this change is detected.

Such a profiler is called a culprit. A test runs it and compares the facts about the process and the
model before and after.
"""

import atexit
import contextlib
import copy
import gc
import io
import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch, flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from tests.support.canary_model import Patient, watched
from tests.support.process_state import HOOKS_OF_SYS, OPERATORS

Culprit = Callable[[contextlib.ExitStack, Patient, Tensor], object]
"""A function that changes something for a model and its input, and registers how to undo it."""


class PlainMode(TorchDispatchMode):
    """A dispatch mode without any precaution for torch.compile."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class PlainFunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def patch(owner: object, name: str) -> Culprit:
    """Return a culprit that replaces an attribute of a module or class by a wrapper."""

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        # For a static method, `getattr` would return the plain function, which cannot be restored.
        original = vars(owner)[name]
        undo.callback(setattr, owner, name, original)

        def patched(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        setattr(owner, name, patched)

    return culprit


def there(tensor: Tensor | None) -> Tensor:
    """Return the tensor, and assert that it is not `None`."""
    assert tensor is not None
    return tensor


def first_filter_off() -> None:
    """Remove the newest filter of warnings."""
    filters: Any = warnings.filters
    filters.pop(0)


def write(to: Callable[[Patient, Tensor], object], name: str, value: object) -> Culprit:
    """Return a culprit that sets an attribute of an object, for example of a module.

    Undoing it restores the previous value, or deletes the attribute if there was none.
    """

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        owner = to(model, x)
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    return culprit


def enter(context: Callable[[], contextlib.AbstractContextManager[object]]) -> Culprit:
    """Return a culprit that enters a context manager and does not leave it."""

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        undo.enter_context(context())

    return culprit


def hook(register: Callable[[Patient, Tensor], Any]) -> Culprit:
    """Return a culprit that registers a hook and does not remove it."""

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        undo.callback(register(model, x).remove)

    return culprit


def call(
    function: Callable[[Patient, Tensor], object], undo_by: Callable[[], object] = lambda: None
) -> Culprit:
    """Return a culprit that calls a function.

    `undo_by` undoes it. This is only needed if the change is not in the model or the input.
    """

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        undo.callback(undo_by)
        function(model, x)

    return culprit


def python_kernel(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Register a kernel of an operator for a custom mode."""
    kernels = OPERATORS["mm"].default.py_kernels
    undo.callback(kernels.pop, PlainMode)
    kernels[PlainMode] = torch.mm


def pushed_mode(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Push a mode with a private function, which does not set the flags of torch, and leave it."""
    mode = PlainMode()  # type: ignore[no-untyped-call]

    def pop() -> None:
        # This function keeps a reference to the mode, because torch 2.8 may otherwise return a mode
        # that it has already freed.
        assert mode is _pop_mode()

    undo.callback(pop)
    _push_mode(mode)


def thread(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Start a thread that waits until the culprit is undone."""
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    undo.callback(waiting.join)
    undo.callback(over.set)
    waiting.start()


def finalizer(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Register a finalizer of a module."""
    undo.callback(weakref.finalize(model.head, watched).detach)


def finalized_storage(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Register a finalizer of a tensor's storage."""
    undo.callback(weakref.finalize(x.untyped_storage(), watched).detach)


def registry(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Add a formula to torch's table of formulas."""
    flop_counter.flop_registry[torch.ops.aten.relu] = watched
    undo.callback(flop_counter.flop_registry.pop, torch.ops.aten.relu)


def handler(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Add a handler to the root logger."""
    added = logging.NullHandler()
    logging.getLogger().addHandler(added)
    undo.callback(logging.getLogger().removeHandler, added)


def directory(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Change the current directory."""
    undo.callback(os.chdir, Path.cwd())
    os.chdir("/")


def functorch_level(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
    """Begin a vmap level and do not end it."""
    undo.callback(torch._C._functorch._vmap_decrement_nesting)
    torch._C._functorch._vmap_increment_nesting(2, "error")


def facts_about(buffer: str) -> list[str]:
    """Return the names of all facts about a buffer. They are new if the buffer is new."""
    return [
        buffer,
        f"{buffer}.grad",
        f"{buffer}: attributes",
        f"{buffer}: hooks",
        f"{buffer}: requires_grad",
        f"{buffer}: weak references",
    ]


FLAGS = sorted(name for name in vars(_python_dispatch) if name.startswith("_is_in_"))
ENTERED = [
    "dispatch modes",
    "dispatch modes: flags",
    *(f"torch.utils._python_dispatch.{flag}" for flag in FLAGS),
]
"""Names of the facts that change if a dispatch mode is entered with `with`."""


def setting(
    change: Callable[[Any], object], before: Callable[[], object], value: object
) -> Culprit:
    """Return a culprit that changes a setting of torch or Python.

    Args:
        change: Changes the setting.
        before: Returns the current value.
        value: The new value.
    """

    def culprit(undo: contextlib.ExitStack, model: Patient, x: Tensor) -> None:
        undo.callback(change, before())
        change(value)

    return culprit


# For each culprit, the names of all facts that it changes. No other fact may change.
CULPRITS: dict[str, tuple[Culprit, list[str]]] = {
    "patches a function": (patch(F, "linear"), ["torch.nn.functional.linear"]),
    "patches an operator's name": (patch(torch, "matmul"), ["torch.matmul"]),
    "patches einsum": (patch(torch, "einsum"), ["torch.einsum"]),
    "patches a tensor's operator": (
        write(lambda model, x: torch.Tensor, "__matmul__", watched),
        ["torch.Tensor.__matmul__"],
    ),
    "patches the call of modules": (
        patch(nn.Module, "__call__"),
        ["class Module", "torch.nn.Module.__call__"],
    ),
    "patches the forward of a class": (
        patch(nn.Linear, "forward"),
        ["class Linear", "torch.nn.Linear.forward"],
    ),
    "patches the model's class": (patch(Patient, "forward"), ["class Patient"]),
    "patches an optimizer": (patch(torch.optim.SGD, "step"), ["torch.optim.SGD.step"]),
    "patches all optimizers": (
        patch(torch.optim.Optimizer, "profile_hook_step"),
        ["torch.optim.Optimizer.profile_hook_step"],
    ),
    "patches an ATen packet": (patch(torch.ops.aten, "mm"), ["torch.ops.aten.mm"]),
    "patches backward": (patch(torch.autograd, "backward"), ["torch.autograd.backward"]),
    "gives an operator a kernel": (python_kernel, ["torch.ops.aten.mm.default: kernels"]),
    "adds to torch's formulas": (registry, ["torch.utils.flop_counter.flop_registry: entries"]),
    "writes on a module": (
        write(lambda model, x: model.head, "__flops__", 0),
        ["model.head: attributes"],
    ),
    "wraps a module's forward": (
        write(lambda model, x: model.head, "forward", partial(F.linear, weight=torch.ones(4, 8))),
        ["model.head: attributes"],
    ),
    "writes on a parameter": (
        write(lambda model, x: model.head.weight, "flops", 0),
        ["model.head.weight: attributes"],
    ),
    "writes on an input": (write(lambda model, x: x, "flops", 0), ["tensor 0: attributes"]),
    "leaves a forward hook": (
        hook(lambda model, x: model.norm.register_forward_hook(watched)),
        ["model.norm: _forward_hooks"],
    ),
    "leaves a pre hook": (
        hook(lambda model, x: model.norm.register_forward_pre_hook(watched)),
        ["model.norm: _forward_pre_hooks"],
    ),
    "leaves a hook on all modules": (
        hook(lambda model, x: register_module_forward_hook(watched)),
        ["hooks on every module: _global_forward_hooks"],
    ),
    "leaves a hook on all optimizers": (
        hook(lambda model, x: register_optimizer_step_pre_hook(watched)),
        ["hooks on every optimizer: _global_optimizer_pre_hooks"],
    ),
    "leaves a hook on an input": (
        hook(lambda model, x: x.register_hook(watched)),
        ["tensor 0: hooks"],
    ),
    "leaves a hook on a gradient": (
        hook(lambda model, x: model.head.weight.register_post_accumulate_grad_hook(watched)),
        ["model.head.weight: hooks"],
    ),
    "leaves a hook that cannot be pickled": (
        hook(lambda model, x: model.norm.register_forward_hook(lambda *_: None)),
        ["model.norm: _forward_hooks", "model: pickle"],
    ),
    "leaves a lock on a module": (
        write(lambda model, x: model.head, "lock", threading.Lock()),
        ["model.head: attributes", "model: deepcopy", "model: pickle"],
    ),
    "pushes a mode": (pushed_mode, ["dispatch modes"]),
    "enters a mode": (enter(PlainMode), ENTERED),
    "enters a function mode": (enter(PlainFunctionMode), ["function modes"]),
    "changes the grad mode": (enter(torch.no_grad), ["grad mode"]),
    "enters inference mode": (enter(torch.inference_mode), ["grad mode", "inference mode"]),
    "enters autocast": (enter(lambda: torch.autocast("cpu", torch.bfloat16)), ["autocast"]),
    "turns autocast's cache off": (
        setting(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, False),
        ["autocast: cache"],
    ),
    # The hooks return nothing, which is no problem, because no tensor is saved.
    "hooks in on saved tensors": (
        enter(lambda: torch.autograd.graph.saved_tensors_hooks(watched, watched)),  # type: ignore[arg-type]
        ["saved tensors hooks"],
    ),
    "looks for anomalies": (
        setting(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, True),
        ["anomaly mode"],
    ),
    "begins a vmap": (functorch_level, ["functorch"]),
    "begins a profile": (
        enter(lambda: torch.autograd.profiler.profile(use_kineto=False)),
        ["profiler"],
    ),
    "keeps the compiler eager": (
        enter(lambda: torch.compiler.set_stance("force_eager")),
        ["compiler stance"],
    ),
    "changes the default device": (
        enter(lambda: torch.device("meta")),
        ["default device", "function modes"],
    ),
    "changes the default dtype": (
        setting(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
        ["default dtype", "torch.Storage"],
    ),
    "changes torch's threads": (
        setting(torch.set_num_threads, torch.get_num_threads, 3),
        ["threads of torch"],
    ),
    "asks for determinism": (
        setting(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
        ),
        ["deterministic"],
    ),
    "draws from torch": (call(lambda model, x: torch.rand(1)), ["random numbers: torch"]),
    # These draw from the global generators on purpose.
    "draws from Python": (
        call(lambda model, x: random.random()),  # noqa: S311
        ["random numbers: python"],
    ),
    "draws from NumPy": (
        call(lambda model, x: np.random.rand()),  # noqa: NPY002
        ["random numbers: numpy"],
    ),
    "moves a buffer": (
        call(lambda model, x: there(model.norm.running_mean).add_(1)),
        ["model.norm.running_mean"],
    ),
    "replaces a buffer": (
        call(lambda model, x: setattr(model, "average", model.average.clone())),
        ["model: _buffers"],
    ),
    "fills an empty buffer": (
        call(lambda model, x: setattr(model, "mask", torch.ones(1))),
        ["model: _buffers", *facts_about("model.mask")],
    ),
    "adds a buffer": (
        call(lambda model, x: model.head.register_buffer("ops", torch.ones(1))),
        ["model.head: _buffers", *facts_about("model.head.ops")],
    ),
    "moves a parameter": (call(lambda model, x: model.head.bias.data.add_(1)), ["model.head.bias"]),
    "replaces a parameter": (
        call(lambda model, x: setattr(model.head, "bias", copy.copy(model.head.bias))),
        ["model.head.bias.grad", "model.head: _parameters"],
    ),
    "freezes a parameter": (
        call(lambda model, x: model.head.bias.requires_grad_(False)),
        ["model.head.bias: requires_grad"],
    ),
    "moves a gradient": (
        call(lambda model, x: there(model.head.bias.grad).add_(1)),
        ["model.head.bias.grad"],
    ),
    "replaces a gradient": (
        call(
            lambda model, x: setattr(model.head.bias, "grad", there(model.head.bias.grad).clone())
        ),
        ["model.head.bias.grad"],
    ),
    "drops a gradient": (
        call(lambda model, x: setattr(model.head.bias, "grad", None)),
        ["model.head.bias.grad"],
    ),
    "gives a frozen parameter a gradient": (
        call(lambda model, x: setattr(model.frozen.bias, "grad", torch.ones(8))),
        ["model.frozen.bias.grad"],
    ),
    "moves an input": (call(lambda model, x: x.data.add_(1)), ["tensor 0"]),
    "moves an input's gradient": (call(lambda model, x: there(x.grad).add_(1)), ["tensor 0.grad"]),
    "changes the training flag": (
        call(lambda model, x: model.norm.eval()),
        ["model.norm: training"],
    ),
    "watches a module": (finalizer, ["model.head: weak references", "weakref.finalize"]),
    "watches a storage": (finalized_storage, ["tensor 0: weak references", "weakref.finalize"]),
    **{
        f"swaps {name}": (write(lambda model, x: sys, name, io.StringIO()), [f"sys.{name}"])
        for name in ("stdin", "stdout", "stderr")
    },
    **{
        f"swaps {name}": (write(lambda model, x: sys, name, watched), [f"sys.{name}"])
        for name in HOOKS_OF_SYS
    },
    "swaps the threads' excepthook": (
        write(lambda model, x: threading, "excepthook", watched),
        ["threading.excepthook"],
    ),
    "swaps how warnings show": (
        write(lambda model, x: warnings, "showwarning", watched),
        ["warnings.showwarning"],
    ),
    "filters warnings": (
        call(lambda model, x: warnings.simplefilter("ignore"), first_filter_off),
        ["warnings.filters"],
    ),
    "traces": (setting(sys.settrace, sys.gettrace, watched), ["sys.settrace"]),
    "profiles": (setting(sys.setprofile, sys.getprofile, watched), ["sys.setprofile"]),
    "traces threads": (
        setting(threading.settrace, threading.gettrace, watched),
        ["threading.settrace"],
    ),
    "profiles threads": (
        setting(threading.setprofile, threading.getprofile, watched),
        ["threading.setprofile"],
    ),
    "recurses deeper": (
        setting(sys.setrecursionlimit, sys.getrecursionlimit, 4321),
        ["sys.setrecursionlimit"],
    ),
    "handles a signal": (
        setting(
            partial(signal.signal, signal.SIGUSR1),
            partial(signal.getsignal, signal.SIGUSR1),
            watched,
        ),
        ["signals"],
    ),
    "acts at exit": (
        call(lambda model, x: atexit.register(watched), lambda: atexit.unregister(watched)),
        ["atexit"],
    ),
    "stops the garbage collector": (call(lambda model, x: gc.disable(), gc.enable), ["gc"]),
    "sets a variable": (
        call(lambda model, x: os.environ.update(LFLOPS="0"), lambda: os.environ.pop("LFLOPS")),
        ["environment"],
    ),
    "leaves a file open": (enter(partial(Path(os.devnull).open, encoding="utf-8")), ["files"]),
    "leaves a thread": (thread, ["threads"]),
    "handles the log": (handler, ["logging"]),
    "changes the directory": (directory, ["directory"]),
}
