"""Where the FLOPs, bytes and milliseconds of a PyTorch training go.

Names are loaded when they are first used, so that importing the package costs next to nothing and a
reader of profiles needs no torch. `__init__.pyi` has them, for type checkers too.
"""

import importlib
from itertools import pairwise
from typing import Any


def _homes() -> dict[str, str]:
    """The public names with the module of each, as the stub has them."""
    homes, home = dict[str, str](), ""
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH123 - to load pathlib takes longer than all of this
        for words in map(str.split, stub):
            home = words[1] if words[:1] == ["from"] else home
            homes |= {name.strip(","): home for before, name in pairwise(words) if before == "as"}
    return homes


_HOMES = _homes()

__all__ = sorted(name for name, home in _HOMES.items() if home != __name__)  # noqa: PLE0605 - type checkers read the stub


def __getattr__(name: str) -> Any:
    """Load a public name, and keep it."""
    if name == "__version__":
        return importlib.import_module("lflops.version").__version__
    home, missing = _HOMES.get(name), AttributeError(f"module 'lflops' has no attribute {name!r}")
    if home is None:
        raise missing
    # a module: `lflops.hardware.lookup`, `lflops.tensorboard.log`
    if home == __name__:
        return importlib.import_module(f"lflops.{name}")
    try:
        globals()[name] = found = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        raise (
            missing if error.name == home.rpartition(".")[0] else error
            # an extra that was removed
        ) from None
    return found


def __dir__() -> list[str]:
    return sorted(_HOMES)
