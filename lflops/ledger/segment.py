"""One start of a run, in memory and in its file: a line of JSON for each few seconds, fewer for what is long ago.

A killed process leaves a whole file, but for its last line. The file is replaced at once when it has become long.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from lflops.errors import ProfileError
from lflops.ledger.account import SlowStep
from lflops.profile.series import summed

ENDING = ".ledger.jsonl"
REQUEST = "window.request"  # a file in the folder of a running ledger that asks for a window

VERSION = 1
MOST_LINES, MOST_SLOW = 1500, 200  # lines that a file may have, and slow steps that it keeps then: the costliest
SHARE_OF_AGE = 0.02  # a row may be so long, as a share of the time since: three seconds of the last minutes, half an hour of yesterday

LARGEST_FILE = 1 << 24


class Head(Struct, frozen=True, tag_field="kind", tag="head"):
    """The first line: when the process began in Unix nanoseconds, which rank it is, and its number in the system."""

    begin: int
    rank: int
    ranks: int
    pid: int
    version: int = VERSION


class Row(Struct, frozen=True, tag_field="kind", tag="row"):
    """A part of the account."""

    end: int  # nanoseconds from the begin
    spent: dict[str, int]  # nanoseconds by category since the row before
    open: dict[str, int] = {}  # those of the step that was going on, which a later row has again
    step: int | None = None  # how many steps were done; `None` before the first
    first: int | None = None  # how many earlier starts had done; `None` before the first step
    memory: int | None = None  # bytes of the process in main memory
    ended: str | None = None  # how the run ended, in the row that ends it


Line = Head | Row | SlowStep


class Segment:
    """The lines of one start, the first being its head, and their file if there is one."""

    def __init__(self, head: Head, path: Path | None = None, rows: Sequence[Row] = (), slow: Sequence[SlowStep] = ()) -> None:
        self.head = head
        self.rows: list[Row] = [*rows]
        self.slow: list[SlowStep] = [*slow]
        self.path = path
        self._file: int | None = None
        self._has_begun = False
        self._lines = 0

    def open(self) -> None:
        """Begin the file, or go on with it, unless somebody has removed it since."""
        if self.path is None or self._file is not None or (self._has_begun and not self.path.exists()):
            return
        if not self._has_begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not self._has_begun:
            self._has_begun = True
            os.write(self._file, _encoded([self.head]))

    def close(self) -> None:
        """Close the file. It can be called again."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def add(self, row: Row, slow: Sequence[SlowStep]) -> None:
        """Add a row and slow steps, in memory and at the file's end."""
        self.rows.append(row)
        self.slow += slow
        self._lines += 1 + len(slow)
        if self._file is not None:
            os.write(self._file, _encoded([*slow, row]))
        if self._lines > MOST_LINES:
            self._shorten()

    def _shorten(self) -> None:
        self.rows = coarser(self.rows)
        kept = set(sorted(range(len(self.slow)), key=lambda place: -self.slow[place].cost)[:MOST_SLOW])
        self.slow = [each for place, each in enumerate(self.slow) if place in kept]
        self._lines = len(self.rows) + len(self.slow)
        if self._file is not None and self.path is not None:
            written = self.path.with_suffix(f".{self.head.pid}.tmp")
            written.write_bytes(_encoded([self.head, *self.slow, *self.rows]))
            written.replace(self.path)
            self.close()
            self.open()


def coarser(rows: Sequence[Row]) -> list[Row]:
    """The rows, where neighbours of long ago are one."""
    now, kept = rows[-1].end, [rows[0]]
    begin = 0
    for before, row in itertools.pairwise(rows):
        if row.end - begin <= SHARE_OF_AGE * (now - row.end):
            kept[-1] = _joined(kept[-1], row)
        else:
            begin = before.end
            kept.append(row)
    return kept


def _joined(first: Row, second: Row) -> Row:
    spent = summed([*first.spent.items(), *second.spent.items()])
    memory = max((each for each in (first.memory, second.memory) if each is not None), default=None)
    return msgspec.structs.replace(second, spent=spent, memory=memory, ended=second.ended or first.ended)


def read_segment(path: Path) -> Segment | None:
    """A start's file; `None` where its first line is not there. A line that cannot be read is left out: the process died in it.

    A `ProfileError` where the file is none of a ledger, or of another version of lflops.
    """
    with suppress(OSError):
        if path.stat().st_size > LARGEST_FILE:
            raise ProfileError(f"{path}: larger than {LARGEST_FILE} bytes: no ledger")
    lines = list(_decoded(path.read_bytes().split(b"\n")))
    if not lines:
        return None
    head, *others = lines
    if not isinstance(head, Head):
        raise ProfileError(f"{path}: the first line is not that of a ledger")
    if head.version != VERSION:
        raise ProfileError(f"{path}: a ledger of version {head.version}; this lflops reads version {VERSION}")
    rows = [each for each in others if isinstance(each, Row)]
    return Segment(head, path, rows, [each for each in others if isinstance(each, SlowStep)])


def _decoded(lines: Iterable[bytes]) -> Iterable[Line]:
    decoder = msgspec.json.Decoder(Line)
    for line in lines:
        with suppress(msgspec.DecodeError, RecursionError):
            yield decoder.decode(line)


def _encoded(lines: Iterable[Line]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
