"""The Roofline of the page, in a real browser."""

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
    """A product of 20,000 FLOPs in 40 s, twice as long as at the roof of 1000 FLOP/s.

    Another in 10 s, over it; an untimed norm.
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
    """Opens a profile's page at its Roofline."""

    def go(given: Profile) -> Seen:
        seen = page_of(given)
        seen.view("Roofline")
        seen.page.locator(".roofline").wait_for()
        return seen

    return go


def order(seen: Seen) -> list[str]:
    """The modules in the table, from top to bottom."""
    return seen.page.locator(f"{SHEET} .to-row").all_inner_texts()


def test_points_stand_below_a_roof(roofline_of: Callable[..., Seen]) -> None:
    """Three of four: what computes nothing has no place.

    The untimed one is a mark on the axis; the roof says its peak and its slope.
    """
    seen = roofline_of(blocks())
    assert (2, 1, 1) == tuple(
        seen.page.locator(f".picture {kind}").count() for kind in (".timed", ".rug", ".ring")
    )
    assert (
        "1 points without FLOPs are not in the chart"
        in seen.page.locator(".side-by-side").inner_text()
    )
    labels = seen.page.locator(".picture .roof-label").all_text_contents()
    assert ["fp32 1.00 kFLOP/s", "100 B/s"] == [
        label.removesuffix("chip: 1,000 FLOP/s") for label in labels
    ]
    assert "chip: fp32 1.00 kFLOP/s, 100 B/s a pencil" in seen.page.locator(".roofs").inner_text()


def test_a_point_is_where_its_figures_are(roofline_of: Callable[..., Seen]) -> None:
    """Both products have one intensity, and the second is 4 times as fast.

    At one place to the right, and log10(4) decades higher.
    """
    seen = roofline_of(blocks())
    at = [
        (float(each.get_attribute("cx")), float(each.get_attribute("cy")))
        for each in seen.page.locator(".picture .timed").all()
    ]
    ticks = seen.page.locator(".picture .tick")
    heights = {tick.text_content(): float(tick.get_attribute("y")) for tick in ticks.all()}
    decade = heights["100 FLOP/s"] - heights["1 kFLOP/s"]
    assert at[0][0] == at[1][0]
    assert pytest.approx(0.60206 * decade, rel=1e-4) == at[0][1] - at[1][1]


def test_the_table_has_what_there_is_to_win_first(roofline_of: Callable[..., Seen]) -> None:
    """20 s of the first product.

    Nothing of what is over its roof, which is said; unknown of what was not timed.
    """
    seen = roofline_of(blocks())
    assert ["blocks.0.fc", "blocks.1", "norm", "norm"] == order(seen)
    first, second = (seen.page.locator(SHEET).nth(index) for index in (0, 1))
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
    ] == [each.inner_text() for each in first.locator("[role=gridcell]").all()][1:]
    assert "above its roofline limit: a count, a time or a peak is wrong" == second.locator(
        ".mark"
    ).get_attribute("title")
    seen.page.get_by_role("button", name="roofline-bound time").click()
    assert "descending" == seen.page.get_by_role(
        "columnheader", name="roofline-bound time"
    ).get_attribute("aria-sort")


def test_a_point_says_its_figures(roofline_of: Callable[..., Seen]) -> None:
    """Under the pointer, and where its row is chosen with the keyboard; elsewhere the card goes."""
    seen = roofline_of(blocks())
    card = seen.page.locator(".card")
    seen.page.locator(".picture .timed").first.hover()
    assert all(
        text in card.inner_text()
        for text in ("blocks.0.fc", "500 FLOP/s", "1.00 kFLOP/s", "50.0 %", "compute")
    )
    seen.page.mouse.move(5, 5)
    card.wait_for(state="hidden")
    seen.page.locator("[role=grid]").press("ArrowDown")
    assert "above its roofline limit: a count, a time or a peak is wrong" in card.inner_text()
    assert 1 == seen.page.locator(".picture .pointed").count()


@pytest.mark.parametrize("way", ["point", "row", "key"])
def test_a_point_leads_to_its_module(way: str, roofline_of: Callable[..., Seen]) -> None:
    """A click on it chooses its row.

    From there by the name, or by Enter: the module is chosen, and what is above it is open.
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
    """From the chart and from the table; the address keeps it."""
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
    """Four operators by phase, none of which has a time.

    Of 10 layers in each block one point by phase.
    """
    seen = roofline_of(blocks())
    seen.page.get_by_label("points", exact=True).select_option("operators")
    assert (0, 3) == tuple(
        seen.page.locator(f".picture {kind}").count() for kind in (".timed", ".rug")
    )
    assert (
        "3 points without a time are marks on the axis"
        in seen.page.locator(".side-by-side").inner_text()
    )
    assert "mm float32" in seen.page.locator(SHEET).first.inner_text()
    seen = roofline_of(profile_of(50))
    assert "blocks.*.layers.*" in order(seen)


def test_without_a_chip_there_are_points_and_a_reason(roofline_of: Callable[..., Seen]) -> None:
    """What was achieved is drawn, with no roof.

    Without a time there is no chart, and still the table.
    """
    seen = roofline_of(blocks(hardware=None, device_name="abacus"))
    assert "the peak of abacus is not known" in seen.page.locator(".caveat").inner_text()
    assert (2, 0) == tuple(
        seen.page.locator(f".picture {kind}").count() for kind in ("circle", ".roof")
    )
    seen = roofline_of(untimed(blocks(hardware=None)))
    assert 0 == seen.page.locator(".picture circle").count()
    assert 4 == len(order(seen))


def test_a_roof_that_nothing_is_judged_by_is_dashed(roofline_of: Callable[..., Seen]) -> None:
    """That of the datasheet, beside what was measured."""
    seen = roofline_of(blocks(device_name="NVIDIA H200"))
    assert (2, 1) == tuple(
        seen.page.locator(f".picture {kind}").count() for kind in (".roof", ".roof.other")
    )
    assert "not used as the limit" in seen.page.locator(".roofs li").last.inner_text()


def test_where_nothing_was_counted_there_is_no_such_tab(page_of: Callable[..., Seen]) -> None:
    """No empty chart."""
    seen = page_of(profile({"": {}}, []))
    assert 0 == seen.page.get_by_role("tab", name="Roofline", exact=True).count()


def test_names_in_the_chart_are_text(roofline_of: Callable[..., Seen]) -> None:
    """Of modules, of the chip and of where its figures are from: nothing of it runs."""
    given = hostile_profile()
    seen = roofline_of(
        replace(given, run=run(hardware=Hardware(IMAGE, {"fp32": 1.0}, 1.0, None, SCRIPT)))
    )
    assert {IMAGE, SCRIPT, "__proto__", "(model)"} == set(order(seen))
    assert IMAGE in seen.page.locator(".roofs").inner_text()
    seen.page.locator("[role=grid]").press("ArrowDown")
    assert seen.page.locator(".card").is_visible()
    assert 0 == seen.page.locator("img").count()


def test_of_many_modules_those_with_the_most_time_are_drawn(
    roofline_of: Callable[..., Seen],
) -> None:
    """2,000 points of 600 modules in 4 phases; and rows as many as fit the screen."""
    seen = roofline_of(replace(profile_of(600), run=run(hardware=CHIP)))
    seen.page.get_by_label("points", exact=True).select_option("modules")
    assert (
        "400 more points with less time are left out"
        in seen.page.locator(".side-by-side").inner_text()
    )
    assert 2000 == seen.page.locator(".picture .point").count()
    assert seen.page.locator(SHEET).count() < 60


def test_a_traced_operator_is_a_point_of_its_own_height(roofline_of: Callable[..., Seen]) -> None:
    """Both products are one operator of 40 s in the trace.

    One timed point, and marks for what was not traced.
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
    assert (1, 1) == tuple(
        seen.page.locator(f".picture {kind}").count() for kind in (".timed", ".rug")
    )
    assert "40.0 s" in seen.page.locator(SHEET).filter(has_text="mm float32").inner_text()


def test_a_drag_zooms_and_the_table_follows(roofline_of: Callable[..., Seen]) -> None:
    """Around the slower product.

    It alone is left in the chart and the table, until the zoom is reset; the address keeps it.
    """
    seen = roofline_of(blocks())
    box = seen.page.locator(".picture .timed").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    seen.page.mouse.move(x - 50, y - 20)
    seen.page.mouse.down()
    seen.page.mouse.move(x + 50, y + 20)
    seen.page.mouse.up()
    seen.page.get_by_role("button", name="reset zoom").wait_for()
    assert ["blocks.0.fc"] == order(seen)
    labels = [
        each.removesuffix("FLOP/s").strip()
        for each in seen.page.locator(".picture .tick").all_text_contents()
    ]
    assert 6 <= len(labels)
    assert all(float(each.split()[0]) > 0 for each in labels)
    seen.page.reload()
    seen.page.get_by_role("button", name="reset zoom").click()
    assert 4 == len(order(seen))


def test_what_fusion_saves_is_in_the_table_and_said(roofline_of: Callable[..., Seen]) -> None:
    """The product's 960 bytes either way, GELU's 512 in 256.

    Of what is not compiled the bytes as dispatched alone.
    """
    seen = roofline_of(compiled_profile())
    assert "fusion saves 20.0 %" in seen.page.locator(".roofline .fusion").inner_text()
    rows = [each.inner_text().split("\n") for each in seen.page.locator(SHEET).all()]
    ends = {(row[0], row[1] if row[1] != "self" else row[2]): row[-2:] for row in rows}
    assert (["960 B", "960 B"], ["512 B", "256 B"]) == (
        ends["encoder.0", "forward"],
        ends["encoder.1", "forward"],
    )
    assert "–" == ends["head", "forward"][1]
    seen = roofline_of(blocks())
    assert (0, 0) == (
        seen.page.locator(".fusion").count(),
        seen.page.get_by_role("columnheader", name="fused bytes moved").count(),
    )
