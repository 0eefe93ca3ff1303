"""One profile of many: of the ranks of a run, or of the batches of a step, where gradients are accumulated over several."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lflops.errors import ProfileError
from lflops.profile.notes import Note
from lflops.profile.profile import (
    COUNTS,
    OP_COUNT_FIELDS,
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
    ModulePhase,
    Rank,
    Seconds,
    TimingStats,
    Trace,
    step_phase,
)
from lflops.profile.series import dtype_of, gathered, grouped, sums
from lflops.profile.steps import Step, is_compared, with_phases
from lflops.profile.timeline import MOST_RANKS, StepTimeline
from lflops.ranks.merge.rank_comparison import SelfWork, compare_ranks, times_last
from lflops.ranks.merge.rank_table import (
    RankTable,
    begins_in,
    known_waits,
    quartiles_in,
    rank_stats,
    table_of,
    waiting_in,
    waits_in,
)
from lflops.ranks.merge.steps import (
    MergedRows,
    MergedSteps,
    RankSteps,
    UnprofiledSteps,
    ranges,
    waits_at_end,
)

LARGEST_WORLD = 1 << 20
_SIZES = tuple(f"{of}_parallel_size" for of in ("data", "tensor", "pipeline", "expert"))
_OF_THE_RUN = ("kind", "stage", "window", "strategy", "accumulation", *_SIZES)


class RankSummary(Struct, frozen=True, kw_only=True, gc=False):
    """What one rank reports in addition to its rows."""

    rank: Count
    # of its rows: ranks with the same have counted the same
    table: str
    run: Run
    # whether it was left by an exception
    failed: bool
    steps: tuple[Step, ...]
    notes: tuple[Note, ...]
    trace: Trace | None
    # of forward and backward
    model_macs: Count
    # of all phases, as `flops`
    macs: Count
    flops: Count
    peak_bytes: Count | None
    # the peak of its memory, where it has one
    memory_bytes: Count | None
    node: str | None = None
    coordinates: Mapping[str, Count] = {}
    # Of each of its collectives, in their order: all seconds, and the exposed ones
    communication_seconds: tuple[tuple[Seconds | None, Seconds | None], ...] = ()
    timelines: tuple[StepTimeline, ...] = ()


def merge(profiles: Iterable[Profile] | Mapping[int, Profile]) -> Profile:
    """Make one profile of a run from those that its ranks made, each with `count`, `counting` or `measure`.

    A module's own figures are those of one rank, never sums over ranks. That is the leading rank:
    the one with the most FLOPs, and of equal ones the first. Where all ranks have the same modules,
    all counts are its own. A module that it does not have, as another pipeline stage, is taken
    whole from the rank that leads among those that have it, and added to the rows above it. These
    rows then hold the work of several ranks, which no clock saw together: their seconds are `None`.
    Modules of one name are assumed to be one module. The facts of the run are the leading rank's
    too, samples and tokens of its batch among them. And:

    * `ranks`: each rank's MACs of forward and backward, its peak, the seconds of its clean steps.
      One that was left by an exception has failed, and leads only failed ones; one that is not
      there is missing; both make the run partial.
    * `rank_stats`: the medians of a module's own seconds from rank to rank, where two at least know
      them.
    * `rank_comparison`: which rank is late and what it takes longer for. Profiles have no single
      steps of modules, so quartiles are compared.
    * The times of modules are those of the rank that came last in most clean steps: its forward is
      that of `steps`.
    * `steps`: of each interval between two collectives the phases of the rank that waited least at
      its end, with the marks of all ranks. Samples and tokens are the sum over the ranks, where
      `data_parallel_size` says which of them have a separate batch.
    * `memory` is that of the rank with the largest peak; peaks of rows are the largest of any rank.
    * `unsupported` has all operators that any rank ran without a formula. A note is taken once. Two
      are new: which ranks are missing, and that ranks differ in their work.

    Args:
        profiles: In the order of the ranks, or by rank, as `{rank: lflops.load(f"rank{rank}.json")
            for rank in range(8)}`.

    Raises:
        ProfileError: One is no profile, is there twice, is merged already, or is of another run;
            the message names its rank.
    """
    given = _by_rank(profiles)
    summaries = (summary_of_rank(rank, profile) for rank, profile in given.items())
    waits = {place for profile in given.values() for place in waits_in(profile)}
    return merged(
        summaries,
        given.__getitem__,
        lambda rank: given[rank].memory,
        partial(_quartiles, given, waits),
        waits,
    )


def _quartiles(
    given: Mapping[int, Profile], waits: Iterable[ModulePhase], patterns: Mapping[str, str]
) -> RankTable | None:
    """The ranks' seconds by place, their quartiles in place of steps."""
    times = {
        rank: quartiles for rank, profile in given.items() if (quartiles := quartiles_in(profile))
    }
    begins = {place for profile in given.values() for place in begins_in(profile)}
    known = known_waits({rank: waiting_in(given[rank]) for rank in times})
    return (
        table_of(times, set(waits), begins, known, patterns=patterns, are_quartiles=True)
        if len(times) > 1
        else None
    )


def summary_of_rank(
    rank: int,
    profile: Profile,
    *,
    table: str | None = None,
    node: str | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> RankSummary:
    """The small part of a rank's profile.

    Without a `table` it is assumed to have a separate one.
    """
    root, memory = profile.modules[""], profile.memory
    left = any(note.code == "ended_early" for note in profile.notes)
    return RankSummary(
        rank=rank,
        table=str(rank) if table is None else table,
        run=profile.run,
        failed=left if profile.run.kind == "training" else profile.run.partial,
        steps=profile.steps,
        notes=profile.notes,
        trace=profile.trace,
        model_macs=sum(root.work(phase).macs for phase in PHASES[:2]),
        macs=sum(root.work(phase).macs for phase in PHASES),
        flops=sum(root.work(phase).flops for phase in PHASES),
        peak_bytes=memory.peak_bytes if memory else root.peak_bytes,
        memory_bytes=memory.peak_bytes if memory else None,
        node=node,
        coordinates=coordinates or {},
        communication_seconds=tuple(
            (each.seconds, each.exposed_seconds) for each in profile.communication
        ),
        timelines=tuple(
            replace(each, rank=rank) for each in profile.timelines if rank < MOST_RANKS
        ),
    )


def merged(
    summaries: Iterable[RankSummary],
    rows_of: Callable[[int], Profile],
    memory_of: Callable[[int], Memory | None],
    rank_table: Callable[[Mapping[str, str]], RankTable | None],
    waits: Iterable[ModulePhase],
    *,
    absent: Mapping[int, Rank] | None = None,
) -> Profile:
    """What `merge` does, from parts: of most ranks the summary is enough.

    A `ProfileError` where the ranks are not of one run.

    `summaries` are in the order of the ranks. `rows_of` has a rank's rows, op_counts, ledger and
    collectives, and is asked once for each distinct table; `memory_of` is asked of the rank with
    the largest peak. `rank_table` makes a table of the ranks' times by place, given each module's
    name with `*` for the numbers of what repeats. `absent` is what is known of ranks that gave
    nothing; the others of these are missing.
    """
    waits = set(waits)
    told, steps, clean = _with_steps(summaries, waits)
    kept = {rank: summary for rank, (summary, _) in told.items()}
    _check_one_run({rank: summary.run for rank, summary in kept.items()})
    order = sorted(kept, key=lambda rank: (kept[rank].run.partial, -kept[rank].flops))
    lowest = {summary.table: rank for rank, summary in reversed(kept.items())}
    rows, collectives = MergedRows(), dict[str, Sequence[Communication]]()
    for rank in order:
        if (table := kept[rank].table) not in collectives:
            profile = rows_of(rank)
            collectives[table] = profile.communication
            rows.add(rank, profile, lowest[table])
    remembering = [summary for summary in kept.values() if summary.memory_bytes is not None]
    largest = max(remembering, key=lambda summary: summary.memory_bytes or 0, default=None)
    world, staged = (
        max(max(summary.rank + 1, summary.run.world_size) for summary in kept.values()),
        any(rows.only_on()),
    )
    last, of_run = None if staged else steps.last_rank, tuple(steps.merged())
    modules = (
        rows.modules()
        if last in {None, order[0]}
        else _timed_by(rows_of(last or 0).modules, rows.modules())
    )
    whole = Profile(
        schema_version=SCHEMA_VERSION,
        run=_run(kept, order[0], world),
        modules=modules if staged else _fitted(modules, of_run, at_end=waits_at_end(waits)),
        op_counts=tuple(rows.op_counts()),
        unsupported=tuple(rows.ledger.values()),
        communication=tuple(_with_least_seconds(rows.communication(), kept.values(), collectives)),
        waits=tuple(sorted(rows.waits)),
        steps=of_run,
        memory=None if largest is None else memory_of(largest.rank),
        trace=_trace(kept, order),
        timelines=tuple(each for rank in sorted(kept) for each in kept[rank].timelines),
        unprofiled_comparison=None if staged else clean.compared(waits),
    )
    times = rank_table(whole.patterns())
    ranks = tuple(_ranks(told, world, None if times is None else times_last(times), absent or {}))
    whole = replace(whole, ranks=ranks, notes=tuple(_notes(kept, order, rows, ranks)))
    if times is None:
        return whole
    stats, comparison = (
        rank_stats(times, whole.modules),
        compare_ranks(times, _own_work(whole.modules) if times.staged else None),
    )
    return replace(whole, rank_stats=tuple(stats), rank_comparison=comparison)


def _with_steps(
    summaries: Iterable[RankSummary], waits: Collection[ModulePhase]
) -> tuple[dict[int, tuple[RankSummary, RankSteps]], MergedSteps, UnprofiledSteps]:
    """The summaries without their steps, and these in what keeps of them what is needed."""
    # There are few clean steps in a window, so the hooked ones, in which the hooks cost all ranks
    # the same, are compared with them
    told, clean = {}, UnprofiledSteps()
    steps = MergedSteps({step_phase(place.phase) for place in waits}, at_end=waits_at_end(waits))
    for summary in summaries:
        compared = (
            step
            for step in summary.steps
            if step.kind in {"unprofiled", "module_timing"} and is_compared(step.marks)
        )
        clean.add(summary.rank, compared, ranks=summary.run.world_size)
        told[summary.rank] = (
            replace(summary, steps=()),
            steps.add(summary.rank, summary.steps, summary.run, summary.coordinates),
        )
    return told, steps, clean


def _timed_by(
    source: Mapping[str, ModuleProfile], modules: Mapping[str, ModuleProfile]
) -> dict[str, ModuleProfile]:
    """The modules with the times that another rank has, as far as it knows them."""
    works = {
        ModulePhase(row, phase): replace(
            module.work(phase), seconds=theirs.seconds, self_seconds=theirs.self_seconds
        )
        for row, module in modules.items()
        for phase in PHASES
        if row in source and (theirs := source[row].work(phase)).seconds is not None
    }
    return with_works(modules, works)


def _fitted(
    modules: Mapping[str, ModuleProfile], steps: Iterable[Step], *, at_end: bool
) -> dict[str, ModuleProfile]:
    """The modules with times that add up to the run's clean steps.

    Those come from several ranks, the modules' times from one.
    """
    # If ranks wait at the end of backward alone (`at_end`), the difference is waiting, which is the
    # root's own
    (clean, scale), fitted = (
        with_phases([step for step in steps if step.is_unprofiled]),
        dict(modules),
    )
    for part, phases in PASSES.items():
        known = [step.phases[part] for step in clean if part in step.phases]
        total = sum(
            spread.median
            for phase in phases
            if (spread := modules[""].work(phase).seconds) is not None
        )
        if not known or not total:
            continue
        run, own, moved = sum(known) * scale / len(clean), modules[""].backward.self_seconds, 0.0
        if at_end and part == "backward" and own is not None:
            moved = max(run - total, -own.median)
        factor = run / (total + moved) if total + moved else 1.0

        def fit(
            spread: TimingStats | None, shift: float, factor: float = factor
        ) -> TimingStats | None:
            return None if spread is None else spread.shifted(shift).times(factor)

        for row, module in fitted.items():
            works: dict[str, Any] = {}
            for phase in phases:
                work, shift = module.work(phase), 0.0 if row or phase != "backward" else moved
                works[phase] = replace(
                    work,
                    seconds=fit(work.seconds, shift),
                    self_seconds=fit(work.self_seconds, shift),
                )
            fitted[row] = replace(module, **works)
    return fitted


def _with_least_seconds(
    communication: Iterable[Communication],
    summaries: Iterable[RankSummary],
    of_table: Mapping[str, Sequence[Communication]],
) -> Iterator[Communication]:
    """The collectives with their least time over the ranks, where at least two know it."""
    known = gathered(
        (_same_on_all_ranks(each), seconds)
        for summary in summaries
        for each, (seconds, _) in zip(
            of_table[summary.table], summary.communication_seconds, strict=True
        )
        if seconds is not None
    )
    for each in communication:
        seconds_of_ranks = known.get(_same_on_all_ranks(each), [])
        yield (
            replace(each, least_seconds=min(seconds_of_ranks))
            if len(seconds_of_ranks) > 1
            else each
        )


def _same_on_all_ranks(each: Communication) -> tuple[object, ...]:
    """The key of a collective on all ranks; groups have other names on each."""
    return each.module, each.phase, each.collective, each.group_size, each.calls, each.bytes


def _own_work(modules: Mapping[str, ModuleProfile]) -> dict[ModulePhase, SelfWork]:
    return {
        ModulePhase(row, phase): SelfWork(work.self_flops, work.self_bytes_moved)
        for row, module in modules.items()
        for phase in PHASES
        if (work := module.work(phase)).self_calls
    }


def _by_rank(profiles: Any) -> dict[int, Profile]:
    """Check that each is the profile of one rank. Returns them by rank."""
    if isinstance(profiles, Profile) or not isinstance(profiles, Iterable):
        raise ProfileError(
            f"merge: profiles is a {type(profiles).__qualname__}: give the profiles of all ranks, in a list or by rank"
        )
    numbered = list(profiles.items() if isinstance(profiles, Mapping) else enumerate(profiles))
    if not numbered:
        raise ProfileError("merge: profiles is empty: give the profile of at least one rank")
    seen: dict[int, int] = {}
    for rank, profile in numbered:
        if type(rank) is not int or not 0 <= rank < LARGEST_WORLD:
            raise ProfileError(
                f"merge: profiles has the rank {rank!r}: whole numbers from 0 to {LARGEST_WORLD - 1} are taken"
            )
        if not isinstance(profile, Profile):
            raise ProfileError(
                f"merge: rank {rank} is a {type(profile).__qualname__}: give a Profile, as lflops.load reads one"
            )
        if profile.ranks:
            raise ProfileError(
                f"merge: rank {rank} is a merged profile, of ranks: {len(profile.ranks)}; give those that it was made of"
            )
        if id(profile) in seen:
            raise ProfileError(
                f"merge: ranks {seen[id(profile)]} and {rank} are the same profile: give each rank its own"
            )
        seen[id(profile)] = rank
    return dict(sorted(numbered))


def _check_one_run(runs: Mapping[int, Run]) -> None:
    """Whether all of them can be of one run.

    A value that one of them does not know contradicts no other: so a world of 1.
    """
    told: dict[str, tuple[int, object]] = {}
    for rank, run in runs.items():
        world = run.world_size
        facts: dict[str, object] = {f"run.{field}": getattr(run, field) for field in _OF_THE_RUN}
        facts |= {
            "run.world_size": world if world > 1 else None,
            "run.versions['torch']": run.versions.get("torch"),
        }
        for fact, value in facts.items():
            other, theirs = (
                told.setdefault(fact, (rank, value)) if value is not None else (rank, None)
            )
            if value != theirs:
                raise ProfileError(
                    f"merge: {fact} is {value!r} on rank {rank}, {theirs!r} on rank {other}: give the ranks of one run"
                )
        if world > 1 and not max(runs) < world <= LARGEST_WORLD:
            taken = f"{max(runs) + 1} to {LARGEST_WORLD}"
            raise ProfileError(
                f"merge: run.world_size is {world} on rank {rank}: with the ranks that are given, {taken} is taken"
            )


def _run(summaries: Mapping[int, RankSummary], leading: int, world: int) -> Run:
    """As the leading rank tells it. Chips of several kinds have no common peak."""
    runs = [summary.run for summary in summaries.values()]
    chips = {run.hardware and run.hardware.name for run in runs}
    return replace(
        summaries[leading].run,
        allocated_bytes=max(
            (run.allocated_bytes for run in runs if run.allocated_bytes is not None), default=None
        ),
        reserved_bytes=max(
            (run.reserved_bytes for run in runs if run.reserved_bytes is not None), default=None
        ),
        world_size=world,
        partial=len(summaries) < world or any(run.partial for run in runs),
        hardware=summaries[leading].run.hardware if len(chips) == 1 else None,
    )


def _trace(summaries: Mapping[int, RankSummary], order: Iterable[int]) -> Trace | None:
    """The files of all ranks, and what the leading one that traced saw in its own."""
    traces = [trace for rank in order if (trace := summaries[rank].trace) is not None]
    files = {
        name: file
        for rank in sorted(summaries)
        if (trace := summaries[rank].trace)
        for name, file in trace.files.items()
    }
    return replace(traces[0], files=files) if traces else None


def _ranks(
    told: Mapping[int, tuple[RankSummary, RankSteps]],
    world: int,
    slowest: Mapping[int, int] | None,
    absent: Mapping[int, Rank],
) -> Iterator[Rank]:
    for rank in range(world):
        if rank not in told:
            yield absent.get(rank) or Rank(
                rank=rank, node=None, host=None, device=None, coordinates={}, status="missing"
            )
            continue
        summary, took = told[rank]
        yield Rank(
            rank=rank,
            node=summary.node,
            host=summary.run.host,
            device=summary.run.device_name,
            coordinates=summary.coordinates,
            status="failed" if summary.failed else "ok",
            step=took.step,
            data=took.data,
            cpu=took.cpu,
            macs=summary.model_macs,
            peak_bytes=summary.peak_bytes,
            slowest=None if slowest is None else slowest.get(rank, 0),
        )


def _notes(
    summaries: Mapping[int, RankSummary],
    order: list[int],
    rows: MergedRows,
    ranks: tuple[Rank, ...],
) -> Iterator[Note]:
    said: dict[tuple[str, str], Note] = {}
    for rank in order:
        for note in summaries[rank].notes:
            said.setdefault((note.code, note.subject), note)
    yield from said.values()
    if missing := [rank.rank for rank in ranks if rank.rank not in summaries]:
        yield Note(
            code="ranks_missing",
            subject=ranges(missing),
            values={"missing": len(missing), "world_size": len(ranks)},
        )
    if rows.differ:
        macs, flops = (
            [summary.macs for summary in summaries.values()],
            [summary.flops for summary in summaries.values()],
        )
        least_and_most = {
            "least_macs": min(macs),
            "most_macs": max(macs),
            "least_flops": min(flops),
            "most_flops": max(flops),
        }
        elsewhere = sum(source != order[0] for source in rows.sources.values())
        yield Note(
            code="ranks_differ",
            subject="",
            values={"leading_rank": order[0], **least_and_most, "rows_of_others": elsewhere},
        )
    for taken, names in rows.only_on():
        tables = {summaries[rank].table for rank in taken}
        having = ranges(rank for rank, summary in summaries.items() if summary.table in tables)
        yield Note(
            code="only_on",
            subject=having,
            values={"modules": len(names), "first": names[0], "last": names[-1]},
        )


_LOGICAL = ("logical_macs", "self_logical_macs")
_TRANSFERS = ("calls", "bytes")

Row = TypeVar("Row", bound=Any)


def sum_of_batches(profiles: Sequence[Profile]) -> Profile:
    """Merge the profiles of a step's batches.

    Work and calls are added up; facts are the last batch's, memory that of the highest peak.
    """
    if len(profiles) == 1:
        return profiles[0]
    last = profiles[-1]
    rows = {name: None for profile in profiles for name in profile.modules}
    memories = [profile.memory for profile in profiles if profile.memory is not None]
    notes = (note for profile in profiles for note in profile.notes)
    op_counts = _sums(
        (each for p in profiles for each in p.op_counts),
        "module operator phase dtype",
        OP_COUNT_FIELDS,
    )
    return replace(
        last,
        run=replace(
            last.run,
            partial=any(profile.run.partial for profile in profiles),
            dtype=dtype_of(op_counts) or last.run.dtype,
        ),
        modules={
            name: _row([profile.modules[name] for profile in profiles if name in profile.modules])
            for name in rows
        },
        op_counts=op_counts,
        unsupported=_sums(
            (each for p in profiles for each in p.unsupported), "module operator phase", _TRANSFERS
        ),
        communication=_sums(
            (each for p in profiles for each in p.communication),
            "module phase collective group",
            _TRANSFERS,
        ),
        waits=tuple(sorted({wait for profile in profiles for wait in profile.waits})),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        notes=tuple(
            reduce(_added, same) for same in grouped(notes, attrgetter("code", "subject")).values()
        ),
    )


def _row(rows: Sequence[ModuleProfile]) -> ModuleProfile:
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    works: dict[str, Any] = {
        phase: reduce(_work, (row.work(phase) for row in rows)) for phase in PHASES
    }
    return replace(
        rows[-1], calls=sum(row.calls for row in rows), peak_bytes=max(peaks, default=None), **works
    )


def _work(one: Work, other: Work) -> Work:
    counts = {
        name: getattr(one, name) + getattr(other, name)
        for count in COUNTS
        for name in (count, f"self_{count}")
    }
    logical = {
        name: None if None in (a := getattr(one, name), b := getattr(other, name)) else a + b
        for name in _LOGICAL
    }
    return replace(one, **counts, **logical)


def _sums(rows: Iterable[Row], fields: str, counts: Iterable[str]) -> tuple[Row, ...]:
    """One row for those that are equal in these fields."""
    return tuple(
        replace(group[0], **sums(group, *counts))
        for group in grouped(rows, attrgetter(*fields.split())).values()
    )


def _added(one: Note, other: Note) -> Note:
    values = {
        name: value + before
        if isinstance(value, int) and isinstance(before := one.values.get(name, 0), int)
        else value
        for name, value in other.values.items()
    }
    return replace(other, values=values)
