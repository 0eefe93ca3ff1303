"""Models with published memory figures, each written in plain torch from its publication."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint


class PublishedLayer(nn.Module):
    """A transformer layer with the activations that Korthikanti et al. count.

    See section 4.1 of "Reducing Activation Recomputation in Large Transformer Models" (2022).
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(hidden)
        self.between = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.out(self._attention(self.before(x))))
        return x + self._dropped(self.down(F.gelu(self.up(self.between(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def by_head(projected: Tensor) -> Tensor:
            heads = projected.view(batch, length, self.heads, -1).transpose(1, 2)
            return heads.reshape(batch * self.heads, length, -1)

        query = by_head(self.query(x))
        key = by_head(self.key(x))
        value = by_head(self.value(x))
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
        """Apply dropout with a mask of one byte per element, as on a GPU."""
        return torch.native_dropout(x, 0.1, True)[0]


class MixedPrecisionAdam(Optimizer):
    """An optimizer with the state of Adam for mixed precision, as counted in the ZeRO paper.

    The state has 12 bytes per parameter: a copy of the parameter, the momentum and the variance,
    all in single precision.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state and copy the parameters.

        The arithmetic of Adam is left out, because it does not change the memory of the state.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["momentum"] = torch.zeros_like(state["master"])
                    state["variance"] = torch.zeros_like(state["master"])
                parameter.copy_(state["master"])


class Llama(NamedTuple):
    """The sizes of a Llama model. The defaults are the sizes of Llama 3.2 3B.

    Attributes:
        width: Width of the hidden states.
        wide: Width inside the perceptron.
        heads: Number of attention heads.
        key_heads: Number of heads of keys and values.
        layers: Number of blocks.
        words: Size of the vocabulary.
        longest: Maximum length of a sequence.
        tied: Whether the head and the embedding have the same weight.
    """

    width: int = 3072
    wide: int = 8192
    heads: int = 24
    key_heads: int = 8
    layers: int = 28
    words: int = 128_256
    longest: int = 131_072
    tied: bool = True


LLAMA_3B = Llama()
LLAMA_8B = Llama(width=4096, wide=14336, heads=32, layers=32, tied=False)


class RootMeanSquare(nn.Module):
    """Normalization in single precision, with its result in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        normed = (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class LlamaBlock(nn.Module):
    """Attention and a perceptron.

    It computes the same as torchtune's `TransformerSelfAttentionLayer` of November 2024.
    """

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.sizes = sizes
        head = sizes.width // sizes.heads
        self.before = RootMeanSquare(sizes.width)
        self.between = RootMeanSquare(sizes.width)
        self.query = linear(sizes.width, sizes.width)
        self.out = linear(sizes.width, sizes.width)
        self.key = linear(sizes.width, sizes.key_heads * head)
        self.value = linear(sizes.width, sizes.key_heads * head)
        self.gate = linear(sizes.width, sizes.wide)
        self.up = linear(sizes.width, sizes.wide)
        self.down = linear(sizes.wide, sizes.width)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.before(x), rotations))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _attention(self, x: Tensor, rotations: Tensor) -> Tensor:
        head = self.sizes.width // self.sizes.heads
        query = self.query(x).unflatten(-1, (-1, head))
        key = self.key(x).unflatten(-1, (-1, head))
        value = self.value(x).unflatten(-1, (-1, head)).transpose(1, 2)
        # Two tensors are assigned together, so that the memory of the old ones is freed together.
        query, key = rotated(query, rotations), rotated(key, rotations)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        groups = self.sizes.heads // self.sizes.key_heads
        key, value = repeated(key, groups), repeated(value, groups)
        return (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Apply rotary positions in single precision. Neighboring numbers form the rotated pairs."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotations[:, :, None].unbind(-1)
    pairs = torch.stack((first * cosine - second * sine, second * cosine + first * sine), -1)
    return pairs.flatten(-2).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat each head of keys or values, so that there are as many as heads of queries."""
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


class LlamaModel(nn.Module):
    """A Llama model that returns logits.

    Args:
        sizes: The sizes.
        recomputes: Whether each block is recomputed in backward.
        chunks: If not 0, the model returns a list of logits for so many parts of the sequence, as
            the chunked loss of torchtune requires. If 0, it returns all logits in single precision.
    """

    rotations: Tensor

    def __init__(
        self, sizes: Llama = LLAMA_3B, *, recomputes: bool = False, chunks: int = 0
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.chunks = chunks
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = RootMeanSquare(sizes.width)
        if sizes.tied:
            self.head: nn.Module = self.embedding
        else:
            self.head = nn.Linear(sizes.width, sizes.words, bias=False)
        rotations = torch.zeros(sizes.longest, sizes.width // sizes.heads // 2, 2)
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor | list[Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(self._block, layer, x, positions, use_reentrant=False)
            else:
                x = self._block(layer, x, positions)
        x = self.norm(x)
        weight: Any = self.head.weight
        if not self.chunks:
            return F.linear(x, weight).float()
        return [F.linear(each, weight) for each in x.chunk(self.chunks, 1)]

    def _block(self, layer: nn.Module, x: Tensor, positions: Tensor) -> Any:
        return layer(x, self.rotations[positions])
