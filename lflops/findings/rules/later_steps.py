"""The rule about a phase that takes longer after the window."""

from collections.abc import Iterator, Sequence

from lflops import units
from lflops.findings.finding import Finding
from lflops.findings.longer_phase import LongerPhase, longer_phase, usual_phases
from lflops.findings.rule import Threshold
from lflops.findings.run_rule import RunEvidence, RunRule
from lflops.ledger.account import StepGroup
from lflops.profile.profile import Profile
from lflops.profile.series import summed

GROWTH = 1.25
"""A phase grows if it takes this many times as long in the last quarter of the run as in the first."""


class LongerAfterWindow(RunRule):
    """A phase, such as forward, takes longer in the steps of the run than in its window.

    The other phases take about as long as in the window. So the steps do not have more data, but
    something in this phase changed, for example layers were unfrozen, or a metric computes its
    result from all previous batches. The times of modules are from the window, so they do not show
    where the additional time is spent.

    This finding is never an issue, because the work may be necessary. It is not reported for a run
    on a GPU or another device, because the host waits for the device in any phase.
    """

    name = "longer_phase"
    threshold = Threshold(reported=0.05)
    fix = (
        "To see which module takes longer, profile later steps: run lflops window with the folder "
        "of the run during the training, or pass a schedule with a longer wait"
    )

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        if run.profile is None or run.ledger.device not in {"", "cpu"} or not run.ledger.unprofiled:
            return
        in_run = usual_phases(run.ledger)
        longer = longer_phase(in_run, _phases_of(run.profile), sum(in_run.values()))
        if longer is None:
            return
        number = sum(group.steps for group in run.ledger.unprofiled)
        seconds = longer.excess * number
        share = seconds / run.training_seconds
        sentence = (
            f"{units.percent(share)} of the training loop's time "
            f"({units.duration(longer.excess)} per step) was added to {longer.name} after the "
            f"window: it takes {units.duration(longer.seconds)} in the mean step of the run, and "
            f"{units.duration(longer.in_window)} in the window"
        )
        yield Finding(
            cause=self.name,
            sentence=f"{sentence}{_growth(longer, run.ledger.unprofiled)}.",
            seconds=longer.excess,
            share=share,
            of="run",
            fix=self.fix,
        )


def _phases_of(profile: Profile) -> dict[str, float]:
    """Return the mean seconds of each phase in the unprofiled steps of a window."""
    steps = [step.phases for step in profile.steps if step.is_unprofiled and step.phases]
    if not steps:
        return {}
    phases = summed([each for step in steps for each in step.items()])
    return {name: seconds / len(steps) for name, seconds in phases.items()}


def _growth(longer: LongerPhase, groups: Sequence[StepGroup]) -> str:
    """Describe by how much a phase grows during the run, or return an empty text."""
    quarter = sum(group.steps for group in groups) / 4
    first = _mean_of_first(longer.name, groups, quarter)
    last = _mean_of_first(longer.name, groups[::-1], quarter)
    if last < GROWTH * first:
        return ""
    return (
        f". It grows from {units.duration(first)} in the first quarter of the steps to "
        f"{units.duration(last)} in the last quarter"
    )


def _mean_of_first(phase: str, groups: Sequence[StepGroup], number: float) -> float:
    """Return the mean seconds of a phase in about the first `number` steps."""
    seconds = 0.0
    steps = 0
    for group in groups:
        seconds += group.spent.get(phase, 0.0)
        steps += group.steps
        if steps >= number:
            break
    return seconds / steps
