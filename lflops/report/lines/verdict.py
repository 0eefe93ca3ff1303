"""What a reader acts on: how fast a step is, why it is no faster, what to do next, and how far to trust that."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.causes import Cause, Row, row_of, waits
from lflops.analyze.speed.budget import Budget
from lflops.analyze.speed.step_times import VERY_BUSY, lost_share
from lflops.profile.model import Profile
from lflops.profile.notes import are_times_far_off, filled, time_factors
from lflops.profile.records import PHASES
from lflops.profile.series import grouped
from lflops.report.lines.ranks import slowest_rank
from lflops.report.lines.text import WORDS, counted, itself_of, plain, plus_minus

_FINDINGS, _ALWAYS = 3, {"peak", "busiest"}  # so many, and those of these kinds, are in every drawing; `lflops why` has more
LARGE = 0.1  # of the time: what takes less is no advice, unless it is a fault
_FEWEST_STEPS = 5  # clean ones: from fewer no one can tell
_UNSTEADY = 0.1  # of the median step: a mean or a quartile that is farther off is worth a word
_WIDE = 0.3  # of the median step: steps whose quartile is farther off are unsteady
_BURST = 5  # times as long as in the other steps
_BUSY = 0.05  # of the CPU time that was asked for: from so much on, what other processes had is worth a word
_KINDS, _COVERED = 3, 2 / 3  # at most so many kinds of modules are read for a part, which together have this share of it
_LABELS = {"memory_bound": "memory-bound", "below_roof": "slower than the chip allows"}


class Finding(Struct, frozen=True, kw_only=True):
    """A cause in words."""

    cause: str  # its kind, for programs
    said: str  # the sentence, with the cost
    module: str = ""  # where it is; empty is no module in particular
    rank: int | None = None  # the slow rank
    phase: str = ""  # what the rank is slow in
    seconds: float | None = None  # what it costs a step; `None` is unknown
    share: float | None = None  # that over the step, or of the run over the time in which it trained
    of: Literal["step", "run"] = "step"  # the steps of the window as they usually are, or all of the run and what is between its steps
    next: str = ""  # what usually shortens it
    is_fault: bool = False  # whether it is something wrong, rather than where the time of any such training goes
    # Of trainings on a CPU with known faults: how often this was rightly the first, of how often it was
    right: tuple[int, int] | None = None


class Verdict(Struct, frozen=True, kw_only=True):
    """The first lines of every drawing."""

    said: str  # how fast and how good the step is, or of a plan its least time and whether it fits
    # Whether anything was `found`. Of `nothing found` the steps were good enough to see it; else it is `cannot tell`.
    status: Literal["found", "nothing found", "cannot tell"] = "cannot tell"
    judgement: str = ""  # the same as a sentence, with the reason; empty where a fault was found, or nothing was timed
    findings: tuple[Finding, ...] = ()  # faults, the most costly first, and then where else the time goes
    why: tuple[str, ...] = ()  # the first faults, each with its cost; without any, where the time goes
    also: tuple[str, ...] = ()  # where else it goes, if there is a fault
    next: tuple[str, ...] = ()  # what usually shortens that, in the same order
    trust: str = ""  # what the figures rest on, how steady they are, and what is unknown
    doubts: int = 0  # how many further remarks make them less reliable


def verdict(analysis: Analysis, doubts: int) -> Verdict:
    """The verdict on a profile. So many remarks make its figures less reliable, besides those in the line of trust."""
    said, trust = " ".join(_said(analysis)), "; ".join(_trust(analysis, doubts))
    if analysis.step_times.mean is None:
        return Verdict(said=said, trust=trust, doubts=doubts)
    reached = analysis.utilization
    peak = Cause(kind="peak", seconds=None, value=reached.hardware, usual="step" if (reached.mfu or 0.0) > 1 else "layer")
    found = [_finding(analysis, cause) for cause in [*analysis.causes, *([peak] if reached.is_peak_too_low else ())]]
    findings = sorted((each for each in found if each is not None), key=lambda each: not each.is_fault)
    first = [*findings[:_FINDINGS], *(each for each in findings[_FINDINGS:] if each.cause in _ALWAYS)]
    return replace(judge(said, first, unseen_because(analysis), trust), findings=tuple(findings), doubts=doubts)


def judge(said: str, findings: Sequence[Finding], unseen: str | None, trust: str) -> Verdict:
    """The verdict from findings, faults first. `unseen` is why a fault would not be seen; `None` if it would be."""
    faults, rest = (tuple(each.said for each in findings if each.is_fault == is_fault) for is_fault in (True, False))
    status: Literal["found", "nothing found", "cannot tell"] = "found" if faults else "nothing found" if unseen is None else "cannot tell"
    doubt = f"Cannot tell whether anything is wrong{f', because {unseen}' if unseen else ''}."
    advised = [each for each in findings if each.is_fault or each.share is None or (each.share >= LARGE and status != "cannot tell")]
    return Verdict(
        said=said,
        status=status,
        judgement={"found": "", "nothing found": "No known fault found.", "cannot tell": doubt}[status],
        findings=tuple(findings),
        why=faults or rest,
        also=rest if faults else (),
        next=tuple(f"{step}." for step in dict.fromkeys(each.next for each in advised if each.next)),
        trust=trust,
    )


def unseen_because(analysis: Analysis) -> str | None:
    """Why the steps are not good enough to see whether anything is wrong; `None` if they are."""
    times, doubt = analysis.step_times, analysis.outliers.doubt
    if times.mean is None:
        return "nothing was timed"
    if lost_share(analysis.profile) >= VERY_BUSY:
        return WORDS["doubts"]["busy"]
    if times.steps < _FEWEST_STEPS:
        return f"fewer than {_FEWEST_STEPS} undisturbed steps were timed"
    if (times.spread or 0.0) >= _WIDE:
        return "the steps vary too much"
    return None if doubt is None else WORDS["doubts"][doubt]


def verdict_lines(said: Verdict) -> Iterator[tuple[str, str]]:
    """Label and text of each line."""
    first = [" ".join(filter(None, (said.said, said.judgement)))]
    for label, lines in (("verdict", first), ("why", said.why), ("also", said.also), ("next", said.next), ("trust", [said.trust])):
        yield from (("" if index else label, line) for index, line in enumerate(lines) if line)


def _said(analysis: Analysis) -> Iterator[str]:
    run, reached, times = analysis.profile.run, analysis.utilization, analysis.step_times
    one = "step" if run.kind == "training" else "pass"
    if times.mean is None:
        if analysis.profile.is_counted:
            yield from _planned(analysis)
        return
    took = f"A {one} takes {units.duration(times.mean)}{' on this busy machine' if lost_share(analysis.profile) >= VERY_BUSY else ''}"
    if reached.mfu is None:
        yield f"{took}."
        return
    yield f"{took}, at {units.percent(reached.mfu)} MFU."


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
    told = _in_words(analysis, cause)
    if told is None:
        return None
    why, following = told
    return Finding(
        cause=cause.kind,
        said=why,
        module=cause.module,
        rank=int(cause.value) if cause.kind == "rank" and isinstance(cause.value, int | float) else None,
        phase=cause.phase,
        seconds=cause.seconds,
        share=None if cause.seconds is None else analysis.step_times.share(cause.seconds),
        next=following,
        is_fault=cause.is_fault,
        right=row_of(cause.kind).right if cause.is_fault and analysis.profile.run.device_type in {None, "cpu"} else None,
    )


def _in_words(analysis: Analysis, cause: Cause) -> tuple[str, str] | None:
    """Why, with its cost, and what usually shortens it."""
    row, share = _row(analysis.profile, _row_name(cause)), None if cause.seconds is None else analysis.step_times.share(cause.seconds)
    if cause.kind == "rank":
        worst = slowest_rank(analysis, cause.seconds or 0.0)
        return None if worst is None else (worst, row.next)
    one = "step" if analysis.profile.run.kind == "training" else "pass"
    cost = f"{'roughly ' if cause.is_rough else ''}{units.percent(share)} of the {one} ({units.duration(cause.seconds)})"
    if not row.why:
        mostly = f", mostly in {plain(cause.module)}" if cause.module else _in_bursts(analysis, cause.kind)
        what = what_it_is(analysis.profile, analysis.budget, cause.kind)
        why = f"{cost} is {'otherwise ' if cause.is_rest else ''}{what}{mostly}."
        return why, advice(analysis.profile, cause.kind, cause.module)
    itself = itself_of(analysis.profile.modules[""].kind)
    plainly = {"tf32": "float32"} if cause.kind == "dtype" else {}  # no tensor has that dtype
    value, usual = (plain(plainly.get(each, each)) if isinstance(each, str) else each for each in (cause.value, cause.usual))
    words = {
        "cost": cost,
        "Cost": cost[0].upper() + cost[1:],
        "where": plain(cause.module) or itself,
        "itself": itself,
        "others": f"the {cause.others} others like it" if cause.others > 1 else "the other like it",
        "value": value,
        "usual": usual,
        "kind": f" ({value})" if value and cause.module else "",  # of the model itself it is in the name
        "ratio": value / usual if isinstance(value, float) and isinstance(usual, float) else None,
    }
    return filled(row.why, words), filled(row.next, words)


def _row_name(cause: Cause) -> str:
    """The row of a cause whose words depend on more than its kind."""
    if cause.kind == "dtype" and not cause.others:
        return "dtype_alone" if cause.module else "dtype_of_all"
    return "busiest_rest" if cause.kind == "busiest" and cause.is_rest else cause.kind


def _in_bursts(analysis: Analysis, phase: str) -> str:
    """As `: 63.5 ms in 1 of 5 steps, else 600 µs`, where a phase is long in some steps and short in most."""
    known = sorted(step.phases.get(phase, 0.0) for step in analysis.profile.steps if step.is_clean and step.phases)
    long = [seconds for seconds in known if seconds > known[-1] / 2]
    short = known[: len(known) - len(long)]
    if not long or len(short) < len(long) or statistics.mean(long) < _BURST * statistics.mean(short):
        return ""
    return f": {units.duration(statistics.mean(long))} in {len(long)} of {len(known)} steps, else {units.duration(statistics.mean(short))}"


def _trust(analysis: Analysis, doubts: int) -> Iterator[str]:
    """Say what the figures rest on, then what makes them doubtful."""
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


def _steadiness(analysis: Analysis) -> Iterator[str]:
    profile, times = analysis.profile, analysis.step_times
    one, several = ("step", "steps") if profile.run.kind == "training" else ("pass", "passes")
    if times.seconds is not None and times.mean is not None:
        median = times.seconds.median
        spread = f" ± {plus_minus(times.spread)}" if times.steps > 1 and times.spread is not None else ""
        quiet = "undisturbed " if lost_share(analysis.profile) < VERY_BUSY else ""
        yield f"{units.count(times.steps)} {quiet}{one if times.steps == 1 else several}{spread}"
        if median and (abs(times.mean - median) > _UNSTEADY * median or (times.spread or 0.0) > _WIDE):
            yield f"unsteady: the longest took {units.duration(times.longest)}, the median {units.duration(median)}"
    if (lost := lost_share(analysis.profile)) >= _BUSY:
        yield f"this machine was busy: other processes took {units.percent(lost, digits=0)} of the CPU time that this one needed"
    if analysis.outliers.doubt and not analysis.outliers.found:
        yield f"cannot tell whether a module is slow among its equals: {WORDS['doubts'][analysis.outliers.doubt]}"
    factors = time_factors(profile.notes)
    if are_times_far_off(profile.notes):
        worst = max(factors, key=lambda factor: abs(math.log(factor)) if factor > 0 else math.inf)
        yield f"times of modules are no measure here: other {several} took {worst:.2f} times as long as those timed by module"
    elif factors:
        yield f"module times are rough (± {units.percent(max(abs(factor - 1) for factor in factors), digits=0)})"


def label_of(name: str) -> str:
    """The name of a part, next to its share."""
    return _LABELS.get(name, plain(name.replace("_", " ")))


def advice(profile: Profile, name: str, module: str = "") -> str:
    """Say what usually shortens a part, of which a module may have the most."""
    row = _row(profile, name)
    return filled(row.next, {"where": plain(module) or "the model"}) or f"Name what is in {plain(name)} with lflops.scope"


def _row(profile: Profile, name: str) -> Row:
    """The row of a cause, in the words of the loop: Lightning's, whose strategies have this name, or a user's own."""
    if name in {"clip", "outside"} and not (profile.run.strategy or "").endswith("Strategy"):
        return row_of(f"{name}_of_loop")
    if name == "idle" and waits(profile):
        return row_of("idle_in_waits")
    return row_of("never_called" if name == "other" and _was_never_called(profile) else name)


def _was_never_called(profile: Profile) -> bool:
    """Whether nothing of the model ran in any step. A profile without counts has no calls, but its steps have a forward."""
    has_forward = any(step.phases.get("forward") for step in profile.steps)
    has_work = any(cell.phase in {"forward", "backward", "recompute"} for cell in profile.cells)
    return "" in profile.uncalled and not has_forward and not has_work


def what_it_is(profile: Profile, budget: Budget | None, name: str) -> str:
    """Describe a part of the step: "memory-bound work"."""
    kinds = _kinds(profile, budget, name) if budget is not None and name == "memory_bound" else {}
    most_of_it = [profile.modules[module] for of_kind in kinds.values() for module in of_kind]
    if most_of_it and not any(module.work(phase).own_macs for module in most_of_it for phase in PHASES):
        return "memory-bound pointwise work"
    if name == "idle" and budget is not None and budget.idle:
        often = f", for which the host waits {units.count(times)} times" if (times := waits(profile)) else ""
        return f"{row_of(name).what}{often}, mostly in {max(budget.idle, key=budget.idle.__getitem__)}"
    unseen = [each.replace("_", "-") for each in budget.inside_rest] if budget is not None and name == "below_roof" else []
    return ", or ".join([_row(profile, name).what or plain(name), *unseen])


def _kinds(profile: Profile, budget: Budget, part: str) -> dict[str, list[str]]:
    having = (module for module, parts in budget.modules.items() if parts[part])
    modules = grouped(having, lambda module: profile.modules[module].kind or module)
    shares = {kind: sum(budget.modules[module][part] for module in names) for kind, names in modules.items()}
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    before = [sum(shares[each] for each in kinds[:index]) for index in range(len(kinds))]
    return {kind: modules[kind] for kind, covered in zip(kinds[:_KINDS], before, strict=False) if covered < _COVERED * sum(shares.values())}
