"""Work with dotted names of modules, such as `layers.3.mlp`.

A pattern is the common name of repeated modules: `layers.*.mlp` stands for `layers.0.mlp`,
`layers.1.mlp` and so on.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from lflops.profile.series import grouped, spelled_runs

Item = TypeVar("Item")

FREQUENT_BLOCKS = 3
"""Minimum number of equal blocks that are repeats of each other without being neighbours."""


@lru_cache(1 << 16)
def ancestry(name: str) -> tuple[str, ...]:
    """Return a name and the names of all modules above it, up to the root.

    For example, `a.b` gives `("a.b", "a", "")`.
    """
    names = [name]
    while name:
        name = parent_of(name)
        names.append(name)
    return tuple(names)


def parent_of(name: str) -> str:
    """Return the name of the module above: `a` for `a.b`, and the empty name for `a`."""
    return name.rpartition(".")[0]


def outermost(names: Iterable[str]) -> list[str]:
    """Return the names that have no parent among the names, in the given order."""
    found = dict.fromkeys(names)
    return [name for name in found if parent_of(name) not in found]


def last_part(name: str) -> str:
    """Return the part of a name after the last dot: `b` for `a.b`, and `a` for `a`."""
    return name.rpartition(".")[2]


def name_below(above: str, label: str) -> str:
    """Return the name of a child of a module: `a.b` for the module `a` and the label `b`.

    The root has an empty name, so its child `b` has the name `b`.
    """
    if not above:
        return label
    return f"{above}.{label}"


def children(names: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each name, the names directly below it, in the given order."""
    below: dict[str, list[str]] = {name: [] for name in names}
    for name in filter(None, below):
        below[parent_of(name)].append(name)
    return below


def patterns(
    modules: Mapping[str, tuple[str, int | None]], below: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """Return the pattern of each module name: repeated modules have the same pattern.

    In a pattern, a star replaces the numbers of repeated modules, as in `layers.*.mlp.0`. The star
    stands for all numbers. If only some of the numbered siblings are alike, their numbers are
    listed, as in `layers.{0-2,4}.mlp`. The pattern of a module that is not repeated is its name.

    A module is repeated if the last part of its name is a number, and if the sibling before or
    after it is alike. For example, the 48 blocks of a stack are repeated. The first and the third
    layer of a `Sequential` are not repeated if a different layer is between them. But blocks, which
    have submodules, are also repeated if at least three siblings at any places have the same class,
    the same number of parameters and submodules of the same classes. For example, they alternate
    with other blocks.

    Siblings are alike if they have the same class. Siblings without submodules must also have the
    same number of parameters.

    Args:
        modules: The class and the number of parameters of each module, by name.
        below: The result of `children`, if it is known.
    """
    below = below or children(modules)
    found = {"": ""}
    waiting = [[""]]
    # Each item of `waiting` is a group of modules with the same pattern. The loop appends the
    # groups of their submodules to this list.
    for parents in waiting:
        above = found[parents[0]]
        taken: set[str] = set()
        for label, names, is_whole in _alike(parents, modules, below):
            pattern = spelled_out(names)
            if is_whole:
                pattern = name_below(above, label)
            if pattern in taken:
                # Another group already has this pattern, so the modules of this group keep their
                # names.
                found.update({name: name for name in names})
            else:
                found.update(dict.fromkeys(names, pattern))
            taken.add(pattern)
            waiting.append(names)
    return found


def _alike(
    parents: Sequence[str],
    modules: Mapping[str, tuple[str, int | None]],
    below: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, list[str], bool]]:
    """Group the modules directly below `parents` by label and class.

    The label is the last part of a module's name, or `*` for repeated modules.

    Args:
        parents: Names of modules that have the same pattern.
        modules: The class and the number of parameters of each module, by name.
        below: The result of `children`.

    Yields:
        The label of a group, the names of its modules, and whether the group is complete. A group
        is incomplete if some parents have no module with its label or, for the label `*`, if some
        numbered modules of the parents are not in the group.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    numbered = 0
    for parent in parents:
        numbered += sum(map(_has_number, below[parent]))
        repeated = _repeated(below[parent], modules, below)
        for name in below[parent]:
            label = "*" if name in repeated else last_part(name)
            groups.setdefault((label, modules[name][0]), []).append(name)
    for (label, _), names in groups.items():
        modules_of_label = numbered if label == "*" else len(parents)
        yield label, names, len(names) == modules_of_label


def _repeated(
    siblings: Sequence[str],
    modules: Mapping[str, tuple[str, int | None]],
    below: Mapping[str, Sequence[str]],
) -> set[str]:
    """Return the numbered siblings that are like a neighbour, and the blocks that are frequent."""

    def signature(name: str) -> tuple[str, int | None]:
        class_name, parameters = modules[name]
        if below[name]:
            return class_name, None
        return class_name, parameters

    repeated: set[str] = set()
    for one, other in pairwise(siblings):
        if _has_number(one) and _has_number(other) and signature(one) == signature(other):
            repeated.update((one, other))
    blocks: dict[Hashable, list[str]] = {}
    for name in siblings:
        if below[name] and _has_number(name):
            inside = tuple((last_part(child), modules[child][0]) for child in below[name])
            blocks.setdefault((modules[name], inside), []).append(name)
    for names in blocks.values():
        if len(names) >= FREQUENT_BLOCKS:
            repeated.update(names)
    return repeated


def _has_number(name: str) -> bool:
    return last_part(name).isdecimal()


def spelled_out(names: Iterable[str]) -> str:
    """Combine names that differ only in numbers into one text, such as `layers.{0-2,4}.mlp`.

    A single name is returned unchanged.
    """
    parts = []
    for labels in zip(*(name.split(".") for name in names), strict=True):
        if len(set(labels)) == 1:
            parts.append(labels[0])
        else:
            numbers = sorted(set(map(int, labels)))
            parts.append(f"{{{','.join(spelled_runs(numbers))}}}")
    return ".".join(parts)


def fold_repeats(
    items: Iterable[Item],
    key: Callable[[Item], tuple[str, *tuple[Hashable, ...]]],
    patterns: Mapping[str, str],
) -> list[tuple[str, list[Item]]]:
    """Group items, each of which belongs to a module, by the name pattern of the module.

    For example, a table with one line per group has one line for 48 identical layers. Returns the
    label and the items of each group, in the order of the groups' first items. If a group contains
    all modules with its pattern, the label is the pattern, such as `layers.*.mlp`. Otherwise the
    label lists the numbers of the modules, as in `layers.{0-2,4}.mlp`.

    Args:
        items: The items to group.
        key: Function that returns the name of an item's module, followed by the other values that
            must be equal within a group.
        patterns: The result of `patterns`. A name that is missing there is used as the pattern.
    """
    modules_of_pattern = Counter(patterns.values())

    def group_key(item: Item) -> tuple[Hashable, ...]:
        name, *rest = key(item)
        return patterns.get(name, name), *rest

    folded = []
    for (pattern, *_), group in grouped(items, group_key).items():
        names = dict.fromkeys(key(item)[0] for item in group)
        if 1 < len(names) == modules_of_pattern[str(pattern)]:
            label = str(pattern)
        else:
            label = spelled_out(names)
        folded.append((label, group))
    return folded


def added_up(values: Mapping[str, float], patterns: Mapping[str, str]) -> dict[str, float]:
    """Add up the values of repeated modules.

    The keys of the result are the labels of `fold_repeats`, such as `layers.*.mlp`.

    Args:
        values: Values by module name.
        patterns: The pattern of each module's name.
    """
    sums = {}
    for label, items in fold_repeats(values.items(), lambda item: item[:1], patterns):
        sums[label] = sum(value for _, value in items)
    return sums


def plain(content: str) -> str:
    """Replace unprintable characters, so that a name from the user cannot control the terminal."""
    if content.isprintable():
        return content
    characters = []
    for character in content:
        characters.append(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}")
    return "".join(characters)
