"""Handmade ledgers of runs, in seconds."""

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
    """A part of the account that ends at this second of its start."""
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
    """A slow step of 2 s in place of 0.1 s, which ended at this second of its start."""
    return SlowStep(step=step, end=end, seconds=2.0, usual=0.1, cost=1.9, cause=cause, phase="data")


def step(number: int, *, data: float = 0.1, forward: float = 0.9) -> StepGroup:
    """A step of these seconds: one second, if not said otherwise."""
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
    """The file of a start that began in that second of the clock."""
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
    """A start of 30 s that is killed, 10 s in which it is down, and one of 20 s that goes on from its last step.

    Steps 0 to 9 take a second of which a tenth is data wait, except for 4 and 7, which wait for 1.1 s;
    steps 10 to 19 take a second.
    """
    begin = row(10, {"start_up": 10}, memory=2**20)
    worked = row(30, {"training/data": 18, "slow/loader": 2}, step=10)
    first = [step(number, data=1.1 if number in {4, 7} else 0.1) for number in range(10)]
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
