"""What other processes took of the CPU.

Clocks of devices are tried in `tests/simulated/test_clocks.py`.
"""

from pathlib import Path

import pytest

from lflops.timing import clock as module
from lflops.timing.clock import CpuWatch, ThreadSchedule, UncontendedClock, UncontendedMark


@pytest.mark.parametrize(
    ("used", "waited", "lost"),
    [
        (1.0, 0.0, 0.0),  # one thread on two CPUs that nobody else wants
        (0.5, 0.5, 0.5),  # it had to share one
        (2.0, 3.0, 0.0),  # five threads waited for each other on both CPUs
        (1.5, 3.0, 0.5),  # and somebody else had half a second of the two
        (0.1, 0.0, 0.0),  # it slept
        (1.0, None, None),  # no Linux
    ],
)
def test_cpu_time_is_lost_to_others_and_not_to_own_threads(
    monkeypatch: pytest.MonkeyPatch, used: float, waited: float | None, lost: float | None
) -> None:
    """In one second on two CPUs."""
    readings = {"used": 7.0, "waited": 3.0, "now": 100.0}
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(module, "perf_counter", lambda: readings["now"])
    monkeypatch.setattr(module, "cpu_seconds", lambda: (readings["used"], 0.0))
    monkeypatch.setattr(module, "_waited", lambda: None if waited is None else readings["waited"])
    watch = CpuWatch()
    readings["used"] += used
    readings["waited"] += waited or 0.0
    readings["now"] += 1.0
    assert lost == pytest.approx(watch.lost()) if lost is not None else watch.lost() is None


def test_a_file_that_says_nothing_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three threads one has ended, two have waited for 2 and 3 s.

    Without the folder nothing is known.
    """
    for thread, waited in {"1": "2000000000", "2": "3000000000", "3": None}.items():
        tmp_path.joinpath(thread).mkdir()
        if waited:
            tmp_path.joinpath(thread, "schedstat").write_text(f"9 {waited} 4\n")
    monkeypatch.setattr(module, "_THREADS", tmp_path)
    assert 5.0 == module._waited()
    monkeypatch.setattr(module, "_THREADS", tmp_path / "none")
    assert module._waited() is None


def test_the_own_clock_stands_still_while_others_have_the_core() -> None:
    """Marks take from 1.0 to 1.5 and from 4.0 to 4.5 s.

    Of the 2.5 s between them others had 0.5; where that is unknown, none is theirs.
    """
    clock = UncontendedClock()
    assert 2.0 == clock.seconds(
        UncontendedMark(1_000_000_000, b"3000000000 7000000000 4", 1_500_000_000),
        UncontendedMark(4_000_000_000, b"5000000000 7500000000 9", 4_500_000_000),
    )
    assert 2.5 == clock.seconds(
        UncontendedMark(1_000_000_000, None, 1_500_000_000),
        UncontendedMark(4_000_000_000, b"5000000000 7500000000 9", 4_500_000_000),
    )


@pytest.mark.parametrize(
    ("counted", "is_needed"), [(b"96 4 1", False), (b"94 6 1", True), (None, False)]
)
def test_the_own_clock_is_needed_where_others_had_a_twentieth(
    counted: bytes | None, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 ns in which the thread could have run."""
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: counted)
    assert is_needed == UncontendedClock().is_needed
