"""Test in a browser the view of a whole run, in a file from disk and in the tab."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.cli.main import main
from tests.page.test_accessibility import AXE, violations
from tests.support.browser import Seen, tab
from tests.support.ledgers import write_resumed_run
from tests.support.profile_pairs import clean, ran

WIDTHS = [1440, 1024, 390]


def cells(seen: Any, table: str) -> list[list[str]]:
    """Return the cells of a table, row by row."""
    rows = seen.get_by_role("table", name=table).locator("tbody tr")
    return [row.locator("td").all_inner_texts() for row in rows.all()]


def figures(seen: Any) -> dict[str, Any]:
    """Return what the view shows of a run: figures, marks, bars, a sentence and tables."""
    seen.locator(".run-chart").wait_for()
    return {
        "figures": seen.locator("section.run > .figures .figure-value").all_inner_texts(),
        "marks": seen.locator(".step-chart text title").all_text_contents()[2:],
        "slices": seen.locator("section.run > .stack .slice").evaluate_all(
            "(all) => all.map((each) => each.title)"
        ),
        "down": seen.locator(".run-chart .down title").all_text_contents(),
        "trained": seen.locator(".trained").inner_text(),
        "slow steps": cells(seen, "slow steps"),
        "starts": cells(seen, "starts"),
    }


RESUMED = {
    "marks": ["restart before step 10"],
    "slices": [
        "training: 33.0 s, 55.0 %",
        "start-up: 15.0 s, 25.0 %",
        "stopped until the restart: 10.0 s, 16.7 %",
        "slow steps: 2.00 s, 3.3 %",
    ],
    "down": ["the run was down for 10.0 s; how start 1 ended: killed"],
    "trained": (
        "55.0 % of 1 min 0 s was training; start-up 25.0 %, stopped until the restart "
        "16.7 %, slow steps 3.3 %."
    ),
    "slow steps": [
        ["4", "1.90 s", "2.00 s", "100 ms", "waiting for the data loader"],
        ["7", "1.90 s", "2.00 s", "100 ms", "waiting for the data loader"],
        ["14", "1.90 s", "2.00 s", "100 ms", "Python's garbage collector"],
    ],
    "starts": [
        ["0 s", "30.0 s", "0 to 9", "killed"],
        ["40.0 s", "20.0 s", "10 to 19", "finished"],
    ],
}
"""What the page shows of the run that `write_resumed_run` writes, computed by hand."""

ALONE = {"figures": ["1.10 s", "55.0 %"]}
"""Figures without a window: the mean of 22 s in 20 steps, and 33 s of 60 s in training."""


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_the_run_opens_offline(
    width: int, opening: Callable[..., Seen], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page requests only itself, and no part of it is wider than the screen."""
    write_resumed_run(tmp_path)
    page = tmp_path / "run.html"
    assert 0 == main(["ledger", str(tmp_path), "--html", str(page)])
    assert f"{page}\n" == capsys.readouterr().out
    seen = opening(page.as_uri())
    seen.page.set_viewport_size({"width": width, "height": 900})
    assert RESUMED | ALONE == figures(seen.page)
    assert [page.as_uri()] == seen.asked
    assert seen.page.locator("main").evaluate("(each) => each.scrollWidth") <= width
    lines = seen.page.locator(".run-chart polyline").evaluate_all(
        "(all) => all.map((each) => each.getAttribute('points').split(' ').length)"
    )
    # Unknown values interrupt the line of the memory. Each part here is a single point, which is
    # drawn twice so that it is visible.
    assert [2, 2] == lines
    seen.page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_all(scheme: str, opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The page passes axe-core's rules for contrast, names and roles."""
    write_resumed_run(tmp_path)
    assert 0 == main(["ledger", str(tmp_path), "--html", str(tmp_path / "run.html")])
    seen = opening((tmp_path / "run.html").as_uri(), color_scheme=scheme)
    seen.page.locator(".run-chart").wait_for()
    assert [] == violations(seen)


def test_a_step_is_said_where_the_pointer_is_and_several_are_selected(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The caption describes the step at the pointer, or the steps that were selected by a drag.

    The pointer may be anywhere above or below the bar. Steps 0 to 9 take 12 s, so 1.2 s on average.
    """
    write_resumed_run(tmp_path)
    assert 0 == main(["ledger", str(tmp_path), "--html", str(tmp_path / "run.html")])
    seen = opening((tmp_path / "run.html").as_uri())
    chart = seen.page.locator(".step-chart")
    chart.wait_for()
    box = chart.bounding_box()
    # The 20 bars are between the margins of the chart.
    left = 70
    right = 60
    across = (box["width"] - left - right) / 20
    caption = seen.page.locator(".step-caption").first

    def middle(step: int) -> float:
        return float(box["x"] + left + (step + 0.5) * across)

    seen.page.mouse.move(middle(4), box["y"] + 12)
    assert "step 4: 2.00 s: data wait 1.10 s (55.0 %), forward 900 ms (45.0 %)" == (
        caption.inner_text()
    )
    seen.page.mouse.move(middle(0), box["y"] + 100)
    seen.page.mouse.down()
    seen.page.mouse.move(middle(9), box["y"] + 100)
    seen.page.mouse.up()
    selected = "steps 0 to 9: mean 1.20 s: data wait 300 ms (25.0 %), forward 900 ms (75.0 %)"
    assert selected == caption.inner_text()
    seen.page.mouse.move(middle(14), box["y"] + 100)
    assert selected == caption.inner_text()
    seen.page.locator(".frame-of-steps").press("Escape")
    assert caption.inner_text().startswith("20 unprofiled steps of the run")


# Counts how often the page decompresses its data.
COUNT_UNPACKED = """() => {
    const Stream = DecompressionStream;
    window.unpacked = 0;
    window.DecompressionStream = function (format) { window.unpacked += 1; return new Stream(format); };
}"""


def test_a_page_of_another_width_is_drawn_again_at_once(page_of: Callable[..., Seen]) -> None:
    """If the width changes, the chart is drawn again without loading the run again.

    Otherwise the page would show "Loading…" in between.
    """
    page = page_of(ran({"fc": 1e-3}, steps=clean(0.1, 0.2))).page
    page.evaluate(COUNT_UNPACKED)
    page.locator(".step-chart").evaluate("(chart) => chart.setAttribute('data-of', 'first')")
    page.set_viewport_size({"width": 900, "height": 800})
    page.locator(".step-chart:not([data-of])").wait_for()
    assert 0 == page.evaluate("window.unpacked")


def test_the_tab_has_the_run_of_its_window(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The tab reads the ledger from the run's folder at the time of the request.

    Without a ledger, it shows the steps of the window. A ledger outside of the log directory is
    refused.
    """
    for name in ("with", "without"):
        with SummaryWriter(tmp_path / name) as writer:
            lflops.tensorboard.log(writer, ran({"fc": 1e-3}, steps=clean(0.1)), 1)
    (tmp_path / "with" / "lflops").mkdir()
    write_resumed_run(tmp_path / "with" / "lflops")
    with tab(opening, tmp_path, expected=2) as (_, frame, server):
        frame.get_by_label("run", exact=True).select_option("with")
        frame.locator(".run-chart").wait_for()
        found = figures(frame)
        assert RESUMED.items() <= found.items()
        assert ["1.10 s", "182 FLOP/s", "55.0 %"] == found["figures"]
        frame.get_by_label("run", exact=True).select_option("without")
        frame.get_by_text("1 unprofiled step of the window").first.wait_for()
        assert 0 == frame.locator(".run-chart").count()
        windows = server.windows(expected=2)["windows"]
        (window,) = (each for each in windows if each["run"] == "with")
        (tmp_path / "with" / "lflops" / "rank0-2.ledger.jsonl").symlink_to("/etc/hostname")
        status, _, said = server.get("run", run="with", tag=window["tag"], step=window["step"])
        assert (403, b"the ledger is outside TensorBoard's log directory") == (status, said)


def test_a_file_has_the_ledger_and_the_other_windows_of_its_folder(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The page of a folder has the run and both windows.

    The last window is shown first; the other can be chosen, and both are compared.
    """
    write_resumed_run(tmp_path)
    for number, seconds in enumerate((0.2, 0.1)):
        window = ran({"fc": 1e-3}, steps=clean(seconds))
        of_run = replace(
            window.run, kind="training", stage="train", window=number, step=10 + number
        )
        replace(window, run=of_run).save(tmp_path / f"train-{number}.profile.json")
    assert 0 == main(["html", str(tmp_path)])
    seen = opening((tmp_path / "run.html").as_uri())
    found = figures(seen.page)
    assert RESUMED.items() <= found.items()
    views = seen.page.get_by_role("tablist", name="views")
    assert ["Run", "Modules", "Compare"] == views.get_by_role("tab").all_inner_texts()
    choice = seen.page.get_by_label("step", exact=True)
    assert "11" == choice.input_value()
    choice.select_option("10")
    seen.page.get_by_text("window 0, step 10").first.wait_for()
    seen.view("Compare")
    seen.page.locator(".changes").wait_for()


def test_json_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` with `--html` is an error of one line."""
    write_resumed_run(tmp_path)
    assert 2 == main(["ledger", str(tmp_path), "--json", "--html", "x"])
    assert "html='x': --json writes no HTML file" in capsys.readouterr().err
