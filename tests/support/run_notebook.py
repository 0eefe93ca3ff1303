"""Run the example notebook without Jupyter, and write its new outputs into the file.

    python -m tests.support.run_notebook

The output of a cell is the value of its last expression as text. If the value has an HTML form, the
output also contains the HTML.
"""

import ast
import json
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run all cells from top to bottom, and return the notebook with their outputs."""
    names: dict[str, Any] = {}
    number = 0
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            value = _run("".join(cell["source"]), names)
            outputs = [] if value is None else [_output(value, number)]
            cell = cell | {"execution_count": number, "outputs": outputs}  # noqa: PLW2901
        cells.append(cell)
    return notebook | {"cells": cells}


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last statement if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102 - our own notebook
        return None
    tree.body.pop()
    exec(compile(tree, "cell", "exec"), names)  # noqa: S102 - our own notebook
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307


def _output(value: Any, number: int) -> dict[str, Any]:
    data = {"text/plain": str(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return {
        "output_type": "execute_result",
        "execution_count": number,
        "metadata": {},
        "data": data,
    }


def read(path: Path = NOTEBOOK) -> dict[str, Any]:
    """Return the notebook in a file."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return notebook


def main() -> None:
    """Run the notebook, and write it with its outputs."""
    text = json.dumps(executed(read()), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
