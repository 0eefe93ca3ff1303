"""Test that every view passes axe-core, light and dark, and works with the keyboard alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.cli.main import main
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from tests.support.browser import WITHIN, Seen, tab
from tests.support.profile_builders import small_profile, with_seconds
from tests.support.rank_profiles import four_ranks
from tests.support.repository import ROOT

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = (
    "run",
    "modules",
    "operators",
    "roofline",
    "timeline",
    "memory",
    "ranks",
    "compare",
    "runs",
)
LABELS = {"runs": "All runs"}
"""Labels of views that differ from the capitalized id of the view."""
CHIP = Hardware("abacus", {"fp32": 1e6}, bandwidth_bytes_per_second=1e6, memory_bytes=4000.0)


def whole() -> Profile:
    """Return a profile with data for every view.

    It has ranks, memory, a trace, an operator without a formula, and a chip.
    """
    given = small_profile()
    return with_seconds(
        replace(
            given,
            run=replace(given.run, hardware=CHIP),
            ranks=four_ranks().ranks,
            rank_stats=four_ranks().rank_stats,
        )
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of two windows; the steps of the second window take twice as long."""
    folder = tmp_path_factory.mktemp("pages")
    given = whole()
    slower = tuple(replace(step, seconds=step.seconds and 2 * step.seconds) for step in given.steps)
    given.save(folder / "a.json")
    replace(given, steps=slower).save(folder / "b.json")
    page = folder / "page.html"
    files = [str(folder / "a.json"), str(folder / "b.json")]
    assert 0 == main(["html", *files, "-o", str(page)])
    return page


def opened(opening: Callable[..., Seen], file: Path, view: str, **options: Any) -> Seen:
    """Open a page at a view, and wait until the view is drawn."""
    seen = opening(f"{file.as_uri()}#view={view}", **options)
    seen.page.locator(f"section.{view}").wait_for()
    if view == "compare":
        seen.page.locator(".changes").wait_for()
    return seen


def violations(seen: Seen) -> list[str]:
    """Return the rules of axe-core that the page violates, with the elements."""
    seen.page.evaluate(AXE.read_text("utf-8"))
    found = seen.page.evaluate(
        "async () => (await axe.run(document, { resultTypes: ['violations'] })).violations"
    )
    messages = []
    for rule in found:
        # At most three elements of each rule
        for node in rule["nodes"][:3]:
            messages.append(f"{rule['id']}: {node['target']} {node['failureSummary']}")
    return messages


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(
    view: str, scheme: str, opening: Callable[..., Seen], file: Path
) -> None:
    """No view violates a rule of axe-core."""
    assert [] == violations(opened(opening, file, view, color_scheme=scheme))


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
def test_axe_would_find_a_button_without_a_name(opening: Callable[..., Seen], file: Path) -> None:
    """A planted button without a name is reported, so the test above can fail."""
    seen = opened(opening, file, "run")
    seen.page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert any(found.startswith("button-name") for found in violations(seen))


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
def test_axe_finds_nothing_in_the_tab_s_frame(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """The frame of the tab passes too.

    TensorBoard creates the document of this frame, without a title and a language.
    """
    with SummaryWriter(tmp_path) as writer:
        lflops.tensorboard.log(writer, small_profile(), 1)
    with tab(opening, tmp_path, expected=1) as (seen, _, _):
        (frame,) = (each for each in seen.page.frames if each.parent_frame)
        frame.evaluate(AXE.read_text("utf-8"))
        found = frame.evaluate(
            "async () => (await axe.run(document, { resultTypes: ['violations'] })).violations"
        )
        assert [] == [rule["id"] for rule in found]


WIDGETS = {
    "run": (
        ".frame-of-steps",
        "ArrowRight",
        "(node) => node.parentElement.querySelector('.step-caption').textContent",
    ),
    "modules": (".icicle", "ArrowDown", "(node) => node.getAttribute('aria-activedescendant')"),
    "timeline": (
        ".step-timeline",
        "ArrowRight",
        "(node) => node.closest('section').querySelector('.timeline-caption').textContent",
    ),
    "operators": (
        "[role=grid]",
        "ArrowDown",
        "(node) => node.getAttribute('aria-activedescendant')",
    ),
    "roofline": (".picture", "ArrowRight", "(node) => node.querySelector('.card').textContent"),
    "memory": (".treemap", "ArrowRight", "(node) => node.getAttribute('aria-activedescendant')"),
    "ranks": (
        "[role=grid], [role=treegrid]",
        "ArrowDown",
        "(node) => node.getAttribute('aria-activedescendant')",
    ),
    "runs": ("[role=grid]", "ArrowDown", "(node) => node.getAttribute('aria-activedescendant')"),
    "compare": (
        "[role=treegrid]",
        "ArrowRight",
        "(node) => node.querySelectorAll('.grid-body [role=row]').length",
    ),
}
"""The main control of each view, a key, and a function that reads what the key changes."""


def walk_to(page: Any, label: str) -> None:
    """Press the right arrow key until the tab with this label has the focus."""
    for _ in VIEWS:
        if page.evaluate("document.activeElement.textContent") == label:
            return
        page.keyboard.press("ArrowRight")
    raise AssertionError(f"no tab {label}")


@pytest.mark.parametrize("view", WIDGETS)
def test_a_view_is_used_with_the_keyboard_alone(
    view: str, opening: Callable[..., Seen], file: Path
) -> None:
    """Tab leads from the tabs to the main control of the view, where a key changes something."""
    seen = opened(opening, file, "run")
    seen.page.set_viewport_size({"width": 1280, "height": 600})
    page = seen.page
    label = LABELS.get(view, view.capitalize())
    page.get_by_role("tab", name="Run", exact=True).focus()
    walk_to(page, WITHIN.get(label, label))
    if label in WITHIN:
        page.keyboard.press("Tab")
        walk_to(page, label)
    page.locator(f"section.{view}").wait_for()
    selector, key, read = WIDGETS[view]
    if view == "compare":
        page.locator(".changes").wait_for()
        page.get_by_label("show").select_option("all")
        page.get_by_role("tab", name="Compare", exact=True).focus()
    widget = page.locator(selector).first
    for _ in range(60):
        page.keyboard.press("Tab")
        if widget.evaluate("(node) => node === document.activeElement"):
            break
    assert widget.evaluate("(node) => node === document.activeElement")
    before = widget.evaluate(read)
    page.keyboard.press(key)
    page.wait_for_function(
        f"([node, before]) => ({read})(node) !== before", arg=[widget.element_handle(), before]
    )
