"""Test the layout of the package: which room may import which, and where private names belong.

The checks read the source of the package. Two limits are not checked here: ruff limits the
complexity of functions (C901, PLR0912, PLR0915), and the number of files in a folder is not
limited.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest

from tests.support.repository import ROOT

TORCH_PRIVATE = "lflops/torch_private/"
HOOKS = "lflops/attribution/hooks.py"
IS_MODULE_HOOK = re.compile(r"register_(module_)?(full_)?(forward|backward)(_pre)?_hook")

VALUE = {
    "pypi:msgspec",
    "version",
    "errors",
    "extras",
    "units",
    "intervals",
    "garbage",
    "display",
    "error_guard",
    "phase_log",
    "files",
    "profile",
    "hardware",
}
"""Rows that every room may import: `profile` and the small modules that it needs."""

FORMULAS = {"formulas", "formulas.attention", "formulas.packages"}

TORCH = VALUE | {"pypi:torch", "torch_private", "inputs", "model", "attribution"}
"""Rows that the rooms that count and time inside torch may import."""

ANALYSIS = {
    "hardware.peaks",
    "analysis",
    "analysis.analysis",
    "analysis.compare",
    "estimation.prediction",
    "findings",
    "findings.evaluate",
    "findings.registry",
    "findings.rules",
    "memory.peak",
    "ranks",
}

COMMAND = {"cli", "report", "report.html", "report.terminal", "pypi:typer", "pypi:rich"}
"""Rows that an extra with a command may import."""

# Each folder, and each file directly in `lflops/`, has a row with the other rows that it may
# import. The standard library and the files of the row itself are always allowed. If a file may
# import other things than its folder, the file has its own row. The names of rows omit `lflops.`,
# and the names of packages begin with `pypi:`. Every folder must have a row.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "extras": {"errors"},
    "units": set(),
    "intervals": set(),
    "display": set(),
    "garbage": set(),
    "error_guard": set(),
    "phase_log": set(),
    "files": set(),
    "version": set(),
    "hardware": {"errors", "files", "pypi:msgspec"},
    "hardware.peaks": {"hardware", "profile"},
    "profile": {"display", "errors", "files", "units", "hardware", "pypi:msgspec"},
    "formulas": {"pypi:msgspec"},
    "formulas.attention": {"formulas"},
    "formulas.packages": {"formulas", "formulas.attention"},
    "ledger": {"display", "errors", "files", "phase_log", "profile", "pypi:msgspec"},
    "memory.peak": VALUE,
    "memory.allocator": {"errors", "pypi:msgspec"},
    "ranks": VALUE,
    "ranks.merge": VALUE,
    "analysis": VALUE | {"hardware.peaks"},
    "analysis.compare": VALUE | {"analysis"},
    "estimation.prediction": VALUE | {"hardware.peaks"},
    "findings": VALUE | {"analysis", "ranks", "ledger"},
    "findings.rules": VALUE | {"hardware.peaks", "analysis", "findings", "ranks", "ledger"},
    "findings.registry": {"findings", "findings.rules"},
    "findings.evaluate": {"findings", "findings.registry", "findings.rules"},
    "analysis.analysis": VALUE | ANALYSIS - {"analysis.analysis"},
    "trace": VALUE | FORMULAS,
    "torch_private": {"errors", "error_guard", "garbage", "profile", "pypi:torch"},
    "inputs": VALUE | {"pypi:torch", "torch_private"},
    "model": VALUE | {"pypi:torch", "torch_private", "inputs"},
    "attribution": TORCH - {"attribution"},
    "timing": TORCH,
    "hardware.calibrate": TORCH | {"timing"},
    "ranks.collect": TORCH | {"timing", "ranks.merge"},
    "flop_counter": TORCH | FORMULAS | {"memory.allocator", "ranks.collect"},
    "timing.measure": TORCH | {"timing", "flop_counter", "hardware.calibrate", "ranks.collect"},
    "trace.record": TORCH | {"timing", "trace"},
    "estimation": TORCH
    | {"flop_counter", "formulas", "memory.allocator", "memory.peak", "pypi:transformers"},
    "selftest": TORCH | {"flop_counter", "timing", "timing.measure"},
    "report": VALUE | ANALYSIS | {"ledger"},
    "report.first_screen": VALUE | ANALYSIS | {"ledger", "report"},
    "report.display": VALUE | ANALYSIS | {"ledger", "report", "report.explanation"},
    "report.explanation": VALUE | ANALYSIS | {"ledger", "report", "report.first_screen"},
    "report.terminal": VALUE | ANALYSIS | {"report", "report.first_screen", "pypi:rich"},
    "report.payload": VALUE | ANALYSIS | {"ledger", "report", "report.first_screen"},
    "report.html": VALUE | ANALYSIS | {"ledger", "report", "report.payload"},
    "report.figures": VALUE | ANALYSIS | {"pypi:matplotlib"},
    "tensorboard": VALUE | ANALYSIS | {"ledger", "report.payload", "pypi:tensorboard"},
    "monitoring.schedule": {"errors"},
    "monitoring.inputs": TORCH
    | {"monitoring.schedule", "ledger", "ranks.collect", "timing", "trace.record"},
    "monitoring.window": TORCH
    | ANALYSIS
    | {
        "flop_counter",
        "formulas",
        "hardware.calibrate",
        "monitoring.inputs",
        "ranks.collect",
        "ranks.merge",
        "timing",
        "trace",
    }
    | {"trace.record"},
    "monitoring.outputs": TORCH
    | ANALYSIS
    | {
        "ledger",
        "monitoring.inputs",
        "report",
        "report.first_screen",
        "report.html",
        "report.payload",
        "tensorboard",
        "pypi:wandb",
        "pypi:PIL",
    },
    "monitoring": TORCH
    | {
        "analysis.analysis",
        "hardware.calibrate",
        "ledger",
        "ranks",
        "ranks.collect",
        "ranks.merge",
        "timing",
        "trace.record",
    }
    | {"monitoring.inputs", "monitoring.outputs", "monitoring.schedule", "monitoring.window"},
    "integrations.loops": TORCH
    | {"ledger", "monitoring", "monitoring.inputs", "monitoring.outputs"},
    "integrations.lightning": TORCH
    | {
        "ledger",
        "monitoring",
        "monitoring.inputs",
        "timing",
        "pypi:lightning",
        "pypi:pytorch_lightning",
    },
    "integrations": VALUE
    | {
        "ledger",
        "integrations.loops",
        "monitoring.inputs",
        "monitoring.outputs",
        "pypi:transformers",
        "pypi:torch",
    },
    "integrations.auto_detect": TORCH
    | {
        "integrations",
        "integrations.lightning",
        "integrations.loops",
        "monitoring",
        "monitoring.inputs",
    },
    "integrations.deepspeed.text": VALUE | ANALYSIS | {"report"},
    "integrations.deepspeed": TORCH
    | {
        "analysis.analysis",
        "integrations.deepspeed.text",
        "monitoring.schedule",
        "timing",
        "timing.measure",
    },
    "huggingface": {"integrations"},
    # The rooms below import torch only within functions. The last tests of this file check that
    # importing the command line does not load torch.
    "cli": VALUE
    | ANALYSIS
    | {
        "estimation",
        "hardware.calibrate",
        "integrations.auto_detect",
        "ledger",
        "monitoring.inputs",
        "selftest",
        "trace",
        "pypi:typer",
        "pypi:rich",
    }
    | {
        "report",
        "report.explanation",
        "report.first_screen",
        "report.html",
        "report.payload",
        "report.terminal",
    },
    "__main__": {"cli"},
    "trace.ncu": VALUE | COMMAND | {"analysis"},
    "trace.analysis": VALUE
    | COMMAND
    | FORMULAS
    | {"trace", "analysis", "analysis.compare", "hardware.peaks"},
    "memory.snapshots": VALUE | COMMAND | {"memory.allocator", "report.payload"},
    "estimation.planning": VALUE
    | COMMAND
    | {
        "pypi:torch",
        "analysis",
        "estimation",
        "estimation.prediction",
        "inputs",
        "memory.peak",
        "model",
    },
}
MAY_IMPORT["__init__"] = set(MAY_IMPORT) - {"__main__", "cli"}

Check = Callable[[PurePosixPath, str], list[str]]
"""A function that checks a file, and returns a report for each error.

Its arguments are the path and the source of the file.
"""


class Import(NamedTuple):
    """One imported name.

    Attributes:
        line: The line of the import.
        target: The full name of the imported object.
        bound: The name that the file uses for it.
    """

    line: int
    target: str
    bound: str


def imports(path: PurePosixPath, source: str) -> Iterator[Import]:
    """Yield every import of a file.

    This includes imports in functions and under `TYPE_CHECKING`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(node.lineno, name.name, name.asname or name.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            above = path.parts[: -node.level] if node.level else ()
            for name in node.names:
                target = ".".join([*above, *filter(None, [node.module]), name.name])
                yield Import(node.lineno, target, name.asname or name.name)


def row_of(path: PurePosixPath) -> str:
    """Return the row for a file: its own row if there is one, else the row of its folder."""
    own = ".".join([*path.parts[1:-1], path.stem])
    if own in MAY_IMPORT:
        return own
    folder = ".".join(path.parts[1:-1])
    return folder or path.stem


def target_row(target: str) -> str:
    """Return the row of an imported name.

    This is the longest row with which the name begins. For a package other than lflops, it is the
    name of the package.
    """
    first, *parts = target.split(".")
    if first != "lflops":
        return first if first in sys.stdlib_module_names else f"pypi:{first}"
    for end in range(len(parts), 0, -1):
        row = ".".join(parts[:end])
        if row in MAY_IMPORT:
            return row
    return ".".join(parts) or "lflops itself"


def imports_out_of_its_row(path: PurePosixPath, source: str) -> list[str]:
    """Return the imports of a file that the table does not allow."""
    row = row_of(path)
    if row not in MAY_IMPORT:
        if path.name == "__init__.py":
            return []
        return [f"{path}: the table has no row for {row}"]
    allowed = MAY_IMPORT[row] | sys.stdlib_module_names | {row}
    found = []
    for line, name, _ in imports(path, source):
        target = target_row(name)
        if target not in allowed:
            found.append(f"{path}:{line}: {row} may not import {target}")
    return found


def init_without_its_paragraph(path: PurePosixPath, source: str) -> list[str]:
    """Return an error if an `__init__.py` has no docstring, or contains more than its docstring.

    Users import names from three of the folders, so their `__init__.py` may contain code.
    """
    if path.name != "__init__.py":
        return []
    module = ast.parse(source)
    if not ast.get_docstring(module):
        return [f"{path}: no docstring that says the folder's job"]
    is_public = str(path.parent) in {"lflops", "lflops/hardware", "lflops/tensorboard"}
    if is_public or len(module.body) == 1:
        return []
    return [f"{path}: more than a docstring"]


def private_torch_names(path: PurePosixPath, source: str) -> list[str]:
    """Return private names that a file outside `torch_private/` imports from torch.

    Private attributes of names that were imported from torch are included.
    """
    if str(path).startswith(TORCH_PRIVATE):
        return []
    from_torch = [found for found in imports(path, source) if found.target.split(".")[0] == "torch"]
    roots = {"torch", *(found.bound for found in from_torch)}
    private = []
    for found in from_torch:
        if any(map(is_private, found.target.split("."))):
            private.append((found.line, found.target))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root(node) in roots:
            private.append((node.lineno, ast.unparse(node)))
    return [f"{path}:{line}: {name} belongs in torch_private/" for line, name in private]


def hooks_elsewhere(path: PurePosixPath, source: str) -> list[str]:
    """Return calls that install hooks on modules in any file except `hooks.py`."""
    if str(path) == HOOKS:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute):
            name = function.attr
        else:
            name = getattr(function, "id", "")
        if IS_MODULE_HOOK.fullmatch(name):
            found.append(f"{path}:{function.lineno}: {name} belongs in {HOOKS}")
    return found


def is_private(name: str) -> bool:
    """Return whether a name is private: it begins with an underscore.

    Names such as `__version__` are not private.
    """
    return name.startswith("_") and not name.endswith("__")


def root(node: ast.expr) -> str | None:
    """Return the name at which a chain of attributes starts."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def pages() -> dict[PurePosixPath, str]:
    """Return the source of every Python file of the package."""
    return {
        PurePosixPath(path.relative_to(ROOT)): path.read_text("utf-8")
        for path in sorted((ROOT / "lflops").rglob("*.py"))
    }


CHECKS = [imports_out_of_its_row, init_without_its_paragraph, private_torch_names, hooks_elsewhere]


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_its_rules(check: Check) -> None:
    """No file of the package breaks the rule."""
    culprits = []
    for path, source in pages().items():
        culprits += check(path, source)
    assert [] == culprits


def test_the_rules_are_held_against_the_package_itself() -> None:
    """`pages` reads the files of lflops.

    Otherwise the rules would pass without checking anything.
    """
    checked = {str(path) for path in pages()}
    assert {"lflops/__init__.py", "lflops/flop_counter/__init__.py"} <= checked


CULPRITS = [
    (imports_out_of_its_row, "lflops/profile/profile.py", "import torch"),
    (imports_out_of_its_row, "lflops/units.py", "from rich.text import Text"),
    (
        imports_out_of_its_row,
        "lflops/monitoring/schedule.py",
        "from lflops.analysis.tree import tree",
    ),
    (imports_out_of_its_row, "lflops/errors.py", "from lflops import count"),
    (imports_out_of_its_row, "lflops/hardware/chips.py", "import lflops"),
    (imports_out_of_its_row, "lflops/profile/json_file.py", "from .. import flop_counter"),
    (imports_out_of_its_row, "lflops/flop_counter/count.py", "from lflops.analysis import tree"),
    (
        imports_out_of_its_row,
        "lflops/flop_counter/dispatch_mode.py",
        "from lflops.estimation.fake_tensors import refuse",
    ),
    (imports_out_of_its_row, "lflops/flop_counter/dispatch_mode.py", "from ..report import text"),
    (imports_out_of_its_row, "lflops/model/call.py", "from lflops.flop_counter.count import count"),
    (
        imports_out_of_its_row,
        "lflops/trace/analysis/merge.py",
        "import lflops.attribution.module_tracker as tracker",
    ),
    (imports_out_of_its_row, "lflops/analysis/tree.py", "def f():\n    import torch"),
    (
        imports_out_of_its_row,
        "lflops/analysis/tree.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
    ),
    (imports_out_of_its_row, "lflops/report/summary_facts.py", "from rich.table import Table"),
    (
        imports_out_of_its_row,
        "lflops/report/summary_facts.py",
        "from lflops.report.terminal.text import text",
    ),
    (
        imports_out_of_its_row,
        "lflops/report/payload/payload.py",
        "from lflops.flop_counter import count",
    ),
    (imports_out_of_its_row, "lflops/tensorboard/tab.py", "import matplotlib.pyplot"),
    (imports_out_of_its_row, "lflops/integrations/deepspeed/api.py", "import lightning"),
    (imports_out_of_its_row, "lflops/cli/estimate.py", "def estimate():\n    import torch"),
    (imports_out_of_its_row, "lflops/integrations/lightning/monitor.py", "import requests"),
    (imports_out_of_its_row, "lflops/__init__.py", "import torch"),
    (imports_out_of_its_row, "lflops/utils.py", ""),
    (imports_out_of_its_row, "lflops/flop_counter/helpers/text.py", ""),
    (init_without_its_paragraph, "lflops/flop_counter/__init__.py", ""),
    (
        init_without_its_paragraph,
        "lflops/flop_counter/__init__.py",
        '"""Counting."""\nfrom lflops.flop_counter.count import count',
    ),
    (private_torch_names, "lflops/flop_counter/count.py", "import torch._dynamo"),
    (hooks_elsewhere, "lflops/flop_counter/count.py", "model.register_forward_hook(print)"),
    (hooks_elsewhere, "lflops/flop_counter/count.py", "register_module_forward_pre_hook(print)"),
    (
        hooks_elsewhere,
        "lflops/integrations/lightning/monitor.py",
        "module.register_full_backward_hook(print)",
    ),
    (private_torch_names, "lflops/flop_counter/count.py", "from torch._C import Graph"),
    (
        private_torch_names,
        "lflops/flop_counter/count.py",
        "from torch.utils import _pytree as tree",
    ),
    (
        private_torch_names,
        "lflops/flop_counter/count.py",
        "import torch\ntorch._C._current_graph_task_id()",
    ),
    (
        private_torch_names,
        "lflops/flop_counter/count.py",
        "from torch import nn\nnn.Module._call_impl",
    ),
    (
        private_torch_names,
        "lflops/flop_counter/count.py",
        "def f():\n    import torch.nn as neural\n    neural.modules._functions",
    ),
]


@pytest.mark.parametrize(("check", "path", "source"), CULPRITS)
def test_a_planted_culprit_is_found(check: Check, path: str, source: str) -> None:
    """The check reports a file that breaks its rule, and begins each report with the path."""
    found = check(PurePosixPath(path), source)
    assert found
    assert all(culprit.startswith(path) for culprit in found)


INNOCENTS = [
    (
        imports_out_of_its_row,
        "lflops/profile/json_file.py",
        (
            "import json, msgspec\n"
            "from lflops.profile.profile import Profile\n"
            "from lflops import units"
        ),
    ),
    (
        imports_out_of_its_row,
        "lflops/flop_counter/dispatch_mode.py",
        "import torch\nfrom lflops.attribution import hooks\nfrom .totals import f",
    ),
    (
        imports_out_of_its_row,
        "lflops/report/terminal/text.py",
        "import rich\nfrom lflops.analysis.tree import tree\nfrom lflops.units import flops",
    ),
    (
        imports_out_of_its_row,
        "lflops/cli/hardware.py",
        "def hardware():\n    from lflops.hardware.calibrate import calibrate",
    ),
    (
        imports_out_of_its_row,
        "lflops/integrations/lightning/monitor.py",
        "import lightning\nimport torch\nfrom lflops.monitoring.run import MonitoredRun",
    ),
    (
        imports_out_of_its_row,
        "lflops/__init__.py",
        "from lflops.flop_counter.count import count\nfrom lflops.errors import LflopsError",
    ),
    (init_without_its_paragraph, "lflops/flop_counter/__init__.py", '"""Counts."""'),
    (init_without_its_paragraph, "lflops/__init__.py", '"""lflops."""\nimport importlib'),
    (
        private_torch_names,
        "lflops/flop_counter/count.py",
        "import torch\ntorch.__version__\nself._handles",
    ),
    (
        private_torch_names,
        "lflops/torch_private/autograd.py",
        "import torch._dynamo\ntorch._C._current_graph_task_id()",
    ),
]


@pytest.mark.parametrize(("check", "path", "source"), INNOCENTS)
def test_what_keeps_the_rule_is_let_through(check: Check, path: str, source: str) -> None:
    """The check reports nothing for a file that keeps its rule."""
    assert [] == check(PurePosixPath(path), source)


def circle(table: dict[str, set[str]]) -> list[str]:
    """Return rows that may import each other in a circle, or an empty list."""
    graph = {row: allowed & table.keys() - {row} for row, allowed in table.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_table_has_no_circle() -> None:
    """Imports go in one direction: if a room may import another, the other may not import it."""
    assert [] == circle(MAY_IMPORT)


def test_a_circle_would_be_seen() -> None:
    """The check above can fail: `circle` finds a planted circle."""
    assert {"profile", "ranks.merge"} == set(circle(MAY_IMPORT | {"profile": {"ranks.merge"}}))


def heavy_modules_after(statement: str) -> set[str]:
    """Return which of torch and Lightning a new interpreter has loaded after the statement."""
    heavy = "{'torch', 'lightning', 'pytorch_lightning'}"
    code = f"import sys\n{statement}\nprint(*{heavy} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize("module", ["lflops", "lflops.cli.main", "lflops.profile.json_file"])
def test_the_light_modules_load_neither_torch_nor_lightning(module: str) -> None:
    """These imports load neither torch nor Lightning.

    Otherwise, a shell command or a look at a file would start slowly.
    """
    assert set() == heavy_modules_after(f"import {module}")


def test_a_loaded_torch_would_be_seen() -> None:
    """The check above can fail: it finds torch if it is loaded."""
    assert {"torch"} == heavy_modules_after("import torch")
