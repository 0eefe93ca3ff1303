"""Cases of products of matrices and vectors, in every way to write them.

Backward has one product of the same size for each operand.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# This name is bound before any count, so lflops cannot replace it.
from torch.nn.functional import linear

from tests.conformance.case import Case
from tests.conformance.making import Family, data, layer, leaf, of
from tests.conformance.pencil import NOTHING, Macs, product

__all__ = ["CASES"]

batch = 2
more = 7
n = 3
k = 4
m = 5
once = product(n, k, m)
each_in_batch = product(batch, n, k, m)
matrices = leaf(n, k), leaf(k, m)
batches = leaf(batch, n, k), leaf(batch, k, m)
trained = Family("matmul").trained
inference = Family("matmul").inference

# The gradient of a matrix that multiplies a vector is an outer product, which has no sums.
matrix_and_vector = product(n, k, gradients=1)
batch_and_vector = product(batch, n, k, gradients=1)


def into(a: Tensor, b: Tensor) -> Tensor:
    """Multiply into an existing tensor."""
    return torch.matmul(a, b, out=torch.empty(*b.shape[:-2], n, m))


def in_pairs(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """Run several products in one kernel, which not every version of torch has."""
    return torch._foreach_mm(a, b)


class Eights(nn.Module):
    """A product of 8-bit integers. The kernels support only some sizes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(inputs, outputs, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x.to(torch.int8), self.weight)


PRODUCTS = (
    trained("mm", of(torch.mm, *matrices), once),
    trained("mm, its operator called", of(torch.ops.aten.mm.default, *matrices), once),
    trained("matmul as a method", of(Tensor.matmul, *matrices), once),
    trained("reflected matmul", of(lambda a, b: b.__rmatmul__(a), *matrices), once),
    trained("addmm", of(torch.addmm, leaf(n, m), *matrices), once),
    trained("addmm with beta 0", of(torch.addmm, leaf(n, m), *matrices, beta=0, alpha=2), once),
    trained(
        "addmm in place", of(lambda x, a, b: (2 * x).addmm_(a, b), leaf(n, m), *matrices), once
    ),
    inference(
        "addmm with an activation",
        of(torch.ops.aten._addmm_activation, data(m), data(n, k), data(k, m)),
        once,
    ),
    trained("bmm", of(torch.bmm, *batches), each_in_batch),
    trained("baddbmm", of(torch.baddbmm, leaf(n, m), *batches), each_in_batch),
    trained(
        "baddbmm in place",
        of(lambda x, a, b: (2 * x).baddbmm_(a, b), leaf(batch, n, m), *batches),
        each_in_batch,
    ),
    trained("addbmm", of(torch.addbmm, leaf(n, m), *batches), each_in_batch),
    trained(
        "addbmm in place",
        of(lambda x, a, b: (2 * x).addbmm_(a, b), leaf(n, m), *batches),
        each_in_batch,
    ),
    trained("inner", of(torch.inner, leaf(n, k), leaf(m, k)), once),
    trained("matrix power", of(torch.linalg.matrix_power, leaf(n, n), 3), 2 * product(n, n, n)),
    trained(
        "tensordot over two dimensions",
        of(torch.tensordot, leaf(n, k, batch), leaf(k, batch, m)),
        each_in_batch,
    ),
    trained(
        "tensordot over none",
        of(lambda a, b: torch.tensordot(a, b, dims=0), *matrices),
        product(n * k, 1, k * m),
    ),
    trained("kron", of(torch.kron, *matrices), NOTHING),
    inference("matmul into a tensor", of(into, data(n, k), data(k, m)), once),
    inference(
        "matmul of a batch into a tensor", of(into, data(n, k), data(batch, k, m)), each_in_batch
    ),
    inference(
        "foreach_mm",
        of(in_pairs, [data(n, k), data(k, m)], [data(k, m), data(m, batch)]),
        once + product(k, m, batch),
    ),
    inference("int_mm", layer(lambda: Eights(16, 8), data(32, 16)), product(32, 16, 8)),
)


VECTORS = (
    trained("mv", of(torch.mv, leaf(n, k), leaf(k)), matrix_and_vector),
    trained("addmv", of(torch.addmv, leaf(n), leaf(n, k), leaf(k)), matrix_and_vector),
    trained(
        "addmv in place",
        of(lambda x, a, b: (2 * x).addmv_(a, b), leaf(n), leaf(n, k), leaf(k)),
        matrix_and_vector,
    ),
    trained("matrix @ vector", of(lambda a, x: a @ x, leaf(n, k), leaf(k)), matrix_and_vector),
    trained(
        "vector @ matrix, which torch makes one of two matrices",
        of(lambda x, a: x @ a, leaf(n), leaf(n, k)),
        product(1, n, k),
    ),
    trained("batch @ vector", of(lambda a, x: a @ x, leaf(batch, n, k), leaf(k)), batch_and_vector),
    trained("vector @ batch", of(lambda x, a: x @ a, leaf(n), leaf(batch, n, k)), batch_and_vector),
    trained("vector @ vector", of(lambda x, y: x @ y, leaf(k), leaf(k)), product(k, gradients=0)),
    trained("dot", of(torch.dot, leaf(k), leaf(k)), product(k, gradients=0)),
    trained("vdot", of(torch.vdot, leaf(k), leaf(k)), product(k, gradients=0)),
    trained("inner of vectors", of(torch.inner, leaf(k), leaf(k)), product(k, gradients=0)),
    trained("outer", of(torch.outer, leaf(n), leaf(m)), NOTHING),
    trained(
        "addr, whose gradients are two of a matrix by a vector",
        of(torch.addr, leaf(n, m), leaf(n), leaf(m)),
        Macs(0, 2 * n * m),
    ),
)

BROADCAST = (
    trained("batch @ matrix", of(lambda a, b: a @ b, leaf(batch, n, k), leaf(k, m)), each_in_batch),
    trained("matrix @ batch", of(lambda a, b: a @ b, leaf(n, k), leaf(batch, k, m)), each_in_batch),
    trained(
        "two batches that broadcast",
        of(lambda a, b: a @ b, leaf(batch, 1, n, k), leaf(1, more, k, m)),
        product(batch, more, n, k, m),
    ),
    trained(
        "batch of data @ matrix",
        of(torch.matmul, data(batch, n, k), leaf(k, m)),
        product(batch, n, k, m, gradients=1),
    ),
)


def linear_layers() -> Iterator[Case]:
    """Yield the cases of linear layers with one to three dimensions, with and without a bias."""
    for rows in ((), (n,), (batch, n)):
        name = f"linear of {len(rows) + 1} dimensions"
        macs = product(*rows, k, m)
        yield trained(f"{name} with bias", layer(lambda: nn.Linear(k, m), leaf(*rows, k)), macs)
        yield trained(
            f"{name} without bias", layer(lambda: nn.Linear(k, m, bias=False), leaf(*rows, k)), macs
        )


LINEAR = (
    *linear_layers(),
    trained(
        "linear of data", layer(lambda: nn.Linear(k, m), data(n, k)), product(n, k, m, gradients=1)
    ),
    trained(
        "linear of a transposed input",
        of(lambda x, w: F.linear(x.mT, w), leaf(batch, k, n), leaf(m, k)),
        each_in_batch,
    ),
    trained(
        "linear by keyword", of(F.linear, input=leaf(n, k), weight=leaf(m, k), bias=leaf(m)), once
    ),
    trained("linear, imported early", of(linear, leaf(n, k), leaf(m, k)), once),
    trained(
        "bilinear",
        layer(lambda: nn.Bilinear(n, k, m), leaf(batch, n), leaf(batch, k)),
        product(batch, m, n, k, gradients=3),
    ),
    trained(
        "bilinear of data",
        layer(lambda: nn.Bilinear(n, k, m), data(batch, n), data(batch, k)),
        product(batch, m, n, k, gradients=1),
    ),
)

# The cheapest order begins in the middle, because the widest dimension is then summed first.
tall = 10
narrow = 2
wide = 9
low = 3
last = 4
CHAINS = (
    trained(
        "multi_dot of three",
        of(torch.linalg.multi_dot, [leaf(tall, narrow), leaf(narrow, wide), leaf(wide, low)]),
        product(narrow, wide, low) + product(tall, narrow, low),
    ),
    trained(
        "multi_dot of four",
        of(
            torch.linalg.multi_dot,
            [leaf(tall, narrow), leaf(narrow, wide), leaf(wide, low), leaf(low, last)],
        ),
        product(narrow, wide, low) + product(narrow, low, last) + product(tall, narrow, last),
    ),
    trained(
        "chain_matmul",
        of(torch.chain_matmul, leaf(tall, narrow), leaf(narrow, wide), leaf(wide, low)),
        product(narrow, wide, low) + product(tall, narrow, low),
    ),
)

CASES = (*PRODUCTS, *VECTORS, *BROADCAST, *LINEAR, *CHAINS)
