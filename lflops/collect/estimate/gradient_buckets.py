"""The gradient buckets of DistributedDataParallel. Its reducer needs real memory, so these stand for it on fake tensors."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, distributed, nn

__all__ = ["FIRST", "LATER", "assigned", "gradient_buckets"]

FIRST, LATER = 1 << 20, 25 << 20
"""The bytes from which a bucket is full: the first one's, and those of all others. They are torch's defaults."""


def gradient_buckets(model: nn.Module, ranks: int) -> tuple[Tensor, ...]:
    """Buckets for the gradients of a model, and hooks that copy each gradient there, reduce a full bucket, and copy the results back.

    As with torch's default settings, a gradient and its place in a bucket are separate memory.
    """
    return tuple(_bucket(parameters, ranks) for parameters in assigned(each for each in model.parameters() if each.requires_grad))


def assigned(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each bucket, from the last to the first, as their gradients become ready. A bucket has one dtype."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= (LATER if full else FIRST):
            full.append(filling.pop(parameter.dtype))
    return [*full, *filling.values()]


def _bucket(parameters: list[nn.Parameter], ranks: int) -> Tensor:
    """One bucket, which the parameters' hooks fill."""
    bucket = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    places = [place.view(each.shape) for place, each in zip(bucket.split([each.numel() for each in parameters]), parameters, strict=True)]
    waiting: set[int] = set()

    def hook(index: int) -> Callable[[Tensor], None]:
        def fill(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            torch.mul(parameter.grad, 1 / ranks, out=places[index])
            waiting.add(index)
            if len(waiting) == len(parameters):
                waiting.clear()
                distributed.all_reduce(bucket)
                for each, place in zip(parameters, places, strict=True):
                    if each.grad is not None:
                        each.grad.copy_(place)

        return fill

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(hook(index))
    return bucket
