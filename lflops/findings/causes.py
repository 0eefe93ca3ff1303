"""What the time of a step goes to besides useful work.

Causes, each with what it costs, the most costly first.

A cause that is found by its own evidence, as work outside of the layers, is taken out of the parts
of the budget that it is in. So no second is in two causes.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.outliers import Outlier, allocating, explaining
from lflops.analysis.step_breakdown import IN_MODULES, StepBreakdown
from lflops.analysis.step_times import StepTimes, lost_share
from lflops.analysis.tree import TIMED_PHASES, BusyModules, total_seconds
from lflops.hardware.chips import vendor_of
from lflops.hardware.peaks import peak_of
from lflops.profile.module_names import added_up, ancestry
from lflops.profile.notes import are_times_far_off, notes_with
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, ModulePhase, step_phase
from lflops.profile.series import grouped, summed
from lflops.profile.steps import is_disturbed
from lflops.ranks.stragglers import MANY_STEPS, Stragglers

# of the step: what costs less is no cause
_WORTH = 0.02
_LEFT_ON = (
    "anomaly_mode",
    "eval_mode",
    "graph_breaks",
    "find_unused",
    # notes that are causes, whose cost is unknown
)

_PER_CALL, _PER_BYTE, _PER_CACHED_BYTE = 20e-6, 1 / 5e9, 1 / 20e9
"""Seconds that an optimizer's operator needs at the most on a CPU, and a byte that it moves.

And one of small operators, in a cache.
"""

_LAUNCHES, _TOO_SLOW = 0.0003, 2.0
"""Seconds that a device waits for the launches of an optimizer that steps all parameters at once.

How many times its need is a fault.
"""

_SMALL_MESSAGE, _MANY_CALLS = (
    1 << 20,
    8,
    # bytes of collectives, and how many of them, that would better be one
)
# MACs of backward over those of forward; twice is usual
_BACKWARD_OF_FORWARD = 2.5
_PER_MODULE = (
    # seconds that a module needs at the most for itself, and for each one that it calls
    50e-6
)
# seconds in which a process hands a batch to another one at the most, besides what the taking
# thread computes
_HANDED_OVER = 0.0015
_BUSY, _MOST_LOST = (
    0.1,
    0.8,
    # of the CPU time that was needed: from so much on others let steps vary; more is no better known
)
# of the step: a loop over parameters that takes as much waits for each of them
_CLIPS = 0.05
# of the products in forward: as many outside of all phases are a model's
_UNWATCHED = 0.05
# times in a step: that often a loop waits for the device, and no loss that is logged
_OFTEN = 10
# by module, which tell what other threads do
_LEAST_STEPS = 3
# seconds for which cores of a CPU differ, by what others do there
_A_WHILE = 5.0
# of the products in forward: as many in frozen layers are worth a word
_MOSTLY_FROZEN = 0.5
_LEAST_MODULES, _LEAST_RATIO, _MORE_CALLS = 3, 1.5, 2
# a part is mostly in a module that has this share of it
_MOSTLY = 0.6
# what NVIDIA's tensor cores multiply faster in
_FASTER = {"float32": "tf32", "tf32": "bfloat16"}
_WIDTH = {"float64": 64, "float32": 32, "tf32": 32, "bfloat16": 16, "float16": 16}


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """What all causes of a kind have in common.

    A row of `causes.toml`, whose first lines explain the fields.
    """

    what: str = ""
    why: str = ""
    next: str = ""
    fault_from: float | None = None
    least_seconds: float = 0.0
    told_from: float = _WORTH
    right: tuple[int, int] | None = None


_ROWS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Row])


def row_of(kind: str) -> Row:
    """The row of a kind; an empty one where it has none."""
    return _ROWS.get(kind, Row())


class Cause(Struct, frozen=True, kw_only=True):
    """Something that a step is longer for.

    Its kind is a row of `causes.toml`, or a phase that the training has named. `busiest` comes
    last: where nothing stands out, or no peak says how fast it could be.
    """

    kind: str
    # what it costs the mean step; `None` is unknown
    seconds: float | None
    # where it is; empty is no module in particular
    module: str = ""
    # with how many others the module is compared
    others: int = 0
    usual: float | str | None = (
        # what these have, in seconds, operator calls, or as their dtype
        None
    )
    # what the module has of that
    value: float | str | None = None
    # whether the times of modules are no measure, so that only the order of the cost is known
    is_rough: bool = False
    # whether other causes have a share of the same part of the budget
    is_rest: bool = False
    # of a slow rank, what it is slow in
    phase: str = ""
    is_fault: bool = (
        # whether it is something wrong, rather than where the time of any such training goes
        False
    )


def causes(
    profile: Profile,
    times: StepTimes,
    budget: StepBreakdown | None,
    *,
    stragglers: Stragglers,
    outliers: Iterable[Outlier],
    busiest: Sequence[BusyModules],
    patterns: Mapping[str, str],
    below: Mapping[str, Sequence[str]],
    # whether the step needs no more than half of the device's memory
    has_room: bool = False,
) -> tuple[Cause, ...]:
    """The causes that cost enough to be worth a word, and those whose cost is unknown.

    Without a clean step there are none.
    """
    # `budget` is of the mean clean step, `None` without a known peak; `below` has the names
    # directly below each module.
    if not times.mean:
        return ()
    is_rough = are_times_far_off(profile.notes)
    unlike = list(_unlike_repeats(profile, patterns, below, _WORTH * times.mean))
    named = {each.module for each in unlike}
    late = list(_of_ranks(stragglers, times.mean, on_host=profile.run.device_type == "cpu"))
    known = {each.module for each in late if each.module} | named
    by_evidence = [*unlike, *_wide(profile, named), *_outside(profile, times, budget, below)]
    in_modules = [
        Cause(
            kind="slow",
            seconds=each.excess,
            module=each.module,
            others=each.others,
            value=each.seconds,
            usual=each.usual_seconds,
        )
        for each in outliers
        if each.module not in known
    ]
    in_modules += [replace(each, is_rough=is_rough) for each in by_evidence]
    exchanged = sum(times.communicating.values())
    parts = list(_parts(profile, times, budget, in_modules, {} if is_rough else patterns))
    if budget is None and is_rough:
        own = {
            "forward": times.phases.get("forward", 0.0),
            "backward": times.phases.get("backward", 0.0) - exchanged,
        }
        parts += (
            Cause(kind=f"all_{name}", seconds=max(seconds, 0.0)) for name, seconds in own.items()
        )
        # they are in these
        in_modules = []
    left_on = [
        Cause(kind=note.code, seconds=None, value=next(iter(note.values.values()), None))
        for code in _LEFT_ON
        for note in notes_with(code, profile.notes)
    ]
    found = [
        *left_on,
        *_threads(profile, times.mean),
        *_padding(profile, times),
        *late,
        *_without([*in_modules, *parts], late),
        *_needless(profile, times, budget),
        *_python(profile, patterns, below, {each.module for each in in_modules}),
    ]
    if budget is None and not is_rough:
        eager = {
            name: each
            for name, each in profile.modules.items()
            if not each.compiled
            # within compiled code nothing has a time
        }
        computing = {
            patterns[name]
            for name, each in eager.items()
            if name and any(each.work(phase).self_calls for phase in TIMED_PHASES)
        }
        judged = computing - {
            patterns.get(each.module, "")
            for each in in_modules
            # but without a peak, no one can tell of products
        }
        plain = (each for each in busiest if each.pattern in judged and not each.macs)
        found += (
            Cause(kind="no_products", seconds=each.seconds, module=each.pattern, value=each.kind)
            for each in plain
        )
    kept = [
        each
        for each in found
        if each.seconds is None or each.seconds >= row_of(each.kind).told_from * times.mean
    ]
    kept = [
        replace(each, is_fault=_is_fault(each, profile, times, has_room=has_room)) for each in kept
    ]
    kept.sort(key=lambda each: (each.seconds is not None, -(each.seconds or 0.0)))
    if busiest and (not kept or (budget is None and not is_rough)):
        most = next(
            (each for each in busiest if each.pattern),
            busiest[0],
            # the model itself is another cause
        )
        if not most.pattern or most.pattern not in {each.module for each in kept}:
            kept.append(
                Cause(
                    kind="busiest",
                    seconds=most.seconds,
                    module=most.name,
                    value=most.kind,
                    is_rest=bool(kept),
                )
            )
    return tuple(kept)


def allowance(lost: float) -> float:
    """How many times as much must be lost to be a fault where others take this share.

    Of a third twice as much.
    """
    return (1 - min(lost, _MOST_LOST)) ** -2 if lost >= _BUSY else 1.0


def _is_fault(cause: Cause, profile: Profile, times: StepTimes, *, has_room: bool) -> bool:
    lost, (took, mean) = lost_share(profile), _without_others(cause, profile, times)
    in_waits = (
        cause.kind == "idle" and waits(profile) and times.phases.get("clip", 0.0) < _CLIPS * mean
        # in which it waits as well
    )
    kind = "idle_in_waits" if in_waits else cause.kind
    row = row_of(
        "recomputed_with_room" if cause.kind in {"recompute", "recomputed"} and has_room else kind
    )
    # for any load
    is_known = bool(times.own) or cause.usual in {"work", "chip"}
    allowed = 1.0 if is_known else allowance(lost) ** (0.5 if cause.kind == "rank" else 1)
    if row.fault_from is None or took < max(row.fault_from * mean, row.least_seconds) * allowed:
        return False
    if cause.kind in {"data", "rank"}:
        return not _is_by_others(cause, profile, is_busy=lost >= _BUSY)
    # a model that is not watched may be there, as another one of a GAN
    if cause.kind == "other":
        of_phase = summed((cell.phase, cell.macs) for cell in profile.op_counts)
        return of_phase.get("other", 0) <= _UNWATCHED * of_phase.get("forward", 0)
    if cause.kind == "optimizer":
        work, run = profile.modules[""].optimizer, profile.run
        bandwidth = (
            run.hardware.bandwidth_bytes_per_second
            if run.hardware is not None and run.device_type != "cpu"
            else None
        )
        on_device = _TOO_SLOW * (work.bytes_moved / bandwidth + _LAUNCHES) if bandwidth else 0.0
        per_byte = _PER_CACHED_BYTE if work.bytes_moved < work.calls << 20 else _PER_BYTE
        needed = on_device or work.calls * _PER_CALL + work.bytes_moved * per_byte
        return took > needed * (1 if times.own else allowance(lost))
    if cause.kind == "communication":
        calls = sum(each.calls for each in profile.communication)
        return (
            calls >= _MANY_CALLS
            and sum(each.bytes for each in profile.communication) < calls * _SMALL_MESSAGE
        )
    return (
        cause.kind != "outside" or ModulePhase("", "forward") not in profile.waits
        # for other ranks, as DDP does before the model runs
    )


def waits(profile: Profile) -> int:
    """How often in a traced step the host waits for a stream of the device, as for the value of `.item()`; 0 if that is not often."""
    operators = profile.trace.operators if profile.trace else ()
    calls = sum(each.calls for each in operators if each.name.endswith("StreamSynchronize"))
    found = (
        round((profile.trace.per_batch(calls) or 0) * (profile.run.accumulation or 1))
        if profile.trace
        else 0
    )
    return found if found >= _OFTEN else 0


def _is_by_others(cause: Cause, profile: Profile, *, is_busy: bool) -> bool:
    """Whether the machine makes a wait.

    A loader's workers have no core either, or a rank's is another's, or slower for a few seconds.
    """
    if cause.kind == "data":
        return bool(profile.run.workers) and is_busy
    return cause.usual == "brief" or (cause.usual == "preempted" and is_busy)


def _without_others(cause: Cause, profile: Profile, times: StepTimes) -> tuple[float, float]:
    """The seconds of a cause and of the step, by which it is judged.

    Where that is known, without what others had of the core.
    """
    took, mean = cause.seconds or 0.0, times.mean or 0.0
    if times.own:
        wall = sum(
            times.phases.get(part, 0.0)
            for part in PASSES
            # as long as modules are together
        )
        of_modules = sum(times.own.get(part, 0.0) for part in PASSES) / wall if wall else 1.0
        took, mean = times.own.get(cause.kind, took * of_modules), sum(times.own.values())
    if cause.kind in times.spreads and (
        times.own or lost_share(profile) >= _BUSY or cause.kind == "optimizer"
    ):
        took = min(
            took,
            times.spreads[cause.kind].median,
            # others delay a step by much, and another one not at all
        )
    return took - (taking_batches(profile) if cause.kind == "data" else 0.0), mean


def taking_batches(profile: Profile) -> float:
    """Seconds in which a batch that a worker has made is handed over, which more workers do not shorten; 0 without workers."""
    known = [step.fetching_cpu for step in profile.steps if step.fetching_cpu is not None]
    return statistics.median(known) + _HANDED_OVER if known and profile.run.workers else 0.0


def _padding(profile: Profile, times: StepTimes) -> Iterator[Cause]:
    """What a batch's padding takes at least: what every position does costs its share."""
    shares = [
        float(note.values["share"])
        for note in notes_with("padding", profile.notes)
        # of each rank
    ]
    if shares:
        share = statistics.mean(shares)
        yield Cause(
            kind="padding",
            seconds=share * sum(times.phases.get(part, 0.0) for part in PASSES),
            value=share,
        )


def _needless(profile: Profile, times: StepTimes, budget: StepBreakdown | None) -> Iterator[Cause]:
    """Work that the step would do without.

    A second backward, modules that nothing is learned from, and recomputing.
    """
    root = profile.modules[""]
    forward, backward = root.forward.macs, root.backward.macs
    if forward and backward >= _BACKWARD_OF_FORWARD * forward:
        seconds = times.phases.get("backward", 0.0) * (1 - 2 * forward / backward)
        yield Cause(kind="backward_twice", seconds=seconds, value=backward / forward)
    chip, faster = profile.run.hardware, _FASTER.get(profile.run.dtype or "")
    if (
        budget is not None
        and chip is not None
        and vendor_of(chip.name) == "NVIDIA"
        and (best := peak_of(faster, chip))
    ):
        saved = (
            (1 - (peak_of(profile.run.dtype, chip) or best) / best)
            * budget.parts.get("useful", 0.0)
            * budget.seconds
        )
        yield Cause(kind="tensor_cores", seconds=saved, value=profile.run.dtype, usual=faster)
    if root.recompute.seconds is not None:
        yield Cause(kind="recomputed", seconds=root.recompute.seconds.median)
    unlearning = {
        name: each
        for name, each in profile.modules.items()
        if not each.backward.macs
        # no gradient goes back through these
    }
    frozen = sum(
        each.forward.self_macs
        for each in unlearning.values()
        if each.parameters and not each.trainable_parameters
    )
    if forward and backward and frozen >= _MOSTLY_FROZEN * forward:
        yield Cause(kind="frozen", seconds=None, value=frozen / forward)
    silent = [
        name
        for name, each in unlearning.items()
        if backward and each.trainable_parameters and each.forward.macs
    ]
    for name in silent:
        took = profile.modules[name].forward.seconds
        if name.rpartition(".")[0] not in silent and took is not None:
            yield Cause(kind="unused", seconds=took.median, module=name)


def _python(
    profile: Profile,
    patterns: Mapping[str, str],
    below: Mapping[str, Sequence[str]],
    known: set[str],
) -> Iterator[Cause]:
    """Modules that take time in forward without any operator.

    Hooks of the user's on their layers, or Python code.
    """
    others = {each.module for each in profile.unsupported} | known
    longer = summed(
        (patterns[name], max(own.median - _PER_MODULE * (1 + len(below[name])), 0.0))
        for name, each in profile.modules.items()
        if name
        and not each.forward.self_calls
        and name not in others
        and (own := each.forward.self_seconds) is not None
    )
    if profile.is_counted and longer:
        most = max(longer, key=longer.__getitem__)
        kinds = {patterns[name]: each.class_name for name, each in profile.modules.items()}
        yield Cause(kind="python", seconds=sum(longer.values()), module=most, value=kinds[most])


def _threads(profile: Profile, mean: float) -> Iterator[Cause]:
    """Threads that take turns.

    More of them than cores, which makes all times longer, by how much is unknown; or Python's own.
    """
    # These compute while the training's thread does not. It is known where torch itself has no
    # other threads.
    run = profile.run
    if run.threads is not None and run.cores is not None and run.threads > run.cores:
        yield Cause(kind="threads", seconds=None, value=run.threads, usual=run.cores)
    shares = [
        min(others, own - step.thread_cpu) / own
        for step in (profile.steps if run.threads == 1 else ())
        if step.kind == "module_timing"
        and step.seconds
        and step.thread_cpu is not None
        and not is_disturbed(step.marks)
        if (own := step.seconds - (step.thread_waited or 0.0)) > 0
        and (others := (step.cpu_user or 0.0) + (step.cpu_system or 0.0) - step.thread_cpu) > 0
    ]
    if len(shares) >= _LEAST_STEPS:
        yield Cause(kind="thread", seconds=max(statistics.median(shares), 0.0) * mean)


def _of_ranks(stragglers: Stragglers, mean: float, *, on_host: bool) -> Iterator[Cause]:
    if stragglers.worst_share is not None:
        few = min(MANY_STEPS, _A_WHILE / (stragglers.step_seconds or 1.0)) if on_host else 0
        lasting = [
            row
            for row in stragglers.rows
            if row.phase != "all" or row.cause is not None or (row.steps or 0) >= few
        ]
        worst = (lasting or stragglers.rows)[0]
        seconds, usual = min(worst.seconds_lost, mean), worst.cause if lasting else "brief"
        yield Cause(
            kind="rank",
            seconds=seconds,
            module=worst.module,
            value=worst.slow_rank,
            phase=worst.phase,
            usual=usual,
        )
    elif stragglers.take_turns and stragglers.lost_share is not None:
        yield Cause(kind="turns", seconds=stragglers.lost_share * mean)


def _without(found: Iterable[Cause], late: Iterable[Cause]) -> list[Cause]:
    """The causes without what a slow rank has of them.

    Of the part that it is slow in, and what is left of the waiting for it.
    """
    causes = list(found)
    for each in late:
        phase, left = step_phase(each.phase), each.seconds or 0.0
        own = phase if phase not in PASSES else "below_roof" if each.module else "outside"
        for kind in (own, "communication"):
            for at, cause in enumerate(causes):
                if cause.kind == kind and (cut := min(left, cause.seconds or 0.0)):
                    causes[at], left = (
                        replace(cause, seconds=(cause.seconds or 0.0) - cut, is_rest=True),
                        left - cut,
                    )
    return causes


def _unlike_repeats(
    profile: Profile, patterns: Mapping[str, str], below: Mapping[str, Sequence[str]], least: float
) -> Iterator[Cause]:
    """Modules that take longer than those at their place since they run more operators, or in a wider dtype."""
    seconds = {name: total_seconds(module) for name, module in profile.modules.items()}
    dtypes = _widest_dtypes(profile)
    calls = {
        name: each.forward.calls + each.backward.calls + each.recompute.calls
        for name, each in profile.modules.items()
    }
    repeated = (
        name for name, pattern in patterns.items() if pattern != name and seconds[name] is not None
    )
    found: dict[str, Cause] = {}
    for names in grouped(repeated, patterns.__getitem__).values():
        usual = statistics.median(seconds[name] or 0.0 for name in names)
        for name in names if len(names) >= _LEAST_MODULES else ():
            took, others = seconds[name] or 0.0, [other for other in names if other != name]
            if took - usual < least or took < _LEAST_RATIO * usual:
                continue
            excess, often = took - usual, statistics.median(calls[other] for other in others)
            usual_dtype = statistics.mode(dtypes.get(other, "") for other in others)
            if _WIDTH.get(dtypes.get(name, ""), 0) > _WIDTH.get(usual_dtype, 64):
                found[name] = Cause(
                    kind="dtype",
                    seconds=excess,
                    module=name,
                    others=len(others),
                    value=dtypes[name],
                    usual=usual_dtype,
                )
            elif often and calls[name] >= _MORE_CALLS * often:
                found[name] = Cause(
                    kind="calls",
                    seconds=excess,
                    module=name,
                    others=len(others),
                    value=calls[name],
                    usual=often,
                )
    yield from (
        found[name]
        for name in explaining({name: each.seconds or 0.0 for name, each in found.items()}, below)
    )


def _widest_dtypes(profile: Profile) -> dict[str, str]:
    widest: dict[str, str] = {}
    for cell in profile.op_counts:
        if cell.macs and cell.dtype in _WIDTH:
            for above in ancestry(cell.module):
                widest[above] = max(
                    widest.get(above, cell.dtype), cell.dtype, key=_WIDTH.__getitem__
                )
    return widest


def _wide(profile: Profile, named: set[str]) -> Iterator[Cause]:
    """Modules without repeats that multiply in float64 where the training does not.

    With half of the bits, half of the time is enough.
    """
    own = {cell.module for cell in profile.op_counts if cell.macs and cell.dtype == "float64"}
    for name in sorted(own) if profile.run.dtype not in {None, "float64"} else ():
        seconds = total_seconds(profile.modules[name], own=True)
        if seconds is not None and named.isdisjoint(ancestry(name)):
            yield Cause(
                kind="dtype",
                seconds=seconds / 2,
                module=name,
                value="float64",
                usual=profile.run.dtype,
            )
    seconds = total_seconds(profile.modules[""])
    if profile.run.dtype == "float64" and seconds is not None:
        yield Cause(kind="dtype", seconds=seconds / 2, value="float64", usual="float32")


def _outside(
    profile: Profile,
    times: StepTimes,
    budget: StepBreakdown | None,
    below: Mapping[str, Sequence[str]],
) -> Iterator[Cause]:
    """The model itself outside of its layers: what its own operators do not need."""
    root, layers = profile.modules[""], [profile.modules[name].forward for name in below[""]]
    if not layers or any(
        layer.calls and layer.seconds is None
        for layer in layers
        # as inside of a compiled model
    ):
        return
    if budget is not None:
        own = budget.modules.get("", {}).get("below_roof", 0.0)
        yield Cause(
            kind="outside", seconds=(own + budget.parts.get("forward", 0.0)) * budget.seconds
        )
    elif root.forward.seconds is not None and not root.forward.self_macs:
        elsewhere = sum(seconds for (name, _), seconds in times.communicating.items() if not name)
        self_seconds = max((total_seconds(root, own=True) or 0.0) - elsewhere, 0.0)
        around = max(times.phases.get("forward", 0.0) - root.forward.seconds.median, 0.0)
        yield Cause(kind="outside", seconds=self_seconds + around)


def _parts(
    profile: Profile,
    times: StepTimes,
    budget: StepBreakdown | None,
    in_modules: Sequence[Cause],
    patterns: Mapping[str, str],
) -> Iterator[Cause]:
    """What is in no module, by its phase.

    And with a known peak the parts of modules' time, without what other causes have.
    """
    mean, exchanged = times.mean or 0.0, sum(times.communicating.values())
    outside = {
        name: seconds / mean for name, seconds in times.parts.items() if name != "backward"
    } | {"communication": exchanged / mean}
    shares = dict(budget.parts if budget else outside)
    on_host = profile.trace is not None and profile.trace.device_compute_seconds is None
    after = [
        each.seconds or 0.0 for each in profile.communication if on_host and each.phase == "other"
    ]
    # Collectives in no phase of a step on the host, as of gradients that are averaged after
    # backward; and waits for the device's driver.
    asked = allocating(profile) if budget else 0.0
    asked = (
        asked if asked >= (row_of("allocating").fault_from or 0.0) * mean else 0.0
        # less would only hide that the device is idle
    )
    within = {
        "communication": (sum(after), ("clip", "other")),
        "allocating": (asked, ("idle", "other")),
    }
    for kind, (seconds, phases) in within.items():
        left = seconds / mean
        for name in phases:
            if (taken := min(left, shares.get(name, 0.0))) > 0:
                left -= taken
                shares |= {name: shares[name] - taken, kind: shares.get(kind, 0.0) + taken}
    own = budget.modules.get("", {}).get("below_roof", 0.0) * mean if budget else 0.0
    by_evidence = (
        own if each.kind == "outside" else each.seconds or 0.0
        for each in in_modules
        if (each.seconds or 0.0) >= _WORTH * mean
    )
    told = {"below_roof": sum(by_evidence)}
    again = profile.modules[""].recompute
    # a cause by itself
    if again.seconds is not None:
        computed = min(again.seconds.median, (again.device_seconds or again.seconds).median)
        told["idle"] = again.seconds.median - computed
        told["below_roof"] += max(computed - shares.pop("recompute", 0.0) * mean, 0.0)
    for name, share in shares.items():
        if name in {"useful", "forward"}:
            continue
        seconds = max(share * mean - told.get(name, 0.0), 0.0)
        module = _innermost(budget, name, patterns) if budget and patterns else ""
        yield Cause(kind=name, seconds=seconds, module=module, is_rest=told.get(name, 0.0) > 0)


def _innermost(budget: StepBreakdown, part: str, patterns: Mapping[str, str]) -> str:
    having = (
        (module, parts[part])
        for module, parts in budget.modules.items()
        if part in IN_MODULES and parts[part]
    )
    shares = summed((above, share) for module, share in having for above in ancestry(module))
    most = [
        name
        for name, share in added_up(shares, patterns).items()
        if name and share >= _MOSTLY * shares[""]
    ]
    return max(most, key=lambda name: name.count("."), default="")
