"""How many scores attention has: against every pair of a query and a key, one by one."""

from itertools import product

import pytest

from lflops.formulas.attention.fused import (
    ALL,
    Packing,
    Scores,
    Sequences,
    Window,
    dense,
    keys_seen,
    scores_of,
    sequences,
)
from lflops.formulas.table import Values


def one_by_one(queries: int, keys: int, window: Window) -> int:
    """Pairs that the window leaves."""
    place = keys - queries if window.from_last else 0
    before = queries + keys if window.before is None else window.before
    after = queries + keys if window.after is None else window.after
    return sum(
        place + i - before <= j <= place + i + after
        for i, j in product(range(queries), range(keys))
    )


def test_a_window_leaves_what_counting_every_pair_leaves() -> None:
    """All lengths up to 6, all windows up to beyond the ends, both alignments."""
    sides = (None, *range(8))
    for queries, keys, before, after, from_last in product(
        range(7), range(7), sides, sides, (False, True)
    ):
        window = Window(before, after, from_last)
        assert one_by_one(queries, keys, window) == keys_seen(queries, keys, window), (
            queries,
            keys,
            window,
        )


def test_a_long_window_is_not_walked_through() -> None:
    """A million tokens, the last 1,000 of which each sees with itself.

    1 + 2 + ... + 1,000, and 1,000 for each of the others.
    """
    assert 1000 * 1001 // 2 + (10**6 - 1000) * 1000 == keys_seen(10**6, 10**6, Window(999, 0))


def test_negative_sides_are_open_as_the_kernels_have_it() -> None:
    """And causal closes the right one."""
    assert (ALL, Window(None, 0, True), Window(3, 0)) == (
        Window.of(-1, -1, causal=False, from_last=False),
        Window.of(-1, None, causal=True, from_last=True),
        Window.of(3, 0, causal=False, from_last=False),
    )


def test_scores_are_of_every_head_and_sequence() -> None:
    """2 batches of 3 heads.

    5 queries, 8 keys; a causal window from the first key leaves 1 + 2 + 3 + 4 + 5.
    """
    assert Scores(2 * 3 * 40, 2 * 3 * 15) == dense((2, 3, 5, 16), (2, 1, 8, 16), Window(None, 0))


def largest(tokens: int, longest: int, count: int) -> int:
    """The largest sum of squares that sequences of so many tokens can have, by trying all."""
    return max(
        sum(x * x for x in lengths)
        for lengths in product(range(longest + 1), repeat=count)
        if sum(lengths) == tokens
    )


@pytest.mark.parametrize(("tokens", "longest"), [(7, 4), (8, 4), (5, 5), (9, 2)])
def test_lengths_that_are_not_known_are_those_of_the_largest_sum_of_squares(
    tokens: int, longest: int
) -> None:
    """Of five sequences at most, none longer than is said."""
    packed = (tokens, 3, 16)
    lengths = sequences(packed, packed, Packing((6,), (6,), longest, longest))
    assert not lengths.known
    assert largest(tokens, longest, 5) == sum(x * x for x in lengths.queries)


def test_sequences_of_no_tokens_have_no_scores() -> None:
    """An empty batch, known or not."""
    empty = (0, 3, 16)
    for offsets in (Values((0, 0)), (2,)):
        assert scores_of(sequences(empty, empty, Packing(offsets, offsets, 0, 0)), 3).all == 0


def test_offsets_that_go_back_are_refused() -> None:
    """The call is listed as unsupported then, and not guessed."""
    packed = (7, 3, 16)
    with pytest.raises(ValueError, match="begins before"):
        sequences(packed, packed, Packing(Values((0, 5, 3)), Values((0, 5, 3)), 5, 5))


def test_as_many_sequences_of_queries_as_of_keys() -> None:
    """Anything else is a mistake of the caller's, which a sum would hide."""
    with pytest.raises(ValueError, match=r"shorter|longer"):
        scores_of(Sequences([1, 2], [3]), 1)
