"""Where the FLOPs, bytes and milliseconds of a PyTorch training go.

Names are loaded when they are first used, so that importing the package costs next to nothing and a reader of profiles needs no torch.
`__init__.pyi` has them for type checkers.
"""

import importlib
from typing import Any

_HOMES = {
    **dict.fromkeys(["CountError", "HardwareError", "LflopsError", "ProfileError", "ScheduleError"], "lflops.errors"),
    **dict.fromkeys(["count", "counting"], "lflops.collect.count"),
    "Cost": "lflops.formulas.table",
    "register_formula": "lflops.collect.operator_costs.table",
    "FlopsMonitor": "lflops.lightning.monitor",
    "Hardware": "lflops.hardware.chips",
    "Profile": "lflops.profile.model",
    "Schedule": "lflops.schedule",
    "calibrate": "lflops.collect.calibration.calibrate",
    "diff": "lflops.analyze.compare.diff",
    "imbalance": "lflops.analyze.ranks.imbalance",
    "estimate": "lflops.collect.estimate.estimate",
    "explain": "lflops.report.explanation",
    "largest_batch": "lflops.collect.estimate.largest_batch",
    "load": "lflops.profile.json_file",
    "Ledger": "lflops.ledger.account",
    "load_run": "lflops.ledger.run",
    "measure": "lflops.collect.measure",
    "merge": "lflops.merging.merge",
    "monitor": "lflops.loops.monitor",
    "roofline": "lflops.analyze.speed.roofline",
    "scope": "lflops.collect.attribution.hooks",
    "utilization": "lflops.analyze.speed.utilization",
    "what_if": "lflops.analyze.speed.what_if",
}

_OF_EXTRAS = ("FlopsProfiler", "best_checkpointing", "get_model_profile", "plan")  # `extras.py` has their modules

__all__ = sorted([*_HOMES, *_OF_EXTRAS])  # noqa: PLE0605 - type checkers read the stub, and Python takes any list

_MODULES = {"hardware", "tensorboard"}  # what is reached as a module: `lflops.hardware.lookup`, `lflops.tensorboard.log`


def __getattr__(name: str) -> Any:
    """Load a public name, and keep it."""
    if name == "__version__":
        return importlib.import_module("lflops.version").__version__
    if name in _MODULES:
        return importlib.import_module(f"lflops.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _OF_EXTRAS:
        from lflops.extras import offered

        found = next(offered(name, f"lflops.{name}"), None)
    else:
        found = None
    if found is None:
        raise AttributeError(f"module 'lflops' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
