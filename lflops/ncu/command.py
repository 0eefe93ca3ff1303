"""`lflops roofline --ncu` and `--ncu-command`: Nsight Compute's counts on a terminal, and the command that has it count."""

import math
import shlex
from pathlib import Path

import typer
from rich.console import Group, RenderableType

from lflops import units
from lflops.cli.output import UsageError, draw, write_json
from lflops.errors import LflopsError, ProfileError
from lflops.hardware.chips import named
from lflops.ncu.counters import Kernel, Measured, command, read
from lflops.profile.json_file import load
from lflops.profile.model import Profile
from lflops.report.lines.text import plain, shortened
from lflops.report.terminal.tables import FittedTable, text

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
    """Run `lflops roofline` with its options for Nsight Compute: a `log` of what it counted, or the command for a `script`."""
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


def _measured(log: Path, gpu_time: float | None, profile: Profile | None, hardware: str | None) -> Measured:
    chip = named(hardware) if hardware else profile.run.hardware if profile else None
    try:
        return read(log.read_text(errors="replace"), gpu_seconds=gpu_time, modules=profile.modules if profile else (), chip=chip)
    except OSError as error:
        raise ProfileError(f"{log}: {error.strerror}") from error
    except LflopsError as error:
        raise ProfileError(f"{log}: {error}") from error


def render_ncu(measured: Measured, *, top: int) -> RenderableType:
    """All kernels together, then at most `top` of them."""
    kernels = (measured.total, *measured.kernels[:top])
    columns = {
        "launches": [units.count(kernel.launches) for kernel in kernels],
        "FLOPs": [units.count(kernel.flops) for kernel in kernels],
        "DRAM bytes": [(units.size(kernel.levels["dram"].bytes) if "dram" in kernel.levels else units.UNKNOWN) for kernel in kernels],
        "FLOPs/byte": [_intensity(kernel, "dram") for kernel in kernels],
        "time": [units.duration(kernel.seconds) for kernel in kernels],
        "FLOP/s": [units.count(kernel.flops_per_second) for kernel in kernels],
    }
    if any(kernel.bound for kernel in kernels):
        columns["bound by"] = [kernel.bound or units.UNKNOWN for kernel in kernels]
        columns["of the roof"] = [units.percent(kernel.share) for kernel in kernels]
    if any(kernel.module is not None for kernel in kernels):
        columns["module"] = [units.UNKNOWN if kernel.module is None else plain(kernel.module) or "all of it" for kernel in kernels]
    for level in ("l2", "l1"):
        if any(level in kernel.levels for kernel in kernels):
            columns[f"per {level.upper()} byte"] = [_intensity(kernel, level) for kernel in kernels]
    left = len(measured.kernels) - top
    more = [text(f"{left} more kernels; --top N lists more, --json all", "dim")] if left > 0 else []
    names = ["all kernels", *(shortened(plain(kernel.name), _KERNEL) for kernel in measured.kernels[:top])]
    return Group(FittedTable("kernel", names, columns, room=_KERNEL), *more)


def _intensity(kernel: Kernel, level: str) -> str:
    intensity = kernel.levels[level].intensity if level in kernel.levels else None
    return units.UNKNOWN if intensity is None else f"{intensity:.2f}"
