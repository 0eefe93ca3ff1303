"""What the log and the shell say of a run's ledger."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.cli.main import main
from lflops.ledger.account import Ledger, SlowStep, Span, Start, memory_growth
from lflops.ledger.ledger_file import Head, Row, Segment
from lflops.report.ledger import has_losses, ledger_lines

GIB = 1 << 30


def slow(step: int, cost: float, cause: str, phase: str) -> SlowStep:
    """One second is usual."""
    return SlowStep(
        step=step, end=1.0, seconds=cost + 1, usual=1.0, cost=cost, cause=cause, phase=phase
    )


def ledger(seconds: dict[str, float], *steps: SlowStep, spans: tuple[Span, ...] = ()) -> Ledger:
    """One of one start."""
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
    }
    | {"checkpoint_save": 5, "lflops": 2, "warm_up": 3},
    *LOADER,
    slow(410, 11, "unknown", "optimizer"),
)
"""430 s: of its losses, the loader's 80 s, 20 s, 11 s and 5 s are more than a hundredth."""


def test_a_run_with_losses_is_worth_a_text() -> None:
    """308 s of 430 s are training, 91 s are slow steps."""
    assert has_losses(RUN)


@pytest.mark.parametrize(
    "seconds",
    [
        {"training/forward": 1000.0, "slow/loader": 9.0, "start_up": 5.0},  # below a hundredth
        {"training/forward": 5.0, "start_up": 20.0},  # a short run
        {"training/forward": 5.0, "slow/gc": 0.9},  # below a second
    ],
)
def test_a_run_without_a_loss_is_silent(seconds: dict[str, float]) -> None:
    """No line is better than one that no one needs."""
    assert not has_losses(ledger(seconds))


@pytest.mark.parametrize(("other", "expected"), [(4.0, False), (6.0, True)])
def test_much_time_outside_all_phases_is_a_loss_in_a_short_run(
    other: float, expected: bool
) -> None:
    """A quarter of the run, because some of it is useful."""
    run = ledger({"training/forward": 15.0, "training/other": other})
    assert expected == has_losses(run)


def test_slow_steps_are_a_loss_in_a_short_run_too() -> None:
    """Five of twenty seconds."""
    assert has_losses(ledger({"training/forward": 15.0, "slow/gc": 5.0}))


def test_the_shell_prints_the_account() -> None:
    """By category, with phases and causes below, and the slow steps, the costliest first."""
    lines = [" ".join(line.split()) for line in ledger_lines(RUN)]
    assert "7 min 10 s in 1 start, 500 steps, rank 0 of 1" == lines[0]
    assert [
        "training 5 min 8 s 71.6 %",
        "forward 5 min 0 s 69.8 %",
        "data wait 8.00 s 1.9 %",
    ] == lines[2:5]
    assert ["step took usual cause", "300 47.0 s 1.00 s waiting for the data loader"] == lines[
        -4:-2
    ]
    assert "410 12.0 s 1.00 s unknown, in optimizer" == lines[-1]


def spans(*memory: int) -> tuple[Span, ...]:
    """A minute each."""
    return tuple(
        Span(begin=60.0 * at, seconds=60.0, steps=at, spent={}, memory=each)
        for at, each in enumerate(memory)
    )


def test_memory_that_creeps_is_a_finding() -> None:
    """A GiB in 40 minutes, from 4 GiB: 1.5 GiB an hour.

    The medians of the quarters are 30 minutes from each other.
    """
    creeping = spans(*(4 * GIB + at * GIB // 40 for at in range(40)))
    growth = memory_growth(ledger({"training/forward": 2400.0}, spans=creeping))
    assert growth == pytest.approx(1.5 * GIB, rel=0.01)
    grown = ledger({"training/forward": 2400.0}, spans=creeping)
    assert has_losses(grown)
    assert "the memory of the process grows by 1.50 GiB per hour" == list(ledger_lines(grown))[-1]


def test_memory_that_grows_while_code_is_compiled_is_none() -> None:
    """30 minutes of compiling, in which inductor loads, before ten of training."""
    memory = [GIB + at * GIB // 10 for at in range(30)] + [4 * GIB] * 10
    of_run = tuple(
        replace(each, spent={"compilation": 60.0}) if at < 30 else each
        for at, each in enumerate(spans(*memory))
    )
    assert memory_growth(ledger({"training/forward": 600.0}, spans=of_run)) is None
    creeping = tuple(
        replace(each, spent={"compilation": 60.0}) if at < 10 else each
        for at, each in enumerate(spans(*memory))
    )
    assert memory_growth(ledger({"training/forward": 1800.0}, spans=creeping)) is not None


@pytest.mark.parametrize(
    "memory",
    [
        [4 * GIB] * 40,
        [*[GIB] * 10, *[4 * GIB] * 30],  # it grew once
        [4 * GIB + at * 1000 for at in range(40)],  # by next to nothing
        [4 * GIB + at % 10 * GIB // 10 for at in range(40)],  # it comes and goes
        [GIB, 2 * GIB, 3 * GIB],  # too short to tell
    ],
)
def test_other_memory_is_none(memory: list[int]) -> None:
    """Steady, a step up, noise, a wave."""
    assert memory_growth(ledger({"training/forward": 2400.0}, spans=spans(*memory))) is None


def test_the_shell_reads_a_folder(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As lines, and as JSON; without a ledger in it with exit status 2."""
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
