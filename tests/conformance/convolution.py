"""Cases of convolutions.

At each position of the output, every output channel multiplies its kernel by its share of the input
channels. A transposed convolution spreads its kernel from each position of the input.
"""

from torch import nn
from torch.nn import functional as F

from tests.conformance.making import Family, data, layer, leaf, of
from tests.conformance.pencil import Macs, product

__all__ = ["CASES"]

batch = 2
inputs = 4
outputs = 6
kernel = 3
size = 9
smaller = size - kernel + 1
image = leaf(batch, inputs, size, size)
trained = Family("convolution").trained
inference = Family("convolution").inference

window = kernel * kernel
plain = product(batch, smaller * smaller, outputs, inputs, window)


def convolution(**options: object) -> nn.Module:
    """Create a convolution of images with a square kernel."""
    return nn.Conv2d(inputs, outputs, kernel, **options)


def frozen() -> nn.Module:
    """Create a convolution with a frozen kernel and a trained bias."""
    module = convolution()
    module.weight.requires_grad_(False)
    return module


stride = 2
padding = 1
dilation = 2
strided = (size + 2 * padding - kernel) // stride + 1
dilated = size - dilation * (kernel - 1)
even = 4

ORDINARY = (
    trained(
        "conv1d",
        layer(lambda: nn.Conv1d(inputs, outputs, kernel), leaf(batch, inputs, size)),
        product(batch, smaller, outputs, inputs, kernel),
    ),
    trained("conv2d", layer(convolution, image), plain),
    trained(
        "conv3d",
        layer(lambda: nn.Conv3d(inputs, outputs, kernel), leaf(batch, inputs, size, size, size)),
        product(batch, smaller**3, outputs, inputs, kernel**3),
    ),
    trained(
        "conv2d of data",
        layer(convolution, data(batch, inputs, size, size)),
        product(*(batch, smaller**2, outputs, inputs, window), gradients=1),
    ),
    trained("conv2d without bias", layer(lambda: convolution(bias=False), image), plain),
    trained(
        "conv2d by keyword",
        of(F.conv2d, input=image, weight=leaf(outputs, inputs, kernel, kernel), bias=leaf(outputs)),
        plain,
    ),
    trained(
        "conv2d with a frozen kernel",
        layer(frozen, image),
        product(batch, smaller**2, outputs, inputs, window, gradients=1),
    ),
    trained(
        "conv2d with a frozen kernel, of data",
        layer(frozen, data(batch, inputs, size, size)),
        Macs(plain.forward),
    ),
    trained(
        "conv2d of one image without a batch",
        layer(convolution, leaf(inputs, size, size)),
        product(smaller**2, outputs, inputs, window),
    ),
    trained(
        "conv2d with a kernel of one",
        layer(lambda: nn.Conv2d(inputs, outputs, 1), image),
        product(batch, size**2, outputs, inputs),
    ),
    inference(
        "conv2d without gradients", layer(convolution, data(batch, inputs, size, size)), plain
    ),
)

SPACED = (
    trained(
        "conv2d with strides",
        layer(lambda: convolution(stride=stride, padding=padding), image),
        product(batch, strided**2, outputs, inputs, window),
    ),
    trained(
        "conv2d, dilated",
        layer(lambda: convolution(dilation=dilation), image),
        product(batch, dilated**2, outputs, inputs, window),
    ),
    trained(
        "conv1d with padding 'same' and an even kernel",
        layer(lambda: nn.Conv1d(inputs, outputs, even, padding="same"), leaf(batch, inputs, size)),
        product(batch, size, outputs, inputs, even),
    ),
    trained(
        "conv2d with padding 'same' and kernels even and odd",
        layer(lambda: nn.Conv2d(inputs, outputs, (even, kernel), padding="same"), image),
        product(batch, size**2, outputs, inputs, even * kernel),
    ),
    *(
        trained(
            f"conv2d with {mode} padding",
            layer(lambda mode=mode: convolution(padding=padding, padding_mode=mode), image),
            product(batch, size**2, outputs, inputs, window),
        )
        for mode in ("circular", "reflect", "replicate")
    ),
)

groups = 2
spread = stride * (size - 1) + kernel
GROUPED = (
    trained(
        "conv2d in groups",
        layer(lambda: convolution(groups=groups), image),
        product(batch, smaller**2, outputs, inputs // groups, window),
    ),
    trained(
        "conv2d, depthwise",
        layer(lambda: nn.Conv2d(inputs, inputs, kernel, groups=inputs), image),
        product(batch, smaller**2, inputs, 1, window),
    ),
    trained(
        "conv2d, depthwise with a multiplier",
        layer(lambda: nn.Conv2d(inputs, 3 * inputs, kernel, groups=inputs), image),
        product(batch, smaller**2, 3 * inputs, 1, window),
    ),
    trained(
        "conv1d, depthwise and causal",
        layer(
            lambda: nn.Conv1d(inputs, inputs, even, groups=inputs, padding=even - 1),
            leaf(batch, inputs, size),
        ),
        product(batch, size + even - 1, inputs, 1, even),
    ),
)

TRANSPOSED = (
    trained(
        "conv1d, transposed",
        layer(lambda: nn.ConvTranspose1d(inputs, outputs, kernel), leaf(batch, inputs, size)),
        product(batch, size, inputs, outputs, kernel),
    ),
    trained(
        "conv2d, transposed, in groups, with output padding",
        layer(
            lambda: nn.ConvTranspose2d(
                inputs, outputs, kernel, stride=stride, output_padding=1, groups=groups
            ),
            image,
        ),
        product(batch, size**2, inputs, outputs // groups, window),
    ),
    trained(
        "conv2d, transposed to a size",
        layer(
            lambda: nn.ConvTranspose2d(inputs, outputs, kernel, stride=stride),
            image,
            output_size=[spread + 1, spread + 1],
        ),
        product(batch, size**2, inputs, outputs, window),
    ),
    trained(
        "conv2d, transposed, depthwise",
        layer(lambda: nn.ConvTranspose2d(inputs, inputs, kernel, groups=inputs), image),
        product(batch, size**2, inputs, 1, window),
    ),
    trained(
        "conv3d, transposed",
        layer(
            lambda: nn.ConvTranspose3d(inputs, outputs, kernel),
            leaf(batch, inputs, size, size, size),
        ),
        product(batch, size**3, inputs, outputs, kernel**3),
    ),
)


OTHERS = (
    trained(
        "conv_tbc, time first",
        of(F.conv_tbc, leaf(size, batch, inputs), leaf(kernel, inputs, outputs), leaf(outputs)),
        product(batch, smaller, outputs, inputs, kernel),
    ),
    trained(
        "unfold and a product",
        of(lambda x, w: w @ F.unfold(x, kernel), image, leaf(outputs, inputs * window)),
        plain,
    ),
)

CASES = (*ORDINARY, *SPACED, *GROUPED, *TRANSPOSED, *OTHERS)
