"""Scaled dot-product attention, on whatever kernel it runs.

The full square is counted, what a mask leaves of it is executed.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.flop_counter import FlopCounterMode

import lflops
from tests.conformance.at_hand import FUSES_GROUPS
from tests.support.count_function import (
    count,
    executed,
    fixed,
    flops,
    macs,
    of,
    operators,
    the_cell,
)

B, H, S, D = 2, 3, 7, 16
scores = B * H * S * S
once = scores * 2 * D
"""Q x K and P x V."""
seen = B * H * (1 + 2 + 3 + 4 + 5 + 6 + 7)
"""Scores that a causal mask leaves."""
cpu = "_scaled_dot_product_flash_attention_for_cpu"


def qkv(
    make: Callable[..., Tensor] = of, *, heads: int = H, length: int = S, value: int = D
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries; keys and values of perhaps other sizes."""
    return make(B, H, S, D), make(B, heads, length, D), make(B, heads, length, value)


def test_the_fused_kernel_computes_the_scores_again_going_back() -> None:
    """Four products for the gradients of Q, K, V and P.

    Q x K once more is no model's work but the kernel's.
    """
    profile = count(attend, *qkv(), backward=True)
    assert (
        {"forward": once, "backward": 2 * once, "recompute": once // 2}
        == macs(profile)
        == executed(profile)
    )
    assert ({cpu}, {f"{cpu}_backward"}, {f"{cpu}_backward"}) == tuple(
        operators(profile, phase) for phase in macs(profile)
    )


def test_the_fused_kernels_softmax_is_counted_by_the_convention() -> None:
    """5 operations a score.

    4 for its gradient; an exponential and a division where the scores are computed again.
    """
    profile = count(attend, *qkv(), backward=True)
    both = (
        the_cell(profile, f"{cpu}_backward", "backward").flops,
        the_cell(profile, f"{cpu}_backward", "recompute").flops,
    )
    assert (2 * once + 5 * scores, (2 * 2 * once + 4 * scores, once + 2 * scores)) == (
        flops(profile)["forward"],
        both,
    )


def test_a_causal_mask_leaves_the_count_and_halves_what_is_executed() -> None:
    """The field counts the square; query i needs keys 0 to i."""
    profile = count(partial(attend, is_causal=True), *qkv(), backward=True)
    assert {"forward": once, "backward": 2 * once, "recompute": once // 2} == macs(profile)
    assert {
        "forward": seen * 2 * D,
        "backward": 2 * seen * 2 * D,
        "recompute": seen * D,
    } == executed(profile)


def test_of_more_keys_than_queries_a_causal_mask_leaves_the_first() -> None:
    """Torch's mask counts from the first key: nothing beyond key S is seen."""
    longer = 2 * S
    profile = count(partial(attend, is_causal=True), *qkv(fixed, length=longer))
    assert ({"forward": B * H * S * longer * 2 * D}, {"forward": seen * 2 * D}) == (
        macs(profile),
        executed(profile),
    )


def test_cross_attention_is_queries_by_keys() -> None:
    """S queries, 5 keys."""
    profile = count(attend, *qkv(length=5), backward=True)
    assert {
        "forward": B * H * S * 5 * 2 * D,
        "backward": 2 * B * H * S * 5 * 2 * D,
        "recompute": B * H * S * 5 * D,
    } == macs(profile)


def test_heads_that_share_keys_cost_what_heads_with_their_own_do() -> None:
    """Grouped queries: as many scores, fewer keys in memory.

    Matrix products, as of torch 2.8, keep the scores.
    """
    profile = count(partial(attend, enable_gqa=True), *qkv(heads=1), backward=True)
    scores_again = {"recompute": once // 2} if FUSES_GROUPS else {}
    assert {"forward": once, "backward": 2 * once} | scores_again == macs(profile)


def test_a_value_may_have_another_width() -> None:
    """Q x K over D, P x V over 24: the CPU does that by matrix products, and keeps the scores."""
    forward = scores * (D + 24)
    assert {"forward": forward, "backward": 2 * forward} == macs(
        count(attend, *qkv(value=24), backward=True)
    )


def test_a_mask_as_a_tensor_leaves_nothing_out() -> None:
    """What is in it is not known from its shape."""
    profile = count(
        lambda q, k, v: attend(q, k, v, attn_mask=torch.ones(S, S).tril().bool()),
        *qkv(),
        backward=True,
    )
    assert (
        {"forward": once, "backward": 2 * once, "recompute": once // 2}
        == macs(profile)
        == executed(profile)
    )


def test_dropout_on_the_scores_costs_no_macs() -> None:
    """On the CPU it takes the path of matrix products."""
    assert {"forward": once, "backward": 2 * once} == macs(
        count(partial(attend, dropout_p=0.5), *qkv(), backward=True)
    )


def by_products(*args: Tensor, **options: Any) -> Tensor:
    """Attention without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(*args, **options)


def test_attention_by_matrix_products_costs_the_same_and_computes_nothing_again() -> None:
    """It keeps the scores; and a mask, being added, skips none."""
    for causal in (False, True):
        profile = count(partial(by_products, is_causal=causal), *qkv(), backward=True)
        assert {"forward": once, "backward": 2 * once} == macs(profile) == executed(profile)
        assert {"bmm"} == operators(profile)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", ["as it is", *MODES])
@pytest.mark.parametrize("how", [attend, by_products])
def test_attention_costs_the_same_under_every_mode(how: Callable[..., Tensor], mode: str) -> None:
    """And on both paths."""
    with MODES.get(mode, contextlib.nullcontext)():
        assert {"forward": once} == macs(count(how, *qkv(fixed)))


class Encoder(nn.Module):
    """One layer of a transformer as its papers draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True)
        self.norm = nn.LayerNorm(H * D)
        self.up = nn.Linear(H * D, 4 * H * D)
        self.down = nn.Linear(4 * H * D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_torchs_own_counter_agrees_on_attention_by_products() -> None:
    """On the fused kernel of the CPU it says 0."""
    model, x = Encoder(), torch.randn(B, S, H * D)
    with sdpa_kernel(SDPBackend.MATH):
        profile = lflops.count(model, x, backward=True)
        with FlopCounterMode(display=False) as theirs:
            model(x).sum().backward()
    assert theirs.get_total_flops() == 2 * profile.total(phase=None)


def test_a_layer_of_a_transformer_costs_12_widths_squared_a_token() -> None:
    """Q, K, V and the way out are 4, up and down 8; and the square of the sequence's length.

    The first layer's input needs no gradient.
    """
    profile = lflops.count(Encoder(), torch.randn(B, S, H * D), backward=True)
    weights, projections = B * S * 12 * (H * D) ** 2, B * S * 3 * (H * D) ** 2
    assert {
        "forward": weights + once,
        "backward": 2 * weights - projections + 2 * once,
        "recompute": once // 2,
    } == macs(profile)


META: dict[str, Callable[..., Any]] = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention,
    "efficient": partial(
        torch.ops.aten._scaled_dot_product_efficient_attention,
        attn_bias=None,
        compute_log_sumexp=True,
    ),
    "cudnn": partial(
        torch.ops.aten._scaled_dot_product_cudnn_attention, attn_bias=None, compute_log_sumexp=True
    ),
}


@pytest.mark.parametrize("kernel", META)
def test_a_gpus_kernel_is_known_by_its_call(kernel: str) -> None:
    """As it is dispatched, worked out without a device."""
    tensors = (torch.randn(B, H, S, D, device="meta", dtype=torch.float16) for _ in range(3))
    profile = count(partial(META[kernel], is_causal=True), *tensors)
    assert ({"forward": once}, {"forward": seen * 2 * D}, ()) == (
        macs(profile),
        executed(profile),
        profile.unsupported,
    )


GPU = {
    "flash": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", GPU)
def test_a_gpus_kernel_costs_what_the_cpus_does(
    cuda: torch.device, kernel: str, causal: bool
) -> None:
    """Forward, backward and the scores once more, in half precision."""
    backend, operator = GPU[kernel]
    length, width = 128, 64
    square = B * H * length * length
    half = B * H * length * (length + 1) // 2 if causal else square
    tensors = [
        torch.randn(B, H, length, width, device=cuda, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    with sdpa_kernel(backend):
        profile = count(partial(attend, is_causal=causal), *tensors, backward=True)
    assert {
        "forward": square * 2 * width,
        "backward": square * 4 * width,
        "recompute": square * width,
    } == macs(profile)
    assert {
        "forward": half * 2 * width,
        "backward": half * 4 * width,
        "recompute": half * width,
    } == executed(profile)
    assert ({operator}, {f"{operator}_backward"}) == (
        operators(profile),
        operators(profile, "backward"),
    )


@pytest.mark.gpu
def test_a_gpus_product_of_eight_bit_floats_is_counted(cuda: torch.device) -> None:
    """`_scaled_mm`: a scale for each operand, and the result scaled."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9")
    a, b = (
        torch.randn(32, 64, device=cuda).to(torch.float8_e4m3fn),
        torch.randn(16, 64, device=cuda).to(torch.float8_e4m3fn).t(),
    )
    scale = torch.ones((), device=cuda)
    profile = count(
        lambda a, b: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16),
        a,
        b,
    )
    assert [("_scaled_mm", "float8_e4m3fn", 32 * 64 * 16)] == [
        (cell.operator, cell.dtype, cell.macs) for cell in profile.op_counts if cell.macs
    ]


@pytest.mark.gpu
def test_a_gpus_convolution_and_normalisation_are_counted_like_the_cpus(cuda: torch.device) -> None:
    """Whatever kernel of cuDNN is behind them: no operator is unknown, no number is another."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
    )
    x = torch.randn(B, 3, 16, 16)
    here, there = (
        lflops.count(model, x, backward=True),
        lflops.count(model.to(cuda), x.to(cuda), backward=True),
    )
    assert (macs(here), flops(here), ()) == (macs(there), flops(there), there.unsupported)
