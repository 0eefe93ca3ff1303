"""Run torch.profiler over a few consecutive steps, and read the recording.

torch.profiler records with Kineto, and a process can have only one Kineto session. A session is
first prepared and then started. Two profilers in one process can disturb each other:

* If a session is prepared while another session records, the other session is cut off, and the
  process sometimes crashes.
* If another session runs between preparing a session and starting it, the process crashes.

Therefore, `Tracer` does not record while another profiler runs. It starts its session immediately
after preparing it. If another profiler is prepared during a recording, the recording ends first.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lflops.error_guard import CleanupStack, Guard, call_each, unguarded
from lflops.files import folder_opened, temporary_path
from lflops.garbage import SearchTimeout, alive, gc_paused
from lflops.inputs.devices import profiler_activity
from lflops.model.module_tree import ModuleTree
from lflops.profile.records import Call, ModulePhase, Phase, TimingStats, Trace
from lflops.profile.series import grouped, summed
from lflops.profile.timeline import StepTimeline
from lflops.timing.module_times import inclusive, timing_stats
from lflops.torch_private.autograd import profiler_is_recording, wrap_profilers
from lflops.torch_private.dispatch_modes import without_modes
from lflops.trace.record.compiled_time import CompiledTimes, divided_among_modules
from lflops.trace.record.events import AttributedTrace, join, read
from lflops.trace.record.module_log import ModuleLog
from lflops.trace.record.step_timeline import (
    PhaseMark,
    communication,
    communication_on_host,
    device_seconds,
    timelines_of,
)
from lflops.trace.recorded import STEP, outer_first

Activity = Literal["cpu", "device"]
ACTIVITIES: tuple[Activity, ...] = ("cpu", "device")

Refusal = Literal[
    "other_profiler", "not_known", "own_trace", "cut_off", "no_activity", "not_written"
]
"""Reason why there is no recording, or no trace file.

* `other_profiler`: Another profiler runs.
* `not_known`: The search for other profilers took too long.
* `own_trace`: Another recording by lflops runs.
* `cut_off`: Another profiler began during the recording.
* `no_activity`: This version of torch can record none of the activities.
* `not_written`: The trace file could not be written.
"""


UNANNOTATED: set[Path] = set()
"""Traces that Kineto has written, but that no process annotates yet.

If Python exits, they are removed.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Results of the traced steps.

    `kernels` and `communication` are averages per step. They are empty if the recording ends in the
    middle of a step, because the averages would then include an incomplete step.

    Attributes:
        raw: Path of the raw trace that Kineto wrote. Trace readers ignore this file name. `None` if
            the trace could not be written.
        path: Path that the trace gets when it is annotated and compressed.
        events: Number of Kineto's events.
        trace: The trace's entry in the profile, such as operators and idle time; its list of files
            is still empty.
        device_seconds: Inclusive device time of each module and phase over complete steps; `None`
            without a device.
        kernels: Time of the kernels that each module and phase launched itself, in seconds per
            step. Collectives are left out, because they include the wait for other ranks.
        communication: Total and exposed seconds of collectives per step, by the module and phase
            that launched the collectives and by their kind.
        calls: Calls of modules and scopes, for annotating the trace.
        compiled: Times inside compiled graphs; `None` if they were not requested or no graph ran.
        call_times: For each batch, the self time of each module and phase in nanoseconds; empty if
            `compiled` is `None`.
        timelines: Timelines of complete steps. The step whose duration is the median comes first.
    """

    raw: Path | None
    path: Path
    events: int
    trace: Trace
    device_seconds: Mapping[ModulePhase, TimingStats] | None
    kernels: Mapping[ModulePhase, float]
    communication: Mapping[tuple[ModulePhase, str], tuple[float, float]]
    calls: tuple[Call, ...]
    compiled: CompiledTimes | None = None
    call_times: tuple[Mapping[ModulePhase, float], ...] = ()
    timelines: tuple[StepTimeline, ...] = ()


class Tracer:
    """Records a trace with torch.profiler from `begin` to `stop`.

    Its methods must be called on the training thread.

    Attributes:
        refusal: Reason why there is no recording or no file; `None` while there is no problem.
        error: Error that kept the trace file from being written, or `None`.
    """

    _recording: ClassVar["weakref.WeakSet[Tracer]"] = weakref.WeakSet()

    def __init__(
        self,
        tree: ModuleTree,
        device: torch.device | None = None,
        *,
        activities: Collection[Activity] = ACTIVITIES,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        inside_compiled: bool = False,
        guard: Guard = unguarded,
    ) -> None:
        """Prepare to record.

        Args:
            tree: The modules.
            device: The device of the model, if it has one.
            activities: What to record: the host, the device, or both.
            record_shapes: Passed to torch.profiler.
            profile_memory: Passed to torch.profiler.
            with_stack: Passed to torch.profiler.
            inside_compiled: Whether to divide the time of compiled graphs among modules.
            guard: Wraps the hooks so that their errors do not reach the training run.
        """
        self.refusal: Refusal | None = None
        self.error: str | None = None
        self._tree = tree
        self._guard = guard
        self._inside_compiled = inside_compiled
        self._activities: list[ProfilerActivity] = []
        if "cpu" in activities:
            self._activities.append(ProfilerActivity.CPU)
        self._device = False
        if device is not None and "device" in activities:
            activity = profiler_activity(device)
            if activity is not None:
                self._activities.append(activity)
                self._device = True
        if not self._activities:
            self.refusal = "no_activity"
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._log = ModuleLog(tree)
        self._hooks = CleanupStack()
        self._profile: profile | None = None
        self._step: record_function | None = None
        # For each batch, true if a step ended with it.
        self._ends: list[bool] = []
        self._phases: list[PhaseMark] = []

    def warm_up(self) -> bool:
        """Record for a moment, so that torch loads its support for device tracing now.

        Otherwise, the first recorded step would take longer.

        Returns:
            Whether recording is possible. If not, `refusal` has the reason.
        """
        if not self._is_free():
            return False
        if self._device:
            try:
                self._start()
            finally:
                self.abandon()
        return True

    def begin(self, *, batch: bool = True) -> bool:
        """Start recording, and begin the first batch if `batch` is true.

        Returns:
            Whether the recording started. If not, `refusal` has the reason.
        """
        if not self._is_free():
            return False
        self._ends = []
        self._phases = []
        try:
            self._start()
            wrap_profilers(self._hooks, self._guard(self._give_way))
            self._log.install(self._hooks, self._guard)
            if batch:
                self.batch()
        except BaseException:
            self.abandon()
            raise
        return True

    @property
    def batches(self) -> int:
        """Number of batches that have ended."""
        return len(self._ends)

    def batch(self) -> None:
        """Begin a batch, unless a batch is already running.

        Work between two batches, for example validation, is recorded but belongs to no batch.
        """
        if self._profile is not None and self._step is None:
            self._step = record_function(f"{STEP}{len(self._ends)}")
            # A user's dispatch mode must not see the operator of `record_function`.
            with without_modes():
                self._step.__enter__()
            self._log.step()

    def step(self, *, whole: bool = True, batch: bool = True) -> None:
        """End the current batch.

        Args:
            whole: Whether this is the last batch of an optimizer step. With gradient accumulation,
                a step has several batches.
            batch: Whether to begin the next batch immediately.
        """
        if self._step is not None:
            self._end_step(whole=whole)
            if batch:
                self.batch()

    def outside(self, phase: Phase) -> None:
        """Set the phase to which work outside all modules belongs from now on.

        The phase is valid until the next module is called or the next backward pass begins.
        """
        if self._profile is not None:
            self._log.outside(phase)

    def phase(self, phase: str) -> None:
        """Record that a phase of the step begins now. The step's timeline shows the phase."""
        if self._profile is not None:
            self._phases.append((time.time_ns(), phase))

    def stop(self, folder: Path, worker: str, *, whole: bool | None = True) -> Recording | None:
        """Stop recording, and read the recording.

        Args:
            folder: Folder of the trace, which is created.
            worker: Machine and global rank, for example `host_3`.
            whole: Whether the current batch is the last batch of an optimizer step; `None` if no
                batch is running.

        Returns:
            The recording, or `None` if there is none, for example because another profiler began
            during it. `refusal` and `error` show why there is no recording or no trace file.
        """
        call_each([self._hooks.close, partial(self._end_step, whole=whole)])
        # Reading creates several objects for each event, so garbage collection would run often.
        with gc_paused():
            recorder = self._stop_recording()
            if recorder is None:
                return None
            raw = recorded_events(recorder)
            if not raw:
                self.refusal = "cut_off"
                return None
            path = folder / f"{worker.replace('.', '-')}.{time.time_ns()}.pt.trace.json.gz"
            unfinished = temporary_path(folder, ".raw")
            UNANNOTATED.add(unfinished)
            self.error = _export(recorder, unfinished)
            # A reference cycle in torch's profiler would keep the events until garbage collection.
            recorder.profiler = None
            if self.error is not None:
                self.refusal = "not_written"
                return self._read(raw, None, path)
            return self._read(raw, unfinished, path)

    def abandon(self) -> None:
        """Stop, and discard the recording. A second call does nothing."""
        call_each([self._hooks.close, partial(self._end_step, whole=None), self._stop_recording])

    def leave_to_parent(self) -> None:
        """Drop this recording in a forked process. The parent process continues the recording."""
        self._recording.discard(self)
        self._step = None
        self._profile = None

    def _is_free(self) -> bool:
        """Return whether a recording can start now; if not, set `refusal`."""
        try:
            if self.refusal is None and other_profiler_runs():
                self.refusal = "own_trace" if self._recording else "other_profiler"
        except SearchTimeout:
            # Starting next to a profiler that is being prepared would crash.
            self.refusal = "not_known"
        return self.refusal is None

    def _start(self) -> None:
        # Without `acc_events`, torch 2.11 warns that events of several cycles are lost, although
        # there is only one cycle. The option is turned off afterwards, because otherwise torch
        # converts all events as soon as it stops.
        self._profile = profile(activities=self._activities, acc_events=True, **self._options)
        self._recording.add(self)
        self._profile.prepare_trace()
        inner: Any = self._profile.profiler
        inner.acc_events = False
        self._profile.start_trace()

    def _stop_recording(self) -> profile | None:
        recorder = self._profile
        if recorder is not None and recorder.profiler is not None:
            recorder.stop_trace()
        self._profile = None
        self._recording.discard(self)
        return recorder

    def _give_way(self) -> None:
        """Stop recording, because another profiler is being prepared."""
        recorder = self._profile
        self._profile = None
        if recorder is None:
            return
        self.refusal = "cut_off"
        # If this runs on another thread, torch has no record of this profiler there, and Kineto
        # itself ends the recording.
        if threading.get_ident() == self._log.home:
            # End the step now. If it ended during the other recording, torch would write into
            # freed memory.
            self._end_step(whole=None)
            recorder.stop_trace()
        # A reference cycle in the recorder would keep the events.
        recorder.profiler = None

    def _end_step(self, *, whole: bool | None) -> None:
        step = self._step
        if step is not None:
            self._step = None
            with without_modes():
                step.__exit__(None, None, None)
            if whole is not None:
                self._ends.append(whole)

    def _read(self, raw: Sequence[object], unfinished: Path | None, path: Path) -> Recording:
        trace = read(raw, device=self._device, stack=self._options["with_stack"])
        log = self._log
        if self._device:
            communicated = communication(trace.work)
            found = join(trace, log.threads, log.home, self._tree, communicated)
        else:
            on_host = communication_on_host(trace)
            found = join(trace, log.threads, log.home, self._tree, on_host=on_host)
        batches = len(found.device)
        compiled = None
        times: tuple[Mapping[ModulePhase, float], ...] = ()
        times_of_batches = chain.from_iterable(batch.items() for batch in found.device)
        kernel_times = summed(times_of_batches)
        if self._inside_compiled and found.regions:
            compiled = divided_among_modules(
                found.regions, found.device, self._tree, device=self._device
            )
            times = call_times(found.calls, found.batch_at, batches)
        has_steps = bool(self._ends) and self._ends[-1]
        steps = sum(self._ends) if has_steps else 0
        seconds = device_seconds(trace.work)
        return Recording(
            raw=unfinished,
            path=path,
            events=len(raw),
            trace=Trace(
                files={},
                batches=len(self._ends),
                device_idle_seconds=seconds.get("idle"),
                device_compute_seconds=seconds.get("computing"),
                exposed_comm_seconds=seconds.get("exposed_communication"),
                exposed_copy_seconds=seconds.get("exposed_copies"),
                operators=found.operators,
                compiled=None if compiled is None else compiled.code,
            ),
            device_seconds=_stats_of_steps(found.device, self._ends) if seconds else None,
            kernels=_kernel_seconds(kernel_times, found, steps),
            communication=_communication_seconds(found, steps),
            calls=tuple(found.calls),
            compiled=compiled,
            call_times=times,
            timelines=tuple(timelines_of(trace, found.calls, self._ends, self._phases)),
        )


def _kernel_seconds(
    kernel_times: Mapping[ModulePhase, float], found: AttributedTrace, steps: int
) -> dict[ModulePhase, float]:
    """Return the kernel time of each module and phase in seconds per step, without collectives."""
    if not steps:
        return {}
    communicated: defaultdict[ModulePhase, float] = defaultdict(float)
    for (place, _), (nanoseconds, _) in found.communication.items():
        communicated[place] += nanoseconds
    seconds = {}
    for place, took in kernel_times.items():
        seconds[place] = max(took - communicated[place], 0) / steps / 1e9
    return seconds


def _communication_seconds(
    found: AttributedTrace, steps: int
) -> dict[tuple[ModulePhase, str], tuple[float, float]]:
    """Return the total and exposed seconds of collectives per step.

    The keys are the module and phase that launched the collectives, and the kind of collective.
    """
    if not steps:
        return {}
    seconds = {}
    for place, (nanoseconds, exposed) in found.communication.items():
        seconds[place] = (nanoseconds / steps / 1e9, exposed / steps / 1e9)
    return seconds


def other_profiler_runs() -> bool:
    """Return whether a torch profiler has been prepared or entered but not yet stopped.

    Searches all objects of the process, and raises `SearchTimeout` if this takes too long.
    """
    if profiler_is_recording():
        return True
    autograd_profilers = _with_subclasses(torch.autograd.profiler.profile)
    profilers = _with_subclasses(torch.profiler.profile)
    for each in alive(autograd_profilers | profilers):
        if type(each) in autograd_profilers:
            runs = each.enabled and each.entered and each.kineto_results is None
        else:
            runs = each.step_rec_fn is not None and not _is_over(each)
        if runs:
            return True
    return False


def recorded_events(profiler: torch.profiler.profile) -> Sequence[Any]:
    """Return the recorded events as Kineto's objects.

    torch could convert them to its own events, but this would take a hundred times as long.
    """
    results = None
    if profiler.profiler is not None:
        results = profiler.profiler.kineto_results
    return () if results is None else results.events()


def _is_over(begun: torch.profiler.profile) -> bool:
    """Return whether a profiler was stopped during a warm-up or a recording.

    torch 2.8 and 2.11 have no flag for this. So a profiler counts as stopped if its schedule is in
    one of these phases, but it already has results. If a profiler was stopped while its schedule
    waited, the result is wrongly false, because it looks like a profiler that still waits.
    """
    action = begun.current_action.name
    is_in_cycle = action in {"WARMUP", "RECORD", "RECORD_AND_SAVE"} and not begun.acc_events
    return is_in_cycle and begun.profiler is not None and begun.profiler.kineto_results is not None


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _export(recorder: profile, into: Path) -> str | None:
    """Write the trace, and return the error if it could not be written.

    If the disk is full, Kineto raises no exception and only writes a line to stderr. So the
    function checks that the file exists.
    """
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        if _is_plain(str(into)):
            recorder.export_chrome_trace(str(into))
        else:
            with folder_opened(into.parent) as folder:
                recorder.export_chrome_trace(f"{folder}/{into.name}")
        error = None
        if not into.exists():
            error = f"Kineto could not write {into}"
    except Exception as raised:  # noqa: BLE001 - the other results remain
        error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        remove_raw(into)
    return error


def _is_plain(path: str) -> bool:
    """Return whether Kineto can write to a path, which must be printable ASCII without a comma."""
    return path.isascii() and path.isprintable() and "," not in path


def remove_raw(path: Path) -> None:
    """Remove a raw trace, and its unfinished file if Kineto has left one."""
    UNANNOTATED.discard(path)
    for part in (path, path.with_name(f"{path.name}.tmp")):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _stats_of_steps(
    batches: Iterable[Mapping[ModulePhase, float]], ends: Sequence[bool]
) -> dict[ModulePhase, TimingStats]:
    """Return statistics of each module's inclusive time per step, in seconds.

    The inclusive times are computed from self times.

    Args:
        batches: For each batch, the self time of each module and phase in nanoseconds. Batches
            after the last complete step are ignored.
        ends: For each batch, whether it is the last batch of a step.
    """
    steps: list[dict[ModulePhase, float]] = []
    step: defaultdict[ModulePhase, float] = defaultdict(float)
    for batch, ends_step in zip(batches, ends, strict=False):
        for key, nanoseconds in batch.items():
            step[key] += nanoseconds / 1e9
        if ends_step:
            steps.append(inclusive(step))
            step = defaultdict(float)
    return timing_stats(steps)


def call_times(
    calls: Iterable[Call], batch_at: Callable[[int], int], batches: int
) -> tuple[dict[ModulePhase, float], ...]:
    """Return, for each batch, the self time of each module and phase in nanoseconds."""
    times: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in range(batches)]
    for calls_of_thread in grouped(calls, attrgetter("thread")).values():
        opened: list[Call] = []
        for call in outer_first(calls_of_thread, opened):
            in_batch = times[batch_at(call.start)]
            took = call.end - call.start
            in_batch[ModulePhase(call.fqn, call.phase)] += took
            if opened:
                in_batch[ModulePhase(opened[-1].fqn, opened[-1].phase)] -= took
            opened.append(call)
    return tuple(map(dict, times))


@atexit.register
def _end_at_exit() -> None:
    """Stop recordings that still run, for example if a monitor was entered and never left.

    torch crashes if the interpreter exits during a recording. Traces that are not annotated yet,
    for example after Ctrl-C, are removed.
    """
    for each in list(Tracer._recording):  # noqa: SLF001 - same file
        with contextlib.suppress(Exception):
            each.abandon()
    for path in tuple(UNANNOTATED):
        remove_raw(path)


def _forget_in_child() -> None:
    """Drop all recordings and trace files in a forked process: they belong to the parent process.

    The child process cannot continue the recordings, because it has none of Kineto's threads.
    """
    for each in tuple(Tracer._recording):  # noqa: SLF001 - same file
        each.leave_to_parent()
    UNANNOTATED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
