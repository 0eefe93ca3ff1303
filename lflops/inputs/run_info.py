"""Describe a run: the versions of software, the host, the device, the dtype and the batch size."""

import datetime as dt
import multiprocessing.process
import os
import platform
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.parameter import is_lazy

from lflops.files import read
from lflops.inputs.batch_size import batch_size
from lflops.inputs.devices import allocator_stats
from lflops.inputs.tensors import device_of, dtype_name, named_arguments, shapes_of
from lflops.profile.profile import Run
from lflops.version import __version__


def run_of(
    parameters: Iterable[Tensor], args: tuple[object, ...], kwargs: dict[str, object]
) -> Run:
    """Describe a run from the model's parameters and the arguments of a call (a batch)."""
    tensors = [parameter for parameter in parameters if not is_lazy(parameter)]
    device = device_of(tensors)
    named = dict(named_arguments(args, kwargs))
    size = batch_size(named.keys(), named.values())
    precision = None
    if _autocasts(device):
        precision = f"autocast {dtype_name(torch.get_autocast_dtype(device.type))}"
    return Run(
        kind="count",
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        versions={
            "lflops": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        host=platform.node(),
        device_name=device_name(device),
        device_type=device.type,
        dtype=_dtype(tensors, device),
        precision=precision,
        shapes=shapes_of(args, kwargs),
        samples_per_step=size.samples,
        tokens_per_step=size.tokens,
        samples_from=size.samples_from,
        tokens_from=size.tokens_from,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        cores=_usable_cores(),
        workers=_worker_processes(),
    )


def _usable_cores() -> int | None:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _worker_processes() -> int:
    """Return the number of child processes, such as the workers of data loaders.

    `multiprocessing.active_children` is not used, because it also reaps processes that have ended.
    Only the code that started a process should reap it.
    """
    return len(getattr(multiprocessing.process, "_children", ()))


def with_allocator_peaks(run: Run, device: torch.device) -> Run:
    """Return the run with the peak memory that the device's allocator has recorded.

    The allocator keeps its statistics on the host, so nothing waits for the device.
    """
    peak = allocator_stats(device).get
    return replace(
        run,
        allocated_bytes=peak("allocated_bytes.all.peak"),
        reserved_bytes=peak("reserved_bytes.all.peak"),
    )


def _dtype(tensors: list[Tensor], device: torch.device) -> str | None:
    """Return the dtype in which the model's matmuls run.

    This is the dtype of autocast if autocast is on. Otherwise, it is the floating-point or complex
    dtype with the most parameter elements.
    """
    if _autocasts(device):
        return dtype_name(torch.get_autocast_dtype(device.type))
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            elements[tensor.dtype] += tensor.numel()
    if not elements:
        return None
    return dtype_name(max(elements, key=elements.__getitem__))


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def device_name(device: torch.device) -> str:
    """Return the name that the driver of a device reports.

    For a CPU, return the name that the operating system reports.
    """
    if device.type != "cpu":
        named = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return device.type if named is None else str(named(device))
    with suppress(OSError):
        for line in read("/proc/cpuinfo").decode(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
