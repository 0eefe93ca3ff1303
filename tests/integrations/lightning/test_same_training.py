"""Test that the monitor does not change a training run: all results are the same to the bit.

Compiled models also stay compiled.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lflops.monitoring.schedule import Schedule
from tests.support.compilers import ENTERED_MODES_END_COMPILATION, Backend
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, Validated, fit, watching
from tests.support.process_state import Facts, bits, differences, random_numbers

pytestmark = [
    *LIGHTNINGS_WARNINGS,
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.filterwarnings("ignore:Swapping"),
]

STEPS = 50


class Losses(Callback):
    """Records the bits of each loss."""

    def __init__(self) -> None:
        self.bits: list[object] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            outputs = bits(outputs["loss"])
        self.bits.append(outputs)


class Drawing(Validated):
    """Draws random numbers from every generator, and has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.norm(x) * random.random() + float(np.random.rand())  # noqa: NPY002, S311 - the global ones are what can be left changed
        return super().training_step((x, y), batch_idx)


class Manual(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.body.parameters()),
            torch.optim.SGD([*self.head.parameters(), *self.norm.parameters()], lr=0.1),
        ]


class Recomputing(Drawing):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(checkpoint(self.body, x, use_reentrant=False)), y)


class Quasi(Drawing):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


TRAININGS: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[], list[Any]]]] = {
    "fp32": (Drawing, {}, list),
    "bf16-mixed": (Drawing, {"precision": "bf16-mixed"}, list),
    "16-mixed": (Drawing, {"plugins": lambda: MixedPrecision("16-mixed", "cpu")}, list),
    "accumulated and clipped": (
        Drawing,
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        list,
    ),
    "manual": (Manual, {}, list),
    "recomputed": (Recomputing, {}, list),
    "LBFGS": (Quasi, {}, list),
    "validated": (Drawing, {"val_check_interval": 7}, list),
    "averaged": (Drawing, {}, lambda: [EMAWeightAveraging(decay=0.9)]),
    "averaged at the end": (
        Drawing,
        {"max_epochs": 5},
        lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=2)],
    ),
}
"""The model, the options of the Trainer, and a function that returns more callbacks."""


def train(name: str, *more: Any) -> Facts:
    """Train 50 steps, and return the losses and the final states of all parts."""
    model, options, callbacks = TRAININGS[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
    module = model()
    losses = Losses()
    epochs = options.get("max_epochs", 1)
    trainer = fit(module, losses, *more, *callbacks(), batches=STEPS // epochs, **options)
    facts: Facts = {"losses": losses.bits}
    for key, tensor in module.state_dict().items():
        facts[key] = bits(tensor)
    states = []
    for optimizer in trainer.optimizers:
        states += optimizer.state_dict()["state"].values()
    for i, state in enumerate(states):
        tensors = [each for each in state.values() if isinstance(each, Tensor)]
        facts[f"state {i}"] = [bits(each) for each in tensors]
    facts.update(random_numbers())
    return facts


@pytest.mark.parametrize("name", TRAININGS)
def test_a_watched_training_is_the_same_training(name: str) -> None:
    """Losses, weights, buffers, optimizer states and random numbers equal those without a monitor.

    The run has several windows with counting and module-timing steps.
    """
    monitor = watching(schedule=Schedule(wait=2, warmup=1, active=2, repeat=3))
    assert [] == differences(train(name), train(name, monitor))
    kinds = set()
    for profile in monitor.profiles:
        kinds.update(step.kind for step in profile.steps)
    assert {"counting", "unprofiled", "module_timing"} == kinds


class Culprit(Callback):
    """Calls a function that changes something in the middle of the run."""

    def __init__(self, deed: Callable[[Any], object]) -> None:
        self.deed = deed

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEPS // 2:
            self.deed(pl_module)


DEEDS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "draws a number": (
        lambda module: torch.rand(1),
        {"losses", "head.weight", "random numbers: torch"},
    ),
    "draws from Python": (lambda module: random.random(), {"losses", "random numbers: python"}),  # noqa: S311
    "draws from NumPy": (lambda module: np.random.rand(), {"losses", "random numbers: numpy"}),  # noqa: NPY002
    "moves a weight": (
        lambda module: module.head.weight.data[0].add_(1e-3),
        {"losses", "head.weight"},
    ),
    "runs a module": (
        lambda module: module.norm(torch.ones(4, 8)),
        {"norm.running_mean", "norm.num_batches_tracked"},
    ),
}
"""Functions that change a training run, and differences that the comparison must report."""


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "accumulated and clipped"])
@pytest.mark.parametrize(("deed", "expected"), DEEDS.values(), ids=DEEDS)
def test_a_training_that_was_meddled_with_is_another_one(
    deed: Callable[[Any], object], expected: set[str], name: str
) -> None:
    """If something changes the run, the comparison reports it, so the test above can fail."""
    assert expected <= set(differences(train(name), train(name, Culprit(deed))))


def compiled_part(backend: Backend) -> Any:
    """Return a model of which one module is compiled."""
    model = Classifier()
    model.body = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=backend)
    return model


def compiled_step(backend: Backend) -> Any:
    """Return a model that is compiled with its `training_step`."""
    return torch.compile(Classifier(), backend=backend)


class Meddling(Callback):
    """Enters an ordinary dispatch mode in batch 5, which prevents compiled code from running."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        from tests.support.leaky_profilers import PlainMode

        self.mode = PlainMode()
        if batch_idx == 5:
            self.mode.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 5:
            self.mode.__exit__(None, None, None)


def graphs(make: Callable[[Backend], Any], *callbacks: Any) -> tuple[int, int]:
    """Train 30 batches, and return the number of compiled graphs and of their runs."""
    torch.compiler.reset()
    backend = Backend()
    fit(make(backend), *callbacks)
    torch.compiler.reset()
    return backend.compilations, backend.runs


@pytest.mark.parametrize("make", [compiled_part, compiled_step])
def test_what_is_compiled_is_compiled_and_runs_as_often_as_without_the_monitor(
    make: Callable[[Backend], Any],
) -> None:
    """With the monitor, as many graphs are compiled and run as without it.

    So compiled code also runs in the counting step, and no step after the first one recompiles.
    """
    plain = graphs(make)
    monitor = watching()
    watched = graphs(make, monitor)
    assert plain == watched
    assert plain[0] >= 1
    (profile,) = monitor.profiles
    assert "compiled_ran_eager" not in {note.code for note in profile.notes}
    assert {0} == {step.index for step in profile.steps if "recompiled" in step.marks}


@pytest.mark.skipif(not ENTERED_MODES_END_COMPILATION, reason="the culprit is none on this torch")
@pytest.mark.parametrize("make", [compiled_part, compiled_step])
def test_a_callback_that_ends_the_compilation_is_seen(make: Callable[[Backend], Any]) -> None:
    """With the callback `Meddling`, compiled graphs run less often, so the test above can fail.

    On older versions of torch, the graphs never run again after the mode was entered.
    """
    assert graphs(make)[1] - 5 > graphs(make, Meddling())[1]
