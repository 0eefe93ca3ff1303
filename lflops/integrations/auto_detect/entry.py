"""Start lflops if the variable `LFLOPS` requests it.

Torch calls `watch` when it is imported, and Lightning calls `monitors` for each Trainer.

Every program with lflops installed runs this module, so it imports only what was requested.
"""

import functools
import importlib
import os
import sys
import warnings
from typing import Any

VARIABLE = "LFLOPS"
FINDER = "lflops.integrations.auto_detect.finder"

is_compiling: Any = bool
"""Replaced by torch's function of this name in `watch`."""


def settings_line() -> str | None:
    """Return the settings in the variable; "" means defaults, `None` that lflops is not requested."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in {"", "0", "false", "no", "off"}:
        return None
    if asked.lower() in {"1", "true", "yes", "on"}:
        return ""
    return asked


def watch() -> None:
    """Detect loops from now on, if the variable requests lflops."""
    global is_compiling  # noqa: PLW0603 - this module is loaded before torch
    if settings_line() is not None:
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(step_ends)


def monitors() -> list[Any]:
    """Return a monitor for a Trainer, if the variable requests lflops.

    Raises:
        MisconfigurationException: The settings in the variable are wrong.
    """
    asked = settings_line()
    if asked is None:
        return []
    from lflops.integrations.lightning.monitor import InjectedMonitor

    return [InjectedMonitor(asked)]


def step_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Handle the end of an optimizer's step.

    Does nothing if the run is already monitored.
    """
    if is_compiling():
        return
    finder: Any = sys.modules.get(FINDER)
    runs: Any = sys.modules.get("lflops.monitoring.run")
    if finder is None and (runs is None or not runs.OPEN):
        finder = _loaded()
    # Another thread may be loading the module, so `current` may be missing.
    current = getattr(finder, "current", None)
    if current is not None:
        current.step_ends(optimizer)


@functools.cache
def _loaded() -> Any:
    try:
        return importlib.import_module(FINDER)
    # For example with an unknown version of torch. This code runs in a step of the training run.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"lflops: this training run is not monitored: {reason}", stacklevel=1)
        return None
