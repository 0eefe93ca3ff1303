"""One run of a training as a monitor sees it: a session for each stage, and nothing of ours that could end the training."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lflops.collect.kineto.compile_tracking import CompileTracking
from lflops.errors import LflopsError
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.session.inputs.messages import warn
from lflops.session.inputs.settings import Settings
from lflops.session.inputs.training import STAGES, Stage, Training
from lflops.session.outlets.out_of_memory import MemoryHistory, ran_out_of_memory, write_report
from lflops.session.outlets.paths import OutputPaths
from lflops.session.results import Results
from lflops.session.session import Session

__all__ = ["MonitoredRun"]


class MonitoredRun:
    """Begins when a run is set up, and ends however the run does.

    Args:
        settings: What is asked for.
        log_dir: The run's, if it has one.
        store: That all ranks reach; `None` where they have none, or there is one rank.

    Attributes:
        sessions: By stage; `None` is one that has not begun, or is over.
        profiles: The windows that are closed, on the main process.
    """

    def __init__(self, settings: Settings, log_dir: str | None, store: Any) -> None:
        """No stage has begun."""
        self.sessions: dict[str, Session | None] = dict.fromkeys(STAGES)
        self._begun: set[str] = set()
        self.profiles: list[Profile] = []
        self._settings = settings
        self._log_dir = log_dir
        self._store = store
        self._training: Training | None = None
        self._results: Results | None = None
        self._history: MemoryHistory | None = None
        self._monitor = 1
        self._failed = False
        self._tracking = CompileTracking()
        if settings.looks_inside_compiled:
            self._tracking.start()

    def begin(self, name: str, training: Callable[[], Training], stage: Callable[[], Stage], monitor: int = 1) -> None:
        """A stage begins, or comes again.

        Args:
            name: Of the stage.
            training: Reads the run off its loop, when its first stage begins.
            stage: Reads the stage, when it begins for the first time.
            monitor: Which of the loop's monitors it is for, from 1.

        Raises:
            LflopsError: An argument is not for this model, or these ranks.
        """
        if self._failed:
            return
        if name in self._begun:
            self.guarded(name, lambda session: session.resume())
        elif name in self._settings.stages:
            try:
                self.sessions[name] = self._session(name, training, stage, monitor)
                self._begun.add(name)
            except LflopsError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
                self.fail(error)

    def _session(self, name: str, training: Callable[[], Training], stage: Callable[[], Stage], monitor: int) -> Session:
        if self._training is None:
            self._training, self._monitor = training(), monitor
            self._history = MemoryHistory(self._training.device) if self._settings.on_oom else None
        if self._results is None:
            self._results = Results.of(self._training, self._settings, self._log_dir, monitor=monitor, store=self._store)
            self._results.profiles = self.profiles
        leave = partial(self.sessions.__setitem__, name, None)
        session = Session(self._settings, self._training, stage(), results=self._results, fail=self.fail, leave=leave)
        if self._tracking.refusal is not None:
            session.add_note(Note(code="compiled_unopened", subject="", values={"error": self._tracking.refusal}))
        return session

    def guarded(self, name: str, action: Callable[[Session], None]) -> None:
        """Do something with a stage's session, if it has one; an error of it ends the watching, not the training."""
        session = self.sessions[name]
        if session is None:
            return
        try:
            action(session)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
            self.fail(error)
        if session.over:
            self.sessions[name] = None

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, or left by an error: tell what there is to tell."""
        training = self._training
        self._tracking.stop()
        for name in STAGES:
            self.guarded(name, lambda session: session.close(error))
        results, self._results, self._training = self._results, None, None
        if results is not None:
            try:
                results.finish(failed=error is not None)
            except Exception as mistake:  # noqa: BLE001 - whatever it is, it is not to end the user's training
                self.fail(mistake)
        if self._history is not None:
            self._end_history(error, training)

    def _end_history(self, error: BaseException | None, training: Training | None) -> None:
        """Stop recording memory, and report what an error says of it."""
        history, self._history = self._history, None
        try:
            paths = OutputPaths.of(self._log_dir, None if self._settings.dirpath is None else Path(self._settings.dirpath), self._monitor)
            if error is not None and ran_out_of_memory(error) and training is not None and paths is not None:
                last = self.profiles[-1] if self.profiles else None
                training.say(f"FlopsMonitor: out of memory, explained in {write_report(error, training, last, paths.profiles)}")
        except Exception as mistake:  # noqa: BLE001 - the training's own error is what its user has to see
            warn(f"FlopsMonitor: the report on memory failed: {type(mistake).__name__}: {mistake}")
        finally:
            if history is not None:
                history.stop()

    def fail(self, error: Exception) -> None:
        """End the watching, not the training: take everything off, and warn once."""
        self._tracking.stop()
        sessions, self._failed = dict(self.sessions), True
        self.sessions.update(dict.fromkeys(STAGES))
        results, self._results, self._training = self._results, None, None
        for session in filter(None, sessions.values()):
            for end in (session.detach, session.leave_annotations):
                with contextlib.suppress(Exception):
                    end()
        if results is not None:
            with contextlib.suppress(Exception):
                results.finish(failed=True)
        if self._settings.on_error == "raise":
            raise error
        warn(f"FlopsMonitor has failed and is off from here on; the training goes on: {type(error).__name__}: {error}")
