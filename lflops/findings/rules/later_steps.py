"""The rule about a phase that takes longer in the run than in its window."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lflops import units
from lflops.findings.finding import Finding
from lflops.findings.longer_phase import (
    LongerPhase,
    joined_phases,
    longer_phase,
    usual_phases,
)
from lflops.findings.rule import Threshold
from lflops.findings.run_rule import RunEvidence, RunRule
from lflops.ledger.account import Ledger
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.profile.series import sum_known, summed

GROWTH = 1.25
"""A phase grows if the last quarter of the run has this many times its time in the first.

If the size of the batches grows about as much, up to this factor, it explains the growth.
"""


NOTICEABLE = 1.05
"""The factor of the other phases is mentioned if it is at least this."""


class LongerThanInWindow(RunRule):
    """A phase, such as forward, takes longer in the steps of the run than in its window.

    The other phases that work with a batch take about as long as in the window. So the steps do not
    have more data, but something in this phase is different, for example layers were unfrozen,
    or a metric computes its result from all previous batches. The times of modules are from the
    window, so they do not show where the additional time is spent.

    This finding is never an issue, because the work may be necessary. It is not reported if the
    phase grows with the size of the batches, or if other programs use the CPU. It is not reported
    on a GPU or another device either, because the host may wait for the device in any phase.
    """

    name = "longer_phase"
    threshold = Threshold(reported=0.05)
    fix = (
        "To see which module takes longer, profile other steps: during the training, run "
        "lflops window DIR (DIR is the folder of the run), or pass a schedule with a longer wait"
    )
    fix_of_growth = f"Look for lists, caches or metrics that grow with each step. {fix}"
    fix_if_batches_are_unknown = (
        "If the batches do not grow, look for lists, caches or metrics that grow with each step. "
        f"{fix}"
    )

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        if run.profile is None or not run.ledger.is_on_cpu or not run.ledger.unprofiled:
            return
        if run.allowance > 1:
            # Other programs slow down some steps more than others.
            return
        in_run = usual_phases(run.ledger)
        longer = longer_phase(in_run, _phases_of(run.profile), sum(in_run.values()))
        if longer is None:
            return
        number = sum(group.steps for group in run.ledger.unprofiled)
        seconds = longer.excess * number
        share = seconds / run.training_seconds
        if share < self.threshold.reported:
            return
        phase = plain(longer.name)
        others = ""
        if longer.others >= NOTICEABLE:
            times = f"{longer.others:.1f} × as long as in the window"
            others = f" (the other phases of the model take {times})"
        growth = _growth(longer, run.ledger)
        if growth is not None and growth.is_explained_by_batches:
            return
        sentence = (
            f"{units.percent(share)} of the training loop's time "
            f"({units.duration(longer.excess)} per step) is missing in the profiled steps: {phase} "
            f"takes {units.duration(longer.seconds)} in the mean step of the run, and "
            f"{units.duration(longer.in_window)} in the window{others}"
        )
        fix = self.fix
        if growth is not None:
            sentence += (
                f". This time grows from {units.duration(growth.first)} in the first quarter of "
                f"the steps to {units.duration(growth.last)} in the last quarter"
            )
            fix = self.fix_of_growth
            if growth.batches is None:
                fix = self.fix_if_batches_are_unknown
        yield Finding(
            cause=self.name,
            sentence=f"{sentence}.",
            title=f"{phase} takes longer than in the window",
            seconds=longer.excess,
            share=share,
            of="run",
            fix=fix,
        )


def _phases_of(profile: Profile) -> dict[str, float]:
    """Return the mean seconds of each phase in the unprofiled steps of a window."""
    steps = [step.phases for step in profile.steps if step.is_unprofiled and step.phases]
    if not steps:
        return {}
    phases = summed([each for step in steps for each in step.items()])
    return joined_phases({name: seconds / len(steps) for name, seconds in phases.items()})


class _Growth(NamedTuple):
    """The growth of a phase during a run.

    Attributes:
        first: Mean seconds of the phase in a step of the first quarter.
        last: Mean seconds of the phase in a step of the last quarter.
        batches: Size of the batches in the last quarter, as a multiple of their size in the first
            quarter. `None` if it is unknown.
    """

    first: float
    last: float
    batches: float | None

    @property
    def is_explained_by_batches(self) -> bool:
        """Return whether the size of the batches grows about as much as the phase."""
        return self.batches is not None and self.batches * GROWTH >= self.last / self.first


class _GroupTime(NamedTuple):
    """The number of steps of a group, the seconds of a phase, and the size of the batches.

    The size is the number of elements, or `None` if it is unknown.
    """

    steps: int
    seconds: float
    elements: int | None


def _growth(longer: LongerPhase, ledger: Ledger) -> _Growth | None:
    """Return the growth of a phase during the run, or `None` if it does not grow.

    The time that slow steps lost is left out.
    """
    lost = []
    for step in ledger.slow_steps:
        if longer.name in joined_phases({step.phase: step.cost}) and step.cause != "larger_batch":
            lost.append(step)
    times = []
    for group in ledger.unprofiled:
        seconds = joined_phases(group.spent).get(longer.name, 0.0)
        for step in [*lost]:
            # After a restart, two groups can have a step of this number.
            if group.first <= step.step <= group.last and step.cost <= seconds:
                seconds -= step.cost
                lost.remove(step)
        times.append(_GroupTime(group.steps, seconds, group.elements))
    quarter = sum(each.steps for each in times) / 4
    first = _sum_of_first(times, quarter)
    last = _sum_of_first(reversed(times), quarter)
    first_seconds = first.seconds / first.steps
    last_seconds = last.seconds / last.steps
    if first_seconds <= 0 or last_seconds < GROWTH * first_seconds:
        return None
    batches = None
    if first.elements and last.elements:
        batches = (last.elements / last.steps) / (first.elements / first.steps)
    return _Growth(first_seconds, last_seconds, batches)


def _sum_of_first(times: Iterable[_GroupTime], number: float) -> _GroupTime:
    """Return the sums over about the first `number` steps."""
    chosen: list[_GroupTime] = []
    steps = 0
    for group in times:
        chosen.append(group)
        steps += group.steps
        if steps >= number:
            break
    seconds = sum(group.seconds for group in chosen)
    return _GroupTime(steps, seconds, sum_known(group.elements for group in chosen))
