"""The peaks that this machine reaches.

Square matrix products by dtype, and a copy through its memory.

Every figure is a median over rounds in which all of them take turns, so that a slow moment falls on
each. What was measured is kept in a file of the user's, and not measured again on the same device
with the same torch and as many threads.
"""

import contextlib
import datetime as dt
import math
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from lflops.errors import HardwareError, LflopsError
from lflops.files import write_whole
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
        self.memory_bytes = (
            _memory_field(ROOT, "MemTotal") if is_cpu else getattr(properties, "total_memory", None)
        )
        self.cache_bytes: int = (
            last_level_cache(ROOT)
            if is_cpu
            else getattr(properties, "L2_cache_size", UNKNOWN_CACHE)
        )
        if self.kind == "cuda" and not nvidia:
            self.cache_bytes = max(
                self.cache_bytes,
                INFINITY_CACHE,
                # AMD's stands behind the L2, and no property tells of it
            )
        has_tf32 = nvidia and properties.major >= 8
        self.dtypes = tuple(dtype for dtype in DTYPES if dtype != "tf32" or has_tf32)

    def free_bytes(self) -> int:
        memory = memory_of(self.device)
        return available_memory(ROOT) if memory is None else memory[0]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, no mode sees what runs, and the current stream is the device's.

        Autocast leaves products with an `out` alone.
        """
        with without_modes(), current(self.device):
            yield

    def precision(self, dtype: str) -> contextlib.AbstractContextManager[None]:
        """Products of float32 in full precision or in TF32, independent of the user's setting."""
        return (
            _float32_products(self.kind, tf32=dtype == "tf32")
            if dtype in {"fp32", "tf32"}
            else contextlib.nullcontext()
        )

    def product(self, dtype: str, size: int) -> Callable[[], object]:
        """A function that multiplies two square matrices of random numbers.

        With zeros a GPU stays cool, and is too fast.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": self.device}
        left, right = (
            torch.empty(size, size, **options).normal_(generator=generator) for _ in range(2)
        )
        return partial(torch.mm, left, right, out=torch.empty(size, size, **options))

    def copy(self, size: int) -> Callable[[], object]:
        # Written to: pages that never were are all one and the same to the system.
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        return partial(torch.empty_like(source).copy_, source)


@contextlib.contextmanager
def _float32_products(kind: str, *, tf32: bool) -> Iterator[None]:
    backend: Any = (
        torch.backends.cuda.matmul
        if kind == "cuda"
        else getattr(torch.backends.mkldnn, "matmul", None)
    )
    set_precision: Callable[[str], object]
    if hasattr(backend, "fp32_precision"):
        before, wanted = backend.fp32_precision, "tf32" if tf32 else "ieee"
        set_precision = partial(setattr, backend, "fp32_precision")
        asked = wanted == ("ieee" if before == "none" else before)
    else:
        # before torch 2.9
        before, wanted = torch.get_float32_matmul_precision(), "high" if tf32 else "highest"
        set_precision = torch.set_float32_matmul_precision
        asked = wanted == before
    if asked:
        # a setting that is not made need not be put back, nor comes to stand where a wider one
        # spoke before
        yield
        return
    set_precision(wanted)
    try:
        yield
    finally:
        set_precision(before)


def last_level_cache(root: pathlib.Path = ROOT) -> int:
    """Bytes of the last level of the CPUs' caches, all of them together.

    A guess where the system does not say.
    """
    levels: dict[int, dict[str, int]] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            level, size, sharers = (
                cache.joinpath(field).read_text().strip()
                for field in ("level", "size", "shared_cpu_list")
            )
            levels.setdefault(int(level), {})[sharers] = int(size.rstrip("KMG")) << {
                "K": 10,
                "M": 20,
                "G": 30,
            }.get(size[-1:], 0)
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
    """What the limits leave, from the process's own group up.

    Of both versions of the control groups.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            limit, used = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes")
                if controllers
                else ("memory.max", "memory.current")
            )
            group = top / name.lstrip("/")
            # Within a container the path can be one that only its host has; the top is the
            # container's own group then.
            for folder in dict.fromkeys(
                [group, *(each for each in group.parents if each.is_relative_to(top)), top]
            ):
                # no limit is a word, not a number
                with contextlib.suppress(OSError, ValueError):
                    reclaimable = dict(
                        each.split() for each in (folder / "memory.stat").read_text().splitlines()
                    )
                    cached = int(
                        reclaimable.get("total_inactive_file", reclaimable.get("inactive_file", 0))
                    )
                    yield (
                        int((folder / limit).read_text())
                        - int((folder / used).read_text())
                        + cached
                    )


if sys.platform != "win32":
    import fcntl

# counted up when figures are measured in another way, so that older ones are not taken for new
METHOD = 2

SIZES = tuple(1 << exponent for exponent in range(8, 15))
SIZING_SECONDS, PROBES, PROBE_SECONDS = 4.0, 3, 0.02

MEASURING_SECONDS, BLOCK_SECONDS = 12.0, 0.2
ROUNDS, FEWEST_ROUNDS = 11, 3

PRODUCT_SHARE, COPY_SHARE = 1 / 32, 1 / 4
"""Of the free memory: the operands of one dtype, and both ends of the copy.

They are all held at once.
"""

CACHES, FEWEST_CACHES = (
    8,
    4,
    # how many times the last-level cache the copy works on; less than the fewer would measure the cache
)

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}

SOURCE, BUSY = "measured by lflops.calibrate", ", while other processes used the CPU"
"""How the source of measured figures begins.

And how it ends where they are too low, so that the next run measures again.
"""

MOST_LOST = (
    # the share of the CPU time that other processes may take while the peaks are measured
    0.03
)

TAKEN = 'give "auto", "measure", a name of lflops.hardware.names(), a TOML file, an lflops.Hardware, or None'


def calibrate(
    device: torch.device | str | None = None,
    *,
    dtypes: Iterable[str] | None = None,
    fresh: bool = False,
    clock: Clock | None = None,
) -> Hardware:
    """Measure the peaks that this machine reaches, which takes up to half a minute, or read what was measured before.

    Processes of one machine measure one after another: at once, each would reach only a part of the
    peaks. Of the ranks of a training the first one measures, and the others wait and read its
    figures.

    Args:
        device: The CPU or an accelerator; `None` is the accelerator where there is one.
        dtypes: Which products to measure, some of `lflops.hardware.DTYPES`; `None` is all that run
            on the device.
        fresh: Measure again, even if figures are stored.
        clock: What times a block; `None` is the device's own.

    Returns:
        FLOP/s of square matrix products, and bytes/s (read and written) of a copy too large for any
        cache. A dtype without a product on this device is left out. The bandwidth is `None` if too
        little memory is free to measure it.

    Raises:
        HardwareError: The device or a dtype is none that can be measured.
    """
    machine = TorchMachine(_device(device))
    wanted = _checked(dtypes, machine)
    threads = torch.get_num_threads()
    key = f"{METHOD} | {machine.name} | torch {torch.__version__} | {threads} threads | {' '.join(wanted)}"
    before = None if fresh else _known(key)
    if before is not None and not before.source.endswith(BUSY):
        return before
    with _one_process_at_a_time():
        known = None if fresh else _known(key)
        if known is not None and (
            known != before or not known.source.endswith(BUSY)
            # another rank has measured meanwhile
        ):
            return known
        with machine.alone():
            peaks, bandwidth, is_busy = _measured(
                machine, clock or clock_of(machine.device), wanted
            )
        today = dt.datetime.now(dt.UTC).date().isoformat()
        source = f"{SOURCE}, {today}, torch {torch.__version__}, {threads} thread{'s' * (threads != 1)}{BUSY * is_busy}"
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
    """Remove figures that a step has exceeded, so that the next run measures again.

    Returns whether they were measured, and are removed.
    """
    if hardware is None or not hardware.source.startswith(SOURCE):
        return False
    entries = _entries()
    kept = {key: entry for key, entry in entries.items() if _known(key) != hardware}
    if len(kept) < len(entries):
        _write(kept)
    return len(kept) < len(entries)


def _measured(
    machine: TorchMachine, clock: Clock, dtypes: tuple[str, ...]
) -> tuple[dict[str, float], float | None, bool]:
    """The peaks, the bandwidth, and whether other processes used the CPU also the second time.

    Then each is the larger of two.
    """
    peaks: dict[str, float] = {}
    bandwidth: float | None = None
    for _ in range(2):
        watch = CpuWatch()
        found, copied = measure(machine, clock, dtypes)
        peaks = {dtype: max(rate, peaks.get(dtype, 0.0)) for dtype, rate in found.items()}
        bandwidth = max(filter(None, (bandwidth, copied)), default=None)
        lost = (watch.lost() or 0.0) if machine.kind == "cpu" else 0.0
        if lost <= MOST_LOST * (watch.used + lost):
            return peaks, bandwidth, False
    return peaks, bandwidth, True


def hardware_of(asked: Hardware | str | None, device: torch.device) -> Hardware | None:
    """What a device can do.

    `"auto"` looks its name up, `"measure"` measures it, another name is the table's, figures stay
    as given.
    """
    # `None` where nothing was asked for, and where `"auto"` does not know the name.
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
    """The peaks by dtype, and the bandwidth."""
    free = machine.free_bytes()
    tasks = {dtype: _fastest(machine, clock, dtype, free * PRODUCT_SHARE) for dtype in dtypes}
    running = {name: task for name, task in tasks.items() if task is not None}
    if not running:
        raise HardwareError(
            f"{machine.name}: no product of {', '.join(tasks)} runs in the {free} bytes that are free"
        )
    copy = _copy(machine, clock, free * COPY_SHARE)
    rates: dict[str, list[float]] = {}
    left = MEASURING_SECONDS
    for done in range(ROUNDS):
        if done >= FEWEST_ROUNDS and left <= 0:
            break
        for name, task in (running | ({"copy": copy} if copy else {})).items():
            with machine.precision(name):
                seconds = _seconds(clock, task.run, task.calls)
            left -= seconds
            rates.setdefault(name, []).append(task.work * task.calls / seconds)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in rates.items()}
    return {dtype: medians[dtype] for dtype in running}, medians.get("copy")


@dataclass(frozen=True)
class _Task:
    """Something to time: its work a call, and how many calls make a block."""

    work: float
    run: Callable[[], object]
    calls: int
    rate: float


def _fastest(machine: TorchMachine, clock: Clock, dtype: str, memory: float) -> _Task | None:
    """The product in the fastest of the sizes that there is time and memory for.

    All of them, as one size can be slow by chance.
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
            # torch has no such product here, or no memory for it
            break
        best = task if best is None or task.rate > best.rate else best
        left -= spent
        # A product of twice the size takes eight times as long, and a long one is called three
        # times to be probed.
        if 3 * 8 * task.work / task.rate > left:
            break
    return best


def _copy(machine: TorchMachine, clock: Clock, memory: float) -> _Task | None:
    """A copy whose two ends together are several times the cache.

    `None` where the memory has no room for them.
    """
    working_set = min(CACHES * machine.cache_bytes, int(memory))
    if working_set < FEWEST_CACHES * machine.cache_bytes:
        return None
    # of whole float32
    half = working_set // 8 * 4
    try:
        return _probed(clock, 2 * half, machine.copy(half))[0]
    except RuntimeError:
        # less memory than the system reported
        return None


def _probed(clock: Clock, work: float, run: Callable[[], object]) -> tuple[_Task, float]:
    """A task with its best rate in a few short blocks, and the seconds that this took."""
    # sets up what the library keeps
    first = _seconds(clock, run, 1)
    once = _seconds(clock, run, 1)
    calls = max(1, math.ceil(PROBE_SECONDS / once))
    blocks = [_seconds(clock, run, calls) for _ in range(PROBES if once < BLOCK_SECONDS else 1)]
    seconds = min(once, *(block / calls for block in blocks))
    return _Task(
        work, run, max(1, math.ceil(BLOCK_SECONDS / seconds)), work / seconds
    ), first + once + sum(blocks)


def _seconds(clock: Clock, run: Callable[[], object], calls: int) -> float:
    # a clock that did not move must not divide
    return max(seconds_of(clock, run, calls), 1e-9)


def _device(device: torch.device | str | None) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    taken = "give 'cpu', or a device of torch.accelerator" + (
        ", of which this machine has none" if here is None else f": '{here.type}'"
    )
    try:
        chosen = torch.device(device or here or "cpu")
    except (RuntimeError, TypeError) as error:
        raise HardwareError(f"device={device!r}: {taken}") from error
    if chosen.type == "cpu":
        return chosen
    if here is None or chosen.type != here.type:
        raise HardwareError(f"device={str(chosen)!r}: {taken}")
    if (chosen.index or 0) >= torch.accelerator.device_count():
        raise HardwareError(
            f"device={str(chosen)!r}: this machine has {torch.accelerator.device_count()} devices of that kind"
        )
    return chosen


def _checked(dtypes: Iterable[str] | None, machine: TorchMachine) -> tuple[str, ...]:
    if dtypes is None:
        return machine.dtypes
    wanted = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    for dtype in wanted:
        if dtype not in machine.dtypes:
            raise HardwareError(
                f"dtypes has {dtype!r}: on {machine.kind}, give some of {', '.join(machine.dtypes)}"
            )
    if not wanted:
        raise HardwareError(f"dtypes={dtypes!r}: give some of {', '.join(machine.dtypes)}")
    return wanted


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Wait until no other process of this user measures on this machine.

    Where no file can be locked, no process waits.
    """
    with contextlib.ExitStack() as undo:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                # In a folder of the machine's own: the home may be shared with others, which
                # measure at the same time.
                name = (
                    pathlib.Path(tempfile.gettempdir()) / f"lflops-calibration-{os.getuid()}.lock"
                )
                file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                # which unlocks it, as the end of the process does
                undo.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_file() -> pathlib.Path:
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (
        (home if home.is_absolute() else pathlib.Path.home() / ".cache")
        / "lflops"
        / "calibration.json"
    )


def _known(key: str) -> Hardware | None:
    """Read what was measured before.

    `None` also for an entry that is not what `calibrate` writes.
    """
    with contextlib.suppress(KeyError, LflopsError, msgspec.MsgspecError):
        return msgspec.json.decode(_entries()[key], type=Hardware)
    return None


def _write(entries: Mapping[str, msgspec.Raw]) -> None:
    """Remember them, where that is possible.

    Without a home or on a full disk there is only no memory of them.
    """
    with contextlib.suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.format(msgspec.json.encode(entries)))


def _entries() -> dict[str, msgspec.Raw]:
    """The file's entries; none where there is no file, or one that was broken."""
    with contextlib.suppress(
        OSError,
        RuntimeError,
        msgspec.MsgspecError,
        # RuntimeError: there is no home
    ):
        return msgspec.json.decode(_cache_file().read_bytes(), type=dict[str, msgspec.Raw])
    return {}
