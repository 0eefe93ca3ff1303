"""Train a GAN with manual optimization and two optimizers.

The profile shows the cost of each network in each phase.

The example takes some seconds on two cores.

python examples/manual_gan.py
lflops show runs/gan/train-0-*.profile.json
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lflops import FlopsMonitor, scope

NOISE, WIDTH, PIXELS, BATCH, STEPS = 16, 128, 256, 64, 40


class GAN(LightningModule):
    """A generator of small images, and a discriminator that separates them from real images."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, PIXELS), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1)
        )

    def training_step(self, images: Tensor, _: int) -> None:
        """Train the discriminator, and then the generator against it."""
        of_generator, of_discriminator = self.optimizers()
        fakes = self.generator(torch.randn(len(images), NOISE, device=self.device))

        self.toggle_optimizer(of_discriminator)
        self.improve(
            of_discriminator, self.wrong(images, real=True) + self.wrong(fakes.detach(), real=False)
        )
        self.untoggle_optimizer(of_discriminator)

        self.toggle_optimizer(of_generator)
        self.improve(of_generator, self.wrong(fakes, real=True))
        self.untoggle_optimizer(of_generator)

    def wrong(self, images: Tensor, *, real: bool) -> Tensor:
        """Compute the discriminator's loss for images that are all real or all generated."""
        said = self.discriminator(images)
        with scope("loss"):
            return F.binary_cross_entropy_with_logits(said, torch.full_like(said, float(real)))

    def improve(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Make one step of an optimizer."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Create an optimizer for each network."""
        return [
            torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]


def main() -> None:
    """Train, and print the work of each network in a step."""
    torch.manual_seed(0)
    data = DataLoader(torch.rand(STEPS * BATCH, PIXELS) * 2 - 1, batch_size=BATCH)
    monitor = FlopsMonitor(dirpath="runs/gan")
    options = {"logger": False, "enable_checkpointing": False}
    Trainer(max_epochs=1, callbacks=[monitor], **options).fit(GAN(), data)
    (profile,) = monitor.profiles
    phases = ("forward", "backward", "optimizer")
    print(f"{'FLOPs of a step':18}{'calls':>7}", *(f"{phase:>13}" for phase in phases))
    for name in ("generator", "discriminator", "loss"):
        module = profile.modules[name]
        print(
            f"{name:18}{module.calls:7}", *(f"{module.work(phase).flops:13,}" for phase in phases)
        )


if __name__ == "__main__":
    main()
