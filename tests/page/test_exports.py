"""What the page shows as files: CSV, JSON, SVG and PNG, in a real browser."""

import csv
import re
from collections.abc import Callable, Mapping
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.image import imread
from msgspec import json
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.analysis.analysis import analyze
from lflops.cli.main import main
from lflops.report.payload.payload import payload
from tests.page.test_accessibility import LABELS, VIEWS, whole
from tests.support.browser import Seen, bench
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import product, profile, small_profile
from tests.support.profile_pairs import clean, ran
from tests.support.rank_profiles import four_ranks
from tests.support.tensorboard_server import board

SVG = "{http://www.w3.org/2000/svg}"


def exported(seen: Seen, frame: Any, label: str) -> tuple[str, bytes]:
    """A file's name and content."""
    frame.locator(".exports summary").click()
    with seen.page.expect_download() as download:
        frame.locator(".menu").get_by_role("button", name=label, exact=True).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def table(content: bytes) -> list[list[str]]:
    """The rows of a CSV file, its head first."""
    return list(csv.reader(StringIO(content.decode(), newline="")))


def test_the_modules_are_exported_as_they_are_shown(page_of: Callable[..., Seen]) -> None:
    """The chosen columns in their order, the rows that match in theirs.

    Exact values, and nothing for what is unknown.
    """
    seen = page_of(small_profile())
    seen.modules()
    seen.page.locator(".chooser summary").click()
    for column in seen.page.locator(".chooser input").all():
        column.set_checked(
            column.get_attribute("value") in {"backward.macs", "rank_spread", "forward.seconds"}
        )
    seen.page.get_by_role("button", name="backward MACs").click()
    seen.page.get_by_label("filter by name or class").fill("linear")
    name, content = exported(seen, seen.page, "modules as CSV")
    assert "Model-fit-window-0-step-8-modules.csv" == name
    head, *rows = table(content)
    assert ["module", "class", "modules", "rank spread", "forward time", "backward MACs"] == head
    assert [["(model)", "768"], ["encoder", "512"], ["encoder.0", "512"], ["head", "256"]] == [
        [row[0], row[5]] for row in rows
    ]
    assert (["", "", ""], pytest.approx(0.5)) == ([row[3] for row in rows[:3]], float(rows[3][3]))
    assert [pytest.approx(3e-4), pytest.approx(2e-4), pytest.approx(1e-4), pytest.approx(1e-4)] == [
        float(row[4]) for row in rows
    ]


def test_what_changed_is_exported(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """Both names of a module, and the numbers as they are.

    20 ms became 10, so 10 ms were won; a row that is open with its parts.
    """
    five = dict.fromkeys("abcde", 20e-3)
    for name, each in ("before", ran(five)), ("after", ran(five | {"e": 10e-3})):
        each.save(tmp_path / name)
    assert 0 == main(["html", *(str(tmp_path / name) for name in ("before", "after"))])
    seen = opening((tmp_path / "after.compare.html").as_uri())
    seen.page.get_by_role("treegrid").press("ArrowRight")
    head, module, part = table(exported(seen, seen.page, "modules that changed as CSV")[1])
    assert ["e", "e", "Linear", "1", "", "faster", "0.02", "0.01", "0.5"] == module[:9]
    assert -10e-3 == float(module[head.index("cost per step")])
    assert ["e", "e", "Linear", "1", "forward", "", "0.02", "0.01", "0.5"] == part[:9]


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-cmd", "@SUM(A1)", "\tx"])
def test_a_name_is_no_formula(page_of: Callable[..., Seen], name: str) -> None:
    """It has an apostrophe before it; so a spreadsheet takes it for text."""
    seen = page_of(
        profile(
            {"": {}, name: {"class_name": '=HYPERLINK("x","y")'}},
            [product(name, "aten::mm", "forward", macs=7, bytes_moved=1)],
        )
    )
    seen.modules()
    _, _, row = table(exported(seen, seen.page, "modules as CSV")[1])
    assert [f"'{name}", '\'=HYPERLINK("x","y")'] == row[:2]


def test_hostile_names_are_exported_as_they_are(page_of: Callable[..., Seen]) -> None:
    """In a cell, and in no file's name."""
    seen = page_of(hostile_profile())
    seen.modules()
    name, content = exported(seen, seen.page, "modules as CSV")
    assert [IMAGE, SCRIPT, "__proto__"] == [row[0] for row in table(content)[2:]]
    assert not {*"<>=/;"} & {*name}


CELLS = """async (rows) => {
  const [{ element }, { csvOf, valuesOfTable, valuesOfGrid }] = await Promise.all([import("./lib/dom.js"), import("./lib/csv.js")]);
  const cells = (row) => row.map(([text, title]) => element("td", { title }, text));
  const labels = ["operator", "FLOPs"];
  const head = element("tr", {}, ...labels.map((label) => element("th", {}, label)));
  const table = element("table", {}, head, ...rows.map((row) => element("tr", {}, ...cells(row))));
  const columns = labels.map((label) => ({ label }));
  return [csvOf(valuesOfTable(table)), csvOf(valuesOfGrid({ columns, rows, cells }))];
}"""


def test_any_table_is_exported_by_its_cells(browser: Any) -> None:
    """A title with the column's label before it is the exact value.

    A dash is nothing; commas and quotes stay what they are.
    """
    rows = [
        [["mm", None], ["1.23 M", "FLOPs: 1,234,567"]],
        [['a "b", c', 'a "b", c'], ["–", "FLOPs: unknown"]],
        [["-neg", None], ["-5", None]],
        [["", ""], ["-1e-5", "FLOPs: -0.00001"]],
    ]
    expected = 'operator,FLOPs\r\nmm,1234567\r\n"a ""b"", c",\r\n\'-neg,-5\r\n(model),-0.00001\r\n'
    with bench(browser) as page:
        assert [expected, expected] == page.evaluate(CELLS, rows)


def test_the_window_is_exported_as_json(page_of: Callable[..., Seen]) -> None:
    """All that the page has of it."""
    name, content = exported(page := page_of(small_profile()), page.page, "this window as JSON")
    assert (
        "Model-fit-window-0-step-8.json",
        json.decode(json.encode(payload(analyze(small_profile())))),
    ) == (name, json.decode(content))


def styles(node: ET.Element) -> Mapping[str, str]:
    """What a node's own style says."""
    return dict(
        part.split(": ", 1) for part in node.get("style", "").rstrip(";").split("; ") if part
    )


def test_a_chart_of_boxes_is_exported_as_it_looks(page_of: Callable[..., Seen]) -> None:
    """Phases of 0.2, 1 and 1.5 ms; in the picture the forward's colour is where the forward is.

    All that under the page's own policy.
    """
    seen = page_of(small_profile(), color_scheme="light")
    drawing = ET.fromstring(exported(seen, seen.page, "Where the step goes as SVG")[1])  # noqa: S314 - our own
    parts = drawing.findall(f"{SVG}svg/{SVG}svg")
    widths = {
        part.findtext(f"{SVG}title", "").split(":")[0]: float(part.get("width", ""))
        for part in parts
        if part.find(f"{SVG}title") is not None
    }
    assert (pytest.approx(5, rel=0.02), pytest.approx(1.5, rel=0.02)) == (
        widths["forward"] / widths["data wait"],
        widths["backward"] / widths["forward"],
    )
    assert "var(" not in ET.tostring(drawing, "unicode")
    picture = imread(BytesIO(exported(seen, seen.page, "Where the step goes as PNG")[1]))
    high, long = picture.shape[:2]
    assert (2 * float(drawing.get("width", "")), 2 * float(drawing.get("height", ""))) == (
        pytest.approx(long, abs=1),
        high,
    )
    assert [0x6A, 0xA9, 0xE9] == [
        round(255 * float(each)) for each in picture[high // 8, int(long * 0.3)][:3]
    ]


def test_the_tab_exports_under_tensorboard_s_policy(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """A drawing with the styles of the sheet in it, as a picture too, and a table."""
    with SummaryWriter(tmp_path) as writer:
        for step in (1, 2):
            lflops.tensorboard.log(
                writer, ran({"a": 1e-3}, steps=clean(0.1 * step), samples_per_step=4), step
            )
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=2)
        seen = opening(f"{server.address}#lflops", color_scheme="light")
        frame = seen.page.frame_locator("iframe")
        frame.locator(".figures").first.wait_for()
        drawing = ET.fromstring(exported(seen, frame, "pass over 2 windows as SVG")[1])  # noqa: S314 - our own
        line = drawing.find(f".//{SVG}polyline")
        assert line is not None
        assert ("rgb(21, 88, 176)", "none") == (styles(line)["stroke"], styles(line)["fill"])
        picture = imread(BytesIO(exported(seen, frame, "pass over 2 windows as PNG")[1]))
        assert (0x15, 0x58, 0xB0) in {
            tuple(round(255 * float(each)) for each in pixel[:3])
            for pixel in picture.reshape(-1, picture.shape[2])
        }
        frame.get_by_role("tab", name="Modules").click()
        assert ["(model)", "a"] == [
            row[0] for row in table(exported(seen, frame, "modules as CSV")[1])[1:]
        ]


def test_the_timeline_is_exported_with_its_bars(page_of: Callable[..., Seen]) -> None:
    """Forward is 1 of 3 ms; its colour is in the picture. The chart is offered once."""
    seen = page_of(small_profile(), color_scheme="light")
    seen.view("Timeline")
    seen.page.locator(".step-timeline svg").wait_for()
    drawing = ET.fromstring(exported(seen, seen.page, "timeline of a step as SVG")[1])  # noqa: S314 - our own
    bar = drawing.find(f".//{SVG}g[@data-bar='0']/{SVG}rect")
    assert bar is not None
    assert "none" != styles(bar)["fill"]
    assert pytest.approx((float(drawing.get("width", "0")) - 122) / 3, rel=0.02) == float(
        bar.get("width", "0")
    )
    picture = imread(BytesIO(exported(seen, seen.page, "timeline of a step as PNG")[1]))
    assert (0x6A, 0xA9, 0xE9) in {
        tuple(round(255 * float(each)) for each in pixel[:3])
        for row in picture[:150]
        for pixel in row[::7]
    }
    seen.page.locator(".exports summary").click()
    assert 1 == seen.page.locator(".menu button", has_text="as SVG").count()


ROUNDED = re.compile(r"[-−+<>~×]?\d[\d.,]*( ?%| [munµ]?s| [KMGT]?i?B| [kMGTP])|.*\d,\d{3}\b.*")
"""A figure as the page writes it."""


@pytest.mark.parametrize("view", [LABELS.get(view, view.capitalize()) for view in VIEWS])
def test_no_table_is_exported_as_rounded_text(
    view: str, opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """No cell of any view has a unit, a per cent sign or a comma in a number."""
    whole().save(tmp_path / "a.json")
    replace(whole(), steps=whole().steps[1:]).save(tmp_path / "b.json")
    assert 0 == main(
        [
            "html",
            str(tmp_path / "a.json"),
            str(tmp_path / "b.json"),
            "-o",
            str(tmp_path / "page.html"),
        ]
    )
    seen = opening((tmp_path / "page.html").as_uri())
    seen.view(view)
    if view == "Compare":
        seen.page.get_by_label("show").select_option("all")
    seen.page.locator(".exports summary").click()
    offered = [
        each
        for each in seen.page.locator(".menu button").all_inner_texts()
        if each.endswith("as CSV")
    ]
    seen.page.locator(".exports summary").click()
    assert bool(offered) is (view not in {"Run", "Timeline"})
    for label in offered:
        rows = table(exported(seen, seen.page, label)[1])
        assert [] == [cell for row in rows for cell in row if ROUNDED.fullmatch(cell)], label


def test_the_menu_is_reached_with_the_keyboard(page_of: Callable[..., Seen]) -> None:
    """Enter opens it, Tab goes into it, Escape closes it and is back where it was."""
    page = page_of(small_profile()).page
    summary = page.locator(".exports summary")
    summary.focus()
    page.keyboard.press("Enter")
    page.locator(".menu button").first.wait_for()
    page.keyboard.press("Tab")
    assert "times of the steps as SVG" == page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Escape")
    assert not page.locator(".menu").is_visible()
    assert "export" == page.evaluate("document.activeElement.textContent")


def test_the_ranks_times_are_exported_exactly(page_of: Callable[..., Seen]) -> None:
    """The heat map in seconds, with nothing for the rank that told none; and every rank's line."""
    seen = page_of(four_ranks())
    seen.view("Ranks")
    _, content = exported(seen, seen.page, "ranks and modules as CSV")
    head, first, _ = table(content)
    assert (["2", "0", "1", "3"], ["0.002", "0.001", "0.001", ""]) == (head[2:], first[2:])
    assert ("head forward", pytest.approx(1e-3)) == (first[0], float(first[1]))
    _, content = exported(seen, seen.page, "all ranks as CSV")
    assert [["2", "0.005"], ["0", "0.003"], ["1", "0.002"], ["3", ""]] == [
        [row[0], row[5]] for row in table(content)[1:]
    ]


def test_the_memory_s_tables_are_exported_exactly(page_of: Callable[..., Seen]) -> None:
    """In bytes; and its drawing as a file of its own."""
    seen = page_of(small_profile())
    seen.view("Memory")
    _, content = exported(seen, seen.page, "by category as CSV")
    assert [["category", "bytes"], ["parameters", "712"], ["activations", "2288"]] == [
        row[:2] for row in table(content)
    ]
    name, content = exported(seen, seen.page, "live memory over the step as SVG")
    assert name.endswith("live-memory-over-the-step.svg")
    assert 4 == len(ET.fromstring(content).findall(f".//{SVG}path"))  # noqa: S314 - our own file
