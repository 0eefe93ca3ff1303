"""`lflops.monitor`: monitor a custom training loop in the way `FlopsMonitor` monitors a Trainer."""

import contextlib
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import distributed, nn
from torch.optim import Optimizer

from lflops.error_guard import CleanupStack, ErrorGuard, ExitBy
from lflops.errors import CountError
from lflops.inputs.arguments import describe, is_whole
from lflops.inputs.batch_size import loader_batch_size
from lflops.inputs.tensors import device_of
from lflops.integrations.loops.phases import RUNNING, LoopPhases
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.messages import name_monitor, say, warn
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import STAGES, Stage, Training
from lflops.monitoring.outputs.loggers import loggers_of
from lflops.monitoring.run import NO_RUN, MonitoredRun
from lflops.profile.profile import Profile
from lflops.torch_private.modules import compiled_wrapper

Item = TypeVar("Item")

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "_FabricModule"}
"""Names of classes that wrap the user's module and keep it in their attribute `module`."""

DATA_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""The wrappers for data parallelism, with which each rank gets a different batch."""

_NO_BATCH: Any = object()
"""The value that `next` returns instead of a batch when a loader has ended."""

BLOCKS = ("checkpoint_save", "checkpoint_load", "logging", "between_epochs")
"""Categories of the ledger that a loop can pass to `LoopMonitor.within`."""


def monitor(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    engine: Any = None,
    logger: Any = None,
    accumulation: int = 1,
    log_every: int = 50,
    steps: int | None = None,
    log: Callable[[str], None] = say,
    **settings: Any,
) -> "LoopMonitor":
    """Monitor a custom training loop, in the way `FlopsMonitor` monitors a Lightning Trainer.

    Args:
        model: The model that is trained, or a mapping from names to several models.
        optimizer: The optimizer, or a list of several.
        engine: The `Fabric` or `Accelerator` that the loop uses, if any.
        logger: A `SummaryWriter`, a wandb run, or an object with `log_metrics(values, step=...)`;
            or a list of several.
        accumulation: Number of batches over which gradients are accumulated. A step ends after this
            many batches, or earlier if all optimizers have made a step, for example at the end of
            an epoch. If the loop uses `Accelerator.accumulate`, the `Accelerator` determines the
            number and the ends of steps.
        log_every: How often metrics such as step time and MFU are logged: every `log_every` steps.
            With 0, they are not logged.
        steps: Number of steps in the run, if known. The schedule is adapted to this number.
        log: Function that receives the summary of each window, on the main process. By default, the
            logger `lflops` logs the summary at level INFO. If logging is not configured, the
            summary is printed.
        settings: The arguments of `FlopsMonitor`, such as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: An argument is wrong. The message has its name, its value and the valid values.

    Example::

        with lflops.monitor(model, optimizer, logger=SummaryWriter()) as monitor:
            for batch in monitor.data(loader):
                with monitor.step(batch):
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    """
    _check_number("accumulation", accumulation, 1)
    _check_number("log_every", log_every, 0)
    if steps is not None:
        _check_number("steps", steps, 1)
    unknown = settings.keys() - Settings.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(Settings.__dataclass_fields__)
        raise CountError(
            f"{min(unknown)!r} is not an argument of lflops.monitor; valid arguments: {known}"
        )
    asked = Settings(**settings)
    asked.check()
    if accumulation == 1:
        # An `Accelerator` has this attribute.
        accumulation = getattr(engine, "gradient_accumulation_steps", 1)
    loop = Loop(
        _models(model),
        _optimizers(optimizer),
        engine,
        loggers_of(logger),
        accumulation,
        log_every,
        steps,
        log,
    )
    return LoopMonitor(loop, asked)


def _check_number(name: str, value: Any, least: int) -> None:
    if not is_whole(value, least):
        raise CountError(f"{name}={describe(value)}: pass a whole number, {least} or more")


@dataclass(frozen=True)
class Loop:
    """The user's description of a loop. The fields are the arguments of `monitor`.

    Attributes:
        owner: Returns the module that contains all models, if the loop calls its submodules and
            never the module itself. Otherwise, it returns `None`.
    """

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    engine: Any
    loggers: Sequence[Any]
    accumulation: int
    log_every: int
    steps: int | None
    log: Callable[[str], None]
    owner: Callable[[], nn.Module | None] = lambda: None


class LoopMonitor:
    """Monitors a loop inside a `with` block. Create it with `lflops.monitor`.

    Attributes:
        profiles: The profiles of the last 32 closed windows. Only the main process has them.
        name: The name that messages use for this monitor, such as `lflops.monitor` or
            `FlopsCallback`.
        follows_update: Whether a training step begins right after the optimizer's step.
        loader_sizes: For each stage, the number of samples that its data loader puts into a batch;
            `None` if unknown.
    """

    name = "lflops.monitor"
    follows_update = False

    def __init__(self, loop: Loop, settings: Settings, phases: LoopPhases | None = None) -> None:
        self.profiles: list[Profile] = []
        self.loader_sizes: dict[str, int | None] = {}
        self._loop = loop
        self._settings = settings
        self._phases = phases or LoopPhases(loop.engine)
        self._stage = "train"
        # number of earlier batches in the current training step
        self._batches = 0
        self._has_batches = False
        # set when the engine has accumulated the gradients of a batch
        self._engine_accumulates = False
        self._steps_done = 0
        self._knows_step = False
        self._run = NO_RUN
        # The rank is stored, because a process group may end before the loop.
        self._rank = 0
        self._world_size = 1
        self._ends = contextlib.ExitStack()
        self._account: Ledger | None = None

    def __enter__(self) -> Self:
        if distributed.is_available() and distributed.is_initialized():
            self._rank = distributed.get_rank()
            self._world_size = distributed.get_world_size()
        if self._rank == 0:
            self._settings.try_folder()
        name_monitor(self.name)
        run = MonitoredRun(self._settings)
        self._run = run
        self.profiles = run.profiles
        self._ends.callback(run.remove)
        self._ends.push(self._close)
        try:
            with run.guard:
                self._open(run)
            self._begin("train")
            return self  # noqa: TRY300 - an interrupt here must be handled too
        except BaseException:
            # Python does not call `__exit__` after an exception in `__enter__`.
            self._ends.__exit__(*sys.exc_info())
            raise

    def _open(self, run: MonitoredRun) -> None:
        # Without a logger no files are written, unless `dirpath` is set.
        for logger in self._loop.loggers:
            directory = getattr(logger, "log_dir", None)
            if isinstance(directory, str | PathLike):
                run.log_dir = str(directory)
                break
        run.open("loop", self._world_size)
        self._phases.awaits_others = self._world_size > 1
        self._phases.checkpoint_begins = partial(self.mark, "checkpoint")
        run.cleanup.add(self._phases.forget_monitor)
        self._phases.install(
            self._loop.models.values(), self._loop.optimizers, run.guard, run.cleanup
        )
        run.keep_ledger(self._phases, self._rank, self._world_size, is_kept=self._settings.ledger)

    __exit__ = ExitBy(operator.attrgetter("_ends"))

    def _close(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        run = self._run
        self._run = NO_RUN
        if run is NO_RUN:
            return
        run.close(error)
        self._account = run.ledger
        if not self._has_batches and error is None:
            warn(
                "lflops.monitor received no batch, so it has no results: "
                "run each batch in `with monitor.step(batch):`"
            )

    def data(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over the batches of a loader. The wait for a batch counts as the phase `data`."""
        self.loader_sizes[self._stage] = loader_batch_size(loader)
        iterator = iter(loader)
        call_in = self._phases.call_in
        while True:
            batch = call_in("data", RUNNING, next, iterator, _NO_BATCH)
            if batch is _NO_BATCH:
                break
            yield batch
        self.epoch_ends()

    def step(self, batch: Any = None) -> "_Batch":
        """Monitor the work on one batch in a `with` block.

        The block is a step, or a part of a step if gradients are accumulated. Samples and tokens
        per second are derived from the shapes of the batch's tensors.
        """
        return _Batch((self, batch))

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Name the phase of a `with` block.

        Use "forward", "backward", "optimizer", "clip", "transfer", or any other name.
        """
        return self._phases.named(name)

    def caller_in(self, phase: str) -> Callable[..., Any]:
        """Return a function that calls other functions and assigns their time to `phase`.

        If the returned function is `f`, then `f(method, *args)` calls `method(*args)`.
        """
        return partial(self._phases.call_in, phase, RUNNING)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Treat a `with` block as another stage: "validate", "test" or "predict".

        The block is not part of a training step. If `stages=` includes the stage, the stage is
        profiled in separate windows.

        Raises:
            CountError: The stage is unknown.
        """
        if name not in STAGES[1:]:
            raise CountError(f"stage={name!r}: pass one of {', '.join(map(repr, STAGES[1:]))}")
        with self.stage_in(name, "validation" if name == "validate" else name):
            yield

    @contextlib.contextmanager
    def stage_in(self, name: str, category: str) -> Iterator[None]:
        """Treat a `with` block as another stage, and assign its time to a ledger category."""
        run = self._run
        before = self._stage
        if category != "inference":
            # The current training step contains the validation, so its time is not used. Inference
            # is different, because some loops generate samples in every step.
            run.guarded("train", lambda session: session.mark("validation"))
        with self._phases.stage(name):
            run.enters(category)
            try:
                self._stage = name
                self._begin(name)
                yield
            finally:
                run.leaves(category)
                self._stage = before
                run.guarded(name, lambda session: session.pause())

    @property
    def ledger(self) -> Ledger | None:
        """The time account of the run; `None` before the run, or if no ledger is kept."""
        return self._account if self._run is NO_RUN else self._run.ledger

    def request_window(self) -> None:
        """Open a window (a few steps to profile) on every rank as soon as possible.

        If the schedule is waiting for its next window, that window opens early. After the end of
        the schedule, an additional window opens. Signal handlers and all threads may call this
        method.
        """
        self._run.request_window()

    def within(self, category: str) -> contextlib.AbstractContextManager[None]:
        """Assign the time of a `with` block to a category of the ledger.

        The category is "checkpoint_save", "checkpoint_load", "logging" or "between_epochs".

        Raises:
            CountError: The category is unknown.
        """
        if category not in BLOCKS:
            raise CountError(f"category={category!r}: pass one of {', '.join(map(repr, BLOCKS))}")
        if category.startswith("checkpoint"):
            self.mark("checkpoint")
        return self._phases.within(category)

    def resume_from(self, step: int) -> None:
        """Continue the numbering of steps after a restart.

        Without this call, steps are numbered from 0, and the ledger cannot determine how much work
        was lost and repeated because of the restart.

        Args:
            step: The number of completed steps when the checkpoint was saved.
        """
        self._steps_done = step
        self._knows_step = True

    @property
    def guard(self) -> ErrorGuard:
        """Error guard for integrations that build on this monitor.

        An error in their code ends the monitoring, not the training run.
        """
        return self._phases.guard

    @property
    def cleanup(self) -> CleanupStack:
        """Cleanup stack for integrations that build on this monitor.

        Hooks that are added to it are removed at the end of the run.

        Raises:
            CountError: The run has not begun.
        """
        if self._run is NO_RUN:
            raise CountError(
                "monitor: the run has not started, so no cleanup can be added: use the monitor in "
                "a `with` block"
            )
        return self._run.cleanup

    def epoch_ends(self) -> None:
        """End an epoch.

        The time until the next fetch of a batch belongs to the ledger category `between_epochs`.
        `data` calls this method at the end of the loader.
        """
        self._run.epoch_ends()

    def mark(self, what: str) -> None:
        """Mark the current step as not typical, so that its time is not used.

        Args:
            what: The reason, such as "checkpoint".
        """
        self._run.guarded("train", lambda session: session.mark(what))

    def _begin(self, name: str) -> None:
        self._run.begin(name, self._training, partial(self._stage_of, name))

    def batch_begins(self, batch: Any) -> None:
        """Begin a batch of the current stage."""
        _Batch((self, batch)).__enter__()

    def batch_ends(self, batch: Any) -> None:
        """End a batch of the current stage."""
        _Batch((self, batch)).__exit__(None, None, None)

    def _ends_step(self) -> bool:
        """Return whether the batch that is ending is the last batch of a training step.

        If the loop uses `Accelerator.accumulate`, then `Accelerator.sync_gradients` is true only
        for the last batch of a step. Otherwise, it is always true. In this case, the step ends when
        all optimizers have made a step, and after `accumulation` batches at the latest, because a
        `GradScaler` may skip the steps of optimizers.
        """
        loop = self._loop
        if not getattr(loop.engine, "sync_gradients", True):
            self._engine_accumulates = True
            return False
        if self._engine_accumulates or self._batches + 1 >= loop.accumulation:
            return True
        return 0 < len(loop.optimizers) == len(self._phases.updated)

    def _training(self) -> Training:
        loop = self._loop
        models: dict[str, nn.Module] = {}
        wrappers: set[str] = set()
        outermost: set[str] = set()
        tensors: list[Any] = []
        looks_for_unused = False
        for name, model in loop.models.items():
            unwrapped, around = _unwrapped(model)
            models[name] = unwrapped
            tensors += [*unwrapped.parameters(), *unwrapped.buffers()]
            wrappers.update(around)
            # Fabric keeps the model with the strategy's wrapper in this attribute.
            wrapped = getattr(model, "_forward_module", model)
            outermost.add(type(wrapped).__name__)
            looks_for_unused |= getattr(wrapped, "find_unused_parameters", False)
        data_parallel = (wrappers | outermost) & DATA_PARALLEL
        if not data_parallel and self._world_size > 1:
            data_parallel = _wrappers_of_accelerate(loop.engine)
        # FSDP1 keeps some of the parameters in its wrapper.
        keeps_parameters = "FullyShardedDataParallel" in wrappers
        precision = getattr(loop.engine, "mixed_precision", None)
        if precision == "no":
            precision = None
        sampler = None
        if data_parallel:
            sampler = {"num_replicas": self._world_size, "rank": self._rank}
        owner = None if keeps_parameters else loop.owner()
        model = _one(models) if owner is None else owner
        return Training(
            loop=self,
            model=model,
            root=_one(loop.models) if keeps_parameters else model,
            device=device_of(tensors),
            rank=self._rank,
            world_size=self._world_size,
            node=os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")),
            is_main=self._rank == 0,
            monitor=self.name,
            strategy=self._strategy(data_parallel or wrappers),
            sampler=sampler,
            precision=precision,
            scales_gradients=getattr(loop.engine, "scaler", None) is not None,
            looks_for_unused=looks_for_unused,
            loggers=loop.loggers,
            log_every=loop.log_every,
            logged_step=partial(getattr, self, "_steps_done"),
            knows_step=partial(getattr, self, "_knows_step"),
            # Only the main process logs.
            log=loop.log if self._rank == 0 else lambda _: None,
        )

    def _strategy(self, wrappers: Iterable[str]) -> str | None:
        """Return the name of the strategy: the class name of a model's wrapper, else the engine's.

        Returns `None` if there is neither a wrapper nor an engine.
        """
        engine = self._loop.engine
        default = None
        if engine is not None:
            default = type(engine).__name__
        return min(wrappers, default=default)

    def _stage_of(self, name: str) -> Stage:
        loop = self._loop
        listen = partial(self._phases.listen, name)
        # A partial of `int` or `bool` returns a constant, and calling it runs no Python code.
        if name != "train":
            return Stage(
                name=name,
                learns=False,
                listen=listen,
                log=self._phases.log,
                accumulation=partial(int, 1),
                ends_step=partial(bool, 1),
                batches_left=math.inf,
                updates=frozenset(),
                loader_size=partial(self.loader_size, name),
            )
        ends_step: Callable[[], bool] = self._ends_step
        if loop.accumulation == 1:
            ends_step = partial(bool, 1)
        batches_left = math.inf
        if loop.steps is not None:
            batches_left = loop.accumulation * loop.steps
        updates = {"optimizer"} if loop.optimizers else set()
        return Stage(
            name=name,
            learns=True,
            listen=listen,
            log=self._phases.log,
            accumulation=partial(int, loop.accumulation),
            ends_step=ends_step,
            batches_left=batches_left,
            updates=frozenset(updates),
            loader_size=partial(self.loader_size, name),
            follows_update=self.follows_update,
        )

    def loader_size(self, stage: str) -> int | None:
        """Return the number of samples that a stage's data loader puts into a batch, if known."""
        return self.loader_sizes.get(stage)


class _Batch(tuple[LoopMonitor, Any]):
    """Context manager around the work on a batch: a tuple of the monitor and the batch.

    A new one is created for every batch. It is a tuple because creating a tuple runs no Python code
    and is therefore fast. This class uses private attributes of the monitor.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        monitor, batch = self
        monitor._has_batches = True  # noqa: SLF001 - see the docstring
        monitor._run.batch_begins(monitor._stage, batch)  # noqa: SLF001
        monitor._phases.begin_step()  # noqa: SLF001

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        monitor, batch = self
        phases = monitor._phases  # noqa: SLF001
        failed = kind is not None
        try:
            phases.end_step(failed=failed)
        except BaseException as mistake:
            if not phases.guard.contains(mistake):
                raise
        if failed:
            return
        stage = monitor._stage  # noqa: SLF001
        monitor._run.batch_ends(stage, batch)  # noqa: SLF001
        if stage != "train":
            return
        if monitor._loop.accumulation == 1 or monitor._ends_step():  # noqa: SLF001
            monitor._steps_done += 1  # noqa: SLF001
            monitor._batches = 0  # noqa: SLF001
            phases.updated.clear()
        else:
            monitor._batches += 1  # noqa: SLF001


def _models(model: Any) -> dict[str, nn.Module]:
    models: dict[str, Any] = {}
    if isinstance(model, nn.Module):
        models = {"": model}
    elif isinstance(model, Mapping):
        models = dict(model)
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise CountError(
            f"model={describe(model)}: pass an nn.Module, or a dict of several modules, for "
            "example {'generator': g, 'critic': c}"
        )
    return {name: compiled_wrapper(each) for name, each in models.items()}


def _optimizers(optimizer: Any) -> list[Optimizer]:
    given = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = []
    for each in given:
        if not isinstance(each, Optimizer):
            raise CountError(
                f"optimizer={describe(each)}: pass a torch.optim.Optimizer, or a list of optimizers"
            )
        # Accelerate's optimizer contains the optimizer that has hooks.
        if type(each).__name__ == "AcceleratedOptimizer":
            optimizers.append(getattr(each, "optimizer", each))
        else:
            optimizers.append(each)
    return optimizers


def _wrappers_of_accelerate(engine: Any) -> set[str]:
    """Return a set with the class name of the data-parallel wrapper that an Accelerator uses.

    The set is empty if there is no such wrapper or if it is unknown. The name is not read from the
    model, because the transformers Trainer passes the user's model without the wrapper.
    """
    kind = getattr(getattr(engine, "distributed_type", None), "value", "")
    mesh = getattr(engine, "parallelism_config", None)
    sizes = [getattr(mesh, size, 1) for size in ("tp_size", "cp_size", "sp_size")]
    if any(size not in {None, 1} for size in sizes):
        return set()
    if kind == "FSDP":
        return {"FullyShardedDataParallel"}
    return {"DistributedDataParallel"} if kind.startswith("MULTI_") else set()


def _one(models: Mapping[str, nn.Module]) -> nn.Module:
    return models[""] if "" in models else nn.ModuleDict(models)


def _unwrapped(model: Any) -> tuple[nn.Module, list[str]]:
    """Return the user's module inside its wrappers, and the class names of the wrappers."""
    wrappers = []
    while (kind := type(model).__name__) in WRAPPERS:
        wrappers.append(kind)
        model = model.module
    return model, wrappers
