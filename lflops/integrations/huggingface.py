"""`FlopsCallback`: one line in a Trainer of transformers.

trainer = transformers.Trainer(model, args, callbacks=[lflops.huggingface.FlopsCallback()], ...)
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
    """Tells where a training step's FLOPs, bytes and milliseconds go, as `FlopsMonitor` does under Lightning.

    Files are below `args.output_dir`. Where `report_to` has "tensorboard" or "wandb", their writer
    and run get curves, text and tables; every other reporter gets the curves. `log_history`, the
    progress bar and your own callbacks see nothing of it.

    Args:
        log: Is called with the summary of each window, on the main process.
        settings: The arguments of `FlopsMonitor`, as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: A setting is not known, or is wrong; the message names it, its value and what is
            taken.

    Attributes:
        profiles: A profile for each window closed in the last training, on the main process; of
            more than 32, the last 32.

    Example::

        trainer = transformers.Trainer(model, args, train_dataset=dataset,
        callbacks=[FlopsCallback()])
    """

    def __init__(self, *, log: Callable[[str], None] = print, **settings: Any) -> None:
        monitor(nn.Identity(), **settings)
        self.profiles: list[Profile] = []
        self._log = log
        self._settings = settings
        self._monitor: LoopMonitor | None = None
        self._batch: Any = None
        self._writer: Any = None
        self._account: Ledger | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the profiles: a copy is a callback that has not begun."""
        kept = {"profiles": list(self.profiles), "_log": self._log, "_settings": self._settings}
        return kept | {"_monitor": None, "_batch": None, "_writer": None, "_account": None}

    @property
    def ledger(self) -> Ledger | None:
        """Every second of the last training so far, by category.

        `None` before it, and where no ledger is kept.
        """
        return self._account if self._monitor is None else self._monitor.ledger

    def request_window(self) -> None:
        """Ask for a window now, on every rank: the next scheduled one, or one more.

        A handler of a signal may call it, and any thread.
        """
        if self._monitor is not None:
            self._monitor.request_window()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch the Trainer that calls.

        Callbacks are given its model and its loaders, but never the Trainer.
        """
        trainer = running_trainer()
        if self not in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
            raise CountError(
                "FlopsCallback: on_train_begin was not called by a transformers.Trainer: give it in Trainer(callbacks=[...])"
            )
        self._begin(trainer)

    def join(self, trainer: Any) -> None:
        """Begin to watch a Trainer in the middle of a step, which is noted as one that took no time."""
        trainer.add_callback(self)
        watched = self._begin(trainer)
        for _ in range(trainer.args.gradient_accumulation_steps):
            with watched.step():
                pass

    def _begin(self, trainer: Any) -> LoopMonitor:
        # of a training that was left by an exception
        self.close(None)
        args, state = trainer.args, trainer.state
        settings = {"dirpath": f"{args.output_dir}/lflops"} | self._settings
        loggers, self._writer = _loggers_of(trainer) if state.is_world_process_zero else ([], None)
        self._monitor = watched = monitor(
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
        watched.go_on_from(state.global_step)
        watched.__enter__()
        self.profiles = watched.profiles
        with watched.boundary:
            self._install(watched, trainer)
        return watched

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch is over, and perhaps its step with it."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.__exit__(None, None, None)

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
        phase, stage = watched.phase, watched.stage
        around: dict[str, Callable[..., Any]] = {
            "get_batch_samples": partial(_within, partial(phase, "data")),
            "_prepare_inputs": partial(_within, partial(phase, "transfer")),
            "training_step": partial(self._training_step, watched),
            "prediction_step": partial(_prediction_step, watched),
            "_save_checkpoint": partial(_within, partial(watched.within, "checkpoint_save")),
            "log": partial(_within, partial(watched.within, "logging")),
            "evaluation_loop": partial(_within, partial(stage, "validate")),
            # the Trainer calls no callback when its loop is left by an exception
            "_run_epoch": self._run_epoch,
        }
        for name, function in around.items():
            if hasattr(trainer, name):
                wrap(watched.undo, trainer, name, function)

    def _training_step(
        self, watched: LoopMonitor, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._batch = watched.step(_inputs_in(args, kwargs))
        self._batch.__enter__()
        with watched.phase("forward"):
            return call(*args, **kwargs)

    def _run_epoch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the watching, if it goes on. The end of a training does so by itself."""
        watched, writer = self._monitor, self._writer
        self._monitor = self._batch = self._writer = None
        if watched is not None:
            watched.__exit__(None if error is None else type(error), error, None)
            self._account = watched.ledger
        if writer is not None:
            # the Trainer closed it at its end, and the last window was written after that
            writer.close()


class _Reporter:
    """A reporter of transformers as a logger, which hears of our figures alone, and by itself.

    No flag and no history of the Trainer's.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer = trainer
        self._callback = callback

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        trainer = self._trainer
        state, control = copy.copy(trainer.state), copy.copy(trainer.control)
        self._callback.on_log(trainer.args, state, control, model=trainer.model, logs=dict(metrics))


def _loggers_of(trainer: Any) -> tuple[list[Any], Any]:
    """The reporters of a Trainer as loggers, and TensorBoard's writer if there is one."""
    loggers: list[Any] = []
    writer = None
    for callback in trainer.callback_handler.callbacks:
        names = {
            base.__name__
            for base in type(callback).__mro__
            if base.__module__.startswith("transformers.integrations")
        }
        if "TensorBoardCallback" in names and callback.tb_writer is not None:
            writer = callback.tb_writer
            loggers += loggers_of(writer)
        elif "WandbCallback" in names and getattr(callback._wandb, "run", None) is not None:  # noqa: SLF001 - there is no public one
            loggers += loggers_of(callback._wandb.run)  # noqa: SLF001
        elif names and "on_log" in {
            name
            for base in type(callback).__mro__
            if base is not TrainerCallback
            for name in vars(base)
        }:
            loggers.append(_Reporter(trainer, callback))
    return loggers, writer


def _within(context: Callable[[], Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return call(*args, **kwargs)


def _prediction_step(
    watched: LoopMonitor, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with watched.step(_inputs_in(args, kwargs)), watched.phase("forward"):
        return call(*args, **kwargs)


def _inputs_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a Trainer's step after the model."""
    return args[1] if len(args) > 1 else kwargs.get("inputs")


def running_trainer() -> Any:
    """The innermost Trainer of those whose methods are running; `None` outside of all."""
    callers = (
        frame.f_locals.get("self")
        for frame, _ in walk_stack(currentframe())
        if "self" in frame.f_code.co_varnames
    )
    return next(
        (
            each
            for each in callers
            if hasattr(type(each), "training_step") and hasattr(each, "callback_handler")
        ),
        None,
    )
