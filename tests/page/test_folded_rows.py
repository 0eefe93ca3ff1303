"""Test in a browser that identical modules share a row of the module table.

The rows and figures must be those of the terminal's module table.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lflops.analysis.tree import ModuleRow, tree
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from tests.support.browser import GRID, ROW, Seen
from tests.support.profile_builders import clocked, product, profile, weights

MACS = {"fc": 100, "norm": 10}


def repeated(*blocks: float, odd: int | None = None) -> Profile:
    """Return a profile of blocks with two layers each, and a head.

    Args:
        blocks: The milliseconds of the layer `fc` in each block. All other layers take 1 ms.
        odd: The number of a block whose `fc` has other work, if there is one.
    """
    macs: dict[str, int] = {}
    for number in range(len(blocks)):
        for layer, count in MACS.items():
            macs[f"blocks.{number}.{layer}"] = count
    macs["head"] = 50
    if odd is not None:
        macs[f"blocks.{odd}.fc"] = 300
    rows: dict[str, dict[str, Any]] = {}
    cells = []
    for name, count in macs.items():
        for above in reversed(ancestry(name)):
            rows[above] = {"class_name": "Block"} | weights(0)
        cells.append(product(name, "aten::mm", "forward", macs=count, bytes_moved=count))
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 1e-3 for name in macs}
    for number, milliseconds in enumerate(blocks):
        own[f"blocks.{number}.fc", "forward"] = milliseconds * 1e-3
    return clocked(profile(rows, cells), own)


def columns(seen: Seen, *more: str) -> None:
    """Choose additional columns of the table."""
    seen.page.locator(".chooser summary").click()
    for each in more:
        seen.page.locator(f".chooser input[value='{each}']").check()


def walked(rows: tuple[ModuleRow, ...]) -> Iterator[ModuleRow]:
    """Yield all rows of a tree, from top to bottom."""
    for row in rows:
        yield row
        yield from walked(row.children)


def test_what_repeats_is_one_row_with_the_mean_of_the_times(page_of: Callable[..., Seen]) -> None:
    """Four identical blocks are one row, with their sums or with the means of their times.

    Their `fc` layers take 1, 2, 3 and 6 ms, so the mean is 3 ms, and 4 ms with the `norm` layer.
    With means, the work is that of one block.
    """
    seen = page_of(repeated(1, 2, 3, 6))
    seen.modules()
    sums = {"blocks": "440", "blocks.0": "440", "blocks.0.fc": "400"}
    assert sums.items() <= seen.shown("forward MACs").items()
    seen.page.get_by_label("mean of identical modules").check()
    columns(seen, "forward.rate")
    assert ["(model)", "blocks", "0…3", "fc", "norm", "head"] == seen.labels()
    times = {name: float(text) for name, text in seen.shown("forward time").items()}
    assert pytest.approx(4e-3) == times["blocks.0"]
    assert pytest.approx(3e-3) == times["blocks.0.fc"]
    assert {
        "": "490",
        "blocks": "440",
        "blocks.0": "110",
        "blocks.0.fc": "100",
        "blocks.0.norm": "10",
        "head": "50",
    } == seen.shown("forward MACs")
    assert pytest.approx(2 * 100 / 3e-3) == float(seen.shown("forward FLOP/s")["blocks.0.fc"])


def _label(row: ModuleRow) -> str:
    """Return the label of a row; identical modules have the first, the last and their number."""
    if row.repeat is None:
        return row.label
    names = [name.rpartition(".")[2] for name in row.names]
    return f"{names[0]}…{names[-1]} ×{row.times}"


def test_the_rows_are_those_of_the_terminal(page_of: Callable[..., Seen]) -> None:
    """Labels, work and times equal the terminal's; a block with other work splits the row."""
    given = repeated(1, 2, 3, 4, 5, 6, odd=2)
    seen = page_of(given)
    seen.modules()
    seen.page.get_by_label("mean of identical modules").check()
    seen.page.get_by_role("button", name="module", exact=True).click()
    rows = list(walked(tree(given)))
    labels = seen.page.locator(f"{ROW} .name").evaluate_all(
        "names => names.map((name) => [...name.querySelectorAll('.label, .mark')]"
        ".map((part) => part.textContent).join(' '))"
    )
    assert ["(model)", *map(_label, rows[1:])] == labels
    assert {row.name: str(row.one("forward").macs) for row in rows} == seen.shown("forward MACs")
    times = {name: float(text) for name, text in seen.shown("forward time").items()}
    assert {row.name: pytest.approx(row.time("forward")) for row in rows} == times


def test_a_run_is_sorted_by_its_sum(page_of: Callable[..., Seen]) -> None:
    """Rows of several blocks are sorted by their sum, as in the terminal.

    A single block of 310 MACs comes after three blocks of 110 and before two blocks of 110.
    """
    given = repeated(1, 1, 1, 1, 1, 1, odd=3)
    seen = page_of(given)
    seen.modules()
    seen.page.get_by_role("button", name="forward MACs").click()
    blocks = next(row for row in tree(given, sort="macs")[0].children if row.name == "blocks")
    found = [name for name in seen.shown("forward MACs") if name.count(".") == 1]
    assert ["blocks.0", "blocks.3", "blocks.4"] == [row.name for row in blocks.children] == found


def test_a_run_is_unfolded_by_a_click_and_folded_again(page_of: Callable[..., Seen]) -> None:
    """A click shows each of the identical modules with its own times, and Enter folds them again.

    Without "fold identical modules", no modules share a row, also after a reload.
    """
    seen = page_of(repeated(1, 2, 6))
    seen.modules()
    seen.page.get_by_role("button", name="show 3 modules one by one").click()
    times = {name: float(text) for name, text in seen.shown("forward time").items()}
    assert pytest.approx([2e-3, 3e-3, 7e-3]) == [times[f"blocks.{i}"] for i in range(3)]
    seen.page.get_by_role("button", name="show 3 identical modules as one").press("Enter")
    assert "0…2" in seen.labels()
    seen.page.get_by_label("fold identical modules").uncheck()
    assert {"0", "1", "2"} < {*seen.labels()}
    seen.page.reload()
    seen.page.locator(ROW).first.wait_for()
    assert "0…2" not in seen.labels()


def test_a_filter_and_a_flat_list_show_each_module(page_of: Callable[..., Seen]) -> None:
    """With a filter or in the flat list, no modules share a row, so no match is hidden."""
    seen = page_of(repeated(1, 1, 1))
    seen.modules()
    seen.page.get_by_label("filter by name or class").fill("blocks.1.")
    assert ["(model)", "blocks", "1", "fc", "norm"] == seen.labels()
    seen.page.get_by_label("filter by name or class").fill("")
    seen.page.get_by_label("flat").check()
    assert 12 == int(seen.page.locator(GRID).get_attribute("aria-rowcount")) - 1


def test_the_chart_leads_to_a_module_within_a_run(page_of: Callable[..., Seen]) -> None:
    """Without folding, each block has a bar in the chart, and a click on it chooses its row."""
    seen = page_of(repeated(1, 1, 1))
    seen.modules()
    seen.page.get_by_label("fold identical modules").uncheck()
    seen.page.get_by_label("chart").select_option("forward.macs")
    seen.page.locator(".icicle .block").filter(has_text="fc").nth(1).click()
    assert "blocks.1.fc" == seen.page.locator(f"{ROW}.chosen .name").get_attribute("title")
    assert ["0", "1", "2"] == [label for label in seen.labels() if label.isdecimal()]
