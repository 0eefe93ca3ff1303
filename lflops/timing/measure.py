"""`measure`: one pass is counted, others are timed.

Text generation likewise: what the prompt costs, and what each further token does.

`CountAndTime` counts and times one pass, for callers that have only one. Counting takes most of the
time then. So the pass is stamped around every operator and every hook, and what counting took is
left out. What torch itself takes to call a hook or a mode is in no stamp; a trial measures it, and
it is taken off. What remains is close to the truth on a CPU. `observer_ratio` says how much longer
the pass took.
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
from lflops.flop_counter.accumulator import Extent
from lflops.flop_counter.count import Counting, Ignored, counted
from lflops.flop_counter.dispatch_mode import CountingMode, OperatorCounter
from lflops.flop_counter.operators import Operator
from lflops.hardware.calibrate import hardware_of
from lflops.hardware.chips import Hardware
from lflops.inputs.arguments import check_whole
from lflops.inputs.batch import Units, samples_and_tokens, units_of
from lflops.inputs.tensors import device_of, tensors_in
from lflops.model.call import ASIDE, Divide, ModelCall
from lflops.model.module_tree import ModuleTree
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, ModulePhase
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
    ENTERS,
    NO_OVERHEAD,
    OPERATOR,
    HookOverhead,
    PassTimes,
    Stamp,
    attach_module_times,
    pass_times,
    scale_to_clean,
    with_times,
)
from lflops.torch_private.autograd import NO_BACKWARD, backward_id


@dataclass(frozen=True)
class Pass:
    """How to run one pass.

    `run` calls its argument where a further part begins, `first` names the first. `prepare` is not
    timed.
    """

    run: Callable[[Divide], None]
    first: str
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class TimedPasses:
    """A step for each pass, and for each hooked pass the times of its parts."""

    steps: tuple[Step, ...]
    hooked: tuple[Mapping[str, PassTimes], ...]


@dataclass(frozen=True)
class _Timed:
    """A pass that is over: the names of its parts, the marks between them, the CPU time before and after it, and what it lost."""

    parts: list[str]
    marks: list[Any]
    cpu: tuple[tuple[float, float], tuple[float, float]]
    # of a hooked pass
    stamps: Mapping[str, list[Stamp]] | None
    cpu_lost: float | None


def time_passes(
    one: Pass, timer: ModuleTimer, clock: Clock, *, warmup: int, repeats: int
) -> TimedPasses:
    """Run `warmup` passes untimed, then `repeats` clean ones, half of them before and half after as many hooked ones."""
    # So a machine that slows down slows both. A clean pass comes first: what is compiled is
    # compiled without hooks. The first pass after the hooked ones has their caches, so it is thrown
    # away. The marks are read at the end: nothing waits for a device.
    _thrown_away(one, warmup)
    before = [_run(one, clock) for _ in range((repeats + 1) // 2)]
    hooked = [_run(one, clock, timer) for _ in range(repeats)]
    _thrown_away(one, min(repeats // 2, 1))
    after = [_run(one, clock) for _ in range(repeats // 2)]
    clock.settle()
    steps = tuple(
        _step(index, each, clock) for index, each in enumerate([*before, *hooked, *after])
    )
    return TimedPasses(
        steps=steps, hooked=tuple(timer.pass_times(each.stamps or {}) for each in hooked)
    )


def _thrown_away(one: Pass, times: int) -> None:
    for _ in range(times):
        one.prepare()
        one.run(lambda *_: None)


def _run(one: Pass, clock: Clock, timer: ModuleTimer | None = None) -> _Timed:
    """Run a pass: a hooked one with a timer, else a clean one."""
    parts, marks = [one.first], []

    def divide(part: str, results: Any = None, /) -> None:
        parts.append(part)
        marks.append(clock.mark())
        if timer is not None and part == ASIDE:
            timer.set_aside()
        elif timer is not None and part == "backward":
            timer.begin_backward(results)

    one.prepare()
    with CleanupStack() as undo:
        if timer is not None:
            timer.install(undo)
        watch, before = None if timer is None else CpuWatch(), cpu_seconds()
        marks.append(clock.mark())
        if timer is not None:
            timer.begin()
        one.run(divide)
        stamps = None if timer is None else timer.end()
        marks.append(clock.mark())
        return _Timed(
            parts, marks, (before, cpu_seconds()), stamps, None if watch is None else watch.lost()
        )


def _step(index: int, given: _Timed, clock: Clock) -> Step:
    phases = {
        part: clock.seconds(*ends)
        for part, ends in zip(given.parts, itertools.pairwise(given.marks), strict=True)
        if part != ASIDE
    }
    before, after = given.cpu
    return Step(
        index=index,
        kind="unprofiled" if given.stamps is None else "module_timing",
        seconds=sum(phases.values()),
        phases=phases,
        cpu_user=after[0] - before[0],
        cpu_system=after[1] - before[1],
        cpu_lost=given.cpu_lost,
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
    """Count one pass, then time others.

    Clean ones for the total, hooked ones to divide it over the modules.

    Afterwards the model's gradients, buffers, mode and the random numbers are what they were.

    Args:
        model: As in `count`; so are `args`, `kwargs`, `backward`, `loss` and `ignore`.
        args: Its positional arguments; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: Output to a scalar; without it, the sum of the floating outputs.
        warmup: Passes that are thrown away first.
        repeats: Clean passes, and hooked ones, that are kept.
        ignore: Names or classes of modules whose own work and time are left out of every total.
        hardware: What the device can do: `"auto"` looks its name up, `"measure"` measures it, else
            a chip by name or in a TOML file, your own figures, or `None`.
        units: Samples and tokens of the batch, as `{"samples": 8, "tokens": 1024}` or a function of
            the model's arguments that gives that; `None` finds them in the shapes.
        logical: As in `count`.

    Raises:
        CountError: An argument is wrong, or times cannot be taken where the model is.
        HardwareError: The chip is not known, or cannot be measured.
    """
    check_logical("measure: ", logical)
    call = ModelCall.of("measure", model, args, kwargs, backward=backward, loss=loss)
    check_whole("measure", "warmup", warmup, least=0)
    check_whole("measure", "repeats", repeats, least=1)
    device = device_of([*call.model.parameters(), *call.model.buffers(), *call.inputs()])
    clock, chip = clock_of(device), hardware_of(hardware, device)
    batch = units_of("measure", units, call.args, call.kwargs)
    with call.untouched():
        profile = counted(call, ignore, logical)
        profile = replace(profile, run=replace(profile.run, hardware=chip, **batch))
        run = Pass(call.run, first="forward", prepare=call.prepare)
        return _timed(profile, run, call.model, clock, warmup=warmup, repeats=repeats)


def _timed(
    profile: Profile, run: Pass, model: nn.Module, clock: Clock, *, warmup: int, repeats: int
) -> Profile:
    """A counted profile with the time that runs of the same take."""
    timer, overhead = ModuleTimer(ModuleTree({"": model}), clock), hook_overhead(clock)
    facts = replace(profile.run, kind="measure")
    passes = time_passes(run, timer, clock, warmup=warmup, repeats=repeats)
    steps = tuple(
        replace(step, samples=facts.samples_per_step, tokens=facts.tokens_per_step)
        for step in passes.steps
    )
    return attach_module_times(replace(profile, run=facts, steps=steps), passes.hooked, overhead)[0]


def measure_generate(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 1,
    repeats: int = 5,
    ignore: Ignored = (),
) -> Profile:
    """What `measure` does, of `model.generate(*args, **kwargs)`.

    Prefill is all up to the end of the first call of the model itself, decode is the rest. A note
    has the work of both, each step has the time. A model that is called only once has neither.
    """
    call = ModelCall.of("measure_generate", model, args, kwargs, backward=False, loss=None)
    clock = clock_of(device_of([*model.parameters(), *model.buffers(), *call.inputs()]))
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    called = getattr(
        generate,
        "__self__",
        model,
        # a module that torch.compile wrapped calls itself, not the wrapper
    )

    def run(divide: Divide) -> None:
        calls = itertools.count(1)
        with after_each_call(called, lambda: divide("decode") if next(calls) == 1 else None):
            generate(*call.args, **call.kwargs)

    with call.untouched():
        counting = Counting(
            {"": model}, phase="forward", ignore=ignore, batch=(call.args, call.kwargs), eager=True
        )
        work_after_calls: list[tuple[int, int]] = []
        with counting, after_each_call(called, lambda: work_after_calls.append(counting.so_far())):
            generate(*call.args, **call.kwargs)
        generated, passes = (
            _with_generated(counting.profile, work_after_calls),
            Pass(run, first="prefill", prepare=call.prepare),
        )
        profile = _timed(generated, passes, model, clock, warmup=warmup, repeats=repeats)
    # All of generating is forward; prefill and decode stay where there are both.
    phases = [
        {"forward": sum(step.phases.values()), **(step.phases if len(work_after_calls) > 1 else {})}
        for step in profile.steps
    ]
    return replace(
        profile,
        steps=tuple(
            replace(step, phases=each) for step, each in zip(profile.steps, phases, strict=True)
        ),
    )


def _with_generated(profile: Profile, work_after_calls: list[tuple[int, int]]) -> Profile:
    """Add the work of prefill and decode, where the model was called more than once."""
    if len(work_after_calls) < 2:
        return profile
    macs, flops = work_after_calls[0]
    samples = profile.run.samples_per_step
    run = replace(
        profile.run,
        tokens_per_step=None if samples is None else samples * len(work_after_calls),
        # one a call for each sample
    )
    forward = profile.modules[""].forward
    values = {
        "prefill_macs": macs,
        "prefill_flops": flops,
        "decode_macs": forward.macs - macs,
        "decode_flops": forward.flops - flops,
        "decode_calls": len(work_after_calls) - 1,
    }
    return replace(
        profile, run=run, notes=(*profile.notes, Note(code="generated", subject="", values=values))
    )


OUTSIDE = ModulePhase("", "other")


class CountAndTime:
    """Counts and times everything that runs inside of a `with`. `profile` is there when it is left.

    Without a clock it is that of the model's device. Without an overhead, what hooks and modes take
    outside of the stamps is measured.
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
            counter=lambda _, extent: _StampingCounter(self._tracker, extent),
        )
        self._stamps: list[Stamp] = []
        self._batch: tuple[int | None, int | None] | None = None

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
            self._stamps, self._batch = self._tracker.stamps, self._tracker.batch
        finally:
            # the model may be freed while the profile is read
            del self._tracker
            self._counting.__exit__(kind, error, trace)

    @property
    def profile(self) -> Profile:
        """What was counted and timed; there once the `with` is left."""
        profile = self._counting.profile
        samples, tokens = self._batch or (None, None)
        run = replace(profile.run, kind="measure", samples_per_step=samples, tokens_per_step=tokens)
        return _with_times(
            replace(profile, run=run), self.pass_times, self._overhead or NO_OVERHEAD
        )

    @property
    def pass_times(self) -> PassTimes:
        """What was timed, from which no overhead is taken off."""
        self._clock.settle()
        return pass_times(self._stamps, self._clock)

    def _make_tracker(self, tree: ModuleTree, **options: Any) -> ModuleTracker:
        self._tracker = _StampingTracker(self._clock, tree, **options)
        return self._tracker


class _StampingTracker(ModuleTracker):
    """Also stamps when the model runs, and when the observer does.

    Hooks, and the counting of operators.
    """

    def __init__(self, clock: Clock, tree: ModuleTree, **options: Any) -> None:
        super().__init__(tree, **options)
        # those of the thread that entered, and of backward
        self.stamps: list[Stamp] = []
        self.batch: tuple[int | None, int | None] | None = (
            # samples and tokens that the model itself was first called with
            None
        )
        self._mark = clock.mark
        # in which the last stamp was made
        self._backward = NO_BACKWARD

    def pause(self, why: str = "") -> None:
        """From here on the observer runs."""
        if self._stamps_this_thread():
            self._end_backward()
            self.stamps.append((self._mark(), None, why))
            self._backward = NO_BACKWARD

    def resume(self, module_phase: ModulePhase | None = None) -> None:
        """From here on the model runs; `None` finds out which module and phase."""
        if self._stamps_this_thread():
            module_phase = ModulePhase(*self.between()) if module_phase is None else module_phase
            self.stamps.append((self._mark(), module_phase, ""))
            self._backward = backward_id()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        self.pause(ENTERS)
        super().enter_module(module, args)
        self.resume()

    def leave_module(self, module: nn.Module, *values: Any) -> None:
        self.pause()
        super().leave_module(module, *values)
        if (
            self.batch is None and len(values) == 3 and module is self.tree.modules[""]
            # an exception leaves no keyword arguments
        ):
            self.batch = samples_and_tokens(tensors_in(values[:2]))
        self.resume()

    def enter_scope(self, key: int, name: str) -> None:
        super().enter_scope(key, name)
        self.resume()

    def leave_scope(self, key: int) -> None:
        super().leave_scope(key)
        self.resume()

    def _end_backward(self) -> None:
        """No hook says when a backward pass ends.

        What followed its last operator was no part of it if by now it is over.
        """
        now = backward_id()
        if self._backward not in {NO_BACKWARD, now}:
            mark, _, why = self.stamps.pop()
            self.stamps.append(
                (mark, OUTSIDE if now > self._backward else ModulePhase(*self.between()), why)
            )

    def _stamps_this_thread(self) -> bool:
        """Two threads at once would cut each other's time short."""
        return threading.get_ident() == self.home or backward_id() != NO_BACKWARD


class _StampingCounter(OperatorCounter):
    def __init__(self, tracker: _StampingTracker, extent: Extent) -> None:
        super().__init__(tracker, extent)
        self.tracker = tracker

    def mode(self) -> CountingMode:
        return _StampingMode(self)


class _StampingMode(CountingMode):
    """Stamps what counting an operator takes, and what the operator itself does."""

    def __init__(self, counter: _StampingCounter) -> None:
        super().__init__(counter)
        self._tracker = counter.tracker

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._tracker.between() == OUTSIDE:
            return function(
                *args,
                **(kwargs or {}),
                # outside of the model: another model's, perhaps
            )
        self._tracker.pause(OPERATOR)
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
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    if all(
        seconds <= times.overhead(each, overhead)
        for each, seconds in times.own.items()
        if each != OUTSIDE
    ):
        # what leaves nothing was measured while the machine was busy
        overhead = NO_OVERHEAD
    timed = with_times(profile, scale_to_clean([{"": times}], {}, overhead, ignored))
    phases: dict[str, float] = {
        phase: spread.median
        for phase in PASS_PHASES
        if (spread := timed.modules[""].work(phase).seconds)
    }
    overheads = {each: times.overhead(each, overhead) for each in times.own}
    update = sum(
        max(seconds - overheads[each], 0.0)
        for each, seconds in times.own.items()
        if each.phase == "optimizer"
    )
    phases |= {"optimizer": update} if update else {}
    seconds = sum(phases.values())
    with_observer = seconds + times.observer + sum(overheads.values())
    run = replace(profile.run, observer_ratio=with_observer / seconds if seconds else None)
    step = Step(
        index=0,
        kind="counting",
        seconds=seconds,
        phases=phases,
        samples=run.samples_per_step,
        tokens=run.tokens_per_step,
    )
    return replace(timed, run=run, steps=(step,))


@functools.cache
def _overhead() -> HookOverhead:
    """What torch takes to call hooks and modes, outside of the stamps."""
    clock = HostClock()

    def timed(chain: Chain, x: Tensor) -> PassTimes:
        watching = CountAndTime(chain.root, clock=clock, overhead=NO_OVERHEAD)
        with watching:
            chain.hooked(watching._tracker)  # noqa: SLF001 - the chain's modules ask for no global hooks
            chain.root(x)
        chain.hooked()
        return watching.pass_times

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(clock, timed)
        x = torch.ones(1, 8, device="cpu", dtype=torch.float32)
        products = Chain(torch.ones(8, 8, device="cpu", dtype=torch.float32))
        clean, times = seconds_of(clock, partial(products.root, x)), timed(products, x)
        extra = sum(times.own.values()) - clean - LEAVES * (inside + outside)
        return HookOverhead(
            inside=inside, outside=outside, operator=extra / sum(times.operators.values())
        )

    return median_overhead(trial, trials=5)
