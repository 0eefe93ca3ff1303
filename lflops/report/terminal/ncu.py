"""What Nsight Compute counted, on a terminal."""

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.speed.ncu import Kernel, Measured
from lflops.report.terminal.fitted_table import FittedTable
from lflops.report.terminal.text import plain, shortened, text

__all__ = ["render_ncu"]

_NAME = 36


def render_ncu(measured: Measured, *, top: int) -> RenderableType:
    """All kernels together, and so many of them apart."""
    kernels = (measured.total, *measured.kernels[:top])
    columns = {
        "launches": [units.count(kernel.launches) for kernel in kernels],
        "FLOPs": [units.count(kernel.flops) for kernel in kernels],
        "DRAM bytes": [_moved(kernel, "dram") for kernel in kernels],
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
    names = ["all kernels", *(shortened(plain(kernel.name), _NAME) for kernel in measured.kernels[:top])]
    return Group(FittedTable("kernel", names, columns, room=_NAME), *more)


def _moved(kernel: Kernel, level: str) -> str:
    return units.size(kernel.levels[level].bytes) if level in kernel.levels else units.UNKNOWN


def _intensity(kernel: Kernel, level: str) -> str:
    intensity = kernel.levels[level].intensity if level in kernel.levels else None
    return units.UNKNOWN if intensity is None else f"{intensity:.2f}"
