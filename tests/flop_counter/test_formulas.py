"""Every formula by itself: a pure function of shapes, compared with what a pencil says."""

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
    """Those that a case is about, with their namespaces."""
    return [
        operator if "::" in operator else f"aten::{operator}" for operator in case.operators.split()
    ]


COVERED = {operator for case in CASES for operator in operators(case)}


def answer(formula: Formula, case: Case) -> Cost:
    """What a formula says, every figure filled in."""
    result = formula(*case.args, **case.kwargs)
    return whole(result if isinstance(result, Cost) else Cost(result))


def whole(cost: Cost) -> Cost:
    """A cost that says it in full.

    What nothing is skipped of is executed, what is not computed again is nothing.
    """
    again = whole(cost.recompute) if cost.recompute else Cost(executed_macs=0)
    return cost._replace(
        executed_macs=cost.macs if cost.executed_macs is None else cost.executed_macs,
        recompute=again,
    )


def holds(formula: Formula, case: Case) -> bool:
    """Whether a formula gives what the case expects."""
    return whole(case.expected) == answer(formula, case)


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.operators.split()[0]}-{place}" for place, case in enumerate(CASES)]
)
def test_a_formula_says_what_a_pencil_says(case: Case) -> None:
    """The cost of one call, for every operator that the formula stands for."""
    for operator in operators(case):
        assert whole(case.expected) == answer(FORMULAS[operator], case)


def test_every_formula_has_a_case() -> None:
    """No operator is in the table without somebody having worked a number out by hand.

    And no case is about none.
    """
    where = "the family's list of cases in tests/support/ (formula_cases.py, formula_family_cases.py, …)"
    assert not FORMULAS.keys() - COVERED, (
        f"formulas without a case: {sorted(FORMULAS.keys() - COVERED)}; add them to {where}"
    )
    assert not COVERED - FORMULAS.keys(), (
        f"cases without a formula: {sorted(COVERED - FORMULAS.keys())}; look for them in {where}"
    )


def mutants(formula: Formula) -> Iterator[Formula]:
    """The formula with one more in one of its figures."""

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
    """The cases would not let a wrong formula through."""
    cases = [case for case in CASES if operator in operators(case)]
    for mutant in mutants(FORMULAS[operator]):
        assert not all(holds(mutant, case) for case in cases)


def schemas(operator: str) -> list[dict[str, str]]:
    """The arguments of an operator's overloads, name to type, in their order."""
    namespace, _, packet_name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        pytest.skip(f"torch {torch.__version__} has no {operator}")
    overloads = [
        overload for overload in packet.overloads() if "dimname" not in overload
    ]  # torch 2.11 has these still
    return [
        {each.name: str(each.type) for each in getattr(packet, overload)._schema.arguments}
        for overload in overloads
    ]


@pytest.mark.parametrize("operator", sorted(COVERED))
def test_a_formula_takes_its_shapes_from_tensors(operator: str) -> None:
    """What it takes by position is where the schema has a tensor or a list of sizes.

    `None` only where that may be missing.
    """
    if operator == "aten::_fused_rms_norm" and not hasattr(
        torch.ops.aten, "_fused_rms_norm_backward"
    ):
        pytest.skip(
            "there it is Apple's alone, and takes how many dimensions it is, which the formula does not need"
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
    """Every keyword without a default is an argument of the operator, in one of its overloads at least, or is its result."""
    keywords = [
        each
        for each in inspect.signature(FORMULAS[operator]).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    wanted = {each.name for each in keywords if each.default is each.empty} - {"out"}
    assert any(wanted <= arguments.keys() for arguments in schemas(operator))


def name_of(formula: Formula) -> str:
    """With the file that it is in: packages have functions of the same name."""
    return f"{formula.__module__.rpartition('.')[2]}.{formula.__name__}"


@pytest.mark.parametrize(
    "formula", sorted({FORMULAS[operator] for operator in COVERED}, key=name_of), ids=name_of
)
def test_no_keyword_of_a_formula_is_without_an_operator(formula: Formula) -> None:
    """A keyword that none of its operators has would never be anything but its default."""
    wanted = {
        each.name
        for each in inspect.signature(formula).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    }
    found = {
        name
        for operator in COVERED
        if FORMULAS[operator] is formula
        for arguments in schemas(operator)
        for name in arguments
    }
    assert set() == wanted - found - {"out"}
