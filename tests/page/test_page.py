"""The page and the tab in a real browser: what stands around the views, and the modules."""

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
from lflops.report.report import report_of
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
    """As the page writes an exact count."""
    return f"{value:,}"


def test_every_module_has_the_profile_s_numbers(page_of: Callable[..., Seen]) -> None:
    """All phases, to the last digit; and nothing but the file itself is asked for."""
    given = small_profile()
    seen = page_of(given)
    seen.modules()
    seen.page.locator(".chooser summary").click()
    for column in seen.page.locator(".chooser input").all():
        column.check()
    for phase in PHASES:
        if any(module.work(phase).macs for module in given.modules.values()):
            expected = {
                name or "": digits(module.work(phase).macs)
                for name, module in given.modules.items()
            }
            assert expected == seen.shown(f"{phase} MACs")
    assert {
        name: digits(module.parameters) for name, module in given.modules.items()
    } == seen.shown("parameters")
    assert {
        name: str(module.forward.seconds.median) for name, module in given.modules.items()
    } == seen.shown("forward time")
    assert {"file:"} == {address.split("//")[0] for address in seen.asked}


def test_own_values_are_those_without_what_is_below(page_of: Callable[..., Seen]) -> None:
    """512 of the encoder's linear layer, 128 of the head, and the time of containers is unknown."""
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
    """The most first, then the least, then the model's order again; flat, all of them together."""
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
    """What is above a match stays; a pattern that is none is said to be none, and filters nothing."""
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
    """Blocks that do the same work, each with an `fc` of so many milliseconds forward and twice as many backward; a head of 4 and 8."""
    names = [
        "",
        "blocks",
        *(f"blocks.{i}{part}" for i in range(len(milliseconds)) for part in ("", ".fc")),
        "head",
    ]
    leaves = [name for name in names if name.endswith("fc") or name == "head"]
    cells = [
        product(name, "aten::mm", phase, macs=100, bytes_moved=100)
        for name in leaves
        for phase in ("forward", "backward")
    ]
    seconds = {f"blocks.{i}.fc": each for i, each in enumerate(milliseconds)} | {"head": 4.0}
    own: dict[tuple[str, Phase], float] = {
        (name, "forward"): each * 1e-3 for name, each in seconds.items()
    }
    own |= {(name, "backward"): 2 * each * 1e-3 for name, each in seconds.items()}
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases={"forward": 0.03, "backward": 0.06})
    kinds = {name: {"class_name": "Linear" if name in leaves else "Block"} for name in names}
    return clocked(
        profile(kinds, cells, run=run(kind="training", stage="train"), steps=(step,)), own
    )


def test_what_takes_the_time_comes_first(page_of: Callable[..., Seen]) -> None:
    """Blocks of 3, 6, 9 and 12 ms.

    30 of 100 ms together in one row, and 7.5 in the mean of one; the head's 12 come after.
    """
    seen = page_of(timed_blocks(1, 2, 3, 4))
    seen.modules()
    assert ["(model)", "blocks", "0…3", "fc", "head"] == seen.labels()
    expected = {"": 0.042, "blocks": 0.03, "blocks.0": 0.03, "blocks.0.fc": 0.03, "head": 0.012}
    assert {name: pytest.approx(each) for name, each in expected.items()} == {
        name: float(text) for name, text in seen.shown("total time").items()
    }
    assert pytest.approx(0.3) == float(seen.shown("share of the step")["blocks"])
    seen.page.get_by_label("mean of repeats").check()
    assert pytest.approx(0.0075) == float(seen.shown("total time")["blocks.0"])


def test_an_unknown_time_says_why(page_of: Callable[..., Seen]) -> None:
    """Of a module that also ran in backward, where it has no time."""
    cells = [
        product(name, "mm", phase, macs=1, bytes_moved=1)
        for name in "ab"
        for phase in ("forward", "backward")
    ]
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
    assert "total time: unknown\nit ran in backward, but its hooks measured no time there" == title


def test_classes_have_colours_of_their_own(page_of: Callable[..., Seen]) -> None:
    """Eleven plain and the same eleven striped, each once; of 24 classes the last two are grey.

    The legend lists twelve.
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
    times = Counter(drawn)
    assert (24, 23, 2) == (len(drawn), len(times), times["var(--rest)"])
    assert 11 == sum("gradient" in each for each in times)
    assert 12 == seen.page.locator(".icicle-head .legend .key").count()
    assert "12 more" == seen.page.locator(".icicle-head .legend .quiet").inner_text()


def test_the_icicle_has_the_shares_and_zooms(page_of: Callable[..., Seen]) -> None:
    """Of 42 ms the blocks have 30, in one bar, and the head 12.

    Enter chooses the row; a space zooms in, and a crumb goes back.
    """
    seen = page_of(timed_blocks(1, 2, 3, 4))
    seen.modules()
    bars = seen.page.locator(".icicle .block")
    assert ["(model)", "blocks", "0…3", "fc", "head"] == bars.all_inner_texts()
    widths = bars.evaluate_all("bars => bars.map((bar) => parseFloat(bar.style.width))")
    assert pytest.approx([100, 500 / 7, 500 / 7, 500 / 7, 200 / 7], rel=1e-4) == widths
    chart, caption = seen.page.locator(".icicle"), seen.page.locator(".icicle-caption")
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
    """Into the branch below the pointer and out again; what matches stays bright.

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
    """Left closes and goes up, right opens; the row is the one that a screen reader is told of."""
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
    """Whoever opens it again sees the same view, filter and order."""
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
    """An image that would run a script, the end of a script, and a name that JavaScript knows.

    All shown as they are; nothing runs.
    """
    seen = page_of(hostile_profile())
    assert IMAGE in seen.page.locator("h1").inner_text()
    assert SCRIPT in seen.page.locator(".facts").inner_text()
    seen.modules()
    assert ["(model)", IMAGE, SCRIPT, "__proto__"] == seen.labels()
    assert 0 == seen.page.locator("img").count()
    # The data of the window and of the first screen, and the code.
    assert 3 == seen.page.locator("script").count()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of the last of 20,000 modules, and their page."""
    given = profile_of(20_000)
    save(analyze(given), path := tmp_path_factory.mktemp("large") / "page.html")
    return list(given.modules)[-1], path


def test_20_000_modules_fit_a_mail(large: tuple[str, Path]) -> None:
    """Below 5 MB."""
    assert large[1].stat().st_size < 5e6


def test_20_000_modules_are_drawn_a_screen_at_a_time(
    large: tuple[str, Path], opening: Callable[..., Seen]
) -> None:
    """The document has what is on the screen, wherever it is scrolled to."""
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
    """The root alone; what is unknown is said to be, and no column is there for it."""
    seen = page_of(
        untimed(
            profile(
                {"": {"class_name": "Linear"}},
                [product("", "aten::mm", "forward", macs=2**60 + 1, bytes_moved=1)],
            )
        )
    )
    assert 1 == seen.page.locator(".of-window").get_by_text("Unknown:").count()
    assert "No unprofiled step was timed." in seen.page.locator(".do-next").inner_text()
    seen.modules()
    assert ["(model)"] == seen.labels()
    assert {"": "1,152,921,504,606,846,977"} == seen.shown("forward MACs")
    assert 0 == seen.page.get_by_role("columnheader", name="time").count()


def test_it_is_dark_where_the_system_is_or_where_it_is_asked_for(
    page_of: Callable[..., Seen],
) -> None:
    """Light and dark by the system, and either by choice."""

    def ground(seen: Seen) -> str:
        return seen.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = (
        page_of(small_profile(), color_scheme="light"),
        page_of(small_profile(), color_scheme="dark"),
    )
    assert ("rgb(255, 255, 255)", "rgb(20, 24, 30)") == (ground(light), ground(dark))
    light.page.get_by_label("theme").select_option("dark")
    dark.page.get_by_label("theme").select_option("light")
    assert ("rgb(20, 24, 30)", "rgb(255, 255, 255)") == (ground(light), ground(dark))


def test_the_tab_shows_what_was_logged(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The latest window first.

    Another one by choice; what cannot be read is named; no request leaves this host.
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
    """The view, its filter and the window that was chosen are in TensorBoard's own address."""
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
    """When TensorBoard reloads.

    The view stays as it is, its trend grows, and the new window, of another run, is one click away.
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
    """Logged when the training was at steps 12 and 29, of windows at steps 8 and 25.

    The second number is nowhere.
    """
    with SummaryWriter(tmp_path) as writer:
        for step, logged in ((8, 12), (25, 29)):
            given = small_profile()
            lflops.tensorboard.log(
                writer, replace(given, run=replace(given.run, step=step)), logged
            )
    with tab(opening, tmp_path, expected=2) as (_, frame, _):
        assert ["8", "25"] == frame.get_by_label("step", exact=True).locator(
            "option"
        ).all_inner_texts()
        assert "29" not in frame.locator("body").inner_text()
        assert "step 8" in frame.locator(".trend-chart").first.get_attribute("aria-label")


def test_back_and_forward_go_from_view_to_view(page_of: Callable[..., Seen]) -> None:
    """As links do; a change within a view is no step."""
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
    """Right and left in a circle, Home and End."""
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
    """From where the page opens, without a click in the view."""
    seen = page_of(small_profile())
    seen.page.set_viewport_size({"width": 1280, "height": 300})
    seen.page.keyboard.press("End")
    assert (
        seen.page.evaluate(
            "(() => { const main = document.querySelector('main'); return main.scrollTop; })()"
        )
        > 100
    )
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


def test_numbers_read_as_in_the_report(browser: Any) -> None:
    """Counts, bytes, seconds and shares: the page's text is that of `units`."""
    code = "async ([name, values]) => { const all = await import('/lib/format.js'); return values.map(all[name]); }"
    with bench(browser) as page:
        for function, values in (
            ("count", NUMBERS),
            ("size", NUMBERS),
            ("duration", SECONDS),
            ("percent", SHARES),
        ):
            given = [
                str(value) if isinstance(value, int) and value >= 1 << 53 else value
                for value in values
            ]
            assert [getattr(units, function)(value) for value in [*values, None]] == page.evaluate(
                code, [function, [*given, None]]
            )


def test_the_step_s_bar_leaves_nothing_unnamed(page_of: Callable[..., Seen]) -> None:
    """0.2 ms of data, 1 of forward and 1.5 of backward are 2.7 of 3 ms: the rest is named too."""
    parts = page_of(small_profile()).page.locator(".parts-of-phase li")
    assert "other 300 µs, 10.0 %" in parts.last.inner_text()


def test_the_cards_are_findings_of_the_report(page_of: Callable[..., Seen]) -> None:
    """Their sentences are those of the log."""
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
    """The columns' menu stays while columns are chosen in it."""
    seen = page_of(small_profile())
    seen.modules()
    menu, opener = seen.page.locator(".chooser"), seen.page.locator(".chooser summary")
    for act in (
        lambda: seen.page.keyboard.press("Escape"),
        lambda: seen.page.locator("h1").click(),
    ):
        opener.click()
        menu.locator("input").first.click()
        assert menu.get_attribute("open") is not None
        act()
        assert menu.get_attribute("open") is None


def test_the_page_shows_each_fact_as_the_report_has_it(page_of: Callable[..., Seen]) -> None:
    """Every part, figure and fact of the window, by its text in the document."""
    given = replace(
        timed_blocks(1, 2, 3, 4),
        run=run(kind="training", stage="train", hardware=Hardware("abacus", {"fp32": 1e6}, 1e9)),
    )
    report, page = report_of(analyze(given)), page_of(given).page
    facts = [*report.speed, *report.model, *report.subject, *report.remarks]
    of_window = page.locator(".of-window")
    shown = dict(
        zip(
            of_window.locator(".figure-label").all_inner_texts(),
            of_window.locator(".figure-value").all_inner_texts(),
            strict=True,
        )
    )
    for label, text in zip(
        of_window.locator(".facts dt").all_inner_texts(),
        of_window.locator(".facts dd").all_inner_texts(),
        strict=True,
    ):
        shown.setdefault(label, text)
    expected = {fact.label: fact.text for fact in reversed(facts)}
    assert dict.fromkeys(expected, True) == {
        label: shown.get(label, "").startswith(text) for label, text in expected.items()
    }
    assert [f"{part.label} {part.text}" for part in report.breakdown] == [
        text.splitlines()[0] for text in of_window.locator(".parts li").all_inner_texts()
    ]


def test_the_first_screen_has_the_numbers_of_the_json(page_of: Callable[..., Seen]) -> None:
    """Its figures, cards and phases; the phases add up to the step, also as they are written."""
    given = replace(
        timed_blocks(1, 2, 3, 4),
        run=run(kind="training", stage="train", hardware=Hardware("abacus", {"fp32": 1e6}, 1e9)),
    )
    screen = first_screen(window_summary(analyze(given)), None)
    page = page_of(given).page
    section = page.locator("section.run")
    assert [fact.text for fact in screen.figures] == section.locator(
        "> .figures .figure-value"
    ).all_inner_texts()
    assert [fact.label for fact in screen.figures] == section.locator(
        "> .figures .figure-label"
    ).all_inner_texts()
    cards = page.locator(".action-card")
    shown = screen.cards[:3]
    assert [(card.text, card.title) for card in shown] == [
        (card.locator(".saving").inner_text(), card.locator(".cause").inner_text())
        for card in cards.all()
    ]
    assert [f"{part.label} {part.text}" for part in screen.phases] == page.locator(
        ".parts-of-phase li"
    ).all_inner_texts()
    assert screen.steps is not None
    assert pytest.approx(screen.steps.mean) == sum(part.seconds for part in screen.phases)
    assert screen.steps.said in section.inner_text()
