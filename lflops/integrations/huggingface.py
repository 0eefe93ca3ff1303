"""`FlopsCallback`: the callback for a transformers Trainer.

Pass it to the Trainer:

trainer = transformers.Trainer(model, args, callbacks=[lflops.huggingface.FlopsCallback()])
"""

import copy
from collections.abc import Callable
from functools import partial
from inspect import currentframe
from traceback import walk_stack
from typing import Any

from torch import nn

from lflops.error_guard import wrap
from lflops.errors import CountError, needed_by
from lflops.integrations.loops.monitor import LoopMonitor, monitor
from lflops.ledger.account import Ledger
from lflops.monitoring.outputs.loggers import loggers_of
from lflops.profile.profile import Profile

with needed_by("lflops.huggingface"):
    from transformers import TrainerCallback


class FlopsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Reports where the FLOPs, bytes and milliseconds of a training step go.

    It monitors a transformers Trainer in the way `FlopsMonitor` monitors a Lightning Trainer.

    Files are written below `args.output_dir`. If `report_to` has "tensorboard" or "wandb",
    TensorBoard's writer or the wandb run receives metrics, text and tables. Everything else in
    `report_to` receives only the metrics. `log_history`, the progress bar and your own callbacks
    receive nothing.

    Args:
        log: Function that receives the summary of each window, on the main process.
        settings: The arguments of `FlopsMonitor`, such as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: A setting is unknown or wrong. The message has its name, its value and the valid
            values.

    Attributes:
        profiles: The profiles of the last 32 windows that were closed in the last run. Only the
            main process has them.

    Example::

        trainer = transformers.Trainer(
            model, args, train_dataset=dataset, callbacks=[FlopsCallback()]
        )
    """

    def __init__(self, *, log: Callable[[str], None] = print, **settings: Any) -> None:
        # This raises an error for a wrong setting. The monitor itself is not used.
        monitor(nn.Identity(), **settings)
        self.profiles: list[Profile] = []
        self._log = log
        self._settings = settings
        self._monitor: LoopMonitor | None = None
        # the inputs of the running batch, if one is running
        self._batch: tuple[Any] | None = None
        self._writer: Any = None
        self._account: Ledger | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the profiles, to copy or pickle the callback.

        The copy is not connected to the current training run.
        """
        kept = {"profiles": list(self.profiles), "_log": self._log, "_settings": self._settings}
        return kept | {"_monitor": None, "_batch": None, "_writer": None, "_account": None}

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of the last run's time; `None` before a run, or if no ledger is kept."""
        return self._account if self._monitor is None else self._monitor.ledger

    def request_window(self) -> None:
        """Open a window (a few steps to profile) on every rank as soon as possible.

        If the schedule is waiting for its next window, that window opens early. After the end of
        the schedule, an additional window opens. Signal handlers and all threads may call this
        method.
        """
        if self._monitor is not None:
            self._monitor.request_window()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to monitor the calling Trainer.

        Callbacks receive the Trainer's model and loaders, but not the Trainer itself. The Trainer
        is found on the call stack.
        """
        trainer = running_trainer()
        if self not in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
            raise CountError(
                "FlopsCallback: on_train_begin was not called by a transformers.Trainer: "
                "pass the callback in Trainer(callbacks=[...])"
            )
        self._begin(trainer)

    def join(self, trainer: Any) -> None:
        """Begin to monitor a Trainer that is already running a step.

        This step is included in the number of steps, but its duration is unknown.
        """
        trainer.add_callback(self)
        watched = self._begin(trainer)
        for _ in range(trainer.args.gradient_accumulation_steps):
            with watched.step():
                pass

    def _begin(self, trainer: Any) -> LoopMonitor:
        # An earlier run may have ended with an exception.
        self.close(None)
        args = trainer.args
        state = trainer.state
        settings = {"dirpath": f"{args.output_dir}/lflops"} | self._settings
        loggers: list[Any] = []
        self._writer = None
        if state.is_world_process_zero:
            loggers, self._writer = _loggers_of(trainer)
        watched = monitor(
            trainer.model,
            trainer.optimizer,
            engine=trainer.accelerator,
            logger=loggers,
            accumulation=args.gradient_accumulation_steps,
            log_every=max(int(state.logging_steps or args.logging_steps), 0),
            steps=max(state.max_steps - state.global_step, 1),
            log=self._log,
            **settings,
        )
        self._monitor = watched
        watched.name = "FlopsCallback"
        watched.loader_sizes["train"] = state.train_batch_size or args.train_batch_size
        watched.loader_sizes["validate"] = args.eval_batch_size
        watched.resume_from(state.global_step)
        watched.__enter__()
        self.profiles = watched.profiles
        with watched.guard:
            self._install(watched, trainer)
        return watched

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a batch. If it is the last batch of its step, this also ends the step."""
        batch = self._batch
        self._batch = None
        if batch is not None and self._monitor is not None:
            self._monitor.batch_ends(*batch)

    on_substep_end = on_step_end

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.epoch_ends()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.mark("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close(None)

    def _install(self, watched: LoopMonitor, trainer: Any) -> None:
        around: dict[str, Callable[..., Any]] = {
            "get_batch_samples": watched.caller_in("data"),
            "_prepare_inputs": watched.caller_in("transfer"),
            "training_step": partial(self._training_step, watched, watched.caller_in("forward")),
            "prediction_step": partial(_prediction_step, watched, watched.caller_in("forward")),
            "_save_checkpoint": partial(_within, partial(watched.within, "checkpoint_save")),
            "log": partial(_within, partial(watched.within, "logging")),
            "evaluation_loop": partial(_within, partial(watched.stage, "validate")),
            # The Trainer calls no callback when an exception ends its loop.
            "_run_epoch": self._run_epoch,
        }
        for name, function in around.items():
            if hasattr(trainer, name):
                wrap(watched.cleanup, trainer, name, function)

    def _training_step(
        self,
        watched: LoopMonitor,
        call_in_forward: Callable[..., Any],
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        batch = args[1] if len(args) > 1 else kwargs.get("inputs")
        self._batch = (batch,)
        watched.batch_begins(batch)
        return call_in_forward(call, *args, **kwargs)

    def _run_epoch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the monitoring if it is running. This is called at the end of a training run."""
        watched = self._monitor
        writer = self._writer
        self._monitor = None
        self._batch = None
        self._writer = None
        if watched is not None:
            watched.__exit__(None if error is None else type(error), error, None)
            self._account = watched.ledger
        if writer is not None:
            # The Trainer has closed the writer already, but the last window was written after that.
            writer.close()


class _Reporter:
    """Logger that passes metrics to a reporter: a transformers callback such as MLflowCallback.

    The reporter receives only the metrics of lflops. The control flags and the history of the
    Trainer do not change.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer = trainer
        self._callback = callback

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        trainer = self._trainer
        state = copy.copy(trainer.state)
        control = copy.copy(trainer.control)
        self._callback.on_log(trainer.args, state, control, model=trainer.model, logs=dict(metrics))


def _loggers_of(trainer: Any) -> tuple[list[Any], Any]:
    """Return the reporters of a Trainer (callbacks that log metrics) as loggers.

    The second result is TensorBoard's writer, or `None`.
    """
    loggers: list[Any] = []
    writer = None
    for callback in trainer.callback_handler.callbacks:
        names = set()
        logs = False
        for base in type(callback).__mro__:
            if base.__module__.startswith("transformers.integrations"):
                names.add(base.__name__)
            logs |= base is not TrainerCallback and "on_log" in vars(base)
        if "TensorBoardCallback" in names and callback.tb_writer is not None:
            writer = callback.tb_writer
            loggers += loggers_of(writer)
        elif "WandbCallback" in names and _wandb_run(callback) is not None:
            loggers += loggers_of(_wandb_run(callback))
        elif names and logs:
            loggers.append(_Reporter(trainer, callback))
    return loggers, writer


def _wandb_run(callback: Any) -> Any:
    # The callback has no public attribute for the run.
    return getattr(callback._wandb, "run", None)  # noqa: SLF001


def _within(context: Callable[[], Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return call(*args, **kwargs)


def _prediction_step(
    watched: LoopMonitor,
    call_in_forward: Callable[..., Any],
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    batch = args[1] if len(args) > 1 else kwargs.get("inputs")
    with watched.step(batch):
        return call_in_forward(call, *args, **kwargs)


def running_trainer() -> Any:
    """Return the transformers Trainer that is calling this code, or `None`.

    The Trainer is found on the call stack, because callbacks do not receive it.
    """
    for frame, _ in walk_stack(currentframe()):
        if "self" not in frame.f_code.co_varnames:
            continue
        caller = frame.f_locals.get("self")
        if hasattr(type(caller), "training_step") and hasattr(caller, "callback_handler"):
            return caller
    return None
