"""A compiler backend for torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ENTERED_MODES_END_COMPILATION = (
    torch.__version__ < "2.14"
)  # 2.13 does, 2.15 does not; 2.14 was not tried
"""Whether a frame that is met within a mode is never compiled again.

And whether what is called on the way into a module is compiled.
"""


class Backend:
    """A compiler that leaves a graph as it is, and knows how many it was given and how often they ran."""

    def __init__(self) -> None:
        self.compilations = 0
        self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.compilations += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return module.forward(*args)

        return run
