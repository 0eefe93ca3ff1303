"""The peak of a step's live memory: the operator that reached it, and the modules that hold it."""

from collections.abc import Mapping

from msgspec import Struct

from lflops.profile.model import Memory, Moment
from lflops.profile.module_names import fold_repeats
from lflops.profile.records import Phase


class Holder(Struct, frozen=True, kw_only=True):
    """A module, or modules that repeat at one place, as `layers.*.mlp`, and the bytes that they made or own."""

    name: str
    modules: int
    bytes: int


class Storages(Struct, frozen=True, kw_only=True):
    """Storages of the same size and origin, of one module or of modules that repeat at one place."""

    category: str
    operator: str
    phase: Phase
    module: str
    pattern: str
    number: int
    each_bytes: int


def fold_storages(memory: Memory, patterns: Mapping[str, str]) -> tuple[Storages, ...]:
    """Storages, those of repeated modules together, the largest first."""
    held = {module: label for label, modules in _folded(memory, patterns) for module, _ in modules}
    folded = fold_repeats(memory.alive, lambda each: (each.module, each.category, each.operator, each.phase, each.bytes), patterns)
    rows = [
        Storages(
            pattern=held.get(first.module, first.module),
            category=first.category,
            operator=first.operator,
            phase=first.phase,
            module=label,
            number=1 + len(more),
            each_bytes=first.bytes,
        )
        for label, (first, *more) in folded
    ]
    return tuple(sorted(rows, key=lambda storages: -storages.each_bytes))


def holders(memory: Memory, patterns: Mapping[str, str]) -> tuple[Holder, ...]:
    """Modules that hold any bytes, repeated ones together, the most bytes first."""
    rows = [Holder(name=label, modules=len(items), bytes=sum(nbytes for _, nbytes in items)) for label, items in _folded(memory, patterns)]
    return tuple(sorted(rows, key=lambda holder: -holder.bytes))


def _folded(memory: Memory, patterns: Mapping[str, str]) -> list[tuple[str, list[tuple[str, int]]]]:
    return fold_repeats(((module, nbytes) for module, nbytes in memory.by_module.items() if nbytes), lambda item: item[:1], patterns)


def peak_moment(memory: Memory) -> Moment | None:
    """The operator that reached the peak, and what was alive before it ran; `None` where the timeline does not have it."""
    return next((moment for moment in memory.timeline if moment.index == memory.peak_index), None)
