"""Test formulas that users register.

A formula gets the operator's arguments, the last registered formula counts, and a formula that
fails does not end the run.
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
    """A module that calls an operator with fixed further arguments."""

    def __init__(self, operator: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.operator = operator
        self.arguments = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.arguments
        return self.operator(x, *args, **kwargs)


@torch.library.custom_op("tests::blur", mutates_args=())
def blur(x: Tensor, kernels: list[Tensor], *, width: int = 3) -> Tensor:
    """An operator for which lflops has no formula."""
    return x.clone()


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a user's operator; formulas that a test registers are removed after it."""
    monkeypatch.setattr(operator_costs, "_USERS", {})
    return torch.ops.tests.blur


def test_an_operator_without_a_formula_is_in_the_ledger(operator: Any) -> None:
    """An operator without a formula is listed with its calls and bytes, and is in no total.

    It reads 3 * 4 floats and writes as many.
    """
    profile = lflops.count(Calls(operator, []), x)
    (entry,) = profile.unsupported
    assert "tests::blur" == entry.operator
    assert "forward" == entry.phase
    assert 1 == entry.calls
    assert 2 * 4 * 12 == entry.bytes
    assert profile.total() == 0


def test_an_operator_without_a_formula_in_an_ignored_module_is_not_in_the_ledger(
    operator: Any,
) -> None:
    """An ignored module adds no unsupported operators.

    They are the operators that are missing from the totals, and an ignored module is not missing.
    """
    model = nn.Sequential(Calls(operator, []))
    assert ["tests::blur"] == [each.operator for each in lflops.count(model, x).unsupported]
    assert () == lflops.count(model, x, ignore=["0"]).unsupported


def test_a_registered_formula_counts_an_operator_of_the_users(operator: Any) -> None:
    """A formula gets the operator's arguments and its result, with shapes instead of tensors."""
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
    """The last formula counts, whether the operator or its only overload was passed."""
    lflops.register_formula(first(operator), lambda *_, out: 1)
    lflops.register_formula(last(operator), lambda *_, out: 2)
    assert lflops.count(Calls(operator, []), x).total() == 2


def test_a_registered_formula_stands_above_the_tables_own(operator: Any) -> None:
    """A user's formula replaces the built-in one, also for an operator of torch.

    The built-in formula would count 3 * 4 * 8 MACs.
    """
    lflops.register_formula(torch.ops.aten.addmm, lambda bias, x, weight, out: 1000)
    assert lflops.count(nn.Linear(4, 8), x).total() == 1000


def test_a_formula_registered_for_one_overload_is_for_that_one(operator: Any) -> None:
    """A formula for `add.Tensor` does not apply to `add.Scalar`."""
    lflops.register_formula(torch.ops.aten.add.Tensor, lambda x, y, out: 5)
    assert lflops.count(Calls(torch.ops.aten.add.Tensor, x), x).total() == 5
    assert lflops.count(Calls(torch.ops.aten.add.Scalar, 1), x).total() == 0


def test_the_formula_of_an_operator_takes_the_place_of_those_of_its_overloads(
    operator: Any,
) -> None:
    """A formula for an operator replaces earlier formulas for its overloads."""
    lflops.register_formula(torch.ops.aten.add.Tensor, lambda x, y, out: 5)
    lflops.register_formula(torch.ops.aten.add, lambda x, y, out: 6)
    assert 6 == lflops.count(Calls(torch.ops.aten.add.Tensor, x), x).total()
    assert 6 == lflops.count(Calls(torch.ops.aten.add.Scalar, 1), x).total()


def test_what_made_a_custom_operator_stands_for_it(operator: Any) -> None:
    """The object that `torch.library.custom_op` returns can be passed instead of the operator.

    It is no operator of `torch.ops`, but it has one.
    """
    lflops.register_formula(blur, lambda *_, out: 7)
    assert lflops.count(Calls(blur, []), x).total() == 7


def test_a_formula_can_tell_of_work_that_is_no_multiply_accumulate(operator: Any) -> None:
    """A `Cost` has MACs, of two FLOPs each, and other FLOPs."""
    lflops.register_formula(operator, lambda *_, out: lflops.Cost(macs=7, other_flops=5))
    work = lflops.count(Calls(operator, []), x).modules[""].forward
    assert 7 == work.macs
    assert 2 * 7 + 5 == work.flops


aten = torch.ops.aten


@pytest.mark.parametrize(
    "whole",
    [aten.linear, aten.linear.default, aten.scaled_dot_product_attention, aten.einsum, aten.matmul],
    ids=str,
)
def test_what_is_taken_apart_takes_no_formula(whole: Any, operator: Any) -> None:
    """Registering a formula for a decomposed operator is an error.

    With gradients enabled, torch decomposes these operators before the dispatch mode receives them,
    so the formula would never be used.
    """
    with pytest.raises(
        lflops.CountError,
        match=f"torch replaces {whole} by other operators before lflops can count it",
    ):
        lflops.register_formula(whole, lambda *_, out: 1)
    assert {} == operator_costs._USERS


@pytest.mark.parametrize(
    "some", [aten.mm, aten.add, aten.std, aten._convolution, aten._fused_rms_norm], ids=str
)
def test_what_arrives_whole_if_only_here_and_there_takes_a_formula(
    some: Any, operator: Any
) -> None:
    """A formula is accepted if any overload of the operator is dispatched whole, on any device."""
    lflops.register_formula(some, lambda *_, out: 1)
    assert 1 == len(operator_costs._USERS)


def test_a_custom_operator_takes_a_formula_even_if_it_is_made_of_others(operator: Any) -> None:
    """A composite custom operator accepts a formula, because inference mode dispatches it whole."""
    library = torch.library.Library("lflops_composite", "DEF")
    library.define("halves(Tensor x) -> Tensor")
    library.impl("halves", lambda x: x.mul(0.5), "CompositeImplicitAutograd")
    lflops.register_formula(torch.ops.lflops_composite.halves, lambda *_, out: 7)
    with torch.inference_mode():
        assert lflops.count(Calls(torch.ops.lflops_composite.halves), x).total() == 7
    library._destroy()


def fail(*_: Any, **__: Any) -> int:
    """A formula that raises an error."""
    raise KeyError("kernel")


NONSENSE: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (fail, "KeyError: 'kernel'"),
    "takes too little": (lambda: 1, "TypeError: "),
    "text": (
        lambda *_, out: "many",
        "TypeError: the formula returned 'many': return a whole number of MACs",
    ),
    "nothing": (
        lambda *_, out: None,
        "TypeError: the formula returned None: return a whole number of MACs",
    ),
    "a fraction": (
        lambda *_, out: 0.5,
        "TypeError: the formula returned 0.5: return a whole number of MACs",
    ),
    "less than nothing": (
        lambda *_, out: -1,
        "TypeError: the formula returned -1: return a whole number of MACs",
    ),
    "a cost of fractions": (
        lambda *_, out: lflops.Cost(macs=0.5),
        "TypeError: the formula returned Cost(",
    ),
    "true": (
        lambda *_, out: True,
        "TypeError: the formula returned True: return a whole number of MACs",
    ),
}


@pytest.mark.parametrize(("formula", "error"), NONSENSE.values(), ids=NONSENSE)
def test_a_formula_that_fails_puts_its_operator_in_the_ledger(
    formula: Callable[..., Any], error: str, operator: Any
) -> None:
    """If a formula fails, its operator is unsupported and the other operators are counted.

    The run continues; a note and one warning contain the error.
    """
    lflops.register_formula(operator, formula)
    with pytest.warns(
        UserWarning, match=re.escape(f"because their formulas failed: tests::blur ({error}")
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
    """Registering a formula does not change torch's registry, which the whole process shares."""
    before = dict(flop_registry)
    lflops.register_formula(operator, lambda *_, out: 1)
    lflops.count(Calls(operator, []), x)
    assert before == flop_registry
