"""Test the counts of scaled dot-product attention, with every kernel.

All scores are counted as MACs; only the scores that a mask leaves are executed MACs.
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
"""MACs of one forward pass: Q x K and P x V."""
seen = B * H * (1 + 2 + 3 + 4 + 5 + 6 + 7)
"""Number of scores that a causal mask leaves."""
cpu = "_scaled_dot_product_flash_attention_for_cpu"


def qkv(
    make: Callable[..., Tensor] = of, *, heads: int = H, length: int = S, value: int = D
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, and keys and values that may have other sizes."""
    return make(B, H, S, D), make(B, heads, length, D), make(B, heads, length, value)


def test_the_fused_kernel_computes_the_scores_again_going_back() -> None:
    """Backward has four matmuls, the gradients of Q, K, V and P, and the kernel recomputes Q x K.

    The recomputation is not work of the model.
    """
    profile = count(attend, *qkv(), backward=True)
    assert (
        {"forward": once, "backward": 2 * once, "recompute": once // 2}
        == macs(profile)
        == executed(profile)
    )
    assert {cpu} == operators(profile, "forward")
    assert {f"{cpu}_backward"} == operators(profile, "backward")
    assert {f"{cpu}_backward"} == operators(profile, "recompute")


def test_the_fused_kernels_softmax_is_counted_by_the_convention() -> None:
    """Softmax costs 5 FLOPs per score and its gradient costs 4.

    Recomputed scores cost 2 more: an exponential and a division.
    """
    profile = count(attend, *qkv(), backward=True)
    backward = the_cell(profile, f"{cpu}_backward", "backward")
    recompute = the_cell(profile, f"{cpu}_backward", "recompute")
    assert 2 * once + 5 * scores == flops(profile)["forward"]
    assert 2 * 2 * once + 4 * scores == backward.flops
    assert once + 2 * scores == recompute.flops


def test_a_causal_mask_leaves_the_count_and_halves_what_is_executed() -> None:
    """With a causal mask, MACs are the whole square, and executed MACs are the scores it leaves.

    Query i needs keys 0 to i.
    """
    profile = count(partial(attend, is_causal=True), *qkv(), backward=True)
    assert {"forward": once, "backward": 2 * once, "recompute": once // 2} == macs(profile)
    assert {
        "forward": seen * 2 * D,
        "backward": 2 * seen * 2 * D,
        "recompute": seen * D,
    } == executed(profile)


def test_of_more_keys_than_queries_a_causal_mask_leaves_the_first() -> None:
    """If there are more keys than queries, no query sees a key after key S.

    Torch's causal mask is aligned with the first key.
    """
    longer = 2 * S
    profile = count(partial(attend, is_causal=True), *qkv(fixed, length=longer))
    assert {"forward": B * H * S * longer * 2 * D} == macs(profile)
    assert {"forward": seen * 2 * D} == executed(profile)


def test_cross_attention_is_queries_by_keys() -> None:
    """The scores are the S queries times 5 keys."""
    profile = count(attend, *qkv(length=5), backward=True)
    assert {
        "forward": B * H * S * 5 * 2 * D,
        "backward": 2 * B * H * S * 5 * 2 * D,
        "recompute": B * H * S * 5 * D,
    } == macs(profile)


def test_heads_that_share_keys_cost_what_heads_with_their_own_do() -> None:
    """Grouped queries have as many scores as separate heads, although they have fewer keys.

    If torch uses matmuls instead of the fused kernel, the scores are kept and not recomputed.
    """
    profile = count(partial(attend, enable_gqa=True), *qkv(heads=1), backward=True)
    scores_again = {"recompute": once // 2} if FUSES_GROUPS else {}
    assert {"forward": once, "backward": 2 * once} | scores_again == macs(profile)


def test_a_value_may_have_another_width() -> None:
    """Q x K has width D and P x V has width 24.

    The CPU uses matmuls for this, which keep the scores.
    """
    forward = scores * (D + 24)
    assert {"forward": forward, "backward": 2 * forward} == macs(
        count(attend, *qkv(value=24), backward=True)
    )


def test_a_mask_as_a_tensor_leaves_nothing_out() -> None:
    """A mask passed as a tensor does not reduce the executed MACs.

    Its contents cannot be derived from its shape.
    """
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
    """Dropout of the scores costs no MACs; the CPU then uses matmuls, which keep the scores."""
    assert {"forward": once, "backward": 2 * once} == macs(
        count(partial(attend, dropout_p=0.5), *qkv(), backward=True)
    )


def by_products(*args: Tensor, **options: Any) -> Tensor:
    """Compute attention by matmuls, without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(*args, **options)


def test_attention_by_matrix_products_costs_the_same_and_computes_nothing_again() -> None:
    """Attention by matmuls keeps the scores, so nothing is recomputed.

    The mask is added to the scores, so it skips none.
    """
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
    """Both the fused kernel and matmuls cost the same in each mode."""
    with MODES.get(mode, contextlib.nullcontext)():
        assert {"forward": once} == macs(count(how, *qkv(fixed)))


class Encoder(nn.Module):
    """One layer of a transformer."""

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
    """The count equals that of torch's `FlopCounterMode` if attention uses matmuls.

    For the fused CPU kernel torch reports 0.
    """
    model, x = Encoder(), torch.randn(B, S, H * D)
    with sdpa_kernel(SDPBackend.MATH):
        profile = lflops.count(model, x, backward=True)
        with FlopCounterMode(display=False) as theirs:
            model(x).sum().backward()
    assert theirs.get_total_flops() == 2 * profile.total(phase=None)


def test_a_layer_of_a_transformer_costs_12_widths_squared_a_token() -> None:
    """A layer has 12 widths squared of MACs per token, plus attention.

    Q, K, V and the output projection are 4, and the MLP is 8. The input of the first projection
    needs no gradient.
    """
    profile = lflops.count(Encoder(), torch.randn(B, S, H * D), backward=True)
    weights = B * S * 12 * (H * D) ** 2
    projections = B * S * 3 * (H * D) ** 2
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
    """A GPU kernel is counted from its dispatched call on the meta device."""
    tensors = (torch.randn(B, H, S, D, device="meta", dtype=torch.float16) for _ in range(3))
    profile = count(partial(META[kernel], is_causal=True), *tensors)
    assert {"forward": once} == macs(profile)
    assert {"forward": seen * 2 * D} == executed(profile)
    assert () == profile.unsupported


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
    """Forward, backward and recomputed scores of each GPU kernel cost as much as on the CPU."""
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
    assert {operator} == operators(profile)
    assert {f"{operator}_backward"} == operators(profile, "backward")


@pytest.mark.gpu
def test_a_gpus_product_of_eight_bit_floats_is_counted(cuda: torch.device) -> None:
    """`_scaled_mm` is counted as a matmul in float8."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9")
    a = torch.randn(32, 64, device=cuda).to(torch.float8_e4m3fn)
    b = torch.randn(16, 64, device=cuda).to(torch.float8_e4m3fn).t()
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
    """Convolutions and batch norms have the same counts on a GPU and on a CPU.

    All operators that cuDNN runs must be supported.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
    )
    x = torch.randn(B, 3, 16, 16)
    on_cpu = lflops.count(model, x, backward=True)
    on_gpu = lflops.count(model.to(cuda), x.to(cuda), backward=True)
    assert macs(on_cpu) == macs(on_gpu)
    assert flops(on_cpu) == flops(on_gpu)
    assert () == on_gpu.unsupported
