"""What torch has for a device that is no CPU, by the names that its backends share.

CUDA's, XPU's, MPS's, and those outside of torch.
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
    """The module that waits for the device.

    A `RuntimeError` where torch has no such device here, or cannot wait for it.
    """
    found = torch.accelerator if is_accelerator(device) else torch.get_device_module(device)
    if not hasattr(found, "synchronize") or not hasattr(found, "current_stream"):
        raise RuntimeError(f"torch.{device.type} has no streams")
    return found


def is_accelerator(device: torch.device) -> bool:
    """Whether it is of the kind that torch has as its accelerator here.

    Of all kinds in a process that is one.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def with_index(device: torch.device) -> torch.device:
    """The device with its number; without one, that of the device that is current now."""
    index: int | None = device.index
    if index is not None:
        return device
    found = runtime(device)
    return torch.device(
        device.type,
        found.current_device_index() if found is torch.accelerator else found.current_device(),
    )


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within it, the device is the current one of its kind."""
    within = (
        None if device.type == "cpu" else getattr(torch.get_device_module(device), "device", None)
        # MPS has but one device
    )
    return contextlib.nullcontext() if within is None else within(device)


def allocator_stats(device: torch.device) -> Mapping[str, int]:
    """What the device's allocator counts on the host, by the names of `torch.cuda.memory_stats`.

    Empty where it counts nothing.
    """
    return _called(device, "memory_stats") or {}


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the device's memory: free, and in total; `None` where torch does not know."""
    found = _called(device, "mem_get_info", "get_memory_info")
    return None if found is None else (int(found[0]), int(found[1]))


def properties_of(device: torch.device) -> Any:
    """What the device's driver says of it; `None` for a CPU, and where torch does not ask."""
    return _called(device, "get_device_properties")


def random_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(*_given(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, *_given(device))


def _given(device: torch.device) -> tuple[torch.device, ...]:
    """The arguments by which functions of the device's module know it.

    MPS has but one device, and its functions take none.
    """
    return () if device.type == "mps" else (device,)


def profiler_activity(device: torch.device) -> ProfilerActivity | None:
    """What torch.profiler calls the device's work; `None` where it can record none, as on MPS."""
    with without_modes():
        outside = torch.device(
            "privateuseone"
            # by the name that a backend outside of torch has given itself
        ).type
    names = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU", outside: "PrivateUse1"}
    activity: ProfilerActivity | None = getattr(ProfilerActivity, names.get(device.type, ""), None)
    return activity if activity in supported_activities() else None


def _called(device: torch.device, name: str, of_accelerator: str | None = None) -> Any:
    """Call a function of the device's module, or where it has none, that of `torch.accelerator`."""
    # `None` where nothing has used the device yet, which asking would initialise, and where there
    # is no such function
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    function = getattr(module, name, None)
    if function is None and is_accelerator(device):
        # torch 2.8 has none
        function = getattr(torch.accelerator, of_accelerator or name, None)
    if function is None or not getattr(module, "is_initialized", lambda: True)():
        return None
    try:
        return function(*_given(device))
    except RuntimeError:
        # the backend has not implemented it
        return None


def has_tf32(device_type: str | None) -> bool:
    """Whether it is a GPU of NVIDIA's from Ampere on."""
    is_nvidia = (
        device_type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available()
    )
    return (
        is_nvidia
        and torch.cuda.get_device_capability() >= (8, 0)
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    )


def multiplies_in_tf32(operator: str) -> bool:
    """Whether torch lets such a GPU multiply float32 in TF32 there.

    In convolutions unless forbidden, else where it is allowed.
    """
    cudnn: Any = torch.backends.cudnn
    kind = "conv" if "convolution" in operator else "rnn" if "_rnn" in operator else ""
    backend: Any = getattr(cudnn, kind, cudnn) if kind else torch.backends.cuda.matmul
    # before torch 2.9 there is none
    precision = getattr(backend, "fp32_precision", None)
    allows = (cudnn if kind else backend).allow_tf32 if precision is None else precision == "tf32"
    return bool(allows and (cudnn.enabled or not kind))
