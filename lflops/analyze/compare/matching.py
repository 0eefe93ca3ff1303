"""Which module of one run is which of another, across wrappers and renames."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lflops.profile.model import Profile

__all__ = ["ModuleNode", "Pair", "matched"]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"})
"""Names under which DDP, FSDP, torch.compile, checkpointing and Lightning's Fabric register the one module that they wrap."""

_Key = Callable[["ModuleNode"], Hashable]


@dataclass(eq=False)
class ModuleNode:
    """A row of a profile, with those that wrap it: from outside they are one module.

    Attributes:
        names: Its rows, the outermost first.
        label: The last part of its name.
        kind: The class of the innermost, that which is wrapped.
        build: The same number for two places whose classes are the same, all the way down; of both profiles.
        work: The same, where parameters and the MACs of forward are too.
    """

    names: list[str]
    label: str
    kind: str
    below: list["ModuleNode"] = field(default_factory=list)
    build: int = 0
    work: int = 0

    def walk(self) -> Iterator["ModuleNode"]:
        """Itself and every place below it, in the model's order."""
        waiting = [self]
        while waiting:
            place = waiting.pop()
            yield place
            waiting.extend(reversed(place.below))


Pair = tuple[ModuleNode | None, ModuleNode | None]
"""The same module before and after; `None` where it was added or removed."""


def matched(before: Profile, after: Profile) -> tuple[Pair, ...]:
    """Each module of either profile once: those of the first in its order, then what was added.

    Wrappers are seen through, and so is a module that a LightningModule, or another, holds the whole model as. Below two modules that are
    the same, children are the same by their label and work, else by a label that is no number and class, else by their work alone, else by
    number and class, else by their class and all classes below where there are as many of these on either side, else by label. Work is
    classes, parameters and MACs of forward, all the way down; what is alike in it takes each other's place in order. What then has found
    nobody is looked for elsewhere, by label and work: it was moved.
    """
    one, other = _root(before), _root(after)
    _look_into(one, other)
    numbers: dict[Hashable, int] = {}
    _number(before, one, numbers)
    _number(after, other, numbers)
    found = _Found()
    found.add(one, other)
    left, right = [list(found.free(root.walk())) for root in (one, other)]
    for pair in _same(left, right, lambda place: (place.label, place.work), as_many=True):
        if not any(place in found.partners for place in pair):
            found.add(*pair)
    return (*((place, found.partners.get(place)) for place in one.walk()), *((None, place) for place in found.free(other.walk())))


class _Found:
    """Who is who so far, either way."""

    def __init__(self) -> None:
        self.partners: dict[ModuleNode, ModuleNode] = {}

    def add(self, before: ModuleNode, after: ModuleNode) -> None:
        """Take two places for the same, and find out which of the places below them are."""
        waiting = [(before, after)]
        while waiting:
            one, other = waiting.pop()
            self.partners |= {one: other, other: one}
            for key, as_many in _KEYS:
                pairs = list(_same(list(self.free(one.below)), list(self.free(other.below)), key, as_many=as_many))
                self.partners |= dict(pairs) | {other: one for one, other in pairs}
                waiting += pairs

    def free(self, places: Iterable[ModuleNode]) -> Iterator[ModuleNode]:
        """Those that have found nobody."""
        return (place for place in places if place not in self.partners)


def _root(profile: Profile) -> ModuleNode:
    """The tree of a profile, without its wrappers."""
    places: dict[str, ModuleNode] = {}
    for name in sorted(profile.modules, key=lambda name: name.count(".") + bool(name)):  # stable: siblings keep the model's order
        above, _, label = name.rpartition(".")
        places[name] = ModuleNode(names=[name], label=label, kind=profile.modules[name].kind.removeprefix("FSDP"))
        if name:
            places[above].below.append(places[name])
    for place in places.values():
        while len(place.below) == 1 and place.below[0].label in _WRAPPERS:
            _absorb(place, place.below[0])
    return places[""]


def _absorb(place: ModuleNode, inner: ModuleNode) -> None:
    """Take what is inside for the same as what is around it."""
    at = place.below.index(inner)
    place.names += inner.names
    place.kind = inner.kind
    place.below[at : at + 1] = inner.below


def _look_into(before: ModuleNode, after: ModuleNode) -> None:
    """Where the whole of one run's model is an attribute of the other's, as in a LightningModule, make them the same place."""
    inside = [(root, other, child) for root, other in ((before, after), (after, before)) for child in root.below if child.below]
    best = max(inside, key=lambda each: _shared(each[2], each[1]), default=None)
    if best is None or _shared(best[2], best[1]) <= _shared(before, after):
        return
    root, _, child = best
    labels = {place.label for place in root.below if place is not child}
    if labels.isdisjoint(place.label for place in child.below):
        _absorb(root, child)


def _shared(one: ModuleNode, other: ModuleNode) -> int:
    """How many paths lead from both to modules of the same class."""
    shared, waiting = 0, [(one, other)]
    while waiting:
        left, right = waiting.pop()
        labels = {place.label: place for place in right.below}
        both = [(place, labels[place.label]) for place in left.below if place.label in labels]
        shared += sum(first.kind == second.kind for first, second in both)
        waiting += both
    return shared


def _number(profile: Profile, root: ModuleNode, numbers: dict[Hashable, int]) -> None:
    for place in reversed(list(root.walk())):
        rows = [profile.modules[name] for name in place.names]
        figures = tuple((row.own_parameters, row.forward.own_macs) for row in rows if row.own_parameters or row.forward.own_macs)
        place.build = numbers.setdefault(("build", place.kind, *(child.build for child in place.below)), len(numbers))
        place.work = numbers.setdefault(("work", place.kind, figures, *(child.work for child in place.below)), len(numbers))


def _same(left: Sequence[ModuleNode], right: Sequence[ModuleNode], key: _Key, *, as_many: bool) -> Iterator[tuple[ModuleNode, ModuleNode]]:
    """The places with the same key, in order. With `as_many` both sides have to have as many, or who is who would be a guess."""
    ours, theirs = _grouped(left, key), _grouped(right, key)
    for each, places in ours.items():
        others = theirs.get(each, [])
        if not as_many or len(places) == len(others):
            yield from zip(places, others, strict=False)


def _grouped(places: Iterable[ModuleNode], key: _Key) -> dict[Hashable, list[ModuleNode]]:
    groups: dict[Hashable, list[ModuleNode]] = {}
    for place in places:
        if (each := key(place)) is not None:
            groups.setdefault(each, []).append(place)
    return groups


_KEYS: tuple[tuple[_Key, bool], ...] = (
    (lambda place: (place.label, place.work), False),
    (lambda place: None if place.label.isdecimal() else (place.label, place.kind), False),
    (lambda place: place.work, False),
    (lambda place: (place.label, place.kind), False),
    (lambda place: place.build, True),
    (lambda place: place.label, False),
)
"""What makes two children of the same module the same, the surest first, and whether there have to be as many of them."""
