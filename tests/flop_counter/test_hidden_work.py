"""What hides from a dispatch mode is named.

Fake tensors, scripts that torch rewrote, parameters that are packed.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lflops
from tests.support.count_function import Function, fixed, flops, macs


def test_counting_refuses_what_has_only_shapes() -> None:
    """As `count` does: a fake tensor is somebody's shape inference, and would count as nothing."""
    with FakeTensorMode():
        model = nn.Linear(3, 4)
        with pytest.raises(lflops.CountError, match="fake"), lflops.counting(model):
            pass
        with pytest.raises(lflops.CountError, match="fake"):
            lflops.count(model, (torch.ones(2, 3),))
    with pytest.raises(lflops.CountError, match="fake"), lflops.counting(model):
        pass


@pytest.mark.filterwarnings("ignore")
def test_a_script_rewritten_for_inference_lists_what_it_runs_below_the_dispatcher() -> None:
    """Two convolutions, which torch calls at once; the linear layer behind them is seen."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)
    ).eval()
    x = torch.randn(1, 3, 8, 8)
    rewritten = torch.jit.optimize_for_inference(torch.jit.trace(model, x))
    profile = lflops.count(rewritten, x)
    weights = 4 * ((4 * 3 * 9 + 4) + (4 * 4 * 9 + 4))
    if not profile.unsupported:
        assert {"forward": 36 * 4 * 27 + 16 * 4 * 36 + 64 * 5} == macs(
            profile
        )  # this processor's torch leaves them to the dispatcher
        return
    assert [("prim::mkldnn_convolution", 2, weights)] == [
        (each.operator, each.calls, each.bytes) for each in profile.unsupported
    ]
    assert {"forward": 64 * 5} == macs(profile)


@pytest.mark.filterwarnings("ignore")
def test_packed_parameters_are_parameters() -> None:
    """Weights of eight bits and biases of floats, by the row of the module that holds them."""
    quantized = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(6, 8), nn.LSTM(8, 5)), {nn.Linear, nn.LSTM}, dtype=torch.qint8
    )
    convolution, embedding = (
        torch.ao.nn.quantized.Conv2d(4, 8, 3),
        torch.ao.nn.quantized.Embedding(10, 8),
    )
    modules = lflops.count(quantized, torch.randn(3, 2, 6), backward=False).modules
    linear, cells = 6 * 8 + 8, 4 * 5 * (8 + 5) + 2 * 4 * 5
    assert (linear + cells, linear, cells) == tuple(
        modules[row].parameters for row in ("", "0", "1")
    )
    assert 6 * 8 + 4 * 8 == modules["0"].parameter_bytes
    assert 0 == modules[""].trainable_parameters
    quint8 = torch.quantize_per_tensor(torch.randn(1, 4, 5, 5), 0.1, 0, torch.quint8)
    assert 8 * 4 * 9 + 8 == lflops.count(convolution, quint8).modules[""].parameters
    assert 10 * 8 == lflops.count(embedding, torch.tensor([1, 2])).modules[""].parameters


FACTORISED = {
    "det": 144,
    "inv": 432,
    "qr": 576,
    "cholesky_ex": 72,
    "lu": 144,
    "eigh": 9 * 216,
    "eig": 25 * 216,
    "svd": 26 * 216,
}
"""FLOPs of 6 by 6, in cubes.

Two thirds for LU, a third for Cholesky, 2 for an inverse, 8/3 for QR, 9, 25 and 26 for vectors.
"""


@pytest.mark.parametrize("name", FACTORISED)
def test_a_factorisation_is_flops_by_the_textbook_and_no_macs(name: str) -> None:
    """As torch calls its kernels."""
    a = fixed(6, 6)
    profile = lflops.count(Function(getattr(torch.linalg, name)), (a @ a.T + 6 * torch.eye(6),))
    found = sum(cell.flops for cell in profile.op_counts if "linalg" in cell.operator)
    assert (FACTORISED[name], {}, ()) == (found, macs(profile), profile.unsupported)


def test_solving_is_a_factorisation_and_two_triangles_a_side() -> None:
    """Two thirds of 6 cubed, and 2 * 36 for each of 3 sides.

    Least squares of 9 by 6: reflections, and (4 * 54 - 36) a side.
    """
    solve = lflops.count(Function(torch.linalg.solve), (fixed(6, 6), fixed(6, 3)))
    least = lflops.count(
        Function(lambda a, b: torch.linalg.lstsq(a, b).solution), (fixed(9, 6), fixed(9, 2))
    )
    assert ({"forward": 144 + 2 * 36 * 3}, {"forward": 2 * 9 * 36 - 144 + (4 * 54 - 36) * 2}) == (
        flops(solve),
        flops(least),
    )


def test_alignments_are_counted_by_their_lengths() -> None:
    """5 and 7 steps of 5 and 7 states, 13 operations each.

    Then each of two losses is divided by its length, and the mean taken.
    """
    log_probs = fixed(7, 2, 10).log_softmax(-1)
    lengths, labels = torch.tensor([5, 7]), torch.tensor([2, 3])
    profile = lflops.count(
        Function(
            lambda x: nn.functional.ctc_loss(x, torch.tensor([1, 2, 3, 4, 5]), lengths, labels)
        ),
        (log_probs,),
    )
    assert ([13 * (5 * 5 + 7 * 7)], ()) == (
        [cell.flops for cell in profile.op_counts if "ctc" in cell.operator],
        profile.unsupported,
    )
