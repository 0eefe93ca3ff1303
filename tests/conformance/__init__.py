"""The conformance suite: models, and their MACs worked out by hand.

lflops must count the same MACs. The same cases are used to compare lflops with other packages.
"""

from collections.abc import Iterator

from tests.conformance import (
    attention,
    convolution,
    convolutional_models,
    einsum,
    formats,
    kernels,
    language_model_heads,
    language_models,
    matmul,
    models_of_several_senses,
    no_products,
    packed,
    recurrent,
    running,
    training,
    transformer,
    vision_models,
)
from tests.conformance.case import Case

__all__ = ["CASES"]

OPERATORS = (
    matmul,
    einsum,
    formats,
    convolution,
    attention,
    transformer,
    recurrent,
    no_products,
    kernels,
    packed,
    language_model_heads,
)
MODELS = (
    running,
    training,
    language_models,
    vision_models,
    convolutional_models,
    models_of_several_senses,
)


def _cases() -> Iterator[Case]:
    for family in (*OPERATORS, *MODELS):
        yield from family.CASES


CASES: tuple[Case, ...] = tuple(_cases())
