"""Estimate the work and the memory of a step by running the step on fake tensors.

To save time, a model with a long sequence of equal blocks, such as `layers.0`, runs with only a few
of these blocks. The results for the whole model are derived from these runs. A `Fold` describes
the sequence of equal blocks.
"""

import contextlib
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lflops.attribution.module_tracker import ModuleTracker
from lflops.errors import CountError
from lflops.estimation.equal_blocks import Fold, folded, folds_of, run_alike
from lflops.estimation.fake_tensors import Fakes, attention_on, values_refused
from lflops.estimation.mesh import (
    checked_mesh,
    checked_rank,
    is_divided,
    mesh_group,
    parallelize,
    with_mesh,
)
from lflops.estimation.optimizer_step import MakesOptimizer, Stepper, makes_optimizer
from lflops.estimation.unrolling import StepRecord, Unrolling
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.count import Counting
from lflops.flop_counter.cpu_kernels import LSTM_LAYER
from lflops.flop_counter.dispatch_mode import OperatorCounter
from lflops.flop_counter.live_memory import AllocationLog
from lflops.flop_counter.memory_record import LONGEST_TIMELINE, MemoryRecord
from lflops.hardware.chips import Hardware, chip_named, is_gpu, vendor_of
from lflops.inputs.arguments import check_arguments, check_module, check_pass, check_whole, describe
from lflops.inputs.tensors import tensors_in
from lflops.memory.allocator.settings import settings_of
from lflops.memory.allocator.simulation import Request, simulate
from lflops.memory.peak import allocator_limit
from lflops.model.call import ModelCall, same_random_numbers
from lflops.model.module_tree import blocks_in
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, Profile, Reserved
from lflops.torch_private.self_check import check_fake_tensors
from lflops.torch_private.tensors import local_part, only_shapes_run

Progress = Callable[[int, int | None], object]
"""A user's function that receives the number of finished operators and the number of all operators.

The number of all operators is `None` while it is unknown. In the last call, both numbers are the
same.
"""

FEWER_BLOCKS = (3, 5)
"""Numbers of equal blocks with which an estimate runs a model, to save time.

The estimate first runs the model with three and with four of its equal blocks. If the results for
all blocks cannot be derived from these two runs, the model runs with five and with six.
"""

# Number of operators between two reports of progress.
REPORT_EVERY = 500
# A module, or a function that builds one.
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
    """Estimate the work and the peak memory of a step, without running its computations.

    Tensors are fake: they have shapes but no values, and use no memory. A compiled module is
    estimated as if it were not compiled. The model and the random state are not changed.

    Args:
        model: A module, or a function that builds a module. The module that a function builds uses
            no memory, so it may be larger than the memory of this machine.
        args: Positional arguments of the model, or a single tensor. Tensors may be real or on
            `meta`.
        kwargs: Keyword arguments of the model.
        backward: Whether to run backward as well, from `loss(output)`.
        loss: Function that takes the output and returns a scalar. The output is freed before
            backward. Without a loss, backward starts from the sum of the floating-point outputs,
            which is not counted.
        optimizer: A name in `torch.optim`, such as `"adamw"`, or a function that takes a list of
            parameters and returns an optimizer. The peak includes the optimizer's state.
        grad_scaler: Whether a `torch.amp.GradScaler` scales the loss and unscales the gradients.
            All gradients are assumed to be finite.
        hardware: The chip to estimate for: a name in lflops' table of chips, a TOML file, or a
            `Hardware` with your own figures. For a chip in the table, attention uses the kernel
            that torch chooses on this chip, and optimizers use their `foreach` implementation by
            default.
        round_to: Round the size of each tensor up to a multiple of this number of bytes. CUDA's
            allocator uses 512.
        allocator: Settings of torch's CUDA allocator, in the syntax of `PYTORCH_ALLOC_CONF`. The
            allocator is simulated for the allocations of all steps, and the result is in
            `memory.reserved`. If you pass no settings and the chip is a GPU in the table, the
            default settings are simulated.
        mesh: Number of ranks in each dimension, such as `{"data": 8, "tensor": 4}`. The estimate is
            for one rank, with its part of the model and its own batch. FSDP2 shards each block over
            `data`, with `replica` copies of each shard. `tensor` follows the model's `tp_plan`.
            `{"replica": 8}` alone is DDP. With the dimension `pipeline`, `model` must be a function
            that builds the stage of this rank, and `step` must run this stage.
        rank: The rank of the mesh to estimate.
        step: A function that runs a training step without the optimizer, for example a pipeline
            schedule. It is called as `step(model, *args, **kwargs)` instead of the model and the
            loss, and must run backward.
        progress: Whether to write the progress to stderr. You can also pass a function, which
            receives the number of finished operators and the number of all operators. The second
            number is `None` while it is unknown.

    Raises:
        CountError: An argument is wrong, or some code needs the value of a tensor. The message
            contains the line of this code.
        HardwareError: The chip is unknown.
    """
    args = (args,) if isinstance(args, Tensor) else args
    _check_step(step, loss, mesh, backward=backward, grad_scaler=grad_scaler)
    held = checked_model("estimate", model, args, kwargs, loss, backward=backward, mesh=mesh)
    if optimizer is not None and step is None and not backward:
        raise CountError(
            "estimate: optimizer= needs a backward pass, but backward=False: pass backward=True as "
            "well"
        )
    ranks = checked_mesh("estimate", mesh)
    estimator = Estimator(
        caller="estimate",
        backward=backward or step is not None,
        optimizer=optimizer,
        hardware=hardware,
        grad_scaler=grad_scaler,
        round_to=round_to,
        allocator=allocator,
        mesh=ranks,
        rank=checked_rank("estimate", rank, ranks),
        progress=progress,
    )
    return estimator.run(
        lambda: Subject(built(model), args, dict(kwargs or {}), loss, step=step),
        held=(*held, *tensors_in((args, kwargs))),
    )


def checked_model(
    caller: str, model: Any, args: Any, kwargs: Any, loss: Any, *, backward: Any, mesh: Any = None
) -> list[Tensor]:
    """Check the model and its arguments that a user passed to a public function.

    Returns the parameters and buffers of the model. The list is empty if `model` is a function that
    builds the module.
    """
    if isinstance(model, nn.Module):
        check_arguments(caller, model, args, kwargs, loss, backward=backward)
    elif not callable(model) or (isinstance(model, type) and not _builds(model)):
        check_module(caller, model, may_build=True)
    check_pass(caller, args, kwargs, loss, backward=backward)
    if mesh and isinstance(model, nn.Module):
        raise CountError(
            f"{caller}: mesh={describe(mesh)} divides the model, so the model must not be built "
            "yet: pass a function that builds the model"
        )
    if not isinstance(model, nn.Module):
        return []
    return [*model.parameters(), *model.buffers()]


def _builds(model: type) -> bool:
    """Return whether a class is a module class that can be built without arguments."""
    if not issubclass(model, nn.Module):
        return False
    for parameter in inspect.signature(model).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            return False
    return True


def _check_step(step: Any, loss: Any, mesh: Any, *, backward: Any, grad_scaler: Any) -> None:
    if step is None:
        if isinstance(mesh, Mapping) and "pipeline" in mesh:
            raise CountError(
                f"estimate: mesh={describe(mesh)} has pipeline stages: pass step=, a function that "
                "runs your pipeline schedule on a stage"
            )
        return
    if not callable(step):
        raise CountError(
            f"estimate: step={describe(step)}: "
            "pass a function that takes the model and its arguments"
        )
    passed = {"backward": backward, "loss": loss is not None, "grad_scaler": grad_scaler}
    for name, value in passed.items():
        if value:
            raise CountError(
                f"estimate: step= and {name}= cannot be combined, because the step computes its "
                f"own loss and runs backward: leave {name}= out"
            )


def built(model: Model) -> nn.Module:
    """Return a module unchanged. If `model` is a function, call it and return its result."""
    return model if isinstance(model, nn.Module) else model()


class Subject(NamedTuple):
    """A model to estimate, with its arguments and its loss function.

    Attributes:
        model: The model.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        loss: Function that takes the output and returns a scalar; `None` without a loss.
        buckets: Gradient buckets of DDP; empty without DDP.
        step: The user's function that runs forward and backward. If it is `None`, the estimate
            calls the model, the loss and backward.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    buckets: tuple[Tensor, ...] = ()
    step: Callable[..., object] | None = None


def batch_of(caller: str, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a batch that a user's function returned to positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    if not isinstance(batch, tuple):
        raise CountError(
            f"{caller}: the batch is {describe(batch)}: "
            "pass a tuple, a tensor, or a mapping of keyword arguments"
        )
    return batch, {}


def subject_of(caller: str, made: Any) -> Subject:
    """Convert the result of a user's function, such as `(model, batch)`, to a `Subject`.

    The function may also return `(model, batch, loss)`.
    """
    if isinstance(made, Subject):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CountError(
            f"{caller}: the function returned {describe(made)}: "
            "it must return (model, batch) or (model, batch, loss)"
        )
    model = made[0]
    batch = made[1]
    loss = made[2] if len(made) == 3 else None
    check_pass(caller, (), None, loss, backward=True)
    return Subject(model, *batch_of(caller, batch), loss)


@dataclass(kw_only=True)
class Estimator:
    """Estimates models on fake tensors, all with the same options.

    Attributes:
        caller: Name of the public function; error messages begin with it.
        backward: Whether to run backward.
        optimizer: Name of an optimizer, or a function that takes a list of parameters and returns
            an optimizer.
        hardware: The chip to estimate for.
        grad_scaler: Whether a `torch.amp.GradScaler` scales the loss.
        round_to: Round the size of each tensor up to a multiple of this number of bytes.
        allocator: Settings of the allocator to simulate.
        mesh: Number of ranks in each dimension.
        rank: The rank of the mesh to estimate.
        in_backward: Whether the optimizer updates each parameter during backward, as soon as the
            gradient of the parameter is ready.
        mixed: The dtypes in which FSDP2 computes and reduces.
        offload: Whether FSDP2 keeps shards, gradients and the optimizer's state on the host.
        progress: Whether to write the progress to stderr, or a function that receives it.
        watch: A function that is called with the profile and the memory record of each counted
            step. If it is set, the memory timeline of each profile has every operator, and the
            allocator is not simulated.
        unrolls: Whether to save time by running only a few of many equal blocks. The result is the
            same.
    """

    caller: str
    backward: bool
    optimizer: MakesOptimizer | str | None = None
    hardware: Hardware | str | None = None
    grad_scaler: bool = False
    round_to: int = 1
    allocator: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    in_backward: bool = False
    mixed: MixedPrecisionPolicy | None = None
    offload: bool = False
    progress: bool | Progress = False
    watch: Callable[[StepRecord], object] | None = None
    unrolls: bool = True

    def run(self, make: Callable[[], Subject], *, held: Iterable[Tensor] = ()) -> Profile:
        """Estimate the model that `make` returns.

        New tensors are fake while `make` runs, so a model that `make` builds uses no memory.

        Args:
            make: Function that returns a model with its arguments.
            held: Real tensors of the model and its arguments, if they exist already. The random
                number generators of their devices are restored at the end.
        """
        with self.started(held) as run:
            return run(make)

    @contextlib.contextmanager
    def started(
        self, held: Iterable[Tensor] = ()
    ) -> Iterator[Callable[[Callable[[], Subject]], Profile]]:
        """Make new tensors fake inside a context, and provide a function that estimates a model.

        Like `run`, this function has the parameter `make` and returns the profile. Use it to
        estimate several models in the same context. `held` means the same as in `run`.
        """
        check_fake_tensors()
        chip = self._checked()
        makes = makes_optimizer(self.caller, self.optimizer)
        fakes = Fakes(on_host=not is_gpu(chip))
        held = list(held)

        def run(make: Callable[[], Subject]) -> Profile:
            setup = _Setup(fakes, chip, makes, Meter(self.progress))
            with same_random_numbers(held):
                first = self._made(make)
                subjects = self._subjects(first, make)
                fold = self._fold(first, fakes)
                profile = None
                if fold is not None:
                    profile = self._unrolled(subjects, fold, setup)
                if profile is None:
                    profile = self._whole(next(subjects), setup)
            setup.meter.end()
            run_of_profile = replace(profile.run, kind="estimate", hardware=chip)
            return with_mesh(replace(profile, run=run_of_profile), self.mesh)

        with (
            mesh_group(self.caller, self.mesh, self.rank),
            same_random_numbers(held),
            fakes.running(),
            values_refused(self.caller),
            warnings.catch_warnings(),
        ):
            # This warning is about modules that write to views. Nothing here writes to views.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")
            # `copy.deepcopy` reads the data pointer of each tensor. A fake tensor has the pointer
            # 0, so torch clones the tensor.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield run

    def _subjects(self, first: Subject, make: Callable[[], Subject]) -> Iterator[Subject]:
        """Yield the model with its arguments for each run of the estimate, without end.

        All runs use the same model if no run changes it. Sharding, and an optimizer that steps in
        backward, change a model. Each run then uses a new model, which `make` builds.
        """
        is_reused = not self.mesh and not self.in_backward
        yield first
        while True:
            yield first if is_reused else self._made(make)

    def _made(self, make: Callable[[], Subject]) -> Subject:
        # Parameters that are created in inference mode cannot have a gradient.
        with torch.inference_mode(mode=False):
            subject = make()
        check_module(self.caller, subject.model)
        return subject

    def _whole(self, subject: Subject, setup: "_Setup") -> Profile:
        """Run the steps of the whole model, with all its blocks, and return the profile."""
        steps = self._steps(subject, None, setup)
        profiles = [step.profile for step in steps.records]
        requests = None
        if steps.log is not None:
            requests = steps.log.requests
        return self._result(profiles, requests, setup.chip)

    def _unrolled(self, subjects: Iterator[Subject], fold: Fold, setup: "_Setup") -> Profile | None:
        """Derive the profile of the whole model from runs with only a few of its equal blocks.

        Returns:
            The profile of the whole model. `None` if the profile cannot be derived, so that the
            whole model has to run.
        """
        for kept in FEWER_BLOCKS:
            # The model may fail with fewer blocks. The run of the whole model raises the model's
            # own errors.
            with contextlib.suppress(Exception):
                return self._from_few_blocks(subjects, fold._replace(kept=kept), setup)
        return None

    def _from_few_blocks(self, subjects: Iterator[Subject], fold: Fold, setup: "_Setup") -> Profile:
        """Derive the profile of the whole model from models with few blocks.

        The model is run with `fold.kept` blocks and with one more block. As a check, the profile of
        the longer model is also derived from the run of the shorter model, and compared with its
        real profile.

        Raises:
            NotPeriodicError: The derived profile of the longer model differs from the real one.
        """
        longer_fold = fold._replace(kept=fold.kept + 1)
        steps = self._steps(next(subjects), fold, setup)
        longer = self._steps(next(subjects), longer_fold, setup)
        check = Unrolling(fold, longer_fold.kept)
        unrolling = Unrolling(fold, fold.length)
        profiles: list[Profile] = []
        for step, longer_step in zip(steps.records, longer.records, strict=True):
            check.check(step, longer_step)
            profiles.append(unrolling.profile(step, longer_step.profile))
        requests = None
        if steps.log is not None and longer.log is not None:
            check.check_requests(steps.log, longer.log)
            requests = unrolling.requests(steps.log)
        return self._result(profiles, requests, setup.chip)

    def _fold(self, subject: Subject, fakes: Fakes) -> Fold | None:
        """Find the longest sequence of equal blocks, of which only a few have to run.

        Returns `None` if the whole model has to run.
        """
        if not self.unrolls or self.watch is not None or subject.step is not None:
            return None
        model = subject.model
        if is_divided(model) or set(self.mesh) == {"replica"}:
            return None
        folds = folds_of(blocks_in(model))
        if not folds:
            return None
        fold = max(folds, key=attrgetter("length"))
        batch = fakes.of((tuple(subject.args), dict(subject.kwargs)))
        try:
            with fakes.swapped_into(model):
                args, kwargs = batch
                is_alike = run_alike(model, lambda: model(*args, **kwargs), fold)
        except Exception:  # noqa: BLE001 - the whole model raises it again
            return None
        finally:
            fakes.forget()
        return fold if is_alike else None

    def _result(
        self,
        profiles: Sequence[Profile],
        requests: Sequence[Request] | None,
        chip: Hardware | None,
    ) -> Profile:
        """Combine the profiles of all steps of an estimate into one profile.

        It is the profile of the last step, but with the memory of the step with the highest peak.
        `requests` are the requests to the allocator in all steps. If they are passed, the memory
        that the simulated allocator reserves is added.
        """
        profile = profiles[-1]
        for earlier in profiles[:-1]:
            profile = _with_the_higher_peak(profile, earlier)
        if requests is None:
            return profile
        limit = allocator_limit(chip, ranks=prod(self.mesh.values()))
        return _with_reserved(profile, requests, self.allocator or "", limit)

    def _parallelized(self, subject: Subject) -> Subject:
        """Divide the model over the ranks of the mesh, and add the gradient buckets of DDP."""
        if not self.mesh:
            return subject._replace(buckets=())
        # Parameters that are created in inference mode cannot have a gradient.
        with torch.inference_mode(mode=False):
            buckets = parallelize(
                self.caller, subject.model, self.mesh, self.mixed, offload=self.offload
            )
        return subject._replace(buckets=buckets)

    def _checked(self) -> Hardware | None:
        """Check the options of the estimate, and return the chip; `None` without a chip."""
        if only_shapes_run(()):
            raise CountError(
                f"{self.caller}: an estimate cannot run inside a FakeTensorMode: leave this mode "
                "before the estimate"
            )
        if self.grad_scaler not in (True, False):
            raise CountError(
                f"{self.caller}: grad_scaler={describe(self.grad_scaler)}: pass True or False"
            )
        if self.grad_scaler and self.optimizer is None:
            raise CountError(f"{self.caller}: grad_scaler=True needs an optimizer: pass optimizer=")
        check_whole(self.caller, "round_to", self.round_to, least=1)
        if self.allocator is not None:
            settings_of(self.allocator)
        if not isinstance(self.hardware, Hardware | str | None):
            raise CountError(
                f"{self.caller}: hardware={describe(self.hardware)}: "
                "pass a chip's name, a TOML file, or an lflops.Hardware"
            )
        return chip_named(self.hardware)

    def _steps(self, subject: Subject, fold: Fold | None, setup: "_Setup") -> "_Steps":
        """Run the steps of a model. If `fold` is passed, most of its blocks are left out."""
        with folded(subject.model, [] if fold is None else [fold]):
            subject = self._parallelized(subject)
            with setup.fakes.swapped_into(subject.model):
                steps = self._run(subject, setup, is_whole=fold is None)
                for parameter in subject.model.parameters():
                    parameter.grad = None
        setup.fakes.forget()
        return steps

    def _run(self, subject: Subject, setup: "_Setup", *, is_whole: bool) -> "_Steps":
        """Run the one or two steps of a model whose tensors are fake.

        With an optimizer there are two steps, because the first step creates the optimizer's state.
        """
        model = subject.model
        loss = subject.loss
        batch = setup.fakes.of((tuple(subject.args), dict(subject.kwargs)))
        args, kwargs = batch
        stepper = None
        if setup.makes is not None:
            if self.grad_scaler and loss is None:
                raise CountError(
                    f"{self.caller}: grad_scaler=True needs a loss to scale: pass loss="
                )
            stepper = Stepper(
                self.caller,
                setup.makes,
                model,
                chip=setup.chip,
                grad_scaler=self.grad_scaler,
                in_backward=self.in_backward,
                on_host=self.offload,
            )
            loss = stepper.scaled(loss)
        call = ModelCall(
            caller=self.caller,
            model=model,
            args=args,
            kwargs=kwargs,
            backward=self.backward,
            loss=loss,
            step=subject.step,
            _given=batch,
        )
        call.begin_without_gradients()
        options = CountOptions(
            fake=True,
            round_to=self.round_to,
            moments=LONGEST_TIMELINE if self.watch is None else sys.maxsize,
            gradients=subject.buckets,
            scratch=not is_gpu(setup.chip),
            survivors=None if subject.step is None else [],
            host=tuple(model.parameters()) if self.offload else (),
        )
        if is_divided(model) and stepper is None:
            # FSDP2 creates its tensors for gathered parameters in the first step. They are known
            # only after this step, so one more step runs before the counted step. With an
            # optimizer, there is a second step in any case.
            self._step(call, stepper, setup._replace(meter=Meter(progress=False)), options)
            model.zero_grad()
        log = None
        if self.watch is None and (self.allocator is not None or is_gpu(setup.chip)):
            log = AllocationLog()
        records: list[MemoryRecord] = []
        options = dataclasses.replace(options, log=log, records=records)
        done_before = setup.meter.done
        profiles = [self._step(call, stepper, setup, options)]
        if stepper is not None:
            if is_whole:
                # The second step has as many operators as the first.
                in_first_step = setup.meter.done - done_before
                setup.meter.total = setup.meter.done + in_first_step
            profiles.append(self._step(call, stepper, setup, options))
        if log is not None:
            log.stop()
        steps = [StepRecord(*pair) for pair in zip(profiles, records, strict=True)]
        if self.watch is not None:
            for step in steps:
                self.watch(step)
        return _Steps(steps, log)

    def _step(
        self,
        call: ModelCall,
        stepper: Stepper | None,
        setup: "_Setup",
        options: CountOptions,
    ) -> Profile:
        call.prepare()
        chip = setup.chip
        has_tf32 = chip is not None and "tf32" in chip.peak_flops_per_second
        is_nvidia = chip is not None and vendor_of(chip.name) == "NVIDIA"
        counting = Counting(
            {"": call.model},
            phase="forward",
            batch=(call.args, call.kwargs),
            options=options,
            counter=partial(_Counter, setup.meter),
            eager=True,
            tf32=has_tf32 and is_nvidia,
        )
        with attention_on(chip) as notes, counting:
            call.run()
            if stepper is not None:
                stepper.step()
        notes += self._notes(call, stepper, chip, options, counting.profile)
        return replace(
            counting.profile,
            notes=counting.profile.notes + tuple(notes),
            communication=tuple(_with_numbered_groups(counting.profile.communication)),
        )

    def _notes(
        self,
        call: ModelCall,
        stepper: Stepper | None,
        chip: Hardware | None,
        options: CountOptions,
        profile: Profile,
    ) -> Iterator[Note]:
        if options.gradients:
            nbytes = sum(bucket.nbytes for bucket in options.gradients)
            values = {"buckets": len(options.gradients), "bytes": nbytes}
            yield Note(code="ddp_buckets", subject="", values=values)
        if self.round_to > 1:
            yield Note(code="rounded_up", subject="", values={"bytes": self.round_to})
        lstm = LSTM_LAYER.name().removeprefix("aten::")
        calls = 0
        for op in profile.op_counts:
            if op.operator == lstm:
                calls += op.calls
        if calls and (self.backward or torch.is_grad_enabled()):
            gpu = ""
            if chip is not None and is_gpu(chip):
                gpu = chip.name
            yield Note(code="lstm_workspace", subject=gpu, values={"calls": calls})
        if stepper is not None:
            yield from stepper.notes
        if self.offload:
            yield _offload_note(call.model, stepper)


class _Setup(NamedTuple):
    """The objects that all runs of a model in one estimate share.

    Attributes:
        fakes: Creates fake tensors.
        chip: The chip to estimate for, or `None`.
        makes: Function that creates the optimizer, or `None` without an optimizer.
        meter: Counts the finished operators, for the progress.
    """

    fakes: Fakes
    chip: Hardware | None
    makes: MakesOptimizer | None
    meter: "Meter"


class _Steps(NamedTuple):
    """The results of the one or two steps of a run.

    Attributes:
        records: The profile and the memory record of each step.
        log: The requests to the allocator in all steps; `None` if the allocator is not simulated.
    """

    records: list[StepRecord]
    log: AllocationLog | None


def _offload_note(model: nn.Module, stepper: Stepper | None) -> Note:
    """Return a note with the bytes that offloading moves between host and device in a step."""
    nbytes = 0
    for parameter in model.parameters():
        size = local_part(parameter).nbytes
        # A gradient is as large as its parameter.
        nbytes += 2 * size if parameter.requires_grad else size
    if stepper is not None:
        for tensor in stepper.state():
            nbytes += local_part(tensor).nbytes
    return Note(code="cpu_offload", subject="", values={"bytes": nbytes})


def _with_numbered_groups(calls: Iterable[Communication]) -> Iterator[Communication]:
    """Replace the names of process groups with numbers that count from 0.

    A name from torch contains the number of groups that the process has created so far, so the
    names would differ between two estimates of the same model.
    """
    numbers: dict[str, str] = {}
    for call in calls:
        yield replace(call, group=numbers.setdefault(call.group, str(len(numbers))))


def _with_reserved(
    step: Profile, requests: Sequence[Request], settings: str, limit: int | None
) -> Profile:
    """Simulate torch's CUDA allocator, and add the memory that it reserves to the profile.

    `requests` are the allocations and frees of all steps. `limit` is the memory of the device in
    bytes. The allocator frees its cache before it exceeds the limit. If even this does not help,
    the result is from a simulation without a limit, and its number of retries is `None`.
    """
    if step.memory is None:
        return step
    simulated = simulate(requests, settings_of(settings))
    retries: int | None = 0
    if limit is not None and simulated.peak.reserved > limit:
        limited = simulate(requests, settings_of(settings), limit_bytes=limit)
        retries = None
        if limited.failed is None:
            simulated = limited
            retries = limited.retries
    at_most = simulated.at_reserved_peak
    reserved = Reserved(
        settings=settings,
        requested_bytes=simulated.peak.requested,
        allocated_bytes=simulated.peak.allocated,
        reserved_bytes=simulated.peak.reserved,
        unused_bytes=at_most.reserved - at_most.allocated,
        retries=retries,
    )
    return replace(step, memory=replace(step.memory, reserved=reserved))


def _with_the_higher_peak(step: Profile, other: Profile) -> Profile:
    """Return `step`, but with the memory of `other` if `other` has the higher peak."""
    if step.memory is None or other.memory is None:
        return step
    if step.memory.peak_bytes >= other.memory.peak_bytes:
        return step
    modules = dict(step.modules)
    for name in step.modules.keys() & other.modules.keys():
        modules[name] = replace(modules[name], peak_bytes=other.modules[name].peak_bytes)
    return replace(step, memory=other.memory, modules=modules)


class Meter:
    """Counts the finished operators of all steps, and reports the progress of an estimate.

    `progress` is the argument of `estimate`: with `True`, a line is written to stderr; with
    `False`, nothing is reported; a function is called with the number of finished operators and the
    number of all operators.
    """

    def __init__(self, progress: bool | Progress) -> None:  # noqa: FBT001 - the user's argument
        if not isinstance(progress, bool) and not callable(progress):
            raise CountError(
                f"estimate: progress={describe(progress)}: "
                "pass True, False, or a function that takes (done, total)"
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
    def __init__(self, meter: Meter, scopes: ModuleTracker, options: CountOptions) -> None:
        super().__init__(scopes, options)
        self._meter = meter

    def record(self, *call: Any) -> Any:
        super().record(*call)
        self._meter.add()


def _write(done: int, total: int | None) -> None:
    of_total = ""
    if total:
        of_total = f" of {total:,} ({done / total:.0%})"
    end = "\n" if done == total else ""
    sys.stderr.write(f"\restimate: {done:,} operators{of_total}{end}")
    sys.stderr.flush()
