"""Count the work of a small GPT, forward and backward, and save the profile.

python examples/count_gpt.py
lflops show gpt.profile.json
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 512, 128, 256, 8, 6


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        """Build the two projections."""
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        """Build the parts."""
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self) -> None:
        """Build the parts."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits of the next tokens."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Count forward and backward of one training step."""
    ids = torch.randint(VOCABULARY, (4, LENGTH))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    profile = lflops.count(GPT(), ids, backward=True, loss=loss)
    profile.save("gpt.profile.json")
    forward, backward = profile.total(), profile.total(phase="backward")
    print("saved gpt.profile.json; to see it: lflops show gpt.profile.json")
    print(
        f"forward {forward:,} MACs, backward {backward:,} MACs: {backward / forward:.3f} times as many"
    )


if __name__ == "__main__":
    main()
