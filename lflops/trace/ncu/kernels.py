"""Read the kernels that Nsight Compute counted: FLOPs, bytes, time and share of the roofline.

FLOPs are 2 x fused multiply-adds + additions + multiplications + operations of tensor cores. DRAM
bytes are 32 x sectors.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, toml

from lflops.analysis.roofline import Bound, bound_of
from lflops.errors import LflopsError
from lflops.hardware.chips import Hardware
from lflops.profile.series import gathered, grouped, ratio, sum_known
from lflops.trace.ncu.log import Launch, launches_in

SECTOR_BYTES = 32


class _TensorCores(Struct, array_like=True):
    """The metrics that count operations of tensor cores in one dtype.

    Attributes:
        since: The first compute capability that supports the dtype.
        total: Metric of all operations.
        parts: Metrics that add up to the total.
    """

    since: float
    total: str
    parts: tuple[str, ...]


class _Level(Struct, array_like=True):
    """The metrics that Nsight Compute counts for one memory level, such as DRAM or L2."""

    bytes: str
    sectors: tuple[str, ...]


class _Metrics(Struct):
    tensor_cores: dict[str, _TensorCores]
    levels: dict[str, _Level]


_FILE = toml.decode(Path(__file__).with_name("metrics.toml").read_bytes(), type=_Metrics)
_TENSOR_CORES = _FILE.tensor_cores
_LEVELS = _FILE.levels
_TIME = "gpu__time_duration.sum"


def _scalar_operations() -> dict[str, tuple[str, int]]:
    metrics = {}
    for letter, dtype in (("f", "fp32"), ("h", "fp16"), ("d", "fp64")):
        for name, flops in (("add", 1), ("mul", 1), ("fma", 2)):
            metric = f"smsp__sass_thread_inst_executed_op_{letter}{name}_pred_on.sum"
            metrics[metric] = (dtype, flops)
    return metrics


_SCALAR_OPERATIONS = _scalar_operations()
"""Dtype and FLOPs per instruction, keyed by the metric that counts the scalar instruction."""


def _tensor_core_metrics() -> list[str]:
    metrics: list[str] = []
    for each in _TENSOR_CORES.values():
        metrics += (each.total, *each.parts)
    return metrics


METRICS = (
    *_LEVELS["dram"].sectors,
    *_SCALAR_OPERATIONS,
    *_tensor_core_metrics(),
    _TIME,
    _LEVELS["l2"].bytes,
    _LEVELS["l1"].bytes,
)
"""The metrics to request from Nsight Compute."""


def _known_metrics() -> frozenset[str]:
    metrics = set(METRICS)
    for level in _LEVELS.values():
        metrics.update((level.bytes, *level.sectors))
    return frozenset(metrics)


_KNOWN = _known_metrics()
"""The metrics that lflops reads from a log.

These are `METRICS`, and other metrics that count the same bytes.
"""


class Traffic(Struct, frozen=True, kw_only=True):
    """The bytes that kernels moved at one memory level, such as DRAM or L2.

    Attributes:
        bytes: Number of bytes; `None` if unknown.
        intensity: FLOPs per byte; `None` if unknown.
    """

    bytes: float | None
    intensity: float | None


class Kernel(Struct, frozen=True, kw_only=True):
    """Totals of all launches of one kernel in one module, or of all launches of all kernels.

    Attributes:
        name: The name in the log; empty for all kernels.
        module: Module of the innermost NVTX range that has a module's name; `None` if unknown.
        launches: Number of launches.
        flops: FLOPs, including operations of int8; `None` if the FLOPs of a dtype are unknown.
        flops_by_dtype: FLOPs by dtype, with the names in `hardware.DTYPES`. A value is `None` if
            the chip supports the dtype but the log has no FLOPs.
        levels: Traffic of `dram`, `l2` and `l1`. Levels with unknown traffic are left out.
        seconds: Time of the launches; `None` if it was not requested.
        flops_per_second: The achieved FLOP/s; `None` if unknown.
        roof_seconds: Minimum time on the chip according to the roofline; `None` if unknown.
        bound: Resource that determines `roof_seconds`; `None` if unknown.
        share: `roof_seconds` divided by `seconds`; `None` if unknown.
    """

    name: str
    module: str | None
    launches: int
    flops: float | None
    flops_by_dtype: Mapping[str, float | None]
    levels: Mapping[str, Traffic]
    seconds: float | None
    flops_per_second: float | None
    roof_seconds: float | None
    bound: Bound | None
    share: float | None


class Measured(Struct, frozen=True, kw_only=True):
    """The kernels in a log of Nsight Compute.

    Attributes:
        total: Totals of all kernels together.
        kernels: The kernels, sorted by time, or by FLOPs if no times are known; largest first.
    """

    total: Kernel
    kernels: tuple[Kernel, ...]


def command(script: Sequence[str]) -> list[str]:
    """Return the command that runs a Python script under Nsight Compute with all `METRICS`.

    The command is for Ampere and later chips. Nsight Compute writes `n/a` for a metric that a chip
    does not have.
    """
    return [
        "ncu",
        "--csv",
        "--log-file",
        "lflops.ncu.csv",
        "--nvtx",
        "--metrics",
        ",".join(METRICS),
        "--target-processes",
        "all",
        "python3",
        *script,
    ]


def read(
    log: str,
    *,
    gpu_seconds: float | None = None,
    modules: Collection[str] = (),
    chip: Hardware | None = None,
) -> Measured:
    """Return the kernels in a log of Nsight Compute.

    Args:
        log: The text that Nsight Compute wrote.
        gpu_seconds: Running time of the GPU, for example from Nsight Systems. It replaces the sum
            of the kernel times.
        modules: Names of modules to find among the NVTX ranges.
        chip: The chip with the roofline to compare with, if it is known.

    Raises:
        LflopsError: No kernel has a metric that lflops reads.
    """
    launches = [launch for launch in launches_in(log) if _has_known_metric(launch)]
    if not launches:
        raise LflopsError(
            "no kernel has a metric that lflops reads: pass the log of the command that lflops "
            "roofline --ncu-command prints"
        )
    groups = grouped(launches, lambda launch: (launch.name, _module_of(launch, modules)))
    kernels = []
    for (name, module), of_kernel in groups.items():
        kernels.append(_kernel(name, module, of_kernel, _seconds(of_kernel), chip))
    kernels.sort(key=lambda kernel: (-(kernel.seconds or 0.0), -(kernel.flops or 0.0)))
    seconds = _seconds(launches) if gpu_seconds is None else gpu_seconds
    total = _kernel("", None, launches, seconds, chip)
    return Measured(total=total, kernels=tuple(kernels))


def _has_known_metric(launch: Launch) -> bool:
    return any(launch.metrics.get(name) is not None for name in _KNOWN)


def _module_of(launch: Launch, modules: Collection[str]) -> str | None:
    for name in reversed(launch.ranges):
        if name in modules:
            return name
    return None


def _seconds(launches: Iterable[Launch]) -> float | None:
    return sum_known(launch.metrics.get(_TIME) for launch in launches)


def _kernel(
    name: str,
    module: str | None,
    launches: Sequence[Launch],
    seconds: float | None,
    chip: Hardware | None,
) -> Kernel:
    by_dtype = _flops_by_dtype(launches)
    # The sum also includes the dtypes with 0 operations, which are removed below. If no dtype has
    # operations, the FLOPs are 0, not unknown.
    flops = None
    if by_dtype:
        flops = sum_known(by_dtype.values())
    by_dtype = {dtype: each for dtype, each in by_dtype.items() if each != 0}
    levels = {}
    for level in _LEVELS:
        nbytes = _bytes(level, launches)
        if nbytes is not None:
            levels[level] = Traffic(bytes=nbytes, intensity=ratio(flops, nbytes))
    roof, bound = _roof(by_dtype, _bytes("dram", launches), chip)
    return Kernel(
        name=name,
        module=module,
        launches=len(launches),
        flops=flops,
        flops_by_dtype=by_dtype,
        levels=levels,
        seconds=seconds,
        flops_per_second=ratio(flops, seconds),
        roof_seconds=roof,
        bound=bound,
        share=ratio(roof, seconds),
    )


def _flops_by_dtype(launches: Iterable[Launch]) -> dict[str, float | None]:
    counted: list[tuple[str, float | None]] = []
    for launch in launches:
        counted += _operations(launch)
    by_dtype = {}
    for dtype, flops in gathered(counted).items():
        by_dtype[dtype] = sum_known(flops)
    return by_dtype


def _operations(launch: Launch) -> Iterator[tuple[str, float | None]]:
    """Yield a dtype and a number of FLOPs for each requested metric that counts operations.

    The FLOPs are `None` if the log has no value. Dtypes that the tensor cores of the chip do not
    support are left out.
    """
    for name, value in launch.metrics.items():
        if name in _SCALAR_OPERATIONS:
            dtype, flops = _SCALAR_OPERATIONS[name]
            yield dtype, None if value is None else flops * value
    for dtype, tensor_cores in _TENSOR_CORES.items():
        if launch.capability >= tensor_cores.since:
            yield from _tensor_core_operations(launch, dtype, tensor_cores)


def _tensor_core_operations(
    launch: Launch, dtype: str, tensor_cores: _TensorCores
) -> Iterator[tuple[str, float | None]]:
    """Yield a dtype and the number of its operations on tensor cores in one launch.

    If the metric of the total is unknown, the metrics of its parts are added up. The number is
    `None` if both are unknown. If neither the total nor the parts were requested, nothing is
    yielded.
    """
    is_requested = False
    for names in ((tensor_cores.total,), tensor_cores.parts):
        values = [launch.metrics[name] for name in names if name in launch.metrics]
        operations = sum_known(values) if values else None
        if operations is not None:
            yield dtype, operations
            return
        is_requested = is_requested or bool(values)
    if is_requested:
        yield dtype, None


def _bytes(level: str, launches: Iterable[Launch]) -> float | None:
    """Return the bytes that all launches moved at a memory level.

    Returns `None` if the log has neither the sectors nor the bytes of a launch.
    """
    metrics = _LEVELS[level]
    sizes: list[float | None] = []
    for launch in launches:
        sectors = sum_known(launch.metrics.get(name) for name in metrics.sectors)
        if sectors is not None:
            sizes.append(SECTOR_BYTES * sectors)
        else:
            sizes.append(launch.metrics.get(metrics.bytes))
    return sum_known(sizes)


def _roof(
    by_dtype: Mapping[str, float | None], nbytes: float | None, chip: Hardware | None
) -> tuple[float | None, Bound | None]:
    """Return the minimum time on a chip according to the roofline, and the limiting resource.

    Both are `None` if unknown.
    """
    if chip is None or nbytes is None or not chip.bandwidth_bytes_per_second:
        return None, None
    peaks = chip.peak_flops_per_second
    if not by_dtype.keys() <= peaks.keys():
        return None, None
    compute = sum_known(ratio(flops, peaks[dtype]) for dtype, flops in by_dtype.items())
    if compute is None:
        return None, None
    memory = nbytes / chip.bandwidth_bytes_per_second
    return max(compute, memory), bound_of(compute, memory)
