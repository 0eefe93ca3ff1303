"""Cases of attention on sequences that are packed one after the other.

If the kernel receives the lengths, it computes the scores within each sequence only. With a dense
mask, it computes all scores.

Kernels that receive lengths run only on GPUs. Here, stand-ins replace them below the functions of
torch and transformers.
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

lengths = (3, 5, 2)
other_lengths = (4, 2, 6)
tokens = sum(lengths)
keys = sum(other_lengths)
longest = max(lengths)
heads = 6
groups = 3
width = 8
squares = heads * (3 * 3 + 5 * 5 + 2 * 2)
triangles = heads * ((1 + 2 + 3) + (1 + 2 + 3 + 4 + 5) + (1 + 2))
# In the window, each query has two keys: its own position and the one before it.
windows = heads * ((1 + 2 + 2) + (1 + 2 + 2 + 2 + 2) + (1 + 2))
crossed = heads * (3 * 4 + 5 * 2 + 2 * 6)
dense = heads * tokens * tokens

on_stand_ins = contextmanager(packed_attention_kernels)
with_lengths = Family("packed sequences", on_stand_ins)
anywhere = Family("packed sequences")


def starts(of_sequences: tuple[int, ...]) -> Made:
    """Return an input: the offsets of all sequences, and the end of the last one."""

    def make() -> Tensor:
        return torch.tensor([0, *of_sequences], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    return Made(make)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Tensor:
    """Call torch's function for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    longest_q = int(cu_seqlens_q.diff().max())
    longest_k = int(cu_seqlens_k.diff().max())
    return varlen_attn(  # type: ignore[return-value]
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, **options
    )


def varlen_into(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Call torch's function for packed sequences that writes into an existing tensor."""
    from torch.nn.attention.varlen import varlen_attn_out

    return varlen_attn_out(  # type: ignore[return-value]
        torch.zeros_like(q), q, k, v, offsets, offsets, longest, longest
    )


def kernel_into(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Call the kernel of `varlen_attn_out` by its name."""
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


query = leaf(tokens, heads, width)
given = data(tokens, heads, width)
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
    """Return a setting in which torch chooses this backend for nested tensors, as on a GPU."""

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
    """Return a function that computes attention of nested tensors, which it makes of packed ones.

    The nested tensors are jagged, with the dimensions sequences, heads, tokens and features.
    """

    def jagged(packed: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(packed, offsets).transpose(1, 2)

    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(
            jagged(q, offsets), jagged(k, offsets), jagged(v, offsets), **options
        )
        return attended.transpose(1, 2).values()

    return function


class NestedLayer(Layer):
    """An attention layer on packed sequences that runs on nested tensors, also its projections."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        packed = self.qkv(torch.nested.nested_tensor_from_jagged(x, offsets))
        q, k, v = (
            each.unflatten(-1, (heads, width)).transpose(1, 2) for each in packed.chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).values()


def nested_cases(name: str, backend: str) -> tuple[Case, ...]:
    """Return the cases of nested tensors with a backend."""
    family = Family("packed sequences", by(backend))
    return (
        family.trained(f"nested tensors, {name}", of(nested(), query, query, query, begins), whole),
        family.trained(
            f"nested tensors, {name}, causal",
            of(nested(is_causal=True), query, query, query, begins),
            whole,
            executed=2 * triangles * width,
        ),
        family.trained(
            f"a layer on nested tensors, {name}",
            layer(NestedLayer, leaf(tokens, heads * width), begins),
            projections + whole,
        ),
    )


NESTED = (
    *nested_cases("flash", "FLASH_ATTENTION"),
    *nested_cases("efficient", "EFFICIENT_ATTENTION"),
)
padded = len(lengths) * heads * longest**2
BY_PRODUCTS = (
    # The matmuls run on tensors that are padded to the longest sequence.
    anywhere.trained(
        "nested tensors on this processor",
        of(nested(), query, query, query, begins),
        attention(padded, width, fused=False),
    ),
)


def of_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any]) -> Tensor:
    """Call flex attention with a mask on blocks of 32 x 32."""
    length = q.shape[-2]
    block_mask = create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=block)
    return flex_attention(q, k, v, block_mask=block_mask)


def same(_b: Any, _h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Keep the keys of the query's document."""
    return of_token[i] == of_token[j]


def same_causal(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Keep the keys of the query's document that are not after the query."""
    return same(b, h, i, j) & (i >= j)


def same_near(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Keep the keys of the query's document in a sliding window of one block."""
    return same_causal(b, h, i, j) & (i - j < block)


def near(_b: Any, _h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Keep the keys in a sliding window of one block."""
    return (i >= j) & (i - j < block)


def near_or_first(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    """Keep the keys in a sliding window, and the first four keys (attention sinks)."""
    return near(b, h, i, j) | ((j < 4) & (i >= j))


block = 32
documents = (80, 48, 128)
total = sum(documents)
rows = sum(documents) // block
of_token = torch.repeat_interleave(torch.tensor(documents))
flexible = data(1, heads, total, width)
divided = heads * (80 * 80 + 48 * 48 + 128 * 128)
undivided = heads * total * total


def blocks(count: int) -> int:
    """Return the MACs of this number of blocks, in all heads."""
    return 2 * heads * count * block**2 * width


def flex(name: str, mask: Callable[..., Any], scores: int, executed: int) -> Case:
    """Return a case of flex attention with a mask."""
    return anywhere.inference(
        f"flex attention, {name}",
        of(of_blocks, flexible, flexible, flexible, mask),
        Macs(2 * scores * width),
        executed=executed,
    )


# There are eight rows of blocks: document 0 is in rows 0 to 2, document 1 in rows 2 and 3, and
# document 2 in rows 4 to 7.
FLEX = (
    # Rows 0 and 1 have blocks 0 to 2, row 2 has blocks 0 to 3, row 3 has blocks 2 and 3, and rows 4
    # to 7 have four blocks each. These 28 blocks of 32 x 32 have 28,672 scores, more than the
    # 25,088 scores within the documents.
    flex("documents", same, divided, 2 * divided * width),
    # 1, 2 and 3 blocks in rows 0 to 2, 2 blocks in row 3, and 1, 2, 3 and 4 blocks in rows 4 to 7.
    flex("causal documents", same_causal, divided, blocks(1 + 2 + 3 + 2 + 1 + 2 + 3 + 4)),
    # One block in rows 0 and 4, two in each of the other rows.
    flex("documents in a window", same_near, divided, blocks(2 * 1 + 6 * 2)),
    flex("a sliding window", near, undivided, blocks(1 + 7 * 2)),
    # The sinks add one block in each of the rows 2 to 7.
    flex("a sliding window and sinks", near_or_first, undivided, blocks(1 + 7 * 2 + 6)),
)


def masked(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Compute attention with a dense mask that keeps the scores within each sequence."""
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

vocabulary = 13
layers = 2
wide = 40
hidden = heads * width
long = (256, 100, 156)
"""Lengths of sequences for flex attention, for which transformers uses blocks of 128 rows.

Blocks 0 and 1 are in the first sequence, block 2 is in the second and the third, and block 3 is in
the third.
"""


def flash_varlen(  # noqa: PLR0917 - the arguments of flash-attn
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
    """Call torch's function for packed sequences, with the arguments of flash-attn's function."""
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
    """Make transformers find the function for packed sequences, as if flash-attn were installed."""
    from transformers import modeling_flash_attention_utils as utilities

    # transformers stores the functions in these variables of its module.
    variables = ("_flash", "_loaded", "_pad", "_process", "_unpad")
    kept = {name: value for name, value in vars(utilities).items() if name.startswith(variables)}
    functions = (None, flash_varlen, None, None, None)
    with on_stand_ins(), mock.patch.object(utilities, "_lazy_imports", return_value=functions):
        try:
            yield
        finally:
            vars(utilities).update(kept)


def eagerly() -> AbstractContextManager[None]:
    """Return a setting without compilation, because transformers compiles flex attention."""
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
    """Return a `Build` of a language model that receives packed sequences in one row.

    The positions start at 0 in each sequence. From this, transformers finds out that sequences are
    packed.
    """

    def make() -> nn.Module:
        model = llama()
        model.config._attn_implementation = kernel
        return model

    words = Made(lambda: torch.randint(3, vocabulary, (1, sum(sequences))))
    positions = Made(lambda: torch.cat([torch.arange(length) for length in sequences])[None])
    return layer(make, input_ids=words, position_ids=positions, use_cache=False)


def of_llama(count: int, scores: int) -> Macs:
    """Return the MACs of a Llama model with this number of tokens and scores."""
    projections = 2 * product(count, hidden, hidden) + 2 * product(count, hidden, groups * width)
    each = projections + attention(scores, width) + 3 * product(count, hidden, wide)
    return layers * each + product(count, hidden, vocabulary)


def left_out(scores: int, executed: int) -> int:
    """Return the MACs of forward that a mask skips."""
    return layers * 2 * (scores - executed) * width


squares_of_long = heads * sum(length**2 for length in long)
of_lengths = of_llama(tokens, squares)
of_square = of_llama(tokens, dense)
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
