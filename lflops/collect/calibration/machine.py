"""What is measured: a device, the products and copies that run on it, its caches and the memory that is free."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lflops.collect.inputs.devices import current, memory_of, properties_of
from lflops.collect.inputs.run_info import device_name
from lflops.collect.torch_private.dispatch_modes import without_modes

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UNKNOWN_CACHE = 64 << 20
UNKNOWN_MEMORY = 1 << 30
INFINITY_CACHE = 256 << 20
ROOT = pathlib.Path("/")


class TorchMachine:
    """A device of torch's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self.name = device_name(device)
        is_cpu, properties = self.kind == "cpu", properties_of(device)
        nvidia = self.kind == "cuda" and not torch.version.hip
        self.memory_bytes = _memory_field(ROOT, "MemTotal") if is_cpu else getattr(properties, "total_memory", None)
        self.cache_bytes: int = last_level_cache(ROOT) if is_cpu else getattr(properties, "L2_cache_size", UNKNOWN_CACHE)
        if self.kind == "cuda" and not nvidia:
            self.cache_bytes = max(self.cache_bytes, INFINITY_CACHE)  # AMD's stands behind the L2, and no property tells of it
        has_tf32 = nvidia and properties.major >= 8
        self.dtypes = tuple(dtype for dtype in DTYPES if dtype != "tf32" or has_tf32)

    def free_bytes(self) -> int:
        """What could be allocated."""
        memory = memory_of(self.device)
        return available_memory(ROOT) if memory is None else memory[0]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, no mode sees what runs, and the current stream is the device's. Autocast leaves products with an `out` alone."""
        with without_modes(), current(self.device):
            yield

    def precision(self, dtype: str) -> contextlib.AbstractContextManager[None]:
        """Products of float32 in full precision or in TF32, independent of the user's setting."""
        return _float32_products(self.kind, tf32=dtype == "tf32") if dtype in {"fp32", "tf32"} else contextlib.nullcontext()

    def product(self, dtype: str, size: int) -> Callable[[], object]:
        """A function that multiplies two square matrices of random numbers: with zeros a GPU stays cool, and is too fast."""
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": self.device}
        left, right = (torch.empty(size, size, **options).normal_(generator=generator) for _ in range(2))
        return partial(torch.mm, left, right, out=torch.empty(size, size, **options))

    def copy(self, size: int) -> Callable[[], object]:
        """A function that copies so many bytes."""
        # Written to: pages that never were are all one and the same to the system.
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        return partial(torch.empty_like(source).copy_, source)


@contextlib.contextmanager
def _float32_products(kind: str, *, tf32: bool) -> Iterator[None]:
    backend: Any = torch.backends.cuda.matmul if kind == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    set_precision: Callable[[str], object]
    if hasattr(backend, "fp32_precision"):
        before, wanted = backend.fp32_precision, "tf32" if tf32 else "ieee"
        set_precision = partial(setattr, backend, "fp32_precision")
        asked = wanted == ("ieee" if before == "none" else before)
    else:  # before torch 2.9
        before, wanted = torch.get_float32_matmul_precision(), "high" if tf32 else "highest"
        set_precision = torch.set_float32_matmul_precision
        asked = wanted == before
    if asked:
        yield  # a setting that is not made need not be put back, nor comes to stand where a wider one spoke before
        return
    set_precision(wanted)
    try:
        yield
    finally:
        set_precision(before)


def last_level_cache(root: pathlib.Path = ROOT) -> int:
    """Bytes of the last level of the CPUs' caches, all of them together; a guess where the system does not say."""
    levels: dict[int, dict[str, int]] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            level, size, sharers = (cache.joinpath(field).read_text().strip() for field in ("level", "size", "shared_cpu_list"))
            levels.setdefault(int(level), {})[sharers] = int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1:], 0)
    return sum(levels[max(levels)].values()) if levels else UNKNOWN_CACHE


def available_memory(root: pathlib.Path = ROOT) -> int:
    """Bytes that the host can still hand out, within the limits of every control group that this process is in."""
    system = _memory_field(root, "MemAvailable")
    return max(0, min([UNKNOWN_MEMORY if system is None else system, *_left_in_groups(root)]))


def _memory_field(root: pathlib.Path, field: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return None


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """What the limits leave, from the process's own group up; of both versions of the control groups."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            group = top / name.lstrip("/")
            # Within a container the path can be one that only its host has; the top is the container's own group then.
            for folder in dict.fromkeys([group, *(each for each in group.parents if each.is_relative_to(top)), top]):
                with contextlib.suppress(OSError, ValueError):  # no limit is a word, not a number
                    reclaimable = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                    cached = int(reclaimable.get("total_inactive_file", reclaimable.get("inactive_file", 0)))
                    yield int((folder / limit).read_text()) - int((folder / used).read_text()) + cached
