"""Test in a browser the view Timeline: a step over time, its keyboard, its zoom and its memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from msgspec.structs import replace

from lflops.monitoring.schedule import Schedule
from lflops.profile.timeline import ModuleSlice, StepTimeline, TimedWork
from tests.support.browser import Seen, tab
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, watching
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import small_profile

pytestmark = LIGHTNINGS_WARNINGS


WALKED = """(node, key) => Array.from({ length: 20 }, (_, number) => {
  node.dispatchEvent(new KeyboardEvent("keydown", { key: number ? key : "Home" }));
  return node.closest("section").querySelector(".timeline-caption b").textContent;
})"""
"""Presses a key 20 times, beginning at the first bar, and returns the name in each caption."""


def opened(seen: Seen) -> Any:
    """Open the view Timeline, and wait until it is drawn."""
    seen.view("Timeline")
    seen.page.locator(".step-timeline svg").wait_for()
    return seen.page.locator("section.timeline-view")


def labels(view: Any) -> list[str]:
    """Return the texts in the bars."""
    return view.locator(".bar-label").all_text_contents()


def caption(view: Any) -> str:
    """Return the caption, which describes the chosen bar."""
    return view.locator(".timeline-caption").inner_text()


def test_modules_operators_and_kernels_share_an_axis(page_of: Callable[..., Seen]) -> None:
    """Two ranks share a time axis; only the first has operators and kernels.

    The encoder takes 0.7 of the 1 ms of forward, so its bar has this share of the width.
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
    forward = view.locator('[data-bar="0"] rect').bounding_box()
    encoder = view.locator('[data-bar="1"] rect').bounding_box()
    assert pytest.approx(0.7, abs=0.01) == encoder["width"] / forward["width"]
    assert "2 shorter bars are left out" in view.inner_text()


def test_one_rank_can_be_chosen(page_of: Callable[..., Seen]) -> None:
    """The chosen rank is shown alone. It is a module-timing step, so it has no operators."""
    seen = page_of(small_profile())
    view = opened(seen)
    seen.page.get_by_label("rank").select_option("1")
    seen.page.locator(".tick-label", has_text="modules").wait_for()
    assert not {"operators", "kernels"} & set(view.locator("svg .tick-label").all_text_contents())
    assert "This is a module-timing step" in view.inner_text()


def test_the_keyboard_goes_from_bar_to_bar_and_zooms(page_of: Callable[..., Seen]) -> None:
    """Arrow keys go from bar to bar, Space zooms in, 0 zooms out, and Enter goes to the module."""
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
    """The mouse wheel zooms, a drag moves the picture, and a button shows the whole step.

    Three turns of the wheel leave 1.5 of 3 ms. The optimizer starts at 2 ms, so it is outside until
    a drag moves it into view.
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
    """The caption has the live memory of the counting step at the operator under the pointer.

    The head is the third operator of the counting step, before which 3,000 bytes were alive.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    view.locator('[data-bar="4"] rect').hover()
    assert "head, forward" in caption(view)
    assert "live memory at" in caption(view)
    assert "2.93 KiB" in caption(view)


def test_memory_is_drawn_where_no_operator_runs(page_of: Callable[..., Seen]) -> None:
    """The memory after the last operator is drawn up to the end of the step.

    Zoomed to the optimizer, where no operator runs, the area has the width of the picture.
    """
    seen = page_of(small_profile())
    view = opened(seen)
    view.locator(".bar-label", has_text="optimizer").dblclick(force=True)
    seen.page.wait_for_function("() => location.hash.includes('timeline.from=')")
    box = view.locator(".step-timeline svg").first.bounding_box()
    area = view.locator(".step-timeline svg > path").first.bounding_box()
    assert area["width"] > 0.85 * box["width"]
    assert area["height"] > 10


def test_names_in_time_are_text(page_of: Callable[..., Seen]) -> None:
    """Names of modules, operators, kernels and phases are shown as text."""
    slices = (ModuleSlice(IMAGE, SCRIPT, 0, 90, 0), ModuleSlice(IMAGE, SCRIPT, 0, 90, 1))
    work = (TimedWork(IMAGE, 0, 90),)
    step = StepTimeline(source="traced", length=100, slices=slices, operators=work, kernels=work)
    seen = page_of(replace(hostile_profile(), timelines=(step,)))
    view = opened(seen)
    assert [SCRIPT, IMAGE, IMAGE, IMAGE] == labels(view)
    assert 0 == seen.page.locator("img").count()


def test_without_a_step_there_is_no_tab(page_of: Callable[..., Seen]) -> None:
    """Without a recorded step there is no Timeline tab."""
    seen = page_of(replace(small_profile(), timelines=()))
    assert 0 == seen.page.get_by_role("tab", name="Timeline").count()


def test_another_step_can_be_chosen(page_of: Callable[..., Seen]) -> None:
    """The median step is shown first; another step can be chosen, and the address keeps the choice.

    Step 7 takes 100 ns and step 9 takes 400 ns, in another phase.
    """
    forward = ModuleSlice("", "forward", 0, 100, 0)
    data = ModuleSlice("", "data", 0, 400, 0)
    steps = (
        StepTimeline(source="module_timing", step=7, length=100, slices=(forward,)),
        StepTimeline(source="module_timing", step=9, length=400, slices=(data,)),
    )
    seen = page_of(replace(small_profile(), timelines=steps, ranks=()))
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
    """The tab shows a traced step of a real Trainer.

    The phases are in the order in which they ran, and the timeline has operators and memory.
    """
    fit(
        Classifier(),
        watching(trace=True, schedule=Schedule(wait=1, warmup=1, active=2)),
        logger=TensorBoardLogger(tmp_path),
    )
    with tab(opening, tmp_path, expected=1) as (_, frame, _):
        frame.get_by_role("tab", name="Timeline").click()
        frame.locator(".step-timeline svg").wait_for()
        headings = set(frame.locator("svg .tick-label").all_text_contents())
        assert {"modules", "operators", "live memory"} <= headings
        walked = frame.locator(".step-timeline").evaluate(WALKED, "ArrowRight")
        phases = list(dict.fromkeys(walked))
        expected = ["data wait", "batch transfer", "forward", "backward", "optimizer"]
        assert expected == phases
