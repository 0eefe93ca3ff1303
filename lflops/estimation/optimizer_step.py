"""The optimizer's step of an estimate, and a GradScaler around it."""

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
from lflops.torch_private.tensors import local_part

MakesOptimizer = Callable[
    [list[nn.Parameter]], Optimizer
    # a function from parameters to their optimizer, as `torch.optim.AdamW`
]


def makes_optimizer(
    caller: str, asked: MakesOptimizer | str | None, *, fused: bool = False
) -> MakesOptimizer | None:
    """The function that was given.

    Of a name, the optimizer of `torch.optim` in any letter case, by default or its fused one.
    """
    if asked is None or (callable(asked) and not isinstance(asked, str)):
        return asked
    if not isinstance(asked, str):
        raise CountError(
            f"{caller}: optimizer={describe(asked)}: give a name, as 'adamw', or a function from parameters to an optimizer"
        )
    known = {
        each.lower(): kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer)
    }
    known |= dict.fromkeys(IN_8_BITS, AdamIn8Bits)
    if asked.lower() not in known.keys() - {"optimizer"}:
        raise CountError(
            f"{caller}: optimizer={asked!r}: give one of {', '.join(sorted(known.keys() - {'optimizer'}))}"
        )
    kind: Callable[..., Optimizer] = known[asked.lower()]
    if fused and "fused" not in inspect.signature(kind).parameters:
        raise CountError(f"{caller}: optimizer={asked!r} has no fused implementation: leave it out")
    return partial(kind, fused=True) if fused else kind


IN_8_BITS = (
    "adam8bit",
    "adamw8bit",
    # names of optimizers whose moments are kept as bitsandbytes keeps them: both have the same state
)
SCALED_TOGETHER, LEAST_IN_8_BITS = 256, 4096
"""In bitsandbytes: the elements that share a scale, and the elements from which a parameter's moments are in 8 bits."""


class AdamIn8Bits(Optimizer):
    """Adam by the storage of bitsandbytes.

    Two moments of one byte an element, with a scale in float32 for 256 of them.

    Small parameters have moments in float32. One fused kernel makes the step, so there are no
    temporary tensors. Nothing is computed here.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update in place all that has a gradient, and allocate its state the first time."""
        del closure
        for parameter in (
            each for group in self.param_groups for each in group["params"] if each.grad is not None
        ):
            whole = local_part(parameter)
            if parameter not in self.state:
                small = whole.numel() < LEAST_IN_8_BITS
                moments = [
                    torch.zeros_like(whole, dtype=torch.float32 if small else torch.uint8)
                    for _ in range(2)
                ]
                scales = (
                    []
                    if small
                    else [
                        whole.new_zeros(-(-whole.numel() // SCALED_TOGETHER), dtype=torch.float32)
                        for _ in range(2)
                    ]
                )
                self.state[parameter] = dict(enumerate([*moments, *scales]))
            for each in self.state[parameter].values():
                each.mul_(1)
            whole.add_(local_part(parameter.grad))


class Stepper:
    """Makes the steps of an optimizer.

    `in_backward`, of one for each parameter, as soon as its gradient is there.
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
        self._caller, self._on_host = caller, on_host
        trained = [each for each in model.parameters() if each.requires_grad]
        if in_backward and not trained:
            raise CountError(
                f"{caller}: no parameter requires a gradient: unfreeze what the optimizer is to step for in backward"
            )
        self._optimizers = (
            [_made(caller, make, [p]) for p in trained]
            if in_backward
            else [_made(caller, make, [*model.parameters()])]
        )
        self._in_backward = in_backward
        for parameter, optimizer in (
            zip(trained, self._optimizers, strict=False) if in_backward else ()
        ):
            parameter.register_post_accumulate_grad_hook(partial(self._step_of, optimizer))
        self._scaler = torch.amp.GradScaler(HOST.type) if grad_scaler else None
        kind, notes = type(self._optimizers[0]).__name__, []
        if _settle(
            self._optimizers,
            "capturable",
            was=True,
            now=False,
            # there is no graph to capture, and the state has the same size
        ):
            notes.append(Note(code="not_captured", subject=kind, values={}))
        if (
            chip is not None
            and is_gpu(chip)
            and not (in_backward or on_host)
            and _settle(self._optimizers, "foreach", was=None, now=True)
        ):
            notes.append(Note(code="foreach_assumed", subject=chip.name, values={}))
        if grad_scaler:
            notes.append(Note(code="gradients_taken_for_finite", subject=kind, values={}))
        self.notes = tuple(notes)

    def scaled(self, loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor] | None:
        """The loss that backward starts from: scaled, if there is a scaler."""
        scaler = self._scaler
        return loss if scaler is None or loss is None else lambda output: scaler.scale(loss(output))

    def step(self) -> None:
        """Make one step and free the gradients.

        With a scaler, as its own `step`, without asking whether all gradients are finite.
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
        """What the optimizers keep."""
        return (
            each
            for made in self._optimizers
            for kept in made.state.values()
            for each in kept.values()
            if isinstance(each, Tensor)
        )

    def _step_of(self, optimizer: Optimizer, _parameter: Tensor | None = None) -> None:
        # Adafactor asks for the norms of parameters and updates, which only scale its step.
        answers = {Tensor.item: 1.0} if type(optimizer) is torch.optim.Adafactor else {}
        where = on_stream(ON_HOST) if self._on_host else nullcontext()
        with values_refused(self._caller, step_of=optimizer), Answers(answers), where:
            optimizer.step()
        optimizer.zero_grad()


def _made(caller: str, make: MakesOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer: Any = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise CountError(
            f"{caller}: optimizer gave {describe(optimizer)}: it has to give a torch.optim.Optimizer"
        )
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise CountError(
            f"{caller}: {name} goes forward as often as the loss says, which fake tensors have not: give another"
        )
    return optimizer


def _settle(optimizers: list[Optimizer], setting: str, *, was: bool | None, now: bool) -> bool:
    """Change a setting from `was` to `now` in all groups that are not fused.

    Returns whether any group changed.
    """
    every = [group for each in optimizers for group in each.param_groups]
    groups = [
        each for each in every if setting in each and each[setting] is was and not each.get("fused")
    ]
    for group in groups:
        group[setting] = now
    return bool(groups)
