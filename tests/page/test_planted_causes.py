"""Test that the first screen of a page names the planted cause of a slow training run.

The sentence must be visible without scrolling and without a click. The clock of the monitor moves
only where the test advances it, so a busy machine changes nothing.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lflops import Hardware
from lflops.monitoring.schedule import Schedule
from lflops.timing.clock import ThreadSchedule
from tests.support.browser import Seen
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    WIDTH,
    Classifier,
    fit,
    loader,
    watching,
)

pytestmark = LIGHTNINGS_WARNINGS

CHIP = Hardware("abacus", {"fp32": 1e4}, bandwidth_bytes_per_second=1e3)
"""A chip so slow that a few hundred bytes take almost a second to move."""


class Slow(nn.Module):
    """A linear layer that takes the given number of seconds of the clock."""

    def __init__(self, clock: StillClock, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(self.seconds)
        return self.linear(x)


class Pointwise(nn.Module):
    """A pointwise module that takes the time that the chip needs for its bytes."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x)
            self.clock.advance(2 * x.nbytes / 1e3)
        return x


class Planted(Classifier):
    """A classifier with four equal blocks, one of which may be slow, and a pointwise module."""

    def __init__(self, clock: StillClock, slow: float, pointwise: nn.Module) -> None:
        super().__init__()
        blocks = [Slow(clock, 0.1), Slow(clock, 0.1), Slow(clock, slow), Slow(clock, 0.1)]
        self.body = nn.Sequential(*blocks, pointwise)  # type: ignore[assignment]


NAMED = {
    "data": "is spent waiting for data",
    "block": "body.2 takes",
    "pointwise": "is memory-bound pointwise work, mostly in body.4",
}


@pytest.mark.parametrize("cause", NAMED)
def test_the_first_screen_names_the_planted_cause(
    cause: str, opening: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence of the cause is on the first card, which is visible at 1024 x 768 pixels."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    # The CPU time of the thread is real, so it does not fit the fake clock.
    monkeypatch.setattr(ThreadSchedule, "between", lambda *_: None)
    slow_block = 10.0 if cause == "block" else 0.1
    pointwise = Pointwise(clock) if cause == "pointwise" else nn.Tanh()
    data_wait = 5.0 if cause == "data" else 0.01
    planted = Planted(clock, slow_block, pointwise)
    monitor = watching(
        hardware=CHIP, html=True, dirpath=tmp_path, schedule=Schedule(wait=1, warmup=1, active=6)
    )
    fit(planted, monitor, data=loader(20, look=lambda: clock.advance(data_wait)))
    (file,) = tmp_path.glob("*.html")
    page = opening(file.as_uri()).page
    page.set_viewport_size({"width": 1024, "height": 768})
    page.locator(".action-card .sentence").first.wait_for()
    # Text and position are read at once: the page is drawn again after its size has changed.
    text, bottom = page.evaluate(
        """() => {
            const card = document.querySelector(".action-card");
            return [
                card.querySelector(".sentence").innerText,
                card.getBoundingClientRect().bottom,
            ];
        }"""
    )
    assert {cause} == {each for each, sentence in NAMED.items() if sentence in text}, text
    assert 0 < bottom < 768
