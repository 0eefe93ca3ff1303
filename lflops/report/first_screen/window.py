"""Extract the data that the first screen needs from the profile of a window (profiled steps)."""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.findings.finding import Finding
from lflops.memory.peak import usable_bytes
from lflops.profile.profile import Profile
from lflops.profile.records import ready_for_threads
from lflops.profile.series import summed
from lflops.profile.settings_advice import how_to_measure_peak
from lflops.report.summary_facts import Fact, device_names, report_of
from lflops.report.text import joined
from lflops.report.verdict import unseen_because


class RankShown(Struct, frozen=True, kw_only=True):
    """A rank, which the page draws as a dot.

    Attributes:
        status: `ok`, `late`, `missing` or `failed`.
        lost: Seconds per step that the other ranks wait for this rank.
        said: Text with the facts about this rank.
    """

    rank: int
    status: str
    lost: float
    said: str


class WindowSummary(Struct, frozen=True, kw_only=True):
    """The data of a window that the first screen needs. Numbers that are unknown are `None`.

    Attributes:
        title: The class of the model.
        device: Names of the chips.
        mean: Mean duration of the unprofiled steps, in seconds.
        phases: Mean seconds of each phase. They add up to `mean`.
        recomputed: Share of the backward time in which activations are recomputed.
        flops: FLOPs of matmuls in forward and backward, of one rank in one step.
        peak: Peak FLOP/s that MFU is relative to.
        hint: Advice on how to make this peak known. Empty if no advice is needed.
        peak_bytes: The peak of live memory.
        usable_bytes: Memory of the chip that a process can use.
        rates: Throughput in tokens and in samples per second. The first rate is shown only if there
            is no ledger, because then the share of time that was spent on training is unknown.
        findings: The findings about the step.
        unseen: Reason why an issue might exist although none was found, for example that too few
            steps were measured. `None` if an issue would have been found.
        confidence: Texts about the measurement: the number of timed steps, and reasons why the
            numbers are less reliable.
        ranks: All ranks. Empty if the run has only one rank.
        profile: The profile with only the data about its run and its steps.
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
    if rate and times.mean is not None:
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
        title=_title(profile),
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


def _title(profile: Profile) -> str:
    """Return the class of the model. If a loop trains several models, return their names."""
    title = profile.modules[""].class_name
    if title == "ModuleDict" and profile.run.monitor != "FlopsMonitor":
        return " and ".join(name for name in profile.modules if name and "." not in name)
    return title or "a script"


def _hint(analysis: Analysis) -> str:
    """Describe how to make the peak FLOP/s of the chip known, which MFU needs.

    Return the empty string if the peak is known, or if nothing was counted or timed.
    """
    reached = analysis.utilization
    if not reached.flops_per_second or reached.peak_flops_per_second is not None:
        return ""
    run = analysis.profile.run
    return (
        f"MFU needs the peak of {run.device_name}: {how_to_measure_peak(run)} to measure this peak"
    )


def _ranks(analysis: Analysis) -> Iterator[RankShown]:
    listed = analysis.profile.ranks
    if len(listed) < 2:
        return
    lost = summed((row.slow_rank, row.seconds_lost) for row in analysis.stragglers.rows)
    for rank in listed:
        seconds = lost.get(rank.rank, 0.0)
        said = ""
        if seconds:
            said = f"the other ranks wait {units.duration(seconds)} per step for this rank"
        status = ""
        if rank.status != "ok":
            status = rank.status
        yield RankShown(
            rank=rank.rank,
            status=rank.status,
            lost=seconds,
            said=joined(f"rank {rank.rank}", rank.host, status, said),
        )
