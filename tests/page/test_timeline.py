"""The view Timeline in a real browser.

One step in time, its keyboard, its zoom, and memory on the same axis.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from msgspec.structs import replace

from lflops.profile.timeline import ModuleSlice, StepTimeline, TimedWork
from lflops.schedule import Schedule
from tests.support.browser import Seen, tab
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import small_profile

pytestmark = LIGHTNINGS_WARNINGS


WALKED = """(node, key) => Array.from({ length: 20 }, (_, number) => {
  node.dispatchEvent(new KeyboardEvent("keydown", { key: number ? key : "Home" }));
  return node.closest("section").querySelector(".timeline-caption b").textContent;
})"""
"""What is said of the bars of the first row, one after the other."""


def opened(seen: Seen) -> Any:
    """The view, drawn."""
    seen.view("Timeline")
    seen.page.locator(".step-timeline svg").wait_for()
    return seen.page.locator("section.timeline-view")


def labels(view: Any) -> list[str]:
    """The texts in the bars."""
    return view.locator(".bar-label").all_text_contents()


def caption(view: Any) -> str:
    """What is said of the chosen bar."""
    return view.locator(".timeline-caption").inner_text()


def test_modules_operators_and_kernels_share_an_axis(page_of: Callable[..., Seen]) -> None:
    """Two ranks, the first with operators and kernels.

    The encoder has 0.7 of 3 ms, so as much of the width.
    """
    view = opened(page_of(small_profile()))
    assert [
        "forward",
        "backward",
        "optimizer",
        "encoder",
        "head",
        "head",
        "encoder",
        "encoder.0",
        "encoder.1",
    ] == labels(view)[:9]
    headings = set(view.locator("svg .tick-label").all_text_contents())
    assert {"rank 0", "rank 1", "operators", "kernels", "stream 1", "live memory"} <= headings
    widths = [
        view.locator(f'[data-bar="{bar}"] rect').bounding_box()["width"] for bar in (0, 1)
    ]  # forward, and the encoder in it
    assert pytest.approx(0.7, abs=0.01) == widths[1] / widths[0]
    assert "2 shorter slices are left out" in view.inner_text()


def test_one_rank_can_be_chosen(page_of: Callable[..., Seen]) -> None:
    """The second had hooks on its modules, and has no operators."""
    seen = page_of(small_profile())
    view = opened(seen)
    seen.page.get_by_label("rank").select_option("1")
    seen.page.locator(".tick-label", has_text="modules").wait_for()
    assert not {"operators", "kernels"} & set(view.locator("svg .tick-label").all_text_contents())
    assert "A module-timing step" in view.inner_text()


def test_the_keyboard_goes_from_bar_to_bar_and_zooms(page_of: Callable[..., Seen]) -> None:
    """Down from forward to the encoder, right to the head, Enter to its row.

    A space zooms to it, 0 shows all again.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    view.locator(".step-timeline").focus()
    assert caption(view).startswith("forward 1.00 ms, 33.3 % of the step, starting at 0 s")
    for key, said in (
        ("ArrowDown", "encoder, forward 700"),
        ("ArrowRight", "head, forward 300"),
        ("ArrowUp", "forward 1.00 ms"),
    ):
        seen.page.keyboard.press(key)
        assert caption(view).startswith(said)
    seen.page.keyboard.press("ArrowDown")
    seen.page.keyboard.press(" ")
    zoomed = labels(view)
    assert "optimizer" not in zoomed
    assert "encoder" in zoomed
    seen.page.wait_for_function("() => location.hash.includes('timeline.from=')")
    seen.page.keyboard.press("0")
    assert "optimizer" in labels(view)
    seen.page.keyboard.press("Enter")
    seen.page.locator("section.modules .chosen", has_text="encoder").wait_for()


def test_the_wheel_zooms_and_a_drag_pans(page_of: Callable[..., Seen]) -> None:
    """Three turns make 1.5 ms of 3 of it.

    The optimizer's slice, from 2 ms on, is out of the picture, and comes in by a drag.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    box = view.locator(".step-timeline svg").bounding_box()
    seen.page.mouse.move(box["x"] + 150, box["y"] + 60)
    for _ in range(3):
        seen.page.mouse.wheel(0, -120)
    optimizer = view.locator(".bar-label", has_text="optimizer")
    optimizer.wait_for(state="detached")
    seen.page.mouse.move(box["x"] + 1000, box["y"] + 60)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + 200, box["y"] + 60, steps=3)
    seen.page.mouse.up()
    optimizer.wait_for()
    view.get_by_label("show the whole step").click()
    assert "forward" in labels(view)


def test_the_pointer_says_what_was_alive(page_of: Callable[..., Seen]) -> None:
    """`head` ran third in the counted step, and from 0.7 ms on in this one.

    3000 bytes were alive before it.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    view.locator('[data-bar="4"] rect').hover()
    assert "head, forward" in caption(view)
    assert "live memory at" in caption(view)
    assert "2.93 KiB" in caption(view)


def test_memory_is_drawn_where_no_operator_runs(page_of: Callable[..., Seen]) -> None:
    """In the optimizer's slice, behind the last operator, as much is alive as after it.

    The areas are as wide as the picture.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    view.locator(".bar-label", has_text="optimizer").dblclick(force=True)
    seen.page.wait_for_function("() => location.hash.includes('timeline.from=')")
    box, area = (
        view.locator(each).first.bounding_box()
        for each in (".step-timeline svg", ".step-timeline svg > path")
    )
    assert area["width"] > 0.85 * box["width"]
    assert area["height"] > 10


def test_names_in_time_are_text(page_of: Callable[..., Seen]) -> None:
    """Of modules, operators, kernels and phases."""
    slices = (ModuleSlice(IMAGE, SCRIPT, 0, 90, 0), ModuleSlice(IMAGE, SCRIPT, 0, 90, 1))
    work = (TimedWork(IMAGE, 0, 90),)
    step = StepTimeline(source="traced", length=100, slices=slices, operators=work, kernels=work)
    seen = page_of(replace(hostile_profile(), timelines=(step,)))
    view = opened(seen)
    assert [SCRIPT, IMAGE, IMAGE, IMAGE] == labels(view)
    assert 0 == seen.page.locator("img").count()


def test_without_a_step_there_is_no_tab(page_of: Callable[..., Seen]) -> None:
    """No empty chart."""
    seen = page_of(replace(small_profile(), timelines=()))
    assert 0 == seen.page.get_by_role("tab", name="Timeline").count()


def test_another_step_can_be_chosen(page_of: Callable[..., Seen]) -> None:
    """Step 7 of 100 ns is the median one; step 9 of 400 ns has another phase, and no memory."""
    steps = [
        StepTimeline(
            source="module_timing",
            step=number,
            length=length,
            slices=(ModuleSlice("", phase, 0, length, 0),),
        )
        for number, length, phase in ((7, 100, "forward"), (9, 400, "data"))
    ]
    seen = page_of(replace(small_profile(), timelines=tuple(steps), ranks=()))
    view = opened(seen)
    assert ["forward"] == labels(view)
    assert "Timeline of step 7, 100 ns" in view.inner_text()
    choice = seen.page.get_by_label("step of the timeline")
    assert ["step 7, 100 ns", "step 9, 400 ns"] == choice.locator("option").all_inner_texts()
    choice.select_option("9")
    seen.page.get_by_text("Timeline of step 9, 400 ns").wait_for()
    assert ["data wait"] == labels(view)
    assert "With trace=True, FlopsMonitor records operators as well." in view.inner_text()
    seen.page.reload()
    seen.page.get_by_text("Timeline of step 9, 400 ns").wait_for()


def test_a_training_is_shown_in_time(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """In the tab, from a real Trainer that traced.

    Modules in the order in which they ran, forward and back, above their operators.
    """
    fit(
        Classifier(),
        watching(trace=True, schedule=Schedule(wait=1, warmup=1, active=2)),
        logger=TensorBoardLogger(tmp_path),
    )
    with tab(opening, tmp_path, expected=1) as (_, frame, _):
        frame.get_by_role("tab", name="Timeline").click()
        frame.locator(".step-timeline svg").wait_for()
        assert {"modules", "operators", "live memory"} <= set(
            frame.locator("svg .tick-label").all_text_contents()
        )
        phases = frame.locator(".step-timeline").evaluate(WALKED, "ArrowRight")
        assert ["data wait", "host-to-device copy", "forward", "backward", "optimizer"] == list(
            dict.fromkeys(phases)
        )
