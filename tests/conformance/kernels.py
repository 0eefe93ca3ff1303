"""Cases of kernels that run only with a tool or a setting, most of them quantized kernels."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.ao.nn.intrinsic.quantized.dynamic
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.case import Case
from tests.conformance.making import Family, Made, data, layer, leaf, of
from tests.conformance.pencil import NOTHING, Macs, product

__all__ = ["CASES"]

batch = 3
inputs = 32
outputs = 64
channels = 6
size = 7
kernel = 3
steps = 5
aten = torch.ops.aten
quantization = torch.ao.quantization
once = product(batch, inputs, outputs)
given = data(batch, inputs)
trained = Family("kernels").trained
inference = Family("kernels").inference


class Prepared(nn.Module):
    """A model that calls a kernel with weights that were prepared before the counted pass."""

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
    """Create a linear layer with weights of eight bits and one scale for each output."""
    weight = torch.ones(outputs, inputs, dtype=torch.int8)
    scales = torch.ones(outputs, dtype=torch.bfloat16)
    return Prepared(aten._weight_int8pack_mm, weight, scales, dtype=torch.bfloat16)


def fours() -> nn.Module:
    """Create a linear layer with weights of four bits, and a scale and a zero for each group."""
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
    """Create a linear layer with weights of four bits, which quantizes its inputs dynamically."""
    weight = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    packed = aten._dyn_quant_pack_4bit_weight(
        weight, torch.ones(outputs, 1), None, inputs, inputs, outputs
    )
    return Prepared(aten._dyn_quant_matmul_4bit, packed, inputs, inputs, outputs)


def floats_of_eight_bits() -> nn.Module:
    """Create a matmul of two operands of 8-bit floats, each with one scale."""
    one = torch.ones(())
    weight = torch.zeros(outputs, inputs).to(torch.float8_e4m3fn).mT
    return Prepared(
        lambda x: torch._scaled_mm(x, weight, one, one, out_dtype=torch.bfloat16),
        dtype=torch.float8_e4m3fn,
    )


def by_its_public_name() -> nn.Module:
    """Create a matmul of 8-bit floats that calls the public function `scaled_mm`."""
    one = torch.ones(())
    weight = torch.zeros(outputs, inputs).to(torch.float8_e4m3fn).mT
    whole = F.ScalingType.TensorWise
    return Prepared(
        lambda x: F.scaled_mm(x, weight, one, whole, one, whole, output_dtype=torch.bfloat16),
        dtype=torch.float8_e4m3fn,
    )


class Apart(nn.Module):
    """A layer in another format, between the conversions to this format and back."""

    def __init__(
        self, into: Callable[[Tensor], Tensor], inside: nn.Module, back: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.into = into
        self.inside = inside
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.inside(self.into(x)))


def in_blocks() -> nn.Module:
    """Create a linear layer in the layout of oneDNN."""
    from torch.utils.mkldnn import to_mkldnn

    return Apart(Tensor.to_mkldnn, to_mkldnn(nn.Linear(inputs, outputs)), Tensor.to_dense)


def dynamic(dtype: torch.dtype) -> nn.Module:
    """Create a linear layer with quantized weights, which quantizes its inputs dynamically."""
    return quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(inputs, outputs)), {nn.Linear}, dtype=dtype
    )


def activated() -> nn.Module:
    """Create a dynamically quantized linear layer with a fused ReLU."""
    return torch.ao.nn.intrinsic.quantized.dynamic.LinearReLU(inputs, outputs)


def static(example: Made, *layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that creates a model with quantized weights and activations.

    The model is calibrated with the example. A ReLU is fused with the layer before it.
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
    """Create a linear layer, which is quantized later."""
    return nn.Linear(inputs, outputs)


def a_convolution(dimensions: int) -> Callable[[], nn.Module]:
    """Return a function that creates a convolution, which is quantized later."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return lambda: kind(channels, outputs, kernel, groups=groups)


def dynamic_convolution(dimensions: int) -> Callable[[], nn.Module]:
    """Return a function that creates a convolution, which quantizes its inputs dynamically."""
    quantized = torch.ao.nn.quantized.dynamic
    kind = (quantized.Conv1d, quantized.Conv2d, quantized.Conv3d)[dimensions - 1]
    return lambda: kind(channels, outputs, kernel, groups=groups)


def in_integers(inside: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that creates a quantized layer, between conversions from and to floats."""
    return lambda: Apart(
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), inside(), Tensor.dequantize
    )


def transposed(dimensions: int, *, dynamically: bool) -> Callable[[], nn.Module]:
    """Return a function that creates a quantized transposed convolution."""
    kinds = torch.ao.nn.quantized.dynamic if dynamically else torch.ao.nn.quantized

    def make() -> nn.Module:
        return getattr(kinds, f"ConvTranspose{dimensions}d")(channels, outputs, kernel)

    return make if dynamically else in_integers(make)


class Added(nn.Module):
    """A convolution with a kernel that adds a tensor to its result, as in a residual block."""

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
    """Return a function that creates a dynamically quantized recurrent layer."""
    return lambda: quantization.quantize_dynamic(
        nn.Sequential(kind(inputs, outputs, **options)), {kind}, dtype=torch.qint8
    )


groups = 2
smaller = size - kernel + 1


def of_places(dimensions: int) -> Macs:
    """Return the MACs of a convolution with this number of spatial dimensions."""
    return product(batch, smaller**dimensions, outputs, channels // groups, kernel**dimensions)


def places(dimensions: int) -> Made:
    """Return the input of a convolution with this number of spatial dimensions."""
    return data(batch, channels, *[size] * dimensions)


def quantized_convolutions() -> Iterator[Case]:
    """Yield the cases of quantized convolutions."""
    for each in (1, 2, 3):
        for kind, more in (("", ()), (" and ReLU", (nn.ReLU,))):
            yield inference(
                f"conv{each}d{kind}, quantized",
                layer(static(places(each), a_convolution(each), *more), places(each)),
                of_places(each),
            )
    for each in (1, 2, 3):
        yield inference(
            f"conv{each}d, quantized dynamically",
            layer(dynamic_convolution(each), places(each)),
            of_places(each),
        )
    for each in (1, 2, 3):
        for kind, dynamically in (("", False), (" dynamically", True)):
            yield inference(
                f"conv_transpose{each}d, quantized{kind}",
                layer(transposed(each, dynamically=dynamically), places(each)),
                product(batch, size**each, outputs, channels, kernel**each),
            )
    for kind, name in (("", "conv2d_add"), (" and ReLU", "conv2d_add_relu")):
        added = functools.partial(Added, getattr(torch.ops.quantized, name))
        yield inference(
            f"conv2d and a sum{kind}, quantized",
            layer(in_integers(added), places(2)),
            product(batch, size**2, channels, channels),
        )


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
    *quantized_convolutions(),
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
    """Call the convolution operator that old traced scripts contain."""
    return torch._convolution(
        x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    )


def by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """Call the fallback kernel for convolutions in two dimensions."""
    return aten._slow_conv2d_forward(x, weight, [kernel, kernel], None, [1, 1], [0, 0])


def by_columns_in_three(x: Tensor, weight: Tensor) -> Tensor:
    """Call the fallback kernel for convolutions in three dimensions."""
    return aten.slow_conv3d_forward(x, weight, [kernel] * 3, None, [1] * 3, [0] * 3)


def through_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Call the convolution operator of graphs that were optimized for inference."""
    return aten.mkldnn_convolution(x, weight, None, [0, 0], [1, 1], [1, 1], 1)


dense = product(batch, smaller**2, outputs, channels, kernel**2)
image = leaf(batch, channels, size, size)
weight = leaf(outputs, channels, kernel, kernel)
volume = leaf(batch, channels, size, size, size)
cube = leaf(outputs, channels, kernel, kernel, kernel)
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
    """Return a function that calls a kernel for batch normalization.

    With `statistics`, the kernel has an argument `training`, which is true.
    """
    training = (True,) if statistics else ()

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = torch.zeros(channels)
        variance = torch.ones(channels)
        return kernel(x, weight, bias, mean, variance, *training, 0.1, 1e-5)[0]

    return function


def in_place(x: Tensor, source: Tensor) -> Tensor:
    """Add values at indices, in place."""
    where = torch.zeros(batch, inputs, dtype=torch.int64)
    place = torch.arange(batch)
    return (
        (2 * x).scatter_add_(0, where, source)
        + (2 * x).scatter_reduce_(0, where, source, "sum")
        + (2 * x).index_reduce_(0, place, source, "amax")
        + (2 * x).index_add_(0, place, source)
    )


def bag_gradient(gradient: Tensor) -> Tensor:
    """Call the usual backward of an embedding bag, which torch calls inside another kernel."""
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
