"""Test operators of other packages that have the name of an ATen operator.

Such an operator is counted by a formula registered for it, or it is unsupported.
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
    """Return a namespace with an operator for each name in the tables, which copies its input."""
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
    """All names in the tables apply to ATen only: each foreign operator is unsupported.

    None of them is in any total.
    """

    def everything(x: Tensor) -> None:
        for name in NAMES:
            getattr(mine, name)(x)

    profile = lflops.count(Function(everything), fixed(3, 4))
    assert [f"{MINE}::{name}" for name in NAMES] == sorted(
        each.operator for each in profile.unsupported
    )
    work = profile.modules[""].forward
    assert 0 == work.calls
    assert 0 == work.macs
    assert 0 == work.flops
    assert 0 == work.bytes_moved


def test_a_foreign_operator_that_is_marked_as_pointwise_is_one_operation_an_element(
    mine: Any,
) -> None:
    """An operator that its author gave torch's tag `pointwise` costs one FLOP per element."""
    assert 3 * 4 == count(mine.doubled, fixed(3, 4)).modules[""].forward.flops


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_foreign_operator_that_is_made_of_others_is_counted_as_these(
    mine: Any, mode: Any
) -> None:
    """A composite operator is counted by the operators it calls, here `mul` and `exp`."""
    with mode():
        profile = count(mine.halves, fixed(3, 4))
    assert {"mul", "exp"} == {op_count.operator for op_count in profile.op_counts}
    assert () == profile.unsupported


@pytest.mark.parametrize(
    "name", ["embedding", "gather", "zeros_like", "index_put_", "avg_pool2d_backward"]
)
def test_the_bytes_of_a_foreign_operator_with_a_formula_are_what_goes_in_and_out(
    name: str, mine: Any, monkeypatch: Any
) -> None:
    """The bytes of a foreign operator are its whole input and output, 12 numbers each.

    The rule for the bytes of the ATen operator with this name does not apply.
    """
    monkeypatch.setattr(operator_costs, "_USERS", {})
    lflops.register_formula(getattr(mine, name), lambda x, *, out: 7)
    profile = lflops.count(Function(getattr(mine, name)), fixed(3, 4))
    work = profile.modules[""].forward
    assert () == profile.notes
    assert 7 == work.macs
    assert 2 * 12 * 4 == work.bytes_moved


def test_bytes_whose_own_rule_cannot_read_a_call_are_what_goes_in_and_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If an operator's rule for bytes fails, all inputs and outputs are counted, without a note.

    The call fills 2 rows of 3 numbers; without the rule all 12 numbers are read and written.
    """
    x = fixed(4, 3)
    places = torch.tensor([0, 2])
    # There is no argument 9, so the rule raises IndexError.
    monkeypatch.setitem(traffic.SCATTERED, "index_fill_", lambda args: args[9])
    profile = count(lambda x: x.index_fill_(0, places, 1.0), x)
    assert (4 * 3 + 4 * 3) * 4 + 2 * 8 == profile.modules[""].forward.bytes_moved
