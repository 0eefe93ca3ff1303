"""Test that the table of formulas contains the formulas of every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lflops.formulas
from lflops.formulas.table import FORMULAS, READS, load_families
from tests.support.repository import ROOT

OPERATOR_COSTS = ROOT / "lflops/flop_counter"
IMPORTER = ROOT / "lflops/flop_counter/operators.py"


def test_a_new_file_in_formulas_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is searched, so a new file is found without an import."""
    (tmp_path / "acme.py").write_text(
        "from lflops.formulas.table import formula\n\n@formula('acme::spin')\ndef spin(x):\n    return 7 * x[0]\n",
        "utf-8",
    )
    monkeypatch.setattr(lflops.formulas, "__path__", [*lflops.formulas.__path__, str(tmp_path)])
    try:
        load_families()
        assert 7 * 3 == FORMULAS["acme::spin"]((3,))
    finally:
        sys.modules.pop("lflops.formulas.acme", None)
        vars(lflops.formulas).pop("acme", None)
        FORMULAS.pop("acme::spin", None)
        READS.pop("acme::spin", None)


def test_the_reader_of_traces_alone_has_all_of_the_table() -> None:
    """A new process that imports only the reader of traces has the whole table."""
    load_families()
    code = "import lflops.trace.analysis.operator_cost\nfrom lflops.formulas.table import FORMULAS\nprint(*FORMULAS)"
    alone = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert sorted(FORMULAS) == sorted(alone)


def calls(source: str, name: str) -> bool:
    """Return whether a file calls a function of this name."""
    called = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == name for function in called)


def test_whoever_counts_calls_loads_all_families() -> None:
    """The file that counts calls also calls `load_families`.

    It imports torch, so the test reads its source instead of starting another process.
    """
    assert calls(IMPORTER.read_text("utf-8"), "load_families")
    assert not calls("from lflops.formulas.table import load_families", "load_families")


def unimported(files: dict[str, str], importer: str) -> list[str]:
    """Return the files that define costs of calls and that the importer does not import."""
    folder = "lflops.flop_counter."
    imported = set()
    for node in ast.walk(ast.parse(importer)):
        if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith(folder):
            continue
        for alias in node.names:
            path = f"{node.module}.{alias.name}".removeprefix(folder)
            imported.add(path.partition(".")[0])
    with_costs = [name for name, source in files.items() if calls(source, "cost_of_call")]
    return [name for name in with_costs if name not in imported]


def test_every_file_with_costs_of_calls_is_imported() -> None:
    """`operators.py` imports every file that defines costs of calls."""
    files = {path.stem: path.read_text("utf-8") for path in OPERATOR_COSTS.glob("*.py")}
    missing = unimported(files, IMPORTER.read_text("utf-8"))
    assert not missing, (
        f"import {missing} of lflops/flop_counter/ in lflops/flop_counter/operators.py"
    )


def test_a_file_with_costs_that_nobody_imports_would_be_seen() -> None:
    """A file that is not imported would make the test above fail."""
    files = {
        "acme": "@cost_of_call('acme::spin')\ndef spin(args, kwargs, out):\n    return Cost(1)\n",
        "flex": "",
        "shapes": "import math",
    }
    assert ["acme"] == unimported(files, "from lflops.flop_counter import flex")
    assert [] == unimported(files, "from lflops.flop_counter import acme, flex")
    assert [] == unimported(files, "from lflops.flop_counter.acme import spin")
