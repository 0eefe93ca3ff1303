"""Test the view Memory in a browser."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.hardware.chips import Hardware
from lflops.profile.profile import Allocation, Moment, Profile
from lflops.profile.records import ByCategory
from tests.support.browser import ROW, Seen
from tests.support.malicious_names import IMAGE, hostile_profile
from tests.support.profile_builders import product, profile, run, small_memory, small_profile


def shown(page_of: Callable[..., Seen], given: Profile) -> Seen:
    """Open the view Memory of a profile."""
    seen = page_of(given)
    seen.view("Memory")
    return seen


def slider(seen: Seen) -> Any:
    """Return the element in which the keyboard moves the cursor."""
    return seen.page.get_by_role("slider")


def said(seen: Seen) -> str:
    """Return the caption, which describes the operator at the cursor."""
    return seen.page.locator(".timeline-caption").inner_text()


def legend(seen: Seen) -> dict[str, str]:
    """Return the exact bytes of each category at the cursor."""
    exact_bytes = {}
    for item in seen.page.locator(".memory .legend li").all():
        category = item.inner_text().split()[0]
        exact_bytes[category] = item.locator("b").get_attribute("title")
    return exact_bytes


def rows(seen: Seen, label: str) -> list[str]:
    """Return the lines of a table, with the cells separated by a bar."""
    found = seen.page.get_by_role("table", name=label).locator("tbody tr")
    return [" | ".join(row.locator("td").all_inner_texts()) for row in found.all()]


def test_the_cursor_begins_at_the_peak_and_moves_with_the_keyboard(
    page_of: Callable[..., Seen],
) -> None:
    """The caption has the operator, module and phase at the cursor, and the legend has the bytes.

    A screen reader reads the same caption.
    """
    seen = shown(page_of, small_profile())
    assert "2.93 KiB at the peak, in aten::addmm of head, forward, operator 3 of 4" == said(seen)
    assert {
        "parameters": "712 bytes",
        "gradients": "0 bytes",
        "activations": "2,288 bytes",
        "temporary": "0 bytes",
    } == legend(seen)
    slider(seen).press("ArrowRight")
    before_backward = "2.44 KiB before aten::mm of head, backward, operator 4 of 4"
    assert before_backward == said(seen)
    assert before_backward == slider(seen).get_attribute("aria-valuetext")
    assert {
        "parameters": "712 bytes",
        "gradients": "136 bytes",
        "activations": "1,288 bytes",
        "temporary": "364 bytes",
    } == legend(seen)
    slider(seen).press("ArrowRight")
    assert said(seen).endswith("operator 4 of 4")
    slider(seen).press("Home")
    assert "712 B before aten::addmm of encoder.0, forward, operator 1 of 4" == said(seen)


def test_the_pointer_moves_the_cursor_too(page_of: Callable[..., Seen]) -> None:
    """The first operator is at the left end of the chart, and the last one at the right end."""
    seen = shown(page_of, small_profile())
    box = slider(seen).bounding_box()
    for x, place in (2, "operator 1 of 4"), (box["width"] - 2, "operator 4 of 4"):
        slider(seen).hover(position={"x": x, "y": box["height"] / 2})
        assert said(seen).endswith(place)


def test_enter_and_a_click_lead_to_the_module(page_of: Callable[..., Seen]) -> None:
    """Enter and a click choose the module's row; the cursor keeps its place after a reload."""
    seen = shown(page_of, small_profile())
    slider(seen).press("Home")
    slider(seen).press("Enter")
    seen.page.locator(f"{ROW}.chosen").get_by_text("Linear").wait_for()
    assert "encoder.0" == seen.page.locator(f"{ROW}.chosen .name").get_attribute("title")
    seen.view("Memory")
    seen.page.reload()
    slider(seen).wait_for()
    assert said(seen).endswith("operator 1 of 4")
    slider(seen).click(position={"x": 1000, "y": 200})
    seen.page.locator(f"{ROW}.chosen .name[title=head]").wait_for()


def test_the_peak_is_taken_apart(page_of: Callable[..., Seen]) -> None:
    """The tables divide the peak of 3,000 bytes by category, by module and by storage.

    Parameters have 712 bytes, `encoder.0` holds 2,832 bytes, and one activation has 2,288 bytes.
    """
    seen = shown(page_of, small_profile())
    assert ["parameters | 712 B | 23.7 %", "activations | 2.23 KiB | 76.3 %"] == rows(
        seen, "by category"
    )
    assert ["encoder.0 | 2.77 KiB | 94.4 %", "head | 168 B | 5.6 %"] == rows(seen, "by module")
    assert [
        "activations | encoder.0 | aten::addmm in forward | 2.23 KiB | 1 | 76.3 %",
        "parameters | head | before the step | 136 B | 1 | 4.5 %",
    ] == rows(seen, "largest storages")


def test_a_line_of_many_modules_leads_to_all_of_them(page_of: Callable[..., Seen]) -> None:
    """The line `blocks.*` leads to both blocks, but not to the modules inside them."""
    names = ["", "blocks", "blocks.0", "blocks.0.body", "blocks.1", "blocks.1.body"]
    memory = replace(
        small_memory(),
        by_module={"blocks.0": 1000, "blocks.1": 2000},
        alive=(),
        timeline=(Moment("mm", "", "forward", 3000, 2, ByCategory(3000, 0, 0, 0, 0, 0)),),
    )
    seen = shown(page_of, profile({name: {} for name in names}, [], memory=memory))
    seen.page.get_by_role("button", name="blocks.* ×2").click()
    seen.page.locator(ROW).first.wait_for()
    assert ["(model)", "blocks", "0", "1"] == seen.labels()


def test_the_chip_s_room_is_drawn_where_it_is_near(page_of: Callable[..., Seen]) -> None:
    """A line shows the chip's memory if it is near the peak; the share of the peak is always shown.

    The chip has 4/3 of the peak, or 100 times the peak.
    """
    # A process can use 98.5 % of the chip, so the first share is 3000 of 3940 bytes.
    for memory_bytes, lines, share in ((4000.0, 1, "76.1 %"), (300_000.0, 0, "1.0 %")):
        chip = run(hardware=Hardware("abacus", {"fp32": 1.0}, memory_bytes=memory_bytes))
        seen = shown(page_of, replace(small_profile(), run=chip))
        assert lines == seen.page.locator("line.roof").count()
        assert share == seen.page.locator(".memory .figure-value").nth(1).inner_text()


def test_without_a_count_there_is_no_such_tab(page_of: Callable[..., Seen]) -> None:
    """Without counted memory there is no Memory tab."""
    seen = page_of(replace(small_profile(), memory=None))
    assert 0 == seen.page.get_by_role("tab", name="Memory", exact=True).count()


def test_names_in_memory_are_text(page_of: Callable[..., Seen]) -> None:
    """Names of operators, modules and categories are shown as text."""
    memory = replace(
        small_memory(),
        by_module={IMAGE: 3000},
        by_category={IMAGE: 3000},
        alive=(Allocation(IMAGE, IMAGE, IMAGE, "forward", 3000),),
        timeline=tuple(
            Moment(IMAGE, IMAGE, "forward", 3000, place, ByCategory(3000, 0, 0, 0, 0, 0))
            for place in range(3)
        ),
    )
    seen = shown(page_of, replace(hostile_profile(), memory=memory))
    assert said(seen).startswith(f"2.93 KiB at the peak, in {IMAGE} of {IMAGE}")
    assert 0 == seen.page.locator("img").count()


def test_the_peak_is_a_treemap_down_to_the_storages(page_of: Callable[..., Seen]) -> None:
    """The areas of the tiles are proportional to bytes, by category or by module.

    Of 3,000 bytes, one activation has 2,288, parameters of the head have 136, and smaller
    parameters have 576.
    """
    seen = shown(page_of, small_profile())
    areas = {}
    for tile in seen.page.locator(".treemap .tile").all():
        name = tile.get_attribute("title").split(":")[0]
        # Because of the gaps, a tile is drawn about 2 pixels smaller than its area.
        areas[name] = tile.evaluate("node => (node.clientWidth + 2) * (node.clientHeight + 2)")
    assert {
        "activations of encoder.0",
        "parameters of head",
        "smaller storages of parameters",
    } == areas.keys()
    ratio = areas["activations of encoder.0"] / areas["smaller storages of parameters"]
    assert pytest.approx(2288 / 576, rel=0.15) == ratio
    seen.page.get_by_label("group the treemap by").select_option("module")
    heads = [head.inner_text() for head in seen.page.locator(".treemap-head").all()]
    assert ["encoder.0 2.77 KiB", "head 168 B"] == heads[:2]
    seen.page.locator(".treemap").focus()
    seen.page.locator(".treemap").press("Home")
    seen.page.locator(".treemap").press("Enter")
    seen.page.locator(f"{ROW}.chosen .name[title='encoder.0']").wait_for()


def test_what_would_lower_the_peak_is_listed(page_of: Callable[..., Seen]) -> None:
    """The page lists two ways to lower the peak, with the bytes that they save.

    Checkpointing two blocks with activations of 1,000 and 900 bytes saves the smaller 900 bytes.
    The gradients of 500 bytes could be freed before forward.
    """
    memory = replace(
        small_memory(),
        activations_by_module={"blocks.0": 1000, "blocks.1": 900},
        by_category={"activations": 1900, "gradients": 500},
    )
    names = ["", "blocks", "blocks.0", "blocks.1"]
    cells = []
    for name in ("blocks.0", "blocks.1"):
        cells.append(product(name, "mm", "forward", macs=10, bytes_moved=1))
        cells.append(product(name, "mm", "backward", macs=10, bytes_moved=1))
    seen = shown(page_of, profile({name: {} for name in names}, cells, memory=memory))
    rows = seen.page.get_by_role("table", name="how to lower the peak").locator("tbody tr").all()
    checkpoint = rows[0].locator("td").all_inner_texts()
    more_work = "20 additional MACs, 50.0 % of the step"
    assert [
        "use activation checkpointing in blocks.* ×2",
        "900 B",
        "30.0 %",
        more_work,
    ] == checkpoint
    assert "free the gradients before forward" in rows[1].inner_text()
    assert "500 B" in rows[1].inner_text()
