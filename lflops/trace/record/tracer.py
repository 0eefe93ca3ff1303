"""Drives torch.profiler over a few steps in a row, and reads what it recorded.

Kineto has one session in a process. One that is got ready while another records cuts that one off,
and sometimes crashes. One that is started after another has ended, without being got ready again,
crashes. So `Tracer` starts nothing while another profiler runs. It gets ready and starts in one go,
so that no other profiler comes between. When another gets ready meanwhile, it ends first.
"""

import atexit
import contextlib
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lflops.error_guard import CleanupStack, Guard, call_each, unguarded
from lflops.garbage import SearchTimeout, alive, gc_paused
from lflops.inputs.devices import profiler_activity
from lflops.model.module_tree import ModuleTree, rows_of
from lflops.profile.records import Call, ModulePhase, Phase, TimingStats, Trace
from lflops.profile.series import grouped, summed
from lflops.profile.timeline import StepTimeline
from lflops.timing.module_times import inclusive, spreads_of
from lflops.torch_private.autograd import hear_profilers, profiler_is_recording
from lflops.torch_private.dispatch_modes import without_modes
from lflops.trace.record.compiled_time import CompiledTimes, recorded_graphs, times_of
from lflops.trace.record.events import AttributedTrace, join, read
from lflops.trace.record.module_log import ModuleLog
from lflops.trace.record.step_timeline import (
    PhaseMark,
    communication,
    communication_on_host,
    device_seconds,
    timeline_of,
)
from lflops.trace.recorded import STEP, outer_first

Activity = Literal["cpu", "device"]
ACTIVITIES: tuple[Activity, ...] = ("cpu", "device")

Refusal = Literal[
    "other_profiler", "not_known", "own_trace", "cut_off", "no_activity", "not_written"
]
"""Why there is no recording.

Somebody else's profiler runs, or another recording of ours; somebody else's ran while ours did;
none of the activities can be recorded here. Or why there is no file: it could not be written.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What the recorded steps showed."""

    raw: (
        Path | None
        # the trace as Kineto wrote it, under a name that no reader of traces looks for; `None` where it
        # could not be written
    )
    # where it belongs once it is annotated and packed
    path: Path
    # how many Kineto recorded
    events: int
    # the totals, without its files
    trace: Trace
    # The device's time for each row and those below it, over whole steps; `None` where no device
    # was recorded.
    device_seconds: Mapping[ModulePhase, TimingStats] | None
    # Own seconds of kernels a step, without collectives, which wait for other ranks; empty where
    # the recording ends within a step.
    kernels: Mapping[ModulePhase, float]
    # Seconds of collectives a step and of these the exposed ones, by module and phase of what
    # launched them, and by kind; empty where the recording ends within a step.
    communication: Mapping[tuple[ModulePhase, str], tuple[float, float]]
    # of modules and named parts, for the annotation
    calls: tuple[Call, ...]
    compiled: CompiledTimes | None = (
        # what ran inside of compiled graphs; `None` if that was not asked for, or none ran
        None
    )
    # Own nanoseconds of modules in each batch, by their calls; empty without `compiled`.
    call_times: tuple[Mapping[ModulePhase, float], ...] = ()
    # one whole step; `None` where none was recorded
    timeline: StepTimeline | None = None


class Tracer:
    """Records from `begin` to `stop`, on the thread that trains."""

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
        self._inside_compiled = inside_compiled
        self._tree = tree
        of_device = (
            None if device is None or "device" not in activities else profiler_activity(device)
        )
        self._device = of_device is not None
        asked = ProfilerActivity.CPU if "cpu" in activities else None, of_device
        self._activities = [each for each in asked if each is not None]
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._log = ModuleLog(tree)
        self._profile: profile | None = None
        self._step: record_function | None = None
        # of each batch, whether a step ended with it
        self._ends: list[bool] = []
        self._phases: list[PhaseMark] = []
        self._guard = guard
        self._hooks = CleanupStack()
        # Why there is no recording, or no file of it; `None` while nothing is against one.
        self.refusal: Refusal | None = None if self._activities else "no_activity"
        self.error: str | None = (
            # what kept the file from being written, in the words of the error
            None
        )

    def warm_up(self) -> bool:
        """Load what tracing a device takes, by a session of nothing, so that the first step does not pay for it.

        Returns as `begin`.
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
        """Start recording, with the first batch if `batch`.

        Returns whether it may be; if not, `refusal` says why.
        """
        if not self._is_free():
            return False
        self._ends, self._phases = [], []
        try:
            self._start()
            hear_profilers(self._hooks, self._guard(self._give_way))
            self._log.install(self._hooks, self._guard)
            if batch:
                self.batch()
        except BaseException:
            self.abandon()
            raise
        return True

    @property
    def batches(self) -> int:
        """The number of batches that are over."""
        return len(self._ends)

    def batch(self) -> None:
        """A batch begins, if none is going on.

        What is recorded between two of them belongs to none.
        """
        if self._profile is not None and self._step is None:
            self._step = record_function(f"{STEP}{len(self._ends)}")
            # a mode of the user's would see the operator
            with without_modes():
                self._step.__enter__()
            self._log.step()

    def step(self, *, whole: bool = True, batch: bool = True) -> None:
        """A batch is over, and a step if `whole`; the spreads are taken over steps.

        The next begins if `batch`.
        """
        if self._step is not None:
            self._end_step(whole=whole)
            if batch:
                self.batch()

    def outside(self, phase: Phase) -> None:
        """Say what is outside of every module from now on, until a module is called, or backward runs."""
        if self._profile is not None:
            self._log.outside(phase)

    def phase(self, phase: str) -> None:
        """Say which phase of the step is the innermost one from now on."""
        if self._profile is not None:
            self._phases.append((time.time_ns(), phase))

    def stop(self, folder: Path, worker: str, *, whole: bool | None = True) -> Recording | None:
        """End with the batch that is over now, and read what was recorded.

        `None` where somebody else's profiler began meanwhile.

        The trace belongs in the folder, which is made. The worker traced, as `host_3`: the machine
        and the global rank. `whole` says whether the batch ended a step, and is `None` where none
        has begun since the last. `refusal` and `error` say why there is no file.
        """
        call_each([self._hooks.close, partial(self._end_step, whole=whole)])
        # several objects for each event
        with gc_paused():
            recorder = self._stop_recording()
            if recorder is None:
                return None
            raw = recorded_events(recorder)
            if not raw:
                self.refusal = "cut_off"
                return None
            path = folder / f"{worker.replace('.', '-')}.{time.time_ns()}.pt.trace.json.gz"
            unfinished = path.with_name(f"{path.name}.raw")
            self.error = _export(recorder, unfinished)
            # a cycle within torch's profiler would keep the events until somebody collects
            recorder.profiler = None
            if self.error is not None:
                self.refusal = "not_written"
            return self._read(raw, unfinished if self.error is None else None, path)

    def abandon(self) -> None:
        """End without a recording: nothing of ours goes on. It can be called again."""
        call_each([self._hooks.close, partial(self._end_step, whole=None), self._stop_recording])

    def _is_free(self) -> bool:
        try:
            if self.refusal is None and other_profiler_runs():
                self.refusal = "own_trace" if self._recording else "other_profiler"
        except SearchTimeout:
            # to start ours next to one that gets ready would be a crash
            self.refusal = "not_known"
        return self.refusal is None

    def _start(self) -> None:
        # Of one that would not keep the events of several cycles torch 2.11 warns, though ours has
        # but one.
        self._profile = profile(activities=self._activities, acc_events=True, **self._options)
        self._recording.add(self)
        self._profile.prepare_trace()
        within: Any = self._profile.profiler
        within.acc_events = (
            # else torch makes its own events of all that is recorded as soon as it stops
            False
        )
        self._profile.start_trace()

    def _stop_recording(self) -> profile | None:
        recorder = self._profile
        if recorder is not None and recorder.profiler is not None:
            recorder.stop_trace()
        self._profile = None
        self._recording.discard(self)
        return recorder

    def _give_way(self) -> None:
        """Somebody else's profiler gets ready."""
        recorder, self._profile = self._profile, None
        if recorder is not None:
            self.refusal = "cut_off"
            if (
                threading.get_ident() == self._log.home
                # on another thread torch knows nothing of ours, and Kineto ends it
            ):
                self._end_step(
                    whole=None
                    # in their recording its end would be written into memory that ours no longer has
                )
                recorder.stop_trace()
            # a cycle within it would keep the events
            recorder.profiler = None

    def _end_step(self, *, whole: bool | None) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            with without_modes():
                step.__exit__(None, None, None)
            if whole is not None:
                self._ends.append(whole)

    def _read(self, raw: Sequence[object], unfinished: Path | None, path: Path) -> Recording:
        recorded = read(raw, device=self._device, stack=self._options["with_stack"])
        collectives: dict[str, Any] = (
            {"communicated": communication(recorded.work)}
            if self._device
            else {"on_host": communication_on_host(recorded)}
        )
        joined = join(recorded, self._log.threads, self._log.home, self._tree, **collectives)
        steps = sum(self._ends) if self._ends and self._ends[-1] else 0
        seconds = device_seconds(recorded.work)
        waited = summed((place, whole) for (place, _), (whole, _) in joined.communication.items())
        own = summed(item for batch in joined.device for item in batch.items())
        kernels = (
            {key: max(took - waited.get(key, 0), 0) / steps / 1e9 for key, took in own.items()}
            if steps
            else {}
        )
        compiled = self._compiled(joined) if self._inside_compiled and joined.regions else None
        trace = Trace(
            files={},
            batches=len(self._ends),
            device_idle_seconds=seconds.get("idle"),
            device_compute_seconds=seconds.get("computing"),
            exposed_comm_seconds=seconds.get("exposed_communication"),
            exposed_copy_seconds=seconds.get("exposed_copies"),
            operators=joined.operators,
            compiled=None if compiled is None else compiled.code,
        )
        return Recording(
            raw=unfinished,
            path=path,
            events=len(raw),
            trace=trace,
            device_seconds=None if not seconds else _spreads(joined.device, self._ends),
            kernels=kernels,
            communication={
                place: (whole / steps / 1e9, alone / steps / 1e9)
                for place, (whole, alone) in joined.communication.items()
                if steps
            },
            calls=tuple(joined.calls),
            compiled=compiled,
            call_times=()
            if compiled is None
            else call_times(joined.calls, joined.batch_at, len(joined.device)),
            timeline=timeline_of(recorded, joined.calls, self._ends, self._phases),
        )

    def _compiled(self, joined: AttributedTrace) -> CompiledTimes:
        """Divide compiled regions over modules, and with them the device's time in `joined`."""
        graphs = recorded_graphs(region.key for region in joined.regions)
        times = times_of(
            joined.regions,
            graphs,
            lambda graph, running: rows_of(graph.modules, running, self._tree),
            batches=len(joined.device),
            device=self._device,
        )
        for batch, opened in zip(joined.device, times.device, strict=True):
            for running, by_module in opened.items():
                for key, took in by_module.items():
                    batch[running] = batch.get(running, 0) - took
                    batch[key] = batch.get(key, 0) + took
        return times


def other_profiler_runs() -> bool:
    """Whether a profiler of torch's is got ready or entered and not stopped.

    A `SearchTimeout` where that takes too long to find out.
    """
    if profiler_is_recording():
        return True
    entered, begun = (
        _and_its_subclasses(torch.autograd.profiler.profile),
        _and_its_subclasses(torch.profiler.profile),
    )
    for each in alive(entered | begun):
        if type(each) not in entered:
            runs = each.step_rec_fn is not None and not _is_over(each)
        else:
            runs = each.enabled and each.entered and each.kineto_results is None
        if runs:
            return True
    return False


def recorded_events(profiler: torch.profiler.profile) -> Sequence[Any]:
    """Kineto's own events, of which torch makes its own in a hundred times as long."""
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    return () if results is None else results.events()


def _is_over(begun: torch.profiler.profile) -> bool:
    """Whether it was stopped while it recorded, which it does not say itself in torch 2.8 and 2.11.

    Its last cycle has results.
    """
    # One that was stopped while it waited looks the same there as one that still waits.
    in_a_cycle = (
        begun.current_action.name in ("WARMUP", "RECORD", "RECORD_AND_SAVE")
        and not begun.acc_events
    )
    return in_a_cycle and begun.profiler is not None and begun.profiler.kineto_results is not None


def _and_its_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_and_its_subclasses, kind.__subclasses__()))


def _export(recorder: profile, into: Path) -> str | None:
    """Write the trace.

    Returns why it is not there: of a disk that is full Kineto writes a line to stderr, and raises
    nothing.
    """
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        recorder.export_chrome_trace(str(into))
        error = None if into.exists() else f"Kineto could not write {into}"
    except Exception as raised:  # noqa: BLE001 - the other results of the recording are there
        error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        for part in (into, into.with_name(f"{into.name}.tmp")):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return error


def _spreads(
    batches: Iterable[Mapping[ModulePhase, float]], ends: Sequence[bool]
) -> dict[ModulePhase, TimingStats]:
    """Seconds of each row and those below it, step by step.

    Batches that no step ends with are left out.
    """
    steps: list[dict[ModulePhase, float]] = []
    step: defaultdict[ModulePhase, float] = defaultdict(float)
    for batch, ends_step in zip(batches, ends, strict=False):
        for key, nanoseconds in batch.items():
            step[key] += nanoseconds / 1e9
        if ends_step:
            steps.append(inclusive(step))
            step = defaultdict(float)
    return spreads_of(steps)


def call_times(
    calls: Iterable[Call], batch_at: Callable[[int], int], batches: int
) -> tuple[dict[ModulePhase, float], ...]:
    """Own nanoseconds of each row and phase in each batch.

    Of its calls, without the calls inside of them.
    """
    own: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in range(batches)]
    for of_thread in grouped(calls, attrgetter("thread")).values():
        opened: list[Call] = []
        for call in outer_first(of_thread, opened):
            in_batch = own[batch_at(call.start)]
            in_batch[ModulePhase(call.fqn, call.phase)] += call.end - call.start
            if opened:
                in_batch[ModulePhase(opened[-1].fqn, opened[-1].phase)] -= call.end - call.start
            opened.append(call)
    return tuple(map(dict, own))


@atexit.register
def _end_at_exit() -> None:
    """End what still records, as where a loop's monitor was entered and never left.

    Torch crashes where the interpreter ends before it.
    """
    for each in list(Tracer._recording):  # noqa: SLF001 - this file's own
        with contextlib.suppress(Exception):
            each.abandon()
