"""Count one pass and time other passes: `measure` and `measure_generate`.

A hooked pass is a pass in which hooks time every module; an unprofiled pass runs without hooks. A
pass consists of parts, for example `forward` and `backward`. The parts of text generation are
`prefill`, which processes the prompt, and `decode`, which generates the other tokens.

`CountAndTime` is for callers that can run only one pass: it counts and times the same pass. Then
most of the time is spent on counting. To leave out this time, `CountAndTime` stamps the time before
and after every operator and every hook. The time that torch takes to call a hook or a dispatch mode
lies outside the stamps. A trial measures how long it takes, and this time is subtracted as well. On
a CPU, the result is nearly exact. `observer_ratio` is the factor by which counting made the pass
longer.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lflops.attribution.hooks import after_each_call
from lflops.attribution.module_tracker import ModuleTracker
from lflops.error_guard import CleanupStack
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.count import Counting, Ignored, counted
from lflops.flop_counter.dispatch_mode import CountingMode, OperatorCounter
from lflops.flop_counter.operators import Operator
from lflops.hardware.calibrate import hardware_of
from lflops.hardware.chips import Hardware
from lflops.inputs.arguments import check_whole
from lflops.inputs.batch import Units, units_of
from lflops.inputs.batch_size import BatchSize, Lookup, batch_size, lookups_of
from lflops.inputs.tensors import device_of, named_arguments
from lflops.model.call import ASIDE, Divide, ModelCall
from lflops.model.module_tree import ModuleTree
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, ModulePhase
from lflops.profile.series import ratio
from lflops.profile.steps import Step
from lflops.ranks.collect.topology import check_logical
from lflops.timing.clock import Clock, CpuWatch, HostClock, clock_of, cpu_seconds, seconds_of
from lflops.timing.module_hooks import (
    LEAVES,
    Chain,
    ModuleTimer,
    hook_overhead,
    median_overhead,
    of_module_calls,
)
from lflops.timing.module_times import (
    MODULE_ENTERED,
    NO_OVERHEAD,
    OPERATOR_COUNTED,
    HookOverhead,
    PassTimes,
    Stamp,
    attach_module_times,
    ignored_modules,
    pass_times,
    scale_to_unprofiled,
    with_times,
)
from lflops.torch_private.autograd import NO_BACKWARD, backward_id


@dataclass(frozen=True)
class Pass:
    """Describes how to run one pass: for example, forward and backward of a model.

    Attributes:
        run: Function that runs the pass. It receives a function, which it calls with the name of
            each part that begins, except for the first part.
        first: Name of the first part, for example `forward`.
        prepare: Function that runs before each pass and is not timed.
    """

    run: Callable[[Divide], None]
    first: str
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class TimedPasses:
    """The times of several passes.

    A hooked pass is a pass in which hooks time every module. An unprofiled pass has no hooks.

    Attributes:
        steps: The duration of each unprofiled pass and each hooked pass, as a `Step`.
        hooked: For each hooked pass, the times of the modules in each part of the pass.
    """

    steps: tuple[Step, ...]
    hooked: tuple[Mapping[str, PassTimes], ...]


@dataclass(frozen=True)
class _Timed:
    """A finished pass. Its marks are moments on a clock.

    The marks are read later, so that no pass has to wait for the device.

    Attributes:
        parts: Names of the pass's parts.
        marks: Marks at the beginning of the pass, between its parts, and at its end.
        cpu_before: User and system CPU seconds of the process when the pass began.
        cpu_after: User and system CPU seconds of the process when the pass ended.
        stamps: For each part of a hooked pass, the stamps of its modules; `None` for an unprofiled
            pass.
        cpu_lost: Seconds in which threads of this process were ready to run while other processes
            had the CPU; `None` for an unprofiled pass, or if unknown.
    """

    parts: list[str]
    marks: list[Any]
    cpu_before: tuple[float, float]
    cpu_after: tuple[float, float]
    stamps: Mapping[str, list[Stamp]] | None = None
    cpu_lost: float | None = None


def time_passes(
    one: Pass, timer: ModuleTimer, clock: Clock, *, warmup: int, repeats: int
) -> TimedPasses:
    """Run `warmup` untimed passes, then time `repeats` passes without hooks and as many with hooks.

    Half of the passes without hooks run before the hooked passes, and half run after them. So if
    the machine becomes slower during the measurement, both kinds of passes are affected. Passes
    without hooks come first, because code must be compiled without hooks. The first pass after the
    hooked passes is discarded, because the hooked passes have filled the caches with other data.
    Times are read at the end, so that no pass has to wait for the device.
    """
    _run_untimed(one, warmup)
    before = [_run(one, clock) for _ in range((repeats + 1) // 2)]
    hooked = [_run_hooked(one, clock, timer) for _ in range(repeats)]
    _run_untimed(one, min(repeats // 2, 1))
    after = [_run(one, clock) for _ in range(repeats // 2)]
    clock.settle()
    passes = [*before, *hooked, *after]
    steps = [_step(index, timed, clock) for index, timed in enumerate(passes)]
    times = [timer.pass_times(timed.stamps or {}) for timed in hooked]
    return TimedPasses(steps=tuple(steps), hooked=tuple(times))


def _run_untimed(one: Pass, times: int) -> None:
    for _ in range(times):
        one.prepare()
        one.run(lambda *_: None)


def _run(one: Pass, clock: Clock) -> _Timed:
    """Run an unprofiled pass: a pass without hooks."""
    parts = [one.first]
    marks = []

    def divide(part: str, _results: Any = None, /) -> None:
        parts.append(part)
        marks.append(clock.mark())

    one.prepare()
    before = cpu_seconds()
    marks.append(clock.mark())
    one.run(divide)
    marks.append(clock.mark())
    return _Timed(parts, marks, before, cpu_seconds())


def _run_hooked(one: Pass, clock: Clock, timer: ModuleTimer) -> _Timed:
    """Run a pass in which the hooks of a timer time every module."""
    parts = [one.first]
    marks = []

    def divide(part: str, results: Any = None, /) -> None:
        parts.append(part)
        marks.append(clock.mark())
        if part == ASIDE:
            timer.set_aside()
        elif part == "backward":
            timer.begin_backward(results)

    one.prepare()
    with CleanupStack() as undo:
        timer.install(undo)
        watch = CpuWatch()
        before = cpu_seconds()
        marks.append(clock.mark())
        timer.begin()
        one.run(divide)
        stamps = timer.end()
        marks.append(clock.mark())
        return _Timed(parts, marks, before, cpu_seconds(), stamps, watch.lost())


def _step(index: int, timed: _Timed, clock: Clock) -> Step:
    phases = {}
    for part, (start, end) in zip(timed.parts, itertools.pairwise(timed.marks), strict=True):
        if part != ASIDE:
            phases[part] = clock.seconds(start, end)
    user_before, system_before = timed.cpu_before
    user_after, system_after = timed.cpu_after
    return Step(
        index=index,
        kind="unprofiled" if timed.stamps is None else "module_timing",
        seconds=sum(phases.values()),
        phases=phases,
        cpu_user=user_after - user_before,
        cpu_system=system_after - system_before,
        cpu_lost=timed.cpu_lost,
    )


def measure(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    warmup: int = 3,
    repeats: int = 10,
    ignore: Ignored = (),
    hardware: Hardware | str | None = "auto",
    units: Units | None = None,
    logical: Profile | None = None,
) -> Profile:
    """Count one pass, then time further passes.

    Passes without hooks give the total time, and passes with hooks divide it among the modules.

    Afterwards, the model's gradients, buffers and training mode are restored, and so are the random
    number states.

    Args:
        model: The model to measure. This argument and `args`, `kwargs`, `backward`, `loss` and
            `ignore` are the same as in `count`.
        args: Positional arguments of the model; a single tensor may be passed without a tuple.
        kwargs: Keyword arguments of the model.
        backward: Also run backward from `loss(output)`.
        loss: Function that takes the output and returns a scalar. Default: the sum of the
            floating-point outputs.
        warmup: Number of passes that run first and are discarded.
        repeats: Number of passes that are timed without hooks. As many are timed with hooks.
        ignore: Names or classes of modules. Their self work and time are left out of every total.
        hardware: The device's peak rates. `"auto"` looks the device up by name, and `"measure"`
            measures its rates. You can also pass the name of a chip, a TOML file, your own figures,
            or `None`.
        units: Samples and tokens of the batch, for example `{"samples": 8, "tokens": 1024}`, or a
            function of the model's arguments that returns them. `None` infers them from shapes.
        logical: As in `count`.

    Raises:
        CountError: An argument is wrong, or passes cannot be timed on the model's device.
        HardwareError: The chip is unknown or cannot be measured.
    """
    check_logical("measure: ", logical)
    call = ModelCall.of("measure", model, args, kwargs, backward=backward, loss=loss)
    check_whole("measure", "warmup", warmup, least=0)
    check_whole("measure", "repeats", repeats, least=1)
    device = device_of([*call.model.parameters(), *call.model.buffers(), *call.inputs()])
    clock = clock_of(device)
    chip = hardware_of(hardware, device)
    batch = units_of("measure", units, call.args, call.kwargs)
    with call.untouched():
        profile = counted(call, ignore, logical)
        profile = replace(profile, run=replace(profile.run, hardware=chip, **batch))
        run = Pass(call.run, first="forward", prepare=call.prepare)
        return _timed(profile, run, call.model, clock, warmup=warmup, repeats=repeats)


def _timed(
    profile: Profile, run: Pass, model: nn.Module, clock: Clock, *, warmup: int, repeats: int
) -> Profile:
    """Add times to a counted profile by running the same pass again."""
    timer = ModuleTimer(ModuleTree({"": model}), clock)
    overhead = hook_overhead(clock)
    passes = time_passes(run, timer, clock, warmup=warmup, repeats=repeats)
    facts = replace(profile.run, kind="measure")
    samples = facts.samples_per_step
    tokens = facts.tokens_per_step
    steps = tuple(replace(step, samples=samples, tokens=tokens) for step in passes.steps)
    timed, _ = attach_module_times(
        replace(profile, run=facts, steps=steps), passes.hooked, overhead
    )
    return timed


def measure_generate(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 1,
    repeats: int = 5,
    ignore: Ignored = (),
) -> Profile:
    """Measure `model.generate(*args, **kwargs)` as `measure` measures a forward pass.

    Generation is divided into prefill, which lasts until the end of the first call of the model
    itself, and decode, which is the rest. The steps of the profile have the times of prefill and
    decode, and a note has their MACs and FLOPs. If the model is called only once, there is no
    decode, and the profile does not divide the generation.
    """
    call = ModelCall.of("measure_generate", model, args, kwargs, backward=False, loss=None)
    clock = clock_of(device_of([*model.parameters(), *model.buffers(), *call.inputs()]))
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    # For a module that torch.compile has wrapped, `generate` calls the original module.
    called = getattr(generate, "__self__", model)

    def run(divide: Divide) -> None:
        calls = itertools.count(1)

        def after_call() -> None:
            if next(calls) == 1:
                divide("decode")

        with after_each_call(called, after_call):
            generate(*call.args, **call.kwargs)

    with call.untouched():
        counting = Counting(
            {"": model}, phase="forward", ignore=ignore, batch=(call.args, call.kwargs), eager=True
        )
        work_after_calls: list[tuple[int, int]] = []
        with counting, after_each_call(called, lambda: work_after_calls.append(counting.so_far())):
            generate(*call.args, **call.kwargs)
        generated = _with_generated(counting.profile, work_after_calls)
        passes = Pass(run, first="prefill", prepare=call.prepare)
        profile = _timed(generated, passes, model, clock, warmup=warmup, repeats=repeats)
    steps = []
    for step in profile.steps:
        # The whole generation is forward. If it has both prefill and decode, they divide it.
        phases = {"forward": sum(step.phases.values())}
        if len(work_after_calls) > 1:
            phases |= step.phases
        steps.append(replace(step, phases=phases))
    return replace(profile, steps=tuple(steps))


def _with_generated(profile: Profile, work_after_calls: list[tuple[int, int]]) -> Profile:
    """Add a note with the MACs of prefill and decode, if the model was called more than once.

    Args:
        profile: The profile of the generation.
        work_after_calls: For each call of the model, the MACs and FLOPs counted up to its end.
    """
    calls = len(work_after_calls)
    if calls < 2:
        return profile
    # Each call generates one token of each sample.
    samples = profile.run.samples_per_step
    tokens = None if samples is None else samples * calls
    macs, flops = work_after_calls[0]
    forward = profile.modules[""].forward
    values = {
        "prefill_macs": macs,
        "prefill_flops": flops,
        "decode_macs": forward.macs - macs,
        "decode_flops": forward.flops - flops,
        "decode_calls": calls - 1,
    }
    note = Note(code="generated", subject="", values=values)
    run = replace(profile.run, tokens_per_step=tokens, tokens_from=("model calls",))
    return replace(profile, run=run, notes=(*profile.notes, note))


OUTSIDE = ModulePhase("", "other")
"""The module and phase of code outside the model, which runs in neither forward nor backward."""


class CountAndTime:
    """Counts and times everything that runs inside a `with` block.

    Args:
        model: The model. Its modules are counted and timed.
        ignore: Names or classes of modules that are left out of every total.
        clock: The clock to use. Default: the clock of the model's device.
        overhead: Time that torch takes to call hooks and dispatch modes, which no stamp shows. By
            default, it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Ignored = (),
        clock: Clock | None = None,
        overhead: HookOverhead | None = None,
    ) -> None:
        self._clock = clock or clock_of(device_of([*model.parameters(), *model.buffers()]))
        self._overhead = overhead
        self._counting = Counting(
            {"": model},
            ignore=ignore,
            tracker=self._make_tracker,
            counter=lambda _, options: _StampingCounter(self._tracker, options),
        )
        self._stamps: list[Stamp] = []
        self._size: BatchSize | None = None

    def __enter__(self) -> Self:
        if self._overhead is None:
            self._overhead = _overhead() if isinstance(self._clock, HostClock) else NO_OVERHEAD
        self._counting.__enter__()
        self._tracker.resume()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._tracker.pause()
            self._stamps = self._tracker.stamps
            self._size = self._tracker.size
            self._counting.inputs = self._tracker.inputs
        finally:
            # drop the tracker, so that the model can be freed before the profile is read
            del self._tracker
            self._counting.__exit__(kind, error, trace)

    @property
    def profile(self) -> Profile:
        """The counted and timed profile, available after the `with` block."""
        profile = self._counting.profile
        run = replace(profile.run, kind="measure")
        size = self._size
        if size is not None:
            run = replace(run, samples_per_step=size.samples, samples_from=size.samples_from)
            if size.tokens is not None:
                run = replace(run, tokens_per_step=size.tokens, tokens_from=size.tokens_from)
        overhead = self._overhead or NO_OVERHEAD
        return _with_times(replace(profile, run=run), self.pass_times, overhead)

    @property
    def pass_times(self) -> PassTimes:
        """Times of the modules during the `with` block, before hook overhead is subtracted."""
        self._clock.settle()
        return pass_times(self._stamps, self._clock)

    def _make_tracker(self, tree: ModuleTree, **options: Any) -> ModuleTracker:
        self._tracker = _StampingTracker(self._clock, tree, **options)
        return self._tracker


class _StampingTracker(ModuleTracker):
    """A module tracker that also makes a stamp whenever model code or observer code begins.

    Observer code is lflops code: the hooks, and the code that counts operators. A stamp is a mark
    of the clock together with the module and phase that run from then on.

    Attributes:
        stamps: The stamps of the home thread, and of other threads that run backward.
        size: Samples and tokens of the first call of the model itself; `None` before this call.
        inputs: The inputs of this first call that may contain tokens, each with its name.
    """

    def __init__(self, clock: Clock, tree: ModuleTree, **options: Any) -> None:
        super().__init__(tree, **options)
        self.stamps: list[Stamp] = []
        self.size: BatchSize | None = None
        self.inputs: list[tuple[str, Lookup]] = []
        self._mark = clock.mark
        # the backward pass in which the last stamp was made
        self._backward = NO_BACKWARD

    def pause(self, why: str = "") -> None:
        """Stamp the start of observer code. `why` is the reason of the stamp."""
        if self._stamps_this_thread():
            self._end_backward()
            self.stamps.append((self._mark(), None, why))
            self._backward = NO_BACKWARD

    def resume(self, module_phase: ModulePhase | None = None) -> None:
        """Record a time stamp, because model code runs from now on.

        `module_phase` is the module and phase that run now. By default, the tracker determines
        them.
        """
        if self._stamps_this_thread():
            if module_phase is None:
                module_phase = ModulePhase(*self.between())
            self.stamps.append((self._mark(), module_phase, ""))
            self._backward = backward_id()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        self.pause(MODULE_ENTERED)
        super().enter_module(module, args)
        self.resume()

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        self.pause()
        super().leave_module(module, *values)
        # After an exception, the keyword arguments are missing.
        is_first_call = self.size is None and len(values) == 3
        if is_first_call and module is self.tree.modules[""]:
            named = dict(named_arguments(*values[:2]))
            self.size = batch_size(named.keys(), named.values())
            self.inputs = lookups_of(named.items())
        self.resume()

    def enter_scope(self, key: int, name: str) -> None:
        super().enter_scope(key, name)
        self.resume()

    def leave_scope(self, key: int) -> None:
        super().leave_scope(key)
        self.resume()

    def _end_backward(self) -> None:
        """Change the last stamp if it names a module in a backward pass that is over by now.

        No hook reports the end of a backward pass. So the last stamp still names a module in
        backward, although the time since the last operator of this pass belongs to other code.
        """
        now = backward_id()
        if self._backward in {NO_BACKWARD, now}:
            return
        mark, _, why = self.stamps.pop()
        # If a later pass has begun, the time before it belongs to no module. Otherwise, the code
        # that called backward runs again, and `between` returns its module.
        module_phase = OUTSIDE if now > self._backward else ModulePhase(*self.between())
        self.stamps.append((mark, module_phase, why))

    def _stamps_this_thread(self) -> bool:
        """Return whether this thread makes stamps: it is the home thread, or it runs backward.

        All stamps are in one list, and a stamp ends the time of the stamp before it. So if two
        threads made stamps at the same time, the times of both would be too short.
        """
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD


class _StampingCounter(OperatorCounter):
    """An operator counter that uses a `_StampingMode` as its dispatch mode."""

    def __init__(self, tracker: _StampingTracker, options: CountOptions) -> None:
        super().__init__(tracker, options)
        self.tracker = tracker

    def mode(self) -> CountingMode:
        return _StampingMode(self)


class _StampingMode(CountingMode):
    """A counting mode that separates the time of each operator from the time of counting it.

    It makes a stamp where the counting of an operator begins, and where the operator itself begins
    and ends.
    """

    def __init__(self, counter: _StampingCounter) -> None:
        super().__init__(counter)
        self._tracker = counter.tracker

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._tracker.between() == OUTSIDE:
            # This call is outside the model, for example in another model.
            return function(*args, **(kwargs or {}))
        self._tracker.pause(OPERATOR_COUNTED)
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._tracker.resume()

    def _run(
        self, operator: Operator, function: Any, args: Any, kwargs: Any, _kernel: Any = None
    ) -> Any:
        return super()._run(operator, partial(self._timed, function), args, kwargs)

    def _timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._tracker.resume(ModulePhase(*self._tracker.current(args)))
        try:
            return function(*args, **kwargs)
        finally:
            self._tracker.pause()


def _with_times(profile: Profile, times: PassTimes, overhead: HookOverhead) -> Profile:
    overhead = _usable_overhead(times, overhead)
    scaled = scale_to_unprofiled([{"": times}], {}, overhead, ignored_modules(profile))
    timed = with_times(profile, scaled)
    phases: dict[str, float] = {}
    for phase in PASS_PHASES:
        in_phase = timed.modules[""].work(phase).seconds
        if in_phase:
            phases[phase] = in_phase.median
    update = 0.0
    for key, seconds in times.self_seconds.items():
        if key.phase == "optimizer":
            update += max(seconds - times.overhead(key, overhead), 0.0)
    if update:
        phases["optimizer"] = update
    seconds = sum(phases.values())
    with_observer = seconds + times.observer + times.total_overhead(overhead)
    run = replace(profile.run, observer_ratio=ratio(with_observer, seconds))
    step = Step(
        index=0,
        kind="counting",
        seconds=seconds,
        phases=phases,
        samples=run.samples_per_step,
        tokens=run.tokens_per_step,
    )
    return replace(timed, run=run, steps=(step,))


def _usable_overhead(times: PassTimes, overhead: HookOverhead) -> HookOverhead:
    """Return the overhead, or zero if no module would have any time left after subtracting it.

    An overhead that large must be wrong: the machine was busy when the overhead was measured.
    """
    for key, seconds in times.self_seconds.items():
        if key != OUTSIDE and seconds > times.overhead(key, overhead):
            return overhead
    return NO_OVERHEAD


@functools.cache
def _overhead() -> HookOverhead:
    """Measure the time that torch takes to call hooks and dispatch modes, which no stamp shows."""
    clock = HostClock()

    def timed(chain: Chain, x: Tensor) -> PassTimes:
        watching = CountAndTime(chain.root, clock=clock, overhead=NO_OVERHEAD)
        with watching:
            # Global hooks are not called for the chain's modules, so set the hooks on their class.
            chain.hooked(watching._tracker)  # noqa: SLF001
            chain.root(x)
        chain.hooked()
        return watching.pass_times

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(clock, timed)
        x = torch.ones(1, 8, device="cpu", dtype=torch.float32)
        matmuls = Chain(torch.ones(8, 8, device="cpu", dtype=torch.float32))
        plain = seconds_of(clock, partial(matmuls.root, x))
        times = timed(matmuls, x)
        extra = sum(times.self_seconds.values()) - plain - LEAVES * (inside + outside)
        operator = extra / times.operators.total()
        return HookOverhead(inside=inside, outside=outside, operator=operator)

    return median_overhead(trial, trials=5)
