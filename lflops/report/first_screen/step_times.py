"""Compute the step times of the first screen and divide the mean step into phases.

An unprofiled step is a step in which lflops only reads a clock. The times of all unprofiled steps
of a run come from its ledger (time account). Without a ledger, the times come from the unprofiled
steps of the window.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.step_times import with_recompute
from lflops.findings.longer_phase import (
    NO_WORK,
    LongerPhase,
    joined_phases,
    longer_phase,
    lost_in_slow_steps,
    mean_phases,
)
from lflops.ledger.account import CATEGORIES, Ledger, StepGroup, percentile
from lflops.profile.series import ratio, scaled, summed
from lflops.report.first_screen.window import WindowSummary
from lflops.report.summary_facts import Part
from lflops.report.text import counted, phase_label


class Steps(Struct, frozen=True, kw_only=True):
    """Statistics of the durations of unprofiled steps.

    Attributes:
        number: Number of steps.
        mean: Mean in seconds.
        p50: Median in seconds.
        p95: 95th percentile in seconds.
        source: "run" for all unprofiled steps of the run, "window" for the unprofiled steps of the
            window.
        said: The number of steps, the mean and the percentiles as text, and work that is not in
            these times.
    """

    number: int
    mean: float
    p50: float | None
    p95: float | None
    source: Literal["run", "window"]
    said: str


class StepTimes(NamedTuple):
    """Statistics of the unprofiled steps, and their mean seconds by phase.

    Attributes:
        steps: The statistics.
        phases: Mean seconds of each phase.
        lost: The part of `phases` that slow steps lost: the seconds by which they exceeded the
            usual steps, divided by the number of all steps. Larger batches are no loss.
    """

    steps: Steps
    phases: Mapping[str, float]
    lost: Mapping[str, float] = {}


def times_of(window: WindowSummary | None, ledger: Ledger | None) -> StepTimes | None:
    """Return the times of the unprofiled steps of the run.

    Without a ledger, return the times of the unprofiled steps of the window. Return `None` if no
    step was timed.
    """
    if ledger is not None and ledger.unprofiled:
        return _times_of_run(ledger.unprofiled, ledger, window)
    if window is None or window.mean is None:
        return None
    seconds = []
    for step in window.profile.steps:
        if step.is_unprofiled and step.seconds is not None:
            seconds.append(step.seconds)
    seconds.sort()
    p50 = _quantile(seconds, 0.5)
    p95 = _quantile(seconds, 0.95)
    steps = _steps(len(seconds), window.mean, p50, p95, "window")
    return StepTimes(steps, with_recompute(window.phases, window.recomputed))


SIMILAR = 1.25
"""A window is typical of its run if its steps take at most this many times as long, or less."""


class WorkRatio(NamedTuple):
    """How many times as long the work of a mean step takes in the run as in the window.

    The work is all phases except `data` (the data wait), `other`, and the phases that the ledger
    keeps outside of steps, such as inference. What slow steps of the run lost is left out.

    Attributes:
        factor: The factor for all work. If there is a `longer` phase, for all other work.
        longer: The only phase that takes much longer in the run than in the window, or `None`.
    """

    factor: float
    longer: LongerPhase | None = None

    @property
    def is_similar(self) -> bool:
        """Whether the window is typical of the run."""
        return self.longer is None and 1 / SIMILAR <= self.factor <= SIMILAR


def work_ratio(window: WindowSummary, times: StepTimes) -> WorkRatio:
    """Compare the work of a mean step of the run with the work of the window's steps.

    The factor is 1 if a time is unknown, or if the times are from the window.
    """
    in_run = joined_phases(times.phases)
    for name, lost in joined_phases(times.lost).items():
        in_run[name] = in_run.get(name, 0.0) - lost
    in_window = joined_phases(window.phases)
    work = _work(in_run)
    work_in_window = _work(in_window)
    if times.steps.source == "window" or work <= 0 or not work_in_window:
        return WorkRatio(1.0)
    longer = longer_phase(in_run, in_window, times.steps.mean)
    if longer is not None:
        return WorkRatio(longer.others, longer)
    return WorkRatio(work / work_in_window)


def _work(phases: Mapping[str, float]) -> float:
    return sum(seconds for phase, seconds in phases.items() if phase not in NO_WORK)


def unlike_window(window: WindowSummary | None, ledger: Ledger | None) -> str:
    """Return the text that the steps of the window are not typical of the run, or an empty text."""
    times = times_of(window, ledger)
    if window is None or times is None:
        return ""
    ratio = work_ratio(window, times)
    if ratio.is_similar:
        return ""
    if ratio.longer is not None:
        longer = ratio.longer
        factor = _factor(longer.seconds / longer.in_window)
        return (
            f"{phase_label(longer.name)} takes {factor} as long in the run as in the window, so "
            "the profiled steps do not show where this time is spent"
        )
    return (
        f"without data wait and other, a step of the run takes {_factor(ratio.factor)} as long as a "
        "step of the window, so the window may not be typical of the run"
    )


def _factor(ratio: float) -> str:
    digits = 2 if ratio < 1 else 1
    return f"{ratio:.{digits}f} ×"


def _quantile(rising: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values, for example the median if `share` is 0.5.

    The result is always one of the values.
    """
    if not rising:
        return None
    place = max(int(-(-share * len(rising) // 1)) - 1, 0)
    return rising[place]


def _times_of_run(
    groups: Sequence[StepGroup], ledger: Ledger, window: WindowSummary | None
) -> StepTimes:
    number = sum(group.steps for group in groups)
    mean = sum(group.seconds for group in groups) / number
    phases = mean_phases(groups)
    lost = scaled(lost_in_slow_steps(ledger), 1 / number)
    if window is not None:
        if window.profile.run.device_type not in {"cpu", None}:
            phases = _on_device(phases, mean, window, lost, _usual_logging(groups))
        else:
            phases = _with_divided_other(phases, window.phases, _usual_logging(groups))
        phases = with_recompute(phases, window.recomputed)
    p50 = percentile(ledger.durations, 0.5)
    p95 = percentile(ledger.durations, 0.95)
    steps = _steps(number, mean, p50, p95, "run")
    steps = replace(steps, said=f"{steps.said}{_not_in_steps(ledger, mean)}")
    if ledger.ranks > 1:
        steps = replace(steps, said=f"rank {ledger.rank}, {steps.said}")
    return StepTimes(steps, phases, lost)


NOT_IN_STEPS = {
    "validation": "validation",
    "inference": "inference",
    "checkpoint_save": "saving checkpoints",
}
"""Work that is not in the times of steps, with the labels in the text about these times."""

LEAST_NOT_IN_STEPS = 0.02
"""Such work is mentioned if it takes at least this share of the mean step."""


def _not_in_steps(ledger: Ledger, mean: float) -> str:
    """Say how much work is not in the times of steps: `; not included per step: 13 ms of …`."""
    parts = []
    for category, label in NOT_IN_STEPS.items():
        seconds = ledger.seconds.get(category, 0.0) / ledger.counted_steps
        if seconds >= LEAST_NOT_IN_STEPS * mean:
            parts.append(f"{units.duration(seconds)} of {label}")
    if not parts:
        return ""
    return f"; not included per step: {', '.join(parts)}"


def _usual_logging(groups: Sequence[StepGroup]) -> float:
    """Return the seconds of logging in a usual step: 0 if most steps do not log."""
    return median(group.spent.get("logging", 0.0) / group.steps for group in groups)


def _with_divided_other(
    phases: Mapping[str, float], of_window: Mapping[str, float], logging: float
) -> dict[str, float]:
    """Divide the ledger's phase `other` into the phases that only the window has, and the rest.

    `phases` is from the ledger, and `of_window` from the window. The ledger has no phases between
    backward and the optimizer step, such as gradient clipping; their time is part of `other`. The
    window shows the proportions in which to divide `other`. But these phases get at most their time
    in the window, multiplied by the factor by which all other work takes longer in the run: the
    rest of `other` may be work that the window does not have. Inference is a category of its own in
    the ledger, and no part of its steps.
    """
    divided = dict(phases)
    known = phases.keys() | CATEGORIES.keys()
    parts = {name: took for name, took in of_window.items() if name not in known}
    # In a window, logging is a part of `other`.
    other_in_window = max(of_window.get("other", 0.0) - logging, 0.0)
    total = sum(parts.values()) + other_in_window
    if "other" not in phases or not total:
        return divided
    work_in_window = _work(of_window) - sum(parts.values())
    longer = 1.0
    if work_in_window > 0:
        longer = max(_work(phases) / work_in_window, 1.0)
    divided |= scaled(parts, min(phases["other"] / total, longer))
    divided["other"] = phases["other"] - sum(divided[name] for name in parts)
    return divided


def _steps(
    number: int, mean: float, p50: float | None, p95: float | None, source: Literal["run", "window"]
) -> Steps:
    said = (
        f"{counted(number, 'unprofiled step')} of the {source}: p50 {units.duration(p50)}, "
        f"p95 {units.duration(p95)}, mean {units.duration(mean)}"
    )
    return Steps(number=number, mean=mean, p50=p50, p95=p95, source=source, said=said)


def _on_device(
    phases: Mapping[str, float],
    mean: float,
    window: WindowSummary,
    lost: Mapping[str, float],
    logging: float,
) -> dict[str, float]:
    """Return the mean seconds by phase of a step that runs on a GPU or another device.

    The times in the ledger are host times. On a device, they show how long the host launched
    kernels, and not how long the kernels ran. So only the data wait and the time that slow steps
    lost come from the ledger. The rest of the step is divided in the same proportions as in the
    window.
    """
    no_part = {"data"} | CATEGORIES.keys()
    usual = {name: took for name, took in window.phases.items() if name not in no_part}
    if "other" in usual:
        # In a window, logging is a part of `other`.
        usual["other"] = max(usual["other"] - logging, 0.0)
    total = sum(usual.values())
    if not total:
        return {**phases}
    known = {name: took for name, took in lost.items() if name != "data"}
    if phases.get("data"):
        known["data"] = phases["data"]
    if phases.get("logging"):
        known["logging"] = phases["logging"]
    rest = max(mean - sum(known.values()), 0.0)
    return summed([*known.items(), *scaled(usual, rest / total).items()])


_ORDER = ("data", "transfer", "forward", "prefill", "decode", "recompute", "backward", "wait")


_LAST = ("optimizer", "logging", "other")


def _place(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases in the order in which a step runs them.

    User-defined phases come before the optimizer.
    """
    if phase in _ORDER:
        return _ORDER.index(phase), ""
    if phase in _LAST:
        return len(_ORDER) + 1 + _LAST.index(phase), ""
    return len(_ORDER), phase


def phase_parts(phases: Mapping[str, float]) -> Iterator[Part]:
    """Yield the phases in the order in which a step runs them, with mean seconds and shares."""
    mean = sum(phases.values())
    for name in sorted(phases, key=_place):
        seconds = phases[name]
        share = ratio(seconds, mean) or 0.0
        yield Part(
            name=name,
            label=phase_label(name),
            seconds=seconds,
            share=share,
            text=f"{units.duration(seconds)}, {units.percent(share)}",
            advice="",
        )
