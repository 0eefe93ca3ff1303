"""Train a small GPT on generated text with a FlopsMonitor.

The example takes half a minute on two cores.

python examples/train_gpt.py
lflops show gpt/lflops/train-1-*.profile.json
tensorboard --logdir gpt
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lflops
from lflops import FlopsMonitor, Schedule

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH, STEPS = 512, 128, 256, 8, 6, 4, 100


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        """Build the parts."""
        super().__init__()
        self.norm1, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """A decoder with tied embeddings that learns to predict the next token."""

    def __init__(self) -> None:
        """Build the parts."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        """Compute the loss of a batch."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def text() -> Tensor:
    """Generate sequences of numbers that increase by a constant, each with its own start and step."""
    begin, stride = (
        torch.randint(VOCABULARY, (STEPS * BATCH, 1)),
        torch.randint(1, 8, (STEPS * BATCH, 1)),
    )
    return (begin + stride * torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    """Train the model."""
    torch.manual_seed(0)
    print("Measuring the peak FLOP/s of this machine takes ten seconds")
    hardware = lflops.calibrate("cpu", dtypes=("fp32",))
    monitor = FlopsMonitor(Schedule(wait=5, warmup=2, active=3, repeat=2), hardware=hardware)
    logger, progress = (
        TensorBoardLogger(".", name="", version="gpt"),
        TQDMProgressBar(refresh_rate=5),
    )
    options = {
        "log_every_n_steps": 10,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(max_epochs=1, callbacks=[monitor, progress], logger=logger, **options)
    trainer.fit(GPT(), DataLoader(text(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
