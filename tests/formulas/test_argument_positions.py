"""Test the positions of formulas' arguments in a trace against torch's own schemas."""

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

assert operators, "the import registers every formula"
# The import registers the operators of variable-length attention, which not every torch has.
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("torch.nn.attention.varlen")


GEOMETRY = ("stride", "padding", "dilation", "output_padding", "groups")
"""Arguments of a convolution that determine the shape of the result."""


def schema(operator: str) -> list[str] | None:
    """Return the names of an operator's arguments, or `None` if this torch lacks the operator."""
    namespace, _, name = operator.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    overload = "default" if "default" in packet.overloads() else packet.overloads()[0]
    return [argument.name for argument in getattr(packet, overload)._schema.arguments]


def asked_for(operator: str) -> list[str]:
    """Return the arguments that the reader of a trace needs by name."""
    parameters = inspect.signature(FORMULAS[operator]).parameters.values()
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    names = [name for name in keywords if name != "out"]
    is_convolution = "conv" in operator and "backward" not in operator
    return [*names, *GEOMETRY] if is_convolution else names


@pytest.mark.parametrize("operator", sorted(FORMULAS))
def test_places_are_those_of_the_schema(operator: str) -> None:
    """The table has the positions of all needed arguments in the schema, and no others."""
    names = schema(operator)
    if names is None:
        pytest.skip(f"torch {torch.__version__} has no {operator}")
    found = {name: names.index(name) for name in asked_for(operator) if name in names}
    assert found == PLACES.get(operator, {}), (
        f"in lflops/formulas/argument_positions.toml the row of {operator} has to be {found}"
    )


def test_no_place_is_of_an_operator_without_a_formula() -> None:
    """No position remains in the table after its formula is removed."""
    assert set() == PLACES.keys() - FORMULAS.keys()


def test_traces_are_counted_by_every_formula_that_live_calls_are() -> None:
    """Traces and running steps are counted with the same formulas.

    A process that imports only the reader of traces has every formula that this process has.
    """
    code = "import lflops.trace.analysis.operator_cost; from lflops.formulas.table import FORMULAS; print(*FORMULAS)"
    registered = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert set(FORMULAS) == set(registered)
