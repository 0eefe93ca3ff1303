"""Monitor one run: create a session for each stage, keep the ledger, and open requested windows.

The ledger is the time account of the whole run. A window is a few consecutive steps that lflops
profiles. All calls from a training loop go through the run's error guard.
"""

import itertools
import math
import os
from collections.abc import Callable
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
from lflops.ledger.writer import LedgerWriter, process_age
from lflops.model.compile_guard import KeptGraphs
from lflops.monitoring.inputs.messages import Failures, monitor_name, warn
from lflops.monitoring.inputs.phases import Phases
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import STAGES, Stage, Training
from lflops.monitoring.outputs.loggers import Reporters, log_run
from lflops.monitoring.outputs.out_of_memory import MemoryHistory, ran_out_of_memory, write_report
from lflops.monitoring.outputs.paths import OutputPaths
from lflops.monitoring.session import Session
from lflops.monitoring.window_publisher import WindowPublisher
from lflops.monitoring.window_requests import WindowRequests
from lflops.phase_log import BEGIN, END, MOVE, PAST, REST, PhaseLog
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.ranks.collect.store import shared_store
from lflops.timing.clock import ThreadSchedule
from lflops.torch_private.dispatch_modes import sweep_modes
from lflops.torch_private.modules import Compilations, compile_seconds
from lflops.trace.record.compiled_time import CompileTracking


class RunLedger:
    """Keeps the ledger of one run, from the run's set-up to its end.

    The ledger is the run's time account: every second belongs to a category, such as validation.

    Attributes:
        ends_step: Returns whether the batch that is ending completes a training step. Before
            training has begun, it returns `False`.
        logged_step: Returns the step on the loggers' x-axis.
        counters: Reads the counters of the training thread at the end of a step.
        requests: The user's requests for windows.
        listen_again: Registers the callback for compilations again, if torch has removed it.
        end_step: Records the end of a step.
        curves: Returns the ledger's values for the loggers' curves, such as the number of slow
            steps so far.
    """

    def __init__(self, phases: Phases, rank: int, ranks: int, requests: WindowRequests) -> None:
        self._device: torch.device | None = None
        self.ends_step: Callable[[], bool] = bool
        self.logged_step: Callable[[], int] = int
        self._log = phases.log
        self._deferred = phases.deferred
        self._writer = LedgerWriter(
            phases.log,
            phases.deferred,
            rank=rank,
            ranks=ranks,
            retries=self._allocator_retries,
            device=self._device_type,
            schedule=ThreadSchedule().read,
            look_for_request=requests.look_for_request,
        )
        self.counters = self._writer.counters
        self.requests = requests
        self._compilations = Compilations(
            partial(phases.deferred.note, self.begin, "compilation"),
            partial(phases.deferred.note, self.end, "compilation"),
        )
        self.listen_again = self._compilations.listen_again
        self.end_step = self._writer.end_step
        self.curves = self._writer.curves

    def install(self, folder: Path | None, guard: ErrorGuard, cleanup: CleanupStack) -> None:
        """Start the ledger, which is kept until `cleanup` is closed.

        If there is a `folder`, the ledger is written to a file in it.
        """
        cleanup.add(self.stop, "interrupted")
        self._writer.start(folder)
        # `DeferredCalls` itself handles errors of the calls that it makes
        guard.passes = self._deferred.runs_here
        cleanup.add(self.requests.stop)
        self.requests.start(self._writer.step_after)
        if self._writer.is_first:
            # add the time of earlier compilations in this process, because nothing has recorded it
            seconds = min(compile_seconds(), process_age())
            self._log.append((self._log.clock(), PAST, "compilation", int(seconds * 1e9)))
        cleanup.add(self._compilations.stop)
        self._compilations.listen(guard.guard)
        # This is added last, so `cleanup` calls it first, while everything above still runs.
        cleanup.add(self._deferred.stop)

    def begin(self, category: str) -> None:
        """Assign the time from now until `end(category)` to this category."""
        self._log.append((self._log.clock(), BEGIN, category, None))

    def end(self, category: str) -> None:
        """Stop assigning time to this category, and to all categories that began inside it."""
        self._log.append((self._log.clock(), END, category, None))

    def rest(self, category: str) -> None:
        """From now on, assign time that belongs to no other category to this category."""
        self._log.append((self._log.clock(), REST, category, None))

    def move(self, nanoseconds: int, phase: str, category: str) -> None:
        """Move the last `nanoseconds` of a phase to a category of the ledger.

        This time then no longer counts as part of the phase.
        """
        self._log.append((self._log.clock(), MOVE, (phase, category), nanoseconds))

    def begin_training(self, training: Training, stage: Stage) -> None:
        """From now on, record the steps of this training stage in the ledger."""
        self.ends_step = stage.ends_step
        self.logged_step = training.logged_step
        self._writer.knows_step = training.knows_step
        self._device = training.device

    def stop(self, ended: str) -> None:
        """End the ledger. Can be called repeatedly.

        Args:
            ended: "finished", or the class of the exception that ended the run.

        Raises:
            OSError: If the file could not be written.
        """
        self.ends_step = bool
        self.logged_step = int
        self._writer.stop(ended)
        # keep only the result of `knows_step`, because the function itself refers to the loop
        self._writer.knows_step = partial(bool, self._writer.knows_step())
        error = self._writer.error
        self._writer.error = None
        if error is not None:
            try:
                raise error
            finally:
                # the traceback of the error refers to this frame, and so to the frames of the
                # training run
                del error

    @property
    def account(self) -> Ledger:
        """The ledger so far, or the whole ledger if the run has ended."""
        return self._writer.ledger()

    def _device_type(self) -> str:
        return "" if self._device is None else self._device.type

    def _allocator_retries(self) -> int:
        """Return how often the device's allocator has freed its cache and tried again."""
        if self._device is None:
            return 0
        return allocator_stats(self._device).get("num_alloc_retries", 0)


# the runs of this process that are monitored now
OPEN: "WeakSet[MonitoredRun]" = WeakSet()

_RUNS = itertools.count()
"""Numbers the runs that have several ranks. A run's keys in the ranks' store contain its number.

Several runs can use the same store one after another. With the number, their keys differ.
"""


class MonitoredRun:
    """Monitors one run, from its set-up to its end.

    Attributes:
        begun: The number of runs that this process has begun.
        sessions: For each stage, the session that monitors it; `None` before the stage begins, and
            after the session has nothing left to do.
        profiles: The profiles of the last 32 closed windows. Empty if this is not the main process.
        log_dir: The run's folder, or `None`.
        store: A store that all ranks can reach. `None` if there is no store or only one rank.
        guard: The error guard for all calls from the training loop.
        cleanup: Removes what the integration has installed, at the end of the run.
    """

    begun = 0

    def __init__(self, settings: Settings) -> None:
        self.sessions: dict[str, Session | None] = dict.fromkeys(STAGES)
        # the stages for which a session was created
        self._begun: set[str] = set()
        self.profiles: list[Profile] = []
        self._settings = settings
        self.log_dir: str | None = None
        self.store: Any = None
        self._training: Training | None = None
        self._results: WindowPublisher | None = None
        self._history: MemoryHistory | None = None
        self._monitor = 1
        self._failed = False
        self.guard = ErrorGuard(self.fail)
        self.cleanup = CleanupStack()
        self._graphs = KeptGraphs()
        self._tracking = CompileTracking()
        self._ledger: RunLedger | None = None
        self._requests: WindowRequests | None = None
        # reads the run and its training stage from the loop; `None` before training has begun
        self._read_training: Callable[[], tuple[Training, Stage]] | None = None
        # the training stage, if it has a session or had one
        self._trained: Stage | None = None
        self._next_window = 0
        self._log = PhaseLog()
        self._reader = BatchReader()

    def keep_ledger(self, phases: Phases, rank: int, ranks: int, *, is_kept: bool) -> None:
        """Start to accept requests for windows and, if `is_kept` is true, to keep a ledger.

        The ledger is written to a file in the run's folder.
        """
        self._log = phases.log
        paths = OutputPaths.of(self.log_dir, self._settings.dirpath, 1)
        folder = None if paths is None else paths.profiles
        self._requests = WindowRequests(rank, ranks, self.store, folder, self._can_open_window)
        if is_kept:
            self._ledger = RunLedger(phases, rank, ranks, self._requests)
            self._ledger.install(folder, self.guard, self.cleanup)

    def _can_open_window(self) -> bool:
        session = self.sessions["train"]
        return session is None or session.can_open

    def request_window(self) -> None:
        """Request a window: a few consecutive steps that lflops profiles.

        The window opens on all ranks after the same step, as soon as all ranks can open it.

        Any thread and a signal handler may call this method.
        """
        if self.store is not None and self._ledger is None:
            warn(
                "request_window: with several ranks, a window can only be requested with "
                "ledger=True, because the ranks use the ledger to agree on a step"
            )
        elif self._requests is not None:
            self._requests.ask()

    @property
    def lone_ledger(self) -> RunLedger | None:
        """The ledger, if steps need no other work than to be recorded in it; otherwise `None`.

        Steps need more work if there is a session, if a session may still begin, or if a window is
        requested.
        """
        if self._failed or self._requests is None or self._requests.due is not None:
            return None
        if any(self.sessions.values()) or not self._begun.issuperset(self._settings.stages):
            return None
        return self._ledger

    @property
    def ledger(self) -> Ledger | None:
        """The time of the run so far by category, or `None` if no ledger is kept."""
        if self._ledger is None:
            return None
        return self._ledger.account

    def enters(self, category: str) -> None:
        """Assign time to this category of the ledger until `leaves(category)` is called."""
        if self._ledger is not None and not self._failed:
            with self.guard:
                self._ledger.begin(category)

    def leaves(self, category: str) -> None:
        """From now on, assign time as before `enters(category)` was called."""
        if self._ledger is not None and not self._failed:
            with self.guard:
                self._ledger.end(category)

    def move_time(self, nanoseconds: int, phase: str, category: str) -> None:
        """Move the last `nanoseconds` of a phase in this step to a category of the ledger."""
        if self._ledger is not None and not self._failed:
            with self.guard:
                self._ledger.move(nanoseconds, phase, category)

    def epoch_ends(self) -> None:
        """Assign the time until the next batch is requested to the category `between_epochs`."""
        if self._ledger is not None and not self._failed:
            with self.guard:
                self._ledger.rest("between_epochs")

    def open(self, name: str, ranks: int) -> None:
        """Prepare for the run.

        From now on, lflops keeps a copy of each graph that torch.compile creates, because compiled
        code is counted from these graphs. With `compiled="modules"`, lflops also records how each
        graph is compiled, so that the graph's time can be divided among modules.

        Args:
            name: The name of the monitor. It is the same on all ranks, and unique among the
                monitors of the loop.
            ranks: The number of ranks.
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
        """Begin a stage, or resume it.

        Args:
            name: The name of the stage.
            training: Creates the description of the run from the loop. Called when the first stage
                begins.
            stage: Creates the description of the stage from the loop. Called when the stage begins
                for the first time.
            monitor: The number of the monitor among the loop's monitors, from 1.

        Raises:
            LflopsError: If an argument of the monitor does not fit the model or the ranks.
        """
        if self._failed or (name != "train" and name not in self._settings.stages):
            return
        self.enters("lflops")
        with self.guard:
            # torch.compile may have been loaded since `open`
            self._graphs.start()
        if name in self._begun:
            self.guarded(name, Session.resume)
        elif name in self._settings.stages:
            wrong: LflopsError | None = None
            with self.guard:
                try:
                    self._begin(name, training, stage, monitor)
                except UnknownTorchError:
                    raise
                except LflopsError as error:
                    wrong = error
            if wrong is not None:
                self.remove()
                raise wrong
        if self._settings.on_oom and self._history is None and not self._failed:
            with self.guard:
                self._history = MemoryHistory((self._training or training()).device)
                self.cleanup.add(self._history.stop)
                self._history.start()
        if name == "train" and not self._failed:
            self._monitor = monitor
            self._read_training = lambda: (
                self._training or training(),
                self._trained or stage(),
            )
            if self._ledger is not None:
                with self.guard:
                    self._ledger.begin_training(*self._read_training())
        self.leaves("lflops")

    def _begin(
        self, name: str, training: Callable[[], Training], stage: Callable[[], Stage], monitor: int
    ) -> None:
        if self._training is None:
            self._training = training()
            self._monitor = monitor
        watched = self._guarded_stage(stage())
        session = Session(
            self._settings,
            self._training,
            watched,
            results=self._results_of(self._training),
            guard=self.guard.guard,
        )
        refusal = self._tracking.refusal
        if refusal is not None:
            note = Note(code="compiled_unopened", subject="", values={"error": refusal})
            session.notes.append(note)
        self.sessions[name] = session
        if name == "train":
            self._trained = watched
        session.begin()
        self._begun.add(name)

    def _guarded_stage(self, stage: Stage) -> Stage:
        return replace(stage, listen=partial(stage.listen, guard=self.guard.guard))

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
        """Begin a batch of a stage."""
        if self._failed:
            # A dispatch mode that counts operators may still be on torch's stack of modes, if
            # counting ended within a backward pass.
            sweep_modes()
        session = self.sessions[name]
        if session is None:
            return
        fast_path = session.fast_path
        if len(fast_path.steps) < fast_path.limit and not fast_path.in_batch:
            fast_path.in_batch = True
            return
        try:
            if self._ledger is None:
                session.batch_begins(batch)
            else:
                self._ledger.begin("lflops")
                session.batch_begins(batch)
                self._ledger.end("lflops")
        except BaseException as error:
            if not self.guard.contains(error):
                raise

    def batch_ends(self, name: str, batch: Any) -> None:
        """End a batch of a stage. If a requested window is due, open it."""
        session = self.sessions[name]
        ledger = None if self._failed else self._ledger
        if session is not None or ledger is not None:
            log = self._log
            log.append((log.clock(), BEGIN, "lflops", None))
            try:
                shapes = self._reader.shapes(batch)
                if ledger is not None and name == "train" and ledger.ends_step():
                    is_touched = session is not None and session.mode.touches_step
                    ledger.end_step(ledger.logged_step() + 1, shapes, touched=is_touched)
                is_fast = False
                if session is not None:
                    fast_path = session.fast_path
                    fast_path.in_batch = False
                    # Most steps take the fast path.
                    is_open = len(fast_path.steps) < fast_path.limit
                    is_fast = is_open and fast_path.note(shapes)
                    if not is_fast:
                        session.batch_ends(batch)
                if ledger is not None and not is_fast:
                    ledger.listen_again()
            except BaseException as error:
                if not self.guard.contains(error):
                    raise
            finally:
                log.append((log.clock(), END, "lflops", None))
            if session is not None and session.over:
                session = self._session_is_over(name, session)
        if name == "train" and self._requests is not None and self._requests.due is not None:
            self.enters("lflops")
            with self.guard:
                self._open_window(self._requests, session, self._requests.due)
            self.leaves("lflops")

    def _session_is_over(self, name: str, session: Session) -> Session | None:
        """Drop the session of the stage `name`, because it has nothing left to do.

        Returns the session that `_open_window` can use. It is `None` for the training stage,
        because a requested window then needs a new session.
        """
        self.sessions[name] = None
        if name != "train":
            return session
        self._next_window = session.next_window or 0
        return None

    def _open_window(self, requests: WindowRequests, session: Session | None, due: int) -> None:
        """Open a requested window if step `due` has ended.

        If the schedule is waiting for its next window, that window opens early. After the end of
        the schedule, an extra window opens. While another window is open, the request waits.
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
                f"on rank {training.rank}, the requested window opens after step {done}, not after "
                f"step {due} as on the other ranks, because the request arrived too late"
            )
        # from now on, the window may open at the end of any step
        requests.due = 0
        if self._training is None:
            # no window was scheduled
            self._training = training
            self._trained = self._guarded_stage(stage)
        if session is not None and not session.bring_forward():
            if session.next_window is None:
                return
            self._next_window = session.next_window
            session.close()
            session = None
        requests.due = None
        if session is None:
            self._begin_extra_window(training, self._trained or stage)

    def _begin_extra_window(self, training: Training, stage: Stage) -> None:
        """Begin a session of the training stage for one more window."""
        schedule = replace(self._settings.schedule, skip_first=0, wait=0, repeat=1)
        session = Session(
            replace(self._settings, schedule=schedule),
            training,
            replace(stage, batches_left=math.inf),
            results=self._results_of(training),
            guard=self.guard.guard,
            number=self._next_window,
        )
        self.sessions["train"] = session
        session.begin()

    def guarded(self, name: str, action: Callable[[Session], None]) -> None:
        """Call `action` with the session of the stage `name`, if there is one.

        The error guard handles errors of this call.
        """
        session = self.sessions[name]
        if session is None:
            return
        with self.guard:
            action(session)
        if session.over:
            self.sessions[name] = None

    def close(self, error: BaseException | None = None) -> None:
        """End the run, normally or after `error`, and report its open windows and its ledger."""
        training = self._training
        if training is None and self._read_training is not None and not self._failed:
            with self.guard:
                training, _ = self._read_training()
        self._read_training = None
        self.enters("lflops")
        with self.guard:
            if self._requests is not None:
                self._requests.stop()
        for name in STAGES:
            self.guarded(name, lambda session: session.close(error))
        reporters = None
        if self._results is not None:
            reporters = self._results.reporters
        with self.guard:
            if self._results is not None:
                self._results.finish(failed=error is not None)
            self._release_training()
        with self.guard:
            if self._ledger is not None:
                self._end_ledger(self._ledger, error, training, reporters)
        with self.guard:
            if self._history is not None:
                self._end_history(error, training)
            self.remove()

    def _release_training(self) -> None:
        self._results = None
        self._training = None
        self._trained = None

    def _paths(self) -> OutputPaths | None:
        return OutputPaths.of(self.log_dir, self._settings.dirpath, self._monitor)

    def _end_ledger(
        self,
        ledger: RunLedger,
        error: BaseException | None,
        training: Training | None,
        reporters: Reporters | None,
    ) -> None:
        failures = Failures(raised=self._settings.on_error == "raise")
        with failures.contained("the ledger"):
            ledger.stop("finished" if error is None else type(error).__name__)
            if training is None or not training.is_main:
                return
            account = ledger.account
            window = None
            if reporters is not None:
                window = reporters.window
            only_on_request = not self._settings.stages
            log_run(account, window, self._paths(), training.log, only_on_request=only_on_request)
            if reporters is not None:
                reporters.save_run_page(self.profiles, account)

    def _end_history(self, error: BaseException | None, training: Training | None) -> None:
        """Write a report if memory ran out. A failure to write it only causes a warning."""
        self._history = None
        if error is None or training is None or not ran_out_of_memory(error):
            return
        try:
            paths = self._paths()
            if paths is not None:
                last = self.profiles[-1] if self.profiles else None
                report = write_report(error, training, last, paths.profiles)
                training.log(f"{monitor_name()}: memory ran out; this file explains why: {report}")
        except Exception as mistake:  # noqa: BLE001 - becomes a warning
            warn(
                f"{monitor_name()}: the report about memory could not be written: "
                f"{type(mistake).__name__}: {mistake}"
            )

    def fail(self, error: BaseException) -> None:
        """Remove everything that was installed, because lflops has failed or was interrupted.

        After a failure, monitoring stops. The failure becomes one warning, or is raised if the
        setting `on_error` requires it. After an interrupt, `close` can still be called.
        """
        failed_before = self._failed
        self._failed = True
        try:
            self.remove()
            if not isinstance(error, Exception):
                return
            results = self._results
            self._release_training()
            if results is not None:
                results.finish(failed=True)
        except Exception:  # noqa: BLE001 - only the first error is reported
            self._release_training()
        if self._settings.on_error == "raise":
            raise error
        if not failed_before:
            warn(
                f"{monitor_name()} has failed and stops monitoring; training continues: "
                f"{type(error).__name__}: {error}"
            )

    def leave_to_parent(self) -> None:
        """Stop monitoring in a forked process, because the run belongs to the parent process."""
        self._failed = True
        # Everything that is installed stays, because it may belong to threads that do not exist in
        # this process.
        self.cleanup = CleanupStack()
        self._release_training()
        self._read_training = None
        self._requests = None
        self._ledger = None
        self._history = None
        self.sessions.update(dict.fromkeys(STAGES))

    def remove(self) -> None:
        """Remove every hook, wrapper and mode of this run. Can be called repeatedly."""
        parts: list[Callable[[], object]] = []
        for session in self.sessions.values():
            if session is not None:
                parts += [session.detach, session.leave_annotations]
        parts += [
            sweep_modes,
            self._graphs.stop,
            self._tracking.stop,
            self.cleanup.close,
            partial(OPEN.discard, self),
            partial(self.sessions.update, dict.fromkeys(STAGES)),
        ]
        call_each(parts)


def _leave_to_parent() -> None:
    for run in tuple(OPEN):
        run.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

# Stands for the run before one is set up. Like an interrupted run, it does nothing.
NO_RUN = MonitoredRun(Settings(hardware=None))
NO_RUN.fail(KeyboardInterrupt())
