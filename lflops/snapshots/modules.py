"""Which modules hold a snapshot's memory: a step's allocations, matched by size and order with the operators of a profile of that run."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from lflops import units
from lflops.errors import ProfileError
from lflops.profile.model import Profile
from lflops.profile.records import Phase
from lflops.snapshots.holders import FREED, alive_before, is_backward, is_forward, is_optimizer, numbered, peak_place
from lflops.snapshots.read import Snapshot, Stack

MOST_OUTPUTS = 4  # allocations in a row that may be one operator's: attention has its result, sums and two numbers of its dropout
MOST_PAIRS = 10_000_000  # of an allocation and an operator that are compared; of more the smallest are left out
LEAST_SHARE = 0.5  # of the step's bytes that have to match: less is another model, batch or precision

EARLIER, OPTIMIZER, UNMATCHED = "before this step", "the optimizer", "no operator of the profile"


class HeldByModule(Struct, frozen=True, kw_only=True):
    """What a module made in one phase, and is alive at each moment."""

    module: str  # repeated ones as their pattern; `OPTIMIZER`, `EARLIER` or `UNMATCHED` for what no module made
    phase: Phase | None  # `None` where unknown
    bytes: tuple[int, ...]


class MemoryByModule(Struct, frozen=True, kw_only=True):
    """What is alive in the step that is explained: when each phase has the most, and last at the peak or failure."""

    moments: tuple[str, ...]
    matched_share: float  # of the bytes that the step allocates, those with an operator of the profile
    rows: tuple[HeldByModule, ...]  # the most bytes at the last moment first

    def lines(self, most: int) -> Iterator[str]:
        """A table with a row for each module and phase."""
        yield f"by module of the profile ({units.percent(self.matched_share)} of what this step allocates is matched)"
        yield f"  {''.join(f'{moment:>14}' for moment in self.moments)}"
        for row in self.rows[:most]:
            name = f"{row.module or 'the model itself'}{'' if row.phase in (None, 'optimizer') else f', made in {row.phase}'}"
            yield f"  {''.join(f'{units.size(nbytes):>14}' for nbytes in row.bytes)}  {name}"


class _Operator(NamedTuple):
    in_backward: bool
    bytes: int  # that it allocates
    module: str
    phase: Phase


_Label = tuple[str, Phase | None]


def memory_by_module(snapshot: Snapshot, profile: Profile) -> MemoryByModule:
    """Name the modules by a profile of the same run; a `ProfileError` says why it cannot be one."""
    trace, at = snapshot.trace, peak_place(snapshot)
    births = {place: passes for place, entry, passes, _ in numbered(trace) if entry.action == "alloc"}
    step = max((passes for place, passes in births.items() if place < at), default=0)
    if profile.memory is None or not step:
        raise ProfileError("the profile has no memory" if step else "the snapshot has no forward pass, with stacks, before its peak")
    operators, patterns = tuple(_operators(profile)), profile.patterns()
    labels: dict[int, _Label] = {place: (UNMATCHED if passes == step else EARLIER, None) for place, passes in births.items()}
    labels |= {place: (OPTIMIZER, "optimizer") for place in births if is_optimizer(trace[place].stack)}
    for number in range(1, step + 1):
        places = [place for place, passes in births.items() if passes == number and not labels[place][1]]
        for index, made in _aligned(tuple((_in_backward(trace[place].stack), trace[place].size) for place in places), operators):
            labels[places[index]] = patterns.get(made.module, made.module), made.phase
    sizes = {place: trace[place].size for place, passes in births.items() if passes == step}
    share = sum(size for place, size in sizes.items() if labels[place][1]) / max(sum(sizes.values()), 1)
    if share < LEAST_SHARE:
        raise ProfileError(
            f"the profile matches {units.percent(share)} of the step at the peak: it is of another model, batch or precision"
        )
    moments = _moments(snapshot, at, labels, min(sizes))
    keys = {key for each in moments.values() for key, nbytes in each.items() if nbytes}
    rows = (HeldByModule(module=key[0], phase=key[1], bytes=tuple(each[key] for each in moments.values())) for key in keys)
    ordered = sorted(rows, key=lambda row: (*(-nbytes for nbytes in reversed(row.bytes)), row.module))
    return MemoryByModule(moments=tuple(moments), matched_share=share, rows=tuple(ordered))


def _moments(snapshot: Snapshot, at: int, labels: dict[int, _Label], begin: int) -> dict[str, Counter[_Label]]:
    """Bytes by module and phase when each phase of the step that begins there has the most, and at the moment to explain."""
    trace = snapshot.trace
    held: dict[int, tuple[_Label, int]] = {address: ((EARLIER, None), size) for address, (size, _) in alive_before(snapshot, 0).items()}
    live: Counter[_Label] = Counter()
    for label, size in held.values():
        live[label] += size
    moments: dict[str, Counter[_Label]] = {}
    phase: str = ""
    explained = live
    for place, entry in enumerate((*trace, None)):
        if place == at:
            explained = live.copy()
        if entry is None or (place > at and labels.get(place, (EARLIER,))[0] == EARLIER and entry.action == "alloc"):
            break
        if entry.action == "alloc":
            label = labels[place]
            held[entry.address] = label, entry.size
            live[label] += entry.size
            phase = "backward" if label[1] == "recompute" else label[1] or phase
            if place >= begin and phase and live.total() > moments.get(phase, Counter()).total():
                moments[phase] = live.copy()
        elif entry.action in FREED and entry.address in held:
            label, size = held.pop(entry.address)
            live[label] -= size
    return moments | {"out of memory" if at < len(trace) and trace[at].action == "oom" else "peak": explained}


def _in_backward(stack: Stack) -> bool:
    """Whether backward runs, and no module's forward that is computed again in it."""
    return is_backward(stack) and not is_forward(stack)


def _operators(profile: Profile) -> Iterator[_Operator]:
    """What allocates in the profile's step, in order; of a long step the timeline has only a part of the operators."""
    timeline = profile.memory.timeline if profile.memory is not None else ()
    following = [*(moment.index for moment in timeline[1:]), *(moment.index + 1 for moment in timeline[-1:])]
    for moment, then in zip(timeline, following, strict=True):
        nbytes = (moment.highest_bytes or 0) - moment.live_bytes
        if then == moment.index + 1 and moment.phase != "optimizer" and nbytes > 0:
            yield _Operator(moment.phase == "backward", nbytes, moment.module, moment.phase)


@cache
def _aligned(made: tuple[tuple[bool, int], ...], operators: tuple[_Operator, ...]) -> list[tuple[int, _Operator]]:
    """The pairs of an allocation, by its place, and its operator that keep both orders and match the most bytes."""
    sums = [
        {(side, sum(size for _, size in made[index - count : index])): count for count in range(min(MOST_OUTPUTS, index), 0, -1)}
        for index, (side, _) in enumerate(made, 1)
    ]
    least, groups, known = 1, sums, operators
    while sum(map(bool, groups)) * len(known) > MOST_PAIRS or least == 1:
        known = tuple(each for each in known if each.bytes >= least)
        wanted = {each[:2] for each in known}
        groups = [{key: count for key, count in each.items() if key in wanted} for each in groups]
        least *= 2
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
