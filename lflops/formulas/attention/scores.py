"""How many scores attention has: the square of each sequence, and the part of it that a window leaves.

Packed sequences are many squares, not one. Their lengths are numbers in a tensor, so where only its shape is known the lengths are not.
Then they are taken to be as unequal as the totals allow, which gives the largest sum of squares.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lflops.formulas.table import Shape, Values

Known = Values | Shape | None
"""Of an argument that is a tensor of integers: its numbers; its shape where they are unknown; `None` where it is not given."""


class Window(NamedTuple):
    """The keys that a query sees, by their distance from its own place among them."""

    before: int | None = None  # how many keys before its place; `None` for all of them
    after: int | None = None  # the same after it
    from_last: bool = False  # whether the last query's place is at the last key; else the first query's is at the first key

    @classmethod
    def of(cls, before: int | None, after: int | None, *, causal: bool, from_last: bool) -> "Window":
        """From a kernel's arguments, where a number below 0 stands for all."""
        before, after = (None if each is None or each < 0 else int(each) for each in (before, after))
        return cls(before, 0 if causal else after, from_last)


ALL = Window()


class Sequences(NamedTuple):
    """The lengths of sequences."""

    queries: Sequence[int]  # by sequence
    keys: Sequence[int]  # by sequence
    known: bool = True  # whether they are; else they are those of which nothing takes more


class Scores(NamedTuple):
    """Scores of all heads."""

    all: int  # of the full squares
    seen: int  # those that the window leaves
    known: bool = True  # whether the lengths are known; else there are at most so many


class Packing(NamedTuple):
    """What kernels are given of sequences of several lengths."""

    queries: Known = None  # where each sequence begins among the queries, and where the last one ends
    keys: Known = None  # the same among the keys
    longest_query: int | None = None  # at least the length of the longest sequence of queries
    longest_key: int | None = None  # the same of keys
    used_keys: Known = None  # how many of its keys each sequence uses
    pages: Shape | None = None  # the shape of the table of pages, where keys are in pages: [sequences, pages]
    used_queries: Known = None  # how many of its queries each sequence has


def sequences(query: Shape, key: Shape, packing: Packing) -> Sequences:
    """The lengths of the sequences in [tokens, heads, width], or in [batch, length, heads, width] where nothing is packed."""
    queries, known = _lengths(query, packing.queries, packing.longest_query)
    if isinstance(packing.used_queries, Values):
        queries = [min(pair) for pair in zip(queries, packing.used_queries, strict=True)]
    elif packing.used_queries is not None:
        known = False
    if packing.pages is not None:
        count, pages = packing.pages
        keys, keys_known = [min(pages * key[1], packing.longest_key or pages * key[1])] * count, packing.used_keys is None
    else:
        keys, keys_known = _lengths(key, packing.keys, packing.longest_key)
    if isinstance(packing.used_keys, Values):
        paged = packing.pages is not None
        keys = list(packing.used_keys) if paged else [min(pair) for pair in zip(keys, packing.used_keys, strict=True)]
        keys_known = paged or keys_known
    elif packing.used_keys is not None:
        keys_known = False
    return Sequences(queries, keys, known and keys_known)


def scores_of(lengths: Sequences, heads: int, window: Window = ALL) -> Scores:
    """Scores of so many heads, each over all sequences; a `ValueError` where these are not as many of queries as of keys."""
    pairs = list(zip(lengths.queries, lengths.keys, strict=not (unknown := not lengths.known)))
    whole = sum(queries * keys for queries, keys in pairs)
    if window.before is None and window.after is None:
        return Scores(heads * whole, heads * whole, not unknown)
    return Scores(heads * whole, heads * sum(keys_seen(*pair, window) for pair in pairs), not unknown)


def dense(query: Shape, key: Shape, window: Window = ALL) -> Scores:
    """Scores of [batch, heads, length, width]."""
    return scores_of(Sequences([query[-2]] * query[0], [key[-2]] * query[0]), query[1], window)


def keys_seen(queries: int, keys: int, window: Window) -> int:
    """How many keys the queries of one sequence see, all together."""
    place = keys - queries if window.from_last else 0
    last = keys if window.after is None else place + window.after
    first = -queries if window.before is None else place - window.before
    return max(_up_to(last, queries, keys) - _up_to(first - 1, queries, keys), 0) if first <= last else 0


def _up_to(distance: int, queries: int, keys: int) -> int:
    """Pairs of query i and key j with j - i at most the distance: query i has so many more keys as i is greater."""
    return _staircase(distance + queries, keys) - _staircase(distance, keys)


def _staircase(steps: int, top: int) -> int:
    """The sum 1 + 2 + ..., of so many steps, none higher than the top."""
    if steps <= 0:
        return 0
    rising = min(steps, top)
    return rising * (rising + 1) // 2 + (steps - rising) * top


def _lengths(shape: Shape, offsets: Known, longest: int | None) -> tuple[list[int], bool]:
    if offsets is None:
        return [shape[1]] * shape[0], True
    if isinstance(offsets, Values):
        lengths = [end - begin for begin, end in pairwise(offsets)]
        if any(length < 0 for length in lengths):
            raise ValueError(f"sequences begin before the last one ends: {tuple(offsets)[:8]}")
        return lengths, True
    tokens, longest = shape[0], min(longest or shape[0], shape[0])
    return [longest] * (tokens // longest if longest else 0) + [tokens % longest if longest else 0], False
