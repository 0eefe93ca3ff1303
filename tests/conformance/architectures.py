"""Parts of published architectures: their models in transformers, and the MACs of their layers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.conformance.case import Build
from tests.conformance.making import data, layer
from tests.conformance.pencil import Macs, attention, product

__all__ = [
    "convolution",
    "decoder_layer",
    "encoder_layer",
    "image_convolution",
    "perceptron",
    "published",
    "seeing",
    "settings",
]


def published(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    """Return a function that creates a model of transformers with random weights.

    The library is imported in this function. A callable in `fields` is called for its value.

    Args:
        model: Class name of the model.
        config: Class name of its configuration.
        fields: Fields of the configuration.
    """

    def make() -> nn.Module:
        import transformers

        parts = {}
        for name, value in fields.items():
            parts[name] = value() if callable(value) else value
        configuration = getattr(transformers, config)(**parts)
        made: nn.Module = getattr(transformers, model)(configuration)
        return made

    return make


def settings(config: str, **fields: Any) -> Callable[[], Any]:
    """Return a function that creates the configuration of a part of a model."""

    def make() -> Any:
        import transformers

        return getattr(transformers, config)(**fields)

    return make


BATCH = 2
COLOURS = 3


def seeing(size: int, model: str, config: str, **fields: Any) -> Build:
    """Return a `Build` of a model that receives square images."""
    return layer(published(model, config, **fields), pixel_values=data(BATCH, COLOURS, size, size))


def perceptron(rows: int, hidden: int, wide: int) -> Macs:
    """Return the MACs of two linear layers, from `hidden` to `wide` features and back."""
    return product(rows, hidden, wide) + product(rows, wide, hidden)


def encoder_layer(
    batch: int, length: int, hidden: int, heads: int, wide: int, *, fused: bool = True
) -> Macs:
    """Return the MACs of an encoder layer.

    It has projections to queries, keys, values and outputs, attention within a sequence, and a
    perceptron.
    """
    rows = batch * length
    scores = batch * heads * length * length
    return (
        4 * product(rows, hidden, hidden)
        + attention(scores, hidden // heads, fused=fused)
        + perceptron(rows, hidden, wide)
    )


def decoder_layer(
    batch: int, length: int, hidden: int, heads: int, wide: int, *, others: int
) -> Macs:
    """Return the MACs of a decoder layer: an encoder layer with attention to another sequence.

    The other sequence has the length `others`, and is usually the output of an encoder.
    """
    rows = batch * length
    scores = batch * heads * length * others
    across = (
        2 * product(rows, hidden, hidden)
        + 2 * product(batch * others, hidden, hidden)
        + attention(scores, hidden // heads)
    )
    return encoder_layer(batch, length, hidden, heads, wide) + across


def convolution(places: int, inputs: int, outputs: int, kernel: int, *, gradients: int = 2) -> Macs:
    """Return the MACs of a convolution at `places` positions, with `kernel` elements at each."""
    return product(places, outputs, inputs, kernel, gradients=gradients)


def image_convolution(places: int, outputs: int, kernel: int) -> Macs:
    """Return the MACs of a convolution of an image with three colors and without a gradient."""
    return convolution(places, COLOURS, outputs, kernel, gradients=1)
