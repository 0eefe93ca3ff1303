"""Numbers as DeepSpeed's profiler writes them, so that two reports can be laid side by side and compared letter by letter.

Two decimals without trailing zeros, `K` for a thousand and `u` for a millionth; parameters in
billions, `B`. Here as everywhere, unknown is a dash, and what is not 0 does not read as 0.
"""

from functools import partial

from lflops.units import UNKNOWN

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def number(value: float | None, unit: str = "") -> str:
    """A number with a prefix, as `1.43 G`."""
    if value is None:
        return UNKNOWN
    size, prefix = (
        next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
        if value
        else (1.0, "")
    )
    return f"{_short(value / size)} {prefix}{unit}".rstrip()


def params(value: float | None) -> str:
    """Parameters, as `1.2 B`."""
    return number(value).replace("G", "B")


# as `10.74 GMACs`
macs = partial(number, unit="MACs")
# as `2.86 G`
flops = number
# a second, as `117.74 TFLOPS`
rate = partial(number, unit="FLOPS")
# as `182.39 us`
duration = partial(number, unit="s")


def percent(part: float | None, total: float | None) -> str:
    """A part of a total, as `0.31%`; unknown where the total is 0."""
    return f"{_short(100 * part / total) if part is not None and total else UNKNOWN}%"


def _short(value: float) -> str:
    return f"{round(value, 2) or float(f'{value:.1g}'):g}"
