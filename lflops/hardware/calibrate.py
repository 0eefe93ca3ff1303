"""Measure the peaks of this machine with square matmuls in each dtype and a memory copy.

A measurement has several rounds. Each round runs all matmuls and the copy, so that a moment in
which the machine is slow affects all of them. In a round, each matmul and the copy run several
times in a row. These calls are timed together, and are called a block. The result of a measurement
is the median over the rounds. It is stored in a file in the user's cache folder, and is used again
for the same device, version of torch and number of threads.
"""

import contextlib
import datetime as dt
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from lflops.errors import HardwareError, LflopsError
from lflops.files import lock, open_lock, read, write_whole
from lflops.hardware.chips import Hardware, lookup, named
from lflops.inputs.devices import current, memory_of, properties_of
from lflops.inputs.run_info import device_name
from lflops.timing.clock import Clock, CpuWatch, clock_of, seconds_of
from lflops.torch_private.dispatch_modes import without_modes

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Assumed size in bytes of the last-level cache and of the free memory, if the system does not
# report them.
UNKNOWN_CACHE = 64 << 20
UNKNOWN_MEMORY = 1 << 30
# Size of the Infinity Cache of AMD's data-center GPUs, in bytes.
INFINITY_CACHE = 256 << 20
ROOT = pathlib.Path("/")
LONGEST_WAIT = 120.0
"""Maximum number of seconds to wait while another process measures the same machine.

Measuring a GPU takes half a minute.
"""
LOCK_INTERVAL = 0.1
"""Seconds between two attempts to lock the file with which processes take turns to measure."""
_BINARY_EXPONENTS = {"K": 10, "M": 20, "G": 30}


class TorchMachine:
    """A device of torch whose peaks can be measured.

    Attributes:
        device: The device.
        kind: The type of the device, such as `cuda`.
        name: The name that the driver reports.
        memory_bytes: Memory of the device; `None` if unknown.
        cache_bytes: Size of the last-level cache.
        dtypes: The names of the dtypes in which matmuls are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self.name = device_name(device)
        properties = properties_of(device)
        self.memory_bytes: int | None
        self.cache_bytes: int
        if self.kind == "cpu":
            self.memory_bytes = _memory_field(ROOT, "MemTotal")
            self.cache_bytes = last_level_cache(ROOT)
        else:
            self.memory_bytes = getattr(properties, "total_memory", None)
            self.cache_bytes = getattr(properties, "L2_cache_size", UNKNOWN_CACHE)
        is_amd = self.kind == "cuda" and bool(torch.version.hip)
        is_nvidia = self.kind == "cuda" and not is_amd
        if is_amd:
            # AMD's Infinity Cache is a cache after the L2 cache, and no property reports it.
            self.cache_bytes = max(self.cache_bytes, INFINITY_CACHE)
        has_tf32 = is_nvidia and properties.major >= 8
        self.dtypes = tuple(dtype for dtype in DTYPES if dtype != "tf32" or has_tf32)

    def free_bytes(self) -> int:
        memory = memory_of(self.device)
        return available_memory(ROOT) if memory is None else memory[0]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context without dispatch modes, in which the device is the current device.

        Autocast stays on, because it does not change matmuls with an `out` argument.
        """
        with without_modes(), current(self.device):
            yield

    def precision(self, dtype: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which float32 matmuls run in the given dtype, `fp32` or `tf32`.

        The user's setting is restored at the end. For other dtypes, the context does nothing.
        """
        if dtype in {"fp32", "tf32"}:
            return _float32_products(self.kind, tf32=dtype == "tf32")
        return contextlib.nullcontext()

    def product(self, dtype: str, size: int) -> Callable[[], object]:
        """Return a function that multiplies two square matrices of random numbers.

        `size` is the number of rows. The numbers are random because a GPU uses less power for
        zeros, so it would run faster than in a real training run.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": self.device}
        left = torch.empty(size, size, **options).normal_(generator=generator)
        right = torch.empty(size, size, **options).normal_(generator=generator)
        return partial(torch.mm, left, right, out=torch.empty(size, size, **options))

    def copy(self, size: int) -> Callable[[], object]:
        # The source is filled, because the system may map all pages that were never written to the
        # same memory.
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        return partial(torch.empty_like(source).copy_, source)


@contextlib.contextmanager
def _float32_products(kind: str, *, tf32: bool) -> Iterator[None]:
    backend: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if kind == "cuda":
        backend = torch.backends.cuda.matmul
    set_precision: Callable[[str], object]
    if hasattr(backend, "fp32_precision"):
        before = backend.fp32_precision
        wanted = "tf32" if tf32 else "ieee"
        set_precision = partial(setattr, backend, "fp32_precision")
        in_effect = "ieee" if before == "none" else before
        is_set = wanted == in_effect
    else:
        # torch before 2.9 has only one setting for all backends.
        before = torch.get_float32_matmul_precision()
        wanted = "high" if tf32 else "highest"
        set_precision = torch.set_float32_matmul_precision
        is_set = wanted == before
    if is_set:
        # The setting is not written again, because its value may come from a more general setting
        # of torch, which would then no longer have an effect.
        yield
        return
    set_precision(wanted)
    try:
        yield
    finally:
        set_precision(before)


def last_level_cache(root: pathlib.Path = ROOT) -> int:
    """Return the total size of the CPU's last-level caches in bytes.

    If the operating system does not report the caches, the result is `UNKNOWN_CACHE`. `root` is the
    folder that contains `sys`; tests pass another folder.
    """
    # Sizes of caches, keyed by the level of the cache, and then by the CPUs that share the cache.
    levels: dict[int, dict[str, int]] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            level = int(read(cache / "level"))
            size = read(cache / "size").decode().strip()
            sharers = read(cache / "shared_cpu_list").decode().strip()
            exponent = _BINARY_EXPONENTS.get(size[-1:], 0)
            levels.setdefault(level, {})[sharers] = int(size.rstrip("KMG")) << exponent
    return sum(levels[max(levels)].values()) if levels else UNKNOWN_CACHE


def available_memory(root: pathlib.Path = ROOT) -> int:
    """Return the number of bytes of host memory that this process can still use.

    It is at most the memory that the limits of control groups leave, for example in a container.
    """
    system = _memory_field(root, "MemAvailable")
    if system is None:
        system = UNKNOWN_MEMORY
    return max(0, min([system, *_left_in_groups(root)]))


def _memory_field(root: pathlib.Path, field: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in read(root / "proc/meminfo").decode().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return None


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """Yield the number of bytes that the limit of each control group leaves for this process.

    The innermost group comes first. Both versions of control groups are supported.
    """
    with contextlib.suppress(OSError):
        for line in read(root / "proc/self/cgroup").decode().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            if controllers:
                top = root / "sys/fs/cgroup/memory"
                limit = "memory.limit_in_bytes"
                used = "memory.usage_in_bytes"
            else:
                top = root / "sys/fs/cgroup"
                limit = "memory.max"
                used = "memory.current"
            group = top / name.lstrip("/")
            parents = [each for each in group.parents if each.is_relative_to(top)]
            # In a container, the folder of the group may exist only on the host. The folder `top`
            # then belongs to the container.
            for folder in dict.fromkeys([group, *parents, top]):
                # Without a limit, the file contains a word instead of a number, so `int` fails.
                with contextlib.suppress(OSError, ValueError):
                    free = _number_in(folder / limit) - _number_in(folder / used)
                    yield free + _inactive_file(folder)


def _number_in(file: pathlib.Path) -> int:
    return int(read(file))


def _inactive_file(group: pathlib.Path) -> int:
    """Return the number of bytes of a control group's file cache that the system can free."""
    fields = {}
    for line in read(group / "memory.stat").decode().splitlines():
        name, value = line.split()
        fields[name] = value
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


METHOD = 2
"""Version of the measuring method. Stored results of other versions are not used."""

SIZES = tuple(1 << exponent for exponent in range(8, 15))
"""Sizes of the square matrices to try: number of rows."""

SIZING_SECONDS = 4.0
"""Maximum seconds to search for the matrix size with the highest FLOP/s, for each dtype."""

PROBES = 3
"""Maximum number of blocks of calls that are timed for a matrix size or for the copy."""

PROBE_SECONDS = 0.02
"""Seconds that a block of calls takes when matrix sizes are compared."""

MEASURING_SECONDS = 12.0
"""Seconds of measuring after which no new round starts.

At least `FEWEST_ROUNDS` rounds are done in any case.
"""

BLOCK_SECONDS = 0.2
"""Seconds that a block of calls takes in a round."""

# Number of rounds of a measurement: `ROUNDS`, or on a slow machine fewer, down to `FEWEST_ROUNDS`.
ROUNDS = 11
FEWEST_ROUNDS = 3

PRODUCT_SHARE = 1 / 32
"""Maximum share of the free memory for the matrices of one dtype.

It is small because the matrices of all dtypes are in memory at the same time.
"""

COPY_SHARE = 1 / 4
"""Maximum share of the free memory for the source and the target of the copy."""

CACHES = 8
"""Total size of the copy's source and target, as a multiple of the last-level cache."""

FEWEST_CACHES = 4
"""Minimum size of the copy's source and target, as a multiple of the last-level cache.

If little memory is free, the copy is smaller than `CACHES` times the cache, but not smaller than
this minimum. An even smaller copy would measure the cache instead of the memory.
"""

# Bytes of an element in each dtype.
ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}

SOURCE = "measured by lflops.calibrate"
"""Beginning of the field `source` in the result of a measurement."""

BUSY = ", while other processes used the CPU"
"""Ending of the field `source` if the peaks may be too low, because other processes were running.

The result is then not used again, and the next run repeats the measurement.
"""

MOST_LOST = 0.03
"""Maximum share of the CPU time that other processes may use during a measurement."""

# The values that the argument `hardware` of a public function accepts, for an error message.
TAKEN = (
    'pass "auto", "measure", a name from lflops.hardware.names(), the path of a TOML file, an '
    "lflops.Hardware, or None"
)


def calibrate(
    device: torch.device | str | None = None,
    *,
    dtypes: Iterable[str] | None = None,
    fresh: bool = False,
    clock: Clock | None = None,
) -> Hardware:
    """Measure the peaks of this machine, or read the result of an earlier measurement.

    A measurement takes up to half a minute. Processes on the same machine measure one after
    another, because processes that measure at the same time reach only a part of the peaks. In a
    run with several ranks, one rank measures. All other ranks of the machine wait and read the
    result.

    Args:
        device: The CPU or an accelerator. Default: the accelerator if there is one.
        dtypes: The dtypes in which matmuls are measured, from `lflops.hardware.DTYPES`. Default:
            all dtypes in which the device can run matmuls.
        fresh: Whether to measure again even if a result is stored.
        clock: The clock that times the calls. Default: the clock of the device.

    Returns:
        FLOP/s of square matmuls, and bytes/s (read and written) of a copy that is too large for the
        cache. A dtype without a matmul on this device is left out. The bandwidth is `None` if too
        little memory is free to measure it.

    Raises:
        HardwareError: The device or a dtype cannot be measured.
    """
    machine = TorchMachine(_device(device))
    wanted = _checked(dtypes, machine)
    threads = torch.get_num_threads()
    key = (
        f"{METHOD} | {machine.name} | torch {torch.__version__} | {threads} threads | "
        f"{' '.join(wanted)}"
    )
    before = None if fresh else _known(key)
    if before is not None and not before.source.endswith(BUSY):
        return before
    with _one_process_at_a_time():
        known = None if fresh else _known(key)
        # Another process may have stored a new result during the wait.
        if known is not None and (known != before or not known.source.endswith(BUSY)):
            return known
        clock = clock or clock_of(machine.device)
        with machine.alone():
            peaks, bandwidth, is_busy = _measured(machine, clock, wanted)
        today = dt.datetime.now(dt.UTC).date().isoformat()
        plural = "" if threads == 1 else "s"
        source = f"{SOURCE}, {today}, torch {torch.__version__}, {threads} thread{plural}"
        if is_busy:
            source += BUSY
        hardware = Hardware(
            machine.name,
            peaks,
            bandwidth,
            machine.memory_bytes,
            source,
            machine.cache_bytes or None,
        )
        _write(_entries() | {key: msgspec.Raw(msgspec.json.encode(hardware))})
    return hardware


def forget(hardware: Hardware | None) -> bool:
    """Delete the stored result of a measurement, so that the next run measures again.

    Call this function if a real step was faster than the measured peaks allow.

    Returns:
        Whether `hardware` was stored.
    """
    if hardware is None or not hardware.source.startswith(SOURCE):
        return False
    entries = _entries()
    kept = {key: entry for key, entry in entries.items() if _known(key) != hardware}
    if len(kept) == len(entries):
        return False
    _write(kept)
    return True


def _measured(
    machine: TorchMachine, clock: Clock, dtypes: tuple[str, ...]
) -> tuple[dict[str, float], float | None, bool]:
    """Return the peaks, the bandwidth, and whether other processes used the CPU during measuring.

    If other processes used the CPU, everything is measured a second time, and the higher values are
    returned.
    """
    peaks: dict[str, float] = {}
    bandwidth: float | None = None
    for _ in range(2):
        watch = CpuWatch()
        found, copied = measure(machine, clock, dtypes)
        peaks = {dtype: max(rate, peaks.get(dtype, 0.0)) for dtype, rate in found.items()}
        bandwidth = max(filter(None, (bandwidth, copied)), default=None)
        lost = 0.0
        if machine.kind == "cpu":
            lost = watch.lost() or 0.0
        if lost <= MOST_LOST * (watch.used + lost):
            return peaks, bandwidth, False
    return peaks, bandwidth, True


def hardware_of(asked: Hardware | str | None, device: torch.device) -> Hardware | None:
    """Return the chip for the argument `hardware` of a public function.

    For `"auto"`, the name of the device is looked up, and the result is `None` if no table has this
    name. For `"measure"`, the device is measured. Any other text is the name of a chip or a TOML
    file. A `Hardware` or `None` is returned unchanged.
    """
    if asked is None or isinstance(asked, Hardware):
        return asked
    if asked == "auto":
        return lookup(device_name(device))
    if asked == "measure":
        return calibrate(device)
    if not isinstance(asked, str):
        raise HardwareError(f"hardware={asked!r}: {TAKEN}")
    return named(asked)


def measure(
    machine: TorchMachine, clock: Clock, dtypes: Iterable[str]
) -> tuple[dict[str, float], float | None]:
    """Measure a machine once, and return its peaks in FLOP/s and its bandwidth in bytes/s.

    The peaks are keyed by dtype. The bandwidth is `None` if too little memory is free.
    """
    free = machine.free_bytes()
    tasks: dict[str, _Task | None] = {}
    for dtype in dtypes:
        tasks[dtype] = _fastest(machine, clock, dtype, free * PRODUCT_SHARE)
    running = {name: task for name, task in tasks.items() if task is not None}
    if not running:
        raise HardwareError(
            f"{machine.name} has only {free} bytes of free memory, too few for a matmul in "
            f"{', '.join(tasks)}"
        )
    copy = _copy(machine, clock, free * COPY_SHARE)
    if copy is not None:
        running["copy"] = copy
    rates: dict[str, list[float]] = {}
    left = MEASURING_SECONDS
    for done in range(ROUNDS):
        if done >= FEWEST_ROUNDS and left <= 0:
            break
        for name, task in running.items():
            with machine.precision(name):
                seconds = _seconds(clock, task.run, task.calls)
            left -= seconds
            rates.setdefault(name, []).append(task.work * task.calls / seconds)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in rates.items()}
    bandwidth = medians.pop("copy", None)
    return medians, bandwidth


@dataclass(frozen=True)
class _Task:
    """A matmul or a copy that is measured.

    Attributes:
        work: FLOPs of one call, or bytes that one call reads and writes.
        run: The function that is called.
        calls: Number of calls that are timed together, as one block.
        rate: The best rate in a few short blocks, in FLOP/s or bytes/s.
    """

    work: float
    run: Callable[[], object]
    calls: int
    rate: float


def _fastest(machine: TorchMachine, clock: Clock, dtype: str, memory: float) -> _Task | None:
    """Return a matmul of the size with the highest FLOP/s, or `None` if no size can run.

    A larger size may be slower by chance, so sizes are tried until there is no time or memory left.
    `memory` is the number of bytes that the three matrices may use.
    """
    best: _Task | None = None
    left = SIZING_SECONDS
    for size in SIZES:
        if 3 * size**2 * ITEM_BYTES[dtype] > memory:
            break
        try:
            with machine.precision(dtype):
                task, spent = _probed(clock, 2 * size**3, machine.product(dtype, size))
        except RuntimeError:
            # torch has no matmul for this dtype on this device, or there is not enough memory.
            break
        if best is None or task.rate > best.rate:
            best = task
        left -= spent
        # A matmul of twice the size takes eight times as long, and is called at least three times.
        if 3 * 8 * task.work / task.rate > left:
            break
    return best


def _copy(machine: TorchMachine, clock: Clock, memory: float) -> _Task | None:
    """Return a copy whose source and target together are several times larger than the cache.

    `memory` is the number of bytes that source and target may use. Returns `None` if these bytes
    are too few.
    """
    working_set = min(CACHES * machine.cache_bytes, int(memory))
    if working_set < FEWEST_CACHES * machine.cache_bytes:
        return None
    # A multiple of the size of a float32.
    half = working_set // 8 * 4
    try:
        return _probed(clock, 2 * half, machine.copy(half))[0]
    except RuntimeError:
        # There is less memory than the system reported.
        return None


def _probed(clock: Clock, work: float, run: Callable[[], object]) -> tuple[_Task, float]:
    """Time a function in a few short blocks of calls.

    `work` is the FLOPs or bytes of one call. Returns the function as a `_Task` with its best rate,
    and the total seconds of all these calls.
    """
    # The first call includes the setup of the library that runs the matmul.
    first = _seconds(clock, run, 1)
    once = _seconds(clock, run, 1)
    calls = max(1, math.ceil(PROBE_SECONDS / once))
    probes = PROBES if once < BLOCK_SECONDS else 1
    blocks = [_seconds(clock, run, calls) for _ in range(probes)]
    best = min(once, min(blocks) / calls)
    calls_of_block = max(1, math.ceil(BLOCK_SECONDS / best))
    task = _Task(work, run, calls_of_block, work / best)
    return task, first + once + sum(blocks)


def _seconds(clock: Clock, run: Callable[[], object], calls: int) -> float:
    # The clock may return the same time before and after the calls.
    return max(seconds_of(clock, run, calls), 1e-9)


def _device(device: torch.device | str | None) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        taken = "pass 'cpu', because this machine has no accelerator"
    else:
        taken = f"pass 'cpu' or '{here.type}'"
    try:
        chosen = torch.device(device or here or "cpu")
    except (RuntimeError, TypeError) as error:
        raise HardwareError(f"device={device!r}: {taken}") from error
    if chosen.type == "cpu":
        return chosen
    if here is None or chosen.type != here.type:
        raise HardwareError(f"device={str(chosen)!r}: {taken}")
    count = torch.accelerator.device_count()
    if (chosen.index or 0) >= count:
        raise HardwareError(
            f"device={str(chosen)!r}: this machine has only {count} {chosen.type} "
            f"device{'' if count == 1 else 's'}"
        )
    return chosen


def _checked(dtypes: Iterable[str] | None, machine: TorchMachine) -> tuple[str, ...]:
    if dtypes is None:
        return machine.dtypes
    wanted = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    for dtype in wanted:
        if dtype not in machine.dtypes:
            raise HardwareError(
                f"dtypes contains {dtype!r}, which cannot be measured on {machine.kind}: use one "
                f"or more of {', '.join(machine.dtypes)}"
            )
    if not wanted:
        raise HardwareError(f"dtypes={dtypes!r}: pass one or more of {', '.join(machine.dtypes)}")
    return wanted


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Return a context that first waits until no other process of this user measures this machine.

    It waits for at most `LONGEST_WAIT` seconds. If the lock file cannot be created, it does not
    wait.
    """
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError, RuntimeError):
            folder = _cache_file().parent
            folder.mkdir(parents=True, exist_ok=True)
            # Several machines may share the folder.
            undo.enter_context(_locked(folder / f"calibration-{platform.node()}.lock"))
        yield


@contextlib.contextmanager
def _locked(
    path: pathlib.Path,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Lock a file inside a context. The variable after `as` is true if the file is locked.

    The file is not locked if another process keeps the lock for more than `LONGEST_WAIT` seconds.
    """
    file = open_lock(path)
    try:
        latest = now() + LONGEST_WAIT
        is_locked = lock(file)
        while not is_locked and now() < latest:
            sleep(LOCK_INTERVAL)
            is_locked = lock(file)
        yield is_locked
    finally:
        # Closing the file unlocks it. The system does the same at the end of the process.
        os.close(file)


def _cache_file() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = pathlib.Path.home() / ".cache"
    return folder / "lflops" / "calibration.json"


def _known(key: str) -> Hardware | None:
    """Return the stored result of a measurement, or `None` if it is missing or damaged."""
    with contextlib.suppress(KeyError, LflopsError, msgspec.MsgspecError):
        return msgspec.json.decode(_entries()[key], type=Hardware)
    return None


def _write(entries: Mapping[str, msgspec.Raw]) -> None:
    """Replace the stored results. If the file cannot be written, do nothing."""
    with contextlib.suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.format(msgspec.json.encode(entries)))


def _entries() -> dict[str, msgspec.Raw]:
    """Read all stored results of measurements, keyed by device and versions.

    The result is empty if the file is missing or damaged.
    """
    # A `RuntimeError` is raised if the user has no home folder.
    with contextlib.suppress(OSError, RuntimeError, msgspec.MsgspecError):
        return msgspec.json.decode(read(_cache_file()), type=dict[str, msgspec.Raw])
    return {}
