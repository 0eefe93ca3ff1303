"""Memory that others published: the activations of a transformer layer, to the byte."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops

HALF = 2


class PublishedLayer(nn.Module):
    """A layer as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022), section 4.1."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.out(self._attention(self.before(x))))
        return x + self._dropped(self.down(F.gelu(self.up(self.between(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            each(x).view(batch, length, self.heads, -1).transpose(1, 2).reshape(batch * self.heads, length, -1)
            for each in (self.query, self.key, self.value)
        )
        scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=1 / math.sqrt(query.shape[-1]))
        mixed = torch.bmm(self._dropped(scores.softmax(-1)), value)
        return mixed.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, hidden)

    @staticmethod
    def _dropped(x: Tensor) -> Tensor:
        """With a mask of a byte an element, as on a GPU."""
        return torch.native_dropout(x, 0.1, True)[0]


@pytest.mark.parametrize(("s", "b", "h", "a"), [(64, 2, 128, 4), (128, 1, 64, 8), (32, 4, 96, 3)])
def test_the_activations_of_a_layer_are_the_published_ones(s: int, b: int, h: int, a: int) -> None:
    """s·b·h·(34 + 5·a·s/h) bytes in half precision: ours have the layer's result in place of its input, and two statistics a norm."""
    x = torch.zeros(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    found = lflops.estimate(lambda: PublishedLayer(h, a).to(torch.bfloat16), x, backward=True, loss=lambda out: out.sum())
    assert found.memory is not None
    (loss,) = (moment for moment in found.memory.timeline if moment.operator == "sum" and moment.phase == "forward")
    assert loss.by_category is not None
    statistics = 2 * 2 * s * b * HALF
    assert s * b * h * 34 + 5 * a * s * s * b == loss.by_category.activations - statistics
