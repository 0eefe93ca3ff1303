"""Test the page and the tab in a browser: the view Modules, and what all views share."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops import units
from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase
from lflops.profile.steps import Step
from lflops.report.first_screen.screen import first_screen
from lflops.report.first_screen.window import window_summary
from lflops.report.html import save
from lflops.report.summary_facts import report_of
from tests.support.browser import GRID, ROW, Seen, bench, tab
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import (
    clocked,
    product,
    profile,
    profile_of,
    run,
    small_profile,
    untimed,
)
from tests.support.tensorboard_server import write


def digits(value: int) -> str:
    """Format an exact count as the page does."""
    return f"{value:,}"


def test_every_module_has_the_profile_s_numbers(page_of: Callable[..., Seen]) -> None:
    """The table has the exact numbers of all modules in all phases.

    The page requests no file except itself.
    """
    given = small_profile()
    seen = page_of(given)
    seen.modules()
    seen.page.locator(".chooser summary").click()
    for column in seen.page.locator(".chooser input").all():
        column.check()
    modules = given.modules
    for phase in PHASES:
        macs = {name: module.work(phase).macs for name, module in modules.items()}
        # Without any MACs, a phase has no such column.
        if any(macs.values()):
            expected = {name: digits(count) for name, count in macs.items()}
            assert expected == seen.shown(f"{phase} MACs")
    parameters = {name: digits(module.parameters) for name, module in modules.items()}
    assert parameters == seen.shown("parameters")
    times = {name: str(module.forward.seconds.median) for name, module in modules.items()}
    assert times == seen.shown("forward time")
    assert {"file:"} == {address.split("//")[0] for address in seen.asked}


def test_own_values_are_those_without_what_is_below(page_of: Callable[..., Seen]) -> None:
    """With "self only", counts and times exclude submodules.

    The linear layer of the encoder has 512 MACs and the head has 128. Containers have no self time,
    so it is unknown.
    """
    seen = page_of(small_profile())
    seen.modules()
    seen.page.get_by_label("self only").check()
    assert {
        "": "0",
        "encoder": "0",
        "encoder.0": "512",
        "encoder.1": "0",
        "head": "128",
    } == seen.shown("forward MACs")
    assert "unknown" == seen.shown("forward time")["encoder"]


def test_rows_are_sorted_among_their_siblings(page_of: Callable[..., Seen]) -> None:
    """Clicks on a column sort siblings downwards, then upwards, and then restore the order.

    A flat list is sorted as a whole.
    """
    seen = page_of(small_profile())
    seen.modules()
    order = seen.labels()
    head = seen.page.get_by_role("button", name="parameters")
    head.click()
    assert ["(model)", "encoder", "0", "1", "head"] == order == seen.labels()
    head.click()
    assert ["(model)", "head", "encoder", "1", "0"] == seen.labels()
    assert "ascending" == seen.page.get_by_role("columnheader", name="parameters").get_attribute(
        "aria-sort"
    )
    head.click()
    assert order == seen.labels()
    assert "descending" == seen.page.get_by_role("columnheader", name="total time").get_attribute(
        "aria-sort"
    )
    seen.page.get_by_label("flat").check()
    seen.page.get_by_role("button", name="module", exact=True).click()
    assert ["(model)", "encoder", "encoder.0", "encoder.1", "head"] == seen.labels()


def test_rows_are_filtered_by_name_class_and_pattern(page_of: Callable[..., Seen]) -> None:
    """A filter keeps the modules that match and the modules above them.

    An invalid regular expression is reported and filters nothing.
    """
    seen = page_of(small_profile())
    seen.modules()
    field = seen.page.get_by_label("filter by name or class")
    field.fill("gelu")
    assert ["(model)", "encoder", "1"] == seen.labels()
    assert "1 of 5 match" == seen.page.locator(".bar-of-controls .quiet").inner_text()
    seen.page.get_by_label("regex").check()
    field.fill("^head$|[.]0")
    assert ["(model)", "encoder", "0", "head"] == seen.labels()
    field.fill("(")
    assert 5 == len(seen.labels())
    assert "invalid regular expression" in seen.page.locator(".bar-of-controls .quiet").inner_text()
    field.fill("nothing is called so")
    assert [] == seen.labels()


def timed_blocks(*milliseconds: float) -> Profile:
    """Return a profile of blocks with the same work but different times, and a head.

    Each block has an `fc` that takes the given milliseconds in forward and twice as long in
    backward. The head takes 4 ms and 8 ms.
    """
    rows = {"": {"class_name": "Block"}, "blocks": {"class_name": "Block"}}
    leaves: dict[str, float] = {}
    for number, forward in enumerate(milliseconds):
        rows[f"blocks.{number}"] = {"class_name": "Block"}
        rows[f"blocks.{number}.fc"] = {"class_name": "Linear"}
        leaves[f"blocks.{number}.fc"] = forward
    rows["head"] = {"class_name": "Linear"}
    leaves["head"] = 4.0
    cells = []
    own: dict[tuple[str, Phase], float] = {}
    for name, forward in leaves.items():
        cells.append(product(name, "aten::mm", "forward", macs=100, bytes_moved=100))
        cells.append(product(name, "aten::mm", "backward", macs=100, bytes_moved=100))
        own[name, "forward"] = forward * 1e-3
        own[name, "backward"] = 2 * forward * 1e-3
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases={"forward": 0.03, "backward": 0.06})
    of_run = run(kind="training", stage="train")
    return clocked(profile(rows, cells, run=of_run, steps=(step,)), own)


def test_what_takes_the_time_comes_first(page_of: Callable[..., Seen]) -> None:
    """Rows are sorted by time first, and identical blocks share a row with their sum or their mean.

    The blocks take 3, 6, 9 and 12 ms, so together 30 of the step's 100 ms, and 7.5 ms on average.
    The head takes 12 ms and comes after them.
    """
    seen = page_of(timed_blocks(1, 2, 3, 4))
    seen.modules()
    assert ["(model)", "blocks", "0…3", "fc", "head"] == seen.labels()
    expected = {"": 0.042, "blocks": 0.03, "blocks.0": 0.03, "blocks.0.fc": 0.03, "head": 0.012}
    times = {name: float(text) for name, text in seen.shown("total time").items()}
    assert pytest.approx(expected) == times
    assert pytest.approx(0.3) == float(seen.shown("share of the step")["blocks"])
    seen.page.get_by_label("mean of identical modules").check()
    assert pytest.approx(0.0075) == float(seen.shown("total time")["blocks.0"])


def test_an_unknown_time_says_why(page_of: Callable[..., Seen]) -> None:
    """The tooltip of an unknown time gives the reason, here that the backward time is missing."""
    cells = [
        product("a", "mm", "forward", macs=1, bytes_moved=1),
        product("a", "mm", "backward", macs=1, bytes_moved=1),
        product("b", "mm", "forward", macs=1, bytes_moved=1),
        product("b", "mm", "backward", macs=1, bytes_moved=1),
    ]
    # The backward of `a` has work, but no time.
    own: dict[tuple[str, Phase], float] = {
        ("a", "forward"): 1.0,
        ("b", "forward"): 1.0,
        ("b", "backward"): 1.0,
    }
    seen = page_of(clocked(profile({"": {}, "a": {}, "b": {}}, cells), own))
    seen.modules()
    title = (
        seen.page.locator(ROW, has_text="a")
        .locator('.number[title^="total time"]')
        .last.get_attribute("title")
    )
    assert (
        "total time: unknown\nthe module ran in backward, but its hooks measured no time there"
        == title
    )


def test_classes_have_colours_of_their_own(page_of: Callable[..., Seen]) -> None:
    """Each of the first 22 classes has its own colour, and all other classes are grey.

    There are 11 plain colours and the same 11 with stripes. Of 24 classes, the legend lists 12.
    """
    kinds = {f"m{number:02}": f"Class{number}" for number in range(23)}
    cells = [product(name, "mm", "forward", macs=1, bytes_moved=1) for name in kinds]
    counted = profile({"": {}, **{name: {} for name in kinds}}, cells)
    modules = {
        name: replace(module, class_name=kinds.get(name, "Root"))
        for name, module in counted.modules.items()
    }
    seen = page_of(replace(counted, modules=modules))
    seen.modules()
    drawn = seen.page.locator(".icicle .block").evaluate_all(
        "bars => bars.map((bar) => bar.style.background)"
    )
    bars_by_colour = Counter(drawn)
    assert 24 == len(drawn)
    # 22 colours of one class each, and grey
    assert 23 == len(bars_by_colour)
    assert 2 == bars_by_colour["var(--rest)"]
    assert 11 == sum("gradient" in colour for colour in bars_by_colour)
    assert 12 == seen.page.locator(".icicle-head .legend .key").count()
    assert "12 more" == seen.page.locator(".icicle-head .legend .quiet").inner_text()


def test_the_icicle_has_the_shares_and_zooms(page_of: Callable[..., Seen]) -> None:
    """The widths of the chart's bars are shares of the time, and the chart works with the keyboard.

    Of 42 ms, the blocks have 30 in one bar, and the head has 12. Enter chooses the row of a bar,
    Space zooms to it, and a click on a link above the chart zooms out.
    """
    seen = page_of(timed_blocks(1, 2, 3, 4))
    seen.modules()
    bars = seen.page.locator(".icicle .block")
    assert ["(model)", "blocks", "0…3", "fc", "head"] == bars.all_inner_texts()
    widths = bars.evaluate_all("bars => bars.map((bar) => parseFloat(bar.style.width))")
    assert pytest.approx([100, 500 / 7, 500 / 7, 500 / 7, 200 / 7], rel=1e-4) == widths
    chart = seen.page.locator(".icicle")
    caption = seen.page.locator(".icicle-caption")
    chart.focus()
    for key in ("ArrowDown", "ArrowRight"):
        chart.press(key)
    assert (
        "head Linear: total time 12.0 ms · self 12.0 ms · 12.0 % of the step"
        == caption.inner_text()
    )
    chart.press("Enter")
    assert "head" == seen.page.locator(f"{ROW}.chosen .name").get_attribute("title")
    for key in ("Home", "ArrowDown", " "):
        chart.press(key)
    assert ["blocks", "0…3", "fc"] == bars.all_inner_texts()
    seen.page.get_by_role("navigation", name="zoomed to").get_by_role(
        "button", name="(model)"
    ).click()
    assert 5 == bars.count()


def test_the_icicle_zooms_with_the_wheel_and_shows_what_is_searched(
    page_of: Callable[..., Seen],
) -> None:
    """The mouse wheel zooms to the bar at the pointer and out again; a filter marks bars.

    The address keeps the zoom.
    """
    seen = page_of(timed_blocks(1, 2, 3, 4))
    seen.modules()
    bars = seen.page.locator(".icicle .block")
    bars.get_by_text("blocks", exact=True).hover()
    seen.page.mouse.wheel(0, -100)
    seen.page.locator(".crumbs b", has_text="blocks").wait_for()
    seen.page.reload()
    seen.page.locator(".crumbs b", has_text="blocks").wait_for()
    bars.first.hover()
    seen.page.mouse.wheel(0, 100)
    seen.page.locator(".crumbs b", has_text="(model)").wait_for()
    seen.page.get_by_label("filter by name or class").fill("head")
    assert ["head"] == seen.page.locator(".icicle .found").all_inner_texts()


def test_the_tree_is_walked_with_the_keyboard(page_of: Callable[..., Seen]) -> None:
    """The left key closes a row or goes to its parent, and the right key opens a row.

    A screen reader finds the current row in `aria-activedescendant`.
    """
    seen = page_of(small_profile())
    seen.modules()
    grid = seen.page.locator(GRID)
    grid.focus()
    for key in ("ArrowDown", "ArrowLeft"):
        grid.press(key)
    assert ["(model)", "encoder", "head"] == seen.labels()
    assert "false" == seen.page.locator(ROW).nth(1).get_attribute("aria-expanded")
    assert "row-1" == grid.get_attribute("aria-activedescendant")
    grid.press("ArrowRight")
    assert 5 == len(seen.labels())
    for key in ("End", "ArrowLeft"):
        grid.press(key)
    assert "row-0" == grid.get_attribute("aria-activedescendant")
    seen.page.get_by_role("button", name="parameters").press("Enter")
    assert ["(model)", "encoder", "0", "1", "head"] == seen.labels()
    assert "descending" == seen.page.get_by_role("columnheader", name="parameters").get_attribute(
        "aria-sort"
    )


def test_the_address_keeps_what_is_looked_at(page_of: Callable[..., Seen]) -> None:
    """After a reload, the view, the filter and the order are the same."""
    seen = page_of(small_profile())
    seen.modules()
    seen.page.get_by_role("button", name="parameters").click()
    seen.page.get_by_label("filter by name or class").fill("head")
    seen.page.reload()
    seen.page.locator(ROW).first.wait_for()
    assert ["(model)", "head"] == seen.labels()
    assert "descending" == seen.page.get_by_role("columnheader", name="parameters").get_attribute(
        "aria-sort"
    )


def test_names_are_text(page_of: Callable[..., Seen]) -> None:
    """Names with HTML or scripts, and names such as `__proto__`, are shown as text."""
    seen = page_of(hostile_profile())
    assert IMAGE in seen.page.locator("h1").inner_text()
    assert SCRIPT in seen.page.locator(".facts").inner_text()
    seen.modules()
    assert ["(model)", IMAGE, SCRIPT, "__proto__"] == seen.labels()
    assert 0 == seen.page.locator("img").count()
    # The three scripts are the data of the window, the data of the first screen, and the code.
    assert 3 == seen.page.locator("script").count()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Write the page of 20,000 modules, and return the name of the last module and the path."""
    given = profile_of(20_000)
    path = tmp_path_factory.mktemp("large") / "page.html"
    save(analyze(given), path)
    last = list(given.modules)[-1]
    return last, path


def test_20_000_modules_fit_a_mail(large: tuple[str, Path]) -> None:
    """A page of 20,000 modules is smaller than 5 MB, so it can be sent by mail."""
    _, path = large
    assert path.stat().st_size < 5e6


def test_20_000_modules_are_drawn_a_screen_at_a_time(
    large: tuple[str, Path], opening: Callable[..., Seen]
) -> None:
    """The document has only the rows on the screen, also after scrolling to the end."""
    last, path = large
    seen = opening(path.as_uri())
    seen.modules()
    seen.page.get_by_label("flat").check()
    grid = seen.page.locator(GRID)
    assert "20001" == grid.get_attribute("aria-rowcount")
    grid.press("End")
    seen.page.locator("#row-19999").wait_for()
    assert last == seen.labels()[-1]
    assert seen.page.locator(ROW).count() < 100


def test_a_profile_of_one_module_and_without_times(page_of: Callable[..., Seen]) -> None:
    """Without submodules and times, the page says what is unknown and has no time column."""
    cells = [product("", "aten::mm", "forward", macs=2**60 + 1, bytes_moved=1)]
    seen = page_of(untimed(profile({"": {"class_name": "Linear"}}, cells)))
    assert 1 == seen.page.locator(".of-window").get_by_text("Unknown:").count()
    assert "No unprofiled step was timed." in seen.page.locator(".do-next").inner_text()
    seen.modules()
    assert ["(model)"] == seen.labels()
    assert {"": "1,152,921,504,606,846,977"} == seen.shown("forward MACs")
    assert 0 == seen.page.get_by_role("columnheader", name="time").count()


def test_it_is_dark_where_the_system_is_or_where_it_is_asked_for(
    page_of: Callable[..., Seen],
) -> None:
    """The theme follows the system unless the user chooses another one."""

    def ground(seen: Seen) -> str:
        return seen.page.evaluate("getComputedStyle(document.body).backgroundColor")

    white = "rgb(255, 255, 255)"
    black = "rgb(20, 24, 30)"
    light = page_of(small_profile(), color_scheme="light")
    dark = page_of(small_profile(), color_scheme="dark")
    assert white == ground(light)
    assert black == ground(dark)
    light.page.get_by_label("theme").select_option("dark")
    dark.page.get_by_label("theme").select_option("light")
    assert black == ground(light)
    assert white == ground(dark)


def test_the_tab_shows_what_was_logged(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The tab shows the latest window first, lists unreadable values, and can show another window.

    It sends no request to another host.
    """
    with SummaryWriter(tmp_path / "run") as writer:
        write(writer, "broken", b"?")
        lflops.tensorboard.log(writer, hostile_profile(), 1)
        lflops.tensorboard.log(writer, small_profile(), 2, tag="second")
    with tab(opening, tmp_path, expected=3) as (_, frame, _):
        assert "Model, fit" in frame.locator("h1").inner_text()
        assert "broken of run run, step 0 is unreadable" in frame.locator(".problems").inner_text()
        frame.get_by_role("tab", name="Modules").click()
        labels = frame.locator(f"{ROW} .name .label")
        assert ["(model)", "encoder", "0", "1", "head"] == labels.all_inner_texts()
        frame.get_by_label("stage").select_option("lflops/count/profile")
        frame.locator(ROW).filter(has_text="img src").first.wait_for()
        assert ["(model)", IMAGE, SCRIPT, "__proto__"] == labels.all_inner_texts()
        assert 0 == frame.locator("img").count()


def test_a_reload_of_tensorboard_shows_the_same_again(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The address of TensorBoard keeps the view, its filter and the chosen window."""
    with SummaryWriter(tmp_path) as writer:
        for step in (1, 2):
            lflops.tensorboard.log(writer, small_profile(), step)
    with tab(opening, tmp_path, expected=2) as (seen, frame, _):
        frame.get_by_label("step", exact=True).select_option("1")
        frame.get_by_role("tab", name="Modules").click()
        frame.get_by_label("filter by name or class").fill("head")
        seen.page.reload()
        frame.locator(ROW).first.wait_for()
        assert ["(model)", "head"] == frame.locator(f"{ROW} .name .label").all_inner_texts()
        assert "1" == frame.get_by_label("step", exact=True).input_value()


def test_the_tab_offers_a_new_window_and_never_switches_by_itself(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """When TensorBoard reloads, the tab offers the new window but keeps the current view.

    The trend of the current run has one more window.
    """
    with SummaryWriter(tmp_path / "a") as writer, SummaryWriter(tmp_path / "b") as other:
        for step in (1, 2):
            lflops.tensorboard.log(writer, small_profile(), step)
        writer.flush()
        with tab(opening, tmp_path, expected=2) as (seen, frame, server):
            assert "2" == frame.get_by_label("step", exact=True).input_value()
            lflops.tensorboard.log(writer, small_profile(), 3)
            lflops.tensorboard.log(other, hostile_profile(), 7, tag="lflops/fit/profile")
            for each in (writer, other):
                each.flush()
            server.windows(expected=4)
            seen.page.get_by_title("Reload").or_(
                seen.page.locator("app-header-reload button")
            ).first.click()
            news = frame.locator(".news")
            news.get_by_text("New window at step 7 of run b").wait_for()
            assert "Model, fit" == frame.locator("h1").inner_text()
            assert ["1", "2", "3"] == frame.get_by_label("step", exact=True).locator(
                "option"
            ).all_inner_texts()
            frame.get_by_label("step over 3 windows").wait_for()
            news.get_by_role("button", name="show").click()
            frame.locator("h1", has_text="img src").wait_for()
            assert 0 == news.get_by_role("button").count()


def test_a_window_has_one_step_wherever_it_is_named(
    opening: Callable[..., Seen], tmp_path: Path
) -> None:
    """The tab shows the step of the window everywhere, and never the step at which it was logged.

    The windows of steps 8 and 25 were logged at steps 12 and 29.
    """
    with SummaryWriter(tmp_path) as writer:
        for step, logged in ((8, 12), (25, 29)):
            given = small_profile()
            window = replace(given, run=replace(given.run, step=step))
            lflops.tensorboard.log(writer, window, logged)
    with tab(opening, tmp_path, expected=2) as (_, frame, _):
        assert ["8", "25"] == frame.get_by_label("step", exact=True).locator(
            "option"
        ).all_inner_texts()
        assert "29" not in frame.locator("body").inner_text()
        assert "step 8" in frame.locator(".trend-chart").first.get_attribute("aria-label")


def test_back_and_forward_go_from_view_to_view(page_of: Callable[..., Seen]) -> None:
    """Back and forward change the view; a change within a view has no entry in the history."""
    seen = page_of(small_profile())
    seen.modules()
    seen.page.get_by_label("filter by name or class").fill("head")
    seen.view("Memory")
    for act, expected in (
        (seen.page.go_back, "modules"),
        (seen.page.go_back, "run"),
        (seen.page.go_forward, "modules"),
    ):
        act()
        seen.page.locator(f"section.{expected}").wait_for()
    assert ["(model)", "head"] == seen.labels()


def test_the_tabs_are_walked_with_the_keyboard(page_of: Callable[..., Seen]) -> None:
    """Right and left go through the tabs in a circle; Home and End go to the first and last."""
    seen = page_of(small_profile())
    seen.page.get_by_role("tab", name="Run").focus()
    for key, expected in (
        ("End", "Ranks"),
        ("ArrowRight", "Run"),
        ("ArrowLeft", "Ranks"),
        ("Home", "Run"),
    ):
        seen.page.keyboard.press(key)
        assert expected == seen.page.evaluate("document.activeElement.textContent")


def test_a_view_scrolls_with_the_keyboard(page_of: Callable[..., Seen]) -> None:
    """Keys scroll the view right after the page opens, without a click into it."""
    seen = page_of(small_profile())
    seen.page.set_viewport_size({"width": 1280, "height": 300})
    seen.page.keyboard.press("End")
    assert seen.page.evaluate("document.querySelector('main').scrollTop") > 100
    seen.page.keyboard.press("Home")
    assert 0 == seen.page.evaluate("document.querySelector('main').scrollTop")


NUMBERS = [
    0,
    1,
    999,
    1000,
    1005,
    1015,
    999_994,
    999_995,
    999_999,
    1 << 20,
    (1 << 20) + 5243,
    1 << 53,
    10**15 - 1,
    10**33,
    0.5,
    0.001,
    2.675,
]
SHARES = [0, -0.0004, -0.25, 0.0004, 0.00051, 0.125, 0.5, 1, 2.5]
SECONDS = [0, 1e-9, 2.5e-7, 1.5e-5, 2e-4, 0.0767, 0.9994, 1, 12.345, 3600]


def as_javascript(value: float) -> float | str:
    """Return a number as payloads have it: counts of 2^53 and more are strings of digits."""
    if isinstance(value, int) and value >= 1 << 53:
        return str(value)
    return value


def test_numbers_read_as_in_the_report(browser: Any) -> None:
    """The page formats counts, bytes, seconds and shares exactly as `lflops.units` does."""
    code = """async ([name, values]) => {
        const all = await import('/lib/format.js');
        return values.map(all[name]);
    }"""
    with bench(browser) as page:
        for function, values in (
            ("count", NUMBERS),
            ("size", NUMBERS),
            ("duration", SECONDS),
            ("percent", SHARES),
        ):
            in_page = [*map(as_javascript, values), None]
            in_python = [getattr(units, function)(value) for value in [*values, None]]
            assert in_python == page.evaluate(code, [function, in_page])


def test_the_step_s_bar_leaves_nothing_unnamed(page_of: Callable[..., Seen]) -> None:
    """The rest of the step is a part too.

    Data, forward and backward take 0.2, 1 and 1.5 ms of 3 ms, so 0.3 ms are left.
    """
    parts = page_of(small_profile()).page.locator(".parts-of-phase li")
    assert "other 300 µs, 10.0 %" in parts.last.inner_text()


def test_the_cards_are_findings_of_the_report(page_of: Callable[..., Seen]) -> None:
    """The sentences of the cards are sentences of the report's findings."""
    given = replace(
        timed_blocks(1, 2, 3, 4),
        run=run(kind="training", stage="train", hardware=Hardware("abacus", {"fp32": 1e6}, 1e9)),
    )
    seen = page_of(given)
    told = report_of(analyze(given)).verdict
    sentences = seen.page.locator(".action-card .sentence").all_inner_texts()
    assert sentences
    assert set(sentences) <= {finding.sentence for finding in told.findings}


def test_a_menu_closes_with_escape_or_by_a_click_beside_it(page_of: Callable[..., Seen]) -> None:
    """The menu stays open while columns are chosen, and closes with Escape or a click outside."""
    seen = page_of(small_profile())
    seen.modules()
    menu = seen.page.locator(".chooser")
    opener = seen.page.locator(".chooser summary")
    for close in (
        lambda: seen.page.keyboard.press("Escape"),
        lambda: seen.page.locator("h1").click(),
    ):
        opener.click()
        menu.locator("input").first.click()
        assert menu.get_attribute("open") is not None
        close()
        assert menu.get_attribute("open") is None


def test_the_page_shows_each_fact_as_the_report_has_it(page_of: Callable[..., Seen]) -> None:
    """Every fact and part of the report is on the page with the same label and text."""
    given = replace(
        timed_blocks(1, 2, 3, 4),
        run=run(kind="training", stage="train", hardware=Hardware("abacus", {"fp32": 1e6}, 1e9)),
    )
    report = report_of(analyze(given))
    of_window = page_of(given).page.locator(".of-window")
    facts = [*report.speed, *report.model, *report.subject, *report.remarks]
    figure_labels = of_window.locator(".figure-label").all_inner_texts()
    figure_values = of_window.locator(".figure-value").all_inner_texts()
    shown = dict(zip(figure_labels, figure_values, strict=True))
    fact_labels = of_window.locator(".facts dt").all_inner_texts()
    fact_texts = of_window.locator(".facts dd").all_inner_texts()
    for label, text in zip(fact_labels, fact_texts, strict=True):
        shown.setdefault(label, text)
    # If several facts have the same label, the first counts.
    expected = {fact.label: fact.text for fact in reversed(facts)}
    for label, text in expected.items():
        assert shown.get(label, "").startswith(text), label
    lines = of_window.locator(".parts li").all_inner_texts()
    parts = [f"{part.label} {part.text}" for part in report.breakdown]
    assert parts == [text.splitlines()[0] for text in lines]


def test_the_first_screen_has_the_numbers_of_the_json(page_of: Callable[..., Seen]) -> None:
    """The first screen shows its figures, cards and phases as `first_screen` computes them.

    The phases add up to the mean of the step.
    """
    given = replace(
        timed_blocks(1, 2, 3, 4),
        run=run(kind="training", stage="train", hardware=Hardware("abacus", {"fp32": 1e6}, 1e9)),
    )
    screen = first_screen(window_summary(analyze(given)), None)
    page = page_of(given).page
    section = page.locator("section.run")
    values = section.locator("> .figures .figure-value").all_inner_texts()
    labels = section.locator("> .figures .figure-label").all_inner_texts()
    assert [fact.text for fact in screen.figures] == values
    assert [fact.label for fact in screen.figures] == labels
    # The page shows at most three cards.
    expected_cards = [(card.text, card.title) for card in screen.cards[:3]]
    cards = []
    for card in page.locator(".action-card").all():
        saving = card.locator(".saving").inner_text()
        cause = card.locator(".cause").inner_text()
        cards.append((saving, cause))
    assert expected_cards == cards
    phases = page.locator(".parts-of-phase li").all_inner_texts()
    assert [f"{part.label} {part.text}" for part in screen.phases] == phases
    assert screen.steps is not None
    assert pytest.approx(screen.steps.mean) == sum(part.seconds for part in screen.phases)
    assert screen.steps.said in section.inner_text()
