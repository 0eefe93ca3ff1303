"""Every view passes axe-core's rules, light and dark, and is used by keyboard alone, in a real browser."""

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
"""The labels of views that are not their ids."""
CHIP = Hardware("abacus", {"fp32": 1e6}, bandwidth_bytes_per_second=1e6, memory_bytes=4000.0)


def whole() -> Profile:
    """A profile that has something for every view.

    Ranks, memory, a trace, an operator without a formula, a chip.
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
    """A page of two windows, of which the second is slower."""
    folder = tmp_path_factory.mktemp("pages")
    given = whole()
    slower = tuple(replace(step, seconds=step.seconds and 2 * step.seconds) for step in given.steps)
    for name, each in ("a", given), ("b", replace(given, steps=slower)):
        each.save(folder / f"{name}.json")
    assert 0 == main(
        ["html", str(folder / "a.json"), str(folder / "b.json"), "-o", str(folder / "page.html")]
    )
    return folder / "page.html"


def opened(opening: Callable[..., Seen], file: Path, view: str, **options: Any) -> Seen:
    """The page at a view."""
    seen = opening(f"{file.as_uri()}#view={view}", **options)
    seen.page.locator(f"section.{view}").wait_for()
    if view == "compare":
        seen.page.locator(".changes").wait_for()
    return seen


def violations(seen: Seen) -> list[str]:
    """What axe-core finds: the rule, and where."""
    seen.page.evaluate(AXE.read_text("utf-8"))
    found = seen.page.evaluate(
        "async () => (await axe.run(document, { resultTypes: ['violations'] })).violations"
    )
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"][:3]
    ]


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(
    view: str, scheme: str, opening: Callable[..., Seen], file: Path
) -> None:
    """In no view."""
    assert [] == violations(opened(opening, file, view, color_scheme=scheme))


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
def test_axe_would_find_a_button_without_a_name(opening: Callable[..., Seen], file: Path) -> None:
    """The check above can fail."""
    seen = opened(opening, file, "run")
    seen.page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert any(found.startswith("button-name") for found in violations(seen))


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, by npm ci")
def test_axe_finds_nothing_in_the_tab_s_frame(opening: Callable[..., Seen], tmp_path: Path) -> None:
    """TensorBoard makes the frame's document, without a title and a language."""
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
"""Of each view what is worked with, a key, and what that changes."""


def walk_to(page: Any, label: str) -> None:
    """Go from tab to tab with the arrow keys."""
    for _ in VIEWS:
        if page.evaluate("document.activeElement.textContent") == label:
            return
        page.keyboard.press("ArrowRight")
    raise AssertionError(f"no tab {label}")


@pytest.mark.parametrize("view", WIDGETS)
def test_a_view_is_used_with_the_keyboard_alone(
    view: str, opening: Callable[..., Seen], file: Path
) -> None:
    """From the tabs by Tab to what is worked with, where a key changes something."""
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
