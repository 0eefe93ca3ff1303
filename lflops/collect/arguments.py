"""What people give to a count, looked at before anything runs: an error names what was given, what is taken, and what to do."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lflops.collect.tensors import tensors_in
from lflops.collect.torch_check import check
from lflops.collect.torch_compat import runs_nothing
from lflops.errors import CountError

__all__ = ["check_arguments", "check_module", "describe"]


def check_arguments(model: Any, args: Any, kwargs: Any, loss: Any, *, backward: Any) -> None:
    """See that `count` was given what it takes.

    Raises:
        CountError: Something is wrong.
    """
    check_module("count", model)
    _check_args(args)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise CountError(f"count: kwargs={describe(kwargs)}: give a mapping from names to the model's keyword arguments")
    if not isinstance(backward, bool):
        raise CountError(f"count: backward={describe(backward)}: give True or False")
    if loss is not None and not callable(loss):
        raise CountError(f"count: loss={describe(loss)}: give a function from the output to a scalar")
    if loss is not None and not backward:
        raise CountError("count: loss is given, but backward=False: give backward=True as well")
    check()
    if runs_nothing([*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]):
        raise CountError(
            "count: the model's tensors are fake, and nothing would be counted: put it on device='meta', which costs no memory either"
        )


def check_module(caller: str, module: Any) -> None:
    """See that something is a module.

    Raises:
        CountError: It is none.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise CountError(f"{caller}: {module.__name__} is a class: give an instance")
    if not isinstance(module, nn.Module):
        raise CountError(f"{caller}: {describe(module)} is no torch.nn.Module")


def describe(value: Any) -> str:
    """A value in a few words, a tensor without its numbers."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_args(args: Any) -> None:
    if isinstance(args, Mapping):
        raise CountError(f"count: args is a {type(args).__name__}: give kwargs=batch, or args=(batch,) if the model takes the dict itself")
    if isinstance(args, list):
        raise CountError("count: args is a list: give (batch,) if it is one argument, tuple(batch) if it is several")
    if not isinstance(args, tuple):
        raise CountError(f"count: args={describe(args)}: give a tuple of the model's positional arguments, or one tensor")
