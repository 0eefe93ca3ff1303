"""Test the view Roofline in a browser."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from lflops.profile.records import Phase, Trace, TracedOperator
from tests.support.browser import ROW, Seen
from tests.support.compiled_profiles import compiled_profile
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import cell, clocked, product, profile, profile_of, run, untimed

CHIP = Hardware("chip", {"fp32": 1000.0}, 100.0, None, "a pencil", 400.0)
SHEET = "[role=grid] .grid-body [role=row]"


def blocks(**facts: Any) -> Profile:
    """Return a profile of two matmuls and a norm, for a chip of 1,000 FLOP/s.

    Each matmul has 20,000 FLOPs, so it needs at least 20 s. The first takes 40 s, which is twice as
    long. The second takes 10 s, which is impossible. The norm has no time.
    """
    rows: dict[str, dict[str, Any]] = {
        "": {},
        "blocks": {},
        "blocks.0": {"class_name": "Block"},
        "blocks.0.fc": {},
        "blocks.1": {},
        "norm": {},
    }
    cells = [
        product("blocks.0.fc", "mm", "forward", macs=10_000, bytes_moved=1000),
        product("blocks.1", "mm", "backward", macs=10_000, bytes_moved=1000),
        cell("norm", "native_layer_norm", "optimizer", flops=500, bytes_moved=1000),
        cell("norm", "copy_", "other", bytes_moved=1000),
    ]
    times: Mapping[tuple[str, Phase], float] = {
        ("blocks.0.fc", "forward"): 40.0,
        ("blocks.1", "backward"): 10.0,
    }
    return clocked(profile(rows, cells, run=run(**({"hardware": CHIP} | facts))), times)


@pytest.fixture
def roofline_of(page_of: Callable[..., Seen]) -> Callable[..., Seen]:
    """Return a function that opens the view Roofline of a profile."""

    def go(given: Profile) -> Seen:
        seen = page_of(given)
        seen.view("Roofline")
        seen.page.locator(".roofline").wait_for()
        return seen

    return go


def drawn(seen: Seen, kind: str) -> int:
    """Return the number of elements in the chart that match a selector."""
    return int(seen.page.locator(f".picture {kind}").count())


def order(seen: Seen) -> list[str]:
    """Return the modules in the table, from top to bottom."""
    return seen.page.locator(f"{SHEET} .to-row").all_inner_texts()


def test_points_stand_below_a_roof(roofline_of: Callable[..., Seen]) -> None:
    """Two rows are points of the chart, one is a mark on the axis, and one is not in the chart.

    The row without a time is the mark, and the row without FLOPs is missing. The point above the
    roofline has a ring. The roofline is labelled with its peak and its slope.
    """
    seen = roofline_of(blocks())
    assert 2 == drawn(seen, ".timed")
    assert 1 == drawn(seen, ".rug")
    assert 1 == drawn(seen, ".ring")
    assert (
        "1 point without FLOPs is not in the chart"
        in seen.page.locator(".side-by-side").inner_text()
    )
    labels = seen.page.locator(".picture .roof-label").all_text_contents()
    # The text of the first label ends with its tooltip.
    labels = [label.removesuffix("chip: 1,000 FLOP/s") for label in labels]
    assert ["fp32 1.00 kFLOP/s", "100 B/s"] == labels
    assert "chip: fp32 1.00 kFLOP/s, 100 B/s a pencil" in seen.page.locator(".roofs").inner_text()


def test_a_point_is_where_its_figures_are(roofline_of: Callable[..., Seen]) -> None:
    """Points are placed by intensity and rate on logarithmic axes.

    Both matmuls have the same intensity, so the same horizontal position. The second is 4 times as
    fast, so it is log10(4) = 0.602 decades higher.
    """
    seen = roofline_of(blocks())
    first, second = seen.page.locator(".picture .timed").all()
    ticks = seen.page.locator(".picture .tick")
    heights = {tick.text_content(): float(tick.get_attribute("y")) for tick in ticks.all()}
    decade = heights["100 FLOP/s"] - heights["1 kFLOP/s"]
    assert float(first.get_attribute("cx")) == float(second.get_attribute("cx"))
    higher = float(first.get_attribute("cy")) - float(second.get_attribute("cy"))
    assert pytest.approx(0.60206 * decade, rel=1e-4) == higher


def test_the_table_has_what_there_is_to_win_first(roofline_of: Callable[..., Seen]) -> None:
    """The table is sorted by potential speed-up, and marks a row that is faster than the roofline.

    The first matmul could save 20 s. The second could save nothing, and for the norm it is unknown.
    """
    seen = roofline_of(blocks())
    assert ["blocks.0.fc", "blocks.1", "norm", "norm"] == order(seen)
    first = seen.page.locator(SHEET).nth(0)
    second = seen.page.locator(SHEET).nth(1)
    texts = [each.inner_text() for each in first.locator("[role=gridcell]").all()]
    assert [
        "forward",
        "compute",
        "20.0 s",
        "50.0 %",
        "40.0 s",
        "20.0 s",
        "500",
        "1.00 k",
        "20",
    ] == texts[1:]
    title = second.locator(".mark").get_attribute("title")
    assert (
        "above its roofline limit: the counted work, the measured time or the peak is wrong"
        == title
    )
    seen.page.get_by_role("button", name="roofline-bound time").click()
    head = seen.page.get_by_role("columnheader", name="roofline-bound time")
    assert "descending" == head.get_attribute("aria-sort")


def test_a_point_says_its_figures(roofline_of: Callable[..., Seen]) -> None:
    """A card shows the figures of the point at the pointer, or of the row chosen by keyboard.

    It disappears when the pointer leaves the point.
    """
    seen = roofline_of(blocks())
    card = seen.page.locator(".card")
    seen.page.locator(".picture .timed").first.hover()
    for text in ("blocks.0.fc", "500 FLOP/s", "1.00 kFLOP/s", "50.0 %", "compute"):
        assert text in card.inner_text()
    seen.page.mouse.move(5, 5)
    card.wait_for(state="hidden")
    seen.page.locator("[role=grid]").press("ArrowDown")
    assert (
        "above its roofline limit: the counted work, the measured time or the peak is wrong"
        in card.inner_text()
    )
    assert 1 == seen.page.locator(".picture .pointed").count()


@pytest.mark.parametrize("way", ["point", "row", "key"])
def test_a_point_leads_to_its_module(way: str, roofline_of: Callable[..., Seen]) -> None:
    """A point, its row and the Enter key all lead to the module, whose parents are open then.

    A click on the point first chooses its row.
    """
    seen = roofline_of(blocks())
    if way == "point":
        seen.page.locator(".picture .timed").first.click()
        assert "blocks.0.fc" in seen.page.locator(f"{SHEET}.chosen").inner_text()
        seen.page.locator("[role=grid]").press("Enter")
    elif way == "row":
        seen.page.get_by_role("button", name="blocks.0.fc", exact=True).click()
    else:
        seen.page.locator("[role=grid]").press("Enter")
    seen.page.locator(f"{ROW}.chosen .name[title='blocks.0.fc']").wait_for()
    assert "true" == seen.page.locator(ROW, has_text="Block").first.get_attribute("aria-expanded")


def test_phases_can_be_left_out(roofline_of: Callable[..., Seen]) -> None:
    """A button removes a phase from the chart and the table; the address keeps the choice."""
    seen = roofline_of(blocks())
    seen.page.get_by_role("button", name="backward", exact=True).click()
    seen.page.reload()
    seen.page.locator(".roofline").wait_for()
    assert ["blocks.0.fc", "norm", "norm"] == order(seen)
    assert 1 == seen.page.locator(".picture .timed").count()
    assert "false" == seen.page.get_by_role("button", name="backward", exact=True).get_attribute(
        "aria-pressed"
    )


def test_operators_and_what_repeats_are_points_too(roofline_of: Callable[..., Seen]) -> None:
    """Points can be operators by phase, and repeated modules share a point.

    Three of the four operators have FLOPs, but none has a time. The layers of all blocks are one
    point per phase.
    """
    seen = roofline_of(blocks())
    seen.page.get_by_label("points", exact=True).select_option("operators")
    assert 0 == drawn(seen, ".timed")
    assert 3 == drawn(seen, ".rug")
    assert (
        "3 points without a measured time are marks on the axis"
        in seen.page.locator(".side-by-side").inner_text()
    )
    assert "mm float32" in seen.page.locator(SHEET).first.inner_text()
    seen = roofline_of(profile_of(50))
    assert "blocks.*.layers.*" in order(seen)


def test_without_a_chip_there_are_points_and_a_reason(roofline_of: Callable[..., Seen]) -> None:
    """Without a known peak, points are drawn without a roofline, and the page says why.

    Without times there is no chart, but the table remains.
    """
    seen = roofline_of(blocks(hardware=None, device_name="abacus"))
    assert "the peak of abacus is unknown" in seen.page.locator(".caveat").inner_text()
    assert 2 == drawn(seen, "circle")
    assert 0 == drawn(seen, ".roof")
    seen = roofline_of(untimed(blocks(hardware=None)))
    assert 0 == drawn(seen, "circle")
    assert 4 == len(order(seen))


def test_a_roof_that_nothing_is_judged_by_is_dashed(roofline_of: Callable[..., Seen]) -> None:
    """The roofline of the datasheet is drawn dashed if the chip's peaks were measured."""
    seen = roofline_of(blocks(device_name="NVIDIA H200"))
    assert 2 == drawn(seen, ".roof")
    assert 1 == drawn(seen, ".roof.other")
    assert "not compared with" in seen.page.locator(".roofs li").last.inner_text()


def test_where_nothing_was_counted_there_is_no_such_tab(page_of: Callable[..., Seen]) -> None:
    """Without counted operators there is no Roofline tab."""
    seen = page_of(profile({"": {}}, []))
    assert 0 == seen.page.get_by_role("tab", name="Roofline", exact=True).count()


def test_names_in_the_chart_are_text(roofline_of: Callable[..., Seen]) -> None:
    """Names of modules, of the chip and of the source of its peaks are shown as text."""
    given = hostile_profile()
    chip = Hardware(IMAGE, {"fp32": 1.0}, 1.0, None, SCRIPT)
    seen = roofline_of(replace(given, run=run(hardware=chip)))
    assert {IMAGE, SCRIPT, "__proto__", "(model)"} == set(order(seen))
    assert IMAGE in seen.page.locator(".roofs").inner_text()
    seen.page.locator("[role=grid]").press("ArrowDown")
    assert seen.page.locator(".card").is_visible()
    assert 0 == seen.page.locator("img").count()


def test_of_many_modules_those_with_the_most_time_are_drawn(
    roofline_of: Callable[..., Seen],
) -> None:
    """The chart has the 2,000 points with the most time, and the table has only rows on the screen.

    Here 600 modules with 4 phases have 2,400 points.
    """
    seen = roofline_of(replace(profile_of(600), run=run(hardware=CHIP)))
    seen.page.get_by_label("points", exact=True).select_option("modules")
    assert (
        "400 more points with less time are left out"
        in seen.page.locator(".side-by-side").inner_text()
    )
    assert 2000 == seen.page.locator(".picture .point").count()
    assert seen.page.locator(SHEET).count() < 60


def test_a_traced_operator_is_a_point_of_its_own_height(roofline_of: Callable[..., Seen]) -> None:
    """An operator with a traced time is a point, and an operator without one is a mark on the axis.

    Both matmuls are the operator `mm`, which takes 40 s in the trace.
    """
    mm = TracedOperator(
        name="mm",
        calls=1,
        host_seconds=40.0,
        self_host_seconds=40.0,
        device_seconds=0.0,
        self_device_seconds=0.0,
    )
    seen = roofline_of(replace(blocks(), trace=Trace(files={}, batches=1, operators=(mm,))))
    seen.page.get_by_label("points", exact=True).select_option("operators")
    assert 1 == drawn(seen, ".timed")
    assert 1 == drawn(seen, ".rug")
    assert "40.0 s" in seen.page.locator(SHEET).filter(has_text="mm float32").inner_text()


def test_a_drag_zooms_and_the_table_follows(roofline_of: Callable[..., Seen]) -> None:
    """A drag zooms to a part of the chart, and the table shows only the points there.

    The address keeps the zoom until it is reset.
    """
    seen = roofline_of(blocks())
    box = seen.page.locator(".picture .timed").first.bounding_box()
    x = box["x"] + box["width"] / 2
    y = box["y"] + box["height"] / 2
    seen.page.mouse.move(x - 50, y - 20)
    seen.page.mouse.down()
    seen.page.mouse.move(x + 50, y + 20)
    seen.page.mouse.up()
    seen.page.get_by_role("button", name="reset zoom").wait_for()
    assert ["blocks.0.fc"] == order(seen)
    labels = seen.page.locator(".picture .tick").all_text_contents()
    assert 6 <= len(labels)
    for label in labels:
        number = label.removesuffix("FLOP/s").split()[0]
        assert float(number) > 0
    seen.page.reload()
    seen.page.get_by_role("button", name="reset zoom").click()
    assert 4 == len(order(seen))


def test_what_fusion_saves_is_in_the_table_and_said(roofline_of: Callable[..., Seen]) -> None:
    """The table has the bytes that compiled code moves; a sentence says what fusion saves.

    The matmul moves 960 bytes in both cases. GELU moves 256 instead of 512 bytes. Modules that are
    not compiled have no such bytes.
    """
    seen = roofline_of(compiled_profile())
    assert "fusion saves 20.0 %" in seen.page.locator(".roofline .fusion").inner_text()
    # The last two columns are the bytes moved as dispatched and as compiled.
    bytes_moved = {}
    for row in seen.page.locator(SHEET).all():
        texts = row.inner_text().split("\n")
        phase = texts[2] if texts[1] == "self" else texts[1]
        bytes_moved[texts[0], phase] = texts[-2:]
    assert ["960 B", "960 B"] == bytes_moved["encoder.0", "forward"]
    assert ["512 B", "256 B"] == bytes_moved["encoder.1", "forward"]
    assert "–" == bytes_moved["head", "forward"][1]
    seen = roofline_of(blocks())
    assert 0 == seen.page.locator(".fusion").count()
    assert 0 == seen.page.get_by_role("columnheader", name="fused bytes moved").count()
