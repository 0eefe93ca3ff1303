"""Backward on the device's thread is attributed as on the CPU, in random graphs.

By the operators that run, and by the time that they take.

Nothing but matrix products takes time on the device, and each takes a nanosecond for a MAC. So a
module's time has to be its MACs.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from lflops import Profile
from lflops.timing.clock import HostClock
from tests.support import simulated
from tests.support.simulated import FIRST

WIDTH, ROWS, GRAPHS = 64, 256, 100
PHASES = ("forward", "backward", "recompute")


class Product(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Branches(nn.Module):
    """All of them of the same input; the first is used last."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = [branch(x) for branch in self.branches]
        return sum(others, torch.zeros_like(x)) * torch.sigmoid(first)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Twice(nn.Module):
    """A module that is shared: it is called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Hooked(nn.Module):
    """A user's hook works on the gradient, with a product of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


def graph(draw: random.Random, *, reentrant: bool, depth: int = 3) -> nn.Module:
    """A random model, with reentrant checkpoints if they are asked for."""
    if depth == 0:
        return Product()

    def below() -> nn.Module:
        return graph(draw, reentrant=reentrant, depth=depth - 1)

    makers: list[Callable[[], nn.Module]] = [
        Product,
        lambda: nn.Sequential(*(below() for _ in range(draw.randint(1, 3)))),
        lambda: Residual(below()),
        lambda: Branches(*(below() for _ in range(draw.randint(2, 3)))),
        lambda: Checkpointed(below(), reentrant=reentrant and draw.random() < 0.5),
        lambda: Twice(below()),
        lambda: Hooked(below()),
    ]
    return draw.choice(makers)()


def loss_of(x: Tensor, *, twice: bool) -> Callable[[Tensor], Tensor]:
    """A loss; where backward runs twice, the gradient of the input is in it."""

    def loss(output: Tensor) -> Tensor:
        if not twice:
            return output.square().mean()
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + gradient.square().sum()

    return loss


def work(profile: Profile) -> dict[tuple[str, str], int]:
    """The MACs of each module by phase."""
    return {
        (name, phase): profile.total(name, phase) for name in profile.modules for phase in PHASES
    }


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_a_random_graph(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each module the MACs are those of the CPU, and the seconds those of its MACs within 2 %.

    Every second graph has a double backward, whose seconds are divided over no modules.
    """
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    draw, twice = random.Random(seed), bool(seed % 2)  # noqa: S311 - a graph is no secret
    torch.manual_seed(seed)
    model = nn.Sequential(*(graph(draw, reentrant=not twice) for _ in range(2)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    on_cpu = lflops.count(model, x, backward=True, loss=loss_of(x, twice=twice))
    simulated.plan(launch=0, event=0, macs_per_second=1e9, bytes_per_second=1e18)
    model.to(FIRST)
    there = x.detach().to(FIRST).requires_grad_()
    on_device = lflops.measure(
        model,
        there,
        backward=True,
        loss=loss_of(there, twice=twice),
        warmup=0,
        repeats=1,
        hardware=None,
    )
    assert work(on_cpu) == work(on_device)
    assert 0 < on_cpu.total("", "backward")
    timed = {"": on_device.modules[""]} if twice else on_device.modules
    for name, module in timed.items():
        for phase in PHASES:
            taken = getattr(module, phase).seconds
            macs = on_cpu.total(name, phase)
            assert (0 if taken is None else taken.median) == pytest.approx(
                macs / 1e9, rel=0.02, abs=1e-6
            ), (name, phase)
