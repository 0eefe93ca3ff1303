"""Keep the stragglers that were logged during a run, for the report at the end of the run.

A straggler is a rank that the other ranks wait for. The comparison of ranks at the end of a run
covers only the last steps, which may not show earlier delays.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, RankComparison, Straggler, step_phase
from lflops.ranks.straggler import Stragglers, in_module_of
from lflops.ranks.straggler_search import WORTH_SAYING

# Smallest number of compared steps for which stragglers are kept. The steps of a shorter comparison
# are also part of the next comparisons, so its results are not needed. With thousands of ranks, no
# comparison has more steps than this.
ENOUGH_TO_KEEP = 16


class ReportedStragglers:
    """The stragglers that were logged during the run.

    They are stored by stage (such as `train`), and then by rank, module and phase.
    """

    def __init__(self) -> None:
        self._flagged: dict[str | None, dict[tuple[int, str, str], Straggler]] = {}

    def keep(self, profile: Profile, found: Stragglers) -> None:
        """Keep the stragglers that were found in a profile and logged.

        Nothing is kept if fewer than `ENOUGH_TO_KEEP` steps were compared.
        """
        compared = profile.unprofiled_comparison
        if compared is None or len(compared.at) < ENOUGH_TO_KEEP:
            return
        of_stage = self._flagged.setdefault(profile.run.stage, {})
        for row in found.rows:
            # If a row has `until`, the straggler was logged earlier, and is not slow in the steps
            # that are compared now.
            if row.slow_steps is not None and row.until is None:
                place = (row.slow_rank, row.module, row.phase)
                of_stage[place] = replace(row, since=None, until=compared.at[-1])

    def added_to(self, compared: RankComparison, stage: str | None) -> RankComparison:
        """Return a copy of `compared` with the stragglers of `stage` in its field `flagged`."""
        return replace(compared, flagged=tuple(self._flagged.get(stage, {}).values()))


def with_reported(rows: Iterable[Straggler], unprofiled: RankComparison) -> list[Straggler]:
    """Return the current stragglers, plus what the stragglers logged during the run add to them.

    `rows` has the current stragglers, and `unprofiled.flagged` has the logged stragglers. For each
    logged straggler, the first matching rule is used:

    * If it is slow in everything (phase `all`), and its rank is already a current straggler, it is
      dropped.
    * If its rank is not a current straggler in the same phase, it is added. If its rank is a
      current straggler in the phase `all`, its cost is subtracted there.
    * If its rank is a current straggler in the same phase, but without a module, its module is
      added to the current straggler.
    * Otherwise, it is dropped.
    """
    current = list(rows)
    for flagged in unprofiled.flagged:
        is_whole_phase = not flagged.module and flagged.phase in PASSES
        earlier = replace(flagged, is_whole_phase=is_whole_phase)
        is_rank_slow = any(row.slow_rank == earlier.slow_rank for row in current)
        if earlier.phase == "all" and is_rank_slow:
            continue
        same_phase = [row for row in current if _is_same_phase(row, earlier)]
        if not same_phase:
            current = _without_cost(current, earlier, WORTH_SAYING * unprofiled.seconds)
            current.append(earlier)
        elif earlier.module and not any(row.module for row in same_phase):
            position = current.index(same_phase[0])
            current[position] = in_module_of(current[position], earlier)
    return current


def _is_same_phase(row: Straggler, earlier: Straggler) -> bool:
    if row.slow_rank != earlier.slow_rank:
        return False
    return step_phase(row.phase) == step_phase(earlier.phase)


def _without_cost(rows: Iterable[Straggler], earlier: Straggler, least: float) -> list[Straggler]:
    """Subtract the cost of `earlier` from the straggler of the same rank in the phase `all`.

    Otherwise, the cost would count twice. A straggler in the phase `all` with a known cause is not
    changed. Stragglers that then cost less than `least` are dropped.
    """
    left = []
    for row in rows:
        rest = row.seconds_lost
        if row.slow_rank == earlier.slow_rank and row.phase == "all" and row.cause is None:
            rest -= earlier.seconds_lost
        if rest >= least:
            left.append(replace(row, seconds_lost=rest))
    return left
