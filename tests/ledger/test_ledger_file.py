"""Test the ledger of a run whose process was restarted.

It has the time between the processes (each process is called a start) and the lost work.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.errors import ProfileError
from lflops.ledger.account import Start
from lflops.ledger.ledger_file import Head, Row, Segment, ledger_of, load_run, starts_of_a_run
from lflops.report.ledger import headline

SECOND = 10**9


def start(begin: int, *rows: Row, pid: int = 1, rank: int = 0) -> Segment:
    """Return the ledger of a process that began at second `begin` of the system clock."""
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
    """Return a row with `seconds` of one category, which ends at second `end` of the process."""
    if step is None:
        first = None
    return Row(
        end=end * SECOND,
        spent={category: seconds * SECOND},
        step=step,
        first=first,
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
    """The account of a resumed run includes the time between the processes and the repeated work.

    The first process was killed at second 130 of the clock, after step 100. The second one resumed
    at second 160 from step 60. Steps 51 to 100 took 10 s; 40 of these 50 steps were lost, which is
    8 s. The whole run took 77 s, from second 100 to second 177.
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
    """A process that was killed while it loaded the checkpoint does not change the lost steps.

    The lost steps are those between the first process and the third one, which resumed.
    """
    failed = start(140, row(3, "checkpoint_load", 3), pid=3)
    ledger = ledger_of([KILLED, failed, RESUMED], now=1e9)
    assert (8, 10 + 17) == (ledger.seconds["repeated"], ledger.seconds["down"])


def test_a_start_from_step_0_after_a_kill_has_lost_all_steps() -> None:
    """If the second process begins at step 0, all 20 s of steps count as repeated.

    The 10 s of start-up were no steps, so they do not.
    """
    anew = start(160, row(10, "training/forward", 10, step=10), pid=2)
    assert {"start_up": 10, "repeated": 20, "down": 30, "training/forward": 10} == ledger_of(
        [KILLED, anew], now=1e9
    ).seconds


def test_a_step_that_was_going_on_counts_once() -> None:
    """The time of a running step is counted once.

    It is in `open` of each row until the step ends, and then in `spent`. So only the `open` of the
    last row counts.
    """
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
    """A process without a recorded end counts as running shortly after its last row.

    Its last row was written at second 130. At second 140 it may be running; at 200 it was killed.
    """
    assert ["running"] == [each.ended for each in ledger_of([KILLED], now=140.0).starts]
    assert ["killed"] == [each.ended for each in ledger_of([KILLED], now=200.0).starts]


def test_a_run_that_finished_is_followed_by_another_run() -> None:
    """After a finished run, another process that begins at step 0 is another run.

    A test stage in the same process continues the run.
    """
    finished = start(100, row(10, "training/forward", 10, step=5, ended="finished"))
    tested = start(110, row(3, "test", 3), pid=1)
    again = start(200, row(10, "training/forward", 10, step=5), pid=4)
    assert [finished, tested] == starts_of_a_run([tested, finished])
    assert [again] == starts_of_a_run([again, finished])


def test_a_folder_with_other_runs_says_so(tmp_path: Path) -> None:
    """If a folder has two finished runs, the ledger is that of the second run.

    The headline says that the file of the other run is not included.
    """
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
    """Two processes belong to one run even if they seem to overlap by half a second.

    They seem to overlap because the system clock was set back. The time between them is then 0.
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
    """A process that began 10 s before the end of another process belongs to another run."""
    other = start(120, row(40, "training/forward", 40, step=70, first=60), pid=2)
    assert [other] == starts_of_a_run([KILLED, other])


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    """`load_run` reads all files of one rank in a folder and below it, or a single file."""
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


def test_the_device_is_known_although_the_last_process_ends_at_its_start() -> None:
    """A restart that fails before training knows no device, and a test after training has none."""
    trained = start(
        100,
        row(10, "start_up", 10),
        replace(row(20, "training/forward", 10, step=50), device="cuda"),
        row(30, "after_run", 10, step=50, ended="finished"),
    )
    failed = start(160, row(5, "start_up", 5, ended="RuntimeError"), pid=2)
    assert "cuda" == ledger_of([trained, failed], now=1e9).device
    assert "" == ledger_of([KILLED], now=1e9).device
