"""Test that the README's script runs, and that its numbers are those of the benchmarks."""

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
    """The script in the README runs without hidden setup code.

    Its first profile has 8 * 1024 * 10 MACs, and its only issue is the data wait that the README
    shows.
    """
    monkeypatch.chdir(tmp_path)
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Lightning sets them. The fixture restores them.
        monkeypatch.setenv(seed, "0")
    assert "<!-- setup" not in README
    assert "<!-- not run" not in README
    names = run_page(README, "README.md")
    callbacks = names["trainer"].callbacks
    (monitor,) = [each for each in callbacks if type(each).__name__ == "FlopsMonitor"]
    rows = 8
    inputs = 1024
    classes = 10
    assert rows * inputs * classes == monitor.profiles[0].total()
    explained = lflops.explain(monitor.profiles[0])
    issues = {each.cause for each in explained.findings if each.is_issue}
    # On a busy machine, the data wait may not be certain enough for an issue.
    assert issues <= {"data"}


def test_it_is_one_screen_and_a_half_and_says_how_to_install() -> None:
    """The README has at most 90 lines: the picture, the script, then the installation."""
    assert len(README.splitlines()) <= 90
    places = [README.index(text) for text in ("hero.png", "```python", "pip install -e")]
    assert places == sorted(places)


def row(text: str, name: str) -> list[str]:
    """Return the cells of the first row of a table that begins with `name`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_counts_of_other_tools_are_those_of_the_benchmark() -> None:
    """The counts in the README are the first numbers of each tool's row in `RESULTS.md`.

    The label of a row contains the number of cases. lflops counts all of them correctly, so its
    count is equal to this number.
    """
    section = RESULTS[RESULTS.index("## Who counts right") :]
    forward, backward = section.split("\nBackward, ", 1)
    tools_backward = [
        "lflops",
        "FlopCounterMode, with attention",
        "FlopCounterMode",
        "DeepSpeed",
    ]
    tools_forward = [*tools_backward, "fvcore", "ptflops, aten"]
    for label, table, tools in [
        ("[forward", forward, tools_forward),
        ("[backward", backward, tools_backward),
    ]:
        shown = row(README, label)
        assert [row(table, tool)[1] for tool in tools] == shown[1 : len(tools) + 1]
        assert re.search(r"of (\d+)", shown[0])[1] == shown[1]


def test_each_row_of_the_comparison_links_to_its_measurement() -> None:
    """Each row of the comparison links to a section that exists in `RESULTS.md`."""
    linked = re.findall(r"^\| \[[^]]*\]\(benchmarks/RESULTS\.md#([\w-]+)\)", README, re.MULTILINE)
    assert 2 == len(linked)
    assert set() == set(linked) - anchors(ROOT / "benchmarks" / "RESULTS.md")


@pytest.mark.parametrize("page", sorted(each.name for each in ROOT.glob("*.md")))
def test_links_of_the_pages_outside_the_site_lead_somewhere(page: str) -> None:
    """The links of Markdown files in the root folder lead to files and anchors that exist.

    Their paths are relative to the repository. The links of the site are checked when it is built.
    """
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
    """Return the anchors of a page's headings, and those that its HTML defines."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    return found | set(re.findall(r"id=\"([^\"]+)\"", text))
