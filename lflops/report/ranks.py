"""Describe the ranks of a run in lines of text.

The lines say which ranks reported, which ranks are slow and in which modules, how long ranks wait
for each other, and how long collectives take.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.findings.rules.slow_rank import hosts_by_rank, place_of, place_of_rank, reason_of
from lflops.profile.module_names import plain
from lflops.profile.records import Rank, RankWait, Straggler, TimingStats
from lflops.profile.series import without_none
from lflops.ranks.communication import Collective
from lflops.ranks.straggler import Stragglers
from lflops.ranks.straggler_search import ENOUGH
from lflops.report.text import counted, label_first

_WORST = 3
"""Maximum number of slow ranks, of waits and of collectives that get a line each."""

_LISTED = 12
"""Maximum number of failed ranks, of late ranks and of missing ranks that are listed.

Further ranks are only counted.
"""

_LONG_WAIT_SHARE = 0.05
"""A wait for another rank is long if it takes at least this share of the step.

A long wait means that some rank is slow. If there is a long wait but no slow rank was found, the
report says that it cannot tell which rank is slow.
"""

_SMALLEST_FACTOR = 10.0
"""Smallest ratio of times that is printed as a factor (`12× as slow`), not as a percentage."""


def ranks(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line about the ranks.

    A line with an empty label continues the previous line. If the run has one rank, all lines are
    about its collectives.
    """
    listed = analysis.profile.ranks
    if len(listed) < 2:
        yield from _communication(analysis)
        return
    yield "ranks", "; ".join(_statuses(listed))
    macs = without_none(rank.macs for rank in listed)
    if any(macs):
        uneven = ""
        least = units.count(min(macs))
        most = units.count(max(macs))
        # The range is left out if both ends are equal after rounding.
        if least != most:
            uneven = f", {least} to {most} per rank"
        yield "all ranks", f"{units.count(sum(macs))} MACs in forward and backward{uneven}"
    yield from _imbalance(analysis)
    yield from _communication(analysis)
    if analysis.stragglers.too_few_steps is None:
        yield from label_first("waiting", map(_waiting, analysis.stragglers.waits[:_WORST]))
    yield from _by_rank(
        listed,
        {"data wait by rank": lambda rank: rank.data, "CPU time by rank": lambda rank: rank.cpu},
    )


def _statuses(listed: Sequence[Rank]) -> Iterator[str]:
    """Yield texts: how many ranks reported, and which ranks failed, were late or are missing."""
    fine = sum(rank.status == "ok" for rank in listed)
    yield f"{fine} of {len(listed)} reported"
    for status in ("failed", "late", "missing"):
        named = []
        for rank in listed:
            if rank.status == status:
                named.append(f"{rank.rank}{_position(rank)}")
        if named:
            more = ""
            if len(named) > _LISTED:
                more = f" and {len(named) - _LISTED} more"
            yield f"{status}: {', '.join(named[:_LISTED])}{more}"


def _position(rank: Rank) -> str:
    """Format the position of a rank in the device mesh and the rank's host, in brackets.

    If the rank did not report, only its position can be known.
    """
    where = coordinates_of(rank)
    if rank.host:
        where.append(f"on {rank.host}")
    if not where:
        return ""
    return f" ({plain(', '.join(where))})"


def coordinates_of(rank: Rank) -> list[str]:
    """Format the position of a rank in each dimension of the device mesh, such as `tp 1`."""
    return [f"{kind} {coordinate}" for kind, coordinate in rank.coordinates.items()]


def _imbalance(analysis: Analysis) -> Iterator[tuple[str, str]]:
    found = analysis.stragglers
    if found.step_seconds is None:
        return
    sentences = [_sentence(row, analysis) for row in found.rows[:_WORST]]
    if len(found.rows) > _WORST:
        sentences.append(f"{len(found.rows) - _WORST} more{_common_host(found, analysis)}")
    if not sentences:
        sentences.append(_why_no_slow_rank(found, analysis))
    yield from label_first("slow ranks", sentences)
    mean = analysis.step_times.mean
    if found.lost_share is not None and (found.rows or found.is_alternating):
        less = f"{units.percent(found.lost_share)} less"
        if mean:
            less = f"{units.duration(mean * (1 - found.lost_share))}, {less}"
        said = f"if all ranks were as fast as the median rank, a step would take {less}"
        yield "imbalance", said


def _common_host(found: Stragglers, analysis: Analysis) -> str:
    """Return text that names the host of all slow ranks, or "" if they run on several hosts."""
    hosts = hosts_by_rank(analysis.profile)
    of_slow_ranks = {hosts.get(row.slow_rank, "") for row in found.rows}
    if len(of_slow_ranks) > 1 or "" in of_slow_ranks:
        return ""
    return f", all of them{of_slow_ranks.pop()}"


def slow_rank_sentences(analysis: Analysis) -> dict[Hashable, str]:
    """Return a sentence about each of the slowest ranks.

    The keys are tuples of the slow rank, the module and the phase in which it is slow, and the
    cause.
    """
    sentences = {}
    for row in analysis.stragglers.rows[:_WORST]:
        key: Hashable = (row.slow_rank, row.module, row.phase, row.cause)
        sentences[key] = _sentence(row, analysis)
    return sentences


def _why_no_slow_rank(found: Stragglers, analysis: Analysis) -> str:
    """Describe why no slow rank is listed."""
    if found.too_few_steps is not None:
        steps = counted(found.too_few_steps, "step")
        return (
            f"cannot tell: only {steps} can be compared between all ranks, but {ENOUGH} are needed"
        )
    if found.busy_machine:
        return (
            "cannot tell: this machine was busy, and the operating system preempted the processes "
            "of all ranks"
        )
    if found.is_alternating:
        why = "and none of them is the last to arrive in most of the steps"
        if found.lengths_differ:
            why = "because the sequence lengths of the batches differ"
        return (
            "no single rank is slow: in different steps, different ranks are the last to reach the "
            f"collectives, {why}"
        )
    longest_wait = max((wait.seconds for wait in found.waits), default=0.0)
    if (
        not analysis.is_staged
        and found.step_seconds
        and longest_wait >= _LONG_WAIT_SHARE * found.step_seconds
    ):
        return (
            "cannot tell: ranks wait for each other, but no rank is slower by more than noise in "
            "any module or phase"
        )
    return "none: no rank is slower than the other ranks by more than noise"


def _sentence(row: Straggler, analysis: Analysis) -> str:
    """Describe a slow rank: `rank 3 on node7 is 12.0 % slower than the other ranks in ...`."""
    often = ""
    if row.steps is not None:
        often = f", in {row.slow_steps} of {counted(row.steps, 'step')}"
    if row.since is not None:
        often += f", since step {row.since}"
    if row.until is not None:
        often += f", up to step {row.until}"
    where = place_of_rank(row)
    if row.modules > 1:
        where += f" ({row.modules} modules)"
    costs = f"this costs {units.duration(row.seconds_lost)} per step"
    rank = f"rank {row.slow_rank}{hosts_by_rank(analysis.profile).get(row.slow_rank, '')}"
    if row.cause is not None:
        costs += f"; {reason_of(row, analysis.profile)}"
    return f"{rank} is {_slower(row.ratio)} the other ranks in {where}{often}: {costs}"


def _slower(ratio: float | None) -> str:
    """Format how much slower a rank is, such as `12.0 % slower than` or `12× as slow as`."""
    if ratio is None or ratio <= 1:
        return "slower than"
    if ratio < _SMALLEST_FACTOR:
        return f"{units.percent(ratio - 1)} slower than"
    return f"{ratio:.0f}× as slow as"


def _waiting(wait: RankWait) -> str:
    """Describe for which rank other ranks wait, in which module and phase, and how long.

    For example: `7 ranks wait 50.00 ms per step for rank 1 in backward outside the layers`.
    """
    who = f"{wait.ranks} ranks wait"
    if wait.ranks == 1:
        who = f"rank {wait.longest_rank} waits"
    traced = ""
    if wait.traced_seconds is not None:
        traced = f" ({units.duration(wait.traced_seconds)} in the traced steps)"
    where = place_of(wait.module, wait.phase)
    cost = f"{units.duration(wait.seconds)} per step"
    return f"{who} {cost} for rank {wait.for_rank} in {where}{traced}"


def _communication(analysis: Analysis) -> Iterator[tuple[str, str]]:
    found = analysis.communication
    similar = Counter((collective.kind, collective.group_size) for collective in found)
    sentences = []
    for collective in found[:_WORST]:
        has_similar = similar[collective.kind, collective.group_size] > 1
        sentences.append(_collective(collective, name_group=has_similar))
    if len(found) > _WORST:
        sentences.append(f"{len(found) - _WORST} more")
    yield from label_first("communication", sentences)


def _collective(collective: Collective, *, name_group: bool) -> str:
    """Describe a collective: `all-reduce over 8 ranks: 3 calls and 1.20 GiB per step, ...`.

    If `name_group` is true, the text also names the process group, to distinguish the collective
    from a similar collective in another group.
    """
    over = ""
    if collective.group_size is not None:
        over = f" over {counted(collective.group_size, 'rank')}"
    group = ""
    if name_group:
        group = f" (group {plain(collective.group)})"
    parts = [f"{counted(collective.calls, 'call')} and {units.size(collective.bytes)} per step"]
    if collective.seconds is not None:
        exposed = ""
        if collective.exposed_seconds is not None:
            exposed = f" ({units.duration(collective.exposed_seconds)} exposed)"
        parts.append(f"taking {units.duration(collective.seconds)}{exposed}")
    if collective.bus_bytes_per_second is not None:
        least = "at least " if collective.includes_waiting else ""
        bandwidth = units.rate(collective.bus_bytes_per_second, "B/s")
        share = ""
        if collective.link_share is not None:
            share = f", {units.percent(collective.link_share)} of the link's bandwidth"
        parts.append(f"bus bandwidth {least}{bandwidth}{share}")
    return f"{collective.kind.replace('_', '-')}{over}{group}: {', '.join(parts)}"


def _by_rank(
    listed: Sequence[Rank], lines: Mapping[str, Callable[[Rank], TimingStats | None]]
) -> Iterator[tuple[str, str]]:
    """Yield the label and text of lines that show how much times differ between ranks.

    A line is about one time, such as the data wait. It has the smallest and the largest median of
    all ranks, and the rank with the largest median.

    Args:
        listed: The ranks.
        lines: A function that returns the statistics of this time for a rank, keyed by the label of
            the line. The function returns `None` if the rank did not report the time.
    """
    for label, time_of in lines.items():
        known: list[tuple[float, int]] = []
        for rank in listed:
            spread = time_of(rank)
            if spread is not None:
                known.append((spread.median, rank.rank))
        if len(known) > 1:
            least, _ = min(known)
            most, slowest = max(known)
            times = f"{units.duration(least)} to {units.duration(most)}"
            yield label, f"{times}, the longest on rank {slowest}"
