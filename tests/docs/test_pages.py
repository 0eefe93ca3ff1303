"""Test that every Python block and shell line of the documentation runs, page by page.

Other tests check the generated parts, the links, the pictures and the quoted figures.
"""

import re
import runpy
from pathlib import Path

import pytest

import lflops
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS
from tests.support.markdown_pages import blocks, run_page
from tests.support.repository import ROOT

pytestmark = [
    *LIGHTNINGS_WARNINGS,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DOCS = ROOT / "docs"
PAGES = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]


def has_runnable_block(page: str) -> bool:
    """Return whether a page has a Python block or shell lines."""
    text = (DOCS / page).read_text("utf-8")
    return any(block.language in {"python", "sh"} for block in blocks(text))


RUN = [page for page in PAGES if has_runnable_block(page)]


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page run from top to bottom, in a folder that is empty at first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    # Lightning sets these variables; after the test, `monkeypatch` restores them.
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(seed, "0")
    run_page((DOCS / page).read_text("utf-8"), page)


def test_few_blocks_are_left_out() -> None:
    """At most a tenth of all blocks are marked as not run."""
    runnable = []
    for page in PAGES:
        for block in blocks((DOCS / page).read_text("utf-8")):
            if block.language in {"python", "sh"}:
                runnable.append(block)
    left_out = [block for block in runnable if block.not_run]
    assert len(left_out) <= len(runnable) / 10


@pytest.mark.parametrize(
    "culprit",
    [
        "```python\n1 / 0\n```",
        '```python\nprint(2)\n```\n\n```text title="output"\n3\n```',
        "```sh\nlflops show missing.json\n```",
        "```sh\nmake nothing\n```",
        "```sh\nrm -r everything\n```",
        "<!-- setup\nraise ValueError\n-->",
    ],
)
def test_a_block_that_fails_is_named(
    culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a failing block begins with the page and the line.

    Line 3 is where the block begins; the block with a wrong output begins at line 7.
    """
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"^page\.md:[357]\b"):
        run_page(f"# Page\n\n{culprit}\n", "page.md")


def test_a_block_sees_what_is_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block can use names of the setup and of earlier blocks, and files of earlier blocks."""
    monkeypatch.chdir(tmp_path)
    page = (
        "<!-- setup\na = 2\n-->\n```python\nb = a + 1\n```\n```python\n# mine.py\nc = 5\n```\n"
        "<!-- not run: it is slow -->\n```python\n1 / 0\n```\n"
        '```python\nimport mine\nprint(b * mine.c)\n```\n```text title="output"\n15\n```\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert 3 == run_page(page, "page.md")["b"]


def test_the_reference_has_every_public_name() -> None:
    """The page lists each public name exactly once.

    Three public names are not in `lflops.__all__`, because they are reached through a module.
    """
    page = (DOCS / "reference/python.md").read_text("utf-8")
    names = re.findall(r"^::: lflops\.(\S+)$", page, re.MULTILINE)
    public = {*lflops.__all__, "hardware.lookup", "tensorboard.log", "huggingface.FlopsCallback"}
    assert [] == [
        f"add ::: lflops.{name} to docs/reference/python.md" for name in sorted(public - set(names))
    ]
    assert sorted(public) == sorted(names)


INDEX = (DOCS / "index.md").read_text("utf-8")


def test_every_page_is_reachable_from_the_index() -> None:
    """The index links to every other page directly."""
    assert [] == [page for page in PAGES if page != "index.md" and f"]({page})" not in INDEX]


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("reference/")])
def test_generated_parts_are_those_of_the_code(page: str) -> None:
    """The generated parts are up to date; `python docs/site_pages.py` updates them."""
    generate = runpy.run_path(str(DOCS / "site_pages.py"))["with_generated_text"]
    text = (DOCS / page).read_text("utf-8")
    assert text == generate(text)
    # A part without its end comment is never filled.
    assert text.count("<!-- generated: ") == text.count("<!-- end of generated text -->")


def test_an_outdated_part_would_be_seen() -> None:
    """Only the text between the two comments is replaced."""
    generate = runpy.run_path(str(DOCS / "site_pages.py"))["with_generated_text"]
    page = "above\n<!-- generated: chips -->\nold\n<!-- end of generated text -->\nbelow\n"
    first, *_, last = generate(page).splitlines()
    assert ("above", "below") == (first, last)
    assert "old" not in generate(page).splitlines()
    assert "H200" in generate(page)


def test_every_picture_is_there_and_is_used() -> None:
    """The README and the pages use exactly the pictures in `docs/images`, for both themes."""
    shown = set()
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r'(?:src|srcset)="([^"]+)"', path.read_text("utf-8")):
            shown.add((path.parent / link).resolve())
    assert set((DOCS / "images").iterdir()) == shown


LIMITS = (DOCS / "reference" / "limits.md").read_text("utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")


def cells(line_begin: str, text: str) -> list[str]:
    """Return the cells of the first table row that begins with `line_begin`."""
    line = next(line for line in text.splitlines() if line.startswith(line_begin))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("limit", "result"),
    [("| one model of the family", "| each model"), ("| one chip", "| each chip")],
)
def test_errors_of_predictions_are_those_of_the_benchmark(limit: str, result: str) -> None:
    """The limits page quotes the mean error in whole percent and the share of good intervals."""
    _, error, held = cells(limit, LIMITS)
    measured = cells(result, RESULTS)
    assert f"{float(measured[2].rstrip('%')):.0f} %" == error
    assert measured[-1].replace("%", " %") == held


def test_figures_in_sentences_are_those_of_the_benchmark() -> None:
    """The limits page quotes the fitted rows, the what-if intervals and the two predicted steps."""
    rows = re.search(r"(\d+) rows of MPT are fitted", RESULTS)
    held = re.search(r"(\d+ of \d+) intervals hold", RESULTS)
    steps = re.findall(r"tokens: (\d+) ms, predicted (\d+) ms", RESULTS)
    prose = " ".join(LIMITS.split())
    assert rows is not None
    assert held is not None
    assert f"fitted to {rows[1]} published training runs" in prose
    assert f"{held[1]} measured changes were inside" in prose
    assert 2 == len(steps)
    for measured, predicted in steps:
        assert re.search(rf"{measured} ms (was predicted )?as {predicted} ms", prose)
