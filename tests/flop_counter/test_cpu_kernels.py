"""Test that results in an estimate have the strides and the memory of real CPU kernels.

For some operators, torch's fake kernels return other strides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from lflops.estimation.fake_tensors import Fakes
from lflops.flop_counter.cpu_kernels import CORRECTIONS
from lflops.profile.notes import sentence
from lflops.torch_private.tensors import storage_key

aten = torch.ops.aten


def turned(*shape: int) -> Tensor:
    """Return a tensor whose last two dimensions are transposed in memory."""
    return torch.rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def last(*shape: int) -> Tensor:
    """Return an image in channels-last memory format."""
    return torch.rand(*shape).contiguous(memory_format=torch.channels_last)


def plain(*shape: int) -> Tensor:
    """Return a contiguous tensor."""
    return torch.rand(*shape)


x = turned(4, 5, 6)
g = plain(4, 5, 6)
PAIRS = [
    (x, g),
    (turned(5, 6), g),
    (x, plain(5, 6)),
    (plain(6, 1, 4).permute(2, 1, 0), turned(5, 6)),
]
HALVES = [(x, g), (g, x), (x, g[:, :1].expand_as(g)), (x, g[:1].expand_as(g))]
channels = [torch.rand(5) for _ in range(4)]
lstm = [
    plain(3, 2, 4),
    plain(20, 4),
    plain(20, 5),
    plain(20),
    plain(20),
    plain(1, 2, 5),
    plain(1, 2, 5),
]
how_lstm: tuple[Any, ...] = (False, [], 2, 5, 1, True, False, False, True)


def lstm_backward(*tensors: Tensor) -> Any:
    """Run the backward of an LSTM layer on the results of its forward."""
    out, h, c, workspace = aten.mkldnn_rnn_layer(*tensors, *how_lstm)
    return aten.mkldnn_rnn_layer_backward(
        *tensors, out, h, c, out, h, c, False, 2, 5, 1, True, True, False, [], False, workspace
    )


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Run the backward of a layer norm with the statistics of its forward."""
    _, mean, rstd = aten.native_layer_norm(x, [6], weight, bias, 1e-5)
    return aten.native_layer_norm_backward(
        grad, x, [6], mean, rstd, weight, bias, [True, True, True]
    )


def batch_norm_backward(name: str, wants_input: bool, grad: Tensor, x: Tensor) -> Any:
    """Run the backward of a batch norm with known statistics for all channels."""
    mask = [wants_input, True, True]
    if name == "batch_norm_backward":
        return aten.batch_norm_backward(
            grad, x, *channels[:1], *channels, True, 1e-5, mask, torch.empty(0, dtype=torch.uint8)
        )
    return aten.native_batch_norm_backward(grad, x, *channels[:1], *channels, True, 1e-5, mask)


CASES: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "native_batch_norm": [
        (lambda x: aten.native_batch_norm(x, *channels, True, 0.1, 1e-5), (each,))
        for each in (x, last(4, 5, 6, 7))
    ],
    "_native_batch_norm_legit": [
        (lambda x: aten._native_batch_norm_legit(x, *channels, True, 0.1, 1e-5), (x,))
    ],
    "_native_batch_norm_legit.no_stats": [
        (lambda x: aten._native_batch_norm_legit.no_stats(x, *channels[:2], True, 0.1, 1e-5), (x,))
    ],
    "_batch_norm_with_update": [
        (lambda x: aten._batch_norm_with_update(x, *channels, 0.1, 1e-5), (x,))
    ],
    "native_layer_norm_backward": [
        (layer_norm_backward, (grad, g, plain(6), plain(6))) for grad in (x, g)
    ],
    "_log_softmax_backward_data": [
        (lambda grad, out: aten._log_softmax_backward_data(grad, out, 1, torch.float32), (x, g))
    ],
    "normal.Tensor_Tensor": [(torch.normal, (x, x))],
    "pow.Scalar": [(partial(torch.pow, 2.0), (x,))],
    "log_sigmoid_forward": [(aten.log_sigmoid_forward, (x,))],
    "mse_loss_backward": [(lambda a, b: aten.mse_loss_backward(torch.ones(()), a, b, 1), (x, x))],
    "smooth_l1_loss_backward": [
        (lambda a, b: aten.smooth_l1_loss_backward(torch.ones(()), a, b, 1, 1.0), (x, x))
    ],
    "huber_loss_backward": [
        (lambda a, b: aten.huber_loss_backward(torch.ones(()), a, b, 1, 1.0), (x, x))
    ],
    "binary_cross_entropy_backward": [
        (aten.binary_cross_entropy_backward, (grad, y, y)) for grad, y in ((x, g), (g, x))
    ],
    "native_dropout_backward": [
        (lambda grad: aten.native_dropout_backward(grad, grad > 0, 2.0), (x,))
    ],
    "special_xlog1py": [(torch.special.xlog1py, (turned(4, 5, 6), plain(5, 6)))],
    "div.Tensor_mode": [(partial(torch.div, rounding_mode="floor"), (x, torch.tensor(2.0)))],
    "hardswish_backward": [(aten.hardswish_backward, (x, g))],
    "hardtanh_backward": [(lambda grad, x: aten.hardtanh_backward(grad, x, -1.0, 1.0), (x, g))],
    "leaky_relu_backward": [
        (lambda grad, x: aten.leaky_relu_backward(grad, x, 0.1, False), pair) for pair in HALVES
    ],
    "logit_backward": [(aten.logit_backward, (x, g))],
    "threshold_backward": [
        (lambda grad, x: aten.threshold_backward(grad, x, 0), pair) for pair in HALVES
    ],
    "max_unpool2d": [
        (
            lambda x, places: F.max_unpool2d(x, places, 2),
            (last(2, 3, 4, 4), last(2, 3, 4, 4).argsort(3)),
        )
    ],
    "channel_shuffle": [(lambda x: F.channel_shuffle(x, 2), (last(2, 4, 5, 6),))],
    "reflection_pad3d": [(lambda x: aten.reflection_pad3d(x, [1] * 6), (last(3, 4, 5, 6),))],
    "replication_pad3d": [(lambda x: aten.replication_pad3d(x, [1] * 6), (last(3, 4, 5, 6),))],
    "reflection_pad2d_backward": [
        (
            lambda grad, x: aten.reflection_pad2d_backward(grad, x, [1] * 4),
            (plain(2, 3, 6, 7), last(2, 3, 4, 5)),
        )
    ],
    "reflection_pad3d_backward": [
        (
            lambda grad, x: aten.reflection_pad3d_backward(grad, x, [1] * 6),
            (plain(3, 6, 7, 8), last(3, 4, 5, 6)),
        )
    ],
    "replication_pad2d_backward": [
        (
            lambda grad, x: aten.replication_pad2d_backward(grad, x, [1] * 4),
            (plain(2, 3, 6, 7), last(2, 3, 4, 5)),
        )
    ],
    "replication_pad3d_backward": [
        (
            lambda grad, x: aten.replication_pad3d_backward(grad, x, [1] * 6),
            (plain(3, 6, 7, 8), last(3, 4, 5, 6)),
        )
    ],
    "mkldnn_rnn_layer": [
        (lambda *tensors: aten.mkldnn_rnn_layer(*tensors, *how_lstm), tuple(lstm))
    ],
    "mkldnn_rnn_layer_backward": [(lstm_backward, tuple(lstm))],
}
"""Calls of each operator, with memory layouts for which torch's fake kernel is wrong."""

for name in ("native_batch_norm_backward", "batch_norm_backward"):
    CASES[name] = []
    for wants_input in (True, False):
        backward_of = partial(batch_norm_backward, name, wants_input)
        for pair in ((x, g), (g, x), (plain(4, 5, 6, 7), last(4, 5, 6, 7))):
            CASES[name].append((backward_of, pair))

LOSSES: dict[str, Callable[..., Any]] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
}
for name, loss in LOSSES.items():
    CASES[name] = []
    for reduction in ("mean", "sum", "none"):
        CASES[name].append((partial(loss, reduction=reduction), (x, g)))

POINTWISE = (
    "copysign.Tensor",
    "floor_divide",
    "heaviside",
    "ldexp.Tensor",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "xlogy.Tensor",
)
for name in POINTWISE:
    pointwise = getattr(torch, name.partition(".")[0])
    CASES[name] = [(pointwise, pair) for pair in PAIRS]

OPERATORS = [name for correction in CORRECTIONS for name in correction.operators.split()]


def in_memory(result: Any) -> Any:
    """Return shape, strides and bytes of each result, and which results share a storage."""
    if isinstance(result, Tensor):
        storage, key = storage_key(result)
        return [(tuple(result.shape), result.stride(), storage.nbytes(), key)]
    seen: list[int] = []
    described = []
    for each in result:
        if each is None:
            described.append(None)
            continue
        ((shape, stride, nbytes, key),) = in_memory(each)
        seen.append(key)
        described.append((shape, stride, nbytes, seen.index(key)))
    return described


def test_every_correction_has_a_case() -> None:
    """Every corrected operator has a case, and every case is about a corrected operator."""
    assert sorted(OPERATORS) == sorted(CASES)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_fake_result_lies_in_memory_as_the_kernels_does(name: str) -> None:
    """A fake result has the strides, the bytes and the shared storages of the real result."""
    if not hasattr(aten, name.partition(".")[0]):
        pytest.skip("older than this operator")
    for function, args in CASES[name]:
        real = function(*args)
        fakes = Fakes()
        fake_args = fakes.of(tuple(args))
        with fakes.running():
            fake = function(*fake_args)
            expected, found = in_memory(real), in_memory(fake)
        if isinstance(real, Tensor):
            # The key of the storage of a single result always differs.
            expected = [each[:3] for each in expected]
            found = [each[:3] for each in found]
        assert expected == found


class Tokens(nn.Module):
    """A norm between two layers, with two dimensions transposed before it and after it."""

    def __init__(self, norm: nn.Module, *turned: int) -> None:
        super().__init__()
        self.norm, self.turned = norm, turned
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x).transpose(*self.turned)).transpose(*self.turned))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "batch norm of turned tokens": lambda: (Tokens(nn.BatchNorm1d(64), 1, 2), plain(32, 128, 64)),
    "layer norm of turned tokens": lambda: (Tokens(nn.LayerNorm(128), 1, 2), plain(32, 128, 64)),
    "LSTM": lambda: (nn.LSTM(16, 32), plain(10, 4, 16)),
    "LSTM of both directions": lambda: (
        nn.LSTM(16, 32, num_layers=2, bidirectional=True, batch_first=True),
        plain(4, 10, 16),
    ),
    "LSTM in half precision": lambda: (
        nn.LSTM(16, 256, dtype=torch.bfloat16),
        plain(10, 4, 16).to(torch.bfloat16),
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_estimate_with_such_an_operator_is_the_count_of_a_real_pass(
    model: str, backward: bool
) -> None:
    """Work and memory equal those of a real pass, operator by operator.

    With a missing copy the estimated peak would be too low, and with one copy too many too high.
    """
    real = lflops.count(*MODELS[model](), backward=backward)
    estimated = lflops.estimate(*MODELS[model](), backward=backward)
    assert real.op_counts == estimated.op_counts
    assert real.memory is not None
    assert estimated.memory is not None
    assert real.memory.timeline == estimated.memory.timeline
    assert real.memory.peak_bytes == estimated.memory.peak_bytes


def test_an_lstm_without_gradients_has_no_workspace() -> None:
    """Without gradients an LSTM has no workspace, as in torch, and there is no note."""
    model, x = MODELS["LSTM"]()
    with torch.no_grad():
        real = lflops.count(model, x)
        estimated = lflops.estimate(model, x)
    assert real.memory is not None
    assert estimated.memory is not None
    assert real.memory.timeline == estimated.memory.timeline
    assert () == estimated.notes


def test_an_lstms_workspace_is_noted_and_left_out_on_a_chip() -> None:
    """On the CPU the peak includes an LSTM's workspaces; on a chip it does not, and notes say so.

    Another kernel runs on the chip. Two layers are two calls.
    """
    model = nn.LSTM(16, 32, num_layers=2)
    x = plain(10, 4, 16)
    on_cpu = lflops.estimate(model, x, hardware=None)
    on_gpu = lflops.estimate(model, x, hardware="NVIDIA H200")
    (cpu_note,) = (note for note in on_cpu.notes if note.code == "lstm_workspace")
    (gpu_note,) = (note for note in on_gpu.notes if note.code == "lstm_workspace")
    assert "" == cpu_note.subject
    assert 2 == cpu_note.values["calls"]
    assert "H200 SXM" == gpu_note.subject
    assert 2 == gpu_note.values["calls"]
    # A layer's workspace has 22 pages of 4096 bytes: 5 for the gates, 2 for the states, and the
    # rest for the layer's states, the cell's states and the four gradients.
    workspace = 90_112
    # The scratch memory of the second layer: a sum of biases, 64 rows of 128 weights, 5 + 2 + 1
    # pages, and 568 bytes of oneDNN.
    scratch = 128 * 4 + 64 * 128 * 4 + 8 * 4096 + 568
    # The last states of both layers are allocated later. Only the chip's peak contains them.
    stacked = 2 * 2 * 4 * 32 * 4
    assert on_cpu.memory is not None
    assert on_gpu.memory is not None
    difference = on_cpu.memory.peak_bytes - on_gpu.memory.peak_bytes
    assert 2 * workspace + scratch - stacked == difference
    assert "of 2 LSTM calls are included in the memory" in sentence(cpu_note)
    assert "keep some memory free for them" in sentence(gpu_note)


def test_a_batch_has_room_for_the_workspace_of_an_lstm() -> None:
    """The largest batch fits by a real count, and one more sample does not."""
    model = nn.LSTM(16, 32)
    memory_bytes = 2_000_000

    def loss(out: Any) -> Tensor:
        return out[0].sum()

    def counted_peak(samples: int) -> int:
        profile = lflops.count(model, plain(10, samples, 16), backward=True, loss=loss)
        assert profile.memory is not None
        return profile.memory.peak_bytes

    found = lflops.largest_batch(
        model, lambda samples: torch.zeros(10, samples, 16), memory_bytes=memory_bytes, loss=loss
    )
    assert counted_peak(found) <= memory_bytes
    assert counted_peak(found + 1) > memory_bytes
