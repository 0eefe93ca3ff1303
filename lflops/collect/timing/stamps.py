"""From moments to seconds: a pass is a row of stamps, each saying what runs from here on, and what lies between two is somebody's own time.

    stamp      root   observer   q        observer   root      end
    mark       0      2          3        9          10        12          own: root 4, q 6; the observer 2

What a hook does lies between stamps of its own, so it is measured, and left out where it happened. What lies outside of them, torch's part
of calling a hook, is `Glue`: about the same for every call, and known from a trial.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lflops.collect.timing.clock import Clock
from lflops.profile.module_names import ancestry
from lflops.profile.records import ModulePhase

__all__ = ["ENTERS", "NO_OVERHEAD", "OPERATOR", "SEGMENT", "HookOverhead", "PassTimes", "Stamp", "inclusive", "pass_times"]


Stamp = tuple[Any, ModulePhase | None, str]
"""A mark, what runs from there on, and why. Where there is no place it is the observer."""

ENTERS, SEGMENT, OPERATOR = "enters", "segment", "operator"
"""Why: a module is being entered; a segment of backward begins; an operator is being counted."""


@dataclass(frozen=True, kw_only=True)
class HookOverhead:
    """Seconds that being watched costs beside what is stamped.

    Attributes:
        inside: In a module, for each call of it.
        outside: In the caller, for each call that it makes.
        segment: In backward, for each segment.
        operator: Where an operator is counted, for each.
    """

    inside: float = 0.0
    outside: float = 0.0
    segment: float = 0.0
    operator: float = 0.0


NO_OVERHEAD = HookOverhead()


@dataclass(kw_only=True)
class PassTimes:
    """One pass: seconds of each place itself, and how often it was called, called others, began a segment of backward, ran an operator."""

    own: defaultdict[ModulePhase, float] = field(default_factory=lambda: defaultdict(float))
    observer: float = 0.0
    called: Counter[ModulePhase] = field(default_factory=Counter)
    calls_others: Counter[ModulePhase] = field(default_factory=Counter)
    segments: Counter[ModulePhase] = field(default_factory=Counter)
    operators: Counter[ModulePhase] = field(default_factory=Counter)

    def add(self, other: "PassTimes") -> None:
        """Let the other's figures be part of this one's."""
        self.observer += other.observer
        for place, seconds in other.own.items():
            self.own[place] += seconds
        for name in ("called", "calls_others", "segments", "operators"):
            getattr(self, name).update(getattr(other, name))

    def overhead(self, place: ModulePhase, glue: HookOverhead) -> float:
        """What of a place's seconds is the glue's."""
        at_modules = glue.inside * self.called[place] + glue.outside * self.calls_others[place]
        return at_modules + glue.segment * self.segments[place] + glue.operator * self.operators[place]


def pass_times(stamps: Sequence[Stamp], clock: Clock) -> PassTimes:
    """What lies between settled stamps, the last of which only ends the one before."""
    lap = PassTimes()
    running: ModulePhase | None = None
    entering = False
    for (mark, place, why), (end, _, _) in pairwise(stamps):
        seconds = clock.seconds(mark, end)
        if place is None:
            lap.observer += seconds
            entering = why == ENTERS
            if running is not None:
                lap.calls_others[running] += entering
                lap.operators[running] += why == OPERATOR
            continue
        lap.own[place] += seconds
        lap.called[place] += entering
        lap.segments[place] += why == SEGMENT
        running, entering = place, False
    return lap


def inclusive(own: Mapping[ModulePhase, float]) -> dict[ModulePhase, float]:
    """Seconds of each row and of all rows below it, in each phase."""
    sums: defaultdict[ModulePhase, float] = defaultdict(float)
    for (row, phase), seconds in own.items():
        for above in ancestry(row):
            sums[ModulePhase(above, phase)] += seconds
    return dict(sums)
