"""Compute the peak memory of a chain of blocks for any checkpointing of each block.

A choice is the checkpointing policy of one block. A few estimates are enough to compute the peak
for all combinations of choices, because only two choices determine the bytes of a block: the choice
of the block and the choice of the previous block (either block may keep the tensor between them).
So the estimates only need to contain each pair of choices for each pair of neighbouring blocks.
Blocks of the same kind run the same operators, so a result for one of them is valid for all. A unit
is a group of blocks with overlapping forwards; the group is treated as one block.

The bytes of a block are three numbers: the bytes that it keeps from its forward to its backward,
the peak in its forward, and the peak in its backward. In this timeline of a step, the `start` of a
block is the number of bytes that are alive before its forward:

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
    """The kinds and policies of a block and its previous block, which determine the block's bytes.

    Attributes:
        kind_before: Kind of the previous block, or `None` for the first block.
        kind: Kind of the block. Blocks of the same kind run the same operators.
        choice_before: Checkpointing policy of the previous block, or `None` for the first block.
        choice: Checkpointing policy of the block.
    """

    kind_before: int | None
    kind: int
    choice_before: str | None
    choice: str


class Reading(Struct, frozen=True, kw_only=True):
    """The bytes of all blocks, read from the memory timeline of one estimate.

    Most attributes have one number for each block. The start of a block is the number of bytes that
    are alive when its forward begins.

    Attributes:
        starts: The start of each block, and the bytes alive after the forward of the last block.
        forward: Peak in the forward of each block, minus the block's start.
        entered: Bytes alive before the backward of each block, minus the start of the next block.
            For a block without a backward, this is `None`.
        backward: Peak in the backward of each block, minus the bytes alive before that backward.
        head: Peak between the forward of the last block and the first backward of a block, minus
            the last number in `starts`. The loss runs in this part of the step.
        fixed: Peak outside the blocks: before the first block, and after the backward of all
            blocks.
        kinds: The kind of each block, as a number. Blocks of the same kind ran the same operators,
            kept the same bytes and had the same peaks.
    """

    starts: tuple[int, ...]
    forward: tuple[int, ...]
    entered: tuple[int | None, ...]
    backward: tuple[int, ...]
    head: int
    fixed: int
    kinds: tuple[int, ...]


class Trial(Struct, frozen=True, kw_only=True):
    """The checkpointing of each block in one estimate, and the results of the estimate.

    Attributes:
        choices: Checkpointing policy of each block.
        flops: FLOPs that each block recomputed.
        times: Least time of the recomputation of each block, in femtoseconds; `None` if the chip is
            unknown. The times are integers, so that equal sets of blocks have exactly equal sums.
        reading: The memory of the blocks in bytes, as read from the estimate.
    """

    choices: tuple[str, ...]
    flops: tuple[int, ...]
    times: tuple[int, ...] | None
    reading: Reading


class Terms(Struct, frozen=True, kw_only=True):
    """The bytes of a block in the situation that a `Key` describes.

    Each number is relative to the bytes that are alive before the forward of the block or of the
    next block.

    Attributes:
        grows: Bytes alive at the start of the next block, minus the bytes at the start of this
            block. The block keeps these bytes for its backward.
        forward: Peak in the block's forward, minus the bytes at the start of the block.
        backward: Peak in the block's backward, minus the bytes at the start of the next block. In
            `Chain.terms`, the bytes in `Chain.offsets` and `Chain.held_input` are subtracted as
            well. `None` for a block without a backward.
    """

    grows: int
    forward: int
    backward: int | None


class Chain(Struct, frozen=True, kw_only=True):
    """The bytes and costs of all blocks, to compute the peak memory for any checkpointing.

    Attributes:
        kinds: Kind of each block, in the order in which their forwards run.
        base: Bytes alive before the first block.
        fixed: Peak outside the blocks, which does not depend on the checkpointing.
        offsets: For each block, the bytes that are alive before its backward in addition to the
            bytes that blocks keep for backward, such as the gradients of later blocks.
        terms: The bytes of a block, keyed by the kinds and choices of the block and the previous
            block.
        heads: Peak between the forward and the backward of the blocks, minus the bytes after the
            forward of the last block, keyed by the choice of the last block. The output layer and
            the loss run in this part of the step.
        held_input: Bytes of the first block's input that stay alive after the forward, keyed by the
            choice of the first block. During the forward, a variable of the model may keep this
            input alive. If the first block recomputes, it keeps its input alive until its backward.
        flops: FLOPs that a block recomputes because of its choice, keyed by kind and choice. FLOPs
            that the model recomputes in any case are not included.
        times: The least time of the recomputation in femtoseconds, keyed by kind and choice; empty
            if the chip is unknown.
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
        """The costs of recomputation that the search minimizes, keyed by kind and choice.

        The costs are `times`, or `flops` if the times are unknown.
        """
        return self.times or self.flops

    def terms_at(self, index: int, before: str | None, choice: str) -> Terms:
        """Return the bytes of a block for the policy `choice`.

        `index` is the position of the block, and `before` is the policy of the previous block.
        """
        terms = self.terms[key_of(self.kinds, index, before, choice)]
        if terms.backward is None:
            return terms
        backward = self.offsets[index] + terms.backward
        return Terms(grows=terms.grows, forward=terms.forward, backward=backward)

    def peak(self, choices: Sequence[str]) -> int:
        """Return the peak bytes of a step. `choices` has the checkpointing policy of each block."""
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
        """Return the total cost of recomputation. `choices` has the policy of each block.

        `costs` is the attribute `flops` or `times`.
        """
        return sum(costs[each] for each in zip(self.kinds, choices, strict=True))


def units_of(timeline: Sequence[Moment], blocks: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the blocks that ran, divided into groups called units, in the order of their forward.

    Most units are a single block. Blocks with overlapping forwards form one unit, because the
    timeline does not show which of these blocks keeps a tensor. All blocks of a unit get the same
    checkpointing.
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
    """Read the bytes of each block from the memory timeline of a step.

    Args:
        timeline: The memory at all operators of the step.
        units: Groups of blocks from `units_of`, in the order of their forward. Each unit is treated
            as one block.
        work: FLOPs of the forward of each unit. Units with different FLOPs have different kinds.

    Raises:
        ValueError: No block runs in backward.
    """
    forward = _spans(timeline, units, ("forward",))
    backward = _spans(timeline, units, ("backward", "recompute"))
    if not backward:
        raise ValueError("no block runs in backward")
    numbers = range(len(units))
    begins = [forward[number][0] for number in numbers]
    begins.append(forward[numbers[-1]][1])
    starts = [timeline[begin].live_bytes for begin in begins]
    backward_begins = sorted(first for first, _ in backward.values())
    backward_end = max(last for _, last in backward.values())
    # The backward of a block lasts until the backward of the next block begins.
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
        entered_bytes = None
        backward_peak = 0
        backward_trace: tuple[str, ...] = ()
        if number in backward:
            first, last = backward[number]
            live = timeline[first].live_bytes
            entered_bytes = live - starts[number + 1]
            backward_peak = _highest(timeline, first, until[first]) - live
            # In backward, the live bytes of equal blocks may differ, because memory that blocks
            # share is freed. Therefore only the operators and the peaks are compared.
            backward_trace = tuple(moment.operator for moment in timeline[first:last])
        entered.append(entered_bytes)
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
    """Return the `Key` of each block in an estimate with the given checkpointing policies.

    `kinds` has the kind of each block, and `choices` has the policy of each block.
    """
    keys: list[Key] = []
    before = None
    for index, choice in enumerate(choices):
        keys.append(key_of(kinds, index, before, choice))
        before = choice
    return keys


def chain_of(trials: Sequence[Trial]) -> Chain:
    """Combine the results of several estimates with different checkpointing into a chain.

    The first estimate must be without recomputation.
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
    # `held_input` is known only from trials in which a block after the first recomputes nothing.
    # These trials come last, so they overwrite the results of other trials.
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
    """Return the bytes that stay alive after the forward only because the first block recomputes.

    They are the bytes of the first block's input (see `Chain.held_input`). To find them, the bytes
    alive before the backward of a later block are compared with `plain`, an estimate without
    checkpointing. The later block must not recompute. If all later blocks recompute, the result is
    `None`.
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
    """Return the `Key` of a block: the kinds and policies of the block and of the previous block.

    `kinds` has the kinds of all blocks, and `index` is the position of the block. `choice` is the
    policy of the block. `before` is the policy of the previous block, and is ignored for the first
    block.
    """
    if index == 0:
        return Key(None, kinds[0], None, choice)
    return Key(kinds[index - 1], kinds[index], before, choice)


def unit_numbers(units: Sequence[tuple[str, ...]]) -> Callable[[str], int | None]:
    """Return a function that converts a module's name to the index of the module's unit.

    A unit is a group of blocks. The function returns `None` for a module outside all units.
    """
    numbers: dict[str, int] = {}
    for number, unit in enumerate(units):
        numbers |= dict.fromkeys(unit, number)

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
    """Return the range of the timeline in which each unit (group of blocks) runs in some phases.

    The keys are the positions of the units. A range consists of the index of the first operator and
    the index after the last operator. Units without operators in these phases are left out.
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
    peaks = [moment.highest_bytes or moment.live_bytes for moment in timeline[begin:end]]
    return max(peaks, default=0)


# Maximum number of candidates to keep. If there are more, the range of their bytes is divided into
# equal steps, and one candidate per step is kept.
MOST_STATES = 4096


class _State(NamedTuple):
    """A candidate of the search: the policies of the first blocks of the chain.

    Attributes:
        start: Bytes alive after the forward of these blocks.
        cost: Cost of the recomputation in these blocks.
        changes: Number of blocks whose choice differs from the choice of the previous block.
        choices: The choice of each of these blocks.
    """

    start: int
    cost: int
    changes: int
    choices: tuple[str, ...]


def cheapest_choice(chain: Chain, choices: Sequence[str], budget: int) -> tuple[str, ...] | None:
    """Return the cheapest combination of policies that keeps the peak within a budget of bytes.

    If several combinations of policies are equally cheap, the combination with the fewest changes
    between neighbouring blocks is returned. Returns `None` if no combination is within the budget.

    Args:
        chain: The bytes and costs of the blocks.
        choices: The policies that a block can have.
        budget: The maximum peak in bytes.
    """
    # A candidate has policies for the first blocks. Its effect on later blocks depends only on the
    # bytes after these blocks and on the policy of the last of them. So if two candidates have the
    # same last policy, a candidate with more bytes and no lower cost is dropped.
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
    """Return the combinations of policies that keep the peak within the budget.

    In all combinations, the first block has the policy `first`. A combination is left out if
    another combination needs fewer bytes and does not cost more. With `free`, the cost of
    recomputation is treated as 0, so only the bytes matter.
    """
    # The candidates for the blocks so far, keyed by the policy of the last block.
    states: dict[str | None, list[_State]] = {None: [_State(chain.base, 0, 0, ())]}
    for index, kind in enumerate(chain.kinds):
        following: dict[str | None, list[_State]] = {}
        policies = choices if index else [first]
        for choice in policies:
            cost = 0 if free else chain.costs[kind, choice]
            reached: list[_State] = []
            for before, some in states.items():
                is_change = not free and before not in (None, choice)
                terms = chain.terms_at(index, before, choice)
                highest_start = budget - _rise(terms, chain.held_input[first])
                for state in some:
                    if state.start <= highest_start:
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
    """Return the higher of a block's peaks in forward and in backward.

    The peak is relative to the bytes that are alive before the forward of the block.
    """
    if terms.backward is None:
        return terms.forward
    return max(terms.forward, terms.grows + held_input + terms.backward)


def lowest_peak(chain: Chain, choices: Sequence[str]) -> int:
    """Return the lowest peak that the blocks can reach with any combination of policies."""
    uniform = min(chain.peak([choice] * len(chain.kinds)) for choice in choices)

    def is_enough(budget: int) -> bool:
        return any(_ends(chain, choices, first, budget, free=True) for first in choices)

    budgets = range(chain.fixed, uniform)
    return chain.fixed + bisect_left(budgets, x=True, key=is_enough)


def _undominated(states: list[_State]) -> list[_State]:
    """Drop the candidates that need more bytes than another candidate and do not cost less.

    If more than `MOST_STATES` candidates are left, some candidates with nearly the same bytes are
    dropped as well.
    """
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
