"""Which modules hold a snapshot's memory.

A step's allocations, matched by size and order with the operators of a profile of that run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import nlargest
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct

from lflops import units
from lflops.errors import ProfileError
from lflops.memory.snapshots.holders import births_in, changes, peak_place, phase_of
from lflops.memory.snapshots.read import Snapshot
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import Phase
from lflops.profile.series import grouped

# allocations in a row that may be one operator's: attention has its result, sums and two numbers of
# its dropout
MOST_OUTPUTS = 4
# that are matched, those which allocate the most
MOST_OPERATORS = 2_000
LEAST_SHARE = (
    # of the step's bytes that have to match: less is another model, batch or precision
    0.5
)

EARLIER, OPTIMIZER, UNMATCHED = "before this step", "the optimizer", "no operator of the profile"


class MemoryByModule(Struct, frozen=True, kw_only=True):
    """What modules hold in the step that is explained.

    `moments` is when each phase has the most alive, and last the peak or the failure. Each has the
    bytes by module and the phase that made them, as `layers.*.mlp, made in forward`; what no module
    made has `EARLIER`, `OPTIMIZER` or `UNMATCHED`.
    """

    # of the bytes that forward and backward allocate, those with an operator of the profile
    matched_share: float
    moments: dict[str, dict[str, int]]

    def lines(self, most: int) -> Iterator[str]:
        """A table with a row for each module and phase, those with the most bytes at the last moment first."""
        yield f"by module of the profile ({units.percent(self.matched_share)} of what forward and backward allocate is matched)"
        yield f"  {''.join(f'{moment:>14}' for moment in self.moments)}"
        rows = {
            name: [held.get(name, 0) for held in self.moments.values()]
            for held in self.moments.values()
            for name in held
        }
        for name, row in nlargest(most, rows.items(), key=lambda item: item[1][::-1]):
            yield f"  {''.join(f'{units.size(nbytes):>14}' for nbytes in row)}  {name}"


class _Operator(NamedTuple):
    in_backward: bool
    # that it allocates
    bytes: int
    module: str
    phase: Phase


def memory_by_module(snapshot: Snapshot, profile: Profile) -> MemoryByModule:
    """Name the modules by a profile of the same run; a `ProfileError` says why it cannot be one."""
    at, made = (
        peak_place(snapshot),
        [each for each in births_in(snapshot.trace) if each.entry.action == "alloc"],
    )
    step = max((each.passes for each in made if each.place < at), default=0)
    if profile.memory is None or not step:
        raise ProfileError(
            "the profile has no memory"
            if step
            else "the snapshot has no forward pass, with stacks, before its peak"
        )
    operators, patterns = tuple(_operators(profile.memory.timeline)), profile.patterns()
    names: dict[int, str] = {}
    # in which each allocation was made, where it is known
    phases: dict[int, str] = {}
    for passes, births in grouped(
        (each for each in made if each.passes <= step), lambda each: each.passes
    ).items():
        optimizing = {each.place for each in births if phase_of(each.entry.stack) == "optimizer"}
        names |= {
            each.place: OPTIMIZER
            if each.place in optimizing
            else UNMATCHED
            if passes == step
            else EARLIER
            for each in births
        }
        phases |= dict.fromkeys(optimizing, "optimizer")
        rest = [each for each in births if each.place not in optimizing]
        sizes = tuple((phase_of(each.entry.stack) == "backward", each.entry.size) for each in rest)
        for index, operator in _aligned(sizes, operators) if passes else ():
            module = patterns.get(operator.module, operator.module) or "the model itself"
            names[rest[index].place] = f"{module}, made in {operator.phase}"
            phases[rest[index].place] = (
                "backward" if operator.phase == "recompute" else operator.phase
            )
    of_step = [each for each in made if each.passes == step and names[each.place] != OPTIMIZER]
    matched = sum(each.entry.size for each in of_step if each.place in phases)
    share = matched / max(sum(each.entry.size for each in of_step), 1)
    if share < LEAST_SHARE:
        raise ProfileError(
            f"the profile matches {units.percent(share)} of the step at the peak: is it of this model, batch and precision?"
        )
    return MemoryByModule(
        matched_share=share, moments=_moments(snapshot, at, names, phases, of_step[0].place)
    )


def _moments(
    snapshot: Snapshot, at: int, names: dict[int, str], phases: dict[int, str], begin: int
) -> dict[str, dict[str, int]]:
    """Bytes by name when each phase of the step that begins there has the most, and at the moment to explain."""
    live: Counter[str] = Counter()
    explained, phase = None, ""
    moments: dict[str, Counter[str]] = {}
    for place, name, nbytes in changes(
        snapshot, lambda *_: EARLIER, lambda place, _: names.get(place, "")
    ):
        explained = live.copy() if explained is None and place >= at else explained
        if name == "":
            # the next step has begun
            break
        live[name or UNMATCHED] += nbytes
        phase = phases.get(place, phase)
        if (
            nbytes > 0
            and place >= begin
            and phase
            and live.total() > moments.get(phase, Counter()).total()
        ):
            moments[phase] = live.copy()
    ran_out = at < len(snapshot.trace) and snapshot.trace[at].action == "oom"
    moments["out of memory" if ran_out else "peak"] = live if explained is None else explained
    return {
        moment: {name: nbytes for name, nbytes in held.items() if nbytes}
        for moment, held in moments.items()
    }


def _operators(timeline: Sequence[Moment]) -> Iterator[_Operator]:
    """What allocates in the profile's step, in order.

    Of a long step the timeline has only a part of the operators.
    """
    for moment, following in zip_longest(timeline, [each.index for each in timeline[1:]]):
        nbytes = (moment.highest_bytes or 0) - moment.live_bytes
        if following in (None, moment.index + 1) and moment.phase != "optimizer" and nbytes > 0:
            yield _Operator(moment.phase == "backward", nbytes, moment.module, moment.phase)


@cache
def _aligned(
    made: tuple[tuple[bool, int], ...], operators: tuple[_Operator, ...]
) -> list[tuple[int, _Operator]]:
    """The pairs of an allocation, by its place, and its operator that keep both orders and match the most bytes."""
    least = min(nlargest(MOST_OPERATORS, (each.bytes for each in operators)), default=0)
    known = [each for each in operators if each.bytes >= least]
    wanted = {each[:2] for each in known}
    groups: list[dict[tuple[bool, int], int]] = []
    for index, (side, _) in enumerate(made, 1):
        sums = {
            (side, sum(size for _, size in made[index - count : index])): count
            for count in range(min(MOST_OUTPUTS, index), 0, -1)
        }
        groups.append({key: count for key, count in sums.items() if key in wanted})
    best = [[0] * (len(known) + 1)]
    for index, group in enumerate(groups, 1):
        row = above = best[-1]
        if group:
            row = [0]
            for column, each in enumerate(known, 1):
                count = group.get(each[:2])
                with_it = 0 if count is None else best[index - count][column - 1] + each.bytes
                row.append(max(row[-1], above[column], with_it))
        best.append(row)
    pairs: list[tuple[int, _Operator]] = []
    index, column = len(made), len(known)
    while index and column:
        if best[index][column] == best[index][column - 1]:
            column -= 1
        elif best[index][column] == best[index - 1][column]:
            index -= 1
        else:
            each = known[column - 1]
            count = groups[index - 1][each[:2]]
            pairs += [(place, each) for place in range(index - count, index)]
            index, column = index - count, column - 1
    return pairs
