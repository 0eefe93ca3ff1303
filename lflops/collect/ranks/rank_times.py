"""The times of modules from rank to rank: exact low, median and high of each, which rank is slow, and what that costs a step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from lflops.collect.ranks.report import Head
from lflops.merging.rank_stats import worst
from lflops.profile.records import PHASES, ModulePhase, RankStat

__all__ = ["RankTimes"]

AT_ONCE = 1 << 18
"""Values that are looked at together."""

Waiting = Literal["none", "left_out", "unknown"]


@dataclass(kw_only=True)
class _Group:
    """The ranks that have the same places and steps. Their times are ranks x steps x places."""

    at: tuple[int, ...]
    places: Sequence[ModulePhase]
    ranks: list[int]
    times: Tensor
    columns: dict[ModulePhase, int] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = {place: column for column, place in enumerate(self.places)}


class RankTimes:
    """Takes each rank's times once, and compares them.

    Args:
        heads: What the ranks have told beside, in the order of the ranks.
        places: Of each table the places that have times.
    """

    def __init__(self, heads: Sequence[Head], places: Mapping[str, Sequence[ModulePhase]]) -> None:
        """Make room for all of them."""
        self._waiting: dict[ModulePhase, dict[int, float | None]] = defaultdict(dict)
        members: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for head in heads:
            if head.at:
                members[head.brief.table, head.at].append(head.brief.rank)
            for number, seconds in head.waiting.items():
                self._waiting[places[head.brief.table][number]][head.brief.rank] = seconds
        self._groups = [
            _Group(at=at, places=places[table], ranks=ranks, times=torch.empty(len(ranks), len(at), len(places[table])))
            for (table, at), ranks in members.items()
        ]
        self._homes = {rank: (group, row) for group in self._groups for row, rank in enumerate(group.ranks)}
        self._common = set.intersection(*(set(group.at) for group in self._groups)) if self._groups else set()

    def add(self, rank: int, times: bytes) -> None:
        """Take a rank's, as they were packed."""
        if rank in self._homes and times:
            group, row = self._homes[rank]
            group.times[row] = torch.frombuffer(bytearray(times), dtype=torch.float32).view(len(group.at), -1)

    def of(self, rank: int) -> list[list[float]]:
        """The times of one rank: of each step, in each place."""
        if rank not in self._homes:
            return []
        group, row = self._homes[rank]
        times: list[list[float]] = group.times[row].tolist()
        return times

    def stats(self, rows: Mapping[str, object]) -> list[RankStat]:
        """Of each place that two ranks at least have, in the order of the rows."""
        shared: dict[tuple[int, ...], list[ModulePhase]] = defaultdict(list)
        having: dict[ModulePhase, tuple[int, ...]] = {}
        for index, group in enumerate(self._groups):
            for place in group.places:
                having[place] = (*having.get(place, ()), index)
        for place, groups in having.items():
            shared[groups].append(place)
        found = [stat for groups, places in shared.items() for stat in self._compared([self._groups[each] for each in groups], places)]
        order = {row: number for number, row in enumerate(rows)}
        found.sort(key=lambda stat: (order[stat.module], PHASES.index(stat.phase)))
        for number in worst(found):
            stat = found[number]
            place = ModulePhase(stat.module, stat.phase)
            found[number] = replace(stat, by_rank=self._by_rank([self._groups[each] for each in having[place]], place))
        return found

    def _compared(self, groups: Sequence[_Group], places: Sequence[ModulePhase]) -> Iterator[RankStat]:
        """Places that the same groups have, as many at once as there is room for."""
        number = sum(len(group.ranks) for group in groups)
        if number < 2:
            return
        width = max(AT_ONCE // (number * max(len(group.at) for group in groups)), 1)
        for start in range(0, len(places), width):
            some = places[start : start + width]
            yield from _stats(some, [self._state(place) for place in some], *self._told(groups, some))

    def _by_rank(self, groups: Sequence[_Group], place: ModulePhase) -> dict[int, float]:
        ranks, medians, _ = self._told(groups, [place])
        return dict(zip(ranks.tolist(), medians[:, 0].tolist(), strict=True))

    def _told(self, groups: Sequence[_Group], places: Sequence[ModulePhase]) -> tuple[Tensor, Tensor, Tensor]:
        """The ranks in their order, ranks x places, and ranks x steps x places, without what is known to be waiting."""
        ranks = torch.tensor([rank for group in groups for rank in group.ranks])
        medians, by_step = [], []
        for group in groups:
            times = group.times[:, :, [group.columns[place] for place in places]]
            medians.append(_median(times))
            by_step.append(times[:, [step for step, index in enumerate(group.at) if index in self._common]])
        whole, steps = torch.cat(medians), torch.cat(by_step)
        waits = self._waits(ranks.tolist(), places)
        if waits is not None:
            whole, steps = (whole - waits).clamp(min=0), (steps - waits[:, None]).clamp(min=0)
        in_order = ranks.argsort()
        return ranks[in_order], whole[in_order], steps[in_order]

    def _waits(self, ranks: list[int], places: Sequence[ModulePhase]) -> Tensor | None:
        """Seconds to leave out of each rank's time in each place, if any."""
        left_out = [(column, self._waiting[place]) for column, place in enumerate(places) if self._state(place) == "left_out"]
        if not left_out:
            return None
        waits = torch.zeros(len(ranks), len(places), dtype=torch.float64)
        for column, told in left_out:
            waits[:, column] = torch.tensor([told.get(rank, 0.0) or 0.0 for rank in ranks], dtype=torch.float64)
        return waits

    def _state(self, place: ModulePhase) -> Waiting:
        if place not in self._waiting:
            return "none"
        return "unknown" if None in self._waiting[place].values() else "left_out"


def _stats(places: Sequence[ModulePhase], states: Sequence[Waiting], ranks: Tensor, medians: Tensor, steps: Tensor) -> Iterator[RankStat]:
    """Of ranks x places, and ranks x steps x places. Of equal times the first rank's is the slow one."""
    high, slow = medians.max(0)
    number = steps.shape[1]
    figures = [medians.amin(0), _middle(medians), high, ranks[slow]]
    if number:
        slowest, slow_in_step = steps.max(0)
        figures += [(slow_in_step == slow).sum(0), (slowest - _middle(steps)).mean(0)]
    for (row, phase), state, low, median, most, rank, *of_steps in zip(places, states, *(each.tolist() for each in figures), strict=True):
        known = {"slowest_steps": of_steps[0], "steps": number, "lost_seconds": of_steps[1]} if of_steps else {}
        yield RankStat(module=row, phase=phase, low=low, median=median, high=most, high_rank=rank, waiting=state, **known)


def _median(times: Tensor) -> Tensor:
    """Over the steps; of an even number the middle between the two in the middle, which torch's own is not."""
    along = times.movedim(1, -1).contiguous()
    number = along.shape[-1]
    if number % 2:
        return along.median(-1).values.double()
    upper_half = along.topk(number // 2 + 1, sorted=False).values
    return upper_half.topk(2, largest=False).values.double().mean(-1)


def _middle(times: Tensor) -> Tensor:
    """Over the ranks; of an even number the faster of the two in the middle, so that of two ranks one is held against the other."""
    return times.movedim(0, -1).contiguous().median(-1).values.double()
