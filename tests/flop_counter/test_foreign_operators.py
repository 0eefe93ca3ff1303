"""An operator of somebody else's is not ATen's because it is called the same.

It is counted by a formula given for it, or listed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lflops
from lflops.flop_counter import operator_costs, traffic
from lflops.flop_counter.operators import LIFTS
from lflops.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from tests.support.count_function import Function, count, fixed

MINE = "lflops_foreign"
POINTWISE = {"relu", "relu_", "exp", "add", "_foreach_add", "_foreach_zero_"}
NAMES = sorted(
    name
    for name in {*FREE, *MOVES, *PER_INPUT, *PER_OUTPUT, *traffic.UNREAD, *LIFTS, *POINTWISE}
    if "::" not in name
)


@pytest.fixture(scope="module")
def mine() -> Iterator[Any]:
    """A namespace with an operator for each name of the tables, that copies what it is given."""
    library = torch.library.Library(MINE, "DEF")
    for name in NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.clone, "CPU")
    library.define("doubled(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("doubled", lambda x: x + x, "CPU")
    library.define("halves(Tensor x) -> Tensor")
    library.impl("halves", lambda x: x.mul(0.5).exp(), "CompositeImplicitAutograd")
    yield getattr(torch.ops, MINE)
    library._destroy()


def test_a_name_that_aten_has_too_says_nothing_about_a_foreign_operator(mine: Any) -> None:
    """Each name of each table once, and each of them is in the ledger, and in no total."""

    def everything(x: Tensor) -> None:
        for name in NAMES:
            getattr(mine, name)(x)

    profile = lflops.count(Function(everything), fixed(3, 4))
    assert [f"{MINE}::{name}" for name in NAMES] == sorted(
        each.operator for each in profile.unsupported
    )
    work = profile.modules[""].forward
    assert (0, 0, 0, 0) == (work.calls, work.macs, work.flops, work.bytes_moved)


def test_a_foreign_operator_that_is_marked_as_pointwise_is_one_operation_an_element(
    mine: Any,
) -> None:
    """By torch's own tag: its author says so."""
    assert 3 * 4 == count(mine.doubled, fixed(3, 4)).modules[""].forward.flops


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_foreign_operator_that_is_made_of_others_is_counted_as_these(
    mine: Any, mode: Any
) -> None:
    """A product with a number and an exponential."""
    with mode():
        profile = count(mine.halves, fixed(3, 4))
    assert ({"mul", "exp"}, ()) == (
        {cell.operator for cell in profile.op_counts},
        profile.unsupported,
    )


@pytest.mark.parametrize(
    "name", ["embedding", "gather", "zeros_like", "index_put_", "avg_pool2d_backward"]
)
def test_the_bytes_of_a_foreign_operator_with_a_formula_are_what_goes_in_and_out(
    name: str, mine: Any, monkeypatch: Any
) -> None:
    """What ATen's does with its first argument is no rule for another: 12 numbers read, 12 written."""
    monkeypatch.setattr(operator_costs, "_USERS", {})
    lflops.register_formula(getattr(mine, name), lambda x, *, out: 7)
    profile = lflops.count(Function(getattr(mine, name)), fixed(3, 4))
    work = profile.modules[""].forward
    assert ((), 7, 2 * 12 * 4) == (profile.notes, work.macs, work.bytes_moved)


def test_bytes_whose_own_rule_cannot_read_a_call_are_what_goes_in_and_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 rows of 3 numbers filled.

    Without its rule all 12 are read and written, and no formula is said to have failed.
    """
    x, places = fixed(4, 3), torch.tensor([0, 2])
    monkeypatch.setitem(traffic.SCATTERED, "index_fill_", lambda args: args[9])
    assert (4 * 3 + 4 * 3) * 4 + 2 * 8 == count(lambda x: x.index_fill_(0, places, 1.0), x).modules[
        ""
    ].forward.bytes_moved
