"""A payload in an event file: deflated JSON, and the version of its format as the plugin's metadata."""

import json
import math
import re
import zlib

from lflops.report.payload.columns import VERSION

__all__ = ["LARGEST", "PLUGIN", "metadata_problem", "packed", "trend", "unpacked"]

PLUGIN = "lflops"
"""The name under which TensorBoard stores our summaries."""

LARGEST = 1 << 26
"""Bytes of a payload: one of 20,000 modules has a tenth of them. What inflates to more is refused."""

_FOREIGN = "is no summary of lflops"
_START = re.compile(rb'\{"lflops":\s*(\d{1,9})')
_TREND = b'{"lflops":%d,"trend":' % VERSION
_LONGEST_TREND = 4096
"""Bytes: it has a number for each of some figures."""


def packed(payload: bytes) -> bytes:
    """The payload for the event file."""
    return zlib.compress(payload, 6)


def metadata_problem(content: bytes) -> str:
    """Why a summary with this metadata cannot be read here; empty if it can."""
    return _version_problem(content[:9].decode()) if content.isdigit() else _FOREIGN


def unpacked(value: object) -> bytes:
    """The payload that a value of a summary is.

    Raises:
        ValueError: It is none; the message says why.
    """
    if not isinstance(value, bytes):
        raise ValueError(_FOREIGN)  # noqa: TRY004 - of what was written, not of an argument
    inflating = zlib.decompressobj()
    try:
        payload = inflating.decompress(value, LARGEST)
    except zlib.error:
        raise ValueError("is unreadable: it is not deflated, or damaged") from None
    if not inflating.eof:
        more = inflating.unconsumed_tail
        raise ValueError(f"inflates to more than {LARGEST} bytes" if more else "is unreadable: its end is missing")
    start = _START.match(payload)
    if problem := _version_problem(start[1].decode()) if start else _FOREIGN:
        raise ValueError(problem)
    return payload


def trend(payload: bytes) -> dict[str, float]:
    """The figures at the beginning of a payload that are drawn over the windows; none where it has none."""
    if not payload.startswith(_TREND):
        return {}
    try:
        figures, _ = json.JSONDecoder(parse_int=float).raw_decode(
            payload[len(_TREND) : len(_TREND) + _LONGEST_TREND].decode(errors="replace")
        )
    except (ValueError, RecursionError):
        return {}
    items = figures.items() if isinstance(figures, dict) else ()
    return {label: figure for label, figure in items if isinstance(figure, float) and math.isfinite(figure)}


def _version_problem(version: str) -> str:
    return "" if version == str(VERSION) else f"is of form {version}, this lflops reads {VERSION}: another version of lflops is needed"
