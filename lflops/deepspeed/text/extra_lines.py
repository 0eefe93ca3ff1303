"""The lines that DeepSpeed does not have: the phases of a step, backward as counted, utilization, memory, uncounted operators."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.speed.step_times import StepTimes
from lflops.deepspeed.text import units as short_units
from lflops.profile.model import Profile
from lflops.profile.notes import notes_with
from lflops.report.lines.report import report_of
from lflops.report.lines.text import counted, plain
from lflops.report.lines.trace import traced

_OF_SPEED = frozenset({"CPU time", "observer", "MFU", "HFU", "executed"})
_SHOWN_ELSEWHERE = frozenset({"generated", "experts", "backward_assumed"})
"""Codes of notes."""
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}

_Lines = Iterator[tuple[str, str]]


def extra_lines(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """Label and value of each line; a line without a label continues the one above.

    Args:
        analysis: What to show.
        latencies: The times in DeepSpeed's lines.
    """
    profile = analysis.profile
    yield from _work(analysis)
    yield from _generated(profile, latencies)
    yield from _latencies(analysis, latencies)
    report = report_of(analysis)
    yield from ((fact.label, fact.said) for fact in report.speed if fact.name in _OF_SPEED)
    yield from ((fact.label, fact.said) for fact in report.model if fact.name == "peak live memory")
    if profile.trace is not None:
        yield from traced(profile.trace)
    above = ""
    for fact in (each for each in report.remarks if each.name not in _SHOWN_ELSEWHERE):
        yield "" if fact.label == above else fact.label, plain(fact.said)
        above = fact.label or above
    if profile.run.partial:
        silent = any(rank.status != "ok" for rank in profile.ranks)
        yield "partial", f"what was watched ended by an exception or before its time{', or not all ranks answered' if silent else ''}"


def _work(analysis: Analysis) -> _Lines:
    """The work that DeepSpeed's lines leave out."""
    root, whose = analysis.profile.modules[""], "of model" if analysis.is_staged else "per GPU"
    if root.forward.executed_macs != root.forward.macs:
        yield f"fwd MACs {whose} that the masks leave to be executed", units.count(root.forward.executed_macs)
    for label, work in (("bwd", root.backward), ("recompute", root.recompute)):
        if work.calls:
            yield f"{label} MACs {whose}", units.count(work.macs)
            yield f"{label} flops {whose}", units.count(work.flops)
    for phase, macs in analysis.unsharded_macs.items():
        if not (phase == "forward" and analysis.is_staged):
            yield f"{_SHORT.get(phase, phase)} MACs of model, on this rank's batch", units.count(macs)
    if root.optimizer.flops:
        yield f"step flops {whose}", units.count(root.optimizer.flops)


def _generated(profile: Profile, latencies: StepTimes) -> _Lines:
    """The two parts of a generation: prefill, which is one call for the prompt, and decode, which is a call for each further token."""
    for values in (note.values for note in notes_with("generated", profile.notes)):
        seconds = latencies.phases
        for part in ("prefill", "decode"):
            yield f"{part} MACs per GPU", units.count(float(values[f"{part}_macs"]))
            took = seconds.get(part)
            yield f"{part} FLOPS per GPU", short_units.rate(float(values[f"{part}_flops"]) / took if took else None)
        calls, samples = int(values["decode_calls"]), profile.run.samples_per_step
        decode, forward = seconds.get("decode"), seconds.get("forward")
        yield "decode calls", units.count(calls)
        yield "decode latency of one call", units.duration(decode / calls if decode and calls else None)
        if samples and decode and forward:
            yield "decode tokens/second per GPU", f"{calls * samples / decode:.2f}"
            yield "tokens/second per GPU", f"{(calls + 1) * samples / forward:.2f}"


def _latencies(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """Each phase with its share of the step, and what that rests on."""
    for name, seconds in latencies.phases.items():
        share = f", {units.percent(latencies.share(seconds))} of the step" if latencies.mean else ""
        host = f", {units.duration(latencies.host_phases[name])} on the host" if name in latencies.host_phases else ""
        yield f"{name} latency", f"{units.duration(seconds)}{share}{host}"
    if latencies.tokens_per_second is not None and "prefill" not in latencies.phases:  # of a generation, these are the prompt's
        yield "tokens/second per GPU", f"{latencies.tokens_per_second:.2f}"
    clean, ratio, median = analysis.step_times.steps, analysis.profile.run.observer_ratio, latencies.seconds
    if analysis.profile.steps and median is not None:
        around = f", {units.duration(median.low)} to {units.duration(median.high)}" if median.n > 1 else ""
        yield "the median step and its quartiles", f"{units.duration(median.median)}{around}"
        yield "the latencies rest on", counted(clean, "undisturbed step") if clean else "the counted pass alone"
    if ratio is not None and not clean:
        rest = "what could be stamped of that is taken off, some µs an operator remain"
        yield "observer's cost: counting made the pass", f"{ratio:.2f} x as long; {rest}"
