"""A payload as it lies in an event file: deflated JSON, and beside it the version of its form."""

import json
import math
import zlib

from lflops.report.payload.columns import VERSION

__all__ = ["LARGEST", "PLUGIN", "checked", "misfit", "packed", "trend"]

PLUGIN = "lflops"
"""The name under which TensorBoard keeps our summaries."""

LARGEST = 1 << 26
"""Bytes of a payload: one of 20,000 modules has a tenth of them. What inflates to more is refused."""


_TREND = b'{"lflops":%d,"trend":' % VERSION
_LONGEST_TREND = 4096
"""Bytes: it has a number for each of some figures."""


def packed(payload: bytes) -> bytes:
    """The payload for the event file."""
    return zlib.compress(payload, 6)


def misfit(content: bytes) -> str:
    """Why a summary with this beside it cannot be read here; empty if it can."""
    if content == str(VERSION).encode():
        return ""
    if content.isdigit():
        return f"is of form {content[:9].decode()}, this lflops reads {VERSION}: another version of lflops is needed"
    return "is no summary of lflops"


def checked(value: object) -> bytes:
    """The payload that a value of a summary is.

    Raises:
        ValueError: It is none; the message says why.
    """
    if not isinstance(value, bytes):
        raise ValueError("is no summary of lflops")  # noqa: TRY004 - of what was written, not of an argument
    inflating = zlib.decompressobj()
    try:
        payload = inflating.decompress(value, LARGEST)
    except zlib.error:
        raise ValueError("is unreadable: it is not deflated, or damaged") from None
    if not inflating.eof:
        more = inflating.unconsumed_tail
        raise ValueError(f"inflates to more than {LARGEST} bytes" if more else "is unreadable: its end is missing")
    if not payload.startswith(b'{"lflops":'):
        raise ValueError("is no summary of lflops")
    return payload


def trend(payload: bytes) -> dict[str, float]:
    """The figures at the beginning of a payload that its window is followed by; none where it has none."""
    if not payload.startswith(_TREND):
        return {}
    try:
        found, _ = json.JSONDecoder(parse_int=float).raw_decode(
            payload[len(_TREND) : len(_TREND) + _LONGEST_TREND].decode(errors="replace")
        )
    except (ValueError, RecursionError):
        return {}
    figures = found.items() if isinstance(found, dict) else ()
    return {label: figure for label, figure in figures if isinstance(figure, float) and math.isfinite(figure)}
