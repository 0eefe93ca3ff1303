"""Check a caller's arguments before anything runs.

An error names the argument, the value that was passed, and the accepted values.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lflops.errors import CountError
from lflops.inputs.tensors import tensors_in
from lflops.torch_private.self_check import check
from lflops.torch_private.tensors import only_shapes_run


def check_arguments(
    caller: str, model: Any, args: Any, kwargs: Any, loss: Any, *, backward: Any
) -> None:
    """Check the arguments of a public function.

    `caller` is the name of the function; error messages begin with it.
    """
    check_module(caller, model)
    check_pass(caller, args, kwargs, loss, backward=backward)
    check()
    if only_shapes_run([*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]):
        raise CountError(
            f"{caller}: the tensors are fake, so nothing would be counted: create the model on "
            "device='meta', which needs no memory either"
        )


def check_pass(caller: str, args: Any, kwargs: Any, loss: Any, *, backward: Any) -> None:
    """Check the batch, the loss and `backward`, but not the model."""
    if isinstance(args, Mapping):
        raise CountError(
            f"{caller}: args is a {type(args).__name__}: "
            "pass kwargs=batch, or args=(batch,) if the dict itself is the model's argument"
        )
    if isinstance(args, list):
        raise CountError(
            f"{caller}: args is a list: pass args=(batch,) if the list is the model's argument, or "
            "args=tuple(batch) if the list contains the model's arguments"
        )
    if not isinstance(args, tuple):
        raise CountError(
            f"{caller}: args={describe(args)}: "
            "pass a tuple of the model's positional arguments, or one tensor"
        )
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise CountError(
            f"{caller}: kwargs={describe(kwargs)}: pass a dict of the model's keyword "
            "arguments, or pass positional arguments as args=(x, y)"
        )
    if not isinstance(backward, bool):
        raise CountError(f"{caller}: backward={describe(backward)}: pass True or False")
    if loss is not None and not callable(loss):
        raise CountError(
            f"{caller}: loss={describe(loss)}: pass a function that accepts the model's output and "
            "returns a scalar"
        )
    if loss is not None and not backward:
        raise CountError(
            f"{caller}: loss= needs a backward pass, but backward=False: pass backward=True as well"
        )


def check_module(caller: str, module: Any, *, may_build: bool = False) -> None:
    """Raise an error if a value is not a module.

    With `may_build`, the error also suggests passing a function that builds a module.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        name = module.__name__
        builds = ""
        if may_build:
            builds = f", or `lambda: {name}(...)` to build the model without memory"
        raise CountError(f"{caller}: {name} is a class: pass an instance{builds}")
    if not isinstance(module, nn.Module):
        raise CountError(f"{caller}: {describe(module)} is not a torch.nn.Module")


def check_whole(caller: str, name: str, value: Any, *, least: int) -> None:
    if not is_whole(value, least):
        raise CountError(
            f"{caller}: {name}={describe(value)}: pass a whole number, at least {least}"
        )


def check_memory(caller: str, memory_bytes: Any) -> None:
    if (
        isinstance(memory_bytes, bool)
        or not isinstance(memory_bytes, int | float)
        or not memory_bytes > 0
    ):
        raise CountError(
            f"{caller}: memory_bytes={describe(memory_bytes)}: pass a positive number of bytes"
        )


def is_whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is an integer of at least `least`, and not a `bool`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def describe(value: Any) -> str:
    """Describe a value briefly for an error message.

    A tensor is described by its shape and dtype.
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
