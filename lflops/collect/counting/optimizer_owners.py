"""Which module owns the parameter that an optimizer's operator works on."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lflops.collect.inputs.tensors import tensors_in
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.tensors import PLAIN, local_part


class StepOwners:
    """The rows that own the tensors of one optimizer step.

    Parameters, gradients and state are known by identity. Intermediate results are not. A step goes through its parameters in order, one by
    one or as lists. So an unknown tensor has the row of the last known one, and an unknown list the rows of the last known list of its
    length.
    """

    def __init__(self, optimizer: Optimizer, tree: ModuleTree) -> None:
        self.optimizer = optimizer
        self._tree = tree
        self._rows: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._states = 0
        self.last = ""  # the row of the last operator
        self._lists: dict[int, list[str]] = {}
        self._register()

    def gradients(self) -> Iterator[Tensor]:
        yield from (parameter.grad for parameter in self._parameters() if parameter.grad is not None)

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """The tensors of the optimizer's state, with the rows of their parameters."""
        for parameter in self._parameters():
            row = self._tree.owner(parameter)
            state = self.optimizer.state.get(parameter, {})
            for value in state.values() if isinstance(state, dict) else [state]:
                yield from ((tensor, row) for tensor in ([value] if isinstance(value, Tensor) else tensors_in(value)))

    def one(self, args: Any) -> str:
        """The row of an operator on single tensors."""
        for each in args:
            known = self._rows.get(id(each))
            if known is not None and known[0]() is each:
                self.last = known[1]
                return known[1]
        if len(self.optimizer.state) != self._states and any(isinstance(each, Tensor) for each in args):
            self._register()  # the first step makes the state
            return self.one(args)
        for each in args:
            if isinstance(each, list | tuple):
                return self.one(each)
        return self.last

    def each(self, tensors: list[Tensor], results: Any) -> list[str]:
        """The rows of an operator on lists, element by element. Its results get the same rows."""
        rows = [self._row(each) for each in tensors]
        known = self._lists.get(len(rows), [self.last] * len(rows))
        rows_or_last = [row if row is not None else before for row, before in zip(rows, known, strict=True)]
        if any(row is not None for row in rows):
            self._lists[len(rows)] = rows_or_last
        for result, row in zip(results or (), rows_or_last, strict=False):
            if isinstance(result, Tensor):
                self._add(result, row)
        return rows_or_last

    def _known(self, value: Any) -> str | None:
        """The row of a tensor. An id is valid only as long as its tensor is alive, and this keeps none alive."""
        known = self._rows.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def _row(self, tensor: Tensor) -> str | None:
        if (known := self._known(tensor)) is None and len(self.optimizer.state) != self._states:
            self._register()  # the first step makes the state
            known = self._known(tensor)
        return known

    def _register(self) -> None:
        self._states = len(self.optimizer.state)
        for parameter in self._parameters():
            row = self._tree.owner(parameter)
            self._add(parameter, row)
            if parameter.grad is not None:
                self._add(parameter.grad, row)
        for tensor, row in self.states():
            self._add(tensor, row)

    def _add(self, tensor: Tensor, row: str) -> None:
        local = tensor if type(tensor) in PLAIN else local_part(tensor)  # the tensor that operators see
        known = self._rows.get(id(local))
        if known is None or known[0]() is not local:
            self._rows[id(local)] = (weakref.ref(local), row)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]
