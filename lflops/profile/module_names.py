"""Dotted names of modules.

What is above and below a name, and which names repeat, as those of 48 layers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from lflops.profile.series import grouped

Item = TypeVar("Item")


@lru_cache(1 << 16)
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


def patterns(
    modules: Mapping[str, tuple[str, int | None]], below: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """Each name with `*` for the numbers of what repeats, as `layers.*.mlp.0`.

    Modules of one class at the same place have the same.

    A module repeats where the sibling before or after it has a number too and is the same. The 48
    blocks of a stack do; the first and the third layer of a `Sequential` do not. A star stands for
    all numbers there are; where it does not, they are listed: `layers.{0-2,4}.mlp`.

    Siblings are the same where they have one class; those without any module below them also need
    as many parameters.

    `modules` has by name its class and parameters; `below` what `children` returns, where it is
    known.
    """
    below = below or children(modules)
    same = {
        name: (kind, None if below[name] else parameters)
        for name, (kind, parameters) in modules.items()
    }
    found = {"": ""}
    waiting = [[""]]
    for parents in waiting:
        places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        numbers = 0
        for parent in parents:
            numbered = {each for each in below[parent] if each.rpartition(".")[2].isdecimal()}
            pairs = (
                pair
                for pair in pairwise(below[parent])
                if numbered.issuperset(pair) and same[pair[0]] == same[pair[1]]
            )
            repeated = {each for pair in pairs for each in pair}
            numbers += len(numbered)
            for each in below[parent]:
                places[
                    "*" if each in repeated else each.rpartition(".")[2], modules[each][0]
                ].append(each)
        above, taken = found[parents[0]], set[str]()
        for (label, _), names in places.items():
            is_whole = len(names) == (numbers if label == "*" else len(parents))
            pattern = (f"{above}.{label}" if above else label) if is_whole else spelled_out(names)
            found |= (
                dict.fromkeys(names, pattern)
                if pattern not in taken
                else {name: name for name in names}
            )
            taken.add(pattern)
            waiting.append(names)
    return found


def spelled_out(names: Iterable[str]) -> str:
    """Names that differ in numbers as one, as `layers.{0-2,4}.mlp`; of one name itself."""
    labels = [
        list(dict.fromkeys(same)) for same in zip(*(name.split(".") for name in names), strict=True)
    ]
    return ".".join(
        each[0] if len(each) == 1 else f"{{{_ranges(sorted(map(int, each)))}}}" for each in labels
    )


def _ranges(numbers: Sequence[int]) -> str:
    known = {*numbers}
    starts = [number for number in numbers if number - 1 not in known]
    ends = [number for number in numbers if number + 1 not in known]
    return ",".join(
        f"{start}-{end}" if end > start else f"{start}"
        for start, end in zip(starts, ends, strict=True)
    )


def fold_repeats(
    items: Iterable[Item],
    key: Callable[[Item], tuple[str, *tuple[Hashable, ...]]],
    patterns: Mapping[str, str],
) -> list[tuple[str, list[Item]]]:
    """Group items of repeated modules, as the 48 layers of a stack.

    Labels and items, in the order of the first items.
    """
    # The label is the names' pattern where the group has all modules of that pattern; else their
    # own names, spelled out. The key is an item's module, then all else that has to be equal within
    # a group. A name without a pattern stands for itself.
    modules = Counter(patterns.values())

    def place(item: Item) -> tuple[Hashable, ...]:
        name, *rest = key(item)
        return patterns.get(name, name), *rest

    def label(pattern: str, group: Sequence[Item]) -> str:
        names = dict.fromkeys(key(item)[0] for item in group)
        return pattern if 1 < len(names) == modules[pattern] else spelled_out(names)

    return [
        (label(str(pattern), group), group)
        for (pattern, *_), group in grouped(items, place).items()
    ]


def added_up(values: Mapping[str, float], patterns: Mapping[str, str]) -> dict[str, float]:
    """Values of modules, those of repeated ones together, by the label that `fold_repeats` gives them."""
    folded = fold_repeats(values.items(), lambda item: item[:1], patterns)
    return {label: sum(value for _, value in items) for label, items in folded}


def plain(content: str) -> str:
    """Replace control characters, so that a name from the user cannot drive the terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in content
    )
