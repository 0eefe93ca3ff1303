"""Formulas of the user's own.

They are called as the operator was, the last one counts, and one that fails breaks nothing.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import lflops
from lflops.flop_counter import operator_costs

x = torch.ones(3, 4)


class Calls(nn.Module):
    """A module that calls an operator."""

    def __init__(self, operator: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.operator = operator
        self.arguments = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.arguments
        return self.operator(x, *args, **kwargs)


@torch.library.custom_op("tests::blur", mutates_args=())
def blur(x: Tensor, kernels: list[Tensor], *, width: int = 3) -> Tensor:
    """An operator that nobody knows."""
    return x.clone()


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's operator; the formulas that a test registers are gone after it."""
    monkeypatch.setattr(operator_costs, "_USERS", {})
    return torch.ops.tests.blur


def test_an_operator_without_a_formula_is_in_the_ledger(operator: Any) -> None:
    """One call, that read 3 * 4 floats and wrote as many, and is in no total."""
    profile = lflops.count(Calls(operator, []), x)
    (entry,) = profile.unsupported
    assert ("tests::blur", "forward", 1, 2 * 4 * 12) == (
        entry.operator,
        entry.phase,
        entry.calls,
        entry.bytes,
    )
    assert profile.total() == 0


def test_an_operator_without_a_formula_in_an_ignored_module_is_not_in_the_ledger(
    operator: Any,
) -> None:
    """The ledger lists what is missing from the totals; what was to be left out is not missed."""
    model = nn.Sequential(Calls(operator, []))
    assert ["tests::blur"] == [each.operator for each in lflops.count(model, x).unsupported]
    assert () == lflops.count(model, x, ignore=["0"]).unsupported


def test_a_registered_formula_counts_an_operator_of_the_users(operator: Any) -> None:
    """It is called as the operator was, with shapes for tensors and the result's shape."""
    seen = []

    def formula(*args: Any, out: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs, out))
        return 7

    lflops.register_formula(operator, formula)
    profile = lflops.count(Calls(operator, [torch.ones(2, 2), torch.ones(3)], width=5), x)
    assert [(((3, 4), [(2, 2), (3,)]), {"width": 5}, (3, 4))] == seen
    assert () == profile.unsupported
    assert {"": {"tests::blur": 7}} == profile.by_module_and_operator()
    assert profile.modules[""].forward.flops == 14


@pytest.mark.parametrize(
    "last", [lambda packet: packet, lambda packet: packet.default], ids=["packet", "overload"]
)
@pytest.mark.parametrize(
    "first", [lambda packet: packet, lambda packet: packet.default], ids=["packet", "overload"]
)
def test_the_last_formula_that_was_registered_counts(
    first: Callable[[Any], Any], last: Callable[[Any], Any], operator: Any
) -> None:
    """Whether the operator or its only overload was named."""
    lflops.register_formula(first(operator), lambda *_, out: 1)
    lflops.register_formula(last(operator), lambda *_, out: 2)
    assert lflops.count(Calls(operator, []), x).total() == 2


def test_a_registered_formula_stands_above_the_tables_own(operator: Any) -> None:
    """The user knows better, also about an operator of torch's.

    By the table the layer has 3 * 4 * 8 MACs.
    """
    lflops.register_formula(torch.ops.aten.addmm, lambda bias, x, weight, out: 1000)
    assert lflops.count(nn.Linear(4, 8), x).total() == 1000


def test_a_formula_registered_for_one_overload_is_for_that_one(operator: Any) -> None:
    """`add.Tensor` multiplies something here, `add.Scalar` still does not."""
    lflops.register_formula(torch.ops.aten.add.Tensor, lambda x, y, out: 5)
    assert lflops.count(Calls(torch.ops.aten.add.Tensor, x), x).total() == 5
    assert lflops.count(Calls(torch.ops.aten.add.Scalar, 1), x).total() == 0


def test_the_formula_of_an_operator_takes_the_place_of_those_of_its_overloads(
    operator: Any,
) -> None:
    """It was the last to be given."""
    lflops.register_formula(torch.ops.aten.add.Tensor, lambda x, y, out: 5)
    lflops.register_formula(torch.ops.aten.add, lambda x, y, out: 6)
    assert [6, 6] == [
        lflops.count(Calls(add, y), x).total()
        for add, y in ((torch.ops.aten.add.Tensor, x), (torch.ops.aten.add.Scalar, 1))
    ]


def test_what_made_a_custom_operator_stands_for_it(operator: Any) -> None:
    """`torch.library.custom_op` gives no operator of torch.ops, but has one."""
    lflops.register_formula(blur, lambda *_, out: 7)
    assert lflops.count(Calls(blur, []), x).total() == 7


def test_a_formula_can_tell_of_work_that_is_no_multiply_accumulate(operator: Any) -> None:
    """7 MACs of two operations, and 5 more."""
    lflops.register_formula(operator, lambda *_, out: lflops.Cost(macs=7, other_flops=5))
    work = lflops.count(Calls(operator, []), x).modules[""].forward
    assert (7, 2 * 7 + 5) == (work.macs, work.flops)


aten = torch.ops.aten


@pytest.mark.parametrize(
    "whole",
    [aten.linear, aten.linear.default, aten.scaled_dot_product_attention, aten.einsum, aten.matmul],
    ids=str,
)
def test_what_is_taken_apart_takes_no_formula(whole: Any, operator: Any) -> None:
    """It would never be asked for; under grad, the operator does not arrive."""
    with pytest.raises(
        lflops.CountError, match=f"{whole} is decomposed before it is counted: register formulas"
    ):
        lflops.register_formula(whole, lambda *_, out: 1)
    assert {} == operator_costs._USERS


@pytest.mark.parametrize(
    "some", [aten.mm, aten.add, aten.std, aten._convolution, aten._fused_rms_norm], ids=str
)
def test_what_arrives_whole_if_only_here_and_there_takes_a_formula(
    some: Any, operator: Any
) -> None:
    """One of its overloads does, or it does on another device."""
    lflops.register_formula(some, lambda *_, out: 1)
    assert 1 == len(operator_costs._USERS)


def test_a_custom_operator_takes_a_formula_even_if_it_is_made_of_others(operator: Any) -> None:
    """Under inference mode it arrives whole."""
    library = torch.library.Library("lflops_composite", "DEF")
    library.define("halves(Tensor x) -> Tensor")
    library.impl("halves", lambda x: x.mul(0.5), "CompositeImplicitAutograd")
    lflops.register_formula(torch.ops.lflops_composite.halves, lambda *_, out: 7)
    with torch.inference_mode():
        assert lflops.count(Calls(torch.ops.lflops_composite.halves), x).total() == 7
    library._destroy()


def fail(*_: Any, **__: Any) -> int:
    """A formula that has a bug."""
    raise KeyError("kernel")


NONSENSE: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (fail, "KeyError: 'kernel'"),
    "takes too little": (lambda: 1, "TypeError: "),
    "text": (
        lambda *_, out: "many",
        "TypeError: a formula must return a whole number of MACs, not 'many'",
    ),
    "nothing": (
        lambda *_, out: None,
        "TypeError: a formula must return a whole number of MACs, not None",
    ),
    "a fraction": (
        lambda *_, out: 0.5,
        "TypeError: a formula must return a whole number of MACs, not 0.5",
    ),
    "less than nothing": (
        lambda *_, out: -1,
        "TypeError: a formula must return a whole number of MACs, not -1",
    ),
    "a cost of fractions": (
        lambda *_, out: lflops.Cost(macs=0.5),
        "TypeError: a formula's Cost must have whole numbers, not Cost(",
    ),
    "true": (
        lambda *_, out: True,
        "TypeError: a formula must return a whole number of MACs, not True",
    ),
}


@pytest.mark.parametrize(("formula", "error"), NONSENSE.values(), ids=NONSENSE)
def test_a_formula_that_fails_puts_its_operator_in_the_ledger(
    formula: Callable[..., Any], error: str, operator: Any
) -> None:
    """The run goes on, the other operators are counted, and a note and one warning say what was wrong."""
    lflops.register_formula(operator, formula)
    with pytest.warns(
        UserWarning, match=re.escape(f"no call is counted: tests::blur ({error}")
    ) as warned:
        profile = lflops.count(
            nn.Sequential(nn.Linear(4, 8), Calls(operator, []), Calls(operator, [])), x
        )
    assert len(warned) == 1
    assert profile.total() == 3 * 4 * 8
    assert [("1", "tests::blur", 1), ("2", "tests::blur", 1)] == [
        (each.module, each.operator, each.calls) for each in profile.unsupported
    ]
    (note,) = profile.notes
    assert ("formula_failed", "tests::blur") == (note.code, note.subject)
    assert str(note.values["error"]).startswith(error)


def test_torchs_own_formulas_are_not_touched(operator: Any) -> None:
    """Its registry belongs to the whole process."""
    before = dict(flop_registry)
    lflops.register_formula(operator, lambda *_, out: 1)
    lflops.count(Calls(operator, []), x)
    assert before == flop_registry
