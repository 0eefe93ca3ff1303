"""Test the view Compare in a browser: the changes between two windows, the most important first."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.cli.main import main
from lflops.profile.profile import Profile
from lflops.report.diff import headline
from tests.support.browser import GRID, ROW, Seen
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import profile_of, small_profile
from tests.support.profile_pairs import clean, ran
from tests.support.tensorboard_server import board

FIVE = {
    "encoder.a": 20e-3,
    "encoder.b": 20e-3,
    "decoder.c": 20e-3,
    "decoder.d": 20e-3,
    "head": 20e-3,
}


def pair_of(opening: Callable[..., Seen], folder: Path, before: Profile, after: Profile) -> Seen:
    """Open the page that `lflops html` writes for two profiles."""
    before.save(folder / "before.json")
    after.save(folder / "after.json")
    assert 0 == main(["html", str(folder / "before.json"), str(folder / "after.json")])
    seen = opening((folder / "after.compare.html").as_uri())
    seen.page.locator(".changes").wait_for()
    return seen


def column(seen: Seen, label: str) -> list[str]:
    """Return the exact values in a column, from top to bottom."""
    cells = seen.page.locator(f'{ROW} .number[title^="{label}: "]').all()
    return [cell.get_attribute("title").removeprefix(f"{label}: ") for cell in cells]


def test_what_changed_comes_first(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The module that became slower is the first row, and unchanged modules are shown on request.

    The head takes 2 ms longer per step. Modules with other work, added modules and renamed modules
    follow.
    """
    before = ran(FIVE | {"old": 1e-3})
    after = ran(
        FIVE | {"head": 22e-3, "new": 1e-3, "extra": 2e-3}, macs={"encoder.a": 300, "extra": 7}
    )
    seen = pair_of(opening, tmp_path, before, after)
    assert "true" == seen.page.get_by_role("tab", name="Compare").get_attribute("aria-selected")
    assert ["head", "encoder.a", "extra", "old → new"] == seen.labels()
    assert ["slower", "work changed", "added", "renamed"] == column(seen, "what changed")
    assert ["0.02", "0.02", "unknown", "0.001"] == column(seen, "time before")
    assert ["0.022", "0.02", "0.002", "0.001"] == column(seen, "time after")
    assert "+10.0 %" == column(seen, "change")[0]
    assert pytest.approx(2e-3) == float(column(seen, "cost per step")[0])
    assert ["100", "100", "unknown", "100"] == column(seen, "MACs before")
    assert ["100", "300", "7", "100"] == column(seen, "MACs after")
    seen.page.get_by_label("show").select_option("all")
    assert {"(model)", "encoder", "decoder", "encoder.b"} < set(seen.labels())
    seen.page.get_by_label("filter by name or class").fill("DECODER")
    assert ["decoder", "decoder.c", "decoder.d"] == seen.labels()


def test_the_interval_is_that_of_python(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The page shows the interval and the sentences of `lflops.diff` as the terminal does."""
    slower = {name: 1.25 * seconds for name, seconds in FIVE.items()} | {"head": 1.25 * 22e-3}
    before = ran(FIVE, width=0.01)
    after = ran(slower, width=0.01)
    time = lflops.diff(before, after).slower[0].news
    assert time.low
    assert time.high
    seen = pair_of(opening, tmp_path, before, after)
    assert [f"+{100 * (time.low - 1):.1f} % to +{100 * (time.high - 1):.1f} %"] == column(
        seen, "interval"
    )
    sentences = seen.page.locator(".verdict, .sentences li").all_inner_texts()
    assert list(headline(lflops.diff(before, after))) == sentences


def test_a_row_opens_into_its_phases(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """A key opens a row: time and MACs of each phase, and the other figures that differ."""
    seen = pair_of(opening, tmp_path, ran(FIVE), ran(FIVE | {"head": 10e-3}, macs={"head": 50}))
    grid = seen.page.locator(GRID)
    grid.focus()
    grid.press("ArrowRight")
    parts = seen.page.locator(f"{ROW} .part").all_inner_texts()
    assert ["forward", "time per MAC", "self FLOPs", "self bytes moved", "self parameters"] == parts
    assert ["0.02", "0.02", "unknown", "200", "400", "100"] == column(seen, "time before")
    assert ["-50.0 %", "-50.0 %", "0 %", "-50.0 %", "-50.0 %", "-50.0 %"] == column(seen, "change")
    grid.press("ArrowLeft")
    assert 0 == seen.page.locator(f"{ROW} .part").count()


def test_rows_are_sorted_by_what_is_asked_for(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Clicks on a column sort it downwards, then upwards, and then restore the usual order."""
    before = FIVE | {f"tail.{i}": 20e-3 for i in range(6)}
    seen = pair_of(
        opening,
        tmp_path,
        ran(before),
        ran(before | {"head": 30e-3, "encoder.a": 24e-3, "decoder.c": 15e-3}),
    )
    usual = ["head", "decoder.c", "encoder.a"]
    assert usual == seen.labels()
    button = seen.page.get_by_role("button", name=re.compile("^change"))
    for expected in (["head", "encoder.a", "decoder.c"], ["decoder.c", "encoder.a", "head"], usual):
        button.click()
        assert expected == seen.labels()


def test_other_circumstances_are_doubts(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Another device and twice the samples are named as differences between the runs."""
    seen = pair_of(
        opening,
        tmp_path,
        ran(FIVE, device_name="cpu", samples_per_step=4),
        ran(FIVE, device_name="cuda", samples_per_step=8),
    )
    told = seen.page.locator(".sentences .caveat").inner_text()
    assert "The runs differ in device name: cpu → cuda; samples per step: 4 → 8." == told
    assert (
        "The work is the same, to the last FLOP and byte."
        in seen.page.locator(".sentences").inner_text()
    )


def test_figures_say_what_they_were(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Each figure shows its old value and its change.

    With 4 samples, steps of 250 ms and 125 ms process 16 and 32 samples per second.
    """
    before = ran(FIVE, steps=clean(0.25, 0.25, 0.25), samples_per_step=4)
    after = ran(FIVE, steps=clean(0.125, 0.125, 0.125), samples_per_step=4)
    seen = pair_of(opening, tmp_path, before, after)
    figure = seen.page.locator(".figure").filter(has_text="samples/s").inner_text()
    assert ["samples/s", "32.0", "was 16.0", "+100.0 %"] == figure.split("\n")
    assert "125 ms" in seen.page.locator(".figure.faster").inner_text()


def test_one_window_alone_has_nothing_to_compare(page_of: Callable[..., Seen]) -> None:
    """The page of one profile has no Compare tab."""
    seen = page_of(small_profile())
    assert 0 == seen.page.get_by_role("tab", name="Compare", exact=True).count()


def test_compared_names_are_text(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Names of modules and files that contain HTML with a script are shown as text."""
    file = tmp_path / '"><img src=x onerror=alert(3)>.json'
    hostile_profile().save(file)
    other = tmp_path / "other.json"
    small_profile().save(other)
    assert 0 == main(["html", str(other), str(file)])
    seen = opening(file.with_suffix(".compare.html").as_uri())
    seen.page.locator(".changes").wait_for()
    assert {IMAGE, SCRIPT, "__proto__"} < set(seen.labels())
    assert file.name == seen.page.get_by_label("run", exact=True).input_value()
    assert 0 == seen.page.locator("img").count()


def test_2_000_modules_are_compared(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """With 2,000 unchanged modules, the document has only the rows on the screen."""
    given = profile_of(2_000)
    seen = pair_of(opening, tmp_path, given, given)
    assert "none of 2000 modules" == seen.page.locator(".changes .quiet").inner_text()
    seen.page.get_by_label("show").select_option("all")
    assert "Linear" in seen.page.locator(ROW, has_text="blocks.*.layers.* ×").first.inner_text()
    seen.page.get_by_label("fold identical modules").uncheck()
    assert "2001" == seen.page.locator(GRID).get_attribute("aria-rowcount")
    assert 0 < seen.page.locator(ROW).count() < 100


def test_the_tab_compares_any_two_windows(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The tab compares with the previous window first, and with a window of another run on request.

    The address keeps this choice.
    """
    with SummaryWriter(tmp_path / "one") as writer:
        for step, head in (1, 20e-3), (2, 22e-3), (3, 20e-3):
            lflops.tensorboard.log(writer, ran(FIVE | {"head": head}), step)
    with SummaryWriter(tmp_path / "two") as writer:
        lflops.tensorboard.log(writer, ran(FIVE, macs={"head": 200}), 1)
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=4)
        seen = opening(
            f"{server.address}#lflops&p.lflops.state=run%3Done%26step%3D3%26view%3Dcompare"
        )
        frame = seen.page.frame_locator("iframe")
        frame.locator(".changes").wait_for()
        assert "2" == frame.get_by_label("compare with step").input_value()
        assert ["head"] == frame.locator(f"{ROW} .label").all_inner_texts()
        assert "faster" == frame.locator(f"{ROW} .change-faster").inner_text()
        frame.get_by_label("compare with run").select_option("two")
        frame.locator(f"{ROW} .change-work-changed").wait_for()
        seen.page.reload()
        frame.locator(f"{ROW} .change-work-changed").wait_for()
        assert "two" == frame.get_by_label("compare with run").input_value()
