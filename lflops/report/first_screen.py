"""Build the first screen of a run, which is what a user sees first on the page.

The terminal and the log show the same data as text. Its parts are a few figures, the share of time
that was training, the phases of a step, and cards. A card is a suggestion for what to do next.

Times and the data wait cover all unprofiled steps of the run and come from its ledger. Modules and
work come from the last window. Without a ledger, the times come from the unprofiled steps of the
window. Without a window, only times are known.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import with_recompute
from lflops.findings.evaluate import findings_of_run
from lflops.findings.finding import LAST, Finding, least_share, ordered
from lflops.findings.part_rule import BURST_RATIO
from lflops.findings.run_rule import RunEvidence, preempted_share
from lflops.ledger.account import CATEGORIES, Ledger, StepGroup, percentile
from lflops.memory.peak import usable_bytes
from lflops.profile.module_names import plain
from lflops.profile.profile import Profile
from lflops.profile.records import ready_for_threads
from lflops.profile.series import ratio, scaled, summed
from lflops.report.report import Fact, Part, device_names, report_of
from lflops.report.text import WORDS, counted, joined, phase_label
from lflops.report.verdict import unseen_because

Level = Literal["high", "medium", "low"]

MOST_CARDS = 6
"""Maximum number of cards of a first screen.

The page shows the first `FIRST_CARDS` cards, and the other cards after a click. Texts only have the
first `FIRST_CARDS` cards.
"""

FIRST_CARDS = 3

LEAST_SAVING = 0.01
"""A finding that is not an issue gets a card only if it may save at least this share of a step."""

PREEMPTED_SHARE = 0.05
"""Confidence is low if steps waited for a CPU core for at least this share of the training time.

If no issue was found in such a run, the report says that it cannot tell whether anything is wrong.
"""

PREEMPTED = "this machine was busy during a part of the run, or the process was stopped"

MANY_STEPS = 30
"""Confidence in a cost that was measured in at least this many steps of the run is high."""

PROVEN_SHARE = 0.65
"""Confidence in a finding is high if at least this share of similar findings was right."""

REGULAR_SHARE = 0.9
"""Long waits are reported as regular (`every 3rd step`) if most of them are equally far apart.

At least this share of the distances between one long wait and the next must be the same.
"""

FEWEST_STALLS = 3
"""Minimum number of long waits to describe how often they occur."""

MOST_OTHERS = 3
"""Maximum number of categories that the sentence about the share of time trained names."""

CAUSES_WITHOUT_CARD = LAST | {"ideal_compute", "no_products", "all_forward", "all_backward"}
"""Causes of findings that get no card, because their time cannot be saved."""

VIEWS = WORDS["views"]
"""The view (tab) of the page that shows the evidence of a finding, keyed by the finding's cause.

For causes that are not in this mapping, the view is `modules` if the finding names a module, and
otherwise `run`.
"""


class Confidence(Struct, frozen=True, kw_only=True):
    """A level of confidence in a value, with the reasons."""

    level: Level
    why: tuple[str, ...] = ()


class Card(Struct, frozen=True, kw_only=True):
    """A suggestion for one thing to do next.

    Attributes:
        cause: The name of the finding's rule.
        title: A few words that name the cause of the cost.
        seconds: Seconds per step that the action saves at most, or `None` if that is unknown.
        text: The saving as text, such as `−29.0 ms`.
        action: Advice on what to do. Empty if there is no general advice.
        sentence: The finding as a sentence.
        view: The view of the page that shows the evidence.
        module: The module that this view shows, if the finding is about a module.
        confidence: Confidence in the finding.
        is_issue: Whether this is an issue to fix. If not, the card only shows where the time goes.
    """

    cause: str
    title: str
    seconds: float | None
    text: str
    action: str
    sentence: str
    view: str
    module: str
    confidence: Confidence
    is_issue: bool


class Steps(Struct, frozen=True, kw_only=True):
    """The unprofiled steps that all times are computed from.

    Attributes:
        number: Number of steps.
        mean: Mean in seconds.
        p50: Median in seconds.
        p95: 95th percentile in seconds.
        source: "run" for all unprofiled steps of the run, "window" for the unprofiled steps of the
            window.
        said: All these values as text.
    """

    number: int
    mean: float
    p50: float | None
    p95: float | None
    source: Literal["run", "window"]
    said: str


class RankShown(Struct, frozen=True, kw_only=True):
    """A rank, which the page draws as a dot.

    Attributes:
        lost: Seconds per step that the other ranks wait for this rank.
        said: Text with the facts about this rank.
    """

    rank: int
    status: str
    lost: float
    said: str


class FirstScreen(Struct, frozen=True, kw_only=True):
    """The first screen: the most important facts about a run, in the order in which they are read.

    Attributes:
        title: The class of the model, or another description if it is unknown.
        header: Facts such as steps, duration and chip.
        confidence: Confidence in the figures.
        figures: At most four numbers, such as the step time and MFU, with labels.
        trained: The share of the run's time that was training, as a sentence. Empty without a
            ledger.
        steps: Times of the unprofiled steps, or `None` if no step was timed.
        cards: Suggestions for what to do next, the most urgent first.
        nothing: Reason why there is no card. Empty if there are cards.
        phases: The phases of a step with their mean times.
        hint: Advice on how to make MFU known if the peak of the chip is unknown. Otherwise empty.
        ranks: All ranks. Empty if the run has only one rank.
    """

    title: str
    header: tuple[str, ...]
    confidence: Confidence
    figures: tuple[Fact, ...]
    trained: str
    steps: Steps | None
    cards: tuple[Card, ...]
    nothing: str
    phases: tuple[Part, ...]
    hint: str
    ranks: tuple[RankShown, ...]


class WindowSummary(Struct, frozen=True, kw_only=True):
    """The data of a window that the first screen needs.

    Attributes:
        title: The class of the model.
        device: Names of the chips.
        mean: Mean duration of the unprofiled steps, in seconds.
        phases: Mean seconds of each phase. They add up to `mean`.
        recomputed: Share of the backward time in which activations are recomputed.
        flops: FLOPs of matmuls in forward and backward, of one rank in one step.
        peak: Peak FLOP/s that MFU is relative to.
        hint: Advice on how to make the peak known. Empty if it is not needed.
        peak_bytes: The peak of live memory.
        usable_bytes: Memory of the chip that a process can use.
        rates: Throughput in tokens and in samples per second. The first rate is shown only if there
            is no ledger, because then the share of time that was training is unknown.
        findings: The findings about the step.
        unseen: Reason why an issue might exist although none was found, for example that too few
            steps were measured. `None` if an issue would have been found.
        confidence: Texts about the measurement, such as the number of timed steps, and reasons why
            the figures are less reliable.
        ranks: All ranks. Empty if the run has only one rank.
        profile: The profile, reduced to its run and its steps.
    """

    title: str
    device: str
    mean: float | None
    phases: Mapping[str, float]
    recomputed: float
    flops: float | None
    peak: float | None
    hint: str
    peak_bytes: int | None
    usable_bytes: int | None
    rates: tuple[Fact, ...]
    findings: tuple[Finding, ...]
    unseen: str | None
    confidence: tuple[str, ...]
    ranks: tuple[RankShown, ...]
    profile: Profile


ready_for_threads(WindowSummary)


def window_summary(analysis: Analysis) -> WindowSummary:
    """Extract the data that the first screen needs from a profile."""
    profile = analysis.profile
    report = report_of(analysis)
    times = analysis.step_times
    reached = analysis.utilization
    chip = analysis.chip
    rate = reached.flops_per_second
    flops = None
    if rate is not None and times.mean is not None:
        flops = rate * times.mean
    usable = None
    if chip is not None:
        usable = usable_bytes(chip)
    rates = []
    for name in ("tokens/s", "samples/s"):
        fact = report.fact(name)
        if fact is not None and fact.value is not None:
            rates.append(fact)
    return WindowSummary(
        title=profile.modules[""].class_name or "a script",
        device=" and ".join(device_names(profile)),
        mean=times.mean,
        phases=times.parts,
        recomputed=times.recomputed_share,
        flops=flops,
        peak=reached.peak_flops_per_second,
        hint=_hint(analysis),
        peak_bytes=analysis.peak_bytes,
        usable_bytes=usable,
        rates=tuple(rates),
        findings=report.verdict.findings,
        unseen=unseen_because(analysis),
        confidence=tuple(filter(None, report.verdict.confidence.split("; "))),
        ranks=tuple(_ranks(analysis)),
        profile=replace(
            profile,
            modules={},
            op_counts=(),
            unsupported=(),
            communication=(),
            waits=(),
            memory=None,
            trace=None,
            ranks=(),
            rank_stats=(),
            rank_comparison=None,
            unprofiled_comparison=None,
            notes=(),
            timelines=(),
        ),
    )


def _hint(analysis: Analysis) -> str:
    """Describe how to make the peak FLOP/s of the chip known, because MFU needs it.

    Return the empty string if the peak is known, or if nothing was counted or timed.
    """
    reached = analysis.utilization
    if reached.flops_per_second is None or reached.peak_flops_per_second is not None:
        return ""
    device = analysis.profile.run.device_name
    return f'MFU needs the peak of {device}: FlopsMonitor(hardware="measure") measures it'


def _ranks(analysis: Analysis) -> Iterator[RankShown]:
    listed = analysis.profile.ranks
    if len(listed) < 2:
        return
    lost = summed((row.slow_rank, row.seconds_lost) for row in analysis.stragglers.rows)
    for rank in listed:
        seconds = lost.get(rank.rank, 0.0)
        said = ""
        if seconds:
            said = f"the other ranks wait {units.duration(seconds)} per step for it"
        status = ""
        if rank.status != "ok":
            status = rank.status
        yield RankShown(
            rank=rank.rank,
            status=rank.status,
            lost=seconds,
            said=joined(f"rank {rank.rank}", rank.host, status, said),
        )


class _Times(NamedTuple):
    """Statistics of the unprofiled steps, and their mean seconds by phase."""

    steps: Steps
    phases: Mapping[str, float]


def first_screen(window: WindowSummary | None, ledger: Ledger | None) -> FirstScreen:
    """Build the first screen of a run from its last window and its ledger.

    A ledger only has training steps, so it is not used for a window of another stage.
    """
    if window is not None and window.profile.run.stage not in {None, "train"}:
        ledger = None
    times = _times(window, ledger)
    confidence = _confidence(window, ledger)
    steps = None
    phases: Mapping[str, float] = {}
    mean = 0.0
    if times is not None:
        steps = times.steps
        phases = times.phases
        mean = steps.mean
    cards: list[Card] = []
    for finding in findings_of(window, ledger):
        if _is_saving(finding, mean):
            cards.append(_card(finding, confidence, ledger))
    hint = ""
    ranks: Sequence[RankShown] = ()
    if window is not None:
        hint = window.hint
        ranks = window.ranks
    return FirstScreen(
        title=_title(window),
        header=tuple(_header(window, ledger)),
        confidence=confidence,
        figures=tuple(_figures(window, ledger, times)),
        trained=_trained(ledger),
        steps=steps,
        cards=tuple(cards[:MOST_CARDS]),
        nothing="" if cards else _nothing(times, confidence),
        phases=tuple(_parts(phases)),
        hint=hint,
        ranks=tuple(ranks),
    )


def _title(window: WindowSummary | None) -> str:
    if window is None:
        return "A run without a window"
    return window.title


def _header(window: WindowSummary | None, ledger: Ledger | None) -> Iterator[str]:
    if ledger is not None:
        yield counted(ledger.steps, "step")
        yield units.long_duration(ledger.total)
    if window is not None:
        run = window.profile.run
        yield f"{window.device} on {run.host}"
        if run.world_size > 1:
            yield counted(run.world_size, "rank")
        precision = run.precision or run.dtype
        if precision:
            yield precision
    if ledger is not None:
        if len(ledger.starts) > 1:
            yield counted(len(ledger.starts), "start")
        if ledger.starts[-1].ended != "finished":
            yield ledger.starts[-1].ended
        began = datetime.fromtimestamp(ledger.starts[0].begin, UTC)
        yield f"began {began:%Y-%m-%d %H:%M} UTC"
    elif window is not None:
        created = window.profile.run.created[:16].replace("T", " ")
        yield f"profiled {created} UTC"


def _times(window: WindowSummary | None, ledger: Ledger | None) -> _Times | None:
    """Return the times of the unprofiled steps of the run.

    Without a ledger, return the times of the unprofiled steps of the window.
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
    return _Times(steps, with_recompute(window.phases, window.recomputed))


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
) -> _Times:
    number = sum(group.steps for group in groups)
    mean = sum(group.seconds for group in groups) / number
    sums: list[tuple[str, float]] = []
    for group in groups:
        sums += group.spent.items()
    phases = summed(sums)
    for name in phases:
        phases[name] /= number
    if window is not None:
        if window.profile.run.device_type not in {"cpu", None}:
            phases = _on_device(phases, mean, window)
        else:
            phases = _with_divided_other(phases, window.phases)
        phases = with_recompute(phases, window.recomputed)
    p50 = percentile(ledger.durations, 0.5)
    p95 = percentile(ledger.durations, 0.95)
    steps = _steps(number, mean, p50, p95, "run")
    if ledger.ranks > 1:
        steps = replace(steps, said=f"rank {ledger.rank}: {steps.said}")
    return _Times(steps, phases)


def _with_divided_other(
    phases: Mapping[str, float], of_window: Mapping[str, float]
) -> dict[str, float]:
    """Divide the phase `other` of the ledger as the window divides it.

    The ledger has no phases between backward and the optimizer, such as gradient clipping. Their
    time is part of its phase `other`.
    """
    divided = dict(phases)
    parts = {name: took for name, took in of_window.items() if name not in phases}
    total = sum(parts.values()) + of_window.get("other", 0.0)
    if "other" not in phases or not total:
        return divided
    for name, took in parts.items():
        divided[name] = phases["other"] * took / total
    divided["other"] = phases["other"] * of_window.get("other", 0.0) / total
    return divided


def _steps(
    number: int, mean: float, p50: float | None, p95: float | None, source: Literal["run", "window"]
) -> Steps:
    said = (
        f"{counted(number, 'unprofiled step')} of the {source}: p50 {units.duration(p50)}, "
        f"p95 {units.duration(p95)}, mean {units.duration(mean)}"
    )
    return Steps(number=number, mean=mean, p50=p50, p95=p95, source=source, said=said)


def _on_device(phases: Mapping[str, float], mean: float, window: WindowSummary) -> dict[str, float]:
    """Return the mean seconds by phase of a step that runs on a GPU or another device.

    The times in the ledger are host times. On a device, they show how long the host launched
    kernels, and not how long the kernels ran. So only the data wait comes from the ledger. The rest
    of the step is divided in the same proportions as in the window.
    """
    waited = phases.get("data", 0.0)
    rest = dict(window.phases)
    rest.pop("data", None)
    total = sum(rest.values())
    if not total:
        return {**phases}
    scale = max(mean - waited, 0.0) / total
    data = {}
    if waited:
        data["data"] = waited
    return data | scaled(rest, scale)


_ORDER = ("data", "transfer", "forward", "prefill", "decode", "recompute", "backward", "wait")
_LAST = ("optimizer", "other")


def _place(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases in the order in which a step runs them.

    User-defined phases come before the optimizer.
    """
    if phase in _ORDER:
        return _ORDER.index(phase), ""
    if phase in _LAST:
        return len(_ORDER) + 1 + _LAST.index(phase), ""
    return len(_ORDER), phase


def _parts(phases: Mapping[str, float]) -> Iterator[Part]:
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


# Figures.


def _figures(
    window: WindowSummary | None, ledger: Ledger | None, times: _Times | None
) -> Iterator[Fact]:
    if times is not None:
        yield _of_step(times.steps)
    if window is not None and window.flops is not None and times is not None:
        yield _of_compute(window, window.flops / times.steps.mean)
    if ledger is not None:
        yield _time_trained(ledger)
    elif window is not None:
        yield from window.rates[:1]
    if window is not None and window.peak_bytes is not None:
        yield _of_memory(window.peak_bytes, window.usable_bytes)


def _of_step(steps: Steps) -> Fact:
    number = counted(steps.number, "unprofiled step")
    return Fact(
        name="step",
        label="step",
        value=steps.mean,
        unit="s",
        text=units.duration(steps.mean),
        remark=f"mean of {number} of the {steps.source}",
    )


def _of_compute(window: WindowSummary, rate: float) -> Fact:
    if window.peak is None:
        return Fact(
            name="achieved",
            label="achieved",
            value=rate,
            unit="FLOP/s",
            text=units.rate(rate, "FLOP/s"),
            remark="of an unknown peak",
        )
    peak = units.rate(window.peak, "FLOP/s")
    return Fact(
        name="MFU",
        label="MFU",
        value=rate / window.peak,
        unit="of peak",
        text=units.of_peak(rate / window.peak),
        remark=f"{units.rate(rate, 'FLOP/s')} of {peak}",
    )


def _time_trained(ledger: Ledger) -> Fact:
    share = trained_share(ledger)
    return Fact(
        name="trained",
        label="time trained",
        value=share,
        unit="share",
        text=units.percent(share),
        remark=joined(
            f"of {units.long_duration(ledger.total)}", *_other_groups(ledger)[:1], separator="; "
        ),
    )


def _other_groups(ledger: Ledger) -> list[str]:
    """Return what else than training took time in a run, each with its share, largest first."""
    others = []
    for group, seconds in ledger.by_group().items():
        if group != "training":
            share = ratio(seconds, ledger.total)
            others.append(f"{CATEGORIES[group]} {units.percent(share)}")
    return others


def _of_memory(peak: int, usable: int | None) -> Fact:
    of_chip = ""
    if usable is not None:
        of_chip = f"of {units.size(usable)} that the chip has"
    return Fact(
        name="peak live memory",
        label="peak live memory",
        value=peak,
        unit="bytes",
        text=units.size(peak),
        remark=of_chip,
    )


def trained_share(ledger: Ledger) -> float | None:
    """Share of the run's time that was spent in training steps that were not slow."""
    if not ledger.total:
        return None
    return ledger.by_group().get("training", 0.0) / ledger.total


def _trained(ledger: Ledger | None) -> str:
    """Return a sentence with the share of the run's time that was training.

    It also names the largest other categories. It is empty if there is no ledger.
    """
    if ledger is None or not ledger.total:
        return ""
    total = units.long_duration(ledger.total)
    trained = f"{units.percent(trained_share(ledger))} of {total} was training"
    others = ", ".join(_other_groups(ledger)[:MOST_OTHERS])
    return f"{joined(trained, others, separator='; ')}."


# Confidence.


def _confidence(window: WindowSummary | None, ledger: Ledger | None) -> Confidence:
    if window is None:
        return Confidence(level="low", why=("no window was profiled", "only the ledger of the run"))
    why = []
    if window.unseen is not None:
        why.append(window.unseen)
    if ledger is not None and preempted_share(ledger) >= PREEMPTED_SHARE:
        why.append(PREEMPTED)
    is_low = bool(why)
    doubts = [text for text in window.confidence if text not in why]
    why += doubts
    level: Level = "high"
    if is_low:
        level = "low"
    elif len(doubts) > 1:
        # The first text has the number of timed steps.
        level = "medium"
    return Confidence(level=level, why=tuple(why))


def _nothing(times: _Times | None, confidence: Confidence) -> str:
    if times is None:
        return "No unprofiled step was timed."
    if confidence.level == "low":
        return f"Cannot tell whether anything is wrong: {confidence.why[0]}."
    return "No known issue found."


# Findings and cards.


def findings_of(window: WindowSummary | None, ledger: Ledger | None) -> list[Finding]:
    """Return the findings about a run, from its last window and its ledger.

    If a finding is about a whole phase, its cost is the mean over all unprofiled steps of the run,
    and not only over the steps of the window.
    """
    profile = None
    of_step: Sequence[Finding] = ()
    of_window: Mapping[str, float] = {}
    if window is not None:
        profile = window.profile
        of_step = window.findings
        of_window = with_recompute(window.phases, window.recomputed)
    if ledger is None:
        return ordered(of_step)
    found = _with_run_findings(of_step, ledger, profile)
    times = _times(window, ledger)
    if times is not None and times.steps.source == "run":
        ratio = _usual_share(of_window, times.phases)
        found = [_of_all_steps(finding, times, of_window, ledger, ratio) for finding in found]
    return ordered(found)


def _with_run_findings(
    of_step: Sequence[Finding], ledger: Ledger, profile: Profile | None
) -> list[Finding]:
    """Add the findings about the whole run to the findings about a step.

    Findings whose time is already explained by another finding are dropped.
    """
    # All steps of the run show the data wait better than the steps of the window.
    step_issues = {finding.cause for finding in of_step if finding.is_issue} - {"data"}
    run = RunEvidence(ledger=ledger, profile=profile, step_issues=frozenset(step_issues))
    of_run = findings_of_run(run)
    is_in_run = any(finding.cause == "data" for finding in of_run)
    findings = [*of_run]
    for finding in of_step:
        if finding.cause != "data" or not is_in_run:
            findings.append(finding)
    collecting = [finding.seconds or 0.0 for finding in findings if finding.cause == "gc"]
    explained = 2 * max(collecting, default=0.0)
    issues = {finding.cause for finding in findings if finding.is_issue}
    kept = []
    for finding in findings:
        # The garbage collector runs in no phase.
        is_collecting = finding.cause == "other" and (finding.seconds or 0.0) <= explained
        is_twice = not finding.is_issue and finding.cause in issues
        if not is_collecting and not is_twice:
            kept.append(finding)
    return kept


_PHASES = {"recomputed": "recompute"}
"""The phase that a finding is about, keyed by the finding's cause.

For all other findings about a phase, the cause is the name of the phase.
"""


def _usual_share(of_window: Mapping[str, float], of_run: Mapping[str, float]) -> float:
    """Return by what to multiply times of the window to get the usual times of the run.

    It is less than 1 if the work in the window took longer, for example because of other programs.
    Otherwise, a cost could exceed its phase.
    """
    in_window = _work(of_window)
    in_run = _work(of_run)
    if in_run and in_window > in_run:
        return in_run / in_window
    return 1.0


def _work(phases: Mapping[str, float]) -> float:
    """Return the seconds of all phases except fetching data and what is in no phase."""
    return sum(phases.values()) - phases.get("data", 0.0) - phases.get("other", 0.0)


def _of_mean_step(finding: Finding, mean: float, ratio: float) -> Finding:
    """State the cost of a finding about the window as a share of the mean step of the run.

    The cost is multiplied by `ratio`, the result of `_usual_share`. The cost of a slow rank is a
    difference between ranks, and is not reduced.
    """
    if finding.of != "step" or not finding.seconds:
        return finding
    seconds = finding.seconds
    if finding.rank is None:
        seconds *= ratio
    share = seconds / mean
    cost = _cost(finding.share, finding.seconds)
    sentence = finding.sentence.replace(cost, _cost(share, seconds))
    return replace(finding, seconds=seconds, share=share, sentence=sentence)


def _of_all_steps(
    finding: Finding,
    times: _Times,
    of_window: Mapping[str, float],
    ledger: Ledger,
    ratio: float,
) -> Finding:
    """Replace the seconds of a finding about a whole phase with the mean over all unprofiled steps.

    The cost of another finding is only compared with the mean step. `ratio` is the result of
    `_usual_share`.
    """
    phase = _PHASES.get(finding.cause, finding.cause)
    seconds = times.phases.get(phase)
    if seconds is None:
        return _of_mean_step(finding, times.steps.mean, ratio)
    if phase == "other":
        # The step is an own finding, and no reason why all others take long.
        seconds -= _slowest(ledger) / times.steps.number
    share = seconds / times.steps.mean
    cost = _cost(share, seconds)
    if phase == "data":
        stalls = _stalls(ledger)
        often = "" if stalls is None else f": {units.duration(stalls.seconds)} {stalls.often}"
        sentence = f"{cost} is spent waiting for data{often}."
    elif _is_whole(finding, of_window.get(phase)):
        sentence = finding.sentence.replace(_cost(finding.share, finding.seconds), cost)
    else:
        return _of_mean_step(finding, times.steps.mean, ratio)
    return replace(finding, seconds=seconds, share=share, of="step", sentence=sentence)


def _cost(share: float | None, seconds: float | None) -> str:
    return f"{units.percent(share)} of the step ({units.duration(seconds)})"


def _slowest(ledger: Ledger) -> float:
    """Seconds that the slowest step lost outside all phases, if there is one such step at all.

    If there are more, they are typical of the run, and the result is 0.
    """
    slow = [
        step.cost for step in ledger.slow_steps if step.cause == "unknown" and step.phase == "other"
    ]
    return slow[0] if len(slow) == 1 else 0.0


def _is_whole(finding: Finding, phase_seconds: float | None) -> bool:
    """Return whether the cost of a finding is the whole time of a phase.

    `phase_seconds` is the mean time of this phase in the window, or `None` if it was not timed.
    """
    if finding.of != "step" or finding.rank is not None or not finding.seconds:
        return False
    return phase_seconds is not None and math.isclose(finding.seconds, phase_seconds)


class Stalls(NamedTuple):
    """Long waits for data in a run in which most waits are short.

    Attributes:
        seconds: Mean duration of the long waits.
        often: How often they occur, such as `every 3rd step` or `in 7 of 90 steps`.
    """

    seconds: float
    often: str


def _stalls(ledger: Ledger | None) -> Stalls | None:
    """Return the long waits for data of a run, or `None` if there are none."""
    if ledger is None:
        return None
    return stalls_in(
        [group.spent.get("data", 0.0) for group in ledger.unprofiled if group.steps == 1]
    )


def stalls_in(waits: Sequence[float]) -> Stalls | None:
    """Return the long waits, or `None` if the time is similar in all steps.

    `waits` are the seconds of waiting in each step, in the order of the steps.
    """
    if not waits:
        return None
    rising = sorted(waits)
    # A single step may have a much longer wait than all other steps.
    longest = rising[-2] if len(rising) > FEWEST_STALLS else rising[-1]
    long = [place for place, value in enumerate(waits) if value > longest / 2]
    usual = rising[: len(rising) - len(long)]
    if len(long) < FEWEST_STALLS or len(usual) < len(long):
        return None
    if longest < BURST_RATIO * usual[len(usual) // 2]:
        return None
    distances = [after - before for before, after in pairwise(long)]
    usual_distance = sorted(distances)[len(distances) // 2]
    is_regular = distances.count(usual_distance) >= REGULAR_SHARE * len(distances)
    # Steps in a row are a slow part of the run, not a rhythm.
    often = f"in {len(long)} of {len(waits)} steps"
    if is_regular and usual_distance > 1:
        often = f"every {_ordinal(usual_distance)} step"
    return Stalls(sum(waits[place] for place in long) / len(long), often)


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"


def _is_saving(finding: Finding, mean: float) -> bool:
    if finding.cause in CAUSES_WITHOUT_CARD:
        return False
    if finding.is_issue or finding.seconds is None:
        return True
    return bool(finding.fix) and finding.seconds >= LEAST_SAVING * mean


def _card(finding: Finding, of_screen: Confidence, ledger: Ledger | None) -> Card:
    seconds = finding.seconds
    saving = "unknown"
    if seconds is not None:
        saving = f"−{units.duration(seconds)}"
    usual_view = "modules" if finding.module else "run"
    view = VIEWS.get(finding.cause, usual_view)
    return Card(
        cause=finding.cause,
        title=_title_of(finding, ledger),
        seconds=seconds,
        text=saving,
        action=finding.fix,
        sentence=finding.sentence,
        view=view,
        module=finding.module,
        confidence=_confidence_of(finding, of_screen, ledger),
        is_issue=finding.is_issue,
    )


def _title_of(finding: Finding, ledger: Ledger | None) -> str:
    if finding.cause == "data":
        stalls = _stalls(ledger)
        if stalls is not None:
            return f"Data loading stalls {stalls.often}"
    title = WORDS["titles"].get(finding.cause, plain(finding.cause.replace("_", " ")))
    if finding.rank is not None:
        title = f"{title} {finding.rank}"
    if finding.module:
        title = f"{title} in {plain(finding.module)}"
    return f"{title[0].upper()}{title[1:]}"


def _confidence_of(finding: Finding, of_screen: Confidence, ledger: Ledger | None) -> Confidence:
    if ledger is not None and (finding.of == "run" or finding.cause == "data"):
        number = sum(group.steps for group in ledger.unprofiled)
        if number >= MANY_STEPS and preempted_share(ledger) < PREEMPTED_SHARE:
            why = f"measured in all {number} unprofiled steps of the run"
            return Confidence(level="high", why=(why,))
    level: Level = "medium"
    if finding.right is not None:
        is_proven = least_share(*finding.right) >= PROVEN_SHARE
        if is_proven and of_screen.level != "low":
            level = "high"
        return Confidence(level=level, why=(finding.track_record,))
    if not finding.is_issue:
        if of_screen.level == "low":
            level = "low"
        return Confidence(level=level, why=("below the threshold of an issue",))
    return Confidence(level=of_screen.level, why=("above the threshold of an issue",))
