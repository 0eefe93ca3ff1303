"""Define `--ncu` and `--ncu-command` of `lflops roofline`, which use Nsight Compute.

`--ncu` shows the kernels in a log. `--ncu-command` prints the command that writes such a log.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import typer
from rich.console import Group, RenderableType

from lflops import units
from lflops.cli.output import UsageError, draw, write_json
from lflops.errors import LflopsError, ProfileError
from lflops.files import read as read_file
from lflops.hardware.chips import Hardware, named
from lflops.profile.json_file import load
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.report.terminal.tables import FittedTable, prose, text
from lflops.report.text import kernel_name, shortened
from lflops.trace.ncu.kernels import Kernel, Measured, command, read

_KERNEL_WIDTH = 36
_LARGEST_LOG = 1 << 28


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
    """Show the kernels in a `log`, or print the command that counts the kernels of a `script`."""
    if script is not None:
        if (file, log, figure, gpu_time, hardware) != (None,) * 5:
            raise UsageError(
                "--ncu-command can only be combined with --json: leave the other options out"
            )
        words = command(shlex.split(script))
        if as_json:
            write_json({"command": words})
        else:
            typer.echo(shlex.join(words))
        return
    if log is None:
        raise UsageError(f"gpu_time={gpu_time}: --gpu-time needs a log: pass --ncu LOG")
    if gpu_time is not None and not 0 < gpu_time < math.inf:
        raise UsageError(f"gpu_time={gpu_time}: pass a positive number of seconds")
    if figure is not None:
        raise UsageError(
            "--figure draws a profile, not the log that --ncu reads: leave --figure out"
        )
    profile = None if file is None else load(file)
    measured = _measured(log, gpu_time, profile, _chip(hardware, profile))
    if as_json:
        write_json(measured)
    else:
        draw(render_ncu(measured, top=top))


def _chip(hardware: str | None, profile: Profile | None) -> Hardware | None:
    if hardware:
        return named(hardware)
    return profile.run.hardware if profile else None


def _measured(
    log: Path, gpu_time: float | None, profile: Profile | None, chip: Hardware | None
) -> Measured:
    modules = profile.modules if profile else ()
    try:
        content = read_file(log, _LARGEST_LOG).decode(errors="replace")
        return read(content, gpu_seconds=gpu_time, modules=modules, chip=chip)
    except OSError as error:
        raise ProfileError(f"{log}: {error.strerror}") from error
    except LflopsError as error:
        raise ProfileError(f"{log}: {error}") from error


def render_ncu(measured: Measured, *, top: int) -> RenderableType:
    """Return a table of kernels, followed by remarks.

    The first row has all kernels together. At most `top` single kernels follow.
    """
    shown = measured.kernels[:top]
    names = ["all kernels"]
    for kernel in shown:
        names.append(shortened(kernel_name(kernel.name), _KERNEL_WIDTH))
    table = FittedTable("kernel", names, _columns((measured.total, *shown)), room=_KERNEL_WIDTH)

    remarks: list[RenderableType] = []
    hidden = len(measured.kernels) - len(shown)
    if hidden:
        remarks.append(text(f"{hidden} more kernels: pass a larger --top, or --json", "dim"))
    by_dtype = measured.total.flops_by_dtype
    unknown = [dtype for dtype, flops in by_dtype.items() if flops is None]
    if unknown:
        remark = (
            f"The FLOPs are unknown, because the log has no value (n/a) for {', '.join(unknown)}: "
            "record the log with the command that --ncu-command prints."
        )
        remarks.append(prose(remark, "dim"))
    return Group(table, *remarks)


def _columns(kernels: Sequence[Kernel]) -> dict[str, list[str]]:
    """Return the columns of the table. Some columns are left out if no kernel has a value."""
    columns: dict[str, list[str]] = {}

    def add(heading: str, cell: Callable[[Kernel], str]) -> None:
        columns[heading] = list(map(cell, kernels))

    add("time", lambda kernel: units.duration(kernel.seconds))
    add("FLOP/s", lambda kernel: units.count(kernel.flops_per_second))
    if any(kernel.bound for kernel in kernels):
        add("bound by", lambda kernel: kernel.bound or units.UNKNOWN)
        add("of roofline", lambda kernel: units.percent(kernel.share))
    add("launches", lambda kernel: units.count(kernel.launches))
    add("FLOPs", lambda kernel: units.count(kernel.flops))
    add("DRAM bytes", _dram_bytes)
    add("FLOPs/byte", lambda kernel: _intensity(kernel, "dram"))
    if any(kernel.module is not None for kernel in kernels):
        add("module", _module)
    for level in ("l2", "l1"):
        if any(level in kernel.levels for kernel in kernels):
            add(f"FLOPs/{level.upper()} byte", partial(_intensity, level=level))
    return columns


def _dram_bytes(kernel: Kernel) -> str:
    dram = kernel.levels.get("dram")
    return units.UNKNOWN if dram is None else units.size(dram.bytes)


def _module(kernel: Kernel) -> str:
    if kernel.module is None:
        return units.UNKNOWN
    return plain(kernel.module) or "the model"


def _intensity(kernel: Kernel, level: str) -> str:
    traffic = kernel.levels.get(level)
    if traffic is None or traffic.intensity is None:
        return units.UNKNOWN
    return f"{traffic.intensity:.2f}"
