"""Test that work in backward is attributed to the module that built the graph.

Backward may run several times over one graph, inside forward, through a gradient, or on another
thread.
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
from lflops.ranks.merge.batches import sum_of_batches
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
    """Run two forward passes, then their backward passes in reverse order, on another thread."""
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
    """Two graphs that exist at once are not confused.

    Each layer has twice the MACs of one pass.
    """
    profile = run(projections_with_backward_elsewhere)
    assert dict.fromkeys(("stem", "q", "k"), 2 * square) == macs(profile, "forward")
    assert {"stem": 2 * square, "q": 4 * square, "k": 4 * square} == macs(profile, "backward")


class Energy(nn.Module):
    """A model whose output is the gradient of a scalar, computed inside forward.

    Both layers are linear, so the MACs are easy to compute by hand.
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
    """A gradient that is computed inside forward is backward of the layers that it passes.

    It is a gradient only of the input, so each layer has one matmul. The layer after it is forward
    again.
    """
    profile = lflops.count(Energy(), sequence())
    assert {"up": up, "out": tokens * wide, "mix": square} == macs(profile, "forward")
    assert {"up": up, "out": tokens * wide} == macs(profile, "backward")


def test_going_backward_through_a_gradient_belongs_to_the_same_modules() -> None:
    """Backward through a gradient belongs to the layers that the gradient passes.

    The force is g W with g = 2 (x W^T) v. Backward has two matmuls through `mix`, and two through g
    W, for g and W. The other factor of g is the weight of `out` times ones, which has one matmul
    for its own weight. x W^T has two more matmuls: the gradient of the input is needed, because the
    input is a leaf that requires a gradient.
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
    """Return the squared gradient of the model's output with respect to its input.

    `backward` runs the function that computes the gradient, possibly on another thread.
    """
    y = model(x).sum()
    (gradient,) = backward(lambda: torch.autograd.grad(y, x, create_graph=True))
    return gradient.square().sum()


critic_forward = {"up": up, "out": tokens * wide}
# The gradient of the input has one matmul in each layer. Backward through these two matmuls has two
# in `up`, but only one in `out`, whose other factor is ones. Backward then continues through tanh
# to the input and the weight of `up`, with two more matmuls.
critic_backward = {
    "up": up + 2 * up + 2 * up,
    "out": tokens * wide + tokens * wide,
}


def test_a_gradient_penalty_is_all_backward() -> None:
    """The gradient of the input, and the backward pass through it, belong to the layers."""
    model = Critic()
    with lflops.counting(model) as counted:
        penalty(model, sequence(requires_grad=True), lambda run: run()).backward()
    assert critic_forward == macs(counted.profile, "forward")
    assert critic_backward == macs(counted.profile, "backward")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_profile_says_whether_the_step_takes_derivatives() -> None:
    """A gradient that is returned, or that can be differentiated again, is a derivative.

    The gradients that backward writes to parameters are none. In a step of several batches, one
    batch with a derivative is enough.
    """

    def counted(backward: Callable[[Tensor, Tensor], Any]) -> Profile:
        x = sequence(requires_grad=True)
        model = Critic()
        with lflops.counting(model) as counting:
            backward(model(x).sum(), x)
        return counting.profile

    backward = counted(lambda y, _x: y.backward())
    gradient = counted(torch.autograd.grad)
    graph = counted(lambda y, x: torch.autograd.backward(y, inputs=[x], create_graph=True))
    found = [profile.run.takes_derivatives for profile in (backward, gradient, graph)]
    assert [False, True, True] == found
    assert sum_of_batches([gradient, backward]).run.takes_derivatives
    assert not sum_of_batches([backward, backward]).run.takes_derivatives


def gradient_penalty_elsewhere() -> Profile:
    """Run the forward passes on this thread, and both backward passes on another thread."""
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
    """The counts are the same if backward runs on another thread.

    The graph of the gradient is built there, with the node numbers of that thread.
    """
    profile = run(gradient_penalty_elsewhere)
    assert critic_forward == macs(profile, "forward")
    assert critic_backward == macs(profile, "backward")


def critics_step(executor: ThreadPoolExecutor, *, ahead: int) -> Profile:
    """Run the training step of a critic: real samples, generated samples, and the penalty.

    Backward runs on the thread of the executor. Before the step, that thread has created `ahead`
    more autograd nodes than this thread.
    """
    model = Critic()
    weight = torch.ones(1, requires_grad=True)
    start = torch.autograd._get_sequence_nr()

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
    """A critic's step is attributed correctly if its backward passes run on another thread.

    In backward, each of the two plain passes adds one matmul of `up` and two of `out`.
    """
    with ThreadPoolExecutor(1) as executor:
        profile = critics_step(executor, ahead=ahead)
    assert critics_step_forward == macs(profile, "forward")
    assert critics_step_backward == macs(profile, "backward")
    assert () == profile.notes


@pytest.mark.parametrize("ahead", range(-40, 41, 8))
def test_where_numbers_of_two_threads_meet_the_rows_are_right_or_the_profile_says_so(
    ahead: int,
) -> None:
    """If nodes of two threads share numbers, the counts are correct or a note reports it.

    The total is always correct. Work whose module is ambiguous belongs to the root.
    """
    with ThreadPoolExecutor(1) as executor:
        profile = critics_step(executor, ahead=ahead)
    actual = macs(profile, "backward")
    assert sum(critics_step_backward.values()) == sum(actual.values())
    notes = [note.code for note in profile.notes]
    assert critics_step_backward == actual or notes == ["ambiguous_threads"]


def test_a_retained_graph_costs_the_same_every_time() -> None:
    """Three backward passes over one graph have three times the matmuls of one pass."""
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
    """The backward of a graph that was built before the count belongs to the root."""
    model = nn.Sequential(nn.Linear(hidden, hidden))
    y = model(sequence()).sum()
    with lflops.counting(model) as counted:
        y.backward()
    assert {"": square} == macs(counted.profile, "backward")


@pytest.mark.parametrize("per_sample", [False, True])
def test_gradients_of_a_function_belong_to_the_modules_in_it(per_sample: bool) -> None:
    """Gradients of `torch.func` belong to the modules that the function calls.

    The model is called as a function of its parameters. Gradients per sample, with `vmap`, have the
    same work.
    """
    model = Block()
    x = sequence()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    gradient = torch.func.grad(loss)
    if per_sample:
        gradient = torch.func.vmap(gradient, in_dims=(None, 0))
    with lflops.counting(model) as counted:
        gradient(parameters, x)
    assert {"up": up, "down": down} == macs(counted.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(counted.profile, "backward")


def test_a_users_backward_hook_belongs_to_its_module() -> None:
    """A matmul in a user's backward hook belongs to the module with the hook, in backward.

    All other counts are as without the hook.
    """
    model = between_linears(Block())
    weight = torch.randn(hidden, hidden)
    model[1].register_full_backward_hook(
        lambda _module, to_input, _to_output: (to_input[0] @ weight,)
    )
    profile = lflops.count(model, sequence(), backward=True)
    assert {"0": square, "1.up": up, "1.down": down, "2": square} == macs(profile, "forward")
    assert {"0": square, "1": square, "1.up": 2 * up, "1.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
