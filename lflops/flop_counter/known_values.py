"""Small tensors with known values among fake ones.

Integers, masks, and results that depend on them alone.
"""

import os
import weakref
from functools import partial
from inspect import currentframe
from math import prod
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn

from lflops.flop_counter.cpu_kernels import LSTM_LAYER, corrected
from lflops.flop_counter.traffic import tensors_of
from lflops.torch_private.dispatch_modes import (
    InternalMode,
    route_higher_order_operators,
    without_modes,
)
from lflops.torch_private.distributed import is_pipeline_vote, receive_operator
from lflops.torch_private.operators import GROUPED_MM, OpOverload, written_arguments
from lflops.torch_private.tensors import NEEDS_VALUES, PLAIN, storage_key

# the most elements of a tensor whose values are kept
LARGEST = 1 << 20

_MADE_OF_NUMBERS = frozenset(
    getattr(torch.ops.aten, name) for name in ("arange", "linspace", "logspace")
)
"""Operators that make floating tensors whose values code may need, such as the rates of stochastic depth."""


_VALIDATORS = frozenset(
    f"{name}.__init__" for name in ("Distribution", "Geometric", "ContinuousBernoulli", "Uniform")
) | {"Distribution._validate_sample"}
"""Functions of `torch.distributions` that check arguments, and raise if one is invalid."""

_TORCH, _OURS, _DISTRIBUTIONS = (
    f"{Path(each).parent}{os.sep}"
    for each in (torch.__file__, Path(__file__).parent, torch.distributions.__file__)
)


class NoCudaError(Exception):
    """Code makes a tensor on CUDA, on a machine without it."""


class KnownValues(InternalMode):
    """Runs operators on real tensors for real, inside a mode that makes all other results fake.

    Code branches on such values: whether a batch has padding, whether it is packed, how many of its
    tokens count. With known values it takes the same branch as in a real step.
    """

    # as torch asks since 2.9
    supports_higher_order_operators = True

    def __init__(self, *, on_host: bool = True) -> None:
        super().__init__()
        # whether the CPU's kernels would run; on a chip the size of an LSTM's workspace is unknown
        self._on_host = on_host
        route_higher_order_operators(type(self))
        self._receive = receive_operator()
        self._stale: dict[
            int, weakref.ref[Any]
            # by storage key, while the storage is alive: keys are reused
        ] = {}

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator for real if the values of its arguments are known and its result is small."""
        kwargs = kwargs or {}
        if (
            (device := kwargs.get("device")) is not None
            and device.type == "cuda"
            and not torch.cuda.is_available()
        ):
            raise NoCudaError(
                "no such device"
                # a fake tensor on CUDA would end the process in backward
            )
        given = list(tensors_of((*args, *kwargs.values())))
        known = isinstance(function, OpOverload) and all(map(self.knows_values_of, given))
        if _changes_shape_alone(function, args, given):
            with without_modes():
                return function(*args, **kwargs)
        if function is torch.ops.aten.index.Tensor and not known:
            args = (args[0], self._numbered(args[1]))
        if function is GROUPED_MM and args[0].dtype is not torch.bfloat16:
            # The fake kernel refuses other dtypes, which the kernels take; the shape is the same.
            return function(
                *(each.to(torch.bfloat16) for each in args[:2]), *args[2:], **kwargs
            ).to(args[0].dtype)
        try:
            out = function(*args, **kwargs)
        except NEEDS_VALUES:
            if not known and (answer := _taken_for_granted(given)) is not None:
                return answer
            if not known:
                raise
            out = None
        if known and function is not self._receive and _is_worth_it(function, given, out):
            with without_modes():
                return function(*args, **kwargs)
        if not isinstance(function, OpOverload):
            return out
        self._forget(function, args, kwargs)
        return (
            out if function is LSTM_LAYER and not self._on_host else corrected(function, args, out)
        )

    def _numbered(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """The same indices with the selected positions in place of each known mask, so that their number is known."""
        found: list[Tensor | None] = []
        for each in indices:
            if each is not None and each.dtype is torch.bool and self.knows_values_of(each):
                with without_modes():
                    found.extend(each.nonzero().unbind(1))
            else:
                found.append(each)
        return found

    def knows_values_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has the numbers that it would have in a real step."""
        if (
            type(tensor) is not Tensor
            or tensor.is_meta
            or tensor.requires_grad
            or tensor.numel() > LARGEST
        ):
            return False
        return not self._stale or storage_key(tensor)[1] not in self._stale

    def _receive_values(self, tensors: list[Tensor]) -> None:
        """Write what a rank that does not exist has sent: the vote of a pipeline's stage.

        The values of anything else are unknown.
        """
        for each in (tensor for tensor in tensors if type(tensor) is Tensor):
            # the others are taken to have them: 1 says so
            if is_pipeline_vote():
                with without_modes():
                    each.fill_(1)
            else:
                self._make_stale(each)

    def _forget(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        """Note that the values of the tensors that the operator writes to are no longer known."""
        if function is self._receive:
            self._receive_values(args[0])
        for name, position in written_arguments(function):
            for each in tensors_of((args[position] if position < len(args) else kwargs.get(name),)):
                if type(each) is Tensor:
                    self._make_stale(each)

    def _make_stale(self, tensor: Tensor) -> None:
        storage, key = storage_key(tensor)
        self._stale[key] = weakref.ref(storage, partial(self._stale.pop, key))


def _is_worth_it(function: OpOverload, given: list[Tensor], out: Any) -> bool:
    results = list(tensors_of((out,)))
    if any(each.numel() > LARGEST for each in results):
        return False
    floats = any(each.is_floating_point() or each.is_complex() for each in results)
    return bool(given) or not floats or function.overloadpacket in _MADE_OF_NUMBERS


def _changes_shape_alone(function: Any, args: Any, given: list[Tensor]) -> bool:
    """Whether the operator changes the shape of real tensors in place, which fake mode refuses."""
    # The values stay unchanged, known or not. `resize_` to more than `LARGEST` elements is not run.
    changes_shape = isinstance(function, OpOverload) and torch.Tag.inplace_view in function.tags
    if not changes_shape or not all(type(each) in PLAIN for each in given):
        return False
    return function.overloadpacket is not torch.ops.aten.resize_ or prod(args[1]) <= LARGEST


def _taken_for_granted(asked: list[Tensor]) -> bool | None:
    """The answer to a check of values whose other answer would raise.

    `None` if the code asks for anything else.
    """
    # `torch.nn.init` checks whether a drawn number is out of bounds, and the answer is no.
    # `torch.distributions` checks whether arguments and samples are valid, and the answer is yes.
    if len(asked) != 1 or asked[0].dtype is not torch.bool:
        return None
    running = [frame.f_code for frame, _ in walk_stack(currentframe())]
    if any(code.co_filename == nn.init.__file__ for code in running):
        return False
    others = (
        each
        for each in running
        if each.co_filename.startswith(_DISTRIBUTIONS)
        or not each.co_filename.startswith((_OURS, _TORCH))
    )
    caller = next(others, None)
    if caller is None or not caller.co_filename.startswith(_DISTRIBUTIONS):
        return None
    is_check = (
        caller.co_filename == torch.distributions.constraints.__file__ and caller.co_name == "check"
    )
    return True if is_check or caller.co_qualname in _VALIDATORS else None
