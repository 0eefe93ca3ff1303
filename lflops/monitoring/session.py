"""One stage of a run: which batch is counted, which steps are kept, when a window is reported, and how all of it ends."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.error_guard import CleanupStack, Guard, call_each
from lflops.errors import CountError
from lflops.inputs.run_info import with_allocator_peaks
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Stage, Training
from lflops.monitoring.window.counting_step import NO_LENGTHS, CountingSteps
from lflops.monitoring.window.live_metrics import LiveMetrics
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.monitoring.window.step_timer import MAX_PENDING_STEPS, StepTimer, TimedStep
from lflops.monitoring.window.traced_steps import TracedSteps
from lflops.monitoring.window.window import WANTED, Window
from lflops.monitoring.window_publisher import WindowPublisher
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import is_compared
from lflops.schedule import Plan, Schedule, ScheduleCursor
from lflops.timing.clock import (
    Clock,
    HostClock,
    StreamClock,
    WaitingClock,
    device_clock,
    event_seconds,
)
from lflops.timing.step_phases import StepPhases
from lflops.trace.record.attach_trace import with_trace

# steps after which ranks share their clean steps, where the run has no curves
SHARE_EVERY = 50
# seconds of an event, from which on the phases of one step in `PHASES_EVERY` are marked: a GPU of
# NVIDIA's takes some 6 µs
DEAR = 30e-6
PHASES_EVERY = 8


class Session:
    """What a monitor is while a training goes through a stage.

    Once in training, again and again in the validations of a fit.
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
        # whether there is nothing left to do
        self.over = False
        self._stage = stage
        self._results = results
        self._guard = guard
        self._settings = settings
        self._training = training
        device = training.device
        self._counted_steps = CountingSteps(settings, training, stage, results.topology, guard)
        self._clock: Clock = HostClock() if device.type == "cpu" else _device_clock(device)
        places = results.paths
        traced = settings.trace and places is not None
        # The schedule in whole steps, and short enough for the run. Where it is not what was asked
        # for, the log says so, and so do the notes, which are what the reader of every window has
        # to know.
        plan = Plan.of(
            settings.schedule,
            accumulation=stage.accumulation(),
            batches=stage.batches_left,
            traced=traced,
        )
        self.notes = list(
            _changes(
                settings.schedule, plan, stage.accumulation(), stage.batches_left, training.say
            )
        )
        self._course = ScheduleCursor(plan, number)
        # The windows that are not reported yet. The last is where the schedule is, unless that is
        # over; the others wait for steps.
        self._windows = [Window(number, 0)]
        self._tree = ModuleTree({"": training.model})
        self._hooked: ModuleTimingStep | None = None
        here = traced and settings.traces_on(training.rank)
        self._tracing = (
            TracedSteps(training, stage, self._tree, settings, places.traces, guard=guard)
            if places is not None and here
            else None
        )
        tracked = (
            stage.learns
            and settings.track
            and results.outlets is not None
            and training.loggers
            and training.log_every
        )
        is_timed, waits = (
            isinstance(self._clock, StreamClock),
            isinstance(self._clock, WaitingClock),
        )
        if device.type != "cpu" and not is_timed:
            self.notes.append(
                Note(code="no_timed_events", subject=device.type, values={"waits": int(waits)})
            )
        is_dear = (
            isinstance(self._clock, StreamClock)
            and (event_seconds(self._clock.device) or 0.0) > DEAR
        )
        phases = StepPhases(
            self._clock, within=HostClock() if waits else None, every=PHASES_EVERY if is_dear else 1
        )
        on_host = StepPhases(HostClock()) if is_timed else None
        scaled = stage.learns and training.scales_gradients
        self._step_clock = StepTimer(
            phases,
            on_host,
            settings.units,
            training.logged_step(),
            updating=stage.updates,
            scaled=scaled,
            on_ranks=training.world_size > 1,
        )
        self._plain, self._in_batch = self._step_clock.plain, False
        self._record_lengths: Callable[[int, Any], None] | None = (
            # what the curves see of each batch; in most trainings nothing
            None
        )
        self._live_metrics = (
            LiveMetrics(self._step_clock.seconds, results.topology.sizes.get("data"))
            if tracked
            else None
        )
        self._listening = CleanupStack()
        # outlasts the windows where the curves need it
        self._transfers = CleanupStack()
        # The clean steps since the last time that they were handed in; `None` where there are no
        # other ranks.
        self._clean: list[TimedStep] | None = (
            [] if stage.learns and results.compares_ranks else None
        )
        self._counts_step = False
        # whether a trace of ours is being annotated
        self._is_annotating = False

    def begin(self) -> None:
        """The stage begins for the first time.

        If this fails, `detach` takes off what was installed until then.
        """
        self._step_clock.install(self._guard)
        self._open()
        self.resume()

    def resume(self) -> None:
        """The stage begins, or begins again.

        What was in between belongs to no step, and the first one is no measure of the others.
        """
        self._listen_to_transfers()
        if self._step_clock.times_phases:
            for each in self._step_clock.listeners:
                self._listening.add(self._stage.listen(each))
            self._flush_plain_steps()
            self._step_clock.resume()
            self._step_clock.mark("warmup")
            if self._tracing is not None:
                self._tracing.step(traced=self._course.phase == "traced")

    def _listen_to_transfers(self) -> None:
        """Listen if the curves need it, and no longer than that."""
        self._transfers.close()
        live, self._record_lengths = self._live_metrics, None
        if live is not None and live.transfers is not None:
            self._transfers.add(self._stage.listen(live.transfers))
            self._record_lengths = live.record_lengths

    def pause(self) -> None:
        """The stage ends, and may begin again: what comes between is in no trace of it."""
        self._listening.close()
        self._end_trace(failed=False)

    def epoch_begins(self) -> None:
        """Gradients may be accumulated otherwise from here on.

        Ask again at the end of the next step.
        """
        self._step_clock.expect_plain(0)

    def batch_begins(self, batch: Any) -> None:
        """Count it, or hook its modules, if its step is one of those."""
        if self._in_batch:
            self._abandon()
        self._in_batch = True
        if len(self._plain.steps) >= self._plain.limit:
            self._begin_batch(batch)

    def batch_ends(self, batch: Any) -> None:
        """Take note of it, and of the step that may end with it.

        In most steps that is all there is to do: those take the short way.
        """
        self._in_batch = False
        if self._record_lengths is not None:
            self._record_lengths(self._step_clock.ordinal, batch)
        if len(self._plain.steps) >= self._plain.limit or not self._plain.note(batch):
            self._end_batch(batch)

    def _begin_batch(self, batch: Any) -> None:
        phase, begins_step = self._course.phase, not self._step_clock.batches
        live = self._live_metrics
        if begins_step:
            is_sample = (
                phase == "warmup"
                and self._settings.count is True
                and live is not None
                and live.is_sample(batch)
            )
            self._counts_step = phase == "count" or is_sample
        if self._counts_step:
            if begins_step and self._settings.count is True:
                self._windows[-1].counted = self._counted_steps.begin_step(
                    batch, NO_LENGTHS if live is None else live.lengths(batch)
                )
            self._counted_steps.begin_batch(batch)
        elif begins_step and (
            phase == "module_timing"
            or any(window.hooks(self._step_clock.ordinal) for window in self._windows)
        ):
            self._hooked = ModuleTimingStep(
                self._stage, self._tree, self._clock, is_alone=self._training.world_size == 1
            )
            self._hooked.start(self._guard)

    def _end_batch(self, batch: Any) -> None:
        is_counted, live = self._counts_step, self._live_metrics
        profile = self._counted_steps.end_batch() if is_counted else None
        shapes = self._step_clock.batch(batch)
        if profile is not None and live is not None:
            live.set_work(
                shapes,
                self._step_clock.tokens_of(shapes),
                live.lengths_of(self._step_clock.ordinal),
                profile,
            )
            if live.transfers is None:
                self._transfers.close()
                self._record_lengths = None
        if not self._stage.ends_step():
            if self._tracing is not None:
                self._tracing.batch()
            return
        counted = self._counted_steps.end_step() if is_counted else None
        self._counts_step = False
        if counted is not None:
            self._windows[-1].counted = counted
        if self._is_annotating or self._results.pending:
            self._check_background_work()
        # Where one rank records, the others wait for it.
        traced = self._course.phase == "traced" and (
            self._training.world_size > 1 or (self._tracing is not None and self._tracing.records)
        )
        # to make those out takes a while, which is no step's
        was_noted = bool(self._plain.steps)
        self._step_clock.end(
            self._training.logged_step(),
            counted=counted is not None,
            hooked=self._end_hooked_step(),
            traced=traced,
        )
        self._advance()
        if was_noted:
            self._step_clock.resume()
        self._step_clock.expect_plain(
            self._steps_until_due() if self._stage.learns and self._stage.accumulation() == 1 else 0
        )

    @property
    def is_plain(self) -> bool:
        """Whether next to nothing is done as the next batch begins."""
        return len(self._plain.steps) < self._plain.limit

    @property
    def touches_step(self) -> bool:
        """Whether the step that is running is counted, timed by module or traced."""
        return self._counts_step or self._hooked is not None or self._course.phase == "traced"

    def mark(self, mark: str) -> None:
        self._step_clock.mark(mark)

    @property
    def next_window(self) -> int | None:
        """The number of a window after all that were scheduled.

        `None` while one of those is to come, or is not reported.
        """
        return (
            None
            if self._windows or self._is_annotating or self._results.pending
            else self._course.window
        )

    @property
    def can_open(self) -> bool:
        """Whether a window that is asked for can open now.

        One is waited for, or all that were scheduled are reported.
        """
        return self._course.phase == "wait" or self.next_window is not None

    def bring_forward(self) -> bool:
        """Open the next scheduled window after the step that begins now, if one is waited for.

        Returns whether that is so.
        """
        if self._course.phase != "wait":
            return False
        self._course.bring_forward(self._step_clock.ordinal + 1)
        self._step_clock.expect_plain(0)
        return True

    def close(self, error: BaseException | None = None) -> None:
        """End, however the fit ends: tell of the windows that have something to tell.

        After an error nothing waits for the device.
        """
        if not self.over:
            call_each([partial(self._close, error), self.leave_annotations])
            self.over = True

    def detach(self, *, keep_curves: bool = False) -> None:
        """Take off every hook; those that the curves need may stay. It can be called again."""
        parts: list[Callable[[], object]] = [
            partial(self._end_trace, failed=True),
            self._counted_steps.take_off,
            self._end_hooked_step,
            self._listening.close,
        ]
        if not keep_curves or self._record_lengths is None:
            parts.append(self._transfers.close)
        if not keep_curves:
            parts.append(self._step_clock.close)
        call_each([*parts, self._step_clock.leave_phases])

    def leave_annotations(self) -> None:
        """Traces that are being annotated are left to their processes."""
        if self._tracing is not None:
            self._tracing.leave()

    def _close(self, error: BaseException | None) -> None:
        unfinished = self._counted_steps.stop(error)
        self._end_trace(failed=error is not None)
        if error is not None:
            self.notes.append(Note(code="ended_early", subject=type(error).__name__, values={}))
            if unfinished is not None and self._windows[-1].counted is None:
                self._windows[-1].counted = self._counted_steps.with_facts(unfinished)
        else:
            self._clock.settle()
        self._flush_plain_steps()
        self.detach()
        for step in self._step_clock.read():
            self._add_step(step)
        if error is None:
            self._share_steps()
        for window in filter(attrgetter("is_worth_reporting"), self._windows):
            self._report(window, failed=error is not None)
        if self._tracing is not None and error is None:
            self._tracing.wait()

    def _end_trace(self, *, failed: bool) -> None:
        """Before its time: the window has what was recorded until now."""
        if (
            self._tracing is not None
            and (recording := self._tracing.end(failed=failed)) is not None
        ):
            self._windows[-1].recording = recording

    def _flush_plain_steps(self) -> None:
        """Between two steps.

        Lightning counts a step behind its callbacks' on_train_batch_end, so it may be at the one
        that is over.
        """
        logged_step, last = self._training.logged_step(), self._step_clock.logged_step
        self._step_clock.flush_plain_steps(last + 1 if logged_step == last else logged_step)

    def _end_hooked_step(self) -> ModuleTimingStep | None:
        """End the step's hooks. Returns what they have stamped; `None` where it had none."""
        hooked = self._hooked
        if hooked is not None:
            hooked.stop()
        self._hooked = None
        return hooked

    def _abandon(self) -> None:
        """The last batch was left before it was over, and the fit goes on: count another step."""
        self._counted_steps.abandon()
        self._end_hooked_step()
        if self._live_metrics is not None:
            self._live_metrics.drop(self._step_clock.ordinal)
        self._counts_step = False
        self._step_clock.drop_batches()

    def _advance(self) -> None:
        """A step is over: read those that can be read, and do what is due.

        In most steps nothing is.
        """
        log, shares = (
            each is not None and not (self._step_clock.logged_step + 1) % each
            for each in self._periods
        )
        if (
            self._step_clock.ordinal < self._course.idle_until
            and not self._waits_for_steps
            and not log
            and not shares
        ):
            return
        for step in self._step_clock.read():
            self._add_step(step)
        busy = self._change_phase()
        ready = [
            window for window in self._windows if window.ready and not self._hooks_more(window)
        ]
        for window in ready:
            self._report(window, failed=False)
            # now, since `can_open` is asked from a thread
            self._windows.remove(window)
        if self._step_clock.times_phases and not self._windows and self._clean is None:
            self.detach(keep_curves=self._live_metrics is not None)
            self.over = (
                self._live_metrics is None and not self._is_annotating and not self._results.pending
            )
        if log and self._live_metrics is not None and self._results.outlets is not None:
            point = (
                self._live_metrics.point(self._results.shares.get(self._stage.name, {}))
                | self._results.run_curves()
            )
            self._results.outlets.point(point, self._stage.name, self._step_clock.logged_step)
        if shares:
            self._share_steps()
        if busy or ready or log or shares:
            self._step_clock.resume()

    @property
    def _waits_for_steps(self) -> bool:
        """Whether a window that is complete waits for steps after its end."""
        return bool(self._windows) and self._windows[0].complete

    def _steps_until_due(self) -> float:
        """Steps from here on at whose end nothing is due.

        No point of the curves, no window that opens, and no work in the background.
        """
        if self._waits_for_steps or self._is_annotating or self._results.pending:
            return 0
        until_window = max(self._course.idle_until - 1 - self._step_clock.ordinal, 0)
        next_step = self._step_clock.logged_step + 1
        return min(
            [
                until_window,
                *(each - 1 - next_step % each for each in self._periods if each is not None),
            ]
        )

    @property
    def _periods(self) -> tuple[int | None, int | None]:
        """Steps from one point of the curves to the next, and from one time that ranks share their clean steps to the next."""
        every = self._training.log_every
        shares = max(min(every or SHARE_EVERY, MAX_PENDING_STEPS) - 1, 1)
        return (
            every if self._live_metrics is not None else None,
            None if self._clean is None else shares,
        )

    def _share_steps(self) -> None:
        if self._clean is not None:
            steps, self._clean = self._clean, []
            self._results.share(self._stage.name, map(self._step_clock.step, steps))
            if self._training.rank == 0:
                # a thread of ours looks at them meanwhile
                self._step_clock.mark("background")

    def _change_phase(self) -> bool:
        """Go to the next window where the last is over, and open one where one opens.

        Returns whether anything was done.
        """
        before = self._course.phase
        self._course.go_to(self._step_clock.ordinal)
        phase, number = self._course.phase, self._course.window
        if phase not in {"wait", "over"} or self._waits_for_steps:
            self._step_clock.mark_phases()
        if (
            self._tracing is not None
            and (recording := self._tracing.step(traced=phase == "traced")) is not None
        ):
            self._windows[-1].recording = recording
        if self._windows and self._windows[-1].number < number and not self._windows[-1].complete:
            self._windows[-1].end(self._step_clock.ordinal, self._step_clock.logged_step)
            if phase != "over":
                self._windows.append(Window(number, self._step_clock.ordinal))
        if before == "traced" != phase and self._training.world_size > 1:
            self._step_clock.mark(
                "background"
                # where one rank ends its recording, the others wait for it
            )
        return self._open() or "traced" in {before, phase}

    def _open(self) -> bool:
        if self._course.phase in {"wait", "over"} or self._windows[-1].opened:
            return False
        self._windows[-1].opened = True
        if self._live_metrics is not None:
            self._live_metrics.open()
            self._listen_to_transfers()
        batches = self._step_clock.ordinal * (
            self._stage.accumulation() if self._stage.learns else 1
            # as the schedule counts
        )
        where = (
            f"at step {self._step_clock.logged_step + 1}"
            if self._stage.learns
            else f"after step {self._step_clock.logged_step}"
        )
        after = (
            "it was asked for"
            if self._course.first
            else f"{batches} batch{'' if batches == 1 else 'es'}"
        )
        self._training.say(
            f"lflops: {self._stage.name} window {self._course.window} opens after {after}, {where}"
        )
        if self._tracing is not None:
            self._tracing.open()
            self._tracing.step(traced=self._course.phase == "traced")
        return True

    def _check_background_work(self) -> None:
        """Look after background work.

        Traces that are being annotated, windows of all ranks being put together.
        """
        self._is_annotating = self._tracing is not None and self._tracing.was_busy()
        reported = self._results.report_ready()
        if self._is_annotating or reported or self._results.busy:
            self._step_clock.mark("background")
        if (
            not self._step_clock.times_phases
            and not self._is_annotating
            and not self._results.pending
        ):
            self.over = self._live_metrics is None

    def _add_step(self, step: TimedStep) -> None:
        for window in self._windows:
            window.add(step)
        if self._live_metrics is not None:
            self._live_metrics.add(step)
        if (
            self._clean is not None
            and step.kind == "unprofiled"
            and is_compared(step.marks)
            and step.times_phases
        ):
            self._clean.append(step)

    def _hooks_more(self, window: Window) -> bool:
        """Hook further steps for a window in which a module seems slow, and no one can tell.

        Not on several ranks, which would disagree.
        """
        more, ordinal = window.more_hooked, self._step_clock.ordinal
        room = self._course.idle_until - ordinal
        if not more or more + WANTED > room or self._training.world_size > 1:
            return False
        if analyze(self._profile(window, failed=False)[0]).outliers.doubt in {None, "scaled"}:
            return False
        window.hook(ordinal, more)
        return True

    def _profile(
        self, window: Window, *, failed: bool
    ) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
        """A window's profile without its trace, and the own seconds of modules in each of its hooked steps."""
        notes = self.notes if self._tracing is None else (*self.notes, *self._tracing.notes)
        counted = window.counted or self._counted_steps.empty_profile()
        return window.profile(
            counted,
            self._step_clock.logged_step,
            notes,
            of=self._step_clock.step,
            clock=self._clock,
            failed=failed,
        )

    def _report(self, window: Window, *, failed: bool) -> None:
        tracing, recording, places, rank = (
            self._tracing,
            window.recording,
            self._results.paths,
            self._training.rank,
        )
        if recording is None and not self._results.wants_windows:
            return
        profile, steps = self._profile(window, failed=failed)
        profile = replace(profile, run=with_allocator_peaks(profile.run, self._training.device))
        if recording is not None and tracing is not None and places is not None:
            trace = places.trace(profile.run, recording.path.name)
            profile = with_trace(
                profile, recording, {} if recording.raw is None else {str(rank): str(trace)}
            )
            own = (
                places.profile(profile.run)
                if self._training.world_size == 1
                else places.of_rank(profile.run, rank)
            )
            if recording.raw is not None:
                self._results.save(profile, own)
                with self._results.failures.contained("the trace"):
                    tracing.annotate(recording, trace, own)
                    self._is_annotating = True
        if self._results.wants_windows:
            self._results.add(profile, steps)


def _device_clock(device: torch.device) -> Clock:
    """The device's clock, or the host's where torch cannot wait for the device."""
    try:
        return device_clock(device)
    except CountError:
        return HostClock()


def _changes(
    asked: Schedule, plan: Plan, accumulation: int, batches: float, say: Callable[[str], None]
) -> Iterator[Note]:
    if any(
        getattr(asked, name) % accumulation for name in ("skip_first", "wait", "warmup", "active")
    ):
        yield Note(code="rounded_to_cycles", subject="", values={"accumulation": accumulation})
        say(
            f"lflops: gradients are accumulated over {accumulation} batches, so the schedule is rounded up to whole steps of them"
        )
    whole = Plan.of(asked, accumulation=accumulation, traced=plan.traced)
    if plan.length < whole.length or (asked.repeat and plan.windows != whole.windows):
        left = {
            name: getattr(plan, name) for name in ("skip_first", "wait", "warmup", "active")
        } | {"windows": plan.windows or 0}
        yield Note(code="schedule_shrunk", subject="", values={"batches": int(batches), **left})
        said = ", ".join(f"{name} {number}" for name, number in left.items())
        run = "1 batch" if batches == 1 else f"{int(batches)} batches"
        say(f"lflops: {asked} does not fit into the run's {run}; shortened to these steps: {said}")
