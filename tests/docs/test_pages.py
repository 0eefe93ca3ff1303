"""Every block of Python and every shell line of the documentation runs, page by page."""

import re
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
RUN = [
    page
    for page in PAGES
    if any(block.language in {"python", "sh"} for block in blocks((DOCS / page).read_text("utf-8")))
]


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty folder, top to bottom."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(seed, "0")  # Lightning sets them, and this takes them back
    run_page((DOCS / page).read_text("utf-8"), page)


def test_few_blocks_are_left_out() -> None:
    """A tenth of them at most, each with its reason."""
    of_pages = [
        block
        for page in PAGES
        for block in blocks((DOCS / page).read_text("utf-8"))
        if block.language in {"python", "sh"}
    ]
    left_out = [block for block in of_pages if block.not_run]
    assert len(left_out) <= len(of_pages) / 10


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
    """By page and line."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"^page\.md:[357]\b"):
        run_page(f"# Page\n\n{culprit}\n", "page.md")


def test_a_block_sees_what_is_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setup's names, an earlier block's, and files."""
    monkeypatch.chdir(tmp_path)
    page = (
        "<!-- setup\na = 2\n-->\n```python\nb = a + 1\n```\n```python\n# mine.py\nc = 5\n```\n"
        "<!-- not run: it is slow -->\n```python\n1 / 0\n```\n"
        '```python\nimport mine\nprint(b * mine.c)\n```\n```text title="output"\n15\n```\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert 3 == run_page(page, "page.md")["b"]


def test_the_reference_has_every_public_name() -> None:
    """Each once, and the two modules that are reached as such."""
    page = (DOCS / "reference/python.md").read_text("utf-8")
    names = re.findall(r"^::: lflops\.(\S+)$", page, re.MULTILINE)
    public = {*lflops.__all__, "hardware.lookup", "tensorboard.log", "huggingface.FlopsCallback"}
    assert [] == [
        f"add ::: lflops.{name} to docs/reference/python.md" for name in sorted(public - set(names))
    ]
    assert sorted(public) == sorted(names)
