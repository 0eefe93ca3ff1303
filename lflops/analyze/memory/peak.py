"""A step's live memory: when it is at its peak, and who holds it then."""

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from lflops.profile.model import Allocation, Memory, Moment
from lflops.profile.queries import pattern
from lflops.profile.records import Phase

__all__ = ["Holder", "Storages", "alike", "holders", "peak_moment"]


class Holder(Struct, frozen=True, kw_only=True):
    """A module, or all of them whose names differ in numbers alone, as `layers.*.mlp`, and the bytes that they made or own."""

    name: str
    modules: int
    bytes: int


class Storages(Struct, frozen=True, kw_only=True):
    """Storages alike in size and in how they were made, of one module or of those whose names differ in numbers alone."""

    category: str
    operator: str
    phase: Phase
    module: str
    number: int
    each_bytes: int


def alike(alive: Iterable[Allocation]) -> tuple[Storages, ...]:
    """Storages with those together that are alike, the largest first."""
    together: dict[tuple[str, str, Phase, str, int], list[str]] = {}
    for each in alive:
        together.setdefault((each.category, each.operator, each.phase, pattern(each.module), each.bytes), []).append(each.module)
    found = [
        Storages(category=category, operator=operator, phase=phase, module=_named(shape, modules), number=len(modules), each_bytes=nbytes)
        for (category, operator, phase, shape, nbytes), modules in together.items()
    ]
    return tuple(sorted(found, key=lambda storages: -storages.each_bytes))


def holders(by_module: Mapping[str, int]) -> tuple[Holder, ...]:
    """Those that hold anything, the most first."""
    together: dict[str, dict[str, int]] = {}
    for module, nbytes in by_module.items():
        if nbytes:
            together.setdefault(pattern(module), {})[module] = nbytes
    found = [Holder(name=_named(shape, parts), modules=len(parts), bytes=sum(parts.values())) for shape, parts in together.items()]
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


def peak_moment(memory: Memory) -> Moment | None:
    """The operator that reached the peak, and what was alive before it ran; `None` where an older file does not say which it is."""
    if any(moment.index is not None for moment in memory.timeline):
        return next((moment for moment in memory.timeline if moment.index == memory.peak_index), None)
    found = memory.timeline[memory.peak_index] if memory.peak_index < len(memory.timeline) else None
    return found if found is not None and found.live_bytes <= memory.peak_bytes else None


def _named(shape: str, modules: Collection[str]) -> str:
    return shape if len(set(modules)) > 1 else next(iter(modules))
