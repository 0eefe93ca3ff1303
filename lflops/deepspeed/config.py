"""A DeepSpeed config's "flops_profiler" section, as arguments of a monitor."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lflops.collect.inputs.arguments import describe
from lflops.errors import CountError
from lflops.schedule import Schedule

SECTION = "flops_profiler"
TAKEN = {
    "enabled": bool,
    "recompute_fwd_factor": int | float,
    "profile_step": int,
    "module_depth": int,
    "top_modules": int,
    "detailed": bool,
    "output_file": str | None,
}
"""The section's keys, and what they hold."""


def arguments_of(config: str | PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """What `FlopsMonitor` is to be given, and whether it is to do anything."""
    whole = config if isinstance(config, Mapping) else _read(Path(config))
    section = whole.get(SECTION)
    if not isinstance(section, Mapping):
        raise CountError(f'from_deepspeed: the config has no "{SECTION}" section')
    unknown = ", ".join(sorted(map(repr, section.keys() - TAKEN.keys())))
    if unknown:
        raise CountError(f'from_deepspeed: "{SECTION}" has the unknown keys {unknown}; known are {", ".join(TAKEN)}')
    for key, value in section.items():
        if not isinstance(value, TAKEN[key]) or (isinstance(value, bool) and TAKEN[key] is not bool):
            raise CountError(f"from_deepspeed: {key}={describe(value)} is not what DeepSpeed takes")
    step = section.get("profile_step", 1)
    arguments = {key: section[key] for key in ("module_depth", "top_modules", "detailed", "output_file") if key in section}
    # DeepSpeed numbers steps from 1, and profiles this one alone.
    return {"top_modules": 1, "detailed": True, **arguments, "schedule": Schedule(wait=max(step - 1, 0), warmup=1)}, bool(
        section.get("enabled", False)
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CountError(f"from_deepspeed: {path}: {error}") from error
    if not isinstance(config, Mapping):
        raise CountError(f"from_deepspeed: {path}: not a JSON object")
    return config
