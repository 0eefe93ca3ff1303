"""`lflops roofline --ncu` and `--ncu-command`.

Nsight Compute's counts on a terminal, and the command that has it count.

FLOPs are 2 x fused multiply-adds + additions + multiplications, and the operations of tensor cores;
DRAM bytes 32 x sectors. FLOP/s are over the kernels' own time, or over the GPU's running time as
Nsight Systems reports it.
"""

import csv
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer
from msgspec import Struct, toml
from rich.console import Group, RenderableType

from lflops import units
from lflops.analysis.roofline import Bound
from lflops.cli.output import UsageError, draw, write_json
from lflops.errors import LflopsError, ProfileError
from lflops.hardware.chips import Hardware, named
from lflops.profile.json_file import load
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.profile.series import grouped, sum_known
from lflops.report.terminal.tables import FittedTable, prose, text
from lflops.report.text import kernel_name, shortened

SECTOR_BYTES = 32

_OPERATION = "smsp__sass_thread_inst_executed_op_{}{}_pred_on.sum"
# The dtype of a scalar instruction, and its FLOPs.
_FLOPS: Mapping[str, tuple[str, int]] = {
    _OPERATION.format(letter, name): (dtype, flops)
    for letter, dtype in (("f", "fp32"), ("h", "fp16"), ("d", "fp64"))
    for name, flops in (("add", 1), ("mul", 1), ("fma", 2))
}
_TIME = "gpu__time_duration.sum"


class _Metrics(Struct):
    tensor_cores: dict[str, tuple[float, str, tuple[str, ...]]]
    levels: dict[str, tuple[str, tuple[str, ...]]]


_FILE = toml.decode(
    Path(__file__).with_name("metrics.toml").read_bytes(),
    type=_Metrics,
    # which explains the rows
)
_TENSOR_CORES, _LEVELS = _FILE.tensor_cores, _FILE.levels

_OPERATIONS = (
    *_FLOPS,
    *(name for _, whole, parts in _TENSOR_CORES.values() for name in (whole, *parts)),
)
METRICS = (
    *_LEVELS["dram"][1],
    *_OPERATIONS,
    _TIME,
    _LEVELS["l2"][0],
    _LEVELS["l1"][0],
    # what to ask `ncu` for
)

_RANGES = "Push/Pop_Range"
_RANGE = re.compile(r'<[^>]*>:(.*?):none(?::none)*"?')
_HEADING = re.compile(
    r"^ {2}(?P<name>\S.*?)(?: \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\)|, \d{4}-\w{3}-\d+ [\d:]+), Context \d+, Stream \d+"
)
_METRIC = re.compile(
    r"^\s+(?P<name>[a-z0-9]\w*__[\w.]+)\s+(?:(?P<unit>[A-Za-z]\S*)\s+)?(?P<value>\S+)\s*$"
)
_SECONDS = {
    "s": 1.0,
    "second": 1.0,
    "ms": 1e-3,
    "msecond": 1e-3,
    "us": 1e-6,
    "usecond": 1e-6,
    "ns": 1e-9,
    "nsecond": 1e-9,
}
_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Traffic(Struct, frozen=True, kw_only=True):
    """What passed one level of memory.

    `intensity` is FLOPs for each of its bytes; `None` is unknown.
    """

    bytes: float | None
    intensity: float | None


class Kernel(Struct, frozen=True, kw_only=True):
    """The launches of one kernel in one module, or of all of them."""

    # as `ncu` says it; empty of all of them
    name: str
    module: (
        str | None
        # the row whose name the innermost NVTX range that is a row's bears; `None` where none does
    )
    # how many there were
    launches: int
    flops: (
        float | None
        # with the operations of int8, as everywhere in lflops; `None` where those of a dtype are
        # unknown
    )
    flops_by_dtype: Mapping[
        str, float | None
        # by the names of `hardware.DTYPES`; `None` where `ncu` has no value for what the chip has
    ]
    # `dram`, `l2` and `l1`, those that were asked for
    levels: Mapping[str, Traffic]
    # their time; `None` where it was not asked for
    seconds: float | None
    flops_per_second: float | None
    # what they take at the roof of the hardware that is given
    roof_seconds: float | None
    bound: (
        Bound | None
        # which side that is; so are `share` of the roof, and the `flops_per_second` achieved
    )
    share: float | None


class Measured(Struct, frozen=True, kw_only=True):
    """All kernels of a log together, then each, those with the most time or else the most FLOPs first."""

    total: Kernel
    kernels: tuple[Kernel, ...]


class _Launch(NamedTuple):
    name: str
    ranges: tuple[str, ...]
    # of the chip; infinite where it is not written
    capability: float
    # what was asked for; `None` where `ncu` has no value
    metrics: dict[str, float | None]


def command(script: Sequence[str]) -> list[str]:
    """The words that run a Python script under `ncu` with every metric that is read here."""
    # For Ampere and later: `ncu` writes `n/a` for what a chip lacks
    asked = (
        "--csv",
        "--log-file",
        "lflops.ncu.csv",
        "--nvtx",
        "--metrics",
        ",".join(METRICS),
        "--target-processes",
        "all",
    )
    return ["ncu", *asked, "python3", *script]


def read(
    text: str,
    *,
    gpu_seconds: float | None = None,
    modules: Collection[str] = (),
    chip: Hardware | None = None,
) -> Measured:
    """The kernels of what `ncu` wrote, as CSV by metric or by kernel, or for people.

    A `LflopsError` where none has any of the metrics.

    `gpu_seconds` of the GPU's running time are used in place of the sum of the kernels' times. The
    `modules` are names of rows, to find among the NVTX ranges, which CSV alone has. The `chip` is
    at the roof.
    """
    launches = [
        launch
        for launch in _launches(text)
        if any(launch.metrics.get(name) is not None for name in _KNOWN)
    ]
    if not launches:
        raise LflopsError(
            "no kernel with a metric that is read here: give what the command of lflops roofline --ncu-command writes"
        )
    groups = grouped(
        launches,
        lambda launch: (
            launch.name,
            next((name for name in reversed(launch.ranges) if name in modules), None),
        ),
    )
    kernels = [
        _kernel(name, row, of_kernel, None, chip) for (name, row), of_kernel in groups.items()
    ]
    return Measured(
        total=_kernel("", None, launches, gpu_seconds, chip),
        kernels=tuple(
            sorted(kernels, key=lambda kernel: (-(kernel.seconds or 0.0), -(kernel.flops or 0.0)))
        ),
    )


_KNOWN = {*METRICS, *(name for total, sectors in _LEVELS.values() for name in (total, *sectors))}


def _kernel(
    name: str,
    module: str | None,
    launches: Sequence[_Launch],
    seconds: float | None,
    chip: Hardware | None,
) -> Kernel:
    counted = grouped(
        (each for launch in launches for each in _operations(launch)), lambda each: each[0]
    )
    by_dtype = {
        dtype: total
        for dtype, each in counted.items()
        if (total := sum_known(flops for _, flops in each)) != 0
    }
    flops = sum_known(by_dtype.values()) if counted else None
    levels = {level: _bytes(level, launches) for level in _LEVELS}
    seconds = (
        sum_known(launch.metrics.get(_TIME) for launch in launches) if seconds is None else seconds
    )
    roof, bound = _roof(by_dtype, levels["dram"], chip)
    return Kernel(
        name=name,
        module=module,
        launches=len(launches),
        flops=flops,
        flops_by_dtype=by_dtype,
        levels={
            level: Traffic(bytes=size, intensity=_ratio(flops, size))
            for level, size in levels.items()
            if size is not None
        },
        seconds=seconds,
        flops_per_second=_ratio(flops, seconds),
        roof_seconds=roof,
        bound=bound,
        share=_ratio(roof, seconds),
    )


def _operations(launch: _Launch) -> Iterator[tuple[str, float | None]]:
    """The FLOPs of the metrics that were asked for, with their dtype.

    Without the dtypes that the chip lacks.
    """
    for name, value in launch.metrics.items():
        if name in _FLOPS:
            dtype, flops = _FLOPS[name]
            yield dtype, None if value is None else flops * value
    for dtype, (since, whole, parts) in _TENSOR_CORES.items():
        asked = [
            form
            for names in ((whole,), parts)
            if (form := [launch.metrics[name] for name in names if name in launch.metrics])
        ]
        if asked and launch.capability >= since:
            yield (
                dtype,
                next((total for form in asked if (total := sum_known(form)) is not None), None),
            )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _bytes(level: str, launches: Iterable[_Launch]) -> float | None:
    """The bytes of all launches at one level; `None` where a launch has neither metric."""
    total, names = _LEVELS[level]
    sectors = [
        (sum_known(launch.metrics.get(name) for name in names), launch.metrics.get(total))
        for launch in launches
    ]
    return sum_known(
        whole if number is None else SECTOR_BYTES * number for number, whole in sectors
    )


def _roof(
    by_dtype: Mapping[str, float | None], moved: float | None, chip: Hardware | None
) -> tuple[float | None, Bound | None]:
    if (
        chip is None
        or moved is None
        or not chip.bandwidth_bytes_per_second
        or not by_dtype.keys() <= chip.peak_flops_per_second.keys()
    ):
        return None, None
    compute = sum_known(
        _ratio(flops, chip.peak_flops_per_second[dtype]) for dtype, flops in by_dtype.items()
    )
    memory = moved / chip.bandwidth_bytes_per_second
    return (
        (None, None)
        if compute is None
        else (max(compute, memory), "compute" if compute >= memory else "memory")
    )


def _launches(text: str) -> Iterable[_Launch]:
    lines = text.splitlines()
    start = next(
        (
            index
            for index, line in enumerate(lines)
            if line.startswith('"') and '"Kernel Name"' in line
        ),
        None,
    )
    if start is None:
        return _of_log(lines)
    heading, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    named = [dict(zip(heading, row, strict=False)) for row in rows if len(row) == len(heading)]
    return _by_metric(named) if "Metric Name" in heading else _by_kernel(named)


def _by_metric(rows: Iterable[Mapping[str, str]]) -> Iterable[_Launch]:
    launches: dict[tuple[str | None, str | None], _Launch] = {}
    for row in rows:
        key = row.get("Process ID"), row.get("ID")
        launch = launches.setdefault(
            key,
            _Launch(
                row["Kernel Name"], _ranges(row), _number(row.get("CC", ""), "") or math.inf, {}
            ),
        )
        launch.metrics[row["Metric Name"]] = _number(
            row["Metric Value"], row.get("Metric Unit", "")
        )
    return launches.values()


def _by_kernel(rows: Sequence[Mapping[str, str]]) -> Iterator[_Launch]:
    """A line a launch, as `--page raw` writes them: the first has the units."""
    units = rows[0] if rows and not rows[0].get("ID") else {}
    for row in rows[1:] if units else rows:
        values = {name: _number(row[name], units.get(name, "")) for name in row if "__" in name}
        yield _Launch(
            row["Kernel Name"], _ranges(row), _number(row.get("CC", ""), "") or math.inf, values
        )


def _of_log(lines: Iterable[str]) -> list[_Launch]:
    """Headings of launches, each with its metrics indented below."""
    launches: list[_Launch] = []
    for line in lines:
        if heading := _HEADING.match(line):
            launches.append(
                _Launch(
                    heading["name"], (), _number(line.rpartition(", CC ")[2], "") or math.inf, {}
                )
            )
        elif launches and (metric := _METRIC.match(line)):
            launches[-1].metrics[metric["name"]] = _number(metric["value"], metric["unit"] or "")
    return launches


def _ranges(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        name for column, stack in row.items() if _RANGES in column for name in _RANGE.findall(stack)
    )


def _number(value: str, unit: str) -> float | None:
    """In seconds, bytes or counts; `None` where `ncu` has no value."""
    plain = (
        value.replace(",", "")
        if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", value)
        else value.replace(",", ".")
    )
    try:
        number = float(plain)
    except ValueError:
        return None
    if unit in _SECONDS:
        return number * _SECONDS[unit]
    return number * (_PREFIXES.get(unit[0], 1.0) if len(unit) > 1 and unit[1:].islower() else 1.0)


_KERNEL = 36


def show_kernels(
    file: Path | None,
    *,
    log: Path | None,
    script: str | None,
    gpu_time: float | None,
    figure: Path | None,
    hardware: str | None,
    top: int,
    as_json: bool,
) -> None:
    """Run `lflops roofline` with its options for Nsight Compute.

    A `log` of what it counted, or the command for a `script`.
    """
    if script is not None and (file, log, figure, gpu_time, hardware) != (None,) * 5:
        raise UsageError("--ncu-command stands alone, or with --json")
    if script is not None:
        words = command(shlex.split(script))
        return write_json({"command": words}) if as_json else typer.echo(shlex.join(words))
    if log is None:
        raise UsageError(f"gpu_time={gpu_time}: --gpu-time goes with --ncu LOG")
    if gpu_time is not None and not 0 < gpu_time < math.inf:
        raise UsageError(f"gpu_time={gpu_time}: give a positive number of seconds")
    if figure is not None:
        raise UsageError("--figure draws a profile's FILE, not what --ncu reads")
    measured = _measured(log, gpu_time, None if file is None else load(file), hardware)
    return write_json(measured) if as_json else draw(render_ncu(measured, top=top))


def _measured(
    log: Path, gpu_time: float | None, profile: Profile | None, hardware: str | None
) -> Measured:
    chip = named(hardware) if hardware else profile.run.hardware if profile else None
    try:
        return read(
            log.read_text(errors="replace"),
            gpu_seconds=gpu_time,
            modules=profile.modules if profile else (),
            chip=chip,
        )
    except OSError as error:
        raise ProfileError(f"{log}: {error.strerror}") from error
    except LflopsError as error:
        raise ProfileError(f"{log}: {error}") from error


def render_ncu(measured: Measured, *, top: int) -> RenderableType:
    """All kernels together, then at most `top` of them."""
    kernels = (measured.total, *measured.kernels[:top])
    columns = {
        "time": [units.duration(kernel.seconds) for kernel in kernels],
        "FLOP/s": [units.count(kernel.flops_per_second) for kernel in kernels],
    }
    if any(kernel.bound for kernel in kernels):
        columns["bound by"] = [kernel.bound or units.UNKNOWN for kernel in kernels]
        columns["of the roof"] = [units.percent(kernel.share) for kernel in kernels]
    columns["launches"] = [units.count(kernel.launches) for kernel in kernels]
    columns["FLOPs"] = [units.count(kernel.flops) for kernel in kernels]
    columns["DRAM bytes"] = [
        (units.size(kernel.levels["dram"].bytes) if "dram" in kernel.levels else units.UNKNOWN)
        for kernel in kernels
    ]
    columns["FLOPs/byte"] = [_intensity(kernel, "dram") for kernel in kernels]
    if any(kernel.module is not None for kernel in kernels):
        columns["module"] = [
            units.UNKNOWN if kernel.module is None else plain(kernel.module) or "all of it"
            for kernel in kernels
        ]
    for level in ("l2", "l1"):
        if any(level in kernel.levels for kernel in kernels):
            columns[f"per {level.upper()} byte"] = [_intensity(kernel, level) for kernel in kernels]
    left = len(measured.kernels) - top
    more: list[RenderableType] = (
        [text(f"{left} more kernels; --top N lists more, --json all", "dim")] if left > 0 else []
    )
    if unsupported := [
        dtype for dtype, flops in measured.total.flops_by_dtype.items() if flops is None
    ]:
        more.append(
            prose(
                f"FLOPs unknown: no count (n/a) of {', '.join(unsupported)}; --ncu-command asks for all that is read",
                "dim",
            )
        )
    names = [
        "all kernels",
        *(shortened(kernel_name(kernel.name), _KERNEL) for kernel in measured.kernels[:top]),
    ]
    return Group(FittedTable("kernel", names, columns, room=_KERNEL), *more)


def _intensity(kernel: Kernel, level: str) -> str:
    intensity = kernel.levels[level].intensity if level in kernel.levels else None
    return units.UNKNOWN if intensity is None else f"{intensity:.2f}"
