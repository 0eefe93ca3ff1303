"""`lflops.monitor`: watch any training loop as a Trainer is watched."""

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
from lflops.inputs.tensors import device_of
from lflops.integrations.loops.phases import LoopPhases
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.messages import say, warn
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import STAGES, Stage, Training
from lflops.monitoring.outputs.loggers import loggers_of
from lflops.monitoring.run import NO_RUN, MonitoredRun
from lflops.profile.profile import Profile

Item = TypeVar("Item")

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "_FabricModule"}
"""Modules that are around a user's own, which is their `module`."""

DATA_PARALLEL = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    # those whose ranks have different batches
}
BLOCKS = (
    "checkpoint_save",
    "checkpoint_load",
    "logging",
    "between_epochs",
    # categories of the ledger that a loop names itself
)


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
    """Watch your own training loop, as `FlopsMonitor` watches a Trainer.

    Args:
        model: What is trained; several by their names.
        optimizer: What steps; one, or several.
        engine: The `Fabric` or `Accelerator` that the loop uses, if it uses one.
        logger: A `SummaryWriter`, a run of wandb, or an object with `log_metrics(values,
            step=...)`; one, or several in a list.
        accumulation: Batches over which gradients are accumulated.
        log_every: Steps from one point of the curves to the next; 0 for no curves.
        steps: How many steps the run has, if you know: the schedule is made to fit.
        log: Is called with the summary of each window, on the main process. By default the logger
            `lflops` logs it at level INFO; where logging is not set up, it is printed.
        settings: The arguments of `FlopsMonitor`, as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: An argument is wrong; the message names it, its value and what is taken.

    Example::

        with lflops.monitor(model, optimizer, logger=SummaryWriter()) as monitor:
            for batch in monitor.data(loader):
                with monitor.step(batch):
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    """
    for name, value, least in (
        ("accumulation", accumulation, 1),
        ("log_every", log_every, 0),
        ("steps", steps, 1),
    ):
        if value is not None and not is_whole(value, least):
            raise CountError(f"{name}={describe(value)}: give a whole number, {least} or more")
    if unknown := settings.keys() - Settings.__dataclass_fields__.keys():
        raise CountError(
            f"{min(unknown)!r} is no argument of lflops.monitor; these are: {', '.join(Settings.__dataclass_fields__)}"
        )
    asked = Settings(**settings)
    asked.check()
    models, optimizers, loggers = _models(model), _optimizers(optimizer), loggers_of(logger)
    loop = Loop(models, optimizers, engine, loggers, accumulation, log_every, steps, log)
    return LoopMonitor(loop, asked)


@dataclass(frozen=True)
class Loop:
    """What a user says of a loop; the arguments of `monitor` have the meanings."""

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    engine: Any
    loggers: Sequence[Any]
    accumulation: int
    log_every: int
    steps: int | None
    log: Callable[[str], None]


class LoopMonitor:
    """A loop that is watched inside of a `with`. `lflops.monitor` makes one."""

    def __init__(self, loop: Loop, settings: Settings, phases: LoopPhases | None = None) -> None:
        # A profile for each window that is closed, on the main process; of more than 32, the last
        # 32.
        self.profiles: list[Profile] = []
        self._loop = loop
        self._settings = settings
        self._phases = phases or LoopPhases(loop.engine)
        self._stage = "train"
        self._batches = 0
        self._has_batches = False
        self._steps_done = 0
        self._run = NO_RUN
        self._ranks = (
            0,
            1,
            # this process's number, and how many there are; a process group may end before the loop
        )
        self._ends = contextlib.ExitStack()
        self._account: Ledger | None = None

    def __enter__(self) -> Self:
        in_group = distributed.is_available() and distributed.is_initialized()
        self._ranks = rank, world_size = (
            (distributed.get_rank(), distributed.get_world_size()) if in_group else (0, 1)
        )
        if rank == 0:
            self._settings.try_folder()
        self._run = run = MonitoredRun(self._settings)
        self.profiles = run.profiles
        self._ends.callback(run.take_off)
        self._ends.push(self._close)
        try:
            with run.boundary:
                directories = (getattr(each, "log_dir", None) for each in self._loop.loggers)
                # Without a logger there are no files, unless `dirpath` asks for them.
                run.log_dir = next(
                    (str(each) for each in directories if isinstance(each, str | PathLike)), None
                )
                run.open("loop", world_size)
                self._phases.awaits_others = world_size > 1
                self._phases.install(
                    self._loop.models.values(), self._loop.optimizers, run.boundary, run.undo
                )
                run.keep_ledger(self._phases, rank, world_size, is_kept=self._settings.ledger)
            self._begin("train")
            return self  # noqa: TRY300 - an interrupt here is one in here
        except BaseException:
            # Python does not call ours then
            self._ends.__exit__(*sys.exc_info())
            raise

    __exit__ = ExitBy(operator.attrgetter("_ends"))

    def _close(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        run, self._run = self._run, NO_RUN
        if run is not NO_RUN:
            run.close(error)
            self._account = run.ledger
            if not self._has_batches and error is None:
                warn(
                    "lflops.monitor saw no step, so there is nothing to tell: put each batch in `with monitor.step(batch):`"
                )

    def data(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Go through a loader's batches.

        The time until each of them is there is the phase `data`.
        """
        iterator = iter(loader)
        while True:
            with self._phases.named("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
            yield batch
        self.epoch_ends()

    def step(self, batch: Any = None) -> "_Batch":
        """One batch: a step, or with accumulation a part of one.

        Samples and tokens per second come from its tensors' shapes.
        """
        return _Batch(self, batch)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A phase that you name.

        "forward", "backward", "optimizer", "clip", "transfer", or any other name.
        """
        return self._phases.named(name)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Another stage.

        "validate", "test" or "predict". It is watched if `stages=` names it, and is part of no
        training step.

        Raises:
            CountError: The stage is not known.
        """
        if name not in STAGES[1:]:
            raise CountError(f"stage={name!r}: give one of {', '.join(map(repr, STAGES[1:]))}")
        run, before = self._run, self._stage
        run.guarded("train", lambda session: session.mark("validation"))
        category = "validation" if name == "validate" else name
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
        """Every second of the run so far, by category.

        `None` before it, and where no ledger is kept.
        """
        return self._account if self._run is NO_RUN else self._run.ledger

    def request_window(self) -> None:
        """Ask for a window now, on every rank: the next scheduled one, or one more.

        A handler of a signal may call it, and any thread.
        """
        self._run.request_window()

    def within(self, category: str) -> contextlib.AbstractContextManager[None]:
        """What runs in this block belongs to a category of the ledger.

        "checkpoint_save", "checkpoint_load", "logging" or "between_epochs".

        Raises:
            CountError: The category is not known.
        """
        if category not in BLOCKS:
            raise CountError(f"category={category!r}: give one of {', '.join(map(repr, BLOCKS))}")
        if category.startswith("checkpoint"):
            self.mark("checkpoint")
        return self._phases.within(category)

    def go_on_from(self, step: int) -> None:
        """The steps before this one were made by an earlier run.

        Number those of this one from here.
        """
        self._steps_done = step

    @property
    def boundary(self) -> ErrorGuard:
        """What code of a driver that builds on this monitor runs in.

        Its errors end the watching, and not the training.
        """
        return self._phases.boundary

    @property
    def undo(self) -> CleanupStack:
        """Takes off, at the end of the run, what such a driver installs.

        There is none before the run begins.
        """
        if self._run is NO_RUN:
            raise CountError(
                "monitor: it is not entered, so there is nothing to undo at its end: use it in a `with`"
            )
        return self._run.undo

    def epoch_ends(self) -> None:
        """An epoch is over: what follows is between two epochs, until a batch is fetched.

        `data` does so at the loader's end.
        """
        self._run.epoch_ends()

    def mark(self, what: str) -> None:
        """Note that something else happens in this step, as "checkpoint".

        It is no measure of the others.
        """
        self._run.guarded("train", lambda session: session.mark(what))

    def _begin(self, name: str) -> None:
        self._run.begin(name, self._training, partial(self._stage_of, name))

    def _batch_begins(self, batch: Any) -> None:
        self._has_batches = True
        self._run.batch_begins(self._stage, batch)
        self._phases.begin_step()

    def _batch_ends(self, batch: Any) -> None:
        with self._phases.boundary:
            self._phases.end_step()
        ends_step = self._ends_step()
        self._run.batch_ends(self._stage, batch)
        if self._stage == "train":
            self._batches += 1
            self._steps_done += ends_step

    def _ends_step(self) -> bool:
        return not (self._batches + 1) % self._loop.accumulation

    def _training(self) -> Training:
        loop, (rank, world_size) = self._loop, self._ranks
        unwrapped = {name: _unwrapped(each) for name, each in loop.models.items()}
        models = {name: each for name, (each, _) in unwrapped.items()}
        wrappers = {kind for _, around in unwrapped.values() for kind in around}
        outermost = [
            getattr(each, "_forward_module", each)
            for each in loop.models.values()
            # Fabric's is around the user's
        ]
        divides = (wrappers | {type(each).__name__ for each in outermost}) & DATA_PARALLEL
        # What torch's first FSDP keeps of the parameters is in its wrapper.
        keeps_parameters = "FullyShardedDataParallel" in wrappers
        return Training(
            loop=self,
            model=_one(models),
            root=_one(loop.models if keeps_parameters else models),
            device=device_of(
                [
                    tensor
                    for each in models.values()
                    for tensor in (*each.parameters(), *each.buffers())
                ]
            ),
            rank=rank,
            world_size=world_size,
            node=os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")),
            is_main=rank == 0,
            strategy=min(divides or wrappers, default=None)
            or (None if loop.engine is None else type(loop.engine).__name__),
            sampler={"num_replicas": world_size, "rank": rank} if divides else None,
            precision=None
            if (precision := getattr(loop.engine, "mixed_precision", None)) == "no"
            else precision,
            scales_gradients=getattr(loop.engine, "scaler", None) is not None,
            looks_for_unused=any(
                getattr(each, "find_unused_parameters", False) for each in outermost
            ),
            loggers=loop.loggers,
            log_every=loop.log_every,
            logged_step=partial(getattr, self, "_steps_done"),
            # only the main process logs
            say=loop.log if rank == 0 else lambda _: None,
        )

    def _stage_of(self, name: str) -> Stage:
        loop, learns = self._loop, name == "train"
        return Stage(
            name=name,
            learns=learns,
            listen=partial(self._phases.listen, name),
            accumulation=partial(int, loop.accumulation if learns else 1),
            ends_step=self._ends_step if learns else partial(bool, 1),
            batches_left=loop.accumulation * loop.steps
            if learns and loop.steps is not None
            else math.inf,
            updates=frozenset({"optimizer"}) if learns and loop.optimizers else frozenset(),
        )


class _Batch:
    def __init__(self, monitor: LoopMonitor, batch: Any) -> None:
        self._monitor = monitor
        self._batch = batch

    def __enter__(self) -> None:
        self._monitor._batch_begins(self._batch)  # noqa: SLF001 - the two are one

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._monitor._batch_ends(self._batch)  # noqa: SLF001
        else:
            with self._monitor._phases.boundary:  # noqa: SLF001
                self._monitor._phases.end_step(failed=True)  # noqa: SLF001


def _models(model: Any) -> dict[str, nn.Module]:
    models: dict[str, Any] = (
        {"": model}
        if isinstance(model, nn.Module)
        else dict(model)
        if isinstance(model, Mapping)
        else {}
    )
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise CountError(
            f"model={describe(model)}: give an nn.Module, or several by their names, as {{'generator': g, 'critic': c}}"
        )
    return models


def _optimizers(optimizer: Any) -> list[Optimizer]:
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise CountError(
                f"optimizer={describe(each)}: give a torch.optim.Optimizer, or several in a list"
            )
    # Accelerate's optimizer has another one inside of it, and no hooks.
    return [
        getattr(each, "optimizer", each) if type(each).__name__ == "AcceleratedOptimizer" else each
        for each in optimizers
    ]


def _one(models: Mapping[str, nn.Module]) -> nn.Module:
    return models[""] if "" in models else nn.ModuleDict(models)


def _unwrapped(model: Any) -> tuple[nn.Module, list[str]]:
    """The user's own module, whose names people know, and the classes of the wrappers around it."""
    wrappers = []
    while (kind := type(model).__name__) in WRAPPERS:
        wrappers.append(kind)
        model = model.module
    return model, wrappers
