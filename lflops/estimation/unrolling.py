"""Derive the estimate of a model with many equal blocks from estimates with few blocks.

In a folded model, most of the equal blocks are removed. Its step is recorded as a sequence of
allocations, frees and operators, which are called tokens here. Each token belongs to a block or to
the rest of the model. All middle blocks do the same, so the tokens of one middle block are copied
for each removed block. This is called unrolling. Outside the blocks, counts such as FLOPs grow
linearly with the number of blocks, so they are extrapolated from two folded models.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lflops.estimation.equal_blocks import Fold
from lflops.flop_counter.live_memory import AllocationLog
from lflops.flop_counter.memory_record import MemoryRecord
from lflops.memory.allocator.simulation import Request
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, ModuleProfile, OpCount, Profile, UnsupportedCall
from lflops.profile.records import ModulePhase
from lflops.profile.series import dtype_of

Row = TypeVar("Row", OpCount, UnsupportedCall, Communication)


class NotPeriodicError(Exception):
    """The step of the whole model cannot be derived from a model with few blocks.

    The whole model is then estimated instead.
    """


class Copy(NamedTuple):
    """A copy of an element of the folded model's sequence, as an element of the larger model's.

    A sequence contains, for example, the allocations and frees of a step.

    Attributes:
        item: The index of the original element in the folded model's sequence.
        shift: The number of blocks by which the copy is moved; 0 if it is not moved. For example, a
            copy of an element of block 3 with shift 2 belongs to block 5 of the larger model.
    """

    item: int
    shift: int


class Place(NamedTuple):
    """The place of an allocation in a step, such as the second allocation of block 3 in forward.

    A block may run in several parts, for example in forward and in backward. Corresponding places
    in two equal blocks differ only in the number of the block.

    Attributes:
        block: The number of the block; `None` outside the blocks.
        run: Number of earlier parts of the same block that have allocations.
        position: Number of earlier allocations in the same part.
    """

    block: int | None
    run: int
    position: int


class Token(NamedTuple):
    """An allocation, a free or an operator in the recorded sequence of a step.

    Attributes:
        block: The number of the block to which the token belongs; `None` outside the blocks.
        storage: The number of the storage that is allocated or freed; `None` for an operator.
        allocates: Whether this is an allocation.
    """

    block: int | None
    storage: int | None = None
    allocates: bool = False


@dataclass(frozen=True)
class StepRecord:
    """The results of one step of a folded model or of the whole model.

    Attributes:
        profile: The profile of the step.
        record: All allocations, frees and operators of the step.
    """

    profile: Profile
    record: MemoryRecord


class Unrolling:
    """Computes the results of a larger model from the results of a folded model.

    In the folded model, some equal blocks are missing. The results of one middle block of the
    folded model are copied for each missing block.

    Args:
        fold: The equal blocks, and the number of them that the folded model keeps.
        length: The number of equal blocks in the larger model.
    """

    def __init__(self, fold: Fold, length: int) -> None:
        self._prefix = f"{fold.container}." if fold.container else ""
        self._first = fold.first
        self._repeated = fold.first + fold.kept // 2
        self._last = fold.first + fold.kept - 1
        self._copies = length - fold.kept
        self.renamed = cache(self._renamed)
        self.number = cache(self._number)

    def _number(self, fqn: str) -> int | None:
        """Return the number of the equal block that contains a module; `None` if there is none."""
        digits = self._digits(fqn)
        if not digits:
            return None
        number = int(digits)
        if self._first <= number <= self._last:
            return number
        return None

    def _digits(self, fqn: str) -> str:
        if not fqn.startswith(self._prefix):
            return ""
        digits = fqn[len(self._prefix) :].partition(".")[0]
        return digits if digits.isdecimal() else ""

    def _renamed(self, fqn: str, shift: int) -> str:
        """Convert the name of a module in the folded model to the name in the larger model.

        If the module is in the copied block, the result is the name of the module in the copy that
        is `shift` blocks later. Blocks after the copied block get higher numbers, because the
        copies are inserted before them.
        """
        digits = self._digits(fqn)
        if not digits:
            return fqn
        number = int(digits)
        if number < self._repeated:
            return fqn
        shift = shift if number == self._repeated else self._copies
        rest = fqn[len(self._prefix) + len(digits) :]
        return f"{self._prefix}{number + shift}{rest}"

    def order(self, blocks: Sequence[int | None]) -> list[Copy]:
        """Extend a sequence of the folded model, such as its allocations, to the larger model.

        The elements of the middle block are repeated for each missing block. In backward, the
        blocks run in reverse order, and so do the copies.

        Args:
            blocks: For each element of the sequence, the number of its block; `None` outside the
                blocks.

        Returns:
            For each element of the larger model's sequence, the element of which it is a copy.

        Raises:
            NotPeriodicError: The middle block does not run between its two neighbours.
        """
        runs = _runs(blocks)
        found: list[Copy] = []
        for place, run in enumerate(runs):
            for shift in self._shifts(runs, place):
                found += [Copy(index, shift) for index in run.items]
        return found

    def _shifts(self, runs: Sequence["_Run"], place: int) -> Sequence[int]:
        """Return the shifts of the copies of `runs[place]`, in the order of the copies.

        A run is a part of the sequence that belongs to one block. A shift is the number of blocks
        by which a copy is moved.
        """
        block = runs[place].block
        if block is None or block < self._repeated:
            return [0]
        if block > self._repeated:
            return [self._copies]
        before = _neighbour(reversed(runs[:place]), block)
        after = _neighbour(runs[place + 1 :], block)
        shifts = range(self._copies + 1)
        if (before, after) == (block - 1, block + 1):
            return shifts
        # In backward, the blocks run in reverse order.
        if (before, after) == (block + 1, block - 1):
            return shifts[::-1]
        raise NotPeriodicError(f"block {block} is between {before} and {after}")

    def tokens(self, tokens: Sequence[Token]) -> Iterator[tuple[int, int, int | None]]:
        """Yield the allocations, frees and operators of the larger model, in order.

        Each token of the larger model is a tuple of three values: the index of the original token,
        the number of blocks by which the copy is moved (see `Copy`), and the number of the storage
        in the larger model, or `None` for an operator. Plain tuples are used because there are
        hundreds of thousands of them.

        Raises:
            NotPeriodicError: It is unknown which storage the copy of a free releases.
        """
        blocks = _with_tokens_between_blocks([token.block for token in tokens])
        place_of, storage_at = _places(tokens, blocks)
        alive: dict[tuple[int, int], int] = {}
        births = 0
        for index, shift in self.order(blocks):
            token = tokens[index]
            if token.storage is None:
                yield index, shift, None
            elif token.allocates:
                alive[token.storage, shift] = births
                yield index, shift, births
                births += 1
            else:
                place = place_of[token.storage]
                block, freed_shift = self._freed(place.block, blocks[index], shift)
                storage = token.storage
                if block != place.block:
                    storage = storage_at.get(Place(block, place.run, place.position), -1)
                number = alive.pop((storage, freed_shift), -1)
                if number < 0:
                    raise NotPeriodicError(f"{blocks[index]} frees {place}")
                yield index, shift, number

    def _freed(self, born_in: int | None, block: int | None, shift: int) -> tuple[int | None, int]:
        """Find the storage that the copy of a free releases.

        Returns the block that allocated the original of this storage in the folded model, and the
        number of blocks by which the copy of the storage is moved.

        Args:
            born_in: The block that allocated the storage that the original free releases.
            block: The block that contains the original free.
            shift: The number of blocks by which the copy of the free is moved.
        """
        repeated = self._repeated
        # First, find the number of the allocating block in the larger model. A storage from the
        # same or a neighbouring block moves together with the free.
        if born_in is None:
            if block == repeated:
                raise NotPeriodicError("a block frees memory that no block allocated")
            return None, 0
        if block is not None and not _is_far(born_in, block):
            number = born_in + shift
        elif born_in == repeated:
            raise NotPeriodicError(
                "a block of the model frees memory that a block far before it allocated"
            )
        else:
            number = born_in + (self._copies if born_in > repeated else 0)
        # Then convert this number to a block of the folded model and a shift.
        if number <= repeated:
            return number, 0
        if number > repeated + self._copies:
            return number - self._copies, self._copies
        return repeated, number - repeated

    def record(self, record: MemoryRecord) -> MemoryRecord:
        """Return the memory record of the larger model's step."""
        tokens, operators = self._memory_tokens(record)
        unrolled = MemoryRecord(longest=record.longest)
        for index, shift, storage in self.tokens(tokens):
            token = tokens[index]
            if token.storage is None:
                number = operators[index]
                operator, fqn, phase, _ = record.moments[number]
                owner = record.owners.get(number)
                if owner is not None:
                    unrolled.owners[len(unrolled.moments)] = self.renamed(owner, shift)
                moment = (operator, self.renamed(fqn, shift), phase, len(unrolled.events))
                unrolled.moments.append(moment)
            elif storage is not None and token.allocates:
                birth = record.births[token.storage]
                renamed = replace(birth, fqn=self.renamed(birth.fqn, shift))
                unrolled.births.append(renamed)
                unrolled.events.append(storage)
                if token.storage in record.relabelled:
                    unrolled.relabelled[storage] = record.relabelled[token.storage]
            elif storage is not None:
                unrolled.events.append(~storage)
        return unrolled

    def _memory_tokens(self, record: MemoryRecord) -> tuple[list[Token], dict[int, int]]:
        """Convert a memory record to tokens (allocations, frees and operators).

        Also returns a dictionary with the position of each operator in the record. Its keys are the
        indexes of the tokens that are operators.
        """
        tokens: list[Token] = []
        operators: dict[int, int] = {}
        born_in = [self.number(birth.fqn) for birth in record.births]
        for window in record.windows():
            running = None
            if window.operator >= 0:
                fqn = record.moments[window.operator][1]
                running = self.number(record.owners.get(window.operator) or fqn)
                operators[len(tokens)] = window.operator
                tokens.append(Token(running))
            for event in record.events[window.begin : window.end]:
                if event >= 0:
                    tokens.append(Token(born_in[event], event, allocates=True))
                else:
                    tokens.append(Token(running, ~event))
        return _with_blocks_of_frees(tokens, dict(enumerate(born_in))), operators

    def requests(self, log: AllocationLog) -> list[Request]:
        """Return the requests to the allocator that the larger model would make."""
        tokens: list[Token] = []
        born_in: dict[int, int | None] = {}
        for request, fqn in zip(log.requests, log.modules, strict=True):
            block = self.number(fqn)
            if request.bytes is not None:
                born_in[request.key] = block
                tokens.append(Token(block, request.key, allocates=True))
            else:
                tokens.append(Token(block, request.key))
        tokens = _with_blocks_of_frees(tokens, born_in)
        unrolled: list[Request] = []
        for index, _, storage in self.tokens(tokens):
            request = log.requests[index]
            if storage is not None:
                unrolled.append(Request(storage, request.bytes, request.stream))
        return unrolled

    def profile(self, step: StepRecord, longer: Profile) -> Profile:
        """Return the profile of the larger model's step.

        `step` is from the folded model, which has few blocks. `longer` is the profile of a folded
        model with one more block. The difference between the two shows how much each count grows
        per block.

        Raises:
            NotPeriodicError: The two folded models differ in more than the additional block.
        """
        profile = step.profile
        record = self.record(step.record)
        op_counts = tuple(self._rows(profile.op_counts, longer.op_counts))
        return replace(
            profile,
            run=replace(
                profile.run,
                dtype=dtype_of(op_counts) or profile.run.dtype,
                optimized_parameters=self._extrapolated(
                    profile.run.optimized_parameters, longer.run.optimized_parameters
                ),
            ),
            modules=self._modules(profile.modules, longer.modules, record.peak_of_rows()),
            op_counts=op_counts,
            unsupported=tuple(self._rows(profile.unsupported, longer.unsupported)),
            communication=tuple(self._rows(profile.communication, longer.communication)),
            waits=self._waits(profile.waits),
            memory=None if profile.memory is None else record.memory(),
            notes=tuple(self._notes(profile.notes, longer.notes)),
        )

    def check(self, step: StepRecord, longer: StepRecord) -> None:
        """Check that the profile computed from `step` is identical to the real profile in `longer`.

        `step` is from the folded model, which has few blocks. `longer` is from a folded model with
        one more block.

        Raises:
            NotPeriodicError: The profiles differ.
        """
        unrolled = self.profile(step, longer.profile)
        for name in unrolled.__struct_fields__:
            if name != "run" and getattr(unrolled, name) != getattr(longer.profile, name):
                raise NotPeriodicError(f"with one more block, {name} is not as expected")

    def check_requests(self, log: AllocationLog, longer: AllocationLog) -> None:
        """Check that the requests computed from `log` equal the real requests in `longer`.

        These are requests to the allocator. `log` is from the folded model, which has few blocks.
        `longer` is from a folded model with one more block.

        Raises:
            NotPeriodicError: The requests differ.
        """
        if _numbered(self.requests(log)) != _numbered(longer.requests):
            raise NotPeriodicError("the requests to the allocator differ")

    def _rows(self, rows: Sequence[Row], longer: Sequence[Row]) -> Iterator[Row]:
        """Yield the rows of the larger model. A row has the work of one operator in one module.

        `rows` are from the folded model, which has few blocks. `longer` are from a folded model
        with one more block.

        Raises:
            NotPeriodicError: The work of a module outside the blocks depends on the number of
                blocks.
        """
        of_longer = {_key(row): row for row in longer}
        for index, shift in self.order([self.number(row.module) for row in rows]):
            row = rows[index]
            if self.number(row.module) is None:
                other = of_longer.get(_key(row, self._name_in_longer(row.module)))
                if not _is_linear(row) and _counts(row) != _counts(other):
                    raise NotPeriodicError(f"{row} depends on the number of blocks")
                row = self._extrapolated(row, other)
            yield replace(row, module=self.renamed(row.module, shift))

    def _modules(
        self,
        modules: Mapping[str, ModuleProfile],
        longer: Mapping[str, ModuleProfile],
        peaks: Mapping[str, int],
    ) -> dict[str, ModuleProfile]:
        names = list(modules)
        unrolled: dict[str, ModuleProfile] = {}
        for index, shift in self.order([self.number(name) for name in names]):
            name = names[index]
            module = modules[name]
            new_name = self.renamed(name, shift)
            if self.number(name) is None:
                other = longer.get(self._name_in_longer(name))
                if other is not None:
                    # Owners and peaks are not extrapolated.
                    other = replace(other, owner=module.owner, peak_bytes=None)
                module = self._extrapolated(replace(module, peak_bytes=None), other)
            owner = module.owner and self.renamed(module.owner, shift)
            unrolled[new_name] = replace(module, owner=owner, peak_bytes=peaks.get(new_name))
        return unrolled

    def _waits(self, waits: Sequence[ModulePhase]) -> tuple[ModulePhase, ...]:
        found: list[ModulePhase] = []
        for fqn, phase in waits:
            is_repeated = self.number(fqn) == self._repeated
            shifts = range(self._copies + 1) if is_repeated else range(1)
            found += [ModulePhase(self.renamed(fqn, shift), phase) for shift in shifts]
        return tuple(sorted(found))

    def _notes(self, notes: Sequence[Note], longer: Sequence[Note]) -> Iterator[Note]:
        of_longer = {(note.code, note.subject): note for note in longer}
        for note in notes:
            yield self._extrapolated(note, of_longer.get((note.code, note.subject)))

    def _name_in_longer(self, fqn: str) -> str:
        """Return the name of a module outside the equal blocks in the longer folded model.

        The longer model has one more block. If the module is after the blocks in the same
        container, its number is greater by 1 in the longer model. All other names are the same.
        """
        digits = self._digits(fqn)
        if not digits or int(digits) < self._repeated:
            return fqn
        rest = fqn[len(self._prefix) + len(digits) :]
        return f"{self._prefix}{int(digits) + 1}{rest}"

    def _extrapolated(self, value: Any, longer: Any) -> Any:
        """Extrapolate all integers in a value linearly to the larger model.

        `value` is from the folded model, which has few blocks. `longer` is the same value in a
        folded model with one more block. Everything except the integers must be equal in both.
        """
        if type(value) is not type(longer):
            raise NotPeriodicError(f"{value} and {longer}")
        if type(value) is int:
            return value + (longer - value) * self._copies
        if isinstance(value, Struct):
            changed = {}
            for name in value.__struct_fields__:
                if name != "module":
                    changed[name] = self._extrapolated(getattr(value, name), getattr(longer, name))
            return replace(value, **changed)
        if isinstance(value, dict):
            if value.keys() != longer.keys():
                raise NotPeriodicError(f"{value} and {longer}")
            return {name: self._extrapolated(each, longer[name]) for name, each in value.items()}
        if value != longer:
            raise NotPeriodicError(f"{value} and {longer}")
        return value


class _Run(NamedTuple):
    """The indexes of consecutive elements of a sequence that belong to the same block."""

    block: int | None
    items: list[int]


def _runs(blocks: Sequence[int | None]) -> list[_Run]:
    runs: list[_Run] = []
    for index, block in enumerate(blocks):
        if not runs or runs[-1].block != block:
            runs.append(_Run(block, []))
        runs[-1].items.append(index)
    return runs


def _neighbour(runs: Iterable[_Run], block: int) -> int | None:
    """Return the first block in `runs` other than `block`; `None` if there is no other block."""
    for run in runs:
        if run.block is not None and run.block != block:
            return run.block
    return None


def _with_tokens_between_blocks(blocks: Sequence[int | None]) -> list[int | None]:
    """Assign the tokens between two neighbouring blocks to the first of the two blocks.

    These tokens belong to no block, but each copy of a block needs a copy of them. `blocks` has the
    block of each token, and so has the result.
    """
    absorbed = list(blocks)
    runs = _runs(blocks)
    numbers = [run.block for run in runs if run.block is not None]
    ends = {min(numbers, default=0), max(numbers, default=0)}
    for before, run, after in zip(runs, runs[1:], runs[2:], strict=False):
        if run.block is not None or before.block is None or after.block is None:
            continue
        # Between two parts of the first or of the last block, the rest of the model may run.
        is_inside = before.block == after.block and before.block not in ends
        if is_inside or abs(before.block - after.block) == 1:
            for index in run.items:
                absorbed[index] = before.block
    return absorbed


def _places(
    tokens: Sequence[Token], blocks: Sequence[int | None]
) -> tuple[dict[int, Place], dict[Place, int]]:
    """Return the place at which each storage is allocated, and the storage of each place.

    Corresponding storages of two equal blocks have places that differ only in the number of the
    block. So the place of a storage also leads to the corresponding storage of another block.
    """
    place_of: dict[int, Place] = {}
    storage_at: dict[Place, int] = {}
    parts: dict[int | None, int] = {}
    for run in _runs(blocks):
        born: list[int] = []
        for index in run.items:
            storage = tokens[index].storage
            if storage is not None and tokens[index].allocates:
                born.append(storage)
        if not born:
            continue
        part = parts.get(run.block, 0)
        parts[run.block] = part + 1
        for position, storage in enumerate(born):
            place = Place(run.block, part, position)
            place_of[storage] = place
            storage_at[place] = storage
    return place_of, storage_at


def _with_blocks_of_frees(
    tokens: Iterable[Token], born_in: Mapping[int, int | None]
) -> list[Token]:
    """Assign each free to a block, so that each copy of this block repeats the free.

    Usually, this is the block that was running, because a block frees tensors that the same or a
    neighbouring block allocated. But a model may collect one tensor of each block in a list, and
    free the whole list later, outside these blocks. Each of these frees is assigned to the block
    that allocated the tensor.

    Args:
        tokens: The tokens of a step. Each free has the block that was running.
        born_in: The block that allocated each storage, keyed by the number of the storage.
    """
    found: list[Token] = []
    for (is_free, running), group in groupby(tokens, _kind):
        items = list(group)
        if not is_free:
            found += items
            continue
        origins = [born_in[token.storage] for token in items if token.storage is not None]
        if running is None or any(_is_far(origin, running) for origin in origins):
            pairs = zip(items, origins, strict=True)
            items = [token._replace(block=origin) for token, origin in pairs]
        found += items
    return found


def _is_far(origin: int | None, running: int) -> bool:
    """Return whether a block is neither the running block nor one of its two neighbours."""
    return origin is not None and abs(origin - running) > 1


def _kind(token: Token) -> tuple[bool, int | None]:
    """Return whether a token is a free, and its block, to group consecutive tokens by both."""
    return token.storage is not None and not token.allocates, token.block


def _is_linear(row: Any) -> bool:
    """Return whether the work of an operator outside the blocks is linear in the number of blocks.

    This is known only for the operator that unscales all gradients. The work of any other operator
    may depend on the number of blocks in a different way.
    """
    return str(getattr(row, "operator", "")).startswith("_amp_foreach")


def _counts(row: Any) -> list[int]:
    counts = []
    for name in getattr(row, "__struct_fields__", ()):
        value = getattr(row, name)
        if isinstance(value, int):
            counts.append(value)
    return counts


def _key(row: Any, module: str | None = None) -> tuple[Any, ...]:
    """Return a key that is the same for the rows of one operator in two models.

    The key has all fields that are not integers, and `group_size`. If `module` is passed, it
    replaces the name of the row's module.
    """
    if module is None:
        module = row.module
    values = []
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if name != "module" and not isinstance(value, int):
            values.append(value)
    group_size = getattr(row, "group_size", None)
    return (module, group_size, *values)


def _numbered(requests: Iterable[Request]) -> list[Request]:
    """Renumber the allocations in requests from 0, to compare the requests of two models."""
    numbers: dict[int, int] = {}
    numbered = []
    for request in requests:
        number = numbers.setdefault(request.key, len(numbers))
        numbered.append(request._replace(key=number))
    return numbered
