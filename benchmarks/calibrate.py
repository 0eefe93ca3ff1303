"""Check that `calibrate` measures the same figures twice in a row.

The two results should differ by at most 5 %. On a machine that other programs use at the same time,
they differ more; run the benchmark again when the machine is idle.
"""

import argparse
import time

from results import record

from lflops import calibrate, units
from lflops.hardware.chips import Hardware


def figures(hardware: Hardware) -> dict[str, tuple[float | None, str]]:
    """Return all measured figures with their units."""
    peaks: dict[str, tuple[float | None, str]] = {
        dtype: (peak, "FLOP/s") for dtype, peak in hardware.peak_flops_per_second.items()
    }
    return peaks | {"bandwidth": (hardware.bandwidth_bytes_per_second, "B/s")}


def main() -> None:
    """Measure twice and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None)
    device = parser.parse_args().device
    taken, measured = [], []
    for _ in range(2):
        start = time.perf_counter()
        measured.append(figures(calibrate(device, fresh=True)))
        taken.append(time.perf_counter() - start)
    first, second = measured
    lines = ["| figure | first | second | difference |", "|---|--:|--:|--:|"]
    for name in first | second:
        (one, unit), (other, _) = first.get(name, (None, "")), second.get(name, (None, ""))
        difference = None if one is None or other is None else abs(other - one) / min(one, other)
        lines.append(
            f"| {name} | {units.quantity(one, unit)} | {units.quantity(other, unit)} | {units.percent(difference)} |"
        )
    lines += [
        "",
        f"Each took {' and '.join(units.duration(seconds, digits=1) for seconds in taken)}; 5 % is what they should differ by at most.",
    ]
    record("calibrate.py", "The peaks that this machine reaches", lines)


if __name__ == "__main__":
    main()
