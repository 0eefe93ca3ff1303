"""Call torch's functions for accelerators under the names that all backends share.

The backends are CUDA, XPU, MPS, and backends outside torch.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, supported_activities

from lflops.torch_private.dispatch_modes import without_modes


def runtime(device: torch.device) -> Any:
    """Return the module of torch, such as `torch.cuda`, that can synchronize with a device.

    Raises:
        RuntimeError: Torch cannot use the device on this machine, or cannot synchronize with it.
    """
    found = torch.accelerator if is_accelerator(device) else torch.get_device_module(device)
    if not hasattr(found, "synchronize") or not hasattr(found, "current_stream"):
        raise RuntimeError(f"torch.{device.type} has no streams")
    return found


def is_accelerator(device: torch.device) -> bool:
    """Return whether this process uses devices of this type as its accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def with_index(device: torch.device) -> torch.device:
    """Return the device with an index: its own index, or else the index of the current device."""
    index: int | None = device.index
    if index is not None:
        return device
    if is_accelerator(device):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device(device.type, runtime(device).current_device())


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device is the current device of its type."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    # MPS has only one device, and no such context.
    context = getattr(torch.get_device_module(device), "device", None)
    return contextlib.nullcontext() if context is None else context(device)


def allocator_stats(device: torch.device) -> Mapping[str, int]:
    """Return the statistics of the device's allocator, keyed as in `torch.cuda.memory_stats`.

    The mapping is empty if the device has no statistics.
    """
    return _called(device, "memory_stats") or {}


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Return the free and total bytes of the device's memory, or `None` if unknown."""
    found = _called(device, "mem_get_info", "get_memory_info")
    if found is None:
        return None
    free, total = found
    return int(free), int(total)


def properties_of(device: torch.device) -> Any:
    """Return the device's properties from its driver, or `None` if torch cannot read them."""
    return _called(device, "get_device_properties")


def random_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(*_device_arguments(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, *_device_arguments(device))


def _device_arguments(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments with which functions of a device's torch module are called.

    They are the device itself, or nothing for MPS, because functions of `torch.mps` accept no
    device.
    """
    return () if device.type == "mps" else (device,)


def profiler_activity(device: torch.device) -> ProfilerActivity | None:
    """Return the `ProfilerActivity` with which torch.profiler records a device.

    Returns `None` if torch.profiler cannot record this type of device, for example MPS.
    """
    with without_modes():
        # A backend outside torch may have renamed this device type.
        outside = torch.device("privateuseone").type
    names = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU", outside: "PrivateUse1"}
    activity: ProfilerActivity | None = getattr(ProfilerActivity, names.get(device.type, ""), None)
    if activity not in supported_activities():
        return None
    return activity


def _called(device: torch.device, name: str, of_accelerator: str | None = None) -> Any:
    """Call a function of the device's torch module, such as `torch.cuda`, and return its result.

    If the module lacks the function, a function of `torch.accelerator` is called instead. Pass the
    name of that function as `of_accelerator` if it is different. Returns `None` if neither function
    exists or the backend does not implement it. Also returns `None` if nothing has used the device
    yet, because the call would initialize the device.
    """
    module = None
    if device.type != "cpu":
        module = getattr(torch, device.type, None)
    function = getattr(module, name, None)
    if function is None and is_accelerator(device):
        # torch 2.8 lacks some of these functions.
        function = getattr(torch.accelerator, of_accelerator or name, None)
    if function is None or not getattr(module, "is_initialized", lambda: True)():
        return None
    try:
        return function(*_device_arguments(device))
    except RuntimeError:
        # The backend does not implement the function.
        return None


def has_tf32(device_type: str | None) -> bool:
    """Return whether the device can multiply in TF32.

    This requires an NVIDIA GPU of the Ampere architecture or later. The environment variable
    `NVIDIA_TF32_OVERRIDE` can forbid TF32.
    """
    if device_type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def multiplies_in_tf32(operator: str) -> bool:
    """Return whether torch's settings let an operator multiply float32 matrices in TF32.

    By default, the settings allow this for cuDNN's convolutions and RNNs. Other operators use TF32
    only if the user allows it.
    """
    cudnn: Any = torch.backends.cudnn
    if "convolution" in operator:
        return bool(cudnn.enabled and _allows_tf32(getattr(cudnn, "conv", cudnn), cudnn))
    if "_rnn" in operator:
        return bool(cudnn.enabled and _allows_tf32(getattr(cudnn, "rnn", cudnn), cudnn))
    matmul = torch.backends.cuda.matmul
    return _allows_tf32(matmul, matmul)


def _allows_tf32(backend: Any, backend_before_2_9: Any) -> bool:
    precision = getattr(backend, "fp32_precision", None)
    if precision is None:
        return bool(backend_before_2_9.allow_tf32)
    return bool(precision == "tf32")
