"""Dotted names of modules: what is above and below a name, and which names repeat, as those of 48 layers."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["ancestry", "children", "fold_repeats", "pattern"]

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


def pattern(name: str) -> str:
    """A name with `*` for its numbers, as `layers.*.mlp`: names that differ only in numbers have the same pattern."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def fold_repeats(items: Iterable[Item], key: Callable[[Item], tuple[str, *tuple[Hashable, ...]]]) -> list[tuple[str, list[Item]]]:
    """Group items of repeated modules, as the 48 layers of a stack.

    Args:
        items: Anything that belongs to a module.
        key: The module's name, then whatever else has to be equal within a group.

    Returns:
        A label and the items of each group, in the order of their first items. The label is the names' pattern, or the name itself where
        all items are of one module.
    """
    groups: dict[tuple[Hashable, ...], list[tuple[str, Item]]] = {}
    for item in items:
        name, *rest = key(item)
        groups.setdefault((pattern(name), *rest), []).append((name, item))
    return [(_label({name for name, _ in group}), [item for _, item in group]) for group in groups.values()]


def _label(names: set[str]) -> str:
    name = next(iter(names))
    return name if len(names) == 1 else pattern(name)
