"""Merge the profiles of the ranks of a run into one profile.

A place is a module in a phase, or a phase of the step outside modules. In an unprofiled step,
lflops only reads the clock. In a module-timing step, hooks time every module.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops.errors import ProfileError
from lflops.profile.notes import Note, notes_with
from lflops.profile.profile import (
    SCHEMA_VERSION,
    Communication,
    Memory,
    ModuleProfile,
    Profile,
    Run,
    Work,
    with_works,
)
from lflops.profile.records import (
    PASSES,
    PHASES,
    Count,
    MainFunction,
    ModulePhase,
    Rank,
    Seconds,
    Trace,
    step_phase,
)
from lflops.profile.series import largest_known
from lflops.profile.steps import Step, is_compared, with_phases
from lflops.profile.timeline import MOST_RANKS, StepTimeline
from lflops.ranks.merge.rank_comparison import SelfWork, compare_ranks, times_last
from lflops.ranks.merge.rank_table import (
    RankTable,
    async_starts_in,
    exposed_by_place,
    exposed_on_all_ranks,
    quartiles_in,
    rank_stats,
    table_of,
    waiting_places,
)
from lflops.ranks.merge.rows import MergedRows, ranges
from lflops.ranks.merge.steps import MergedSteps, RankSteps, waits_at_end
from lflops.ranks.merge.unprofiled_steps import UnprofiledSteps

LARGEST_WORLD = 1 << 20

_FACTS_OF_RUN = (
    "kind",
    "stage",
    "window",
    "strategy",
    "accumulation",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
)


class RankSummary(Struct, frozen=True, kw_only=True, gc=False):
    """The results of a rank, except for its modules, operators and memory.

    Attributes:
        table: Name of the shared table with the rank's modules, operators and other counts. Ranks
            that did the same work have the same table.
        failed: Whether the run ended with an exception on this rank.
        model_macs: MACs of forward and backward.
        macs: MACs of all phases.
        flops: FLOPs of all phases.
        peak_bytes: The memory peak of the rank; `None` if unknown.
        memory_bytes: The memory peak in `Profile.memory`; `None` if the rank has no `memory`.
        communication_seconds: Total seconds of each collective of the rank, and the seconds in
            which nothing was computed. The collectives have the same order as in the table.
    """

    rank: Count
    table: str
    run: Run
    failed: bool
    steps: tuple[Step, ...]
    notes: tuple[Note, ...]
    trace: Trace | None
    model_macs: Count
    macs: Count
    flops: Count
    peak_bytes: Count | None
    memory_bytes: Count | None
    node: str | None = None
    coordinates: Mapping[str, Count] = {}
    communication_seconds: tuple[tuple[Seconds | None, Seconds | None], ...] = ()
    timelines: tuple[StepTimeline, ...] = ()
    hooks: Mapping[str, Seconds] = {}
    main_functions: tuple[MainFunction, ...] = ()


def merge(profiles: Iterable[Profile] | Mapping[int, Profile]) -> Profile:
    """Merge the profiles that the ranks of a run made with `count`, `counting` or `measure`.

    If all ranks have the same modules, the work of each module is the work of one rank, not a sum
    over ranks. It is copied from the leading rank, which is the first rank with the most FLOPs. The
    properties of the run come from the leading rank too, including the number of samples and tokens
    of its batch. Times and memory may come from other ranks.

    Ranks may have different modules, such as the stages of a pipeline. A module that the leading
    rank does not have is copied from another rank, and its work is added to all modules that
    contain it. These containing modules then have the work of several ranks. No rank measured the
    time of all this work, so the times of the containing modules are `None`. Modules with the same
    name are assumed to be the same module.

    The other fields:

    * `ranks` lists, for each rank, the MACs of forward and backward, the peak memory, and the
      seconds of its unprofiled steps. The status of a rank is `failed` if the run ended with an
      exception on it, and `missing` if it has no profile. If there are such ranks, `run.partial` is
      true. A failed rank becomes the leading rank only if all ranks failed.
    * `rank_stats` has the median self time of each module on each rank. Modules whose self time is
      known on fewer than two ranks are left out.
    * `rank_comparison` shows which rank is late, and in which modules it takes longer. Profiles do
      not contain the times of modules in single steps, so the quartiles of these times are
      compared.
    * `steps` has one step for the same step of all ranks. Each step is divided at its collectives
      into intervals. The phases of an interval come from the rank that arrived last at the
      collective that ends the interval, which is the rank that waited least. A step has the `marks`
      of all ranks, for example `warmup`. Samples and tokens are summed over the ranks if
      `data_parallel_size` shows which ranks have a separate batch.
    * The times of modules are from the rank that, in most unprofiled steps, arrived last at the end
      of the interval with forward. If ranks have different modules, the times of a module are from
      the same rank as its work.
    * `memory` is from the rank with the largest peak. The peak of a module is its largest peak on
      any rank.
    * `unsupported` has all operators that any rank ran without a formula.
    * `notes` has each note once. Notes are added if ranks are missing, or if ranks did different
      work.

    Args:
        profiles: The profiles as a list in rank order, or as a mapping by rank, such as `{rank:
            lflops.load(f"rank{rank}.json") for rank in range(8)}`.

    Raises:
        ProfileError: A value is not a profile, is passed twice, is already merged, or is from
            another run. The message names the rank.
    """
    by_rank = _by_rank(profiles)
    waits: set[ModulePhase] = set()
    for profile in by_rank.values():
        waits |= waiting_places(profile)

    def memory_of(rank: int) -> Memory | None:
        return by_rank[rank].memory

    def rank_table(patterns: Mapping[str, str]) -> RankTable | None:
        return _quartile_table(by_rank, waits, patterns)

    summaries = (summary_of_rank(rank, profile) for rank, profile in by_rank.items())
    return merged(summaries, by_rank.__getitem__, memory_of, rank_table, waits)


def _quartile_table(
    profiles: Mapping[int, Profile], waits: Collection[ModulePhase], patterns: Mapping[str, str]
) -> RankTable | None:
    """Make a table of the ranks' times from profiles, which have no times of single steps.

    For each rank and place (a module in a phase), the table has the lower quartile, the median and
    the upper quartile of the time. Returns `None` if fewer than two ranks have timed modules.
    """
    times = {}
    waiting = {}
    async_starts: set[ModulePhase] = set()
    for rank, profile in profiles.items():
        async_starts |= async_starts_in(profile)
        quartiles = quartiles_in(profile)
        if quartiles:
            times[rank] = quartiles
            waiting[rank] = exposed_by_place(profile)
    if len(times) < 2:
        return None
    known = exposed_on_all_ranks(waiting)
    return table_of(times, waits, async_starts, known, patterns=patterns, are_quartiles=True)


def summary_of_rank(
    rank: int,
    profile: Profile,
    *,
    table: str | None = None,
    node: str | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> RankSummary:
    """Make the summary of a rank's profile.

    `table` is the name of the table with the rank's modules. If it is `None`, the rank's modules
    are treated as different from the modules of all other ranks.
    """
    root = profile.modules[""]
    memory = profile.memory
    failed = profile.run.partial
    if profile.run.kind == "training":
        failed = any(notes_with("ended_early", profile.notes))
    peak_bytes = root.peak_bytes
    memory_bytes = None
    if memory is not None:
        peak_bytes = memory_bytes = memory.peak_bytes
    macs = 0
    flops = 0
    for phase in PHASES:
        macs += root.work(phase).macs
        flops += root.work(phase).flops
    seconds = [(each.seconds, each.exposed_seconds) for each in profile.communication]
    timelines = []
    if rank < MOST_RANKS:
        for timeline in profile.timelines:
            timelines.append(replace(timeline, rank=rank))
    if table is None:
        table = str(rank)
    return RankSummary(
        rank=rank,
        table=table,
        run=profile.run,
        failed=failed,
        steps=profile.steps,
        notes=profile.notes,
        trace=profile.trace,
        model_macs=root.forward.macs + root.backward.macs,
        macs=macs,
        flops=flops,
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        node=node,
        coordinates=coordinates or {},
        communication_seconds=tuple(seconds),
        timelines=tuple(timelines),
        hooks=profile.hooks,
        main_functions=profile.main_functions,
    )


def merged(
    summaries: Iterable[RankSummary],
    rows_of: Callable[[int], Profile],
    memory_of: Callable[[int], Memory | None],
    rank_table: Callable[[Mapping[str, str]], RankTable | None],
    waits: Collection[ModulePhase],
    *,
    absent: Mapping[int, Rank] | None = None,
) -> Profile:
    """Merge the ranks of a run.

    The summaries of all ranks are needed, but the modules and the memory of only a few ranks. The
    functions `rows_of` and `memory_of` are called for these ranks.

    Args:
        summaries: Summaries in rank order.
        rows_of: Returns a profile with the modules, operators, unsupported operators and
            collectives of a rank. Called for one rank of each distinct `RankSummary.table`, and for
            the rank from which the times of modules are copied.
        memory_of: Returns the memory of a rank. Called for the rank with the largest peak.
        rank_table: Returns the times of all ranks, or `None` if they are unknown. Called with the
            name pattern of each module, such as `layers.*.mlp`.
        waits: The places where ranks wait for each other. A place is a module in a phase.
        absent: Descriptions of ranks without a summary. A rank that is neither in `absent` nor in
            `summaries` gets the status `missing`.

    Raises:
        ProfileError: The ranks are from different runs.
    """
    steps = _StepsOfRanks(waits)
    kept = {}
    for summary in summaries:
        kept[summary.rank] = steps.taken_from(summary)
    _check_one_run(kept)
    order = sorted(kept, key=lambda rank: (kept[rank].run.partial, -kept[rank].flops))
    rows, collectives = _merged_rows(kept, order, rows_of)
    is_staged = any(rows.only_on())
    merged_steps = tuple(steps.merged.merged())
    modules = rows.modules()
    if not is_staged:
        last_rank = steps.merged.last_rank
        if last_rank not in {None, order[0]}:
            modules = _timed_by(rows_of(last_rank or 0).modules, modules)
        modules = _fitted(modules, merged_steps, at_end=waits_at_end(waits))
    world = max(kept) + 1
    for summary in kept.values():
        world = max(world, summary.run.world_size)
    timelines: list[StepTimeline] = []
    for rank in sorted(kept):
        timelines += kept[rank].timelines
    comparison = None
    if not is_staged:
        comparison = steps.unprofiled.compared(waits)
    whole = Profile(
        schema_version=SCHEMA_VERSION,
        run=_run(kept, order[0], world),
        modules=modules,
        op_counts=tuple(rows.op_counts()),
        unsupported=tuple(rows.unsupported.values()),
        communication=_with_least_seconds(rows.communication(), kept.values(), collectives),
        waits=tuple(sorted(rows.waits)),
        steps=merged_steps,
        memory=_largest_memory(kept, memory_of),
        trace=_trace(kept, order),
        timelines=tuple(timelines),
        hooks=kept[order[0]].hooks,
        main_functions=kept[order[0]].main_functions,
        unprofiled_comparison=comparison,
    )
    table = rank_table(whole.patterns())
    slowest: Mapping[int, int] = {}
    if table is not None:
        slowest = times_last(table)
    ranks = tuple(_ranks(kept, steps.of_rank, world, slowest, absent or {}))
    whole = replace(whole, ranks=ranks, notes=_notes(kept, order, rows, ranks))
    if table is None:
        return whole
    work = None
    if table.staged:
        work = _self_work(whole.modules)
    return replace(
        whole,
        rank_stats=tuple(rank_stats(table, whole.modules)),
        rank_comparison=compare_ranks(table, work),
    )


class _StepsOfRanks:
    """Merges and compares the steps of all ranks, which are added rank by rank.

    Attributes:
        merged: Merges the ranks' steps into the steps of the run.
        unprofiled: Compares the ranks phase by phase, in unprofiled steps and in module-timing
            steps. A window has few unprofiled steps. Module-timing steps can be compared too,
            because the cost of hooks is the same on all ranks.
        of_rank: The statistics of each rank's unprofiled steps, by rank.
    """

    def __init__(self, waits: Collection[ModulePhase]) -> None:
        phases = {step_phase(wait.phase) for wait in waits}
        self.merged = MergedSteps(phases, at_end=waits_at_end(waits))
        self.unprofiled = UnprofiledSteps()
        self.of_rank: dict[int, RankSteps] = {}

    def taken_from(self, summary: RankSummary) -> RankSummary:
        """Add the steps in a rank's summary, and return the summary without the steps."""
        compared = []
        for step in summary.steps:
            if step.kind in {"unprofiled", "module_timing"} and is_compared(step.marks):
                compared.append(step)
        self.unprofiled.add(summary.rank, compared, ranks=summary.run.world_size)
        self.of_rank[summary.rank] = self.merged.add(
            summary.rank, summary.steps, summary.run, summary.coordinates
        )
        return replace(summary, steps=())


def _merged_rows(
    summaries: Mapping[int, RankSummary],
    order: Iterable[int],
    rows_of: Callable[[int], Profile],
) -> tuple[MergedRows, dict[str, Sequence[Communication]]]:
    """Merge the modules, operators and collectives of all ranks.

    Ranks with the same `RankSummary.table` have the same modules, operators and collectives, so
    only the first of these ranks in `order` is read. Also returns the collectives of each table, by
    the name of the table.
    """
    lowest: dict[str, int] = {}
    for rank, summary in summaries.items():
        lowest.setdefault(summary.table, rank)
    rows = MergedRows()
    collectives: dict[str, Sequence[Communication]] = {}
    for rank in order:
        table = summaries[rank].table
        if table not in collectives:
            profile = rows_of(rank)
            collectives[table] = profile.communication
            rows.add(rank, profile, lowest[table])
    return rows, collectives


def _timed_by(
    source: Mapping[str, ModuleProfile], modules: Mapping[str, ModuleProfile]
) -> dict[str, ModuleProfile]:
    """Return a copy of `modules` with the times in `source`, which has the modules of another rank.

    A module that has no times in `source` keeps its own times.
    """
    works = {}
    for row, module in modules.items():
        if row not in source:
            continue
        for phase in PHASES:
            times = source[row].work(phase)
            if times.seconds is not None:
                works[ModulePhase(row, phase)] = replace(
                    module.work(phase), seconds=times.seconds, self_seconds=times.self_seconds
                )
    return with_works(modules, works)


def _fitted(
    modules: Mapping[str, ModuleProfile], steps: Iterable[Step], *, at_end: bool
) -> dict[str, ModuleProfile]:
    """Adjust the times of modules so that they add up to the mean time of the unprofiled steps.

    The steps are merged from several ranks, but the times of modules are from one rank. So the sum
    of the modules' times differs from the step time. Normally, the times of all modules are
    multiplied by the same factor. If ranks wait only at the end of backward (`at_end`), the
    difference in backward is waiting time. It is added to the self time of the root, and the other
    modules keep their times.
    """
    unprofiled, scale = with_phases([step for step in steps if step.is_unprofiled])
    fitted = dict(modules)
    root = modules[""]
    for part, phases in PASSES.items():
        known = [step.phases[part] for step in unprofiled if part in step.phases]
        module_seconds = 0.0
        for phase in phases:
            stats = root.work(phase).seconds
            if stats is not None:
                module_seconds += stats.median
        if not known or not module_seconds:
            continue
        step_seconds = sum(known) * scale / len(unprofiled)
        waiting = 0.0
        root_self = root.backward.self_seconds
        if at_end and part == "backward" and root_self is not None:
            waiting = max(step_seconds - module_seconds, -root_self.median)
            fitted[""] = _shifted_backward(fitted[""], waiting)
        left = module_seconds + waiting
        factor = step_seconds / left if left else 1.0
        for row, module in fitted.items():
            works = {}
            for phase in phases:
                works[phase] = _scaled(module.work(phase), factor)
            fitted[row] = replace(module, **works)
    return fitted


def _shifted_backward(root: ModuleProfile, seconds: float) -> ModuleProfile:
    """Return the root with `seconds` added to the total time and the self time of backward."""
    work = root.backward
    if work.seconds is not None:
        work = replace(work, seconds=work.seconds.shifted(seconds))
    if work.self_seconds is not None:
        work = replace(work, self_seconds=work.self_seconds.shifted(seconds))
    return replace(root, backward=work)


def _scaled(work: Work, factor: float) -> Work:
    if work.seconds is not None:
        work = replace(work, seconds=work.seconds.times(factor))
    if work.self_seconds is not None:
        work = replace(work, self_seconds=work.self_seconds.times(factor))
    return work


def _with_least_seconds(
    communication: Iterable[Communication],
    summaries: Iterable[RankSummary],
    of_table: Mapping[str, Sequence[Communication]],
) -> tuple[Communication, ...]:
    """Set `least_seconds` of each collective to the shortest time of the collective on any rank.

    The field is left unchanged if fewer than two ranks have timed the collective. `of_table` has
    the collectives of each table, by the name of the table.
    """
    known: dict[tuple[object, ...], list[float]] = {}
    for summary in summaries:
        times = zip(of_table[summary.table], summary.communication_seconds, strict=True)
        for each, (seconds, _) in times:
            if seconds is not None:
                known.setdefault(_key_on_all_ranks(each), []).append(seconds)
    collectives = []
    for each in communication:
        times_of_ranks = known.get(_key_on_all_ranks(each), [])
        if len(times_of_ranks) > 1:
            each = replace(each, least_seconds=min(times_of_ranks))  # noqa: PLW2901
        collectives.append(each)
    return tuple(collectives)


def _key_on_all_ranks(each: Communication) -> tuple[object, ...]:
    """Return a key that identifies a collective on all ranks.

    The key does not contain the name of the group, which differs between ranks.
    """
    return each.module, each.phase, each.collective, each.group_size, each.calls, each.bytes


def _self_work(modules: Mapping[str, ModuleProfile]) -> dict[ModulePhase, SelfWork]:
    """Return the work of each module in each phase, without its submodules."""
    found = {}
    for row, module in modules.items():
        for phase in PHASES:
            work = module.work(phase)
            if work.self_calls:
                found[ModulePhase(row, phase)] = SelfWork(work.self_flops, work.self_bytes_moved)
    return found


def _by_rank(profiles: Any) -> dict[int, Profile]:
    """Return the profiles by rank, after checking that each is the profile of a single rank."""
    if isinstance(profiles, Profile) or not isinstance(profiles, Iterable):
        raise ProfileError(
            f"merge: profiles is a {type(profiles).__qualname__}: pass the profiles of all ranks,"
            " as a list, or as a dict with ranks as keys"
        )
    if isinstance(profiles, Mapping):
        numbered = list(profiles.items())
    else:
        numbered = list(enumerate(profiles))
    if not numbered:
        raise ProfileError("merge: profiles is empty: pass the profile of at least one rank")
    seen: dict[int, int] = {}
    for rank, profile in numbered:
        _check_rank(rank, profile)
        if id(profile) in seen:
            raise ProfileError(
                f"merge: ranks {seen[id(profile)]} and {rank} have the same profile:"
                " pass a separate profile for each rank"
            )
        seen[id(profile)] = rank
    return dict(sorted(numbered))


def _check_rank(rank: Any, profile: Any) -> None:
    if type(rank) is not int or not 0 <= rank < LARGEST_WORLD:
        raise ProfileError(
            f"merge: the key {rank!r} is not a rank: use whole numbers as keys, from 0 to "
            f"{LARGEST_WORLD - 1}"
        )
    if not isinstance(profile, Profile):
        raise ProfileError(
            f"merge: the profile of rank {rank} is a {type(profile).__qualname__}:"
            " pass a Profile, for example from lflops.load"
        )
    if profile.ranks:
        raise ProfileError(
            f"merge: the profile of rank {rank} is already merged from {len(profile.ranks)} ranks:"
            " pass profiles that were not merged, one for each rank"
        )


def _check_one_run(summaries: Mapping[int, RankSummary]) -> None:
    """Raise a `ProfileError` if the ranks cannot be from one run.

    Properties such as the strategy must be equal on all ranks. Unknown values and a world size of 1
    are ignored.
    """
    known: dict[str, tuple[int, object]] = {}
    for rank, summary in summaries.items():
        run = summary.run
        for fact, value in _facts(run).items():
            if value is None:
                continue
            other_rank, other_value = known.setdefault(fact, (rank, value))
            if value != other_value:
                raise ProfileError(
                    f"merge: {fact} is {value!r} on rank {rank}, but {other_value!r} on rank"
                    f" {other_rank}: pass profiles of the same run"
                )
        if run.world_size > 1 and not max(summaries) < run.world_size <= LARGEST_WORLD:
            raise ProfileError(
                f"merge: run.world_size is {run.world_size} on rank {rank}, but must be at least"
                f" {max(summaries) + 1} for these ranks, and at most {LARGEST_WORLD}"
            )


def _facts(run: Run) -> dict[str, object]:
    """Return the properties that must be the same on all ranks of a run.

    The keys are the names that error messages use.
    """
    facts: dict[str, object] = {}
    for field in _FACTS_OF_RUN:
        facts[f"run.{field}"] = getattr(run, field)
    facts["run.world_size"] = None
    if run.world_size > 1:
        facts["run.world_size"] = run.world_size
    facts["run.versions['torch']"] = run.versions.get("torch")
    return facts


def _run(summaries: Mapping[int, RankSummary], leading: int, world: int) -> Run:
    """Return the properties of the merged run, most of which are from the leading rank.

    If the ranks have different chips, `hardware` is `None`.
    """
    allocated = []
    reserved = []
    chips = set()
    is_partial = len(summaries) < world
    for summary in summaries.values():
        of_rank = summary.run
        allocated.append(of_rank.allocated_bytes)
        reserved.append(of_rank.reserved_bytes)
        chips.add(of_rank.hardware and of_rank.hardware.name)
        is_partial = is_partial or of_rank.partial
    run = summaries[leading].run
    hardware = run.hardware
    if len(chips) > 1:
        hardware = None
    return replace(
        run,
        allocated_bytes=largest_known(allocated),
        reserved_bytes=largest_known(reserved),
        world_size=world,
        partial=is_partial,
        hardware=hardware,
    )


def _largest_memory(
    summaries: Mapping[int, RankSummary], memory_of: Callable[[int], Memory | None]
) -> Memory | None:
    peaks: dict[int, int] = {}
    for rank, summary in summaries.items():
        if summary.memory_bytes is not None:
            peaks[rank] = summary.memory_bytes
    if not peaks:
        return None
    return memory_of(max(peaks, key=peaks.__getitem__))


def _trace(summaries: Mapping[int, RankSummary], order: Iterable[int]) -> Trace | None:
    """Return the trace files of all ranks, and the totals of the first traced rank in `order`."""
    files: dict[str, str] = {}
    for rank in sorted(summaries):
        trace = summaries[rank].trace
        if trace is not None:
            files.update(trace.files)
    for rank in order:
        trace = summaries[rank].trace
        if trace is not None:
            return replace(trace, files=files)
    return None


def _ranks(
    summaries: Mapping[int, RankSummary],
    steps: Mapping[int, RankSteps],
    world: int,
    slowest: Mapping[int, int],
    absent: Mapping[int, Rank],
) -> Iterator[Rank]:
    """Yield a `Rank` for every rank of the run.

    `slowest` has the number of steps in which each rank was the slowest. `absent` has descriptions
    of the ranks that sent no complete report.
    """
    for rank in range(world):
        if rank in summaries:
            summary = summaries[rank]
            yield Rank(
                rank=rank,
                node=summary.node,
                host=summary.run.host,
                device=summary.run.device_name,
                coordinates=summary.coordinates,
                status=_status(summary),
                step=steps[rank].step,
                data=steps[rank].data,
                cpu=steps[rank].cpu,
                macs=summary.model_macs,
                peak_bytes=summary.peak_bytes,
                slowest=slowest.get(rank),
            )
        elif rank in absent:
            yield absent[rank]
        else:
            yield Rank(
                rank=rank, node=None, host=None, device=None, coordinates={}, status="missing"
            )


def _status(summary: RankSummary) -> Literal["failed", "ok"]:
    if summary.failed:
        return "failed"
    return "ok"


def _notes(
    summaries: Mapping[int, RankSummary],
    order: Sequence[int],
    rows: MergedRows,
    ranks: Sequence[Rank],
) -> tuple[Note, ...]:
    """Return each note of the ranks once, then notes about missing ranks and different work.

    `order` has the ranks with the leading rank first.
    """
    of_ranks: dict[tuple[str, str], Note] = {}
    for rank in order:
        for note in summaries[rank].notes:
            of_ranks.setdefault((note.code, note.subject), note)
    notes = list(of_ranks.values())
    missing = [rank.rank for rank in ranks if rank.rank not in summaries]
    if missing:
        values = {"missing": len(missing), "world_size": len(ranks)}
        notes.append(Note(code="ranks_missing", subject=ranges(missing), values=values))
    if rows.differ:
        notes.append(_difference(summaries, order[0], rows))
    for sources, names in rows.only_on():
        tables = {summaries[rank].table for rank in sources}
        having = [rank for rank, summary in summaries.items() if summary.table in tables]
        modules: dict[str, int | float | str] = {
            "modules": len(names),
            "first": names[0],
            "last": names[-1],
        }
        notes.append(Note(code="only_on", subject=ranges(having), values=modules))
    return tuple(notes)


def _difference(summaries: Mapping[int, RankSummary], leading: int, rows: MergedRows) -> Note:
    """Make the note `ranks_differ`: the ranks did different work."""
    macs = [summary.macs for summary in summaries.values()]
    flops = [summary.flops for summary in summaries.values()]
    values = {
        "leading_rank": leading,
        "least_macs": min(macs),
        "most_macs": max(macs),
        "least_flops": min(flops),
        "most_flops": max(flops),
        "rows_of_others": sum(source != leading for source in rows.sources.values()),
    }
    return Note(code="ranks_differ", subject="", values=values)
