"""How the time of clean passes divides over the modules: as it did in the hooked passes.

Hooked passes take longer. Part of that is the observer's own time, which is stamped and belongs to no module. The rest is hook overhead as
far as that explains it. A trial measured the overhead, but with cold caches it is more, and on a busy device it is nothing. So it is scaled
here by a factor from 0 to 3. What it does not explain scales all modules equally, and is reported.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from lflops.collect.timing.stamps import HookOverhead, PassTimes, inclusive
from lflops.profile.records import ModulePhase, Spread
from lflops.profile.series import gathered

MOST_OVERHEAD = 3.0  # the largest factor of the trial's overhead

NONE: Mapping[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class ScaledTimes:
    """Seconds by module and phase, own and inclusive, over the hooked passes."""

    own: Mapping[ModulePhase, Spread]
    inclusive: Mapping[ModulePhase, Spread]
    # Of each part, usual seconds of clean passes over those of hooked ones without the overhead: 1 is a good division.
    factors: Mapping[str, float]
    ignored: Mapping[str, float]  # median seconds of each row that is in none of the others

    @classmethod
    def of_steps(
        cls, steps: Sequence[Mapping[ModulePhase, float]], factors: Mapping[str, float] = NONE, ignored: Mapping[str, float] = NONE
    ) -> Self:
        """The spreads over passes whose own seconds are known."""
        own = spreads_of(steps)
        medians = {key: spread.median for key, spread in own.items()}
        # The median of a sum is not the sum of medians, but the rows below a row have to add up to it.
        sums, spreads = inclusive(medians), spreads_of([inclusive(each) for each in steps])
        summed = {key: replace(spread.shifted(sums[key] - spread.median), median=sums[key]) for key, spread in spreads.items()}
        return cls(own=own, inclusive=summed, factors=factors, ignored=ignored)


def scale_to_clean(
    hooked: Sequence[Mapping[str, PassTimes]],
    clean: Mapping[str, float],
    overhead: HookOverhead,
    ignored: Collection[str] = (),  # rows that are left out
    means: Mapping[str, float] | None = None,  # seconds of each part, which the modules add up to in the end; without them the usual ones
) -> ScaledTimes:
    """Take off hook overhead, and scale the rest to add up to the clean passes.

    Each hooked pass is given by its parts, of which forward may have time of the backward phase, where it takes a gradient. `clean` are the
    usual seconds of each part of a clean pass; a part not in it is not scaled.
    """
    means = clean if means is None else means
    scaled: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in hooked]
    factors = {}
    for part in dict.fromkeys(part for each in hooked for part in each):
        passes = [each.get(part, PassTimes()) for each in hooked]
        times = _times_the_overhead(passes, clean[part], overhead) if part in clean else 1.0
        own = [{key: max(seconds - times * each.overhead(key, overhead), 0.0) for key, seconds in each.own.items()} for each in passes]
        total = sum(spread.median for spread in spreads_of(own).values())
        if part in clean and total > 0:
            factors[part] = clean[part] / total
        for sums, of_pass in zip(scaled, own, strict=True):
            for key, seconds in of_pass.items():
                sums[key] += seconds * (means[part] / total if part in factors else 1.0)
    kept = [{key: seconds for key, seconds in own.items() if key.row not in ignored} for own in scaled]
    left_out = {row: statistics.median(sum(took for key, took in own.items() if key.row == row) for own in scaled) for row in ignored}
    return ScaledTimes.of_steps(kept, factors, left_out)


def _times_the_overhead(passes: Sequence[PassTimes], clean: float, overhead: HookOverhead) -> float:
    """The factor of the trial's overhead that explains what hooked passes took longer."""
    hooked = statistics.median(sum(each.own.values()) for each in passes)
    expected = statistics.median(sum(each.overhead(key, overhead) for key in each.own) for each in passes)
    return min(max((hooked - clean) / expected, 0.0), MOST_OVERHEAD) if expected > 0 else 0.0


def spreads_of(passes: Sequence[Mapping[ModulePhase, float]]) -> dict[ModulePhase, Spread]:
    """Over the passes: what a module usually takes where it runs, times how often it does, as those of a GAN that take turns."""
    ran = gathered(item for each in passes for item in each.items())
    spreads = {key: spread for key, seconds in ran.items() if (spread := Spread.of(seconds)) is not None}
    for key, spread in spreads.items():
        if (often := spread.n / len(passes)) < 1:
            spreads[key] = spread.times(often)
    return spreads
