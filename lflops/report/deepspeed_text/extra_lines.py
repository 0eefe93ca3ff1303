"""The lines that DeepSpeed does not have: the phases of a step, backward as counted, utilization, memory, uncounted operators."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.operators import UncountedOperator
from lflops.analyze.speed.step_times import StepTimes
from lflops.profile.model import Profile
from lflops.profile.notes import notes_with
from lflops.profile.records import PHASES, Spread
from lflops.report.deepspeed_text import units as short_units
from lflops.report.lines.notes import sentence
from lflops.report.lines.ranks import ranks
from lflops.report.lines.text import counted, plain
from lflops.report.lines.trace import traced

__all__ = ["extra_lines"]

_LISTED = 8
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}
_SHOWN_ELSEWHERE = frozenset({"generated", "experts", "backward_assumed"})

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
    yield from _time(analysis, latencies)
    yield from _utilization(analysis)
    yield "peak live memory, as counted", units.size(analysis.peak_bytes)
    if profile.trace is not None:
        yield from traced(profile.trace)
    yield from ranks(analysis)
    yield from _uncounted(analysis, latencies)
    yield from _remarks(analysis)


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


def _time(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """Each phase with its share of the step and its quartiles, and what the figures rest on."""
    for name, seconds in latencies.phases.items():
        share = f", {units.percent(latencies.share(seconds))} of the step" if latencies.mean else ""
        host = f", {units.duration(latencies.host_phases[name])} on the host" if name in latencies.host_phases else ""
        yield f"{name} latency", f"{units.duration(seconds)}{share}{host}"
    if latencies.tokens_per_second is not None and "prefill" not in latencies.phases:  # of a generation, these are the prompt's
        yield "tokens/second per GPU", f"{latencies.tokens_per_second:.2f}"
    if latencies.cpu_seconds is not None:
        system = "" if latencies.system_seconds is None else f"; {units.duration(latencies.system_seconds.median)} of it the system's"
        yield "CPU time of a step, over all threads", f"{_spread(latencies.cpu_seconds)}{system}"
    clean, ratio = analysis.step_times.steps, analysis.profile.run.observer_ratio
    if analysis.profile.steps and latencies.seconds is not None:
        yield "the median step and its quartiles", _spread(latencies.seconds)
        yield "the latencies rest on", counted(clean, "undisturbed step") if clean else "the counted pass alone"
    if ratio is not None:
        yield _observer(ratio, clean=bool(clean))


def _observer(ratio: float, *, clean: bool) -> tuple[str, str]:
    """Where there is no clean step, every latency is that of a counted one, less what counting took."""
    made = "timing modules made a step" if clean else "counting made the pass"
    rest = "" if clean else "; what could be stamped of that is taken off, some µs an operator remain"
    return f"observer's cost: {made}", f"{ratio:.2f} x as long{rest}"


def _utilization(analysis: Analysis) -> _Lines:
    run, reached = analysis.profile.run, analysis.utilization
    if not analysis.profile.steps:
        return
    if reached.peak_flops_per_second is None:
        yield "MFU", f"{units.UNKNOWN}, no peak is known for {plain(run.device_name)} in {run.dtype or 'an unknown dtype'}"
        return
    of = f"of {units.quantity(reached.peak_flops_per_second, 'FLOP/s')} ({reached.hardware}, {reached.dtype})"
    yield "MFU = 2 * (fwd + bwd) MACs per GPU / iter latency / peak", f"{units.of_peak(reached.mfu)} {of}"
    yield "HFU, which has recompute in it", units.of_peak(reached.hfu)
    if units.percent(reached.executed) != units.percent(reached.hfu):
        yield "executed, which has no skipped MACs, each dtype at its peak", units.of_peak(reached.executed)


def _uncounted(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """The operators that ran without a formula, and their share of the calls and of the time."""
    profile, rows = analysis.profile, analysis.uncounted
    if not profile.is_counted:
        return
    if not rows:
        yield "not counted", "nothing: every operator that ran has a formula"
        return
    works = [profile.modules[""].work(phase) for phase in PHASES]
    missing = sum(row.calls for row in rows)
    calls = missing + sum(work.calls for work in works)
    moved = sum(row.bytes for row in rows) + sum(work.bytes_moved for work in works)
    yield "not counted", f"{units.percent(missing / calls)} of the operator calls have no formula" if calls else units.UNKNOWN
    for row in rows[:_LISTED]:
        yield "", f"{plain(row.operator)}  {counted(row.calls, 'call')}, {_share(row, moved, latencies)}"
    if left := rows[_LISTED:]:
        yield "", f"and {counted(len(left), 'operator')} more"


def _share(row: UncountedOperator, moved: int, latencies: StepTimes) -> str:
    """Of the time where that is known, else of the bytes."""
    if row.seconds is not None and latencies.mean:
        return f"{units.percent(row.seconds / latencies.mean)} of the time"
    return f"{units.percent(row.bytes / moved) if moved else units.UNKNOWN} of the bytes moved"


def _remarks(analysis: Analysis) -> _Lines:
    """Uncalled modules, a partial window, and the notes."""
    profile, uncalled = analysis.profile, set(analysis.uncalled)
    if uncalled and profile.is_counted:
        top = [name or "all of it" for name in analysis.uncalled if not name or name.rpartition(".")[0] not in uncalled]
        more = f" and {len(top) - _LISTED} more" if len(top) > _LISTED else ""
        yield "never called", plain(", ".join(top[:_LISTED]) + more)
    if profile.run.partial:
        silent = any(rank.status != "ok" for rank in profile.ranks)
        yield "partial", f"what was watched ended by an exception or before its time{', or not all ranks answered' if silent else ''}"
    sentences = [plain(sentence(note)) for note in profile.notes if note.code not in _SHOWN_ELSEWHERE]
    for index, each in enumerate(sentences):
        yield "" if index else "note", each


def _spread(spread: Spread) -> str:
    """The median, and the quartiles around it where there are any."""
    around = f", {units.duration(spread.low)} to {units.duration(spread.high)}" if spread.n > 1 else ""
    return f"{units.duration(spread.median)}{around}"
