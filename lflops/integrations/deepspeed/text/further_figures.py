"""Write the lines of the summary that DeepSpeed's summary does not have, as labels and values."""

from collections.abc import Iterator, Mapping

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import StepTimes
from lflops.integrations.deepspeed.text import units as short_units
from lflops.profile.module_names import plain
from lflops.profile.notes import notes_with
from lflops.profile.profile import Profile
from lflops.profile.records import Trace
from lflops.profile.series import ratio
from lflops.report.summary_facts import Report
from lflops.report.text import counted

# Names of those facts about speed in the report that are shown here.
_SPEED_FACTS = frozenset({"CPU time", "observer", "MFU", "HFU", "executed"})
# Codes of notes that have separate lines.
_SHOWN_ELSEWHERE = frozenset({"generated", "experts", "backward_assumed"})
# Number of operators of a trace that are listed.
_LISTED_OPERATORS = 5
_SHORT_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}


def further_lines(
    analysis: Analysis, report: Report, latencies: StepTimes
) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line that DeepSpeed's summary does not have.

    If the label is empty, the value belongs to the label of the previous line.

    Args:
        analysis: The profile with its results.
        report: The report about the profile.
        latencies: The times of the steps.
    """
    profile = analysis.profile
    yield from _work(analysis)
    yield from _generation(profile, latencies)
    yield from _latencies(analysis, latencies)
    for fact in report.speed:
        if fact.name in _SPEED_FACTS:
            yield fact.label, fact.said
    for fact in report.model:
        if fact.name == "peak live memory":
            yield fact.label, fact.said
    if profile.trace is not None:
        yield from _trace(profile.trace)
    yield from _remarks(report)
    if profile.run.partial:
        yield "partial", _why_partial(profile)


def _work(analysis: Analysis) -> Iterator[tuple[str, str]]:
    root = analysis.profile.modules[""]
    owner = "of model" if analysis.is_staged else "per GPU"
    if root.forward.executed_macs != root.forward.macs:
        executed = units.count(root.forward.executed_macs)
        yield f"fwd MACs {owner} without the part that is skipped because of masks", executed
    for label, work in (("bwd", root.backward), ("recompute", root.recompute)):
        if work.calls:
            yield f"{label} MACs {owner}", units.count(work.macs)
            yield f"{label} flops {owner}", units.count(work.flops)
    for phase, macs in analysis.unsharded_macs.items():
        if phase == "forward" and analysis.is_staged:
            # DeepSpeed's figures already contain these MACs.
            continue
        short_phase = _SHORT_PHASES.get(phase, phase)
        yield f"{short_phase} MACs of the model, on this rank's batch", units.count(macs)
    if root.optimizer.flops:
        yield f"step flops {owner}", units.count(root.optimizer.flops)


def _generation(profile: Profile, latencies: StepTimes) -> Iterator[tuple[str, str]]:
    """Yield the lines about text generation, if `generate` was profiled.

    Prefill is the call of the model for the prompt. Decode is all further calls.
    """
    for note in notes_with("generated", profile.notes):
        yield from _part_of_generation("prefill", note.values, latencies)
        yield from _part_of_generation("decode", note.values, latencies)
        calls = int(note.values["decode_calls"])
        samples = profile.run.samples_per_step
        decode = latencies.phases.get("decode")
        forward = latencies.phases.get("forward")
        yield "decode calls", units.count(calls)
        yield "decode latency of one forward call", units.duration(ratio(decode, calls))
        if samples and decode and forward:
            yield "decode tokens/second per GPU", f"{calls * samples / decode:.2f}"
            yield "tokens/second per GPU", f"{(calls + 1) * samples / forward:.2f}"


def _part_of_generation(
    part: str, values: Mapping[str, int | float | str], latencies: StepTimes
) -> Iterator[tuple[str, str]]:
    rate = ratio(float(values[f"{part}_flops"]), latencies.phases.get(part))
    yield f"{part} MACs per GPU", units.count(float(values[f"{part}_macs"]))
    yield f"{part} FLOPS per GPU", short_units.rate(rate)


def _latencies(analysis: Analysis, latencies: StepTimes) -> Iterator[tuple[str, str]]:
    """Yield the lines about time.

    They show the latency of each phase, which steps were timed, and by which factor counting made
    the pass slower.
    """
    for name, seconds in latencies.phases.items():
        text = units.duration(seconds)
        if latencies.mean:
            text += f", {units.percent(latencies.share(seconds))} of the step"
        if name in latencies.host_phases:
            text += f", {units.duration(latencies.host_phases[name])} on the host"
        yield f"{name} latency", text
    # In a generation, these are the tokens of the prompt.
    if latencies.tokens_per_second is not None and "prefill" not in latencies.phases:
        yield "tokens/second per GPU", f"{latencies.tokens_per_second:.2f}"
    unprofiled = analysis.step_times.steps
    step = latencies.seconds
    if analysis.profile.steps and step is not None:
        text = units.duration(step.median)
        if step.n > 1:
            text += f", {units.duration(step.low)} to {units.duration(step.high)}"
        yield "the median step and its quartiles", text
        source = (
            counted(unprofiled, "unprofiled step")
            if unprofiled
            else "only the pass in which operators were counted"
        )
        yield "the latencies come from", source
    ratio = analysis.profile.run.observer_ratio
    if ratio is not None and not unprofiled:
        text = (
            f"counting made the pass {ratio:.2f} times as long; the extra time is subtracted from "
            "the latencies, except for a few µs per operator"
        )
        yield "cost of counting", text


def _trace(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the lines with the files of the traces, and the operators with the most self time."""
    for rank, file in trace.files.items():
        label = "trace" if len(trace.files) == 1 else f"trace of rank {rank}"
        yield label, plain(file)
    on_device = trace.has_device_times
    place = "on the device" if on_device else "on the host"
    label = f"operators with the most self time {place}, per traced batch"
    for operator in trace.by_own_time()[:_LISTED_OPERATORS]:
        seconds = operator.self_device_seconds if on_device else operator.self_host_seconds
        duration = units.duration(trace.per_batch(seconds))
        calls = units.count(trace.per_batch(operator.calls))
        yield label, f"{plain(operator.name)}  {duration}, calls: {calls}"
        label = ""


def _remarks(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the lines with the remarks of the report, such as its notes.

    If consecutive remarks have the same label, only the first of them shows the label.
    """
    above = ""
    for fact in report.remarks:
        if fact.name in _SHOWN_ELSEWHERE:
            continue
        label = "" if fact.label == above else fact.label
        yield label, plain(fact.said)
        above = fact.label or above


def _why_partial(profile: Profile) -> str:
    reason = "the profiled run ended early or with an exception"
    if any(rank.status != "ok" for rank in profile.ranks):
        reason += ", or some ranks sent no complete profile"
    return reason
