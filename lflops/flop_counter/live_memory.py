"""Live bytes after each operator.

Storages are born as results of operators, and die when they are freed.

The same allocations and frees, of several steps, are requests for the simulation of the caching
allocator.
"""

import heapq
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from torch import Tensor

from lflops.flop_counter.traffic import tensors_of
from lflops.memory.allocator.simulation import Request, rounded_up
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Allocation, Memory, Moment
from lflops.profile.records import CATEGORIES, ByCategory, Phase
from lflops.profile.series import extremes, summed
from lflops.torch_private.tensors import PLAIN, FakeTensor, local_part, storage_key

STREAM: ContextVar[int] = ContextVar("stream", default=0)
"""The stream on which memory is allocated, where code says that it takes another on CUDA.

The allocator does not reuse it on others.
"""

ON_HOST = -1
"""The stream for what is in the host's memory, and so in none of the device's."""


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """A context in which memory is allocated on that stream."""
    before = STREAM.set(number)
    try:
        yield
    finally:
        STREAM.reset(before)


class AllocationLog:
    """Requests to the allocator.

    A storage that outlives a step is one allocation; nothing is kept alive.
    """

    def __init__(self) -> None:
        # allocations and frees, from the first step on
        self.requests: list[Request] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._made = 0
        self._replaced: tuple[int, int] | None = None

    def replaces(self, key: int) -> None:
        """Note that the next allocation takes the place of this storage, if that one is freed before any other allocation."""
        self._replaced = (key, len(self.requests))

    def allocated(self, storage: Any, key: int, nbytes: int) -> None:
        """Add a storage, unless it is in the log already."""
        if key in self._alive:
            return
        if self._replaced is not None and self._replaced[1] != len(self.requests):
            self._replaced = None
        self._made += 1
        self._alive[key] = (self._made, weakref.ref(storage, partial(self.freed, key)))
        self.requests.append(Request(self._made, nbytes, STREAM.get()))

    def freed(self, key: int, _reference: object = None) -> None:
        alive = self._alive.pop(key, None)
        if alive is None:
            return
        if self._replaced is not None and self._replaced[0] == key:
            self.requests.insert(self._replaced[1], Request(alive[0], None))
            self._replaced = None
        else:
            self.requests.append(Request(alive[0], None))

    def stop(self) -> None:
        self._alive.clear()


NO_STORAGE = (
    NotImplementedError,
    RuntimeError,
    ValueError,
    # a sparse tensor has none, a lazy one has none yet
)
LARGEST = 50
LONGEST_TIMELINE = 20_000
BORN_IN: dict[Phase, str] = {
    "forward": "activations",
    "recompute": "activations",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}


class Birth(Struct, frozen=True, gc=False):
    """What is known of a storage when it is first seen."""

    nbytes: int
    category: str
    operator: str
    row: str
    phase: Phase


Survivors = list[tuple[int, weakref.ref[Any], Birth]]
"""Keys and storages that a step made, and that were alive at its end. None is kept alive."""


class _Followed(weakref.ref[Any]):
    """A storage that is followed: one object for each."""

    __slots__ = ("key", "serial")
    key: int
    serial: int


class _Replaced(NamedTuple):
    """A storage that a sum of gradients may take the place of, until the next operator."""

    # the storage's key
    key: int
    # where the sum's allocation is among the events
    place: int
    # live bytes with both
    live: int
    # the module at work
    row: str


class LiveMemory:
    """Follows storages from birth to death, and keeps none of them alive.

    Births and deaths go into one list of events, which is replayed at the end, up to the peak.
    Copying the live set at each new peak would double the cost of counting.
    """

    def __init__(
        self,
        round_to: int = 1,
        log: AllocationLog | None = None,
        moments: int = LONGEST_TIMELINE,
        survivors: Survivors | None = None,
        host: Iterable[Tensor] = (),
    ) -> None:
        # the most operators of the timeline; of more the extremes are kept
        self._longest = moments
        self._round_to = (
            # the size of each storage is rounded up to a multiple of so many bytes
            round_to
        )
        self._births: list[Birth] = []
        self._events: list[int] = []
        self._alive: dict[int, _Followed] = {}
        self._dead: list[
            _Followed
            # filled without a line of ours: Python drops an interrupt in a callback
        ] = []
        self._died = self._dead.append
        self._live = 0
        self._peak = 0
        self._peak_event = 0
        self._peak_index = 0
        self._moments: list[tuple[str, str, Phase, int, int]] = []
        self._highest: dict[str, int] = {}
        self._relabelled: dict[int, str] = {}
        self._fake: set[int] = set()
        self._resized: dict[int, Any] = {}
        self._replaced: _Replaced | None = None
        self._log = log
        # Storages that the last step left: this one begins with those still alive, and at its end
        # puts its own there.
        self._survivors = survivors
        self._on_host = {
            key: weakref.ref(storage) for storage, key in filter(None, map(storage_of, host))
        }

    def hold(self, tensors: Iterable[Tensor], category: str, row: str) -> None:
        """Add tensors that exist before the first operator."""
        for tensor in tensors:
            self._bear(tensor, category, "", row, "other")

    def hold_survivors(self) -> None:
        """Add what an earlier step made and something still keeps.

        The buffers of a pipeline's schedule, for one.
        """
        for key, reference, birth in self._survivors or ():
            storage = reference()
            if storage is not None and key not in self._alive:
                self._bear_storage(storage, key, birth, fake=True)

    def before(self, operator: str, row: str, phase: Phase) -> None:
        """Record the live bytes before an operator runs."""
        if self._dead:
            self._see_deaths()
        if self._resized:
            self._drop_emptied()
        if self._replaced is not None:
            self._keep_both(self._replaced)
        live, highest = self._live, self._highest
        self._moments.append((operator, row, phase, live, len(self._events)))
        if live > highest.get(row, -1):
            highest[row] = live

    def after(self, operator: str, row: str, phase: Phase, out: Any) -> None:
        """Record the storages of what the operator returned."""
        for tensor in (out,) if type(out) is Tensor else tensors_of((out,)):
            self._bear(tensor, BORN_IN[phase], operator, row, phase)
        if self._live > self._highest.get(row, -1):
            self._highest[row] = self._live

    def after_sum(self, operator: str, row: str, phase: Phase, out: Tensor, term: Tensor) -> None:
        """Record the sum of two gradients, which autograd writes over one of them."""
        # It does so unless a dispatch mode is on: then the sum gets its own storage, and the term
        # is freed right after. So the term is taken to be freed before the sum is allocated. If
        # something else keeps the term, autograd does not write over it, and both are alive.
        self._see_deaths()
        before, (_, sum_key), (_, term_key) = self._live, storage_key(out), storage_key(term)
        if (
            sum_key in self._alive
            or term_key not in self._alive
            or out.untyped_storage().nbytes() != term.untyped_storage().nbytes()
        ):
            self.after(operator, row, phase, out)
            return
        place = len(self._events)
        peak = self._peak, self._peak_event, self._peak_index
        if self._log is not None:
            self._log.replaces(term_key)
        self._bear(out, BORN_IN[phase], operator, row, phase)
        self._peak, self._peak_event, self._peak_index = peak
        if self._live > before:
            self._replaced = _Replaced(term_key, place, self._live, row)

    def _keep_both(self, replaced: _Replaced) -> None:
        self._replaced = None
        if replaced.live > self._highest.get(replaced.row, -1):
            self._highest[replaced.row] = replaced.live
        if replaced.live > self._peak:
            self._peak, self._peak_event, self._peak_index = (
                replaced.live,
                replaced.place + 1,
                max(len(self._moments) - 1, 0),
            )

    def scratch(self, operator: str, row: str, phase: Phase, nbytes: int) -> None:
        """Record bytes that a kernel allocated besides its results, and freed before it returned."""
        self._see_deaths()
        nbytes = rounded_up(nbytes, self._round_to)
        serial, live = len(self._births), self._live + nbytes
        self._births.append(Birth(nbytes, "temporary", operator, row, phase))
        self._events.append(serial)
        self._highest[row] = max(self._highest.get(row, -1), live)
        if live > self._peak:
            self._peak, self._peak_event, self._peak_index = (
                live,
                len(self._events),
                max(len(self._moments) - 1, 0),
            )
        self._events.append(~serial)

    def filled(self, operator: str, row: str, phase: Phase, tensors: Iterable[Tensor]) -> None:
        """Add storages that got their memory without an operator, and watch them until it is freed."""
        # FSDP resizes the storages of gathered parameters to their size and back to nothing.
        for tensor in tensors:
            found = storage_of(tensor)
            if found is not None:
                self._bear(tensor, "parameters", operator, row, phase)
                self._resized[found[1]] = weakref.ref(found[0])
        if self._live > self._highest.get(row, -1):
            self._highest[row] = self._live

    def _drop_emptied(self) -> None:
        for key, reference in list(self._resized.items()):
            storage = reference()
            if storage is None or not storage.nbytes():
                del self._resized[key]
                if key in self._alive:
                    self._die(self._alive[key])
                if self._log is not None:
                    self._log.freed(key)

    def add_earlier(self, tensors: Iterable[tuple[Tensor, str]], category: str) -> None:
        """Add tensors, each with its row, that are found late but have existed from the beginning."""
        self._see_deaths()
        before, peak, peak_event, peak_index = (
            self._events,
            self._peak,
            self._peak_event,
            self._peak_index,
        )
        self._events = []
        for tensor, row in tensors:
            self._bear(tensor, category, "", row, "other")
        born = [event for event in self._events if event >= 0]
        died = [event for event in self._events if event < 0]
        more = sum(self._births[event].nbytes for event in born)
        self._events = born + before + died
        if not born:
            return
        self._peak, self._peak_event, self._peak_index = (
            peak + more,
            peak_event + len(born),
            peak_index,
        )
        self._moments = [
            (operator, row, phase, live + more, event + len(born))
            for operator, row, phase, live, event in self._moments
        ]
        self._highest = {row: highest + more for row, highest in self._highest.items()}

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Change the category of storages that are still alive."""
        self._see_deaths()
        for tensor in tensors:
            found = storage_of(tensor)
            alive = self._alive.get(found[1]) if found else None
            if alive is not None:
                self._relabelled[alive.serial] = category

    def stop(self) -> None:
        self._see_deaths()
        if self._replaced is not None:
            self._keep_both(self._replaced)
        if self._survivors is not None:
            labels = self._relabelled
            # An optimizer's parameters lead to its state.
            alive = [
                each
                for each in self._alive.values()
                if labels.get(each.serial) != "optimizer_state"
            ]
            self._survivors[:] = [(each.key, each, self._births[each.serial]) for each in alive]
        self._alive.clear()

    def peak_of_rows(self) -> dict[str, int]:
        """The most bytes alive while each row, or one below it, ran."""
        peaks: dict[str, int] = {}
        for row, live in self._highest.items():
            for above in ancestry(row):
                peaks[above] = max(peaks.get(above, 0), live)
        return peaks

    def result(self) -> Memory:
        at_peak = self._alive_at_peak()
        alive = [(self._relabelled.get(serial, birth.category), birth) for serial, birth in at_peak]
        timeline, most = self._timeline()
        largest = heapq.nlargest(LARGEST, alive, key=lambda each: each[1].nbytes)
        return Memory(
            source="counted" if self._fake.isdisjoint(serial for serial, _ in at_peak) else "fake",
            peak_bytes=self._peak,
            peak_index=self._peak_index,
            by_category=dict.fromkeys(CATEGORIES, 0)
            | summed((category, birth.nbytes) for category, birth in alive),
            by_module=summed((birth.row, birth.nbytes) for _, birth in alive),
            activations_by_module=summed(
                (birth.row, birth.nbytes) for category, birth in alive if category == "activations"
            ),
            alive=tuple(
                Allocation(category, birth.operator, birth.row, birth.phase, birth.nbytes)
                for category, birth in largest
            ),
            timeline=tuple(timeline),
            most_by_category=most,
        )

    def _bear(self, tensor: Tensor, category: str, operator: str, row: str, phase: Phase) -> None:
        if self._dead:
            self._see_deaths()
        is_plain = type(tensor) in PLAIN
        try:
            storage, key = storage_key(tensor if is_plain else local_part(tensor))
        except NO_STORAGE:
            return
        if key not in self._alive and (nbytes := storage.nbytes()):
            birth = Birth(
                rounded_up(nbytes, self._round_to) if self._round_to > 1 else nbytes,
                category,
                operator,
                row,
                phase,
            )
            self._bear_storage(
                storage,
                key,
                birth,
                fake=tensor.is_meta or (not is_plain and type(tensor) is FakeTensor),
            )

    def _bear_storage(self, storage: Any, key: int, birth: Birth, *, fake: bool) -> None:
        if self._on_host and (
            STREAM.get() == ON_HOST or (key in self._on_host and self._on_host[key]() is storage)
        ):
            self._on_host[key] = weakref.ref(storage)
            return
        if self._log is not None:
            self._log.allocated(storage, key, storage.nbytes())
        serial = len(self._births)
        self._births.append(birth)
        followed = self._alive[key] = _Followed(storage, self._died)
        followed.key, followed.serial = key, serial
        self._events.append(serial)
        if fake:
            self._fake.add(serial)
        self._live = live = self._live + birth.nbytes
        if live > self._peak:
            self._peak, self._peak_event, self._peak_index = (
                live,
                len(self._events),
                max(len(self._moments) - 1, 0),
            )

    def _see_deaths(self) -> None:
        dead = self._dead
        try:
            while dead:
                self._die(dead.pop(0))
        except IndexError:
            # another thread has taken the last one
            return

    def _die(self, storage: _Followed) -> None:
        if self._alive.pop(storage.key, None) is None:
            return
        serial = storage.serial
        if self._replaced is not None and self._replaced.key == storage.key:
            self._events.insert(self._replaced.place, ~serial)
            self._replaced = None
        else:
            self._events.append(~serial)
        self._live -= self._births[serial].nbytes

    def _timeline(self) -> tuple[list[Moment], dict[str, int]]:
        """The moments that are kept, each with the live bytes by final category.

        And the most of each category.
        """
        live = dict.fromkeys(CATEGORIES, 0)
        most = dict(live)
        kept = extremes([moment[3] for moment in self._moments], self._longest, [self._peak_index])
        begins = [self._moments[index][4] for index in kept]
        ends = [*begins[1:], len(self._events)][: len(kept)]
        self._replay(self._events[: begins[0] if begins else None], live, most)
        timeline = []
        for index, end in zip(kept, ends, strict=True):
            operator, row, phase, in_all, event = self._moments[index]
            before = ByCategory(**live)
            highest = self._replay(self._events[event:end], live, most)
            timeline.append(Moment(operator, row, phase, in_all, index, before, highest))
        return timeline, most

    def _replay(self, events: Iterable[int], live: dict[str, int], most: dict[str, int]) -> int:
        """Apply allocations and frees to the live bytes.

        Returns the most that were alive in all.
        """
        total = highest = sum(live.values())
        for each in events:
            serial = each if each >= 0 else ~each
            birth = self._births[serial]
            category = self._relabelled.get(serial, birth.category)
            change = birth.nbytes if each >= 0 else -birth.nbytes
            live[category] += change
            total += change
            highest = max(highest, total)
            most[category] = max(most[category], live[category])
        return highest

    def _alive_at_peak(self) -> list[tuple[int, Birth]]:
        alive: dict[int, Birth] = {}
        for event in self._events[: self._peak_event]:
            if event >= 0:
                alive[event] = self._births[event]
            else:
                del alive[~event]
        return list(alive.items())


def storage_of(tensor: Tensor) -> tuple[Any, int] | None:
    """The storage of this rank's part of a tensor, and its key.

    `None` if the tensor has no storage.
    """
    try:
        return storage_key(tensor if type(tensor) in PLAIN else local_part(tensor))
    except NO_STORAGE:
        return None
