"""One stage of a run: which batch is counted, which steps are kept, when a window is told of, and how all of it ends."""

import contextlib
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.attach_times import with_trace
from lflops.collect.timing.clock import Clock, HostClock, StreamClock
from lflops.collect.timing.step_phases import StepPhases
from lflops.lightning.results import Results
from lflops.lightning.trainer.compat import say
from lflops.lightning.trainer.facts import logged_step, steps_here
from lflops.lightning.trainer.planning import planned
from lflops.lightning.trainer.settings import Settings
from lflops.lightning.trainer.stages import Stage
from lflops.lightning.window.counted_steps import CountedSteps
from lflops.lightning.window.hooked_step import HookedStep
from lflops.lightning.window.live_metrics import LiveMetrics
from lflops.lightning.window.phase_hooks import listen
from lflops.lightning.window.step_clock import StepClock, TimedStep
from lflops.lightning.window.traced_steps import TracedSteps
from lflops.lightning.window.window import Window
from lflops.profile.notes import Note

__all__ = ["Session"]


class Session:
    """What a monitor is while a Trainer goes through a stage: once in training, again and again in the validations of a fit.

    Args:
        settings: What is asked for.
        stage: Which it is.
        trainer: The one that goes through it.
        pl_module: What is trained, or asked.
        results: What is told of the windows that are closed.

    Attributes:
        over: Whether there is nothing left to do.
    """

    def __init__(
        self,
        settings: Settings,
        stage: Stage,
        trainer: Any,
        pl_module: Any,
        results: Results,
    ) -> None:
        """Begin when the stage does."""
        self.over = False
        self._stage = stage
        self._results = results
        self._settings = settings
        self._trainer = trainer
        self._module = pl_module
        device = trainer.strategy.root_device
        self._counts = CountedSteps(settings, stage, trainer, pl_module, results.topology)
        self._clock: Clock = StreamClock() if device.type == "cuda" else HostClock()
        places = results.places
        traced = settings.trace and places is not None
        self._plan, self._notes = planned(settings.schedule, stage, trainer, pl_module, traced=traced)
        self._place = self._plan.place(0)
        self._idle_until = self._plan.waits_until(0)
        self._window = Window(0, 0)
        self._waiting: list[Window] = []
        self._in_batch = False
        self._tree = ModuleTree({"": pl_module})
        self._hooked: HookedStep | None = None
        self._at = logged_step(trainer)
        here = traced and settings.traces_on(trainer.global_rank)
        self._tracing = TracedSteps(trainer, stage, self._tree, settings, places.traces) if places is not None and here else None
        tracked = stage.learns and settings.track and results.outlets is not None and trainer.loggers and trainer.log_every_n_steps
        phases, on_host = StepPhases(self._clock), StepPhases(HostClock()) if device.type == "cuda" else None
        self._listeners = [phases] if on_host is None else [phases, on_host]
        scaled = stage.learns and getattr(trainer.precision_plugin, "scaler", None) is not None
        updating = frozenset({"backward", "optimizer"}) if stage.learns and pl_module.automatic_optimization else frozenset()
        self._steps = StepClock(phases, on_host, settings.units, updating=updating, scaled=scaled)
        self._curve = LiveMetrics(self._steps.seconds, results.topology.sizes.get("data")) if tracked else None
        self._updates = register_optimizer_step_post_hook(self._steps.update) if scaled else None
        self._listening = contextlib.ExitStack()
        self._tapping = True
        self._beside = False  # whether a trace of ours is being annotated
        self._open()
        self.go_on()

    def go_on(self) -> None:
        """The stage begins, or begins again: what was in between belongs to no step, and the first one is no measure of the others."""
        if self._tapping:
            for each in self._listeners:
                self._listening.callback(listen(self._trainer, self._stage.name, each))
            self._steps.resume()
            self._steps.mark("cold")
            if self._tracing is not None:
                self._tracing.step(traced=self._place.phase == "traced")

    def rest(self) -> None:
        """The stage ends, and may begin again: what comes between is in no trace of it."""
        self._listening.close()
        self._end_trace(failed=False)

    def batch_begins(self, batch: Any) -> None:
        """Count it, or hook its modules, if its step is one of those."""
        if self._in_batch:
            self._abandon()
        self._in_batch = True
        if not self._steps.shapes:
            if self._place.phase == "count" and self._settings.count is True:
                self._window.counted = self._counts.begin_step(batch)
            elif self._place.phase == "hooked":
                self._hooked = HookedStep(self._trainer, self._stage.name, self._tree, self._clock)
        self._counts.begin_batch(batch)

    def batch_ends(self, batch: Any) -> None:
        """Take note of it, and of the step that may end with it."""
        self._in_batch = False
        profile = self._counts.end_batch()
        shapes = self._steps.batch(batch)
        if profile is not None and self._curve is not None:
            self._curve.learn(shapes, profile)
        if self._stage.learns and not steps_here(self._trainer, self._module):
            if self._tracing is not None:
                self._tracing.batch()
            return
        counted = self._counts.end_step(self._steps.shapes[0])
        if counted is not None:
            self._window.counted = counted
        if self._beside or self._results.pending:
            self._look_after()
        self._at = logged_step(self._trainer)
        # Where one rank records, the others wait for it.
        traced = self._place.phase == "traced" and (self._trainer.world_size > 1 or (self._tracing is not None and self._tracing.records))
        self._steps.end(self._at, counted=counted is not None, hooked=self._unhook(), traced=traced)
        self._advance()

    def mark(self, mark: str) -> None:
        """Note what else happens in this step."""
        self._steps.mark(mark)

    def close(self, error: BaseException | None = None) -> None:
        """End, however the fit ends: tell of the windows that have something to tell, and leave no trace.

        After an error nothing waits for the device, or for anybody.
        """
        if self.over:
            return
        self.over = True
        unfinished = self._counts.stop(error)
        self._end_trace(failed=error is not None)
        if error is not None:
            self._notes.append(Note(code="ended_early", subject=type(error).__name__, values={}))
            if self._window.counted is None and unfinished is not None:
                self._window.counted = self._counts.with_facts(unfinished)
        else:
            self._clock.settle()
        self.detach()
        for lap in self._steps.read():
            self._take(lap)
        cut_short = [] if self._window.complete or not self._window.worth_telling else [self._window]
        for window in (*self._waiting, *cut_short):
            self._tell(window, failed=error is not None)
        if self._tracing is not None and error is None:
            self._tracing.wait()

    def detach(self) -> None:
        """Take off whatever is on."""
        self._end_trace(failed=True)
        self._counts.abandon()
        self._unhook()
        self._listening.close()
        self._tapping = self._steps.tapped = False
        if self._updates is not None:
            self._updates.remove()
            self._updates = None

    def _end_trace(self, *, failed: bool) -> None:
        """Before its time: the window has what was recorded until now."""
        if self._tracing is not None:
            self._window.recording = self._tracing.end(failed=failed) or self._window.recording

    def _unhook(self) -> HookedStep | None:
        """What the hooks of this step have stamped; nothing where it had none."""
        hooked, self._hooked = self._hooked, None
        if hooked is not None:
            hooked.stop()
        return hooked

    def _abandon(self) -> None:
        """The last batch was left before it was over, and the fit goes on: count another step."""
        self._counts.abandon()
        self._unhook()
        self._steps.tear()

    def _advance(self) -> None:
        """A step is over: read those that can be read, and do what is due. In most steps nothing is."""
        log = self._curve is not None and not (self._at + 1) % self._trainer.log_every_n_steps
        if self._steps.ordinal < self._idle_until and not self._waiting and not log:
            return
        for lap in self._steps.read():
            self._take(lap)
        busy = self._move_on()
        ready = [window for window in self._waiting if window.ready]
        for window in ready:
            self._waiting.remove(window)
            self._tell(window, failed=False)
        if self._tapping and self._window.complete and not self._waiting:
            self.detach()
            self.over = self._curve is None and not self._beside and not self._results.pending
        if log:
            self._log_point()
        if busy or ready or log:
            self._steps.resume()

    def _log_point(self) -> None:
        if self._curve is not None and self._results.outlets is not None:
            self._results.outlets.scalars(self._curve.point(), self._stage.name, self._at)

    def _move_on(self) -> bool:
        """Go to the next window where the last is over, and open one where one opens. Returns whether anything was done."""
        before = self._place.phase
        self._place = phase, number = self._plan.place(self._steps.ordinal)
        self._idle_until = self._plan.waits_until(self._steps.ordinal)
        if self._tracing is not None:
            self._window.recording = self._tracing.step(traced=phase == "traced") or self._window.recording
        if number != self._window.number and not self._window.complete:
            self._window.end(self._steps.ordinal, self._at)
            self._waiting.append(self._window)
            if phase != "over":
                self._window = Window(number, self._steps.ordinal)
        return self._open() or "traced" in {before, phase}

    def _open(self) -> bool:
        """Open the window if its time has come. Returns whether it was opened."""
        if self._place.phase in {"wait", "over"} or self._window.opened:
            return False
        self._window.opened = True
        where = f"at step {self._at + 1}" if self._stage.learns else f"behind step {self._at}"
        say(f"lflops: {self._stage.name} window {self._window.number} opens {where}")
        if self._tracing is not None:
            self._tracing.open()
            self._tracing.step(traced=self._place.phase == "traced")
        return True

    def _look_after(self) -> None:
        """See to what goes on beside the training: traces that are being annotated, windows of all ranks being put together."""
        self._beside = self._tracing is not None and self._tracing.was_busy()
        told = self._results.tell_ready()
        if self._beside or told or self._results.busy:
            self._steps.mark("background")
        if not self._tapping and not self._beside and not self._results.pending:
            self.over = self._curve is None

    def _take(self, lap: TimedStep) -> None:
        for window in self._waiting:
            window.take(lap)
        if not self._window.complete:
            self._window.take(lap)
        if self._curve is not None:
            self._curve.take(lap)

    def _tell(self, window: Window, *, failed: bool) -> None:
        """Make a window's profile, and hand it on."""
        tracing, recording, places, rank = self._tracing, window.recording, self._results.places, self._trainer.global_rank
        if recording is None and not self._results.wants_windows:
            return
        notes = self._notes if tracing is None else (*self._notes, *tracing.notes)
        counted = window.counted or self._counts.without()
        profile, steps = window.profile(counted, self._at, notes, of=self._steps.step, clock=self._clock, failed=failed)
        if recording is not None and tracing is not None and places is not None:
            trace = places.trace(profile.run, recording.path.name)
            profile = with_trace(profile, recording, {str(rank): str(trace)})
            own = places.profile(profile.run) if self._trainer.world_size == 1 else places.of_rank(profile.run, rank)
            own.parent.mkdir(parents=True, exist_ok=True)
            profile.save(own)
            tracing.annotate(recording, trace, own)
            self._beside = True
        if self._results.wants_windows:
            self._results.add(profile, steps)
