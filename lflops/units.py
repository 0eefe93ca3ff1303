"""Format numbers as text.

Reports format almost all numbers with this module. Counts and bytes have two decimals and a prefix;
a count that needs no prefix stays exact. Times and rates have three digits. An unknown value is
shown as a dash. 0 is shown as `0`, and no other value is rounded to 0.
"""

from decimal import ROUND_HALF_UP, Context, Decimal

UNKNOWN = "–"

_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")
_SECONDS = ("ns", "µs", "ms", "s")

# Enough digits for the largest float and its decimals.
_HALF_UP = Context(prec=400, rounding=ROUND_HALF_UP)


def count(value: float | None) -> str:
    """Format a count: `1.23 G`."""
    return quantity(value, "")


def quantity(value: float | None, unit: str, *, digits: int = 2) -> str:
    """Format an amount with a decimal prefix before its unit: `312.00 TFLOP/s`."""
    return _scaled(_known(value), 1000, _with_prefixes(unit), digits)


def size(value: float | None, *, digits: int = 2) -> str:
    """Format bytes in binary units: `417.76 MiB`."""
    return _scaled(_known(value), 1024, _BINARY, digits)


def rate(value: float | None, unit: str = "", *, peak: float | None = None) -> str:
    """Format a rate: `177 GFLOP/s`.

    The text has three digits, because a rate comes from a measured time. If the rate is above
    `peak`, the text says so, because then the peak is too low or a count is wrong.
    """
    text = _three_digits(_known(value), _with_prefixes(unit))
    is_over = value is not None and peak is not None and value > peak
    return f"{text} (over the peak)" if is_over else text


def duration(value: float | None) -> str:
    """Format seconds: `76.7 ms`.

    The text has three digits, because more digits would be noise. Long durations are in seconds,
    never in minutes.
    """
    seconds = _known(value)
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1:
        return _three_digits(seconds, ("s",))
    return _three_digits(seconds.scaleb(9), _SECONDS)


def long_duration(value: float | None) -> str:
    """Format seconds with larger units: `76.7 ms`, `47.1 s`, `13 min 20 s`, `2 h 13 min`.

    From one minute up, the smaller unit is rounded down.
    """
    known = _known(value)
    if known is None or known < 60:
        return duration(value)
    minutes, seconds = divmod(int(known), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def percent(share: float | None, *, digits: int = 1) -> str:
    """Format a fraction as a percentage: `41.5 %`."""
    known = _known(share)
    if known is None:
        return UNKNOWN
    if known == 0:
        return "0 %"
    rounded = _rounded(known.scaleb(2), digits)
    if rounded != 0:
        return f"{rounded} %"
    least = Decimal(1).scaleb(-digits)
    return f"<{least} %" if known > 0 else f">-{least} %"


def of_peak(share: float | None) -> str:
    """Format a share of the peak: `41.5 %`.

    If the share is above 1, the text says so, because then the peak is too low or a count is wrong.
    """
    text = percent(share)
    return f"{text} (over the peak)" if share is not None and share > 1 else text


def _with_prefixes(unit: str) -> tuple[str, ...]:
    return tuple(prefix + unit for prefix in _DECIMAL)


def _known(value: float | None) -> Decimal | None:
    """Return the value as a `Decimal`, or `None` if it is unknown or not finite."""
    if value is None:
        return None
    # Adding 0 turns -0.0 into 0.
    number = Decimal(value) + 0
    return number if number.is_finite() else None


def _scaled(number: Decimal | None, base: int, symbols: tuple[str, ...], digits: int) -> str:
    """Format the number in the largest unit in which it is at least 1 after rounding."""
    if number is None:
        return UNKNOWN
    if abs(number) >= Decimal(base) ** len(symbols):
        return f"{number:.{digits}e} {symbols[0]}".rstrip()
    power = 0
    scaled = number
    while abs(_rounded(scaled, digits)) >= base and power + 1 < len(symbols):
        power += 1
        scaled = number / Decimal(base) ** power
    is_exact = power == 0 and scaled == scaled.to_integral_value()
    rounded = scaled if is_exact else _rounded(scaled, digits)
    reads_as_zero = not rounded and scaled
    text = f"{scaled:.{digits}e}" if reads_as_zero else f"{rounded:f}"
    return f"{text} {symbols[power]}".rstrip()


def _three_digits(number: Decimal | None, symbols: tuple[str, ...]) -> str:
    if number is None:
        return UNKNOWN
    if number == 0:
        return f"0 {symbols[0]}".rstrip()
    power = 0
    scaled = number
    while abs(_rounded(scaled, 0)) >= 1000 and power + 1 < len(symbols):
        power += 1
        scaled = scaled.scaleb(-3)
    rounded = _rounded(scaled, 0)
    for digits in (1, 2):
        finer = _rounded(scaled, digits)
        if abs(finer) < 10 ** (3 - digits):
            rounded = finer
    text = f"{rounded:f}" if rounded else f"{scaled:.2e}"
    return f"{text} {symbols[power]}".rstrip()


def _rounded(number: Decimal, digits: int) -> Decimal:
    return number.quantize(Decimal(1).scaleb(-digits), context=_HALF_UP)
