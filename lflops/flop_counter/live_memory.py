"""Live bytes after each operator.

A storage becomes alive as an operator's result, and is alive until it is freed.

The same allocations and frees, over several steps, are the requests for the simulation of the
caching allocator.
"""

import heapq
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from torch import Tensor

from lflops.flop_counter.traffic import tensors_of
from lflops.memory.allocator.simulation import Request, rounded_up
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Allocation, Memory, Moment
from lflops.profile.records import CATEGORIES, ByCategory, Phase
from lflops.profile.series import extremes
from lflops.torch_private.tensors import PLAIN, FakeTensor, local_part, storage_key

STREAM: ContextVar[int] = ContextVar("stream", default=0)
"""The CUDA stream on which the running code would allocate memory.

The allocator does not reuse memory of one stream on another.
"""

ON_HOST = -1
"""The stream of storages in host memory, which take no memory of the device."""


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Allocate memory on a stream inside the context."""
    before = STREAM.set(number)
    try:
        yield
    finally:
        STREAM.reset(before)


class AllocationLog:
    """Requests to the allocator, in order.

    A storage that outlives a step is one allocation. The log keeps no storage alive.

    Attributes:
        requests: The allocations and frees since the first step.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._allocations = 0
        self._replaced: tuple[int, int] | None = None

    def replaces(self, key: int) -> None:
        """Let the next allocation replace a storage if no other allocation precedes its free."""
        self._replaced = (key, len(self.requests))

    def allocated(self, storage: Any, key: int, nbytes: int) -> None:
        """Add a storage, unless it is in the log already."""
        if key in self._alive:
            return
        if self._replaced is not None and self._replaced[1] != len(self.requests):
            self._replaced = None
        self._allocations += 1
        number = self._allocations
        self._alive[key] = (number, weakref.ref(storage, partial(self.freed, key)))
        self.requests.append(Request(number, nbytes, STREAM.get()))

    def freed(self, key: int, _reference: object = None) -> None:
        """Add the free of a storage that is in the log."""
        alive = self._alive.pop(key, None)
        if alive is None:
            return
        request = Request(alive[0], None)
        if self._replaced is not None and self._replaced[0] == key:
            self.requests.insert(self._replaced[1], request)
            self._replaced = None
        else:
            self.requests.append(request)

    def stop(self) -> None:
        """Stop logging frees."""
        self._alive.clear()


NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
"""Errors for a tensor without a storage: a sparse tensor, or a lazy tensor that has none yet."""

LARGEST = 50
"""Number of the largest storages at the peak that a profile lists."""

LONGEST_TIMELINE = 20_000
"""Default of the most operators of a memory timeline."""

CATEGORY_OF_RESULTS: dict[Phase, str] = {
    "forward": "activations",
    "recompute": "activations",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}
"""The memory category of an operator's results, by phase."""


class Birth(Struct, frozen=True, gc=False):
    """How a storage became alive."""

    nbytes: int
    category: str
    operator: str
    fqn: str
    phase: Phase


Survivors = list[tuple[int, weakref.ref[Any], Birth]]
"""Keys and storages that a step allocated and that were alive at its end, as weak references."""


class _Followed(weakref.ref[Any]):
    """A weak reference to a storage that is followed.

    Attributes:
        key: The storage's key.
        serial: The index of its `Birth`.
    """

    __slots__ = ("key", "serial")
    key: int
    serial: int


class _Replaced(NamedTuple):
    """A storage that a sum of gradients may replace, until the next operator runs.

    Attributes:
        key: The storage's key.
        place: The index of the sum's allocation among the events.
        live: The live bytes with both the storage and the sum.
        fqn: The module that was running.
    """

    key: int
    place: int
    live: int
    fqn: str


_Moment = tuple[str, str, Phase, int, int]
"""The state before an operator: operator, module, phase, live bytes, number of events so far.

It is a plain tuple, because one is created for every operator.
"""


class LiveMemory:
    """Follows storages from allocation to free, and keeps none of them alive.

    Allocations and frees go into one list of events, which is replayed at the end, up to the peak.
    Copying the set of live storages at each new peak would double the cost of counting. An event
    is the index of a birth if the storage became alive, else that index inverted bitwise.
    """

    def __init__(
        self,
        round_to: int = 1,
        log: AllocationLog | None = None,
        moments: int = LONGEST_TIMELINE,
        survivors: Survivors | None = None,
        host: Iterable[Tensor] = (),
    ) -> None:
        """Initialize without any storage.

        Args:
            round_to: The size of each storage is rounded up to a multiple of this number of bytes.
            log: Receives allocations and frees.
            moments: The most operators of the timeline. A longer timeline keeps its extremes.
            survivors: Storages that the last step left. `stop` replaces them by those that this
                step leaves.
            host: Tensors in host memory, which are not followed.
        """
        self._longest = moments
        self._round_to = round_to
        self._log = log
        self._survivors = survivors
        self._births: list[Birth] = []
        self._events: list[int] = []
        self._alive: dict[int, _Followed] = {}
        # Weak references append themselves here when their storage is freed. The callback is a
        # method in C: Python drops an interrupt that arrives in a callback written in Python.
        self._dead: list[_Followed] = []
        self._died = self._dead.append
        self._live = 0
        self._peak = 0
        self._peak_event = 0
        self._peak_index = 0
        self._moments: list[_Moment] = []
        self._highest: dict[str, int] = {}
        self._relabelled: dict[int, str] = {}
        self._fake: set[int] = set()
        self._resized: dict[int, Any] = {}
        self._replaced: _Replaced | None = None
        self._on_host: dict[int, weakref.ref[Any]] = {}
        for tensor in host:
            storage_and_key = storage_of(tensor)
            if storage_and_key is not None:
                storage, key = storage_and_key
                self._on_host[key] = weakref.ref(storage)

    def hold(self, tensors: Iterable[Tensor], category: str, fqn: str) -> None:
        """Add tensors that exist before the first operator."""
        for tensor in tensors:
            self._bear(tensor, category, "", fqn, "other")

    def hold_survivors(self) -> None:
        """Add the storages that an earlier step allocated and that are still alive.

        An example are the buffers of a pipeline schedule.
        """
        for key, reference, birth in self._survivors or ():
            storage = reference()
            if storage is not None and key not in self._alive:
                self._bear_storage(storage, key, birth, fake=True)

    def before(self, operator: str, fqn: str, phase: Phase) -> None:
        """Record the live bytes before an operator runs."""
        if self._dead:
            self._see_deaths()
        if self._resized:
            self._drop_emptied()
        if self._replaced is not None:
            self._keep_both(self._replaced)
        live = self._live
        highest = self._highest
        self._moments.append((operator, fqn, phase, live, len(self._events)))
        if live > highest.get(fqn, -1):
            highest[fqn] = live

    def after(self, operator: str, fqn: str, phase: Phase, out: Any) -> None:
        """Record the storages of an operator's results."""
        category = CATEGORY_OF_RESULTS[phase]
        results = (out,) if type(out) is Tensor else tensors_of((out,))
        for tensor in results:
            self._bear(tensor, category, operator, fqn, phase)
        if self._live > self._highest.get(fqn, -1):
            self._highest[fqn] = self._live

    def after_sum(self, operator: str, fqn: str, phase: Phase, out: Tensor, term: Tensor) -> None:
        """Record the sum of two gradients, which autograd writes to the memory of one of them.

        Under a dispatch mode it does not: the sum gets new memory, and the term is freed right
        after. So the term is recorded as freed before the sum is allocated. If something else
        keeps the term, autograd does not overwrite it, and both are alive.
        """
        self._see_deaths()
        sum_storage, sum_key = storage_key(out)
        term_storage, term_key = storage_key(term)
        replaces_term = (
            sum_key not in self._alive
            and term_key in self._alive
            and sum_storage.nbytes() == term_storage.nbytes()
        )
        if not replaces_term:
            self.after(operator, fqn, phase, out)
            return
        live_before = self._live
        place = len(self._events)
        peak = self._peak
        peak_event = self._peak_event
        peak_index = self._peak_index
        if self._log is not None:
            self._log.replaces(term_key)
        self._bear(out, CATEGORY_OF_RESULTS[phase], operator, fqn, phase)
        self._peak = peak
        self._peak_event = peak_event
        self._peak_index = peak_index
        if self._live > live_before:
            self._replaced = _Replaced(term_key, place, self._live, fqn)

    def _keep_both(self, replaced: _Replaced) -> None:
        """Record that a sum of gradients and its term were alive together."""
        self._replaced = None
        if replaced.live > self._highest.get(replaced.fqn, -1):
            self._highest[replaced.fqn] = replaced.live
        if replaced.live > self._peak:
            self._set_peak(replaced.live, replaced.place + 1)

    def _set_peak(self, live: int, event: int) -> None:
        self._peak = live
        self._peak_event = event
        self._peak_index = max(len(self._moments) - 1, 0)

    def scratch(self, operator: str, fqn: str, phase: Phase, nbytes: int) -> None:
        """Record bytes that a kernel allocated besides its results and freed before it returned."""
        self._see_deaths()
        nbytes = rounded_up(nbytes, self._round_to)
        serial = len(self._births)
        live = self._live + nbytes
        self._births.append(Birth(nbytes, "temporary", operator, fqn, phase))
        self._events.append(serial)
        self._highest[fqn] = max(self._highest.get(fqn, -1), live)
        if live > self._peak:
            self._set_peak(live, len(self._events))
        self._events.append(~serial)

    def filled(self, operator: str, fqn: str, phase: Phase, tensors: Iterable[Tensor]) -> None:
        """Add storages that were resized without an operator, and watch them until they are empty.

        FSDP resizes the storages of gathered parameters to their size and back to nothing.
        """
        for tensor in tensors:
            storage_and_key = storage_of(tensor)
            if storage_and_key is not None:
                storage, key = storage_and_key
                self._bear(tensor, "parameters", operator, fqn, phase)
                self._resized[key] = weakref.ref(storage)
        if self._live > self._highest.get(fqn, -1):
            self._highest[fqn] = self._live

    def _drop_emptied(self) -> None:
        """Record the free of storages that were resized to nothing."""
        for key, reference in list(self._resized.items()):
            storage = reference()
            if storage is None or not storage.nbytes():
                del self._resized[key]
                if key in self._alive:
                    self._die(self._alive[key])
                if self._log is not None:
                    self._log.freed(key)

    def add_earlier(self, tensors: Iterable[tuple[Tensor, str]], category: str) -> None:
        """Add tensors, with their modules, that have been alive from the beginning."""
        self._see_deaths()
        earlier_events = self._events
        peak = self._peak
        peak_event = self._peak_event
        peak_index = self._peak_index
        self._events = []
        for tensor, fqn in tensors:
            self._bear(tensor, category, "", fqn, "other")
        born = [event for event in self._events if event >= 0]
        died = [event for event in self._events if event < 0]
        self._events = born + earlier_events + died
        if not born:
            return
        added = sum(self._births[event].nbytes for event in born)
        self._peak = peak + added
        self._peak_event = peak_event + len(born)
        self._peak_index = peak_index
        moments: list[_Moment] = []
        for operator, fqn, phase, live, event in self._moments:
            moments.append((operator, fqn, phase, live + added, event + len(born)))
        self._moments = moments
        self._highest = {fqn: highest + added for fqn, highest in self._highest.items()}

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Change the category of storages that are still alive."""
        self._see_deaths()
        for tensor in tensors:
            storage_and_key = storage_of(tensor)
            alive = self._alive.get(storage_and_key[1]) if storage_and_key else None
            if alive is not None:
                self._relabelled[alive.serial] = category

    def stop(self) -> None:
        """End following storages, and pass on those that are still alive."""
        self._see_deaths()
        if self._replaced is not None:
            self._keep_both(self._replaced)
        if self._survivors is not None:
            survivors = []
            for followed in self._alive.values():
                # The optimizer's state is found again through its parameters.
                if self._relabelled.get(followed.serial) != "optimizer_state":
                    survivors.append((followed.key, followed, self._births[followed.serial]))
            self._survivors[:] = survivors
        self._alive.clear()

    def peak_of_rows(self) -> dict[str, int]:
        """The most bytes alive while each module or one of its submodules ran."""
        peaks: dict[str, int] = {}
        for fqn, live in self._highest.items():
            for ancestor in ancestry(fqn):
                peaks[ancestor] = max(peaks.get(ancestor, 0), live)
        return peaks

    def result(self) -> Memory:
        """Return the peak, what was alive at it, and the timeline."""
        by_category = dict.fromkeys(CATEGORIES, 0)
        by_module: Counter[str] = Counter()
        activations_by_module: Counter[str] = Counter()
        allocations = []
        source: Literal["counted", "fake"] = "counted"
        for serial, birth in self._alive_at_peak():
            category = self._relabelled.get(serial, birth.category)
            by_category[category] += birth.nbytes
            by_module[birth.fqn] += birth.nbytes
            if category == "activations":
                activations_by_module[birth.fqn] += birth.nbytes
            if serial in self._fake:
                source = "fake"
            allocations.append(
                Allocation(category, birth.operator, birth.fqn, birth.phase, birth.nbytes)
            )
        timeline, most = self._timeline()
        return Memory(
            source=source,
            peak_bytes=self._peak,
            peak_index=self._peak_index,
            by_category=by_category,
            by_module=dict(by_module),
            activations_by_module=dict(activations_by_module),
            alive=tuple(heapq.nlargest(LARGEST, allocations, key=attrgetter("bytes"))),
            timeline=tuple(timeline),
            most_by_category=most,
        )

    def _bear(self, tensor: Tensor, category: str, operator: str, fqn: str, phase: Phase) -> None:
        """Record that a tensor's storage is alive, unless it is known."""
        if self._dead:
            self._see_deaths()
        is_plain = type(tensor) in PLAIN
        try:
            storage, key = storage_key(tensor if is_plain else local_part(tensor))
        except NO_STORAGE:
            return
        if key in self._alive:
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        if self._round_to > 1:
            nbytes = rounded_up(nbytes, self._round_to)
        is_fake = tensor.is_meta or (not is_plain and type(tensor) is FakeTensor)
        birth = Birth(nbytes, category, operator, fqn, phase)
        self._bear_storage(storage, key, birth, fake=is_fake)

    def _bear_storage(self, storage: Any, key: int, birth: Birth, *, fake: bool) -> None:
        if self._on_host:
            is_known = key in self._on_host and self._on_host[key]() is storage
            if is_known or STREAM.get() == ON_HOST:
                self._on_host[key] = weakref.ref(storage)
                return
        if self._log is not None:
            self._log.allocated(storage, key, storage.nbytes())
        serial = len(self._births)
        self._births.append(birth)
        followed = _Followed(storage, self._died)
        followed.key = key
        followed.serial = serial
        self._alive[key] = followed
        self._events.append(serial)
        if fake:
            self._fake.add(serial)
        live = self._live + birth.nbytes
        self._live = live
        if live > self._peak:
            # As in `_set_peak`, without the call.
            self._peak = live
            self._peak_event = len(self._events)
            self._peak_index = max(len(self._moments) - 1, 0)

    def _see_deaths(self) -> None:
        dead = self._dead
        try:
            while dead:
                self._die(dead.pop(0))
        except IndexError:
            # Another thread has removed the last entry.
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
        """Return the moments that are kept, and the most live bytes of each category.

        Each moment has the live bytes by final category.
        """
        live = dict.fromkeys(CATEGORIES, 0)
        most = dict(live)
        live_bytes = [moment[3] for moment in self._moments]
        kept = extremes(live_bytes, self._longest, [self._peak_index])
        first_events = [self._moments[index][4] for index in kept]
        first_events.append(len(self._events))
        self._replay(self._events[: first_events[0]], live, most)
        timeline: list[Moment] = []
        for index, (begin, end) in zip(kept, pairwise(first_events), strict=True):
            operator, fqn, phase, live_in_all, _ = self._moments[index]
            before = ByCategory(**live)
            highest = self._replay(self._events[begin:end], live, most)
            timeline.append(Moment(operator, fqn, phase, live_in_all, index, before, highest))
        return timeline, most

    def _replay(self, events: Iterable[int], live: dict[str, int], most: dict[str, int]) -> int:
        """Apply allocations and frees to the live bytes, and return the most that were alive."""
        total = sum(live.values())
        highest = total
        for event in events:
            is_allocation = event >= 0
            serial = event if is_allocation else ~event
            birth = self._births[serial]
            category = self._relabelled.get(serial, birth.category)
            change = birth.nbytes if is_allocation else -birth.nbytes
            live[category] += change
            total += change
            highest = max(highest, total)
            most[category] = max(most[category], live[category])
        return highest

    def _alive_at_peak(self) -> list[tuple[int, Birth]]:
        """The storages that were alive at the peak, with the index of each birth."""
        alive: dict[int, Birth] = {}
        for event in self._events[: self._peak_event]:
            if event >= 0:
                alive[event] = self._births[event]
            else:
                del alive[~event]
        return list(alive.items())


def storage_of(tensor: Tensor) -> tuple[Any, int] | None:
    """The storage of this rank's part of a tensor and its key, or `None` if it has no storage."""
    try:
        return storage_key(tensor if type(tensor) in PLAIN else local_part(tensor))
    except NO_STORAGE:
        return None
