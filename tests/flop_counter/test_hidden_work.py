"""Test work that a dispatch mode cannot see, and operators that only their lengths explain.

Examples are fake tensors, scripts that torch rewrote, and packed parameters.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lflops
from tests.support.count_function import Function, fixed, flops, macs


def test_counting_refuses_what_has_only_shapes() -> None:
    """Like `count`, `counting` refuses a model with fake tensors.

    A fake tensor usually belongs to shape inference, and its operators would count as nothing.
    """
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
    """Two convolutions that the script calls directly are unsupported.

    The linear layer after them is counted.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)
    ).eval()
    x = torch.randn(1, 3, 8, 8)
    rewritten = torch.jit.optimize_for_inference(torch.jit.trace(model, x))
    profile = lflops.count(rewritten, x)
    weights = 4 * ((4 * 3 * 9 + 4) + (4 * 4 * 9 + 4))
    # On some processors torch leaves the convolutions to the dispatcher.
    if not profile.unsupported:
        assert {"forward": 36 * 4 * 27 + 16 * 4 * 36 + 64 * 5} == macs(profile)
        return
    assert [("prim::mkldnn_convolution", 2, weights)] == [
        (each.operator, each.calls, each.bytes) for each in profile.unsupported
    ]
    assert {"forward": 64 * 5} == macs(profile)


@pytest.mark.filterwarnings("ignore")
def test_packed_parameters_are_parameters() -> None:
    """Packed parameters of quantized modules are counted for the module that holds them.

    Weights have one byte, and biases are floats.
    """
    quantized = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(6, 8), nn.LSTM(8, 5)), {nn.Linear, nn.LSTM}, dtype=torch.qint8
    )
    convolution = torch.ao.nn.quantized.Conv2d(4, 8, 3)
    embedding = torch.ao.nn.quantized.Embedding(10, 8)
    modules = lflops.count(quantized, torch.randn(3, 2, 6), backward=False).modules
    linear = 6 * 8 + 8
    lstm = 4 * 5 * (8 + 5) + 2 * 4 * 5
    assert linear + lstm == modules[""].parameters
    assert linear == modules["0"].parameters
    assert lstm == modules["1"].parameters
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
"""FLOPs of a 6 x 6 matrix, where a cube is 6**3 = 216.

Cholesky costs a third of a cube, LU (and with it the determinant) two thirds, an inverse 2, QR 8/3,
and eigenvectors or singular vectors 9, 25 and 26 cubes.
"""


@pytest.mark.parametrize("name", FACTORISED)
def test_a_factorisation_is_flops_by_the_textbook_and_no_macs(name: str) -> None:
    """A factorization has the FLOPs of a textbook, and no MACs.

    It is called through `torch.linalg`, as users call it.
    """
    a = fixed(6, 6)
    profile = lflops.count(Function(getattr(torch.linalg, name)), (a @ a.T + 6 * torch.eye(6),))
    found = sum(cell.flops for cell in profile.op_counts if "linalg" in cell.operator)
    assert FACTORISED[name] == found
    assert {} == macs(profile)
    assert () == profile.unsupported


def test_solving_is_a_factorisation_and_two_triangles_a_side() -> None:
    """Solving costs a factorization, and two triangular solves for each right-hand side.

    Two thirds of 6 cubed are 144, and the triangles cost 2 * 36 for each of 3 sides. Least squares
    of a 9 x 6 matrix costs the reflections of QR, and 4 * 54 - 36 for each side.
    """
    solve = lflops.count(Function(torch.linalg.solve), (fixed(6, 6), fixed(6, 3)))
    least = lflops.count(
        Function(lambda a, b: torch.linalg.lstsq(a, b).solution), (fixed(9, 6), fixed(9, 2))
    )
    assert {"forward": 144 + 2 * 36 * 3} == flops(solve)
    assert {"forward": 2 * 9 * 36 - 144 + (4 * 54 - 36) * 2} == flops(least)


def test_alignments_are_counted_by_their_lengths() -> None:
    """CTC loss costs 13 FLOPs for each step and state, by the length of each sequence.

    The sequences have 5 and 7 steps, and as many states: 2 * 2 + 1 and 2 * 3 + 1.
    """
    log_probs = fixed(7, 2, 10).log_softmax(-1)
    targets = torch.tensor([1, 2, 3, 4, 5])
    lengths = torch.tensor([5, 7])
    target_lengths = torch.tensor([2, 3])
    loss = Function(lambda x: nn.functional.ctc_loss(x, targets, lengths, target_lengths))
    profile = lflops.count(loss, (log_probs,))
    ctc = [op_count.flops for op_count in profile.op_counts if "ctc" in op_count.operator]
    assert [13 * (5 * 5 + 7 * 7)] == ctc
    assert () == profile.unsupported
