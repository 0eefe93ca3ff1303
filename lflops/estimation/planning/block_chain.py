"""The peak of a chain of blocks under every choice of what they recompute, from a few estimates.

A block keeps bytes from its forward to its backward, and has a highest point in each of the two.
How many bytes depends on what the block recomputes, and on what the block before it does, because
the tensor between them may be kept by either. So an estimate shows one pair of choices for each two
neighbours, and equal blocks share what any of them shows.

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

Key = tuple[int | None, int, str | None, str]
"""The kinds of a block's predecessor and of the block, then their choices;

`None` before the first block.
"""


class Reading(Struct, frozen=True, kw_only=True):
    """What one estimate's timeline shows of each block. All are bytes."""

    starts: tuple[
        int, ...
        # alive before the forward of each block, and after that of the last one
    ]
    # the most alive in the forward of each block, beyond its start
    forward: tuple[int, ...]
    entered: tuple[
        int | None, ...
        # alive before each block's backward, beyond the next start; `None` without a backward
    ]
    backward: tuple[
        int, ...
        # the most alive in the backward of each block, beyond what was alive before it
    ]
    # the most alive between forward and backward of the blocks, beyond the last start
    head: int
    # the most alive before the first block and after the backward of all
    fixed: int
    kinds: tuple[
        int, ...
        # blocks with the same number ran the same operators, kept as many bytes and had the same
        # highest points
    ]


class Trial(Struct, frozen=True, kw_only=True):
    """One estimate: the choice of each block, the FLOPs and the time of what it recomputed, and what the timeline shows.

    Times are in femtoseconds, so that equal sums are equal; `None` where no chip is known.
    """

    choices: tuple[str, ...]
    flops: tuple[int, ...]
    times: tuple[int, ...] | None
    reading: Reading


class Terms(Struct, frozen=True, kw_only=True):
    """Bytes of a block under one key.

    What it adds to the next start, and its highest points beyond its start and the next one.
    """

    grows: int
    forward: int
    backward: int | None


class Chain(Struct, frozen=True, kw_only=True):
    """The peak of a step as a function of the choice of each block.

    A variable of the model may hold the first block's input until the end of forward. If the block
    recomputes, it holds the input further: what the first block's choice so settles is alive from
    then on beyond the starts.
    """

    # of the blocks, in their order
    kinds: tuple[int, ...]
    # bytes alive before the first block
    base: int
    # the most alive outside of the blocks
    fixed: int
    offsets: tuple[
        int, ...
        # what is alive before the backward of each block besides the blocks' own, such as gradients of
        # the later ones
    ]
    terms: dict[Key, Terms]
    heads: dict[
        str, int
        # the most alive between forward and backward, beyond the last start, by the choice of the last
        # block
    ]
    # by the choice of the first block, in bytes
    settled: dict[str, int]
    flops: dict[
        tuple[int, str], int
        # recomputed beyond what the first estimate does, by kind and choice
    ]
    # the same in femtoseconds; empty where no chip is known
    times: dict[tuple[int, str], int]

    @property
    def costs(self) -> dict[tuple[int, str], int]:
        """What is minimized: times, or FLOPs where they are not known."""
        return self.times or self.flops

    def at(self, index: int, before: str | None, choice: str) -> tuple[int, int, int | None]:
        """What a block adds, its highest point in forward beyond its start, and that in backward beyond the next start as settled."""
        terms = self.terms[key_of(self.kinds, index, before, choice)]
        return (
            terms.grows,
            terms.forward,
            None if terms.backward is None else self.offsets[index] + terms.backward,
        )

    def peak(self, choices: Sequence[str]) -> int:
        """The most bytes alive in the step."""
        start, highest, before = self.base, self.fixed, None
        settled = self.settled[choices[0]]
        for index, choice in enumerate(choices):
            grows, forward, backward = self.at(index, before, choice)
            highest = max(highest, start + forward)
            start += grows
            highest = max(highest, start + settled + backward) if backward is not None else highest
            before = choice
        return max(highest, start + settled + self.heads[choices[-1]])

    def spent(self, costs: Mapping[tuple[int, str], int], choices: Sequence[str]) -> int:
        """The sum over all blocks of one of the two costs."""
        return sum(costs[each] for each in zip(self.kinds, choices, strict=True))


def units_of(timeline: Sequence[Moment], blocks: Iterable[str]) -> list[tuple[str, ...]]:
    """Blocks in the order of their forward.

    Those whose forwards overlap are one unit; those that did not run are left out.
    """
    names = list(blocks)
    spans = _spans(timeline, [(block,) for block in names], ("forward",))
    units: list[tuple[tuple[str, ...], int]] = []
    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        block = names[number]
        if units and first < units[-1][1]:
            units[-1] = ((*units[-1][0], block), max(last, units[-1][1]))
        else:
            units.append(((block,), last))
    return [unit for unit, _ in units]


def read(
    timeline: Sequence[Moment], units: Sequence[tuple[str, ...]], work: Sequence[int]
) -> Reading:
    """What the timeline of a step shows of blocks, which are in the order of their forward.

    A `ValueError` where none has a backward.
    """
    # `work` has the FLOPs of each forward: blocks that differ in them are of different kinds.
    forward, backward = (
        _spans(timeline, units, phases) for phases in (("forward",), ("backward", "recompute"))
    )
    ahead = [forward[number] for number in range(len(units))]
    behind = [backward.get(number) for number in range(len(units))]
    if not backward:
        raise ValueError("no block has a backward")
    end = ahead[-1][1]
    begins = [*(first for first, _ in ahead), end]
    starts = [timeline[begin].live_bytes for begin in begins]
    turns = sorted(first for first, _ in backward.values())
    after = max(last for _, last in backward.values())
    until = dict(pairwise([*turns, after]))
    entered = [None if span is None else timeline[span[0]].live_bytes for span in behind]
    most = tuple(
        0
        if span is None
        else _highest(timeline, span[0], until[span[0]]) - timeline[span[0]].live_bytes
        for span in behind
    )
    traces = []
    for flops, (first, last), turn, beyond in zip(work, ahead, behind, most, strict=True):
        forward_of_block = tuple(
            (each.operator, each.live_bytes - timeline[first].live_bytes)
            for each in timeline[first:last]
        )
        # What others share may be freed in a backward: bytes of equal blocks differ, their highest
        # point does not.
        backward_of_block = (
            () if turn is None else tuple(each.operator for each in timeline[slice(*turn)])
        )
        traces.append((flops, forward_of_block, backward_of_block, beyond))
    numbers: dict[Hashable, int] = {}
    return Reading(
        starts=tuple(starts),
        forward=tuple(
            _highest(timeline, *span) - start
            for span, start in zip(pairwise(begins), starts, strict=False)
        ),
        entered=tuple(
            None if live is None else live - start
            for live, start in zip(entered, starts[1:], strict=True)
        ),
        backward=most,
        head=_highest(timeline, end, turns[0]) - starts[-1],
        fixed=max(_highest(timeline, 0, begins[0]), _highest(timeline, after, len(timeline))),
        kinds=tuple(numbers.setdefault(trace, len(numbers)) for trace in traces),
    )


def keys_of(kinds: Sequence[int], choices: Sequence[str]) -> list[Key]:
    """The keys that an estimate with these choices shows."""
    return [
        key_of(kinds, index, choices[index - 1] if index else None, choice)
        for index, choice in enumerate(choices)
    ]


def chain_of(trials: Sequence[Trial]) -> Chain:
    """The chain of some estimates, the first of which recomputes nothing."""
    plain = trials[0].reading
    chain = Chain(
        kinds=plain.kinds,
        base=plain.starts[0],
        fixed=max(trial.reading.fixed for trial in trials),
        offsets=tuple(each or 0 for each in plain.entered),
        terms={},
        heads={},
        settled={
            trial.choices[0]: settled_by(trial, plain) or 0
            for trial in sorted(trials, key=lambda trial: "none" in trial.choices[1:])
        },
        flops={},
        times={},
    )
    for trial in trials:
        shown = trial.reading
        settled = chain.settled[trial.choices[0]]
        chain.heads.setdefault(trial.choices[-1], shown.head - settled)
        for index, key in enumerate(keys_of(plain.kinds, trial.choices)):
            entered = shown.entered[index]
            backward = (
                None
                if entered is None
                else entered - settled - chain.offsets[index] + shown.backward[index]
            )
            grows = shown.starts[index + 1] - shown.starts[index]
            chain.terms.setdefault(
                key, Terms(grows=grows, forward=shown.forward[index], backward=backward)
            )
            which = (plain.kinds[index], trial.choices[index])
            chain.flops.setdefault(which, trial.flops[index] - trials[0].flops[index])
            if trial.times is not None and trials[0].times is not None:
                chain.times.setdefault(which, trial.times[index] - trials[0].times[index])
    return chain


def settled_by(trial: Trial, plain: Reading) -> int | None:
    """What the first block's choice adds from the end of forward on.

    Seen at a later block that recomputes nothing, as in `plain`.
    """
    if len(trial.choices) == 1:
        return 0
    for choice, entered, before in list(
        zip(trial.choices, trial.reading.entered, plain.entered, strict=True)
    )[1:]:
        if choice == "none" and entered is not None and before is not None:
            return entered - before
    return None


def key_of(kinds: Sequence[int], index: int, before: str | None, choice: str) -> Key:
    """The key of the block at this place, with its choice and that of the block before it."""
    return (kinds[index - 1] if index else None, kinds[index], before if index else None, choice)


def unit_numbers(units: Sequence[tuple[str, ...]]) -> Callable[[str], int | None]:
    """From a module to the number of the unit that it is in."""
    numbers = {block: number for number, unit in enumerate(units) for block in unit}
    return cache(
        lambda module: next(
            (numbers[above] for above in ancestry(module) if above in numbers), None
        )
    )


def _spans(
    timeline: Sequence[Moment], units: Sequence[tuple[str, ...]], phases: tuple[Phase, ...]
) -> dict[int, tuple[int, int]]:
    """The first operator of each unit in some phases, and the one after its last."""
    number_of = unit_numbers(units)
    spans: dict[int, tuple[int, int]] = {}
    for index, moment in enumerate(timeline):
        number = number_of(moment.module) if moment.phase in phases else None
        if number is not None:
            spans[number] = (spans.get(number, (index, 0))[0], index + 1)
    return spans


def _highest(timeline: Sequence[Moment], begin: int, end: int) -> int:
    return max(
        (moment.highest_bytes or moment.live_bytes for moment in timeline[begin:end]), default=0
    )


# partial choices that are followed at once. Of more, one in each of equal steps of bytes is
# followed.
MOST_STATES = 4096


class _State(NamedTuple):
    """Choices of the first blocks.

    Bytes alive after them, their cost, and the changes between neighbours.
    """

    start: int
    cost: int
    changes: int
    choices: tuple[str, ...]


def cheapest_choice(chain: Chain, choices: Sequence[str], budget: int) -> tuple[str, ...] | None:
    """The choice of each block with the least cost whose peak is within the budget of bytes.

    Of equal ones that with the fewest changes.
    """
    # The bytes of a moment depend on the choices before it by the start alone. So of two partial
    # choices with the same last block, the one that has more bytes and costs more is dropped.
    # `None` where no choice is within the budget.
    if chain.fixed > budget:
        return None
    ends = [state for first in choices for state in _ends(chain, choices, first, budget)]
    best = min(ends, key=lambda state: (state.cost, state.changes, state.start), default=None)
    return None if best is None else best.choices


def _ends(
    chain: Chain, choices: Sequence[str], first: str, budget: int, *, free: bool = False
) -> list[_State]:
    """The choices of all blocks within the budget that are worth following and begin with this one.

    If `free`, all cost the same.
    """
    states: dict[str | None, list[_State]] = {None: [_State(chain.base, 0, 0, ())]}
    settled = chain.settled[first]
    for index, kind in enumerate(chain.kinds):
        following: dict[str | None, list[_State]] = {}
        for choice in choices if index else (first,):
            cost = 0 if free else chain.costs[kind, choice]
            reached: list[_State] = []
            for before, some in states.items():
                grows, forward, backward = chain.at(index, before, choice)
                most = budget - max(
                    forward, forward if backward is None else grows + settled + backward
                )
                changed = not free and before not in (None, choice)
                fitting = (state for state in some if state.start <= most)
                reached += (
                    _State(
                        each.start + grows,
                        each.cost + cost,
                        each.changes + changed,
                        (*each.choices, choice),
                    )
                    for each in fitting
                )
            following[choice] = _undominated(reached)
        states = following
    return [
        state
        for some in states.values()
        for state in some
        if state.start + settled + chain.heads[state.choices[-1]] <= budget
    ]


def lowest_peak(chain: Chain, choices: Sequence[str]) -> int:
    """The least budget that some choice is within."""
    budgets = range(chain.fixed, min(chain.peak([choice] * len(chain.kinds)) for choice in choices))
    return chain.fixed + bisect_left(
        budgets,
        x=True,
        key=lambda budget: any(
            _ends(chain, choices, first, budget, free=True) for first in choices
        ),
    )


def _undominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:3]):
        if not kept or (state.cost, state.changes) < (kept[-1].cost, kept[-1].changes):
            kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    width = (kept[-1].start - kept[0].start) // MOST_STATES + 1
    return list({(state.start - kept[0].start) // width: state for state in kept}.values())
