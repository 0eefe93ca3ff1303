"""Format numbers like DeepSpeed's profiler, so that the reports of both tools can be compared.

Numbers have at most two decimals. `K` is a thousand and `u` is a millionth. For parameters, a
billion is `B`. An unknown value is shown as a dash. Only 0 is shown as `0`; small numbers keep one
significant digit.
"""

from functools import partial

from lflops.profile.series import ratio
from lflops.units import UNKNOWN

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def number(value: float | None, unit: str = "") -> str:
    """Format a number with an SI prefix, such as `1.43 G`."""
    if value is None:
        return UNKNOWN
    size, prefix = _prefix_of(value)
    return f"{_short(value / size)} {prefix}{unit}".rstrip()


def _prefix_of(value: float) -> tuple[float, str]:
    """Return the factor and the name of a value's prefix: `(1e9, "G")` for 1.43 billion."""
    if value == 0:
        return 1.0, ""
    for size, prefix in _PREFIXES:
        if value >= size:
            return size, prefix
    return _PREFIXES[-1]


def params(value: float | None) -> str:
    """Format a number of parameters, such as `1.2 B`."""
    return number(value).replace("G", "B")


macs = partial(number, unit="MACs")
"""Formats a number of MACs, such as `10.74 GMACs`."""

flops = number
"""Formats a number of FLOPs, such as `2.86 G`."""

rate = partial(number, unit="FLOPS")
"""Formats a number of FLOPs per second, such as `117.74 TFLOPS`."""

duration = partial(number, unit="s")
"""Formats a number of seconds, such as `182.39 us`."""


def percent(part: float | None, total: float | None) -> str:
    """Format a part of a total, such as `0.31%`. The result has a dash if the share is unknown."""
    share = ratio(part, total)
    return f"{UNKNOWN}%" if share is None else f"{_short(100 * share)}%"


def _short(value: float) -> str:
    rounded = round(value, 2) or float(f"{value:.1g}")
    return f"{rounded:g}"
