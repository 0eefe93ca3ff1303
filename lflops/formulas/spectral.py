"""Fourier transforms, by the count that the field quotes for the fast algorithm: 5 n log2 n operations, half of them for real numbers."""

from collections.abc import Sequence
from math import log2, prod

from lflops.formulas.table import Cost, Shape, formula


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
