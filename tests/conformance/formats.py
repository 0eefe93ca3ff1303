"""Cases of matmuls of other tensors than dense ones of 32-bit floats.

They are sparse, complex, grouped, nested, or of other floating-point dtypes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.making import Family, Made, data, layer, leaf, of
from tests.conformance.pencil import NOTHING, Macs, attention, product

__all__ = ["CASES"]

batch = 2
n = 6
k = 8
m = 5
trained = Family("formats").trained
inference = Family("formats").inference

PART = 3
OF = 8
stored = n * k * PART // OF


def few() -> Tensor:
    """Return a matrix in which three of eight elements are not zero."""
    return torch.randn(n, k) * (torch.arange(n * k).view(n, k) % OF < PART)


coordinates = Made(lambda: few().to_sparse())
rows = Made(lambda: few().to_sparse_csr())
batches = Made(lambda: torch.stack([few()] * batch).to_sparse())
columns = leaf(k, m)
# Forward and backward multiply only the stored elements. If the sparse matrix is trained, its
# gradient is a dense product, which is then masked.
of_stored = product(stored, m, gradients=1)

SPARSE = (
    trained("sparse coordinates @ matrix", of(lambda a, b: a @ b, coordinates, columns), of_stored),
    trained("sparse.mm of coordinates", of(torch.sparse.mm, coordinates, columns), of_stored),
    trained(
        "sparse.addmm of coordinates",
        of(torch.sparse.addmm, leaf(n, m), coordinates, columns),
        of_stored,
    ),
    trained(
        "sparse coordinates @ vector",
        of(lambda a, x: a @ x, coordinates, leaf(k)),
        product(stored, gradients=1),
    ),
    trained("sparse rows @ matrix", of(lambda a, b: a @ b, rows, columns), of_stored),
    trained("sparse.mm of rows", of(torch.sparse.mm, rows, columns), of_stored),
    trained(
        "sparse rows @ vector", of(lambda a, x: a @ x, rows, leaf(k)), product(stored, gradients=1)
    ),
    trained(
        "sparse rows, trained, @ matrix",
        of(lambda a, b: a @ b, Made(lambda: few().to_sparse_csr().requires_grad_()), columns),
        of_stored + Macs(0, n * m * k),
    ),
    inference(
        "a product at the places of a sparse matrix",
        of(torch.sparse.sampled_addmm, rows, data(n, m), data(m, k)),
        product(stored, m),
    ),
    inference(
        "bmm of sparse coordinates",
        of(torch.bmm, batches, data(batch, k, m)),
        product(batch, stored, m),
    ),
    trained(
        "sparse.mm of rows, averaged",
        of(lambda a, b: torch.sparse.mm(a, b, "mean"), rows, columns),
        of_stored,
    ),
    trained(
        "linear with a sparse weight",
        of(F.linear, leaf(batch, k), rows),
        product(batch, stored, gradients=1),
    ),
)

four = 4
"""Number of real products in a complex product."""
three = 3
"""Number of real convolutions in a complex convolution."""
shorts = {"dtype": torch.complex64}
COMPLEX = (
    trained(
        "complex mm",
        of(torch.mm, leaf(n, k, **shorts), leaf(k, m, **shorts)),
        product(four, n, k, m),
    ),
    trained(
        "complex bmm",
        of(torch.bmm, leaf(batch, n, k, **shorts), leaf(batch, k, m, **shorts)),
        product(four, batch, n, k, m),
    ),
    trained(
        "complex einsum",
        of(torch.einsum, "ij,jk->ik", leaf(n, k, **shorts), leaf(k, m, **shorts)),
        product(four, n, k, m),
    ),
    trained(
        "complex vdot",
        of(torch.vdot, leaf(k, **shorts), leaf(k, **shorts)),
        product(four, k, gradients=0),
    ),
    trained(
        "complex linear",
        layer(lambda: nn.Linear(k, m, dtype=torch.complex64), leaf(n, k, **shorts)),
        product(four, n, k, m),
    ),
    trained(
        "complex conv1d, made of real ones",
        of(F.conv1d, leaf(batch, n, k, **shorts), leaf(m, n, 3, **shorts)),
        product(three, batch, k - 2, m, n, 3),
    ),
)

experts = 3
share = 16
inputs = 8
outputs = 24
ends = Made(lambda: torch.arange(1, experts + 1, dtype=torch.int32) * share)
bf16 = {"dtype": torch.bfloat16}


def grouped(a: Tensor, b: Tensor, ends: Tensor | None = None) -> Tensor:
    """Run a grouped product, and scale its result.

    The kernel of backward does not accept the gradient of a sum, so the result is scaled.
    """
    return F.grouped_mm(a, b, offs=ends) * 2


GROUPED = (
    trained(
        "grouped_mm of rows that go to experts",
        of(
            grouped,
            leaf(experts * share, inputs, **bf16),
            leaf(experts, inputs, outputs, **bf16),
            ends,
        ),
        product(experts * share, inputs, outputs),
    ),
    trained(
        "grouped_mm of a batch",
        of(grouped, leaf(experts, share, inputs, **bf16), leaf(experts, inputs, outputs, **bf16)),
        product(experts, share, inputs, outputs),
    ),
    trained(
        "grouped_mm over parts of the inner dimension",
        of(
            grouped,
            leaf(inputs, experts * share, **bf16),
            leaf(experts * share, outputs, **bf16),
            ends,
        ),
        product(inputs, experts * share, outputs),
    ),
    trained(
        "grouped_mm to parts of the columns",
        of(
            grouped,
            leaf(experts, outputs, inputs, **bf16),
            leaf(inputs, experts * share, **bf16),
            ends,
        ),
        product(outputs, inputs, experts * share),
    ),
)


def perceptron(**options: Any) -> nn.Sequential:
    """Create two linear layers with ReLU between them."""
    return nn.Sequential(nn.Linear(k, n, **options), nn.ReLU(), nn.Linear(n, m, **options))


both = product(batch, k, n) + product(batch, n, m)


lengths = (2, 5)


def sequences(*, jagged: bool, trained: bool = True) -> Made:
    """Return an input: sequences of several lengths in one nested tensor."""
    layout = torch.jagged if jagged else torch.strided

    def make() -> Tensor:
        rows = [torch.randn(each, k) for each in lengths]
        return torch.nested.nested_tensor(rows, layout=layout, requires_grad=trained)

    return Made(make)


class Padded(nn.Module):
    """Layers that run on nested sequences. Their results are then padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(self.layers(x), 0.0)


heads = 2
width = k // 2


def attended(x: Tensor) -> Tensor:
    """Compute attention within each sequence, padded to the longest one."""
    by_head = x.unflatten(-1, (heads, width)).transpose(1, 2)
    return F.scaled_dot_product_attention(by_head, by_head, by_head).values()


of_all = product(sum(lengths), k, n) + product(sum(lengths), n, m)
of_longest = attention(len(lengths) * heads * max(lengths) ** 2, width, fused=False)
NESTED = (
    trained("linear of jagged sequences", layer(perceptron, sequences(jagged=True)), of_all),
    trained("attention of jagged sequences", of(attended, sequences(jagged=True)), of_longest),
    trained("linear of nested sequences", layer(Padded, sequences(jagged=False)), of_all),
    inference(
        "linear of nested sequences in inference",
        layer(Padded, sequences(jagged=False, trained=False)),
        of_all,
    ),
)

SHORT = (
    trained("linear in bfloat16", layer(lambda: perceptron(**bf16), leaf(batch, k, **bf16)), both),
    trained(
        "linear in float64",
        layer(lambda: perceptron(dtype=torch.float64), leaf(batch, k, dtype=torch.float64)),
        both,
    ),
    trained(
        "linear in float16",
        layer(lambda: perceptron(dtype=torch.float16), leaf(batch, k, dtype=torch.float16)),
        both,
    ),
    trained(
        "copies to other dtypes", of(lambda x: x.double().bfloat16().float(), leaf(n, k)), NOTHING
    ),
)

CASES = (*SPARSE, *COMPLEX, *GROUPED, *NESTED, *SHORT)
