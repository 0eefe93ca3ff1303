"""Test the activations of a transformer layer against a published formula, to the byte."""

import pytest
import torch

import lflops
from tests.support.published_models import PublishedLayer

HALF = 2


@pytest.mark.parametrize(("s", "b", "h", "a"), [(64, 2, 128, 4), (128, 1, 64, 8), (32, 4, 96, 3)])
def test_the_activations_of_a_layer_are_the_published_ones(s: int, b: int, h: int, a: int) -> None:
    """In half precision the layer keeps s·b·h·(34 + 5·a·s/h) bytes.

    The estimate includes the layer's result instead of its input, and two statistics per norm.
    """
    x = torch.zeros(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    found = lflops.estimate(
        lambda: PublishedLayer(h, a).to(torch.bfloat16),
        x,
        backward=True,
        loss=lambda out: out.sum(),
    )
    assert found.memory is not None
    (loss,) = (
        moment
        for moment in found.memory.timeline
        if moment.operator == "sum" and moment.phase == "forward"
    )
    assert loss.by_category is not None
    statistics = 2 * 2 * s * b * HALF
    assert s * b * h * 34 + 5 * a * s * s * b == loss.by_category.activations - statistics
