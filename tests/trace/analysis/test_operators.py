"""Test the operators of a trace: their times, their costs, their roofline, and the utilization."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lflops
from lflops.hardware.chips import Hardware
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.sentences import remarks
from lflops.trace.analysis.summary import TraceSummary, summarise
from tests.support.traces_by_hand import TraceByHand, small_gpu_trace

CHIP = Hardware(
    "a chip", {"bf16": 100e9, "tf32": 50e9, "fp32": 10e9}, bandwidth_bytes_per_second=10e9
)
"""A chip with 100 FLOPs per nanosecond in bf16 and 10 bytes per nanosecond."""


def nested() -> TraceByHand:
    """Return a trace of `linear`, which calls `addmm`.

    `addmm` multiplies [10, 20] with [20, 30] in 200 ns on the device, and adds a bias.
    """
    trace = TraceByHand()
    trace.operator(
        "aten::linear", 0, 100, shapes=[[10, 20], [30, 20], [30]], types=["c10::BFloat16"] * 3
    )
    types = [*["c10::BFloat16"] * 3, "Scalar", "Scalar"]
    trace.operator(
        "aten::addmm",
        10,
        90,
        shapes=[[30], [10, 20], [20, 30], [], []],
        types=types,
        values=["", "", "", "1", "1"],
    )
    trace.operator("aten::empty", 20, 30)
    trace.kernel("gemm", 200, 350, launch=(40, 50))
    trace.kernel("splitKreduce_kernel", 350, 400, launch=(60, 70))
    return trace


def test_times_are_inclusive_and_its_own(tmp_path: Path) -> None:
    """An operator has inclusive times and self times.

    On the host, `linear` has 100 - 80 ns of self time, and `addmm` has 80 - 10 ns. The 200 ns on
    the device are self time of `addmm`.
    """
    rows = {row.name: row for row in summarise(nested().read(tmp_path)).operators}
    linear = rows["aten::linear"]
    addmm = rows["aten::addmm"]
    assert (100, 20, 200, 0) == (linear.host, linear.self_host, linear.device, linear.self_device)
    assert (80, 70, 200, 200) == (addmm.host, addmm.self_host, addmm.device, addmm.self_device)


def test_an_operator_that_calls_itself_is_inclusive_once(tmp_path: Path) -> None:
    """The inclusive time of an operator that calls itself counts once: `arange` calls `arange`."""
    trace = TraceByHand()
    trace.operator("aten::arange", 0, 100, shapes=[[], []])
    trace.operator("aten::arange", 10, 60, shapes=[[], [], [5]])
    trace.kernel("elementwise", 200, 230, launch=(20, 30))
    (row,) = summarise(trace.read(tmp_path)).operators
    assert 2 == row.calls
    assert (100, 100) == (row.host, row.self_host)
    assert (30, 30) == (row.device, row.self_device)


def test_the_roof_is_the_longer_of_two_times(tmp_path: Path) -> None:
    """The roofline of an operator is the longer of its compute time and its memory time.

    6000 MACs and 300 additions take 123 ns at the peak, and 2 * (200 + 600 + 30 + 300) bytes take
    226 ns. So the operator is memory-bound.
    """
    (row,) = summarise(nested().read(tmp_path), CHIP).shapes
    assert ("aten::addmm", 1, 200) == (row.name, row.calls, row.device)
    assert (6000, 12300, 2260) == (row.macs, row.flops, row.bytes_moved)
    assert ("memory", "bf16") == (row.bound, row.precision)
    assert (226e-9, 226 / 200) == pytest.approx((row.roof_seconds, row.share))
    assert (12300 / 200e-9, 12300 / 2260) == pytest.approx((row.flops_per_second, row.intensity))
    assert ((30,), (10, 20), (20, 30), None, None) == row.shapes


def test_without_a_chip_the_roof_is_unknown(tmp_path: Path) -> None:
    """Without a chip, the roofline is unknown, but the rate is known."""
    (row,) = summarise(nested().read(tmp_path)).shapes
    assert (None, None, None) == (row.roof_seconds, row.bound, row.share)
    assert row.flops_per_second == pytest.approx(12300 / 200e-9)


def test_a_part_of_a_counted_operator_is_not_counted_again(tmp_path: Path) -> None:
    """An operator that a counted operator calls is not counted again.

    A convolution calls another convolution with the same shapes.
    """
    trace = TraceByHand()
    shapes = [[1, 4, 9, 9], [6, 4, 3, 3]]
    types = ["float", "float"]
    trace.operator(
        "aten::convolution",
        0,
        100,
        shapes=[*shapes, *[[]] * 7],
        types=[*types, *["Scalar"] * 7],
        values=["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"],
    )
    trace.operator(
        "aten::cudnn_convolution",
        10,
        90,
        shapes=[*shapes, *[[]] * 7],
        types=[*types, *["Scalar"] * 7],
        values=["", "", "[0, 0]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"],
    )
    trace.kernel(
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwc", 200, 300, launch=(20, 30)
    )
    found = summarise(trace.read(tmp_path), CHIP)
    (row,) = found.shapes
    macs = 49 * 6 * 4 * 9
    assert ("aten::convolution", macs) == (row.name, row.macs)
    assert (100, "tf32") == (row.device, row.precision)
    assert () == found.unsupported
    utilization = found.utilization
    assert utilization is not None
    assert macs == utilization.macs
    assert ("tf32", 50e9) == (utilization.precision, utilization.peak_flops_per_second)


def test_what_multiplies_without_shapes_is_listed(tmp_path: Path) -> None:
    """A matmul without shapes is listed as unsupported, with its device time.

    An operator that only calls other operators is not listed.
    """
    trace = TraceByHand()
    trace.operator("aten::matmul", 0, 100)
    trace.operator("aten::mm", 10, 90)
    trace.kernel("gemm", 200, 350, launch=(40, 50))
    trace.operator("aten::add", 100, 120)
    trace.kernel("elementwise", 350, 360, launch=(105, 110))
    found = summarise(trace.read(tmp_path))
    assert [("aten::mm", 1, 150)] == [
        (row.name, row.calls, row.self_device) for row in found.unsupported
    ]
    assert found.utilization is None


def test_utilization_is_of_the_steps(tmp_path: Path) -> None:
    """The utilization refers to the steps.

    Each of two steps of 1000 ns has 2 x 3 x 4 MACs. The H100 has a peak of 989.5 TFLOP/s in bf16.
    """
    found = summarise(small_gpu_trace().read(tmp_path)).utilization
    assert found is not None
    assert (48, 2, 2e-6) == (found.macs, found.steps, found.seconds)
    assert ("H100 SXM", "bf16") == (found.hardware, found.precision)
    assert 96 / 2e-6 / 989.5e12 == pytest.approx(found.mfu) == pytest.approx(found.hfu)


def test_work_outside_of_the_steps_is_in_no_utilization(tmp_path: Path) -> None:
    """Work outside the steps, such as a validation, is not part of the utilization.

    Without steps, the utilization refers to all work in the window.
    """
    trace = small_gpu_trace()
    trace.operator("aten::mm", 2500, 2600, shapes=[[2, 3], [3, 4]])
    found = summarise(trace.read(tmp_path)).utilization
    assert found is not None
    assert 48 == found.macs
    alone = nested()
    window = summarise(alone.read(tmp_path), CHIP).utilization
    assert window is not None
    assert (6000, 0, 200e-9) == (window.macs, window.steps, window.seconds)
    assert 12000 / 200e-9 / 100e9 == pytest.approx(window.mfu)


def test_what_a_mask_leaves_out_was_not_executed(tmp_path: Path) -> None:
    """`executed` excludes the work that a mask leaves out.

    Causal attention with 4 queries executes 10 of 16 scores.
    """
    trace = TraceByHand()
    trace.operator(
        "aten::_scaled_dot_product_flash_attention",
        0,
        100,
        shapes=[[1, 2, 4, 8]] * 3 + [[]] * 4,
        types=["c10::BFloat16"] * 3 + ["Scalar"] * 4,
        values=["", "", "", "0.", "True", "False", ""],
    )
    trace.kernel("flash_fwd", 200, 300, launch=(10, 20))
    found = summarise(trace.read(tmp_path), CHIP).utilization
    assert found is not None
    # The window and the kernel take 100 ns, and the peak is 100 FLOPs per nanosecond.
    all_scores = 2 * 512 / 100 / 100
    executed = 2 * 320 / 100 / 100
    assert (all_scores, all_scores) == pytest.approx((found.mfu, found.hfu))
    assert executed == pytest.approx(found.executed)


@pytest.mark.parametrize(("kind", "again"), [(None, 0), (False, 1), (True, 1), ("create_graph", 0)])
def test_what_checkpointing_computes_again_is_in_hfu_alone(
    kind: Any, again: int, tmp_path: Path
) -> None:
    """The work that checkpointing computes again is part of HFU, but not of MFU.

    There are two matmuls of 8 x 32 x 32 in forward and four in backward. With checkpointing, one of
    them is computed again. A gradient penalty computes nothing again.
    """
    first = nn.Linear(32, 32)
    second = nn.Linear(32, 32)
    x = torch.randn(8, 32, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        hidden = first(x)
        if isinstance(kind, bool):
            out = checkpoint(second, hidden, use_reentrant=kind)
        else:
            out = second(hidden)
        loss = out.square().sum()
        if kind == "create_graph":
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = gradient.square().sum()
        loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = summarise(read_trace(tmp_path / "trace.json"), CHIP).utilization
    assert found is not None
    assert found.mfu is not None
    assert found.hfu == pytest.approx(found.mfu * (1 + again / 6))
    if kind != "create_graph":
        assert 6 * 8 * 32 * 32 == found.macs


def selective(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a layer with selective checkpointing whose policy recomputes every operator."""
    contexts = partial(
        create_selective_checkpoint_contexts,
        lambda *_args, **_kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
    )
    out: torch.Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return out


def within_another(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a layer with a checkpoint within a checkpoint."""

    def inner(y: torch.Tensor) -> Any:
        return checkpoint(layer, y, use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_amp(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a layer with a checkpoint under autocast, which is restored in backward."""
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [selective, within_another, with_amp])
def test_recomputation_of_every_kind_is_in_no_mfu(
    way: Callable[[nn.Module, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """No kind of recomputation is part of the MFU.

    A layer with 8 x 32 x 32 MACs has forward, two gradients, and forward again. The last is an
    operator of the trace, but not part of the MFU.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        out = way(nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True))
        out.float().square().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = summarise(read_trace(tmp_path / "trace.json"), CHIP)
    assert found.utilization is not None
    assert 3 * 8 * 32 * 32 == found.utilization.macs
    assert 4 * 8 * 32 * 32 == sum(row.macs for row in found.shapes)


def test_a_compiled_backward_may_compute_again_and_it_is_said(tmp_path: Path) -> None:
    """For a compiled backward, a remark says that it may include recomputation.

    The trace of a compiled graph does not show which matmuls are recomputation.
    """
    for name, is_said in (("CompiledFunctionBackward", True), ("MmBackward0", False)):
        trace = TraceByHand()
        trace.operator(name, 0, 100)
        trace.operator("aten::mm", 10, 50, shapes=[[4, 4], [4, 4]])
        assert is_said is ("compiled" in dict(remarks(summarise(trace.read(tmp_path)))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a convolution, attention and a linear layer."""
        x = self.convolution(x).flatten(2).transpose(1, 2)
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(attended)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[TraceSummary, lflops.Profile]:
    """Return the summary of a trace with shapes of a small model, and the count of the model."""
    model = _Model()
    x = torch.randn(2, 3, 8, 8)
    counted = lflops.count(model, (x,), backward=True, loss=lambda out: out.square().sum())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        model(x).square().sum().backward()
    path = tmp_path_factory.mktemp("trace") / "cpu.pt.trace.json"
    recorder.export_chrome_trace(str(path))
    return summarise(read_trace(path)), counted


def test_a_recorded_step_has_the_macs_that_are_counted(
    recorded: tuple[TraceSummary, lflops.Profile],
) -> None:
    """The MACs that are computed from a real trace equal those of `lflops.count`.

    The model has a convolution, attention and linear layers, in forward and backward.
    """
    found, counted = recorded
    root = counted.modules[""]
    assert () == found.unsupported
    assert found.utilization is not None
    assert root.forward.macs + root.backward.macs == found.utilization.macs
    assert root.forward.macs + root.backward.macs == sum(row.macs for row in found.shapes)


def test_a_recorded_step_has_the_hosts_times(recorded: tuple[TraceSummary, lflops.Profile]) -> None:
    """Self times are at most the inclusive times, and all events of the trace are read."""
    found, _ = recorded
    assert all(0 <= row.self_host <= row.host for row in found.operators)
    assert {} == dict(found.unread)
    assert {"aten::convolution_backward", "aten::addmm", "aten::mm"} <= {
        row.name for row in found.operators
    }
