"""Test the ledger file of one process.

The file is readable wherever the process was killed, its size is bounded, and a shortened file has
the same sums.
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
    """Return a row with two seconds of forward that ends at second `end`."""
    spent = {"training/forward": 2 * SECOND}
    return Row(end=end * SECOND, spent=spent, **more)  # type: ignore[arg-type]


def slow(step: int, cost: float) -> SlowStep:
    """Return a slow step that took `cost` seconds longer than usual."""
    return SlowStep(
        step=step, end=1.0, seconds=cost + 1, usual=1.0, cost=cost, cause="loader", phase="data"
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """A file contains what was written, also if it was closed and opened again in between."""
    written = Segment(HEAD, tmp_path / "a.ledger.jsonl")
    for end in (2, 4):
        written.open()
        written.add(row(end, step=end, memory=7), [slow(end, 0.5)])
        written.close()
    read = read_segment(tmp_path / "a.ledger.jsonl")
    assert read is not None
    assert (HEAD, written.rows, written.slow) == (read.head, read.rows, read.slow)


def test_a_file_cut_at_any_byte_has_all_whole_lines(tmp_path: Path) -> None:
    """Every complete line of a truncated file is read.

    The last line may be incomplete, because the process was killed while it wrote. Without a
    complete first line, there is nothing to read.
    """
    path = tmp_path / "a.ledger.jsonl"
    written = Segment(HEAD, path)
    written.open()
    for end in (2, 4, 6):
        written.add(row(end), [])
    written.close()
    whole = path.read_bytes()
    # The position at which each line is complete. A line is complete even without its newline.
    ends = []
    position = 0
    for line in whole.splitlines(keepends=True):
        position += len(line)
        ends.append(position - 1)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        read = read_segment(path)
        read_lines = 0
        if read is not None:
            read_lines = 1 + len(read.rows)
        whole_lines = sum(end <= length for end in ends)
        assert whole_lines == read_lines


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
    """A file without a header, or of another version, is rejected with the reason."""
    path = tmp_path / "a.ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        read_segment(path)


def test_a_file_of_damaged_lines_is_refused(tmp_path: Path) -> None:
    """A file with more than 10,000 damaged lines is rejected.

    Some damaged lines are accepted, because each killed process leaves one. Empty lines do not
    count.
    """
    path = tmp_path / "a.ledger.jsonl"
    head = b'{"kind":"head","begin":1,"rank":0,"ranks":1,"pid":1,"version":1}\n'
    path.write_bytes(head + b"\n" * 1_000_000 + b"{\n" * 10_000)
    assert read_segment(path) is not None
    path.write_bytes(head + b"{\n" * 10_001)
    with pytest.raises(ProfileError, match=r"more than 10,000 lines are damaged"):
        read_segment(path)


def test_a_row_with_countless_categories_is_left_out(tmp_path: Path) -> None:
    """A row with more than 1,000 categories is skipped; a row with 1,000 is read.

    A real row has a few dozen categories.
    """
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
    """Old rows are joined, and no second is lost.

    A day has 43,200 rows of two seconds. The last 50 rows stay as they are. A joined row is at most
    a fiftieth as long as it is old (`SHARE_OF_AGE`). Joining a second time changes nothing.
    """
    day = 24 * 3600
    rows = coarser([row(end) for end in range(2, day + 1, 2)])
    lengths = []
    begin = 0
    for each in rows:
        lengths.append(each.end - begin)
        begin = each.end
    spent = sum(sum(each.spent.values()) for each in rows)
    assert day * SECOND == spent == sum(lengths)
    assert [2 * SECOND] * 50 == lengths[-50:]
    assert len(rows) < 500
    for each, length in zip(rows, lengths, strict=True):
        age = day * SECOND - each.end
        assert length <= max(age / 50, 2 * SECOND)
    assert rows == coarser(rows)


def test_a_long_file_is_replaced_by_a_shorter_one_with_the_same_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with more than 300 lines is shortened, and its sums stay the same.

    Only the ten most expensive slow steps are kept, in their order. No temporary file remains.
    """
    monkeypatch.setattr(segment_file, "MOST_LINES", 300)
    monkeypatch.setattr(segment_file, "MOST_SLOW", 10)
    path = tmp_path / "a.ledger.jsonl"
    written = Segment(HEAD, path)
    written.open()
    for end in range(2, 2002, 2):
        slow_steps = []
        if end < 200:
            slow_steps.append(slow(end, 200 - end))
        written.add(row(end, step=end), slow_steps)
        assert len(path.read_bytes().splitlines()) <= 303
    written.close()
    read = read_segment(path)
    assert read is not None
    assert (written.rows, written.slow) == (read.rows, read.slow)
    assert 2000 * SECOND == sum(each.spent["training/forward"] for each in read.rows)
    assert [2, 4, 6, 8, 10, 12, 14, 16, 18, 20] == [each.step for each in read.slow]
    assert [path] == list(tmp_path.iterdir())


def test_a_file_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """If the user has removed the file and its folder, neither is created again."""
    written = Segment(HEAD, tmp_path / "below" / "a.ledger.jsonl")
    written.open()
    written.add(row(2), [])
    written.close()
    (tmp_path / "below" / "a.ledger.jsonl").unlink()
    (tmp_path / "below").rmdir()
    written.open()
    written.add(row(4), [])
    assert [] == list(tmp_path.iterdir())


def group(step: int, mode: str = "unprofiled", elements: int | None = None) -> StepGroup:
    """Return a group that consists of one step of one second."""
    return StepGroup(
        first=step,
        last=step,
        spent={"forward": 1.0},
        longest=1.0,
        elements=elements,
        mode=mode,  # type: ignore[arg-type]
    )


def test_neighbours_of_one_mode_are_joined() -> None:
    """Groups are joined in pairs, but a profiled step is not joined with its neighbours."""
    joined = in_pairs([group(1), group(2), group(3), group(4, "profiled"), group(5)])
    assert [(1, 2, 2), (3, 3, 1), (4, 4, 1), (5, 5, 1)] == [
        (each.first, each.last, each.steps) for each in joined
    ]


def test_the_size_of_joined_batches_is_their_sum() -> None:
    """The size is unknown if it is unknown for one of the two groups."""
    sizes = (3, 4, 5, None)
    joined = in_pairs([group(step, elements=size) for step, size in enumerate(sizes)])
    assert [7, None] == [each.elements for each in joined]


def test_a_file_has_a_bounded_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file keeps all seconds of 5,000 steps in at most 100 groups.

    Nine of ten steps take 0.5 s and one takes 2 s, so these are the median and the 95th percentile.
    """
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
    median = percentile(counted, 0.5)
    largest = percentile(counted, 0.95)
    assert median == pytest.approx(0.5, rel=0.005)
    assert largest == pytest.approx(2.0, rel=0.005)
    assert percentile({}, 0.5) is None
