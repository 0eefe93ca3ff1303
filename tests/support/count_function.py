"""Wrap a function as a model, and count it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lflops
from lflops.profile.profile import OpCount, Profile
from lflops.profile.records import PHASES, Phase


class Function(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def of(*shape: int) -> Tensor:
    """A tensor that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def fixed(*shape: int) -> Tensor:
    """A tensor that wants none."""
    return torch.randn(*shape)


def count(function: Callable[..., Any], *args: Any, backward: bool = False) -> Profile:
    """The profile of one call, in which no formula failed."""
    profile = lflops.count(Function(function), args, backward=backward)
    assert () == profile.notes
    return profile


def macs(profile: Profile) -> dict[Phase, int]:
    """MACs by phase; phases without any are left out."""
    return _by_phase(profile, "macs")


def executed(profile: Profile) -> dict[Phase, int]:
    """The same of executed MACs."""
    return _by_phase(profile, "executed_macs")


def flops(profile: Profile) -> dict[Phase, int]:
    """The same of FLOPs."""
    return _by_phase(profile, "flops")


def operators(profile: Profile, phase: Phase = "forward") -> set[str]:
    """The names of those that multiply."""
    return {cell.operator for cell in profile.op_counts if cell.phase == phase and cell.macs}


def the_cell(profile: Profile, operator: str, phase: Phase = "forward") -> OpCount:
    """The one cell of an operator."""
    (cell,) = (
        cell for cell in profile.op_counts if cell.operator == operator and cell.phase == phase
    )
    return cell


def _by_phase(profile: Profile, figure: str) -> dict[Phase, int]:
    sums = {phase: int(getattr(profile.modules[""].work(phase), figure)) for phase in PHASES}
    return {phase: value for phase, value in sums.items() if value}
