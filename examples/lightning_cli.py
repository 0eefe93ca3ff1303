"""Train a model with a monitor, both configured in a YAML file.

LightningCLI sets the arguments of the monitor and of its schedule. The command line can change each
setting, for example with `--model.layers 6` or `--trainer.callbacks.schedule.wait 20`. The example
takes some seconds on two cores.

pip install 'jsonargparse[signatures]'
python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --model.layers 6
tensorboard --logdir runs/cli
"""

from itertools import pairwise

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lflops import FlopsMonitor

FEATURES = 32


class Perceptron(LightningModule):
    """Layers of equal width that learn the sum of their inputs.

    Args:
        width: Width of the hidden layers.
        layers: Number of hidden layers.
    """

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        sides = [FEATURES, *[width] * layers]
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(*each), nn.ReLU()) for each in pairwise(sides))
        )
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Compute the loss of a batch."""
        x, y = batch
        loss = F.mse_loss(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters())


class Sums(LightningDataModule):
    """Random numbers and their sums.

    Args:
        batch_size: Number of rows in a batch.
        batches: Number of batches in an epoch.
    """

    def __init__(self, batch_size: int = 32, batches: int = 100) -> None:
        super().__init__()
        self.batch_size, self.batches = batch_size, batches

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Load the batches of one epoch."""
        x = torch.randn(self.batch_size * self.batches, FEATURES)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)


def main() -> None:
    """Train, and print the profile of each window."""
    cli = LightningCLI(Perceptron, Sums)
    for monitor in (each for each in cli.trainer.callbacks if isinstance(each, FlopsMonitor)):
        for profile in monitor.profiles:
            print(f"window {profile.run.window}, closed at step {profile.run.step}: {profile!r}")


if __name__ == "__main__":
    main()
