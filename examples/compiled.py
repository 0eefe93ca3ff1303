"""Train a model without torch.compile, and then with compiled blocks.

lflops counts the work of both runs exactly. In the table of times, each compiled block is one row.
The example takes half a minute on two cores, mostly for compilation.

python examples/compiled.py
lflops show runs/compiled/train-0-*.profile.json
"""

import statistics

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lflops import FlopsMonitor, Profile

FEATURES, WIDTH, LAYERS, CLASSES, BATCH, STEPS = 64, 256, 3, 10, 128, 30


class Block(nn.Module):
    """A gated MLP with a residual connection. The compiler can fuse many of its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.back = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Gate one half of the features by the other half."""
        value, gate = self.into(self.norm(x)).chunk(2, dim=1)
        return x + self.back(value * F.gelu(gate))


class Classifier(LightningModule):
    """Several blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.body = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Compute the loss of a batch."""
        x, y = batch
        return F.cross_entropy(self.head(self.body(self.embed(x))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters())


def trained(model: Classifier, name: str) -> Profile:
    """Train the model, and return the profile of its window."""
    data = DataLoader(
        TensorDataset(
            torch.randn(STEPS * BATCH, FEATURES), torch.randint(CLASSES, (STEPS * BATCH,))
        ),
        batch_size=BATCH,
    )
    monitor = FlopsMonitor(dirpath=f"runs/{name}")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, callbacks=[monitor], **options).fit(model, data)
    return monitor.profiles[0]


def main(backend: str = "inductor") -> None:
    """Train both models, and compare them."""
    torch.manual_seed(0)
    eager, model = trained(Classifier(), "eager"), Classifier()
    for block in model.body:
        block.compile(backend=backend)
    compiled = trained(model, "compiled")
    for name, profile in {"eager": eager, "compiled": compiled}.items():
        typical = statistics.median(step.seconds for step in profile.steps if step.is_unprofiled)
        timed = sum(module.forward.seconds is not None for module in profile.modules.values())
        print(
            f"{name:10}{profile.total(phase='all'):14,} MACs a step, {typical * 1e3:6.2f} ms, times of {timed} modules"
        )


if __name__ == "__main__":
    main()
