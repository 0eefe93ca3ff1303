"""Models for the faults of `gpu_faults.py`; no rule was tuned on them.

The models are convolutions, and a decoder with logits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        """Build the layers on the CPU."""
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.one, self.two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolutions as in a ResNet."""
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


class Convolutions(nn.Module):
    """Residual blocks on small images."""

    def __init__(self, device: str) -> None:
        """Build the layers on the CPU."""
        super().__init__()
        wide = device == "cuda"
        self.width, self.image = (1024, (32, 128, 128)) if wide else (32, (4, 8, 8))
        channels = 512 if wide else 8
        self.stem = nn.Conv2d(self.image[0], channels, 4, 4)
        self.layers = nn.ModuleList(Residual(channels) for _ in range(4))

    def loss(self, x: Tensor) -> Tensor:
        """Return the distance between the mean of each channel and one."""
        x = self.stem(x.view(-1, *self.image))
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.mean((2, 3)), torch.ones_like(x[:, :, 0, 0]))


class Block(nn.Module):
    """Causal attention and a gated feed-forward network, as in Llama."""

    def __init__(self, width: int, heads: int) -> None:
        """Build the layers on the CPU."""
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the feed-forward network."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Blocks, followed by logits for many words."""

    def __init__(self, device: str) -> None:
        """Build the layers on the CPU."""
        super().__init__()
        wide = device == "cuda"
        self.width, self.words = (1024, 16384) if wide else (32, 64)
        self.layers = nn.ModuleList(Block(self.width, 8 if wide else 2) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(self.width), nn.Linear(self.width, self.words, bias=False)

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss for consecutive words as labels."""
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(
            logits.float(), torch.arange(len(logits), device=x.device) % self.words
        )
