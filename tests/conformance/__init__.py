"""Models and what they cost, worked out by hand.

What lflops is held to, and what it is compared with its peers on.
"""

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
CASES: tuple[Case, ...] = tuple(case for family in (*OPERATORS, *MODELS) for case in family.CASES)
