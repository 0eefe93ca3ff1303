"""Describe an optimizer: its class, and whether its step uses fused or foreach kernels."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from lflops.profile.profile import OptimizerSettings


def settings_of_all(optimizers: Iterable[Optimizer]) -> tuple[OptimizerSettings, ...]:
    """Return the different settings of optimizers, those with the most parameters first."""
    largest_first = sorted(optimizers, key=_number_of_parameters, reverse=True)
    return tuple(dict.fromkeys(map(settings_of, largest_first)))


def parameters_of(optimizers: Iterable[Optimizer]) -> int | None:
    """Return the number of parameters that optimizers update; `None` if there is no optimizer.

    A parameter of several optimizers counts once.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not groups:
        return None
    sizes: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            sizes[id(parameter)] = parameter.numel()
    return sum(sizes.values())


def _number_of_parameters(optimizer: Optimizer) -> int:
    return parameters_of([optimizer]) or 0


def settings_of(optimizer: Optimizer) -> OptimizerSettings:
    """Return the class of an optimizer, and how it updates the parameters."""
    arguments = _arguments(type(optimizer))
    groups = optimizer.param_groups
    iterations = groups[0].get("max_iter") if groups else None
    return OptimizerSettings(
        class_name=type(optimizer).__name__,
        accepts_fused="fused" in arguments,
        fused=_is_set(groups, "fused"),
        accepts_foreach="foreach" in arguments,
        foreach=_is_set(groups, "foreach"),
        max_iter=iterations if type(iterations) is int else None,
    )


def _arguments(kind: type) -> Mapping[str, Any]:
    """Return the arguments of a class by name; empty if they are unknown."""
    try:
        return inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return {}


def _is_set(groups: list[dict[str, Any]], name: str) -> bool:
    """Return whether a setting is true for all groups of parameters."""
    return bool(groups) and all(group.get(name) for group in groups)
