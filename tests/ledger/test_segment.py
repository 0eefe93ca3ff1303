"""The file of one start.

Readable wherever the process died, bounded, and exact after it was shortened.
"""

from pathlib import Path

import pytest

from lflops.errors import ProfileError
from lflops.ledger import ledger_file as segment_file
from lflops.ledger.account import SlowStep, StepGroup, duration_class, in_pairs, percentile
from lflops.ledger.ledger_file import Head, Row, Segment, coarser, ledger_of, read_segment

SECOND = 10**9
HEAD = Head(begin=1_000 * SECOND, rank=0, ranks=1, pid=1)


def row(end: int, **more: object) -> Row:
    """Two seconds of forward, to that second."""
    return Row(end=end * SECOND, spent={"training/forward": 2 * SECOND}, **more)  # type: ignore[arg-type]


def slow(step: int, cost: float) -> SlowStep:
    """One that cost so many seconds."""
    return SlowStep(
        step=step, end=1.0, seconds=cost + 1, usual=1.0, cost=cost, cause="loader", phase="data"
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Also after the file was closed and gone on with."""
    written = Segment(HEAD, tmp_path / "a.ledger.jsonl")
    for end in (2, 4):
        written.open()
        written.add(row(end, step=end, memory=7), [slow(end, 0.5)])
        written.close()
    read = read_segment(tmp_path / "a.ledger.jsonl")
    assert read is not None
    assert (HEAD, written.rows, written.slow) == (read.head, read.rows, read.slow)


def test_a_file_cut_at_any_byte_has_all_whole_lines(tmp_path: Path) -> None:
    """The last line is torn where the process was killed in it.

    Without a first line there is nothing.
    """
    path = tmp_path / "a.ledger.jsonl"
    written = Segment(HEAD, path)
    written.open()
    for end in (2, 4, 6):
        written.add(row(end), [])
    written.close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = [
        sum(map(len, lines[: count + 1])) - 1 for count in range(len(lines))
    ]  # without the newline a line is whole, too
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        read = read_segment(path)
        whole_lines = sum(end <= length for end in ends)
        assert whole_lines == (0 if read is None else 1 + len(read.rows))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"kind":"row","end":1,"spent":{}}\n',
            "this is not a ledger: the first line is not a ledger header",
        ),
        (
            b'{"kind":"head","begin":1,"rank":0,"ranks":1,"pid":1,"version":9}\n',
            "the ledger has version 9, but this lflops reads version 1",
        ),
    ],
)
def test_another_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """The message says why."""
    path = tmp_path / "a.ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        read_segment(path)


def test_a_file_of_damaged_lines_is_refused(tmp_path: Path) -> None:
    """Empty lines cost nothing, and a killed process leaves one damaged line."""
    path = tmp_path / "a.ledger.jsonl"
    head = b'{"kind":"head","begin":1,"rank":0,"ranks":1,"pid":1,"version":1}\n'
    path.write_bytes(head + b"\n" * 1_000_000 + b"{\n" * 10_000)
    assert read_segment(path) is not None
    path.write_bytes(head + b"{\n" * 10_001)
    with pytest.raises(ProfileError, match=r"more than 10,000 lines are damaged"):
        read_segment(path)


def test_a_row_with_countless_categories_is_left_out(tmp_path: Path) -> None:
    """A row has some dozens; the twin has a thousand."""
    path = tmp_path / "a.ledger.jsonl"
    head = b'{"kind":"head","begin":1,"rank":0,"ranks":1,"pid":1,"version":1}\n'
    for categories in (1_000, 1_001):
        spent = ",".join(f'"training/{number}":1' for number in range(categories))
        row = f'{{"kind":"row","end":2,"spent":{{{spent}}}}}\n'
        path.write_bytes(head + row.encode())
        segment = read_segment(path)
        assert segment is not None
        assert len(segment.rows) == (categories == 1_000)


def test_rows_of_long_ago_become_one() -> None:
    """A day of rows of two seconds.

    The last minutes as they were, none longer than a fiftieth of its age, and no second is lost.
    """
    day = 24 * 3600
    rows = coarser([row(end) for end in range(2, day + 1, 2)])
    lengths = [
        after.end - before.end
        for before, after in zip([Row(end=0, spent={}), *rows], rows, strict=False)
    ]
    assert day * SECOND == sum(sum(each.spent.values()) for each in rows) == sum(lengths)
    assert [2 * SECOND] * 50 == lengths[-50:]
    assert len(rows) < 500
    ages = [day * SECOND - each.end for each in rows]
    assert all(
        length <= max(age / 50, 2 * SECOND) for length, age in zip(lengths, ages, strict=True)
    )
    assert rows == coarser(rows)


def test_a_long_file_is_replaced_by_a_shorter_one_with_the_same_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three hundred lines at most.

    Of the slow steps the costliest ten stay, and they stay in their order.
    """
    monkeypatch.setattr(segment_file, "MOST_LINES", 300)
    monkeypatch.setattr(segment_file, "MOST_SLOW", 10)
    path = tmp_path / "a.ledger.jsonl"
    written = Segment(HEAD, path)
    written.open()
    for end in range(2, 2002, 2):
        written.add(row(end, step=end), [slow(end, 200 - end)] if end < 200 else [])
        assert len(path.read_bytes().splitlines()) <= 303
    written.close()
    read = read_segment(path)
    assert read is not None
    assert (written.rows, written.slow) == (read.rows, read.slow)
    assert 2000 * SECOND == sum(each.spent["training/forward"] for each in read.rows)
    assert [2, 4, 6, 8, 10, 12, 14, 16, 18, 20] == [each.step for each in read.slow]
    assert [path] == list(tmp_path.iterdir())


def test_a_file_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """Nor its folder: the user did that."""
    written = Segment(HEAD, tmp_path / "below" / "a.ledger.jsonl")
    written.open()
    written.add(row(2), [])
    written.close()
    (tmp_path / "below" / "a.ledger.jsonl").unlink()
    (tmp_path / "below").rmdir()
    written.open()
    written.add(row(4), [])
    assert [] == list(tmp_path.iterdir())


def group(step: int, mode: str = "unprofiled") -> StepGroup:
    """A step of one second."""
    return StepGroup(first=step, last=step, spent={"forward": 1.0}, longest=1.0, mode=mode)  # type: ignore[arg-type]


def test_neighbours_of_one_mode_are_joined() -> None:
    """A profiled step is not mixed with the steps around it."""
    joined = in_pairs([group(1), group(2), group(3), group(4, "profiled"), group(5)])
    assert [(1, 2, 2), (3, 3, 1), (4, 4, 1), (5, 5, 1)] == [
        (each.first, each.last, each.steps) for each in joined
    ]


def test_a_file_has_a_bounded_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seconds of 5,000 steps stay, in at most 100 lines."""
    monkeypatch.setattr(segment_file, "MOST_GROUPS", 100)
    path = tmp_path / "a.ledger.jsonl"
    written = Segment(HEAD, path)
    written.open()
    for end in range(10, 5010, 10):
        durations = {duration_class(0.5): 9, duration_class(2.0): 1}
        written.add(row(end, durations=durations), [], [group(end + each) for each in range(10)])
    written.close()
    read = read_segment(path)
    assert read is not None
    assert len(read.groups) <= 100
    assert (5000, 5000.0) == (
        sum(each.steps for each in read.groups),
        sum(each.seconds for each in read.groups),
    )
    counted = ledger_of([read]).durations
    assert 5000 == sum(counted.values())
    median, largest = percentile(counted, 0.5), percentile(counted, 0.95)
    assert median == pytest.approx(0.5, rel=0.005)
    assert largest == pytest.approx(2.0, rel=0.005)
    assert percentile({}, 0.5) is None
