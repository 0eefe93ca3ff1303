"""Test that a training run with a counted or measured step has the same results, to the bit."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.timing.measure import CountAndTime
from lflops.timing.module_times import NO_OVERHEAD
from tests.support.canary_model import Patient
from tests.support.process_state import Facts, bits, differences, random_numbers

Around = Callable[[nn.Module, Tensor], contextlib.AbstractContextManager[object]]
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Tensor]


class TensorState(torch.optim.Optimizer):
    """A handwritten momentum optimizer. Its state for each parameter is a tensor, not a dict."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                momentum = self.state.get(parameter)
                if momentum is None:
                    momentum = parameter.grad.clone()
                else:
                    momentum.mul_(0.9).add_(parameter.grad)
                self.state[parameter] = momentum
                parameter.sub_(0.1 * momentum)


class NamedState(torch.optim.SGD):
    """An optimizer with a state that belongs to no parameter, in addition to the usual states."""

    def step(self, closure: None = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step as in torch's tutorials."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step of an optimizer that receives a closure, which it may call several times."""

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(run)  # type: ignore[return-value]


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step of two batches with clipped gradients, which are set to zero in place."""
    loss = sum(model(part).square().mean() for part in x.chunk(2))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def mixed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, optimizer, x)


def recomputed(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, reentrant: bool
) -> Tensor:
    """Run a step with activation checkpointing, which draws the random numbers of forward again."""

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    return plain(checkpointed, optimizer, x.requires_grad_())  # type: ignore[arg-type]


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step that offloads saved tensors to the CPU."""
    with torch.autograd.graph.save_on_cpu():
        return plain(model, optimizer, x)


def penalised(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step with a gradient penalty: the gradient is differentiated as well."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    penalty = gradient.square().sum()
    return plain(lambda x: model(x) + penalty, optimizer, x)  # type: ignore[arg-type]


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Run a step, and average a copy of the model."""
    loss = plain(model, optimizer, x)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    average.update_parameters(model)
    return loss


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


class Training(NamedTuple):
    step: Step = plain
    model: Callable[[], nn.Module] = Patient
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = partial(
        torch.optim.SGD, lr=0.1, momentum=0.9
    )


TRAININGS = {
    "SGD": Training(),
    "AdamW": Training(optimizer=partial(torch.optim.AdamW, foreach=False)),
    "AdamW, foreach": Training(optimizer=partial(torch.optim.AdamW, foreach=True)),
    "AdamW, fused": Training(optimizer=partial(torch.optim.AdamW, fused=True)),
    "Adafactor": Training(optimizer=torch.optim.Adafactor),
    "LBFGS": Training(closure, optimizer=partial(torch.optim.LBFGS, max_iter=3)),
    "by hand": Training(optimizer=TensorState),
    "named state": Training(optimizer=partial(NamedState, lr=0.1)),
    "closure": Training(closure),
    "accumulated": Training(accumulated),
    "autocast": Training(mixed),
    "checkpointed": Training(partial(recomputed, reentrant=False)),
    "checkpointed, reentrant": Training(partial(recomputed, reentrant=True)),
    "offloaded": Training(offloaded),
    "penalised": Training(penalised, Attention),
    "averaged": Training(averaged),
    "attention": Training(model=Attention),
    "recurrent": Training(model=Recurrent),
}


def train(training: Training, around: Around, counted_step: int = 1) -> Facts:
    """Train for three steps, and return the losses and the final state of everything.

    The step with the index `counted_step` runs inside the context that `around` makes.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
    model = training.model()
    optimizer = training.optimizer(model.parameters())
    losses = []
    for step in range(3):
        x = torch.randn(6, 4)
        with around(model, x) if step == counted_step else contextlib.nullcontext():
            losses.append(bits(training.step(model, optimizer, x)))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    states = enumerate(optimizer.state_dict()["state"].values())
    return {
        "losses": losses,
        **{name: bits(tensor) for name, tensor in tensors.items()},
        **{f"{name}.grad": bits(tensor.grad) for name, tensor in tensors.items()},
        **{f"state {i}": [bits(each) for each in tensors_of(state)] for i, state in states},
        **random_numbers(),
    }


def tensors_of(state: Any) -> list[Tensor]:
    """Return the tensors in the state that an optimizer has for one parameter."""
    values = list(state.values()) if isinstance(state, dict) else [state]
    return [each for each in values if isinstance(each, Tensor)]


def nothing(_model: nn.Module, _x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context that does nothing."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def counted_before(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Count a pass before the step, on the step's batch."""
    assert lflops.count(model, x.detach(), backward=True).total()
    yield


@contextlib.contextmanager
def measured_before(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Count and time passes before the step, on the step's batch."""
    assert lflops.measure(model, x.detach(), backward=True, warmup=1, repeats=2).total()
    yield


@contextlib.contextmanager
def watched(model: nn.Module, _x: Tensor) -> Iterator[None]:
    """Count and time the step itself."""
    with CountAndTime(model, overhead=NO_OVERHEAD) as watching:
        yield
    assert watching.profile.total()


@contextlib.contextmanager
def twice(model: nn.Module, _x: Tensor) -> Iterator[None]:
    """Count the step twice at once. The count that began first ends first."""
    counts = [lflops.counting(model) for _ in range(2)]
    for count in counts:
        count.__enter__()
    yield
    for count in counts:
        count.__exit__(None, None, None)
    assert counts[0].profile.op_counts == counts[1].profile.op_counts


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_a_training_with_a_counted_step_is_the_same_training(training: Training) -> None:
    """A counted step does not change losses, weights, gradients, buffers or optimizer states.

    The next random numbers are the same as well.
    """
    assert [] == differences(
        train(training, nothing), train(training, lambda model, x: lflops.counting(model))
    )


@pytest.mark.parametrize("around", [counted_before, measured_before, watched, twice])
@pytest.mark.parametrize("name", ["AdamW, foreach", "accumulated", "attention"])
def test_a_training_that_is_counted_in_another_way_is_the_same_training(
    around: Around, name: str
) -> None:
    """Counting between two steps, counting with timing, and two counts at once change nothing."""
    assert [] == differences(train(TRAININGS[name], nothing), train(TRAININGS[name], around))


CULPRITS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "draws a number": (
        lambda model: torch.rand(1),
        {"losses", "random numbers: torch", "head.weight", "state 0"},
    ),
    "draws from Python": (
        lambda model: random.random(),  # noqa: S311
        {"losses", "random numbers: python"},
    ),
    "runs the model": (
        lambda model: model(torch.ones(3, 4)),
        {"losses", "steps", "norm.running_mean", "random numbers: torch"},
    ),
    "freezes": (
        lambda model: model.embedding.weight.requires_grad_(False),
        {"losses", "embedding.weight"},
    ),
    "evaluates": (lambda model: model.norm.eval(), {"losses", "norm.running_mean"}),
    "leaves a gradient": (
        lambda model: setattr(model.head.bias, "grad", torch.ones(4)),
        {"losses", "head.bias"},
    ),
    "moves a weight": (lambda model: model.head.bias.data.add_(1e-3), {"losses", "head.bias"}),
    "fills a buffer": (lambda model: model.unused.zero_(), {"unused"}),
}


@pytest.mark.parametrize(("culprit", "expected"), CULPRITS.values(), ids=CULPRITS)
def test_a_training_that_was_meddled_with_is_another_one(
    culprit: Callable[[Any], object], expected: set[str]
) -> None:
    """The tests above can fail: if a step is disturbed, the comparison names the changes."""

    @contextlib.contextmanager
    def around(model: nn.Module, _x: Tensor) -> Iterator[None]:
        culprit(model)
        yield

    assert expected <= set(
        differences(train(TRAININGS["SGD"], nothing), train(TRAININGS["SGD"], around))
    )
