"""Test how much CPU time other processes took.

`tests/simulated/test_clocks.py` tests the clocks of devices.
"""

from pathlib import Path

import pytest

from lflops.timing import clock as module
from lflops.timing.clock import CpuWatch, ThreadSchedule, UncontendedClock, UncontendedMark


@pytest.mark.parametrize(
    ("used", "waited", "lost"),
    [
        # One thread runs, and no other process needs the two CPUs.
        (1.0, 0.0, 0.0),
        # The thread shares its CPU with another process.
        (0.5, 0.5, 0.5),
        # Five threads of this process use both CPUs and wait for each other.
        (2.0, 3.0, 0.0),
        # The same, but another process had a CPU for half a second.
        (1.5, 3.0, 0.5),
        # The thread sleeps most of the time.
        (0.1, 0.0, 0.0),
        # The system is not Linux.
        (1.0, None, None),
    ],
)
def test_cpu_time_is_lost_to_others_and_not_to_own_threads(
    monkeypatch: pytest.MonkeyPatch, used: float, waited: float | None, lost: float | None
) -> None:
    """CPU time is lost if other processes had the CPUs, but not if own threads shared them.

    Each case lasts one second on two CPUs. In this second, the threads of this process used the
    CPUs for `used` seconds, and waited for them for `waited` seconds.
    """
    readings = {"used": 7.0, "waited": 3.0, "now": 100.0}
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(module, "perf_counter", lambda: readings["now"])
    monkeypatch.setattr(module, "cpu_seconds", lambda: (readings["used"], 0.0))
    monkeypatch.setattr(module, "_waited", lambda: None if waited is None else readings["waited"])
    watch = CpuWatch()
    readings["used"] += used
    readings["waited"] += waited or 0.0
    readings["now"] += 1.0
    if lost is None:
        assert watch.lost() is None
    else:
        assert lost == pytest.approx(watch.lost())


def test_a_file_that_says_nothing_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting times of all threads are added; a thread without a file has ended.

    Two of three threads have waited for 2 s and 3 s. Without the folder, the waiting time is
    unknown.
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
    """`UncontendedClock` leaves out the time in which the thread waited for a core.

    One mark was taken from 1.0 to 1.5 s, and the other from 4.0 to 4.5 s. In the 2.5 s between
    them, the thread waited for 0.5 s. If its counters are unknown, no time is left out.
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


def test_a_thread_sleeps_while_it_needs_no_core() -> None:
    """In 2.5 s between two marks, a thread ran for 0.4 s and waited for a core for 0.5 s.

    So it slept for 1.6 s. Without its counters, this is unknown and counts as no sleep.
    """
    start = UncontendedMark(1_000_000_000, b"3000000000 7000000000 4", 1_500_000_000)
    end = UncontendedMark(4_000_000_000, b"3400000000 7500000000 9", 4_500_000_000)
    assert pytest.approx(1.6) == UncontendedClock.asleep(start, end)
    assert 0.0 == UncontendedClock.asleep(start, end._replace(counted=None))


@pytest.mark.parametrize(
    ("counted", "is_needed"), [(b"96 4 1", False), (b"94 6 1", True), (None, False)]
)
def test_the_own_clock_is_needed_where_others_had_a_twentieth(
    counted: bytes | None, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`UncontendedClock` is needed if the thread waited for a core for more than 5 % of its time.

    In the first two cases, it waited for 4 and 6 of the 100 ns in which it could have run.
    """
    monkeypatch.setattr(ThreadSchedule, "read", lambda _: counted)
    assert is_needed == UncontendedClock().is_needed
