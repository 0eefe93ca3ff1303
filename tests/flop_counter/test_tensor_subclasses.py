"""Test runs that use tensor subclasses or function transforms.

A monitored run must end exactly as it does without lflops, and the counts must be exact.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

import lflops
from lflops.monitoring.schedule import Schedule
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS
from tests.support.tensor_subclasses import (
    LOSSES,
    WIDTH,
    Alias,
    LabelTensor,
    OverriddenTensor,
    Plain,
    RefusingTensor,
)

pytestmark = LIGHTNINGS_WARNINGS

ROWS, STEPS = 3, 8
SCHEDULE = Schedule(wait=1, warmup=1, active=2, repeat=1)
Loss = Callable[[nn.Module, Tensor], Tensor]


def a_model() -> nn.Module:
    """Build two layers, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def facts(losses: list[str], model: nn.Module) -> dict[str, Any]:
    """Return everything in which two runs may differ."""
    weights = {name: each.detach().numpy().tobytes() for name, each in model.named_parameters()}
    return {
        "losses": losses,
        "weights": weights,
        "random numbers": torch.get_rng_state().tolist(),
        "calls of __torch_function__": list(OverriddenTensor.seen),
    }


def own_loop(loss_of: Loss, folder: Path | None) -> dict[str, Any]:
    """Train in a custom loop; with a folder, monitor it."""
    OverriddenTensor.seen.clear()
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses: list[str] = []

    def step() -> None:
        loss = loss_of(model, torch.randn(ROWS, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())

    if folder is None:
        for _ in range(STEPS):
            step()
        return facts(losses, model)
    with lflops.monitor(
        model, optimizer, dirpath=folder, schedule=SCHEDULE, trace=False, on_error="raise"
    ) as monitor:
        for _ in range(STEPS):
            with monitor.step():
                step()
    assert 1 == len(monitor.profiles)
    assert monitor.profiles[0].is_counted
    return facts(losses, model)


class Solver(LightningModule):
    """A module that trains a model with a loss."""

    def __init__(self, loss_of: Loss) -> None:
        super().__init__()
        self.model = a_model()
        self.loss_of = loss_of
        self.losses: list[str] = []

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        loss = self.loss_of(self.model, batch)
        self.losses.append(float(loss.detach()).hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def lightning(loss_of: Loss, folder: Path | None) -> dict[str, Any]:
    """Train with a Trainer; with a folder, monitor and trace it."""
    OverriddenTensor.seen.clear()
    solver = Solver(loss_of)
    watcher = None
    if folder is not None:
        watcher = lflops.FlopsMonitor(dirpath=folder, schedule=SCHEDULE, on_error="raise")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[] if watcher is None else [watcher],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = list(torch.randn(STEPS, ROWS, WIDTH))
    trainer.fit(solver, torch.utils.data.DataLoader(batches, batch_size=None))
    if watcher is not None:
        assert 1 == len(watcher.profiles)
    return facts(solver.losses, solver)


# torch warns about `torch.jit.script` when it loads its rules for `jvp`.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor")
@pytest.mark.parametrize("run", [own_loop, lightning])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_watched_run_is_the_same_to_the_bit(
    run: Callable[..., dict[str, Any]], loss_of: Loss, tmp_path: Path
) -> None:
    """A monitored run has the same losses, weights, random numbers and calls of the subclass."""
    assert run(loss_of, None) == run(loss_of, tmp_path)


@pytest.mark.parametrize("kind", [Plain, OverriddenTensor, RefusingTensor])
def test_a_product_of_a_subclass_is_counted_as_that_of_a_tensor(kind: type[Tensor]) -> None:
    """3 rows by 4 x 4 weights are 48 MACs in forward, and 48 in backward for the weights.

    The input needs no gradient.
    """
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with lflops.counting(layer) as counted:
        layer(kind(torch.randn(ROWS, WIDTH))).as_subclass(Tensor).sum().backward()
    root = counted.profile.modules[""]
    assert 48 == root.forward.macs
    assert 48 == root.backward.macs


def test_a_derivative_that_is_differentiated_again_is_counted_once() -> None:
    """Each of the three matmuls of a gradient of a gradient costs 12 MACs.

    They are `u = x W`, `u' = 1 W` in the first backward pass, and `dW = 1' du'` in the second. `u`
    itself is not part of the second.
    """
    layer = nn.Linear(WIDTH, 1, bias=False)
    with lflops.counting(layer) as counted:
        points = LabelTensor(torch.randn(ROWS, WIDTH), "abcd").requires_grad_()
        (slope,) = torch.autograd.grad(layer(points).sum(), points, create_graph=True)
        slope.as_subclass(Tensor).square().sum().backward()
    assert 36 == sum(cell.macs for cell in counted.profile.op_counts)
    assert layer.weight.grad is not None


def test_memory_that_a_subclass_constructor_allocates_is_live_memory() -> None:
    """A constructor that allocates 6 floats adds 24 bytes; an alias adds none."""
    layer = nn.Linear(1, 1)
    with lflops.counting(layer) as without:
        torch.empty(1)
    with lflops.counting(layer) as counted:
        made = Plain(2, 3)
        Plain(made)
        torch.empty(1)
    assert without.profile.memory is not None
    assert counted.profile.memory is not None
    assert 24 == counted.profile.memory.peak_bytes - without.profile.memory.peak_bytes


def test_the_constructor_of_tensors_is_as_before_after_the_counted_step() -> None:
    """`Tensor.__new__` is replaced only during the count.

    Afterwards `torch.Tensor` inherits it again, without an attribute of its own.
    """
    before = Tensor.__new__
    with lflops.counting(nn.Linear(1, 1)):
        assert Tensor.__new__ is not before
    assert Tensor.__new__ is before
    assert "__new__" not in vars(Tensor)


def test_other_modes_stay_on_the_stack_in_a_constructor() -> None:
    """The user's modes receive the alias, and the order of the mode stack is kept.

    One mode is outside the mode of lflops, and one is inside.
    """
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    outer, inner = Mode(), Mode()
    with outer, lflops.counting(nn.Linear(1, 1)), inner:
        stack = _get_current_dispatch_mode_stack()
        Tensor([1.0])
        seen = outer.seen
        # With the user's modes, torch itself refuses this call.
        with pytest.raises(RuntimeError, match="already associated"):
            Plain(torch.ones(2).as_subclass(Tensor))
        assert _get_current_dispatch_mode_stack() == stack
    assert outer.seen > seen


@pytest.mark.parametrize("kind", [Plain, Alias])
def test_a_compiled_function_that_constructs_a_subclass_is_compiled_whole(kind: Any) -> None:
    """`fullgraph=True` raises no error, so dynamo can trace the constructor."""
    torch.compiler.reset()
    double = torch.compile(lambda x: kind(x) * 2, backend="eager", fullgraph=True)
    with lflops.counting(nn.Linear(1, 1)):
        assert [2.0, 4.0] == double(torch.tensor([1.0, 2.0])).tolist()
