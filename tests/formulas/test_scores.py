"""Test the number of attention scores against counting every pair of a query and a key."""

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
    """Return the number of pairs that the window leaves, by checking every pair."""
    shift = keys - queries if window.from_last else 0
    everything = queries + keys
    before = everything if window.before is None else window.before
    after = everything if window.after is None else window.after
    pairs = 0
    for query in range(queries):
        center = shift + query
        for key in range(keys):
            if center - before <= key <= center + after:
                pairs += 1
    return pairs


def test_a_window_leaves_what_counting_every_pair_leaves() -> None:
    """The formula equals counting every pair.

    All lengths up to 6, all windows up to beyond the ends, and both alignments are tested.
    """
    sides = (None, *range(8))
    for queries, keys, before, after, from_last in product(
        range(7), range(7), sides, sides, (False, True)
    ):
        window = Window(before, after, from_last)
        case = (queries, keys, window)
        assert one_by_one(queries, keys, window) == keys_seen(queries, keys, window), case


def test_a_long_window_is_not_walked_through() -> None:
    """A window over a million tokens is computed at once.

    The first 1,000 tokens see 1, 2, ..., 1,000 tokens, and each of the others sees 1,000.
    """
    assert 1000 * 1001 // 2 + (10**6 - 1000) * 1000 == keys_seen(10**6, 10**6, Window(999, 0))


def test_negative_sides_are_open_as_the_kernels_have_it() -> None:
    """A negative side of a window is open, as in the kernels; `causal` closes the right side."""
    assert ALL == Window.of(-1, -1, causal=False, from_last=False)
    assert Window(None, 0, True) == Window.of(-1, None, causal=True, from_last=True)
    assert Window(3, 0) == Window.of(3, 0, causal=False, from_last=False)


def test_scores_are_of_every_head_and_sequence() -> None:
    """The scores are those of all heads and batches.

    2 batches of 3 heads have 5 queries and 8 keys. A causal window from the first key leaves 1 + 2
    + 3 + 4 + 5 scores.
    """
    assert Scores(2 * 3 * 40, 2 * 3 * 15) == dense((2, 3, 5, 16), (2, 1, 8, 16), Window(None, 0))


def largest(tokens: int, longest: int, count: int) -> int:
    """Return the largest possible sum of squares of `count` lengths, by trying all lengths."""
    return max(
        sum(x * x for x in lengths)
        for lengths in product(range(longest + 1), repeat=count)
        if sum(lengths) == tokens
    )


@pytest.mark.parametrize(("tokens", "longest"), [(7, 4), (8, 4), (5, 5), (9, 2)])
def test_lengths_that_are_not_known_are_those_of_the_largest_sum_of_squares(
    tokens: int, longest: int
) -> None:
    """Unknown lengths are assumed to have the largest possible sum of squares.

    There are at most five sequences, none longer than `longest`.
    """
    packed = (tokens, 3, 16)
    lengths = sequences(packed, packed, Packing((6,), (6,), longest, longest))
    assert not lengths.known
    assert largest(tokens, longest, 5) == sum(x * x for x in lengths.queries)


def test_sequences_of_no_tokens_have_no_scores() -> None:
    """An empty batch has no scores, whether its lengths are known or not."""
    empty = (0, 3, 16)
    for offsets in (Values((0, 0)), (2,)):
        assert scores_of(sequences(empty, empty, Packing(offsets, offsets, 0, 0)), 3).all == 0


def test_offsets_that_go_back_are_refused() -> None:
    """Decreasing offsets raise an error, so that the call is unsupported instead of guessed."""
    packed = (7, 3, 16)
    with pytest.raises(ValueError, match="must not decrease"):
        sequences(packed, packed, Packing(Values((0, 5, 3)), Values((0, 5, 3)), 5, 5))


def test_as_many_sequences_of_queries_as_of_keys() -> None:
    """Different numbers of query and key sequences are an error of the caller.

    A sum over pairs of sequences would hide it.
    """
    with pytest.raises(ValueError, match=r"shorter|longer"):
        scores_of(Sequences([1, 2], [3]), 1)
