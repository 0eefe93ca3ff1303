"""Compute the peak memory of a chain of blocks for every choice of checkpointing.

A few estimates are enough. A block keeps bytes from its forward to its backward, and has a peak in
both. These bytes depend on the checkpointing of the block and of the previous block, because either
block may keep the tensor between them. Each estimate therefore shows one pair of choices for each
pair of neighbours. A result for one block applies to all equal blocks. In this timeline of a step,
each start is the bytes that are alive at that point:

    before | block 0 | block 1 | block 2 | loss | block 2 | block 1 | block 0 | optimizer
           start 0   start 1   start 2   start 3
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from lflops.profile.module_names import ancestry
from lflops.profile.profile import Moment
from lflops.profile.records import Phase


class Key(NamedTuple):
    """The facts that determine the bytes of a block.

    Attributes:
        kind_before: Kind of the previous block, or `None` for the first block.
        kind: Kind of the block. Blocks of one kind run the same operators.
        choice_before: Checkpointing of the previous block, or `None` for the first block.
        choice: Checkpointing of the block.
    """

    kind_before: int | None
    kind: int
    choice_before: str | None
    choice: str


class Reading(Struct, frozen=True, kw_only=True):
    """The bytes of each block in the timeline of one estimate.

    Attributes:
        starts: Bytes alive before the forward of each block, and after the forward of the last
            block.
        forward: Peak in the forward of each block, minus the block's start.
        entered: Bytes alive before the backward of each block, minus the start of the next block;
            `None` for a block without a backward.
        backward: Peak in the backward of each block, minus the bytes alive before that backward.
        head: Peak between the forward and the backward of the blocks, minus the last start.
        fixed: Peak before the first block and after the backward of all blocks.
        kinds: A number for each block. Blocks with the same number ran the same operators, kept the
            same bytes and had the same peaks.
    """

    starts: tuple[int, ...]
    forward: tuple[int, ...]
    entered: tuple[int | None, ...]
    backward: tuple[int, ...]
    head: int
    fixed: int
    kinds: tuple[int, ...]


class Trial(Struct, frozen=True, kw_only=True):
    """The checkpointing of each block in one estimate, and its result.

    Attributes:
        choices: Checkpointing of each block.
        flops: FLOPs that each block recomputed.
        times: Time of the recomputation of each block in femtoseconds; `None` if the chip is
            unknown. They are integers because sums of equal integers are exactly equal.
        reading: Bytes of the blocks.
    """

    choices: tuple[str, ...]
    flops: tuple[int, ...]
    times: tuple[int, ...] | None
    reading: Reading


class Terms(Struct, frozen=True, kw_only=True):
    """The bytes of a block for one `Key`.

    Attributes:
        grows: Bytes alive at the start of the next block, minus the bytes at the start of this
            block.
        forward: Peak in the block's forward, minus the bytes at the start of the block.
        backward: Peak in the block's backward, minus the bytes at the start of the next block;
            `None` without a backward.
    """

    grows: int
    forward: int
    backward: int | None


class Chain(Struct, frozen=True, kw_only=True):
    """The peak of a step as a function of the checkpointing of each block.

    Attributes:
        kinds: Kind of each block, in the order of their forward.
        base: Bytes alive before the first block.
        fixed: Peak outside the blocks.
        offsets: Bytes that are alive before the backward of each block and belong to no block, such
            as the gradients of later blocks.
        terms: The bytes of a block for each key.
        heads: Peak between forward and backward, minus the bytes after the last block's forward.
            The keys are the choices of the last block.
        held_input: Bytes of the first block's input that stay alive after the forward. The keys are
            the choices of the first block. A variable in the model may hold this input during the
            forward, and a block that recomputes holds it longer.
        flops: FLOPs that a block recomputes in addition to those of the first estimate, keyed by
            kind and choice.
        times: Femtoseconds of recomputation in addition to those of the first estimate, keyed by
            kind and choice; empty if the chip is unknown.
    """

    kinds: tuple[int, ...]
    base: int
    fixed: int
    offsets: tuple[int, ...]
    terms: dict[Key, Terms]
    heads: dict[str, int]
    held_input: dict[str, int]
    flops: dict[tuple[int, str], int]
    times: dict[tuple[int, str], int]

    @property
    def costs(self) -> dict[tuple[int, str], int]:
        """The costs to minimize: `times`, or `flops` if the times are unknown."""
        return self.times or self.flops

    def terms_at(self, index: int, before: str | None, choice: str) -> Terms:
        """Return the bytes of the block at an index of the chain."""
        terms = self.terms[key_of(self.kinds, index, before, choice)]
        if terms.backward is None:
            return terms
        backward = self.offsets[index] + terms.backward
        return Terms(grows=terms.grows, forward=terms.forward, backward=backward)

    def peak(self, choices: Sequence[str]) -> int:
        """Return the peak bytes of the step."""
        start = self.base
        highest = self.fixed
        held_input = self.held_input[choices[0]]
        before = None
        for index, choice in enumerate(choices):
            terms = self.terms_at(index, before, choice)
            highest = max(highest, start + terms.forward)
            start += terms.grows
            if terms.backward is not None:
                highest = max(highest, start + held_input + terms.backward)
            before = choice
        return max(highest, start + held_input + self.heads[choices[-1]])

    def spent(self, costs: Mapping[tuple[int, str], int], choices: Sequence[str]) -> int:
        """Add up `flops` or `times` over all blocks."""
        return sum(costs[each] for each in zip(self.kinds, choices, strict=True))


def units_of(timeline: Sequence[Moment], blocks: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the blocks that ran, in the order of their forward.

    Blocks with overlapping forwards are one unit.
    """
    names = list(blocks)
    spans = _spans(timeline, [(block,) for block in names], ("forward",))
    units: list[tuple[str, ...]] = []
    end = 0
    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if units and first < end:
            units[-1] = (*units[-1], names[number])
            end = max(last, end)
        else:
            units.append((names[number],))
            end = last
    return units


def read(
    timeline: Sequence[Moment], units: Sequence[tuple[str, ...]], work: Sequence[int]
) -> Reading:
    """Read the bytes of each block from the timeline of a step.

    Args:
        timeline: All operators of the step.
        units: The blocks, in the order of their forward.
        work: FLOPs of the forward of each unit. Units with different FLOPs are of different kinds.

    Raises:
        ValueError: No block has a backward.
    """
    forward = _spans(timeline, units, ("forward",))
    backward = _spans(timeline, units, ("backward", "recompute"))
    if not backward:
        raise ValueError("no block has a backward")
    numbers = range(len(units))
    begins = [forward[number][0] for number in numbers]
    begins.append(forward[numbers[-1]][1])
    starts = [timeline[begin].live_bytes for begin in begins]
    backward_begins = sorted(first for first, _ in backward.values())
    backward_end = max(last for _, last in backward.values())
    # The backward of a block lasts until the backward of the next one begins.
    until = dict(pairwise([*backward_begins, backward_end]))

    forward_peaks: list[int] = []
    entered: list[int | None] = []
    backward_peaks: list[int] = []
    kinds: list[int] = []
    kind_of_trace: dict[Hashable, int] = {}
    for number in numbers:
        start = starts[number]
        forward_peaks.append(_highest(timeline, begins[number], begins[number + 1]) - start)
        first, last = forward[number]
        forward_trace = tuple(
            (moment.operator, moment.live_bytes - start) for moment in timeline[first:last]
        )
        backward_peak = 0
        backward_trace: tuple[str, ...] = ()
        if number in backward:
            first, last = backward[number]
            live = timeline[first].live_bytes
            entered.append(live - starts[number + 1])
            backward_peak = _highest(timeline, first, until[first]) - live
            # The bytes of equal blocks may differ in backward, where memory that other blocks share
            # is freed. The peaks do not differ.
            backward_trace = tuple(moment.operator for moment in timeline[first:last])
        else:
            entered.append(None)
        backward_peaks.append(backward_peak)
        trace = (work[number], forward_trace, backward_trace, backward_peak)
        kinds.append(kind_of_trace.setdefault(trace, len(kind_of_trace)))

    before = _highest(timeline, 0, begins[0])
    after = _highest(timeline, backward_end, len(timeline))
    return Reading(
        starts=tuple(starts),
        forward=tuple(forward_peaks),
        entered=tuple(entered),
        backward=tuple(backward_peaks),
        head=_highest(timeline, begins[-1], backward_begins[0]) - starts[-1],
        fixed=max(before, after),
        kinds=tuple(kinds),
    )


def keys_of(kinds: Sequence[int], choices: Sequence[str]) -> list[Key]:
    """Return the keys that an estimate with the given choices shows."""
    keys: list[Key] = []
    before = None
    for index, choice in enumerate(choices):
        keys.append(key_of(kinds, index, before, choice))
        before = choice
    return keys


def chain_of(trials: Sequence[Trial]) -> Chain:
    """Combine estimates into a chain.

    The first estimate must recompute nothing.
    """
    first = trials[0]
    plain = first.reading
    chain = Chain(
        kinds=plain.kinds,
        base=plain.starts[0],
        fixed=max(trial.reading.fixed for trial in trials),
        offsets=tuple(each or 0 for each in plain.entered),
        terms={},
        heads={},
        held_input={},
        flops={},
        times={},
    )
    # Trials in which a later block recomputes nothing show the held input. They come last and
    # overwrite the results of other trials.
    for trial in sorted(trials, key=lambda trial: "none" in trial.choices[1:]):
        chain.held_input[trial.choices[0]] = held_input_of(trial, plain) or 0
    for trial in trials:
        _add_trial(chain, trial, first)
    return chain


def _add_trial(chain: Chain, trial: Trial, first: Trial) -> None:
    reading = trial.reading
    held_input = chain.held_input[trial.choices[0]]
    chain.heads.setdefault(trial.choices[-1], reading.head - held_input)
    for index, key in enumerate(keys_of(chain.kinds, trial.choices)):
        entered = reading.entered[index]
        backward = None
        if entered is not None:
            kept = entered - held_input - chain.offsets[index]
            backward = kept + reading.backward[index]
        grows = reading.starts[index + 1] - reading.starts[index]
        terms = Terms(grows=grows, forward=reading.forward[index], backward=backward)
        chain.terms.setdefault(key, terms)
        cost_key = (key.kind, key.choice)
        chain.flops.setdefault(cost_key, trial.flops[index] - first.flops[index])
        if trial.times is not None and first.times is not None:
            chain.times.setdefault(cost_key, trial.times[index] - first.times[index])


def held_input_of(trial: Trial, plain: Reading) -> int | None:
    """Return the bytes that the choice of the first block keeps alive after the forward.

    These bytes are visible at a later block that recomputes nothing, as in `plain`. Returns `None`
    if there is no such block.
    """
    if len(trial.choices) == 1:
        return 0
    for index, choice in enumerate(trial.choices[1:], 1):
        entered = trial.reading.entered[index]
        before = plain.entered[index]
        if choice == "none" and entered is not None and before is not None:
            return entered - before
    return None


def key_of(kinds: Sequence[int], index: int, before: str | None, choice: str) -> Key:
    """Return the key of a block, from its choice and the choice of the previous block."""
    if index == 0:
        return Key(None, kinds[0], None, choice)
    return Key(kinds[index - 1], kinds[index], before, choice)


def unit_numbers(units: Sequence[tuple[str, ...]]) -> Callable[[str], int | None]:
    """Return a function that takes a module's name and returns the number of its unit.

    It returns `None` for a module in no unit.
    """
    numbers = {block: number for number, unit in enumerate(units) for block in unit}

    @cache
    def number_of(module: str) -> int | None:
        for block in ancestry(module):
            if block in numbers:
                return numbers[block]
        return None

    return number_of


def _spans(
    timeline: Sequence[Moment], units: Sequence[tuple[str, ...]], phases: tuple[Phase, ...]
) -> dict[int, tuple[int, int]]:
    """Return the range of indexes of each unit's operators in the given phases.

    A range is the index of the first operator and the index after the last operator.
    """
    number_of = unit_numbers(units)
    spans: dict[int, tuple[int, int]] = {}
    for index, moment in enumerate(timeline):
        if moment.phase not in phases:
            continue
        number = number_of(moment.module)
        if number is not None:
            first, _ = spans.get(number, (index, 0))
            spans[number] = (first, index + 1)
    return spans


def _highest(timeline: Sequence[Moment], begin: int, end: int) -> int:
    return max(
        (moment.highest_bytes or moment.live_bytes for moment in timeline[begin:end]), default=0
    )


# Maximum number of partial choices to keep. If there are more, their bytes are divided into equal
# steps, and one choice per step is kept.
MOST_STATES = 4096


class _State(NamedTuple):
    """Choices of the first blocks.

    Attributes:
        start: Bytes alive after these blocks.
        cost: Cost of recomputing these blocks.
        changes: Number of blocks that have a different choice from the previous block.
        choices: The choice of each block.
    """

    start: int
    cost: int
    changes: int
    choices: tuple[str, ...]


def cheapest_choice(chain: Chain, choices: Sequence[str], budget: int) -> tuple[str, ...] | None:
    """Return the cheapest combination of choices with a peak within a budget of bytes.

    If several are equally cheap, the one with the fewest changes between neighbours is returned.
    Returns `None` if no combination is within the budget.
    """
    # Later bytes depend on earlier choices only through the start. So among partial choices with
    # the same choice for the last block, one with more bytes and a higher cost than another is
    # dropped.
    if chain.fixed > budget:
        return None
    ends: list[_State] = []
    for first in choices:
        ends += _ends(chain, choices, first, budget)
    best = min(ends, key=lambda state: (state.cost, state.changes, state.start), default=None)
    return None if best is None else best.choices


def _ends(
    chain: Chain, choices: Sequence[str], first: str, budget: int, *, free: bool = False
) -> list[_State]:
    """Return the candidates for the choices of all blocks, with `first` for the first block.

    With `free`, all choices have the same cost.
    """
    # The candidates for the blocks so far, keyed by the choice of the last block.
    states: dict[str | None, list[_State]] = {None: [_State(chain.base, 0, 0, ())]}
    for index, kind in enumerate(chain.kinds):
        following: dict[str | None, list[_State]] = {}
        for choice in choices if index else (first,):
            cost = 0 if free else chain.costs[kind, choice]
            reached: list[_State] = []
            for before, some in states.items():
                is_change = not free and before not in (None, choice)
                terms = chain.terms_at(index, before, choice)
                most = budget - _rise(terms, chain.held_input[first])
                for state in some:
                    if state.start <= most:
                        start = state.start + terms.grows
                        changes = state.changes + is_change
                        so_far = (*state.choices, choice)
                        reached.append(_State(start, state.cost + cost, changes, so_far))
            following[choice] = _undominated(reached)
        states = following
    fitting: list[_State] = []
    for some in states.values():
        for state in some:
            head = chain.held_input[first] + chain.heads[state.choices[-1]]
            if state.start + head <= budget:
                fitting.append(state)
    return fitting


def _rise(terms: Terms, held_input: int) -> int:
    """Return the larger peak of a block's forward and backward, above its start."""
    if terms.backward is None:
        return terms.forward
    return max(terms.forward, terms.grows + held_input + terms.backward)


def lowest_peak(chain: Chain, choices: Sequence[str]) -> int:
    """Return the smallest budget that any choice fits into."""
    uniform = min(chain.peak([choice] * len(chain.kinds)) for choice in choices)

    def is_enough(budget: int) -> bool:
        return any(_ends(chain, choices, first, budget, free=True) for first in choices)

    budgets = range(chain.fixed, uniform)
    return chain.fixed + bisect_left(budgets, x=True, key=is_enough)


def _undominated(states: list[_State]) -> list[_State]:
    """Drop states that have more bytes than another state but do not cost less."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:3]):
        if not kept or (state.cost, state.changes) < (kept[-1].cost, kept[-1].changes):
            kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    lowest = kept[0].start
    width = (kept[-1].start - lowest) // MOST_STATES + 1
    last_of_step = {(state.start - lowest) // width: state for state in kept}
    return list(last_of_step.values())
