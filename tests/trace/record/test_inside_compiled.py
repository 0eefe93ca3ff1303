"""A real training inside of compiled code.

Whose its kernels are, and that it is the training that it would be without us.

It is compiled in one process, whose results all tests here look at: to compile takes half a minute.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.repository import ROOT
from tests.support.warm_python import WarmPython

PRODUCTS = {
    ("blocks.0.up", "forward"): 1,
    ("blocks.0.down", "forward"): 1,
    ("blocks.1.up", "forward"): 1,
    ("blocks.1.down", "forward"): 1,
    ("blocks.1.up", "recompute"): 1,
    ("blocks.1.down", "backward"): 2,
    ("blocks.1.up", "backward"): 2,
    ("blocks.0.down", "backward"): 2,
    ("blocks.0.up", "backward"): 1,
}
"""Products of a step.

Backward has one for each weight and one for each input, but for the data. The second block is
checkpointed, and backward needs what its first layer computes.
"""


@pytest.mark.skipif(
    " " in tempfile.gettempdir(),
    reason="inductor gives g++ its paths unquoted: it compiles in no folder with a space",
)
def test_a_training_inside_of_compiled_code(warm_python: WarmPython, tmp_path: Path) -> None:
    """Everything that one process can tell: compiling again for each test would take minutes."""
    ended = warm_python.run((ROOT / "tests/support/compiled_training.py").read_text(), tmp_path)
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    if found["refusal"] is not None:
        assert found["refusal"].startswith(f"torch {torch.__version__}: ")
        pytest.skip(found["refusal"])
    _is_the_same_training(found)
    for name in ("recorded", "from cache"):
        _adds_up(found[name]["code"])
        assert PRODUCTS == _products(found[name]["code"])
        assert (found[name]["code"]["graphs"], found[name]["code"]["regions"]) == (2, 4)
    _adds_up(found["by block"])
    assert {
        (f"{block}.{layer}", "forward"): 1 for block in "01" for layer in ("up", "down")
    } == _products(found["by block"])
    assert (found["by block"]["graphs"], found["by block"]["regions"]) == (1, 4)
    assert {("first", "forward"): 1, ("second", "forward"): 1} == _products(found["by graph"])
    assert (found["by graph"]["graphs"], found["by graph"]["regions"]) == (2, 4)
    assert (found["hits before"], found["hits"]) == (0, 1)
    assert found["unrecorded"]["unrecorded_graphs"] == found["unrecorded"]["graphs"] == 2
    assert found["unrecorded"]["unassigned_seconds"] == found["unrecorded"]["seconds"] > 0


def _is_the_same_training(found: dict[str, Any]) -> None:
    """Weights, losses, graphs and kernels, and no setting of inductor changed for good."""
    for name in ("recorded", "from cache"):
        assert {key: found["plain"][key] for key in ("losses", "weights", "graphs")} == {
            key: found[name][key] for key in ("losses", "weights", "graphs")
        }
        assert found[name]["later"] == 0, "the trace had something compiled"
    number, same = found["kernels"]
    assert number > 0
    assert same
    assert found["refusal"] is None
    assert (found["changed"], found["left"]) == (True, False)


def _adds_up(code: dict[str, Any]) -> None:
    """All of the regions' time is in rows, or unassigned."""
    assert (code["unrecorded_graphs"], code["timed_on"]) == (0, "host")
    parts = sum(kernel["host_seconds"] for kernel in code["kernels"])
    assert parts + code["unassigned_seconds"] == pytest.approx(code["seconds"], rel=1e-9)


def _products(code: dict[str, Any]) -> dict[tuple[str, str], int]:
    """The matrix products of a step by module and phase; the trace has two steps."""
    found: dict[tuple[str, str], int] = {}
    for kernel in code["kernels"]:
        if kernel["name"].startswith("extern_kernels"):
            key = kernel["module"], kernel["phase"]
            found[key] = found.get(key, 0) + kernel["calls"] // 2
    return found
