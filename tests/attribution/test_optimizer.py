"""Test that the work of an optimizer's step belongs to the modules that own the parameters.

Other work around the step, such as clipping, is not attributed to the optimizer.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import lflops
from lflops import Profile
from tests.support.profile_checks import consistent, flops, macs
from tests.support.small_models import (
    Block,
    Projections,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)

up_elements = hidden * wide + wide
down_elements = wide * hidden + hidden
tensors = 2
"""Number of tensors in a linear layer: weight and bias."""

# The three implementations of an optimizer's step in torch.
KERNELS = {"one by one": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}
kernels = pytest.mark.parametrize("kernel", KERNELS)
first_or_later = pytest.mark.parametrize("steps_before", [0, 2])


def counted_step(model: nn.Module, optimizer: Optimizer, *, steps_before: int = 0) -> Profile:
    """Count a whole step, after some uncounted steps."""
    for _ in range(steps_before):
        model(sequence()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with lflops.counting(model) as counted:
        model(sequence()).sum().backward()
        optimizer.step()
    return counted.profile


def moved(profile: Profile, operator: str) -> dict[str, int]:
    """Return the bytes that an operator moves in the optimizer's phase, by module."""
    return {
        cell.module: cell.bytes_moved
        for cell in profile.op_counts
        if (cell.operator, cell.phase) == (operator, "optimizer")
    }


@first_or_later
@kernels
def test_plain_descent_is_one_operation_an_element(kernel: str, steps_before: int) -> None:
    """SGD has one operation per element in the module of the parameter.

    The operation is a scaled subtraction.
    """
    model = Block()
    profile = counted_step(
        model, SGD(model.parameters(), lr=0.1, **KERNELS[kernel]), steps_before=steps_before
    )
    assert {"up": up_elements, "down": down_elements} == flops(profile, "optimizer")
    assert {} == macs(profile, "optimizer")


@first_or_later
@kernels
def test_momentum_and_decay_are_three_more(kernel: str, steps_before: int) -> None:
    """Weight decay and momentum add three operations per element to SGD.

    Weight decay is one operation, and the running average is two. In the first step, the average is
    a copy instead, which is no operation.
    """
    model = Block()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **KERNELS[kernel])
    profile = counted_step(model, optimizer, steps_before=steps_before)
    operations = 4 if steps_before else 2
    assert {"up": operations * up_elements, "down": operations * down_elements} == flops(
        profile, "optimizer"
    )


@pytest.mark.parametrize("kernel", ["one by one", "lists"])
def test_the_first_steps_copies_are_their_parameters_owners(kernel: str) -> None:
    """The copies in the first step belong to the modules that own the parameters.

    The momentum begins as a copy of the gradient: four bytes per element are read, and four are
    written.
    """
    model = Block()
    profile = counted_step(
        model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **KERNELS[kernel])
    )
    assert {"up": 2 * 4 * up_elements, "down": 2 * 4 * down_elements} == moved(profile, "clone")


@first_or_later
@kernels
def test_adamw_is_eleven_operations_an_element(kernel: str, steps_before: int) -> None:
    """AdamW has 11 operations per element.

    Weight decay is 1, the two averages are 2 and 3, the root, the division and the addition are 1
    each, and the update is 2. In addition, each tensor counts its steps, with one operation.
    """
    model = Block()
    profile = counted_step(
        model, AdamW(model.parameters(), **KERNELS[kernel]), steps_before=steps_before
    )
    assert {"up": 11 * up_elements + tensors, "down": 11 * down_elements + tensors} == flops(
        profile, "optimizer"
    )


@first_or_later
@kernels
def test_groups_of_equal_length_keep_their_owners(kernel: str, steps_before: int) -> None:
    """The parameters of two groups with the same length keep their modules.

    Each list alternates between the modules. Weights have decay, with 11 operations per element.
    Biases have none, with 10.
    """
    model = Block()
    groups = [
        {"params": [model.up.weight, model.down.weight], "weight_decay": 0.1},
        {"params": [model.down.bias, model.up.bias], "weight_decay": 0.0},
    ]
    profile = counted_step(model, AdamW(groups, **KERNELS[kernel]), steps_before=steps_before)
    weight = 11 * hidden * wide
    assert {"up": weight + 10 * wide + tensors, "down": weight + 10 * hidden + tensors} == flops(
        profile, "optimizer"
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_what_a_step_makes_of_a_parameter_belongs_with_it() -> None:
    """Matmuls of an optimizer belong to the module of the parameter that they update.

    For a matrix of n x m with the smaller side n, Muon computes three matmuls five times: n x n x
    m, n x n x n and n x n x m.
    """
    model = nn.Sequential(nn.Linear(hidden, wide, bias=False), nn.Linear(wide, wide, bias=False))
    profile = counted_step(model, torch.optim.Muon(model.parameters()))
    small = 5 * (hidden * hidden * wide + hidden**3 + hidden * hidden * wide)
    large = 5 * (wide**3 + wide**3 + wide**3)
    assert {"0": small, "1": large} == macs(profile, "optimizer")


@kernels
def test_two_optimizers_and_a_parameter_of_nobody(kernel: str) -> None:
    """If a model has two optimizers, each has the work of the modules that it updates.

    A parameter that belongs to no module belongs to the root. A module without an optimizer has no
    optimizer work.
    """
    model = Projections()
    loose = nn.Parameter(torch.randn(hidden))
    first = SGD([*model.q.parameters(), loose], lr=0.1, **KERNELS[kernel])
    second = SGD(model.k.parameters(), lr=0.1, **KERNELS[kernel])
    with lflops.counting(model) as counted:
        (model(sequence()) * loose).sum().backward()
        first.step()
        second.step()
    weights = hidden * hidden + hidden
    assert {"": hidden, "q": weights, "k": weights} == flops(counted.profile, "optimizer")


# LBFGS in torch 2.8 causes this warning itself.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_closure_is_not_part_of_the_step() -> None:
    """Forward and backward in a closure are counted as forward and backward, as often as they run.

    The matmuls of LBFGS itself are only the dot products of its directions.
    """
    model = Block()
    optimizer = LBFGS(model.parameters(), max_iter=3)
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(sequence()).square().mean()
        loss.backward()
        evaluations.append(loss)
        return loss

    with lflops.counting(model) as counted:
        optimizer.step(closure)
    assert {"up": len(evaluations) * up, "down": len(evaluations) * down} == macs(
        counted.profile, "forward"
    )
    assert {"up": len(evaluations) * up, "down": len(evaluations) * 2 * down} == macs(
        counted.profile, "backward"
    )
    assert {"dot"} == {
        cell.operator
        for cell in counted.profile.op_counts
        if cell.phase == "optimizer" and cell.macs
    }


@pytest.mark.parametrize(
    "give",
    [lambda step, closure: step(closure), lambda step, closure: step(closure=closure)],
    ids=["place", "name"],
)
def test_a_closure_may_be_given_by_place_or_by_name(give: Callable[..., None]) -> None:
    """The work of the step is only the update, for a positional and for a keyword closure."""
    model = Block()
    optimizer = SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as counted:
        give(optimizer.step, lambda: model(sequence()).sum().backward())
    assert {"up": up, "down": down} == macs(counted.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(counted.profile, "backward")
    assert {"up": up_elements, "down": down_elements} == flops(counted.profile, "optimizer")


def test_clipping_and_zeroing_are_neither_the_models_nor_the_optimizers() -> None:
    """Gradient clipping and zeroing belong to the phase other.

    Clipping computes a norm of every gradient, with two operations per element, and a norm of these
    norms. Four operations on a single number follow, and one multiplication per element. Zeroing
    writes four bytes per element.
    """
    model = Block()
    optimizer = SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as counted:
        model(sequence()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    elements = up_elements + down_elements
    assert {"": 2 * elements + 2 * 2 * tensors + 4 + elements} == flops(counted.profile, "other")
    assert {"up": up_elements, "down": down_elements} == flops(counted.profile, "optimizer")
    zeroed = {
        cell.phase: cell.bytes_moved
        for cell in consistent(counted.profile).op_counts
        if cell.operator == "zero_"
    }
    assert {"other": 4 * elements} == zeroed


def test_the_next_steps_loss_is_forward_again() -> None:
    """In each of two steps, the loss outside the model belongs to forward.

    Work without gradients after the optimizer's step, here an average of weights, belongs to the
    phase other.
    """
    model = Block()
    optimizer = SGD(model.parameters(), lr=0.1)
    mean = torch.zeros(hidden * wide)
    with lflops.counting(model) as counted:
        for _ in range(2):
            model(sequence()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                mean.lerp_(model.up.weight.flatten(), 0.1)
    assert {
        "": 2 * (2 * tokens * hidden + tokens * wide),
        "up": 2 * (2 * up + tokens * wide),
        "down": 2 * (2 * down + tokens * hidden),
    } == flops(counted.profile, "forward")
    assert {"": 2 * 2 * hidden * wide} == flops(counted.profile, "other")


def test_accumulating_a_gradient_is_its_owners() -> None:
    """Adding to an existing gradient is one operation per element, in the module that owns it."""
    model = Block()
    with lflops.counting(model) as once:
        model(sequence()).sum().backward()
    with lflops.counting(model) as again:
        model(sequence()).sum().backward()
    first = flops(once.profile, "backward")
    second = flops(again.profile, "backward")
    assert first["up"] + up_elements == second["up"]
    assert first["down"] + down_elements == second["down"]


def test_a_step_that_raises_is_over() -> None:
    """If a step raises, the work after it does not belong to the optimizer."""
    model = nn.Linear(hidden, hidden)
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        raise ValueError("no loss")

    with lflops.counting(model) as counted:
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(closure)
        model(sequence()).square().sum().backward()
    assert {} == flops(counted.profile, "optimizer")
    assert {"": 2 * square + tokens * hidden + 2 * tokens * hidden} == flops(
        counted.profile, "forward"
    )


def test_a_step_within_backward_is_the_optimizers() -> None:
    """An optimizer's step that a hook runs during backward belongs to the optimizer.

    Training loops that save memory update each parameter as soon as it has its gradient.
    """
    model = Block()
    optimizers = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with lflops.counting(model) as counted:
        model(sequence()).sum().backward()
    assert {"up": up_elements, "down": down_elements} == flops(counted.profile, "optimizer")
    assert {
        "": tokens * wide,
        "up": 2 * up + tokens * wide,
        "down": 4 * down + tokens * hidden,
    } == flops(counted.profile, "backward")


class WholeStep(nn.Module):
    """A module whose forward runs a whole training step."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.optimizer = SGD(self.block.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> None:
        self.block(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_step_within_forward_is_the_optimizers() -> None:
    """Backward and the optimizer's step inside the forward of a module belong to their own phases.

    Lightning calls `training_step` in place of forward; with manual optimization, it runs the whole
    step.
    """
    model = WholeStep()
    with lflops.counting(model) as counted:
        model(sequence())
    assert {"block.up": up, "block.down": down} == macs(counted.profile, "forward")
    assert {"block.up": up, "block.down": 2 * down} == macs(counted.profile, "backward")
    assert {"block.up": up_elements, "block.down": down_elements} == flops(
        counted.profile, "optimizer"
    )


def test_scaling_the_loss_is_forward_and_scaling_back_is_other() -> None:
    """Scaling the loss is one multiplication in forward.

    Unscaling is one reciprocal and one multiplication per element in the phase other. The
    optimizer's step is the same as without a scaler.
    """
    model = Block()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with lflops.counting(model) as counted:
        scaler.scale(model(sequence()).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert tokens * wide + tokens * hidden + 1 == flops(counted.profile, "forward")[""]
    assert {"": 1 + up_elements + down_elements} == flops(counted.profile, "other")
    assert {"up": up_elements, "down": down_elements} == flops(counted.profile, "optimizer")


def test_a_step_after_an_interrupted_one_is_whole() -> None:
    """After an interrupt in forward that was caught, a whole step is attributed as usual."""
    model = nn.Sequential(Block(), nn.Linear(hidden, hidden))
    interrupt = model[1].register_forward_pre_hook(raise_interrupt)
    optimizer = SGD(model.parameters(), lr=0.1)
    with lflops.counting(model) as counted:
        with pytest.raises(KeyboardInterrupt):
            model(sequence())
        interrupt.remove()
        model(sequence()).square().sum().backward()
        optimizer.step()
    assert {"0.up": 2 * up, "0.down": 2 * down, "1": square} == macs(counted.profile, "forward")
    assert 2 * tokens * hidden == flops(counted.profile, "forward")[""]
    weights = hidden * hidden + hidden
    assert {"0.up": up_elements, "0.down": down_elements, "1": weights} == flops(
        counted.profile, "optimizer"
    )


def raise_interrupt(*_: object) -> None:
    """Raise the exception of Ctrl-C."""
    raise KeyboardInterrupt
