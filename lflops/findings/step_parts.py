"""Divide a step into parts that do not overlap.

A part is a phase outside modules, such as the data wait, or one kind of time in modules, such as
memory-bound work. Costs that rules about modules report are subtracted from the parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lflops.analysis.module_outliers import allocating
from lflops.analysis.step_breakdown import IN_MODULES, move
from lflops.findings.evidence import REPORTED_SHARE, StepEvidence
from lflops.findings.rule import Candidate
from lflops.profile.module_names import added_up, ancestry

MAIN_MODULE_SHARE = 0.6
"""The finding about a part names a module if the module has at least this share of the part."""

LEAST_ALLOCATING_SHARE = 0.1
"""Waiting for the driver to allocate memory is a separate part only above this share of the step.
"""

NOT_REPORTED = {"ideal_compute", "forward"}
"""Parts that are not reported.

`ideal_compute` is necessary work, and the finding `outside` includes the time of `forward`.
"""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of the mean step, such as the data wait or memory-bound work.

    Attributes:
        seconds: Seconds of the part, without the costs that other findings already report.
        module: The innermost module that has most of the part, or the pattern of repeated modules,
            such as `layers.*.mlp`. Empty if no module has most of the part.
        is_rest: Whether other findings already report some of the part.
    """

    seconds: float
    module: str
    is_rest: bool


def step_parts(step: StepEvidence, in_modules: Sequence[Candidate]) -> dict[str, StepPart]:
    """Divide the mean step into parts, and return them by name.

    Args:
        step: The measured facts about the step.
        in_modules: The candidates (possible findings) of the rules about modules. Their costs are
            subtracted from the part `inefficient_kernels`.
    """
    shares = _shares(step)
    explained = {"inefficient_kernels": _explained_by_modules(step, in_modules)}
    recompute = step.root.recompute
    if recompute.seconds is not None:
        # Recomputation has a separate finding, so its idle time and its kernels are subtracted from
        # the parts.
        took = recompute.seconds.median
        device_seconds = recompute.device_seconds or recompute.seconds
        computing = min(took, device_seconds.median)
        matmuls = shares.pop("recompute", 0.0) * step.mean
        explained["idle"] = took - computing
        explained["inefficient_kernels"] += max(computing - matmuls, 0.0)
    parts: dict[str, StepPart] = {}
    for name, share in shares.items():
        if name in NOT_REPORTED:
            continue
        already = explained.get(name, 0.0)
        parts[name] = StepPart(
            seconds=max(share * step.mean - already, 0.0),
            module=_innermost_module(step, name),
            is_rest=already > 0,
        )
    return parts


def _shares(step: StepEvidence) -> dict[str, float]:
    """Return the share of the step that each part takes.

    CPU collectives outside all phases are moved to the part `communication`. Long waits for the
    driver to allocate memory are moved to the part `allocating`.
    """
    if step.breakdown is not None:
        shares = dict(step.breakdown.parts)
    else:
        shares = _shares_of_phases(step)
    collectives = _collectives_after_backward(step) / step.mean
    move(shares, collectives, "communication", "clip", "other")
    move(shares, _allocating(step) / step.mean, "allocating", "idle", "other")
    return shares


def _shares_of_phases(step: StepEvidence) -> dict[str, float]:
    """Return the shares of the step that communication and all phases except backward take.

    They are used if there is no step breakdown, because the chip's peak is unknown.
    """
    seconds = step.times.parts
    seconds.pop("backward", None)
    seconds["communication"] = step.communication_seconds
    shares = {}
    for part, took in seconds.items():
        shares[part] = took / step.mean
    return shares


def _collectives_after_backward(step: StepEvidence) -> float:
    """Return the seconds per step of CPU collectives that run outside all phases.

    An example is a custom loop that averages gradients itself.
    """
    trace = step.profile.trace
    if trace is None or trace.device_compute_seconds is not None:
        return 0.0
    seconds = []
    for each in step.profile.communication:
        if each.phase == "other":
            seconds.append(each.seconds or 0.0)
    return sum(seconds)


def _allocating(step: StepEvidence) -> float:
    """Return how many seconds per step the host waits for the driver to allocate or free memory.

    Returns 0 if this wait is too short to be a separate part of the step. The wait then remains in
    the idle time of the device.
    """
    if step.breakdown is None:
        return 0.0
    seconds = allocating(step.profile)
    if seconds >= LEAST_ALLOCATING_SHARE * step.mean:
        return seconds
    return 0.0


def _explained_by_modules(step: StepEvidence, in_modules: Sequence[Candidate]) -> float:
    """Return the seconds of inefficient kernels that the rules about modules already report."""
    explained = 0.0
    for candidate in in_modules:
        seconds = candidate.seconds or 0.0
        if seconds < REPORTED_SHARE * step.mean:
            continue
        if candidate.rule.name == "outside":
            # The rest of this candidate's cost is in the part `forward`.
            seconds = step.inefficient_share_of_root * step.mean
        explained += seconds
    return explained


def _innermost_module(step: StepEvidence, part: str) -> str:
    """Return the innermost module with most of the time of a step part; "" if there is none.

    Repeated modules count as one module, and their pattern, such as `layers.*.mlp`, is returned.
    """
    breakdown = step.breakdown
    if breakdown is None or step.are_module_times_unreliable or part not in IN_MODULES:
        return ""
    inclusive = _inclusive_shares(breakdown.modules, part)
    least = MAIN_MODULE_SHARE * inclusive.get("", 0.0)
    by_pattern = added_up(inclusive, step.patterns) if step.patterns else {}
    main = [name for name, share in by_pattern.items() if name and share >= least]
    return max(main, key=lambda name: name.count("."), default="")


def _inclusive_shares(modules: Mapping[str, Mapping[str, float]], part: str) -> dict[str, float]:
    """Return the share of the step that a part takes in each module, including its submodules."""
    shares: dict[str, float] = {}
    for module, parts in modules.items():
        for above in ancestry(module):
            if parts[part]:
                shares[above] = shares.get(above, 0.0) + parts[part]
    return shares
