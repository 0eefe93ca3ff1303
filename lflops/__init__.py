"""Measure the FLOPs, bytes and milliseconds of a PyTorch training run.

Names are loaded when they are first used, so importing the package is fast and reading profiles
does not require torch. `__init__.pyi` lists the names, for this module and for type checkers.
"""

import importlib
from typing import Any


def _read_stub() -> dict[str, str]:
    """Return the name of the module that contains each public name, keyed by the public name.

    The names are read from lines of `__init__.pyi` such as `from lflops.errors import A as A`.
    """
    homes: dict[str, str] = {}
    home = ""
    # Importing pathlib would take longer than the rest of this module.
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH123
        for line in stub:
            words = line.split()
            if words[:1] == ["from"]:
                home = words[1]
            for place, word in enumerate(words):
                if word == "as":
                    name = words[place + 1].strip(",")
                    homes[name] = home
    return homes


_HOMES = _read_stub()

__all__ = sorted(name for name, home in _HOMES.items() if home != __name__)  # noqa: PLE0605 - type checkers read the stub


def __getattr__(name: str) -> Any:
    """Load a public name and cache it."""
    if name == "__version__":
        return importlib.import_module("lflops.version").__version__
    missing = AttributeError(f"module 'lflops' has no attribute {name!r}")
    home = _HOMES.get(name)
    if home is None:
        raise missing
    # The name is a module, such as `lflops.hardware`.
    if home == __name__:
        return importlib.import_module(f"lflops.{name}")
    try:
        found = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        # The name belongs to an extra (an optional folder of lflops) that was removed.
        if error.name == home.rpartition(".")[0]:
            raise missing from None
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_HOMES)
