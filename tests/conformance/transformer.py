"""Cases of torch's attention and transformer layers, in training and in inference.

In inference, many of these layers run one fused kernel.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.making import Family, Made, data, layer, leaf
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch = 2
queries = 5
keys = 7
heads = 4
width = 3
wide = 20
layers = 2
# The kernel for inference needs an even number of heads.
hidden = heads * width
key_width = 8
value_width = 10
tokens = batch * queries
others = batch * keys
square = batch * heads * queries * queries
cross = batch * heads * queries * keys

x = leaf(batch, queries, hidden)
memory = leaf(batch, keys, hidden)
given = data(batch, queries, hidden)
known = data(batch, keys, hidden)
trained = Family("transformer").trained
inference = Family("transformer").inference


class Attention(nn.Module):
    """`nn.MultiheadAttention` within a sequence, or from one sequence to another."""

    def __init__(self, *, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, heads, **{"batch_first": True, **options})
        self.weights = weights

    def forward(self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None) -> Any:
        memory = x if memory is None else memory
        values = memory if values is None else values
        return self.attention(x, memory, values, need_weights=self.weights)


out = product(tokens, hidden, hidden)
within = product(tokens, hidden, 3 * hidden) + out
across = product(tokens, hidden, hidden) + product(others, hidden, 2 * hidden) + out
kept = partial(attention, fused=False)

MULTIHEAD = (
    trained("MultiheadAttention", layer(Attention, x), within + attention(square, width)),
    trained(
        "MultiheadAttention that gives its weights",
        layer(lambda: Attention(weights=True), x),
        within + kept(square, width),
    ),
    trained(
        "MultiheadAttention with dropout",
        layer(lambda: Attention(dropout=0.1), x),
        within + kept(square, width),
    ),
    trained(
        "MultiheadAttention without biases",
        layer(lambda: Attention(bias=False), x),
        within + attention(square, width),
    ),
    trained(
        "MultiheadAttention to another sequence",
        layer(Attention, x, memory),
        across + attention(cross, width),
    ),
    trained(
        "MultiheadAttention, time first",
        layer(
            lambda: Attention(batch_first=False),
            leaf(queries, batch, hidden),
            leaf(keys, batch, hidden),
        ),
        across + attention(cross, width),
    ),
    trained(
        "MultiheadAttention without a batch",
        layer(Attention, leaf(queries, hidden)),
        product(queries, hidden, 3 * hidden)
        + product(queries, hidden, hidden)
        + attention(heads * queries * queries, width),
    ),
    trained(
        "MultiheadAttention to keys and values of other widths",
        layer(
            lambda: Attention(kdim=key_width, vdim=value_width),
            x,
            leaf(batch, keys, key_width),
            leaf(batch, keys, value_width),
        ),
        2 * out
        + product(others, key_width, hidden)
        + product(others, value_width, hidden)
        + attention(cross, width),
    ),
    trained(
        "MultiheadAttention with one more key",
        layer(lambda: Attention(add_bias_kv=True), x, memory),
        across + attention(batch * heads * queries * (keys + 1), width),
    ),
    trained(
        "MultiheadAttention of data",
        layer(Attention, given),
        product(tokens, hidden, 3 * hidden, gradients=1) + out + attention(square, width),
    ),
    inference(
        "MultiheadAttention in one kernel",
        layer(lambda: Attention().eval(), given),
        within + attention(square, width),
    ),
    inference(
        "MultiheadAttention in one kernel that gives its weights",
        layer(lambda: Attention(weights=True).eval(), given),
        within + attention(square, width),
    ),
    inference(
        "MultiheadAttention in inference, to another sequence",
        layer(lambda: Attention().eval(), given, known),
        across + attention(cross, width),
    ),
)

options: dict[str, Any] = {"dim_feedforward": wide, "batch_first": True, "dropout": 0.0}


def encoder_layer(**others: Any) -> nn.TransformerEncoderLayer:
    """Create an encoder layer."""
    return nn.TransformerEncoderLayer(hidden, heads, **{**options, **others})


def decoder_layer() -> nn.TransformerDecoderLayer:
    """Create a decoder layer."""
    return nn.TransformerDecoderLayer(hidden, heads, **options)


def encoder(*, nested: bool = False) -> nn.TransformerEncoder:
    """Create an encoder. With `nested`, it skips padding."""
    return nn.TransformerEncoder(encoder_layer(), layers, enable_nested_tensor=nested)


def padding() -> Tensor:
    """Return a padding mask, in which the end of the second sequence is padding."""
    return torch.arange(batch * queries).view(batch, queries) >= there


def perceptron(rows: int) -> Macs:
    """Return the MACs of two linear layers, from `hidden` to `wide` features and back."""
    return product(rows, hidden, wide) + product(rows, wide, hidden)


def encoding(length: int, attend: Any = attention) -> Macs:
    """Return the MACs of an encoder layer."""
    rows = batch * length
    return (
        product(rows, hidden, 4 * hidden)
        + attend(batch * heads * length * length, width)
        + perceptron(rows)
    )


there = batch * queries - 2
without_padding = product(there, hidden, 4 * hidden) + attention(square, width) + perceptron(there)
decoding = within + attention(square, width) + across + attention(cross, width) + perceptron(tokens)
# The input of the first layer requires no gradient, so its projection has one matmul less.
not_wanted = Macs(0, -product(tokens, hidden, 3 * hidden).forward)
both = {"num_encoder_layers": layers, "num_decoder_layers": layers, **options}

LAYERS = (
    trained("TransformerEncoderLayer", layer(encoder_layer, x), encoding(queries)),
    trained(
        "TransformerEncoderLayer with dropout",
        layer(lambda: encoder_layer(dropout=0.1), x),
        encoding(queries, kept),
    ),
    trained(
        "TransformerEncoderLayer, evaluated with gradients",
        layer(lambda: encoder_layer().eval(), x),
        encoding(queries),
    ),
    inference(
        "TransformerEncoderLayer in one kernel",
        layer(lambda: encoder_layer().eval(), given),
        encoding(queries),
    ),
    inference(
        "TransformerEncoderLayer in one kernel, norm first, with GELU",
        layer(lambda: encoder_layer(norm_first=True, activation="gelu").eval(), given),
        encoding(queries),
    ),
    inference(
        "TransformerEncoderLayer in one kernel, with a mask",
        layer(
            lambda: encoder_layer().eval(),
            given,
            src_mask=Made(lambda: torch.zeros(queries, queries)),
        ),
        encoding(queries),
    ),
    inference(
        "TransformerEncoderLayer in training without gradients",
        layer(encoder_layer, given),
        encoding(queries),
    ),
    trained(
        "TransformerEncoder of data", layer(encoder, given), layers * encoding(queries) + not_wanted
    ),
    inference(
        "TransformerEncoder in one kernel a layer",
        layer(lambda: encoder().eval(), given),
        layers * encoding(queries),
    ),
    inference(
        "TransformerEncoder in one kernel a layer, which leaves padding out but for the scores",
        layer(lambda: encoder(nested=True).eval(), given, src_key_padding_mask=Made(padding)),
        layers * without_padding,
    ),
    trained("TransformerDecoderLayer", layer(decoder_layer, x, memory), decoding),
    trained(
        "TransformerDecoder",
        layer(lambda: nn.TransformerDecoder(decoder_layer(), layers), x, memory),
        layers * decoding,
    ),
    trained(
        "Transformer",
        layer(lambda: nn.Transformer(hidden, heads, **both), memory, x),
        layers * encoding(keys) + layers * decoding,
    ),
    inference(
        "Transformer in inference",
        layer(lambda: nn.Transformer(hidden, heads, **both).eval(), known, given),
        layers * (encoding(keys) + decoding),
    ),
)

CASES = (*MULTIHEAD, *LAYERS)
