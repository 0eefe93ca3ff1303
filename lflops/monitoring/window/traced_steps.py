"""The traces of one rank.

Which steps Kineto records, where the files go, and their annotation in the background.
"""

import contextlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lflops.error_guard import Guard, call_each
from lflops.model.module_tree import ModuleTree
from lflops.monitoring.inputs.messages import warn
from lflops.monitoring.inputs.phases import OutsideModules
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Stage, Training
from lflops.profile.notes import Note, sentence
from lflops.timing.step_phases import OTHER
from lflops.trace.annotate import Calls
from lflops.trace.annotate_in_background import AnnotationProcess
from lflops.trace.record.tracer import Recording, Tracer


class _Batches(OutsideModules):
    """Also tells when a batch begins: with its first phase.

    What is between two, as a validation, belongs to neither.
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


class TracedSteps:
    """Records the traced steps of one window after the other."""

    def __init__(
        self,
        training: Training,
        stage: Stage,
        tree: ModuleTree,
        settings: Settings,
        folder: Path,
        *,
        guard: Guard,
    ) -> None:
        self._training = training
        self._stage = stage
        self._tree = tree
        self._settings = settings
        self._folder = folder
        self._guard = guard
        self._tracer: Tracer | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._annotations: list[AnnotationProcess] = []
        # why there is no trace, if there is none
        self.notes: list[Note] = []

    def open(self) -> None:
        """A window opens: get ready, before anything is timed."""
        asked = self._settings
        self._tracer = Tracer(
            self._tree,
            self._training.device,
            activities=asked.activities,
            record_shapes=asked.record_shapes,
            profile_memory=asked.profile_memory,
            with_stack=asked.with_stack,
            inside_compiled=asked.looks_inside_compiled,
            guard=self._guard,
        )
        if not self._tracer.warm_up():
            self._refused(self._tracer)

    def batch(self) -> None:
        """A batch is over, and its step is not."""
        if self._tracer is not None and self._stop_listening is not None:
            self._tracer.step(whole=False, batch=False)

    def step(self, *, traced: bool) -> Recording | None:
        """A step is over, and the next one is to be recorded if `traced`.

        Returns what was recorded, after the last traced step.
        """
        tracer = self._tracer
        if tracer is None:
            return None
        if self._stop_listening is None:
            if traced:
                self._begin(tracer)
            return None
        tracer.step(batch=False)
        return None if traced else self._stop(tracer)

    @property
    def records(self) -> bool:
        """Whether the step that is going on is recorded."""
        return self._stop_listening is not None

    def end(self, *, failed: bool) -> Recording | None:
        """No further step for now.

        What was recorded until here; nothing after a failure, when nothing may wait.
        """
        tracer = self._tracer
        if tracer is None:
            return None
        if self._stop_listening is None:
            tracer.abandon()
            return None
        if tracer.batches and not failed:
            return self._stop(tracer)
        call_each([self._stop_listening, tracer.abandon])
        self._stop_listening = None
        return None

    def annotate(self, recording: Recording, into: Path, profile: Path) -> None:
        """Begin to annotate a trace, in its own process.

        The profile's file says how much a module computes.
        """
        raw = recording.raw
        if raw is None:
            return
        rank, world, batches = (
            self._training.rank,
            self._training.world_size,
            recording.trace.batches or 0,
        )
        calls = Calls(batches=batches, rank=rank, world_size=world, calls=tuple(recording.calls))
        try:
            into.parent.mkdir(parents=True, exist_ok=True)
            self._annotations.append(AnnotationProcess(raw, into, calls, profile))
        except OSError:
            for part in raw.parent.glob(f"{raw.name}*"):
                with contextlib.suppress(OSError):
                    part.unlink()
            raise

    def was_busy(self) -> bool:
        """Whether a trace was being annotated since this was last asked."""
        was_busy = bool(self._annotations)
        for annotation in [each for each in self._annotations if each.is_done]:
            self._finish(annotation)
        return was_busy

    def wait(self) -> None:
        """Until all traces are annotated."""
        for annotation in tuple(self._annotations):
            self._finish(annotation)

    def leave(self) -> None:
        """Wait for none of the traces that are being annotated.

        Their processes go on by themselves.
        """
        while self._annotations:
            self._annotations.pop().leave()

    def _begin(self, tracer: Tracer) -> None:
        if not tracer.begin(batch=False):
            self._refused(tracer)
            return
        try:
            self._stop_listening = self._stage.listen(_Batches(tracer))
        except BaseException:
            tracer.abandon()
            raise

    def _stop(self, tracer: Tracer) -> Recording | None:
        if self._stop_listening is not None:
            self._stop_listening()
        recording = tracer.stop(
            self._folder, f"{platform.node()}_{self._training.rank}", whole=None
        )
        self._tracer = self._stop_listening = None
        if tracer.refusal is not None:
            self._refused(tracer)
        return recording

    def _refused(self, tracer: Tracer) -> None:
        self._tracer = None
        if not self.notes:
            values = {} if tracer.error is None else {"error": tracer.error}
            note = Note(code="no_trace", subject=tracer.refusal or "", values=values)
            self.notes.append(note)
            warn(f"FlopsMonitor: {sentence(note)}; all else goes on")

    def _finish(self, annotation: AnnotationProcess) -> None:
        try:
            failure = annotation.finish()
        except OSError as error:
            warn(
                f"FlopsMonitor: {annotation.into} was not written; all else goes on: {type(error).__name__}: {error}"
            )
            failure = None
        self._annotations.remove(annotation)
        if not annotation.is_done:
            annotation.leave()
        if failure is not None:
            warn(
                f"FlopsMonitor: {annotation.into} is a trace without {annotation.lacks}: {failure}"
            )
