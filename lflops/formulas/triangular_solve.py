"""Solving with a triangular matrix: each unknown needs those before it, so this is no contraction, and has FLOPs but no MACs."""

from math import prod

from lflops.formulas.table import Cost, Shape, formula


@formula("linalg_solve_triangular")
def solve_triangular(a: Shape, b: Shape, *, out: Shape, unitriangular: bool = False) -> Cost:
    """[n, n] with k right-hand sides: n (n - 1) / 2 multiplications, as many subtractions and n divisions for each of them.

    Together n * n operations a side; n fewer where the diagonal is ones, which nothing is divided by.
    """
    return Cost(other_flops=prod(out) * (a[-1] - unitriangular))
