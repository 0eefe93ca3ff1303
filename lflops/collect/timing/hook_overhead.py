"""Hook overhead: what torch takes to call a hook, outside of our timestamps. It is tried out once, on modules that do next to nothing."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, nn

from lflops.boundary import Undo
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.clock import Clock, HostClock, StreamClock, seconds_of
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import NO_OVERHEAD, HookOverhead, PassTimes
from lflops.collect.torch_private.dispatch_modes import without_modes

__all__ = ["Chain", "hook_overhead", "median_overhead", "of_module_calls"]

LEAVES = 100


class _Leaf(nn.Module):
    """One product where it has a weight, one autograd node where a gradient is asked for, else nothing.

    No layer of torch's: making one would draw random numbers.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return nn.functional.linear(x, self.weight)
        return x.view_as(x) if x.requires_grad else x


class Chain(nn.Module):
    """Leaves one after the other.

    Args:
        weight: What each multiplies its input by; `None` is no product.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        """Make the leaves."""
        super().__init__()
        self.leaves = nn.ModuleList([_Leaf(weight) for _ in range(LEAVES)])

    def forward(self, x: Tensor) -> Tensor:
        """Run the leaves."""
        for leaf in self.leaves:
            x = leaf(x)
        return x


def hook_overhead(clock: Clock) -> HookOverhead:
    """The overhead of a `ModuleTimer` with this clock; none for a clock that is not this machine's."""
    if isinstance(clock, HostClock):
        return _of_timer(HostClock)
    return _of_timer(StreamClock) if isinstance(clock, StreamClock) else NO_OVERHEAD


def median_overhead(trial: Callable[[], HookOverhead], *, trials: int) -> HookOverhead:
    """Medians of so many trials, none below 0. No mode sees what they run."""
    with without_modes(), torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        tried = [trial() for _ in range(trials)]
    medians = {each.name: statistics.median(getattr(one, each.name) for one in tried) for each in fields(HookOverhead)}
    return HookOverhead(**{name: max(seconds, 0.0) for name, seconds in medians.items()})


def of_module_calls(clock: Clock, timed: Callable[[nn.Module, Tensor], PassTimes]) -> tuple[float, float]:
    """Try out calls of modules that do nothing.

    Args:
        clock: Times a pass without hooks.
        timed: Runs a pass with hooks, forward only. Returns its times.

    Returns:
        The overhead of each call: in the module, and in its caller.
    """
    chain, x = Chain(), torch.ones((), device="cpu")
    clean, own = seconds_of(clock, partial(chain, x)), timed(chain, x).own
    in_leaves = sum(seconds for (row, _), seconds in own.items() if row.startswith("leaves."))
    return (in_leaves - clean) / LEAVES, (sum(own.values()) - in_leaves) / LEAVES


@functools.cache
def _of_timer(kind: Callable[[], Clock]) -> HookOverhead:
    clock = kind()

    def trial() -> HookOverhead:
        inside, outside = of_module_calls(clock, lambda chain, x: _timed(clock, chain, x)["forward"])
        chain, x = Chain(), torch.ones((), requires_grad=True, device="cpu")
        clean = seconds_of(clock, chain(x).backward)
        backward = sum(_timed(clock, chain, x, backward=True)["backward"].own.values())
        return HookOverhead(inside=inside, outside=outside, segment=(backward - clean) / LEAVES)

    return median_overhead(trial, trials=15)


def _timed(clock: Clock, chain: nn.Module, x: Tensor, *, backward: bool = False) -> dict[str, PassTimes]:
    timer = ModuleTimer(ModuleTree({"": chain}), clock)
    with Undo() as undo:
        timer.install(undo)
        timer.begin()
        result = chain(x)
        if backward:
            timer.set_aside()
            timer.begin_backward(result)
            result.backward()
        stamps = timer.end()
    clock.settle()
    return timer.pass_times(stamps)
