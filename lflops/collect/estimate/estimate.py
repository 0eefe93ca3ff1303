"""`estimate`: a step that is run on fake tensors, so that nothing is allocated and nothing computed."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lflops.collect.estimate.optimizer_step import MakesOptimizer
from lflops.collect.estimate.progress import Progress
from lflops.collect.estimate.runner import Estimate, Model, Subject, built
from lflops.collect.inputs.arguments import check_arguments, check_module, check_pass
from lflops.collect.inputs.tensors import tensors_in
from lflops.errors import CountError
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile

__all__ = ["estimate"]


def estimate(
    model: Model,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | None = None,
    grad_scaler: bool = False,
    hardware: Hardware | str | None = None,
    round_to: int = 1,
    progress: bool | Progress = False,
) -> Profile:
    """Work out what a step would compute and keep in memory: nothing is allocated and nothing is computed.

    Compiled modules are estimated as the code that they were compiled from. Afterwards a module that was given is what it was, to the bit,
    and so are the random numbers.

    Args:
        model: A module, or a function that builds one: that is built without memory too, so it may be larger than the machine.
        args: Its positional arguments, real or on `meta`; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: Output to a scalar; without it, the sum of the floating outputs, which itself is not counted. The output is let go before
            backward, but for what the loss needs of it.
        optimizer: Makes one from a list of parameters, as `torch.optim.AdamW` does. Two steps are run, so that its state is in the peak;
            the work is the second's.
        grad_scaler: Whether a `torch.amp.GradScaler` scales the loss, and the gradients back; all are taken for finite, so that no step is
            left out.
        hardware: The chip that it is for, by its name in the table or with figures of your own. For one of the table optimizers work on
            lists of parameters where they leave that open, and attention is the kernel that torch takes there.
        round_to: Bytes that each tensor's memory is rounded up to a multiple of: 512 is what CUDA's allocator gives out.
        progress: Whether to write to stderr how far it is; or a function that is told the operators done, and of how many where that is
            known.

    Raises:
        CountError: An argument is wrong; or some code needs the value of a tensor, and the message says on which line.
        HardwareError: The chip is not known.
    """
    args = (args,) if isinstance(args, Tensor) else args
    _check(model, args, kwargs, loss, backward=backward)
    if optimizer is not None and not backward:
        raise CountError("estimate: optimizer is given, but backward=False: give backward=True as well")
    asked = Estimate(
        asker="estimate",
        backward=backward,
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        hardware=hardware,
        round_to=round_to,
        progress=progress,
    )
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return asked.of(lambda: Subject(built(model), args, dict(kwargs or {}), loss), held=(*held, *tensors_in((args, kwargs))))


def _check(model: Any, args: Any, kwargs: Any, loss: Any, *, backward: Any) -> None:
    if isinstance(model, nn.Module):
        check_arguments("estimate", model, args, kwargs, loss, backward=backward)
    elif isinstance(model, type) or not callable(model):
        check_module("estimate", model, may_build=True)
    check_pass("estimate", args, kwargs, loss, backward=backward)
