"""Handmade profiles of two runs to compare, with chosen times of modules."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import product, profile, run, weights


def around(median: float, width: float, n: int) -> TimingStats:
    """Return the statistics of `n` times.

    `width` is the distance of both quartiles from the median, as a share of the median.
    """
    return TimingStats(median=median, low=median * (1 - width), high=median * (1 + width), n=n)


def ran(
    seconds: Mapping[str, float],
    *,
    macs: Mapping[str, int] | None = None,
    width: float = 0.0,
    n: int = 30,
    spreads: Mapping[str, TimingStats] | None = None,
    steps: Sequence[Step] = (),
    kinds: Mapping[str, str] | None = None,
    **facts: Any,
) -> Profile:
    """Return the profile of a run whose modules have these self times in forward.

    Args:
        seconds: Self time of each module in forward. Modules above them are added.
        macs: MACs of the matmul in each module; 100 by default. A module has as many parameters.
        width: Distance of the quartiles from the median, as a share.
        n: Number of times.
        spreads: Statistics that replace the statistics of single modules.
        steps: The steps of the profile.
        kinds: Class names of modules; "Linear" by default.
        **facts: Fields of the `Run`.
    """
    names: dict[str, None] = {}
    for name in seconds:
        for above in reversed(ancestry(name)):
            names[above] = None
    macs_of = dict.fromkeys(seconds, 100) | dict(macs or {})
    kind_of = dict(kinds or {})
    cells = []
    for name in seconds:
        done = macs_of[name]
        if done:
            cells.append(product(name, "aten::mm", "forward", macs=done, bytes_moved=4 * done))
    rows = {}
    for name in names:
        rows[name] = weights(macs_of.get(name, 0)) | {"class_name": kind_of.get(name, "Linear")}
    counted = profile(rows, cells, run=run(kind="measure", **facts), steps=tuple(steps))
    given = {name: around(each, width, n) for name, each in seconds.items()} | dict(spreads or {})

    def timed(name: str, module: ModuleProfile) -> ModuleProfile:
        inside = [spread for other, spread in given.items() if name in ancestry(other)]
        below = TimingStats(
            median=sum(each.median for each in inside),
            low=sum(each.low for each in inside),
            high=sum(each.high for each in inside),
            n=n,
        )
        forward = replace(module.forward, seconds=below, self_seconds=given.get(name))
        return replace(module, forward=forward)

    modules = {name: timed(name, module) for name, module in counted.modules.items()}
    return replace(counted, modules=modules)


def clean(*seconds: float, **phases: float) -> list[Step]:
    """Return unprofiled steps of so many seconds, with the shares of a step in its phases."""
    steps = []
    for i, each in enumerate(seconds):
        times = {name: share * each for name, share in phases.items()}
        steps.append(Step(index=i, kind="unprofiled", seconds=each, phases=times))
    return steps
