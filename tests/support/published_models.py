"""Models with published memory figures, each written in plain torch from its publication."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint


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
            each(x)
            .view(batch, length, self.heads, -1)
            .transpose(1, 2)
            .reshape(batch * self.heads, length, -1)
            for each in (self.query, self.key, self.value)
        )
        scores = torch.baddbmm(
            query.new_empty(1, 1, 1),
            query,
            key.transpose(1, 2),
            beta=0,
            alpha=1 / math.sqrt(query.shape[-1]),
        )
        mixed = torch.bmm(self._dropped(scores.softmax(-1)), value)
        return (
            mixed.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, hidden)
        )

    @staticmethod
    def _dropped(x: Tensor) -> Tensor:
        """With a mask of a byte an element, as on a GPU."""
        return torch.native_dropout(x, 0.1, True)[0]


class MixedPrecisionAdam(Optimizer):
    """Adam as the ZeRO paper counts it for mixed precision.

    12 bytes a parameter, in single precision.

    These are a copy of the parameter, the momentum and the variance.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add up the momentum and set the parameters.

        The arithmetic of Adam makes no difference to what is kept.
        """
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
                state["momentum"], state["variance"] = (
                    torch.zeros_like(state["master"]),
                    torch.zeros_like(state["master"]),
                )
            parameter.copy_(state["master"])


class Llama(NamedTuple):
    """Sizes of a Llama; these are of Llama 3.2 3B."""

    width: int = 3072
    wide: int = 8192
    heads: int = 24
    key_heads: int = 8
    layers: int = 28
    words: int = 128_256
    longest: int = 131_072
    tied: bool = True  # whether the head's weight is the embedding's


LLAMA_3B = Llama()
LLAMA_8B = Llama(width=4096, wide=14336, heads=32, layers=32, tied=False)


class RootMeanSquare(nn.Module):
    """Normalization in single precision, with its result in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.scale


class LlamaBlock(nn.Module):
    """Attention and a perceptron, as torchtune's `TransformerSelfAttentionLayer` of November 2024 computes them."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.sizes, head = sizes, sizes.width // sizes.heads
        self.before, self.between = RootMeanSquare(sizes.width), RootMeanSquare(sizes.width)
        self.query, self.out = linear(sizes.width, sizes.width), linear(sizes.width, sizes.width)
        self.key, self.value = (
            linear(sizes.width, sizes.key_heads * head),
            linear(sizes.width, sizes.key_heads * head),
        )
        self.gate, self.up, self.down = (
            linear(sizes.width, sizes.wide),
            linear(sizes.width, sizes.wide),
            linear(sizes.wide, sizes.width),
        )

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.before(x), rotations))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _attention(self, x: Tensor, rotations: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.sizes.width // self.sizes.heads))
            for each in (self.query, self.key, self.value)
        )
        query, key, value = (
            rotated(query, rotations).transpose(1, 2),
            rotated(key, rotations).transpose(1, 2),
            value.transpose(1, 2),
        )
        groups = self.sizes.heads // self.sizes.key_heads
        key, value = (
            each.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for each in (key, value)
        )
        return (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotary positions, in single precision; pairs of numbers are neighbours."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotations[:, :, None].unbind(-1)
    return (
        torch.stack((first * cosine - second * sine, second * cosine + first * sine), -1)
        .flatten(-2)
        .type_as(x)
    )


class LlamaModel(nn.Module):
    """Llama. Its result are logits; of several chunks a list, as torchtune's chunked loss takes it.

    Args:
        sizes: The model's sizes.
        recomputes: Whether each block is recomputed in backward.
        chunks: In how many parts of the sequence logits are computed; 0 makes them at once, in
            single precision.
    """

    rotations: Tensor

    def __init__(
        self, sizes: Llama = LLAMA_3B, *, recomputes: bool = False, chunks: int = 0
    ) -> None:
        super().__init__()
        self.recomputes, self.chunks = recomputes, chunks
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = RootMeanSquare(sizes.width)
        self.head = (
            self.embedding if sizes.tied else nn.Linear(sizes.width, sizes.words, bias=False)
        )
        self.register_buffer(
            "rotations",
            torch.zeros(sizes.longest, sizes.width // sizes.heads // 2, 2),
            persistent=False,
        )

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor | list[Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = (
                checkpoint(self._block, layer, x, positions, use_reentrant=False)
                if self.recomputes
                else self._block(layer, x, positions)
            )
        x = self.norm(x)
        if not self.chunks:
            return F.linear(x, self.head.weight).float()
        return [F.linear(each, self.head.weight) for each in x.chunk(self.chunks, 1)]

    def _block(self, layer: nn.Module, x: Tensor, positions: Tensor) -> Any:
        return layer(x, self.rotations[positions])
