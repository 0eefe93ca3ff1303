"""Test that backward on the thread of a device is attributed to modules as on the CPU.

The models are random graphs, and both the MACs and the times of modules are checked. On the
simulated device only matmuls take time, one nanosecond for each MAC, so the time of a module
follows from its MACs.
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
    """Calls all branches with the same input. The output of the first branch is used last."""

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
    """Calls the same module twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Hooked(nn.Module):
    """Has a hook of the user that multiplies the gradient of the output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


def graph(draw: random.Random, *, reentrant: bool, depth: int = 3) -> nn.Module:
    """Return a random model. If `reentrant` is set, some of its checkpoints are reentrant."""
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
    """Return a loss function. With `twice`, it contains the gradient of the input."""

    def loss(output: Tensor) -> Tensor:
        if not twice:
            return output.square().mean()
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + gradient.square().sum()

    return loss


def work(profile: Profile) -> dict[tuple[str, str], int]:
    """Return the MACs by module and phase."""
    macs = {}
    for name in profile.modules:
        for phase in PHASES:
            macs[name, phase] = profile.total(name, phase)
    return macs


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_a_random_graph(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MACs of each module equal those on the CPU, and its times follow from them within 2 %.

    Every second graph has a double backward. Its time is not divided among modules, so only the
    times of the whole model are checked.
    """
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    draw = random.Random(seed)  # noqa: S311 - a graph is no secret
    twice = bool(seed % 2)
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
    names = [""] if twice else list(on_device.modules)
    for name in names:
        for phase in PHASES:
            taken = getattr(on_device.modules[name], phase).seconds
            seconds = 0 if taken is None else taken.median
            expected = on_cpu.total(name, phase) / 1e9
            assert seconds == pytest.approx(expected, rel=0.02, abs=1e-6), (name, phase)
