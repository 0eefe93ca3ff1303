"""Test the public names of the package and their documentation."""

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
    """A public name is added or removed on purpose: the change is also made in `PUBLIC`."""
    assert PUBLIC == lflops.__all__, (
        "PUBLIC in tests/test_public_names.py and the names in lflops/__init__.pyi differ"
    )


def test_every_public_name_can_be_had_and_no_other() -> None:
    """Attributes, `import *` and `dir` offer the same public names, and each has a docstring.

    `dir` also contains the folders `hardware` and `tensorboard`, whose names users import.
    """
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
    """Yield the names of functions, classes and methods without a docstring.

    Checked are the offered objects, the classes that offered functions return, and the methods of
    all these classes. Methods that a class inherits from a class of the same package are included.
    A method that overrides another may use the docstring of the overridden method.
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
        for name in undocumented_methods(each):
            yield f"{each.__qualname__}.{name}"


def undocumented_methods(owner: type) -> list[str]:
    """Return the names of a class's public methods that have no docstring in any base class."""
    package = owner.__module__.partition(".")[0]
    methods: set[str] = set()
    documented: set[str] = set()
    for base in owner.__mro__:
        is_own = base.__module__.partition(".")[0] == package
        for name, value in vars(base).items():
            if value.__doc__:
                documented.add(name)
            if is_own and isinstance(value, METHODS) and not name.startswith("_"):
                methods.add(name)
    return sorted(methods - documented)


def test_what_users_call_is_documented() -> None:
    """Every function, class and method that users call has a docstring.

    These are the names in `PUBLIC`, the names in the Python reference, and the methods of classes
    that their functions return.
    """
    reference = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    shown = re.findall(r"^::: (\S+)", reference, re.MULTILINE)
    assert "lflops.huggingface.FlopsCallback" in shown
    paths = {*shown, *(f"lflops.{name}" for name in PUBLIC)}
    assert [] == sorted(undocumented([resolve_name(path) for path in paths]))


def test_what_is_not_documented_is_found() -> None:
    """`undocumented` finds each kind of object without a docstring.

    These are a method, an inherited method, a property, a function, and the methods of a class that
    a function returns.
    """

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
    """`lflops.count` stays the function after the module with the same name was imported."""
    import lflops.flop_counter
    import lflops.flop_counter.count

    assert lflops.count is lflops.flop_counter.count.count


@pytest.mark.parametrize(
    "error", [lflops.CountError, lflops.HardwareError, lflops.ProfileError, lflops.ScheduleError]
)
def test_every_error_is_an_error_of_lflops(error: type[Exception]) -> None:
    """`except lflops.LflopsError` catches all errors that lflops raises on purpose."""
    assert issubclass(error, lflops.LflopsError)
