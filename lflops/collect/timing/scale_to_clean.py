"""How the time of clean passes divides over the modules: as it did in the hooked ones.

Hooked passes took longer. Part of that is the observer's own time, which is stamped and in no place. Of what remains, as much as can be is
explained by the glue, which is known from a trial but not how far it holds: among cold caches it is more, behind a busy device nothing. So
its size is found here, between nothing and three times the trial's; only what then is left scales all places alike, and is reported.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lflops.collect.timing.stamps import HookOverhead, PassTimes, inclusive
from lflops.profile.records import ModulePhase, Spread

__all__ = ["ScaledTimes", "scale_to_clean"]

MOST_GLUE = 3.0
"""Times the trial's."""


@dataclass(frozen=True, kw_only=True)
class ScaledTimes:
    """Seconds by place, own and inclusive, over the hooked passes.

    Attributes:
        factors: What the seconds of each part were multiplied by to add up to the clean passes'.
        ignored: Median seconds of each row that is in none of the others.
        steps: Own seconds of each hooked pass, which `own` and `inclusive` are the spreads of.
    """

    own: Mapping[ModulePhase, Spread]
    inclusive: Mapping[ModulePhase, Spread]
    factors: Mapping[str, float]
    ignored: Mapping[str, float]
    steps: tuple[Mapping[ModulePhase, float], ...] = ()

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[Mapping[ModulePhase, float]],
        *,
        factors: Mapping[str, float] | None = None,
        ignored: Mapping[str, float] | None = None,
    ) -> Self:
        """The spreads over passes whose own seconds are known."""
        own = _spreads(steps)
        medians = {place: spread.median for place, spread in own.items()}
        whole = _shifted(_spreads([inclusive(each) for each in steps]), inclusive(medians))
        return cls(own=own, inclusive=whole, factors=factors or {}, ignored=ignored or {}, steps=tuple(steps))


def scale_to_clean(
    laps: Sequence[Mapping[str, PassTimes]], clean: Mapping[str, float], glue: HookOverhead, ignored: Collection[str] = ()
) -> ScaledTimes:
    """Take off the glue, and let what remains add up to the clean passes.

    Args:
        laps: The hooked passes, each by its parts: forward may hold time of the backward phase too, where it takes a gradient.
        clean: Seconds of each part of a clean pass; of what is not in it nothing but the glue is taken off.
        glue: What each call's hooks cost beside what is stamped.
        ignored: Rows that are left out.
    """
    fitted: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in laps]
    factors = {}
    for part in dict.fromkeys(part for lap in laps for part in lap):
        of_part = [lap.get(part, PassTimes()) for lap in laps]
        times = _times_the_glue(of_part, clean[part], glue) if part in clean else 1.0
        own = [{place: max(lap.own[place] - times * lap.overhead(place, glue), 0.0) for place in lap.own} for lap in of_part]
        hooked = sum(spread.median for spread in _spreads(own).values())
        if part in clean and hooked > 0:
            factors[part] = clean[part] / hooked
        for whole, each in zip(fitted, own, strict=True):
            for place, seconds in each.items():
                whole[place] += seconds * factors.get(part, 1.0)
    kept = [{place: seconds for place, seconds in own.items() if place.row not in ignored} for own in fitted]
    return ScaledTimes.of_steps(
        kept, factors=factors, ignored={row: statistics.median(_of_row(own, row) for own in fitted) for row in ignored}
    )


def _times_the_glue(laps: Sequence[PassTimes], clean: float, glue: HookOverhead) -> float:
    """How much of it explains what hooked passes took longer."""
    hooked = statistics.median(sum(lap.own.values()) for lap in laps)
    expected = statistics.median(sum(lap.overhead(place, glue) for place in lap.own) for lap in laps)
    return min(max((hooked - clean) / expected, 0.0), MOST_GLUE) if expected > 0 else 0.0


def _of_row(own: Mapping[ModulePhase, float], row: str) -> float:
    return sum(seconds for place, seconds in own.items() if place.row == row)


def _shifted(spreads: Mapping[ModulePhase, Spread], medians: Mapping[ModulePhase, float]) -> dict[ModulePhase, Spread]:
    """The spreads around other medians: those of sums are no sums, and what stands below a row is to add up to it."""
    return {
        place: Spread(
            median=medians[place],
            low=max(spread.low - spread.median + medians[place], 0.0),
            high=spread.high - spread.median + medians[place],
            n=spread.n,
        )
        for place, spread in spreads.items()
    }


def _spreads(laps: Sequence[Mapping[ModulePhase, float]]) -> dict[ModulePhase, Spread]:
    """Over the laps; one that a lap does not have took no time in it."""
    places = dict.fromkeys(place for lap in laps for place in lap)
    spreads = {place: Spread.of(lap.get(place, 0.0) for lap in laps) for place in places}
    return {place: spread for place, spread in spreads.items() if spread is not None}
