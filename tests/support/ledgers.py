"""Handmade ledgers of runs, with times in seconds."""

from pathlib import Path

from msgspec.structs import replace

from lflops.ledger.account import SlowStep, StepGroup, duration_class
from lflops.ledger.ledger_file import ENDING, Head, Row, Segment

SECOND = 10**9


def row(
    end: float,
    spent: dict[str, float],
    *,
    step: int | None = None,
    first: int = 0,
    memory: int | None = None,
    ended: str | None = None,
) -> Row:
    """Return a row of the ledger, a part of the run's time account.

    In a ledger, the time between one start of the run's process and its end is a *start*.

    Args:
        end: When the row ends, in seconds since the start.
        spent: Seconds by category.
        step: The number of steps at the end of the row; `None` if there is none.
        first: The first step of this start, if `step` is given.
        memory: Peak memory in bytes.
        ended: How the start ended, such as "finished"; `None` if it goes on or was killed.
    """
    nanoseconds = {name: int(value * SECOND) for name, value in spent.items()}
    return Row(
        end=int(end * SECOND),
        spent=nanoseconds,
        step=step,
        first=None if step is None else first,
        memory=memory,
        ended=ended,
    )


def slow(step: int, end: float, cause: str = "loader") -> SlowStep:
    """Return a step that took 2 s instead of 0.1 s and ended `end` seconds after the start."""
    return SlowStep(step=step, end=end, seconds=2.0, usual=0.1, cost=1.9, cause=cause, phase="data")


def step(number: int, *, data: float = 0.1, forward: float = 0.9) -> StepGroup:
    """Return a step with these seconds of data wait and forward. By default it takes one second."""
    return StepGroup(
        first=number,
        last=number,
        spent={"data": data, "forward": forward},
        longest=data + forward,
    )


def write_start(
    folder: Path,
    begin: int,
    rows: list[Row],
    slow_steps: list[SlowStep] | None = None,
    steps: list[StepGroup] | None = None,
) -> None:
    """Write the ledger file of a start that began at second `begin` of the clock."""
    segment = Segment(
        Head(begin=begin * SECOND, rank=0, ranks=1, pid=begin), folder / f"rank0-{begin}{ENDING}"
    )
    segment.open()
    durations: dict[int, int] = {}
    for each in steps or []:
        kind = duration_class(each.seconds)
        durations[kind] = durations.get(kind, 0) + 1
    for each_row in rows[:-1]:
        segment.add(each_row, [])
    segment.add(replace(rows[-1], durations=durations), slow_steps or [], steps or [])
    segment.close()


def write_resumed_run(folder: Path) -> None:
    """Write the ledger of a run that is killed after 30 s, is down for 10 s, and resumes for 20 s.

    It resumes from its last step. Steps 0 to 9 take one second, of which a tenth is data wait, but
    steps 4 and 7 wait for 1.1 s. Steps 10 to 19 take one second.
    """
    begin = row(10, {"start_up": 10}, memory=2**20)
    worked = row(30, {"training/data": 18, "slow/loader": 2}, step=10)
    first = []
    for number in range(10):
        is_slow = number in {4, 7}
        first.append(step(number, data=1.1 if is_slow else 0.1))
    write_start(folder, 1, [begin, worked], [slow(4, 12), slow(7, 29)], first)
    again = row(
        20,
        {"start_up": 5, "training/forward": 15},
        step=20,
        first=10,
        memory=3 * 2**20,
        ended="finished",
    )
    second = [step(number) for number in range(10, 20)]
    write_start(folder, 41, [again], [slow(14, 12, "gc")], second)
