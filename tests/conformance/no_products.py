"""Cases of operators without matmuls: they have no MACs, and none of them is unsupported.

Distances between rows do have MACs, because they are sums of products.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.making import Family, Function, Made, data, layer, leaf, of
from tests.conformance.pencil import NOTHING, product

__all__ = ["CASES"]

batch = 4
channels = 6
size = 8
width = 10
classes = 5
rows = leaf(batch, width)
signal = leaf(batch, channels, size)
image = leaf(batch, channels, size, size)
volume = leaf(2, channels, size, size, size)
trained = Family("no products").trained
inference = Family("no products").inference


class Sum(nn.Module):
    """The sum of the results of several layers on one input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Any) -> Any:
        return sum(each(*inputs).sum() for each in self.layers)


def all_of(*functions: Any) -> Any:
    """Return a function that creates a model of these layers and functions."""

    def make() -> nn.Module:
        layers = []
        for each in functions:
            layers.append(each if isinstance(each, nn.Module) else Function(each))
        return Sum(*layers)

    return make


NORMALISATION = (
    trained(
        "normalisation of rows",
        layer(
            all_of(nn.LayerNorm(width), nn.RMSNorm(width), nn.BatchNorm1d(width), F.normalize), rows
        ),
        NOTHING,
    ),
    trained(
        "normalisation of images",
        layer(
            all_of(
                nn.BatchNorm2d(channels),
                nn.GroupNorm(2, channels),
                nn.InstanceNorm2d(channels),
                nn.LocalResponseNorm(2),
            ),
            image,
        ),
        NOTHING,
    ),
    trained(
        "batch normalisation, evaluated",
        layer(lambda: nn.BatchNorm2d(channels).eval(), image),
        NOTHING,
    ),
)

smooth = (
    nn.CELU(),
    nn.ELU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.LogSigmoid(),
    nn.Mish(),
    nn.SELU(),
    nn.SiLU(),
    nn.Sigmoid(),
    nn.Softplus(),
)
piecewise = (
    nn.Hardshrink(),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardtanh(),
    nn.LeakyReLU(),
    nn.ReLU(),
    nn.ReLU6(),
    nn.Softshrink(),
)
others = (
    nn.GLU(),
    nn.PReLU(),
    nn.RReLU(),
    nn.Softsign(),
    nn.Tanh(),
    nn.Tanhshrink(),
    nn.Threshold(0.1, 0),
)
to_one = (
    nn.Softmax(-1),
    nn.LogSoftmax(-1),
    nn.Softmin(-1),
    F.gumbel_softmax,
    lambda x: torch.logsumexp(x, -1),
)
ACTIVATIONS = (
    trained("activations, smooth", layer(all_of(*smooth), rows), NOTHING),
    trained("activations, piecewise", layer(all_of(*piecewise), rows), NOTHING),
    trained("activations, others", layer(all_of(*others), rows), NOTHING),
    trained("softmax and its kin", layer(all_of(*to_one), rows), NOTHING),
    trained(
        "dropout in every form",
        layer(
            all_of(nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout1d()),
            signal,
        ),
        NOTHING,
    ),
)

in_one = (
    nn.MaxPool1d(2),
    nn.AvgPool1d(2),
    nn.AdaptiveAvgPool1d(2),
    nn.AdaptiveMaxPool1d(2),
    nn.Upsample(scale_factor=2),
)
in_two = (
    nn.MaxPool2d(2),
    nn.AvgPool2d(2),
    nn.AdaptiveAvgPool2d(2),
    nn.AdaptiveMaxPool2d(2),
    nn.FractionalMaxPool2d(2, 4),
    nn.LPPool2d(2, 2),
)
in_three = (
    nn.MaxPool3d(2),
    nn.AvgPool3d(2),
    nn.AdaptiveAvgPool3d(2),
    nn.AdaptiveMaxPool3d(2),
    nn.FractionalMaxPool3d(2, 4),
)
larger = [
    nn.Upsample(scale_factor=2, mode=mode)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
]


def unpooled(x: Tensor) -> Tensor:
    """Pool images, and undo it with the indices of the maxima."""
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


def antialiased(x: Tensor) -> Tensor:
    """Enlarge images with antialiasing in two modes."""
    return sum(
        F.interpolate(x, scale_factor=2, mode=mode, antialias=True).sum()
        for mode in ("bilinear", "bicubic")
    )


def sampled(x: Tensor, grid: Tensor) -> Tensor:
    """Sample between pixels in every mode."""
    return sum(
        F.grid_sample(x, grid, mode=mode, align_corners=False).sum()
        for mode in ("bilinear", "nearest", "bicubic")
    )


SPACE = (
    trained("pooling in one dimension", layer(all_of(*in_one), signal), NOTHING),
    trained("pooling in two dimensions", layer(all_of(*in_two, unpooled), image), NOTHING),
    trained("pooling in three dimensions", layer(all_of(*in_three), volume), NOTHING),
    trained("interpolation", layer(all_of(*larger, antialiased), image), NOTHING),
    trained(
        "interpolation in three dimensions",
        layer(lambda: nn.Upsample(scale_factor=2, mode="trilinear"), volume),
        NOTHING,
    ),
    trained(
        "sampling at a grid",
        of(sampled, image, Made(lambda: torch.rand(batch, 3, 3, 2, requires_grad=True))),
        NOTHING,
    ),
    trained(
        "pixels to channels and back",
        layer(
            lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.PixelShuffle(2)),
            image,
        ),
        NOTHING,
    ),
    trained(
        "unfold and fold", of(lambda x: F.fold(F.unfold(x, 3), (size, size), 3), image), NOTHING
    ),
    trained(
        "padding in every mode",
        layer(
            all_of(
                *(
                    lambda x, mode=mode: F.pad(x, (1, 1, 1, 1), mode=mode)
                    for mode in ("constant", "reflect", "replicate", "circular")
                )
            ),
            image,
        ),
        NOTHING,
    ),
)

words = Made(lambda: torch.arange(12).view(batch, 3) % width)
target = Made(lambda: torch.arange(batch) % width)
likely = Made(lambda: torch.rand(batch, width))


def against_rows(x: Tensor, y: Tensor) -> Tensor:
    """Compute losses between two sets of rows."""
    losses = (
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.poisson_nll_loss,
        F.binary_cross_entropy_with_logits,
    )
    return (
        sum(each(x, y) for each in losses)
        + F.binary_cross_entropy(torch.sigmoid(x), y)
        + F.soft_margin_loss(x, y)
    )


LOSSES = (
    trained("cross entropy", of(F.cross_entropy, rows, target, label_smoothing=0.1), NOTHING),
    trained(
        "cross entropy of images",
        of(lambda x: F.cross_entropy(x, x.detach().argmax(1)), image),
        NOTHING,
    ),
    trained("losses between rows", of(against_rows, rows, likely), NOTHING),
    trained(
        "losses between pairs",
        of(
            lambda x, y: F.cosine_similarity(x, y).sum() + F.pairwise_distance(x, y).sum(),
            rows,
            rows,
        ),
        NOTHING,
    ),
    trained("triplet margin loss", of(F.triplet_margin_loss, rows, rows, rows), NOTHING),
)


def fourier(x: Tensor) -> Tensor:
    """Transform forth and back, with complex and with real values."""
    there = torch.fft.fft(x)
    return torch.fft.ifft(there).abs() + torch.fft.irfft(torch.fft.rfft(x)) + there.abs()


def in_order(x: Tensor) -> Tensor:
    """Run operators that sort, accumulate and reduce."""
    kept = (
        x.sort(-1).values + x.cumsum(-1) + x.cumprod(-1) + x.cummax(-1).values + x.logcumsumexp(-1)
    )
    return (
        kept.sum()
        + x.topk(2).values.sum()
        + x.std()
        + x.var()
        + x.amax()
        + x.median()
        + x.prod()
        + x.kthvalue(2).values.sum()
    )


def gathered(x: Tensor, source: Tensor) -> Tensor:
    """Run operators that add values at indices."""
    place = torch.arange(batch)
    where = torch.zeros(batch, width, dtype=torch.int64)
    added = (
        x.index_add(0, place, source)
        + x.scatter_add(0, where, source)
        + x.scatter_reduce(0, where, source, "mean")
    )
    return added + x.index_reduce(0, place, source, "mean") + x.gather(0, where) + x[place.flip(0)]


REST = (
    trained(
        "embedding", layer(lambda: nn.Embedding(width, channels, padding_idx=0), words), NOTHING
    ),
    trained(
        "embedding with a largest norm",
        layer(lambda: nn.Embedding(width, channels, max_norm=1.0), words),
        NOTHING,
    ),
    trained(
        "embedding with a sparse gradient",
        layer(lambda: nn.Embedding(width, channels, sparse=True), words),
        NOTHING,
    ),
    *(
        trained(
            f"embedding bag, {mode}",
            layer(lambda mode=mode: nn.EmbeddingBag(width, channels, mode=mode), words),
            NOTHING,
        )
        for mode in ("sum", "max")
    ),
    inference(
        "embedding bag in inference",
        layer(lambda: nn.EmbeddingBag(width, channels), words),
        NOTHING,
    ),
    trained("Fourier transforms", of(fourier, leaf(batch, size)), NOTHING),
    trained(
        "short-time Fourier transform",
        of(
            lambda x: torch.stft(x, size, return_complex=True, window=torch.ones(size)),
            leaf(4 * size),
        ),
        NOTHING,
    ),
    trained("sorts, scans and reductions", of(in_order, rows), NOTHING),
    trained("sums at indices", of(gathered, rows, leaf(batch, width)), NOTHING),
    trained(
        "sums of segments",
        of(lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, batch - 1])), rows),
        NOTHING,
    ),
)

many = 30
more = 26
DISTANCES = (
    trained(
        "cdist of few rows",
        of(torch.cdist, leaf(2, batch, width), leaf(2, classes, width)),
        product(2, batch, classes, width),
    ),
    trained(
        "cdist of many rows",
        of(torch.cdist, leaf(2, many, width), leaf(2, more, width)),
        product(2, many, more, width),
    ),
    trained(
        "cdist of another norm",
        of(torch.cdist, rows, leaf(classes, width), p=1.0),
        product(batch, classes, width),
    ),
    trained("pdist", of(F.pdist, rows), product(batch * (batch - 1) // 2, width, gradients=1)),
    trained(
        "the norm of a weight",
        layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, classes)), rows),
        product(batch, width, classes),
    ),
    inference(
        "distances to data",
        of(torch.cdist, data(many, width), data(more, width)),
        product(many, more, width),
    ),
)

CASES = (*NORMALISATION, *ACTIVATIONS, *SPACE, *LOSSES, *REST, *DISTANCES)
