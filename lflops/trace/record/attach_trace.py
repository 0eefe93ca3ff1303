"""A profile and what was recorded of its traced steps, as one profile.

The clean time of a compiled module is divided over the modules in it as in the traced steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from lflops.profile.collective_names import collective_kind
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, ModuleProfile, Profile, Work, with_works
from lflops.profile.records import PHASES, ModulePhase, TimingStats
from lflops.trace.record.compiled_time import CompiledTimes
from lflops.trace.record.tracer import Recording

ROOTS_BACKWARD, OTHER = ModulePhase("", "backward"), ModulePhase("", "other")
"""What the engine calls at the end of backward is the root's backward in a count.

A trace has it after the last node: `other`.
"""


def with_trace(profile: Profile, recording: Recording, files: Mapping[str, str]) -> Profile:
    """The profile with what was recorded: the operators, and the device's time of each module and phase.

    `files` are traces by rank.
    """
    seconds = recording.device_seconds or {}
    known = {
        key: spread
        for key, spread in seconds.items()
        if key.fqn in profile.modules and key.phase in PHASES
    }
    works = {
        key: replace(profile.modules[key.fqn].work(key.phase), device_seconds=spread)
        for key, spread in known.items()
    }
    communication = _timed(profile.communication, recording.communication)
    timelines = profile.timelines if recording.timeline is None else (recording.timeline,)
    trace = replace(recording.trace, files=files)
    modules = with_works(profile.modules, works)
    profile = replace(
        profile, modules=modules, communication=communication, trace=trace, timelines=timelines
    )
    return (
        profile
        if recording.compiled is None
        else with_compiled(profile, recording.compiled, recording.call_times)
    )


def _timed(
    rows: Sequence[Communication], seconds: Mapping[tuple[ModulePhase, str], tuple[float, float]]
) -> tuple[Communication, ...]:
    """The collectives with their times.

    Two of one kind in one place share kernels that cannot be distinguished: unknown.
    """
    # Where one collective alone has a kind, all of the kind is its: a trace may see its launch a
    # little before or after its module.
    places = [
        {(ModulePhase(row.module, row.phase), kind) for kind in _kernels_of(row.collective)}
        for row in rows
    ]
    counted = set().union(*places)
    kinds = Counter(kind for row in rows for kind in _kernels_of(row.collective))
    for each in places:
        each |= {
            (OTHER, kind)
            for place, kind in each
            if place == ROOTS_BACKWARD and (OTHER, kind) not in counted
        }
        each |= {
            key for key in seconds if {key[1]} == {kind for _, kind in each} and kinds[key[1]] == 1
        }
    number = Counter(place for each in places for place in each)
    timed = []
    for row, each in zip(rows, places, strict=True):
        known = [seconds[place] for place in each if place in seconds and number[place] == 1]
        whole, exposed = (sum(part) for part in zip(*known, strict=True)) if known else (None, None)
        timed.append(replace(row, seconds=whole, exposed_seconds=exposed))
    return tuple(timed)


def _kernels_of(collective: str) -> set[str]:
    kind = collective_kind(collective)
    return (
        {kind, "send_recv"}
        if kind in {"all_to_all", "send", "recv", "gather", "scatter"}
        else {kind}
    )


def with_compiled(
    profile: Profile, times: CompiledTimes, called: Sequence[Mapping[ModulePhase, float]]
) -> Profile:
    """The profile with times of modules inside of compiled ones."""
    # A row gets its part of the compiled module's own time. Time of no module stays the compiled
    # module's.
    rows = _Rows(profile.modules)
    for running in dict.fromkeys(each for batch in times.host for each in batch):
        number = _usual(running, times.host)
        by_module = times.host[number][running]
        inside = {
            key: took
            for key, took in by_module.items()
            if key.fqn != running.fqn and running.fqn in ancestry(key.fqn)
        }
        again = sum(
            took
            for key, took in by_module.items()
            if key.fqn == running.fqn and key.phase == "recompute"
        )
        rows.open(
            running,
            inside,
            again,
            whole=max(called[number].get(running, 0.0), sum(by_module.values())),
        )
    code = times.code
    notes = []
    if code.graphs > code.unrecorded_graphs:
        values = {
            "graphs": code.graphs - code.unrecorded_graphs,
            "assigned": 1 - _part(code.unassigned_seconds, code.seconds),
        }
        notes.append(
            Note(
                code="compiled_by_module",
                subject="",
                values={**values, "divided": _part(code.divided_seconds, code.seconds)},
            )
        )
    if code.unrecorded_graphs:
        notes.append(
            Note(code="compiled_unrecorded", subject="", values={"graphs": code.unrecorded_graphs})
        )
    return replace(
        profile, modules=with_works(profile.modules, rows.works), notes=(*profile.notes, *notes)
    )


def _usual(
    running: ModulePhase, batches: Sequence[Mapping[ModulePhase, Mapping[ModulePhase, float]]]
) -> int:
    """The index of the batch in which a module's compiled code took its median time.

    One that was interrupted is no measure.
    """
    took = sorted(
        (sum(batch[running].values()), number)
        for number, batch in enumerate(batches)
        if running in batch
    )
    return took[(len(took) - 1) // 2][1]


class _Rows:
    """The modules of a profile while times are moved between them."""

    def __init__(self, modules: Mapping[str, ModuleProfile]) -> None:
        self._modules = modules
        # those that have changed
        self.works: dict[ModulePhase, Work] = {}

    def open(
        self,
        running: ModulePhase,
        inside: Mapping[ModulePhase, float],
        again: float,
        *,
        whole: float,
    ) -> None:
        """Divide a compiled row's self time over the rows below it.

        Of its `whole` traced nanoseconds, `again` are recomputed self time.
        """
        own = self._work(running).self_seconds if running.fqn in self._modules else None
        if own is None or not whole or running.phase not in {"forward", "backward", "recompute"}:
            return
        recomputed = again / whole if running.phase == "backward" else 0.0
        for key, took in inside.items():
            if key.fqn not in self._modules:
                continue
            part = took / whole
            self._add(key, own, part, below=running.fqn)
            self._give_own(running, own, -part)
            recomputed += part if key.phase != running.phase else 0.0
        if recomputed:
            self._give_own(running, own, -again / whole)
            self._give_own(ModulePhase(running.fqn, "recompute"), own, again / whole)
            for row in ancestry(running.fqn):
                self._move(row, own, recomputed)

    def _work(self, key: ModulePhase) -> Work:
        return self.works.get(key) or self._modules[key.fqn].work(key.phase)

    def _set(self, key: ModulePhase, **times: TimingStats | None) -> None:
        self.works[key] = replace(self._work(key), **times)

    def _add(self, key: ModulePhase, own: TimingStats, part: float, *, below: str) -> None:
        """Add to a row's own time, and to the time of every row between it and the compiled one."""
        self._give_own(key, own, part)
        for row in ancestry(key.fqn):
            if row == below:
                return
            above = ModulePhase(row, key.phase)
            if row in self._modules:
                self._set(above, seconds=_plus(self._work(above).seconds, own, part))

    def _give_own(self, key: ModulePhase, own: TimingStats, part: float) -> None:
        self._set(key, self_seconds=_plus(self._work(key).self_seconds, own, part))

    def _move(self, row: str, own: TimingStats, part: float) -> None:
        """Move what is recomputed inside of a row from its backward to its recompute."""
        backward, recompute = ModulePhase(row, "backward"), ModulePhase(row, "recompute")
        if self._work(backward).seconds is not None:
            self._set(backward, seconds=_plus(self._work(backward).seconds, own, -part))
            self._set(recompute, seconds=_plus(self._work(recompute).seconds, own, part))


def _plus(spread: TimingStats | None, other: TimingStats, part: float) -> TimingStats:
    """A spread with a part of another added.

    Both are of the same steps, and a part of a median is as sure as the median.
    """
    if spread is None:
        return other.times(part)
    return TimingStats(
        median=max(spread.median + other.median * part, 0.0),
        low=max(spread.low + other.low * part, 0.0),
        high=max(spread.high + other.high * part, 0.0),
        n=min(spread.n, other.n),
    )


def _part(seconds: float, of: float) -> float:
    return seconds / of if of else 0.0
