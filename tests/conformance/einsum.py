"""Cases of `torch.einsum` with operands in every form.

An einsum has MACs only if it sums over an index of two operands.
"""

import torch

from tests.conformance.making import Family, leaf, of
from tests.conformance.pencil import NOTHING, product

__all__ = ["CASES"]

# The sizes have the names of the indices.
b = 7
i = 2
j = 4
k = 5
l = 6  # noqa: E741
heads = 3
width = 8
# If opt_einsum is installed, it chooses the order of the matmuls, so it is turned off.
einsum = torch.backends.opt_einsum.flags(enabled=False)(torch.einsum)
two = leaf(i, j), leaf(j, k)
batches = leaf(b, i, j), leaf(b, j, k)
trained = Family("einsum").trained

CASES = (
    trained("einsum of a string and tensors", of(einsum, "ij,jk->ik", *two), product(i, j, k)),
    trained("einsum of a string and a list", of(einsum, "ij,jk->ik", [*two]), product(i, j, k)),
    trained(
        "einsum of sublists",
        of(lambda x, y: einsum(x, [0, 1], y, [1, 2], [0, 2]), *two),
        product(i, j, k),
    ),
    trained(
        "einsum of sublists with an ellipsis",
        of(lambda x, y: einsum(x, [..., 0, 1], y, [1, 2], [..., 0, 2]), leaf(b, i, j), leaf(j, k)),
        product(b, i, j, k),
    ),
    trained(
        "einsum with an ellipsis", of(einsum, "...ij,...jk->...ik", *batches), product(b, i, j, k)
    ),
    trained("einsum with an implicit result", of(einsum, "bij,bjk", *batches), product(b, i, j, k)),
    trained(
        "einsum as attention's scores",
        of(einsum, "bhid,bhjd->bhij", leaf(b, heads, i, width), leaf(b, heads, j, width)),
        product(b, heads, i, width, j),
    ),
    trained(
        "einsum of three, from the left",
        of(einsum, "ij,jk,kl->il", *two, leaf(k, l)),
        product(i, j, k) + product(i, k, l),
    ),
    trained(
        "einsum as a bilinear form",
        of(einsum, "bi,kij,bj->bk", leaf(b, i), leaf(k, i, j), leaf(b, j)),
        product(b, i, k, j) + product(b, k, j),
    ),
    trained("einsum to a number", of(einsum, "ij,ij->", leaf(i, j), leaf(i, j)), product(i, j)),
    trained("einsum as a dot product", of(einsum, "i,i->", leaf(i), leaf(i)), product(i)),
    trained("einsum that sums one operand first", of(einsum, "ij,jk->k", *two), product(j, k)),
    trained("einsum as a trace", of(einsum, "ii->", leaf(i, i)), NOTHING),
    trained("einsum as a diagonal", of(einsum, "ii->i", leaf(i, i)), NOTHING),
    trained("einsum as a sum", of(einsum, "ij->i", leaf(i, j)), NOTHING),
    trained("einsum as an outer product", of(einsum, "i,j->ij", leaf(i), leaf(j)), NOTHING),
    trained(
        "einsum as a product by element", of(einsum, "ij,ij->ij", leaf(i, j), leaf(i, j)), NOTHING
    ),
)
