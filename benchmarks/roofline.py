"""Check the position of points in the roofline.

Large matmuls must be near the compute roof, copies near the memory roof, and no point above a roof.

Both work on eight times the size of the last-level cache. The roofs are the larger of two results
of `calibrate`, directly before and after. On a machine that other programs use, `--cpu-time`
measures the CPU time of one thread, which excludes the time of other programs.
"""

import argparse
import time
from dataclasses import replace
from unittest import mock

import torch
from results import record
from torch import Tensor, nn

import lflops
from lflops import units
from lflops.analysis.roofline import Point, roofline
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from lflops.timing.clock import HostClock

CACHES = 8
DEPTHS = {torch.float32: 256, torch.bfloat16: 1024}
"""Inner dimensions of the matmuls: large enough to be compute-bound, and finished in seconds."""

DTYPES = ("fp32", "bf16")

LEAST, MOST = 0.80, 1.05


class CpuClock(HostClock):
    """A clock that reads the CPU time of the process, for one thread."""

    mark = staticmethod(time.process_time_ns)


class Product(nn.Module):
    """A matmul that writes into existing memory.

    New memory would be slower because of page faults, which are not part of a matmul.
    """

    def __init__(self, out: Tensor) -> None:
        """Keep the memory, but not as a buffer, because lflops would copy a buffer."""
        super().__init__()
        self.out = [out]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply."""
        return torch.mm(a, b, out=self.out[0])


class Copy(Product):
    """A copy into existing memory."""

    def forward(self, a: Tensor) -> Tensor:
        """Copy."""
        return self.out[0].copy_(a)


def timed(model: nn.Module, args: tuple[Tensor, ...], repeats: int) -> Profile:
    """Measure a model, with unprofiled passes."""
    with torch.no_grad():
        return lflops.measure(model, args, warmup=1, repeats=repeats, hardware=None)


def placed(profile: Profile, chip: Hardware) -> Point:
    """Return the point of the whole forward."""
    return next(point for point in roofline(profile, chip).modules if point.module == "")


def profiles(chip: Hardware, repeats: int) -> dict[str, tuple[Profile, str]]:
    """Return the profile of each case, and the roof that should bound it."""
    working_set = int(CACHES * (chip.cache_bytes or 32 * 2**20))
    found = {}
    for dtype, depth in DEPTHS.items():
        name, size = str(dtype).removeprefix("torch."), int((working_set / dtype.itemsize) ** 0.5)
        operands = torch.ones(size, depth, dtype=dtype), torch.ones(depth, size, dtype=dtype)
        model = Product(torch.zeros(size, size, dtype=dtype))
        found[f"{name} product, {size} x {depth} x {size}"] = (
            timed(model, operands, repeats),
            "compute",
        )
        del model, operands
        half = torch.zeros(working_set // 2 // dtype.itemsize, dtype=dtype)
        found[f"{name} copy, {units.size(working_set)}"] = (
            timed(Copy(torch.zeros_like(half)), (half,), repeats),
            "memory",
        )
        del half
    return found


def better(one: Hardware, other: Hardware) -> Hardware:
    """Return the larger of each figure of two chips."""
    peaks = {
        dtype: max(peak, other.peak_flops_per_second[dtype])
        for dtype, peak in one.peak_flops_per_second.items()
    }
    bandwidths = [
        each.bandwidth_bytes_per_second for each in (one, other) if each.bandwidth_bytes_per_second
    ]
    return replace(
        one, peak_flops_per_second=peaks, bandwidth_bytes_per_second=max(bandwidths, default=None)
    )


def main() -> None:
    """Measure the peaks, place the points, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, by its CPU time: where others use the machine too",
    )
    parser.add_argument("--note", default="", help="what the reader of the numbers has to know")
    options = parser.parse_args()
    clock = CpuClock() if options.cpu_time else HostClock()
    if options.cpu_time:
        torch.set_num_threads(1)
    before = lflops.calibrate("cpu", dtypes=DTYPES, fresh=True, clock=clock)
    with mock.patch("lflops.timing.measure.clock_of", return_value=clock):
        measured = profiles(before, options.repeats)
    chip = better(before, lflops.calibrate("cpu", dtypes=DTYPES, fresh=True, clock=clock))
    head = "| what | FLOPs a byte | bound by | reached | the roof | share |"
    lines = [head, "|---|--:|---|--:|--:|--:|"]
    for name, (profile, side) in measured.items():
        point = placed(profile, chip)
        moves = side == "memory"
        work, unit = (point.bytes_moved, "B/s") if moves else (point.flops, "FLOP/s")
        rate, roof = (
            work / seconds if seconds else None for seconds in (point.seconds, point.roof_seconds)
        )
        right = point.bound == side and point.share is not None and LEAST <= point.share <= MOST
        share = units.percent(point.share) if right else f"**{units.percent(point.share)}**"
        intensity = "–" if point.intensity is None else f"{point.intensity:.1f}"
        lines.append(
            f"| {name} | {intensity} | {point.bound} | {units.quantity(rate, unit)} | {units.quantity(roof, unit)} | {share} |"
        )
    clocked = "Seconds are one thread's CPU time. " if options.cpu_time else ""
    said = f"{units.percent(LEAST, digits=0)} to {units.percent(MOST, digits=0)} of the roof are wanted. {clocked}{options.note}".strip()
    record("roofline.py", "How near its roof what should be near it is", [*lines, "", said])


if __name__ == "__main__":
    main()
