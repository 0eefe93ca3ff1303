"""Fine-tune a frozen transformer with low-rank adapters.

Because most layers are frozen, backward costs about as much as forward, not twice as much. The
example takes some seconds on two cores.

python examples/finetune_lora.py
lflops show runs/lora/train-0-*.profile.json --phase backward
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lflops import FlopsMonitor

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, RANK, CLASSES, BATCH, STEPS = (
    512,
    64,
    128,
    4,
    3,
    8,
    2,
    16,
    30,
)


class LoRA(nn.Module):
    """A frozen linear layer, plus a trained low-rank adapter that starts at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = (
            nn.Linear(frozen.in_features, RANK, bias=False),
            nn.Linear(RANK, frozen.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of the layer and of the adapter."""
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention with adapters, and an MLP without adapters, each with a residual connection."""

    def __init__(self) -> None:
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
        self.requires_grad_(requires_grad=False)
        self.qkv, self.out = LoRA(self.qkv), LoRA(self.out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Classifier(LightningModule):
    """A frozen model with adapters, and a trained head. In practice, the model is pretrained."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Compute the loss of a batch."""
        ids, labels = batch
        return F.cross_entropy(self.head(self.blocks(self.tokens(ids)).mean(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train the parameters that are not frozen."""
        return torch.optim.AdamW(
            (each for each in self.parameters() if each.requires_grad), lr=1e-3
        )


def main() -> None:
    """Train, and compare backward with forward."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH))
    data = DataLoader(TensorDataset(ids, (ids[:, 0] > VOCABULARY // 2).long()), batch_size=BATCH)
    monitor = FlopsMonitor(dirpath="runs/lora")
    Trainer(max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False).fit(
        Classifier(), data
    )
    (profile,) = monitor.profiles
    print(f"{'MACs of a step':24}{'forward':>14}{'backward':>14}")
    for name in (
        "blocks.0.qkv.frozen",
        "blocks.1.qkv.frozen",
        "blocks.1.qkv.down",
        "blocks.1.qkv.up",
        "blocks.1.mlp",
        "head",
        "",
    ):
        forward, backward = profile.total(name), profile.total(name, phase="backward")
        print(
            f"{name or 'the whole model':24}{forward:14,}{backward:14,}   {backward / forward:.2f} times forward"
        )


if __name__ == "__main__":
    main()
