"""Handmade profiles of two runs to compare, with chosen times of modules."""

from collections.abc import Mapping, Sequence
from typing import Any

from lflops.profile.module_names import ancestry
from lflops.profile.profile import ModuleProfile, Profile, Work
from lflops.profile.records import TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import fields_of, product, profile, run, weights


def around(median: float, width: float, n: int) -> TimingStats:
    """Quartiles so far, as a share, on either side of the median."""
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
    """Modules by the seconds of their own forward.

    Each has a product of 100 MACs, or of as many as given, and as many parameters.
    """
    names = {above: None for name in seconds for above in reversed(ancestry(name))}
    done = dict.fromkeys(seconds, 100) | dict(macs or {})
    cells = [
        product(name, "aten::mm", "forward", macs=done[name], bytes_moved=4 * done[name])
        for name in seconds
        if done[name]
    ]
    own = {name: weights(done.get(name, 0)) for name in names}
    rows = {name: own[name] | {"class_name": (kinds or {}).get(name, "Linear")} for name in names}
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
        forward = Work(
            **fields_of(module.forward) | {"seconds": below, "self_seconds": given.get(name)}
        )
        return ModuleProfile(**fields_of(module) | {"forward": forward})

    return Profile(
        **fields_of(counted)
        | {"modules": {name: timed(name, module) for name, module in counted.modules.items()}}
    )


def clean(*seconds: float, **phases: float) -> list[Step]:
    """Clean steps of so many seconds, with these shares of them in phases."""
    return [
        Step(
            index=i,
            kind="unprofiled",
            seconds=each,
            phases={name: share * each for name, share in phases.items()},
        )
        for i, each in enumerate(seconds)
    ]
