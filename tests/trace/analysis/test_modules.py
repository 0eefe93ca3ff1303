"""Test how the modules and scopes of a trace are found.

They are found from stack frames, slices of lflops and named ranges. Backward is found by sequence
numbers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lflops.trace.analysis.operators import SpanTimes
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.summary import summarise
from lflops.trace.annotate import MODULE, PROCESS_ID
from tests.support.traces_by_hand import BACKWARD, TraceByHand


def figures(rows: tuple[SpanTimes, ...]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the instances, calls, device time and own device time, by name and phase."""
    return {
        (row.name, row.phase): (row.instances, row.calls, row.device, row.self_device)
        for row in rows
    }


def test_frames_of_one_class_are_one_row(tmp_path: Path) -> None:
    """Modules of one class, found by their stack frames, are one row.

    A model calls two layers, which launch kernels of 20 and 30 ns. The model itself launches 5 ns.
    """
    trace = TraceByHand()
    trace.event("python_function", "nn.Module: Model_0", 0, 1000)
    trace.event("python_function", "model.py(3): forward", 5, 990)
    for number, length in enumerate((20, 30)):
        begin = 100 * number + 100
        trace.event("python_function", f"nn.Module: Linear_{number}", begin, begin + 90)
        trace.operator("aten::mm", begin + 10, begin + 80)
        trace.kernel("gemm", 2000 + begin, 2000 + begin + length, launch=(begin + 20, begin + 30))
    trace.kernel("add", 3000, 3005, launch=(500, 510))
    found = figures(summarise(trace.read(tmp_path)).modules)
    assert {("Model_0", "forward"): (1, 1, 55, 5), ("Linear_*", "forward"): (2, 2, 50, 50)} == found


def test_backward_is_in_the_module_of_its_forward(tmp_path: Path) -> None:
    """Backward belongs to the module whose forward created the autograd node.

    The node has the same sequence number, 7, as the operator in the module.
    """
    trace = TraceByHand()
    trace.event("python_function", "nn.Module: Linear_0", 0, 100)
    trace.operator("aten::mm", 10, 90, **{"Sequence number": 7})
    trace.kernel("gemm", 1000, 1040, launch=(20, 30))
    node = {"Sequence number": 7, "Fwd thread id": 1}
    trace.operator(
        "autograd::engine::evaluate_function: MmBackward0", 200, 300, thread=BACKWARD, **node
    )
    trace.operator("MmBackward0", 205, 295, thread=BACKWARD, **node)
    trace.operator("aten::mm", 210, 290, thread=BACKWARD)
    trace.kernel("gemm", 1100, 1170, launch=(220, 230), thread=BACKWARD)
    found = figures(summarise(trace.read(tmp_path)).modules)
    assert {
        ("Linear_0", "forward"): (1, 1, 40, 40),
        ("Linear_0", "backward"): (1, 1, 70, 70),
    } == found


def test_slices_of_lflops_are_on_the_threads_that_they_were_recorded_on(tmp_path: Path) -> None:
    """Slices of lflops, which have separate tracks, are assigned to the threads of their calls.

    The track of forward belongs to the thread of the step. The track of backward belongs to the
    thread on which an autograd node begins at the same time.
    """
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    forward: dict[str, Any] = {"pid": PROCESS_ID, "tid": 0, "phase": "forward"}
    backward: dict[str, Any] = {"pid": PROCESS_ID, "tid": 5, "phase": "backward"}
    trace.event(MODULE, "(model)", 0, 400, module="", **forward)
    trace.event(MODULE, "layers.0", 10, 100, module="layers.0", **forward)
    trace.event(MODULE, "layers.1", 110, 200, module="layers.1", **forward)
    trace.event(MODULE, "layers.1", 500, 600, module="layers.1", **backward)
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 500, 590, thread=BACKWARD)
    trace.kernel("a", 2000, 2010, launch=(20, 30))
    trace.kernel("b", 2020, 2040, launch=(120, 130))
    trace.kernel("c", 2050, 2055, launch=(300, 310))
    trace.kernel("d", 2100, 2130, launch=(520, 530), thread=BACKWARD)
    found = figures(summarise(trace.read(tmp_path)).modules)
    assert found == {
        ("(model)", "forward"): (1, 1, 35, 5),
        ("layers.*", "forward"): (2, 2, 30, 30),
        ("layers.1", "backward"): (1, 1, 30, 30),
    }


def test_scopes_are_rows_of_their_own(tmp_path: Path) -> None:
    """Named ranges are rows, also inside other named ranges. A step is no such range."""
    trace = TraceByHand()
    trace.step(0, 0, 1000)
    trace.event("user_annotation", "outer", 10, 500)
    trace.event("user_annotation", "inner", 100, 300)
    trace.kernel("a", 2000, 2010, launch=(120, 130))
    trace.kernel("b", 2010, 2040, launch=(400, 410))
    found = summarise(trace.read(tmp_path))
    assert {("outer", "forward"): (1, 1, 40, 30), ("inner", "forward"): (1, 1, 10, 10)} == figures(
        found.scopes
    )
    assert () == found.modules


def test_a_recorded_stack_has_its_modules(tmp_path: Path) -> None:
    """A real trace with stacks has the classes of all modules, and outer modules take longer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    recorder: Any = profile(activities=[ProfilerActivity.CPU], with_stack=True)
    with recorder, record_function("mine"):
        model(torch.randn(2, 4))
    recorder.export_chrome_trace(str(tmp_path / "stack.json"))
    found = summarise(read_trace(tmp_path / "stack.json"))
    rows = {row.name: row for row in found.modules}
    assert {"Sequential_*": (2, 2), "Linear_*": (2, 2), "ReLU_0": (1, 1)} == {
        name: (row.instances, row.calls) for name, row in rows.items()
    }
    assert rows["Linear_*"].host + rows["ReLU_0"].host < rows["Sequential_*"].host
    assert ["mine"] == [row.name for row in found.scopes]
    assert found.has_stack
