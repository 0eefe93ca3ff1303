"""Find the modules that hold a snapshot's memory.

A snapshot contains no modules, but a profile of the same run lists the module and the allocated
bytes of each operator. Therefore the allocations of a step are matched with the operators of the
profile, by size and order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from heapq import nlargest
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops import units
from lflops.errors import ProfileError
from lflops.memory.snapshots.holders import (
    AllocationEvent,
    allocation_events,
    changes,
    failure_at,
    peak_index,
    phase_of,
)
from lflops.memory.snapshots.read import Snapshot
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import Phase, step_phase
from lflops.profile.series import grouped

MOST_OUTPUTS = 4
"""Maximum number of successive allocations that are matched with one operator.

For example, attention allocates its result, its softmax sums, and two numbers for dropout.
"""

MOST_OPERATORS = 2_000
"""Maximum number of operators of a profile that are matched with allocations.

If a profile has more operators, only the operators that allocate the most are matched. The maximum
is exceeded if further operators allocate as many bytes as the smallest of the matched operators.
"""

LEAST_SHARE = 0.5
"""A profile is rejected if less than this share of the step's bytes is matched with its operators.

Such a profile was recorded with another model, batch or precision.
"""

EARLIER = "before this step"
OPTIMIZER = "the optimizer"
UNMATCHED = "no operator of the profile"


class MemoryByModule(Struct, frozen=True, kw_only=True):
    """The memory that modules hold in the step with the peak.

    Attributes:
        matched_share: Share of the bytes of forward and backward that was matched with operators of
            the profile.
        moments: The live bytes at several points of the step. Each outer key is a phase, for the
            peak of this phase. The last outer key is `out of memory` or `peak`. Each inner key is a
            module and a phase, such as `layers.*.mlp, made in forward`. Bytes without a module have
            the key `EARLIER`, `OPTIMIZER` or `UNMATCHED`.
    """

    matched_share: float
    moments: dict[str, dict[str, int]]

    def lines(self, most: int) -> Iterator[str]:
        """Yield a table with one column for each point of the step, and at most `most` rows.

        The rows are sorted by the bytes in the last column.
        """
        share = units.percent(self.matched_share)
        yield (
            f"by module ({share} of the bytes that forward and backward allocate match operators "
            f"of the profile)"
        )
        yield f"  {_right_aligned(self.moments)}"
        rows: dict[str, list[int]] = {}
        for column, held in enumerate(self.moments.values()):
            for name, nbytes in held.items():
                row = rows.setdefault(name, [0] * len(self.moments))
                row[column] = nbytes
        for name, row in nlargest(most, rows.items(), key=lambda item: item[1][::-1]):
            yield f"  {_right_aligned(map(units.size, row))}  {name}"


def _right_aligned(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>14}" for cell in cells)


class _Operator(NamedTuple):
    """An operator of the profile, with the bytes that it allocates."""

    in_backward: bool
    bytes: int
    module: str
    phase: Phase


def memory_by_module(snapshot: Snapshot, profile: Profile) -> MemoryByModule:
    """Return the memory that each module holds, with the help of a profile of the same run.

    Raises:
        ProfileError: The profile has no memory or does not match the snapshot, or the snapshot has
            no forward pass before its peak.
    """
    peak = peak_index(snapshot)
    events = allocation_events(snapshot.trace)
    allocations = [event for event in events if event.entry.action == "alloc"]
    step = 0
    for event in allocations:
        if event.trace_index < peak:
            step = max(step, event.passes)
    if not step:
        raise ProfileError(
            "the snapshot has no forward pass with stacks before the peak, so its memory cannot be "
            "assigned to modules: record at least one whole step, with stacks"
        )
    if profile.memory is None:
        raise ProfileError(
            "the profile has no memory, so the snapshot cannot be compared with it: pass another "
            "profile of the run"
        )
    operators = tuple(_operators(profile.memory.timeline))
    matches = _Matches(operators, profile.patterns())
    by_pass = grouped(allocations, attrgetter("passes"))
    for passes, made in by_pass.items():
        if passes <= step:
            matches.add_pass(made, UNMATCHED if passes == step else EARLIER, match=passes > 0)

    names = matches.names
    of_passes = [event for event in by_pass[step] if names[event.trace_index] != OPTIMIZER]
    total = 0
    matched = 0
    for event in of_passes:
        total += event.entry.size
        if event.trace_index in matches.phases:
            matched += event.entry.size
    share = matched / max(total, 1)
    if share < LEAST_SHARE:
        raise ProfileError(
            f"only {units.percent(share)} of the bytes that were allocated in the step with the "
            "peak match operators of the profile: check that the profile and the snapshot have the "
            "same model, batch and precision"
        )
    moments = _moments(snapshot, peak, names, matches.phases, of_passes[0].trace_index)
    return MemoryByModule(matched_share=share, moments=moments)


class _Matches:
    """The result of matching allocations with operators of a profile.

    Attributes:
        names: The owner of each allocation as text, keyed by the allocation's index in the trace.
            The owner is a module and phase, `OPTIMIZER`, `EARLIER` or `UNMATCHED`.
        phases: The phase of each allocation, keyed by the allocation's index in the trace. Only
            allocations that match an operator, or that an optimizer made, have a phase.
    """

    def __init__(self, operators: tuple[_Operator, ...], patterns: dict[str, str]) -> None:
        self._operators = operators
        self._patterns = patterns
        self.names: dict[int, str] = {}
        self.phases: dict[int, str] = {}

    def add_pass(self, allocations: list[AllocationEvent], rest: str, *, match: bool) -> None:
        """Find the owners of the allocations from one forward pass up to the next one.

        The owner of an allocation that matches an operator is the module of the operator.

        Args:
            allocations: The allocations.
            rest: The owner of allocations that match no operator: `EARLIER` or `UNMATCHED`.
            match: Whether to match the allocations with operators. Allocations before the first
                forward pass are not matched.
        """
        indexes: list[int] = []
        sizes: list[tuple[bool, int]] = []
        for event in allocations:
            phase = phase_of(event.entry.stack)
            if phase == "optimizer":
                self.names[event.trace_index] = OPTIMIZER
                self.phases[event.trace_index] = phase
            else:
                self.names[event.trace_index] = rest
                indexes.append(event.trace_index)
                sizes.append((phase == "backward", event.entry.size))
        if not match:
            return
        for number, operator in _aligned(tuple(sizes), self._operators):
            index = indexes[number]
            module = self._patterns.get(operator.module, operator.module) or "the model itself"
            self.names[index] = f"{module}, made in {operator.phase}"
            self.phases[index] = step_phase(operator.phase)


def _moments(
    snapshot: Snapshot, peak: int, names: dict[int, str], phases: dict[int, str], begin: int
) -> dict[str, dict[str, int]]:
    """Return the live bytes at the peak of each phase and at the peak of the step.

    The result has the keys of `MemoryByModule.moments`. If a request failed, the moment of the
    failure replaces the peak of the step.

    Args:
        snapshot: The snapshot.
        peak: Index in the trace of the last failed request or, if none failed, of the step's peak.
        names: The owner of each allocation, such as `layers.*.mlp, made in forward`, keyed by the
            allocation's index in the trace. The first allocation without an owner belongs to the
            next step, so the search ends there.
        phases: The phase of each allocation, keyed by the allocation's index in the trace. Only
            allocations that match an operator, or that an optimizer made, have a phase.
        begin: Index in the trace of the step's first allocation, apart from the optimizer's.
    """
    live: Counter[str] = Counter()
    at_peak: Counter[str] | None = None
    phase = ""
    moments: dict[str, Counter[str]] = {}
    next_step = ""
    for change in changes(
        snapshot, lambda *_: EARLIER, lambda index, _: names.get(index, next_step)
    ):
        if at_peak is None and change.trace_index >= peak:
            at_peak = live.copy()
        if change.label == next_step:
            break
        live[change.label or UNMATCHED] += change.bytes
        phase = phases.get(change.trace_index, phase)
        if change.bytes <= 0 or change.trace_index < begin or not phase:
            continue
        if phase not in moments or live.total() > moments[phase].total():
            moments[phase] = live.copy()
    last = "peak" if failure_at(snapshot, peak) is None else "out of memory"
    moments[last] = live if at_peak is None else at_peak
    found = {}
    for moment, held in moments.items():
        found[moment] = {name: nbytes for name, nbytes in held.items() if nbytes}
    return found


def _operators(timeline: Sequence[Moment]) -> Iterator[_Operator]:
    """Yield the operators that allocate memory, in the order of execution.

    Operators of the optimizer step are left out.

    The timeline of a long step contains only some of the operators. An operator is left out if the
    timeline does not contain the next operator, because the bytes that it allocates are unknown.
    """
    for moment, following in zip_longest(timeline, timeline[1:]):
        nbytes = (moment.highest_bytes or 0) - moment.live_bytes
        is_followed = following is None or following.index == moment.index + 1
        if is_followed and moment.phase != "optimizer" and nbytes > 0:
            yield _Operator(moment.phase == "backward", nbytes, moment.module, moment.phase)


@cache
def _aligned(
    made: tuple[tuple[bool, int], ...], operators: tuple[_Operator, ...]
) -> list[tuple[int, _Operator]]:
    """Match allocations with operators of the same size, so that the most bytes match.

    The matched operators have the same order as their allocations. This is an alignment of two
    sequences by dynamic programming. `best[i][j]` is the maximum number of bytes that can match
    among the first i allocations and the first j operators.

    Args:
        made: For each allocation, whether it was made in backward, and its bytes.
        operators: The operators of the profile.

    Returns:
        The index of each matched allocation, with its operator.
    """
    largest = nlargest(MOST_OPERATORS, (operator.bytes for operator in operators))
    least = min(largest, default=0)
    known = [operator for operator in operators if operator.bytes >= least]
    groups = _groups_by_end(made, set(map(_key, known)))
    best = [[0] * (len(known) + 1)]
    for end, group in enumerate(groups, 1):
        without_this = best[end - 1]
        if not group:
            best.append(without_this)
            continue
        row = [0]
        for column, operator in enumerate(known, 1):
            most = max(row[-1], without_this[column])
            count = group.get(_key(operator))
            if count is not None:
                most = max(most, best[end - count][column - 1] + operator.bytes)
            row.append(most)
        best.append(row)

    pairs: list[tuple[int, _Operator]] = []
    end = len(made)
    column = len(known)
    while end and column:
        if best[end][column] == best[end][column - 1]:
            column -= 1
        elif best[end][column] == best[end - 1][column]:
            end -= 1
        else:
            operator = known[column - 1]
            begin = end - groups[end - 1][_key(operator)]
            for index in range(begin, end):
                pairs.append((index, operator))
            end = begin
            column -= 1
    return pairs


def _key(operator: _Operator) -> tuple[bool, int]:
    return (operator.in_backward, operator.bytes)


def _groups_by_end(
    made: tuple[tuple[bool, int], ...], wanted: set[tuple[bool, int]]
) -> list[dict[tuple[bool, int], int]]:
    """Return, for each allocation, the groups of successive allocations that end with it.

    One operator may make several allocations, so it may match a whole group.

    Args:
        made: For each allocation, whether it was made in backward, and its bytes.
        wanted: The groups to return. A group is identified by whether it is in backward, and by its
            total bytes.

    Returns:
        One dict for each allocation. It maps each group in `wanted` that ends with the allocation
        to the number of allocations in the group. If several numbers are possible, it contains the
        smallest one.
    """
    groups = []
    for end, (in_backward, _) in enumerate(made, 1):
        group: dict[tuple[bool, int], int] = {}
        total = 0
        for count in range(1, min(MOST_OUTPUTS, end) + 1):
            total += made[end - count][1]
            if (in_backward, total) in wanted:
                group.setdefault((in_backward, total), count)
        groups.append(group)
    return groups
