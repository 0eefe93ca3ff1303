"""Compress and read payloads, which are stored in event files of TensorBoard.

A payload is everything that the LFLOPS tab shows for one window (a few profiled steps), as
compressed JSON. It begins with the version of its format and with the head: the few values that the
tab shows in its list of windows. If a window has a timeline, it is stored as a second value after
the payload.
"""

import json
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

from lflops.report.payload.columns import VERSION

PLUGIN = "lflops"
"""The name under which TensorBoard stores the summaries of lflops."""

LARGEST = 1 << 26
"""Maximum size of a decompressed payload in bytes; larger payloads are rejected.

A payload with 20,000 modules has about a tenth of this size.
"""

# Ends of error messages about a summary (the entry of an event file with a payload).
_FOREIGN = "was not written by lflops"
_DAMAGED = "is unreadable: it is damaged, or not compressed with deflate"
_CUT = "is unreadable: its end is missing"

_START = re.compile(rb'\{"lflops":\s*(\d{1,9})')
_HEAD = b'{"lflops":%d,"head":' % VERSION

_BEGINNING = 1 << 16
"""Number of bytes that are decompressed to read the head of a payload, which is always shorter."""

_WORDS = ("when", "kind", "device", "strategy", "dtype")
_NUMBERS = ("step", "ranks")


def packed(payload: bytes) -> bytes:
    return zlib.compress(payload, 6)


def metadata_problem(content: bytes) -> str:
    """Return the reason why a payload cannot be read, according to the metadata of its event.

    The result is empty if the payload can be read.
    """
    if not content.isdigit():
        return _FOREIGN
    return _version_problem(content[:9].decode())


def unpacked(value: object) -> bytes:
    """Decompress a value from an event file, and check that it is a payload.

    Raises:
        ValueError: The value is not a payload, is damaged, or is too large.
    """
    payload = inflated(value)
    _check_start(payload)
    return payload


def inflated(value: object) -> bytes:
    """Decompress a value from an event file: a payload or a timeline.

    Raises:
        ValueError: The value is damaged, or too large.
    """
    text, inflating = _begin(value, LARGEST)
    if inflating.eof:
        return text
    if inflating.unconsumed_tail:
        raise ValueError(f"is too large: it has more than {LARGEST} bytes after decompression")
    raise ValueError(_CUT)


def head(value: object) -> dict[str, Any]:
    """Return the head of a compressed payload: the values for the list of windows.

    Only the beginning of the payload is decompressed. Fields with an unexpected type are left out.
    The result is empty if the head is invalid.

    Raises:
        ValueError: The value is not a payload, or is damaged.
    """
    beginning, inflating = _begin(value, _BEGINNING)
    is_all = not inflating.unconsumed_tail and len(beginning) < _BEGINNING
    if is_all and not inflating.eof:
        raise ValueError(_CUT)
    _check_start(beginning)
    if not beginning.startswith(_HEAD):
        return {}
    text = beginning.removeprefix(_HEAD).decode(errors="replace")
    try:
        given, _ = json.JSONDecoder(parse_int=float).raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(given, dict):
        return {}
    return _known(given)


def _begin(value: object, most: int) -> tuple[bytes, Any]:
    """Decompress a value up to `most` bytes. Return the bytes and the decompressor."""
    if not isinstance(value, bytes):
        raise ValueError(_FOREIGN)  # noqa: TRY004 - the value is data, not an argument
    inflating = zlib.decompressobj()
    try:
        return inflating.decompress(value, most), inflating
    except zlib.error:
        raise ValueError(_DAMAGED) from None


def _check_start(payload: bytes) -> None:
    start = _START.match(payload)
    problem = _FOREIGN if start is None else _version_problem(start[1].decode())
    if problem:
        raise ValueError(problem)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    """Return the expected fields of a head, without fields of an unexpected type."""
    known: dict[str, Any] = {"partial": given.get("partial") is True}
    for name in _WORDS:
        if isinstance(given.get(name), str):
            known[name] = given[name]
    for name in _NUMBERS:
        if _is_number(given.get(name)):
            known[name] = int(given[name])
    known["figures"] = _only(given.get("figures"), _is_number)
    known["ranges"] = _only(given.get("ranges"), _is_range)
    return known


def _only(mapping: object, is_valid: Callable[[object], bool]) -> dict[str, Any]:
    if not isinstance(mapping, dict):
        return {}
    return {name: value for name, value in mapping.items() if is_valid(value)}


def _is_range(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _version_problem(version: str) -> str:
    if version == str(VERSION):
        return ""
    return (
        f"has format version {version}, but this version of lflops reads only version {VERSION}: "
        "open it with the version of lflops that wrote it"
    )
