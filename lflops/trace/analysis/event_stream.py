"""The events of a trace file in portions, so that a file of any size is read in bounded memory.

A Chrome trace is one JSON object with the events in one array. The text is read in pieces. Each
piece is cut after its last whole event and decoded as a separate array, so no text outlives its
piece.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from lflops.errors import ProfileError
from lflops.trace.files import AT_BYTE, GZIP, as_trace, rank_in_name, without_infinities

_PIECE = 1 << 22
# bytes of the longest event, header or trailer that is read
_LONGEST = 1 << 26
# bytes of the largest file, unpacked
_LARGEST = 1 << 33
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_TAIL, _CUTS = 1 << 16, 8

_Event = TypeVar("_Event")


class _Distributed(Struct, frozen=True):
    rank: int | None = None
    world_size: int | None = None
    groups: int | None = msgspec.field(default=None, name="pg_count")


class _Device(Struct, frozen=True):
    id: int = 0
    name: str = ""


class Header(Struct, frozen=True):
    """What a trace says of itself, before its events or after them."""

    base: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    distributed: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    devices: tuple[_Device, ...] = msgspec.field(default=(), name="deviceProperties")

    def rank(self, path: Path) -> int | None:
        """The rank that it says, or else the file's name."""
        told = self.distributed.rank if self.distributed else None
        return rank_in_name(path) if told is None else told


class TraceStream(Generic[_Event]):
    """One trace file, packed or not, which its first bytes show.

    What the trace says of itself is in `header`, complete when all events have been read. Events
    that are not of the kind are left out: `damaged` is how many, `damage` what is wrong with the
    first.
    """

    def __init__(self, path: Path, kind: type[_Event]) -> None:
        self.header = Header()
        self.damaged, self.damage = 0, ""
        self._path = path
        self._decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        self._single = msgspec.json.Decoder(kind)
        self._read = 0
        # of the first byte that is not decoded yet
        self._line = self._column = 1

    def portions(self) -> Iterator[list[_Event]]:
        """The events, some thousands at a time.

        A `ProfileError` names a file that cannot be read, or is no trace.
        """
        try:
            with as_trace(self._path), self._path.open("rb") as raw:
                packed = raw.read(2) == GZIP
                raw.seek(0)
                yield from self._portions(gzip.GzipFile(fileobj=raw) if packed else raw)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ProfileError(f"{self._path}: cannot be read: {reason}") from error

    def _portions(self, file: gzip.GzipFile | BufferedReader) -> Iterator[list[_Event]]:
        head, rest = self._head(file)
        self._pass(head + b"[")
        missing = _PIECE
        while True:
            piece = self._piece(file, missing)
            text = rest + piece
            found = self._leading(text)
            if found is None and (finite := without_infinities(text)) != text:
                text, found = finite, self._leading(finite)
            if found is not None:
                events, rest = found
                self._pass(text[: len(text) - len(rest)])
                missing = _PIECE
                yield events
                continue
            end = _end_of_array(text)
            if end is not None:
                if end > 2:
                    yield self._decoded(b"[" + text[: end - 1])
                break
            if not piece or len(text) > _LONGEST:
                raise ValueError(self._fault(text, is_whole=not piece))
            rest, missing = text, len(text)
        if head:
            tail = text[end - 1 :] + b"".join(
                islice(iter(lambda: file.read(_PIECE), b""), _LONGEST // _PIECE)
            )
            self.header = msgspec.json.decode(without_infinities(head + b"[]" + tail), type=Header)

    def _head(self, file: gzip.GzipFile | BufferedReader) -> tuple[bytes, bytes]:
        """The text before the list of events, and what has been read of the list."""
        text = b""
        while piece := self._piece(file, _PIECE):
            text += piece
            # a list of events without a header is a trace too
            if text.lstrip()[:1] == b"[":
                return b"", text.lstrip()[1:]
            for start in _EVENTS.finditer(text):
                head = text[: start.end() - 1]
                try:
                    msgspec.json.decode(head + b"[]}", type=Header)
                except msgspec.ValidationError:
                    raise
                except msgspec.DecodeError:
                    # it stands within a text, or in another object
                    continue
                return head, text[start.end() :]
            if len(text) > _LONGEST or text.lstrip()[:1] != b"{":
                break
        if not text.strip():
            raise ValueError("the file is empty")
        raise ValueError('it has no list of events, "traceEvents"')

    def _piece(self, file: gzip.GzipFile | BufferedReader, size: int) -> bytes:
        piece = file.read(size)
        self._read += len(piece)
        if self._read > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST >> 30} GiB of text; record fewer steps")
        return piece

    def _pass(self, text: bytes) -> None:
        """Count the lines of text that is decoded."""
        self._line += text.count(b"\n")
        self._column = len(text) - text.rfind(b"\n") if b"\n" in text else self._column + len(text)

    def _fault(self, text: bytes, *, is_whole: bool) -> str:
        """Why a text, which has all that follows or its beginning, is not the rest of a list of events."""
        try:
            msgspec.json.decode(b"[" + text, type=list[Raw])
        except msgspec.DecodeError as error:
            if found := AT_BYTE.search(str(error)):
                self._pass(text[: int(found[1]) - 1])
                return f"line {self._line}, column {self._column}: {str(error)[: found.start()]}"
        if is_whole:
            return "the text ends before the list of events does, so the file is truncated"
        return f"line {self._line}, column {self._column}: comes an event of more than {_LONGEST >> 20} MiB"

    def skip(self, error: Exception) -> None:
        """Count an event that is left out."""
        self.damaged += 1
        self.damage = self.damage or str(error)

    def _decoded(self, text: bytes) -> list[_Event]:
        """The events of a list."""
        try:
            return self._decoder.decode(text)
        except (msgspec.ValidationError, UnicodeDecodeError):
            found = []
            for each in msgspec.json.decode(text, type=list[Raw]):
                try:
                    found.append(self._single.decode(each))
                except (msgspec.ValidationError, UnicodeDecodeError) as error:
                    self.skip(error)
            return found

    def _leading(self, text: bytes) -> tuple[list[_Event], bytes] | None:
        """The whole events that a text begins with, and the rest.

        `None` where no cut is one between two events of the list.
        """
        cuts = [match.start() + 1 for match in _BETWEEN.finditer(text, max(len(text) - _TAIL, 0))]
        for cut in reversed(cuts[-_CUTS:]):
            try:
                return self._decoded(b"[" + text[:cut] + b"]"), text[cut:].lstrip().removeprefix(
                    b","
                )
            except msgspec.DecodeError:
                continue
        return None


def _end_of_array(text: bytes) -> int | None:
    """Where the array ends that has the text after its first bracket.

    `None` where it does not end.
    """
    try:
        return json.JSONDecoder(parse_int=len, strict=False).raw_decode(
            "[" + text.decode("latin-1")
        )[1]
    except ValueError:
        return None
