"""Test in a browser the files that the page exports: CSV, JSON, SVG and PNG."""

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
# The colour of forward on a light page, as red, green and blue
FORWARD = (0x6A, 0xA9, 0xE9)


def exported(seen: Seen, frame: Any, label: str) -> tuple[str, bytes]:
    """Export a file from the menu, and return its name and content."""
    frame.locator(".exports summary").click()
    with seen.page.expect_download() as download:
        frame.locator(".menu").get_by_role("button", name=label, exact=True).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def table(content: bytes) -> list[list[str]]:
    """Return the rows of a CSV file, the first of which has the column names."""
    return list(csv.reader(StringIO(content.decode(), newline="")))


def test_the_modules_are_exported_as_they_are_shown(page_of: Callable[..., Seen]) -> None:
    """The file has the chosen columns and the rows that match the filter, in the order of the page.

    Values are exact, and cells of unknown values are empty.
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
    assert ["(model)", "encoder", "encoder.0", "head"] == [row[0] for row in rows]
    assert ["768", "512", "512", "256"] == [row[5] for row in rows]
    assert ["", "", ""] == [row[3] for row in rows[:3]]
    assert pytest.approx(0.5) == float(rows[3][3])
    assert pytest.approx([3e-4, 2e-4, 1e-4, 1e-4]) == [float(row[4]) for row in rows]


def test_what_changed_is_exported(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The file has both names of a module, the exact numbers, and the parts of an open row.

    A module that took 20 ms takes 10 ms now, so its cost per step is −10 ms.
    """
    five = dict.fromkeys("abcde", 20e-3)
    ran(five).save(tmp_path / "before")
    ran(five | {"e": 10e-3}).save(tmp_path / "after")
    assert 0 == main(["html", str(tmp_path / "before"), str(tmp_path / "after")])
    seen = opening((tmp_path / "after.compare.html").as_uri())
    seen.page.get_by_role("treegrid").press("ArrowRight")
    head, module, part = table(exported(seen, seen.page, "modules that changed as CSV")[1])
    assert ["e", "e", "Linear", "1", "", "faster", "0.02", "0.01", "0.5"] == module[:9]
    assert -10e-3 == float(module[head.index("cost per step")])
    assert ["e", "e", "Linear", "1", "forward", "", "0.02", "0.01", "0.5"] == part[:9]


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-cmd", "@SUM(A1)", "\tx"])
def test_a_name_is_no_formula(page_of: Callable[..., Seen], name: str) -> None:
    """A name that a spreadsheet would run as a formula gets an apostrophe before it."""
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
    """Cells have the unchanged names; the file's name has none of their special characters."""
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
    """A cell exports its exact value, which is in its title after the label of the column.

    A dash is exported as an empty cell, and commas and quotes are quoted.
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
    """The file has the whole payload of the window."""
    seen = page_of(small_profile())
    name, content = exported(seen, seen.page, "this window as JSON")
    assert "Model-fit-window-0-step-8.json" == name
    assert json.decode(json.encode(payload(analyze(small_profile())))) == json.decode(content)


def rgb(pixel: Any) -> tuple[int, ...]:
    """Return red, green and blue of a pixel, each from 0 to 255. In pictures they are 0 to 1."""
    return tuple(round(255 * float(channel)) for channel in pixel[:3])


def styles(node: ET.Element) -> Mapping[str, str]:
    """Return the properties of a node's `style` attribute."""
    parts = node.get("style", "").rstrip(";").split("; ")
    return dict(part.split(": ", 1) for part in parts if part)


def test_a_chart_of_boxes_is_exported_as_it_looks(page_of: Callable[..., Seen]) -> None:
    """The exported bar has the widths of the phases, and the picture has the colour of forward.

    The phases take 0.2, 1 and 1.5 ms. The export works under the content security policy of the
    page.
    """
    seen = page_of(small_profile(), color_scheme="light")
    _, content = exported(seen, seen.page, "Where the step goes as SVG")
    drawing = ET.fromstring(content)  # noqa: S314 - our own file
    widths = {}
    for part in drawing.findall(f"{SVG}svg/{SVG}svg"):
        title = part.findtext(f"{SVG}title")
        if title is not None:
            widths[title.split(":")[0]] = float(part.get("width", ""))
    assert pytest.approx(5, rel=0.02) == widths["forward"] / widths["data wait"]
    assert pytest.approx(1.5, rel=0.02) == widths["backward"] / widths["forward"]
    assert "var(" not in ET.tostring(drawing, "unicode")
    picture = imread(BytesIO(exported(seen, seen.page, "Where the step goes as PNG")[1]))
    high, long = picture.shape[:2]
    assert pytest.approx(long, abs=1) == 2 * float(drawing.get("width", ""))
    assert high == 2 * float(drawing.get("height", ""))
    in_forward = picture[high // 8, int(long * 0.3)]
    assert FORWARD == rgb(in_forward)


def test_the_tab_exports_under_tensorboard_s_policy(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The tab exports a drawing with its styles, the same drawing as a picture, and a table.

    The content security policy of TensorBoard applies there.
    """
    with SummaryWriter(tmp_path) as writer:
        for step in (1, 2):
            window = ran({"a": 1e-3}, steps=clean(0.1 * step), samples_per_step=4)
            lflops.tensorboard.log(writer, window, step)
    with board(tmp_path, "--load_fast=false") as server:
        server.windows(expected=2)
        seen = opening(f"{server.address}#lflops", color_scheme="light")
        frame = seen.page.frame_locator("iframe")
        frame.locator(".figures").first.wait_for()
        _, content = exported(seen, frame, "pass over 2 windows as SVG")
        drawing = ET.fromstring(content)  # noqa: S314 - our own file
        line = drawing.find(f".//{SVG}polyline")
        assert line is not None
        # In hexadecimal, this is the colour (0x15, 0x58, 0xB0) of the picture below.
        assert "rgb(21, 88, 176)" == styles(line)["stroke"]
        assert "none" == styles(line)["fill"]
        picture = imread(BytesIO(exported(seen, frame, "pass over 2 windows as PNG")[1]))
        pixels = picture.reshape(-1, picture.shape[2])
        assert (0x15, 0x58, 0xB0) in {rgb(pixel) for pixel in pixels}
        frame.get_by_role("tab", name="Modules").click()
        _, content = exported(seen, frame, "modules as CSV")
        assert ["(model)", "a"] == [row[0] for row in table(content)[1:]]


def test_the_timeline_is_exported_with_its_bars(page_of: Callable[..., Seen]) -> None:
    """Forward has 1/3 of the width and its own colour, and the chart is offered only once."""
    seen = page_of(small_profile(), color_scheme="light")
    seen.view("Timeline")
    seen.page.locator(".step-timeline svg").wait_for()
    _, content = exported(seen, seen.page, "timeline of a step as SVG")
    drawing = ET.fromstring(content)  # noqa: S314 - our own file
    bar = drawing.find(f".//{SVG}g[@data-bar='0']/{SVG}rect")
    assert bar is not None
    assert "none" != styles(bar)["fill"]
    # 122 pixels of the width are beside the time axis.
    axis = float(drawing.get("width", "0")) - 122
    assert pytest.approx(axis / 3, rel=0.02) == float(bar.get("width", "0"))
    picture = imread(BytesIO(exported(seen, seen.page, "timeline of a step as PNG")[1]))
    # Every seventh pixel of the top rows
    pixels = picture[:150, ::7].reshape(-1, picture.shape[2])
    assert FORWARD in {rgb(pixel) for pixel in pixels}
    seen.page.locator(".exports summary").click()
    assert 1 == seen.page.locator(".menu button", has_text="as SVG").count()


ROUNDED = re.compile(r"[-−+<>~×]?\d[\d.,]*( ?%| [munµ]?s| [KMGT]?i?B| [kMGTP])|.*\d,\d{3}\b.*")
"""Matches a rounded figure as the page shows it."""


@pytest.mark.parametrize("view", [LABELS.get(view, view.capitalize()) for view in VIEWS])
def test_no_table_is_exported_as_rounded_text(
    view: str, opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """No cell that any view exports has a unit, a percent sign or grouped digits."""
    whole().save(tmp_path / "a.json")
    replace(whole(), steps=whole().steps[1:]).save(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert 0 == main(["html", *files, "-o", str(tmp_path / "page.html")])
    seen = opening((tmp_path / "page.html").as_uri())
    seen.view(view)
    if view == "Compare":
        seen.page.get_by_label("show").select_option("all")
    seen.page.locator(".exports summary").click()
    buttons = seen.page.locator(".menu button").all_inner_texts()
    offered = [label for label in buttons if label.endswith("as CSV")]
    seen.page.locator(".exports summary").click()
    assert bool(offered) is (view not in {"Run", "Timeline"})
    for label in offered:
        _, content = exported(seen, seen.page, label)
        for row in table(content):
            assert [] == [cell for cell in row if ROUNDED.fullmatch(cell)], label


def test_the_menu_is_reached_with_the_keyboard(page_of: Callable[..., Seen]) -> None:
    """Enter opens the menu, Tab goes to its first item, and Escape returns to the button."""
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
    """The heat map and the list of ranks have exact seconds; the missing rank has empty cells."""
    seen = page_of(four_ranks())
    seen.view("Ranks")
    _, content = exported(seen, seen.page, "ranks and modules as CSV")
    head, first, _ = table(content)
    assert ["2", "0", "1", "3"] == head[2:]
    assert ["0.002", "0.001", "0.001", ""] == first[2:]
    assert "head forward" == first[0]
    assert pytest.approx(1e-3) == float(first[1])
    _, content = exported(seen, seen.page, "all ranks as CSV")
    rows = table(content)[1:]
    assert ["2", "0", "1", "3"] == [row[0] for row in rows]
    assert ["0.005", "0.003", "0.002", ""] == [row[5] for row in rows]


def test_the_memory_s_tables_are_exported_exactly(page_of: Callable[..., Seen]) -> None:
    """The table has exact bytes, and the chart is exported under its own name."""
    seen = page_of(small_profile())
    seen.view("Memory")
    _, content = exported(seen, seen.page, "by category as CSV")
    assert [["category", "bytes"], ["parameters", "712"], ["activations", "2288"]] == [
        row[:2] for row in table(content)
    ]
    name, content = exported(seen, seen.page, "live memory over the step as SVG")
    assert name.endswith("live-memory-over-the-step.svg")
    assert 4 == len(ET.fromstring(content).findall(f".//{SVG}path"))  # noqa: S314 - our own file
