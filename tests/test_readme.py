"""The README's examples run as they stand, and its figures are those that were measured."""

import re
from pathlib import Path

import pytest

from tests.support.lightning_runs import LIGHTNINGS_WARNINGS
from tests.support.markdown_pages import run_page
from tests.support.repository import ROOT

pytestmark = [*LIGHTNINGS_WARNINGS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

README = (ROOT / "README.md").read_text("utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")


def test_the_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone who pastes the blocks in order meets no error, and the figure in the comment is the one that comes out."""
    monkeypatch.chdir(tmp_path)
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(seed, "0")  # Lightning sets them, and this takes them back
    names = run_page(README, "README.md")
    batch, length, width, hidden = 8, 32, 64, 256
    projections, scores, perceptron = 4 * width * width, 2 * length * width, 2 * width * hidden
    assert batch * length * (projections + scores + perceptron) == names["profile"].total()
    assert f"{names['profile'].total():,}" in README


def test_its_first_screen_says_how_to_install_and_to_try_it() -> None:
    """Within 30 lines, and the whole of it within 150."""
    lines = README.splitlines()
    assert len(lines) < 150
    first = "\n".join(lines[:30])
    assert [] == [
        command
        for command in ("pip install lflops", "make demo", "make test")
        if command not in first
    ]


def row(text: str, name: str) -> list[str]:
    """The cells of the first row of a table that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_counts_of_other_tools_are_those_of_the_benchmark() -> None:
    """The first number of each tool's row, forward and backward.

    And its cases are all that there are.
    """
    section = RESULTS[RESULTS.index("## Who counts right") :]
    forward, backward = section.split("\nBackward, ", 1)
    for label, table, tools in [
        (
            "[forward",
            forward,
            ["lflops", "FlopCounterMode", "DeepSpeed", "fvcore", "ptflops, aten"],
        ),
        ("[backward", backward, ["lflops", "FlopCounterMode", "DeepSpeed"]),
    ]:
        shown = row(README, label)
        assert [row(table, tool)[1] for tool in tools] == shown[1 : len(tools) + 1]
        assert re.search(r"of (\d+)", shown[0])[1] == shown[1]


def test_each_row_of_the_comparison_links_to_its_measurement() -> None:
    """To a section that is there."""
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", RESULTS, re.MULTILINE)
    }
    linked = re.findall(r"^\| \[[^]]*\]\(benchmarks/RESULTS\.md#([\w-]+)\)", README, re.MULTILINE)
    assert 5 == len(linked)
    assert set() == set(linked) - anchors
