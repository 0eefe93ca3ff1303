"""What being watched costs beside what is stamped: found once for each clock, on modules that do nothing."""

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.timing.clock import Clock, HostClock, StreamClock, seconds_of
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import NO_OVERHEAD, HookOverhead, PassTimes
from lflops.collect.torch_private.dispatch_modes import without_modes
from lflops.profile.records import ModulePhase

__all__ = ["hook_overhead"]

LEAVES = 100
TRIALS = 15


class _Leaf(nn.Module):
    """Nothing to do in forward; one autograd node where a gradient is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if x.requires_grad else x


class _Chain(nn.Module):
    """Leaves one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList([_Leaf() for _ in range(LEAVES)])

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x)
        return x


def hook_overhead(clock: Clock) -> HookOverhead:
    """The glue of hooks whose marks are read from this clock; none for a clock that is not this machine's."""
    if isinstance(clock, HostClock):
        return _tried(HostClock)
    return _tried(StreamClock) if isinstance(clock, StreamClock) else NO_OVERHEAD


@functools.cache
def _tried(kind: Callable[[], Clock]) -> HookOverhead:
    """Medians of some trials, each beside one without hooks."""
    clock, chain = kind(), _Chain()
    tried: list[HookOverhead] = []
    with without_modes(), torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        plain, leaf = (torch.ones((), requires_grad=wanted, device="cpu") for wanted in (False, True))
        for _ in range(TRIALS):
            clean = seconds_of(clock, lambda: chain(plain)) / LEAVES
            lap = _watched(clock, chain, plain)["forward"]
            in_leaves = _sum(lap, lambda place: place.row.startswith("leaves."))
            in_callers = _sum(lap, lambda place: not place.row.startswith("leaves."))
            result = chain(leaf)
            clean_backward = seconds_of(clock, result.backward)
            backward = sum(_watched(clock, chain, leaf, backward=True)["backward"].own.values())
            tried.append(
                HookOverhead(inside=in_leaves / LEAVES - clean, outside=in_callers / LEAVES, segment=(backward - clean_backward) / LEAVES)
            )
    return HookOverhead(
        **{name: max(statistics.median(getattr(each, name) for each in tried), 0.0) for name in ("inside", "outside", "segment")}
    )


def _sum(lap: PassTimes, wanted: Callable[[ModulePhase], bool]) -> float:
    return sum(seconds for place, seconds in lap.own.items() if wanted(place))


def _watched(clock: Clock, chain: nn.Module, x: Tensor, *, backward: bool = False) -> dict[str, PassTimes]:
    spans = ModuleTimer(ModuleTree({"": chain}), clock)
    with spans.hooked():
        spans.begin()
        result = chain(x)
        if backward:
            spans.set_aside()
            spans.begin_backward(result)
            result.backward()
        stamps = spans.end()
    clock.settle()
    return spans.laps(stamps)
