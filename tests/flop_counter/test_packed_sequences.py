"""Test attention over packed sequences of several lengths.

Each sequence is counted as a separate square of scores, exact to the last MAC.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

import lflops
from tests.support.count_function import Function, count, executed, macs
from tests.support.cpu_stand_ins import packed_attention_kernels

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

HEADS, WIDTH = 3, 8
PHASES = ("forward", "backward", "recompute")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    yield from packed_attention_kernels()


def offsets_of(lengths: list[int]) -> Tensor:
    """Return the offsets where each sequence begins, and where the last one ends."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(lengths: list[int], **options: Any) -> dict[str, dict[str, int]]:
    """Return MACs and executed MACs by phase of one call of `varlen_attn` with all sequences."""
    offsets = offsets_of(lengths)
    tensors = [torch.randn(sum(lengths), HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    profile = count(
        lambda *qkv: varlen.varlen_attn(
            *qkv, offsets, offsets, max(lengths), max(lengths), **options
        ),
        *tensors,
        backward=True,
    )
    assert () == profile.unsupported
    return {"macs": macs(profile), "executed": executed(profile)}


def alone(length: int, *, is_causal: bool) -> dict[str, dict[str, int]]:
    """Return MACs and executed MACs by phase of one sequence without packing.

    It runs through `scaled_dot_product_attention`.
    """
    tensors = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    profile = count(partial(attend, is_causal=is_causal), *tensors, backward=True)
    return {"macs": macs(profile), "executed": executed(profile)}


def summed(parts: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sums of several results."""
    return {
        figure: {phase: sum(part[figure][phase] for part in parts) for phase in PHASES}
        for figure in ("macs", "executed")
    }


@pytest.mark.parametrize("is_causal", [False, True])
def test_100_packings_cost_what_their_sequences_cost_one_by_one(is_causal: bool) -> None:
    """A packed call costs as much as attention on each sequence separately.

    100 packings have up to 8 sequences of 1 to 40 tokens, in forward and backward. The reference is
    the CPU's attention kernel.
    """
    draw = random.Random(7)  # noqa: S311
    of_length = {length: alone(length, is_causal=is_causal) for length in range(1, 41)}
    window = {"window_size": (-1, 0)} if is_causal else {}
    for _ in range(100):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 8))]
        assert summed([of_length[length] for length in lengths]) == packed(lengths, **window), (
            lengths
        )


def test_100_windowed_packings_execute_what_a_mask_of_ones_says() -> None:
    """With a window, the executed MACs equal those of an explicit mask.

    The mask of each sequence is built as a matrix and its ones are counted, so no formula is used.
    """
    draw = random.Random(8)  # noqa: S311
    for _ in range(100):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 6))]
        before = draw.randint(0, 12)
        seen = 0
        for length in lengths:
            distances = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            mask = (distances >= 0) & (distances <= before)
            seen += HEADS * int(mask.sum())
        whole = HEADS * sum(length**2 for length in lengths)
        times = {"forward": 2 * WIDTH, "backward": 4 * WIDTH, "recompute": WIDTH}
        assert {
            "macs": {phase: whole * each for phase, each in times.items()},
            "executed": {phase: seen * each for phase, each in times.items()},
        } == packed(lengths, window_size=(before, 0)), (lengths, before)


def jagged(lengths: list[int]) -> Tensor:
    """Return a jagged nested tensor of shape [sequences, heads, tokens, width] with a gradient."""
    parts = [torch.randn(length, HEADS, WIDTH) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True).transpose(
        1, 2
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_jagged_tensors_cost_each_sequences_square_in_the_kernels_for_them(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over a jagged tensor has 3 * 3 + 5 * 5 + 2 * 2 scores per head.

    The test selects the kernels that torch uses on a GPU.
    """
    backend = getattr(torch.nn.attention.SDPBackend, kernel)
    monkeypatch.setattr("torch.nested._internal.sdpa._select_sdp_backend", lambda *_: backend)
    x = jagged([3, 5, 2])
    profile = lflops.count(
        Function(lambda x: attend(x, x, x, is_causal=True)),
        (x,),
        backward=True,
        loss=lambda out: out.values().sum(),
    )
    scores, seen = HEADS * (9 + 25 + 4), HEADS * (6 + 15 + 3)
    times = {"forward": 2 * WIDTH, "backward": 4 * WIDTH, "recompute": WIDTH}
    assert {phase: scores * each for phase, each in times.items()} == macs(profile)
    assert {phase: seen * each for phase, each in times.items()} == executed(profile)


def test_lengths_without_values_give_the_upper_bound_and_a_note() -> None:
    """If the lengths have no values, the count is an upper bound, and a note says so.

    10 tokens in sequences of at most 5 have at most two squares of 5. With the values they have 3 *
    3 + 5 * 5 + 2 * 2 scores.
    """

    def on(device: str) -> tuple[int, list[Any]]:
        offsets = offsets_of([3, 5, 2]).to(device)
        tensors = tuple(torch.randn(10, HEADS, WIDTH, device=device) for _ in range(3))
        profile = lflops.count(
            Function(lambda *qkv: varlen.varlen_attn(*qkv, offsets, offsets, 5, 5)), tensors
        )
        scores = profile.total() // (HEADS * 2 * WIDTH)
        notes = [(note.code, note.subject, dict(note.values)) for note in profile.notes]
        return scores, notes

    assert (50, [("upper_bound", "torch_attn::_varlen_attn", {"calls": 1})]) == on("meta")
    assert (38, []) == on("cpu")


class Packed(torch.nn.Module):
    """Attention over lengths that are an argument."""

    def forward(self, qkv: Tensor, offsets: Tensor) -> Any:
        return varlen.varlen_attn(*qkv.unbind(1), offsets, offsets, 5, 5)


def test_an_estimate_uses_the_lengths_that_it_is_given() -> None:
    """Small integer tensors keep their values in an estimate, so the lengths are known."""
    profile = lflops.estimate(Packed(), (torch.randn(10, 3, HEADS, WIDTH), offsets_of([3, 5, 2])))
    assert HEADS * 38 * 2 * WIDTH == profile.total()
    assert () == profile.notes


def test_an_estimate_does_not_believe_lengths_that_it_could_not_work_out() -> None:
    """If unknown values are written to the offsets, the estimate counts the upper bound."""

    class Overwritten(Packed):
        def forward(self, qkv: Tensor, offsets: Tensor) -> Any:
            offsets[1:] = (qkv[: len(offsets) - 1, 0, 0, 0] * 0).int()
            return super().forward(qkv, offsets)

    profile = lflops.estimate(
        Overwritten(), (torch.randn(10, 3, HEADS, WIDTH), offsets_of([3, 5, 2]))
    )
    assert HEADS * 50 * 2 * WIDTH == profile.total()
    assert ["upper_bound"] == [note.code for note in profile.notes]


TOKENS, BLOCK = 256, 64


def documents(lengths: list[int]) -> Tensor:
    """Return the number of the document to which each token belongs."""
    return torch.repeat_interleave(torch.tensor(lengths))


def flexible(mask: Any) -> tuple[int, int]:
    """Return the scores of one head, and those in the blocks that run."""
    block = create_block_mask(mask, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=BLOCK)
    qkv = [torch.randn(1, HEADS, TOKENS, WIDTH) for _ in range(3)]
    profile = lflops.count(
        Function(lambda *qkv: flex_attention(*qkv, block_mask=block)), tuple(qkv)
    )
    assert () == profile.notes
    each = HEADS * 2 * WIDTH
    return profile.total() // each, profile.total(metric="executed_macs") // each


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_of_documents_divides_the_square_of_all_tokens() -> None:
    """A mask that separates documents is counted as one square of scores for each document.

    The documents have 100, 28 and 128 tokens. The count does not depend on a causal mask, or on the
    boundaries of blocks.
    """
    document = documents([100, 28, 128])
    squares = 100**2 + 28**2 + 128**2
    # In blocks of 64, the first two documents are in rows 0 and 1, and the third in rows 2 and 3.
    assert (squares, squares) == flexible(lambda _b, _h, i, j: document[i] == document[j])
    assert (squares, (1 + 2 + 1 + 2) * BLOCK**2) == flexible(
        lambda _b, _h, i, j: (document[i] == document[j]) & (i >= j)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_window_and_a_sink_divide_nothing() -> None:
    """A window or a sink connects all tokens, so the count is the whole square.

    The executed blocks are on and next to the diagonal, and in the column of the sink.
    """
    assert (TOKENS**2, (4 + 3) * BLOCK**2) == flexible(
        lambda _b, _h, i, j: (i >= j) & (i - j < BLOCK)
    )
    assert (TOKENS**2, (4 + 3 + 2) * BLOCK**2) == flexible(
        lambda _b, _h, i, j: (i >= j) & ((i - j < BLOCK) | (j < 4))
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_that_cannot_be_asked_gives_the_upper_bound() -> None:
    """If the mask function raises an error when lflops calls it, the count is an upper bound."""

    def mask(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # `create_block_mask` passes one index at a time, but lflops passes many.
        if i.dim():
            raise RuntimeError("one at a time")
        return i >= j

    block = create_block_mask(mask, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=BLOCK)
    qkv = tuple(torch.randn(1, HEADS, TOKENS, WIDTH) for _ in range(3))
    profile = lflops.count(Function(lambda *qkv: flex_attention(*qkv, block_mask=block)), qkv)
    assert HEADS * TOKENS**2 * 2 * WIDTH == profile.total()
    assert ["upper_bound"] == [note.code for note in profile.notes]


def test_grouped_products_that_end_before_the_rows_execute_only_those() -> None:
    """A grouped matmul executes only the rows before the last offset.

    2, 0 and 3 of 8 rows belong to the three experts; the kernel skips the other 3 rows.
    """
    rows, inner, outer = 8, 16, 32
    x = torch.randn(rows, inner, dtype=torch.bfloat16)
    weights = torch.randn(3, inner, outer, dtype=torch.bfloat16)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    profile = count(lambda x, w: torch.ops.aten._grouped_mm(x, w, offs=ends), x, weights)
    assert {"forward": rows * inner * outer} == macs(profile)
    assert {"forward": 5 * inner * outer} == executed(profile)
