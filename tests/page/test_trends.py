"""Test in a browser the trends of figures over the windows of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.hardware.chips import Hardware
from tests.support.browser import Seen
from tests.support.profile_builders import small_profile
from tests.support.profile_pairs import clean, ran
from tests.support.tensorboard_server import board


def figure(frame: Any, label: str) -> Any:
    """Return the figure with this label."""
    return frame.locator(".of-window .figure").filter(has=frame.get_by_text(label, exact=True))


def test_figures_have_their_trend_over_the_windows_of_the_run(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """Figures have a trend over the windows of one run and stage, and their last change in words.

    Steps of 100, 80 and 100 ms with 4 samples are 40, 50 and 40 samples per second. The 200 FLOPs
    of a step need 100 ms at the peak of 2 kFLOP/s, so 80 ms are faster than the peak, which is
    marked.
    """
    chip = Hardware("abacus", {"fp32": 2000.0}, None)
    with SummaryWriter(tmp_path / "one") as writer:
        for step, seconds in ((10, 0.1), (20, 0.08), (40, 0.1)):
            window = ran({"a": 1e-3}, steps=clean(seconds), samples_per_step=4, hardware=chip)
            lflops.tensorboard.log(writer, window, step)
        slow_window = ran({"a": 1e-3}, steps=clean(9.0), samples_per_step=4)
        lflops.tensorboard.log(writer, slow_window, 30, tag="other")
    with SummaryWriter(tmp_path / "two") as writer:
        lflops.tensorboard.log(writer, slow_window, 30)
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=5)
        state = "run%3Done%26tag%3Dlflops%252Fmeasure%252Fprofile%26step%3D40"
        seen = opening(f"{server.address}#lflops&p.lflops.state={state}")
        frame = seen.page.frame_locator("iframe")
        frame.locator(".of-window .figures").wait_for()
        samples = figure(frame, "samples/s")
        line = samples.get_by_role("img")
        label = "samples/s over 3 windows, from 40.0 at step 10 to 40.0 at step 40"
        assert label == line.get_attribute("aria-label")
        titles = line.locator("title").all_text_contents()
        assert ["step 10: 40.0", "step 20: 50.0", "step 40: 40.0"] == titles
        points = line.locator("polyline").get_attribute("points").split()
        (x10, y10), (x20, y20), (x40, y40) = (map(float, point.split(",")) for point in points)
        # The y axis points downwards, so the highest value has the least y.
        assert y10 == y40 > y20
        # Steps have their place on the axis: 10 to 20 is shorter than 20 to 40.
        assert x20 - x10 < x40 - x20
        reached = figure(frame, "MFU").get_by_role("img").locator("title").all_text_contents()
        assert [
            "step 10: 100.0 %",
            "step 20: 125.0 % (over the peak)",
            "step 40: 100.0 %",
        ] == reached
        assert "20.0 % less than at step 20" in samples.inner_text()
        assert "25.0 % more than at step 20" in figure(frame, "pass").inner_text()
        frame.get_by_label("step", exact=True).select_option("10")
        samples.get_by_text("the first of 3 windows").wait_for()
        frame.get_by_label("stage").select_option("other")
        figure(frame, "pass").get_by_text("9.00 s").wait_for()
        assert 0 == frame.locator(".trend-chart").count()


def test_a_file_of_one_window_has_no_trend(page_of: Callable[..., Seen]) -> None:
    """The page of one window has no trends."""
    assert 0 == page_of(small_profile()).page.locator(".trend").count()
