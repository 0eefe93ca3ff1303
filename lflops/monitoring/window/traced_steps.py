"""Trace steps with torch.profiler, and add the FLOPs of modules to the traces in the background."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lflops.error_guard import call_each
from lflops.monitoring.inputs.messages import monitor_name, warn
from lflops.monitoring.inputs.phases import OutsideModules
from lflops.monitoring.inputs.training import Stage, Training
from lflops.monitoring.window.step_modes import EndedStep, StepMode
from lflops.monitoring.window.window import Window
from lflops.profile.notes import Note, sentence
from lflops.timing.step_phases import OTHER
from lflops.trace.annotate import RecordedCalls
from lflops.trace.annotate_in_background import AnnotationProcess
from lflops.trace.record.tracer import UNANNOTATED, Recording, Tracer, remove_raw


class _PhaseListener(OutsideModules):
    """Reports the phases of a step and the start of each batch to the tracer.

    A batch starts with its first phase. So the time between two batches, for example during
    validation, belongs to no batch.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer.outside)
        self._tracer = tracer
        self._running = [OTHER]

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        self._tracer.batch()
        super().enter(phase, given)
        self._running.append(phase)
        self._tracer.phase(phase)

    def leave(self) -> None:
        super().leave()
        self._running.pop()
        self._tracer.phase(self._running[-1])

    drop = leave


class TracedMode(StepMode):
    """Records the traced steps of one window with torch.profiler.

    The recording begins before the data of the first traced step is fetched, and ends with the last
    traced step.

    Args:
        tracer: Records on this rank; `None` if only other ranks record.
        folder: The folder for raw traces.
        notes: If there is no trace, a note with the reason is added here. All windows of a stage
            share this list, so there is only one such note.
        mark: Marks the current step as not typical, for a reason such as `background`.
    """

    touches_step = True
    works_between_steps = True

    def __init__(
        self,
        training: Training,
        stage: Stage,
        window: Window,
        tracer: Tracer | None,
        folder: Path,
        *,
        notes: list[Note],
        mark: Callable[[str], None],
    ) -> None:
        self._training = training
        self._stage = stage
        self._window = window
        # set to `None` after the recording has ended or failed
        self._tracer = tracer
        self._folder = folder
        self._notes = notes
        self._mark = mark
        # set while the tracer records
        self._stop_listening: Callable[[], None] | None = None

    def prepare(self) -> None:
        if self._tracer is not None and not self._tracer.warm_up():
            self._give_up(self._tracer)

    def begin_step(self) -> None:
        tracer = self._tracer
        if tracer is None:
            return
        if self._stop_listening is not None:
            tracer.step(batch=False)
        elif tracer.begin(batch=False):
            self._listen(tracer)
        else:
            self._give_up(tracer)

    def continue_step(self) -> None:
        if self._tracer is not None and self._stop_listening is not None:
            self._tracer.step(whole=False, batch=False)

    def end_step(self) -> EndedStep:
        # if one rank records, the other ranks wait for it
        is_recorded = self._stop_listening is not None or self._training.world_size > 1
        return EndedStep("traced" if is_recorded else "unprofiled")

    def leave(self) -> None:
        if self._tracer is not None and self._stop_listening is not None:
            self._tracer.step(batch=False)
            self._stop(self._tracer)
        if self._training.world_size > 1:
            # the other ranks wait until this recording has ended
            self._mark("background")

    def pause(self) -> None:
        self._end(keep=True)

    def finish(self, error: BaseException | None) -> None:
        self._end(keep=error is None)

    def remove(self) -> None:
        self._end(keep=False)

    def _listen(self, tracer: Tracer) -> None:
        try:
            self._stop_listening = self._stage.listen(_PhaseListener(tracer))
        except BaseException:
            tracer.abandon()
            raise

    def _end(self, *, keep: bool) -> None:
        """End a recording early. If `keep` is true, the batches recorded so far are kept."""
        tracer = self._tracer
        if tracer is None:
            return
        if self._stop_listening is None:
            tracer.abandon()
        elif tracer.batches and keep:
            self._stop(tracer)
        else:
            call_each([self._stop_listening, tracer.abandon])
            self._stop_listening = None

    def _stop(self, tracer: Tracer) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
        worker = f"{platform.node()}_{self._training.rank}"
        recording = tracer.stop(self._folder, worker, whole=None)
        self._tracer = None
        self._stop_listening = None
        if tracer.refusal is not None:
            self._give_up(tracer)
        if recording is not None:
            self._window.recording = recording

    def _give_up(self, tracer: Tracer) -> None:
        """Continue without a trace. The reason is reported once for all windows of a stage."""
        self._tracer = None
        if self._notes:
            return
        values = {} if tracer.error is None else {"error": tracer.error}
        note = Note(code="no_trace", subject=tracer.refusal or "", values=values)
        self._notes.append(note)
        warn(f"{monitor_name()}: {sentence(note)}; training and all other outputs continue")


class TraceAnnotations:
    """Adds the FLOPs of modules to the traces of one stage, such as training.

    Each trace is annotated in a separate process, so that training continues.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._processes: list[AnnotationProcess] = []

    def start(self, recording: Recording, into: Path, profile: Path) -> None:
        """Start to annotate a raw trace.

        Args:
            recording: The recording with the raw trace.
            into: The file for the annotated trace.
            profile: The file of the profile that has the FLOPs of modules.
        """
        raw = recording.raw
        if raw is None:
            return
        calls = RecordedCalls(
            batches=recording.trace.batches or 0,
            rank=self._training.rank,
            world_size=self._training.world_size,
            calls=tuple(recording.calls),
        )
        try:
            into.parent.mkdir(parents=True, exist_ok=True)
            self._processes.append(AnnotationProcess(raw, into, calls, profile))
        except OSError:
            remove_raw(raw)
            raise
        # The annotation process removes the raw trace.
        UNANNOTATED.discard(raw)

    def were_running(self) -> bool:
        """Return whether a process has annotated a trace at any time since the last call.

        Processes that have ended are removed. If one has failed, a warning is issued.
        """
        were_running = bool(self._processes)
        for process in tuple(self._processes):
            if process.is_done:
                self._collect(process)
        return were_running

    def wait(self) -> None:
        """Wait until all traces are annotated."""
        for process in tuple(self._processes):
            self._collect(process)

    def detach(self) -> None:
        """Stop watching the processes that annotate traces. They continue on their own."""
        while self._processes:
            self._processes.pop().leave()

    def _collect(self, process: AnnotationProcess) -> None:
        failure = None
        try:
            failure = process.finish()
        except OSError as error:
            warn(
                f"{monitor_name()}: the trace {process.into} could not be written, but training "
                f"and all other outputs continue: {type(error).__name__}: {error}"
            )
        self._processes.remove(process)
        if not process.is_done:
            process.leave()
        if failure is not None:
            warn(f"{monitor_name()}: the trace {process.into} lacks {process.lacks}: {failure}")
