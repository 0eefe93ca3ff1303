"""One run of a training as a monitor sees it.

A session for each stage, and nothing of ours that could end the training.

Its ledger has what the training, torch.compile and the session itself mark.

Windows may be asked for while it goes on.
"""

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from lflops.error_guard import CleanupStack, ErrorGuard, call_each
from lflops.errors import LflopsError, UnknownTorchError
from lflops.inputs.batch import BatchReader
from lflops.inputs.devices import allocator_stats
from lflops.ledger.account import Ledger
from lflops.ledger.keeper import DeferredCalls, LedgerWriter, TrainPhases, process_age
from lflops.model.compile_guard import KeptGraphs
from lflops.monitoring.inputs.messages import Failures, warn
from lflops.monitoring.inputs.phases import RUN, Phases
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import STAGES, Stage, Training
from lflops.monitoring.outputs.loggers import log_ledger
from lflops.monitoring.outputs.out_of_memory import MemoryHistory, ran_out_of_memory, write_report
from lflops.monitoring.outputs.paths import OutputPaths
from lflops.monitoring.session import Session
from lflops.monitoring.window_publisher import WindowPublisher
from lflops.monitoring.window_requests import WindowRequests
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.ranks.collect.store import shared_store
from lflops.timing.clock import ThreadSchedule
from lflops.torch_private.dispatch_modes import sweep_modes
from lflops.torch_private.modules import Compilations, compile_seconds
from lflops.trace.record.compiled_time import CompileTracking


class RunLedger:
    """Marks what one run does, from its set-up to its end."""

    def __init__(
        self, rank: int, ranks: int, requests: WindowRequests, tape: DeferredCalls
    ) -> None:
        # of the training, once it has begun
        self._device: torch.device | None = None
        self._keeper = LedgerWriter(
            rank,
            ranks,
            tape,
            retries=self._allocator_retries,
            schedule=ThreadSchedule().read,
            hear=requests.hears,
        )
        self.recorder = recorder = self._keeper.recorder
        self.requests = requests
        self._compilations = Compilations(
            *(
                partial(tape.note, each, "compilation")
                for each in (recorder.enter, recorder.leave_last)
            )
        )
        self.reader = BatchReader()
        self._ends_step: Callable[[], bool] | None = (
            # of the training's batches, once it has begun
            None
        )
        self._logged_step: Callable[[], int] = int
        self.curves = self._keeper.curves
        self.enter, self.leave_last = self.recorder.enter, self.recorder.leave_last
        self.epoch_ends = partial(
            self.recorder.rest,
            "between_epochs",
            # what follows is between two epochs, until a batch is asked for
        )

    def install(
        self, phases: Phases, folder: Path | None, boundary: ErrorGuard, undo: CleanupStack
    ) -> None:
        """Listen from here on, until `undo` is closed.

        The folder gets the file; `None` for no file.
        """
        undo.add(self.stop, "interrupted")
        self._keeper.start(folder)
        boundary.passes = phases.tape.plays_here
        undo.add(self.requests.stop)
        self.requests.start(self._keeper.step_after)
        # of the process, whose compilations until now no one has heard
        if self._keeper.is_first:
            self.recorder.note_past("compilation", min(compile_seconds(), process_age()))
        undo.add(self._compilations.stop)
        self._compilations.listen(boundary.guard)
        undo.add(phases.listen("train", TrainPhases(self.recorder), boundary.guard))
        undo.add(phases.listen(RUN, self.recorder, boundary.guard))
        # while all of these still listen
        undo.add(phases.tape.stop)

    def begin_training(self, training: Training, stage: Stage) -> None:
        """The stage begins whose steps are those of the ledger."""
        self._ends_step, self._logged_step, self._device = (
            stage.ends_step,
            training.logged_step,
            training.device,
        )

    def batch_ends(self, batch: Any, *, touched: bool) -> None:
        """A batch of the training ends, and perhaps its step.

        `touched` is whether lflops counted, timed or traced it.
        """
        if self._ends_step is not None and self._ends_step():
            self.step_ends(
                self.recorder.read(self._logged_step() + 1),
                self.reader.shapes(batch),
                touched=touched,
            )

    def step_ends(self, read: Any, shapes: Hashable, *, touched: bool) -> None:
        """A step has ended, of which its recorder has read that."""
        self._compilations.listen_again()
        self.recorder.step_ends(read, shapes, touched=touched)

    def stop(self, ended: str) -> None:
        """End the run.

        "finished", or the class of the exception. It can be called again. An `OSError` if the file
        could not be written.
        """
        self._ends_step, self._logged_step = None, int
        self._keeper.stop(ended)
        error, self._keeper.error = self._keeper.error, None
        if error is not None:
            try:
                raise error
            finally:
                # which has this frame, and with it the training's
                del error

    @property
    def account(self) -> Ledger:
        """The account until now, or until the run ended."""
        return self._keeper.ledger()

    def _allocator_retries(self) -> int:
        """How often the allocator of the training's device has freed its cache and tried again."""
        return (
            0 if self._device is None else allocator_stats(self._device).get("num_alloc_retries", 0)
        )


# the runs of this process that are watched now
OPEN: "WeakSet[MonitoredRun]" = WeakSet()

_RUNS = itertools.count()
"""Numbers the runs on several ranks in this process.

A process group outlives them, and what they left in its store.
"""


class MonitoredRun:
    """Begins when a run is set up, and ends however the run does."""

    # how many of them this process has begun
    begun = 0

    def __init__(self, settings: Settings) -> None:
        self.sessions: dict[str, Session | None] = dict.fromkeys(
            STAGES
            # by stage; `None` is one that has not begun, or is over
        )
        self._begun: set[str] = set()
        self.profiles: list[
            Profile
            # the windows that are closed, on the main process; of more than 32, the last 32
        ] = []
        self._settings = settings
        # the run's folder; `None` where it has none
        self.log_dir: str | None = None
        self.store: Any = (
            # that all ranks reach; `None` where they have none, or there is one rank
            None
        )
        self._training: Training | None = None
        self._results: WindowPublisher | None = None
        self._history: MemoryHistory | None = None
        self._monitor = 1
        self._failed = False
        # all that the training calls of ours goes through it
        self.boundary = ErrorGuard(self.fail)
        # takes off what the driver has installed, at the end of the run
        self.undo = CleanupStack()
        self._graphs = KeptGraphs()
        self._tracking = CompileTracking()
        self._ledger: RunLedger | None = None
        self._requests: WindowRequests | None = None
        self._read_training: Callable[[], tuple[Training, Stage]] | None = (
            # reads the training off its loop, once it has begun
            None
        )
        # its stage, where one was read
        self._trained: Stage | None = None
        self._next_window = 0

    def keep_ledger(self, phases: Phases, rank: int, ranks: int, *, is_kept: bool) -> None:
        """Account for the time of this process from here on, if the loop leaves that to this run.

        The file is in the run's folder.
        """
        paths = OutputPaths.of(self.log_dir, self._settings.dirpath, 1)
        folder = None if paths is None else paths.profiles
        self._requests = WindowRequests(
            rank,
            ranks,
            self.store,
            folder,
            lambda: (own := self.sessions["train"]) is None or own.can_open,
        )
        if is_kept:
            self._ledger = RunLedger(rank, ranks, self._requests, phases.tape)
            self._ledger.install(phases, folder, self.boundary, self.undo)

    def request_window(self) -> None:
        """Ask for a window, on every rank, as soon as all can meet.

        Any thread may do so, and a handler of a signal.
        """
        if self.store is not None and self._ledger is None:
            warn(
                "request_window: no window opens: the ledger finds the step that all ranks can meet, and this monitor keeps none"
            )
        elif self._requests is not None:
            self._requests.ask()

    @property
    def lone_ledger(self) -> RunLedger | None:
        """The ledger where nothing but it listens to the training, and nothing else is about to."""
        others = (
            self._failed
            or self._requests is None
            or self._requests.due is not None
            or any(self.sessions.values())
        )
        return None if others or not self._begun.issuperset(self._settings.stages) else self._ledger

    @property
    def ledger(self) -> Ledger | None:
        """Every second of the run so far, by category; `None` where no ledger is kept."""
        return None if self._ledger is None else self._ledger.account

    def enters(self, category: str) -> None:
        """From here on the time belongs to this category of the ledger, until `leaves` is called with it."""
        if self._ledger is not None and not self._failed:
            with self.boundary:
                self._ledger.enter(category)

    def leaves(self, category: str) -> None:
        """The time belongs to what was running before."""
        if self._ledger is not None and not self._failed:
            with self.boundary:
                self._ledger.leave_last(category)

    def belongs(self, nanoseconds: int, phase: str, category: str) -> None:
        """So many of this step's phase belong to this category of the ledger."""
        if self._ledger is not None and not self._failed:
            with self.boundary:
                self._ledger.recorder.move(nanoseconds, phase, category)

    def epoch_ends(self) -> None:
        if self._ledger is not None and not self._failed:
            with self.boundary:
                self._ledger.epoch_ends()

    def open(self, name: str, ranks: int) -> None:
        """The run is about to begin.

        Graphs that are compiled from here on are kept, and tracked if that is asked for.

        All ranks call this with the same name, which no other of the loop's monitors has.
        """
        OPEN.add(self)
        MonitoredRun.begun += 1
        self._graphs.start()
        if self._settings.looks_inside_compiled:
            self._tracking.start()
        if ranks > 1:
            self.store = shared_store(
                f"lflops/{name}/{next(_RUNS)}", timeout=self._settings.gather_timeout
            )

    def begin(
        self,
        name: str,
        training: Callable[[], Training],
        stage: Callable[[], Stage],
        monitor: int = 1,
    ) -> None:
        """A stage begins, or comes again.

        A `LflopsError` says that an argument is not for this model, or these ranks.

        `training` reads the run off its loop when its first stage begins, `stage` the stage when it
        begins for the first time; `monitor` says which of the loop's monitors it is for, from 1.
        """
        if self._failed or (name != "train" and name not in self._settings.stages):
            return
        self.enters("lflops")
        with self.boundary:
            # torch.compile may have been loaded since
            self._graphs.start()
        if name in self._begun:
            self.guarded(name, Session.resume)
        elif name in self._settings.stages:
            wrong: LflopsError | None = None
            with self.boundary:
                try:
                    self._begin(name, training, stage, monitor)
                except UnknownTorchError:
                    raise
                except LflopsError as error:
                    wrong = error
            if wrong is not None:
                self.take_off()
                raise wrong
        if self._settings.on_oom and self._history is None and not self._failed:
            with self.boundary:
                self._history = MemoryHistory((self._training or training()).device)
                self.undo.add(self._history.stop)
                self._history.start()
        if name == "train" and not self._failed:
            self._monitor, self._read_training = (
                monitor,
                lambda: (self._training or training(), self._trained or stage()),
            )
            if self._ledger is not None:
                with self.boundary:
                    self._ledger.begin_training(*self._read_training())
        self.leaves("lflops")

    def _begin(
        self, name: str, training: Callable[[], Training], stage: Callable[[], Stage], monitor: int
    ) -> None:
        if self._training is None:
            self._training, self._monitor = training(), monitor
        watched = self._guarded_stage(stage())
        session = Session(
            self._settings,
            self._training,
            watched,
            results=self._results_of(self._training),
            guard=self.boundary.guard,
        )
        if self._tracking.refusal is not None:
            session.notes.append(
                Note(code="compiled_unopened", subject="", values={"error": self._tracking.refusal})
            )
        self.sessions[name] = session
        if name == "train":
            self._trained = watched
        session.begin()
        self._begun.add(name)

    def _guarded_stage(self, stage: Stage) -> Stage:
        return replace(stage, listen=partial(stage.listen, guard=self.boundary.guard))

    def _results_of(self, training: Training) -> WindowPublisher:
        if self._results is None:
            self._results = WindowPublisher(
                training, self._settings, self.log_dir, monitor=self._monitor, store=self.store
            )
            self._results.profiles = self.profiles
            if self._ledger is not None:
                self._results.run_curves = self._ledger.curves
        return self._results

    def batch_begins(self, name: str, batch: Any) -> None:
        if self._failed:
            # one that counted may have been taken off within a backward pass
            sweep_modes()
        if (session := self.sessions[name]) is not None:
            with self.boundary:
                if self._ledger is None or session.is_plain:
                    session.batch_begins(batch)
                else:
                    self._ledger.enter("lflops")
                    session.batch_begins(batch)
                    self._ledger.leave_last("lflops")

    def batch_ends(self, name: str, batch: Any) -> None:
        session, ledger = self.sessions[name], None if self._failed else self._ledger
        with self.boundary:
            if ledger is not None:
                ledger.enter("lflops")
                if name == "train":
                    ledger.batch_ends(batch, touched=session is not None and session.touches_step)
            if session is not None:
                session.batch_ends(batch)
            if ledger is not None:
                ledger.leave_last("lflops")
        if session is not None and session.over:
            self.sessions[name] = None
            if name == "train":
                self._next_window, session = session.next_window or 0, None
        if name == "train" and self._requests is not None and self._requests.due is not None:
            self.enters("lflops")
            with self.boundary:
                self._open_window(self._requests, session, self._requests.due)
            self.leaves("lflops")

    def _open_window(self, requests: WindowRequests, session: Session | None, due: int) -> None:
        """Open a window that was asked for, if its step has come: the next scheduled one, or one more.

        A running one is waited for.
        """
        if self._read_training is None or self._failed:
            requests.due = None
            return
        training, stage = self._read_training()
        done = training.logged_step() + 1
        if not stage.ends_step() or done < due:
            return
        if done > due > 0:
            warn(
                f"the window that was asked for opens after step {done} on rank {training.rank}, which had passed step {due} of the others"
            )
        # a running window is waited for
        requests.due = 0
        # no window was scheduled
        if self._training is None:
            self._training, self._trained = training, self._guarded_stage(stage)
        if session is not None and not session.bring_forward():
            if session.next_window is None:
                return
            self._next_window = session.next_window
            session.close()
            session = None
        requests.due = None
        if session is None:
            once = replace(self._settings.schedule, skip_first=0, wait=0, repeat=1)
            asked, endless = (
                replace(self._settings, schedule=once),
                replace(self._trained or stage, batches_left=math.inf),
            )
            results, guard = self._results_of(training), self.boundary.guard
            session = Session(
                asked, training, endless, results=results, guard=guard, number=self._next_window
            )
            self.sessions["train"] = session
            session.begin()

    def guarded(self, name: str, action: Callable[[Session], None]) -> None:
        """Do something with a stage's session, if it has one."""
        if (session := self.sessions[name]) is not None:
            with self.boundary:
                action(session)
            if session.over:
                self.sessions[name] = None

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, or left by an error: tell what there is to tell."""
        training = self._training
        if training is None and self._read_training is not None and not self._failed:
            with self.boundary:
                training, _ = self._read_training()
        self._read_training = None
        self.enters("lflops")
        with self.boundary:
            if self._requests is not None:
                self._requests.stop()
        for name in STAGES:
            self.guarded(name, lambda session: session.close(error))
        with self.boundary:
            if self._results is not None:
                self._results.finish(failed=error is not None)
            self._results = self._training = self._trained = None
        with self.boundary:
            if self._ledger is not None:
                with Failures(raised=self._settings.on_error == "raise").contained("the ledger"):
                    self._ledger.stop("finished" if error is None else type(error).__name__)
                    if training is not None and training.is_main:
                        paths = OutputPaths.of(self.log_dir, self._settings.dirpath, self._monitor)
                        log_ledger(self._ledger.account, paths, training.say)
        with self.boundary:
            if self._history is not None:
                self._end_history(error, training)
            self.take_off()

    def _end_history(self, error: BaseException | None, training: Training | None) -> None:
        self._history = None
        try:
            paths = OutputPaths.of(self.log_dir, self._settings.dirpath, self._monitor)
            if (
                error is not None
                and ran_out_of_memory(error)
                and training is not None
                and paths is not None
            ):
                last = self.profiles[-1] if self.profiles else None
                training.say(
                    f"FlopsMonitor: out of memory, explained in {write_report(error, training, last, paths.profiles)}"
                )
        except Exception as mistake:  # noqa: BLE001 - the training's own error is what its user has to see
            warn(f"FlopsMonitor: the report on memory failed: {type(mistake).__name__}: {mistake}")

    def fail(self, error: BaseException) -> None:
        """Take everything off.

        After an error of ours, also warn once and watch no more; after an interrupt the run can
        still be closed.
        """
        failed_before, self._failed = self._failed, True
        try:
            self.take_off()
            if not isinstance(error, Exception):
                return
            results, self._results, self._training, self._trained = self._results, None, None, None
            if results is not None:
                results.finish(failed=True)
        except Exception:  # noqa: BLE001 - the first error is told, not those that follow from it
            self._results = self._training = self._trained = None
        if self._settings.on_error == "raise":
            raise error
        if not failed_before:
            warn(
                f"FlopsMonitor has failed and is off from here on; the training goes on: {type(error).__name__}: {error}"
            )

    def take_off(self) -> None:
        """Take off every hook, wrapper and mode of this run. It can be called again."""
        sessions = [each for each in self.sessions.values() if each is not None]
        parts = [part for each in sessions for part in (each.detach, each.leave_annotations)]
        parts += [
            sweep_modes,
            self._graphs.stop,
            self._tracking.stop,
            self.undo.close,
            partial(OPEN.discard, self),
        ]
        call_each([*parts, partial(self.sessions.update, dict.fromkeys(STAGES))])


NO_RUN = MonitoredRun(
    Settings(hardware=None)
    # in place of one where none is set up: as an interrupted one, it does nothing
)
NO_RUN.fail(KeyboardInterrupt())
