"""Files of traces: those of a folder, one that is read, one that is written."""

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from lflops.errors import ProfileError

_BEGIN = 1 << 16
GZIP = b"\x1f\x8b"
AT_BYTE = re.compile(r" \(byte (\d+)\)")
_NO_NUMBER = re.compile(rb":\s*[-+]?(?:nan|inf|NaN|Infinity|infinity)(?=\s*[,}\]])")
"""C++ writes these where a rate is a division by 0. JSON has no such numbers."""

DAMAGE = (msgspec.MsgspecError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a damaged event raises."""

_RANK = re.compile(r"_(\d+)\.(?:.*\.)?pt\.trace\.json(\.gz)?$")
_ANY_TRACE = re.compile(r"\btrace\.json(\.gz)?$|\.json\.gz$")
_TRACE = re.compile(r"\.pt\.trace\.json(\.gz)?$")


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder, by their names; a `ProfileError` where there is none."""
    if not folder.is_dir():
        raise ProfileError(f"{folder}: is no folder: give the one that has the traces of a window")
    found = sorted(path for path in folder.iterdir() if _TRACE.search(path.name))
    if not found:
        raise ProfileError(
            f"{folder}: has no trace: give a folder with files as torch.profiler writes them, *.pt.trace.json or *.pt.trace.json.gz"
        )
    return found


def rank_in_name(path: Path) -> int | None:
    """The rank in a trace's name, as in `host_3.1234.pt.trace.json`; `None` where it has none."""
    named = _RANK.search(path.name)
    return int(named[1]) if named else None


def is_trace(path: Path) -> bool:
    """Whether a file is meant as a trace, rather than as a profile.

    By its name, or by how it begins.
    """
    if _ANY_TRACE.search(path.name):
        return True
    try:
        with path.open("rb") as file:
            begin = file.read(_BEGIN)
    except OSError:
        return False
    return begin[:2] == GZIP or begin.lstrip()[:1] == b"[" or b'"traceEvents"' in begin


@contextlib.contextmanager
def as_trace(path: Path) -> Iterator[None]:
    """A context for what is read of a trace: a `ProfileError` names the file that is none."""
    try:
        yield
    except (*DAMAGE, RecursionError) as error:
        raise ProfileError(f"{path}: is no trace as torch.profiler writes them: {error}") from error


def read(path: Path, kind: Any) -> Any:
    """Read a trace, packed or not, as a value of that type.

    A `ProfileError` names a file that cannot be read.
    """
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if content[:2] == GZIP else content
    except (OSError, EOFError, zlib.error) as error:
        raise ProfileError(f"{path}: is no trace as torch.profiler writes them: {error}") from error
    with as_trace(path):
        return decoded(text, kind)


def decoded(text: bytes, kind: Any) -> Any:
    """Decode a whole trace as a value of that type, infinite rates as null.

    A `ValueError` says in which line the JSON is broken.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if (finite := without_infinities(text)) != text:
            return decoded(finite, kind)
        if not (found := AT_BYTE.search(str(error))):
            raise
        before = text[: int(found[1])]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise ValueError(f"line {line}, column {column}: {str(error)[: found.start()]}") from None


def without_infinities(text: bytes) -> bytes:
    """JSON text with null in place of infinite numbers."""
    return _NO_NUMBER.sub(b": null", text)


def write_head(file: gzip.GzipFile, parts: Mapping[str, Raw]) -> None:
    """All of a trace but its events, which begin behind this."""
    file.write(b"{\n")
    for key, value in parts.items():
        file.write(b"%b: %b,\n" % (msgspec.json.encode(key), value))
    file.write(b'"traceEvents": ')


@contextlib.contextmanager
def written_whole(into: Path) -> Iterator[gzip.GzipFile]:
    """A file that is there once it is finished.

    Until then its name is none that readers of traces look for.
    """
    part = into.with_name(f"{into.name}.part")
    try:
        with gzip.open(part, "wb", compresslevel=6) as file:
            yield file
        part.replace(into)
    finally:
        part.unlink(missing_ok=True)
