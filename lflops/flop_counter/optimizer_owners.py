"""Find the module to which each operator of an optimizer's step belongs.

An operator belongs to the module that owns the parameter that the operator helps to update.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lflops.inputs.tensors import tensors_in
from lflops.model.module_tree import ModuleTree
from lflops.torch_private.tensors import PLAIN, local_part


class StepOwners:
    """Finds the module that owns each tensor in one optimizer step.

    Parameters, gradients and optimizer states are known tensors: the optimizer holds them, so their
    owners are registered. Intermediate results are unknown tensors. But an optimizer processes its
    parameters in order, one by one or as lists. Therefore an unknown tensor belongs to the module
    of the last known tensor, and an unknown list of tensors belongs to the modules of the last
    known list of the same length.

    Attributes:
        optimizer: The optimizer that makes the step.
        last: The module to which the last operator belongs.
    """

    def __init__(self, optimizer: Optimizer, tree: ModuleTree) -> None:
        self.optimizer = optimizer
        self.last = ""
        self._tree = tree
        self._owners: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._states = 0
        self._owners_of_lists: dict[int, list[str]] = {}
        self._register()

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of the optimizer's parameters."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield each tensor of the optimizer's state, and the module that owns its parameter."""
        for parameter in self._parameters():
            owner = self._tree.owner(parameter)
            state = self.optimizer.state.get(parameter, {})
            values = state.values() if isinstance(state, dict) else [state]
            for value in values:
                if isinstance(value, Tensor):
                    yield value, owner
                    continue
                for tensor in tensors_in(value):
                    yield tensor, owner

    def one(self, args: Any) -> str:
        """Return the module to which an operator with these arguments belongs.

        This is the module of the first known tensor among the arguments, and becomes `last`. If no
        tensor is known, return `last` unchanged. For operators on lists of tensors, use `each`.
        """
        for value in args:
            known = self._owners.get(id(value))
            if known is not None and known[0]() is value:
                self.last = known[1]
                return known[1]
        has_new_state = len(self.optimizer.state) != self._states
        if has_new_state and any(isinstance(value, Tensor) for value in args):
            # The optimizer creates its state in its first step.
            self._register()
            return self.one(args)
        for value in args:
            if isinstance(value, list | tuple):
                return self.one(value)
        return self.last

    def follow(self, args: Any) -> None:
        """Remember, in `last`, the module of an operator that costs nothing, such as `zeros_like`.

        It is the module of the parameter that the operator reads. In its first step, the optimizer
        creates its state with such operators. The state is not registered here, because it may
        still be incomplete: `one` registers it at the next operator with a cost.
        """
        for value in args:
            owner = self._known(value)
            if owner is not None:
                self.last = owner
                return

    def each(self, tensors: list[Tensor], results: Any) -> list[str]:
        """Return the module of each tensor in a list that is passed to one operator.

        The results of the operator are registered as tensors of the same modules.
        """
        known = [self._known_or_new(tensor) for tensor in tensors]
        before = self._owners_of_lists.get(len(tensors), [self.last] * len(tensors))
        owners = []
        for owner, owner_before in zip(known, before, strict=True):
            owners.append(owner_before if owner is None else owner)
        if any(owner is not None for owner in known):
            self._owners_of_lists[len(tensors)] = owners
        for result, owner in zip(results or (), owners, strict=False):
            if isinstance(result, Tensor):
                self._add(result, owner)
        return owners

    def owner_of(self, result: Tensor) -> str:
        """Return the module that owns a registered tensor, or `self.last` for any other tensor."""
        owner = self._known(result)
        return self.last if owner is None else owner

    def _known(self, value: Any) -> str | None:
        """Return the module of a registered tensor, or `None` for any other value.

        Tensors are registered by their id and not kept alive, and Python may reuse the id of a
        freed tensor. Therefore the value is also compared with a weak reference to the tensor.
        """
        known = self._owners.get(id(value))
        if known is None:
            return None
        reference, owner = known
        return owner if reference() is value else None

    def _known_or_new(self, tensor: Tensor) -> str | None:
        owner = self._known(tensor)
        if owner is None and len(self.optimizer.state) != self._states:
            # The optimizer creates its state in its first step.
            self._register()
            return self._known(tensor)
        return owner

    def _register(self) -> None:
        self._states = len(self.optimizer.state)
        for parameter in self._parameters():
            owner = self._tree.owner(parameter)
            self._add(parameter, owner)
            if parameter.grad is not None:
                self._add(parameter.grad, owner)
        for tensor, owner in self.states():
            self._add(tensor, owner)

    def _add(self, tensor: Tensor, owner: str) -> None:
        # Operators receive the local part of a DTensor.
        local = tensor if type(tensor) in PLAIN else local_part(tensor)
        known = self._owners.get(id(local))
        if known is None or known[0]() is not local:
            self._owners[id(local)] = (weakref.ref(local), owner)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]
