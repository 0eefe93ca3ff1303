"""A training that is counted or measured is the training that it would have been, to the bit."""

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
    """Momentum as one writes it by hand: what is kept for a parameter is a tensor, not a dict."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                momentum = self.state.get(parameter)
                momentum = self.state[parameter] = (
                    parameter.grad.clone()
                    if momentum is None
                    else momentum.mul_(0.9).add_(parameter.grad)
                )
                parameter.sub_(0.1 * momentum)


class NamedState(torch.optim.SGD):
    """Keeps something that belongs to no parameter beside what does."""

    def step(self, closure: None = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The step of the tutorials."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step that is given a closure, and runs it as often as it likes."""

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(run)  # type: ignore[return-value]


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Two batches for one step, clipped, and the gradients set to zero in place."""
    loss = sum(model(part).square().mean() for part in x.chunk(2))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def mixed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, optimizer, x)


def recomputed(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, reentrant: bool
) -> Tensor:
    """Under activation checkpointing, which draws the random numbers of the forward again."""
    return plain(
        lambda x: checkpoint(model, x, use_reentrant=reentrant), optimizer, x.requires_grad_()
    )  # type: ignore[arg-type]


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """What backward needs is kept elsewhere meanwhile."""
    with torch.autograd.graph.save_on_cpu():
        return plain(model, optimizer, x)


def penalised(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A gradient that is itself differentiated."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return plain(lambda x: model(x) + gradient.square().sum(), optimizer, x)  # type: ignore[arg-type]


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A copy of the model is made and moved along."""
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
    """Three steps, the second of them within something: its losses, and all that it ends with."""
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
    """What an optimizer keeps for one parameter."""
    values = list(state.values()) if isinstance(state, dict) else [state]
    return [each for each in values if isinstance(each, Tensor)]


def nothing(_model: nn.Module, _x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A step as it is."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def counted_before(model: nn.Module, x: Tensor) -> Iterator[None]:
    """A pass is counted before the step, on a batch like the step's."""
    assert lflops.count(model, x.detach(), backward=True).total()
    yield


@contextlib.contextmanager
def measured_before(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Passes are counted and timed before the step, on a batch like the step's."""
    assert lflops.measure(model, x.detach(), backward=True, warmup=1, repeats=2).total()
    yield


@contextlib.contextmanager
def watched(model: nn.Module, _x: Tensor) -> Iterator[None]:
    """The step is counted and timed at once."""
    with CountAndTime(model, overhead=NO_OVERHEAD) as watching:
        yield
    assert watching.profile.total()


@contextlib.contextmanager
def twice(model: nn.Module, _x: Tensor) -> Iterator[None]:
    """Two counts at once, the first of which ends first."""
    counts = [lflops.counting(model) for _ in range(2)]
    for count in counts:
        count.__enter__()
    yield
    for count in counts:
        count.__exit__(None, None, None)
    assert counts[0].profile.op_counts == counts[1].profile.op_counts


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_a_training_with_a_counted_step_is_the_same_training(training: Training) -> None:
    """Losses, weights, gradients, buffers, the optimizer's state and the random numbers that come next."""
    assert [] == differences(
        train(training, nothing), train(training, lambda model, x: lflops.counting(model))
    )


@pytest.mark.parametrize("around", [counted_before, measured_before, watched, twice])
@pytest.mark.parametrize("name", ["AdamW, foreach", "accumulated", "attention"])
def test_a_training_that_is_counted_in_another_way_is_the_same_training(
    around: Around, name: str
) -> None:
    """Passes between two steps, a count that takes the time as well, and two counts at once."""
    assert [] == differences(train(TRAININGS[name], nothing), train(TRAININGS[name], around))


CULPRITS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "draws a number": (
        lambda model: torch.rand(1),
        {"losses", "random numbers: torch", "head.weight", "state 0"},
    ),
    "draws from Python": (lambda model: random.random(), {"losses", "random numbers: python"}),  # noqa: S311
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
    """The comparison names what became of it."""

    @contextlib.contextmanager
    def around(model: nn.Module, _x: Tensor) -> Iterator[None]:
        culprit(model)
        yield

    assert expected <= set(
        differences(train(TRAININGS["SGD"], nothing), train(TRAININGS["SGD"], around))
    )
