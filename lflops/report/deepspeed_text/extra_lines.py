"""What stands beneath DeepSpeed's lines: the phases of a step, backward as counted, utilization, memory, and what no total holds."""

from collections.abc import Iterator

from lflops import units
from lflops.analyze.modules.uncounted import UncountedOperator, uncounted_operators
from lflops.analyze.speed.step_times import StepTimes, step_times
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import Profile
from lflops.profile.records import PHASES, Spread
from lflops.report.deepspeed_text import units as short_units
from lflops.report.lines.notes import sentence
from lflops.report.lines.ranks import is_staged, ranks
from lflops.report.lines.trace import traced
from lflops.report.lines.unsharded_work import whole_macs
from lflops.report.terminal.text import plain

__all__ = ["further"]

_LISTED = 8
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}
_SHOWN_ELSEWHERE = frozenset({"generated", "experts", "backward_assumed"})

_Lines = Iterator[tuple[str, str]]


def further(profile: Profile, paced: StepTimes) -> _Lines:
    """Label and value of each line; one without a label goes on with the line above.

    Args:
        profile: What to show.
        paced: The latencies that stand above.
    """
    yield from _work(profile)
    yield from _generated(profile, paced)
    yield from _time(profile, paced)
    yield from _utilization(profile)
    peak = profile.modules[""].peak_bytes if profile.memory is None else profile.memory.peak_bytes
    yield "peak live memory, as counted", units.size(peak)
    if profile.trace is not None:
        yield from traced(profile.trace)
    yield from ranks(profile)
    yield from _ledger(profile, paced)
    yield from _remarks(profile)


def _work(profile: Profile) -> _Lines:
    """What the lines above have not said of each phase."""
    root, whose = profile.modules[""], "of model" if is_staged(profile) else "per GPU"
    if root.forward.executed_macs != root.forward.macs:
        yield f"fwd MACs {whose} that the masks leave to be executed", units.count(root.forward.executed_macs)
    for label, work in (("bwd", root.backward), ("recompute", root.recompute)):
        if work.calls:
            yield f"{label} MACs {whose}", units.count(work.macs)
            yield f"{label} flops {whose}", units.count(work.flops)
    for phase, macs in whole_macs(profile).items():
        if not (phase == "forward" and is_staged(profile)):
            yield f"{_SHORT.get(phase, phase)} MACs of model, on this rank's batch", units.count(macs)
    if root.optimizer.flops:
        yield f"step flops {whose}", units.count(root.optimizer.flops)


def _generated(profile: Profile, paced: StepTimes) -> _Lines:
    """The two parts of a generation, apart: the prompt at once, then a call for each further token of every sequence."""
    for values in (note.values for note in profile.notes if note.code == "generated"):
        seconds = {part: spread.median for part, spread in paced.phases.items()}
        for part in ("prefill", "decode"):
            yield f"{part} MACs per GPU", units.count(float(values[f"{part}_macs"]))
            took = seconds.get(part)
            yield f"{part} FLOPS per GPU", short_units.rate(float(values[f"{part}_flops"]) / took if took else None)
        calls, samples = int(values["decode_calls"]), profile.run.samples_per_step
        decode, whole = seconds.get("decode"), seconds.get("forward")
        yield "decode calls", units.count(calls)
        yield "decode latency of one call", units.duration(decode / calls if decode and calls else None)
        if samples and decode and whole:
            yield "decode tokens/second per GPU", f"{calls * samples / decode:.2f}"
            yield "tokens/second per GPU", f"{(calls + 1) * samples / whole:.2f}"


def _time(profile: Profile, paced: StepTimes) -> _Lines:
    """Each phase with its quartiles and its share of the step, and what the figures rest on."""
    for name, spread in paced.phases.items():
        share = f", {units.percent(spread.median / paced.seconds.median)} of the step" if paced.seconds and paced.seconds.median else ""
        host = f", {units.duration(paced.host_phases[name].median)} on the host" if name in paced.host_phases else ""
        yield f"{name} latency", f"{_spread(spread)}{share}{host}"
    if paced.tokens_per_second is not None and "prefill" not in paced.phases:  # of a generation, these are the prompt's
        yield "tokens/second per GPU", f"{paced.tokens_per_second:.2f}"
    if paced.cpu_seconds is not None:
        system = "" if paced.system_seconds is None else f"; {units.duration(paced.system_seconds.median)} of it the system's"
        yield "CPU time of a step, over all threads", f"{_spread(paced.cpu_seconds)}{system}"
    if profile.steps:
        clean = step_times(profile).steps
        yield "the latencies rest on", _counted(clean, "clean step") if clean else "the counted pass alone"
    if profile.run.observer_ratio is not None:
        yield _observer(profile.run.observer_ratio, clean=bool(step_times(profile).steps))


def _observer(ratio: float, *, clean: bool) -> tuple[str, str]:
    """Where there is no clean step, every latency is that of a counted one, less what counting took."""
    made = "timing modules made a step" if clean else "counting made the pass"
    rest = "" if clean else "; what could be stamped of that is taken off, some µs an operator remain"
    return f"observer's cost: {made}", f"{ratio:.2f} x as long{rest}"


def _utilization(profile: Profile) -> _Lines:
    if not profile.steps:
        return
    found = utilization(profile)
    if found.peak_flops_per_second is None:
        yield "MFU", f"{units.UNKNOWN}, no peak is known for {plain(profile.run.device_name)} in {profile.run.dtype or 'an unknown dtype'}"
        return
    of = f"of {units.quantity(found.peak_flops_per_second, 'FLOP/s')} ({found.hardware}, {found.dtype})"
    yield "MFU = 2 * (fwd + bwd) MACs per GPU / iter latency / peak", f"{units.percent(found.mfu)} {of}"
    yield "HFU, which has recompute in it and skipped MACs not", units.percent(found.hfu)


def _ledger(profile: Profile, paced: StepTimes) -> _Lines:
    """The operators that ran without a formula, and how much they are."""
    lines = uncounted_operators(profile)
    if not profile.is_counted:
        return
    if not lines:
        yield "not counted", "nothing: every operator that ran has a formula"
        return
    works = [profile.modules[""].work(phase) for phase in PHASES]
    missing = sum(line.calls for line in lines)
    calls = missing + sum(work.calls for work in works)
    moved = sum(line.bytes for line in lines) + sum(work.bytes_moved for work in works)
    yield "not counted", f"{units.percent(missing / calls)} of the operator calls have no formula" if calls else units.UNKNOWN
    for line in lines[:_LISTED]:
        yield "", f"{plain(line.operator)}  {_counted(line.calls, 'call')}, {_share(line, moved, paced)}"
    if left := lines[_LISTED:]:
        yield "", f"and {_counted(len(left), 'operator')} more"


def _share(line: UncountedOperator, moved: int, paced: StepTimes) -> str:
    """Of the time where that is known, else of the bytes."""
    if line.seconds is not None and paced.seconds is not None and paced.seconds.median:
        return f"{units.percent(line.seconds / paced.seconds.median)} of the time"
    return f"{units.percent(line.bytes / moved) if moved else units.UNKNOWN} of the bytes moved"


def _remarks(profile: Profile) -> _Lines:
    """What a reader has to know."""
    uncalled = set(profile.uncalled)
    if uncalled and profile.is_counted:
        top = [name or "all of it" for name in profile.uncalled if not name or name.rpartition(".")[0] not in uncalled]
        more = f" and {len(top) - _LISTED} more" if len(top) > _LISTED else ""
        yield "never called", plain(", ".join(top[:_LISTED]) + more)
    if profile.run.partial:
        silent = any(rank.status != "ok" for rank in profile.ranks)
        yield "partial", f"what was watched ended by an exception or before its time{', or not all ranks answered' if silent else ''}"
    sentences = [plain(sentence(note)) for note in profile.notes if note.code not in _SHOWN_ELSEWHERE]
    for index, said in enumerate(sentences):
        yield "" if index else "note", said


def _spread(spread: Spread) -> str:
    """The median, and the quartiles around it where there are any."""
    around = f", {units.duration(spread.low)} to {units.duration(spread.high)}" if spread.n > 1 else ""
    return f"{units.duration(spread.median)}{around}"


def _counted(number: int, noun: str) -> str:
    return f"{units.count(number)} {noun}" if number == 1 else f"{units.count(number)} {noun}s"
