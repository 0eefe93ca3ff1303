"""Operators of a trace.

Times, what is counted once, the roof above it, and the utilization of a step.
"""

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
"""100 FLOPs and 10 bytes a nanosecond."""


def nested() -> TraceByHand:
    """A linear layer that calls addmm, which multiplies [10, 20] with [20, 30] in 200 ns and adds a bias."""
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
    """On the host linear has 100 - 80 ns of its own, addmm 80 - 10.

    The device's 200 ns are addmm's own.
    """
    rows = {row.name: row for row in summarise(nested().read(tmp_path)).operators}
    linear, addmm = rows["aten::linear"], rows["aten::addmm"]
    assert (100, 20, 200, 0) == (linear.host, linear.self_host, linear.device, linear.self_device)
    assert (80, 70, 200, 200) == (addmm.host, addmm.self_host, addmm.device, addmm.self_device)


def test_an_operator_that_calls_itself_is_inclusive_once(tmp_path: Path) -> None:
    """`arange` calls `arange` with a result."""
    trace = TraceByHand()
    trace.operator("aten::arange", 0, 100, shapes=[[], []])
    trace.operator("aten::arange", 10, 60, shapes=[[], [], [5]])
    trace.kernel("elementwise", 200, 230, launch=(20, 30))
    (row,) = summarise(trace.read(tmp_path)).operators
    assert (2, 100, 100, 30, 30) == (
        row.calls,
        row.host,
        row.self_host,
        row.device,
        row.self_device,
    )


def test_the_roof_is_the_longer_of_two_times(tmp_path: Path) -> None:
    """6000 MACs and 300 additions take 123 ns at the peak.

    2 * (200 + 600 + 30 + 300) bytes take 226 ns, so memory bounds it.
    """
    (row,) = summarise(nested().read(tmp_path), CHIP).shapes
    assert ("aten::addmm", 1, 200, 6000, 12300, 2260) == (
        row.name,
        row.calls,
        row.device,
        row.macs,
        row.flops,
        row.bytes_moved,
    )
    assert ("memory", "bf16") == (row.bound, row.precision)
    assert (226e-9, 226 / 200, 12300 / 200e-9, 12300 / 2260) == pytest.approx(
        (row.roof_seconds, row.share, row.flops_per_second, row.intensity)
    )
    assert ((30,), (10, 20), (20, 30), None, None) == row.shapes


def test_without_a_chip_the_roof_is_unknown(tmp_path: Path) -> None:
    """And the rate is not."""
    (row,) = summarise(nested().read(tmp_path)).shapes
    assert (None, None, None) == (row.roof_seconds, row.bound, row.share)
    assert row.flops_per_second == pytest.approx(12300 / 200e-9)


def test_a_part_of_a_counted_operator_is_not_counted_again(tmp_path: Path) -> None:
    """A convolution calls another, with the same shapes."""
    trace = TraceByHand()
    shapes, types = [[1, 4, 9, 9], [6, 4, 3, 3]], ["float", "float"]
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
    assert ("aten::convolution", 49 * 6 * 4 * 9, 100, "tf32") == (
        row.name,
        row.macs,
        row.device,
        row.precision,
    )
    assert () == found.unsupported
    assert found.utilization is not None
    assert (49 * 6 * 4 * 9, "tf32", 50e9) == (
        found.utilization.macs,
        found.utilization.precision,
        found.utilization.peak_flops_per_second,
    )


def test_what_multiplies_without_shapes_is_listed(tmp_path: Path) -> None:
    """Not counted, with the device's time; what only passes its work on is not listed."""
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
    """Two steps of 1000 ns, each with 2 x 3 x 4 MACs, on an H100: 989.5 TFLOP/s in bf16."""
    found = summarise(small_gpu_trace().read(tmp_path)).utilization
    assert found is not None
    assert (48, 2, 2e-6, "H100 SXM", "bf16") == (
        found.macs,
        found.steps,
        found.seconds,
        found.hardware,
        found.precision,
    )
    assert 96 / 2e-6 / 989.5e12 == pytest.approx(found.mfu) == pytest.approx(found.hfu)


def test_work_outside_of_the_steps_is_in_no_utilization(tmp_path: Path) -> None:
    """As a validation between them; without steps all counts, over the window."""
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
    """Causal attention of 4 queries: 10 of 16 scores are executed."""
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
    assert (2 * 512 / 100 / 100, 2 * 512 / 100 / 100, 2 * 320 / 100 / 100) == pytest.approx(
        (found.mfu, found.hfu, found.executed)
    )


@pytest.mark.parametrize(("kind", "again"), [(None, 0), (False, 1), (True, 1), ("create_graph", 0)])
def test_what_checkpointing_computes_again_is_in_hfu_alone(
    kind: Any, again: int, tmp_path: Path
) -> None:
    """Two products of 8 x 32 x 32 forward, four backward, and one of them again.

    Of a gradient penalty nothing is computed again.
    """
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    x = torch.randn(8, 32, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        hidden = first(x)
        out = (
            checkpoint(second, hidden, use_reentrant=kind)
            if isinstance(kind, bool)
            else second(hidden)
        )
        if kind == "create_graph":
            torch.autograd.grad(out.square().sum(), x, create_graph=True)[
                0
            ].square().sum().backward()
        else:
            out.square().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = summarise(read_trace(tmp_path / "trace.json"), CHIP).utilization
    assert found is not None
    assert found.mfu is not None
    assert found.hfu == pytest.approx(found.mfu * (1 + again / 6))
    assert kind == "create_graph" or 6 * 8 * 32 * 32 == found.macs


def selective(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Checkpointing that keeps nothing of a layer, by a policy for each operator."""
    contexts = partial(
        create_selective_checkpoint_contexts,
        lambda *_args, **_kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
    )
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def within_another(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Checkpointing within checkpointing."""
    return checkpoint(lambda y: checkpoint(layer, y, use_reentrant=False), x, use_reentrant=False)  # type: ignore[no-any-return]


def with_amp(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Under autocast, which checkpointing restores in backward."""
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [selective, within_another, with_amp])
def test_recomputation_of_every_kind_is_in_no_mfu(
    way: Callable[[nn.Module, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """A layer of 8 x 32 x 32.

    Forward, two gradients, and forward again, which is an operator of the trace and in no MFU.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        way(
            nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
        ).float().square().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = summarise(read_trace(tmp_path / "trace.json"), CHIP)
    assert found.utilization is not None
    assert (3 * 8 * 32 * 32, 4 * 8 * 32 * 32) == (
        found.utilization.macs,
        sum(row.macs for row in found.shapes),
    )


def test_a_compiled_backward_may_compute_again_and_it_is_said(tmp_path: Path) -> None:
    """The trace of a graph names its products, and not what they are for."""
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
        """Each kind of product once."""
        x = self.convolution(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[TraceSummary, lflops.Profile]:
    """A small model, recorded by torch.profiler with its shapes; and counted."""
    model, x = _Model(), torch.randn(2, 3, 8, 8)
    counted = lflops.count(model, (x,), backward=True, loss=lambda out: out.square().sum())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        model(x).square().sum().backward()
    path = tmp_path_factory.mktemp("trace") / "cpu.pt.trace.json"
    recorder.export_chrome_trace(str(path))
    return summarise(read_trace(path)), counted


def test_a_recorded_step_has_the_macs_that_are_counted(
    recorded: tuple[TraceSummary, lflops.Profile],
) -> None:
    """Forward and backward of a convolution, attention and linear layers, by a real trace and by the dispatch mode."""
    found, counted = recorded
    root = counted.modules[""]
    assert () == found.unsupported
    assert found.utilization is not None
    assert root.forward.macs + root.backward.macs == found.utilization.macs
    assert root.forward.macs + root.backward.macs == sum(row.macs for row in found.shapes)


def test_a_recorded_step_has_the_hosts_times(recorded: tuple[TraceSummary, lflops.Profile]) -> None:
    """Own times are parts of inclusive ones, and nothing is unsupported or unread."""
    found, _ = recorded
    assert all(0 <= row.self_host <= row.host for row in found.operators)
    assert {} == dict(found.unread)
    assert {"aten::convolution_backward", "aten::addmm", "aten::mm"} <= {
        row.name for row in found.operators
    }
