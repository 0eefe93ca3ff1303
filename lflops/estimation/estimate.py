"""`estimate`: a step on fake tensors, so that nothing is allocated or computed."""

import contextlib
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lflops.attribution.module_tracker import ModuleTracker
from lflops.errors import CountError
from lflops.estimation.fake_tensors import Fakes, attention_on, values_refused
from lflops.estimation.mesh import checked_mesh, checked_rank, mesh_group, parallelize, with_mesh
from lflops.estimation.optimizer_step import MakesOptimizer, Stepper, makes_optimizer
from lflops.flop_counter.accumulator import Extent
from lflops.flop_counter.count import Counting
from lflops.flop_counter.cpu_kernels import LSTM_LAYER
from lflops.flop_counter.dispatch_mode import OperatorCounter
from lflops.flop_counter.live_memory import LONGEST_TIMELINE, AllocationLog
from lflops.hardware.chips import Hardware, is_gpu, named, vendor_of
from lflops.inputs.arguments import check_arguments, check_module, check_pass, check_whole, describe
from lflops.inputs.tensors import tensors_in
from lflops.memory.allocator.settings import settings_of
from lflops.memory.allocator.simulation import simulate
from lflops.model.call import ModelCall, same_random_numbers
from lflops.profile.notes import Note
from lflops.profile.profile import Profile, Reserved
from lflops.torch_private.self_check import check_fake_tensors
from lflops.torch_private.tensors import local_part, only_shapes_run

Progress = Callable[[int, int | None], object]
"""Called with the finished operators and their total, which is `None` while unknown.

Once more at the end, with the total.
"""

# operators between two reports
REPORT_EVERY = 500
# a module, or a function that builds one
Model = nn.Module | Callable[[], nn.Module]


def estimate(
    model: Model,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | str | None = None,
    grad_scaler: bool = False,
    hardware: Hardware | str | None = None,
    round_to: int = 1,
    allocator: str | None = None,
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    step: Callable[..., object] | None = None,
    progress: bool | Progress = False,
) -> Profile:
    """Estimate the work and the peak memory of a step.

    Nothing is allocated and nothing is computed.

    Compiled modules are estimated as the code that they were compiled from. The given module and
    the random numbers are not changed.

    Args:
        model: A module, or a function that builds one. The function's module is built without
            memory, so it may be larger than the machine.
        args: Its positional arguments, real or on `meta`; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: From the output, which is freed before backward, to a scalar; without it, the sum of
            the floating outputs, not counted.
        optimizer: A name of `torch.optim`, as `"adamw"`, or a function of a list of parameters. Its
            state is in the peak.
        grad_scaler: Whether a `torch.amp.GradScaler` scales the loss and unscales the gradients,
            which all count as finite.
        hardware: The chip to estimate for: a name in the table, a TOML file, or a `Hardware` with
            your own figures. For a chip of the table, attention uses the kernel that torch takes on
            it. There optimizers also default to their `foreach` implementation.
        round_to: The size of each tensor is rounded up to a multiple of so many bytes; CUDA's
            allocator uses 512.
        allocator: The settings of torch's allocator for CUDA, as the text of `PYTORCH_ALLOC_CONF`:
            it is simulated over the allocations of both steps, and `memory.reserved` has the
            result. For a chip of the table the default is simulated where nothing is given.
        mesh: Ranks by dimension, as `{"data": 8, "tensor": 4}`: the built model is divided as one
            of them has it. FSDP2 shards each block over `data`, in `replica` replicas; `tensor`
            follows its `tp_plan`. `{"replica": 8}` alone is DDP. The batch is one rank's. Of
            `pipeline` the functions `model` and `step` make the stage of the rank.
        rank: The rank of the mesh to estimate.
        step: A training step without its optimizer, in place of the call, the loss and backward, as
            a pipeline's schedule makes it. It is called as `step(model, *args, **kwargs)`, and goes
            backward itself.
        progress: Whether to write the progress to stderr; or a function of the finished operators
            and their total, `None` while unknown.

    Raises:
        CountError: An argument is wrong, or some code needs the value of a tensor. The message
            names the line.
        HardwareError: The chip is unknown.
    """
    args = (args,) if isinstance(args, Tensor) else args
    _check_step(step, loss, mesh, backward=backward, grad_scaler=grad_scaler)
    held = checked_model("estimate", model, args, kwargs, loss, backward=backward, mesh=mesh)
    if optimizer is not None and step is None and not backward:
        raise CountError(
            "estimate: optimizer is given, but backward=False: give backward=True as well"
        )
    ranks = checked_mesh("estimate", mesh)
    how: dict[str, Any] = {
        "mesh": ranks,
        "rank": checked_rank("estimate", rank, ranks),
        "hardware": hardware,
        "round_to": round_to,
    }
    how |= {
        "allocator": allocator,
        "backward": backward or step is not None,
        "optimizer": optimizer,
        "grad_scaler": grad_scaler,
    }
    estimator = Estimator(caller="estimate", progress=progress, **how)
    return estimator.run(
        lambda: Subject(built(model), args, dict(kwargs or {}), loss, step=step),
        held=(*held, *tensors_in((args, kwargs))),
    )


def checked_model(
    caller: str, model: Any, args: Any, kwargs: Any, loss: Any, *, backward: Any, mesh: Any = None
) -> list[Tensor]:
    """Check a module, or a function that builds one, and what it is called with.

    Returns the tensors that exist already.
    """
    if isinstance(model, nn.Module):
        check_arguments(caller, model, args, kwargs, loss, backward=backward)
    elif not callable(model) or (isinstance(model, type) and not _builds(model)):
        check_module(caller, model, may_build=True)
    check_pass(caller, args, kwargs, loss, backward=backward)
    if mesh and isinstance(model, nn.Module):
        raise CountError(
            f"{caller}: mesh={describe(mesh)} divides the model: give a function that builds it"
        )
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []


def _builds(model: type) -> bool:
    """Whether a class of modules needs no arguments, so that it is a function that builds one."""
    if not issubclass(model, nn.Module):
        return False
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(model).parameters.values()
    )


def _check_step(step: Any, loss: Any, mesh: Any, *, backward: Any, grad_scaler: Any) -> None:
    if step is None:
        if isinstance(mesh, Mapping) and "pipeline" in mesh:
            raise CountError(
                f"estimate: mesh={describe(mesh)}: give step=, a function that runs your schedule on the stage"
            )
        return
    if not callable(step):
        raise CountError(
            f"estimate: step={describe(step)}: give a function of the model and its arguments"
        )
    given = {"backward": backward, "loss": loss is not None, "grad_scaler": grad_scaler}
    if name := next((name for name, value in given.items() if value), None):
        raise CountError(
            f"estimate: step is given, and {name} as well: leave {name} out, a step computes its loss and goes backward itself"
        )


def built(model: Model) -> nn.Module:
    """The module itself, or the module that the function builds."""
    return model if isinstance(model, nn.Module) else model()


class Subject(NamedTuple):
    """A model, its arguments, and the loss of its output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    # of gradients, where ranks are replicas
    buckets: tuple[Tensor, ...] = ()
    # runs in place of the call, the loss and backward
    step: Callable[..., object] | None = None


def batch_of(caller: str, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a batch that a function made."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    if not isinstance(batch, tuple):
        raise CountError(
            f"{caller}: the batch is {describe(batch)}: give a tuple, a tensor, or a mapping of keyword arguments"
        )
    return batch, {}


def subject_of(caller: str, made: Any) -> Subject:
    """The subject from what a user's function returned: a model, its batch and perhaps a loss."""
    if isinstance(made, Subject):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CountError(
            f"{caller}: it gave {describe(made)}: it has to give (model, batch) or (model, batch, loss)"
        )
    model, batch, loss = made if len(made) == 3 else (*made, None)
    check_pass(caller, (), None, loss, backward=True)
    return Subject(model, *batch_of(caller, batch), loss)


@dataclass(kw_only=True)
class Estimator:
    """Runs subjects on fake tensors, all with the same options."""

    # the name of the public function, with which errors begin
    caller: str
    backward: bool
    optimizer: MakesOptimizer | str | None = None
    hardware: Hardware | str | None = None
    grad_scaler: bool = False
    round_to: int = 1
    allocator: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    # whether the optimizer steps for each parameter in backward, as soon as its gradient is there
    in_backward: bool = False
    # the dtypes in which FSDP2 computes and reduces
    mixed: MixedPrecisionPolicy | None = None
    offload: bool = (
        # whether FSDP2 keeps shards, gradients and the optimizer's state on the host
        False
    )
    progress: bool | Progress = False
    # Called with the profile of each step. Its timeline has every operator then, and no allocator
    # is simulated.
    watch: Callable[[Profile], object] | None = None

    def run(self, make: Callable[[], Subject], *, held: Iterable[Tensor] = ()) -> Profile:
        """Run the subject that `make` makes while new tensors are fake, so that a model that it builds has no memory."""
        with self.started(held) as run:
            return run(make)

    @contextlib.contextmanager
    def started(
        self, held: Iterable[Tensor] = ()
    ) -> Iterator[Callable[[Callable[[], Subject]], Profile]]:
        """A context in which new tensors are fake, with a function that runs a subject.

        Each run starts afresh.
        """
        check_fake_tensors()
        chip = self._checked()
        makes = makes_optimizer(self.caller, self.optimizer)
        fakes, held = Fakes(on_host=not is_gpu(chip)), list(held)

        def run(make: Callable[[], Subject]) -> Profile:
            with same_random_numbers(held):
                # otherwise its parameters take no gradient
                with torch.inference_mode(mode=False):
                    subject = make()
                    check_module(self.caller, subject.model)
                    buckets = (
                        parallelize(
                            self.caller, subject.model, self.mesh, self.mixed, offload=self.offload
                        )
                        if self.mesh
                        else ()
                    )
                with fakes.swapped_into(subject.model):
                    profile = self._run(subject._replace(buckets=buckets), fakes, chip, makes)
                    for parameter in subject.model.parameters():
                        parameter.grad = None
            fakes.forget()
            return with_mesh(
                replace(profile, run=replace(profile.run, kind="estimate", hardware=chip)),
                self.mesh,
            )

        group = mesh_group(self.caller, self.mesh, self.rank)
        with (
            group,
            same_random_numbers(held),
            fakes.running(),
            values_refused(self.caller),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings(
                "ignore",
                "FSDP2-wrapped module",
                # of views, which nothing here writes to
            )
            yield run

    def _checked(self) -> Hardware | None:
        if only_shapes_run(()):
            raise CountError(
                f"{self.caller}: a mode that makes tensors fake is open here already: call it outside"
            )
        if self.grad_scaler not in (True, False):
            raise CountError(
                f"{self.caller}: grad_scaler={describe(self.grad_scaler)}: give True or False"
            )
        if self.grad_scaler and self.optimizer is None:
            raise CountError(
                f"{self.caller}: grad_scaler=True, but there is no optimizer whose gradients it would scale: give optimizer="
            )
        check_whole(self.caller, "round_to", self.round_to, least=1)
        if self.allocator is not None:
            settings_of(self.allocator)
        if not isinstance(self.hardware, Hardware | str | None):
            raise CountError(
                f"{self.caller}: hardware={describe(self.hardware)}: give a chip's name, a TOML file, or an lflops.Hardware"
            )
        return named(self.hardware) if isinstance(self.hardware, str) else self.hardware

    def _run(
        self, subject: Subject, fakes: Fakes, chip: Hardware | None, makes: MakesOptimizer | None
    ) -> Profile:
        model, loss = subject.model, subject.loss
        args, kwargs = given = fakes.of((tuple(subject.args), dict(subject.kwargs)))
        stepper = None
        if makes is not None:
            if self.grad_scaler and loss is None:
                raise CountError(
                    f"{self.caller}: grad_scaler=True, but there is no loss to scale: give one"
                )
            how: dict[str, Any] = {
                "grad_scaler": self.grad_scaler,
                "in_backward": self.in_backward,
                "on_host": self.offload,
            }
            stepper = Stepper(self.caller, makes, model, chip=chip, **how)
            loss = stepper.scaled(loss)
        call = ModelCall(
            caller=self.caller,
            model=model,
            args=args,
            kwargs=kwargs,
            backward=self.backward,
            loss=loss,
            step=subject.step,
            _given=given,
        )
        call.begin_without_gradients()
        how = {
            "gradients": subject.buckets,
            "scratch": not is_gpu(chip),
            "survivors": None if subject.step is None else [],
        }
        how["host"] = tuple(model.parameters()) if self.offload else ()
        extent = Extent(
            fake=True,
            round_to=self.round_to,
            moments=LONGEST_TIMELINE if self.watch is None else sys.maxsize,
            **how,
        )
        if any(local_part(each) is not each for each in model.parameters()):
            # Torch infers the placements of results in the first step only, with its own tensors.
            self._step(call, stepper, chip, Meter(progress=False), extent)
            model.zero_grad()
        log = (
            AllocationLog()
            if self.watch is None and (self.allocator is not None or is_gpu(chip))
            else None
        )
        extent = dataclasses.replace(extent, log=log)
        meter = Meter(self.progress)
        step = self._step(call, stepper, chip, meter, extent)
        if stepper is not None:
            meter.total = 2 * meter.done
            second = self._step(call, stepper, chip, meter, extent)
            step = _with_the_higher_peak(replace(second, notes=second.notes + stepper.notes), step)
        meter.end()
        if self.offload:
            trained = (
                each
                for each in model.parameters()
                if each.requires_grad
                # their gradients are as large
            )
            moved = [*model.parameters(), *trained, *(stepper.state() if stepper else ())]
            note = Note(
                code="cpu_offload",
                subject="",
                values={"bytes": sum(local_part(each).nbytes for each in moved)},
            )
            step = replace(step, notes=(*step.notes, note))
        return step if log is None else _with_reserved(step, log, self.allocator or "")

    def _step(
        self,
        call: ModelCall,
        stepper: Stepper | None,
        chip: Hardware | None,
        meter: "Meter",
        extent: Extent,
    ) -> Profile:
        call.prepare()
        tf32 = (
            chip is not None
            and vendor_of(chip.name) == "NVIDIA"
            and "tf32" in chip.peak_flops_per_second
        )
        how: dict[str, Any] = {
            "extent": extent,
            "counter": partial(_Counter, meter),
            "eager": True,
            "tf32": tf32,
        }
        counting = Counting(
            {"": call.model}, phase="forward", batch=(call.args, call.kwargs), **how
        )
        with attention_on(chip) as notes, counting:
            call.run()
            if stepper is not None:
                stepper.step()
        if extent.gradients:
            nbytes = sum(each.nbytes for each in extent.gradients)
            notes.append(
                Note(
                    code="ddp_buckets",
                    subject="",
                    values={"buckets": len(extent.gradients), "bytes": nbytes},
                )
            )
        if self.round_to > 1:
            notes.append(Note(code="rounded_up", subject="", values={"bytes": self.round_to}))
        calls = sum(
            cell.calls
            for cell in counting.profile.op_counts
            if cell.operator == LSTM_LAYER.name().removeprefix("aten::")
        )
        if calls and (self.backward or torch.is_grad_enabled()):
            gpu = chip.name if chip is not None and is_gpu(chip) else ""
            notes.append(Note(code="lstm_workspace", subject=gpu, values={"calls": calls}))
        profile = replace(counting.profile, notes=counting.profile.notes + tuple(notes))
        if self.watch is not None:
            self.watch(profile)
        return profile


def _with_reserved(step: Profile, log: AllocationLog, settings: str) -> Profile:
    log.stop()
    if step.memory is None:
        return step
    simulated = simulate(log.requests, settings_of(settings))
    reserved = Reserved(
        settings=settings,
        requested_bytes=simulated.peak.requested,
        allocated_bytes=simulated.peak.allocated,
        reserved_bytes=simulated.peak.reserved,
        unused_bytes=simulated.at_reserved_peak.reserved - simulated.at_reserved_peak.allocated,
    )
    return replace(step, memory=replace(step.memory, reserved=reserved))


def _with_the_higher_peak(step: Profile, other: Profile) -> Profile:
    if (
        step.memory is None
        or other.memory is None
        or step.memory.peak_bytes >= other.memory.peak_bytes
    ):
        return step
    both = step.modules.keys() & other.modules.keys()
    modules = {
        row: replace(step.modules[row], peak_bytes=other.modules[row].peak_bytes) for row in both
    }
    return replace(step, memory=other.memory, modules={**step.modules, **modules})


class Meter:
    """Counts the finished operators of all steps.

    `progress` is called with them; `True` writes a line to stderr, `False` is silent.
    """

    def __init__(self, progress: bool | Progress) -> None:  # noqa: FBT001 - the user's own argument, handed on
        if not isinstance(progress, bool) and not callable(progress):
            raise CountError(
                f"estimate: progress={describe(progress)}: give True, False or a function of (done, total)"
            )
        self._report = _write if progress is True else progress or None
        self.done = 0
        self.total: int | None = None

    def end(self) -> None:
        if self._report is not None:
            self._report(self.done, self.done)

    def add(self) -> None:
        self.done += 1
        if self._report is not None and self.done % REPORT_EVERY == 0:
            self._report(self.done, self.total)


class _Counter(OperatorCounter):
    def __init__(self, meter: Meter, scopes: ModuleTracker, extent: Extent) -> None:
        super().__init__(scopes, extent)
        self._meter = meter

    def record(self, *call: Any) -> Any:
        super().record(*call)
        self._meter.add()


def _write(done: int, total: int | None) -> None:
    of = "" if total is None else f" of {total:,} ({done / total:.0%})" if total else ""
    sys.stderr.write(f"\restimate: {done:,} operators{of}" + ("\n" if done == total else ""))
    sys.stderr.flush()
