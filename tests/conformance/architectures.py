"""What the published architectures are made of."""

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
    """A model of transformers with random weights; the library is imported where one is made."""

    def make() -> nn.Module:
        import transformers

        kinds = {name: getattr(transformers, name) for name in (model, config)}
        parts = {name: value() if callable(value) else value for name, value in fields.items()}
        made: nn.Module = kinds[model](kinds[config](**parts))
        return made

    return make


def settings(config: str, **fields: Any) -> Callable[[], Any]:
    """The configuration of a part."""

    def make() -> Any:
        import transformers

        return getattr(transformers, config)(**fields)

    return make


BATCH, COLOURS = 2, 3


def seeing(size: int, model: str, config: str, **fields: Any) -> Build:
    """A model on square images."""
    return layer(published(model, config, **fields), pixel_values=data(BATCH, COLOURS, size, size))


def perceptron(rows: int, hidden: int, wide: int) -> Macs:
    """Up and down."""
    return product(rows, hidden, wide) + product(rows, wide, hidden)


def encoder_layer(
    batch: int, length: int, hidden: int, heads: int, wide: int, *, fused: bool = True
) -> Macs:
    """Projections to queries, keys, values and out, attention of all to all, a perceptron."""
    rows, scores = batch * length, batch * heads * length * length
    return (
        4 * product(rows, hidden, hidden)
        + attention(scores, hidden // heads, fused=fused)
        + perceptron(rows, hidden, wide)
    )


def decoder_layer(
    batch: int, length: int, hidden: int, heads: int, wide: int, *, others: int
) -> Macs:
    """The same, and between the two attention to an encoder's `others`."""
    rows, scores = batch * length, batch * heads * length * others
    across = (
        2 * product(rows, hidden, hidden)
        + 2 * product(batch * others, hidden, hidden)
        + attention(scores, hidden // heads)
    )
    return encoder_layer(batch, length, hidden, heads, wide) + across


def convolution(places: int, inputs: int, outputs: int, kernel: int, *, gradients: int = 2) -> Macs:
    """A kernel of so many places, at so many places."""
    return product(places, outputs, inputs, kernel, gradients=gradients)


def image_convolution(places: int, outputs: int, kernel: int) -> Macs:
    """The same of an image's colours, which want no gradient."""
    return convolution(places, COLOURS, outputs, kernel, gradients=1)
