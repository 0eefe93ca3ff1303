"""Which modules are alike, all the way down: such neighbours need only one row."""

from collections.abc import Mapping
from typing import Any

from lflops.profile.model import COUNTS, PHASES, ModuleProfile, Profile

__all__ = ["identical_subtrees"]

_COMPARED = (*COUNTS, *(f"own_{count}" for count in COUNTS), "logical_macs", "own_logical_macs")
_FACTS = (
    "kind",
    "calls",
    "compiled",
    "parameters",
    "trainable_parameters",
    "parameter_bytes",
    "trainable_parameter_bytes",
    "own_parameters",
    "local_parameters",
    "local_parameter_bytes",
)


def identical_subtrees(profile: Profile, below: Mapping[str, list[str]]) -> dict[str, int]:
    """A number for each module: the same for two of them where all counts are, with the same labels and counts below."""
    numbers: dict[str, int] = {}
    seen: dict[Any, int] = {}
    for name in sorted(profile.modules, key=len, reverse=True):  # the longer first, so that those below come before those above
        children = tuple((child.rpartition(".")[2], numbers[child]) for child in below[name])
        numbers[name] = seen.setdefault((_counts(profile.modules[name]), children), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    """All that makes two modules alike: neither the times, nor the peak, in which each one differs by when it runs."""
    works = (getattr(module.work(phase), field) for phase in PHASES for field in _COMPARED)
    dtypes = ((dtype, share.parameters, share.bytes) for dtype, share in sorted(module.dtypes.items()))
    facts = (getattr(module, field) for field in _FACTS)
    return (module.owner is None, *facts, *dtypes, *works)
