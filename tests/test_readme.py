"""The README's examples run as they stand, and its figures are those that were measured."""

import re
from pathlib import Path

import pytest

import lflops
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS
from tests.support.markdown_pages import run_page
from tests.support.repository import ROOT

pytestmark = [*LIGHTNINGS_WARNINGS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

README = (ROOT / "README.md").read_text("utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")


def test_the_script_runs_as_a_reader_pastes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a hidden setup, and its log has the issue that the README shows."""
    monkeypatch.chdir(tmp_path)
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Lightning sets them. The fixture restores them.
        monkeypatch.setenv(seed, "0")
    assert "<!-- setup" not in README
    assert "<!-- not run" not in README
    names = run_page(README, "README.md")
    (monitor,) = (
        each for each in names["trainer"].callbacks if type(each).__name__ == "FlopsMonitor"
    )
    rows, inputs, classes = 8, 1024, 10
    assert rows * inputs * classes == monitor.profiles[0].total()
    explained = lflops.explain(monitor.profiles[0])
    # On a busy machine it may not be certain, but it is never another cause.
    assert {each.cause for each in explained.findings if each.is_issue} <= {"data"}


def test_it_is_one_screen_and_a_half_and_says_how_to_install() -> None:
    """At most 90 lines; the picture and the script come first."""
    assert len(README.splitlines()) <= 90
    places = [README.index(text) for text in ("hero.png", "```python", "pip install lflops")]
    assert places == sorted(places)


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
    linked = re.findall(r"^\| \[[^]]*\]\(benchmarks/RESULTS\.md#([\w-]+)\)", README, re.MULTILINE)
    assert 2 == len(linked)
    assert set() == set(linked) - anchors(ROOT / "benchmarks" / "RESULTS.md")


@pytest.mark.parametrize("page", sorted(each.name for each in ROOT.glob("*.md")))
def test_links_of_the_pages_outside_the_site_lead_somewhere(page: str) -> None:
    """The site checks its own links. These are relative to the repository."""
    text = (ROOT / page).read_text("utf-8")
    broken = []
    for link in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", text):
        path, _, anchor = link.partition("#")
        if link.startswith(("http", "mailto:", "../../")):
            continue
        target = ROOT / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert [] == broken


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, and those that it defines itself."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    return found | set(re.findall(r"id=\"([^\"]+)\"", text))
