"""How an estimate is made: of a model, its batch and its loss, by running one step or two on fake tensors."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lflops.collect.count import Counting
from lflops.collect.counting.accumulator import Extent
from lflops.collect.estimate.cpu_kernels import LSTM_LAYER
from lflops.collect.estimate.cuda_attention import attention_on
from lflops.collect.estimate.fake_errors import values_refused
from lflops.collect.estimate.fake_tensors import Fakes
from lflops.collect.estimate.optimizer_step import MakesOptimizer, Stepper
from lflops.collect.estimate.progress import Meter, Progress
from lflops.collect.inputs.arguments import check_module, check_pass, check_whole, describe
from lflops.collect.model.call import ModelCall
from lflops.collect.model.restore import same_random_numbers
from lflops.collect.torch_private.self_check import check_fake_tensors
from lflops.collect.torch_private.tensors import local_part, only_shapes_run
from lflops.errors import CountError
from lflops.hardware.chips import Hardware, lookup, named
from lflops.profile.model import Profile
from lflops.profile.notes import Note

__all__ = ["Estimate", "Model", "Subject", "batch_of", "built", "subject_of"]

Model = nn.Module | Callable[[], nn.Module]


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
    grad_scaler: bool = False
    round_to: int = 1
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
        with self.begun(held) as run:
            return run(make)

    @contextlib.contextmanager
    def begun(self, held: Iterable[Tensor] = ()) -> Iterator[Callable[[Callable[[], Subject]], Profile]]:
        """Make everything fake, and give a function that runs what is made, as often as it is called: none sees what another left.

        Args:
            held: As in `of`.

        Raises:
            CountError: Something cannot be run like that.
            HardwareError: The chip is not known.
        """
        check_fake_tensors()
        chip = self._checked()
        fakes, held = Fakes(on_host=not _is_listed(chip)), list(held)

        def run(make: Callable[[], Subject]) -> Profile:
            with same_random_numbers(held):
                with torch.inference_mode(mode=False):  # or its parameters could take no gradient
                    subject = make()
                check_module(self.asker, subject.model)
                with fakes.lent_to(subject.model):
                    profile = self._run(subject, fakes, chip)
                    for parameter in subject.model.parameters():
                        parameter.grad = None
            fakes.forget()
            return replace(profile, run=replace(profile.run, kind="estimate", hardware=chip))

        with same_random_numbers(held), fakes.running(), values_refused(self.asker):
            yield run

    def _checked(self) -> Hardware | None:
        """See that what is wanted can be; and the chip."""
        if only_shapes_run(()):
            raise CountError(f"{self.asker}: a mode that makes tensors fake is open here already: call it outside")
        if self.optimizer is not None and not callable(self.optimizer):
            raise CountError(
                f"{self.asker}: optimizer={describe(self.optimizer)}: give a function from parameters to one, as torch.optim.AdamW"
            )
        if self.grad_scaler not in (True, False):
            raise CountError(f"{self.asker}: grad_scaler={describe(self.grad_scaler)}: give True or False")
        if self.grad_scaler and self.optimizer is None:
            raise CountError(f"{self.asker}: grad_scaler=True, but there is no optimizer whose gradients it would scale: give optimizer=")
        check_whole(self.asker, "round_to", self.round_to, least=1)
        if not isinstance(self.hardware, Hardware | str | None):
            raise CountError(f"{self.asker}: hardware={describe(self.hardware)}: give a chip's name or a lflops.Hardware")
        return named(self.hardware) if isinstance(self.hardware, str) else self.hardware

    def _run(self, subject: Subject, fakes: Fakes, chip: Hardware | None) -> Profile:
        model, loss = subject.model, subject.loss
        args, kwargs = given = fakes.of((tuple(subject.args), dict(subject.kwargs)))
        stepper = None
        if self.optimizer is not None:
            if self.grad_scaler and loss is None:
                raise CountError(f"{self.asker}: grad_scaler=True, but there is no loss to scale: give one")
            stepper = Stepper(self.asker, self.optimizer, model, chip=chip, grad_scaler=self.grad_scaler)
            loss = stepper.scaled(loss)
        call = ModelCall(asker=self.asker, model=model, args=args, kwargs=kwargs, backward=self.backward, loss=loss, _given=given)
        if any(local_part(each) is not each for each in model.parameters()):
            self._step(call, stepper, chip, Meter(progress=False))  # in which torch works out once, with tensors, how results are spread
            model.zero_grad()
        with Meter(self.progress) as meter:
            first = self._step(call, stepper, chip, meter)
            if stepper is None:
                return first
            meter.expect(2)
            second = self._step(call, stepper, chip, meter)
        return _with_the_higher_peak(replace(second, notes=second.notes + stepper.notes), first)

    def _step(self, call: ModelCall, stepper: Stepper | None, chip: Hardware | None, meter: Meter) -> Profile:
        call.prepare()
        extent = Extent(fake=True, round_to=self.round_to)
        counting = Counting({"": call.model}, phase="forward", batch=(call.args, call.kwargs), extent=extent, counter=meter.counter)
        with attention_on(chip) as notes, counting:
            call.run()
            if stepper is not None:
                stepper.step()
        if self.round_to > 1:
            notes.append(Note(code="rounded_up", subject="", values={"bytes": self.round_to}))
        calls = sum(cell.calls for cell in counting.profile.cells if cell.operator == LSTM_LAYER.name().removeprefix("aten::"))
        if calls and (self.backward or torch.is_grad_enabled()):
            notes.append(
                Note(code="lstm_workspace", subject=chip.name if chip is not None and _is_listed(chip) else "", values={"calls": calls})
            )
        return replace(counting.profile, notes=counting.profile.notes + tuple(notes))


def _is_listed(chip: Hardware | None) -> bool:
    """Whether the step is for a chip of the table. Other figures are taken for this machine's own."""
    return chip is not None and lookup(chip.name) is not None


def _with_the_higher_peak(step: Profile, other: Profile) -> Profile:
    """The step, with the other's memory where that needed more."""
    if step.memory is None or other.memory is None or step.memory.peak_bytes >= other.memory.peak_bytes:
        return step
    modules = {
        row: replace(module, peak_bytes=other.modules[row].peak_bytes) for row, module in step.modules.items() if row in other.modules
    }
    return replace(step, memory=other.memory, modules={**step.modules, **modules})
