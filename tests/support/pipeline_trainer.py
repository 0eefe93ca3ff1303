"""Train a pipeline of two stages with a Trainer.

Each rank has a different module. Activations and gradients are sent from one rank to the other.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from lflops.profile.profile import Profile
from tests.support.lightning_runs import CLASSES, WIDTH, fit, watching
from tests.support.process_state import Facts, bits, random_numbers
from tests.support.trainer_ranks import FEW, SOON, WIDE, rank


class Stages(DDPStrategy):
    """A DDP strategy that starts the ranks, but does not wrap the model.

    The ranks have no parameters in common.
    """

    def configure_ddp(self) -> None:
        pass

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


class Stage(LightningModule):
    """A pipeline stage: the layer `up` on rank 0, the layer `down` and the loss on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        if rank():
            self.down = nn.Linear(WIDE, CLASSES)
        else:
            self.up = nn.Linear(WIDTH, WIDE)
        self.losses: list[object] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if rank():
            self._second(batch[1])
        else:
            self._first(batch[0])
        optimizer.step()

    def _first(self, x: Tensor) -> None:
        hidden = torch.relu(self.up(x))
        distributed.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        distributed.recv(gradient, 1)
        self.manual_backward(hidden, gradient=gradient)

    def _second(self, y: Tensor) -> None:
        hidden = torch.empty(len(y), WIDE)
        distributed.recv(hidden, 0)
        loss = F.cross_entropy(self.down(hidden.requires_grad_()), y)
        self.manual_backward(loss)
        assert hidden.grad is not None
        distributed.send(hidden.grad, 0)
        self.losses.append(bits(loss))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def facts(self) -> Facts:
        """Return the results of training on this rank: losses, weights and random states."""
        weights = {name: bits(tensor) for name, tensor in self.state_dict().items()}
        return {"losses": self.losses} | weights | random_numbers()


def staged() -> tuple[list[Profile], Facts, Facts]:
    """Train the pipeline with and without a monitor.

    Returns:
        The profiles, the results of the run with the monitor, and the results of the other run.
    """
    monitor = watching(schedule=SOON, topology=lambda each: {"data": 0, "pipeline": each})
    facts = []
    for callbacks in ([monitor], []):
        torch.manual_seed(0)
        stage = Stage()
        fit(stage, *callbacks, batches=2 * FEW, strategy=Stages(), devices=2)
        facts.append(stage.facts())
    return monitor.profiles, facts[0], facts[1]
