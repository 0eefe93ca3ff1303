"""Record the state that a profiler could change, as named facts to compare before and after."""

import atexit
import builtins
import contextlib
import copy
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_module
from torch.optim import optimizer as optimizer_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch, checkpoint, flop_counter

Facts = dict[str, Any]
"""Values by name. Two values are equal if nothing has changed."""
MISSING = object()

# The modules and classes whose names a profiler may patch. Some of these names are flags, with
# which torch records which modes are entered.
OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch.linalg": torch.linalg,
    "torch.autograd": torch.autograd,
    "torch.compiler": torch.compiler,
    "torch.nn.functional": nn.functional,
    "torch.nn.init": nn.init,
    "torch.Tensor": torch.Tensor,
    "torch.TensorBase": torch._C.TensorBase,
    "torch.nn.Module": nn.Module,
    "torch.nn.Linear": nn.Linear,
    "torch.nn.modules.module": module_module,
    "torch.optim.optimizer": optimizer_module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.SGD": torch.optim.SGD,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.utils.checkpoint": checkpoint,
    "torch.utils._python_dispatch": _python_dispatch,
    "torch.utils.flop_counter": flop_counter,
    "builtins": builtins,
    "time": time,
}
OPERATORS = {
    name: getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "matmul", "linear", "convolution", "add", "t", "sum")
}
HOOKS_OF_SYS = ("excepthook", "unraisablehook", "displayhook")
SIGNALS = [each for each in signal.valid_signals() if each not in (signal.SIGKILL, signal.SIGSTOP)]


class Same:
    """The identity of an object: two of these are equal if they hold the same object.

    It keeps a reference to the object, so that no other object can have the same address.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def differences(before: Facts, after: Facts) -> list[str]:
    """Return the names of the facts that have changed, are new, or are gone."""
    changed = []
    for name in before.keys() | after.keys():
        if before.get(name, MISSING) != after.get(name, MISSING):
            changed.append(name)
    return sorted(changed)


def everything(model: nn.Module, *tensors: Tensor) -> Facts:
    """Return all facts about the process, a model and its inputs.

    They must be the same before and after a call of lflops.
    """
    copied = copies(model)
    # Weak references are counted first, because other facts keep references to the objects.
    weak = weak_references(model, *tensors)
    facts = names() | settings() | global_hooks() | structure(model) | contents(model)
    facts |= copied
    facts |= weak
    for i, tensor in enumerate(tensors):
        facts |= about(f"tensor {i}", tensor)
    return facts


def during(model: nn.Module) -> Facts:
    """Return the facts that must not change even while lflops counts or times a pass."""
    copied = copies(model)
    return names() | process() | structure(model) | copied


def copies(model: nn.Module) -> Facts:
    """Return facts that show whether the model can be pickled and copied."""
    return {
        "model: pickle": attempt(pickle.dumps, model),
        "model: deepcopy": attempt(copy.deepcopy, model),
    }


def settings() -> Facts:
    """Return the facts that do not depend on a model.

    They describe the process, the modes and settings of torch, and the random generators.
    """
    return process() | modes() | random_numbers()


def names() -> Facts:
    """Return the objects behind all names that profilers commonly patch."""
    volatile = ("__warningregistry__", "__slotnames__", "__annotations__", "_")
    facts: Facts = {}
    for owner, where in OWNERS.items():
        for name, value in vars(where).items():
            if not isinstance(value, ModuleType) and name not in volatile:
                facts[f"{owner}.{name}"] = Same(value)
    for name, packet in OPERATORS.items():
        facts[f"torch.ops.aten.{name}"] = Same(getattr(torch.ops.aten, name))
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            facts[f"torch.ops.aten.{name}.{overload}"] = Same(operator)
            facts[f"torch.ops.aten.{name}.{overload}: kernels"] = held(operator.py_kernels)
    registry = held(flop_counter.flop_registry)
    return facts | {"torch.utils.flop_counter.flop_registry: entries": registry}


def settle() -> None:
    """Wait for the threads of lflops to end, and collect garbage.

    So nothing that earlier tests have left disappears between two records of the facts.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("lflops"):
            thread.join(600)
    gc.collect()


def process() -> Facts:
    """Return facts about the whole process, such as streams, handlers, threads and open files."""
    root = logging.getLogger()
    of_sys = {}
    for name in ("stdin", "stdout", "stderr", *HOOKS_OF_SYS):
        of_sys[f"sys.{name}"] = Same(getattr(sys, name))
    return of_sys | {
        "sys.settrace": Same(sys.gettrace()),
        "sys.setprofile": Same(sys.getprofile()),
        "sys.setrecursionlimit": sys.getrecursionlimit(),
        "threading.settrace": Same(threading.gettrace()),
        "threading.setprofile": Same(threading.getprofile()),
        "threading.excepthook": Same(threading.excepthook),
        "threads": {Same(each) for each in threading.enumerate()},
        "files": sorted(open_files()),
        "warnings.filters": tuple(warnings.filters),
        "warnings.showwarning": Same(warnings.showwarning),
        "logging": (root.level, tuple(map(Same, root.handlers)), logging.root.manager.disable),
        "signals": {number: Same(signal.getsignal(number)) for number in SIGNALS},
        "atexit": atexit._ncallbacks(),
        "weakref.finalize": len(weakref.finalize._registry),  # type: ignore[attr-defined]
        "gc": (gc.isenabled(), gc.get_threshold(), held(dict(enumerate(gc.callbacks)))),
        "environment": dict(os.environ),
        "directory": str(os.getcwd()),  # noqa: PTH109
    }


def open_files() -> Iterator[str]:
    """Yield the target of each open file descriptor of this process.

    Yields nothing on systems without `/proc/self/fd`. It uses the functions of `os`, because they
    open no other file.
    """
    if os.path.isdir("/proc/self/fd"):  # noqa: PTH112
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
            # The list contains the descriptor of the folder itself, which is closed by now.
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115


def modes() -> Facts:
    """Return the modes of torch on this thread, and its settings."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = ("default", Same(None))
    if dynamo:
        stance = (dynamo._stance.stance, Same(dynamo._stance.backend))
    flags = []
    for name, value in vars(_python_dispatch).items():
        if name.startswith("_is_in_"):
            flags.append(value)
    saved: Any = torch._C._autograd
    return {
        "dispatch modes": tuple(map(Same, _python_dispatch._get_current_dispatch_mode_stack())),
        "dispatch modes: flags": flags,
        "function modes": tuple(map(Same, _get_current_function_mode_stack())),
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "saved tensors hooks": held(
            dict(enumerate(saved._top_saved_tensors_default_hooks(True) or ()))
        ),
        "autocast": tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
        "autocast: cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads of torch": torch.get_num_threads(),
        "profiler": torch._C._autograd._profiler_enabled(),
        "compiler stance": stance,
    }


def random_numbers() -> Facts:
    """Return the states of the global random generators of torch, Python and NumPy."""
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, *rest = state
    return {
        "random numbers: torch": torch.get_rng_state().numpy().tobytes(),
        "random numbers: python": random.getstate(),
        "random numbers: numpy": (kind, keys.tobytes(), *rest),
    }


def global_hooks() -> Facts:
    """Return the hooks that apply to all modules and to all optimizers."""
    places = {"module": module_module, "optimizer": optimizer_module}
    facts: Facts = {}
    for kind, place in places.items():
        for name, value in vars(place).items():
            if name.startswith("_global") and isinstance(value, dict):
                facts[f"hooks on every {kind}: {name}"] = held(value)
    return facts


def structure(model: nn.Module) -> Facts:
    """Return the attributes, hooks, flags and classes of all modules, parameters and buffers.

    The numbers in parameters and buffers are not included; see `contents`.
    """
    facts: Facts = {}
    for name, module in model.named_modules(prefix="model"):
        facts[f"{name}: attributes"] = held(vars(module), without="training")
        facts[f"{name}: training"] = module.training
        for key, value in vars(module).items():
            if isinstance(value, dict):
                facts[f"{name}: {key}"] = held(value)
        for kind in type(module).__mro__[:-1]:
            facts[f"class {kind.__qualname__}"] = held(vars(kind), without="__slotnames__")
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                facts[f"{name}.{key}: attributes"] = held(vars(tensor))
                facts[f"{name}.{key}: requires_grad"] = tensor.requires_grad
                facts[f"{name}.{key}: hooks"] = hooks_of(tensor)
    return facts


def contents(model: nn.Module) -> Facts:
    """Return the exact numbers in all parameters, their gradients, and the buffers."""
    facts: Facts = {}
    for name, tensor in tensors_of(model):
        facts[name] = bits(tensor)
        facts[f"{name}.grad"] = (Same(tensor.grad), bits(tensor.grad))
    return facts


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of all parameters and buffers."""
    return [*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")]


def about(name: str, tensor: Tensor) -> Facts:
    """Return facts about a tensor of the user.

    They are its numbers, gradient, hooks and attributes, and the autograd graph that computed it.
    """
    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    return {
        name: bits(tensor),
        f"{name}.grad": (Same(grad), bits(grad)),
        f"{name}: attributes": held(vars(tensor)),
        f"{name}: hooks": hooks_of(tensor),
        f"{name}: graph": [(Same(node), held(node.metadata)) for node in graph(tensor)],
    }


def weak_references(model: nn.Module, *tensors: Tensor) -> Facts:
    """Return the number of weak references to each module, tensor and storage."""
    facts: Facts = {}
    for name, module in model.named_modules(prefix="model"):
        facts[f"{name}: weak references"] = weakref.getweakrefcount(module)
    named = tensors_of(model)
    for i, each in enumerate(tensors):
        named.append((f"tensor {i}", each))
    for name, tensor in named:
        facts[f"{name}: weak references"] = (
            weakref.getweakrefcount(tensor),
            weakref.getweakrefcount(tensor.untyped_storage()),
        )
    return facts


def held(entries: Mapping[Any, Any], without: str = "") -> list[tuple[Any, Same]]:
    """Return the keys and the identities of the values in order, without the entry `without`."""
    found = []
    for key, value in entries.items():
        # The key is converted, because a dispatch key cannot be compared with a text.
        if str(key) != without:
            found.append((key, Same(value)))
    return found


def hooks_of(tensor: Tensor) -> list[tuple[Any, Same]]:
    """Return the hooks on a tensor: backward hooks and post-accumulate-grad hooks."""
    return [*held(tensor._backward_hooks or {}), *held(tensor._post_accumulate_grad_hooks or {})]


def bits(tensor: Tensor | None) -> object:
    """Return the dtype, shape, strides and bytes of a tensor."""
    if tensor is None:
        return None
    with torch.no_grad():
        plain = tensor.detach()
        if tensor.layout is not torch.strided:
            plain = plain.to_dense()
        return (
            plain.dtype,
            plain.shape,
            plain.stride(),
            plain.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(),
        )


def graph(tensor: Tensor) -> list[Any]:
    """Return all nodes of the autograd graph that computed a tensor."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting.extend(following for following, _ in node.next_functions)
    return list(nodes)


def attempt(function: Callable[[Any], object], value: object) -> str | None:
    """Call a function, and return the name of the error's class, or `None` if there was none."""
    try:
        function(value)
    except Exception as error:  # noqa: BLE001 - the class of any error is the fact
        return type(error).__name__
    return None
