"""Cases of convolutional networks from transformers, with random weights.

Images require no gradient, so the first convolution has only one product in backward.
"""

import math

from tests.conformance.architectures import convolution, image_convolution, perceptron, seeing
from tests.conformance.case import Build
from tests.conformance.making import Family
from tests.conformance.pencil import NOTHING, Macs, product

__all__ = ["CASES"]

batch = 2
size = 32
labels = 5
narrow = 8
broad = 16
half = size // 2
quarter = size // 4
eighth = size // 8
trained = Family("convolutional models").trained


def convnext(version: str = "") -> Build:
    """Return a `Build` of ConvNeXt with two stages of one block."""
    fields = {
        "hidden_sizes": [narrow, broad],
        "depths": [1, 1],
        "num_stages": 2,
        "num_labels": labels,
    }
    return seeing(
        size, f"ConvNext{version}ForImageClassification", f"ConvNext{version}Config", **fields
    )


def convnext_block(places: int, channels: int) -> Macs:
    """Return the MACs of a ConvNeXt block: a depthwise 7 x 7 convolution, and a perceptron."""
    return convolution(places, 1, channels, 7 * 7) + perceptron(places, channels, 4 * channels)


of_convnext = (
    image_convolution(batch * quarter**2, narrow, 4 * 4)
    + convnext_block(batch * quarter**2, narrow)
    + convolution(batch * eighth**2, narrow, broad, 2 * 2)
    + convnext_block(batch * eighth**2, broad)
    + product(batch, broad, labels)
)


def bottleneck(side: int, inputs: int, outputs: int, stride: int = 1) -> Macs:
    """Return the MACs of a ResNet bottleneck.

    A 3 x 3 convolution runs with a quarter of the channels, between two 1 x 1 convolutions. The
    shortcut has a convolution only if the number of channels changes.
    """
    inside = outputs // 4
    before = batch * (side * stride) ** 2
    after = batch * side**2
    shortcut = convolution(after, inputs, outputs, 1) if inputs != outputs else NOTHING
    return (
        convolution(before, inputs, inside, 1)
        + convolution(after, inside, inside, 3 * 3)
        + convolution(after, inside, outputs, 1)
        + shortcut
    )


stem = 8
of_resnet = (
    image_convolution(batch * half**2, stem, 7 * 7)
    + bottleneck(quarter, stem, 2 * broad)
    + bottleneck(eighth, 2 * broad, 4 * broad, 2)
    + bottleneck(eighth, 4 * broad, 4 * broad)
)
stages = {
    "embedding_size": stem,
    "hidden_sizes": [2 * broad, 4 * broad],
    "depths": [1, 2],
    "layer_type": "bottleneck",
}
resnet_places = eighth**2
resnet_channels = 4 * broad

thinner = 0.25
least = 8
of_eight = 8
bottlenecks = [
    (16, 1),
    (24, 2),
    (24, 1),
    (32, 2),
    *[(32, 1)] * 2,
    (64, 2),
    *[(64, 1)] * 3,
    *[(96, 1)] * 3,
    (160, 2),
    *[(160, 1)] * 2,
    (320, 1),
]
"""Output channels and strides of the blocks, as in the paper. The first entry is the stem."""


def thinned(channels: int) -> int:
    """Return a quarter of the channels, rounded to a multiple of 8.

    If this rounds down by more than a tenth, it is rounded up instead.
    """
    part = round(channels * thinner)
    rounded = max(least, (part + of_eight // 2) // of_eight * of_eight)
    return rounded + of_eight if rounded < 0.9 * part else rounded


def of_mobilenet() -> Macs:
    """Return the MACs of MobileNetV2.

    Each block expands the channels six times, runs a depthwise convolution, and reduces them again.
    """
    channels = thinned(bottlenecks[0][0])
    side = half
    start = thinned(32)
    macs = (
        image_convolution(batch * side**2, start, 3 * 3)
        + convolution(batch * side**2, 1, start, 3 * 3)
        + convolution(batch * side**2, start, channels, 1)
    )
    for outputs, stride in bottlenecks[1:]:
        inside = 6 * channels
        macs += convolution(batch * side**2, channels, inside, 1)
        side = math.ceil(side / stride)
        channels = thinned(outputs)
        macs += convolution(batch * side**2, 1, inside, 3 * 3)
        macs += convolution(batch * side**2, inside, channels, 1)
    return macs + convolution(batch * side**2, channels, 1280, 1) + product(batch, 1280, labels)


CASES = (
    trained("ConvNeXt", convnext(), of_convnext),
    trained("ConvNeXt V2", convnext("V2"), of_convnext),
    trained(
        "ResNet",
        seeing(size, "ResNetForImageClassification", "ResNetConfig", **stages, num_labels=labels),
        of_resnet + product(batch, resnet_channels, labels),
    ),
    trained(
        "MobileNetV2",
        seeing(
            size,
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            depth_multiplier=thinner,
            num_labels=labels,
            image_size=size,
        ),
        of_mobilenet(),
    ),
)
