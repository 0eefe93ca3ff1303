"""What one rank tells the others, and how it is packed.

What a thousand ranks have in common, the names of modules and all that was counted, is a separate
blob, named by its content: one of them hands it in for all. What is left of each rank is its steps,
and the times of its modules as a table of float32.

Where ranks and modules are too many for one process, a rank keeps that table until it is asked for
it. It hands in the sums between the collectives, which say how late it is.
"""

import hashlib
import statistics
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from msgspec import Struct, msgpack
from msgspec.structs import replace

from lflops.profile.profile import (
    SCHEMA_VERSION,
    Communication,
    Memory,
    ModuleProfile,
    OpCount,
    Profile,
    UnsupportedCall,
    Work,
    with_works,
)
from lflops.profile.records import PHASES, Count, ModulePhase, Seconds, ready_for_threads
from lflops.profile.steps import is_disturbed
from lflops.ranks.merge.merge import RankSummary, summary_of_rank
from lflops.ranks.merge.rank_table import (
    OUTSIDE,
    begins_in,
    few_intervals,
    intervals_of,
    waiting_in,
    waits_in,
)
from lflops.timing.module_times import ScaledTimes, with_times

Part = TypeVar("Part")

# of zlib: names repeat so much that more effort gains little
_FAST = 1


class RankReport(NamedTuple):
    """What a rank has to tell of a window."""

    rank: int
    profile: Profile
    # Of each hooked step, in the order of the profile's, the own seconds of its modules, neither
    # corrected nor scaled.
    steps: tuple[Mapping[ModulePhase, float], ...] = ()
    # where the rank runs, as far as that has a name
    node: str | None = None
    # of the rank, by kind of parallelism
    coordinates: Mapping[str, int] = {}


class PlacesOfTable(Struct, frozen=True, kw_only=True):
    """The part of a table that says what its times are of."""

    # those that have times
    places: tuple[ModulePhase, ...]
    # those where ranks wait for each other
    waits: tuple[ModulePhase, ...]
    # those where collectives begin that are awaited elsewhere
    begins: tuple[ModulePhase, ...]


class Table(PlacesOfTable, frozen=True, kw_only=True):
    """What ranks that did the same have in common: all but times, and the groups' names."""

    modules: Mapping[str, ModuleProfile]
    op_counts: tuple[OpCount, ...]
    unsupported: tuple[UnsupportedCall, ...]
    communication: tuple[Communication, ...]
    # the profile's own `waits`
    counted_waits: tuple[ModulePhase, ...]


class RankHeader(Struct, frozen=True, kw_only=True, gc=False):
    """What is one rank's alone, without the times of its modules."""

    summary: RankSummary
    # which step each row of times is of
    at: tuple[int, ...]
    # those of them that are no measure of this rank
    disturbed: tuple[int, ...] = ()
    # the name of the blob that has its memory
    memory: str | None
    groups: tuple[
        str, ...
        # the names of the groups that its collectives ran on, which the table has numbers for
    ]
    waiting: Mapping[
        Count, Seconds | None
        # exposed seconds of collectives in each place where they are awaited, by the place's number
    ]
    # where the rank keeps its times: float64 seconds, in each step those of each interval, then of
    # all waiting
    sums: bytes = b""


ready_for_threads(RankHeader, Table, PlacesOfTable)


class Packed(NamedTuple):
    """A report on its way: `shared` blobs by name, `times` row by row."""

    head: bytes
    shared: Mapping[str, bytes]
    times: bytes
    keeps_times: bool = False


def pack(report: RankReport, *, ranks: int = 1, most_bytes: int | None = None) -> Packed:
    """The report of one of so many ranks as bytes.

    Each hooked step has its times; beyond `most_bytes` of them the rank keeps them.
    """
    profile = report.profile
    hooked = [step for step in profile.steps if step.kind == "module_timing"]
    steps: list[dict[ModulePhase, float]] = []
    for step, own in zip(hooked, report.steps, strict=True) if report.steps else ():
        outside = {
            ModulePhase("", phase): seconds
            for phase, seconds in step.phases.items()
            if phase in OUTSIDE
        }
        steps.append({**outside, **own})
    places = tuple(_in_order(profile, {place for step in steps for place in step}))
    at = tuple(step.index for step, _ in zip(hooked, steps, strict=False))
    groups = tuple(dict.fromkeys(each.group for each in profile.communication))
    table = Table(
        modules=with_works(profile.modules, _timeless(profile.modules)),
        op_counts=profile.op_counts,
        unsupported=profile.unsupported,
        communication=tuple(
            replace(each, group=str(groups.index(each.group)), seconds=None, exposed_seconds=None)
            for each in profile.communication
        ),
        places=places,
        waits=tuple(sorted(waits_in(profile))),
        begins=tuple(sorted(begins_in(profile))),
        counted_waits=profile.waits,
    )
    name, blob = _named(table)
    memory = dict([] if profile.memory is None else [_named(profile.memory)])
    number = {place: index for index, place in enumerate(places)}
    times = array(
        "f",
        (step.get(place, 0.0) for step in (*steps, _scales(profile, steps)) for place in places)
        if steps
        else (),
    )
    keeps = most_bytes is not None and len(times) * times.itemsize > most_bytes
    head = RankHeader(
        summary=summary_of_rank(
            report.rank, profile, table=name, node=report.node, coordinates=report.coordinates
        ),
        at=at,
        disturbed=tuple(step.index for step in hooked if is_disturbed(step.marks)),
        memory=next(iter(memory), None),
        groups=groups,
        waiting={
            number[place]: seconds
            for place, seconds in waiting_in(profile).items()
            if place in number
        },
        sums=_sums(table, times, len(steps), ranks) if keeps else b"",
    )
    return Packed(
        zlib.compress(msgpack.encode(head), _FAST), {name: blob} | memory, times.tobytes(), keeps
    )


def intervals_in(places: PlacesOfTable, ranks: int) -> dict[ModulePhase, int]:
    """The interval of each place of these where no rank waits, as a rank of so many sums them."""
    return few_intervals(intervals_of(places.places, frozenset(places.waits)), ranks)


def _sums(table: Table, times: Sequence[float], steps: int, ranks: int) -> bytes:
    """`RankHeader.sums`."""
    intervals = intervals_in(table, ranks)
    number, width = max(intervals.values(), default=0) + 1, len(table.places)
    columns = [intervals.get(place, number) for place in table.places]
    sums = array("d", bytes(8 * steps * (number + 1)))
    for step in range(steps):
        for column, seconds in zip(columns, times[step * width : (step + 1) * width], strict=True):
            sums[step * (number + 1) + column] += seconds
    return sums.tobytes()


def unpacked(blob: bytes, kind: type[Part]) -> Part:
    """Unpack a value. A table may be read as a `PlacesOfTable`: the rest is skipped."""
    return msgpack.decode(zlib.decompress(blob), type=kind)


def rows_in(table: Table, head: RankHeader, times: Sequence[Sequence[float]]) -> Profile:
    """The rows of a rank's profile, and what its modules took, of which `times` has the seconds of each step in each place."""
    communication = zip(table.communication, head.summary.communication_seconds, strict=True)
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        run=head.summary.run,
        modules=table.modules,
        op_counts=table.op_counts,
        unsupported=table.unsupported,
        communication=tuple(
            replace(
                each, group=head.groups[int(each.group)], seconds=seconds, exposed_seconds=exposed
            )
            for each, (seconds, exposed) in communication
        ),
        waits=table.counted_waits,
    )
    steps = [
        {
            place: each
            for place, each in zip(table.places, step, strict=True)
            if _is_timed_in(place.phase)
        }
        for step in times
    ]
    return with_times(profile, ScaledTimes.of_steps(steps)) if steps else profile


def _in_order(profile: Profile, places: Collection[ModulePhase]) -> Iterator[ModulePhase]:
    """As the profile has its rows; a place in none of these is no row's time."""
    outside = (ModulePhase("", phase) for phase in OUTSIDE)
    inside = (
        ModulePhase(row, phase)
        for row in profile.modules
        for phase in PHASES
        if _is_timed_in(phase)
    )
    return (place for place in chain(outside, inside) if place in places)


def _is_timed_in(phase: str) -> bool:
    return phase in PHASES and phase not in OUTSIDE


def _scales(
    profile: Profile, steps: Sequence[Mapping[ModulePhase, float]]
) -> dict[ModulePhase, float]:
    """The factor of each place: its median without hook overhead over its raw median."""
    scales = dict.fromkeys((place for step in steps for place in step), 1.0)
    for place in scales:
        module = profile.modules.get(place.fqn)
        if (
            module is not None
            and _is_timed_in(place.phase)
            and (own := module.work(place.phase).self_seconds) is not None
        ):
            median = statistics.median(step.get(place, 0.0) for step in steps)
            scales[place] = own.median / median if median else 1.0
    return scales


def _timeless(modules: Mapping[str, ModuleProfile]) -> dict[ModulePhase, Work]:
    return {
        ModulePhase(row, phase): replace(work, seconds=None, self_seconds=None, device_seconds=None)
        for row, module in modules.items()
        for phase in PHASES
        if (work := module.work(phase)).seconds is not None
        or work.self_seconds is not None
        or work.device_seconds is not None
    }


def _named(value: Table | Memory) -> tuple[str, bytes]:
    """A blob and its name, which says what is in it."""
    packed = msgpack.encode(value)
    return hashlib.blake2b(packed, digest_size=16).hexdigest(), zlib.compress(packed, _FAST)
