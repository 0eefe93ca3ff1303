"""`FlopsCallback`: one line in a Trainer of transformers.

trainer = transformers.Trainer(model, args, callbacks=[lflops.huggingface.FlopsCallback()], ...)
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lflops.errors import CountError, needed_by
from lflops.loops.monitor import LoopMonitor, monitor
from lflops.profile.model import Profile
from lflops.session.inputs.wrappers import Wrappers

with needed_by("lflops.huggingface"):
    from transformers import TrainerCallback

__all__ = ["FlopsCallback"]


class FlopsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Tells where a training step's FLOPs, bytes and milliseconds go, as `FlopsMonitor` does under Lightning.

    Files are below `args.output_dir`. Curves, text and figures are in TensorBoard's folder where `report_to` has "tensorboard", and go by
    `trainer.log` to every other reporter.

    Args:
        log: Is called with the summary of each window, on the main process.
        settings: The arguments of `FlopsMonitor`, as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: A setting is not known, or is wrong; the message names it, its value and what is taken.

    Attributes:
        profiles: A profile for each window closed in the last training, on the main process.

    Example::

        trainer = transformers.Trainer(model, args, train_dataset=dataset, callbacks=[FlopsCallback()])
    """

    def __init__(self, *, log: Callable[[str], None] = print, **settings: Any) -> None:
        """See that the settings can be."""
        monitor(nn.Identity(), **settings)
        self.profiles: list[Profile] = []
        self._log = log
        self._settings = settings
        self._monitor: LoopMonitor | None = None
        self._wrappers = Wrappers()
        self._batch: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the profiles: a copy is a callback that has not begun."""
        kept = {"profiles": list(self.profiles), "_log": self._log, "_settings": self._settings}
        return kept | {"_monitor": None, "_wrappers": Wrappers(), "_batch": None}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch the Trainer that calls."""
        trainer = _caller_of(self)
        settings = {"dirpath": f"{args.output_dir}/lflops"} | self._settings
        self._monitor = monitor(
            trainer.model,
            trainer.optimizer,
            engine=trainer.accelerator,
            logger=[_Reporter(trainer)],
            accumulation=args.gradient_accumulation_steps,
            log_every=max(int(state.logging_steps or args.logging_steps), 0),
            steps=max(state.max_steps - state.global_step, 1),
            log=self._log,
            **settings,
        )
        self._monitor.__enter__()
        self.profiles = self._monitor.profiles
        self._install(trainer)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch is over, and its step is not."""
        self._end_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch is over, and its step with it."""
        self._end_batch()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Know why this step takes longer."""
        if self._monitor is not None:
            self._monitor.mark("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close what is open."""
        self._close(None)

    def _install(self, trainer: Any) -> None:
        watched = self._monitor
        if watched is None:
            return
        install, phase = self._wrappers.install, watched.phase
        install(trainer, "get_batch_samples", _within(partial(phase, "data"), trainer.get_batch_samples))
        install(trainer, "_prepare_inputs", _within(partial(phase, "transfer"), trainer._prepare_inputs))  # noqa: SLF001 - overridable
        install(trainer, "training_step", partial(self._training_step, trainer.training_step))
        install(trainer, "prediction_step", partial(self._prediction_step, trainer.prediction_step))
        install(trainer, "evaluation_loop", _within(partial(watched.stage, "validate"), trainer.evaluation_loop))
        # The Trainer calls no callback when its loop is left by an exception.
        install(trainer, "_run_epoch", partial(self._run_epoch, trainer._run_epoch))  # noqa: SLF001

    def _training_step(self, call: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._monitor is None:
            return call(model, inputs, *args, **kwargs)
        self._batch = self._monitor.step(inputs)
        self._batch.__enter__()
        with self._monitor.phase("forward"):
            return call(model, inputs, *args, **kwargs)

    def _prediction_step(self, call: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._monitor is None:
            return call(model, inputs, *args, **kwargs)
        with self._monitor.step(inputs), self._monitor.phase("forward"):
            return call(model, inputs, *args, **kwargs)

    def _run_epoch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self._close(error)
            raise

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.__exit__(None, None, None)

    def _close(self, error: BaseException | None) -> None:
        self._wrappers.uninstall()
        watched, self._monitor, self._batch = self._monitor, None, None
        if watched is not None:
            watched.__exit__(None if error is None else type(error), error, None)


class _Reporter:
    """The reporters of a Trainer as one logger.

    Args:
        trainer: Whose reporters they are.
    """

    def __init__(self, trainer: Any) -> None:
        """Write nothing yet."""
        self._trainer = trainer

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Give them to every reporter, with the Trainer's own step."""
        self._trainer.log(dict(metrics))


def _within(context: Callable[[], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return call(*args, **kwargs)

    return wrapped


def _caller_of(callback: TrainerCallback) -> Any:
    """The Trainer that calls a callback. Callbacks are given its model and its loaders, but never the Trainer.

    Raises:
        CountError: Somebody else calls it.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - to read the caller's `self`, and nothing else
    while frame is not None:
        caller = frame.f_locals.get("self")
        if callback in getattr(getattr(caller, "callback_handler", None), "callbacks", ()):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise CountError("FlopsCallback: on_train_begin was not called by a transformers.Trainer: give it in Trainer(callbacks=[...])")
