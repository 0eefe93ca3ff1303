"""Test every formula, a pure function of shapes, against numbers worked out by hand."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lflops.formulas import table
from lflops.formulas.table import Cost, Formula, Shape
from tests.support.formula_cases import CASES as CORE_CASES, Case
from tests.support.formula_family_cases import CASES as FAMILY_CASES
from tests.support.linear_algebra_cases import CASES as LINEAR_ALGEBRA_CASES
from tests.support.package_cases import CASES as PACKAGE_CASES
from tests.support.packed_formula_cases import CASES as PACKED_CASES

table.load_families()
FORMULAS = table.FORMULAS
CASES = [*CORE_CASES, *FAMILY_CASES, *LINEAR_ALGEBRA_CASES, *PACKED_CASES, *PACKAGE_CASES]


def operators(case: Case) -> list[str]:
    """Return the operators of a case, with their namespaces."""
    names = []
    for operator in case.operators.split():
        has_namespace = "::" in operator
        names.append(operator if has_namespace else f"aten::{operator}")
    return names


COVERED = {operator for case in CASES for operator in operators(case)}


def answer(formula: Formula, case: Case) -> Cost:
    """Return the cost by a formula, with every field filled in."""
    result = formula(*case.args, **case.kwargs)
    return whole(result if isinstance(result, Cost) else Cost(result))


def whole(cost: Cost) -> Cost:
    """Return a cost with every field filled in.

    By default all MACs are executed, and nothing is recomputed.
    """
    again = whole(cost.recompute) if cost.recompute else Cost(executed_macs=0)
    return cost._replace(
        executed_macs=cost.macs if cost.executed_macs is None else cost.executed_macs,
        recompute=again,
    )


def holds(formula: Formula, case: Case) -> bool:
    """Return whether a formula gives the expected cost of a case."""
    return whole(case.expected) == answer(formula, case)


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.operators.split()[0]}-{place}" for place, case in enumerate(CASES)]
)
def test_a_formula_says_what_a_pencil_says(case: Case) -> None:
    """Each operator's formula gives the cost of one call that was worked out by hand."""
    for operator in operators(case):
        assert whole(case.expected) == answer(FORMULAS[operator], case)


def test_every_formula_has_a_case() -> None:
    """Every operator in the table has a case worked out by hand, and every case has a formula."""
    where = "the family's list of cases in tests/support/ (formula_cases.py, formula_family_cases.py, …)"
    assert not FORMULAS.keys() - COVERED, (
        f"formulas without a case: {sorted(FORMULAS.keys() - COVERED)}; add them to {where}"
    )
    assert not COVERED - FORMULAS.keys(), (
        f"cases without a formula: {sorted(COVERED - FORMULAS.keys())}; look for them in {where}"
    )


def mutants(formula: Formula) -> Iterator[Formula]:
    """Return variants of the formula that return one more in one field of the cost."""

    def mutant(figure: str) -> Formula:
        def changed(*args: Any, **kwargs: Any) -> Cost:
            result = formula(*args, **kwargs)
            cost = whole(result if isinstance(result, Cost) else Cost(result))
            if figure == "recompute":
                return cost._replace(recompute=Cost(1))
            return cost._replace(**{figure: getattr(cost, figure) + 1})

        return changed

    yield from map(mutant, ("macs", "executed_macs", "other_flops", "recompute"))


@pytest.mark.parametrize("operator", sorted(COVERED))
def test_one_more_in_any_figure_of_a_formula_is_noticed(operator: str) -> None:
    """The cases detect a formula that is wrong in any field of the cost."""
    cases = [case for case in CASES if operator in operators(case)]
    for mutant in mutants(FORMULAS[operator]):
        assert not all(holds(mutant, case) for case in cases)


def schemas(operator: str) -> list[dict[str, str]]:
    """Return the arguments of an operator's overloads, in order, as a map from name to type."""
    namespace, _, packet_name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        pytest.skip(f"torch {torch.__version__} has no {operator}")
    found = []
    for overload in packet.overloads():
        # torch 2.11 still has overloads for named dimensions.
        if "dimname" in overload:
            continue
        arguments = getattr(packet, overload)._schema.arguments
        found.append({each.name: str(each.type) for each in arguments})
    return found


@pytest.mark.parametrize("operator", sorted(COVERED))
def test_a_formula_takes_its_shapes_from_tensors(operator: str) -> None:
    """A formula accepts a shape where the operator's schema has a tensor or a list of sizes.

    The shape may be `None` only if the argument is optional.
    """
    if operator == "aten::_fused_rms_norm" and not hasattr(
        torch.ops.aten, "_fused_rms_norm_backward"
    ):
        pytest.skip(
            "in this torch only Apple devices have the operator, with another argument list"
        )
    accepted = {
        Shape: {"Tensor", "List[int]"},
        Shape | None: {"Tensor", "Optional[Tensor]"},
        int: {"int"},
    }
    for arguments in schemas(operator):
        given = [
            each
            for each in inspect.signature(FORMULAS[operator]).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        for parameter, kind in zip(given, arguments.values(), strict=False):
            assert kind in accepted.get(parameter.annotation, {kind}), f"{parameter.name} is {kind}"


@pytest.mark.parametrize("operator", sorted(COVERED))
def test_what_a_formula_asks_for_by_name_is_there(operator: str) -> None:
    """Every required keyword of a formula is an argument of some overload of the operator.

    The only exception is `out`, the result.
    """
    keywords = [
        each
        for each in inspect.signature(FORMULAS[operator]).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    wanted = {each.name for each in keywords if each.default is each.empty} - {"out"}
    assert any(wanted <= arguments.keys() for arguments in schemas(operator))


def name_of(formula: Formula) -> str:
    """Return the name with its file, because packages have functions of the same name."""
    return f"{formula.__module__.rpartition('.')[2]}.{formula.__name__}"


@pytest.mark.parametrize(
    "formula", sorted({FORMULAS[operator] for operator in COVERED}, key=name_of), ids=name_of
)
def test_no_keyword_of_a_formula_is_without_an_operator(formula: Formula) -> None:
    """Every keyword of a formula is an argument of one of its operators.

    Otherwise the keyword would always have its default.
    """
    wanted = {
        each.name
        for each in inspect.signature(formula).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    }
    found: set[str] = set()
    for operator in COVERED:
        if FORMULAS[operator] is formula:
            for arguments in schemas(operator):
                found.update(arguments)
    assert set() == wanted - found - {"out"}
