"""Modules that are alike share a row of Modules, in a real browser.

The same rows and figures as in the terminal's report.
"""

from collections.abc import Callable, Iterator

import pytest

from lflops.analysis.tree import ModuleRow, tree
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from tests.support.browser import GRID, ROW, Seen
from tests.support.profile_builders import clocked, product, profile, weights

MACS = {"fc": 100, "norm": 10}


def repeated(*blocks: float, odd: int | None = None) -> Profile:
    """Blocks of two layers, whose `fc` takes so many milliseconds; one of them may have other work."""
    names = [f"blocks.{i}.{layer}" for i in range(len(blocks)) for layer in MACS]
    rows = {
        above: {"class_name": "Block"}
        for name in [*names, "head"]
        for above in reversed(ancestry(name))
    }
    macs = {name: MACS[name.rpartition(".")[2]] for name in names} | {"head": 50}
    if odd is not None:
        macs[f"blocks.{odd}.fc"] = 300
    cells = [
        product(name, "aten::mm", "forward", macs=each, bytes_moved=each)
        for name, each in macs.items()
    ]
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 1e-3 for name in macs}
    own |= {(f"blocks.{i}.fc", "forward"): each * 1e-3 for i, each in enumerate(blocks)}
    return clocked(profile({name: row | weights(0) for name, row in rows.items()}, cells), own)


def columns(seen: Seen, *more: str) -> None:
    """Show these columns as well."""
    seen.page.locator(".chooser summary").click()
    for each in more:
        seen.page.locator(f".chooser input[value='{each}']").check()


def walked(rows: tuple[ModuleRow, ...]) -> Iterator[ModuleRow]:
    """All rows, from top to bottom."""
    for row in rows:
        yield row
        yield from walked(row.children)


def test_what_repeats_is_one_row_with_the_mean_of_the_times(page_of: Callable[..., Seen]) -> None:
    """4 blocks with an `fc` of 1, 2, 3 and 6 ms.

    3 ms in the mean, and 4 with the norm's; the work is that of one.
    """
    seen = page_of(repeated(1, 2, 3, 6))
    seen.modules()
    assert {"blocks": "440", "blocks.0": "440", "blocks.0.fc": "400"}.items() <= seen.shown(
        "forward MACs"
    ).items()
    seen.page.get_by_label("mean of repeats").check()
    columns(seen, "forward.rate")
    assert ["(model)", "blocks", "0…3", "fc", "norm", "head"] == seen.labels()
    times = {name: float(text) for name, text in seen.shown("forward time").items()}
    assert (pytest.approx(4e-3), pytest.approx(3e-3)) == (times["blocks.0"], times["blocks.0.fc"])
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
    """The name in its parent, of equal modules the first and the last, with how many they are."""
    names = [name.rpartition(".")[2] for name in row.names]
    return row.label if row.repeat is None else f"{names[0]}…{names[-1]} ×{row.times}"


def test_the_rows_are_those_of_the_terminal(page_of: Callable[..., Seen]) -> None:
    """A block with other work parts the run; labels, work and times are those of the report."""
    given = repeated(1, 2, 3, 4, 5, 6, odd=2)
    seen = page_of(given)
    seen.modules()
    seen.page.get_by_label("mean of repeats").check()
    seen.page.get_by_role("button", name="module", exact=True).click()
    rows = list(walked(tree(given)))
    labels = seen.page.locator(f"{ROW} .name").evaluate_all(
        "names => names.map((name) => [...name.querySelectorAll('.label, .mark')].map((part) => part.textContent).join(' '))"
    )
    assert ["(model)", *map(_label, rows[1:])] == labels
    assert {row.name: str(row.one("forward").macs) for row in rows} == seen.shown("forward MACs")
    assert {row.name: pytest.approx(row.time("forward")) for row in rows} == {
        name: float(text) for name, text in seen.shown("forward time").items()
    }


def test_a_run_is_sorted_by_its_sum(page_of: Callable[..., Seen]) -> None:
    """A block of 310 MACs comes behind three of 110, and before two of them; as in the report."""
    given = repeated(1, 1, 1, 1, 1, 1, odd=3)
    seen = page_of(given)
    seen.modules()
    seen.page.get_by_role("button", name="forward MACs").click()
    blocks = next(row for row in tree(given, sort="macs")[0].children if row.name == "blocks")
    found = [name for name in seen.shown("forward MACs") if name.count(".") == 1]
    assert ["blocks.0", "blocks.3", "blocks.4"] == [row.name for row in blocks.children] == found


def test_a_run_is_unfolded_by_a_click_and_folded_again(page_of: Callable[..., Seen]) -> None:
    """Each with its own times then."""
    seen = page_of(repeated(1, 2, 6))
    seen.modules()
    seen.page.get_by_role("button", name="show 3 modules one by one").click()
    times = {name: float(text) for name, text in seen.shown("forward time").items()}
    assert [pytest.approx(2e-3), pytest.approx(3e-3), pytest.approx(7e-3)] == [
        times[f"blocks.{i}"] for i in range(3)
    ]
    seen.page.get_by_role("button", name="show 3 identical modules as one").press("Enter")
    assert "0…2" in seen.labels()
    seen.page.get_by_label("fold repeats").uncheck()
    assert {"0", "1", "2"} < {*seen.labels()}
    seen.page.reload()
    seen.page.locator(ROW).first.wait_for()
    assert "0…2" not in seen.labels()


def test_a_filter_and_a_flat_list_show_each_module(page_of: Callable[..., Seen]) -> None:
    """What matches is not hidden in a run."""
    seen = page_of(repeated(1, 1, 1))
    seen.modules()
    seen.page.get_by_label("filter by name or class").fill("blocks.1.")
    assert ["(model)", "blocks", "1", "fc", "norm"] == seen.labels()
    seen.page.get_by_label("filter by name or class").fill("")
    seen.page.get_by_label("flat").check()
    assert 12 == int(seen.page.locator(GRID).get_attribute("aria-rowcount")) - 1


def test_the_chart_leads_to_a_module_within_a_run(page_of: Callable[..., Seen]) -> None:
    """With repeats unfolded each block has its bar, and a click chooses its row."""
    seen = page_of(repeated(1, 1, 1))
    seen.modules()
    seen.page.get_by_label("fold repeats").uncheck()
    seen.page.get_by_label("chart").select_option("forward.macs")
    seen.page.locator(".icicle .block").filter(has_text="fc").nth(1).click()
    assert "blocks.1.fc" == seen.page.locator(f"{ROW}.chosen .name").get_attribute("title")
    assert ["0", "1", "2"] == [label for label in seen.labels() if label.isdecimal()]
