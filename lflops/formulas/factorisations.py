"""Factorisations, what solves with them, and Fourier transforms.

FLOPs by the leading terms of the textbook, and no MACs.

Each step of a factorisation needs those before it, so a matrix unit's peak is no measure of it. The
terms are those of Golub and Van Loan, "Matrix Computations" (fourth edition), for real [m, n]
matrices. Where an iteration decides, as for eigenvalues, they are its usual number of sweeps. What
LAPACK does in blocks may be a few per cent more.

| operator | FLOPs a matrix, k right-hand sides |
|---|---|
| Cholesky; LDL | n³ / 3 |
| LU, and the determinant by it | m n² - n³ / 3, m at least n; of a square 2 n³ / 3 |
| inverse | 2 n³; from a Cholesky factor 2 n³ / 3 |
| solve | 2 n³ / 3 + 2 n² k; by known factors 2 n² k; by a triangle n² k |
| QR | R alone 2 m n² - 2 n³ / 3; Q of c columns 4 m c r - 2 (m + c) r² + 4 r³ / 3 more, r the smaller of m and n |
| least squares, by QR | 2 m n² - 2 n³ / 3 + (4 m n - n²) k |
| eigenvalues of a symmetric matrix | 4 n³ / 3; with vectors 9 n³ |
| eigenvalues of any matrix | 10 n³; with vectors 25 n³ |
| singular values | 2 m n² + 2 n³; with thin vectors 6 m n² + 20 n³; with all 4 m² n + 22 n³ |
| Fourier transform of n complex numbers | 5 n log₂ n; where one side is real, half of that |
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import log2, prod

from lflops.formulas.table import Cost, Formula, Shape, formula

_THIRD = Fraction(1, 3)


def _each(batch: Sequence[int], operations: Fraction | int) -> Cost:
    """So many operations for each matrix of a batch, rounded down."""
    return Cost(other_flops=prod(batch) * int(operations))


def _tall(shape: Shape) -> tuple[int, int]:
    return max(shape[-2:]), min(shape[-2:])


@formula("linalg_solve_triangular")
def solve_triangular(a: Shape, b: Shape, *, out: Shape, unitriangular: bool = False) -> Cost:
    """[n, n] with k right-hand sides.

    N (n - 1) / 2 multiplications, as many subtractions and n divisions for each of them.
    """
    # Together n * n operations a side; n fewer where the diagonal is ones, which nothing is divided
    # by
    return Cost(other_flops=prod(out) * (a[-1] - unitriangular))


@formula("triangular_solve")
def triangular_solve(
    b: Shape, a: Shape, *, out: Sequence[Shape], unitriangular: bool = False
) -> Cost:
    """`solve_triangular` by its old name."""
    return solve_triangular(a, b, out=out[0], unitriangular=unitriangular)


def _cubic(operations: Fraction | int) -> Formula:
    def cost(a: Shape) -> Cost:
        return _each(a[:-2], operations * a[-1] ** 3)

    cost.__name__ = f"{operations}_cubed"
    return cost


_CUBIC: Mapping[str, Fraction | int] = {
    # half of an LU
    "linalg_cholesky_ex cholesky linalg_ldl_factor_ex": _THIRD,
    # an LU, and n right-hand sides
    "linalg_inv_ex": 2,
    # from the factor
    "cholesky_inverse": 2 * _THIRD,
    # Hessenberg, then implicit QR steps, with the vectors
    "linalg_eig": 25,
    # without them
    "_linalg_eigvals": 10,
}
for operators, operations in _CUBIC.items():
    formula(operators)(_cubic(operations))


@formula("linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet")
def lu(a: Shape) -> Cost:
    """[m, n]; a determinant is the product of its diagonal."""
    m, n = _tall(a)
    return _each(a[:-2], m * n**2 - n**3 * _THIRD)


@formula("_linalg_solve_ex")
def solve(a: Shape, b: Shape, *, out: Sequence[Shape]) -> Cost:
    """An LU and two triangles for each side: of columns of [..., n, k], or of n numbers each."""
    return Cost(other_flops=lu(a).other_flops + 2 * prod(out[0]) * a[-1])


@formula("linalg_lu_solve", "linalg_ldl_solve")
def solve_by_factors(a: Shape, pivots: Shape, b: Shape, *, out: Shape) -> Cost:
    """Two triangles for each side."""
    return Cost(other_flops=2 * prod(out) * a[-1])


@formula("_cholesky_solve_helper", "cholesky_solve")
def cholesky_solve(b: Shape, a: Shape, *, out: Shape) -> Cost:
    """Two triangles for each side."""
    return Cost(other_flops=2 * prod(out) * a[-1])


def _householder(m: int, n: int) -> Fraction:
    """R and the reflections of a tall matrix."""
    return 2 * m * n**2 - 2 * n**3 * _THIRD


def _product_of_reflections(m: int, columns: int, reflections: int) -> Fraction:
    """The first columns of Q."""
    return (
        4 * m * columns * reflections
        - 2 * (m + columns) * reflections**2
        + 4 * reflections**3 * _THIRD
    )


@formula("linalg_qr")
def qr(a: Shape, *, out: Sequence[Shape], mode: str = "reduced") -> Cost:
    """Reflections, and Q where it is asked for."""
    tall, m = _householder(*_tall(a)), a[-2]
    return _each(
        a[:-2], tall if mode == "r" else tall + _product_of_reflections(m, out[0][-1], min(a[-2:]))
    )


@formula("geqrf")
def reflections(a: Shape) -> Cost:
    """QR without Q."""
    return _each(a[:-2], _householder(*_tall(a)))


@formula("linalg_householder_product")
def householder_product(a: Shape, tau: Shape) -> Cost:
    """Q of reflections."""
    return _each(a[:-2], _product_of_reflections(a[-2], a[-1], tau[-1]))


@formula("ormqr")
def multiply_by_reflections(a: Shape, tau: Shape, other: Shape, *, left: bool = True) -> Cost:
    """A matrix times Q, reflection by reflection."""
    m, columns = other[-2:] if left else other[:-3:-1]
    return _each(other[:-2], 4 * m * columns * tau[-1] - 2 * columns * tau[-1] ** 2)


@formula("linalg_lstsq")
def least_squares(a: Shape, b: Shape) -> Cost:
    """QR: reflections, these on the sides, and a triangle."""
    m, n = _tall(a)
    sides = b[-1] if len(b) == len(a) else 1
    return _each(a[:-2], _householder(m, n) + (4 * m * n - n * n) * sides)


@formula("_linalg_eigh")
def symmetric_eigenvalues(a: Shape, *, compute_v: bool = True) -> Cost:
    """Tridiagonal, then implicit QR steps."""
    return _each(a[:-2], 9 * a[-1] ** 3 if compute_v else 4 * a[-1] ** 3 * _THIRD)


@formula("_linalg_svd")
def singular_values(a: Shape, *, full_matrices: bool = False, compute_uv: bool = True) -> Cost:
    """Bidiagonal, by way of R where the matrix is tall."""
    m, n = _tall(a)
    if not compute_uv:
        return _each(a[:-2], 2 * m * n**2 + 2 * n**3)
    return _each(a[:-2], 4 * m**2 * n + 22 * n**3 if full_matrices else 6 * m * n**2 + 20 * n**3)


def _fft(shape: Shape, dimensions: Sequence[int], each: float) -> Cost:
    transformed = prod(shape[place] for place in dimensions)
    return Cost(other_flops=round(each * prod(shape) * log2(transformed)) if transformed else 0)


@formula("_fft_c2c")
def fft(x: Shape, dim: Sequence[int]) -> Cost:
    """Complex to complex."""
    return _fft(x, dim, 5)


@formula("_fft_r2c")
def rfft(x: Shape, dim: Sequence[int]) -> Cost:
    """Real to complex."""
    return _fft(x, dim, 2.5)


@formula("_fft_c2r")
def irfft(x: Shape, dim: Sequence[int], *, out: Shape) -> Cost:
    """Complex to real: as many operations as the way there."""
    return _fft(out, dim, 2.5)
