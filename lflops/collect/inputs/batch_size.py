"""How many samples and tokens a batch has: as the user says, or as its shapes do."""

from collections.abc import Callable, Mapping
from typing import Any

from lflops.collect.inputs.arguments import describe
from lflops.collect.inputs.tensors import tensors_in
from lflops.errors import CountError

__all__ = ["Units", "samples_and_tokens", "units_of"]

Units = Mapping[str, int] | Callable[..., Mapping[str, int]]
"""`{"samples": n, "tokens": n}`, either of them or both, or a function that gives it."""


def units_of(asker: str, units: Any, args: Any, kwargs: Any) -> dict[str, int]:
    """What the user says of a batch, as fields of `Run`; empty where they say nothing.

    Raises:
        CountError: It is not what is taken.
    """
    if units is None:
        return {}
    try:
        given = units(*args, **kwargs) if callable(units) else units
    except Exception as error:
        raise CountError(f"{asker}: units failed on the batch: {type(error).__name__}: {error}") from error
    if not isinstance(given, Mapping) or not given.keys() <= {"samples", "tokens"} or not all(map(_is_whole, given.values())):
        raise CountError(f"{asker}: units gave {describe(given)}: give {{'samples': n, 'tokens': n}} or a function that returns it")
    return {f"{name}_per_step": int(number) for name, number in given.items()}


def samples_and_tokens(args: Any, kwargs: Any) -> tuple[int | None, int | None]:
    """Samples are the dimension 0 that most tensors share; tokens the size of the first 2-d integer tensor."""
    tensors = list(tensors_in((args, kwargs)))
    first = [tensor.size(0) for tensor in tensors if tensor.dim()]
    samples = max(first, key=first.count) if first else None
    whole = (tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex())
    tokens = next((tensor.numel() for tensor in whole), None)
    return samples, tokens


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
