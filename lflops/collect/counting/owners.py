"""Whose parameter an optimizer's operator works on."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lflops.collect.modules import ModuleTree

__all__ = ["StepOwners"]


class StepOwners:
    """The rows behind the tensors of one optimizer step.

    Parameters, their gradients and their state are known by identity. What the step makes of them is not; but a step goes through its
    parameters in order, one by one or as lists, so an unknown tensor belongs with the last known one, and an unknown list with the last
    known list of its length.
    """

    def __init__(self, optimizer: Optimizer, tree: ModuleTree) -> None:
        """Look the optimizer's tensors up."""
        self.optimizer = optimizer
        self._tree = tree
        self._rows: dict[int, str] = {}
        self._held: list[Tensor] = []
        self._states = 0
        self._last = ""
        self._lists: dict[int, list[str]] = {}
        self._look()

    def one(self, args: Any) -> str:
        """The row of an operator on single tensors."""
        for each in args:
            row = self._row(each) if isinstance(each, Tensor) else None
            if row is not None:
                self._last = row
                break
        return self._last

    def each(self, tensors: list[Tensor]) -> list[str]:
        """The rows of an operator on lists, element by element."""
        rows = [self._row(each) for each in tensors]
        known = self._lists.get(len(rows), [self._last] * len(rows))
        if all(row is None for row in rows):
            return known
        self._lists[len(rows)] = [row if row is not None else before for row, before in zip(rows, known, strict=True)]
        return self._lists[len(rows)]

    def _row(self, tensor: Tensor) -> str | None:
        if id(tensor) not in self._rows and len(self.optimizer.state) != self._states:
            self._look()  # the first step makes the state
        return self._rows.get(id(tensor))

    def _look(self) -> None:
        self._states = len(self.optimizer.state)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                row = self._tree.owner(parameter)
                states = self.optimizer.state.get(parameter, {}).values()
                for tensor in (parameter, parameter.grad, *states):
                    if isinstance(tensor, Tensor) and id(tensor) not in self._rows:
                        self._rows[id(tensor)] = row
                        # An identity says something only as long as its tensor lives.
                        self._held.append(tensor)
