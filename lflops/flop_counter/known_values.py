"""Run operators on small tensors for real while all other tensors are fake.

Fake tensors have no values, but the model's code may read the values of integers and masks. So
these tensors are real if they are small, and so are small results that depend only on real tensors.
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
from lflops.inputs.tensors import argument
from lflops.torch_private.dispatch_modes import (
    InternalMode,
    route_higher_order_operators,
    without_modes,
)
from lflops.torch_private.distributed import is_pipeline_vote, receive_operator
from lflops.torch_private.operators import GROUPED_MM, OpOverload, written_arguments
from lflops.torch_private.tensors import (
    ASKS_FOR_DEVICE,
    NEEDS_VALUES,
    PLAIN,
    FakeTensor,
    fake_device,
    storage_key,
)

LARGEST = 1 << 20
"""Maximum number of elements of a tensor whose values are computed and kept."""

_MADE_OF_NUMBERS = frozenset(
    (torch.ops.aten.arange, torch.ops.aten.linspace, torch.ops.aten.logspace)
)
"""Operators that create floating-point tensors from numbers and run for real.

The model's code may read the values, for example the drop rates of stochastic depth.
"""

_FILLS = frozenset(
    (
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
    )
)
"""Operators that only write values to their argument. On a fake tensor, they are skipped.

A fake tensor has no values. Building a model calls these operators for each parameter, so skipping
them saves time.
"""

_VALIDATORS = frozenset(
    {
        "Distribution.__init__",
        "Geometric.__init__",
        "ContinuousBernoulli.__init__",
        "Uniform.__init__",
        "Distribution._validate_sample",
    }
)
"""Functions of `torch.distributions` that check arguments and raise if an argument is invalid."""

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LFLOPS_COUNTER = f"{Path(__file__).parent}{os.sep}"
_DISTRIBUTIONS = f"{Path(torch.distributions.__file__).parent}{os.sep}"


class NoCudaError(Exception):
    """Code creates a tensor on CUDA on a machine without CUDA."""


class KnownValues(InternalMode):
    """A dispatch mode that runs operators on small real tensors for real.

    It works inside a fake mode, which makes all other results fake. The model's code may branch on
    values, for example on whether a batch has padding or how many of its tokens are not ignored.
    With real values, the code takes the same branch as in a real step.

    Attributes:
        supports_higher_order_operators: Whether torch sends higher-order operators to the mode.
    """

    supports_higher_order_operators = True

    def __init__(self, *, on_host: bool = True) -> None:
        """Create the mode.

        Args:
            on_host: Whether the real step would run CPU kernels. If not, the size of an LSTM's
                workspace is unknown, so the fake result of an LSTM layer is not corrected.
        """
        super().__init__()
        self._on_host = on_host
        route_higher_order_operators(type(self))
        self._receive = receive_operator()
        # Weak references to the storages whose values are unknown, keyed by storage key. Torch may
        # use the key of a freed storage again, so an entry is removed when its storage is freed.
        self._stale: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(  # noqa: C901, PLR0911 - helper functions would be slow
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator for real if its arguments' values are known and its result is small."""
        if function is ASKS_FOR_DEVICE and type(args[0]) is FakeTensor:
            return fake_device(args[0])
        if function in _FILLS and type(args[0]) is FakeTensor:
            return args[0]
        kwargs = kwargs or {}
        _refuse_missing_cuda(kwargs.get("device"))
        given = tensors_of((*args, *kwargs.values()))
        known = isinstance(function, OpOverload) and all(map(self.knows_values_of, given))
        if _only_changes_shape(function, args, given):
            with without_modes():
                return function(*args, **kwargs)
        if function is torch.ops.aten.index.Tensor and not known:
            args = (args[0], self._with_positions(args[1]))
        if function is GROUPED_MM and args[0].dtype is not torch.bfloat16:
            # The fake kernel rejects other dtypes, although the real kernels accept them.
            operands = [operand.to(torch.bfloat16) for operand in args[:2]]
            return function(*operands, *args[2:], **kwargs).to(args[0].dtype)
        try:
            out = function(*args, **kwargs)
        except NEEDS_VALUES:
            if not known:
                answer = _validation_result(given)
                if answer is None:
                    raise
                return answer
            out = None
        if known and function is not self._receive and _is_small(function, given, out):
            with without_modes():
                return function(*args, **kwargs)
        if not isinstance(function, OpOverload):
            return out
        self._forget(function, args, kwargs)
        if function is LSTM_LAYER and not self._on_host:
            return out
        return corrected(function, args, out)

    def _with_positions(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Replace each boolean mask whose values are known with the positions that it selects.

        The shape of `x[mask]` depends on the number of selected positions. With the positions, the
        shape is known even if `x` is fake.
        """
        replaced: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype is torch.bool and self.knows_values_of(index):
                with without_modes():
                    replaced.extend(index.nonzero().unbind(1))
            else:
                replaced.append(index)
        return replaced

    def knows_values_of(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are the same as in a real step.

        The values are unknown if the tensor is fake, has more than `LARGEST` elements or requires a
        gradient, or if an operator on fake tensors wrote to it.
        """
        if type(tensor) is not Tensor or tensor.is_meta or tensor.requires_grad:
            return False
        if tensor.numel() > LARGEST:
            return False
        return not self._stale or storage_key(tensor)[1] not in self._stale

    def _receive_values(self, tensors: list[Tensor]) -> None:
        """Handle tensors that a real step would receive from another rank.

        With fake tensors, there is no other rank, so nothing is received. The stages of a
        pipeline exchange votes on whether their shapes are known. For a vote, write 1 (yes) to the
        tensor. Mark the values of all other tensors as unknown.
        """
        for tensor in tensors:
            if type(tensor) is not Tensor:
                continue
            if is_pipeline_vote():
                with without_modes():
                    tensor.fill_(1)
            else:
                self._make_stale(tensor)

    def _forget(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        """Mark the values of the tensors that the operator writes to as unknown."""
        if function is self._receive:
            self._receive_values(args[0])
        for name, position in written_arguments(function):
            written = argument(args, kwargs, position, name)
            for tensor in tensors_of((written,)):
                if type(tensor) is Tensor:
                    self._make_stale(tensor)

    def _make_stale(self, tensor: Tensor) -> None:
        storage, key = storage_key(tensor)
        self._stale[key] = weakref.ref(storage, partial(self._stale.pop, key))


def _refuse_missing_cuda(device: Any) -> None:
    """Raise an error if `device` is a CUDA device on a machine without CUDA.

    A fake tensor on a missing device would crash the process in backward.
    """
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise NoCudaError("CUDA is not available on this machine")


def _is_small(function: OpOverload, given: list[Tensor], out: Any) -> bool:
    """Return whether an operator's results are small and likely to be read by the model's code.

    Only these results are computed for real. Large results, and floating-point results that are
    created from nothing (such as parameters), stay fake.
    """
    results = tensors_of((out,))
    if any(result.numel() > LARGEST for result in results):
        return False
    if given or function.overloadpacket in _MADE_OF_NUMBERS:
        return True
    return not any(result.is_floating_point() or result.is_complex() for result in results)


def _only_changes_shape(function: Any, args: Any, given: list[Tensor]) -> bool:
    """Return whether the operator changes the shape of real tensors in place.

    Fake mode rejects these operators on real tensors, so they run outside fake mode. They change no
    values, so known values stay known and unknown values stay unknown. A `resize_` to more than
    `LARGEST` elements is excluded, because it would allocate much real memory.
    """
    if not isinstance(function, OpOverload) or torch.Tag.inplace_view not in function.tags:
        return False
    if not all(type(tensor) in PLAIN for tensor in given):
        return False
    return function.overloadpacket is not torch.ops.aten.resize_ or prod(args[1]) <= LARGEST


def _validation_result(asked: list[Tensor]) -> bool | None:
    """Return the expected result of one of torch's own validity checks.

    The check reads a value of a fake tensor, which has none, so it would raise an error. In a real
    step, such a check normally passes: `torch.nn.init` checks whether a drawn number is out of
    bounds (false), and `torch.distributions` checks whether arguments and samples are valid (true).

    Return `None` if other code reads the value.

    Args:
        asked: The tensors whose values are read.
    """
    if len(asked) != 1 or asked[0].dtype is not torch.bool:
        return None
    running = [frame.f_code for frame, _ in walk_stack(currentframe())]
    if any(code.co_filename == nn.init.__file__ for code in running):
        return False
    for code in running:
        file = code.co_filename
        if file.startswith(_DISTRIBUTIONS):
            is_check = file == torch.distributions.constraints.__file__ and code.co_name == "check"
            if is_check or code.co_qualname in _VALIDATORS:
                return True
            return None
        if not file.startswith((_LFLOPS_COUNTER, _TORCH)):
            return None
    return None
