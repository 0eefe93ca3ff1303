"""Rules about ranks that make other ranks wait."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lflops.findings.evidence import StepEvidence, allowance
from lflops.findings.rule import Candidate, StepRule, Threshold, cost_of
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, Straggler, step_phase
from lflops.ranks.straggler_search import MANY_STEPS

SHARE_OF_SLOW_RANK = 0.05
"""A slow rank is reported if it costs at least this share of the step."""

OBSERVED_SECONDS = 5.0
"""A CPU rank that is slow in all phases is an issue only if it is slow for this many seconds.

If it is slow for a shorter time, other programs on the machine might be the cause. If it is slow
for at least `MANY_STEPS` steps, it is also an issue.
"""

REASONS_BEYOND_LOAD = {"work", "chip"}
"""Reasons for a slow rank that other programs on the machine cannot cause."""

OUTSIDE_MODULES = {
    "data": "data loading",
    "transfer": "the batch transfer",
    "clip": "clipping",
    "optimizer": "the optimizer",
    "other": "other work outside the modules",
    "validation": "validation",
    "checkpoint": "saving checkpoints",
    "stage": "its pipeline stage",
    "sync": "Lightning's collectives",
}
"""Phases outside modules in which a rank can be slow, and the names that sentences use for them."""


class SlowRank(StepRule):
    """One rank is slower than the other ranks, and they wait for it.

    The threshold is higher on a machine that runs other programs. If a rank on a CPU is slower in
    all phases, it is an issue only after 50 steps or five seconds, because other programs may be
    the reason for a shorter slowdown.
    """

    name = "rank"
    threshold = Threshold(share=SHARE_OF_SLOW_RANK)
    fix = "Look at the machine, the data and the code of this rank"
    fix_in_module = (
        "Look at what this rank does differently in {where}, such as sleeps, locks or more data, "
        "and at its machine"
    )
    right = (37, 41)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        stragglers = step.stragglers
        if stragglers.worst_share is None:
            return
        lasting = [row for row in stragglers.rows if not _may_be_brief(row, step)]
        worst = (lasting or stragglers.rows)[0]
        yield Candidate(
            rule=self,
            seconds=min(worst.seconds_lost, step.mean),
            module=worst.module,
            facts={"reason": worst.cause if lasting else "brief"},
            rank=worst.slow_rank,
            phase=worst.phase,
        )

    def allowance(self, candidate: Candidate, step: StepEvidence) -> float:
        if step.times.uncontended or candidate.facts["reason"] in REASONS_BEYOND_LOAD:
            return 1.0
        return math.sqrt(allowance(step.lost_cpu_share))

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        reason = candidate.facts["reason"]
        if reason == "preempted":
            return not step.is_cpu_contended
        return reason != "brief"

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.fix_in_module if candidate.module else self.fix

    def describe(self, candidate: Candidate, step: StepEvidence) -> str | None:
        stragglers = step.stragglers
        if (stragglers.worst_share or 0.0) < SHARE_OF_SLOW_RANK:
            return None
        worst = next(row for row in stragglers.rows if row.slow_rank == candidate.rank)
        rank = f"Rank {worst.slow_rank}{hosts_by_rank(step.profile).get(worst.slow_rank, '')}"
        others = "the other ranks" if len(step.profile.ranks) > 2 else "the other rank"
        cost = cost_of(candidate.seconds, step)
        return f"{rank} makes {others} wait for {cost}: {_why(worst, step.profile)}."


class AlternatingStragglers(StepRule):
    """The slowest rank changes from step to step, and the other ranks wait for it.

    The usual reason is that ranks get batches with different sequence lengths.
    """

    name = "turns"
    threshold = Threshold(share=0.20)
    sentence = "The slowest rank changes from step to step: {cost} is spent waiting."
    fix = "In each step, use sequences of about the same length on all ranks"

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        stragglers = step.stragglers
        if stragglers.worst_share is not None:
            return
        if stragglers.is_alternating and stragglers.lost_share is not None:
            yield Candidate(rule=self, seconds=stragglers.lost_share * step.mean)


def _may_be_brief(row: Straggler, step: StepEvidence) -> bool:
    """Return whether a CPU rank is slow in all phases, but not for long enough to be an issue.

    Other programs on the machine might be the reason for such a short slowdown.
    """
    if step.profile.run.device_type != "cpu":
        return False
    if row.phase != "all" or row.cause is not None:
        return False
    enough = min(MANY_STEPS, OBSERVED_SECONDS / (step.stragglers.step_seconds or 1.0))
    return (row.steps or 0) < enough


def _why(worst: Straggler, profile: Profile) -> str:
    if worst.cause is not None:
        return reason_of(worst, profile)
    place = place_of_rank(worst)
    if worst.until is not None:
        return f"it was slow in {place} up to step {worst.until}"
    return f"it is slow in {place}"


def place_of(module: str, phase: str) -> str:
    """Format where a rank is slow, such as "the forward of layers.3.mlp" or "data loading".

    Args:
        module: Name of the module. Empty for a phase outside modules, and for the root itself.
        phase: The phase in which the rank is slow.
    """
    if not module and phase in OUTSIDE_MODULES:
        return OUTSIDE_MODULES[phase]
    if phase == "wait":
        return "the exchange of gradients at the end of backward"
    if not module:
        return plain(f"{phase} outside the layers")
    return plain(f"the {phase} of {module}")


def place_of_rank(row: Straggler) -> str:
    """Format where a rank is slow: a module in a phase, a whole phase, or "all phases"."""
    if row.phase == "all":
        return "different places" if row.cause == "preempted" else "all phases"
    if row.is_whole_phase:
        return f"{row.phase} (module unknown)"
    return place_of(row.module, row.phase)


def hosts_by_rank(profile: Profile) -> dict[int, str]:
    """Return the host of each rank as the end of a phrase, such as ` on node7`.

    The result is empty if all ranks are on one host.
    """
    hosts = {rank.rank: rank.host for rank in profile.ranks if rank.host}
    if len(set(hosts.values())) <= 1:
        return {}
    endings = {}
    for rank, host in hosts.items():
        endings[rank] = plain(f" on {host}")
    return endings


def reason_of(row: Straggler, profile: Profile) -> str:
    """Describe the known reason for a slow rank: "its chip is A, while other ranks have B"."""
    if row.cause == "chip":
        chips = {}
        for rank in profile.ranks:
            if rank.device is not None:
                chips[rank.rank] = rank.device
        slow_chip = chips.pop(row.slow_rank)
        other_chips = " or ".join(dict.fromkeys(chips.values()))
        return f"its chip is {slow_chip}, while other ranks have {other_chips}"
    if row.cause == "work":
        times = f"{row.work_ratio or 0.0:.1f} × as much work as"
        if row.phase == "stage":
            return f"its pipeline stage has {times} the stages of the other ranks"
        return f"its batch has {times} the batches of the other ranks"
    if row.cause == "thread":
        return "another thread of its process computes and takes CPU time from the training thread"
    return "its process was preempted: the operating system gave its core to another process"


def without_rank_costs(
    candidates: Iterable[Candidate], slow_ranks: Sequence[Candidate]
) -> list[Candidate]:
    """Subtract the cost of slow ranks from the other candidates (possible findings).

    So the cost is reported only once. On the slow rank, it is contained in the part of the step in
    which the rank is slow. On the other ranks, it is contained in the communication wait.
    """
    remaining = list(candidates)
    for slow_rank in slow_ranks:
        left = slow_rank.seconds or 0.0
        for name in (_part_of(slow_rank), "communication"):
            for index, candidate in enumerate(remaining):
                shared = min(left, candidate.seconds or 0.0)
                if candidate.rule.name == name and shared:
                    left -= shared
                    remaining[index] = _reduced(candidate, shared)
    return remaining


def _part_of(slow_rank: Candidate) -> str:
    """Return the name of the rule for the part of the step that contains the delay of a slow rank.

    For a delay in the root module, this is the rule `outside`.
    """
    phase = step_phase(slow_rank.phase)
    if phase not in PASSES:
        return phase
    return "inefficient_kernels" if slow_rank.module else "outside"


def _reduced(candidate: Candidate, seconds: float) -> Candidate:
    return replace(candidate, seconds=(candidate.seconds or 0.0) - seconds, is_rest=True)
