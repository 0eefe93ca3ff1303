"""`FlopsMonitor`: the callback for a Lightning Trainer."""

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any, Self

from lflops.error_guard import wrap
from lflops.errors import LflopsError
from lflops.extras import needed
from lflops.integrations.lightning.trainer_phases import PhaseListener, TrainerPhases, phases_of
from lflops.integrations.lightning.training import (
    Base,
    MisconfigurationException,
    log_dir_of,
    stage_of,
    training_of,
)
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.messages import name_monitor
from lflops.monitoring.inputs.settings import Settings, settings_of, takes
from lflops.monitoring.run import NO_RUN, OPEN, MonitoredRun
from lflops.profile.profile import Profile


class FlopsMonitor(Base, PhaseListener):
    """Reports where the FLOPs, bytes and milliseconds of a training step go.

    In a window of a few steps, lflops counts one batch operator by operator, traces the active
    steps with torch.profiler, and then times modules in the same number of steps. In all other
    steps, lflops only reads a clock. At the end of a window, the main process logs a summary, saves
    the profile in `trainer.log_dir`/lflops and the trace in `trainer.log_dir`/lflops_traces, and
    passes metrics to every logger. For a Trainer without a logger, a new folder is created for each
    run, and its name is logged. Outside windows, step time, MFU and throughput are logged every
    `log_every_n_steps` steps.

    In a run with several processes, every process needs this callback.

    If lflops fails, it logs one warning and training continues. If a file or a logger fails, lflops
    logs one warning and continues with the other files and loggers.

    Args:
        schedule: How many steps to wait, to warm up, to count and to profile. Steps are numbered
            separately in each stage.
        stages: Stages that have windows: any of "train", "validate", "test" and "predict". With
            `()`, a window opens only on request.
        count: Whether to count a step. A profile of the same model that was counted elsewhere can
            be passed instead.
        trace: Whether to trace the active steps. Otherwise, modules are timed in these steps.
        trace_ranks: Ranks that trace: "zero", "all", or a list of ranks.
        activities: Activities to trace: "cpu", "device" (the model's device), or both. The next
            three arguments have the same meaning as in torch.profiler.
        record_shapes: Also record the shapes of operators' inputs.
        profile_memory: Also record allocations.
        with_stack: Also record Python stacks. This breaks the nesting of your `record_function`
            ranges in the trace.
        compiled: How traces divide the time of code that torch.compile generated: `"row"` shows
            each compiled module as a whole, and `"modules"` divides its kernels among the modules
            inside it, in forward and backward. With `"modules"`, Inductor records the modules of
            each graph that it compiles, so cached graphs are compiled once more. Set it from the
            start of the run: the modules of graphs that were compiled before are unknown.
        module_depth: Largest depth in the table of module classes, which is part of the detailed
            text; -1 means all depths.
        top_modules: Number of module classes that this table lists for each depth and metric.
        detailed: Log the detailed text, with lines for every module, instead of the summary of
            about 40 lines.
        ignore_modules: Names or classes of modules. Their work, without the work of their
            submodules, is left out of every total.
        output_file: File that receives the detailed text of each window. Text that the same Trainer
            wrote there earlier is kept.
        hardware: Source of the device's peak rates. `"auto"` looks up the device's name, and
            `"measure"` measures the device. You can also pass the name of a chip, a TOML file, an
            `lflops.Hardware`, or `None`.
        track: Log step time, MFU and throughput over the whole run.
        units: Function that takes a batch and returns `{"samples": n, "tokens": n}`. By default,
            both numbers are inferred from the shapes of the batch's tensors.
        topology: Function that takes a rank and returns its coordinates in the device mesh, for
            example `{"data": 0, "tensor": 1}`. By default, the coordinates are read from the
            strategy and the parameters.
        logical: A profile of the unsharded model for one rank's batch, as `lflops.count` returns
            it. It is needed if lflops cannot find the work of the unsharded model under tensor
            parallelism.
        gather_timeout: Maximum number of seconds to wait for results of other ranks at the end of a
            run. lflops never waits for these results at any other time.
        html: Write an HTML page next to each profile. The page can be opened offline.
        ledger: Account for every second of the run, in a file next to the profiles.
        module_scalars: Number of modules for which metrics are logged: the modules with the most
            self time in the first window. This needs a schedule with at least three windows.
        dirpath: Folder for profiles instead of `trainer.log_dir`. Traces go to the subfolder
            lflops_traces.
        on_error: Reaction to an error inside lflops: `"warn"` or `"raise"`.
        on_oom: Write a report next to the profiles if the training run runs out of memory. With
            this setting, torch's CUDA allocator records its last 100,000 allocations with their
            stacks.

    Raises:
        ScheduleError: The schedule leaves no step to count.

    Attributes:
        profiles: The profiles of the last 32 windows that were closed in the Trainer's last run.
            Only the process of rank 0 has them.

    Example::

        trainer = Trainer(callbacks=[FlopsMonitor()])
    """

    _writes_without_logger = True
    _run = NO_RUN
    _phases: TrainerPhases | None = None
    # the number of this monitor among the monitors of the Trainer, from 1
    _number = 1
    # The runs inside which the current run was begun, each with its phases and the number of the
    # monitor. They continue after the current run.
    _outer: tuple[tuple[MonitoredRun, TrainerPhases | None, int], ...] = ()

    @takes(Settings)
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.profiles: list[Profile] = []
        self._enabled = True

    @classmethod
    def from_deepspeed(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Self:
        """Create a monitor from the section "flops_profiler" of a DeepSpeed config.

        The monitor uses the `profile_step` of the section and its settings for the printed output.
        `recompute_fwd_factor` is accepted but ignored, because recomputed work is counted when it
        runs.

        Args:
            config: A DeepSpeed config, or its path. If its "flops_profiler" is not enabled, the
                monitor is disabled too.

        Raises:
            CountError: The section is missing, or DeepSpeed does not accept one of its keys or
                values.
        """
        arguments, enabled = needed("arguments_of", "from_deepspeed")(config)
        monitor = cls(**arguments)
        monitor._enabled = enabled
        return monitor

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the profiles, to copy or pickle the monitor.

        The copy is not connected to the current training run.
        """
        # A Trainer sets `log` and `log_dict` to methods of its model.
        left_out = {"log", "log_dict", "_run", "_phases", "_number", "_outer"}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["profiles"] = list(self.profiles)
        return state

    @property
    def ledger(self) -> Ledger | None:
        """The time account of the last run; `None` before a run, or if no ledger is kept."""
        return self._run.ledger

    def request_window(self) -> None:
        """Open a window (a few steps to profile) on every rank as soon as possible.

        If the schedule is waiting for its next window, that window opens early. After the end of
        the schedule, an additional window opens. Signal handlers and all threads may call this
        method.
        """
        self._run.request_window()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the settings, and agree with other ranks on the folder for files.

        Every process must call this method.
        """
        if not self._enabled:
            return
        try:
            self._settings.check()
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error
        run = MonitoredRun(self._settings)
        # All ranks take part in this broadcast, and all raise the same error.
        folder, problem = trainer.strategy.broadcast(self._log_dir(run, trainer))
        if problem:
            raise MisconfigurationException(f"FlopsMonitor: {problem}")
        run.log_dir = folder
        if self._run in OPEN:
            self._outer += ((self._run, self._phases, self._number),)
        name_monitor("FlopsMonitor")
        phases = phases_of(trainer)
        self._run = run
        self._phases = phases
        self.profiles = run.profiles
        with run.guard:
            self._number = phases.join(run.guard, run.cleanup, run.close)
            run.open(str(self._number), trainer.world_size)
            wrap(run.cleanup, trainer.strategy, "save_checkpoint", partial(_marked, run))
            is_kept = self._settings.ledger and not phases.has_ledger
            phases.has_ledger |= is_kept
            run.keep_ledger(phases, trainer.global_rank, trainer.world_size, is_kept=is_kept)

    def _log_dir(self, run: MonitoredRun, trainer: Any) -> tuple[str | None, str]:
        """Return the folder for files, and why no files can be written to it.

        Only the main process decides. A run with `dirpath` needs no other folder.
        """
        if not trainer.is_global_zero:
            return None, ""
        if self._settings.dirpath is None:
            try:
                with run.guard:
                    return log_dir_of(trainer, without_logger=self._writes_without_logger), ""
            except Exception as error:  # noqa: BLE001 - all ranks raise it
                return None, f"{type(error).__name__}: {error}"
            return None, ""
        try:
            self._settings.try_folder()
        except LflopsError as error:
            return None, str(error)
        return None, ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("train", trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch. The number of batches per step may differ from the previous epoch."""
        self._run.guarded("train", lambda session: session.epoch_begins())

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_begins("train", batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        phases = self._phases
        if phases is None or (phases.running and phases.running[-1][0] == "backward"):
            return
        try:
            phases.enter("backward", "train", (loss,))
            if phases.awaits_others:
                phases.hook_wait(loss)
        except BaseException as error:
            if not self._run.guard.contains(error):
                raise

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        phases = self._phases
        if phases is None or not phases.running or phases.running[-1][0] != "backward":
            return
        try:
            phases.leave(len(phases.running) - 1)
        except BaseException as error:
            if not self._run.guard.contains(error):
                raise

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        phases = self._phases
        # The phase `optimizer` ends at the end of the optimizer's step. If the optimizer has a
        # closure, the step is already running here. With mixed precision, the step begins later.
        if phases is None or (phases.running and phases.running[-1][0] == "optimizer"):
            return
        try:
            phases.enter("optimizer", "train")
        except BaseException as error:
            if not self._run.guard.contains(error):
                raise

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_ends("train", batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.close()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.epoch_ends()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin or resume the validation stage.

        Validation runs inside the current training step, so the time of this step is not used. The
        time of the sanity check counts as start-up, not as validation.
        """
        if not trainer.sanity_checking:
            self._run.enters("validation")
            self._run.guarded("train", lambda session: session.mark("validation"))
            self._begin("validate", trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._run.batch_begins(trainer.state.stage.value, batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._run.batch_ends(trainer.state.stage.value, batch)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.guarded("validate", lambda session: session.pause())
        self._run.leaves("validation")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.enters(trainer.state.stage.value)
        self._begin(trainer.state.stage.value, trainer, pl_module)

    on_predict_start = on_test_start

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _begin(self, name: str, trainer: Any, pl_module: Any) -> None:
        training = partial(training_of, trainer, pl_module)
        stage = partial(stage_of, name, trainer, pl_module)
        try:
            self._run.begin(name, training, stage, self._number)
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error

    def _leave(self, error: BaseException | None = None) -> None:
        """End the run.

        If this run was begun inside another run, for example by another Trainer in a callback of
        `fit`, the other run continues.
        """
        self._run.close(error)
        if self._outer:
            self._run, self._phases, self._number = self._outer[-1]
            self._outer = self._outer[:-1]
            self.profiles = self._run.profiles


def _marked(run: MonitoredRun, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint, and do not use the time of the training step that contains it."""
    run.guarded("train", lambda session: session.mark("checkpoint"))
    return call(*args, **kwargs)


class InjectedMonitor(FlopsMonitor):
    """A monitor that is added because the environment variable `LFLOPS` requests it.

    It does nothing if the script already has a `FlopsMonitor`. Without a logger and without
    `dirpath`, it writes no file.

    Args:
        asked: The settings in the variable, such as `"wait=2,active=5"`.

    Raises:
        MisconfigurationException: A setting is unknown or wrong.
    """

    _writes_without_logger = False

    def __init__(self, asked: str) -> None:
        try:
            super().__init__(**settings_of(asked))
        except LflopsError as error:
            raise MisconfigurationException(f"LFLOPS={asked!r}: {error}") from error

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set up the run, or remove this monitor if the Trainer has another monitor.

        This cannot be decided earlier, because the model may add callbacks before `setup`. The
        other monitor may also have been added for an earlier Trainer that was created with the same
        list of callbacks.
        """
        monitors = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]
        explicit = [each for each in monitors if not isinstance(each, InjectedMonitor)]
        staying = explicit[0] if explicit else monitors[0]
        if staying is self:
            super().setup(trainer, pl_module, stage)
        else:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]
