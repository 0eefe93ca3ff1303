"""`FlopsMonitor`: one line in a Trainer."""

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any, Self

from lflops.errors import LflopsError
from lflops.extras import needed
from lflops.integrations.lightning.phase_hooks import PhaseListener, TrainerPhases, phases_of
from lflops.integrations.lightning.training import (
    Base,
    MisconfigurationException,
    log_dir_of,
    stage_of,
    training_of,
)
from lflops.ledger.account import Ledger
from lflops.monitoring.inputs.settings import Settings, settings_of, takes
from lflops.monitoring.run import NO_RUN, OPEN, MonitoredRun
from lflops.profile.profile import Profile


class FlopsMonitor(Base, PhaseListener):
    """Tells where a training step's FLOPs, bytes and milliseconds go, from a few steps of the run.

    One batch of a window is counted, operator by operator; the active ones are traced by
    torch.profiler, and in as many behind them the modules are timed; all others only pass a clock.
    At a window's end the main process logs a summary, saves the profile under
    `trainer.log_dir`/lflops and the trace under `trainer.log_dir`/lflops_traces, and gives figures
    to every logger. A Trainer without a logger gets a new folder for each run, which the log names.
    In between and afterwards, step time, MFU and throughput are logged every `log_every_n_steps`.

    An error of lflops' own is warned of once; the training goes on without it. A file or a logger
    that fails is warned of once, and the others go on.

    Args:
        schedule: Which steps are waited for, warmed up in, counted and profiled; each stage has its
            own count of them.
        stages: Which of "train", "validate", "test" and "predict" have windows. With `()` a window
            opens only when it is asked for.
        count: Whether to count a step; or a profile of the same model that was counted elsewhere.
        trace: Whether to trace; without, the modules are timed in the active steps.
        trace_ranks: Which ranks trace: "zero", "all", or a list of them.
        activities: What is traced, of "cpu" and "device", the one that the model is on. The next
            three are as torch.profiler takes them.
        record_shapes: The shapes of operators' inputs as well.
        profile_memory: Allocations as well.
        with_stack: Python's stack as well; it breaks the nesting of your `record_function` in the
            trace.
        compiled: What a trace says of code that torch.compile made: `"row"` is one row for each
            compiled module, `"modules"` divides its kernels over the modules inside, forward and
            backward. That has inductor record the modules of each graph that it compiles, so its
            caches compile once more; give it from the start, because graphs compiled before have no
            record.
        module_depth: The last depth in the long text's table of classes; -1 is the innermost.
        top_modules: How many classes of modules that table names for each figure.
        detailed: Whether the log has the long text, with lines for every module, in place of about
            40 lines.
        ignore_modules: Names or classes of modules whose own work is left out of every total.
        output_file: Gets the long text of each window. What the same Trainer wrote there before is
            kept.
        hardware: What the device can do: `"auto"` looks its name up, `"measure"` measures it, else
            a chip by name or in a TOML file, your own figures, or `None`.
        track: Whether to log step time, MFU and throughput over the whole run.
        units: A function from a batch to `{"samples": n, "tokens": n}`; `None` finds them in the
            shapes of its tensors.
        topology: A function from a rank to its coordinates, as `{"data": 0, "tensor": 1}`; `None`
            asks the strategy and the parameters.
        logical: As `lflops.count` takes it: of the whole model on a rank's batch, where tensor
            parallelism hides what it does.
        gather_timeout: Seconds that the end of a run waits, at most, for what other ranks have to
            tell; nothing else waits.
        html: Whether a page that opens offline is written next to each profile.
        ledger: Whether to account for every second of the run, in a file next to the profiles.
        module_scalars: How many modules have curves: those with the most self time in the first
            window. Three windows make a curve.
        dirpath: Where profiles are saved, instead of below `trainer.log_dir`; traces in its folder
            lflops_traces.
        on_error: What an error of lflops' own does: `"warn"`, or `"raise"`.
        on_oom: Whether a report is written next to the profiles when the training runs out of
            memory. On CUDA torch's allocator then records its last 100,000 allocations with their
            stacks.

    Raises:
        ScheduleError: The schedule leaves no step to count in.

    Attributes:
        profiles: A profile for each window closed in the last run of the Trainer, on the main
            process; of more than 32, the last 32.

    Example::

        trainer = Trainer(callbacks=[FlopsMonitor()])
    """

    _writes_without_logger = True
    _run = NO_RUN
    _phases: TrainerPhases | None = None
    # among the monitors of the Trainer
    _number = 1
    _outer: tuple[
        tuple[MonitoredRun, TrainerPhases | None], ...
        # runs that go on, within which the last one was begun
    ] = ()

    @takes(Settings)
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.profiles: list[Profile] = []
        self._enabled = True

    @classmethod
    def from_deepspeed(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Self:
        """Make the monitor that a DeepSpeed config asks for.

        The step to profile, and how to print it.

        `recompute_fwd_factor` is taken and not needed: what is computed again is counted as it
        runs.

        Args:
            config: A DeepSpeed config, or the path of one. If its "flops_profiler" is not enabled,
                neither is the monitor.

        Raises:
            CountError: The section is missing, or has a key or a value that DeepSpeed does not
                take.
        """
        arguments, enabled = needed("arguments_of", "from_deepspeed")(config)
        monitor = cls(**arguments)
        monitor._enabled = enabled
        return monitor

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the profiles so far, without the run.

        A copy, or what is unpickled, is a monitor that has not begun.
        """
        others = {
            "log",
            "log_dict",
            "_run",
            "_phases",
            "_number",
            "_outer",
            # the first two a Trainer sets: methods of its model
        }
        return {name: value for name, value in self.__dict__.items() if name not in others} | {
            "profiles": list(self.profiles)
        }

    @property
    def ledger(self) -> Ledger | None:
        """Every second of the last run so far, by category.

        `None` before it, and where no ledger is kept.
        """
        return self._run.ledger

    def request_window(self) -> None:
        """Ask for a window now, on every rank: the next scheduled one, or one more.

        A handler of a signal may call it, and any thread.
        """
        self._run.request_window()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the arguments, and ask where files go and how ranks reach each other.

        On every process, for that takes all of them.
        """
        if not self._enabled:
            return
        try:
            self._settings.check()
            if trainer.is_global_zero:
                self._settings.try_folder()
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error
        if self._run in OPEN:
            self._outer += ((self._run, self._phases),)
        self._run, self._phases = run, phases = MonitoredRun(self._settings), phases_of(trainer)
        self.profiles = run.profiles
        with run.boundary:
            self._number = phases.join(run.boundary, run.undo, run.close)
            run.open(str(self._number), trainer.world_size)
            if self._settings.dirpath is None:
                run.log_dir = log_dir_of(trainer, without_logger=self._writes_without_logger)
            is_kept = self._settings.ledger and not phases.has_ledger
            phases.has_ledger |= is_kept
            run.keep_ledger(phases, trainer.global_rank, trainer.world_size, is_kept=is_kept)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("train", trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Know that gradients may be accumulated otherwise from here on."""
        self._run.guarded("train", lambda session: session.epoch_begins())

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_begins("train", batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._phases is not None:
            with self._run.boundary:
                self._phases.backward_begins(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._phases is not None:
            with self._run.boundary:
                self._phases.backward_ends()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._phases is not None:
            with self._run.boundary:
                self._phases.optimizer_begins()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_ends("train", batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.close()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.epoch_ends()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Know why this step takes longer, and begin, or go on, with this stage.

        The sanity check is a part of the start.
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

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Know why this step takes longer; nothing is added to the checkpoint."""
        self._run.guarded("train", lambda session: session.mark("checkpoint"))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _begin(self, name: str, trainer: Any, pl_module: Any) -> None:
        training, stage = (
            partial(training_of, trainer, pl_module),
            partial(stage_of, name, trainer, pl_module),
        )
        try:
            self._run.begin(name, training, stage, self._number)
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error

    def _leave(self, error: BaseException | None = None) -> None:
        """End the run, and go on with the one within which it was begun."""
        self._run.close(error)
        if self._outer:
            (self._run, self._phases), self._outer = self._outer[-1], self._outer[:-1]
            self.profiles = self._run.profiles


class InjectedMonitor(FlopsMonitor):
    """A monitor that was asked for from outside, with settings as `"wait=2,active=5"`.

    Unknown ones are a `MisconfigurationException`.

    If the script already has a `FlopsMonitor`, this one does nothing. Without a logger and without
    `dirpath` it writes no file.
    """

    _writes_without_logger = False

    def __init__(self, asked: str) -> None:
        try:
            super().__init__(**settings_of(asked))
        except LflopsError as error:
            raise MisconfigurationException(f"LFLOPS={asked!r}: {error}") from error

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave, if there is another.

        What a model adds is known by now, and a list that served an earlier Trainer has its
        monitor.
        """
        monitors = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]
        staying = next(
            (each for each in monitors if not isinstance(each, InjectedMonitor)), monitors[0]
        )
        if staying is self:
            super().setup(trainer, pl_module, stage)
        else:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]
