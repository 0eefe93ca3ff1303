"""The names that the package offers."""

import re
from pathlib import Path
from typing import Any

import pytest

import lflops
from lflops.extras import EXTRAS

PUBLIC = [
    "Cost",
    "CountError",
    "FlopsMonitor",
    "FlopsProfiler",
    "Hardware",
    "HardwareError",
    "Ledger",
    "LflopsError",
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
    "imbalance",
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
    "utilization",
    "what_if",
]


def test_the_public_names_are_these() -> None:
    """A name that comes or goes is a decision: it is written down here too."""
    assert PUBLIC == lflops.__all__, "PUBLIC in tests/test_public_names.py and the names in lflops/__init__.py differ"


def test_every_public_name_can_be_had_and_no_other() -> None:
    """By attribute and by star; each is documented, and is found by `dir`."""
    star: dict[str, Any] = {}
    exec("from lflops import *", star)  # noqa: S102 - the only way to see what a star brings
    assert set(PUBLIC) == star.keys() - {"__builtins__"}
    assert {name: star[name] for name in PUBLIC} == {name: getattr(lflops, name) for name in PUBLIC}
    assert set(PUBLIC) <= set(dir(lflops))
    assert [] == [name for name in PUBLIC if not star[name].__doc__]
    of_extras = {entry.partition(":")[2] for entries in EXTRAS.values() for entry in entries}
    assert set() == set(PUBLIC) - lflops._HOMES.keys() - of_extras, "_HOMES in lflops/__init__.py has the module of each public name"
    stub = re.findall(r" as (\w+)\b", Path(str(lflops.__file__)).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE)
    assert {*PUBLIC, "hardware", "tensorboard"} == set(stub), "PUBLIC and the names for type checkers in lflops/__init__.pyi differ"
    with pytest.raises(AttributeError, match="has no attribute 'estimates'"):
        _ = lflops.estimates


def test_a_function_is_not_hidden_by_the_module_that_it_lives_in() -> None:
    """`lflops.count` stays the function, however its neighbours are imported."""
    import lflops.collect.count
    import lflops.collect.counting

    assert lflops.count is lflops.collect.count.count


@pytest.mark.parametrize("error", [lflops.CountError, lflops.HardwareError, lflops.ProfileError, lflops.ScheduleError])
def test_every_error_is_an_error_of_lflops(error: type[Exception]) -> None:
    """One `except` catches all that lflops raises on purpose."""
    assert issubclass(error, lflops.LflopsError)
