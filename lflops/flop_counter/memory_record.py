"""Record the allocations and frees of a step in order, and compute the memory profile from them.

A storage is the memory of one or more tensors. Live bytes are the total size of all storages that
are alive. A birth is the allocation of a storage. An event is one allocation or one free. A moment
is the time at which an operator is about to run. A window is the range of events from one moment to
the next.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.profile.module_names import ancestry
from lflops.profile.profile import Allocation, Memory, Moment
from lflops.profile.records import CATEGORIES, ByCategory, Phase
from lflops.profile.series import extremes

LARGEST = 50
"""Maximum number of storages that a profile lists for the peak. It lists the largest storages."""

LONGEST_TIMELINE = 20_000
"""Default maximum number of operators in a memory timeline."""


class Birth(Struct, frozen=True, gc=False):
    """The allocation of a storage.

    Attributes:
        nbytes: The size of the storage in bytes.
        category: Category of the storage when it was allocated, for example `activations`. The
            category may change later.
        operator: The operator that allocated the storage.
        fqn: The module that allocated the storage or owns it.
        phase: The phase in which the storage was allocated.
        is_fake: Whether the storage belongs to a fake tensor, so that no memory was allocated.
    """

    nbytes: int
    category: str
    operator: str
    fqn: str
    phase: Phase
    is_fake: bool = False


RecordedMoment = tuple[str, str, Phase, int]
"""An operator that is about to run, its module, its phase, and the number of events before it.

A moment is created for every operator. It is a plain tuple, because plain tuples are created fast.
"""


class Peak(NamedTuple):
    """The point of a step at which the most bytes were alive.

    Attributes:
        nbytes: The live bytes.
        events: The number of allocations and frees up to and including the peak.
        operator: The index of the operator that reached the peak.
    """

    nbytes: int
    events: int
    operator: int


class Window(NamedTuple):
    """The range of events from the start of one operator to the start of the next operator.

    Attributes:
        operator: The index of the operator, or -1 for the events before the first operator.
        begin: The index of the first event.
        end: The index after the last event.
    """

    operator: int
    begin: int
    end: int


@dataclass
class MemoryRecord:
    """Everything that was recorded about the memory of a step.

    Attributes:
        births: The allocation of each storage.
        events: Allocations and frees in order. An allocation is the index of the storage in
            `births`. A free is the bitwise inverse (`~index`) of the same index.
        moments: One moment for each operator, in the order in which the operators ran.
        owners: For each operator in an optimizer's step, the module that owns the updated
            parameter, keyed by the operator's index in `moments`.
        relabelled: The final category of each storage whose category changed after its allocation,
            keyed by the storage's index in `births`.
        longest: Maximum number of operators in the timeline. In a longer timeline, operators are
            dropped, but the highest and lowest points are kept.
    """

    births: list[Birth] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    moments: list[RecordedMoment] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    relabelled: dict[int, str] = field(default_factory=dict)
    longest: int = LONGEST_TIMELINE

    def windows(self) -> Iterator[Window]:
        """Yield the range of events before the first operator, then the range of each operator."""
        begin = 0
        for operator, moment in enumerate(self.moments):
            yield Window(operator - 1, begin, moment[3])
            begin = moment[3]
        yield Window(len(self.moments) - 1, begin, len(self.events))

    def memory(self) -> Memory:
        """Return the peak, the storages that were alive at the peak, and the timeline."""
        peak = self._peak()
        by_category = dict.fromkeys(CATEGORIES, 0)
        by_module: Counter[str] = Counter()
        activations_by_module: Counter[str] = Counter()
        allocations: list[Allocation] = []
        is_fake = False
        for serial, birth in self._alive_after(peak.events):
            category = self.category(serial)
            by_category[category] += birth.nbytes
            by_module[birth.fqn] += birth.nbytes
            if category == "activations":
                activations_by_module[birth.fqn] += birth.nbytes
            is_fake = is_fake or birth.is_fake
            allocations.append(
                Allocation(category, birth.operator, birth.fqn, birth.phase, birth.nbytes)
            )
        timeline, most = self._timeline(peak)
        return Memory(
            source="fake" if is_fake else "counted",
            peak_bytes=peak.nbytes,
            peak_index=peak.operator,
            by_category=by_category,
            by_module=dict(by_module),
            activations_by_module=dict(activations_by_module),
            alive=tuple(heapq.nlargest(LARGEST, allocations, key=attrgetter("bytes"))),
            timeline=tuple(timeline),
            most_by_category=most,
        )

    def peak_of_rows(self) -> dict[str, int]:
        """Return, for each module, the maximum live bytes while it or a submodule ran."""
        highest: dict[str, int] = {}
        live = 0
        for window in self.windows():
            most = live
            rows: set[str] = set()
            if window.operator >= 0:
                rows.add(self.moments[window.operator][1])
            if window.operator in self.owners:
                rows.add(self.owners[window.operator])
            for event in self.events[window.begin : window.end]:
                if event < 0:
                    live -= self.births[~event].nbytes
                    continue
                live += self.births[event].nbytes
                most = max(most, live)
                if window.operator >= 0:
                    rows.add(self.births[event].fqn)
            for fqn in rows:
                highest[fqn] = max(highest.get(fqn, 0), most)
        peaks: dict[str, int] = {}
        for fqn, most in highest.items():
            for ancestor in ancestry(fqn):
                peaks[ancestor] = max(peaks.get(ancestor, 0), most)
        return peaks

    def category(self, serial: int) -> str:
        """Return the final category of the storage with this index in `births`."""
        return self.relabelled.get(serial, self.births[serial].category)

    def _peak(self) -> Peak:
        peak = Peak(0, 0, 0)
        live = 0
        for window in self.windows():
            for place in range(window.begin, window.end):
                event = self.events[place]
                if event < 0:
                    live -= self.births[~event].nbytes
                    continue
                live += self.births[event].nbytes
                if live > peak.nbytes:
                    peak = Peak(live, place + 1, max(window.operator, 0))
        return peak

    def _timeline(self, peak: Peak) -> tuple[list[Moment], dict[str, int]]:
        """Return the memory timeline, and the maximum live bytes of each category.

        The timeline contains at most `longest` operators, including the operator that reached the
        peak. Each entry contains the live bytes by category. If the category of a storage changed
        during the step, the storage counts in its final category from the start.
        """
        live = dict.fromkeys(CATEGORIES, 0)
        most = dict(live)
        live_bytes = self._live_bytes()
        kept = extremes(live_bytes, self.longest, [peak.operator])
        first_events = [self.moments[index][3] for index in kept]
        first_events.append(len(self.events))
        self._replay(self.events[: first_events[0]], live, most)
        timeline: list[Moment] = []
        for index, (begin, end) in zip(kept, pairwise(first_events), strict=True):
            operator, fqn, phase, _ = self.moments[index]
            before = ByCategory(**live)
            highest = self._replay(self.events[begin:end], live, most)
            moment = Moment(operator, fqn, phase, live_bytes[index], index, before, highest)
            timeline.append(moment)
        return timeline, most

    def _live_bytes(self) -> list[int]:
        """Return the live bytes before each operator."""
        live_bytes: list[int] = []
        live = 0
        for window in self.windows():
            if window.operator >= 0:
                live_bytes.append(live)
            for event in self.events[window.begin : window.end]:
                live += self.births[event].nbytes if event >= 0 else -self.births[~event].nbytes
        return live_bytes

    def _replay(self, events: Iterable[int], live: dict[str, int], most: dict[str, int]) -> int:
        """Apply allocations and frees to the live bytes, and return the maximum total live bytes.

        Args:
            events: The allocations and frees, as in the attribute `events`.
            live: The live bytes by category. This dict is updated.
            most: The maximum live bytes by category. This dict is updated.
        """
        total = sum(live.values())
        highest = total
        for event in events:
            is_allocation = event >= 0
            serial = event if is_allocation else ~event
            nbytes = self.births[serial].nbytes
            category = self.category(serial)
            change = nbytes if is_allocation else -nbytes
            live[category] += change
            total += change
            highest = max(highest, total)
            most[category] = max(most[category], live[category])
        return highest

    def _alive_after(self, events: int) -> list[tuple[int, Birth]]:
        """Return the storages that are alive after the first `events` allocations and frees.

        Each entry has the storage's index in `births`, and its `Birth`.
        """
        alive: dict[int, Birth] = {}
        for event in self.events[:events]:
            if event >= 0:
                alive[event] = self.births[event]
            else:
                del alive[~event]
        return list(alive.items())
