"""The run around the windows, in a real browser: offline, and in the tab."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.cli.main import main
from tests.page.test_accessibility import AXE, violations
from tests.support.browser import Seen, tab
from tests.support.ledgers import write_resumed_run
from tests.support.profile_pairs import clean, ran

WIDTHS = [1440, 1024, 390]


def figures(seen: Any) -> dict[str, Any]:
    """What the view has of a run: its bar, its dots and bands, and its tables."""
    seen.locator(".run-chart").wait_for()
    table = {
        name: seen.get_by_role("table", name=name).locator("tbody tr")
        for name in ("slow steps", "starts")
    }
    return {
        "title": seen.locator("section.run h2").first.inner_text(),
        "slices": seen.locator("section.run .slice").evaluate_all(
            "(all) => all.map((each) => each.title)"
        ),
        "dots": seen.locator(".run-chart circle title").all_text_contents(),
        "down": seen.locator(".run-chart .down title").all_text_contents(),
        **{
            name: [row.locator("td").all_inner_texts() for row in rows.all()]
            for name, rows in table.items()
        },
    }


RESUMED = {
    "title": "1 min 0 s in 2 starts, 20 steps, rank 0 of 1",
    "slices": [
        "training: 33.0 s, 55.0 %",
        "start-up: 15.0 s, 25.0 %",
        "down until the restart: 10.0 s, 16.7 %",
        "slow steps: 2.00 s, 3.3 %",
    ],
    "dots": [
        "step 5: 2.00 s instead of 100 ms, waiting for the data loader",
        "step 8: 2.00 s instead of 100 ms, waiting for the data loader",
        "step 15: 2.00 s instead of 100 ms, Python's garbage collector",
    ],
    "down": ["down for 10.0 s; start 1: killed"],
    "slow steps": [
        ["5", "2.00 s", "100 ms", "waiting for the data loader"],
        ["8", "2.00 s", "100 ms", "waiting for the data loader"],
        ["15", "2.00 s", "100 ms", "Python's garbage collector"],
    ],
    "starts": [
        ["0 s", "30.0 s", "1 to 10", "killed"],
        ["40.0 s", "20.0 s", "11 to 20", "finished"],
    ],
}
"""By hand, from what is written."""


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_the_run_opens_offline(
    width: int, opening: Callable[..., Seen], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for nothing, and no part of it is cut off."""
    write_resumed_run(tmp_path)
    page = tmp_path / "run.html"
    assert 0 == main(["ledger", str(tmp_path), "--html", str(page)])
    assert f"{page}\n" == capsys.readouterr().out
    seen = opening(page.as_uri())
    seen.page.set_viewport_size({"width": width, "height": 900})
    assert RESUMED == figures(seen.page)
    assert [page.as_uri()] == seen.asked
    assert seen.page.locator("main").evaluate("(each) => each.scrollWidth") <= width
    lines = seen.page.locator(".run-chart polyline").evaluate_all(
        "(all) => all.map((each) => each.getAttribute('points').split(' ').length)"
    )
    assert (
        [2, 2, 2, 2] == lines
    )  # two of steps and two of memory: what is unknown interrupts them, and a point by itself is drawn twice
    seen.page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_all(scheme: str, opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Contrast, names and roles, as axe-core checks them."""
    write_resumed_run(tmp_path)
    assert 0 == main(["ledger", str(tmp_path), "--html", str(tmp_path / "run.html")])
    seen = opening((tmp_path / "run.html").as_uri(), color_scheme=scheme)
    seen.page.locator(".run-chart").wait_for()
    assert [] == violations(seen)


def test_the_tab_has_the_run_of_its_window(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """From the files in the run's folder now; a run without one says so."""
    for name in ("with", "without"):
        with SummaryWriter(tmp_path / name) as writer:
            lflops.tensorboard.log(writer, ran({"fc": 1e-3}, steps=clean(0.1)), 1)
    (tmp_path / "with" / "lflops").mkdir()
    write_resumed_run(tmp_path / "with" / "lflops")
    with tab(opening, tmp_path, expected=2) as (_, frame, server):
        frame.get_by_label("run", exact=True).select_option("with")
        frame.get_by_role("tab", name="Run", exact=True).click()
        assert RESUMED == figures(frame)
        frame.get_by_label("run", exact=True).select_option("without")
        frame.get_by_text("no ledger of rank 0 found").wait_for()
        window = next(
            each for each in server.windows(expected=2)["windows"] if each["run"] == "with"
        )
        (tmp_path / "with" / "lflops" / "rank0-2.ledger.jsonl").symlink_to("/etc/hostname")
        status, _, said = server.get("ledger", run="with", tag=window["tag"], step=window["step"])
        assert (403, b"the ledger is not below the log directory") == (status, said)


def test_a_file_of_a_window_says_where_the_run_is(page_of: Callable[..., Seen]) -> None:
    """It has only the window."""
    seen = page_of(ran({"fc": 1e-3}, steps=clean(0.1)))
    seen.view("Run")
    assert "lflops ledger DIR --html OUT" in seen.page.locator("section.run").inner_text()


def test_json_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so."""
    write_resumed_run(tmp_path)
    assert 2 == main(["ledger", str(tmp_path), "--json", "--html", "x"])
    assert "html='x': --json writes no page" in capsys.readouterr().err
