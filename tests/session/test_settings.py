"""The monitors' arguments: each is a setting, and each setting is an argument, with the same default."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import lflops
from lflops.session.inputs.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "lightning.md"
MONITOR, SETTINGS = "FlopsMonitor.__init__ in lflops/lightning/monitor.py", "Settings in lflops/session/inputs/settings.py"


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function and their defaults."""
    return {
        each.name: each.default
        for each in inspect.signature(function).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }


def differences(arguments: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What to do about each argument without a setting, each setting without an argument, and each default that differs."""
    return [
        *[f"argument {name!r} is dropped: add a field {name} to {SETTINGS}" for name in arguments.keys() - settings.keys()],
        *[f"setting {name!r} cannot be given: add an argument {name} to {MONITOR}" for name in settings.keys() - arguments.keys()],
        *[
            f"{name} is {arguments[name]!r} in {MONITOR} and {settings[name]!r} in {SETTINGS}"
            for name in arguments.keys() & settings.keys()
            if arguments[name] != settings[name]
        ],
    ]


def unexplained(arguments: Iterable[str], docstring: str, page: str) -> list[str]:
    """What to write about each argument that the docstring's list, or the page's table, does not have."""
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    return [
        *[
            f"add {name} to the docstring of FlopsMonitor"
            for name in arguments
            if not re.search(rf"^    {name}: ", docstring, re.MULTILINE)
        ],
        *[f"add a row of {name} to {PAGE.name}" for name in arguments if not re.search(rf"`{name}[=`]", rows)],
    ]


def test_an_argument_of_the_callback_is_a_setting_of_the_same_default() -> None:
    """They are written twice: people and Lightning's CLI read a callback's signature. Defaults are those of `lflops.monitor` too."""
    settings = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    assert [] == differences(defaults_of(lflops.FlopsMonitor.__init__), settings)


def test_a_forgotten_side_would_be_seen() -> None:
    """The check above can fail, in three ways."""
    assert [f"argument 'colour' is dropped: add a field colour to {SETTINGS}"] == differences({"colour": 1}, {})
    assert [f"setting 'colour' cannot be given: add an argument colour to {MONITOR}"] == differences({}, {"colour": 1})
    assert [f"colour is 1 in {MONITOR} and 2 in {SETTINGS}"] == differences({"colour": 1}, {"colour": 2})


def test_every_argument_is_explained() -> None:
    """In the docstring, which is the reference, and in the page that people read first."""
    given = defaults_of(lflops.FlopsMonitor.__init__)
    assert [] == unexplained(given, inspect.getdoc(lflops.FlopsMonitor) or "", PAGE.read_text("utf-8"))


def test_an_unexplained_argument_would_be_seen() -> None:
    """Text that has the name elsewhere is no explanation."""
    said = ["add colour to the docstring of FlopsMonitor", f"add a row of colour to {PAGE.name}"]
    assert said == unexplained(["colour"], "A colour: any.", "`colour=1` is red.\n| `size=1` | of a colour, as `colour` |")
    assert [] == unexplained(["colour"], "Args:\n    colour: Any.", "| `size=1`, `colour` | any |")


def test_no_setting_has_the_name_of_an_argument_that_is_the_loop_s_own() -> None:
    """`lflops.monitor` takes the settings as keywords: one of its own arguments of the same name would hide the setting."""
    assert set() == defaults_of(lflops.monitor).keys() & {field.name for field in fields(Settings)}
