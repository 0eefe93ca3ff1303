"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

from tests.support.repository import ROOT

README = ROOT / "README.md"


def test_the_examples_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who pastes the blocks in order meets no error, and the figure in the comment is the one that comes out."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(block, names)  # noqa: S102 - our own README
    batch, length, width, hidden = 8, 32, 64, 256
    projections, scores, perceptron = 4 * width * width, 2 * length * width, 2 * width * hidden
    assert batch * length * (projections + scores + perceptron) == names["profile"].total()
    assert f"{names['profile'].total():,}" in README.read_text()
    assert (tmp_path / "layer.profile.json").exists()


def test_it_opens_with_the_two_commands() -> None:
    """A newcomer sees `make demo` and `make test` before anything else to type."""
    first = re.search(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    assert ["make demo", "make test"] == [line.split("#")[0].strip() for line in first[1].strip().splitlines()]
