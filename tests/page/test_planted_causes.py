"""Trainings with one planted cause each.

The first screen of their pages names it, without scrolling and without a click.

The monitor's clock stands still but where the cause is, so a busy machine changes nothing.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lflops import Hardware
from lflops.schedule import Schedule
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
"""Slow enough that tensors of a few hundred bytes take a second to move."""

LAYERS = 4


class Slow(nn.Module):
    """A linear layer that takes so many seconds of the clock."""

    def __init__(self, clock: StillClock, seconds: float) -> None:
        super().__init__()
        self.linear, self.clock, self.seconds = nn.Linear(WIDTH, WIDTH), clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(self.seconds)
        return self.linear(x)


class Pointwise(nn.Module):
    """Nothing but element by element, again and again.

    It takes the time that its bytes take on the chip.
    """

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x)
            self.clock.advance(2 * x.nbytes / 1e3)
        return x


class Planted(Classifier):
    """Four equal blocks in front of the classifier, and something pointwise behind them."""

    def __init__(self, clock: StillClock, slow: float, pointwise: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(Slow(clock, slow if number == 2 else 0.1) for number in range(LAYERS)),
            pointwise,  # type: ignore[assignment]
        )


NAMED = {
    "data": "is spent waiting for data",
    "block": "body.2 takes",
    "pointwise": "is memory-bound pointwise work, mostly in body.4",
}


@pytest.mark.parametrize("cause", NAMED)
def test_the_first_screen_names_the_planted_cause(
    cause: str, opening: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1024 x 768 the sentence is in sight as soon as the page is drawn, and it is the first cause."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    # The clock says nothing about the CPU time of the thread.
    monkeypatch.setattr(ThreadSchedule, "between", lambda *_: None)
    planted = Planted(
        clock,
        10.0 if cause == "block" else 0.1,
        Pointwise(clock) if cause == "pointwise" else nn.Tanh(),
    )
    monitor = watching(
        hardware=CHIP, html=True, dirpath=tmp_path, schedule=Schedule(wait=1, warmup=1, active=6)
    )
    fit(
        planted,
        monitor,
        data=loader(20, look=lambda: clock.advance(5.0 if cause == "data" else 0.01)),
    )
    (file,) = tmp_path.glob("*.html")
    page = opening(file.as_uri()).page
    page.set_viewport_size({"width": 1024, "height": 768})
    page.locator(".action-card .sentence").first.wait_for()
    # Both are of the same card only if read at once: a page of another size is drawn again.
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
