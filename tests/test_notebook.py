"""The notebook of the examples runs from top to bottom, and its stored outputs are those of its cells."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.run_notebook import executed, read

FIRST_CONVOLUTION = 8 * 32 * 32 * 32 * 3 * 3 * 3
"""MACs of a batch of 8 images of 32 x 32 pixels, 3 to 32 channels, a kernel of 3 x 3."""


def texts(notebook: dict[str, Any]) -> list[str]:
    """The output of each code cell as text; empty if it has none."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            outputs = cell["outputs"]
            found.append("".join(outputs[0]["data"]["text/plain"]) if outputs else "")
    return found


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is that of a pencil; each cell that stores an output has one."""
    monkeypatch.chdir(tmp_path)
    stored = read()
    ran = executed(stored)
    assert str(FIRST_CONVOLUTION) in texts(ran)
    assert [bool(text) for text in texts(stored)] == [bool(text) for text in texts(ran)]


def test_the_stored_notebook_has_tables_that_need_no_script() -> None:
    """A site that shows the file shows them."""
    pages = []
    for cell in read()["cells"]:
        for output in cell.get("outputs", ()):
            pages.append("".join(output["data"].get("text/html", ())))
    shown = [page for page in pages if page]
    assert len(shown) >= 4
    assert not any("<script" in page for page in shown)
