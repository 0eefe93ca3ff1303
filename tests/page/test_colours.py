"""The colours of the parts of a step: a part has one everywhere, and no other part has it."""

import itertools
import math
import re
from collections.abc import Callable

from lflops.report.figures import pictures
from tests.page.test_accessibility import whole
from tests.support.browser import PARTS, Seen

STYLE = (PARTS / "shell" / "style.css").read_text("utf-8")
LEAST = 0.05
"""Of the distance in Oklab, in which 0.02 is just seen."""


def oklab(colour: str) -> tuple[float, ...]:
    """A colour `#rrggbb` in Björn Ottosson's Oklab."""
    values = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    )
    cones = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.63))
    l, m, s = ((r * red + g * green + b * blue) ** (1 / 3) for r, g, b in cones)  # noqa: E741 - as the paper calls them
    return (
        0.2105 * l + 0.7936 * m - 0.0041 * s,
        1.978 * l - 2.4286 * m + 0.4506 * s,
        0.0259 * l + 0.7828 * m - 0.8087 * s,
    )


def colours_of(prefix: str) -> dict[str, str]:
    """The colours of a table of the style sheet, by name."""
    return dict(re.findall(rf"--{prefix}-([\w-]+): (#\w+)", STYLE))


def test_no_two_parts_of_a_step_look_alike() -> None:
    """All pairs of the table are further apart than twice what is just seen."""
    table = {name: oklab(colour) for name, colour in colours_of("part").items()}
    assert [] == [
        pair
        for pair in itertools.combinations(table, 2)
        if math.dist(table[pair[0]], table[pair[1]]) < LEAST
    ]
    assert 16 <= len(table)


def test_a_category_of_the_run_looks_like_no_part_of_a_step() -> None:
    """The two bars are on one screen: validation is no data wait, and training no optimizer."""
    parts = {name: oklab(colour) for name, colour in colours_of("part").items()}
    run = {name: oklab(colour) for name, colour in colours_of("run").items()}
    assert [] == [
        (category, part)
        for category, part in itertools.product(run, parts)
        if math.dist(run[category], parts[part]) < 0.04
    ]
    assert 18 == len(run)


def test_the_bars_of_a_step_have_the_table_s_colours(page_of: Callable[..., Seen]) -> None:
    """In both stacked bars of Run, and in the phases of Roofline.

    A name has one colour, and a colour one name.
    """
    seen = page_of(whole(), color_scheme="light")
    shown = """(nodes) => nodes.map((node) => [node.textContent.trim(), getComputedStyle(node).backgroundColor])"""
    slices = seen.page.locator(".slice:not(.unaccounted)").evaluate_all(shown)
    seen.view("Roofline")
    keys = seen.page.locator(".phases button").evaluate_all(
        "(nodes) => nodes.map((node) => [node.textContent.trim(), getComputedStyle(node.querySelector('.key')).backgroundColor])"
    )
    pairs = {tuple(each) for each in [*slices, *keys]}
    names, colours = {name for name, _ in pairs}, {colour for _, colour in pairs}
    assert {"forward", "backward", "optimizer", "ideal compute", "memory-bound", "other"} <= names
    assert len(pairs) == len(names) == len(colours)


def test_figures_have_the_page_s_colours() -> None:
    """Those of matplotlib are a table of their own."""
    parts, memory = colours_of("part"), colours_of("memory")
    assert {name: parts[name] for name in pictures.PHASES} == pictures.PHASES
    assert {
        name: parts["other"] if name == "other" else memory[name] for name in pictures.CATEGORIES
    } == pictures.CATEGORIES
