"""Compare the phases of a run's mean step with the phases of the steps in its window.

A window has the times of modules, but only for a few steps. If one phase takes longer in the other
steps of the run, the window cannot show which module takes this time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lflops.ledger.account import CATEGORIES, Ledger, StepGroup
from lflops.profile.series import summed

MUCH_LONGER = 1.25
"""A phase takes much longer if the factor exceeds the factor of all other phases this many times."""

LEAST_SHARE = 0.05
"""A phase is compared only if its additional time is at least this share of the mean step."""

NO_WORK = frozenset({"data", "other"} | CATEGORIES.keys())
"""Parts of a step that are not compared, because their time varies or the ledger excludes it."""


BESIDE_MODEL = frozenset({"optimizer", "clip", "transfer"})
"""Phases whose time says little about the work that the model does with a batch."""


class LongerPhase(NamedTuple):
    """A phase that takes longer in the run than in the window, unlike all other phases.

    Attributes:
        name: The phase.
        seconds: Mean seconds of the phase in the run.
        in_window: Mean seconds of the phase in the window.
        excess: The additional seconds, beyond the factor by which all other phases take longer.
        others: The factor by which all other phases take longer in the run.
    """

    name: str
    seconds: float
    in_window: float
    excess: float
    others: float


def longer_phase(
    in_run: Mapping[str, float], in_window: Mapping[str, float], mean: float
) -> LongerPhase | None:
    """Return the phase that takes much longer in the run than in the window, or `None`.

    If the other phases take longer by about the same factor, the steps of the run have more work,
    and the result is `None`. The optimizer's time says nothing about the work of a batch.

    Args:
        in_run: Mean seconds of each phase in the run, as `joined_phases` returns them.
        in_window: Mean seconds of each phase in the window, as `joined_phases` returns them.
        mean: Mean seconds of a step of the run.
    """
    known = [name for name in in_run if name in in_window and name not in NO_WORK]
    of_batch = [name for name in known if name not in BESIDE_MODEL]
    longest: LongerPhase | None = None
    for name in known:
        run_of_others = sum(in_run[each] for each in of_batch if each != name)
        window_of_others = sum(in_window[each] for each in of_batch if each != name)
        if not window_of_others or not in_window[name]:
            continue
        others = run_of_others / window_of_others
        excess = in_run[name] - in_window[name] * max(others, 1.0)
        is_longer = in_run[name] > MUCH_LONGER * max(others, 1.0) * in_window[name]
        if not is_longer or excess < LEAST_SHARE * mean:
            continue
        if longest is None or excess > longest.excess:
            longest = LongerPhase(name, in_run[name], in_window[name], excess, others)
    return longest


def joined_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of phases, with all of backward as one phase.

    A window counts the wait for other ranks, and recomputation, as parts of backward.
    """
    joined: dict[str, float] = {}
    for name, seconds in phases.items():
        key = "backward" if name in {"recompute", "wait"} else name
        joined[key] = joined.get(key, 0.0) + seconds
    return joined


def usual_phases(ledger: Ledger) -> dict[str, float]:
    """Return the mean seconds of each phase in the unprofiled steps of a run.

    The time that slow steps lost is left out. All of backward is one phase.
    """
    number = sum(group.steps for group in ledger.unprofiled)
    lost = lost_in_slow_steps(ledger)
    usual = {}
    for name, seconds in mean_phases(ledger.unprofiled).items():
        usual[name] = seconds - lost.get(name, 0.0) / number
    return joined_phases(usual)


def mean_phases(groups: Sequence[StepGroup]) -> dict[str, float]:
    """Return the mean seconds of each phase in a step of the groups. There must be a group."""
    number = sum(group.steps for group in groups)
    spent = [each for group in groups for each in group.spent.items()]
    return {name: seconds / number for name, seconds in summed(spent).items()}


def lost_in_slow_steps(ledger: Ledger) -> dict[str, float]:
    """Return the seconds that slow unprofiled steps lost, by phase.

    Time that interrupted a step without being part of its phases is left out, and so are larger
    batches. The ledger names only the phase with the largest part of the loss. This phase gets all
    of the loss.
    """
    groups = ledger.unprofiled
    phases = {name for group in groups for name in group.spent}
    lost: dict[str, float] = {}
    for step in ledger.slow_steps:
        is_unprofiled = any(group.first <= step.step <= group.last for group in groups)
        if is_unprofiled and step.phase in phases and step.cause != "larger_batch":
            lost[step.phase] = lost.get(step.phase, 0.0) + step.cost
    return lost
