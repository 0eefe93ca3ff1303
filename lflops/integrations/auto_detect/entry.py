"""Start lflops if the environment variable `LFLOPS` requests it.

When torch is imported, it calls `watch`. Lightning calls `monitors` for each Trainer.

Wherever lflops is installed, every program that imports torch runs this module. Therefore it
imports other modules only if the variable requests lflops.
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
"""The function `torch.compiler.is_compiling`, which returns whether code is being compiled.

Until `watch` has imported that function, this is `bool`, which returns false.
"""


def settings_line() -> str | None:
    """Return the settings in the environment variable, such as `"wait=2,active=5"`.

    Returns the empty string for the default settings, and `None` if the variable does not request
    lflops.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in {"", "0", "false", "no", "off"}:
        return None
    if asked.lower() in {"1", "true", "yes", "on"}:
        return ""
    return asked


def watch() -> None:
    """Detect training loops from now on, if the environment variable requests lflops."""
    if settings_line() is not None:
        _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Register `step_ends` as a hook that torch calls after each step of each optimizer.

    A second call does nothing.
    """
    global is_compiling  # noqa: PLW0603 - this module is loaded before torch
    from torch.compiler import is_compiling
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(step_ends)


def monitors() -> list[Any]:
    """Return the callbacks that Lightning adds to a Trainer: a list with one monitor.

    The list is empty if the environment variable does not request lflops.

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

    Does nothing if the script itself monitors its run.
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
    # This may fail, for example, with an unknown version of torch. The error must not reach the
    # training run, because this code runs in one of its steps.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"lflops: this training run is not monitored because of an error: {reason}",
            stacklevel=1,
        )
        return None
