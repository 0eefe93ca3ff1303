"""Custom operators written in Python.

Without a formula they are counted by the operators that run inside of them.
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
    """Operators of every kind: what is inside is seen, in part, or not at all."""
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
    """Of [3, 5] by [5, 7]."""
    return lflops.count(Function(function), (fixed(N, K), fixed(K, M)))


def inside(profile: lflops.Profile) -> dict[str, Any]:
    """The operators that a note says were counted by what is inside of them, and their calls."""
    return {
        note.subject.partition("::")[2]: note.values["calls"]
        for note in profile.notes
        if note.code == "counted_inside"
    }


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_operator_without_a_formula_is_counted_by_what_runs_inside(mode: Any, mine: Any) -> None:
    """A product, and an addition an element.

    And a note, since a kernel that it called itself would not be seen.
    """
    with mode():
        profile = profile_of(mine.product)
    assert (({"forward": N * K * M}, {"forward": 2 * N * K * M + N * M}), (), {"product": 1}) == (
        (macs(profile), flops(profile)),
        profile.unsupported,
        inside(profile),
    )


def test_one_inside_another_is_counted_once(mine: Any) -> None:
    """Both have a note."""
    profile = profile_of(mine.twice)
    assert ({"forward": N * K * M}, {"product": 1, "twice": 1}) == (macs(profile), inside(profile))


def test_an_operator_that_shows_nothing_is_in_the_ledger(mine: Any) -> None:
    """A copy computes nothing, so the operator is listed, and the copy is in no total."""
    profile = profile_of(mine.unseen)
    work = profile.modules[""].forward
    assert ([f"{MINE}::unseen"], (0, 0, 0)) == (
        [each.operator for each in profile.unsupported],
        (work.calls, work.flops, work.bytes_moved),
    )


def test_what_is_seen_in_part_is_counted_and_the_rest_listed(mine: Any) -> None:
    """The product is seen; the operator inside that shows nothing is in the ledger."""
    profile = profile_of(mine.both)
    assert ({"forward": N * K * M}, [f"{MINE}::unseen"]) == (
        macs(profile),
        [each.operator for each in profile.unsupported],
    )


def test_a_formula_comes_first(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing inside is counted as well."""
    monkeypatch.setattr("lflops.flop_counter.operator_costs._USERS", {})
    lflops.register_formula(mine.product, lambda x, y, *, out: 42)
    profile = profile_of(mine.product)
    assert ({"forward": 42}, {}) == (macs(profile), inside(profile))


def test_an_error_inside_leaves_what_ran_before_it(mine: Any) -> None:
    """And is the user's own."""
    counting = lflops.counting(model := Function(mine.raises))
    with pytest.raises(ZeroDivisionError), counting as counted:
        model(fixed(N, K), fixed(K, M))
    assert N * K * M == counted.profile.total(phase=None)


def test_an_estimate_sees_the_inside_too(mine: Any) -> None:
    """On fake tensors the kernel runs as it does on real ones."""
    profile = lflops.estimate(Function(mine.product), (fixed(N, K), fixed(K, M)))
    assert {"forward": N * K * M} == macs(profile)


ROWS, WIDTH, WORDS = 8, 4, 64
head = ROWS * WIDTH * WORDS
"""The logits of every row: the head of a language model."""


class Head(nn.Module):
    """A language model's last layer and its loss in one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.options = options

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, self.weight, words, **self.options)


def of_head(how: Any, **options: Any) -> lflops.Profile:
    """A step of it."""
    return how(Head(**options), (of(ROWS, WIDTH), torch.randint(0, WORDS, (ROWS,))), backward=True)  # type: ignore[no-any-return]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
@pytest.mark.parametrize("how", [lflops.count, lflops.estimate])
def test_a_chunked_head_is_counted_whole(how: Any) -> None:
    """Three products of the head's size.

    The chunked operator makes the gradients in forward, and there also two dot products of all
    rows.

    Without a reduction it makes them in backward, and the logits anew: that is recompute.
    """
    chunked = torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions(
        batch_chunk_size=2, chunking_method=None
    )
    profiles = [
        of_head(how, **options)
        for options in ({}, {"options": chunked}, {"options": chunked, "reduction": "none"})
    ]
    assert [
        {"forward": head, "backward": 2 * head},
        {"forward": 3 * head + 2 * ROWS},
        {"forward": head, "backward": 2 * head + 2 * ROWS, "recompute": head},
    ] == [macs(profile) for profile in profiles]
    assert [((), ())] * 3 == [(profile.unsupported, profile.notes) for profile in profiles]
