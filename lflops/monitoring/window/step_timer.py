"""Time the steps of a run, and mark the steps whose time is not typical.

Most steps take the fast path, on which only a clock is read. This code runs in every training step,
so work that can wait is done later, when the times of a step are read.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from resource import struct_rusage
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_post_hook

from lflops.error_guard import CleanupStack, Guard
from lflops.inputs.batch import BatchReader, BatchTensors, units_of
from lflops.inputs.batch_size import BatchSizes, tokens_of_shapes
from lflops.monitoring.inputs.messages import monitor_name
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.phase_log import STEP_END
from lflops.profile.series import sum_known
from lflops.profile.steps import EVENTS, Step, StepKind, is_unprofiled
from lflops.timing.clock import ThreadSchedule, cpu_usage
from lflops.timing.stack_samples import StackSample
from lflops.timing.step_phases import LoggedPhases, MarkedPhases, PhaseMarks, StepPhases
from lflops.torch_private.modules import Compilations, compilations, remove_hook

# number of steps at the start of a stage that are marked as warm-up
WARMUP_STEPS = 2
# Number of distinct batch shapes after which a new shape no longer marks its step as not typical.
MANY_SHAPES = 16
# If an event, such as a checkpoint, happens in this many consecutive steps, it is part of a typical
# step. From then on, it no longer marks a step as not typical.
USUAL_AFTER = 4
# maximum number of shapes to store, because new shapes in every batch must not fill the memory
MOST_SHAPES = 1000

# Maximum number of consecutive steps on the fast path, and maximum number of ended steps whose
# times are not read yet.
MAX_PENDING_STEPS = 200

# In every `CPU_ROUND` steps on the fast path, the process's CPU time is measured for `CPU_READ`
# steps. Reading it is slow, since the system adds up the time of all threads.
CPU_ROUND = 16
CPU_READ = 3


class BatchUnits(NamedTuple):
    """The shapes of a batch, its number of samples and its number of tokens.

    A value that is unknown is `None`.
    """

    shapes: Hashable
    samples: int | None
    tokens: int | None


class FastPathSteps:
    """Records the steps on the fast path since the last step on the slow path.

    A step takes the fast path if it has one batch, with shapes that occurred before, and if lflops
    has no work to do at its end. Almost every training step is such a step. The fast path uses as
    few objects as possible, and `TimedStep` objects are created later: a training step evicts this
    code and its objects from the processor's caches, and loading them again takes longer than
    running the code.

    Attributes:
        limit: Maximum length of `steps`. Only `StepTimer.allow_fast_path` sets it.
        in_batch: Whether a batch has begun and not ended.
        known: The shapes, samples and tokens of earlier batches, keyed by shapes.
        steps: The shapes, samples and tokens of each step's batch.
        cpu: The CPU time of the process at the end of some steps. The key n belongs to the n-th
            step in `steps`, counted from 1.
        reads_cpu: Whether CPU times are read at all.
        schedule: Reads how long the training thread has run and waited for a core. `None` if this
            is not needed.
        threads: The values that `schedule` has returned, with keys as in `cpu`.
    """

    def __init__(self, phases: LoggedPhases, schedule: ThreadSchedule | None = None) -> None:
        """Start without any steps. `phases` measures the stage's phases on the host clock."""
        self.limit = 0
        self.in_batch = False
        self.known: dict[Hashable, BatchUnits] = {}
        self.steps: list[BatchUnits] = []
        self.cpu: dict[int, struct_rusage] = {}
        self.reads_cpu = True
        self.schedule = schedule
        self.threads: dict[int, bytes | None] = {}
        self._phases = phases

    def note(self, shapes: Hashable) -> bool:
        """End a step on the fast path if its shapes are in `known`.

        Returns whether the step was ended.
        """
        known = self.known.get(shapes)
        if known is None:
            return False
        phases = self._phases
        phases.log.append((phases.mark(), STEP_END, phases, None))
        self.steps.append(known)
        if self.reads_cpu and (
            self.schedule is not None or len(self.steps) % CPU_ROUND <= CPU_READ
        ):
            self.cpu[len(self.steps)] = cpu_usage()
            if self.schedule is not None:
                self.threads[len(self.steps)] = self.schedule.read()
        return True

    def take(
        self,
    ) -> tuple[list[BatchUnits], Mapping[int, struct_rusage], Mapping[int, bytes | None]]:
        """Return `steps`, `cpu` and `threads`, and clear them."""
        taken = self.steps, self.cpu, self.threads
        self.steps = []
        self.cpu = {}
        self.threads = {}
        return taken


class TimedStep(NamedTuple):
    """A step that has ended. Its times can be read once the device has reached its timestamps.

    Attributes:
        ordinal: The number of the step in this stage, from 0.
        logged_step: The step on the loggers' x-axis.
        times_phases: Whether the phases were recorded; if not, only the total time is known.
        device_marks: The timestamps of the phases on the clock of the training device.
        shapes: The shapes of each batch.
        cpu: The CPU time of the process at the start and the end of the step; `None` if it was not
            read.
        thread: The scheduler counters of the training thread at the start and at the end of the
            step. They show how long the thread has run and waited for a core so far.
        host_marks: The timestamps of the phases on the host clock, if the device has another clock.
        kind: How the step was profiled, such as `counting`.
        module_timing: The timestamps of module hooks; `None` if it is not a module-timing step.
        stacks: Samples of the training thread's Python stack, in a stack-sampling step.
        is_complete: Whether every batch ran to its end.
        marks: The reasons why the step is not typical, such as `warmup` or `recompiled`.
    """

    ordinal: int
    logged_step: int
    times_phases: bool
    device_marks: PhaseMarks
    shapes: tuple[Hashable, ...]
    samples: int | None
    tokens: int | None
    cpu: tuple[struct_rusage, struct_rusage] | None
    thread: tuple[bytes | None, bytes | None] = (None, None)
    host_marks: PhaseMarks | None = None
    kind: StepKind = "unprofiled"
    module_timing: ModuleTimingStep | None = None
    stacks: Sequence[StackSample] = ()
    is_complete: bool = True
    marks: tuple[str, ...] = ()

    @property
    def is_unprofiled(self) -> bool:
        """Return whether lflops only read a clock, and the step is complete and typical."""
        return self.is_complete and is_unprofiled(self.kind, self.marks)

    def tokens_in(self, token_inputs: Sequence[str]) -> int | None:
        """Return the number of tokens in the step, or `None` if it is unknown.

        If `tokens` is `None`, the number is computed from the shapes of the inputs with the names
        `token_inputs`.
        """
        if self.tokens is not None or not token_inputs:
            return self.tokens
        return sum_known(tokens_of_shapes(shapes, token_inputs) for shapes in self.shapes)


class StepTimer:
    """Turns the batches and phases of a stage, such as training, into timed steps.

    Args:
        host_phases: Measures the phases on the host clock.
        device_phases: Measures the phases on the clock of the training device. `None` if this is
            the host clock.
        units: The user's function that returns the samples and tokens of a batch, or `None`.
        logged_step: The last step so far on the loggers' x-axis.
        updating: The phases that a step has if it updates the model, such as `optimizer`.
        scaled: Whether gradients are scaled, so that the optimizer may skip a step.
        on_ranks: Whether steps are compared with the steps of other ranks. If so, every step
            measures how long the training thread ran and waited for a core.
        loader_size: Returns the number of samples that the data loader puts into a batch, or `None`
            if it is unknown.

    Attributes:
        batches: The shapes, samples and tokens of each batch that has ended in the current step.
        fast_path: The steps on the fast path since the last step on the slow path.
        times_phases: Whether the phases are recorded.
        samples_from: How the number of samples of the last batch was determined.
        token_inputs: The names of the inputs that hold the tokens; empty if unknown.
    """

    def __init__(
        self,
        host_phases: LoggedPhases,
        device_phases: MarkedPhases | None,
        units: Any,
        logged_step: int,
        *,
        updating: frozenset[str],
        scaled: bool,
        on_ranks: bool = False,
        loader_size: Callable[[], int | None] | None = None,
    ) -> None:
        self.batches: list[BatchUnits] = []
        self.times_phases = True
        self.samples_from: str | None = None
        self.token_inputs: tuple[str, ...] = ()
        self._sizes = BatchSizes(loader_size)
        self._schedule = ThreadSchedule()
        schedule = self._schedule if on_ranks else None
        self.fast_path = FastPathSteps(host_phases, schedule)
        self._reader = BatchReader()
        self._new_shapes = 0
        self._has_unknown_shapes = False
        # the number of ended steps, without the steps that `fast_path` still holds
        self._ended = 0
        self._logged_step = logged_step
        self._phases: StepPhases = host_phases if device_phases is None else device_phases
        self._host_phases = host_phases
        self._is_on_device = device_phases is not None
        self._units = units
        self._updating = updating
        self._marks: dict[str, None] = {"warmup": None}
        # for each of `EVENTS`, the number of consecutive steps with it, up to the last step
        self._repeated: Counter[str] = Counter()
        self._pending: deque[TimedStep] = deque(maxlen=MAX_PENDING_STEPS)
        self._cpu: struct_rusage | None = None
        self._thread: bytes | None = None
        # true if a batch of the current step has not run to its end
        self._is_torn = False
        self._scaled = scaled
        self._updated = False
        self._compilations = Compilations(partial(self.mark, "recompiled"))
        self._compiled = compilations()
        self._is_closed = False
        self._hooks = CleanupStack()
        self.resume()

    def install(self, guard: Guard) -> None:
        """Start to receive the events that change how a step is marked, until `close` is called.

        The events are compilations and, if an optimizer may skip steps, optimizer steps.
        """
        self._hooks.add(self._compilations.stop)
        self._compilations.listen(guard)
        if self._scaled:
            update = guard(self._update)
            self._hooks.add(remove_hook, update)
            register_optimizer_step_post_hook(update)

    @property
    def ordinal(self) -> int:
        """The number of the current step, from 0."""
        return self._ended + len(self.fast_path.steps)

    @property
    def logged_step(self) -> int:
        """The last step that ended, on the loggers' x-axis."""
        return self._logged_step + len(self.fast_path.steps)

    def leave_phases(self) -> None:
        """From now on, record only the total time of each step."""
        self.times_phases = False
        self.fast_path.reads_cpu = False

    def mark_phases(self) -> None:
        """Take timestamps of the phases in the current step, even if they are expensive.

        On a device where timestamps are expensive, other steps usually have none.
        """
        self._phases.is_marked = True

    def close(self) -> None:
        """Remove every hook permanently."""
        self._is_closed = True
        self._hooks.close()
        self._schedule.close()

    def _update(self, *_: object) -> None:
        self._updated = True

    def _drop_usual_events(self) -> None:
        """Remove the marks of events that happened in each of the last `USUAL_AFTER` steps."""
        for event in EVENTS:
            if event not in self._marks:
                self._repeated[event] = 0
                continue
            self._repeated[event] += 1
            if self._repeated[event] >= USUAL_AFTER:
                del self._marks[event]

    def mark(self, mark: str) -> None:
        """Mark the current step as not typical. `mark` is the reason, such as `validation`."""
        self._marks[mark] = None
        self.allow_fast_path(0)

    def allow_fast_path(self, steps: float) -> None:
        """Let at most the next `steps` steps take the fast path.

        No step takes it if the current step is marked, or if this timer's settings need the slow
        path in every step, for example because phases are timed on the device.
        """
        needs_slow_path = (
            self._marks
            or self._is_on_device
            or self._units is not None
            or self._scaled
            or not self._host_phases.is_connected
        )
        self.fast_path.limit = 0 if needs_slow_path else int(min(steps, MAX_PENDING_STEPS))

    def flush_fast_path(self, logged_step: int) -> None:
        """Convert the steps of the fast path to timed steps.

        `logged_step` is the current step on the loggers' x-axis.
        """
        self._flush(logged_step, self._phases.steps(), self._missed_compilations())

    def _flush(self, logged_step: int, steps: Iterable[PhaseMarks], marks: tuple[str, ...]) -> None:
        """Convert the batches of the fast path to timed steps, all with the given marks.

        `steps` has the timestamps of each of these steps.

        The fast path assumes that each batch is a step. If the loggers have counted fewer or more
        steps than batches, the assumption was wrong, and the steps are marked as incomplete.
        """
        is_complete = logged_step == self.logged_step + 1
        self.allow_fast_path(0)
        taken, usage, threads = self.fast_path.take()
        if taken:
            # Steps on the fast path have no marks, so none of `EVENTS` happened in the last step.
            self._repeated.clear()
        for number, (batch, device_marks) in enumerate(zip(taken, steps, strict=True), 1):
            step = self._ended_step(
                self._logged_step + 1, device_marks, [batch], usage.get(number), threads.get(number)
            )
            self._pending.append(step._replace(is_complete=is_complete, marks=marks))

    def _ended_step(
        self,
        logged_step: int,
        device_marks: PhaseMarks,
        batches: Sequence[BatchUnits],
        usage: struct_rusage | None,
        thread: bytes | None,
    ) -> TimedStep:
        """Create the `TimedStep` of the step that has ended, and prepare for the next step.

        `usage` is the CPU time of the process at the end of the step, and `thread` has the
        scheduler counters of the training thread at the same moment.
        """
        cpu_before = self._cpu
        thread_before = self._thread
        ordinal = self._ended
        self._cpu = usage
        self._thread = thread
        self._logged_step = logged_step
        self._ended += 1
        return TimedStep(
            ordinal=ordinal,
            logged_step=logged_step,
            times_phases=self.times_phases,
            device_marks=device_marks,
            shapes=tuple(each.shapes for each in batches),
            samples=sum_known(each.samples for each in batches),
            tokens=sum_known(each.tokens for each in batches),
            cpu=None if cpu_before is None or usage is None else (cpu_before, usage),
            thread=(thread_before, thread),
        )

    def _missed_compilations(self) -> tuple[str, ...]:
        """Return the mark `recompiled` if torch compiled code without reporting it, otherwise `()`.

        Unreported compilations happen after `torch.compiler.reset()`, which removes the callback
        that reports them.
        """
        is_callback_lost = not self._is_closed and not self._compilations.listens
        if is_callback_lost and compilations() != self._compiled:
            return ("recompiled",)
        return ()

    def drop_batches(self) -> None:
        """Drop the batches of the current step, because one of them did not run to its end.

        The step is then marked as incomplete.
        """
        self._is_torn = True
        self.batches = []
        self.allow_fast_path(0)

    def batch(self, batch: Any) -> Hashable:
        """End a batch on the slow path. Returns its shapes, or `None` if they are unknown."""
        self.allow_fast_path(0)
        found = self._reader.read(batch)
        shapes = None if found is None else found.shapes()
        units = self.fast_path.known.get(shapes)
        if units is None:
            units = self._new_units(shapes, batch, found)
        if self._units is not None:
            units = self._given_units(units, batch)
        self.batches.append(units)
        return shapes

    def _given_units(self, units: BatchUnits, batch: Any) -> BatchUnits:
        """Return `units` with the samples and tokens that the user's function returns.

        A number that the function does not return stays unchanged.
        """
        given = units_of(monitor_name(), self._units, (batch,), {})
        samples = given.get("samples_per_step", units.samples)
        tokens = given.get("tokens_per_step", units.tokens)
        self.samples_from = given.get("samples_from", self.samples_from)
        self.token_inputs = given.get("tokens_from", self.token_inputs)
        return BatchUnits(units.shapes, samples, tokens)

    def _new_units(self, shapes: Hashable, batch: Any, found: BatchTensors | None) -> BatchUnits:
        """Read the samples and tokens of a batch with new or unknown shapes."""
        known = self.fast_path.known
        if len(known) >= MOST_SHAPES:
            known.clear()
        if found is None or shapes is None:
            found = BatchTensors((), [])
        names, tensors = found
        size = self._sizes.read(batch, names, tensors)
        units = BatchUnits(shapes, size.samples, size.tokens)
        self.samples_from = size.samples_from
        self.token_inputs = size.tokens_from or self.token_inputs
        if shapes is not None:
            known[shapes] = units
        elif self._has_unknown_shapes:
            return units
        else:
            self._has_unknown_shapes = True
        self._new_shapes += 1
        if self._new_shapes <= MANY_SHAPES:
            self.mark("new_shapes")
        return units

    def end(
        self,
        logged_step: int,
        kind: StepKind = "unprofiled",
        module_timing: ModuleTimingStep | None = None,
        stacks: Sequence[StackSample] = (),
    ) -> None:
        """End a step on the slow path, and begin the next step."""
        # Mark the end of the step first, because the rest of this method takes time. Only
        # `is_marked` is read before, because `end_step` sets it for the next step.
        times_phases = self.times_phases and self._phases.is_marked
        self._phases.end_step()
        host_marks = None
        if self._is_on_device:
            host_marks = self._host_phases.end()
        usage = cpu_usage() if self.times_phases else None
        thread = self._schedule.read()
        *of_fast_path, device_marks = self._phases.steps()
        missed = self._missed_compilations()
        self._flush(logged_step, of_fast_path, missed)
        self._drop_usual_events()
        marks = self._marks | dict.fromkeys(missed)
        if self._scaled and not self._updated:
            marks["no_update"] = None
        step = self._ended_step(logged_step, device_marks, self.batches, usage, thread)
        self._pending.append(
            step._replace(
                times_phases=times_phases,
                host_marks=host_marks,
                kind=kind,
                module_timing=module_timing,
                stacks=stacks,
                is_complete=not self._is_torn,
                marks=tuple(marks),
            )
        )
        self._marks = {"warmup": None} if self._ended < WARMUP_STEPS else {}
        self.batches = []
        self._is_torn = False
        self._updated = False
        self._compiled = compilations()
        if not self._is_closed:
            self._compilations.listen_again()

    def resume(self) -> None:
        """Start the current step now.

        The time since the end of the last step then belongs to no step.
        """
        self._phases.begin()
        if self._is_on_device:
            self._host_phases.begin()
        self._cpu = cpu_usage()
        self._thread = self._schedule.read()

    def read(self) -> Iterator[TimedStep]:
        """Yield the ended steps whose times can be read without waiting for the device."""
        while self._pending and self._phases.is_readable(self._pending[0].device_marks):
            yield self._pending.popleft()

    def seconds(self, step: TimedStep) -> float:
        """Return the total time of a step in seconds."""
        return self._phases.total(step.device_marks)

    def step(self, timed: TimedStep) -> Step:
        """Read the times of a step. A counting step gets no duration and no phases."""
        phases = self._phases.seconds(timed.device_marks) if timed.times_phases else {}
        step = Step(
            index=timed.logged_step,
            kind=timed.kind,
            seconds=None,
            phases={},
            samples=timed.samples,
            tokens=timed.tokens_in(self.token_inputs),
            marks=timed.marks,
        )
        if timed.times_phases and not self._updating <= phases.keys():
            marks = dict.fromkeys((*timed.marks, "no_update"))
            step = replace(step, marks=tuple(marks))
        if timed.cpu is not None:
            before, after = timed.cpu
            step = replace(
                step,
                cpu_user=after.ru_utime - before.ru_utime,
                cpu_system=after.ru_stime - before.ru_stime,
            )
        if timed.kind != "counting":
            step = self._with_times(step, timed, phases)
        return self._with_thread_times(step, timed, phases.get("data", 0.0))

    def _with_times(self, step: Step, timed: TimedStep, phases: Mapping[str, float]) -> Step:
        step = replace(step, seconds=self.seconds(timed), phases=phases)
        if not timed.times_phases:
            return step
        step = replace(step, waiting=self._phases.waiting(timed.device_marks))
        if timed.host_marks is not None:
            step = replace(step, host_phases=self._host_phases.seconds(timed.host_marks))
        return step

    def _with_thread_times(self, step: Step, timed: TimedStep, fetching: float) -> Step:
        """Add to a step how long the training thread ran and waited for a core.

        The times are added only to module-timing steps, and to all steps of a run with several
        ranks.
        """
        hooks = timed.module_timing
        if hooks is None and self.fast_path.schedule is None:
            return step
        on_core, waited = ThreadSchedule.between(*timed.thread) or (None, None)
        step = replace(step, thread_cpu=on_core, thread_waited=waited)
        if hooks is None:
            return step
        fetching_cpu, fetching_waited = hooks.fetching(timed.thread[0])
        return replace(
            step,
            cpu_lost=hooks.cpu_lost,
            fetching_cpu=fetching_cpu,
            fetching_waited=fetching_waited,
            uncontended_phases=hooks.uncontended_phases(timed.device_marks, fetching, waited),
        )
