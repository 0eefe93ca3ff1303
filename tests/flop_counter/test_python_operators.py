"""Test custom operators written in Python.

Without a formula they are counted by the operators that run inside them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from tests.support.count_function import Function, fixed, flops, macs, of

MINE = "lflops_in_python"
N, K, M = 3, 5, 7


@pytest.fixture(scope="module")
def mine() -> Iterator[Any]:
    """Return operators whose inside is visible completely, partly or not at all."""
    library = torch.library.Library(MINE, "DEF")

    def define(schema: str, function: Any) -> None:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CPU")
        library.impl(name, function, "CompositeExplicitAutograd")

    space = getattr(torch.ops, MINE)
    define("product(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.mm(x, y) + 1)
    define("twice(Tensor x, Tensor y) -> Tensor", lambda x, y: space.product(x, y) * 2)
    define(
        "unseen(Tensor x, Tensor y) -> Tensor",
        lambda x, y: torch.from_numpy(x.numpy() @ y.numpy()).clone(),
    )
    define("both(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.mm(x, y) + space.unseen(x, y))
    define("raises(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.mm(x, y).sum().item() // 0)
    yield space
    library._destroy()


def profile_of(function: Any) -> lflops.Profile:
    """Count a function of a 3 x 5 and a 5 x 7 matrix."""
    return lflops.count(Function(function), (fixed(N, K), fixed(K, M)))


def inside(profile: lflops.Profile) -> dict[str, Any]:
    """Return the operators with the note `counted_inside`, and their numbers of calls."""
    return {
        note.subject.partition("::")[2]: note.values["calls"]
        for note in profile.notes
        if note.code == "counted_inside"
    }


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_operator_without_a_formula_is_counted_by_what_runs_inside(mode: Any, mine: Any) -> None:
    """The matmul and the addition inside the operator are counted, and a note says so.

    The note is needed because a kernel that the operator launches itself would not be visible.
    """
    with mode():
        profile = profile_of(mine.product)
    assert {"forward": N * K * M} == macs(profile)
    assert {"forward": 2 * N * K * M + N * M} == flops(profile)
    assert () == profile.unsupported
    assert {"product": 1} == inside(profile)


def test_one_inside_another_is_counted_once(mine: Any) -> None:
    """If one custom operator calls another, the work is counted once, and both have a note."""
    profile = profile_of(mine.twice)
    assert {"forward": N * K * M} == macs(profile)
    assert {"product": 1, "twice": 1} == inside(profile)


def test_an_operator_that_shows_nothing_is_in_the_ledger(mine: Any) -> None:
    """If only a copy is visible inside, the operator is unsupported and the copy is in no total.

    A copy computes nothing.
    """
    profile = profile_of(mine.unseen)
    work = profile.modules[""].forward
    assert [f"{MINE}::unseen"] == [each.operator for each in profile.unsupported]
    assert 0 == work.calls
    assert 0 == work.flops
    assert 0 == work.bytes_moved


def test_what_is_seen_in_part_is_counted_and_the_rest_listed(mine: Any) -> None:
    """The visible matmul is counted, and the inner operator that shows nothing is unsupported."""
    profile = profile_of(mine.both)
    assert {"forward": N * K * M} == macs(profile)
    assert [f"{MINE}::unseen"] == [each.operator for each in profile.unsupported]


def test_a_formula_comes_first(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the operator has a formula, nothing inside it is counted in addition."""
    monkeypatch.setattr("lflops.flop_counter.operator_costs._USERS", {})
    lflops.register_formula(mine.product, lambda x, y, *, out: 42)
    profile = profile_of(mine.product)
    assert {"forward": 42} == macs(profile)
    assert {} == inside(profile)


def test_an_error_inside_leaves_what_ran_before_it(mine: Any) -> None:
    """An error inside the operator reaches the user, and the work before it is counted."""
    model = Function(mine.raises)
    counting = lflops.counting(model)
    with pytest.raises(ZeroDivisionError), counting as counted:
        model(fixed(N, K), fixed(K, M))
    assert N * K * M == counted.profile.total(phase=None)


def test_an_estimate_sees_the_inside_too(mine: Any) -> None:
    """In an estimate the operator runs on fake tensors, and its inside is counted as well."""
    profile = lflops.estimate(Function(mine.product), (fixed(N, K), fixed(K, M)))
    assert {"forward": N * K * M} == macs(profile)


ROWS, WIDTH, WORDS = 8, 4, 64
head = ROWS * WIDTH * WORDS
"""MACs of the logits of every row, the head of a language model."""


class Head(nn.Module):
    """The last layer of a language model with its loss, in one operator."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.options = options

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, self.weight, words, **self.options)


def of_head(how: Any, **options: Any) -> lflops.Profile:
    """Count or estimate a training step of the head."""
    return how(Head(**options), (of(ROWS, WIDTH), torch.randint(0, WORDS, (ROWS,))), backward=True)  # type: ignore[no-any-return]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
@pytest.mark.parametrize("how", [lflops.count, lflops.estimate])
def test_a_chunked_head_is_counted_whole(how: Any) -> None:
    """The fused head costs three matmuls of its size, chunked or not.

    The chunked operator computes the gradients in forward, with two more dot products for all rows.
    Without a reduction it computes the gradients in backward and recomputes the logits there.
    """
    chunked = torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions(
        batch_chunk_size=2, chunking_method=None
    )
    whole = of_head(how)
    in_chunks = of_head(how, options=chunked)
    unreduced = of_head(how, options=chunked, reduction="none")
    assert {"forward": head, "backward": 2 * head} == macs(whole)
    assert {"forward": 3 * head + 2 * ROWS} == macs(in_chunks)
    assert {"forward": head, "backward": 2 * head + 2 * ROWS, "recompute": head} == macs(unreduced)
    for profile in (whole, in_chunks, unreduced):
        assert () == profile.unsupported
        assert () == profile.notes
