"""From moments to seconds. A stamp says what runs from here on; the time up to the next stamp is that module's own.

    stamp      root   observer   q        observer   root      end
    mark       0      2          3        9          10        12          own: root 4, q 6; the observer 2

What a hook does is between two stamps, so it is measured and left out. What torch takes to call the hook is in no stamp. That is the
`HookOverhead`: about the same for every call, and known from a trial.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lflops.collect.timing.clock import Clock
from lflops.profile.module_names import ancestry
from lflops.profile.records import ModulePhase
from lflops.profile.series import summed

Stamp = tuple[Any, ModulePhase | None, str]  # a mark, what runs from there on, and why; `None` is the observer

ENTERS, SEGMENT, OPERATOR = "enters", "segment", "operator"
"""Why: a module is entered; a segment of backward begins; an operator is counted."""


@dataclass(frozen=True, kw_only=True)
class HookOverhead:
    """Seconds that hooks and modes take outside of our stamps."""

    inside: float = 0.0  # in a module, for each call of it
    outside: float = 0.0  # in the caller, for each call that it makes
    segment: float = 0.0  # in backward, for each segment
    operator: float = 0.0  # where an operator is counted, for each


NO_OVERHEAD = HookOverhead()


@dataclass(kw_only=True)
class PassTimes:
    """One pass by module and phase: own seconds; how often it was called, called others, began a segment of backward, ran an operator."""

    own: defaultdict[ModulePhase, float] = field(default_factory=lambda: defaultdict(float))
    observer: float = 0.0
    called: Counter[ModulePhase] = field(default_factory=Counter)
    calls_others: Counter[ModulePhase] = field(default_factory=Counter)
    segments: Counter[ModulePhase] = field(default_factory=Counter)
    operators: Counter[ModulePhase] = field(default_factory=Counter)

    def add(self, other: "PassTimes") -> None:
        self.observer += other.observer
        for key, seconds in other.own.items():
            self.own[key] += seconds
        for name in ("called", "calls_others", "segments", "operators"):
            getattr(self, name).update(getattr(other, name))

    def overhead(self, key: ModulePhase, each: HookOverhead) -> float:
        """The hook overhead in the seconds of a module and phase."""
        at_modules = each.inside * self.called[key] + each.outside * self.calls_others[key]
        return at_modules + each.segment * self.segments[key] + each.operator * self.operators[key]


def pass_times(stamps: Sequence[Stamp], clock: Clock) -> PassTimes:
    """The times between settled stamps; the last one only ends the one before."""
    times = PassTimes()
    running: ModulePhase | None = None
    entering = False
    for (mark, key, why), (end, _, _) in pairwise(stamps):
        seconds = clock.seconds(mark, end)
        if key is None:
            times.observer += seconds
            entering = why == ENTERS
            if running is not None:
                times.calls_others[running] += entering
                times.operators[running] += why == OPERATOR
            continue
        times.own[key] += seconds
        times.called[key] += entering
        times.segments[key] += why == SEGMENT
        running, entering = key, False
    return times


def inclusive(own: Mapping[ModulePhase, float]) -> dict[ModulePhase, float]:
    """Seconds of each row and of all rows below it, in each phase."""
    return summed((ModulePhase(above, phase), seconds) for (row, phase), seconds in own.items() for above in ancestry(row))
