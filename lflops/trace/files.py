"""Recognize trace files by name and content, and decode and write their text."""

import contextlib
import gzip
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from lflops.errors import ProfileError
from lflops.files import GZIP, open_file, replacing

_BEGIN = 1 << 16
"""Number of bytes at the start of a file that are searched for `"traceEvents"`."""

_AT_BYTE = re.compile(r" \(byte (\d+)\)")
_NO_NUMBER = re.compile(rb":\s*[-+]?(?:nan|inf|NaN|Infinity|infinity)(?=\s*[,}\]])")
"""Matches values such as `nan` and `inf`, which JSON does not allow.

Kineto, which is written in C++, writes them for a division by 0.
"""

DAMAGE = (msgspec.MsgspecError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that can occur when a damaged event is read."""

LARGEST_RAW = 1 << 33
"""Maximum size in bytes of a trace to which lflops has not yet added modules."""


class LeftOut:
    """Events that are left out because they are damaged.

    Attributes:
        number: Number of events that are left out.
        first: Problem of the first of these events; empty if no event is left out.
    """

    def __init__(self) -> None:
        self.number = 0
        self.first = ""

    def add(self, error: Exception) -> None:
        """Count an event that is left out because of an error."""
        self.number += 1
        self.first = self.first or str(error)


_RANK = re.compile(r"_(\d+)\.(?:.*\.)?pt\.trace\.json(\.gz)?$")
_ANY_TRACE = re.compile(r"\btrace\.json(\.gz)?$|\.json\.gz$")
_TRACE = re.compile(r"\.pt\.trace\.json(\.gz)?$")


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder, sorted by name; raise `ProfileError` if there are none."""
    if not folder.is_dir():
        raise ProfileError(f"{folder}: is not a folder: pass a folder with traces")
    found = sorted(path for path in folder.iterdir() if _TRACE.search(path.name))
    if not found:
        raise ProfileError(
            f"{folder}: contains no trace: pass a folder with files that torch.profiler wrote, "
            "*.pt.trace.json or *.pt.trace.json.gz"
        )
    return found


def rank_in_name(path: Path) -> int | None:
    """Return the rank from a file name, or `None` if the name has no rank.

    For example, the rank is 3 if the name is `host_3.1234.pt.trace.json`.
    """
    named = _RANK.search(path.name)
    return int(named[1]) if named else None


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace rather than a profile, by its name or its first bytes."""
    if _ANY_TRACE.search(path.name):
        return True
    try:
        with open_file(path) as file:
            begin = file.read(_BEGIN)
    except OSError:
        return False
    return begin[:2] == GZIP or begin.lstrip()[:1] == b"[" or b'"traceEvents"' in begin


@contextlib.contextmanager
def as_trace(path: Path) -> Iterator[None]:
    """Turn errors from reading a trace into a `ProfileError` that names the file."""
    try:
        yield
    except (*DAMAGE, RecursionError) as error:
        raise ProfileError(f"{path}: is not a torch.profiler trace: {error}") from error


def decoded(text: bytes, kind: Any) -> Any:
    """Decode a whole trace as a value of the type `kind`, with `nan` and `inf` as null.

    Raises:
        ValueError: The JSON is malformed; the message has the line and the column.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        finite = without_infinities(text)
        if finite != text:
            return decoded(finite, kind)
        found = malformed_at(error)
        if found is None:
            raise
        byte, problem = found
        before = text[: byte + 1]
        line = before.count(b"\n") + 1
        column = len(before) - before.rfind(b"\n")
        raise ValueError(f"line {line}, column {column}: {problem}") from None


def malformed_at(error: msgspec.DecodeError) -> tuple[int, str] | None:
    """Return the position and the problem from an error about malformed JSON.

    Returns `None` if the error reports no position.
    """
    message = str(error)
    found = _AT_BYTE.search(message)
    if not found:
        return None
    return (int(found[1]) - 1, message[: found.start()])


def without_infinities(text: bytes) -> bytes:
    """Replace values such as `nan` and `inf`, which JSON does not allow, with null."""
    return _NO_NUMBER.sub(b": null", text)


def write_head(file: gzip.GzipFile, parts: Mapping[str, Raw]) -> None:
    """Write the part of a trace before its events."""
    file.write(b"{\n")
    for key, value in parts.items():
        file.write(b"%b: %b,\n" % (msgspec.json.encode(key), value))
    file.write(b'"traceEvents": ')


@contextlib.contextmanager
def written_whole(into: Path) -> Iterator[gzip.GzipFile]:
    """Open a compressed file that appears only when it is complete."""
    with (
        replacing(into) as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6) as file,
    ):
        yield file
