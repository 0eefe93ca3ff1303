"""Dotted names of modules: what is above and below a name, and which names repeat, as those of 48 layers."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["ancestry", "children", "fold_repeats", "patterns"]

Item = TypeVar("Item")


def ancestry(name: str) -> tuple[str, ...]:
    """A row's name and those of all the rows above it, itself first, the root last."""
    names = [name]
    while name:
        name = name.rpartition(".")[0]
        names.append(name)
    return tuple(names)


def children(names: Iterable[str]) -> dict[str, list[str]]:
    """The names directly below each name, in the given order."""
    below: dict[str, list[str]] = {name: [] for name in names}
    for name in filter(None, below):
        below[name.rpartition(".")[0]].append(name)
    return below


def patterns(modules: Mapping[str, Hashable], below: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """Each name with `*` for the numbers of what repeats, as `layers.*.mlp.0`: names at the same place have the same pattern.

    A module repeats where the sibling before or after it has a number too and is the same. The 48 blocks of a stack do; the first and the
    third layer of a `Sequential` do not.

    Args:
        modules: By name, what makes two siblings the same, as the class.
        below: What `children` returns, where it is already known.
    """
    below = below or children(modules)
    found = {"": ""}
    for name in sorted(below, key=len):
        labels = below[name]
        numbered = {each for each in labels if each.rpartition(".")[2].isdecimal()}
        repeated = {
            each for pair in pairwise(labels) if numbered.issuperset(pair) and modules[pair[0]] == modules[pair[1]] for each in pair
        }
        for each in labels:
            label = "*" if each in repeated else each.rpartition(".")[2]
            found[each] = f"{found[name]}.{label}" if name else label
    return found


def fold_repeats(
    items: Iterable[Item], key: Callable[[Item], tuple[str, *tuple[Hashable, ...]]], patterns: Mapping[str, str]
) -> list[tuple[str, list[Item]]]:
    """Group items of repeated modules, as the 48 layers of a stack.

    Args:
        items: Anything that belongs to a module.
        key: The module's name, then all else that has to be equal within a group.
        patterns: What the function of that name returns; a name that it has not stands for itself.

    Returns:
        A label and the items of each group, in the order of their first items. The label is the names' pattern, or the name itself where
        all items are of one module.
    """
    groups: defaultdict[tuple[str, tuple[Hashable, ...]], list[Item]] = defaultdict(list)
    for item in items:
        values = key(item)
        groups[patterns.get(values[0], values[0]), values[1:]].append(item)

    def label(pattern: str, group: Sequence[Item]) -> str:
        name = key(group[0])[0]
        return name if all(key(item)[0] == name for item in group) else pattern

    return [(label(pattern, group), group) for (pattern, _), group in groups.items()]
