"""A run's ledger, over the starts of its process.

What `lflops.load_run` reads, and what `monitor.ledger` has.

A start of a run has a file: a line of JSON for each few seconds, fewer for what is long ago. A
killed process leaves a whole file, but for its last line. The file is replaced at once when it has
become long.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path

import msgspec
from msgspec import Struct

from lflops.errors import ProfileError
from lflops.ledger.account import Ledger, SlowStep, Span, Start
from lflops.profile.records import ready_for_threads
from lflops.profile.series import summed

ENDING = ".ledger.jsonl"
# a file in the folder of a running ledger that asks for a window
REQUEST = "window.request"

VERSION = 1
MOST_LINES, MOST_SLOW = (
    1500,
    200,
    # lines that a file may have, and slow steps that it keeps then: the costliest
)
# a row may be so long, as a share of the time since: three seconds of the last minutes, half an
# hour of yesterday
SHARE_OF_AGE = 0.02

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

    # nanoseconds from the begin
    end: int
    # nanoseconds by category since the row before
    spent: dict[str, int]
    # those of the step that was going on, which a later row has again
    open: dict[str, int] = {}
    # how many steps were done; `None` before the first
    step: int | None = None
    # how many earlier starts had done; `None` before the first step
    first: int | None = None
    # bytes of the process in main memory
    memory: int | None = None
    # how the run ended, in the row that ends it
    ended: str | None = None


Line = Head | Row | SlowStep
_encoded = msgspec.json.Encoder().encode_lines
ready_for_threads(Line)


class Segment:
    """The lines of one start, the first being its head, and their file if there is one."""

    def __init__(
        self,
        head: Head,
        path: Path | None = None,
        rows: Sequence[Row] = (),
        slow: Sequence[SlowStep] = (),
    ) -> None:
        self.head = head
        self.rows: list[Row] = [*rows]
        self.slow: list[SlowStep] = [*slow]
        self.path = path
        self._file: int | None = None
        self._has_begun = False

    def open(self) -> None:
        """Begin the file, or go on with it, unless somebody has removed it since."""
        if (
            self.path is None
            or self._file is not None
            or (self._has_begun and not self.path.exists())
        ):
            return
        if not self._has_begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
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
        if self._file is not None:
            os.write(self._file, _encoded([*slow, row]))
        if len(self.rows) + len(self.slow) > MOST_LINES:
            self._shorten()

    def _shorten(self) -> None:
        self.rows = coarser(self.rows)
        kept = set(
            sorted(range(len(self.slow)), key=lambda place: -self.slow[place].cost)[:MOST_SLOW]
        )
        self.slow = [each for place, each in enumerate(self.slow) if place in kept]
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
    return msgspec.structs.replace(
        second, spent=spent, memory=memory, ended=second.ended or first.ended
    )


def read_segment(path: Path) -> Segment | None:
    """A start's file.

    `None` where its first line is not there. A line that cannot be read is left out: the process
    died in it.
    """
    # A `ProfileError` where the file is none of a ledger, or of another version of lflops.
    if path.stat().st_size > LARGEST_FILE:
        raise ProfileError(f"{path}: larger than {LARGEST_FILE} bytes: no ledger")
    lines = list(_decoded(path.read_bytes().split(b"\n")))
    if not lines:
        return None
    head, *others = lines
    if not isinstance(head, Head):
        raise ProfileError(f"{path}: the first line is not that of a ledger")
    if head.version != VERSION:
        raise ProfileError(
            f"{path}: a ledger of version {head.version}; this lflops reads version {VERSION}"
        )
    rows = [each for each in others if isinstance(each, Row)]
    return Segment(head, path, rows, [each for each in others if isinstance(each, SlowStep)])


def _decoded(lines: Iterable[bytes]) -> Iterable[Line]:
    for line in lines:
        with suppress(msgspec.DecodeError, RecursionError):
            yield msgspec.json.decode(line, type=Line)


# Nanoseconds that a start may begin before the end of the one before: the system's clock is set
# while a process counts on.
CLOCKS_DIFFER = 1_000_000_000
# seconds since the last row of a start without an end, within which its process may be running
ALIVE = 30.0


def load_run(path: str | PathLike[str], rank: int = 0) -> Ledger:
    """Read the ledger of the last run in a folder, over its restarts.

    A start belongs to the run of the one before if it goes on from a step, or if the one before was
    killed or failed.

    Args:
        path: The folder of a run's files, or one above it; or one file of a ledger.
        rank: The process that it is of.

    Raises:
        ProfileError: There is no ledger of this rank, or it cannot be read.
    """
    given = Path(path)
    try:
        files = [given] if given.is_file() else sorted(given.rglob(f"*{ENDING}"))
        segments = [each for each in map(read_segment, files) if each is not None and each.rows]
    except OSError as error:
        raise ProfileError(f"{os.fspath(path)}: {error.strerror or error}") from error
    of_rank = [each for each in segments if each.head.rank == rank or given.is_file()]
    if not of_rank:
        raise ProfileError(
            f"{os.fspath(path)}: no ledger of rank {rank} is there: give the folder of a run, watched with ledger=True"
        )
    run = starts_of_a_run(of_rank)
    return msgspec.structs.replace(ledger_of(run), others=len(of_rank) - len(run))


def newest_file(path: str | PathLike[str], rank: int = 0) -> Path:
    """The file of the last start of a rank in a folder that has one."""
    given = Path(path)
    return (
        max(given.rglob(f"rank{rank}-*{ENDING}"), key=lambda file: file.stat().st_mtime)
        if given.is_dir()
        else given
    )


def starts_of_a_run(segments: Iterable[Segment]) -> list[Segment]:
    """Choose the starts of the run that began last, one after the other."""
    run: list[Segment] = []
    for each in sorted(segments, key=lambda segment: segment.head.begin):
        is_next = (
            bool(run)
            and _end(run[-1]) - CLOCKS_DIFFER <= each.head.begin
            and _goes_on(run[-1], each)
        )
        run = [*run, each] if is_next else [each]
    return run


def _goes_on(before: Segment, segment: Segment) -> bool:
    """Whether a start goes on with the run of the one before.

    From a step, after a failure, or with a test in the same process.
    """
    is_same_process = before.head.pid == segment.head.pid and all(
        row.step is None for row in segment.rows
    )
    return _first(segment) > 0 or _ended(before) != "finished" or is_same_process


def ledger_of(segments: Sequence[Segment], now: float | None = None) -> Ledger:
    """The account of a run's starts. `now` is Unix time; without it, it is asked for."""
    spans: list[Span] = []
    for place, segment in enumerate(segments):
        if place:
            before = segments[place - 1]
            down = max(segment.head.begin - _end(before), 0) / 1e9
            last = spans[-1]
            spans.append(
                Span(
                    begin=last.begin + last.seconds,
                    seconds=down,
                    steps=last.steps,
                    spent={"down": down},
                )
            )
        again_from = [
            each.first
            for later in segments[place + 1 :]
            for each in later.rows
            if each.first is not None
        ]
        spans += _spans(segment, min(again_from, default=None))
    moment = time.time() if now is None else now
    starts = tuple(_start(each, moment if each is segments[-1] else None) for each in segments)
    head = segments[-1].head
    return Ledger(
        seconds=summed(item for span in spans for item in span.spent.items()),
        total=sum(span.seconds for span in spans),
        steps=starts[-1].last_step,
        slow_steps=tuple(each for segment in segments for each in segment.slow),
        starts=starts,
        spans=tuple(spans),
        rank=head.rank,
        ranks=head.ranks,
    )


def _spans(segment: Segment, lost_after: int | None) -> Iterator[Span]:
    """The rows of a start; what it did after a step from which the next one began is work that was lost."""
    before, steps, is_over = 0, _first(segment), False
    for row in segment.rows:
        is_last = row is segment.rows[-1]
        spent: dict[str, float] = summed(
            [*row.spent.items(), *(row.open.items() if is_last else ())]
        )
        done = steps if row.step is None else row.step
        if lost_after is not None and not is_over and done > lost_after:
            share = (lost_after - steps) / (done - steps) if steps < lost_after else 0.0
            spent, is_over = _lost(spent, share), True
        elif is_over:
            spent = _lost(spent, 0.0)
        # A step that is going on is in its row, and again in the one that has its end: the spans
        # have the time once.
        seconds = sum(spent.values())
        begin = (segment.head.begin + before) / 1e9
        yield Span(
            begin=begin,
            seconds=seconds / 1e9,
            steps=done,
            spent={name: ns / 1e9 for name, ns in spent.items()},
            memory=row.memory,
        )
        before, steps = before + int(seconds), done


def _lost(spent: dict[str, float], kept: float) -> dict[str, float]:
    lost = sum(spent.values()) * (1 - kept)
    return {name: each * kept for name, each in spent.items() if kept} | {"repeated": lost}


def _start(segment: Segment, now: float | None) -> Start:
    last, begin = _end(segment) / 1e9, segment.head.begin / 1e9
    ended = _ended(segment) or ("running" if now is not None and now - last < ALIVE else "killed")
    first = _first(segment)
    steps = next((row.step for row in reversed(segment.rows) if row.step is not None), first)
    return Start(
        begin=begin,
        seconds=segment.rows[-1].end / 1e9,
        first_step=first,
        last_step=steps,
        ended=ended,
    )


def _end(segment: Segment) -> int:
    return segment.head.begin + segment.rows[-1].end


def _first(segment: Segment) -> int:
    return next((row.first for row in segment.rows if row.first is not None), 0)


def _ended(segment: Segment) -> str | None:
    return next((row.ended for row in reversed(segment.rows) if row.ended is not None), None)
