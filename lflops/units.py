"""Numbers to text: the one place where they are rounded.

Two decimals and a prefix; what needs no prefix stays exact. Times and rates have three digits.
Unknown is a dash, 0 is `0`, and what is not 0 never reads as 0.
"""

from decimal import ROUND_HALF_UP, Context, Decimal

UNKNOWN = "–"

_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")
_SECONDS = ("ns", "µs", "ms", "s")
# wide enough for any float with its decimals
_HALF_UP = Context(prec=400, rounding=ROUND_HALF_UP)


def count(value: float | None) -> str:
    """A count, as `1.23 G`."""
    return quantity(value, "")


def quantity(value: float | None, unit: str, *, digits: int = 2) -> str:
    """An amount with a decimal prefix before its unit, as `312.00 TFLOP/s`."""
    return _scaled(_known(value), 1000, tuple(prefix + unit for prefix in _DECIMAL), digits)


def size(value: float | None, *, digits: int = 2) -> str:
    """Bytes in binary units, as `417.76 MiB`."""
    return _scaled(_known(value), 1024, _BINARY, digits)


def rate(value: float | None, unit: str = "", *, peak: float | None = None) -> str:
    """A rate in three digits, as `177 GFLOP/s`: it is made of a time.

    More than the `peak` is marked, as in `of_peak`.
    """
    mark = " (over the peak)" if value is not None and peak is not None and value > peak else ""
    return _three_digits(_known(value), tuple(prefix + unit for prefix in _DECIMAL)) + mark


def duration(value: float | None) -> str:
    """Seconds in three digits, as `76.7 ms`: a time is measured, and its noise hides the others.

    From a second on they stay seconds.
    """
    known = _known(value)
    if known is None or known == 0:
        return UNKNOWN if known is None else "0 s"
    return (
        _three_digits(known, _SECONDS[-1:])
        if abs(known) >= 1
        else _three_digits(known.scaleb(9), _SECONDS)
    )


def long_duration(value: float | None) -> str:
    """Seconds as people say them.

    `76.7 ms`, `47.1 s`, `13 min 20 s`, `2 h 13 min`. From a minute on the smaller unit is rounded
    down.
    """
    known = _known(value)
    if known is None or known < 60:
        return duration(value)
    minutes, seconds = divmod(int(known), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {seconds} s"


def percent(share: float | None, *, digits: int = 1) -> str:
    """A share of 1, as `41.5 %`."""
    known = _known(share)
    if known is None or known == 0:
        return UNKNOWN if known is None else "0 %"
    rounded = _rounded(known.scaleb(2), digits)
    if rounded == 0:
        return f"{'<' if known > 0 else '>-'}{Decimal(1).scaleb(-digits)} %"
    return f"{rounded} %"


def of_peak(share: float | None) -> str:
    """A share of what is possible, as `41.5 %`.

    More than that is marked: the peak is too low, or a count is wrong.
    """
    return (
        f"{percent(share)} (over the peak)" if share is not None and share > 1 else percent(share)
    )


def _known(value: float | None) -> Decimal | None:
    """The number; `None` also for what is no number, or not finite."""
    # -0.0 becomes 0
    number = None if value is None else Decimal(value) + 0
    return number if number is not None and number.is_finite() else None


def _scaled(number: Decimal | None, base: int, symbols: tuple[str, ...], digits: int) -> str:
    """The number in the unit in which it has the fewest digits before the point, but at least one."""
    if number is None:
        return UNKNOWN
    if abs(number) >= Decimal(base) ** len(symbols):
        return f"{number:.{digits}e} {symbols[0]}".rstrip()
    power, scaled = 0, number
    while abs(_rounded(scaled, digits)) >= base and power + 1 < len(symbols):
        power += 1
        scaled = number / Decimal(base) ** power
    rounded = (
        scaled if power == 0 and scaled == scaled.to_integral_value() else _rounded(scaled, digits)
    )
    return f"{f'{rounded:f}' if rounded or not scaled else f'{scaled:.{digits}e}'} {symbols[power]}".rstrip()


def _three_digits(number: Decimal | None, symbols: tuple[str, ...]) -> str:
    if number is None or number == 0:
        return UNKNOWN if number is None else f"0 {symbols[0]}".rstrip()
    power, scaled = 0, number
    while abs(_rounded(scaled, 0)) >= 1000 and power + 1 < len(symbols):
        power, scaled = power + 1, scaled.scaleb(-3)
    rounded = next(
        (each for digits in (2, 1) if abs(each := _rounded(scaled, digits)) < 10 ** (3 - digits)),
        _rounded(scaled, 0),
    )
    return f"{f'{rounded:f}' if rounded else f'{scaled:.2e}'} {symbols[power]}".rstrip()


def _rounded(number: Decimal, digits: int) -> Decimal:
    return number.quantize(Decimal(1).scaleb(-digits), context=_HALF_UP)
