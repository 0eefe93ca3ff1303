"""Convert the section "flops_profiler" of a DeepSpeed config to arguments of `FlopsMonitor`."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lflops.errors import CountError
from lflops.files import read
from lflops.inputs.arguments import describe
from lflops.monitoring.schedule import Schedule

_SECTION = "flops_profiler"

_TYPES = {
    "enabled": bool,
    "recompute_fwd_factor": int | float,
    "profile_step": int,
    "module_depth": int,
    "top_modules": int,
    "detailed": bool,
    "output_file": str | None,
}
"""The keys that the section may have, and the types of their values."""

_ARGUMENTS = ("module_depth", "top_modules", "detailed", "output_file")
"""The keys of the section that `FlopsMonitor` accepts as arguments with the same names."""


def arguments_of(config: str | PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments for `FlopsMonitor`, and whether the config enables the profiler.

    Raises:
        CountError: The config has no section for the profiler, or one of its keys or values is
            not valid in DeepSpeed.
    """
    whole = config if isinstance(config, Mapping) else _read(Path(config))
    section = whole.get(_SECTION)
    if not isinstance(section, Mapping):
        raise CountError(f'from_deepspeed: the config has no "{_SECTION}" section')
    _check(section)
    arguments: dict[str, Any] = {"top_modules": 1, "detailed": True}
    for key in _ARGUMENTS:
        if key in section:
            arguments[key] = section[key]
    # DeepSpeed profiles one step, and numbers steps from 1.
    step = section.get("profile_step", 1)
    arguments["schedule"] = Schedule(wait=max(step - 1, 0), warmup=1)
    return arguments, bool(section.get("enabled", False))


def _check(section: Mapping[str, Any]) -> None:
    unknown = ", ".join(sorted(repr(key) for key in section.keys() - _TYPES.keys()))
    if unknown:
        raise CountError(
            f'from_deepspeed: "{_SECTION}" has unknown keys: {unknown}; '
            f"DeepSpeed accepts {', '.join(_TYPES)}"
        )
    for key, value in section.items():
        accepted = _TYPES[key]
        is_unwanted_bool = isinstance(value, bool) and accepted is not bool
        if is_unwanted_bool or not isinstance(value, accepted):
            name = accepted.__name__ if isinstance(accepted, type) else str(accepted)
            raise CountError(
                f"from_deepspeed: {key}={describe(value)}: DeepSpeed accepts only values of the "
                f"type {name}"
            )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CountError(f"from_deepspeed: {path}: {error}") from error
    if not isinstance(config, Mapping):
        raise CountError(f"from_deepspeed: {path}: the file does not contain a JSON object")
    return config
