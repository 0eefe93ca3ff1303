"""Test the description of optimizers in the profile of a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.inputs.optimizers import settings_of
from lflops.profile.profile import OptimizerSettings
from lflops.ranks.merge.batches import sum_of_batches


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("AdamW", {}, {"accepts_fused": True, "accepts_foreach": True}),
        (
            "AdamW",
            {"fused": True},
            {"accepts_fused": True, "accepts_foreach": True, "fused": True},
        ),
        ("RMSprop", {"foreach": True}, {"accepts_foreach": True, "foreach": True}),
        ("SparseAdam", {}, {}),
        ("LBFGS", {"max_iter": 4}, {"max_iter": 4}),
    ],
)
def test_an_optimizer_accepts_the_arguments_of_its_class(
    kind: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The documentation of torch says which optimizers have `fused` and `foreach`."""
    parameters = [nn.Parameter(torch.ones(2))]
    settings = settings_of(getattr(torch.optim, kind)(parameters, **arguments))
    assert OptimizerSettings(class_name=kind, **expected) == settings


def test_a_profile_has_the_optimizers_of_its_step() -> None:
    """An optimizer that makes no step is left out, and equal optimizers are listed once."""
    model = nn.Linear(2, 2)
    sgd, same, adam, idle = (
        kind(model.parameters(), lr=0.1)
        for kind in (torch.optim.SGD, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)
    )
    profiles = []
    for optimizers in ((sgd, same), (sgd, adam)):
        with lflops.counting(model) as counted:
            model(Tensor(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        profiles.append(counted.profile)
    idle.zero_grad()
    merged = sum_of_batches(profiles)
    names = []
    for profile in (*profiles, merged):
        names.append([settings.class_name for settings in profile.run.optimizers])
    assert [["SGD"], ["SGD", "Adam"], ["SGD", "Adam"]] == names
