"""Where formulas find their arguments in a trace, against torch's own schemas."""

import contextlib
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from lflops.flop_counter import operators
from lflops.formulas.table import FORMULAS, PLACES

assert operators, "importing them registers every formula"
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module(
        "torch.nn.attention.varlen"
    )  # which registers its operators when it is loaded; not every torch has it


GEOMETRY = ("stride", "padding", "dilation", "output_padding", "groups")
"""Arguments of convolutions that decide the shape of the result."""


def schema(operator: str) -> list[str] | None:
    """The names of an operator's arguments; `None` where this torch does not have it."""
    namespace, _, name = operator.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    overload = "default" if "default" in packet.overloads() else packet.overloads()[0]
    return [argument.name for argument in getattr(packet, overload)._schema.arguments]


def asked_for(operator: str) -> list[str]:
    """The arguments that a trace's reader needs by name."""
    parameters = inspect.signature(FORMULAS[operator]).parameters.values()
    names = [
        each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "out"
    ]
    return [*names, *GEOMETRY] if "conv" in operator and "backward" not in operator else names


@pytest.mark.parametrize("operator", sorted(FORMULAS))
def test_places_are_those_of_the_schema(operator: str) -> None:
    """All arguments that are asked for and that the schema has, and no others."""
    names = schema(operator)
    if names is None:
        pytest.skip(f"torch {torch.__version__} has no {operator}")
    found = {name: names.index(name) for name in asked_for(operator) if name in names}
    assert found == PLACES.get(operator, {}), (
        f"in lflops/formulas/argument_positions.toml the row of {operator} has to be {found}"
    )


def test_no_place_is_of_an_operator_without_a_formula() -> None:
    """What is left over when a formula goes."""
    assert set() == PLACES.keys() - FORMULAS.keys()


def test_traces_are_counted_by_every_formula_that_live_calls_are() -> None:
    """A family that one of the two does not import would be unknown to it.

    A process without torch has what the trace's reader imports.
    """
    code = "import lflops.trace.analysis.operator_cost; from lflops.formulas.table import FORMULAS; print(*FORMULAS)"
    registered = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert set(FORMULAS) == set(registered)
