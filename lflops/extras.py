"""List the extras: optional folders of lflops that no training run needs.

No other code of lflops imports an extra. If you remove the folder of an extra and its line here,
everything else still works.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from lflops.errors import LflopsError, needed_by

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "integrations.deepspeed": ("config:arguments_of", "text.summary:summary"),
    "report.figures": (
        "pictures:pictures",
        "pictures:save_memory_figure",
        "pictures:save_roofline_figure",
    ),
    "trace.ncu": ("command:show_kernels",),
    "estimation.planning": ("command:add_commands", "best_checkpointing:search"),
    "memory.snapshots": ("command:add_commands", "explain:explain_snapshot"),
    "trace.analysis": (
        "command:add_commands",
        "command:diff_traces",
        "command:show_trace_roofline",
    ),
}
"""The functions of each extra that the rest of lflops calls, as `module:function`.

The keys are the folders of the extras, with dots instead of slashes.
"""


def offered(name: str, feature: str) -> Iterator[Any]:
    """Import and yield the functions with this name from all extras.

    `feature` is named in the error if a package is missing.
    """
    for folder, entries in EXTRAS.items():
        for entry in entries:
            module, _, function = entry.partition(":")
            if function == name:
                with needed_by(feature):
                    extra = import_module(f"lflops.{folder}.{module}")
                yield getattr(extra, name)


def needed(name: str, feature: str) -> Any:
    """Import and return the function with this name, which only one extra has.

    Raises:
        LflopsError: The extra was removed.
    """
    for function in offered(name, feature):
        return function
    raise LflopsError(f"{feature} is not part of this installation of lflops")
