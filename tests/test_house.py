"""The house's rules, read from the source: who may import whom, how long a page may be, where torch's private names live."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LINES_PER_FILE = 320
LINES_PER_FUNCTION = 55
TORCH_COMPAT = PurePosixPath("lflops/collect/torch_compat.py")

FIRST_ROW = {
    "observations",
    "profile",
    "profile_file",
    "merging",
    "merged_rows",
    "merged_stats",
    "merged_steps",
    "queries",
    "extremes",
    "units",
    "errors",
    "hardware",
    "schedule",
}
FOUNDATION = {"msgspec", *(f"lflops.{room}" for room in FIRST_ROW)}

# Beside the standard library and its own files. A room that has no row here may not exist.
MAY_IMPORT = dict.fromkeys(FIRST_ROW, FOUNDATION) | {
    "collect": FOUNDATION | {"torch"},
    "traces": FOUNDATION,
    "analyze": FOUNDATION,
    "report": FOUNDATION | {"lflops.analyze", "rich", "matplotlib"},
    "tensorboard": FOUNDATION | {"lflops.report", "tensorboard"},
    "deepspeed_api": FOUNDATION | {"lflops.collect", "lflops.report"},
    # `collect` within a function only: the last tests hold that importing the shell loads no torch.
    "commands": FOUNDATION | {"lflops.analyze", "lflops.collect", "lflops.report", "lflops.traces", "typer", "rich"},
    "cli": {"lflops.errors", "lflops.commands", "typer"},
}
ROOMS = {f"lflops.{room}" for room in MAY_IMPORT}
MAY_IMPORT["callback"] = set.union(ROOMS, *MAY_IMPORT.values()) | {"lightning", "pytorch_lightning"}
MAY_IMPORT["__main__"] = {"lflops.cli"}
MAY_IMPORT["__init__"] = ROOMS | {"lflops.callback"}

Check = Callable[[PurePosixPath, str], list[str]]


class Import(NamedTuple):
    line: int
    target: str
    bound: str


def imports(path: PurePosixPath, source: str) -> Iterator[Import]:
    """Every import of a file, wherever it stands: at the top, in a function, under `TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(node.lineno, name.name, name.asname or name.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            above = path.parts[: -node.level] if node.level else ()
            for name in node.names:
                target = ".".join([*above, *filter(None, [node.module]), name.name])
                yield Import(node.lineno, target, name.asname or name.name)


def imports_out_of_its_row(path: PurePosixPath, source: str) -> list[str]:
    """Imports that the table has no place for."""
    room = PurePosixPath(path.parts[1]).stem
    if room not in MAY_IMPORT:
        return [f"{path}: the table has no row for {room}"]
    allowed = MAY_IMPORT[room] | sys.stdlib_module_names | {f"lflops.{room}"}
    found = [(line, target.split(".")) for line, target, _ in imports(path, source)]
    return [
        f"{path}:{line}: {room} may not import {'.'.join(parts)}"
        for line, parts in found
        if ".".join(parts[: 2 if parts[0] == "lflops" else 1]) not in allowed
    ]


def filled_init(path: PurePosixPath, source: str) -> list[str]:
    """A sub-package's `__init__` with anything in it; but users reach `lflops.tensorboard` as a module that has `log`."""
    is_sub_package = path.name == "__init__.py" and len(path.parts) > 2 and path.parts[1] != "tensorboard"
    return [f"{path}: not empty"] if is_sub_package and source else []


def long_file(path: PurePosixPath, source: str) -> list[str]:
    """A file over its budget of lines."""
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, {LINES_PER_FILE} at most"] if lines > LINES_PER_FILE else []


def long_functions(path: PurePosixPath, source: str) -> list[str]:
    """Functions over their budget of lines, signature and docstring included."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines, {LINES_PER_FUNCTION} at most"
        for node, lines in lengths
        if lines > LINES_PER_FUNCTION
    ]


def private_torch_names(path: PurePosixPath, source: str) -> list[str]:
    """Private names imported from torch or reached through a name that was, anywhere but in `torch_compat.py`."""
    if path == TORCH_COMPAT:
        return []
    from_torch = [found for found in imports(path, source) if found.target.split(".")[0] == "torch"]
    roots = {"torch", *(found.bound for found in from_torch)}
    named = [(found.line, found.target) for found in from_torch if any(map(is_private, found.target.split(".")))]
    reached = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root(node) in roots
    ]
    return [f"{path}:{line}: {name} belongs in torch_compat.py" for line, name in named + reached]


def is_private(name: str) -> bool:
    """One underscore makes a name private; Python's own `__version__` and the like are not."""
    return name.startswith("_") and not name.endswith("__")


def root(node: ast.expr) -> str | None:
    """The name that a chain of attributes starts at."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def pages() -> dict[PurePosixPath, str]:
    """Every Python file of the package, with its source."""
    return {PurePosixPath(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted((ROOT / "lflops").rglob("*.py"))}


CHECKS = [imports_out_of_its_row, filled_init, long_file, long_functions, private_torch_names]


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_its_rules(check: Check) -> None:
    """No file of the package breaks the rule."""
    assert [] == [culprit for path, source in pages().items() for culprit in check(path, source)]


def test_the_rules_are_held_against_the_package_itself() -> None:
    """The files that are read are lflops's own."""
    assert {"lflops/__init__.py", "lflops/collect/__init__.py"} <= {str(path) for path in pages()}


def function_of(lines: int) -> str:
    """A function that takes so many lines."""
    return "\n".join(["def f():", *["    pass"] * (lines - 1)])


CULPRITS = [
    (imports_out_of_its_row, "lflops/profile.py", "import torch"),
    (imports_out_of_its_row, "lflops/units.py", "from rich.text import Text"),
    (imports_out_of_its_row, "lflops/schedule.py", "from lflops.analyze.tree import tree"),
    (imports_out_of_its_row, "lflops/errors.py", "from lflops import count"),
    (imports_out_of_its_row, "lflops/hardware.py", "import lflops"),
    (imports_out_of_its_row, "lflops/profile_file.py", "from . import collect"),
    (imports_out_of_its_row, "lflops/collect/passes.py", "from lflops.analyze import tree"),
    (imports_out_of_its_row, "lflops/collect/counting/mode.py", "from ...report.text import show"),
    (imports_out_of_its_row, "lflops/traces/merge.py", "import lflops.collect.scopes as scopes"),
    (imports_out_of_its_row, "lflops/analyze/tree.py", "def f():\n    import torch"),
    (imports_out_of_its_row, "lflops/analyze/tree.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
    (imports_out_of_its_row, "lflops/report/text.py", "from lflops.collect import passes"),
    (imports_out_of_its_row, "lflops/tensorboard/tab.py", "import matplotlib.pyplot"),
    (imports_out_of_its_row, "lflops/deepspeed_api.py", "import lightning"),
    (imports_out_of_its_row, "lflops/commands/estimate.py", "def estimate():\n    import torch"),
    (imports_out_of_its_row, "lflops/callback/monitor.py", "import requests"),
    (imports_out_of_its_row, "lflops/__init__.py", "import torch"),
    (imports_out_of_its_row, "lflops/utils.py", ""),
    (filled_init, "lflops/collect/__init__.py", "from lflops.collect.passes import count"),
    (filled_init, "lflops/collect/counting/__init__.py", '"""Counting."""'),
    (long_file, "lflops/units.py", "x = 1\n" * (LINES_PER_FILE + 1)),
    (long_functions, "lflops/units.py", function_of(LINES_PER_FUNCTION + 1)),
    (long_functions, "lflops/units.py", "async " + function_of(LINES_PER_FUNCTION + 1)),
    (private_torch_names, "lflops/collect/scopes.py", "import torch._dynamo"),
    (private_torch_names, "lflops/collect/scopes.py", "from torch._C import Graph"),
    (private_torch_names, "lflops/collect/scopes.py", "from torch.utils import _pytree as tree"),
    (private_torch_names, "lflops/collect/scopes.py", "import torch\ntorch._C._current_graph_task_id()"),
    (private_torch_names, "lflops/collect/scopes.py", "from torch import nn\nnn.Module._call_impl"),
    (private_torch_names, "lflops/collect/scopes.py", "def f():\n    import torch.nn as neural\n    neural.modules._functions"),
]


@pytest.mark.parametrize(("check", "path", "source"), CULPRITS)
def test_a_planted_culprit_is_found(check: Check, path: str, source: str) -> None:
    """The rule's own check says which file it is in."""
    found = check(PurePosixPath(path), source)
    assert found
    assert all(culprit.startswith(path) for culprit in found)


INNOCENTS = [
    (imports_out_of_its_row, "lflops/profile_file.py", "import json, msgspec\nfrom lflops.profile import Profile\nfrom . import units"),
    (imports_out_of_its_row, "lflops/collect/counting/mode.py", "import torch\nfrom lflops.collect import scopes\nfrom ..passes import f"),
    (imports_out_of_its_row, "lflops/report/text.py", "import rich\nfrom lflops.analyze.tree import tree\nfrom lflops.units import flops"),
    (imports_out_of_its_row, "lflops/commands/hardware.py", "def hardware():\n    from lflops.collect.calibrate import calibrate"),
    (imports_out_of_its_row, "lflops/callback/monitor.py", "import lightning\nimport torch\nfrom lflops.tensorboard import log"),
    (imports_out_of_its_row, "lflops/__init__.py", "from lflops.collect.passes import count\nfrom lflops.errors import LflopsError"),
    (filled_init, "lflops/collect/__init__.py", ""),
    (filled_init, "lflops/__init__.py", "import importlib"),
    (long_file, "lflops/units.py", "x = 1\n" * LINES_PER_FILE),
    (long_functions, "lflops/units.py", function_of(LINES_PER_FUNCTION)),
    (private_torch_names, "lflops/collect/scopes.py", "import torch\ntorch.__version__\nself._handles"),
    (private_torch_names, str(TORCH_COMPAT), "import torch._dynamo\ntorch._C._current_graph_task_id()"),
]


@pytest.mark.parametrize(("check", "path", "source"), INNOCENTS)
def test_what_keeps_the_rule_is_let_through(check: Check, path: str, source: str) -> None:
    """At its budget to the line, in its row, in the right room: nothing to say."""
    assert [] == check(PurePosixPath(path), source)


def heavy_modules_after(statement: str) -> set[str]:
    """Which of torch and Lightning a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*{{'torch', 'lightning', 'pytorch_lightning'}} & sys.modules.keys())"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", ["lflops", "lflops.cli", "lflops.profile_file"])
def test_the_light_modules_load_neither_torch_nor_lightning(module: str) -> None:
    """A shell command and a look at a file start at once."""
    assert set() == heavy_modules_after(f"import {module}")


def test_a_loaded_torch_would_be_seen() -> None:
    """The check above can fail."""
    assert {"torch"} == heavy_modules_after("import torch")
