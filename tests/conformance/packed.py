"""Sequences packed end to end.

Each is a square of its own where the kernel is given their lengths; a dense mask divides nothing.

The kernels that are given lengths run on GPUs alone. Here others stand in for them, below torch's
and transformers' own functions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.conformance.architectures import published
from tests.conformance.case import Build, Case
from tests.conformance.making import Family, Made, data, layer, leaf, of
from tests.conformance.pencil import Macs, attention, product
from tests.support.cpu_stand_ins import packed_attention_kernels

__all__ = ["CASES"]

lengths, other_lengths = (3, 5, 2), (4, 2, 6)
tokens, keys, longest = sum(lengths), sum(other_lengths), max(lengths)
heads, groups, width = 6, 3, 8
squares = heads * (3 * 3 + 5 * 5 + 2 * 2)
triangles = heads * ((1 + 2 + 3) + (1 + 2 + 3 + 4 + 5) + (1 + 2))
windows = heads * ((1 + 2 + 2) + (1 + 2 + 2 + 2 + 2) + (1 + 2))
"""Each query sees itself and the one before."""
crossed = heads * (3 * 4 + 5 * 2 + 2 * 6)
dense = heads * tokens * tokens

on_stand_ins = contextmanager(packed_attention_kernels)
with_lengths = Family("packed sequences", on_stand_ins)
anywhere = Family("packed sequences")


def starts(of_sequences: tuple[int, ...]) -> Made:
    """Where each sequence begins, and where the last one ends."""
    return Made(
        lambda: torch.tensor([0, *of_sequences], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    )


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Tensor:
    """Torch's own function for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    longest = (int(each.diff().max()) for each in (cu_seqlens_q, cu_seqlens_k))
    return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options)  # type: ignore[return-value]


def varlen_into(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """The same, into a tensor that is there."""
    from torch.nn.attention.varlen import varlen_attn_out

    return varlen_attn_out(torch.zeros_like(q), q, k, v, offsets, offsets, longest, longest)  # type: ignore[return-value]


def kernel_into(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """The kernel that it calls, by its own name."""
    kernel = torch.ops.aten._flash_attention_forward_no_dropout_inplace
    return kernel(
        torch.zeros_like(q), q, k, v, offsets, offsets, longest, longest, 0.0, True, False
    )


class Layer(nn.Module):
    """An attention layer on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(heads * width, 3 * heads * width, bias=False)
        self.out = nn.Linear(heads * width, heads * width, bias=False)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, width)).unbind(1)
        return self.out(varlen(q, k, v, offsets, offsets, window_size=(-1, 0)).flatten(1))


query, given = leaf(tokens, heads, width), data(tokens, heads, width)
begins = starts(lengths)
qkv = (query, query, query, begins, begins)
projections = product(tokens, heads * width, 3 * heads * width) + product(
    tokens, heads * width, heads * width
)
whole = attention(squares, width)
VARLEN = (
    with_lengths.trained("varlen_attn", of(varlen, *qkv), whole),
    with_lengths.trained(
        "varlen_attn, causal",
        of(varlen, *qkv, window_size=(-1, 0)),
        whole,
        executed=2 * triangles * width,
    ),
    with_lengths.trained(
        "varlen_attn in a window",
        of(varlen, *qkv, window_size=(1, 0)),
        whole,
        executed=2 * windows * width,
    ),
    with_lengths.trained(
        "varlen_attn to other sequences",
        of(varlen, query, *[leaf(keys, heads, width)] * 2, begins, starts(other_lengths)),
        attention(crossed, width),
    ),
    with_lengths.trained(
        "varlen_attn of groups of heads",
        of(varlen, query, *[leaf(tokens, groups, width)] * 2, begins, begins, enable_gqa=True),
        whole,
    ),
    with_lengths.inference(
        "varlen_attn without gradients", of(varlen, given, given, given, begins, begins), whole
    ),
    with_lengths.inference(
        "varlen_attn into a tensor", of(varlen_into, given, given, given, begins), whole
    ),
    with_lengths.inference(
        "flash attention into a tensor",
        of(kernel_into, given, given, given, begins),
        whole,
        executed=2 * triangles * width,
    ),
    with_lengths.trained(
        "an attention layer on packed sequences",
        layer(Layer, leaf(tokens, heads * width), begins),
        projections + whole,
        executed=projections.forward + 2 * triangles * width,
    ),
)


def by(backend: str) -> Callable[[], AbstractContextManager[None]]:
    """As on a GPU, where torch picks this backend for nested tensors."""

    @contextmanager
    def setting() -> Iterator[None]:
        choice = getattr(torch.nn.attention.SDPBackend, backend)
        with (
            on_stand_ins(),
            mock.patch("torch.nested._internal.sdpa._select_sdp_backend", return_value=choice),
        ):
            yield

    return setting


def nested(**options: bool) -> Callable[..., Tensor]:
    """Attention of jagged nested tensors, [sequences, heads, tokens, width], made of packed ones."""

    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(each, offsets).transpose(1, 2)
            for each in (q, k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).values()

    return function


class NestedLayer(Layer):
    """The same layer, whose projections take nested tensors too."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        packed = self.qkv(torch.nested.nested_tensor_from_jagged(x, offsets))
        q, k, v = (
            each.unflatten(-1, (heads, width)).transpose(1, 2) for each in packed.chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).values()


NESTED = tuple(
    case
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    for short in (backend.partition("_")[0].lower(),)
    for family in (Family("packed sequences", by(backend)),)
    for case in (
        family.trained(
            f"nested tensors, {short}", of(nested(), query, query, query, begins), whole
        ),
        family.trained(
            f"nested tensors, {short}, causal",
            of(nested(is_causal=True), query, query, query, begins),
            whole,
            executed=2 * triangles * width,
        ),
        family.trained(
            f"a layer on nested tensors, {short}",
            layer(NestedLayer, leaf(tokens, heads * width), begins),
            projections + whole,
        ),
    )
)
padded = len(lengths) * heads * longest**2
BY_PRODUCTS = (
    # Its products are of tensors that are padded to the longest sequence.
    anywhere.trained(
        "nested tensors on this processor",
        of(nested(), query, query, query, begins),
        attention(padded, width, fused=False),
    ),
)


def of_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any]) -> Tensor:
    """Flex attention on blocks of 32."""
    length = q.shape[-2]
    return flex_attention(
        q,
        k,
        v,
        block_mask=create_block_mask(
            mask, None, None, length, length, device="cpu", BLOCK_SIZE=block
        ),
    )


def same(_b: Any, _h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Of the same document."""
    return of_token[i] == of_token[j]


def same_causal(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """And not after."""
    return same(b, h, i, j) & (i >= j)


def same_near(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """And at most one block before."""
    return same_causal(b, h, i, j) & (i - j < block)


def near(_b: Any, _h: Any, i: Tensor, j: Tensor) -> Tensor:
    """A sliding window."""
    return (i >= j) & (i - j < block)


def near_or_first(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """The window and four sinks."""
    return near(b, h, i, j) | ((j < 4) & (i >= j))


block, documents = 32, (80, 48, 128)
total, rows = sum(documents), sum(documents) // block
of_token = torch.repeat_interleave(torch.tensor(documents))
flexible = data(1, heads, total, width)
divided = heads * (80 * 80 + 48 * 48 + 128 * 128)
undivided = heads * total * total


def blocks(count: int) -> int:
    """MACs of so many blocks."""
    return 2 * heads * count * block**2 * width


# Rows of blocks 0 to 7: document 0 is in rows 0 to 2, document 1 in rows 2 and 3, document 2 in
# rows 4 to 7.
FLEX = tuple(
    anywhere.inference(
        f"flex attention, {name}",
        of(of_blocks, flexible, flexible, flexible, mask),
        Macs(2 * scores * width),
        executed=ran,
    )
    for name, mask, scores, ran in (
        # Rows 0 and 1 see blocks 0 to 2, row 2 blocks 0 to 3, row 3 blocks 2 and 3, rows 4 to 7
        # four blocks each: 28 blocks of 32 x 32 are 28,672 scores, more than the three squares'
        # 25,088.
        ("documents", same, divided, 2 * divided * width),
        # 1 + 2 + 3 and 2 blocks, then 1 + 2 + 3 + 4.
        ("causal documents", same_causal, divided, blocks(1 + 2 + 3 + 2 + 1 + 2 + 3 + 4)),
        # One block in rows 0 and 4, two in the others.
        ("documents in a window", same_near, divided, blocks(2 * 1 + 6 * 2)),
        ("a sliding window", near, undivided, blocks(1 + 7 * 2)),
        # The sinks' column of blocks is one more in rows 2 to 7.
        ("a sliding window and sinks", near_or_first, undivided, blocks(1 + 7 * 2 + 6)),
    )
)


def masked(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """A dense mask that leaves of the whole square those of the sequences."""
    of_token = torch.repeat_interleave(offsets.diff())
    return F.scaled_dot_product_attention(q, k, v, attn_mask=of_token[:, None] == of_token[None, :])


rectangle = leaf(1, heads, tokens, width)
MASKED = (
    anywhere.trained(
        "packed by a dense mask",
        of(masked, rectangle, rectangle, rectangle, begins),
        attention(dense, width),
    ),
)

vocabulary, layers, wide = 13, 2, 40
hidden = heads * width
long = (256, 100, 156)
"""In blocks of 128 rows, which transformers takes.

Rows 0 and 1 are of the first, row 2 of the second and third, row 3 of the third.
"""


def flash_varlen(  # noqa: PLR0917 - as flash-attn has it
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn's function, by torch's."""
    assert not dropout_p
    window = (window_size[0], 0) if causal else window_size
    return varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        window_size=window,
        scale=softmax_scale,
        enable_gqa=True,
    )


@contextmanager
def with_flash_attention() -> Iterator[None]:
    """As where flash-attn is installed: transformers finds the function for packed sequences."""
    from transformers import modeling_flash_attention_utils as utilities

    kept = {
        name: value
        for name, value in vars(utilities).items()
        if name.startswith(("_flash", "_loaded", "_pad", "_process", "_unpad"))
    }
    functions = (None, flash_varlen, None, None, None)
    with on_stand_ins(), mock.patch.object(utilities, "_lazy_imports", return_value=functions):
        try:
            yield
        finally:
            vars(utilities).update(kept)


def eagerly() -> AbstractContextManager[None]:
    """Without a compiler: transformers compiles flex attention where it calls it."""
    return torch.compiler.set_stance("force_eager")


llama = published(
    "LlamaForCausalLM",
    "LlamaConfig",
    vocab_size=vocabulary,
    hidden_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=groups,
    intermediate_size=wide,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


def reading(kernel: str, sequences: tuple[int, ...]) -> Build:
    """A language model on one row of sequences, whose positions begin anew with each.

    How transformers is told that they are packed.
    """

    def make() -> nn.Module:
        model = llama()
        model.config._attn_implementation = kernel
        return model

    words = Made(lambda: torch.randint(3, vocabulary, (1, sum(sequences))))
    positions = Made(lambda: torch.cat([torch.arange(length) for length in sequences])[None])
    return layer(make, input_ids=words, position_ids=positions, use_cache=False)


def of_llama(count: int, scores: int) -> Macs:
    """Its layers and its head, on so many tokens and scores."""
    projections = 2 * product(count, hidden, hidden) + 2 * product(count, hidden, groups * width)
    each = projections + attention(scores, width) + 3 * product(count, hidden, wide)
    return layers * each + product(count, hidden, vocabulary)


def left_out(scores: int, executed: int) -> int:
    """MACs of forward that a mask spares."""
    return layers * 2 * (scores - executed) * width


squares_of_long = heads * sum(length**2 for length in long)
of_lengths, of_square = of_llama(tokens, squares), of_llama(tokens, dense)
of_documents = of_llama(sum(long), squares_of_long)
TRANSFORMERS = (
    Family("packed sequences", with_flash_attention).trained(
        "Llama, packed, by flash attention",
        reading("flash_attention_2", lengths),
        of_lengths,
        executed=of_lengths.forward - left_out(squares, triangles),
    ),
    anywhere.trained("Llama, packed, by a dense mask", reading("sdpa", lengths), of_square),
    Family("packed sequences", eagerly).inference(
        "Llama, packed, by flex attention",
        reading("flex_attention", long),
        of_documents,
        executed=of_documents.forward - left_out(squares_of_long, heads * (1 + 2 + 1 + 2) * 128**2),
    ),
)

CASES: tuple[Case, ...] = (*VARLEN, *NESTED, *BY_PRODUCTS, *FLEX, *MASKED, *TRANSFORMERS)
