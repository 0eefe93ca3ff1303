"""Test how many points of curves slow loggers get, on a clock that the test advances."""

import pytest

from lflops.monitoring.window import live_metrics
from lflops.monitoring.window.live_metrics import PointPause


@pytest.fixture(autouse=True)
def slow_from_five_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limit that users have. `conftest.py` sets a higher one for all other tests."""
    monkeypatch.setattr(live_metrics, "SLOW_LOGGERS", 0.005)


def points_of(cost: float, *, step: float = 0.01, steps: int = 1000) -> int:
    """Return the number of points in a run whose loggers take `cost` seconds for a point.

    A point may be logged after each step.
    """
    now = 0.0

    def clock() -> float:
        return now

    pause = PointPause(clock)
    points = 0
    for _ in range(steps):
        now += step
        if pause.is_over:
            with pause.logs_point():
                now += cost
            points += 1
    return points


def test_fast_loggers_get_a_point_in_each_step() -> None:
    """A point of 4 ms is fast, even in steps of 10 ms."""
    assert 1000 == points_of(0.004)


def test_slow_loggers_take_two_percent_of_the_run() -> None:
    """The first three points show that a point takes 20 ms. Then, one point a second is logged."""
    points = points_of(0.02, steps=1003)
    assert 3 + 10 == pytest.approx(points, abs=1)
    assert 0.02 == pytest.approx((points - 3) * 0.02 / 10, rel=0.15)


def test_a_single_slow_point_makes_no_pause() -> None:
    """A logger may flush its file once in a while."""
    now = 0.0
    pause = PointPause(lambda: now)
    for cost in (0.001, 1.0, 0.001, 0.001, 2.0, 0.001):
        assert pause.is_over
        with pause.logs_point():
            now += cost
    assert pause.is_over
