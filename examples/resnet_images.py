"""Train a small ResNet on generated images in bf16-mixed.

The output compares the share of the time that each stage takes with its share of the work.

The example takes some seconds on two cores.

python examples/resnet_images.py
lflops show runs/resnet/train-0-*.profile.json --sort time
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lflops import FlopsMonitor, Schedule

SIDE, WIDTH, BLOCKS, STAGES, CLASSES, BATCH, STEPS = 16, 16, 2, 3, 10, 16, 20


def convolution(channels: int, made: int, size: int, stride: int = 1) -> nn.Sequential:
    """Create a convolution that keeps or halves the image size, followed by normalization."""
    return nn.Sequential(
        nn.Conv2d(channels, made, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(made)
    )


class Block(nn.Module):
    """Two convolutions with a residual connection, which is projected if the shape changes."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        stride = made // channels
        self.first, self.second = convolution(channels, made, 3, stride), convolution(made, made, 3)
        self.residual = nn.Identity() if stride == 1 else convolution(channels, made, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions."""
        return F.relu(self.residual(x) + self.second(F.relu(self.first(x))))


class ResNet(LightningModule):
    """A ResNet: each stage halves the image size and doubles the channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * 2**stage for stage in range(STAGES)]
        self.stem = nn.Sequential(convolution(3, WIDTH, 3), nn.ReLU())
        self.stages = nn.Sequential()
        for before, width in zip([WIDTH, *widths], widths, strict=False):
            self.stages.append(
                nn.Sequential(
                    Block(before, width), *(Block(width, width) for _ in range(BLOCKS - 1))
                )
            )
        self.head = nn.Linear(widths[-1], CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Compute the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train, and compare each part's share of the time with its share of the work."""
    torch.manual_seed(0)
    data = TensorDataset(
        torch.randn(STEPS * BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (STEPS * BATCH,))
    )
    monitor = FlopsMonitor(Schedule(wait=3, warmup=2, active=5), dirpath="runs/resnet")
    options = {"logger": False, "enable_checkpointing": False}
    Trainer(max_epochs=1, precision="bf16-mixed", callbacks=[monitor], **options).fit(
        ResNet(), DataLoader(data, BATCH)
    )
    (profile,) = monitor.profiles
    whole = profile.modules[""].forward
    for name in ("stem", "stages.0", "stages.1", "stages.2", "head"):
        part = profile.modules[name].forward
        work, time = part.macs / whole.macs, part.seconds.median / whole.seconds.median
        print(
            f"{name:10}{work:7.1%} of the MACs,{time:7.1%} of the time,{part.flops / part.seconds.median / 1e9:8.2f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
