"""Test the page on a telephone screen of 390 pixels width."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.test_accessibility import LABELS, VIEWS, file, opened
from tests.support.browser import Seen

__all__ = ["file"]

TABLES = {"modules", "operators", "roofline", "ranks", "runs", "compare"}
"""Views with a table that scrolls sideways."""

SHOWN = (
    "(cells) => cells.map((cell) => cell.getBoundingClientRect()).filter(({ left, "
    "right }) => left >= 0 && right <= innerWidth).length"
)
WIDTHS = """() => {
  const main = document.querySelector("main");
  return [document.documentElement.scrollWidth, main.scrollWidth - main.clientWidth];
}"""
STAYS = """() => {
  document.querySelector(".grid").scrollLeft = 300;
  const { left, width } = document.querySelector(".grid .grid-body [role=row] > :first-child").getBoundingClientRect();
  return width > 0 && left >= 0 && left < 20;
}"""


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_but_tables_is_wider_than_the_screen(
    view: str, opening: Callable[..., Seen], file: Path
) -> None:
    """Only tables are wider than the screen; the document and the view fit.

    A table shows at least two columns of numbers beside the names, and the names stay visible when
    it scrolls.
    """
    seen = opened(opening, file, "run")
    seen.page.set_viewport_size({"width": 390, "height": 844})
    seen.view(LABELS.get(view, view.capitalize()))
    seen.page.locator(f"section.{view}").wait_for()
    if view == "compare":
        seen.page.get_by_label("show").select_option("all")
    assert [390, 0] == seen.page.evaluate(WIDTHS)
    if view in TABLES:
        assert 2 <= seen.page.locator(".grid .grid-body [role=row]").first.locator(
            ".number"
        ).evaluate_all(SHOWN)
        seen.page.wait_for_function(STAYS)
