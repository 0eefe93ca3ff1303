"""Whose work backward is.

Twice over one graph, within forward, through a gradient, and on a thread of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops import Profile
from tests.support.processes import anywhere, as_a_device_would
from tests.support.profile_checks import macs
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)


def projections_with_backward_elsewhere() -> Profile:
    """Two forward passes first, then their backward passes, the second one first."""
    model = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("stem", "q", "k")})
    with ThreadPoolExecutor(1) as device, lflops.counting(model) as counted:
        losses = []
        for _ in range(2):
            x = model["stem"](sequence())
            losses.append((model["q"](x) + model["k"](x)).sum())
        for loss in reversed(losses):
            as_a_device_would(device, loss.backward)
    return counted.profile


@anywhere
def test_two_graphs_alive_at_once_are_told_apart(run: Any) -> None:
    """Each row costs twice what it does in one pass."""
    profile = run(projections_with_backward_elsewhere)
    assert dict.fromkeys(("stem", "q", "k"), 2 * square) == macs(profile, "forward")
    assert {"stem": 2 * square, "q": 4 * square, "k": 4 * square} == macs(profile, "backward")


class Energy(nn.Module):
    """A potential: its output is the gradient of a scalar, taken inside of forward.

    Both layers are linear, so that the sums are short.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide, bias=False)
        self.out = nn.Linear(wide, 1, bias=False)
        self.mix = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.out(self.up(x).square()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.mix(force)


def test_a_gradient_within_forward_is_backward_of_what_it_goes_through() -> None:
    """To the input alone: one product a layer. What comes after it is forward again."""
    profile = lflops.count(Energy(), sequence())
    assert {"up": up, "out": tokens * wide, "mix": square} == macs(profile, "forward")
    assert {"up": up, "out": tokens * wide} == macs(profile, "backward")


def test_going_backward_through_a_gradient_belongs_to_the_same_modules() -> None:
    """The force is g W with g = 2 (x W^T) v.

    Through `mix` two products; through g W two (for g and W); g's other factor is `out`'s weight
    times ones, which has one product to its own weight; x W^T gives two more, of which the input's
    gradient is wanted as well since the input is a leaf that requires one.
    """
    profile = lflops.count(Energy(), sequence(), backward=True)
    inside = {"up": up, "out": tokens * wide}
    outside = {"mix": 2 * square, "up": 2 * up + 2 * up, "out": tokens * wide}
    assert {row: inside.get(row, 0) + outside[row] for row in outside} == macs(profile, "backward")
    assert {} == macs(profile, "recompute")


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide)
        self.out = nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.up(x)))


def penalty(model: nn.Module, x: Tensor, backward: Callable[[Callable[[], Any]], Any]) -> Tensor:
    """The squared gradient of the model's output to its input."""
    y = model(x).sum()
    (gradient,) = backward(lambda: torch.autograd.grad(y, x, create_graph=True))
    return gradient.square().sum()


critic_forward = {"up": up, "out": tokens * wide}
critic_backward = {
    # the gradient; through its two products, each two but the one that begins at ones; and on
    # through tanh to x and W
    "up": up + 2 * up + 2 * up,
    "out": tokens * wide + tokens * wide,
}


def test_a_gradient_penalty_is_all_backward() -> None:
    """The gradient to the input, and the way back through it, are the modules' own."""
    model = Critic()
    with lflops.counting(model) as counted:
        penalty(model, sequence(requires_grad=True), lambda run: run()).backward()
    assert critic_forward == macs(counted.profile, "forward")
    assert critic_backward == macs(counted.profile, "backward")


def gradient_penalty_elsewhere() -> Profile:
    """Both backward passes on another thread; the forward passes here."""
    model = Critic()
    with ThreadPoolExecutor(1) as device, lflops.counting(model) as counted:
        x = sequence(requires_grad=True)
        y = model(x).sum()
        (gradient,) = as_a_device_would(
            device, lambda: torch.autograd.grad(y, x, create_graph=True)
        )
        loss = gradient.square().sum()
        as_a_device_would(device, loss.backward)
    return counted.profile


@anywhere
def test_a_gradient_penalty_on_a_device_thread_is_the_same(run: Any) -> None:
    """The gradient's own graph is built there, with that thread's numbers."""
    profile = run(gradient_penalty_elsewhere)
    assert critic_forward == macs(profile, "forward")
    assert critic_backward == macs(profile, "backward")


def critics_step(executor: ThreadPoolExecutor, *, ahead: int) -> Profile:
    """The step of a critic: on real and made-up samples, and the penalty.

    The other thread has built so many more nodes than this.
    """
    model, weight, start = (
        Critic(),
        torch.ones(1, requires_grad=True),
        torch.autograd._get_sequence_nr(),
    )

    def build_up_to(number: int) -> None:
        while torch.autograd._get_sequence_nr() < number:
            weight.add(1)

    build_up_to(start + max(0, -ahead))
    executor.submit(build_up_to, torch.autograd._get_sequence_nr() + ahead).result()
    with lflops.counting(model) as counted:
        difference = model(sequence()).sum() - model(sequence()).sum()
        x = sequence(requires_grad=True)
        loss = difference + penalty(model, x, partial(as_a_device_would, executor))
        as_a_device_would(executor, loss.backward)
    return counted.profile


critics_step_forward = {row: 3 * cost for row, cost in critic_forward.items()}
critics_step_backward = {
    "up": 2 * up + critic_backward["up"],
    "out": 2 * 2 * tokens * wide + critic_backward["out"],
}


@pytest.mark.parametrize("ahead", [-1000, 1000])
def test_a_critics_step_keeps_its_rows_on_a_device_thread(ahead: int) -> None:
    """The two plain passes add a product of `up` and two of `out` each."""
    with ThreadPoolExecutor(1) as executor:
        profile = critics_step(executor, ahead=ahead)
    assert critics_step_forward == macs(profile, "forward")
    assert critics_step_backward == macs(profile, "backward")
    assert () == profile.notes


@pytest.mark.parametrize("ahead", range(-40, 41, 8))
def test_where_numbers_of_two_threads_meet_the_rows_are_right_or_the_profile_says_so(
    ahead: int,
) -> None:
    """Nothing of the total is lost.

    What cannot be told apart is the root's, and there is a note of it.
    """
    with ThreadPoolExecutor(1) as executor:
        profile = critics_step(executor, ahead=ahead)
    actual = macs(profile, "backward")
    assert sum(critics_step_backward.values()) == sum(actual.values())
    assert critics_step_backward == actual or ["ambiguous_threads"] == [
        note.code for note in profile.notes
    ]


def test_a_retained_graph_costs_the_same_every_time() -> None:
    """Three passes over one graph: three times the products of one."""
    model = between_linears(Block())
    with lflops.counting(model) as counted:
        y = model(sequence()).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        torch.autograd.grad(y, list(model.parameters()))
    assert {"0": square, "1.up": up, "1.down": down, "2": square} == macs(
        counted.profile, "forward"
    )
    assert {"0": 3 * square, "1.up": 6 * up, "1.down": 6 * down, "2": 6 * square} == macs(
        counted.profile, "backward"
    )


def test_a_graph_from_before_is_the_roots() -> None:
    """What was built while nobody counted has no row.

    Its backward is counted where no module is named.
    """
    model = nn.Sequential(nn.Linear(hidden, hidden))
    y = model(sequence()).sum()
    with lflops.counting(model) as counted:
        y.backward()
    assert {"": square} == macs(counted.profile, "backward")


@pytest.mark.parametrize("per_sample", [False, True])
def test_gradients_of_a_function_belong_to_the_modules_in_it(per_sample: bool) -> None:
    """Of a model called as a function of its parameters; one sample at a time it is the same work."""
    model, x = Block(), sequence()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    gradient = torch.func.grad(loss)
    with lflops.counting(model) as counted:
        (torch.func.vmap(gradient, in_dims=(None, 0)) if per_sample else gradient)(parameters, x)
    assert {"up": up, "down": down} == macs(counted.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(counted.profile, "backward")


def test_a_users_backward_hook_belongs_to_its_module() -> None:
    """A product in it is the module's own, in backward; nothing else moves."""
    model, weight = between_linears(Block()), torch.randn(hidden, hidden)
    model[1].register_full_backward_hook(
        lambda _module, to_input, _to_output: (to_input[0] @ weight,)
    )
    profile = lflops.count(model, sequence(), backward=True)
    assert {"0": square, "1.up": up, "1.down": down, "2": square} == macs(profile, "forward")
    assert {"0": square, "1": square, "1.up": 2 * up, "1.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
