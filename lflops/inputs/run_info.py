"""Facts about a run: versions, host, device, dtype."""

import datetime as dt
import multiprocessing.process
import os
import pathlib
import platform
from collections.abc import Iterable

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.parameter import is_lazy

from lflops.inputs.batch import samples_and_tokens
from lflops.inputs.devices import allocator_stats
from lflops.inputs.tensors import device_of, dtype_name, shapes_of, tensors_in
from lflops.profile.profile import Run
from lflops.profile.series import summed
from lflops.version import __version__


def run_of(
    parameters: Iterable[Tensor], args: tuple[object, ...], kwargs: dict[str, object]
) -> Run:
    tensors = [each for each in parameters if not is_lazy(each)]
    device = device_of(tensors)
    samples, tokens = samples_and_tokens(tensors_in((args, kwargs)))
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
        precision=f"autocast {dtype_name(torch.get_autocast_dtype(device.type))}"
        if _autocasts(device)
        else None,
        shapes=shapes_of(args, kwargs),
        samples_per_step=samples,
        tokens_per_step=tokens,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        # that the process may use
        else os.cpu_count(),
        # multiprocessing's own function would also collect those that have ended, which is for who
        # started them.
        workers=len(getattr(multiprocessing.process, "_children", ())),
    )


def with_allocator_peaks(run: Run, device: torch.device) -> Run:
    """The facts with the peaks of the device's allocator.

    It keeps these sums on the host, so nothing waits for the device.
    """
    peak = allocator_stats(device).get
    return replace(
        run,
        allocated_bytes=peak("allocated_bytes.all.peak"),
        reserved_bytes=peak("reserved_bytes.all.peak"),
    )


def _dtype(tensors: list[Tensor], device: torch.device) -> str | None:
    """The dtype of contractions: that of autocast, else that of most parameters."""
    if _autocasts(device):
        return dtype_name(torch.get_autocast_dtype(device.type))
    sizes = summed(
        (each.dtype, each.numel())
        for each in tensors
        if each.dtype.is_floating_point or each.dtype.is_complex
    )
    return dtype_name(max(sizes, key=sizes.__getitem__)) if sizes else None


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def device_name(device: torch.device) -> str:
    """The name of a device, from its driver; of a CPU, from the system."""
    if device.type != "cpu":
        named = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return device.type if named is None else str(named(device))
    processors = pathlib.Path("/proc/cpuinfo")
    if processors.exists():
        for line in processors.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
