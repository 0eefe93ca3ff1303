"""The modules that a step spends most of its time in: each one's own time, those of repeated blocks together."""

from collections.abc import Mapping

from msgspec import Struct

from lflops.profile.model import ModuleProfile, Profile
from lflops.profile.module_names import fold_repeats
from lflops.profile.records import Phase
from lflops.profile.series import summed

TIMED_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
"""The phases of a module's total time. The optimizer's is rarely known by module."""


class BusyModules(Struct, frozen=True, kw_only=True):
    """The modules at one place of the model, without the modules below them."""

    pattern: str
    name: str  # the pattern; where only some at that place have a time, the names of these
    kind: str
    modules: int
    seconds: float  # total time of all of them in a step
    macs: int  # of forward and backward, of all of them


def total_seconds(module: ModuleProfile, *, own: bool = False) -> float | None:
    """Forward, backward and recompute, and the optimizer where it is known. `None` where no phase has a time.

    A phase whose time is unknown is left out, so that it does not hide the others. `own` is without the modules below it.
    """
    works = [module.work(phase) for phase in TIMED_PHASES]
    known = [spread.median for work in works if (spread := work.own_seconds if own else work.seconds) is not None]
    return sum(known) if known else None


def busiest(
    profile: Profile, patterns: Mapping[str, str], communicating: Mapping[tuple[str, str], float] | None = None
) -> tuple[BusyModules, ...]:
    """All places with a time, the one with the most time first; seconds of communication are no work of the module."""
    without = summed((name, seconds) for (name, _), seconds in (communicating or {}).items())
    # A module that never ran, as a list of layers, has no time.
    own = {name: (total_seconds(module, own=True) or 0.0) - without.get(name, 0.0) for name, module in profile.modules.items()}
    timed = {name: seconds for name, seconds in own.items() if seconds > 0}
    found = []
    for label, names in fold_repeats(timed, lambda name: (name,), patterns):
        modules = [profile.modules[name] for name in names]
        found.append(
            BusyModules(
                pattern=patterns[names[0]],
                name=label,
                kind=modules[0].kind,
                modules=len(names),
                seconds=sum(timed[name] for name in names),
                macs=sum(module.forward.own_macs + module.backward.own_macs for module in modules),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.seconds))
