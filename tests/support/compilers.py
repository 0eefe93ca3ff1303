"""A compiler backend for torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Torch 2.13 behaves like this, and torch 2.15 does not; 2.14 was not tried.
ENTERED_MODES_END_COMPILATION = torch.__version__ < "2.14"
"""Whether torch never compiles a frame again that it has met within a dispatch mode.

Such a torch also compiles functions that are called on the way into a module.
"""


class Backend:
    """A compiler backend that runs each graph unchanged.

    Attributes:
        compilations: Number of graphs that it has compiled.
        runs: Number of runs of all graphs.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.compilations += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return module.forward(*args)

        return run
