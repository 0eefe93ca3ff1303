"""Create the optimizer of an estimate and run its steps, with a `GradScaler` on request.

This module also contains a stand-in for an optimizer with 8-bit state.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.errors import CountError
from lflops.estimation.fake_tensors import HOST, Answers, values_refused
from lflops.flop_counter.live_memory import ON_HOST, on_stream
from lflops.hardware.chips import Hardware, is_gpu
from lflops.inputs.arguments import describe
from lflops.profile.notes import Note
from lflops.profile.series import grouped
from lflops.torch_private.tensors import local_part

MakesOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""A function that takes parameters and returns their optimizer, such as `torch.optim.AdamW`."""


def makes_optimizer(
    caller: str, asked: MakesOptimizer | str | None, *, fused: bool = False
) -> MakesOptimizer | None:
    """Convert the argument `optimizer` to a function that creates the optimizer.

    If `asked` is a function or `None`, it is returned unchanged. A name, in upper or lower case,
    stands for an optimizer in `torch.optim` or in `IN_8_BITS`. `fused` selects the fused
    implementation of a named optimizer.
    """
    if asked is None or (callable(asked) and not isinstance(asked, str)):
        return asked
    if not isinstance(asked, str):
        raise CountError(
            f"{caller}: optimizer={describe(asked)}: "
            "pass a name such as 'adamw', or a function that takes parameters and returns an "
            "optimizer"
        )
    known: dict[str, Callable[..., Optimizer]] = dict.fromkeys(IN_8_BITS, AdamIn8Bits)
    for name, value in vars(torch.optim).items():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            known[name.lower()] = value
    if asked.lower() not in known:
        raise CountError(f"{caller}: optimizer={asked!r}: pass one of {', '.join(sorted(known))}")
    kind = known[asked.lower()]
    if not fused:
        return kind
    if "fused" not in inspect.signature(kind).parameters:
        raise CountError(
            f"{caller}: optimizer={asked!r} has no fused implementation: leave fused out"
        )
    return partial(kind, fused=True)


IN_8_BITS = ("adam8bit", "adamw8bit")
"""Names that users can pass for an optimizer that keeps its state in 8 bits, as in bitsandbytes.

Both names stand for `AdamIn8Bits`, because Adam and AdamW have states of the same size.
"""

SCALED_TOGETHER = 256
"""Number of elements of 8-bit state that share one scale in bitsandbytes."""

LEAST_IN_8_BITS = 4096
"""bitsandbytes uses 8-bit state only for parameters with at least this many elements."""


class AdamIn8Bits(Optimizer):
    """A stand-in for the 8-bit Adam of bitsandbytes: the same memory, without the real update.

    Each element of a parameter has two moments of one byte. For each moment, 256 elements share a
    scale in float32. Small parameters have moments in float32. The real step is one fused kernel,
    so no temporary tensors are allocated.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. The first step allocates their state."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: Any) -> None:
        values = local_part(parameter)
        if parameter not in self.state:
            state = self.state[parameter]
            is_small = values.numel() < LEAST_IN_8_BITS
            dtype = torch.float32 if is_small else torch.uint8
            state["moment1"] = torch.zeros_like(values, dtype=dtype)
            state["moment2"] = torch.zeros_like(values, dtype=dtype)
            if not is_small:
                scales = -(-values.numel() // SCALED_TOGETHER)
                state["scales1"] = values.new_zeros(scales, dtype=torch.float32)
                state["scales2"] = values.new_zeros(scales, dtype=torch.float32)
        for each in self.state[parameter].values():
            each.mul_(1)
        values.add_(local_part(parameter.grad))


class Stepper:
    """Creates the optimizer of an estimate, and runs its steps.

    With `in_backward`, each parameter has a separate optimizer, which steps during backward as soon
    as the gradient of the parameter is ready.
    """

    def __init__(
        self,
        caller: str,
        make: MakesOptimizer,
        model: nn.Module,
        *,
        chip: Hardware | None,
        grad_scaler: bool,
        in_backward: bool = False,
        on_host: bool = False,
    ) -> None:
        self._caller = caller
        self._on_host = on_host
        self._in_backward = in_backward
        self._scaler = torch.amp.GradScaler(HOST.type) if grad_scaler else None
        self._optimizers: list[Optimizer] = []
        if in_backward:
            self._step_in_backward(make, model)
        else:
            optimizer = _made(caller, make, [*model.parameters()])
            _separate_meshes(optimizer)
            self._optimizers.append(optimizer)
        name = type(self._optimizers[0]).__name__
        notes: list[Note] = []
        # `capturable` is for CUDA graphs, and an estimate captures no graph. The optimizer's state
        # has the same size with and without `capturable`.
        if _change_setting(self._optimizers, "capturable", was=True, now=False):
            notes.append(Note(code="not_captured", subject=name, values={}))
        may_use_foreach = is_gpu(chip) and not in_backward and not on_host
        if chip is not None and may_use_foreach:
            is_assumed = _change_setting(self._optimizers, "foreach", was=None, now=True)
            if is_assumed:
                notes.append(Note(code="foreach_assumed", subject=chip.name, values={}))
        if grad_scaler:
            notes.append(Note(code="gradients_assumed_finite", subject=name, values={}))
        self.notes = tuple(notes)

    def _step_in_backward(self, make: MakesOptimizer, model: nn.Module) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        if not trained:
            raise CountError(
                f"{self._caller}: no parameter requires a gradient: "
                "unfreeze the parameters that the optimizer should update in backward"
            )
        self._optimizers = [_made(self._caller, make, [parameter]) for parameter in trained]
        for parameter, optimizer in zip(trained, self._optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._step_of, optimizer))

    def scaled(self, loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor] | None:
        """Return a loss function whose result is multiplied by the factor of the `GradScaler`.

        Without a `GradScaler` or without a loss, the argument is returned unchanged.
        """
        scaler = self._scaler
        if scaler is None or loss is None:
            return loss
        return lambda output: scaler.scale(loss(output))

    def step(self) -> None:
        """Run the optimizer's step, and free the gradients.

        With `in_backward`, nothing is done, because the steps have already run. A `GradScaler` is
        used as in a real step in which all gradients are finite.
        """
        if self._in_backward:
            return
        (optimizer,) = self._optimizers
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        self._step_of(optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def state(self) -> Iterator[Tensor]:
        """Yield the tensors in the optimizer's state, such as Adam's moments."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        yield value

    def _step_of(self, optimizer: Optimizer, _parameter: Tensor | None = None) -> None:
        # Adafactor reads norms of parameters and updates with `Tensor.item`. The norms only
        # determine the size of the update, so any number works.
        answers = {Tensor.item: 1.0} if type(optimizer) is torch.optim.Adafactor else {}
        where = on_stream(ON_HOST) if self._on_host else nullcontext()
        with values_refused(self._caller, step_of=optimizer), Answers(answers), where:
            optimizer.step()
        optimizer.zero_grad()


def _made(caller: str, make: MakesOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer: Any = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise CountError(
            f"{caller}: the function optimizer returned {describe(optimizer)}: it must return a "
            "torch.optim.Optimizer"
        )
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise CountError(
            f"{caller}: for {name}, the number of forward passes depends on the value of the loss, "
            "but the fake tensors of an estimate have no values: pass another optimizer"
        )
    return optimizer


def _separate_meshes(optimizer: Optimizer) -> None:
    """Divide the parameter groups so that no group mixes plain tensors and DTensors.

    Tensor parallelism leaves some parameters whole, such as the weights of norms. torch cannot
    update plain tensors and DTensors in the same list, so a real training run needs separate groups
    as well. DTensors on different meshes are also put into separate groups.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_mesh = grouped(group["params"], lambda each: getattr(each, "device_mesh", None))
        for parameters in by_mesh.values():
            groups.append({**group, "params": parameters})
    optimizer.param_groups[:] = groups


def _change_setting(
    optimizers: list[Optimizer], setting: str, *, was: bool | None, now: bool
) -> bool:
    """Change a setting, such as `foreach`, from the value `was` to the value `now`.

    Only parameter groups that have the value `was` and are not fused are changed. Returns whether
    any group was changed.
    """
    has_changed = False
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if setting in group and group[setting] is was and not group.get("fused"):
                group[setting] = now
                has_changed = True
    return has_changed
