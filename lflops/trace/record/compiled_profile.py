"""Divide the time of compiled modules among the modules inside them.

Hooks do not run inside compiled code, so module-timing steps, in which hooks time the modules, only
measure the compiled module as a whole. Traced steps, which torch.profiler records, show how its
time is divided among the modules inside. These shares are applied to the time in unprofiled steps.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import ModuleProfile, Profile, Work, with_works
from lflops.profile.records import CompiledCode, ModulePhase, TimingStats
from lflops.trace.record.compiled_time import CompiledTimes

_PASSES = frozenset({"forward", "backward", "recompute"})


def with_compiled(
    profile: Profile, times: CompiledTimes, called: Sequence[Mapping[ModulePhase, float]]
) -> Profile:
    """Return the profile with times for the modules inside compiled modules.

    An inner module gets a share of the compiled module's self time. Time that belongs to no inner
    module stays with the compiled module.

    Args:
        profile: The profile.
        times: Times of the compiled regions. A region is one run of a compiled graph.
        called: For each batch, the self time of each module and phase in nanoseconds.
    """
    modules = _Modules(profile.modules)
    # The dict keeps the modules in the order in which they first occur.
    running_modules = dict.fromkeys(chain.from_iterable(times.host))
    for running in running_modules:
        number = _median_batch(running, times.host)
        by_module = times.host[number][running]
        whole = max(called[number].get(running, 0.0), sum(by_module.values()))
        modules.divide(running, by_module, whole)
    return replace(
        profile,
        modules=with_works(profile.modules, modules.works),
        notes=(*profile.notes, *_notes(times.code)),
    )


def _notes(code: CompiledCode) -> list[Note]:
    notes = []
    recorded = code.graphs - code.unrecorded_graphs
    if recorded:
        values = {
            "graphs": recorded,
            "assigned": 1 - _share(code.unassigned_seconds, code.seconds),
            "divided": _share(code.divided_seconds, code.seconds),
        }
        notes.append(Note(code="compiled_by_module", subject="", values=values))
    if code.unrecorded_graphs:
        values = {"graphs": code.unrecorded_graphs}
        notes.append(Note(code="compiled_unrecorded", subject="", values=values))
    return notes


def _share(seconds: float, whole: float) -> float:
    return seconds / whole if whole else 0.0


def _median_batch(
    running: ModulePhase, batches: Sequence[Mapping[ModulePhase, Mapping[ModulePhase, float]]]
) -> int:
    """Return the index of the batch in which a module's compiled code took its median time.

    The caller uses the shares of this batch and not means, because interruptions distort means.
    """
    times = []
    for number, batch in enumerate(batches):
        if running in batch:
            times.append((sum(batch[running].values()), number))
    times.sort()
    _, median = times[(len(times) - 1) // 2]
    return median


class _Modules:
    """Moves times between the modules of a profile.

    Attributes:
        works: The modules and phases whose times have changed, with their new times.
    """

    def __init__(self, modules: Mapping[str, ModuleProfile]) -> None:
        """Start with the modules of a profile."""
        self.works: dict[ModulePhase, Work] = {}
        self._modules = modules

    def divide(
        self, running: ModulePhase, by_module: Mapping[ModulePhase, float], whole: float
    ) -> None:
        """Divide a compiled module's self time among the modules below it.

        Args:
            running: The compiled module and its phase.
            by_module: The time of each module and phase inside it in a traced step, in nanoseconds.
            whole: The time of the compiled module in the same step, in nanoseconds.
        """
        if running.fqn not in self._modules or running.phase not in _PASSES or not whole:
            return
        self_time = self._work(running).self_seconds
        if self_time is None:
            return
        recomputed_inside = 0.0
        recomputed_self = 0.0
        for key, took in by_module.items():
            share = took / whole
            if key.fqn == running.fqn:
                if key.phase == "recompute" and running.phase == "backward":
                    recomputed_self += share
            elif key.fqn in self._modules and running.fqn in ancestry(key.fqn):
                self._add(key, self_time, share, below=running.fqn)
                self._add_self(running, self_time, -share)
                if key.phase != running.phase:
                    recomputed_inside += share
        recomputed = recomputed_inside + recomputed_self
        if recomputed:
            self._add_self(running, self_time, -recomputed_self)
            recompute = ModulePhase(running.fqn, "recompute")
            self._add_self(recompute, self_time, recomputed_self)
            for name in ancestry(running.fqn):
                self._move_to_recompute(name, self_time, recomputed)

    def _work(self, key: ModulePhase) -> Work:
        return self.works.get(key) or self._modules[key.fqn].work(key.phase)

    def _add(self, key: ModulePhase, time: TimingStats, share: float, *, below: str) -> None:
        """Add a share of the given time to the self time and inclusive time of a module.

        It is also added to the inclusive times of all modules between this module and `below`.
        """
        self._add_self(key, time, share)
        for name in ancestry(key.fqn):
            if name == below:
                return
            if name in self._modules:
                self._add_inclusive(ModulePhase(name, key.phase), time, share)

    def _add_self(self, key: ModulePhase, time: TimingStats, share: float) -> None:
        work = self._work(key)
        self.works[key] = replace(work, self_seconds=_plus(work.self_seconds, time, share))

    def _add_inclusive(self, key: ModulePhase, time: TimingStats, share: float) -> None:
        work = self._work(key)
        self.works[key] = replace(work, seconds=_plus(work.seconds, time, share))

    def _move_to_recompute(self, name: str, time: TimingStats, share: float) -> None:
        """Move a share of the given time from a module's backward time to its recompute time."""
        backward = ModulePhase(name, "backward")
        if self._work(backward).seconds is not None:
            self._add_inclusive(backward, time, -share)
            self._add_inclusive(ModulePhase(name, "recompute"), time, share)


def _plus(time: TimingStats | None, other: TimingStats, share: float) -> TimingStats:
    """Return the statistics of a time to which `share` of another time is added.

    The median and both quartiles are added, because both times come from the same steps.
    """
    if time is None:
        return other.times(share)
    return TimingStats(
        median=max(time.median + other.median * share, 0.0),
        low=max(time.low + other.low * share, 0.0),
        high=max(time.high + other.high * share, 0.0),
        n=min(time.n, other.n),
    )
