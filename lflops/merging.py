"""Many ranks, one profile: what the run did, from what each of its ranks counted or measured."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from lflops.errors import ProfileError
from lflops.observations import PHASES, Rank, RankStat, Spread, Step, Trace
from lflops.profile import COUNTS, SCHEMA_VERSION, Communication, DtypeShare, ModuleProfile, Note, Profile, Run, Uncounted, Work, ancestry

__all__ = ["merge"]

LARGEST_WORLD = 1 << 20
_LISTED = 12
_SIZES = tuple(f"{of}_parallel_size" for of in ("data", "tensor", "pipeline", "expert"))
_OF_THE_RUN = ("kind", "stage", "window", "strategy", "accumulation", *_SIZES)
_HELD = (
    "parameters",
    "trainable_parameters",
    "parameter_bytes",
    "trainable_parameter_bytes",
    "local_parameters",
    "local_parameter_bytes",
)

Ranks = Mapping[int, Profile]


def merge(profiles: Iterable[Profile] | Mapping[int, Profile]) -> Profile:
    """Make one profile of a run from those that its ranks made, each with `count`, `counting` or `measure`.

    A module's own figures are those of one rank, never sums over ranks: of the leading rank, the one with the most FLOPs and of equal ones
    the first: where all ranks have the same modules, all counts are its own. A module that it does not have, as another pipeline stage, is
    taken whole from the rank that leads among those that have it, and added to the rows above it. These then hold the work of several
    ranks, which no clock saw together: their seconds are `None`. Modules of one name are taken to be one module. The facts of the run are
    the leading rank's too, samples and tokens among them: which ranks share a batch is not known here. Beside that:

    * `ranks`: each rank's MACs of forward and backward, its peak, the seconds of its clean steps, in how many of those it was the slowest.
      One that was left by an exception has failed, and leads only failed ones; one that is not there is missing; both make the run partial.
    * `rank_stats`: the medians of a module's seconds from rank to rank, where two at least know them. In how many steps which rank was
      slow is not known of modules: 0 of 0.
    * `steps`: each as the rank saw it that took longest, with the marks of all.
    * `memory` is that of the rank with the largest peak; peaks of rows are the largest of any rank.
    * `uncounted` has whatever any rank ran without a formula. A note is taken once. Two are new: which ranks are missing, and that ranks
      differ in their work.

    Args:
        profiles: In the order of the ranks, or by rank, as `{rank: lflops.load(f"rank{rank}.json") for rank in range(8)}`.

    Raises:
        ProfileError: One is no profile, is there twice, is merged already, or is of another run; the message names its rank.
    """
    given = _by_rank(profiles)
    _check_one_run(given)
    order = sorted(given, key=lambda rank: (given[rank].run.partial, -_total(given[rank], "flops")))
    rows = {row: None for profile in given.values() for row in profile.modules}
    sources = {row: next(rank for rank in order if row in given[rank].modules) for row in rows}
    ranks = tuple(_ranks(given))
    memories = [profile.memory for profile in given.values() if profile.memory is not None]
    return Profile(
        schema_version=SCHEMA_VERSION,
        run=_run(given, order[0], len(ranks)),
        modules=_modules(given, sources),
        cells=tuple(cell for rank, profile in given.items() for cell in profile.cells if sources[cell.module] == rank),
        uncounted=tuple(_uncounted(given, sources)),
        communication=tuple(each for rank, profile in given.items() for each in profile.communication if sources[each.module] == rank),
        steps=_steps(given),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        trace=_trace(given, order),
        ranks=ranks,
        rank_stats=tuple(_rank_stats(given, sources)),
        notes=tuple(_notes(given, order, sources, ranks)),
    )


def _by_rank(profiles: Any) -> dict[int, Profile]:
    """What was given, by rank, once each is seen to be the profile of one rank."""
    if isinstance(profiles, Profile) or not isinstance(profiles, Iterable):
        raise ProfileError(f"merge: profiles is a {type(profiles).__qualname__}: give the profiles of all ranks, in a list or by rank")
    numbered = list(profiles.items() if isinstance(profiles, Mapping) else enumerate(profiles))
    if not numbered:
        raise ProfileError("merge: profiles is empty: give the profile of at least one rank")
    seen: dict[int, int] = {}
    for rank, profile in numbered:
        if type(rank) is not int or not 0 <= rank < LARGEST_WORLD:
            raise ProfileError(f"merge: profiles has the rank {rank!r}: whole numbers from 0 to {LARGEST_WORLD - 1} are taken")
        if not isinstance(profile, Profile):
            raise ProfileError(f"merge: rank {rank} is a {type(profile).__qualname__}: give a Profile, as lflops.load reads one")
        if profile.ranks:
            raise ProfileError(f"merge: rank {rank} is a merged profile, of ranks: {len(profile.ranks)}; give those that it was made of")
        if id(profile) in seen:
            raise ProfileError(f"merge: ranks {seen[id(profile)]} and {rank} are the same profile: give each rank its own")
        seen[id(profile)] = rank
    return dict(sorted(numbered))


def _check_one_run(given: Ranks) -> None:
    """Whether all of them can be of one run. What one of them does not know contradicts nobody."""
    told: dict[str, tuple[int, object]] = {}
    for rank, profile in given.items():
        for fact, value in _facts(profile).items():
            other, theirs = told.setdefault(fact, (rank, value)) if value is not None else (rank, None)
            if value != theirs:
                raise ProfileError(f"merge: {fact} is {value!r} on rank {rank}, {theirs!r} on rank {other}: give the ranks of one run")
        world = profile.run.world_size
        if world > 1 and not max(given) < world <= LARGEST_WORLD:
            taken = f"{max(given) + 1} to {LARGEST_WORLD}"
            raise ProfileError(f"merge: run.world_size is {world} on rank {rank}: with the ranks that are given, {taken} is taken")


def _facts(profile: Profile) -> dict[str, object]:
    """What all ranks of a run have in common. A world of 1 is what a profile says that knows of no other rank."""
    facts = {f"run.{field}": getattr(profile.run, field) for field in _OF_THE_RUN}
    world = profile.run.world_size if profile.run.world_size > 1 else None
    return facts | {"run.world_size": world, "run.versions['torch']": profile.run.versions.get("torch")}


def _run(given: Ranks, leading: int, world: int) -> Run:
    """As the leading rank tells it. Chips of several kinds have no common peak."""
    runs = [profile.run for profile in given.values()]
    chips = {run.hardware and run.hardware.name for run in runs}
    return replace(
        given[leading].run,
        world_size=world,
        partial=len(given) < world or any(run.partial for run in runs),
        hardware=given[leading].run.hardware if len(chips) == 1 else None,
    )


def _modules(given: Ranks, sources: Mapping[str, int]) -> dict[str, ModuleProfile]:
    """Every row as its source has it; what other ranks have below it is added."""
    rows = {row: given[rank].modules[row] for row, rank in sources.items()}
    grafts: dict[str, list[ModuleProfile]] = defaultdict(list)
    for row, module in rows.items():
        above = ancestry(row)[1:]
        if above and sources[above[0]] != sources[row]:
            for each in above:
                grafts[each].append(module)
    peaks: dict[str, int] = {}
    for profile in given.values():
        for row, module in profile.modules.items():
            if module.peak_bytes is not None:
                peaks[row] = max(module.peak_bytes, peaks.get(row, 0))
    return {row: replace(_grown(module, grafts[row]), peak_bytes=peaks.get(row)) for row, module in rows.items()}


def _grown(row: ModuleProfile, grafts: list[ModuleProfile]) -> ModuleProfile:
    """The row with the work and the parameters of further rows below it."""
    if not grafts:
        return row
    figures: dict[str, Any] = {field: sum(getattr(each, field) for each in (row, *grafts)) for field in _HELD}
    figures |= {phase: _added(row.work(phase), [graft.work(phase) for graft in grafts]) for phase in PHASES}
    parameters, sizes = Counter[str](), Counter[str]()
    for each in (row, *grafts):
        for dtype, share in each.dtypes.items():
            parameters[dtype] += share.parameters
            sizes[dtype] += share.bytes
    return replace(row, **figures, dtypes={dtype: DtypeShare(parameters=n, bytes=sizes[dtype]) for dtype, n in parameters.items()})


def _added(work: Work, grafts: list[Work]) -> Work:
    """Inclusive work with more of it below. Times of several ranks have no sum."""
    more = {count: sum(getattr(graft, count) for graft in grafts) for count in COUNTS}
    if not any(more.values()):
        return work
    logical = [each.logical_macs for each in (work, *grafts)]
    known = [macs for macs in logical if macs is not None]
    return replace(
        work,
        **{count: getattr(work, count) + added for count, added in more.items()},
        logical_macs=sum(known) if len(known) == len(logical) else None,
        seconds=None,
        device_seconds=None,
    )


def _uncounted(given: Ranks, sources: Mapping[str, int]) -> Iterator[Uncounted]:
    """The ledger of every rank, for a total that leaves something out on one rank only is not whole either."""
    found: dict[tuple[str, str, str], Uncounted] = {}
    for rank, profile in given.items():
        for each in profile.uncounted:
            key = each.module, each.operator, each.phase
            if key not in found or sources[each.module] == rank:
                found[key] = each
    yield from found.values()


def _steps(given: Ranks) -> tuple[Step, ...]:
    """A step lasts until the last rank is done with it, and what disturbed one rank has disturbed it."""
    found: dict[tuple[int, str], list[Step]] = defaultdict(list)
    for profile in given.values():
        for step in profile.steps:
            found[step.index, step.kind].append(step)
    in_order = (found[key] for key in sorted(found, key=lambda key: key[0]))
    return tuple(_longest(steps) for steps in in_order)


def _longest(steps: Iterable[Step]) -> Step:
    longest = max(steps, key=lambda step: -1.0 if step.seconds is None else step.seconds)
    return replace(longest, marks=tuple({mark: None for step in steps for mark in step.marks}))


def _trace(given: Ranks, order: Iterable[int]) -> Trace | None:
    """The files of all ranks, and what the leading one that traced saw in its own."""
    traces = [trace for rank in order if (trace := given[rank].trace) is not None]
    files = {name: file for trace in traces for name, file in trace.files.items()}
    return replace(traces[0], files=files) if traces else None


def _ranks(given: Ranks) -> Iterator[Rank]:
    world = max(max(given) + 1, *(profile.run.world_size for profile in given.values()))
    slowest = _slowest(given)
    for rank in range(world):
        profile = given.get(rank)
        if profile is None:
            yield Rank(rank=rank, node=None, host=None, device=None, coordinates={}, status="missing")
            continue
        steps = [step for step in profile.steps if step.is_typical]
        yield Rank(
            rank=rank,
            node=None,
            host=profile.run.host,
            device=profile.run.device_name,
            coordinates={},
            status="failed" if profile.run.partial else "ok",
            step=Spread.of(step.seconds for step in steps if step.seconds is not None),
            data=Spread.of(step.phases["data"] for step in steps if "data" in step.phases),
            cpu=Spread.of(each.cpu_user + each.cpu_system for each in steps if each.cpu_user is not None and each.cpu_system is not None),
            macs=sum(profile.modules[""].work(phase).macs for phase in PHASES[:2]),
            peak_bytes=profile.memory.peak_bytes if profile.memory else profile.modules[""].peak_bytes,
            slowest=None if slowest is None else slowest[rank],
        )


def _slowest(given: Ranks) -> Counter[int] | None:
    """How often each rank was the slowest in the clean steps that all of them tell of; `None` where there is nothing to compare."""
    times = {
        rank: {step.index: step.seconds for step in profile.steps if step.kind == "clean" and step.seconds is not None}
        for rank, profile in given.items()
    }
    common = set.intersection(*map(set, times.values()))
    return Counter(max(times, key=lambda rank: times[rank][index]) for index in common) if common and len(given) > 1 else None


def _rank_stats(given: Ranks, sources: Mapping[str, int]) -> Iterator[RankStat]:
    for row in sources:
        having = {rank: profile.modules[row] for rank, profile in given.items() if row in profile.modules}
        for phase in PHASES:
            spreads = {rank: module.work(phase).seconds for rank, module in having.items()}
            medians = {rank: spread.median for rank, spread in spreads.items() if spread is not None}
            if len(medians) < 2:
                continue
            slow = max(medians, key=medians.__getitem__)
            yield RankStat(
                module=row,
                phase=phase,
                low=min(medians.values()),
                median=statistics.median(medians.values()),
                high=medians[slow],
                high_rank=slow,
            )


def _notes(given: Ranks, order: list[int], sources: Mapping[str, int], ranks: tuple[Rank, ...]) -> Iterator[Note]:
    said: dict[tuple[str, str], Note] = {}
    for rank in order:
        for note in given[rank].notes:
            said.setdefault((note.code, note.subject), note)
    yield from said.values()
    if missing := [str(rank.rank) for rank in ranks if rank.status == "missing"]:
        named = ", ".join(missing[:_LISTED]) + (", …" if len(missing) > _LISTED else "")
        yield Note(code="ranks_missing", subject=named, values={"missing": len(missing), "world_size": len(ranks)})
    leading = order[0]
    if any(_differ(given[leading], profile) for profile in given.values()):
        macs, flops = ([_total(profile, count) for profile in given.values()] for count in ("macs", "flops"))
        least_and_most = {"least_macs": min(macs), "most_macs": max(macs), "least_flops": min(flops), "most_flops": max(flops)}
        elsewhere = sum(source != leading for source in sources.values())
        yield Note(code="ranks_differ", subject="", values={"leading_rank": leading, **least_and_most, "rows_of_others": elsewhere})


def _differ(one: Profile, other: Profile) -> bool:
    """Whether two ranks did different work. What one of them did in another order is the same."""
    if one.cells != other.cells and set(one.cells) != set(other.cells):
        return True
    return _beside_cells(one) != _beside_cells(other)


def _beside_cells(profile: Profile) -> tuple[object, ...]:
    """The rows and their calls, the ledger and the collectives; not the groups' names, of which each rank has its own."""
    rows = {row: (module.kind, module.calls) for row, module in profile.modules.items()}
    return rows, *(Counter(map(_counts, table)) for table in (profile.uncounted, profile.communication))


def _counts(each: Uncounted | Communication) -> tuple[object, ...]:
    what = (each.operator, None) if isinstance(each, Uncounted) else (each.collective, each.group_size)
    return each.module, each.phase, *what, each.calls, each.bytes


def _total(profile: Profile, count: str) -> int:
    """Of all phases."""
    return sum(getattr(profile.modules[""].work(phase), count) for phase in PHASES)
