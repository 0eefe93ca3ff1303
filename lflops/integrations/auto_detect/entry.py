"""Whether the variable `LFLOPS` asks for lflops. torch calls `watch` as it is imported, and Lightning `monitors` for each Trainer.

Every program where lflops is installed runs this file, so it imports nothing that was not asked
for.
"""

import functools
import importlib
import os
import sys
import warnings
from typing import Any

VARIABLE = "LFLOPS"
FINDER = "lflops.integrations.auto_detect.finder"
# torch's own, from `watch` on
is_compiling: Any = bool


def settings_line() -> str | None:
    """The settings that the variable has, "" for none; `None` where it does not ask for lflops."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in {"", "0", "false", "no", "off"}:
        return None
    return "" if asked.lower() in {"1", "true", "yes", "on"} else asked


def watch() -> None:
    """Look for loops from here on, if that is asked for."""
    global is_compiling  # noqa: PLW0603 - torch is not loaded yet where this file is
    if settings_line() is not None:
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(step_ends)


def monitors() -> list[Any]:
    """A monitor for a Trainer, if that is asked for.

    A `MisconfigurationException` where the variable says something that cannot be.
    """
    asked = settings_line()
    if asked is None:
        return []
    from lflops.integrations.lightning.monitor import InjectedMonitor

    return [InjectedMonitor(asked)]


def step_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """An optimizer has made a step. A training that is watched already is left alone."""
    if is_compiling():
        return
    finder: Any = sys.modules.get(FINDER)
    runs: Any = sys.modules.get("lflops.monitoring.run")
    if finder is None and (runs is None or not runs.OPEN):
        finder = _loaded()
    if (
        current := getattr(finder, "current", None)
        # another thread may be loading it
    ) is not None:
        current.step_ends(optimizer)


@functools.cache
def _loaded() -> Any:
    try:
        return importlib.import_module(FINDER)
    except Exception as error:  # noqa: BLE001 - as of a torch that lflops does not know; it is the training's step
        warnings.warn(
            f"lflops: this training is not watched: {type(error).__name__}: {error}", stacklevel=1
        )
        return None
