"""Kernels that models reach only by a tool or a setting, quantized ones most of all.

Each by the shortest way to it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.nn.intrinsic.quantized.dynamic
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.making import Family, Made, data, layer, leaf, of
from tests.conformance.pencil import NOTHING, Macs, product

__all__ = ["CASES"]

batch, inputs, outputs, channels, size, kernel, steps = 3, 32, 64, 6, 7, 3, 5
aten = torch.ops.aten
quantization = torch.ao.quantization
once = product(batch, inputs, outputs)
given = data(batch, inputs)
trained, inference = Family("kernels").trained, Family("kernels").inference


class Prepared(nn.Module):
    """A kernel on a weight that is prepared once, which costs nothing that is counted."""

    def __init__(
        self, kernel: Callable[..., Tensor], *prepared: Any, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.prepared = prepared
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x.to(self.dtype), *self.prepared)


def eights() -> nn.Module:
    """Weights of eight bits, a scale a column."""
    weight, scales = (
        torch.ones(outputs, inputs, dtype=torch.int8),
        torch.ones(outputs, dtype=torch.bfloat16),
    )
    return Prepared(aten._weight_int8pack_mm, weight, scales, dtype=torch.bfloat16)


def fours() -> nn.Module:
    """Weights of four bits, a scale and a zero for each group of them."""
    packed = aten._convert_weight_to_int4pack_for_cpu(
        torch.zeros(outputs, inputs, dtype=torch.int32), 1
    )
    return Prepared(
        aten._weight_int4pack_mm_for_cpu,
        packed,
        inputs,
        torch.ones(1, outputs, 2, dtype=torch.bfloat16),
        dtype=torch.bfloat16,
    )


def fours_of_floats() -> nn.Module:
    """The same on inputs that are quantized as they come."""
    weight = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    packed = aten._dyn_quant_pack_4bit_weight(
        weight, torch.ones(outputs, 1), None, inputs, inputs, outputs
    )
    return Prepared(aten._dyn_quant_matmul_4bit, packed, inputs, inputs, outputs)


def floats_of_eight_bits() -> nn.Module:
    """Both operands are floats of eight bits, with a scale each."""
    one, weight = torch.ones(()), torch.zeros(outputs, inputs).to(torch.float8_e4m3fn).mT
    return Prepared(
        lambda x: torch._scaled_mm(x, weight, one, one, out_dtype=torch.bfloat16),
        dtype=torch.float8_e4m3fn,
    )


def by_its_public_name() -> nn.Module:
    """The same, one scale a tensor."""
    one, weight, whole = (
        torch.ones(()),
        torch.zeros(outputs, inputs).to(torch.float8_e4m3fn).mT,
        F.ScalingType.TensorWise,
    )
    return Prepared(
        lambda x: F.scaled_mm(x, weight, one, whole, one, whole, output_dtype=torch.bfloat16),
        dtype=torch.float8_e4m3fn,
    )


class Apart(nn.Module):
    """A layer between the way into another format and the way back."""

    def __init__(
        self, into: Callable[[Tensor], Tensor], inside: nn.Module, back: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.into, self.inside, self.back = into, inside, back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.inside(self.into(x)))


def in_blocks() -> nn.Module:
    """OneDNN's own layout."""
    from torch.utils.mkldnn import to_mkldnn

    return Apart(Tensor.to_mkldnn, to_mkldnn(nn.Linear(inputs, outputs)), Tensor.to_dense)


def dynamic(dtype: torch.dtype) -> nn.Module:
    """Short weights, and inputs that are quantized as they come."""
    return quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(inputs, outputs)), {nn.Linear}, dtype=dtype
    )


def activated() -> nn.Module:
    """The same with a ReLU behind it."""
    return torch.ao.nn.intrinsic.quantized.dynamic.LinearReLU(inputs, outputs)


def static(example: Made, *layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Short weights and short activations, by what an example showed.

    A ReLU is part of the layer before it.
    """

    def make() -> nn.Module:
        model = nn.Sequential(
            quantization.QuantStub(), *(each() for each in layers), quantization.DeQuantStub()
        ).eval()
        model.qconfig = quantization.get_default_qconfig("fbgemm")
        if len(layers) > 1:
            quantization.fuse_modules(model, ["1", "2"], inplace=True)
        quantization.prepare(model, inplace=True)
        model(example.make())
        return quantization.convert(model, inplace=True)

    return make


def a_linear() -> nn.Module:
    """To be quantized."""
    return nn.Linear(inputs, outputs)


def a_convolution(dimensions: int) -> Callable[[], nn.Module]:
    """To be quantized."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return lambda: kind(channels, outputs, kernel, groups=groups)


def dynamic_convolution(dimensions: int) -> Callable[[], nn.Module]:
    """On inputs that are quantized as they come."""
    quantized = torch.ao.nn.quantized.dynamic
    kind = (quantized.Conv1d, quantized.Conv2d, quantized.Conv3d)[dimensions - 1]
    return lambda: kind(channels, outputs, kernel, groups=groups)


def in_integers(inside: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A quantized layer between floats."""
    return lambda: Apart(
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), inside(), Tensor.dequantize
    )


def transposed(dimensions: int, *, dynamically: bool) -> Callable[[], nn.Module]:
    """A transposed convolution, quantized."""
    kinds = torch.ao.nn.quantized.dynamic if dynamically else torch.ao.nn.quantized
    make = lambda: getattr(kinds, f"ConvTranspose{dimensions}d")(channels, outputs, kernel)  # noqa: E731
    return make if dynamically else in_integers(make)


class Added(nn.Module):
    """A convolution whose kernel adds something to its result, as a residual block has it."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "onednn"
        try:
            weight = torch.quantize_per_tensor(
                torch.zeros(channels, channels, 1, 1), 0.1, 0, torch.qint8
            )
            packed = torch.ops.quantized.conv2d_prepack(
                weight, torch.zeros(channels), [1, 1], [0, 0], [1, 1], 1
            )
            return self.kernel(x, x, packed, 0.1, 0)
        finally:
            torch.backends.quantized.engine = engine


def recurrent_layer(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    """Short weights, and inputs that are quantized as they come."""
    return lambda: quantization.quantize_dynamic(
        nn.Sequential(kind(inputs, outputs, **options)), {kind}, dtype=torch.qint8
    )


groups, smaller = 2, size - kernel + 1


def of_places(dimensions: int) -> Macs:
    """A convolution of so many dimensions."""
    return product(batch, smaller**dimensions, outputs, channels // groups, kernel**dimensions)


def places(dimensions: int) -> Made:
    """What it is applied to."""
    return data(batch, channels, *[size] * dimensions)


QUANTIZED = (
    inference("linear, quantized dynamically", layer(lambda: dynamic(torch.qint8), given), once),
    inference(
        "linear, quantized dynamically to 16 bits",
        layer(lambda: dynamic(torch.float16), given),
        once,
    ),
    inference("linear and ReLU, quantized dynamically", layer(activated, given), once),
    inference("linear, quantized", layer(static(given, a_linear), given), once),
    inference("linear and ReLU, quantized", layer(static(given, a_linear, nn.ReLU), given), once),
    *(
        inference(
            f"conv{each}d{kind}, quantized",
            layer(static(places(each), a_convolution(each), *more), places(each)),
            of_places(each),
        )
        for each in (1, 2, 3)
        for kind, more in (("", ()), (" and ReLU", (nn.ReLU,)))
    ),
    *(
        inference(
            f"conv{each}d, quantized dynamically",
            layer(dynamic_convolution(each), places(each)),
            of_places(each),
        )
        for each in (1, 2, 3)
    ),
    *(
        inference(
            f"conv_transpose{each}d, quantized{' dynamically' if dynamically else ''}",
            layer(transposed(each, dynamically=dynamically), places(each)),
            product(batch, size**each, outputs, channels, kernel**each),
        )
        for each in (1, 2, 3)
        for dynamically in (False, True)
    ),
    *(
        inference(
            f"conv2d and a sum{' and ReLU' if more else ''}, quantized",
            layer(
                in_integers(
                    lambda more=more: Added(getattr(torch.ops.quantized, f"conv2d_add{more}"))
                ),
                places(2),
            ),
            product(batch, size**2, channels, channels),
        )
        for more in ("", "_relu")
    ),
    inference(
        "LSTM, quantized dynamically",
        layer(
            recurrent_layer(nn.LSTM, num_layers=2, bidirectional=True), data(steps, batch, inputs)
        ),
        product(steps, batch, 2 * 4 * outputs, inputs + outputs)
        + product(steps, batch, 2 * 4 * outputs, 2 * outputs + outputs),
    ),
    inference(
        "GRU, quantized dynamically",
        layer(recurrent_layer(nn.GRU), data(steps, batch, inputs)),
        product(steps, batch, 3 * outputs, inputs + outputs),
    ),
    inference("linear with weights of eight bits", layer(eights, given), once),
    inference("linear with weights of four bits", layer(fours, given), once),
    inference(
        "linear with weights of four bits, quantized dynamically",
        layer(fours_of_floats, given),
        once,
    ),
    inference("linear of floats of eight bits", layer(floats_of_eight_bits, given), once),
    inference(
        "linear of floats of eight bits by its public name", layer(by_its_public_name, given), once
    ),
    inference("linear in oneDNN's layout", layer(in_blocks, given), once),
)


def by_the_short_name(x: Tensor, weight: Tensor) -> Tensor:
    """As scripts that torch traced long ago have it."""
    return torch._convolution(
        x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    )


def by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """The kernel of last resort in two dimensions."""
    return aten._slow_conv2d_forward(x, weight, [kernel, kernel], None, [1, 1], [0, 0])


def by_columns_in_three(x: Tensor, weight: Tensor) -> Tensor:
    """And in three."""
    return aten.slow_conv3d_forward(x, weight, [kernel] * 3, None, [1] * 3, [0] * 3)


def through_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """As a graph that was rewritten for inference has it."""
    return aten.mkldnn_convolution(x, weight, None, [0, 0], [1, 1], [1, 1], 1)


dense = product(batch, smaller**2, outputs, channels, kernel**2)
image, weight = leaf(batch, channels, size, size), leaf(outputs, channels, kernel, kernel)
volume, cube = (
    leaf(batch, channels, size, size, size),
    leaf(outputs, channels, kernel, kernel, kernel),
)
CONVOLUTIONS = (
    trained("_convolution", of(by_the_short_name, image, weight), dense),
    trained("_slow_conv2d_forward", of(by_columns, image, weight), dense),
    trained(
        "slow_conv3d_forward",
        of(by_columns_in_three, volume, cube),
        product(batch, smaller**3, outputs, channels, kernel**3),
    ),
    inference("mkldnn_convolution", of(through_onednn, image, weight), dense),
)


def normalised(kernel: Callable[..., Any], *, statistics: bool) -> Callable[..., Tensor]:
    """Over a batch of images, by what is known of them or by what is seen."""
    seen = (True,) if statistics else ()
    return lambda x, weight, bias: kernel(
        x, weight, bias, torch.zeros(channels), torch.ones(channels), *seen, 0.1, 1e-5
    )[0]


def in_place(x: Tensor, source: Tensor) -> Tensor:
    """Sums where an index says, into what is there."""
    where = torch.zeros(batch, inputs, dtype=torch.int64)
    added = (2 * x).scatter_add_(0, where, source) + (2 * x).scatter_reduce_(
        0, where, source, "sum"
    )
    return (
        added
        + (2 * x).index_reduce_(0, torch.arange(batch), source, "amax")
        + (2 * x).index_add_(0, torch.arange(batch), source)
    )


def bag_gradient(gradient: Tensor) -> Tensor:
    """What an embedding bag's backward is for most tables; torch runs it inside of another kernel."""
    rows = torch.arange(2 * batch)
    return aten._embedding_bag_dense_backward(
        gradient, rows, rows // 2, torch.full((batch,), 2), rows[:batch], size, False, 0, None
    )


scale_and_shift = leaf(channels), leaf(channels)
legit = {
    "_native_batch_norm_legit": True,
    "_batch_norm_with_update": False,
    "_native_batch_norm_legit_no_training": False,
    "_batch_norm_no_update": False,
}
REST = (
    *(
        trained(
            name,
            of(normalised(getattr(aten, name), statistics=statistics), image, *scale_and_shift),
            NOTHING,
        )
        for name, statistics in legit.items()
    ),
    inference("sums in place", of(in_place, given, given), NOTHING),
    inference(
        "embedding bag of frozen rows",
        layer(
            lambda: nn.EmbeddingBag(size, channels).requires_grad_(requires_grad=False),
            Made(lambda: torch.arange(6).view(2, 3)),
        ),
        NOTHING,
    ),
    inference("_embedding_bag_dense_backward", of(bag_gradient, given), NOTHING),
    trained(
        "sampling in a volume",
        of(
            lambda x, grid: F.grid_sample(x, grid, align_corners=False),
            volume,
            Made(lambda: torch.rand(batch, 2, 2, 2, 3, requires_grad=True)),
        ),
        NOTHING,
    ),
    trained(
        "affine_grid",
        of(
            lambda matrix: F.affine_grid(matrix, [batch, 1, size, size], align_corners=False),
            leaf(batch, 2, 3),
        ),
        product(batch, size**2, 2, 3, gradients=1),
    ),
)

CASES = (*QUANTIZED, *CONVOLUTIONS, *REST)
