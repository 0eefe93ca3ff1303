"""Parameters, work and time by class of module, depth by depth."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from lflops.profile.model import ModuleProfile, Profile
from lflops.profile.series import grouped, sum_known


class Kind(Struct, frozen=True, kw_only=True):
    """All modules of one class at one depth, each with what is below it; no module is in another one of the same depth."""

    kind: str
    modules: int
    parameters: int  # what this rank holds of them
    macs: int  # in forward
    seconds: float | None  # in forward, the medians added up; `None` where one that ran has none, or none ran


def by_depth(profile: Profile, depth: int = -1) -> tuple[tuple[Kind, ...], ...]:
    """The classes at depth 0, which is the root alone, at depth 1, and so on, in the model's order.

    The last depth is `depth`; -1, and anything deeper than the model, is the innermost. Less is a `ValueError`.
    """
    if depth < -1:
        raise ValueError(f"depth={depth!r}: give -1 for all depths, 0 for the model alone, or how many to go below it")
    levels = grouped((module for module in profile.modules.values() if depth == -1 or module.depth <= depth), attrgetter("depth"))
    kinds = (grouped(levels[level], attrgetter("kind")) for level in sorted(levels))
    return tuple(tuple(_kind(kind, modules) for kind, modules in by_kind.items()) for by_kind in kinds)


def most(kinds: Iterable[Kind], metric: Literal["parameters", "macs", "seconds"], number: int) -> dict[str, float]:
    """The kinds with the most of a metric, sorted; kinds for which it is unknown are left out."""
    known = [(kind.kind, value) for kind in kinds if (value := getattr(kind, metric)) is not None]
    return dict(sorted(known, key=lambda each: -each[1])[:number])


def _kind(kind: str, modules: list[ModuleProfile]) -> Kind:
    ran = [module.forward.seconds for module in modules if module.calls or module.forward.calls]
    return Kind(
        kind=kind,
        modules=len(modules),
        parameters=sum(module.local_parameters for module in modules),
        macs=sum(module.forward.macs for module in modules),
        seconds=sum_known(None if spread is None else spread.median for spread in ran) if ran else None,
    )
