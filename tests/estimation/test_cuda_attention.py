"""Test that for an NVIDIA chip an estimate uses the attention kernel that torch selects there.

The tests check which kernel is selected, what it keeps for backward, and what it recomputes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.estimation.fake_tensors import Attention, attention_on, prefers_cudnn
from lflops.hardware.chips import BLACKWELL, HOPPER, lookup, names
from lflops.profile.notes import sentence
from lflops.profile.profile import Profile

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 16
FLASH = "flash_attention"
EFFICIENT = "efficient_attention"
CUDNN = "cudnn_attention"
MATH = "attention_math"
HALF = torch.bfloat16
SINGLE = torch.float32
H200 = "NVIDIA H200"
A100 = "NVIDIA A100-SXM4-80GB"


def heads(
    dtype: torch.dtype = HALF,
    *,
    count: int = HEADS,
    length: int = LENGTH,
    width: int = WIDTH,
    batch: int = BATCH,
    device: str = "meta",
) -> Tensor:
    """Return queries, keys or values."""
    return torch.zeros(batch, count, length, width, dtype=dtype, device=device)


def call(dtype: torch.dtype = HALF, width: int = WIDTH, **how: Any) -> Attention:
    """Return an attention call of three equally shaped inputs, with changed arguments."""
    return Attention(*(heads(dtype, width=width) for _ in range(3)))._replace(**how)


def kernel_name(selected: tuple[str, Any] | None) -> str:
    """Return the name of the selected kernel, or an empty string if there is none."""
    if selected is None:
        return ""
    return selected[0]


MASK = torch.zeros(LENGTH, LENGTH, device="meta")
# A call, the kernel on Ampere and later chips, and the kernel on older chips.
TAKEN: dict[str, tuple[Attention, str, str]] = {
    "half": (call(), FLASH, MATH),
    "the older half": (call(torch.float16), FLASH, EFFICIENT),
    "single": (call(SINGLE), EFFICIENT, EFFICIENT),
    "double": (call(torch.float64), MATH, MATH),
    "masked": (call(torch.float16, attn_mask=MASK), EFFICIENT, EFFICIENT),
    "a mask in columns": (call(SINGLE, attn_mask=MASK.t()[:, ::2]), MATH, MATH),
    "the widest": (call(torch.float16, width=256), FLASH, EFFICIENT),
    "wider than that": (call(torch.float16, width=264), EFFICIENT, EFFICIENT),
    "a width of its own": (call(torch.float16, width=20), FLASH, MATH),
    "single of a width of its own": (call(SINGLE, width=6), MATH, EFFICIENT),
    "narrower values": (
        call(torch.float16, value=heads(torch.float16, width=8)),
        EFFICIENT,
        EFFICIENT,
    ),
    "causal, as long as its keys": (call(is_causal=True), FLASH, MATH),
    "causal, and shorter": (
        call(torch.float16, query=heads(torch.float16, length=8), is_causal=True),
        EFFICIENT,
        EFFICIENT,
    ),
    "fewer keys": (call(key=heads(count=2), value=heads(count=2), enable_gqa=True), FLASH, MATH),
    "fewer keys in single": (
        call(SINGLE, key=heads(SINGLE, count=2), value=heads(SINGLE, count=2), enable_gqa=True),
        MATH,
        MATH,
    ),
    "three dimensions": (Attention(*(heads().flatten(0, 1) for _ in range(3))), MATH, MATH),
    "one batch for all": (call(key=heads(batch=1), value=heads(batch=1)), MATH, MATH),
    "columns": (call(key=heads(length=WIDTH, width=LENGTH).mT), MATH, MATH),
    "no keys": (call(key=heads(length=0), value=heads(length=0)), MATH, MATH),
}


@pytest.mark.parametrize(("attention", "ampere", "before"), TAKEN.values(), ids=TAKEN)
def test_the_kernel_is_the_first_that_takes_the_call(
    attention: Attention, ampere: str, before: str
) -> None:
    """The first kernel in torch's order that supports the call is selected.

    The expected kernels come from torch's documentation and source code.
    """
    assert ampere == kernel_name(attention.kernel(ampere=True))
    assert before == kernel_name(attention.kernel(ampere=False))


def a_torch(monkeypatch: pytest.MonkeyPatch, release: str, cudnn: int | None = None) -> None:
    """Pretend that this release of torch runs: with this cuDNN, or built for a CPU."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    monkeypatch.setattr(torch.version, "cuda", None if cudnn is None else "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


MASKED = call(attn_mask=MASK.to(HALF))
# A call, the kernel on Hopper and the kernel on Blackwell, for torch 2.11 and its cuDNN.
ON_HOPPER: dict[str, tuple[Attention, str, str]] = {
    "half": (call(), CUDNN, CUDNN),
    "single": (call(SINGLE), EFFICIENT, EFFICIENT),
    "masked": (MASKED, CUDNN, CUDNN),
    "a mask that is trained": (
        call(attn_mask=MASK.to(HALF).requires_grad_()),
        EFFICIENT,
        EFFICIENT,
    ),
    "causal, and shorter": (call(query=heads(length=8), is_causal=True), CUDNN, CUDNN),
    "the widest": (call(torch.float16, width=256), CUDNN, FLASH),
    "wider than that": (call(torch.float16, width=264), EFFICIENT, EFFICIENT),
    "a width of its own": (call(width=61), FLASH, FLASH),
    "narrower values": (call(value=heads(width=8)), CUDNN, CUDNN),
    "latent attention": (
        Attention(heads(width=192), heads(width=192), heads(width=128)),
        CUDNN,
        CUDNN,
    ),
    "as wide with wider values": (
        Attention(heads(width=192), heads(width=192), heads(width=136)),
        CUDNN,
        EFFICIENT,
    ),
    "fewer keys": (call(key=heads(count=2), value=heads(count=2), enable_gqa=True), CUDNN, CUDNN),
    "one key": (call(key=heads(length=1), value=heads(length=1)), FLASH, FLASH),
    "dropout": (call(dropout_p=0.1), CUDNN, CUDNN),
    "dropout for one query": (call(query=heads(length=1), dropout_p=0.1), FLASH, FLASH),
}


@pytest.mark.parametrize(("attention", "hopper", "blackwell"), ON_HOPPER.values(), ids=ON_HOPPER)
def test_cudnns_kernel_is_the_first_on_hopper_and_blackwell(
    attention: Attention, hopper: str, blackwell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper and Blackwell, torch selects cuDNN for every call that cuDNN supports.

    A real H100 selected it in half precision and for a width of 256, but neither for a width of 61
    nor in single precision. The other expectations come from torch's source code.
    """
    a_torch(monkeypatch, "2.11.0+cu130", 91900)
    assert hopper == kernel_name(attention.kernel(ampere=True, family="H100"))
    assert blackwell == kernel_name(attention.kernel(ampere=True, family="B200"))


WIDE = {"width": 64, "count": 8, "length": 256}
ON_AN_H100: dict[str, tuple[Attention, str]] = {
    **{
        f"{width} wide": (call(width=width), CUDNN)
        for width in (8, 64, 120, 128, 136, 192, 200, 256)
    },
    **{
        f"{width} wide": (call(width=width), taken)
        for width, taken in ((4, FLASH), (61, FLASH), (264, EFFICIENT))
    },
    **{f"dropout of {p}": (call(dropout_p=p), CUDNN) for p in (0.0625, 0.1, 0.125)},
    **{
        str(dtype): (call(dtype), taken)
        for dtype, taken in ((torch.float16, CUDNN), (SINGLE, EFFICIENT), (torch.float64, MATH))
    },
    "192 and 128 wide": (Attention(heads(width=192), heads(width=192), heads(width=128)), CUDNN),
    "64 and 32 wide": (
        Attention(heads(**WIDE), heads(**WIDE), heads(**WIDE | {"width": 32})),
        CUDNN,
    ),
    "causal, and shorter": (call(query=heads(length=8), is_causal=True), CUDNN),
    "masked": (MASKED, CUDNN),
    "masked by truths": (call(attn_mask=MASK.bool()), CUDNN),
    "a mask that is trained": (call(attn_mask=MASK.to(HALF).requires_grad_()), EFFICIENT),
    "one key": (call(key=heads(length=1), value=heads(length=1)), FLASH),
    "one query": (call(query=heads(length=1)), CUDNN),
    "one query with dropout": (call(query=heads(length=1), dropout_p=0.125), FLASH),
    "no query": (call(query=heads(length=0)), MATH),
    "fewer keys": (call(key=heads(count=2), value=heads(count=2), enable_gqa=True), CUDNN),
    "fewer keys in single": (
        call(SINGLE, key=heads(SINGLE, count=2), value=heads(SINGLE, count=2), enable_gqa=True),
        MATH,
    ),
    "fewer keys, which was not said": (call(key=heads(count=1), value=heads(count=1)), MATH),
}


@pytest.mark.parametrize(("attention", "taken"), ON_AN_H100.values(), ids=ON_AN_H100)
def test_it_is_the_kernel_that_an_h100_took(
    attention: Attention, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selected kernel is the one that `torch._fused_sdp_choice` selected on a real H100.

    It was measured with torch 2.11 and cuDNN 9.19, both with and without gradients.
    """
    a_torch(monkeypatch, "2.11.0+cu130", 91900)
    assert taken == kernel_name(attention.kernel(ampere=True, family="H100"))


# A release of torch, a cuDNN, and the chips on which this torch prefers cuDNN's attention.
# None means the cuDNN of the release's wheel on PyPI.
PREFER = (
    ("2.8.0", None, set()),
    ("2.8.0+cu129", 91002, set()),
    ("2.9.1", None, {"H100", "B200"}),
    ("2.9.0+cu130", 91300, {"H100", "B200"}),
    ("2.10.0", None, set()),
    ("2.10.0+cu130", 91501, {"H100", "B200", "B300"}),
    ("2.11.0", None, {"H100", "B200", "B300"}),
    ("2.11.0+cu126", 91002, set()),
    ("2.11.0+cu130", 91500, set()),
    ("2.13.0", None, {"H100", "B200", "B300"}),
)


@pytest.mark.parametrize(("release", "cudnn", "chips"), PREFER)
def test_which_chips_prefer_it_depends_on_torch_and_cudnn(
    release: str, cudnn: int | None, chips: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2.8 to 2.13, each torch prefers cuDNN on the chips that its source code names.

    No other chip prefers it, and the user can switch the preference off.
    """
    a_torch(monkeypatch, release, cudnn)
    assert chips == {
        each for each in ("H100", "B200", "B300", "A100", "L40S", "RTX") if prefers_cudnn(each)
    }
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not prefers_cudnn("H100")


def test_later_torchs_take_it_with_sixteenths_of_dropout_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From torch 2.12 on, cuDNN is selected only if the dropout is a multiple of 1/16.

    1/8 is two sixteenths; 0.1 is not a multiple. With deterministic algorithms cuDNN is never
    selected.
    """
    a_torch(monkeypatch, "2.12.0")
    eighth = call(dropout_p=0.125).kernel(ampere=True, family="H100")
    tenth = call(dropout_p=0.1).kernel(ampere=True, family="H100")
    assert CUDNN == kernel_name(eighth)
    assert FLASH == kernel_name(tenth)
    torch.use_deterministic_algorithms(True)
    try:
        assert FLASH == kernel_name(call().kernel(ampere=True, family="H100"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("chip", [*HOPPER, *BLACKWELL])
def test_the_table_has_chips_of_these_names(chip: str) -> None:
    """Each family name is the first word of a chip in the table.

    Otherwise the family would match no chip.
    """
    assert chip in {name.split()[0] for name in names()}


def test_the_users_choice_is_kept_to() -> None:
    """Kernels that the user switched off are not selected, and the user's order is followed.

    If no enabled kernel supports the call, the result is None.
    """
    calls = (call(), call(SINGLE), call(width=136))

    def chosen(enabled: Any, *, in_order: bool = False) -> list[str | None]:
        kernels: list[str | None] = []
        with sdpa_kernel(enabled, set_priority=in_order):
            for each in calls:
                selected = each.kernel(ampere=True)
                kernels.append(selected and selected[0])
        return kernels

    cudnn_first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert [MATH, MATH, MATH] == chosen(SDPBackend.MATH)
    assert [EFFICIENT, EFFICIENT, EFFICIENT] == chosen(SDPBackend.EFFICIENT_ATTENTION)
    assert [CUDNN, None, FLASH] == chosen(cudnn_first, in_order=True)
    assert [CUDNN, None, None] == chosen(SDPBackend.CUDNN_ATTENTION)


class Attends(nn.Module):
    """Attention of three inputs with fixed arguments."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, **self.how)


def estimated(
    dtype: torch.dtype = HALF, *, width: int = WIDTH, hardware: str | None = H200, **how: Any
) -> Profile:
    """Estimate forward and backward of one attention call on a chip."""
    inputs = tuple(heads(dtype, width=width).requires_grad_() for _ in range(3))
    return lflops.estimate(Attends(**how), inputs, backward=True, hardware=hardware)


def kept(profile: Profile) -> int:
    """Return the bytes that are alive when backward begins."""
    assert profile.memory is not None
    return next(each for each in profile.memory.timeline if each.phase == "backward").live_bytes


ONE = BATCH * HEADS * LENGTH * WIDTH
"""Number of elements of one input."""

SUM = 4
"""Bytes of a row's sum, which is in single precision."""


def test_flash_attention_keeps_its_result_and_a_sum_a_row() -> None:
    """Flash attention keeps its inputs, its result, one sum per row, and its random state.

    The inputs and the result are in half precision. The random state for dropout is three numbers
    of 8 bytes.
    """
    assert 4 * 2 * ONE + BATCH * HEADS * LENGTH * SUM + 3 * 8 == kept(
        estimated(hardware=A100, dropout_p=0.1)
    )
    (note,) = estimated(hardware=A100).notes
    assert {FLASH: 1} == note.values


def test_cudnns_attention_keeps_as_much_and_computes_as_much() -> None:
    """Attention of cuDNN keeps and computes as much as flash attention.

    The only difference is its random state: two numbers of 8 bytes instead of three. A boolean mask
    is kept as numbers in half precision.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        profile = estimated(is_causal=True)
        masked = estimated(attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    sums = BATCH * HEADS * LENGTH * SUM + 2 * 8
    assert 4 * 2 * ONE + sums == kept(profile)
    assert 4 * 2 * ONE + sums + LENGTH * LENGTH * 2 == kept(masked)
    square = BATCH * HEADS * LENGTH * LENGTH * WIDTH
    seen = BATCH * HEADS * (LENGTH * (LENGTH + 1) // 2) * WIDTH
    for metric, product in (("macs", square), ("executed_macs", seen)):
        assert [2 * product, 4 * product, product] == [
            profile.total(phase=phase, metric=metric)
            for phase in ("forward", "backward", "recompute")
        ]


def test_efficient_attention_keeps_sums_of_whole_groups_of_rows() -> None:
    """Efficient attention keeps one sum per row, with the rows rounded up to a multiple of 32.

    48 rows are rounded up to 64. The random state is two numbers of 8 bytes. A boolean mask is kept
    as numbers in the dtype of the inputs.
    """
    sums = BATCH * HEADS * 64 * SUM + 2 * 8
    assert 4 * 4 * ONE + sums == kept(estimated(SINGLE, dropout_p=0.1))
    truths = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    assert 4 * 4 * ONE + sums + LENGTH * LENGTH * SUM == kept(estimated(SINGLE, attn_mask=truths))


def test_plain_attention_keeps_the_weights() -> None:
    """Attention by matmul and softmax keeps the attention weights.

    It is the only kernel of an older chip for this dtype.
    """
    # The weights are computed in single precision.
    weights = BATCH * HEADS * LENGTH * LENGTH * SUM
    assert kept(estimated(hardware="Tesla T4")) > weights > kept(estimated())


def test_the_scores_are_computed_a_second_time_in_backward() -> None:
    """Flash and efficient attention recompute one matmul, the scores, in backward.

    Forward has two matmuls and backward has four. With a causal mask, the kernel executes only the
    scores up to and including the diagonal. Plain attention recomputes nothing.
    """
    square = BATCH * HEADS * LENGTH * LENGTH * WIDTH
    seen = BATCH * HEADS * (LENGTH * (LENGTH + 1) // 2) * WIDTH
    for profile in (estimated(is_causal=True, hardware=A100), estimated(SINGLE, is_causal=True)):
        assert [2 * square, 4 * square, square] == [
            profile.total(phase=phase) for phase in ("forward", "backward", "recompute")
        ]
        executed = [
            profile.total(phase=phase, metric="executed_macs")
            for phase in ("forward", "backward", "recompute")
        ]
        assert [2 * seen, 4 * seen, seen] == executed
    assert 0 == estimated(hardware="Tesla T4").total(phase="recompute")


def test_heads_are_filled_up_to_a_width_that_the_kernel_takes() -> None:
    """A head of width 20 is padded to 24: the kernel computes and keeps 24 columns.

    The returned result is 20 wide.
    """
    profile = estimated(width=20)
    assert 2 * BATCH * HEADS * LENGTH * LENGTH * 24 == profile.total()
    inputs, wider = 3 * ONE // WIDTH * 20, 4 * ONE // WIDTH * 24
    assert 2 * (inputs + wider) + BATCH * HEADS * LENGTH * SUM + 3 * 8 == kept(profile)


def test_a_mask_is_laid_in_rows_that_the_kernel_takes() -> None:
    """A mask is copied only if its rows are not aligned.

    Rows of 48 are aligned, so all heads share the given mask. Rows of 20 are padded to 32.
    """
    for length, row in ((48, 48), (20, 32)):
        seen: list[Tensor] = []
        with attention_on(lookup(H200)), Masks(seen):
            F.scaled_dot_product_attention(
                *(heads(SINGLE, length=length, device="cpu") for _ in range(3)),
                torch.zeros(length, length),
            )
        assert [(0, 0, row, 1)] == [each.stride() for each in seen]


class Masks(TorchDispatchMode):
    """Record the mask of each efficient-attention call, and run the kernel on meta tensors."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            self.seen.append(args[3])
            args = [each.to("meta") if isinstance(each, Tensor) else each for each in args]
        return function(*args, **(kwargs or {}))


def attend(x: Tensor) -> Tensor:
    """Compute self-attention."""
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


def go_back_at_once(x: Tensor) -> Tensor:
    """Compute a gradient through a checkpoint inside forward, and use it in forward."""
    (gradient,) = torch.autograd.grad(checkpoint(attend, x, use_reentrant=False).sum(), x)
    return attend(x + gradient)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "by torch's module": nn.MultiheadAttention(16, 2, 0.1, dtype=HALF),
    "by its operator": lambda x: torch.ops.aten.scaled_dot_product_attention(
        x[None], x[None], x[None]
    ),
    "by name": lambda x: F.scaled_dot_product_attention(query=x[None], key=x[None], value=x[None]),
    "checkpointed": lambda x: checkpoint(attend, x, use_reentrant=False),
    "checkpointed in another way": lambda x: checkpoint(attend, x, use_reentrant=True),
    "a gradient within": go_back_at_once,
}


class Weighed(nn.Module):
    """A module that calls attention in one of the `WAYS`.

    `nn.MultiheadAttention` needs its input three times.
    """

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.way, nn.Module):
            return self.way(x, x, x, need_weights=False)[0]
        return self.way(x)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_attention_is_found_however_it_is_called(way: Callable[[Tensor], Tensor]) -> None:
    """Every call of attention is replaced, also inside torch functions and during recomputation."""
    profile = lflops.estimate(
        Weighed(way),
        torch.zeros(8, 6, 16, dtype=HALF, requires_grad=True),
        backward=True,
        hardware=A100,
    )
    found = {cell.operator for cell in profile.op_counts if "attention" in cell.operator}
    assert {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    } == found


def test_attention_is_in_what_autocast_makes_of_it() -> None:
    """The kernel is selected by the dtype to which autocast casts the inputs, here bfloat16."""
    with torch.autocast("cpu", HALF):
        (note,) = estimated(SINGLE, hardware=A100).notes
    assert {FLASH: 1} == note.values


def test_what_no_kernel_takes_is_an_error() -> None:
    """The error names the chip and says what to do."""
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(
            lflops.CountError, match="do not support this call on H200 SXM: enable SDPBackend"
        ),
    ):
        estimated(SINGLE)


@pytest.mark.parametrize("chip", [None, "AMD Instinct MI300X"])
def test_of_any_other_device_it_is_the_hosts(chip: str | None) -> None:
    """Without an NVIDIA chip, the estimate keeps the kernel of the CPU and has no note."""
    profile = estimated(hardware=chip)
    assert {"_scaled_dot_product_flash_attention_for_cpu"} == {
        name for name in profile.by_operator() if "attention" in name
    }
    assert () == profile.notes


def test_no_mode_stays_open() -> None:
    """An estimate that fails leaves no attention mode active.

    Real attention runs on the CPU again afterwards; inside an active mode it raises an error.
    """
    with pytest.raises(lflops.CountError):
        lflops.estimate(
            Attends(dropout_p=0.1),
            (heads(SINGLE),) * 3,
            loss=lambda out: out.sum().item(),
            backward=True,
            hardware=H200,
        )
    real = [heads(device="cpu") for _ in range(3)]
    assert real[0].shape == F.scaled_dot_product_attention(*real).shape
    with attention_on(lookup(A100)), pytest.raises(NotImplementedError, match="flash_attention"):
        F.scaled_dot_product_attention(*real)


def test_the_note_says_which_and_how_often() -> None:
    """The note's sentence contains the kernel, the chip and the number of calls."""
    (note,) = estimated(hardware=A100).notes
    assert (
        "scaled_dot_product_attention is counted as the kernel that torch selects on A100 SXM 80GB: flash attention 1 time"
        == sentence(note)
    )
