"""Where the FLOPs, bytes and milliseconds of a PyTorch training go.

Names are loaded when they are first used, so that importing the package costs next to nothing and a reader of profiles needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lflops import hardware as hardware
    from lflops import tensorboard as tensorboard
    from lflops.analyze.compare.diff import diff
    from lflops.analyze.ranks.imbalance import imbalance
    from lflops.analyze.speed.roofline import roofline
    from lflops.analyze.speed.utilization import utilization
    from lflops.collect.attribution.hooks import scope
    from lflops.collect.calibration.calibrate import calibrate
    from lflops.collect.count import count, counting
    from lflops.collect.estimate.estimate import estimate
    from lflops.collect.estimate.largest_batch import largest_batch
    from lflops.collect.measure import measure
    from lflops.collect.operator_costs.table import register_formula
    from lflops.deepspeed.api import FlopsProfiler, get_model_profile
    from lflops.errors import CountError, HardwareError, LflopsError, ProfileError, ScheduleError
    from lflops.formulas.table import Cost
    from lflops.hardware.chips import Hardware
    from lflops.ledger.account import Ledger
    from lflops.ledger.run import load_run
    from lflops.lightning.monitor import FlopsMonitor
    from lflops.loops.monitor import monitor
    from lflops.merging.merge import merge
    from lflops.planning.best_checkpointing import best_checkpointing
    from lflops.profile.json_file import load
    from lflops.profile.model import Profile
    from lflops.report.explanation import explain
    from lflops.schedule import Schedule

__all__ = [
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
    "register_formula",
    "roofline",
    "scope",
    "utilization",
]

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
}

_MODULES = {"hardware", "tensorboard"}  # what is reached as a module: `lflops.hardware.lookup`, `lflops.tensorboard.log`


def __getattr__(name: str) -> Any:
    """Load a public name, and keep it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lflops")
    if name in _MODULES:
        return importlib.import_module(f"lflops.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
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
