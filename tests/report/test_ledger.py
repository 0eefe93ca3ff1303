"""Test the report of a run's ledger, in the log and on the command line."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.cli.main import main
from lflops.ledger.account import Ledger, SlowStep, Span, Start, StepGroup, memory_growth
from lflops.ledger.ledger_file import Head, Row, Segment
from lflops.report.ledger import has_losses, ledger_lines

GIB = 1 << 30


def slow(step: int, cost: float, cause: str, phase: str) -> SlowStep:
    """Return a slow step that costs the given seconds more than the usual second."""
    return SlowStep(
        step=step, end=1.0, seconds=cost + 1, usual=1.0, cost=cost, cause=cause, phase=phase
    )


def ledger(seconds: dict[str, float], *steps: SlowStep, spans: tuple[Span, ...] = ()) -> Ledger:
    """Return a ledger of one start."""
    total = sum(seconds.values())
    start = Start(begin=0.0, seconds=total, first_step=0, last_step=500, ended="finished")
    return Ledger(
        seconds=seconds, total=total, steps=500, slow_steps=steps, starts=(start,), spans=spans
    )


LOADER = [slow(300, 46, "loader", "data"), slow(400, 34, "loader", "data")]
RUN = ledger(
    {
        "start_up": 20,
        "training/forward": 300,
        "training/data": 8,
        "slow/loader": 80,
        "slow/unknown": 11,
        "validation": 1,
        "checkpoint_save": 5,
        "lflops": 2,
        "warm_up": 3,
    },
    *LOADER,
    slow(410, 11, "unknown", "optimizer"),
)
"""A run of 430 s with four losses of more than 1 %: the loader's 80 s, and 20 s, 11 s and 5 s."""


def test_a_run_with_losses_is_worth_a_text() -> None:
    """308 s of 430 s are training, and 91 s are lost in slow steps."""
    assert has_losses(RUN)


@pytest.mark.parametrize(
    "seconds",
    [
        # Less than 1 %
        {"training/forward": 1000.0, "slow/loader": 9.0, "start_up": 5.0},
        # The start-up of a short run
        {"training/forward": 5.0, "start_up": 20.0},
        # Less than a second
        {"training/forward": 5.0, "slow/gc": 0.9},
    ],
)
def test_a_run_without_a_loss_is_silent(seconds: dict[str, float]) -> None:
    """Small losses are not reported."""
    assert not has_losses(ledger(seconds))


@pytest.mark.parametrize(("other", "expected"), [(4.0, False), (6.0, True)])
def test_much_time_outside_all_phases_is_a_loss_in_a_short_run(
    other: float, expected: bool
) -> None:
    """Time outside all phases is a loss if it is at least a quarter of the run.

    Less may be useful work.
    """
    run = ledger({"training/forward": 15.0, "training/other": other})
    assert expected == has_losses(run)


def test_slow_steps_are_a_loss_in_a_short_run_too() -> None:
    """Slow steps that take 5 s of 20 s are a loss."""
    assert has_losses(ledger({"training/forward": 15.0, "slow/gc": 5.0}))


def test_the_shell_prints_the_account() -> None:
    """The text has categories with their phases and causes, and then the worst slow steps."""
    lines = [" ".join(line.split()) for line in ledger_lines(RUN)]
    assert "7 min 10 s in 1 start, 500 steps, rank 0 of 1" == lines[0]
    assert [
        "training 5 min 8 s 71.6 %",
        "forward 5 min 0 s 69.8 %",
        "data wait 8.00 s 1.9 %",
    ] == lines[2:5]
    assert "step took usual cause" == lines[-4]
    assert "300 47.0 s 1.00 s waiting for the data loader" == lines[-3]
    assert "410 12.0 s 1.00 s unknown, in the phase optimizer" == lines[-1]


def test_slow_steps_of_an_unknown_cause_have_a_rhythm() -> None:
    """Forward takes 300 ms in each fourth step and 20 ms in all others."""
    steps = []
    for number in range(40):
        seconds = 0.3 if number % 4 == 0 else 0.02
        steps.append(
            StepGroup(first=number, last=number, spent={"forward": seconds}, longest=seconds)
        )
    run = replace(
        ledger({"training/forward": 3.6}, slow(4, 0.28, "unknown", "forward")),
        step_groups=tuple(steps),
    )
    line = "forward takes 300 ms every 4th step, and 20.0 ms in the other steps"
    assert line == list(ledger_lines(run))[-1]
    known = replace(run, slow_steps=(slow(4, 0.28, "swap", "forward"),))
    assert line not in list(ledger_lines(known))


def spans(*memory: int) -> tuple[Span, ...]:
    """Return a span of a minute for each value of the process's memory."""
    return tuple(
        Span(begin=60.0 * at, seconds=60.0, steps=at, spent={}, memory=each)
        for at, each in enumerate(memory)
    )


def test_memory_that_creeps_is_a_finding() -> None:
    """Memory that grows by 1 GiB in 40 minutes grows by 1.5 GiB per hour, which is reported.

    The growth is computed from the medians of the first and the last quarter, which are 30 minutes
    apart.
    """
    creeping = spans(*(4 * GIB + at * GIB // 40 for at in range(40)))
    growth = memory_growth(ledger({"training/forward": 2400.0}, spans=creeping))
    assert growth == pytest.approx(1.5 * GIB, rel=0.01)
    grown = ledger({"training/forward": 2400.0}, spans=creeping)
    assert has_losses(grown)
    assert (
        "the host memory of the process grows by 1.50 GiB per hour" == list(ledger_lines(grown))[-1]
    )


def test_memory_that_grows_while_code_is_compiled_is_none() -> None:
    """Growth during compilation does not count.

    In the first run, memory grows for 30 minutes, all of them compilation, which loads inductor. In
    the second run, only 10 of these minutes are compilation.
    """
    memory = [GIB + at * GIB // 10 for at in range(30)] + [4 * GIB] * 10
    compiled = tuple(replace(each, spent={"compilation": 60.0}) for each in spans(*memory))
    growing_in_compilation = (*compiled[:30], *spans(*memory)[30:])
    run = ledger({"training/forward": 600.0}, spans=growing_in_compilation)
    assert memory_growth(run) is None
    growing_afterwards = (*compiled[:10], *spans(*memory)[10:])
    run = ledger({"training/forward": 1800.0}, spans=growing_afterwards)
    assert memory_growth(run) is not None


@pytest.mark.parametrize(
    "memory",
    [
        # Steady
        [4 * GIB] * 40,
        # A single step
        [*[GIB] * 10, *[4 * GIB] * 30],
        # A tiny growth
        [4 * GIB + at * 1000 for at in range(40)],
        # Waves
        [4 * GIB + at % 10 * GIB // 10 for at in range(40)],
        # Too short
        [GIB, 2 * GIB, 3 * GIB],
    ],
)
def test_other_memory_is_none(memory: list[int]) -> None:
    """Steady memory, a single step, noise and waves are not growth."""
    assert memory_growth(ledger({"training/forward": 2400.0}, spans=spans(*memory))) is None


def test_the_shell_reads_a_folder(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`lflops ledger` prints text or JSON, and fails with status 2 if the folder has no ledger."""
    assert 2 == main(["ledger", str(tmp_path)])
    assert b"no ledger of rank 0 found" in capsysbinary.readouterr().err
    segment = Segment(Head(begin=0, rank=0, ranks=1, pid=1), tmp_path / "a.ledger.jsonl")
    segment.open()
    segment.add(Row(end=4 * 10**9, spent={"start_up": 4 * 10**9}, ended="finished"), [])
    segment.close()
    assert 0 == main(["ledger", str(tmp_path)])
    assert capsysbinary.readouterr().out.startswith(
        b"4.00 s in 1 start, 0 steps, rank 0 of 1\n\nstart-up"
    )
    assert 0 == main(["ledger", "--json", str(tmp_path)])
    assert b'"start_up": 4.0' in capsysbinary.readouterr().out
