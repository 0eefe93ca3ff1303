"""Test the MACs of matmuls and convolutions, forward and backward, as users write them.

They are also counted under `no_grad`, inference mode and autocast.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lflops
from tests.conformance.at_hand import runs_here
from tests.support.count_function import Function, count, fixed, flops, macs, of, the_cell

B, H, N, K, M = 2, 3, 5, 7, 11

# A function, the shapes of its inputs, and the MACs of forward. Every input requires a gradient,
# which costs as many MACs as forward.
PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]] = {
    "linear": (F.linear, ((N, K), (M, K)), N * K * M),
    "linear with a bias": (F.linear, ((N, K), (M, K), (M,)), N * K * M),
    "linear of a vector": (F.linear, ((K,), (M, K), (M,)), K * M),
    "linear of sequences": (F.linear, ((B, N, K), (M, K)), B * N * K * M),
    "linear of sequences with a bias": (F.linear, ((B, N, K), (M, K), (M,)), B * N * K * M),
    "linear of many dimensions": (F.linear, ((B, H, N, K), (M, K), (M,)), B * H * N * K * M),
    "matmul": (torch.matmul, ((N, K), (K, M)), N * K * M),
    "matmul, batches by one matrix": (torch.matmul, ((B, N, K), (K, M)), B * N * K * M),
    "matmul, one matrix by batches": (torch.matmul, ((N, K), (B, K, M)), B * N * K * M),
    "matmul, batches and heads": (torch.matmul, ((B, H, N, K), (B, H, K, M)), B * H * N * K * M),
    "matmul, heads shared": (torch.matmul, ((B, H, N, K), (B, 1, K, M)), B * H * N * K * M),
    "matmul, vector by matrix": (torch.matmul, ((K,), (K, M)), K * M),
    "the operator @": (lambda a, b: a @ b, ((N, K), (K, M)), N * K * M),
    "mm": (torch.mm, ((N, K), (K, M)), N * K * M),
    "bmm": (torch.bmm, ((B, N, K), (B, K, M)), B * N * K * M),
    "addmm": (torch.addmm, ((M,), (N, K), (K, M)), N * K * M),
    "baddbmm": (torch.baddbmm, ((B, N, M), (B, N, K), (B, K, M)), B * N * K * M),
    "addbmm": (torch.addbmm, ((N, M), (B, N, K), (B, K, M)), B * N * K * M),
    "inner": (torch.inner, ((N, K), (M, K)), N * K * M),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, dims=2),
        ((N, B, K), (B, K, M)),
        N * B * K * M,
    ),
    "einsum of heads": (
        lambda a, b: torch.einsum("bhnk,bhmk->bhnm", a, b),
        ((B, H, N, K), (B, H, M, K)),
        B * H * N * M * K,
    ),
    "einsum of one head": (
        lambda a, b: torch.einsum("bhnk,bmk->bhnm", a, b),
        ((B, H, N, K), (B, M, K)),
        B * H * N * M * K,
    ),
    "einsum in a list": (lambda a, b: torch.einsum("ij,jk", [a, b]), ((N, K), (K, M)), N * K * M),
    "chained": (
        lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
        ((2, 9), (9, 3), (3, 7)),
        2 * 9 * 3 + 2 * 3 * 7,
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_costs_itself_once_for_each_gradient(case: str) -> None:
    """Each operand's gradient is a matmul of the size of the forward matmul."""
    function, shapes, forward = PRODUCTS[case]
    assert {"forward": forward, "backward": 2 * forward} == macs(
        count(function, *(of(*shape) for shape in shapes), backward=True)
    )


def test_the_gradients_of_a_product_with_a_vector() -> None:
    """The vector's gradient costs as many MACs as forward, and the matrix's gradient costs none.

    The gradient of the matrix is an outer product, which multiplies but does not accumulate.
    """
    assert {"forward": N * K, "backward": N * K} == macs(
        count(torch.mv, of(N, K), of(K), backward=True)
    )
    assert {"forward": B * N * K, "backward": B * N * K} == macs(
        count(torch.matmul, of(B, N, K), of(K), backward=True)
    )
    assert {"forward": N * K, "backward": N * K} == macs(
        count(torch.addmv, of(N), of(N, K), of(K), backward=True)
    )
    assert {"forward": K} == macs(count(torch.dot, of(K), of(K), backward=True))


@pytest.mark.parametrize(
    ("function", "shapes", "elements"),
    [
        (F.linear, ((N, K), (M, K), (M,)), N * M),
        (F.linear, ((B, N, K), (M, K), (M,)), B * N * M),
        (torch.addmv, ((N,), (N, K), (K,)), N),
    ],
)
def test_a_bias_costs_an_addition_an_element(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], elements: int
) -> None:
    """FLOPs are two for each MAC, plus one for each element to which the bias is added."""
    profile = count(function, *(fixed(*shape) for shape in shapes))
    assert {"forward": 2 * macs(profile)["forward"] + elements} == flops(profile)


@pytest.mark.parametrize("wanted", [mask for mask in product((False, True), repeat=3) if any(mask)])
def test_only_the_gradients_asked_for_are_counted(wanted: tuple[bool, bool, bool]) -> None:
    """Only gradients that are required are counted.

    Those of input and weight cost a matmul each. That of the bias is a sum, one FLOP for each
    element that is summed.
    """
    of_input, of_weight, of_bias = wanted
    x = fixed(N, K).requires_grad_(of_input)
    weight = fixed(M, K).requires_grad_(of_weight)
    bias = fixed(M).requires_grad_(of_bias)
    profile = count(F.linear, x, weight, bias, backward=True)
    matmuls = N * K * M * (of_input + of_weight)
    assert matmuls == macs(profile).get("backward", 0)
    assert 2 * matmuls + N * M * of_bias == flops(profile).get("backward", 0)


IN_PLACE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]] = {
    "addmm_": (Tensor.addmm_, ((N, M), (N, K), (K, M)), N * K * M),
    "addmv_": (Tensor.addmv_, ((N,), (N, K), (K,)), N * K),
    "baddbmm_": (Tensor.baddbmm_, ((B, N, M), (B, N, K), (B, K, M)), B * N * K * M),
    "addbmm_": (Tensor.addbmm_, ((N, M), (B, N, K), (B, K, M)), B * N * K * M),
}


@pytest.mark.parametrize("operator", IN_PLACE)
def test_a_product_into_a_tensor_is_counted_too(operator: str) -> None:
    """In-place matmuls are counted, and are not unsupported operators."""
    function, shapes, expected = IN_PLACE[operator]
    profile = count(function, *(fixed(*shape) for shape in shapes))
    assert expected == the_cell(profile, operator).macs
    assert () == profile.unsupported


def test_a_product_with_its_result_given_is_counted_too() -> None:
    """With `out=`, torch calls another overload of the same operator."""
    assert {"forward": N * K * M} == macs(
        count(partial(torch.mm, out=torch.empty(N, M)), fixed(N, K), fixed(K, M))
    )


@pytest.mark.skipif(
    not (runs_here("_grouped_mm") and hasattr(F, "grouped_mm")),
    reason="no grouped product on the CPU",
)
def test_products_of_experts_take_each_row_once() -> None:
    """A grouped matmul multiplies each token by the weight of one of H experts.

    In the gradient of the weights, each token is one term of one expert.
    """
    tokens, narrow, wide = 8, 16, 32
    x = torch.randn(tokens, narrow, dtype=torch.bfloat16)
    weight = torch.randn(H, narrow, wide, dtype=torch.bfloat16)
    ends = torch.tensor([1, 5, 8], dtype=torch.int32)
    profile = count(
        lambda x, w: F.grouped_mm(x, w, offs=ends).relu(),
        x.requires_grad_(),
        weight.requires_grad_(),
        backward=True,
    )
    assert {"forward": tokens * narrow * wide, "backward": 2 * tokens * narrow * wide} == macs(
        profile
    )


def test_products_of_experts_that_transformers_runs_take_each_row_once() -> None:
    """The fallback of transformers for grouped matmuls costs as much as torch's own operator.

    If torch or the chip lacks grouped matmuls, transformers runs one custom operator in forward and
    one in backward.
    """
    moe = pytest.importorskip("transformers.integrations.moe")
    if not hasattr(moe, "_grouped_mm_fallback"):
        pytest.skip("older than that operator")
    tokens, narrow, wide = 8, 16, 32
    ends = torch.tensor([1, 5, 8])
    model = Function(lambda x, w: torch.ops.transformers.grouped_mm_fallback(x, w, ends))
    profiles = [
        ask(model, (of(tokens, narrow), of(H, narrow, wide)), backward=True)
        for ask in (lflops.count, lflops.estimate)
    ]
    for profile in profiles:
        assert {"forward": tokens * narrow * wide, "backward": 2 * tokens * narrow * wide} == macs(
            profile
        )
        assert () == profile.unsupported


MODES: dict[str, Callable[[], Any]] = {
    "as it is": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_costs_the_same_under_every_mode(mode: str) -> None:
    """A 3x3 convolution over 8x8 and a linear layer cost the same in each mode."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 10)
    )
    expected = B * 8 * 8 * 4 * 3 * 9 + B * 4 * 8 * 8 * 10
    with MODES[mode]():
        assert {"forward": expected} == macs(lflops.count(model, torch.randn(B, 3, 8, 8)))


def test_autocast_is_seen_in_the_dtype_of_each_product() -> None:
    """Autocast casts the operands before the matmul, so the matmul is counted in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        profile = count(F.linear, fixed(N, K), fixed(M, K))
    assert [("mm", "bfloat16", N * K * M)] == [
        (cell.operator, cell.dtype, cell.macs) for cell in profile.op_counts if cell.macs
    ]


@pytest.mark.parametrize(
    ("dtype", "each"),
    [(torch.float64, 1), (torch.float16, 1), (torch.bfloat16, 1), (torch.complex64, 4)],
    ids=str,
)
def test_a_product_is_as_many_macs_in_every_dtype(dtype: torch.dtype, each: int) -> None:
    """Real dtypes need the same MACs; a complex dtype needs four times as many.

    The product (a + bi)(c + di) has four multiplications.
    """
    profile = count(torch.mm, torch.ones(N, K, dtype=dtype), torch.ones(K, M, dtype=dtype))
    assert [(str(dtype).removeprefix("torch."), each * N * K * M)] == [
        (cell.dtype, cell.macs) for cell in profile.op_counts
    ]


# A function, the shapes of input, weight and bias, and the MACs: output positions x input channels
# of a group x output channels x kernel size.
Convolution = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]
CONVOLUTIONS: dict[str, Convolution] = {
    "1-d": (F.conv1d, ((B, 4, 9), (6, 4, 3)), B * 7 * 4 * 6 * 3),
    "2-d": (F.conv2d, ((B, 4, 9, 8), (6, 4, 3, 2), (6,)), B * 7 * 7 * 4 * 6 * 6),
    "3-d": (F.conv3d, ((B, 4, 5, 6, 7), (6, 4, 2, 3, 4), (6,)), B * 4 * 4 * 4 * 4 * 6 * 24),
    "of one image": (F.conv2d, ((4, 9, 8), (6, 4, 3, 2)), 7 * 7 * 4 * 6 * 6),
    "1x1": (F.conv2d, ((B, 4, 9, 8), (6, 4, 1, 1)), B * 9 * 8 * 4 * 6),
    "strided": (partial(F.conv2d, stride=2), ((B, 4, 9, 8), (6, 4, 3, 2)), B * 4 * 4 * 4 * 6 * 6),
    "padded": (partial(F.conv2d, padding=1), ((B, 4, 9, 8), (6, 4, 3, 3)), B * 9 * 8 * 4 * 6 * 9),
    "dilated": (partial(F.conv2d, dilation=2), ((B, 4, 9, 8), (6, 4, 3, 3)), B * 5 * 4 * 4 * 6 * 9),
    "same": (
        partial(F.conv2d, padding="same"),
        ((B, 4, 9, 8), (6, 4, 3, 3)),
        B * 9 * 8 * 4 * 6 * 9,
    ),
    "same, of an even kernel": (
        partial(F.conv2d, padding="same"),
        ((B, 4, 9, 8), (6, 4, 4, 2)),
        B * 9 * 8 * 4 * 6 * 8,
    ),
    "grouped": (
        partial(F.conv2d, groups=2),
        ((B, 4, 9, 8), (6, 2, 3, 2), (6,)),
        B * 7 * 7 * 2 * 6 * 6,
    ),
    "depthwise": (partial(F.conv2d, groups=4), ((B, 4, 9, 8), (4, 1, 3, 2)), B * 7 * 7 * 4 * 6),
    "depthwise, twice as many": (
        partial(F.conv2d, groups=4),
        ((B, 4, 9, 8), (8, 1, 3, 2)),
        B * 7 * 7 * 8 * 6,
    ),
    # A transposed convolution applies the kernel at each position of the input.
    "transposed 1-d": (F.conv_transpose1d, ((B, 4, 9), (4, 6, 3)), B * 9 * 4 * 6 * 3),
    "transposed 2-d": (
        F.conv_transpose2d,
        ((B, 4, 9, 8), (4, 6, 3, 2), (6,)),
        B * 9 * 8 * 4 * 6 * 6,
    ),
    "transposed 3-d": (
        F.conv_transpose3d,
        ((B, 4, 3, 4, 5), (4, 6, 2, 2, 2)),
        B * 3 * 4 * 5 * 4 * 6 * 8,
    ),
    "transposed, strided": (
        partial(F.conv_transpose2d, stride=2),
        ((B, 4, 9, 8), (4, 6, 3, 2)),
        B * 9 * 8 * 4 * 6 * 6,
    ),
    "transposed, grouped": (
        partial(F.conv_transpose2d, groups=2),
        ((B, 4, 9, 8), (4, 3, 3, 2)),
        B * 9 * 8 * 4 * 3 * 6,
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_costs_itself_once_for_each_gradient(case: str) -> None:
    """Each gradient of a convolution costs as many MACs as forward, also if it is grouped.

    The gradient of a grouped weight must not be counted once for each group.
    """
    function, shapes, forward = CONVOLUTIONS[case]
    assert {"forward": forward, "backward": 2 * forward} == macs(
        count(function, *(of(*shape) for shape in shapes), backward=True)
    )


@pytest.mark.parametrize("wanted", [mask for mask in product((False, True), repeat=3) if any(mask)])
@pytest.mark.parametrize("case", ["2-d", "3-d", "grouped", "transposed 2-d"])
def test_a_convolutions_output_mask_is_followed(case: str, wanted: tuple[bool, bool, bool]) -> None:
    """Only the gradients that the output mask selects are counted.

    Those of input and weight cost as much as forward. That of the bias is a sum, one FLOP for each
    element of the output.
    """
    function, shapes, forward = CONVOLUTIONS[case]
    tensors = [
        fixed(*shape).requires_grad_(each) for shape, each in zip(shapes, wanted, strict=True)
    ]
    elements = function(*tensors).numel()
    profile = count(function, *tensors, backward=True)
    products = forward * (wanted[0] + wanted[1])
    assert 2 * forward + elements == flops(profile)["forward"]
    assert products == macs(profile).get("backward", 0)
    assert 2 * products + elements * wanted[2] == flops(profile).get("backward", 0)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a perceptron": (lambda: nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)), (5, 7)),
    "a perceptron of sequences": (
        lambda: nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 3)),
        (2, 5, 7),
    ),
    "a convolutional network": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, dilation=2),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(16, 4, 2, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 10),
        ),
        (2, 3, 32, 30),
    ),
    "a network of one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 5), nn.ELU(), nn.ConvTranspose1d(6, 2, 3)),
        (3, 4, 20),
    ),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_torchs_own_counter_agrees_where_it_is_right(name: str, backward: bool) -> None:
    """The count equals that of torch's `FlopCounterMode`, which reports two FLOPs for each MAC.

    It is correct for dense layers and ungrouped convolutions.
    """
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    theirs = FlopCounterMode(display=False)
    with theirs:
        output = model(x)
        if backward:
            output.sum().backward()
    assert theirs.get_total_flops() == 2 * lflops.count(model, x, backward=backward).total(
        phase=None
    )
