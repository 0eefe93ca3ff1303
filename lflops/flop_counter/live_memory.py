"""Record when the memory of tensors (their storages) is allocated and freed.

A storage is alive from its allocation until it is freed. The total size of the live storages after
each operator gives the memory timeline of a step.

The allocations and frees of several steps are also logged as requests to CUDA's caching allocator,
which lflops simulates.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lflops.flop_counter.memory_record import LONGEST_TIMELINE, Birth, MemoryRecord
from lflops.flop_counter.traffic import tensors_of
from lflops.memory.allocator.simulation import Request, rounded_up
from lflops.profile.records import Phase
from lflops.torch_private.tensors import PLAIN, FakeTensor, local_part, storage_key

STREAM: ContextVar[int] = ContextVar("stream", default=0)
"""The number of the CUDA stream on which the running code would allocate memory.

The simulated allocator needs this number, because memory that was freed on one stream is not reused
on another stream.
"""

ON_HOST = -1
"""The stream number that marks allocations in host memory, which take no device memory."""


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Return a context in which allocations are recorded for the stream with this number."""
    before = STREAM.set(number)
    try:
        yield
    finally:
        STREAM.reset(before)


class AllocationLog:
    """A log of the requests (allocations and frees) that a run makes to the CUDA allocator.

    The log covers several steps. A storage that stays alive from one step to the next is logged
    only once. The log keeps no storage alive.

    Attributes:
        requests: The allocations and frees since the first step, in order.
        modules: The module of each request: the owner of the allocated storage, or the module that
            was running when a storage was freed.
        running_module: The name of the module that is running.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.modules: list[str] = []
        self.running_module = ""
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._allocations = 0
        # The key of the storage that the next allocation may replace, and the index of the request
        # for that allocation.
        self._replaced: tuple[int, int] | None = None

    def replaces(self, key: int) -> None:
        """Let the next allocation reuse the memory of the storage with this key.

        If the next request is an allocation, and the storage is freed before the allocation after
        it, the free is logged before the first of the two allocations. Then the simulated allocator
        can reuse the memory.
        """
        self._replaced = (key, len(self.requests))

    def allocated(self, storage: Any, key: int, nbytes: int, owner: str) -> None:
        """Log the allocation of a storage, unless the storage is already in the log."""
        if key in self._alive:
            return
        if self._replaced is not None and self._replaced[1] != len(self.requests):
            self._replaced = None
        self._allocations += 1
        number = self._allocations
        self._alive[key] = (number, weakref.ref(storage, partial(self.freed, key)))
        self._add(len(self.requests), Request(number, nbytes, STREAM.get()), owner)

    def freed(self, key: int, _reference: object = None) -> None:
        """Log the free of a storage. A storage that is not in the log is ignored."""
        alive = self._alive.pop(key, None)
        if alive is None:
            return
        index = len(self.requests)
        if self._replaced is not None and self._replaced[0] == key:
            index = self._replaced[1]
            self._replaced = None
        self._add(index, Request(alive[0], None), self.running_module)

    def _add(self, index: int, request: Request, module: str) -> None:
        self.requests.insert(index, request)
        self.modules.insert(index, module)

    def stop(self) -> None:
        """Stop logging frees."""
        self._alive.clear()


NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
"""Errors that torch raises for a tensor without a storage, such as a sparse or a lazy tensor."""

CATEGORY_OF_RESULTS: dict[Phase, str] = {
    "forward": "activations",
    "recompute": "activations",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}
"""The memory category of an operator's results, keyed by the phase in which the operator ran."""


Survivors = list[tuple[int, weakref.ref[Any], Birth]]
"""The storages that were alive at the end of a step.

Each entry has the storage's key, a weak reference to the storage, and its `Birth`.
"""


class _Followed(weakref.ref[Any]):
    """A weak reference to a live storage.

    Attributes:
        key: The storage's key, which identifies it among the live storages.
        serial: The index of the storage's `Birth` in the memory record.
    """

    __slots__ = ("key", "serial")
    key: int
    serial: int


class _Replaced(NamedTuple):
    """The storage of a gradient whose memory a sum of gradients may reuse.

    The sum reuses the memory if the storage is freed before the next operator runs.

    Attributes:
        key: The key of the gradient's storage.
        place: The index of the sum's allocation in the list of events.
    """

    key: int
    place: int


class LiveMemory:
    """Records the allocation and the free of each storage, without keeping storages alive.

    Allocations and frees go into one list of events, and the peak is computed from this list at the
    end. The alternative, copying the set of live storages at each new peak, would double the time
    of counting.

    Attributes:
        record: The allocations and frees so far.
    """

    def __init__(
        self,
        round_to: int = 1,
        log: AllocationLog | None = None,
        moments: int = LONGEST_TIMELINE,
        survivors: Survivors | None = None,
        host: Iterable[Tensor] = (),
    ) -> None:
        """Start an empty record.

        Args:
            round_to: The size of each storage is rounded up to a multiple of this number of bytes.
            log: Receives allocations and frees; `None` if no log is needed.
            moments: Maximum number of operators in the timeline. In a longer timeline, operators
                are dropped, but the highest and lowest points are kept.
            survivors: The storages that the previous step left alive; `None` if not needed. `stop`
                replaces the content of this list with the storages that this step leaves alive.
            host: Tensors in host memory, which are not recorded.
        """
        self.record = MemoryRecord(longest=moments)
        self._round_to = round_to
        self._log = log
        self._survivors = survivors
        self._alive: dict[int, _Followed] = {}
        # The freed storages that `_record_frees` has not recorded yet. When a storage is freed, its
        # weak reference appends itself to this list. The callback, `list.append`, is written in C,
        # because Python drops an interrupt that arrives in a callback written in Python.
        self._freed: list[_Followed] = []
        self._append_freed = self._freed.append
        self._resized: dict[int, Any] = {}
        self._replaced: _Replaced | None = None
        self._on_host: dict[int, weakref.ref[Any]] = {}
        for tensor in host:
            storage_and_key = storage_of(tensor)
            if storage_and_key is not None:
                storage, key = storage_and_key
                self._on_host[key] = weakref.ref(storage)

    def hold(self, tensors: Iterable[Tensor], category: str, fqn: str) -> None:
        """Record that tensors are alive before the first operator.

        Args:
            tensors: The tensors.
            category: Their memory category, for example `parameters`.
            fqn: The module that owns them.
        """
        for tensor in tensors:
            self._record_allocation(tensor, category, "", fqn, "other")

    def hold_survivors(self) -> None:
        """Record the storages of an earlier step that are still alive.

        An example is the receive buffers of a pipeline schedule.
        """
        for key, reference, birth in self._survivors or ():
            storage = reference()
            if storage is not None and key not in self._alive:
                self._record_birth(storage, key, birth)

    def before(self, operator: str, fqn: str, phase: Phase) -> None:
        """Record that an operator of a module is about to run in a phase."""
        if self._freed:
            self._record_frees()
        if self._resized:
            self._drop_emptied()
        self._replaced = None
        record = self.record
        record.moments.append((operator, fqn, phase, len(record.events)))
        if self._log is not None:
            self._log.running_module = fqn

    def ran_for(self, owner: str) -> None:
        """Record the module that owns the parameter that the optimizer's last operator updated."""
        record = self.record
        record.owners[len(record.moments) - 1] = owner

    def after(self, operator: str, fqn: str, phase: Phase, out: Any) -> None:
        """Record the storages that an operator allocated for its results."""
        category = CATEGORY_OF_RESULTS[phase]
        results = (out,) if type(out) is Tensor else tensors_of((out,))
        for tensor in results:
            self._record_allocation(tensor, category, operator, fqn, phase)

    def after_sum(self, operator: str, fqn: str, phase: Phase, out: Tensor, term: Tensor) -> None:
        """Record the sum of two gradients, which autograd writes to the memory of one of them.

        Under a dispatch mode, autograd behaves differently: it allocates new memory for the sum and
        frees `term` directly afterwards. To record the normal behavior, the free of `term` is moved
        before the allocation of the sum. If other code keeps `term` alive, autograd would not
        overwrite `term` either, so the sum and `term` are both recorded as alive.
        """
        self._record_frees()
        sum_storage, sum_key = storage_key(out)
        term_storage, term_key = storage_key(term)
        replaces_term = (
            sum_key not in self._alive
            and term_key in self._alive
            and sum_storage.nbytes() == term_storage.nbytes()
        )
        place = len(self.record.events)
        if replaces_term and self._log is not None:
            self._log.replaces(term_key)
        self.after(operator, fqn, phase, out)
        if replaces_term:
            self._replaced = _Replaced(term_key, place)

    def scratch(self, operator: str, fqn: str, phase: Phase, nbytes: int) -> None:
        """Record scratch memory that a kernel allocated and freed before the kernel returned."""
        self._record_frees()
        record = self.record
        serial = len(record.births)
        nbytes = rounded_up(nbytes, self._round_to)
        record.births.append(Birth(nbytes, "temporary", operator, fqn, phase))
        record.events += serial, ~serial

    def filled(self, operator: str, fqn: str, phase: Phase, tensors: Iterable[Tensor]) -> None:
        """Record storages that were resized without an operator.

        FSDP resizes the storages of gathered parameters from zero to full size and later back to
        zero. When a storage is resized to zero, it is recorded as freed before the next operator.
        """
        for tensor in tensors:
            storage_and_key = storage_of(tensor)
            if storage_and_key is not None:
                storage, key = storage_and_key
                self._record_allocation(tensor, "parameters", operator, fqn, phase)
                self._resized[key] = weakref.ref(storage)

    def _drop_emptied(self) -> None:
        """Record storages that were resized to zero as freed."""
        for key, reference in list(self._resized.items()):
            storage = reference()
            if storage is None or not storage.nbytes():
                del self._resized[key]
                if key in self._alive:
                    self._record_free(self._alive[key])
                if self._log is not None:
                    self._log.freed(key)

    def add_earlier(self, tensors: Iterable[tuple[Tensor, str]], category: str) -> None:
        """Record, during a step, that tensors have been alive since the beginning of the step.

        Args:
            tensors: Each tensor with the name of the module that owns it.
            category: Their memory category.
        """
        self._record_frees()
        record = self.record
        earlier_events = record.events
        record.events = []
        for tensor, fqn in tensors:
            self._record_allocation(tensor, category, "", fqn, "other")
        born = [event for event in record.events if event >= 0]
        died = [event for event in record.events if event < 0]
        record.events = born + earlier_events + died
        moments = record.moments
        record.moments = [(*moment[:3], moment[3] + len(born)) for moment in moments]

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Change the category of storages that are still alive."""
        self._record_frees()
        for tensor in tensors:
            storage_and_key = storage_of(tensor)
            alive = None
            if storage_and_key:
                alive = self._alive.get(storage_and_key[1])
            if alive is not None:
                self.record.relabelled[alive.serial] = category

    def stop(self) -> None:
        """Stop recording allocations and frees.

        The storages that are still alive, except the optimizer's state, become the survivors for
        the next step.
        """
        self._record_frees()
        if self._survivors is not None:
            survivors = []
            for followed in self._alive.values():
                # The next step finds the optimizer's state through the parameters.
                if self.record.category(followed.serial) != "optimizer_state":
                    birth = self.record.births[followed.serial]
                    survivors.append((followed.key, followed, birth))
            self._survivors[:] = survivors
        self._alive.clear()

    def _record_allocation(
        self, tensor: Tensor, category: str, operator: str, fqn: str, phase: Phase
    ) -> None:
        """Record that a tensor's storage is alive, unless this has already been recorded."""
        if self._freed:
            self._record_frees()
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
        birth = Birth(nbytes, category, operator, fqn, phase, is_fake)
        self._record_birth(storage, key, birth)

    def _record_birth(self, storage: Any, key: int, birth: Birth) -> None:
        """Record the allocation of a storage, and later record its free.

        Nothing is recorded for a storage in host memory.
        """
        if self._on_host:
            is_known = key in self._on_host and self._on_host[key]() is storage
            if is_known or STREAM.get() == ON_HOST:
                self._on_host[key] = weakref.ref(storage)
                return
        if self._log is not None:
            self._log.allocated(storage, key, storage.nbytes(), birth.fqn)
        record = self.record
        serial = len(record.births)
        record.births.append(birth)
        followed = _Followed(storage, self._append_freed)
        followed.key = key
        followed.serial = serial
        self._alive[key] = followed
        record.events.append(serial)

    def _record_frees(self) -> None:
        """Record the frees of all storages in `_freed`."""
        freed = self._freed
        try:
            while freed:
                self._record_free(freed.pop(0))
        except IndexError:
            # Another thread has removed the last entry.
            return

    def _record_free(self, storage: _Followed) -> None:
        if self._alive.pop(storage.key, None) is None:
            return
        serial = storage.serial
        if self._replaced is not None and self._replaced.key == storage.key:
            self.record.events.insert(self._replaced.place, ~serial)
            self._replaced = None
        else:
            self.record.events.append(~serial)


def storage_of(tensor: Tensor) -> tuple[Any, int] | None:
    """Return the storage of this rank's part of a tensor, and the key of the storage.

    Return `None` if the tensor has no storage.
    """
    try:
        return storage_key(tensor if type(tensor) in PLAIN else local_part(tensor))
    except NO_STORAGE:
        return None
