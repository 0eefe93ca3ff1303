"""Compare the strides and storages of fake results with results on the CPU.

torch's sample inputs for every operator, contiguous and not contiguous, are run in both ways.

Prints a line for each operator with a fake result that still differs after the corrections of an
estimate. In torch 2.13, this is only `max_unpool2d` for images that are one pixel high or wide,
which are both channels-first and channels-last. Takes ten minutes. Requires `pip install
expecttest`, like torch's own tests.
"""

import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lflops.flop_counter.cpu_kernels import corrected

SAMPLES = 6
"""Number of samples per operator."""

TOLERANCE = 64
"""Largest difference of two storages, in bytes, that is not reported."""

Layout = Callable[[Any], Any]


class Comparison(TorchDispatchMode):
    """Runs each operator on fake tensors as well, and records differences.

    For each operator, it keeps the first case that differs, and the number of cases.
    """

    def __init__(self) -> None:
        """Create empty counters."""
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.found: dict[str, str] = {}
        self.differ: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and compare its result with the fake result."""
        kwargs = kwargs or {}
        call = f"{function} {layouts((args, kwargs))}"
        if call in self.seen:
            return function(*args, **kwargs)
        self.seen.add(call)
        fake = None
        # Some operators need the values of tensors, and some samples are supposed to fail.
        with (
            contextlib.suppress(Exception),
            FakeTensorMode() as mode,
        ):
            given = tree_map(
                lambda each: mode.from_tensor(each) if isinstance(each, Tensor) else each,
                (args, kwargs),
            )
            fake = corrected(function, given[0], function(*given[0], **given[1]))
        out = function(*args, **kwargs)
        if fake is not None:
            self.calls[str(function)] += 1
            for place, (real, made) in enumerate(
                zip(tree_flatten(out)[0], tree_flatten(fake)[0], strict=True)
            ):
                if (
                    what := difference(
                        real, made, of_storages=not getattr(function, "is_view", False)
                    )
                ) is not None:
                    key = f"{function}, result {place}"
                    self.differ[key] += 1
                    self.found.setdefault(key, f"{what}, of {layouts(args)}")
        return out


def difference(real: Any, fake: Any, *, of_storages: bool) -> str | None:
    """Describe the difference of a fake result, or return `None` if there is none.

    The storage of a view is not compared, because its size is that of the fake argument.
    """
    if not isinstance(real, Tensor) or not isinstance(fake, Tensor):
        return (
            None
            if isinstance(real, Tensor) == isinstance(fake, Tensor)
            else "only one of them is a tensor"
        )
    if real.layout is not torch.strided or real.is_nested or not real.numel():
        return None
    steps = [
        (
            each.shape,
            [step for step, size in zip(each.stride(), each.shape, strict=True) if size > 1],
        )
        for each in (real, fake)
    ]
    if steps[0] != steps[1]:
        return f"shape and strides {steps[0]}, fake {steps[1]}"
    sizes = [each.untyped_storage().nbytes() for each in (real, fake)]
    return (
        None
        if not of_storages or abs(sizes[0] - sizes[1]) <= TOLERANCE
        else f"{sizes[0]} bytes, fake {sizes[1]}"
    )


def layouts(args: Any) -> Any:
    """Return the shapes, strides and dtypes of all tensors in the arguments."""
    return tree_map(
        lambda each: (
            (each.shape, each.layout is torch.strided and each.stride(), each.dtype)
            if isinstance(each, Tensor)
            else each
        ),
        args,
    )


def laid_out(least: int, change: Callable[[Tensor], Tensor]) -> Layout:
    """Return a function that changes the layout of tensors, and leaves other values unchanged.

    Tensors with fewer dimensions than `least` stay unchanged, too.
    """

    def change_it(value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or value.layout is not torch.strided
            or value.dim() < least
            or value.numel() < 2
        ):
            return value
        return change(value.detach()).requires_grad_(value.requires_grad)

    return change_it


LAYOUTS: list[Layout] = [
    lambda value: value,
    laid_out(2, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)),
    laid_out(3, lambda x: x.transpose(1, -1).contiguous().transpose(1, -1)),
    laid_out(
        4,
        lambda x: x.contiguous(
            memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        ),
    ),
    laid_out(1, lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
    laid_out(2, lambda x: x[:1].expand(x.shape)),
]


def compare(comparison: Comparison, operator: Any, sample: Any) -> None:
    """Run one sample in every layout, and backward with gradients in every layout."""
    for layout in LAYOUTS:
        inputs, args, kwargs = tree_map(layout, (sample.input, sample.args, sample.kwargs))
        # Some samples do not support every layout.
        with (
            contextlib.suppress(Exception),
            comparison,
        ):
            outs = [
                each
                for each in tree_flatten(operator(inputs, *args, **kwargs))[0]
                if isinstance(each, Tensor) and each.requires_grad
            ]
            leaves = [
                each
                for each in tree_flatten((inputs, args, kwargs))[0]
                if isinstance(each, Tensor) and each.requires_grad
            ]
            for of_gradients in LAYOUTS if outs else ():
                ones = [of_gradients(torch.ones(each.shape, dtype=each.dtype)) for each in outs]
                torch.autograd.grad(outs, leaves, ones, retain_graph=True, allow_unused=True)


def main() -> int:
    """Compare all operators, or those in the arguments."""
    warnings.simplefilter("ignore")
    # torch logs a traceback for each sample that is supposed to fail.
    logging.disable(logging.ERROR)
    torch.manual_seed(0)
    comparison = Comparison()
    for operator in op_db:
        if sys.argv[1:] and operator.name not in sys.argv[1:]:
            continue
        dtype = next(
            (
                each
                for each in (torch.float32, torch.int64, torch.complex64)
                if each in operator.dtypes
            ),
            None,
        )
        if dtype is None:
            continue
        wants = operator.supports_autograd and dtype is torch.float32
        for sample in list(operator.sample_inputs("cpu", dtype, requires_grad=wants))[:SAMPLES]:
            compare(comparison, operator, sample)
    print(
        f"{len(comparison.calls)} operators, {sum(comparison.calls.values())} calls; {len(comparison.found)} results differ"
    )
    for key, what in sorted(comparison.found.items()):
        print(f"{key}: {comparison.differ[key]} times, as {what}")
    return 1 if comparison.found else 0


if __name__ == "__main__":
    sys.exit(main())
