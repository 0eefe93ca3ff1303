"""Count and time the same pass, for callers that have only one.

Counting takes most of the time then. So the pass is stamped around every operator and every hook, and what counting took is left out. What
torch itself takes to call a hook or a mode is in no stamp; a trial measures it, and it is taken off. What remains is close to the truth on
a CPU. `observer_ratio` says how much longer the pass took than that.
"""

import functools
import threading
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lflops.collect.attribution.module_tracker import ModuleTracker
from lflops.collect.count import Counting, Ignored
from lflops.collect.counting.accumulator import Extent
from lflops.collect.counting.dispatch_mode import CountingMode, OperatorCounter
from lflops.collect.counting.operators import Operator
from lflops.collect.inputs.batch import samples_and_tokens
from lflops.collect.inputs.tensors import device_of, tensors_in
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.attach_times import scale_to_clean, with_times
from lflops.collect.timing.clock import Clock, HostClock, clock_of, seconds_of
from lflops.collect.timing.hook_overhead import LEAVES, Chain, median_overhead, of_module_calls
from lflops.collect.timing.stamps import ENTERS, NO_OVERHEAD, OPERATOR, HookOverhead, PassTimes, Stamp, pass_times
from lflops.collect.torch_private.autograd import NO_BACKWARD, backward_id
from lflops.profile.model import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step

OUTSIDE = ModulePhase("", "other")


class CountAndTime:
    """Counts and times everything that runs inside of a `with`. `profile` is there when it is left.

    Without a clock it is that of the model's device. Without an overhead, what hooks and modes take outside of the stamps is measured.
    """

    def __init__(self, model: nn.Module, *, ignore: Ignored = (), clock: Clock | None = None, overhead: HookOverhead | None = None) -> None:
        self._clock = clock or clock_of(device_of([*model.parameters(), *model.buffers()]))
        self._overhead = overhead
        self._counting = Counting(
            {"": model}, ignore=ignore, tracker=self._make_tracker, counter=lambda _, extent: _StampingCounter(self._tracker, extent)
        )
        self._stamps: list[Stamp] = []
        self._batch: tuple[int | None, int | None] | None = None

    def __enter__(self) -> Self:
        if self._overhead is None:
            self._overhead = _overhead() if isinstance(self._clock, HostClock) else NO_OVERHEAD
        self._counting.__enter__()
        self._tracker.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._tracker.pause()
            self._stamps, self._batch = self._tracker.stamps, self._tracker.batch
        finally:
            del self._tracker  # the model may be freed while the profile is read
            self._counting.__exit__(kind, error, trace)

    @property
    def profile(self) -> Profile:
        """What was counted and timed; there once the `with` is left."""
        profile = self._counting.profile
        samples, tokens = self._batch or (None, None)
        run = replace(profile.run, kind="measure", samples_per_step=samples, tokens_per_step=tokens)
        return _with_times(replace(profile, run=run), self.pass_times, self._overhead or NO_OVERHEAD)

    @property
    def pass_times(self) -> PassTimes:
        """What was timed, from which no overhead is taken off."""
        self._clock.settle()
        return pass_times(self._stamps, self._clock)

    def _make_tracker(self, tree: ModuleTree, **options: Any) -> ModuleTracker:
        self._tracker = _StampingTracker(self._clock, tree, **options)
        return self._tracker


class _StampingTracker(ModuleTracker):
    """Also stamps when the model runs, and when the observer does: hooks, and the counting of operators."""

    def __init__(self, clock: Clock, tree: ModuleTree, **options: Any) -> None:
        super().__init__(tree, **options)
        self.stamps: list[Stamp] = []  # those of the thread that entered, and of backward
        self.batch: tuple[int | None, int | None] | None = None  # samples and tokens that the model itself was first called with
        self._mark = clock.mark
        self._backward = NO_BACKWARD  # in which the last stamp was made

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
        if self.batch is None and len(values) == 3 and module is self.tree.modules[""]:  # an exception leaves no keyword arguments
            self.batch = samples_and_tokens(tensors_in(values[:2]))
        self.resume()

    def enter_scope(self, key: int, name: str) -> None:
        super().enter_scope(key, name)
        self.resume()

    def leave_scope(self, key: int) -> None:
        super().leave_scope(key)
        self.resume()

    def _end_backward(self) -> None:
        """No hook says when a backward pass ends: what followed its last operator was no part of it if by now it is over."""
        now = backward_id()
        if self._backward not in {NO_BACKWARD, now}:
            mark, _, why = self.stamps.pop()
            self.stamps.append((mark, OUTSIDE if now > self._backward else ModulePhase(*self.between()), why))

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

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracker.between() == OUTSIDE:
            return function(*args, **(kwargs or {}))  # outside of the model: another model's, perhaps
        self._tracker.pause(OPERATOR)
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._tracker.resume()

    def _run(self, operator: Operator, function: Any, args: Any, kwargs: Any, _kernel: Any = None) -> Any:
        return super()._run(operator, partial(self._timed, function), args, kwargs)

    def _timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._tracker.resume(ModulePhase(*self._tracker.current(args)))
        try:
            return function(*args, **kwargs)
        finally:
            self._tracker.pause()


def _with_times(profile: Profile, times: PassTimes, overhead: HookOverhead) -> Profile:
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    if all(seconds <= times.overhead(each, overhead) for each, seconds in times.own.items() if each != OUTSIDE):
        overhead = NO_OVERHEAD  # what leaves nothing was measured while the machine was busy
    timed = with_times(profile, scale_to_clean([{"": times}], {}, overhead, ignored))
    phases = {phase: spread.median for phase in ("forward", "backward", "recompute") if (spread := timed.modules[""].work(phase).seconds)}
    overheads = {each: times.overhead(each, overhead) for each in times.own}
    update = sum(max(seconds - overheads[each], 0.0) for each, seconds in times.own.items() if each.phase == "optimizer")
    phases |= {"optimizer": update} if update else {}
    seconds = sum(phases.values())
    with_observer = seconds + times.observer + sum(overheads.values())
    run = replace(profile.run, observer_ratio=with_observer / seconds if seconds else None)
    step = Step(index=0, kind="counted", seconds=seconds, phases=phases, samples=run.samples_per_step, tokens=run.tokens_per_step)
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
        return HookOverhead(inside=inside, outside=outside, operator=extra / sum(times.operators.values()))

    return median_overhead(trial, trials=5)
