"""A payload in an event file.

Deflated JSON, and the version of its format as the plugin's metadata.
"""

import json
import math
import re
import zlib
from typing import Any

from lflops.report.payload.columns import VERSION

PLUGIN = "lflops"
"""The name under which TensorBoard stores the summaries of lflops."""

LARGEST = 1 << 26
"""The most bytes of a payload; larger ones are rejected. 20,000 modules need a tenth of them."""

_FOREIGN = "is no summary of lflops"
_DAMAGED = "is unreadable: it is not deflated, or damaged"
_CUT = "is unreadable: its end is missing"
_START = re.compile(rb'\{"lflops":\s*(\d{1,9})')
_HEAD = b'{"lflops":%d,"head":' % VERSION
# Bytes of a payload that are inflated for the list of windows: its head is shorter.
_BEGINNING = 1 << 16
_WORDS = ("when", "kind", "device", "strategy", "dtype")
_NUMBERS = ("step", "ranks")


def packed(payload: bytes) -> bytes:
    return zlib.compress(payload, 6)


def metadata_problem(content: bytes) -> str:
    """Why a summary with this metadata cannot be read here; empty if it can."""
    return _version_problem(content[:9].decode()) if content.isdigit() else _FOREIGN


def unpacked(value: object) -> bytes:
    """The payload that a value of a summary is; a `ValueError` says why it is none."""
    payload = inflated(value)
    _check_start(payload)
    return payload


def inflated(value: object) -> bytes:
    """The text that a value of a summary is; a `ValueError` says if it is damaged, or too large."""
    text, inflating = _begin(value, LARGEST)
    if not inflating.eof:
        more = inflating.unconsumed_tail
        raise ValueError(f"inflates to more than {LARGEST} bytes" if more else _CUT)
    return text


def head(value: object) -> dict[str, Any]:
    """Read a list's entry of a summary's value, inflating its beginning.

    `None` for other types. A `ValueError` says what is wrong.
    """
    beginning, inflating = _begin(value, _BEGINNING)
    if not inflating.eof and not inflating.unconsumed_tail and len(beginning) < _BEGINNING:
        raise ValueError(_CUT)
    _check_start(beginning)
    try:
        given, _ = json.JSONDecoder(parse_int=float).raw_decode(
            beginning.removeprefix(_HEAD).decode(errors="replace")
        )
    except (ValueError, RecursionError):
        return {}
    return _known(given) if beginning.startswith(_HEAD) and isinstance(given, dict) else {}


def _begin(value: object, most: int) -> tuple[bytes, Any]:
    if not isinstance(value, bytes):
        raise ValueError(_FOREIGN)  # noqa: TRY004 - of what was written, not of an argument
    inflating = zlib.decompressobj()
    try:
        return inflating.decompress(value, most), inflating
    except zlib.error:
        raise ValueError(_DAMAGED) from None


def _check_start(payload: bytes) -> None:
    start = _START.match(payload)
    if problem := _version_problem(start[1].decode()) if start else _FOREIGN:
        raise ValueError(problem)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    words = {name: given[name] for name in _WORDS if isinstance(given.get(name), str)}
    numbers = {name: int(given[name]) for name in _NUMBERS if _is_number(given.get(name))}
    figures, ranges = (
        each if isinstance(each := given.get(name), dict) else {} for name in ("figures", "ranges")
    )
    return {
        **words,
        **numbers,
        "partial": given.get("partial") is True,
        "figures": {label: figure for label, figure in figures.items() if _is_number(figure)},
        "ranges": {
            name: pair
            for name, pair in ranges.items()
            if isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
        },
    }


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _version_problem(version: str) -> str:
    return (
        ""
        if version == str(VERSION)
        else f"has format {version}, and this lflops reads {VERSION}: show it with the lflops that wrote it"
    )
