"""What one rank tells the others, and how it is packed.

What a thousand ranks have in common, the names of modules and all that was counted, is a blob of its own, named by its content: one of them
hands it in for all. What is left of each rank is its steps, and the times of its modules as a table of float32.
"""

import hashlib
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, msgpack
from msgspec.structs import replace

from lflops.collect.timing.attach_times import with_times
from lflops.collect.timing.scale_to_clean import ScaledTimes
from lflops.merging.merge import Brief, brief_of
from lflops.merging.rank_stats import waiting_in
from lflops.profile.model import SCHEMA_VERSION, Cell, Communication, Memory, ModuleProfile, Profile, Uncounted, Work
from lflops.profile.records import PHASES, Count, ModulePhase, Seconds

__all__ = ["Head", "Packed", "RankReport", "Table", "head_in", "memory_in", "pack", "places_in", "rows_in", "squeezed", "table_in"]

_FAST = 1
"""Of zlib: names repeat so much that more effort gains little."""


class RankReport(NamedTuple):
    """What a rank has to tell of a window.

    Attributes:
        steps: Of each hooked step, in the order of the profile's, the own seconds of its modules.
        node: Where the rank runs, as far as that has a name.
        coordinates: Of the rank, by kind of parallelism.
    """

    rank: int
    profile: Profile
    steps: tuple[Mapping[ModulePhase, float], ...] = ()
    node: str | None = None
    coordinates: Mapping[str, int] = {}


class Table(Struct, frozen=True, kw_only=True):
    """What ranks that did the same have in common: all but times, and the groups' names. `places` are those that have times."""

    modules: Mapping[str, ModuleProfile]
    cells: tuple[Cell, ...]
    uncounted: tuple[Uncounted, ...]
    communication: tuple[Communication, ...]
    places: tuple[ModulePhase, ...]


class _Places(Struct, frozen=True, kw_only=True):
    """A part of a table."""

    places: tuple[ModulePhase, ...]


class Head(Struct, frozen=True, kw_only=True):
    """What is one rank's alone, without the times of its modules.

    Attributes:
        at: Which step each row of times is of.
        memory: The name of the blob that has its memory.
        groups: The names of the groups that its collectives ran on, which the table has numbers for.
        waiting: Seconds inside of collectives in each place that has any, by the place's number.
    """

    brief: Brief
    at: tuple[int, ...]
    memory: str | None
    groups: tuple[str, ...]
    communication_seconds: tuple[tuple[Seconds | None, Seconds | None], ...]
    waiting: Mapping[Count, Seconds | None]


class Packed(NamedTuple):
    """A report on its way: `shared` blobs by name, `times` row by row."""

    head: bytes
    shared: Mapping[str, bytes]
    times: bytes


def pack(report: RankReport) -> Packed:
    """As bytes.

    Raises:
        ValueError: There are other steps with times than hooked ones in the profile.
    """
    profile = report.profile
    places = tuple(_in_order(profile, {place for step in report.steps for place in step}))
    hooked = [step.index for step in profile.steps if step.kind == "hooked"]
    at = tuple(index for index, _ in zip(hooked, report.steps, strict=True)) if report.steps else ()
    groups = tuple(dict.fromkeys(each.group for each in profile.communication))
    table = Table(
        modules={row: _timeless(module) for row, module in profile.modules.items()},
        cells=profile.cells,
        uncounted=profile.uncounted,
        communication=tuple(
            replace(each, group=str(groups.index(each.group)), seconds=None, exposed_seconds=None) for each in profile.communication
        ),
        places=places,
    )
    name, blob = _named(table)
    remembered = None if profile.memory is None else _named(profile.memory)
    number = {place: index for index, place in enumerate(places)}
    head = Head(
        brief=brief_of(report.rank, profile, table=name, node=report.node, coordinates=report.coordinates),
        at=at,
        memory=None if remembered is None else remembered[0],
        groups=groups,
        communication_seconds=tuple((each.seconds, each.exposed_seconds) for each in profile.communication),
        waiting={number[place]: seconds for place, seconds in waiting_in(profile).items() if place in number},
    )
    times = array("f", (step.get(place, 0.0) for step in report.steps for place in places))
    return Packed(squeezed(head), {name: blob} | ({} if remembered is None else {remembered[0]: remembered[1]}), times.tobytes())


def head_in(head: bytes) -> Head:
    """What was packed as a head."""
    return msgpack.decode(zlib.decompress(head), type=Head)


def table_in(blob: bytes) -> Table:
    """What was packed as a table."""
    return msgpack.decode(zlib.decompress(blob), type=Table)


def places_in(blob: bytes) -> tuple[ModulePhase, ...]:
    """Those of what was packed as a table, of which the rest is passed over."""
    return msgpack.decode(zlib.decompress(blob), type=_Places).places


def memory_in(blob: bytes) -> Memory:
    """What was packed as a memory."""
    return msgpack.decode(zlib.decompress(blob), type=Memory)


def rows_in(table: Table, head: Head, times: Sequence[Sequence[float]]) -> Profile:
    """The rows of a rank's profile, and what its modules took, of which `times` has the seconds of each step in each place."""
    communication = zip(table.communication, head.communication_seconds, strict=True)
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        run=head.brief.run,
        modules=table.modules,
        cells=table.cells,
        uncounted=table.uncounted,
        communication=tuple(
            replace(each, group=head.groups[int(each.group)], seconds=seconds, exposed_seconds=exposed)
            for each, (seconds, exposed) in communication
        ),
    )
    steps = [dict(zip(table.places, row, strict=True)) for row in times]
    return with_times(profile, ScaledTimes.of_steps(steps)) if steps else profile


def _in_order(profile: Profile, places: set[ModulePhase]) -> Iterator[ModulePhase]:
    """As the profile has its rows; a place in none of these is no row's time."""
    return (place for row in profile.modules for phase in PHASES if (place := ModulePhase(row, phase)) in places)


def _timeless(module: ModuleProfile) -> ModuleProfile:
    works: dict[str, Any] = {phase: _without_times(work) for phase in PHASES if _is_timed(work := module.work(phase))}
    return replace(module, **works) if works else module


def _is_timed(work: Work) -> bool:
    return work.seconds is not None or work.own_seconds is not None or work.device_seconds is not None


def _without_times(work: Work) -> Work:
    return replace(work, seconds=None, own_seconds=None, device_seconds=None)


def _named(value: Table | Memory) -> tuple[str, bytes]:
    """A blob and its name, which says what is in it."""
    packed = msgpack.encode(value)
    return hashlib.blake2b(packed, digest_size=16).hexdigest(), zlib.compress(packed, _FAST)


def squeezed(head: Head) -> bytes:
    """As `told_in` takes it."""
    return zlib.compress(msgpack.encode(head), _FAST)
