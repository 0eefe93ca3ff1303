"""Test that the example notebook runs, and that its stored outputs match its cells."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.run_notebook import executed, read

FIRST_CONVOLUTION = 8 * 32 * 32 * 32 * 3 * 3 * 3
"""MACs of the first convolution for a batch of 8 images of 32 x 32 pixels.

It has 3 input channels, 32 output channels and a kernel of 3 x 3.
"""


def texts(notebook: dict[str, Any]) -> list[str]:
    """Return the output of each code cell as text, which is empty if the cell has no output."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            outputs = cell["outputs"]
            found.append("".join(outputs[0]["data"]["text/plain"]) if outputs else "")
    return found


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook counts the MACs that were computed by hand.

    Each cell that has a stored output also has an output when it runs.
    """
    monkeypatch.chdir(tmp_path)
    stored = read()
    ran = executed(stored)
    assert str(FIRST_CONVOLUTION) in texts(ran)
    assert [bool(text) for text in texts(stored)] == [bool(text) for text in texts(ran)]


def test_the_stored_notebook_has_tables_that_need_no_script() -> None:
    """The stored HTML tables contain no scripts.

    So any site that shows the notebook file also shows the tables.
    """
    pages = []
    for cell in read()["cells"]:
        for output in cell.get("outputs", ()):
            pages.append("".join(output["data"].get("text/html", ())))
    shown = [page for page in pages if page]
    assert len(shown) >= 4
    assert not any("<script" in page for page in shown)
