"""Monitor one stage of a run, such as training.

A session follows the user's schedule: it opens and closes windows (a few consecutive steps that
lflops profiles), and chooses the mode in which each step runs, for example counting or module
timing. Most steps need no work at their end and take a fast path, on which only a clock is read.
All other steps take the slow path.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.errors import CountError
from lflops.files import path_text
from lflops.inputs.run_info import with_allocator_peaks
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Stage, Training
from lflops.monitoring.schedule import Plan, Schedule, ScheduleCursor
from lflops.monitoring.window.counting_step import CountingStepMode, StepCounter, has_backward
from lflops.monitoring.window.live_metrics import LiveMetrics, PointPause
from lflops.monitoring.window.step_modes import ModuleTimingMode, StackSamplingMode, StepMode
from lflops.monitoring.window.step_timer import MAX_PENDING_STEPS, StepTimer, TimedStep
from lflops.monitoring.window.traced_steps import TraceAnnotations, TracedMode
from lflops.monitoring.window.window import WANTED, Window
from lflops.monitoring.window_publisher import WindowPublisher
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step, is_compared
from lflops.timing.clock import (
    Clock,
    HostClock,
    StreamClock,
    WaitingClock,
    device_clock,
    event_seconds,
)
from lflops.timing.phase_waits import PhaseWaits
from lflops.timing.step_phases import LoggedPhases, MarkedPhases
from lflops.trace.record.attach_trace import with_trace
from lflops.trace.record.tracer import Recording, Tracer

# Ranks send the times of their unprofiled steps to rank 0 about every `SHARE_EVERY` steps. If
# loggers draw curves, ranks send them about once per point of a curve, but at most every
# `SHARE_LEAST` steps, because the next step on rank 0 is then not typical.
SHARE_EVERY = 50
SHARE_LEAST = 9
# If recording a timing event takes more than this many seconds, phases are timed in only one of
# `PHASES_EVERY` steps. An NVIDIA GPU takes about 6 µs.
EXPENSIVE_EVENT = 30e-6
PHASES_EVERY = 8

# the mode of all steps that have no other mode
UNPROFILED = StepMode()


class Session:
    """Monitors one stage of a run: training, or another stage that may run many times.

    Attributes:
        over: Whether the session has nothing left to do.
        fast_path: The steps on the fast path since the last step on the slow path.
        mode: The mode of the current step.
        notes: Notes for the profile of every window.
    """

    def __init__(
        self,
        settings: Settings,
        training: Training,
        stage: Stage,
        *,
        results: WindowPublisher,
        guard: Guard,
        number: int = 0,
    ) -> None:
        self.over = False
        self.notes: list[Note] = []
        self._settings = settings
        self._training = training
        self._stage = stage
        self._results = results
        self._guard = guard
        self._counter = StepCounter(settings, training, stage, results.topology, guard)
        self._tree = ModuleTree({"": training.model})
        self._traces_steps = settings.trace and results.paths is not None
        self._cursor = ScheduleCursor(self._plan(), number)
        self._clock = self._device_clock()
        # The windows that are not reported yet. The last one is the current window of the schedule,
        # unless the schedule is over. Earlier windows have ended, but still miss some steps.
        self._windows = [Window(number, 0)]
        # The mode of the current step. The modes of the window that opened last, keyed by the phase
        # of the schedule, are in `_modes`.
        self.mode = UNPROFILED
        self._modes: dict[str, StepMode] = {}
        self._trace_notes: list[Note] = []
        self._annotations = TraceAnnotations(training)
        # true while a trace is being annotated
        self._is_annotating = False
        self._marked_phases = self._device_phases()
        host_clock = self._clock if self._marked_phases is None else HostClock()
        self._logged_phases = LoggedPhases(stage.log, stage.name, host_clock)
        self._step_timer = self._new_step_timer()
        self.fast_path = self._step_timer.fast_path
        self._live_metrics = self._new_live_metrics()
        self._point_pause = PointPause()
        self._listening = CleanupStack()
        # The unprofiled steps that are not sent to rank 0 yet; `None` if no ranks are compared.
        shares_steps = stage.learns and results.compares_ranks
        self._unshared: list[TimedStep] | None = [] if shares_steps else None
        # measures how long the training thread waits for a core in these steps
        self._phase_waits: PhaseWaits | None = None
        if shares_steps and isinstance(self._clock, HostClock):
            self._phase_waits = PhaseWaits(self._clock)

    def _device_clock(self) -> Clock:
        """Return the clock of the run's device.

        If the device cannot take timestamps itself, a note is added.
        """
        device = self._training.device
        if device.type == "cpu":
            return HostClock()
        clock: Clock
        try:
            clock = device_clock(device)
        except CountError:
            # torch cannot wait for this device
            clock = HostClock()
        if not isinstance(clock, StreamClock):
            waits = isinstance(clock, WaitingClock)
            values = {"waits": int(waits)}
            self.notes.append(Note(code="no_timed_events", subject=device.type, values=values))
        return clock

    def _plan(self) -> Plan:
        """Return the schedule, rounded to whole steps and shortened to fit the run.

        Each change is logged and added to the notes.
        """
        schedule = self._settings.schedule
        accumulation = self._stage.accumulation()
        batches = self._stage.batches_left
        plan = Plan.of(
            schedule, accumulation=accumulation, batches=batches, traced=self._traces_steps
        )
        changes = _schedule_changes(schedule, plan, accumulation, batches)
        for note, message in changes:
            self.notes.append(note)
            self._training.log(message)
        return plan

    def _device_phases(self) -> MarkedPhases | None:
        """Return an object that times phases with the device's clock.

        Returns `None` if the host clock is enough to time them.
        """
        clock = self._clock
        if not isinstance(clock, StreamClock):
            return None
        is_expensive = (event_seconds(clock.device) or 0.0) > EXPENSIVE_EVENT
        return MarkedPhases(clock, every=PHASES_EVERY if is_expensive else 1)

    def _new_step_timer(self) -> StepTimer:
        training = self._training
        return StepTimer(
            self._logged_phases,
            self._marked_phases,
            self._settings.units,
            training.logged_step(),
            updating=self._stage.updates,
            scaled=self._stage.learns and training.scales_gradients,
            on_ranks=training.world_size > 1,
            loader_size=self._stage.loader_size,
        )

    def _new_live_metrics(self) -> LiveMetrics | None:
        """Return an object that collects metrics over all steps, or `None` if nothing logs them."""
        training = self._training
        is_logged = self._results.reporters is not None and training.loggers and training.log_every
        if not (self._stage.learns and self._settings.track and is_logged):
            return None
        replicas = self._results.topology.sizes.get("data")
        return LiveMetrics(self._step_timer.seconds, replicas)

    def begin(self) -> None:
        """Begin the stage for the first time.

        If this method fails, `detach` removes everything that was installed before the failure.
        """
        self._step_timer.install(self._guard)
        self._open_window()
        self.mode = self._next_mode()
        self.resume()

    def resume(self) -> None:
        """Begin the stage, or resume it.

        The time since the last step belongs to no step. The first step is marked as warm-up, so
        that it is not treated as typical.
        """
        if not self._step_timer.times_phases:
            return
        self._logged_phases.connect()
        if self._marked_phases is not None:
            self._listening.add(self._stage.listen(self._marked_phases))
        if self._phase_waits is not None:
            self._listening.add(self._stage.listen(self._phase_waits))
        self._flush_fast_path()
        self._step_timer.resume()
        self._step_timer.mark("warmup")
        self.mode.begin_step()

    def pause(self) -> None:
        """Pause the stage, which can resume later. If a trace is being recorded, it ends now."""
        self._listening.close()
        self._logged_phases.disconnect()
        for mode in self._modes.values():
            mode.pause()

    def epoch_begins(self) -> None:
        """Make the next step take the slow path.

        The fast path is only for steps with one batch, and a new epoch may begin to accumulate
        gradients over several batches.
        """
        self._step_timer.allow_fast_path(0)

    def batch_begins(self, batch: Any) -> None:
        """Begin a batch in the mode of its step.

        For a batch on the fast path, this method is called only if the previous batch did not end.
        """
        if self.fast_path.in_batch:
            self._abandon_step()
        self.fast_path.in_batch = True
        begins_step = not self._step_timer.batches
        self.mode.begin_batch(batch, begins_step=begins_step)

    def batch_ends(self, batch: Any) -> None:
        """End a batch that is not on the fast path. If it is the last of a step, end the step."""
        counted = self.mode.end_batch(batch)
        shapes = self._step_timer.batch(batch)
        if counted is not None and self._live_metrics is not None:
            self._live_metrics.set_work(shapes, counted)
        if self._stage.ends_step():
            self._end_step()
        else:
            self.mode.continue_step()

    def _end_step(self) -> None:
        ended = self.mode.end_step()
        has_reported = False
        if self._is_annotating or self._results.pending:
            has_reported = self._check_background_work()
        took_fast_path = bool(self.fast_path.steps)
        self._step_timer.end(
            self._training.logged_step(), ended.kind, ended.module_timing, ended.stacks
        )
        self._advance()
        if has_reported:
            self._mark_wait_of_ranks()
        if took_fast_path:
            # converting the steps of the fast path took time, which belongs to no step
            self._step_timer.resume()
        is_one_batch = self._stage.learns and self._stage.accumulation() == 1
        self._step_timer.allow_fast_path(self._steps_until_due() if is_one_batch else 0)

    def _abandon_step(self) -> None:
        """Discard the current step, because a batch did not end and yet training continues."""
        self.mode.abandon()
        self._step_timer.drop_batches()

    def mark(self, mark: str) -> None:
        """Mark the current step as not typical. `mark` is the reason, such as `validation`."""
        self._step_timer.mark(mark)

    @property
    def next_window(self) -> int | None:
        """The number that the next requested window gets.

        It is `None` until all scheduled windows have been reported.
        """
        if self._windows or self._is_annotating or self._results.pending:
            return None
        return self._cursor.window

    @property
    def can_open(self) -> bool:
        """Return whether a requested window can open now.

        It can open if the schedule is waiting for its next window, or if the schedule is over.
        """
        return self._cursor.phase == "wait" or self.next_window is not None

    def bring_forward(self) -> bool:
        """Open the next window after the next step, if the schedule is between two windows.

        Returns whether the window will open.
        """
        if self._cursor.phase != "wait":
            return False
        self._cursor.bring_forward(self._step_timer.ordinal + 1)
        self._step_timer.allow_fast_path(0)
        return True

    def close(self, error: BaseException | None = None) -> None:
        """End the stage when the run ends, and report its windows.

        After an error, do not wait for the device or for background work.
        """
        if not self.over:
            call_each([partial(self._close, error), self.leave_annotations])
            self.over = True

    def detach(self, *, keep_curves: bool = False) -> None:
        """Remove every hook. Can be called repeatedly.

        If `keep_curves` is true, the hooks that are needed to log curves stay.
        """
        parts: list[Callable[[], object]] = [mode.remove for mode in self._modes.values()]
        parts.append(self._listening.close)
        if not keep_curves:
            parts += [self._step_timer.close, self._logged_phases.disconnect]
        parts.append(self._step_timer.leave_phases)
        call_each(parts)

    def leave_annotations(self) -> None:
        """Stop watching the processes that annotate traces. They continue on their own."""
        self._annotations.detach()

    def _close(self, error: BaseException | None) -> None:
        for mode in self._modes.values():
            mode.finish(error)
        if error is None:
            self._clock.settle()
        else:
            self.notes.append(Note(code="ended_early", subject=type(error).__name__, values={}))
        self._flush_fast_path()
        self.detach()
        self._read_steps()
        if error is None:
            self._share_steps()
        for window in self._windows:
            if window.is_worth_reporting:
                self._report(window, failed=error is not None)
        if error is None:
            self._annotations.wait()

    def _flush_fast_path(self) -> None:
        """Convert the steps of the fast path to timed steps. Called between two steps."""
        logged_step = self._training.logged_step()
        last = self._step_timer.logged_step
        # Lightning counts a step after `on_train_batch_end`, so `logged_step` may still be `last`
        self._step_timer.flush_fast_path(last + 1 if logged_step == last else logged_step)

    def _advance(self) -> None:
        """Do the work that is due between two steps. After most steps, there is none.

        The work can be to read the times of finished steps, to change the mode (for example to
        counting), to report finished windows, to log a point of the loggers' curves, and to send
        times to rank 0.
        """
        logs_point = self._is_due(self._point_period)
        shares = self._is_due(self._share_period)
        is_idle = self._step_timer.ordinal < self._cursor.idle_until and not self._waits_for_steps
        if is_idle and not logs_point and not shares:
            return
        self._read_steps()
        has_opened = self._move_cursor()
        ready = [window for window in self._windows if window.ready and not self._extends(window)]
        has_worked = self._change_mode()
        for window in ready:
            self._report(window, failed=False)
            # remove windows one by one, because another thread reads `can_open`
            self._windows.remove(window)
        if has_opened or ready:
            self._mark_wait_of_ranks()
        if self._step_timer.times_phases and not self._windows and self._unshared is None:
            self.detach(keep_curves=self._live_metrics is not None)
            self.over = self._has_nothing_to_do()
        if logs_point:
            self._log_point()
        if shares:
            self._share_steps()
        if has_opened or has_worked or ready or logs_point or shares:
            self._step_timer.resume()

    def _move_cursor(self) -> bool:
        """Move the schedule to the current step. End or open a window if the schedule requires it.

        Returns whether a window has opened.
        """
        cursor = self._cursor
        ordinal = self._step_timer.ordinal
        cursor.go_to(ordinal)
        if cursor.phase not in {"wait", "over"} or self._waits_for_steps:
            self._step_timer.mark_phases()
        if self._windows:
            window = self._windows[-1]
            if window.number < cursor.window and not window.has_ended:
                window.end(ordinal, self._step_timer.logged_step)
                if cursor.phase != "over":
                    self._windows.append(Window(cursor.window, ordinal))
        return self._open_window()

    def _change_mode(self) -> bool:
        """Change to the mode of the next step.

        Returns whether the change took long. Its time must then not be included in any step.
        """
        last = self.mode
        self.mode = self._next_mode()
        if last is not self.mode:
            last.leave()
        self.mode.begin_step()
        return last.works_between_steps or self.mode.works_between_steps

    def _next_mode(self) -> StepMode:
        ordinal = self._step_timer.ordinal
        phase: str = self._cursor.phase
        for window in self._windows:
            phase = window.requested_mode(ordinal) or phase
        return self._modes.get(phase, UNPROFILED)

    def _open_window(self) -> bool:
        """Open the next window and create its modes, if the schedule has reached the window.

        Returns whether the window has opened.
        """
        cursor = self._cursor
        if cursor.phase in {"wait", "over"} or self._windows[-1].opened:
            return False
        window = self._windows[-1]
        window.opened = True
        self._announce()
        self._modes = self._modes_of(window)
        for mode in self._modes.values():
            mode.prepare()
        return True

    def _announce(self) -> None:
        """Log that a window opens."""
        learns = self._stage.learns
        logged_step = self._step_timer.logged_step
        # the step number in batches, because the schedule counts batches
        batches = self._step_timer.ordinal * (self._stage.accumulation() if learns else 1)
        after = f"{batches} batch{'' if batches == 1 else 'es'}"
        if self._cursor.first:
            after = "a request"
        where = f"at step {logged_step + 1}" if learns else f"after step {logged_step}"
        self._training.log(
            f"lflops: {self._stage.name} window {self._cursor.window} opens after {after}, {where}"
        )

    def _modes_of(self, window: Window) -> dict[str, StepMode]:
        """Return the modes of a window, keyed by the phase of the schedule that uses the mode."""
        training = self._training
        settings = self._settings
        modes: dict[str, StepMode] = {
            "module_timing": ModuleTimingMode(
                self._stage,
                self._tree,
                self._clock,
                self._guard,
                is_alone=training.world_size == 1,
            ),
            "stack_sampling": StackSamplingMode(self._stage, self._tree, self._clock, self._guard),
        }
        if settings.count is True:
            modes["count"] = CountingStepMode(self._counter, self._stage, window)
        paths = self._results.paths
        if self._traces_steps and paths is not None:
            modes["traced"] = TracedMode(
                training,
                self._stage,
                window,
                self._new_tracer() if settings.traces_on(training.rank) else None,
                paths.traces,
                notes=self._trace_notes,
                mark=self._step_timer.mark,
            )
        return modes

    def _new_tracer(self) -> Tracer:
        settings = self._settings
        return Tracer(
            self._tree,
            self._training.device,
            activities=settings.activities,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            inside_compiled=settings.looks_inside_compiled,
            guard=self._guard,
        )

    @property
    def _waits_for_steps(self) -> bool:
        """Return whether a window has ended but still waits for missing unprofiled steps."""
        return bool(self._windows) and self._windows[0].has_ended

    @property
    def _point_period(self) -> int | None:
        """Number of steps between two points of the curves, or `None` without curves."""
        if self._live_metrics is None:
            return None
        return self._training.log_every

    @property
    def _share_period(self) -> int | None:
        """Number of steps after which unprofiled steps are sent to rank 0; `None` for never."""
        if self._unshared is None:
            return None
        # The period is one step shorter than the period of the curves. Otherwise, the steps that
        # are not typical would always be the steps in which the user logs or saves something.
        period = min(self._training.log_every or SHARE_EVERY, MAX_PENDING_STEPS) - 1
        return max(period, SHARE_LEAST)

    def _is_due(self, period: int | None) -> bool:
        return period is not None and (self._step_timer.logged_step + 1) % period == 0

    def _steps_until_due(self) -> float:
        """Return how many of the next steps can take the fast path, because no work is due.

        Work is due at the end of a step if a point of the curves must be logged, if steps must be
        sent to rank 0, if the schedule changes, or while background threads work.
        """
        if self._waits_for_steps or self._is_annotating or self._results.pending:
            return 0
        until_due = max(self._cursor.idle_until - 1 - self._step_timer.ordinal, 0)
        next_step = self._step_timer.logged_step + 1
        for period in (self._point_period, self._share_period):
            if period is not None:
                until_due = min(until_due, period - 1 - next_step % period)
        return until_due

    def _has_nothing_to_do(self) -> bool:
        return self._live_metrics is None and not self._is_annotating and not self._results.pending

    def _check_background_work(self) -> bool:
        """Collect traces that have been annotated, and windows that all ranks have reported.

        If work in the background ran during the current step, the step is marked as not typical.
        Returns whether a window was published.
        """
        self._is_annotating = self._annotations.were_running()
        has_reported = self._results.report_ready()
        if self._is_annotating or has_reported or self._results.busy:
            self._step_timer.mark("background")
        if not self._step_timer.times_phases:
            self.over = self._has_nothing_to_do()
        return has_reported

    def _mark_wait_of_ranks(self) -> None:
        """Mark the step that has just begun as not typical, if there are several ranks.

        In this step, the other ranks wait until this rank has finished its work between steps. If
        one rank marks a step, the step is left out when ranks are compared and merged.
        """
        if self._training.world_size > 1:
            self._step_timer.mark("background")

    def _read_steps(self) -> None:
        """Read the steps whose times can be read without waiting for the device.

        The steps are passed to the windows, to the live metrics, and to the comparison of ranks.
        """
        for step in self._step_timer.read():
            if self._phase_waits is not None:
                marks = step.device_marks
                self._phase_waits.end_step(step.ordinal, marks[0][0], marks[-1])
            for window in self._windows:
                window.add(step)
            if self._live_metrics is not None:
                self._live_metrics.add(step)
            if self._unshared is not None and _is_shared(step):
                self._unshared.append(step)

    def _log_point(self) -> None:
        """Log a point of the curves: the metrics of the steps since the last point.

        If the loggers are slow, there are fewer points.
        """
        if self._live_metrics is None or self._results.reporters is None:
            return
        if not self._point_pause.is_over:
            return
        point = self._live_metrics.point(self._results.shares.get(self._stage.name, {}))
        point |= self._results.run_curves()
        with self._point_pause.logs_point():
            self._results.reporters.point(point, self._stage.name, self._step_timer.logged_step)

    def _share_steps(self) -> None:
        """Send the unprofiled steps since the last call to rank 0, which compares the ranks."""
        if self._unshared is None:
            return
        steps = self._unshared
        self._unshared = []
        self._results.share(self._stage.name, map(self._step, steps))
        if self._training.rank == 0:
            # a background thread compares them during the next step
            self._step_timer.mark("background")

    def _step(self, timed: TimedStep) -> Step:
        """Read the times of a step.

        The result includes how long the training thread waited for a core in each phase, if this is
        known.
        """
        step = self._step_timer.step(timed)
        if self._phase_waits is None:
            return step
        return replace(step, waited_by_phase=self._phase_waits.of_step(timed.ordinal))

    def _lacks_backward(self, window: Window) -> bool:
        """Return whether the counted training step ran no backward, because the loop skipped it."""
        is_counted = self._settings.count is True and self._counter.can_count()
        if not is_counted or not self._stage.learns or window.counted is None:
            return False
        return not has_backward(window.counted)

    def _extends(self, window: Window) -> bool:
        """Request more steps for a window, if its results would otherwise be incomplete.

        Another step is counted if the counted step ran no backward. Modules are timed in more steps
        if a module seems slow but this is not certain. Stacks are sampled if much time is spent
        outside the layers. With several ranks, no steps are requested, because each rank might
        request a different number. Returns whether steps were requested.
        """
        if self._training.world_size > 1:
            return False
        ordinal = self._step_timer.ordinal
        room = self._cursor.idle_until - ordinal
        if room > WANTED and window.has_counts_left and self._lacks_backward(window):
            window.request(range(ordinal, ordinal + 1), "count")
            return True
        room -= WANTED
        if not window.may_extend or room <= 0:
            return False
        profile, _ = self._profile(window, failed=False)
        missing = window.missing_timing_steps
        are_uncertain = analyze(profile).outliers.caveat not in {None, "scaled"}
        if are_uncertain and 0 < missing <= room:
            window.request(range(ordinal, ordinal + missing), "module_timing")
            return True
        missing = window.missing_stack_steps(profile)
        if 0 < missing <= room and self._ended_last(window):
            window.request(range(ordinal, ordinal + missing), "stack_sampling")
            return True
        return False

    def _ended_last(self, window: Window) -> bool:
        return window is [each for each in self._windows if each.has_ended][-1]

    def _profile(
        self, window: Window, *, failed: bool
    ) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
        """Return a window's profile without its trace.

        The second result has the self seconds of modules in each module-timing step.
        """
        counted = window.counted or self._counter.uncounted_profile()
        timer = self._step_timer
        timer.token_inputs = timer.token_inputs or counted.run.tokens_from
        sources = replace(
            counted.run, samples_from=timer.samples_from, tokens_from=timer.token_inputs
        )
        return window.profile(
            replace(counted, run=sources),
            self._step_timer.logged_step,
            (*self.notes, *self._trace_notes),
            read=self._step,
            clock=self._clock,
            failed=failed,
        )

    def _report(self, window: Window, *, failed: bool) -> None:
        """Publish a window, and start to annotate its trace."""
        wants_windows = self._results.wants_windows
        if window.recording is None and not wants_windows:
            return
        profile, steps = self._profile(window, failed=failed)
        profile = replace(profile, run=with_allocator_peaks(profile.run, self._training.device))
        if window.recording is not None:
            profile = self._with_trace(profile, window.recording)
        if wants_windows:
            self._results.add(profile, steps)

    def _with_trace(self, profile: Profile, recording: Recording) -> Profile:
        """Add the recording of traced steps to a window's profile.

        If the recording has a raw trace, start to annotate it in the background.
        """
        results = self._results
        paths = results.paths
        if paths is None:
            return profile
        rank = self._training.rank
        trace = paths.trace(profile.run, recording.path.name)
        files = {} if recording.raw is None else {str(rank): path_text(trace)}
        profile = with_trace(profile, recording, files)
        if recording.raw is None:
            return profile
        is_alone = self._training.world_size == 1
        file = paths.profile(profile.run) if is_alone else paths.of_rank(profile.run, rank)
        results.save(profile, file)
        with results.failures.contained("the trace"):
            self._annotations.start(recording, trace, file)
            self._is_annotating = True
        return profile


def _is_shared(step: TimedStep) -> bool:
    """Return whether this step is used to compare ranks."""
    return step.kind == "unprofiled" and step.times_phases and is_compared(step.marks)


def _schedule_changes(
    asked: Schedule, plan: Plan, accumulation: int, batches: float
) -> Iterator[tuple[Note, str]]:
    """Yield a note and a message for each difference between `plan` and the requested schedule."""
    names = ("skip_first", "wait", "warmup", "active")
    if any(getattr(asked, name) % accumulation for name in names):
        values = {"accumulation": accumulation}
        message = (
            f"lflops: each step accumulates the gradients of {accumulation} batches, so each part "
            "of lflops' schedule is rounded up to a whole number of steps"
        )
        yield Note(code="rounded_to_cycles", subject="", values=values), message
    whole = Plan.of(asked, accumulation=accumulation, traced=plan.traced)
    if plan.length < whole.length or (asked.repeat and plan.windows != whole.windows):
        shortened = {name: getattr(plan, name) for name in names}
        shortened["windows"] = plan.windows or 0
        run = "1 batch" if batches == 1 else f"{int(batches)} batches"
        steps = ", ".join(f"{name} {number}" for name, number in shortened.items())
        values = {"batches": int(batches), **shortened}
        note = Note(code="schedule_shrunk", subject="", values=values)
        yield note, f"lflops: {asked} does not fit into {run}; the schedule is shortened to {steps}"
