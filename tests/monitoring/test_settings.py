"""The monitors' arguments: they are the settings, each of which is explained."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lflops
from lflops.monitoring.inputs.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "monitor.md"


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function and their defaults."""
    return {
        each.name: each.default
        for each in inspect.signature(function).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }


def unexplained(arguments: Iterable[str], docstring: str, page: str) -> list[str]:
    """What to write about each argument that the docstring's list, or the page's table, does not have."""
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    return [
        *[
            f"add {name} to the docstring of FlopsMonitor"
            for name in arguments
            if not re.search(rf"^    {name}: ", docstring, re.MULTILINE)
        ],
        *[
            f"add a row of {name} to {PAGE.name}"
            for name in arguments
            if not re.search(rf"`{name}[=`]", rows)
        ],
    ]


def test_the_callback_s_arguments_are_the_settings_in_their_order() -> None:
    """They are written once.

    Their defaults are those of `lflops.monitor` too, and the docstring has the same order.
    """
    given = inspect.signature(lflops.FlopsMonitor).parameters
    documented = re.findall(
        r"^    (\w+): ", inspect.getdoc(lflops.FlopsMonitor) or "", re.MULTILINE
    )
    assert list(given) == [each.name for each in fields(Settings)] == documented[: len(given)]
    assert [given["schedule"].kind] == [
        each.kind for each in given.values() if each.kind is not each.KEYWORD_ONLY
    ]
    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument 'colour'"):
        lflops.FlopsMonitor(colour=1)  # type: ignore[call-arg]  # mypy sees it, or warns of this comment


def test_every_argument_is_explained() -> None:
    """In the docstring, which is the reference, and in the page that people read first."""
    given = defaults_of(lflops.FlopsMonitor.__init__)
    assert [] == unexplained(
        given, inspect.getdoc(lflops.FlopsMonitor) or "", PAGE.read_text("utf-8")
    )


def test_an_unexplained_argument_would_be_seen() -> None:
    """Text that has the name elsewhere is no explanation."""
    said = ["add colour to the docstring of FlopsMonitor", f"add a row of colour to {PAGE.name}"]
    assert said == unexplained(
        ["colour"], "A colour: any.", "`colour=1` is red.\n| `size=1` | of a colour, as `colour` |"
    )
    assert [] == unexplained(["colour"], "Args:\n    colour: Any.", "| `size=1`, `colour` | any |")


def test_no_setting_has_the_name_of_an_argument_that_is_the_loop_s_own() -> None:
    """`lflops.monitor` takes the settings as keywords.

    One of its own arguments of the same name would hide the setting.
    """
    assert set() == defaults_of(lflops.monitor).keys() & {field.name for field in fields(Settings)}
