"""The names that the package offers."""

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, get_type_hints

import pytest

import lflops
from tests.support.repository import ROOT

PUBLIC = [
    "Cost",
    "CountError",
    "FlopsMonitor",
    "FlopsProfiler",
    "Hardware",
    "HardwareError",
    "Ledger",
    "LflopsError",
    "LightningProfiler",
    "Profile",
    "ProfileError",
    "Schedule",
    "ScheduleError",
    "best_checkpointing",
    "calibrate",
    "count",
    "counting",
    "diff",
    "estimate",
    "explain",
    "get_model_profile",
    "largest_batch",
    "load",
    "load_run",
    "measure",
    "merge",
    "monitor",
    "plan",
    "register_formula",
    "roofline",
    "scope",
    "stragglers",
    "utilization",
    "what_if",
]


def test_the_public_names_are_these() -> None:
    """A name that comes or goes is a decision: it is written down here too."""
    assert PUBLIC == lflops.__all__, (
        "PUBLIC in tests/test_public_names.py and the names in lflops/__init__.pyi differ"
    )


def test_every_public_name_can_be_had_and_no_other() -> None:
    """By attribute and by star; each is documented, and is found by `dir`."""
    star: dict[str, Any] = {}
    exec("from lflops import *", star)  # noqa: S102 - the only way to see what a star brings
    assert set(PUBLIC) == star.keys() - {"__builtins__"}
    assert {name: star[name] for name in PUBLIC} == {name: getattr(lflops, name) for name in PUBLIC}
    assert [] == [name for name in PUBLIC if not star[name].__doc__]
    assert {*PUBLIC, "hardware", "tensorboard"} == set(dir(lflops))
    with pytest.raises(AttributeError, match="has no attribute 'estimates'"):
        _ = lflops.estimates


METHODS = (FunctionType, property, cached_property, classmethod, staticmethod)


def undocumented(offered: Iterable[Any]) -> Iterator[str]:
    """What has no docstring.

    Of functions, of classes and those that functions return, and of their methods.

    Those that a class of the same package has are its methods too. An override may have the
    docstring of what it overrides.
    """
    given = list(offered)
    returned = [get_type_hints(each).get("return") for each in given if inspect.isfunction(each)]
    classes = {
        each
        for each in (*given, *returned)
        if isinstance(each, type) and each.__module__ != "builtins"
    }
    yield from (each.__qualname__ for each in {*given, *classes} if not each.__doc__)
    for each in classes:
        package = each.__module__.partition(".")[0]
        members = {
            name: value
            for base in each.__mro__
            if base.__module__.partition(".")[0] == package
            for name, value in vars(base).items()
        }
        methods = [
            name
            for name, value in members.items()
            if isinstance(value, METHODS) and not name.startswith("_")
        ]
        documented = {
            name for base in each.__mro__ for name, value in vars(base).items() if value.__doc__
        }
        yield from (f"{each.__qualname__}.{name}" for name in methods if name not in documented)


def test_what_users_call_is_documented() -> None:
    """Every name of the package and of the reference, the methods of classes, and those of what functions return."""
    shown = re.findall(
        r"^::: (\S+)", (ROOT / "docs" / "reference" / "python.md").read_text("utf-8"), re.MULTILINE
    )
    assert "lflops.huggingface.FlopsCallback" in shown
    assert [] == sorted(
        undocumented(
            [resolve_name(path) for path in {*shown, *(f"lflops.{name}" for name in PUBLIC)}]
        )
    )


def test_what_is_not_documented_is_found() -> None:
    """A method, an inherited one, a property, a function, and a method of a class that a function returns."""

    class Base:
        """Documented."""

        def inherited(self) -> None: ...
        def overridden(self) -> None:
            """Documented."""

    class Offered(Base):
        """Documented."""

        def overridden(self) -> None: ...
        def method(self) -> None: ...
        @property
        def size(self) -> int:
            return 0

    def function() -> None: ...
    def returns() -> Offered:
        """Documented."""
        return Offered()

    of_class = {"Offered.inherited", "Offered.method", "Offered.size"}
    found = {name.rpartition("<locals>.")[2] for name in undocumented([Offered, function])}
    assert {*of_class, "function"} == found
    assert of_class == {name.rpartition("<locals>.")[2] for name in undocumented([returns])}


def test_a_function_is_not_hidden_by_the_module_that_it_lives_in() -> None:
    """`lflops.count` stays the function, however its neighbours are imported."""
    import lflops.flop_counter
    import lflops.flop_counter.count

    assert lflops.count is lflops.flop_counter.count.count


@pytest.mark.parametrize(
    "error", [lflops.CountError, lflops.HardwareError, lflops.ProfileError, lflops.ScheduleError]
)
def test_every_error_is_an_error_of_lflops(error: type[Exception]) -> None:
    """One `except` catches all that lflops raises on purpose."""
    assert issubclass(error, lflops.LflopsError)
