"""The cheapest choice of what the blocks of a chain recompute, within a budget of bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lflops.planning.block_chain import Chain

MOST_STATES = 4096  # partial choices that are followed at once. Of more, one in each of equal steps of bytes is followed.


class _State(NamedTuple):
    """The choices of the first blocks: bytes alive after them, their cost, the changes between neighbours, and the choice before."""

    start: int
    cost: int
    changes: int
    choice: str | None
    before: "_State | None"


def cheapest_choice(chain: Chain, choices: Sequence[str], budget: int) -> tuple[str, ...] | None:
    """The choice of each block with the least cost whose peak is within the budget of bytes; of equal ones that with the fewest changes.

    The bytes of a moment depend on the choices before it by the start alone. So of two partial choices with the same last block, the
    one that has more bytes and costs more is dropped. `None` where no choice is within the budget.
    """
    if chain.fixed > budget:
        return None
    ends = [state for first in choices for state in _ends(chain, choices, first, budget)]
    best = min(ends, key=lambda state: (state.cost, state.changes, state.start), default=None)
    return None if best is None else _choices(best)


def _ends(chain: Chain, choices: Sequence[str], first: str, budget: int) -> list[_State]:
    """The choices of all blocks within the budget that are worth following and begin with this one."""
    states: dict[str | None, list[_State]] = {None: [_State(chain.base, 0, 0, None, None)]}
    settled = chain.settled[first]
    for index, kind in enumerate(chain.kinds):
        following: dict[str | None, list[_State]] = {}
        for choice in choices if index else (first,):
            cost = chain.costs[kind, choice]
            reached = [
                _State(start, state.cost + cost, state.changes + (before not in (None, choice)), choice, state)
                for before, some in states.items()
                for state, start in _within(chain.at(index, before, choice), some, budget, settled)
            ]
            following[choice] = _undominated(reached)
        states = following
    return [state for choice, some in states.items() for state in some if state.start + settled + chain.heads[str(choice)] <= budget]


def lowest_peak(chain: Chain, choices: Sequence[str]) -> int:
    """The least budget that some choice is within."""
    low, high = chain.fixed - 1, min(chain.peak([choice] * len(chain.kinds)) for choice in choices)
    while high - low > 1:
        middle = (low + high) // 2
        if any(_is_within(chain, choices, first, middle) for first in choices):
            high = middle
        else:
            low = middle
    return high


def _is_within(chain: Chain, choices: Sequence[str], first: str, budget: int) -> bool:
    """Whether some choice that begins with this one is within the budget. Without costs, the least start is all that matters."""
    starts: dict[str | None, int] = {None: chain.base}
    settled = chain.settled[first]
    for index in range(len(chain.kinds)):
        following: dict[str | None, int] = {}
        for choice in choices if index else (first,):
            for before, least in starts.items():
                state = _State(least, 0, 0, before, None)
                for _, start in _within(chain.at(index, before, choice), [state], budget, settled):
                    following[choice] = min(start, following.get(choice, start))
        starts = following
    return any(start + settled + chain.heads[str(choice)] <= budget for choice, start in starts.items())


def _within(at: tuple[int, int, int | None], states: Iterable[_State], budget: int, settled: int) -> Iterable[tuple[_State, int]]:
    """The states that may make a choice within the budget, each with the start that follows."""
    grows, forward, backward = at
    for state in states:
        start = state.start + grows
        if state.start + forward <= budget and (backward is None or start + settled + backward <= budget):
            yield state, start


def _undominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:3]):
        if not kept or (state.cost, state.changes) < (kept[-1].cost, kept[-1].changes):
            kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    width = (kept[-1].start - kept[0].start) // MOST_STATES + 1
    return list({(state.start - kept[0].start) // width: state for state in kept}.values())


def _choices(end: _State) -> tuple[str, ...]:
    found: list[str] = []
    state: _State | None = end
    while state is not None and state.choice is not None:
        found.append(state.choice)
        state = state.before
    return tuple(reversed(found))
