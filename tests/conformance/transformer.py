"""torch's own attention and transformer layers, in training and by the one kernel that inference takes where it can."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.making import Family, Made, data, layer, leaf
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch, queries, keys, heads, width, wide, layers = 2, 5, 7, 4, 3, 20, 2
hidden = heads * width  # an even number of heads: of an odd one the kernel for inference takes none
key_width, value_width = 8, 10
tokens, others = batch * queries, batch * keys
square, cross = batch * heads * queries * queries, batch * heads * queries * keys

x, memory = leaf(batch, queries, hidden), leaf(batch, keys, hidden)
given, known = data(batch, queries, hidden), data(batch, keys, hidden)
trained, inference = Family("transformer").trained, Family("transformer").inference


class Attention(nn.Module):
    """`nn.MultiheadAttention` within a sequence, or from it to another."""

    def __init__(self, *, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, heads, **{"batch_first": True, **options})
        self.weights = weights

    def forward(self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None) -> Any:
        memory = x if memory is None else memory
        return self.attention(
            x, memory, memory if values is None else values, need_weights=self.weights
        )


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
    """An encoder's layer."""
    return nn.TransformerEncoderLayer(hidden, heads, **{**options, **others})


def decoder_layer() -> nn.TransformerDecoderLayer:
    """A decoder's layer."""
    return nn.TransformerDecoderLayer(hidden, heads, **options)


def encoder(*, nested: bool = False) -> nn.TransformerEncoder:
    """Layers that take padding as it comes, or leave it out."""
    return nn.TransformerEncoder(encoder_layer(), layers, enable_nested_tensor=nested)


def padding() -> Tensor:
    """Of the second sequence a part is not there."""
    return torch.arange(batch * queries).view(batch, queries) >= there


def perceptron(rows: int) -> Macs:
    """Up and down."""
    return product(rows, hidden, wide) + product(rows, wide, hidden)


def encoding(length: int, attend: Any = attention) -> Macs:
    """One layer of an encoder."""
    rows = batch * length
    return (
        product(rows, hidden, 4 * hidden)
        + attend(batch * heads * length * length, width)
        + perceptron(rows)
    )


there = batch * queries - 2
without_padding = product(there, hidden, 4 * hidden) + attention(square, width) + perceptron(there)
decoding = within + attention(square, width) + across + attention(cross, width) + perceptron(tokens)
# The first layer's projections have no input's gradient to give.
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
