"""Einstein's sums in every form of operands.

Where an index is summed between two operands it is a product, else nothing is.
"""

import torch

from tests.conformance.making import Family, leaf, of
from tests.conformance.pencil import NOTHING, product

__all__ = ["CASES"]

b, i, j, k, l = 7, 2, 4, 5, 6  # noqa: E741 - the indices' own names
heads, width = 3, 8
einsum = torch.backends.opt_einsum.flags(enabled=False)(
    torch.einsum
)  # else where opt_einsum is installed it chooses the order
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
