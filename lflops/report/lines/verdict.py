"""What a reader acts on: how fast a step is, why it is no faster, what to do next, and how far to trust that."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.causes import Cause
from lflops.analyze.modules.outliers import Doubt
from lflops.profile.notes import are_times_far_off, time_factors
from lflops.report.lines.parts import advice, what_it_is
from lflops.report.lines.ranks import slowest_rank
from lflops.report.lines.text import counted, itself_of, plain, plus_minus

_CAUSES, _NEXT = 3, 2
_UNSTEADY = 0.1  # of the median step: a mean or a quartile that is farther off is worth a word
_WIDE = 0.3  # of the median step: steps whose quartile is farther off are unsteady
_BURST = 5  # times as long as in the other steps
VERY_BUSY = 0.2  # from so much on the verdict itself says so
_BUSY = 0.05  # of the CPU time that was asked for: from so much on, what other processes had is worth a word
_REMEASURE = "Measure the peak again on an idle machine: lflops hardware --measure"


class Finding(Struct, frozen=True, kw_only=True):
    """A cause in words.

    Attributes:
        cause: Its kind, for programs.
        said: The sentence, with the cost.
        module: Where it is; empty is no module in particular.
        rank: The slow rank.
        seconds: What it costs a step; `None` is unknown.
        share: That over the step.
        next: What usually shortens it.
        is_fault: Whether it is something wrong, rather than where the time of any such training goes.
    """

    cause: str
    said: str
    module: str = ""
    rank: int | None = None
    seconds: float | None = None
    share: float | None = None
    next: str = ""
    is_fault: bool = False


class Verdict(Struct, frozen=True, kw_only=True):
    """The first lines of every drawing."""

    said: str  # how fast and how good the step is, or of a plan its least time and whether it fits
    findings: tuple[Finding, ...] = ()  # all that it is longer for, the most costly first
    why: tuple[str, ...] = ()  # the first of these, each with its cost
    next: tuple[str, ...] = ()  # what usually shortens that, in the same order
    trust: str = ""  # what the figures rest on, how steady they are, and what is unknown
    doubts: int = 0  # how many further remarks make them less reliable


def verdict(analysis: Analysis, doubts: int) -> Verdict:
    """The verdict on a profile. So many remarks make its figures less reliable, besides those in the line of trust."""
    found = [each for cause in analysis.causes if (each := _finding(analysis, cause)) is not None]
    judged = [each for each in found if each.cause != "busiest"]
    told = [*judged[:_CAUSES], *(each for each in found if each.cause == "busiest")]
    steps = dict.fromkeys(each.next for each in told if each.next)
    if analysis.utilization.is_peak_too_low:
        steps = {_REMEASURE: None} | steps
    return Verdict(
        said=" ".join(_said(analysis)),
        findings=tuple(judged),
        why=tuple(each.said for each in told),
        next=tuple(f"{step}." for step in steps)[:_NEXT],
        trust="; ".join(_trust(analysis, doubts)),
        doubts=doubts,
    )


def _said(analysis: Analysis) -> Iterator[str]:
    run, reached, times = analysis.profile.run, analysis.utilization, analysis.step_times
    one = "step" if run.kind == "training" else "pass"
    if times.mean is None:
        if analysis.profile.is_counted:
            yield from _planned(analysis)
        return
    took = f"A {one} takes {units.duration(times.mean)}{' on this busy machine' if lost_share(analysis) >= VERY_BUSY else ''}"
    if reached.mfu is None:
        yield f"{took}."
        return
    yield f"{took}, at {units.percent(reached.mfu)} MFU."
    if reached.is_peak_too_low:
        what = "step" if reached.mfu > 1 else "layer"
        yield f"No {what} can exceed the peak, so the peak of {reached.hardware} is too low here, and MFU too high."


def _planned(analysis: Analysis) -> Iterator[str]:
    bound, room = analysis.lower_bound, analysis.room
    if bound is not None:
        yield f"A step takes at least {units.duration(bound.seconds)} on {bound.hardware}."
    if room is not None:
        need = f"{units.size(room.needed_bytes)} of {units.size(room.usable_bytes)}"
        yield {"fits": f"It fits: {need}.", "tight": f"It is tight: {need}.", "does not fit": f"It does not fit: {need}."}[room.verdict]
    if bound is None and room is None:
        yield f"A step has {units.count(sum(counts.macs for counts in analysis.totals.values()))} MACs. Nothing was timed."


def _finding(analysis: Analysis, cause: Cause) -> Finding | None:
    """A cause in words; `None` where it is not worth a sentence."""
    told = _told(analysis, cause)
    if told is None:
        return None
    return Finding(
        cause=cause.kind,
        said=told.why,
        module=cause.module,
        rank=int(cause.value) if cause.kind == "rank" and isinstance(cause.value, int | float) else None,
        seconds=cause.seconds,
        share=None if cause.seconds is None else analysis.step_times.share(cause.seconds),
        next=told.next,
        is_fault=cause.is_fault,
    )


class _Told(NamedTuple):
    """Why, with its cost, and what usually shortens it."""

    why: str
    next: str


class _Setting(NamedTuple):
    """What the sentence about a cause needs besides it."""

    cost: str  # as `59.3 % of the step (68.2 ms)`
    where: str  # the cause's module
    others: str  # those that it is compared with
    itself: str  # what the root is to a reader


def _told(analysis: Analysis, cause: Cause) -> _Told | None:
    if cause.kind == "rank":
        worst = slowest_rank(analysis, cause.seconds or 0.0)
        return None if worst is None else _Told(worst, "Look at that rank's machine, data and code: the view Ranks has its phases")
    share = None if cause.seconds is None else analysis.step_times.share(cause.seconds)
    one = "step" if analysis.profile.run.kind == "training" else "pass"
    itself = itself_of(analysis.profile.modules[""].kind)
    setting = _Setting(
        cost=f"{'roughly ' if cause.is_rough else ''}{units.percent(share)} of the {one} ({units.duration(cause.seconds)})",
        where=plain(cause.module) or itself,
        others=f"the {cause.others} others like it" if cause.others > 1 else "the other like it",
        itself=itself,
    )
    if (told := _told_alone(cause, setting)) is not None:
        return told
    mostly = f", mostly in {plain(cause.module)}" if cause.module else _in_bursts(analysis, cause.kind)
    what = what_it_is(analysis.profile, analysis.budget, cause.kind)
    return _Told(
        f"{setting.cost} is {'otherwise ' if cause.is_rest else ''}{what}{mostly}.", advice(analysis.profile, cause.kind, cause.module)
    )


def _in_bursts(analysis: Analysis, phase: str) -> str:
    """As `: 63.5 ms in 1 of 5 steps, else 600 µs`, where a phase is long in some steps and short in most."""
    known = sorted(step.phases.get(phase, 0.0) for step in analysis.profile.steps if step.is_clean and step.seconds is not None)
    long = [seconds for seconds in known if seconds > known[-1] / 2]
    short = known[: len(known) - len(long)]
    if not long or len(short) < len(long) or statistics.mean(long) < _BURST * statistics.mean(short):
        return ""
    return f": {units.duration(statistics.mean(long))} in {len(long)} of {len(known)} steps, else {units.duration(statistics.mean(short))}"


def _told_alone(cause: Cause, at: _Setting) -> _Told | None:
    """Of a cause that is no part of a budget and no phase."""
    where, value, usual, cost = at.where, cause.value, cause.usual, at.cost
    kind = f" ({plain(str(value))})" if value else ""
    match cause.kind:
        case "threads":
            why = f"torch computes with {value} threads on {usual} cores: they take turns, and all times are longer for it."
            advised = f"Give it no more threads than cores: torch.set_num_threads({usual}), or OMP_NUM_THREADS={usual}"
        case "slow":
            why = f"{where} takes {float(value or 0) / float(usual or 1):.1f}× as long as {at.others}: {cost} more."
            advised = f"Look for what only {where} does: hooks, prints, copies, its own code"
        case "calls":
            runs, usually = (units.count(float(calls or 0)) for calls in (value, usual))
            why = f"{where} runs {runs} operators where {at.others} run {usually} each: {cost} more."
            advised = f"Replace the loop in {where} by few large operators, or compile it"
        case "dtype":
            others, at_least = (at.others, f"{cost} more") if cause.others else ("the training", f"at least {cost}")
            why = f"{where} multiplies in {value}, {others} in {usual}: {at_least}."
            advised = f"Cast the parameters and inputs of {where} to {usual}"
        case "outside":
            why = f"{cost[0].upper()}{cost[1:]} is {at.itself}."
            keep = "Keep .item(), images, prints and loops in Python out of training_step and forward, if there are any"
            advised = f"{keep}; name the parts of them with lflops.scope"
        case "no_products":
            why = f"{cost} is in {where}{kind} itself, in operators that multiply no matrices."
            advised = f"Fuse the operators of {where}, for example with torch.compile"
        case "busiest" if cause.is_rest:
            why = f"The most time is in {where}{kind}, {cost}: without a known peak no one can say how fast it could be."
            advised = 'Give the peak of this chip: hardware="measure" measures it'
        case "busiest":
            why, advised = f"Nothing stands out: the most time is in {where}{kind}, {cost}.", ""
        case _:
            return _told_needless(cause, at)
    return _Told(why, advised)


def _told_needless(cause: Cause, at: _Setting) -> _Told | None:
    """Of work, or waiting, that the step would do without."""
    match cause.kind:
        case "anomaly_mode":
            why, advised = "Anomaly detection is on: it makes steps longer.", "Switch torch.autograd.set_detect_anomaly off"
        case "eval_mode":
            why = "All modules are in eval mode while they are trained: dropout does nothing, and norms do not learn their statistics."
            advised = "Call model.train() before training, and after each validation"
        case "unused":
            why = f"{at.where} runs forward, and no gradient goes back through it: {at.cost}."
            advised = f"Leave {at.where} out if nothing reads its output"
        case "backward_twice":
            why = f"Backward multiplies {float(cause.value or 0):.1f}× as much as forward, where twice is usual: {at.cost} more."
            advised = "Call backward once, of the sum of the losses, unless you need gradients of gradients"
        case "recomputed":
            why = f"{at.cost} is computed again in backward, by activation checkpointing."
            advised = "Checkpoint fewer layers, if memory allows it"
        case "turns":
            why = f"Ranks take turns in coming last: {at.cost} is waiting."
            advised = "Give all ranks batches of about the same length in each step"
        case _:
            return None
    return _Told(why, advised)


_DOUBT: Mapping[Doubt, str] = {
    "busy": "other processes used the CPU",
    "few_steps": "too few steps were timed by module; active=8 in the schedule times enough",
    "varied": "the steps timed by module vary too much",
    "scaled": "timing the modules changed their times too much",
}


def _trust(analysis: Analysis, doubts: int) -> Iterator[str]:
    """What the figures rest on; then what makes them doubtful."""
    yield from _steadiness(analysis)
    profile = analysis.profile
    if analysis.step_times.mean is not None and profile.is_counted and analysis.utilization.mfu is None:
        yield "MFU is unknown: no peak is known here"
    if missing := len({row.operator for row in analysis.uncounted}):
        yield f"{counted(missing, 'operator')} not counted"
    if silent := sum(rank.status != "ok" for rank in profile.ranks):
        yield f"{counted(silent, 'rank')} did not report"
    if doubts:
        yield f"{counted(doubts, 'note')} below"


def lost_share(analysis: Analysis) -> float:
    """What share of the CPU time that the process needed others took, while modules were timed."""
    return statistics.median(analysis.profile.cpu_lost_shares or [0.0])


def _steadiness(analysis: Analysis) -> Iterator[str]:
    profile, times = analysis.profile, analysis.step_times
    one, several = ("step", "steps") if profile.run.kind == "training" else ("pass", "passes")
    if times.seconds is not None and times.mean is not None:
        median = times.seconds.median
        spread = f" ± {plus_minus(times.spread)}" if times.steps > 1 and times.spread is not None else ""
        quiet = "undisturbed " if lost_share(analysis) < VERY_BUSY else ""
        yield f"{units.count(times.steps)} {quiet}{one if times.steps == 1 else several}{spread}"
        if median and (abs(times.mean - median) > _UNSTEADY * median or (times.spread or 0.0) > _WIDE):
            yield f"unsteady: the longest took {units.duration(times.longest)}, the median {units.duration(median)}"
    if (lost := lost_share(analysis)) >= _BUSY:
        yield f"this machine was busy: other processes took {units.percent(lost, digits=0)} of the CPU time that this one needed"
    if analysis.outliers.doubt and not analysis.outliers.found:
        yield f"cannot tell whether a module is slow among its equals: {_DOUBT[analysis.outliers.doubt]}"
    factors = time_factors(profile.notes)
    if are_times_far_off(profile.notes):
        worst = max(factors, key=lambda factor: abs(math.log(factor)) if factor > 0 else math.inf)
        yield f"times of modules are no measure here: other {several} took {worst:.2f} times as long as those timed by module"
    elif factors:
        yield f"module times are rough (± {units.percent(max(abs(factor - 1) for factor in factors), digits=0)})"
