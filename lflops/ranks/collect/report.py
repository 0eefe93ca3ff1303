"""Pack and unpack the report of one rank on a window (a few consecutive steps).

The names of modules and all counts are the same on most ranks of a run. So they are packed
separately, as a `Table`. The packed bytes are called a shared blob. The name of a blob is a hash of
its content, and most ranks only send the name of a blob that another rank has already sent. The
rest of a report differs between ranks. It consists of the rank's steps and of the times of its
modules, which are an array of float32 values.

A place is a module in a phase, or a phase of the step outside modules, such as `("", "data")`. Each
time belongs to a place.

If the times of all ranks are too large for rank 0, only a sample of the ranks sends times.
"""

import hashlib
import random
import statistics
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
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
from lflops.profile.steps import Step, is_disturbed
from lflops.ranks.merge.merge import RankSummary, summary_of_rank
from lflops.ranks.merge.rank_table import OUTSIDE, async_starts_in, exposed_by_place, waiting_places
from lflops.timing.module_times import ScaledTimes, with_times

Part = TypeVar("Part")

# Maximum number of bytes of module times that all ranks together send.
MOST_BYTES = 1 << 27

# A low compression level. Names repeat so often that a higher level gains little.
_FAST = 1


class RankReport(NamedTuple):
    """The report of a rank on a window (a few consecutive steps).

    Attributes:
        steps: The self times of modules, one mapping for each module-timing step of the profile, in
            order. The times include hook overhead.
        node: Name of the node that the rank runs on; `None` if unknown.
        coordinates: The rank's coordinate in each kind of parallelism, such as `{"data": 3,
            "tensor": 0}`.
    """

    rank: int
    profile: Profile
    steps: tuple[Mapping[ModulePhase, float], ...] = ()
    node: str | None = None
    coordinates: Mapping[str, int] = {}


class PlacesOfTable(Struct, frozen=True, kw_only=True):
    """The part of a `Table` that says to which place each packed time belongs.

    A place is a module in a phase. This part can be unpacked without the rest of the table.

    Attributes:
        places: The places that have times, in the order of the packed times.
        waits: The places where ranks wait for each other.
        async_starts: The places that start a collective whose result is awaited in another place.
    """

    places: tuple[ModulePhase, ...]
    waits: tuple[ModulePhase, ...]
    async_starts: tuple[ModulePhase, ...]


class Table(PlacesOfTable, frozen=True, kw_only=True):
    """The part of a report that is identical on all ranks that do the same work.

    It has no times. It has numbers instead of the names of process groups, because these names
    differ between ranks.

    Attributes:
        counted_waits: The places (modules in a phase) where a rank waited in the counting step, as
            in `Profile.waits`. The field `waits` of the table has more places; see
            `waiting_places`.
    """

    modules: Mapping[str, ModuleProfile]
    op_counts: tuple[OpCount, ...]
    unsupported: tuple[UnsupportedCall, ...]
    communication: tuple[Communication, ...]
    counted_waits: tuple[ModulePhase, ...]


class RankHeader(Struct, frozen=True, kw_only=True, gc=False):
    """The part of a report that differs between ranks, without the times of modules.

    Attributes:
        at: The index of each module-timing step whose times are sent; empty if the rank sends no
            times.
        disturbed: The indices of the steps whose duration is not typical, for example because of
            warmup.
        memory: The name of the packed `Memory`, which ranks with the same memory share. `None` if
            the memory is unknown.
        groups: The names of the process groups. The `group` of a collective in the table is an
            index into this tuple.
        waiting: For each place (a module in a phase) where the rank waits for collectives, the
            seconds per step in which collectives run but nothing is computed. A key is an index
            into `PlacesOfTable.places`.
    """

    summary: RankSummary
    at: tuple[int, ...]
    disturbed: tuple[int, ...] = ()
    memory: str | None
    groups: tuple[str, ...]
    waiting: Mapping[Count, Seconds | None]


ready_for_threads(RankHeader, Table, PlacesOfTable)


class Packed(NamedTuple):
    """A packed report.

    Attributes:
        head: The packed `RankHeader`.
        shared: The packed `Table` and, if known, the packed `Memory`, by name. They may be
            identical on several ranks.
        times: Float32 values with one row for each module-timing step and one column for each place
            (a module in a phase). A last row has the factors that remove hook overhead (see
            `_scales`).
    """

    head: bytes
    shared: Mapping[str, bytes]
    times: bytes


def pack(report: RankReport, *, ranks: int = 1) -> Packed:
    """Pack the report of one rank of a run with `ranks` ranks."""
    profile = report.profile
    hooked = [step for step in profile.steps if step.kind == "module_timing"]
    steps = _timed_steps(hooked, report.steps)
    table = _table(profile, steps)
    times = array("f")
    if steps:
        for row in (*steps, _scales(profile, steps)):
            times.extend(row.get(place, 0.0) for place in table.places)
    at = tuple(step.index for step in hooked[: len(steps)])
    if report.rank not in ranks_with_times(ranks, len(times) * times.itemsize):
        at = ()
        times = array("f")
    name, blob = _named(table)
    shared = {name: blob}
    memory = None
    if profile.memory is not None:
        memory, shared_memory = _named(profile.memory)
        shared[memory] = shared_memory
    summary = summary_of_rank(
        report.rank, profile, table=name, node=report.node, coordinates=report.coordinates
    )
    disturbed = []
    for step in hooked:
        if is_disturbed(step.marks):
            disturbed.append(step.index)
    exposed = exposed_by_place(profile)
    waiting = {}
    for number, place in enumerate(table.places):
        if place in exposed:
            waiting[number] = exposed[place]
    head = RankHeader(
        summary=summary,
        at=at,
        disturbed=tuple(disturbed),
        memory=memory,
        groups=_groups(profile),
        waiting=waiting,
    )
    return Packed(zlib.compress(msgpack.encode(head), _FAST), shared, times.tobytes())


def ranks_with_times(ranks: int, bytes_of_rank: int) -> Collection[int]:
    """Return the ranks that send the times of their modules.

    `bytes_of_rank` is the size of the times of one rank. If the times of all ranks are too large, a
    random sample of the ranks is returned, which covers hosts and meshes about evenly. All ranks
    compute the same sample.
    """
    if ranks * bytes_of_rank <= MOST_BYTES:
        return range(ranks)
    number = max(MOST_BYTES // bytes_of_rank, 1)
    sample = random.Random(ranks).sample(range(ranks), number)  # noqa: S311 - nothing is secret
    return frozenset(sample)


def _timed_steps(
    hooked: Sequence[Step], modules_by_step: Sequence[Mapping[ModulePhase, float]]
) -> list[dict[ModulePhase, float]]:
    """Return the times of all modules and of all phases outside modules, for each step in `hooked`.

    `hooked` are the module-timing steps, and `modules_by_step` has the module times in these steps.
    The times include hook overhead. The result is empty if modules were not timed.
    """
    if not modules_by_step:
        return []
    steps = []
    for step, modules in zip(hooked, modules_by_step, strict=True):
        places = {}
        for phase, seconds in step.phases.items():
            if phase in OUTSIDE:
                places[ModulePhase("", phase)] = seconds
        places.update(modules)
        steps.append(places)
    return steps


def _table(profile: Profile, steps: Sequence[Mapping[ModulePhase, float]]) -> Table:
    groups = _groups(profile)
    communication = []
    for each in profile.communication:
        number = groups.index(each.group)
        untimed = replace(each, group=str(number), seconds=None, exposed_seconds=None)
        communication.append(untimed)
    return Table(
        modules=_without_times(profile.modules),
        op_counts=profile.op_counts,
        unsupported=profile.unsupported,
        communication=tuple(communication),
        places=_places(profile, steps),
        waits=tuple(sorted(waiting_places(profile))),
        async_starts=tuple(sorted(async_starts_in(profile))),
        counted_waits=profile.waits,
    )


def _groups(profile: Profile) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.group for each in profile.communication))


def unpacked(blob: bytes, kind: type[Part]) -> Part:
    """Unpack the packed bytes `blob` as an instance of `kind`.

    A packed `Table` can also be unpacked as `PlacesOfTable`, which is faster.
    """
    return msgpack.decode(zlib.decompress(blob), type=kind)


def profile_of_rank(table: Table, head: RankHeader, times: Sequence[Sequence[float]]) -> Profile:
    """Rebuild the profile of a rank, without steps, memory and notes, from the parts of its report.

    `times` has one sequence for each step: the seconds in each place (a module in a phase), without
    hook overhead. It is empty if the times are unknown.
    """
    communication = []
    seconds_of_calls = head.summary.communication_seconds
    for each, (seconds, exposed) in zip(table.communication, seconds_of_calls, strict=True):
        group = head.groups[int(each.group)]
        communication.append(replace(each, group=group, seconds=seconds, exposed_seconds=exposed))
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        run=head.summary.run,
        modules=table.modules,
        op_counts=table.op_counts,
        unsupported=table.unsupported,
        communication=tuple(communication),
        waits=table.counted_waits,
    )
    if not times:
        return profile
    steps = []
    for row in times:
        by_place = zip(table.places, row, strict=True)
        steps.append({place: each for place, each in by_place if _is_timed(place.phase)})
    return with_times(profile, ScaledTimes.of_steps(steps))


def _places(
    profile: Profile, steps: Sequence[Mapping[ModulePhase, float]]
) -> tuple[ModulePhase, ...]:
    """Return the places that have times, in the order of the profile's modules.

    A place is a module in a phase.
    """
    timed = set().union(*steps)
    places = [ModulePhase("", phase) for phase in OUTSIDE]
    for row in profile.modules:
        for phase in PHASES:
            if _is_timed(phase):
                places.append(ModulePhase(row, phase))
    return tuple(place for place in places if place in timed)


def _is_timed(phase: str) -> bool:
    """Return whether modules are timed in this phase."""
    return phase in PHASES and phase not in OUTSIDE


def _scales(
    profile: Profile, steps: Sequence[Mapping[ModulePhase, float]]
) -> dict[ModulePhase, float]:
    """Return, for each place, the factor that removes hook overhead from its times.

    A place is a module in a phase. The factor is the median self time in the profile, which
    excludes hook overhead, divided by the median of the measured times. It is 1 if one of these two
    medians is unknown.
    """
    scales = {}
    for place in set().union(*steps):
        scales[place] = 1.0
        module = profile.modules.get(place.fqn)
        if module is None or not _is_timed(place.phase):
            continue
        self_seconds = module.work(place.phase).self_seconds
        raw_median = statistics.median(step.get(place, 0.0) for step in steps)
        if self_seconds is not None and raw_median:
            scales[place] = self_seconds.median / raw_median
    return scales


def _without_times(modules: Mapping[str, ModuleProfile]) -> Mapping[str, ModuleProfile]:
    works: dict[ModulePhase, Work] = {}
    for row, module in modules.items():
        for phase in PHASES:
            work = module.work(phase)
            timeless = replace(work, seconds=None, self_seconds=None, device_seconds=None)
            if timeless != work:
                works[ModulePhase(row, phase)] = timeless
    return with_works(modules, works)


def _named(value: Table | Memory) -> tuple[str, bytes]:
    """Pack a value. Return a name, which is a hash of the content, and the packed bytes."""
    packed = msgpack.encode(value)
    name = hashlib.blake2b(packed, digest_size=16).hexdigest()
    return name, zlib.compress(packed, _FAST)
