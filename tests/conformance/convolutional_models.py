"""Convolutional networks with random weights.

Images want no gradient, so the first convolution has one product less backward.
"""

from tests.conformance.architectures import convolution, image_convolution, perceptron, seeing
from tests.conformance.case import Build
from tests.conformance.making import Family
from tests.conformance.pencil import NOTHING, Macs, product

__all__ = ["CASES"]

batch, size, labels, narrow, broad = 2, 32, 5, 8, 16
half, quarter, eighth = size // 2, size // 4, size // 8
trained = Family("convolutional models").trained


def convnext(version: str = "") -> Build:
    """Two stages of one block."""
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
    """A depthwise kernel of 7 by 7, a perceptron."""
    return convolution(places, 1, channels, 7 * 7) + perceptron(places, channels, 4 * channels)


of_convnext = (
    image_convolution(batch * quarter**2, narrow, 4 * 4)
    + convnext_block(batch * quarter**2, narrow)
    + convolution(batch * eighth**2, narrow, broad, 2 * 2)
    + convnext_block(batch * eighth**2, broad)
    + product(batch, broad, labels)
)


def bottleneck(side: int, inputs: int, outputs: int, stride: int = 1) -> Macs:
    """Down to a quarter, 3 by 3 there, and up; a shortcut where the shape changes."""
    inside, before, after = outputs // 4, batch * (side * stride) ** 2, batch * side**2
    main = (
        convolution(before, inputs, inside, 1)
        + convolution(after, inside, inside, 3 * 3)
        + convolution(after, inside, outputs, 1)
    )
    return main + (convolution(after, inputs, outputs, 1) if inputs != outputs else NOTHING)


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
resnet_places, resnet_channels = eighth**2, 4 * broad

thinner, least, of_eight = 0.25, 8, 8
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
"""The paper's output channels and strides, the first of them the stem's."""


def thinned(channels: int) -> int:
    """A part of the channels, rounded to eights and by no more than a tenth down."""
    part = round(channels * thinner)
    rounded = max(least, (part + of_eight // 2) // of_eight * of_eight)
    return rounded + of_eight if rounded < 0.9 * part else rounded


def of_mobilenet() -> Macs:
    """Six times as many channels, a depthwise convolution there, and back to few."""
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
        side = -(-side // stride)
        macs += convolution(batch * side**2, 1, inside, 3 * 3) + convolution(
            batch * side**2, inside, thinned(outputs), 1
        )
        channels = thinned(outputs)
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
