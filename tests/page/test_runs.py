"""Test in a browser the table of all runs."""

from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

import lflops
from tests.support.browser import Seen
from tests.support.profile_pairs import clean, ran
from tests.support.tensorboard_server import board

SHEET = "[role=grid] .grid-body [role=row]"


def test_runs_are_searched_sorted_and_held_against_a_baseline(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The table of the runs' last windows is sorted, filtered and compared with a baseline.

    The last windows have steps of 100, 80 and 125 ms.
    """
    for name, seconds, device in (("a", 0.1, "cpu"), ("b", 0.08, "H200"), ("c", 0.125, "H200")):
        with SummaryWriter(tmp_path / name) as writer:
            for step in (1, 2):
                given = ran(
                    {"fc": 1e-3},
                    steps=clean(seconds * 2 / step),
                    samples_per_step=4,
                    device_name=device,
                )
                lflops.tensorboard.log(writer, given, step)
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=6)
        seen = opening(f"{server.address}?runFilter=%5Ba-c%5D#lflops&p.lflops.state=view%3Druns")
        frame = seen.page.frame_locator("iframe")
        rows = frame.locator(SHEET)
        rows.first.wait_for()
        names = frame.locator(f"{SHEET} .label")
        frame.get_by_role("button", name="step", exact=True).click()
        assert ["c", "a", "b"] == names.all_inner_texts()
        assert "100 ms" in rows.nth(1).inner_text()
        frame.get_by_role("button", name="pin a as the baseline").click()
        assert "80.0 ms -20.0 %" in rows.nth(2).inner_text()
        # No cell is too narrow for its text.
        assert [] == rows.locator(".number").evaluate_all(
            "(cells) => cells.filter((each) => each.scrollWidth > each.clientWidth)"
            ".map((each) => each.textContent)"
        )
        assert "125 ms +25.0 %" in rows.nth(0).inner_text()
        frame.get_by_label("filter runs").fill("h200")
        assert ["c", "b"] == names.all_inner_texts()
        names.nth(1).click()
        frame.locator("section.run").wait_for()
        assert "b" == frame.get_by_label("run", exact=True).input_value()


def test_a_file_of_one_profile_has_no_list_of_runs(page_of: Callable[..., Seen]) -> None:
    """The page of one profile has no tab for all runs."""
    seen = page_of(ran({"fc": 1e-3}, steps=clean(0.1)))
    views = seen.page.get_by_role("tablist", name="views")
    assert ["Run", "Modules"] == views.get_by_role("tab").all_inner_texts()


def test_the_run_filter_of_tensorboard_is_followed(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The run filter of TensorBoard applies, and the page says how many runs it hides."""
    for name in ("fast", "slow"):
        with SummaryWriter(tmp_path / name) as writer:
            lflops.tensorboard.log(writer, ran({"fc": 1e-3}, steps=clean(0.1)), 1)
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=2)
        seen = opening(f"{server.address}?runFilter=fa#lflops&p.lflops.state=view%3Druns")
        frame = seen.page.frame_locator("iframe")
        frame.locator(SHEET).first.wait_for()
        assert ["fast"] == frame.locator(f"{SHEET} .label").all_inner_texts()
        assert (
            "1 hidden by TensorBoard's run filter"
            in frame.locator(".bar-of-controls .quiet").inner_text()
        )
