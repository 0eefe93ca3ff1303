"""A run over the starts of its process: the time between them, and the work that was lost."""

from pathlib import Path

import pytest

from lflops.errors import ProfileError
from lflops.ledger.account import Start
from lflops.ledger.ledger_file import Head, Row, Segment, ledger_of, load_run, starts_of_a_run
from lflops.report.ledger import headline

SECOND = 10**9


def start(begin: int, *rows: Row, pid: int = 1, rank: int = 0) -> Segment:
    """One that began in that second of the clock."""
    return Segment(Head(begin=begin * SECOND, rank=rank, ranks=1, pid=pid), None, rows)


def row(
    end: int,
    category: str,
    seconds: int,
    *,
    step: int | None = None,
    first: int | None = 0,
    ended: str | None = None,
) -> Row:
    """So many seconds of a category, to that second of the start."""
    return Row(
        end=end * SECOND,
        spent={category: seconds * SECOND},
        step=step,
        first=None if step is None else first,
        ended=ended,
    )


KILLED = start(
    100,
    row(10, "start_up", 10),
    row(20, "training/forward", 10, step=50),
    row(30, "training/forward", 10, step=100),
)
RESUMED = start(
    160,
    row(5, "start_up", 5),
    row(15, "training/forward", 10, step=110, first=60),
    row(17, "after_run", 2, step=110, first=60, ended="finished"),
    pid=2,
)


def test_a_resumed_run_has_the_time_in_between_and_the_work_that_was_lost() -> None:
    """Killed at second 130 of the clock in step 100, back at 160 from step 60.

    Of the steps 51 to 100, which took 10 s, 40 were lost.

    From 100 to 177 are 77 s.
    """
    ledger = ledger_of([KILLED, RESUMED], now=1e9)
    assert {
        "start_up": 15,
        "training/forward": 22,
        "repeated": 8,
        "down": 30,
        "after_run": 2,
    } == ledger.seconds
    assert (77, 110) == (ledger.total, ledger.steps)
    assert (
        Start(begin=100, seconds=30, first_step=0, last_step=100, ended="killed"),
        Start(begin=160, seconds=17, first_step=60, last_step=110, ended="finished"),
    ) == ledger.starts
    assert [0, 50, 100, 100, 60, 110, 110] == [span.steps for span in ledger.spans]
    ends = [100, *(span.begin + span.seconds for span in ledger.spans)]
    assert ends[:-1] == [span.begin for span in ledger.spans]


def test_a_start_that_did_no_step_loses_nothing_of_the_one_before() -> None:
    """It was killed while it loaded the checkpoint, and the next one went on."""
    failed = start(140, row(3, "checkpoint_load", 3), pid=3)
    ledger = ledger_of([KILLED, failed, RESUMED], now=1e9)
    assert (8, 10 + 17) == (ledger.seconds["repeated"], ledger.seconds["down"])


def test_a_start_from_step_0_after_a_kill_has_lost_all_steps() -> None:
    """The start-up was no step."""
    anew = start(160, row(10, "training/forward", 10, step=10), pid=2)
    assert {"start_up": 10, "repeated": 20, "down": 30, "training/forward": 10} == ledger_of(
        [KILLED, anew], now=1e9
    ).seconds


def test_a_step_that_was_going_on_counts_once() -> None:
    """In the last row alone; the rows before have it in `open`, and later in what was spent."""
    rows = [
        Row(end=2 * SECOND, spent={}, open={"training/data": 2 * SECOND}),
        Row(end=4 * SECOND, spent={}, open={"training/data": 4 * SECOND}),
        Row(
            end=6 * SECOND,
            spent={"slow/loader": 5 * SECOND},
            open={"training/data": SECOND},
            step=1,
            first=0,
        ),
    ]
    ledger = ledger_of([start(100, *rows)], now=1e9)
    assert ({"slow/loader": 5, "training/data": 1}, 6) == (ledger.seconds, ledger.total)


def test_a_process_that_wrote_a_moment_ago_may_be_running() -> None:
    """Without an end in its file."""
    assert ["running"] == [each.ended for each in ledger_of([KILLED], now=140.0).starts]
    assert ["killed"] == [each.ended for each in ledger_of([KILLED], now=200.0).starts]


def test_a_run_that_finished_is_followed_by_another_run() -> None:
    """From step 0 in another process; with a test in the same process it goes on."""
    finished = start(100, row(10, "training/forward", 10, step=5, ended="finished"))
    tested = start(110, row(3, "test", 3), pid=1)
    again = start(200, row(10, "training/forward", 10, step=5), pid=4)
    assert [finished, tested] == starts_of_a_run([tested, finished])
    assert [again] == starts_of_a_run([again, finished])


def test_a_folder_with_other_runs_says_so(tmp_path: Path) -> None:
    """Two that have finished, one after the other: the account is the second's."""
    for number in range(2):
        head = Head(begin=(number + 1) * 1_000_000_000_000, rank=0, ranks=1, pid=number + 1)
        segment = Segment(head)
        segment.path = tmp_path / f"rank0-{number}-{number}.ledger.jsonl"
        segment.open()
        segment.add(
            Row(
                end=10**9,
                spent={"training/forward": 10**9},
                open={},
                step=5,
                first=0,
                memory=None,
                ended="finished",
            ),
            [],
        )
        segment.close()
    found = load_run(tmp_path)
    assert (1, 1, 5) == (found.others, len(found.starts), found.steps)
    assert headline(found).endswith(
        "; this folder also has 1 ledger file of other runs, which are not included here"
    )


def test_a_clock_that_was_set_back_a_little_makes_no_other_run() -> None:
    """The next start began half a second before the end of the one before, so it seems.

    Then it was not down at all.
    """
    killed = start(100, row(10, "training/forward", 10, step=5))
    resumed = Segment(
        Head(begin=109_500_000_000, rank=0, ranks=1, pid=2),
        None,
        [row(4, "training/forward", 4, step=9, first=5)],
    )
    assert [killed, resumed] == starts_of_a_run([killed, resumed])
    assert {"training/forward": 14, "down": 0} == ledger_of([killed, resumed], now=1e9).seconds


def test_two_runs_at_once_are_two() -> None:
    """The second began while the first was running."""
    other = start(120, row(40, "training/forward", 40, step=70, first=60), pid=2)
    assert [other] == starts_of_a_run([KILLED, other])


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    """By rank, however deep its files are."""
    for segment, name in (
        (KILLED, "a"),
        (RESUMED, "b/c"),
        (start(100, row(9, "start_up", 9), rank=1), "d"),
    ):
        copy = Segment(segment.head, tmp_path / f"{name}.ledger.jsonl")
        copy.open()
        for each in segment.rows:
            copy.add(each, [])
        copy.close()
    assert (77, 2) == (load_run(tmp_path).total, len(load_run(tmp_path).starts))
    assert 9 == load_run(tmp_path, rank=1).total
    assert 30 == load_run(tmp_path / "a.ledger.jsonl").total
    with pytest.raises(ProfileError, match="no ledger of rank 2 found"):
        load_run(tmp_path, rank=2)
