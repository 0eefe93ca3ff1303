"""Formulas of the user's own: they are called as the operator was, the last one counts, and one that fails breaks nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import lflops
from lflops.collect.counting.formulas import table

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
    monkeypatch.setattr(table, "_USERS", {})
    return torch.ops.tests.blur


def test_an_operator_without_a_formula_is_in_the_ledger(operator: Any) -> None:
    """One call, that read 3 * 4 floats and wrote as many, and is in no total."""
    profile = lflops.count(Calls(operator, []), x)
    (entry,) = profile.uncounted
    assert ("tests::blur", "forward", 1, 2 * 4 * 12) == (entry.operator, entry.phase, entry.calls, entry.bytes)
    assert profile.total() == 0


def test_an_operator_without_a_formula_in_an_ignored_module_is_not_in_the_ledger(operator: Any) -> None:
    """The ledger lists what is missing from the totals; what was to be left out is not missed."""
    model = nn.Sequential(Calls(operator, []))
    assert ["tests::blur"] == [each.operator for each in lflops.count(model, x).uncounted]
    assert () == lflops.count(model, x, ignore=["0"]).uncounted


def test_a_registered_formula_counts_an_operator_of_the_users(operator: Any) -> None:
    """It is called as the operator was, with shapes for tensors and the result's shape."""
    seen = []

    def formula(*args: Any, out: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs, out))
        return 7

    lflops.register_formula(operator, formula)
    profile = lflops.count(Calls(operator, [torch.ones(2, 2), torch.ones(3)], width=5), x)
    assert [(((3, 4), [(2, 2), (3,)]), {"width": 5}, (3, 4))] == seen
    assert () == profile.uncounted
    assert {"": {"tests::blur": 7}} == profile.by_module_and_operator()
    assert profile.modules[""].forward.flops == 14


@pytest.mark.parametrize("last", [lambda packet: packet, lambda packet: packet.default], ids=["packet", "overload"])
@pytest.mark.parametrize("first", [lambda packet: packet, lambda packet: packet.default], ids=["packet", "overload"])
def test_the_last_formula_that_was_registered_counts(first: Callable[[Any], Any], last: Callable[[Any], Any], operator: Any) -> None:
    """Whether the operator or its only overload was named."""
    lflops.register_formula(first(operator), lambda *_, out: 1)
    lflops.register_formula(last(operator), lambda *_, out: 2)
    assert lflops.count(Calls(operator, []), x).total() == 2


def test_a_registered_formula_stands_above_the_tables_own(operator: Any) -> None:
    """The user knows better, also about an operator of torch's; by the table the layer has 3 * 4 * 8 MACs."""
    lflops.register_formula(torch.ops.aten.addmm, lambda bias, x, weight, out: 1000)
    assert lflops.count(nn.Linear(4, 8), x).total() == 1000


def test_a_formula_registered_for_one_overload_is_for_that_one(operator: Any) -> None:
    """`add.Tensor` multiplies something here, `add.Scalar` still does not."""
    lflops.register_formula(torch.ops.aten.add.Tensor, lambda x, y, out: 5)
    assert lflops.count(Calls(torch.ops.aten.add.Tensor, x), x).total() == 5
    assert lflops.count(Calls(torch.ops.aten.add.Scalar, 1), x).total() == 0


def fail(*_: Any, **__: Any) -> int:
    """A formula that has a bug."""
    raise KeyError("kernel")


NONSENSE: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (fail, "KeyError: 'kernel'"),
    "takes too little": (lambda: 1, "TypeError: "),
    "text": (lambda *_, out: "many", "TypeError: a formula gives a whole number of MACs, not 'many'"),
    "nothing": (lambda *_, out: None, "TypeError: a formula gives a whole number of MACs, not None"),
    "a fraction": (lambda *_, out: 0.5, "TypeError: a formula gives a whole number of MACs, not 0.5"),
    "less than nothing": (lambda *_, out: -1, "TypeError: a formula gives a whole number of MACs, not -1"),
    "true": (lambda *_, out: True, "TypeError: a formula gives a whole number of MACs, not True"),
}


@pytest.mark.parametrize(("formula", "error"), NONSENSE.values(), ids=NONSENSE)
def test_a_formula_that_fails_puts_its_operator_in_the_ledger(formula: Callable[..., Any], error: str, operator: Any) -> None:
    """The run goes on, the other operators are counted, and a note says what was wrong."""
    lflops.register_formula(operator, formula)
    profile = lflops.count(nn.Sequential(nn.Linear(4, 8), Calls(operator, []), Calls(operator, [])), x)
    assert profile.total() == 3 * 4 * 8
    assert [("1", "tests::blur", 1), ("2", "tests::blur", 1)] == [(each.module, each.operator, each.calls) for each in profile.uncounted]
    (note,) = profile.notes
    assert ("formula_failed", "tests::blur") == (note.code, note.subject)
    assert str(note.values["error"]).startswith(error)


def test_torchs_own_formulas_are_not_touched(operator: Any) -> None:
    """Its registry belongs to the whole process."""
    before = dict(flop_registry)
    lflops.register_formula(operator, lambda *_, out: 1)
    lflops.count(Calls(operator, []), x)
    assert before == flop_registry
