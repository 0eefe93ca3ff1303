"""`estimate` and `largest_batch`: a step that is run on fake tensors, so that nothing is allocated and nothing computed."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.collect.arguments import check_arguments, check_module, check_pass, describe
from lflops.collect.counting.mode import Extent
from lflops.collect.cuda_attention import attention_on
from lflops.collect.fake import Fakes, values_refused
from lflops.collect.model_call import ModelCall
from lflops.collect.passes import Counting
from lflops.collect.progress import Meter, Progress
from lflops.collect.random_numbers import same_random_numbers
from lflops.collect.tensors import tensors_in
from lflops.collect.torch_check import check
from lflops.collect.torch_compat import runs_nothing
from lflops.errors import CountError
from lflops.hardware import Hardware, lookup, named
from lflops.profile import Note, Profile

__all__ = ["Estimate", "MakesOptimizer", "Model", "Subject", "batch_of", "built", "estimate", "optimizer_named", "subject_of"]

Model = nn.Module | Callable[[], nn.Module]
MakesOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def estimate(
    model: Model,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | None = None,
    hardware: Hardware | str | None = None,
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
        hardware: The chip that it is for, by its name in the table or with figures of your own. For one of the table optimizers work on
            lists of parameters where they leave that open, as they do there.
        progress: Whether to write to stderr how far it is; or a function that is told the operators done, and of how many where that is
            known.

    Raises:
        CountError: An argument is wrong; or some code needs the value of a tensor, and the message says on which line.
        HardwareError: The chip is not known.
    """
    args = (args,) if isinstance(args, Tensor) else args
    if isinstance(model, nn.Module):
        check_arguments("estimate", model, args, kwargs, loss, backward=backward)
    elif isinstance(model, type) or not callable(model):
        check_module("estimate", model)
    check_pass("estimate", args, kwargs, loss, backward=backward)
    if optimizer is not None and not backward:
        raise CountError("estimate: optimizer is given, but backward=False: give backward=True as well")
    asked = Estimate(asker="estimate", backward=backward, optimizer=optimizer, hardware=hardware, progress=progress)
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return asked.of(lambda: Subject(built(model), args, dict(kwargs or {}), loss), held=(*held, *tensors_in((args, kwargs))))


def built(model: Model) -> nn.Module:
    """The module, or what the function makes."""
    return model if isinstance(model, nn.Module) else model()


class Subject(NamedTuple):
    """What is run, and the loss of what it returns."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def batch_of(asker: str, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of what a function made for a model.

    Raises:
        CountError: It is nothing that a model is called with.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    if not isinstance(batch, tuple):
        raise CountError(f"{asker}: the batch is {describe(batch)}: give a tuple, a tensor, or a mapping of keyword arguments")
    return batch, {}


def subject_of(asker: str, made: Any) -> Subject:
    """What a function made of a model, its batch and perhaps a loss.

    Raises:
        CountError: It is something else.
    """
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CountError(f"{asker}: it gave {describe(made)}: it has to give (model, batch) or (model, batch, loss)")
    model, batch, loss = made if len(made) == 3 else (*made, None)
    check_pass(asker, (), None, loss, backward=True)
    return Subject(model, *batch_of(asker, batch), loss)


def optimizer_named(name: str) -> MakesOptimizer:
    """One of `torch.optim`, in its own settings, whatever the letter case.

    Raises:
        CountError: There is none of that name.
    """
    known = {each.lower(): kind for each, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    if name.lower() not in known.keys() - {"optimizer"}:
        raise CountError(f"optimizer={name!r}: give one of {', '.join(sorted(known.keys() - {'optimizer'}))}")
    return known[name.lower()]


@dataclass(kw_only=True)
class Estimate:
    """What is wanted of a subject.

    Attributes:
        asker: The public function that it is for, which errors begin with.
    """

    asker: str
    backward: bool
    optimizer: MakesOptimizer | None = None
    hardware: Hardware | str | None = None
    progress: bool | Progress = False

    def of(self, make: Callable[[], Subject], *, held: Iterable[Tensor] = ()) -> Profile:
        """Run what is made, which is made without memory where it is not there yet.

        Args:
            make: Called where everything is fake.
            held: Tensors on whose devices random numbers may be drawn.

        Raises:
            CountError: It cannot be run like that.
            HardwareError: The chip is not known.
        """
        check()
        if runs_nothing(()):
            raise CountError(f"{self.asker}: a mode that makes tensors fake is open here already: call it outside")
        if self.optimizer is not None and not callable(self.optimizer):
            raise CountError(
                f"{self.asker}: optimizer={describe(self.optimizer)}: give a function from parameters to one, as torch.optim.AdamW"
            )
        chip = named(self.hardware) if isinstance(self.hardware, str) else self.hardware
        fakes = Fakes()
        with same_random_numbers(held), fakes.running(), values_refused(self.asker):
            with torch.inference_mode(mode=False):  # or its parameters could take no gradient
                subject = make()
            check_module(self.asker, subject.model)
            with fakes.lent_to(subject.model):
                profile = self._run(subject, fakes, chip)
        return replace(profile, run=replace(profile.run, kind="estimate", hardware=chip))

    def _run(self, subject: Subject, fakes: Fakes, chip: Hardware | None) -> Profile:
        args, kwargs = given = fakes.of((tuple(subject.args), dict(subject.kwargs)))
        call = ModelCall(
            asker=self.asker, model=subject.model, args=args, kwargs=kwargs, backward=self.backward, loss=subject.loss, _given=given
        )
        with Meter(self.progress) as meter:
            if self.optimizer is None:
                return self._step(call, None, chip, meter)
            optimizer, notes = self._made(self.optimizer, call.model, chip)
            first = self._step(call, optimizer, chip, meter)
            meter.expect(2)
            second = self._step(call, optimizer, chip, meter)
        return _with_the_higher_peak(replace(second, notes=second.notes + notes), first)

    def _step(self, call: ModelCall, optimizer: Optimizer | None, chip: Hardware | None, meter: Meter) -> Profile:
        call.prepare()
        batch = (call.args, call.kwargs)
        counting = Counting({"": call.model}, phase="forward", batch=batch, extent=Extent(fake=True), counter=meter.counter)
        with attention_on(chip) as notes, counting:
            call.run()
            if optimizer is not None:
                with values_refused(self.asker, step_of=optimizer):
                    optimizer.step()
                optimizer.zero_grad()
        return replace(counting.profile, notes=counting.profile.notes + tuple(notes))

    def _made(self, make: MakesOptimizer, model: nn.Module, chip: Hardware | None) -> tuple[Optimizer, tuple[Note, ...]]:
        """The optimizer, and what is to be said of it."""
        optimizer = make(list(model.parameters()))
        if not isinstance(optimizer, Optimizer):
            raise CountError(f"{self.asker}: optimizer gave {describe(optimizer)}: it has to give a torch.optim.Optimizer")
        if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
            name = type(optimizer).__name__
            raise CountError(f"{self.asker}: {name} goes forward as often as the loss says, which fake tensors have not: give another")
        notes = []
        if _settle(optimizer, "capturable", was=True, now=False):  # there is no graph to capture, and the state is as large
            notes.append(Note(code="not_captured", subject=type(optimizer).__name__, values={}))
        if chip is not None and lookup(chip.name) is not None and _settle(optimizer, "foreach", was=None, now=True):
            notes.append(Note(code="foreach_assumed", subject=chip.name, values={}))
        return optimizer, tuple(notes)


def _settle(optimizer: Optimizer, setting: str, *, was: bool | None, now: bool) -> bool:
    """Change a setting of the groups that have it so and are not fused. Returns whether any did."""
    groups = [each for each in optimizer.param_groups if setting in each and each[setting] is was and not each.get("fused")]
    for group in groups:
        group[setting] = now
    return bool(groups)


def _with_the_higher_peak(step: Profile, other: Profile) -> Profile:
    """The step, with the other's memory where that needed more."""
    if step.memory is None or other.memory is None or step.memory.peak_bytes >= other.memory.peak_bytes:
        return step
    modules = {
        row: replace(module, peak_bytes=other.modules[row].peak_bytes) for row, module in step.modules.items() if row in other.modules
    }
    return replace(step, memory=other.memory, modules={**step.modules, **modules})
