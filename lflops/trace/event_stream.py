"""Read the events of a trace file in portions, so that even a large file needs little memory.

A Chrome trace is one JSON object that contains all events in one array. The text of the file is
read in pieces. Each piece is cut after its last complete event, and the events before the cut are
decoded as a separate array. So only one piece of the text is in memory at a time.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from lflops.errors import ProfileError
from lflops.files import InflatedFile
from lflops.trace.files import as_trace, malformed_at, rank_in_name, without_infinities

_PIECE = 1 << 22
"""Number of bytes to read at a time."""
_LONGEST = 1 << 24
"""Maximum size of an event, of the header and of the trailer, in bytes."""
_LARGEST = 1 << 33
"""Maximum size of a file after decompression, in bytes."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
"""Text that separates two events. The same text may also occur inside an event."""
_TRAILING = "JSON is malformed: trailing characters"
"""Message of the error that msgspec raises if text follows a complete JSON value."""
_TAIL = 1 << 16
"""Number of bytes at the end of the text that are searched for a border between two events."""
_CUTS = 8
"""Maximum number of positions that are tried as a border between two events, the last one first.

A position that looks like a border may lie inside an event, so decoding may fail there.
"""

_Event = TypeVar("_Event")


class _Distributed(Struct, frozen=True):
    rank: int | None = None
    world_size: int | None = None
    groups: int | None = msgspec.field(default=None, name="pg_count")


class _Device(Struct, frozen=True):
    id: int = 0
    name: str = ""


class Header(Struct, frozen=True):
    """The content of a trace file except its events.

    In the file, the fields can be before or after the events.
    """

    base: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    distributed: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    devices: tuple[_Device, ...] = msgspec.field(default=(), name="deviceProperties")

    def rank(self, path: Path) -> int | None:
        """Return the rank from the header, or from the file's name if the header has none."""
        if self.distributed is not None and self.distributed.rank is not None:
            return self.distributed.rank
        return rank_in_name(path)


class TraceStream(Generic[_Event]):
    """Reads one trace file, compressed or not.

    Attributes:
        header: The trace's header. It is complete when all events have been read.
        header_text: The JSON of the header, without events.
        damaged: Number of events left out because they are not of the expected type.
        damage: Error of the first damaged event.
    """

    def __init__(self, path: Path, kind: type[_Event]) -> None:
        """Prepare to read a file. Each event is decoded as a value of the type `kind`."""
        self.header = Header()
        self.header_text = b"{}"
        self.damaged = 0
        self.damage = ""
        self._path = path
        self._decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        self._single = msgspec.json.Decoder(kind)
        self._read = 0
        # Position of the first byte that is not decoded yet.
        self._line = 1
        self._column = 1

    def portions(self) -> Iterator[list[_Event]]:
        """Yield lists of a few thousand events each.

        Raises:
            ProfileError: The file cannot be read, or it is not a trace.
        """
        try:
            with as_trace(self._path), InflatedFile(self._path) as file:
                yield from self._portions(file)
        except OSError as error:
            raise ProfileError(f"{self._path}: cannot be read: {error.strerror}") from error

    def _portions(self, file: InflatedFile) -> Iterator[list[_Event]]:
        head, rest = self._read_head(file)
        self._count_lines(head + b"[")
        missing = _PIECE
        while True:
            piece = self._read_piece(file, missing)
            text = rest + piece
            found = self._leading_events(text)
            if found is None:
                finite = without_infinities(text)
                if finite != text:
                    text = finite
                    found = self._leading_events(text)
            if found is not None:
                events, rest = found
                self._count_lines(text[: len(text) - len(rest)])
                missing = _PIECE
                yield events
                continue
            end = _end_of_array(text)
            if end is not None:
                break
            if not piece or len(text) > _LONGEST:
                raise ValueError(self._problem(text, is_whole=not piece))
            rest = text
            missing = len(text)
        # An array of two bytes, `[]`, contains no events.
        if end > 2:
            yield self._decode(b"[" + text[: end - 1])
        if head:
            trailer = text[end - 1 :] + self._read_trailer(file)
            self.header_text = without_infinities(head + b"[]" + trailer)
            self.header = msgspec.json.decode(self.header_text, type=Header)

    def _read_head(self, file: InflatedFile) -> tuple[bytes, bytes]:
        """Return the text before the list of events, and the beginning of the list."""
        text = b""
        while piece := self._read_piece(file, _PIECE):
            text += piece
            start = text.lstrip()
            # A trace can also be a list of events without a header.
            if start.startswith(b"["):
                return b"", start[1:]
            for match in _EVENTS.finditer(text):
                head = text[: match.end() - 1]
                if _is_header(head):
                    return head, text[match.end() :]
            if len(text) > _LONGEST or not start.startswith(b"{"):
                break
        if not text.strip():
            raise ValueError("the file is empty")
        raise ValueError('it has no list of events, "traceEvents"')

    def _read_trailer(self, file: InflatedFile) -> bytes:
        pieces = iter(lambda: file.read(_PIECE), b"")
        return b"".join(islice(pieces, _LONGEST // _PIECE))

    def _read_piece(self, file: InflatedFile, size: int) -> bytes:
        piece = file.read(size)
        self._read += len(piece)
        if self._read > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST >> 30} GiB of text: record fewer steps")
        return piece

    def _count_lines(self, text: bytes) -> None:
        """Move the line and column that error messages show to the end of `text`.

        `text` begins at the current line and column.
        """
        self._line += text.count(b"\n")
        if b"\n" in text:
            self._column = len(text) - text.rfind(b"\n")
        else:
            self._column += len(text)

    def _problem(self, text: bytes, *, is_whole: bool) -> str:
        """Explain why the unread text of a trace is not a list of events.

        `is_whole` means that the text reaches the end of the file.
        """
        try:
            msgspec.json.decode(b"[" + text, type=list[Raw])
        except msgspec.DecodeError as error:
            found = malformed_at(error)
            if found is not None:
                # The position also counts the bracket before the text.
                position, problem = found
                self._count_lines(text[:position])
                return f"line {self._line}, column {self._column}: {problem}"
        if is_whole:
            return "the text ends within the list of events, so the file is truncated"
        limit = _LONGEST >> 20
        return f"line {self._line}, column {self._column}: an event is larger than {limit} MiB"

    def skip(self, error: Exception) -> None:
        """Count an event that is left out because of an error."""
        self.damaged += 1
        self.damage = self.damage or str(error)

    def _decode(self, text: bytes) -> list[_Event]:
        """Decode a list of events. Damaged events are skipped and counted."""
        try:
            return self._decoder.decode(text)
        except (msgspec.ValidationError, UnicodeDecodeError):
            pass
        found = []
        for each in msgspec.json.decode(text, type=list[Raw]):
            try:
                found.append(self._single.decode(each))
            except (msgspec.ValidationError, UnicodeDecodeError) as error:
                self.skip(error)
        return found

    def _leading_events(self, text: bytes) -> tuple[list[_Event], bytes] | None:
        """Return the complete events at the beginning of a text, and the rest of the text.

        Returns `None` if no border between two events is found.
        """
        borders = _BETWEEN.finditer(text, max(len(text) - _TAIL, 0))
        cuts = [match.start() + 1 for match in borders]
        for cut in reversed(cuts[-_CUTS:]):
            try:
                events = self._decode(b"[" + text[:cut] + b"]")
            except msgspec.DecodeError:
                continue
            return events, text[cut:].lstrip().removeprefix(b",")
        return None


def _is_header(head: bytes) -> bool:
    """Return whether a text that ends with `"traceEvents": ` is really the start of a trace.

    The result is false if `"traceEvents"` occurs inside a string or inside another object.
    """
    try:
        msgspec.json.decode(head + b"[]}", type=Header)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return False
    return True


def _end_of_array(text: bytes) -> int | None:
    """Return the length of the array that continues in `text`, or `None` if it does not end there.

    The opening bracket of the array is not in `text`, but the length includes it.
    """
    try:
        msgspec.json.decode(b"[" + text, type=Raw)
    except msgspec.DecodeError as error:
        found = malformed_at(error)
        if found is None or found[1] != _TRAILING:
            return None
        return found[0]
    return len(text) + 1
