"""Write the ledger file of one process, and read the ledger of a run with all its restarts.

A start is one process of a run. Each start has a file of JSON lines. Every few seconds, a line is
added for the time since the previous line. Such a line is called a row. Rows from long ago are
joined, so that the file stays small; the shortened file replaces the old file atomically. If the
process is killed, at most the last line of the file is incomplete.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lflops.errors import ProfileError
from lflops.files import open_for_append, read, write_whole
from lflops.ledger.account import (
    CATEGORIES,
    CAUSES,
    Ledger,
    SlowStep,
    Span,
    Start,
    StepGroup,
    in_pairs,
)
from lflops.profile.records import ready_for_threads
from lflops.profile.series import scaled, summed

ENDING = ".ledger.jsonl"
REQUEST = "window.request"
"""Name of the file with which a user requests a window (a few steps to profile).

The user creates this file in the folder in which a running process writes its ledger.
"""

VERSION = 1

MOST_LINES = 1500
"""Maximum number of rows and slow steps in a file. If there are more, the file is shortened."""

MOST_SLOW = 200
"""Maximum number of slow steps in a shortened file. The steps with the highest cost are kept."""

MOST_GROUPS = 2000
"""Maximum number of groups of steps in a file. If there are more, they are joined in pairs.

Only neighbouring groups of the same mode are joined, so more groups may remain.
"""

SHARE_OF_AGE = 0.02
"""Maximum duration of a row that is joined from old rows, as a share of the row's age.

For example, a row from yesterday may cover half an hour.
"""

LARGEST_FILE = 1 << 24
"""Maximum size in bytes of a ledger file that is read."""

Number = Annotated[int, Meta(ge=-(2**62), le=2**62)]
"""A number of nanoseconds, steps or bytes in a ledger file. Larger numbers are invalid."""

MOST_DAMAGED = 10_000
"""Maximum number of unreadable lines in a file. A file with more is rejected as damaged.

A few unreadable lines are normal, because a killed process leaves one incomplete line.
"""

MOST_CATEGORIES = 1_000
"""Maximum number of categories in a single row. A row is a line of a ledger file."""

MOST_STEPS = 2**53
"""Upper limit of the number of steps of a run.

A float cannot represent all larger integers exactly.
"""

_LARGEST_CLASS = 10_000
"""Largest valid number of a duration class in a row.

A duration class is a bin of the histogram of durations. This class stands for about 10^43 seconds.
"""


class Head(Struct, frozen=True, tag_field="kind", tag="head"):
    """The first line of a ledger file, which identifies the process.

    Attributes:
        begin: Unix time at which the ledger begins, in nanoseconds. For the first ledger of a
            process, this is the beginning of the process.
        rank: Rank of the process.
        ranks: Number of ranks.
        pid: Id of the process.
        version: Version of the file format.
    """

    begin: Number
    rank: Number
    ranks: Number
    pid: Number
    version: int = VERSION


class Row(Struct, frozen=True, tag_field="kind", tag="row"):
    """The time account of the seconds since the previous row.

    Attributes:
        end: Nanoseconds from `Head.begin` to the end of the row.
        spent: Nanoseconds by category.
        open: Nanoseconds by category of the step that is incomplete at the end of the row. They are
            not included in `spent` of this row, but in `spent` of the row in which the step ends.
        step: Number of steps that the run has done. `None` before the first step.
        first: Number of steps that the run had done before this ledger began. `None` before the
            first step, or if the number is unknown.
        memory: Resident memory of the process in bytes, or `None` if it was not read.
        durations: Histogram of the durations of unprofiled steps: the number of steps in each
            duration class.
        ended: How the run ended; `None` in rows before the end.
        device: Type of the device on which the model trains, such as "cuda". Empty if unknown.
    """

    end: Number
    spent: dict[str, Number]
    open: dict[str, Number] = {}
    step: Number | None = None
    first: Number | None = None
    memory: Number | None = None
    durations: dict[int, Number] = {}
    ended: str | None = None
    device: str = ""


Line = Head | Row | SlowStep | StepGroup
_encoded = msgspec.json.Encoder().encode_lines
ready_for_threads(Line)


class Segment:
    """The ledger of one process: the lines of its file, which are also kept in memory.

    Attributes:
        head: The first line.
        rows: The rows in chronological order.
        slow: The slow steps.
        groups: The groups of steps.
        path: Path of the file. `None` if the ledger is only kept in memory.
    """

    def __init__(
        self,
        head: Head,
        path: Path | None = None,
        rows: Sequence[Row] = (),
        slow: Sequence[SlowStep] = (),
        groups: Sequence[StepGroup] = (),
    ) -> None:
        self.head = head
        self.rows: list[Row] = [*rows]
        self.slow: list[SlowStep] = [*slow]
        self.groups: list[StepGroup] = [*groups]
        self.path = path
        self._file: int | None = None
        self._has_begun = False

    def open(self) -> None:
        """Create the file, or open it again.

        A file that the user has removed is not created again.
        """
        if self.path is None or self._file is not None:
            return
        if self._has_begun and not self.path.exists():
            return
        if not self._has_begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_for_append(self.path, new=not self._has_begun)
        if not self._has_begun:
            self._has_begun = True
            os.write(self._file, _encoded([self.head]))

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            file = self._file
            self._file = None
            os.close(file)

    def add(self, row: Row, slow: Sequence[SlowStep], groups: Sequence[StepGroup] = ()) -> None:
        """Append a row, slow steps and groups of steps to memory and to the file."""
        self.rows.append(row)
        self.slow += slow
        self.groups += groups
        if self._file is not None:
            os.write(self._file, _encoded([*slow, *groups, row]))
        has_many_groups = len(self.groups) > MOST_GROUPS
        if has_many_groups:
            self.groups = in_pairs(self.groups)
        if has_many_groups or len(self.rows) + len(self.slow) > MOST_LINES:
            self._shorten()

    def _shorten(self) -> None:
        self.rows = coarser(self.rows)
        costliest = sorted(range(len(self.slow)), key=lambda place: -self.slow[place].cost)
        self.slow = [self.slow[place] for place in sorted(costliest[:MOST_SLOW])]
        if self._file is not None and self.path is not None:
            write_whole(self.path, _encoded([self.head, *self.slow, *self.groups, *self.rows]))
            self.close()
            self.open()


def coarser(rows: Sequence[Row]) -> list[Row]:
    """Join rows from long ago with their neighbours, as `SHARE_OF_AGE` allows."""
    now = rows[-1].end
    kept = [rows[0]]
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
    durations = summed([*first.durations.items(), *second.durations.items()])
    memory = second.memory if first.memory is None else first.memory
    if first.memory is not None and second.memory is not None:
        memory = max(first.memory, second.memory)
    ended = second.ended or first.ended
    return msgspec.structs.replace(
        second, spent=spent, memory=memory, durations=durations, ended=ended
    )


def read_segment(path: Path) -> Segment | None:
    """Read the ledger file of one process.

    Returns `None` if the file has no valid line. An invalid line is skipped, because a process
    that was killed may leave an incomplete line.

    Raises:
        ProfileError: The file cannot be read, is not a ledger, or another version of lflops wrote
            it.
    """
    try:
        content = read(path, LARGEST_FILE)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from error
    lines = list(_decoded(content.split(b"\n"), path))
    if not lines:
        return None
    head, *others = lines
    if not isinstance(head, Head):
        raise ProfileError(f"{path}: this is not a ledger: the first line is not a ledger header")
    if head.version != VERSION:
        raise ProfileError(
            f"{path}: the ledger has version {head.version}, but this lflops reads version "
            f"{VERSION}: use the version of lflops that wrote the ledger"
        )
    rows: list[Row] = []
    slow: list[SlowStep] = []
    groups: list[StepGroup] = []
    for line in others:
        if isinstance(line, Row):
            rows.append(line)
        elif isinstance(line, SlowStep):
            slow.append(line)
        elif isinstance(line, StepGroup):
            groups.append(line)
    return Segment(head, path, rows, slow, groups)


def _decoded(lines: Iterable[bytes], path: Path) -> Iterator[Line]:
    damaged = 0
    for text in lines:
        if not text:
            continue
        try:
            line: Line = msgspec.json.decode(text, type=Line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            damaged += 1
            if damaged > MOST_DAMAGED:
                raise ProfileError(
                    f"{path}: this is not a readable ledger: more than {MOST_DAMAGED:,} lines are "
                    "damaged"
                ) from None
            continue
        if _is_known(line):
            yield line


def _is_known(line: Line) -> bool:
    """Return whether a line has only known categories and causes, and no number that is too large.

    Lines that another version of lflops wrote may have unknown categories.
    """
    if isinstance(line, SlowStep):
        return line.cause in CAUSES
    if isinstance(line, StepGroup):
        return max(abs(line.first), abs(line.last), abs(line.steps)) < MOST_STEPS
    if isinstance(line, Row):
        if len(line.spent) + len(line.open) > MOST_CATEGORIES:
            return False
        if any(abs(each) > _LARGEST_CLASS for each in line.durations):
            return False
        for category in (*line.spent, *line.open):
            group, _, cause = category.partition("/")
            if group not in CATEGORIES or (group == "slow" and cause not in CAUSES):
                return False
    return True


CLOCKS_DIFFER = 1_000_000_000
"""Maximum time in nanoseconds by which two starts (processes) of one run may overlap.

They seem to overlap if the system clock is changed while a process runs.
"""

ALIVE = 30.0
"""A process without a recorded end counts as running for this many seconds after its last row."""


def load_run(path: str | PathLike[str], rank: int = 0) -> Ledger:
    """Read the ledger of the last run in a folder, including its restarts.

    A process belongs to the same run as the previous process if it resumes from a step, or if the
    previous process was killed or failed. `trainer.test` after `trainer.fit` in one process is also
    part of the same run.

    Args:
        path: The folder of a run's files, a folder above it, or one ledger file.
        rank: Rank of the process.

    Raises:
        ProfileError: There is no ledger of this rank, or it cannot be read.
    """
    given = Path(path)
    name = os.fspath(path)
    try:
        files = [given] if given.is_file() else sorted(given.rglob(f"*{ENDING}"))
        found = [read_segment(file) for file in files]
    except OSError as error:
        raise ProfileError(f"{name}: {error.strerror or error}") from error
    segments = []
    for segment in found:
        if segment is not None and segment.rows and (given.is_file() or segment.head.rank == rank):
            segments.append(segment)
    if not segments:
        raise ProfileError(
            f"{name}: no ledger of rank {rank} found: pass the folder of a run that was monitored "
            "with ledger=True"
        )
    run = starts_of_a_run(segments)
    return msgspec.structs.replace(ledger_of(run), others=len(segments) - len(run))


def newest_file(path: str | PathLike[str]) -> Path:
    """Return the newest ledger file of rank 0 in a folder, or `path` itself if it is no folder."""
    given = Path(path)
    if not given.is_dir():
        return given
    files = given.rglob(f"rank0-*{ENDING}")
    return max(files, key=lambda file: file.stat().st_mtime)


def starts_of_a_run(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments (processes) of the last run in chronological order.

    Segments of earlier runs are left out.
    """
    run: list[Segment] = []
    for segment in sorted(segments, key=lambda each: each.head.begin):
        if run and not _goes_on(run[-1], segment):
            run = []
        run.append(segment)
    return run


def _goes_on(before: Segment, segment: Segment) -> bool:
    """Return whether a segment (process) continues the run of the previous segment.

    A segment continues the run if it resumes from a step, if the previous segment did not finish,
    or if both segments are from one process and this segment has no training steps, such as
    `trainer.test` after `trainer.fit`. In each case, it must not begin more than `CLOCKS_DIFFER`
    before the previous segment ends.
    """
    if segment.head.begin < _end(before) - CLOCKS_DIFFER:
        return False
    is_test = not _steps(segment) and before.head.pid == segment.head.pid
    return _first(segment) > 0 or _ended(before) != "finished" or is_test


def ledger_of(segments: Sequence[Segment], now: float | None = None) -> Ledger:
    """Compute the ledger of a run from its segments (one for each process).

    Args:
        segments: The segments in chronological order.
        now: Unix time in seconds; by default, the current time. If the last row is recent at this
            time and records no end, the last process counts as running.
    """
    spans: list[Span] = []
    for place, segment in enumerate(segments):
        if place:
            spans.append(_down(segments[place - 1], segment, spans[-1]))
        spans += _spans(segment, _resumed_from(segments[place + 1 :]))
    moment = time.time() if now is None else now
    last = segments[-1]
    starts = [_start(each, None) for each in segments[:-1]]
    starts.append(_start(last, moment))
    spent: list[tuple[str, float]] = []
    for span in spans:
        spent += span.spent.items()
    slow_steps: list[SlowStep] = []
    groups: list[StepGroup] = []
    durations: list[tuple[int, int]] = []
    for number, segment in enumerate(segments):
        slow_steps += segment.slow
        for group in segment.groups:
            groups.append(msgspec.structs.replace(group, start=number))
        for row in segment.rows:
            durations += row.durations.items()
    return Ledger(
        seconds=summed(spent),
        total=sum(span.seconds for span in spans),
        steps=starts[-1].last_step,
        slow_steps=tuple(slow_steps),
        starts=tuple(starts),
        spans=tuple(spans),
        step_groups=tuple(groups),
        durations=summed(durations),
        rank=last.head.rank,
        ranks=last.head.ranks,
        device=_device(segments),
    )


def _device(segments: Sequence[Segment]) -> str:
    """Return the type of the last known device. It is unknown before training begins."""
    for segment in reversed(segments):
        for row in reversed(segment.rows):
            if row.device:
                return row.device
    return ""


def _down(before: Segment, segment: Segment, last: Span) -> Span:
    """Return the time between two processes of a run as a span of the category `down`."""
    seconds = max(segment.head.begin - _end(before), 0) / 1e9
    return Span(
        begin=last.begin + last.seconds,
        seconds=seconds,
        steps=last.steps,
        spent={"down": seconds},
    )


def _resumed_from(later: Sequence[Segment]) -> int | None:
    """Return the lowest step from which one of the later processes resumed.

    Returns `None` if there is no later process, or if the step is unknown.
    """
    first: int | None = None
    for segment in later:
        for row in segment.rows:
            if row.first is not None and (first is None or row.first < first):
                first = row.first
    return first


def _spans(segment: Segment, lost_after: int | None) -> Iterator[Span]:
    """Yield one span for each row of a process's ledger.

    Args:
        segment: The ledger of the process.
        lost_after: The step from which a later process resumed, or `None`. The steps after it were
            repeated, so their time counts as `repeated`.
    """
    begin = 0
    steps = _first(segment)
    is_over = False
    for row in segment.rows:
        spent: dict[str, float] = dict(row.spent)
        # The time of a running step is in `open`, and later in `spent` of the row in which the step
        # ends. So only the `open` of the last row counts.
        if row is segment.rows[-1]:
            spent = summed([*spent.items(), *row.open.items()])
        done = steps if row.step is None else row.step
        if is_over:
            spent = _lost(spent, 0.0)
        elif lost_after is not None and done > lost_after:
            share = 0.0
            if steps < lost_after:
                share = (lost_after - steps) / (done - steps)
            spent = _lost(spent, share)
            is_over = True
        nanoseconds = sum(spent.values())
        yield Span(
            begin=(segment.head.begin + begin) / 1e9,
            seconds=nanoseconds / 1e9,
            steps=done,
            spent={name: each / 1e9 for name, each in spent.items()},
            memory=row.memory,
        )
        begin += int(nanoseconds)
        steps = done


def _lost(spent: dict[str, float], kept: float) -> dict[str, float]:
    """Move lost time to the category `repeated`.

    Lost time is the time of steps that a later process repeated. In each category, the share `kept`
    of the time remains.
    """
    lost = sum(spent.values()) * (1 - kept)
    remaining: dict[str, float] = {}
    if kept:
        remaining = scaled(spent, kept)
    return remaining | {"repeated": lost}


def _start(segment: Segment, now: float | None) -> Start:
    """Return the `Start` (process) that a segment describes.

    Args:
        segment: The ledger of the process.
        now: Unix time in seconds, or `None` if the process cannot be running.
    """
    first = _first(segment)
    ended = _ended(segment)
    if ended is None:
        is_alive = now is not None and now - _end(segment) / 1e9 < ALIVE
        ended = "running" if is_alive else "killed"
    steps = _steps(segment)
    return Start(
        begin=segment.head.begin / 1e9,
        seconds=segment.rows[-1].end / 1e9,
        first_step=first,
        last_step=steps[-1] if steps else first,
        ended=ended,
    )


def _end(segment: Segment) -> int:
    return segment.head.begin + segment.rows[-1].end


def _steps(segment: Segment) -> list[int]:
    """Return the `step` of each row in which it is known."""
    return [row.step for row in segment.rows if row.step is not None]


def _first(segment: Segment) -> int:
    for row in segment.rows:
        if row.first is not None:
            return row.first
    return 0


def _ended(segment: Segment) -> str | None:
    for row in reversed(segment.rows):
        if row.ended is not None:
            return row.ended
    return None
