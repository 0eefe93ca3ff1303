"""Record everything that a profiler could leave behind, as named facts to compare before and after."""

import atexit
import builtins
import contextlib
import copy
import gc
import itertools
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
MISSING = object()

# Everything that is patched to count: names in modules and classes. The flags that torch keeps
# about modes are such names too.
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
    """Stands for one object: equal to what stands for the same one.

    It keeps the object, so that no other can have its address.
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
    """The names of the facts that changed, came or went."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name, MISSING) != after.get(name, MISSING)
    )


def everything(model: nn.Module, *tensors: Tensor) -> Facts:
    """What has to be the same before and after."""
    copied = {
        "model: pickle": attempt(pickle.dumps, model),
        "model: deepcopy": attempt(copy.deepcopy, model),
    }
    weak = weak_references(model, *tensors)  # before any other fact keeps one of the objects
    facts = names() | settings() | global_hooks() | structure(model) | contents(model)
    return (
        facts
        | copied
        | weak
        | dict(
            itertools.chain.from_iterable(
                about(f"tensor {i}", each).items() for i, each in enumerate(tensors)
            )
        )
    )


def during(model: nn.Module) -> Facts:
    """What has to be the same even while a pass is running."""
    copied = {
        "model: pickle": attempt(pickle.dumps, model),
        "model: deepcopy": attempt(copy.deepcopy, model),
    }
    return names() | process() | structure(model) | copied


def settings() -> Facts:
    """What belongs to nobody's model.

    Of the process, of torch, of the generators of random numbers.
    """
    return process() | modes() | random_numbers()


def names() -> Facts:
    """What every name that is commonly patched stands for."""
    facts: Facts = {
        f"{owner}.{name}": Same(value)
        for owner, where in OWNERS.items()
        for name, value in vars(where).items()
        if not isinstance(value, ModuleType)
        and name not in ("__warningregistry__", "__slotnames__", "__annotations__", "_")
    }
    for name, packet in OPERATORS.items():
        facts[f"torch.ops.aten.{name}"] = Same(getattr(torch.ops.aten, name))
        for overload in packet.overloads():
            facts[f"torch.ops.aten.{name}.{overload}"] = Same(getattr(packet, overload))
            facts[f"torch.ops.aten.{name}.{overload}: kernels"] = held(
                getattr(packet, overload).py_kernels
            )
    return facts | {
        "torch.utils.flop_counter.flop_registry: entries": held(flop_counter.flop_registry)
    }


def settle() -> None:
    """Let what earlier tests have left go now, rather than between two looks.

    Our threads end, and garbage is collected.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("lflops"):
            thread.join(600)
    gc.collect()


def process() -> Facts:
    """What belongs to the whole process: streams, handlers, threads, files, filters."""
    root = logging.getLogger()
    return {
        **{
            f"sys.{name}": Same(getattr(sys, name))
            for name in ("stdin", "stdout", "stderr", *HOOKS_OF_SYS)
        },
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
        "directory": str(os.getcwd()),  # noqa: PTH109 - a Path would be another fact
    }


def open_files() -> Iterator[str]:
    """Where the file descriptors of this process lead to; nothing where the system does not tell."""
    if os.path.isdir("/proc/self/fd"):  # noqa: PTH112 - the plain form opens nothing
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the plain form opens nothing
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                yield os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115


def modes() -> Facts:
    """What torch is doing on this thread, and its settings."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = (
        (dynamo._stance.stance, Same(dynamo._stance.backend)) if dynamo else ("default", Same(None))
    )
    saved: Any = torch._C._autograd
    return {
        "dispatch modes": tuple(map(Same, _python_dispatch._get_current_dispatch_mode_stack())),
        "dispatch modes: flags": [
            value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")
        ],
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
    """The states of the generators that a model may draw from."""
    state: Any = np.random.get_state()  # noqa: NPY002 - the global one is the one that can be left changed
    kind, keys, *rest = state
    return {
        "random numbers: torch": torch.get_rng_state().numpy().tobytes(),
        "random numbers: python": random.getstate(),
        "random numbers: numpy": (kind, keys.tobytes(), *rest),
    }


def global_hooks() -> Facts:
    """The hooks on all modules and on all optimizers."""
    places = {"module": module_module, "optimizer": optimizer_module}
    return {
        f"hooks on every {kind}: {name}": held(value)
        for kind, place in places.items()
        for name, value in vars(place).items()
        if name.startswith("_global") and isinstance(value, dict)
    }


def structure(model: nn.Module) -> Facts:
    """Attributes, hooks, flags, classes of every module, parameter and buffer.

    What they are, not what is in them.
    """
    facts: Facts = {}
    for name, module in model.named_modules(prefix="model"):
        facts[f"{name}: attributes"] = held(vars(module), without="training")
        facts[f"{name}: training"] = module.training
        facts |= {
            f"{name}: {key}": held(value)
            for key, value in vars(module).items()
            if isinstance(value, dict)
        }
        for kind in type(module).__mro__[:-1]:
            facts[f"class {kind.__qualname__}"] = held(vars(kind), without="__slotnames__")
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                facts[f"{name}.{key}: attributes"] = held(vars(tensor))
                facts[f"{name}.{key}: requires_grad"] = tensor.requires_grad
                facts[f"{name}.{key}: hooks"] = hooks_of(tensor)
    return facts


def contents(model: nn.Module) -> Facts:
    """What is in the parameters, their gradients and the buffers, to the bit."""
    facts: Facts = {}
    for name, tensor in (
        *model.named_parameters(prefix="model"),
        *model.named_buffers(prefix="model"),
    ):
        facts[name] = bits(tensor)
        facts[f"{name}.grad"] = (Same(tensor.grad), bits(tensor.grad))
    return facts


def about(name: str, tensor: Tensor) -> Facts:
    """A tensor of the user's.

    What is in it, its gradient, its hooks, its attributes, and the graph that it came from.
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
    """How many watch each module and each storage."""
    facts: Facts = {
        f"{name}: weak references": weakref.getweakrefcount(module)
        for name, module in model.named_modules(prefix="model")
    }
    held_by_model = [*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")]
    for name, tensor in (
        *held_by_model,
        *((f"tensor {i}", each) for i, each in enumerate(tensors)),
    ):
        facts[f"{name}: weak references"] = (
            weakref.getweakrefcount(tensor),
            weakref.getweakrefcount(tensor.untyped_storage()),
        )
    return facts


def held(entries: Mapping[Any, Any], without: str = "") -> list[tuple[Any, Same]]:
    """Names and identities, in order."""
    return [
        (key, Same(value)) for key, value in entries.items() if str(key) != without
    ]  # a dispatch key cannot be compared with a text


def hooks_of(tensor: Tensor) -> list[tuple[Any, Same]]:
    """The hooks on a tensor, of both kinds."""
    return [*held(tensor._backward_hooks or {}), *held(tensor._post_accumulate_grad_hooks or {})]


def bits(tensor: Tensor | None) -> object:
    """Dtype, shape, strides and bytes."""
    if tensor is None:
        return None
    with torch.no_grad():
        plain = (
            tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        )
        return (
            plain.dtype,
            plain.shape,
            plain.stride(),
            plain.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(),
        )


def graph(tensor: Tensor) -> list[Any]:
    """Every node that the tensor was computed by."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting.extend(following for following, _ in node.next_functions)
    return list(nodes)


def attempt(function: Callable[[Any], object], value: object) -> str | None:
    """`None`, or the error's class, where there is one."""
    try:
        function(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the fact
        return type(error).__name__
    return None
