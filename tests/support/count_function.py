"""Wrap a function as a model, count it, and read single figures of its profile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lflops
from lflops.profile.profile import OpCount, Profile
from lflops.profile.records import PHASES, Phase


class Function(nn.Module):
    """A model without submodules that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def of(*shape: int) -> Tensor:
    """Return a random tensor that requires a gradient."""
    return torch.randn(*shape, requires_grad=True)


def fixed(*shape: int) -> Tensor:
    """Return a random tensor that requires no gradient."""
    return torch.randn(*shape)


def count(function: Callable[..., Any], *args: Any, backward: bool = False) -> Profile:
    """Count one call of a function, and check that the profile has no notes."""
    profile = lflops.count(Function(function), args, backward=backward)
    assert () == profile.notes
    return profile


def macs(profile: Profile) -> dict[Phase, int]:
    """Return the MACs by phase, without phases that have none."""
    return _by_phase(profile, "macs")


def executed(profile: Profile) -> dict[Phase, int]:
    """Return the executed MACs by phase, without phases that have none."""
    return _by_phase(profile, "executed_macs")


def flops(profile: Profile) -> dict[Phase, int]:
    """Return the FLOPs by phase, without phases that have none."""
    return _by_phase(profile, "flops")


def operators(profile: Profile, phase: Phase = "forward") -> set[str]:
    """Return the names of the operators with MACs in a phase."""
    return {cell.operator for cell in profile.op_counts if cell.phase == phase and cell.macs}


def the_cell(profile: Profile, operator: str, phase: Phase = "forward") -> OpCount:
    """Return the only op count of an operator in a phase."""
    in_phase = [cell for cell in profile.op_counts if cell.phase == phase]
    (found,) = [cell for cell in in_phase if cell.operator == operator]
    return found


def _by_phase(profile: Profile, figure: str) -> dict[Phase, int]:
    model = profile.modules[""]
    found = {}
    for phase in PHASES:
        value = int(getattr(model.work(phase), figure))
        if value:
            found[phase] = value
    return found
