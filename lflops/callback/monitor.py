"""`FlopsMonitor`: one line in a Trainer."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import nn

from lflops.callback.bases import Base, MisconfigurationException, warn
from lflops.callback.deepspeed_config import arguments_of
from lflops.callback.loggers import Outlets
from lflops.callback.session import Session
from lflops.callback.settings import Settings
from lflops.errors import LflopsError
from lflops.hardware import Hardware
from lflops.profile import Profile
from lflops.schedule import Schedule

__all__ = ["FlopsMonitor"]

DEFAULT = Schedule()


class FlopsMonitor(Base):
    """Tells where a training step's FLOPs, bytes and milliseconds go, from a few steps of the run.

    One batch of a window is counted, operator by operator and eagerly; all others only pass a clock. At a window's end the main process
    logs a summary, saves the profile under `trainer.log_dir`/lflops, and gives figures to every logger. In between and afterwards, step
    time, MFU and throughput are logged every `log_every_n_steps`.

    An error of lflops' own is warned of once; the training goes on without it.

    Args:
        schedule: Which steps are waited for, warmed up in, counted and profiled.
        count: Whether to count a step; or a profile of the same model that was counted elsewhere.
        module_depth: The last depth in the summary's table of classes; -1 is the innermost.
        top_modules: How many classes of modules that table names for each figure.
        detailed: Whether the summary has a line for every module.
        ignore_modules: Names or classes of modules whose own work is left out of every total.
        output_file: Also gets the summaries.
        hardware: What the device can do: `"auto"` looks its name up, `"measure"` measures it, else a name of the table, figures of your
            own, or `None`.
        track: Whether to log step time, MFU and throughput over the whole run.
        units: A function from a batch to `{"samples": n, "tokens": n}`; `None` finds them in the shapes of its tensors.
        dirpath: Where profiles are saved, instead of below `trainer.log_dir`.
        on_error: What an error of lflops' own does: `"warn"`, or `"raise"`.

    Raises:
        ScheduleError: The schedule leaves no step to count in.

    Attributes:
        profiles: A profile for each window closed in the last fit, on the main process.

    Example::

        trainer = Trainer(callbacks=[FlopsMonitor()])
    """

    def __init__(
        self,
        schedule: Schedule = DEFAULT,
        *,
        count: bool | Profile = True,
        module_depth: int = -1,
        top_modules: int = 3,
        detailed: bool = True,
        ignore_modules: Iterable[str | type[nn.Module]] = (),
        output_file: str | PathLike[str] | None = None,
        hardware: Hardware | str | None = "auto",
        track: bool = True,
        units: Callable[[Any], Any] | None = None,
        dirpath: str | PathLike[str] | None = None,
        on_error: str = "warn",
    ) -> None:
        """Touch nothing until a Trainer fits."""
        self._settings = Settings(
            schedule=schedule,
            count=count,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            ignore_modules=ignore_modules,
            output_file=output_file,
            hardware=hardware,
            track=track,
            units=units,
            dirpath=dirpath,
            on_error=on_error,
        )
        self.profiles: list[Profile] = []
        self._enabled = True
        self._directory: Path | None = None
        self._session: Session | None = None

    @classmethod
    def from_deepspeed(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Self:
        """What a DeepSpeed config asks its own profiler for: the step to profile, and how to print it.

        `recompute_fwd_factor` is taken and not needed: what is computed again is counted as it runs.

        Args:
            config: A DeepSpeed config, or the path of one. If its "flops_profiler" is not enabled, neither is the monitor.

        Raises:
            CountError: The section is missing, or has a key or a value that DeepSpeed does not take.
        """
        arguments, enabled = arguments_of(config)
        monitor = cls(**arguments)
        monitor._enabled = enabled
        return monitor

    def __getstate__(self) -> dict[str, Any]:
        """All but the fit that is going on, which belongs to this process."""
        return self.__dict__ | {"_session": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the arguments, and ask where files go: on every process, for Lightning passes the answer round.

        Raises:
            MisconfigurationException: An argument is wrong.
        """
        if stage != "fit" or not self._enabled:
            return
        try:
            self._settings.check()
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error
        log_dir = trainer.log_dir
        self._directory = None if log_dir is None or trainer.fast_dev_run else Path(log_dir) / "lflops"
        if self._settings.dirpath is not None:
            self._directory = Path(self._settings.dirpath)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin.

        Raises:
            MisconfigurationException: The model has no module that is to be ignored.
        """
        if not self._enabled:
            return
        self.profiles = []
        place = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)].index(self) + 1
        outlets = Outlets(trainer, self._settings, self._directory, place) if trainer.is_global_zero else None
        try:
            self._session = Session(self._settings, trainer, pl_module, outlets, self.profiles)
        except LflopsError as error:
            raise MisconfigurationException(f"FlopsMonitor: {error}") from error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
            self._fail(error)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count, if it is time to."""
        session = self._session
        if session is not None:  # as `_guarded`, with less on the way
            try:
                session.batch_begins(batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
                self._fail(error)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the clock."""
        session = self._session
        if session is not None:  # as `_guarded`, with less on the way
            try:
                session.batch_ends(batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
                self._fail(error)
            if session.over:
                self._session = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Know why this step takes longer."""
        self._guarded(lambda session: session.mark("validation"))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Know why this step takes longer; nothing is added to the checkpoint."""
        self._guarded(lambda session: session.mark("checkpoint"))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close what is open."""
        self._guarded(lambda session: session.close())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close what is open, with what there is."""
        self._guarded(lambda session: session.close(exception))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close what is open, however it came to be left so."""
        self._guarded(lambda session: session.close())

    def _guarded(self, action: Callable[[Session], None]) -> None:
        """Do something with the session, if there is one; an error of it ends the session, not the training."""
        session = self._session
        if session is None:
            return
        try:
            action(session)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
            self._fail(error)
        if session.over:
            self._session = None

    def _fail(self, error: Exception) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.detach()
        if self._settings.on_error == "raise":
            raise error
        warn(f"FlopsMonitor has failed and is off from here on; the training goes on: {type(error).__name__}: {error}")
