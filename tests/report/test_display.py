"""Test values that print as a report, and that notebooks show as HTML."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import lflops
from lflops.display import Displayed, Table
from tests.support.ledgers import write_resumed_run


class Reader(HTMLParser):
    """A parser that collects the tags and the text of a page, and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def read(value: Displayed | Table) -> Reader:
    """Parse the HTML of a value, and check that all tags are closed in order."""
    reader = Reader()
    reader.feed(value._repr_html_())
    assert [] == reader.open
    return reader


@pytest.fixture(scope="module")
def profile() -> lflops.Profile:
    """Count two layers with 3 x 8 x 16 and 3 x 16 x 4 MACs in forward."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4)))
    return lflops.count(model, torch.ones(3, 8))


def test_a_printed_profile_has_the_summary_and_the_modules(profile: lflops.Profile) -> None:
    """A printed profile has the parameters, and the MACs of each module."""
    text = str(profile)
    (row,) = re.findall(r"^0 +Linear .*$", text, re.MULTILINE)
    assert str(3 * 8 * 16) in row
    assert "parameters" in text


def test_a_table_has_the_levels_and_the_order_that_are_asked_for(profile: lflops.Profile) -> None:
    """`depth` limits the levels of the table, and `sort` chooses the order.

    The larger layer `0` has more MACs. Layer `1.0` is at the second level.
    """
    table = profile.table(depth=1, sort="macs")
    assert ["(model)", "0", "1"] == [row[0] for row in table.rows]
    assert ["(model)", "0", "1", "1.0"] == [row[0] for row in profile.table().rows]
    with pytest.raises(ValueError, match="sort='size'"):
        profile.table(sort="size")


def test_a_column_of_figures_is_aligned(profile: lflops.Profile) -> None:
    """Figures are right-aligned, so all lines of a printed table have the same length."""
    lines = str(profile.table()).splitlines()
    assert 1 == len({len(line) for line in lines})


@pytest.mark.parametrize("kind", ["profile", "explanation", "ledger", "diff"])
def test_values_print_and_show_the_same_text(
    kind: str, profile: lflops.Profile, tmp_path: Path
) -> None:
    """HTML has the printed text, and no scripts or links, so it works in a notebook offline."""
    write_resumed_run(tmp_path)
    values: dict[str, Displayed] = {
        "profile": profile,
        "explanation": lflops.explain(profile),
        "ledger": lflops.load_run(tmp_path),
        "diff": lflops.diff(profile, profile),
    }
    value = values[kind]
    shown = read(value)
    assert {"pre"} <= shown.tags <= {"pre", "table", "tr", "th", "td"}
    first = str(value).splitlines()[0]
    assert first
    assert first in shown.text


def test_names_of_modules_are_no_html() -> None:
    """A module name that contains HTML is shown as text."""
    name = "<script>alert(1)</script>"
    table = Table(("module", "class", "MACs"), ((name, "&", "1"),))
    shown = read(table)
    assert "script" not in shown.tags
    assert name in shown.text


def test_a_value_without_a_report_is_an_error() -> None:
    """A class of displayed values without a report is a `TypeError`."""

    class Other(Displayed):
        pass

    with pytest.raises(TypeError, match="no report for the type Other"):
        str(Other())
