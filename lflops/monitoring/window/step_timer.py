"""The steps of a run as they go by.

How long each took, what it was made of, and whether it is a measure of the others.

This runs in every step of the training. All that can wait until somebody asks for a step is left
until then.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from resource import struct_rusage
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook

from lflops.error_guard import CleanupStack, Guard
from lflops.inputs.batch import BatchReader, samples_and_tokens, units_of
from lflops.monitoring.window.module_timing_step import ModuleTimingStep
from lflops.profile.series import sum_known
from lflops.profile.steps import Step, StepKind, is_unprofiled
from lflops.timing.clock import ThreadSchedule, cpu_usage
from lflops.timing.step_phases import PhaseMarks, StepPhases
from lflops.torch_private.modules import Compilations, compilations, remove_hook

# so many steps at the beginning of a run are no measure of the others
COLD = 2
# after this many distinct shapes, a new shape no longer marks a step
MANY_SHAPES = 16
# shapes of batches that are remembered: where each batch has its own, they would fill the memory
MOST_SHAPES = 1000

# plain steps are flushed after this many
MAX_PENDING_STEPS = 200

CPU_ROUND, CPU_READ = 16, 3
"""In each round of so many plain steps, the CPU time of so many is read.

The system adds it up over all threads, which takes long.
"""


class BatchUnits(NamedTuple):
    """What is known of batches of the same shapes.

    All of it is `None` for those whose shapes are unknown.
    """

    shapes: Hashable
    samples: int | None
    tokens: int | None


class FastPathSteps:
    """The plain steps since the last one that was none.

    One batch each, of shapes that are known, and no figure is due at their end.

    Almost every step of a training is like that. All that is touched here has left the processor's
    caches since the last step, and to fetch it takes longer than to run it. So as few objects as
    possible are touched; what the steps were is made out when somebody asks.
    """

    def __init__(
        self, mark: Callable[[], Any], marks: Sized, schedule: ThreadSchedule | None = None
    ) -> None:
        # how many steps may be plain, until they are made out; `StepTimer.expect_plain` alone sets
        # it
        self.limit = 0
        # reads the batches
        self.reader = BatchReader()
        # batches by their shapes
        self.known: dict[Hashable, BatchUnits] = {}
        # Of each step so far its batch, how many marks there were when it ended, and a mark of that
        # moment.
        self.steps: list[tuple[BatchUnits, int, Any]] = []
        # What the process had used of the CPU by the end of a step, by how many steps there were;
        # only some are there.
        self.cpu: dict[int, struct_rusage] = {}
        # whether that is read at all
        self.reads_cpu = True
        self.schedule = schedule
        # What the system has counted of the training's thread by the end of each step; empty where
        # that is not read.
        self.threads: dict[int, bytes | None] = {}
        self._mark = mark
        self._marks = marks

    def note(self, batch: Any) -> bool:
        """End a step that may be plain. Returns whether it is one; where not, nothing is done."""
        known = self.known.get(self.reader.shapes(batch))
        if known is None:
            return False
        self.steps.append((known, len(self._marks), self._mark()))
        if self.reads_cpu and (
            self.schedule is not None or len(self.steps) % CPU_ROUND <= CPU_READ
        ):
            self.cpu[len(self.steps)] = cpu_usage()
            if self.schedule is not None:
                self.threads[len(self.steps)] = self.schedule.read()
        return True

    def ends(self) -> list[tuple[int, Any]]:
        """Where the noted steps ended."""
        return [(length, end) for _, length, end in self.steps]

    def take(
        self,
    ) -> tuple[
        list[tuple[BatchUnits, int, Any]], Mapping[int, struct_rusage], Mapping[int, bytes | None]
    ]:
        """The steps so far, to begin anew."""
        taken = self.steps, self.cpu, self.threads
        self.steps, self.cpu, self.threads = [], {}, {}
        return taken


class TimedStep(NamedTuple):
    """A step that is over."""

    # its number in this run, from 0
    ordinal: int
    # the step's number in the loggers
    logged_step: int
    # whether its phases were recorded; if not, only its total time is known
    times_phases: bool
    # its phases on the training's device
    device_marks: PhaseMarks
    # those of its batches
    shapes: tuple[Hashable, ...]
    samples: int | None
    tokens: int | None
    # The process's CPU time when the step began, and when it ended; `None` where that was not read.
    cpu: tuple[struct_rusage, struct_rusage] | None
    # What the system had counted of the training's thread then, where that was read.
    thread: tuple[bytes | None, bytes | None] = (None, None)
    on_host: PhaseMarks | None = (
        # its phases by the host's clock, where the device has another one
        None
    )
    # whether it was counted. Such a step is not timed
    counted: bool = False
    hooked: ModuleTimingStep | None = (
        # the timestamps of its modules' hooks; `None` in a step without hooks
        None
    )
    # whether Kineto recorded it
    traced: bool = False
    # whether every batch of it ran to its end
    is_complete: bool = True
    marks: tuple[str, ...] = ()

    @property
    def kind(self) -> StepKind:
        if self.counted:
            return "counting"
        if self.hooked is not None:
            return "module_timing"
        return "traced" if self.traced else "unprofiled"

    @property
    def is_unprofiled(self) -> bool:
        """Whether it is a clean step that no batch was dropped from."""
        return self.is_complete and is_unprofiled(self.kind, self.marks)


class StepTimer:
    """Makes a step of the batches that gradients are accumulated over."""

    def __init__(
        self,
        # a listener to the phases
        phases: StepPhases,
        # one by the host's clock, where `phases` have another
        on_host: StepPhases | None,
        # as `FlopsMonitor` is given it
        units: Any,
        # what the loggers call the last step so far
        logged_step: int,
        *,
        # the phases without which a step has learned nothing
        updating: frozenset[str],
        # whether gradients are scaled, so that an optimizer that should step may not
        scaled: bool,
        # whether steps are compared with those of other ranks: then it matters what the system does
        # to this one
        on_ranks: bool = False,
    ) -> None:
        self.listeners = (
            [phases] if on_host is None else [phases, on_host]
            # what has to listen to phases
        )
        # the batches of the step that are over
        self.batches: list[BatchUnits] = []
        # The plain steps since the last one that was none.
        self._schedule = ThreadSchedule()
        self.plain = FastPathSteps(phases.mark, phases.marks, self._schedule if on_ranks else None)
        # whether the phases are recorded
        self.times_phases = True
        self._new_shapes = 0
        self._ended = 0
        self._logged_step = logged_step
        self._phases = phases
        self._on_host = on_host
        self._units = units
        self._updating = updating
        self._marks: dict[str, None] = {"warmup": None}
        self._pending: deque[TimedStep] = deque(maxlen=MAX_PENDING_STEPS)
        self._cpu: struct_rusage | None = None
        self._thread: bytes | None = None
        self._is_torn = False
        self._scaled = scaled
        self._updated = False
        self._compilations = Compilations(partial(self.mark, "recompiled"))
        self._compiled = compilations()
        self._is_closed = False
        self._hooks = CleanupStack()
        self.resume()

    def install(self, guard: Guard) -> None:
        """Listen to compilations, and to optimizers where a step may be skipped, until `close`."""
        self._hooks.add(self._compilations.stop)
        self._compilations.listen(guard)
        if self._scaled:
            update = guard(self._update)
            self._hooks.add(remove_hook, update)
            register_optimizer_step_post_hook(update)

    @property
    def ordinal(self) -> int:
        """The number of the step that is going on, from 0."""
        return self._ended + len(self.plain.steps)

    @property
    def logged_step(self) -> int:
        """What the loggers call the step that ended last."""
        return self._logged_step + len(self.plain.steps)

    def leave_phases(self) -> None:
        """From here on steps have a total time alone."""
        self.times_phases = self.plain.reads_cpu = False

    def mark_phases(self) -> None:
        """Mark the phases of the step that has begun, also where those of most steps are not."""
        self._phases.is_marked = True

    def close(self) -> None:
        """Take off every hook, for good: no step is looked into any more."""
        self._is_closed = True
        self._hooks.close()
        self._schedule.close()

    def _update(self, *_: object) -> None:
        self._updated = True

    def mark(self, mark: str) -> None:
        self._marks[mark] = None
        self.expect_plain(0)

    def expect_plain(self, steps: float) -> None:
        """So many steps from here on may be plain, if nothing happens in them.

        With 0 the next one is looked at in full.
        """
        has_more = (
            self._marks or self._on_host is not None or self._units is not None or self._scaled
        )
        self.plain.limit = 0 if has_more else int(min(steps, MAX_PENDING_STEPS))

    def flush_plain_steps(self, logged_step: int) -> None:
        """Make steps of the noted ones.

        The step that is running goes on; the loggers call it `logged_step`.
        """
        self._flush(logged_step, self._phases.cut(self.plain.ends()), self._unheard())

    def _flush(self, logged_step: int, steps: Iterable[PhaseMarks], marks: tuple[str, ...]) -> None:
        """Make steps of the noted batches.

        They were parts of steps if the loggers have not counted a step for each of them.
        """
        is_complete = logged_step == self.logged_step + 1
        self.expect_plain(0)
        notes, usage, threads = self.plain.take()
        for number, ((batch, *_), device_marks) in enumerate(zip(notes, steps, strict=True), 1):
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
        """The step that has ended, with what the process and the thread had used by then."""
        before, self._cpu = self._cpu, usage
        thread_before, self._thread = self._thread, thread
        ordinal, self._logged_step = self._ended, logged_step
        self._ended += 1
        return TimedStep(
            ordinal=ordinal,
            logged_step=logged_step,
            times_phases=self.times_phases,
            device_marks=device_marks,
            shapes=tuple(each.shapes for each in batches),
            samples=sum_known([each.samples for each in batches]),
            tokens=sum_known([each.tokens for each in batches]),
            cpu=None if before is None or usage is None else (before, usage),
            thread=(thread_before, thread),
        )

    def _unheard(self) -> tuple[str, ...]:
        """The mark of steps in which torch.compile may have compiled unheard.

        Torch.compiler.reset() takes off what hears it.
        """
        is_deaf = not self._is_closed and not self._compilations.listens
        return ("recompiled",) if is_deaf and compilations() != self._compiled else ()

    def drop_batches(self) -> None:
        """A batch was left before it was over.

        Its step begins again with the next one, and is not timed.
        """
        self._is_torn = True
        self.batches = []
        self.expect_plain(0)

    def batch(self, batch: Any) -> Hashable:
        """A batch is over. Returns its shapes; `None` where they are unknown."""
        self.expect_plain(0)
        found, known = self.plain.reader.read(batch), self.plain.known
        shapes = None if found is None else found.shapes()
        units = known.get(shapes)
        if units is None:
            if len(known) >= MOST_SHAPES:
                known.clear()
            units = known[shapes] = BatchUnits(
                shapes,
                *samples_and_tokens(() if found is None or shapes is None else found.tensors),
            )
            self._new_shapes += 1
            if self._new_shapes <= MANY_SHAPES:
                self.mark("new_shapes")
        if self._units is not None:
            given = units_of("FlopsMonitor", self._units, (batch,), {})
            units = BatchUnits(
                shapes,
                given.get("samples_per_step", units.samples),
                given.get("tokens_per_step", units.tokens),
            )
        self.batches.append(units)
        return shapes

    def tokens_of(self, shapes: Hashable) -> int | None:
        known = self.plain.known.get(shapes)
        return None if known is None else known.tokens

    def end(
        self,
        logged_step: int,
        *,
        counted: bool,
        hooked: ModuleTimingStep | None = None,
        traced: bool = False,
    ) -> None:
        """The step is over, and the next one begins."""
        ends = [
            *self.plain.ends(),
            (len(self._phases.marks), self._phases.mark()),
            # what follows takes a while
        ]
        on_host = None if self._on_host is None else self._on_host.end()
        times_phases = self.times_phases and self._phases.is_marked
        usage = cpu_usage() if self.times_phases else None
        of_thread = self._schedule.read()
        *plain, device_marks = self._phases.cut(ends)
        unheard = self._unheard()
        self._flush(logged_step, plain, unheard)
        marks = self._marks | dict.fromkeys(unheard)
        if self._scaled and not self._updated:
            marks["no_update"] = None
        step = self._ended_step(logged_step, device_marks, self.batches, usage, of_thread)
        step = step._replace(
            times_phases=times_phases,
            on_host=on_host,
            is_complete=not self._is_torn,
            marks=tuple(marks),
        )
        self._pending.append(step._replace(counted=counted, hooked=hooked, traced=traced))
        self._marks = {"warmup": None} if self._ended < COLD else {}
        self.batches, self._is_torn, self._updated = [], False, False
        self._compiled = compilations()
        if not self._is_closed:
            self._compilations.listen_again()

    def resume(self) -> None:
        """Begin the step anew: what ran since the last one ended was our own."""
        self._phases.begin()
        if self._on_host is not None:
            self._on_host.begin()
        self._cpu = cpu_usage()
        self._thread = self._schedule.read()

    def read(self) -> Iterator[TimedStep]:
        """The steps that are over and can be timed without waiting."""
        while self._pending and self._phases.has_come(self._pending[0].device_marks):
            yield self._pending.popleft()

    def seconds(self, step: TimedStep) -> float:
        return self._phases.total(step.device_marks)

    def step(self, step: TimedStep) -> Step:
        phases = self._phases.seconds(step.device_marks) if step.times_phases else {}
        idle = (
            step.times_phases
            and not self._updating <= phases.keys()
            and "no_update" not in step.marks
        )
        before, after = step.cpu or (None, None)
        is_read = self.plain.schedule is not None or step.hooked is not None
        on_core, waited = (ThreadSchedule.between(*step.thread) if is_read else None) or (
            None,
            None,
        )
        is_timed = step.times_phases and not step.counted
        return Step(
            index=step.logged_step,
            kind=step.kind,
            seconds=None if step.counted else self.seconds(step),
            phases={} if step.counted else phases,
            host_phases=self._on_host.seconds(step.on_host)
            if self._on_host and step.on_host and is_timed
            else {},
            cpu_user=after.ru_utime - before.ru_utime if before and after else None,
            cpu_system=after.ru_stime - before.ru_stime if before and after else None,
            cpu_lost=None if step.hooked is None else step.hooked.cpu_lost,
            waiting=self._phases.waiting(step.device_marks) if is_timed else None,
            thread_cpu=on_core,
            thread_waited=waited,
            fetching_cpu=None if step.hooked is None else step.hooked.fetching(step.thread[0]),
            uncontended_phases={}
            if step.hooked is None
            else step.hooked.uncontended_phases(step.device_marks, phases.get("data", 0.0), waited),
            samples=step.samples,
            tokens=step.tokens,
            marks=(*step.marks, "no_update") if idle else step.marks,
        )
