"""Show profiles in TensorBoard: `log` writes them, and the LFLOPS tab shows them.

`log` is imported only when it is used, because TensorBoard loads the tab from this package, and the
tab does not need the packages that `log` imports.
"""

from typing import TYPE_CHECKING, Any

from lflops.errors import needed_by

if TYPE_CHECKING:
    from lflops.tensorboard.events import log

__all__ = ["log"]


def __getattr__(name: str) -> Any:
    if name == "log":
        with needed_by("lflops.tensorboard.log"):
            from lflops.tensorboard.events import log
        return log
    raise AttributeError(f"module 'lflops.tensorboard' has no attribute {name!r}")
