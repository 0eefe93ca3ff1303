"""Hook overhead: what torch takes to call a hook, outside of our timestamps. It is tried out once, on modules that do next to nothing."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, mm
from torch.autograd import backward

from lflops.collect.attribution.hooks import ModuleListener
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.clock import Clock, DeviceClock, HostClock, device_clock, seconds_of
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import NO_OVERHEAD, HookOverhead, PassTimes
from lflops.collect.torch_private.dispatch_modes import isolated
from lflops.collect.torch_private.modules import OwnModule

LEAVES = 100

view_as = Tensor.view_as


class Chain:
    """Modules one after the other, in a module. Each chain has its own classes, and so its own hooks."""

    def __init__(self, weight: Tensor | None = None) -> None:

        class Own(OwnModule):
            pass

        class Leaf(Own):
            """One product where it has a weight, one autograd node where a gradient is asked for, else nothing.

            No layer of torch's: making one would draw random numbers. No function of torch's that users replace.
            """

            def forward(self, x: Tensor) -> Tensor:
                if weight is not None:
                    return mm(x, weight)
                return view_as(x, x) if x.requires_grad else x

        leaves = {str(number): Leaf() for number in range(LEAVES)}

        class Root(Own):
            """Runs the leaves."""

            def forward(self, x: Tensor) -> Tensor:
                for leaf in leaves.values():
                    x = leaf(x)
                return x

        self._own = Own
        self.root = Root(leaves=Own(**leaves))
        self.hooked()

    def hooked(self, listener: ModuleListener | None = None) -> None:
        """From here on, call a listener's hooks for each module; without one, none."""
        if listener is None:
            self._own.hooked()
        else:
            self._own.hooked(listener.enter_module, listener.leave_module)


def hook_overhead(clock: Clock) -> HookOverhead:
    """The overhead of a `ModuleTimer` with this clock; none for a clock that is not this machine's."""
    if isinstance(clock, DeviceClock):
        return _of_timer(clock.device)
    return _of_timer(None) if isinstance(clock, HostClock) else NO_OVERHEAD


def median_overhead(trial: Callable[[], HookOverhead], *, trials: int) -> HookOverhead:
    """Medians of so many trials, none below 0. Nothing of the user's sees what they run."""
    with isolated():
        tried = [trial() for _ in range(trials)]
    medians = {each.name: statistics.median(getattr(one, each.name) for one in tried) for each in fields(HookOverhead)}
    return HookOverhead(**{name: max(seconds, 0.0) for name, seconds in medians.items()})


def of_module_calls(clock: Clock, timed: Callable[[Chain, Tensor], PassTimes]) -> tuple[float, float]:
    """The overhead of a call in the module and in its caller, from calls of modules that do nothing. `timed` runs a pass with hooks."""
    chain, x = Chain(), torch.ones((), device="cpu", dtype=torch.float32)
    clean, own = seconds_of(clock, partial(chain.root, x)), timed(chain, x).own
    in_leaves = sum(seconds for (row, _), seconds in own.items() if row.startswith("leaves."))
    return (in_leaves - clean) / LEAVES, (sum(own.values()) - in_leaves) / LEAVES


@functools.cache
def _of_timer(device: torch.device | None) -> HookOverhead:
    """With a device's clock; with the host's where there is none."""
    clock = HostClock() if device is None else device_clock(device)

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(clock, lambda chain, x: _timed(clock, chain, x)["forward"])
        chain, x = Chain(), torch.ones((), requires_grad=True, device="cpu", dtype=torch.float32)
        clean = seconds_of(clock, partial(backward, chain.root(x)))
        hooked = sum(_timed(clock, chain, x, with_backward=True)["backward"].own.values())
        return HookOverhead(inside=inside, outside=outside, segment=(hooked - clean) / LEAVES)

    return median_overhead(trial, trials=15)


def _timed(clock: Clock, chain: Chain, x: Tensor, *, with_backward: bool = False) -> dict[str, PassTimes]:
    """Times of a pass in which a timer's hooks are called for the chain's modules, and for no others in the process."""
    timer = ModuleTimer(ModuleTree({"": chain.root}), clock)
    chain.hooked(timer)
    try:
        timer.begin()
        result = chain.root(x)
        if with_backward:
            timer.set_aside()
            timer.begin_backward(result)
            backward(result)
        stamps = timer.end()
    finally:
        chain.hooked()
    clock.settle()
    return timer.pass_times(stamps)
