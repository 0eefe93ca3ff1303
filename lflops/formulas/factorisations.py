"""Formulas for factorisations, solvers, and Fourier transforms.

The formulas count FLOPs, not MACs. Each step of a factorisation needs the previous steps, so a
matrix unit cannot run it, and the peak of the matrix unit does not apply. The formulas are the
leading terms in Golub and Van Loan, "Matrix Computations" (fourth edition), for real [m, n]
matrices. If the number of iterations depends on the values, as for eigenvalues, a typical number is
assumed. LAPACK's blocked algorithms may need a few per cent more.

FLOPs per matrix, for k right-hand sides:

| operator | FLOPs |
|---|---|
| Cholesky, LDL | n³ / 3 |
| LU, determinant (m ≥ n) | m n² - n³ / 3; 2 n³ / 3 if square |
| inverse | 2 n³ |
| inverse from a Cholesky factor | 2 n³ / 3 |
| solve | 2 n³ / 3 + 2 n² k |
| solve with known factors | 2 n² k |
| solve with a triangle | n² k |
| QR, R alone | 2 m n² - 2 n³ / 3 |
| QR, additionally c columns of Q | 4 m c r - 2 (m + c) r² + 4 r³ / 3, where r = min(m, n) |
| least squares, by QR | 2 m n² - 2 n³ / 3 + (4 m n - n²) k |
| eigenvalues of a symmetric matrix | 4 n³ / 3; with vectors 9 n³ |
| eigenvalues of any matrix | 10 n³; with vectors 25 n³ |
| singular values | 2 m n² + 2 n³ |
| singular values, with thin vectors | 6 m n² + 20 n³ |
| singular values, with all vectors | 4 m² n + 22 n³ |
| Fourier transform of n complex numbers | 5 n log₂ n; half of it if one side is real |
"""

from collections.abc import Sequence
from fractions import Fraction
from math import log2, prod

from lflops.formulas.table import Cost, Formula, Shape, formula

_THIRD = Fraction(1, 3)


def _per_matrix(a: Shape, operations: Fraction | int) -> Cost:
    """Cost of a batch of matrices, where each matrix needs the given number of operations."""
    batch = prod(a[:-2])
    return Cost(other_flops=batch * int(operations))


def _tall(a: Shape) -> tuple[int, int]:
    """Return the longer and the shorter side of a matrix."""
    m, n = a[-2:]
    return max(m, n), min(m, n)


@formula("linalg_solve_triangular")
def solve_triangular(a: Shape, b: Shape, *, out: Shape, unitriangular: bool = False) -> Cost:
    """Cost of solving a triangular system [n, n] with k right-hand sides.

    Each right-hand side needs n (n - 1) / 2 multiplications, as many subtractions, and n divisions.
    These are n² operations. If all elements of the diagonal are 1, no divisions are needed.
    """
    n = a[-1]
    operations_per_element = n - 1 if unitriangular else n
    return Cost(other_flops=prod(out) * operations_per_element)


@formula("triangular_solve")
def triangular_solve(
    b: Shape, a: Shape, *, out: Sequence[Shape], unitriangular: bool = False
) -> Cost:
    """Cost of `torch.triangular_solve`, an older operator with the work of `solve_triangular`."""
    return solve_triangular(a, b, out=out[0], unitriangular=unitriangular)


def _cubic(factor: Fraction | int) -> Formula:
    """Return a formula that counts `factor` × n³ operations for each matrix [n, n]."""

    def cost(a: Shape) -> Cost:
        return _per_matrix(a, factor * a[-1] ** 3)

    cost.__name__ = f"{factor}_cubed"
    return cost


# A Cholesky or LDL factorisation has half of the cost of an LU factorisation.
formula("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex")(_cubic(_THIRD))
# An inverse costs an LU factorisation, and solving for n right-hand sides with its factors.
formula("linalg_inv_ex")(_cubic(2))
formula("cholesky_inverse")(_cubic(2 * _THIRD))
# Eigenvalues (with or without eigenvectors) need the Hessenberg form and implicit QR steps.
formula("linalg_eig")(_cubic(25))
formula("_linalg_eigvals")(_cubic(10))


@formula("linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet")
def lu(a: Shape) -> Cost:
    """Cost of an LU factorisation of a matrix [m, n].

    A determinant has the same cost, because it is the product of the diagonal elements of U.
    """
    m, n = _tall(a)
    return _per_matrix(a, m * n**2 - n**3 * _THIRD)


def _two_triangles(a: Shape, solutions: Shape) -> int:
    """Count the operations of solving with the two triangular factors of a matrix."""
    n = a[-1]
    return 2 * prod(solutions) * n


@formula("_linalg_solve_ex")
def solve(a: Shape, b: Shape, *, out: Sequence[Shape]) -> Cost:
    """Cost of solving linear systems: an LU factorisation and two triangular solves.

    The right-hand sides are [..., n, k] or [..., n].
    """
    return Cost(other_flops=lu(a).other_flops + _two_triangles(a, out[0]))


@formula("linalg_lu_solve", "linalg_ldl_solve")
def solve_by_factors(a: Shape, pivots: Shape, b: Shape, *, out: Shape) -> Cost:
    """Cost of solving linear systems with known LU or LDL factors: two triangular solves."""
    return Cost(other_flops=_two_triangles(a, out))


@formula("_cholesky_solve_helper", "cholesky_solve")
def cholesky_solve(b: Shape, a: Shape, *, out: Shape) -> Cost:
    """Cost of solving linear systems with a known Cholesky factor: two triangular solves."""
    return Cost(other_flops=_two_triangles(a, out))


def _householder(a: Shape) -> Fraction:
    """Count the operations of a QR factorisation that computes R and reflections, but not Q.

    Q is the product of the (Householder) reflections.
    """
    m, n = _tall(a)
    return 2 * m * n**2 - 2 * n**3 * _THIRD


def _columns_of_q(m: int, columns: int, reflections: int) -> Fraction:
    """Count the operations of computing the first `columns` columns of Q from the reflections.

    Q has `m` rows, and is the product of the (Householder) reflections of a QR factorisation.
    """
    return (
        4 * m * columns * reflections
        - 2 * (m + columns) * reflections**2
        + 4 * reflections**3 * _THIRD
    )


@formula("linalg_qr")
def qr(a: Shape, *, out: Sequence[Shape], mode: str = "reduced") -> Cost:
    """Cost of a QR factorisation, which computes Q and R. If `mode` is "r", only R is computed."""
    if mode == "r":
        return _per_matrix(a, _householder(a))
    q = out[0]
    m, n = a[-2:]
    of_q = _columns_of_q(m, columns=q[-1], reflections=min(m, n))
    return _per_matrix(a, _householder(a) + of_q)


@formula("geqrf")
def reflections(a: Shape) -> Cost:
    """Cost of a QR factorisation that computes R and Householder reflections, but not Q."""
    return _per_matrix(a, _householder(a))


@formula("linalg_householder_product")
def householder_product(a: Shape, tau: Shape) -> Cost:
    """Cost of computing the factor Q of a QR factorisation from its Householder reflections."""
    m, columns = a[-2:]
    return _per_matrix(a, _columns_of_q(m, columns, reflections=tau[-1]))


@formula("ormqr")
def multiply_by_reflections(a: Shape, tau: Shape, other: Shape, *, left: bool = True) -> Cost:
    """Cost of multiplying a matrix by the factor Q of a QR factorisation.

    If `left`, the product is Q times the matrix, else the matrix times Q. Q itself is not computed.
    Its Householder reflections are applied to the matrix one by one.
    """
    # A reflection changes each column of the matrix, or each row if not `left`.
    length, vectors = other[-2:]
    if not left:
        length, vectors = vectors, length
    count = tau[-1]
    return _per_matrix(other, 4 * length * vectors * count - 2 * vectors * count**2)


@formula("linalg_lstsq")
def least_squares(a: Shape, b: Shape) -> Cost:
    """Cost of solving a least-squares problem by a QR factorisation.

    The Householder reflections of the factorisation are applied to the right-hand sides, and a
    triangular solve follows.
    """
    m, n = _tall(a)
    has_several_sides = len(b) == len(a)
    sides = b[-1] if has_several_sides else 1
    return _per_matrix(a, _householder(a) + (4 * m * n - n**2) * sides)


@formula("_linalg_eigh")
def symmetric_eigenvalues(a: Shape, *, compute_v: bool = True) -> Cost:
    """Cost of the eigenvalues of a symmetric matrix, and of the eigenvectors if `compute_v`.

    The matrix is reduced to tridiagonal form, and implicit QR steps follow.
    """
    n = a[-1]
    if compute_v:
        return _per_matrix(a, 9 * n**3)
    return _per_matrix(a, 4 * n**3 * _THIRD)


@formula("_linalg_svd")
def singular_values(a: Shape, *, full_matrices: bool = False, compute_uv: bool = True) -> Cost:
    """Cost of a singular value decomposition, with singular vectors if `compute_uv`.

    The formula is for an algorithm that first computes a QR factorisation, then reduces R to
    bidiagonal form, and then iterates.
    """
    m, n = _tall(a)
    if not compute_uv:
        return _per_matrix(a, 2 * m * n**2 + 2 * n**3)
    if full_matrices:
        return _per_matrix(a, 4 * m**2 * n + 22 * n**3)
    return _per_matrix(a, 6 * m * n**2 + 20 * n**3)


def _fft(x: Shape, dimensions: Sequence[int], factor: float) -> Cost:
    length = 1
    for dimension in dimensions:
        length *= x[dimension]
    if not length:
        return Cost()
    return Cost(other_flops=round(factor * prod(x) * log2(length)))


@formula("_fft_c2c")
def fft(x: Shape, dim: Sequence[int]) -> Cost:
    """Cost of a Fourier transform of complex numbers to complex numbers."""
    return _fft(x, dim, 5)


@formula("_fft_r2c")
def rfft(x: Shape, dim: Sequence[int]) -> Cost:
    """Cost of a Fourier transform of real numbers to complex numbers."""
    return _fft(x, dim, 2.5)


@formula("_fft_c2r")
def irfft(x: Shape, dim: Sequence[int], *, out: Shape) -> Cost:
    """Cost of a Fourier transform of complex numbers to real numbers.

    The cost is the same as for real numbers to complex numbers.
    """
    return _fft(out, dim, 2.5)
