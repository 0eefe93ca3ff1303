"""Test that the arguments of the monitors are the fields of `Settings`, and are all documented."""

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
    """Return the defaults of a function's arguments by name, without `self` and `**kwargs`."""
    defaults = {}
    for each in inspect.signature(function).parameters.values():
        if each.name != "self" and each.kind is not each.VAR_KEYWORD:
            defaults[each.name] = each.default
    return defaults


def unexplained(arguments: Iterable[str], docstring: str, page: str) -> list[str]:
    """Return a message for each argument that the docstring or the page's tables do not have."""
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    messages = []
    for name in arguments:
        if not re.search(rf"^    {name}: ", docstring, re.MULTILINE):
            messages.append(f"add {name} to the docstring of FlopsMonitor")
        if not re.search(rf"`{name}[=`]", rows):
            messages.append(f"add a row of {name} to {PAGE.name}")
    return messages


def test_the_callback_s_arguments_are_the_settings_in_their_order() -> None:
    """`FlopsMonitor` has the fields of `Settings` as arguments, in the same order.

    Its docstring has the same order. All arguments except `schedule` are keyword-only, and an
    unknown argument is an error.
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
        # If mypy did not find this error, it would warn that the comment is unused.
        lflops.FlopsMonitor(colour=1)  # type: ignore[call-arg]


def test_every_argument_is_explained() -> None:
    """Every argument is in the docstring of `FlopsMonitor` and in a table of the reference page."""
    given = defaults_of(lflops.FlopsMonitor.__init__)
    assert [] == unexplained(
        given, inspect.getdoc(lflops.FlopsMonitor) or "", PAGE.read_text("utf-8")
    )


def test_an_unexplained_argument_would_be_seen() -> None:
    """A missing argument is found even if its name occurs elsewhere in the text."""
    said = ["add colour to the docstring of FlopsMonitor", f"add a row of colour to {PAGE.name}"]
    assert said == unexplained(
        ["colour"], "A colour: any.", "`colour=1` is red.\n| `size=1` | of a colour, as `colour` |"
    )
    assert [] == unexplained(["colour"], "Args:\n    colour: Any.", "| `size=1`, `colour` | any |")


def test_no_setting_has_the_name_of_an_argument_that_is_the_loop_s_own() -> None:
    """No argument of `lflops.monitor` has the name of a setting.

    `lflops.monitor` accepts the settings as keywords, so such an argument would hide the setting.
    """
    assert set() == defaults_of(lflops.monitor).keys() & {field.name for field in fields(Settings)}
