"""Test a real training run with compiled code.

The kernels of the compiled code must belong to the right modules, and lflops must not change the
run. Compiling takes half a minute, so one process compiles for all checks.
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
"""Number of matmuls of a step, by module and phase.

Backward has one matmul for each weight and one for each input, except for the data. The second
block is checkpointed. Its first layer is recomputed, because backward needs its result.
"""


@pytest.mark.skipif(
    " " in tempfile.gettempdir(),
    reason="inductor gives g++ its paths unquoted: it compiles in no folder with a space",
)
def test_a_training_inside_of_compiled_code(warm_python: WarmPython, tmp_path: Path) -> None:
    """Check all results of one process, because compiling for each check would take minutes."""
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
        ("0.up", "forward"): 1,
        ("0.down", "forward"): 1,
        ("1.up", "forward"): 1,
        ("1.down", "forward"): 1,
    } == _products(found["by block"])
    assert (found["by block"]["graphs"], found["by block"]["regions"]) == (1, 4)
    assert {("first", "forward"): 1, ("second", "forward"): 1} == _products(found["by graph"])
    assert (found["by graph"]["graphs"], found["by graph"]["regions"]) == (2, 4)
    assert (found["hits before"], found["hits"]) == (0, 1)
    assert found["unrecorded"]["unrecorded_graphs"] == found["unrecorded"]["graphs"] == 2
    assert found["unrecorded"]["unassigned_seconds"] == found["unrecorded"]["seconds"] > 0


def _is_the_same_training(found: dict[str, Any]) -> None:
    """Check that weights, losses, graphs and kernels are the same as without lflops.

    No setting of inductor may be changed permanently.
    """
    for name in ("recorded", "from cache"):
        for key in ("losses", "weights", "graphs"):
            assert found["plain"][key] == found[name][key]
        assert found[name]["later"] == 0, "the trace had something compiled"
    number, same = found["kernels"]
    assert number > 0
    assert same
    assert found["refusal"] is None
    assert (found["changed"], found["left"]) == (True, False)


def _adds_up(code: dict[str, Any]) -> None:
    """Check that the times of the kernels and the unassigned time add up to the total time."""
    assert (code["unrecorded_graphs"], code["timed_on"]) == (0, "host")
    parts = sum(kernel["host_seconds"] for kernel in code["kernels"])
    assert parts + code["unassigned_seconds"] == pytest.approx(code["seconds"], rel=1e-9)


def _products(code: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the number of matmuls per step by module and phase. The trace has two steps."""
    found: dict[tuple[str, str], int] = {}
    for kernel in code["kernels"]:
        if kernel["name"].startswith("extern_kernels"):
            key = kernel["module"], kernel["phase"]
            found[key] = found.get(key, 0) + kernel["calls"] // 2
    return found
