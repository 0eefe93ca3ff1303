"""What `lflops.tensorboard` is reached for.

`log`. It is loaded when it is used, because TensorBoard loads the tab from in here.
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
