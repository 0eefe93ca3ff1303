"""Test that each part of a step has one colour everywhere, and that no two parts look alike."""

import itertools
import math
import re
from collections.abc import Callable

from lflops.report.figures import pictures
from tests.page.test_accessibility import whole
from tests.support.browser import PARTS, Seen

STYLE = (PARTS / "shell" / "style.css").read_text("utf-8")
LEAST = 0.05
"""Least distance of two colours in Oklab. A distance of 0.02 is just visible."""


def linear(value: float) -> float:
    """Convert a channel of sRGB, from 0 to 1, to linear light."""
    if value <= 0.04045:
        return value / 12.92
    return float(((value + 0.055) / 1.055) ** 2.4)


def oklab(colour: str) -> tuple[float, ...]:
    """Convert a colour `#rrggbb` to Björn Ottosson's colour space Oklab."""
    red = linear(int(colour[1:3], 16) / 255)
    green = linear(int(colour[3:5], 16) / 255)
    blue = linear(int(colour[5:7], 16) / 255)
    # The responses of the three kinds of cones, with the names of the paper
    l = (0.4122 * red + 0.5363 * green + 0.0514 * blue) ** (1 / 3)  # noqa: E741
    m = (0.2119 * red + 0.6807 * green + 0.1074 * blue) ** (1 / 3)
    s = (0.0883 * red + 0.2817 * green + 0.63 * blue) ** (1 / 3)
    return (
        0.2105 * l + 0.7936 * m - 0.0041 * s,
        1.978 * l - 2.4286 * m + 0.4506 * s,
        0.0259 * l + 0.7828 * m - 0.8087 * s,
    )


def colours_of(prefix: str) -> dict[str, str]:
    """Return the colours of the style sheet's variables with this prefix, by name."""
    return dict(re.findall(rf"--{prefix}-([\w-]+): (#\w+)", STYLE))


def test_no_two_parts_of_a_step_look_alike() -> None:
    """All pairs of parts are more than twice as far apart as is just visible."""
    table = {name: oklab(colour) for name, colour in colours_of("part").items()}
    alike = []
    for first, second in itertools.combinations(table, 2):
        if math.dist(table[first], table[second]) < LEAST:
            alike.append((first, second))
    assert [] == alike
    assert 16 <= len(table)


def test_a_category_of_the_run_looks_like_no_part_of_a_step() -> None:
    """Categories of the run differ from parts of a step, because both bars are on one screen.

    For example, validation must not look like data wait. A smaller distance than between parts is
    enough. Only logging is a category and a part of a step, in one colour.
    """
    parts = {name: oklab(colour) for name, colour in colours_of("part").items()}
    run = {name: oklab(colour) for name, colour in colours_of("run").items()}
    alike = []
    for category, part in itertools.product(run, parts):
        if category != part and math.dist(run[category], parts[part]) < 0.04:
            alike.append((category, part))
    assert [] == alike
    assert 18 == len(run)


def test_the_bars_of_a_step_have_the_table_s_colours(page_of: Callable[..., Seen]) -> None:
    """Names and colours correspond one to one in both bars of Run and in the phases of Roofline."""
    seen = page_of(whole(), color_scheme="light")
    shown = (
        "(nodes) => nodes.map((node) => "
        "[node.textContent.trim(), getComputedStyle(node).backgroundColor])"
    )
    slices = seen.page.locator(".slice:not(.unaccounted)").evaluate_all(shown)
    seen.view("Roofline")
    keys = seen.page.locator(".phases button").evaluate_all(
        "(nodes) => nodes.map((node) => [node.textContent.trim(), "
        "getComputedStyle(node.querySelector('.key')).backgroundColor])"
    )
    pairs = {tuple(each) for each in [*slices, *keys]}
    names = {name for name, _ in pairs}
    colours = {colour for _, colour in pairs}
    assert {"forward", "backward", "optimizer", "ideal compute", "memory-bound", "other"} <= names
    assert len(pairs) == len(names) == len(colours)


def test_figures_have_the_page_s_colours() -> None:
    """The matplotlib figures use the colours of the page, although they have their own table."""
    parts = colours_of("part")
    assert {name: parts[name] for name in pictures.PHASES} == pictures.PHASES
    categories = colours_of("memory") | {"other": parts["other"]}
    assert {name: categories[name] for name in pictures.CATEGORIES} == pictures.CATEGORIES
