"""Times of traces: microseconds as decimal text in a file, integer nanoseconds here.

Never a float. Kineto's times begin with the quarter: from its 51st day on, floats of them lie 1/1024 µs from each other, and what is
computed from them is off by a nanosecond. A slice would end before another that it contains.
"""

from decimal import Context, Decimal, InvalidOperation

from msgspec import Raw

ZERO = Raw(b"0.000")

_EXACT = Context(prec=60)
_LARGEST = Decimal(10) ** 18  # microseconds: 30 000 years


def span(ts: Raw, dur: Raw = ZERO) -> tuple[int, int]:
    """Start and end of an event in nanoseconds, from the JSON texts of its `ts` and `dur`; without `dur` it has no length.

    Fractions of a nanosecond are rounded at both ends, so that an event inside of another one stays inside. A `ValueError` says which of
    them is no number of microseconds.
    """
    start, length = _as_kineto_writes(bytes(ts)), _as_kineto_writes(bytes(dur))
    if start is not None and length is not None:
        return start, start + length
    begin, took = (_decimal(bytes(each).strip(b'"')) for each in (ts, dur))  # some profilers write a text
    return _rounded(begin), _rounded(_EXACT.add(begin, took))


def microseconds(nanoseconds: int) -> Raw:
    """The JSON text of a time, exact: microseconds with three places, as Kineto writes them."""
    whole, places = divmod(abs(nanoseconds), 1000)
    return Raw(b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", whole, places))


def _as_kineto_writes(text: bytes) -> int | None:
    """Nanoseconds, where the text has exactly three places; this is four times as fast as a decimal."""
    if text[-4:-3] != b"." or len(text) > 22:
        return None
    digits = text[:-4] + text[-3:]
    return int(digits) if digits.isdigit() else None


def _decimal(text: bytes) -> Decimal:
    try:
        value = Decimal(text.decode())
    except (InvalidOperation, UnicodeDecodeError):
        value = _LARGEST
    if value.copy_abs() >= _LARGEST:
        raise ValueError(
            f"a time of {text[:40].decode(errors='replace') or 'nothing'}: `ts` and `dur` are numbers of microseconds below 1e18"
        )
    return value


def _rounded(value: Decimal) -> int:
    return int(_EXACT.to_integral_value(_EXACT.scaleb(value, 3)))
