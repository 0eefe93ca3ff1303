"""A profile as the text that users of DeepSpeed's profiler know.

A summary, the classes of modules by depth, the model in detail.

Headings, labels and their order are DeepSpeed's, so that two reports can be compared line by line.
A label that differs names a number with another meaning. Lines that DeepSpeed does not have follow
after its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import StepTimes, step_times
from lflops.analysis.tree import ModuleRow, numbered, tree, walk
from lflops.integrations.deepspeed.text import units as short_units
from lflops.profile.module_names import plain
from lflops.profile.notes import notes_with
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import Trace
from lflops.profile.series import grouped, sum_known
from lflops.report.report import report_of
from lflops.report.text import counted
from lflops.report.verdict import verdict_lines
from lflops.units import UNKNOWN


class Kind(Struct, frozen=True, kw_only=True):
    """All modules of one class at one depth, each with what is below it.

    No module is in another one of the same depth.
    """

    kind: str
    modules: int
    # what this rank holds of them
    parameters: int
    # in forward
    macs: int
    seconds: (
        float | None
        # in forward, the medians added up; `None` where one that ran has none, or none ran
    )


def by_depth(profile: Profile, depth: int = -1) -> tuple[tuple[Kind, ...], ...]:
    """The classes at depth 0, which is the root alone, at depth 1, and so on, in the model's order."""
    # The last depth is `depth`; -1, and anything deeper than the model, is the innermost. Less is a
    # `ValueError`.
    if depth < -1:
        raise ValueError(
            f"depth={depth!r}: give -1 for all depths, 0 for the model alone, or how many to go below it"
        )
    levels = grouped(
        (module for module in profile.modules.values() if depth == -1 or module.depth <= depth),
        attrgetter("depth"),
    )
    kinds = (grouped(levels[level], attrgetter("class_name")) for level in sorted(levels))
    return tuple(
        tuple(_kind(kind, modules) for kind, modules in by_kind.items()) for by_kind in kinds
    )


def most(
    kinds: Iterable[Kind], metric: Literal["parameters", "macs", "seconds"], number: int
) -> dict[str, float]:
    """The kinds with the most of a metric, sorted; kinds for which it is unknown are left out."""
    known = [(kind.kind, value) for kind in kinds if (value := getattr(kind, metric)) is not None]
    return dict(sorted(known, key=lambda each: -each[1])[:number])


def _kind(kind: str, modules: list[ModuleProfile]) -> Kind:
    ran = [module.forward.seconds for module in modules if module.calls or module.forward.calls]
    return Kind(
        kind=kind,
        modules=len(modules),
        parameters=sum(module.local_parameters for module in modules),
        macs=sum(module.forward.macs for module in modules),
        seconds=sum_known(None if spread is None else spread.median for spread in ran)
        if ran
        else None,
    )


_LEGEND = """\
Behind a module's name: its params, MACs and fwd latency, each with its share of the whole model's; its fwd FLOPS; what torch prints of it.
The modules below it are included. What is left beyond their sum is the module's own: functions that its forward calls itself.
Parameters that modules share are counted in the first of them."""

_FOLDED = (
    "12 x: the figures are those of one of 12 modules with the same counts, its latency their mean."
)


def aggregated(profile: Profile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """The second part, without a heading.

    At each depth down to `module_depth`, the classes with the most parameters, MACs and time.
    """
    lines = [
        f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"
    ]
    for depth, kinds in enumerate(by_depth(profile, module_depth)):
        lines += [
            f"depth {depth}:",
            f"    params      - {_named(most(kinds, 'parameters', top_modules), short_units.params)}",
            f"    MACs        - {_named(most(kinds, 'macs', top_modules), short_units.macs)}",
            f"    fwd latency - {_named(most(kinds, 'seconds', top_modules), short_units.duration)}",
        ]
    return "\n".join(lines)


def _named(figures: Mapping[str, float], unit: Callable[[float], str]) -> str:
    return (
        str({plain(kind): unit(value) for kind, value in figures.items()}) if figures else UNKNOWN
    )


def _detailed(analysis: Analysis, *, fold: bool = False) -> str:
    """The third part, without a heading.

    With `fold`, modules with the same counts share their lines.
    """
    modules, identical = analysis.profile.modules, analysis.identical_subtrees
    groups = (
        numbered(analysis.children, lambda name: (identical[name], modules[name].detail))
        if fold
        else None
    )
    rows = tree(analysis.profile, fold=False, below=analysis.children, groups=groups)
    legend = f"{_LEGEND}\n{_FOLDED}" if any(row.repeat for row in walk(rows)) else _LEGEND
    return "\n".join([legend, "", *_module(analysis, rows[0], frozenset(analysis.uncalled))])


def _module(analysis: Analysis, row: ModuleRow, uncalled: frozenset[str]) -> Iterator[str]:
    kind = f"{row.times} x {plain(row.class_name)}" if row.repeat else plain(row.class_name)
    figures = ", ".join(_figures(analysis.profile, row, never_called=row.name in uncalled))
    if not row.children:
        yield f"{kind}({figures})"
        return
    yield f"{kind or 'all of it'}("
    yield f"  {figures}"
    for child in row.children:
        first, *rest = _module(analysis, child, uncalled)
        yield f"  ({_label(child)}): {first}"
        for line in rest:
            yield f"  {line}"
    yield ")"


def _label(row: ModuleRow) -> str:
    """The last part of the name.

    Of modules that share their lines both numbers, as torch prints them, or all names.
    """
    labels = [name.rpartition(".")[2] for name in row.names]
    ends = (
        (labels[0], labels[-1]) if row.repeat and all(label.isdecimal() for label in labels) else ()
    )
    return plain("-".join(ends) if ends else ", ".join(labels))


def _figures(profile: Profile, row: ModuleRow, *, never_called: bool) -> Iterator[str]:
    module, seconds = profile.modules[row.name], row.seconds["forward"]
    root, work = profile.modules[""], module.forward
    total = root.forward.seconds.median if root.forward.seconds else None
    params = short_units.percent(module.local_parameters, root.local_parameters)
    yield f"{short_units.params(module.local_parameters)} = {params} Params"
    yield f"{short_units.macs(work.macs)} = {short_units.percent(work.macs, root.forward.macs)} MACs"
    yield f"{short_units.duration(seconds)} = {short_units.percent(seconds, total)} latency"
    yield short_units.rate(work.flops / seconds) if seconds else f"{UNKNOWN} FLOPS"
    if module.owner is not None:
        yield f"shares {plain(module.owner) or 'the model itself'}"
    if module.compiled:
        yield "compiled"
    if never_called:
        yield "never called"
    if module.detail:
        yield plain(module.detail)


_NOTATIONS = """\
Notations:
dp: data parallel, mp: model parallel; params: parameters, shared ones once; MACs: multiply-accumulates of contractions;
flops: 2 for each MAC, and the pointwise and other work: a count; FLOPS: flops a second; latency: the mean over the unprofiled steps;
fwd: forward; bwd: backward, counted and timed; step: the optimizer's update; iter: a whole step, the wait for data in it"""

_Lines = Iterator[tuple[str, str]]


def summary(
    analysis: Analysis,
    *,
    step: int | None = None,
    module_depth: int = -1,
    top_modules: int = 1,
    detailed: bool = True,
    fold: bool = False,
) -> str:
    """The text in all its parts, by the arguments of `get_model_profile`.

    A `ValueError` where there is no such depth.

    `step` is the step to name in the first line, by default the run's. With `fold`, modules that
    repeat share their lines in the third part.
    """
    step = analysis.profile.run.step if step is None else step
    table = aggregated(analysis.profile, module_depth=module_depth, top_modules=top_modules)
    latencies = _latencies(analysis)
    parts = [
        "-------------------------- lflops Flops Profiler --------------------------",
        "Profile Summary:" if step is None else f"Profile Summary at step {step}:",
        f"{_NOTATIONS}\n",
        *(_line(label, value) for label, value in _facts(analysis, latencies)),
        "\n------------------------------ Further Figures per GPU ------------------------------",
        *(_line(label, value) for label, value in extra_lines(analysis, latencies)),
        "\n----------------------------- Aggregated Profile per GPU -----------------------------",
        table,
    ]
    if detailed:
        parts += [
            "\n------------------------------ Detailed Profile per GPU ------------------------------",
            _detailed(analysis, fold=fold),
        ]
    report = report_of(analysis)
    if report.verdict.why:
        closing = [_line(label, value) for label, value in verdict_lines(report.verdict)]
        parts += [
            "\n----------------------------- Where the Step's Time Went -----------------------------",
            *closing,
        ]
    return "\n".join([*parts, "-" * 78])


def _line(label: str, value: str) -> str:
    return f"{f'{label}: ' if label else '':<70}  {value}"


def _latencies(analysis: Analysis) -> StepTimes:
    """Times of the clean steps; without any, those of the counted steps, which a line says."""
    if analysis.step_times.steps:
        return analysis.step_times
    counted = (
        replace(step, kind="unprofiled")
        for step in analysis.profile.steps
        if step.kind == "counting"
    )
    return step_times(replace(analysis.profile, steps=tuple(counted)))


def _facts(analysis: Analysis, latencies: StepTimes) -> _Lines:
    profile = analysis.profile
    world, data, tensor = (
        profile.run.world_size,
        profile.run.data_parallel_size,
        profile.run.tensor_parallel_size,
    )
    replicas = (
        1 if data is None and world in {1, tensor} else data
        # where one group has all the ranks, the other has one
    )
    tensor_parallel = 1 if tensor is None and world in {1, data} else tensor
    yield "world size", str(world)
    yield "data parallel size", _integer(replicas)
    yield "model parallel size", _integer(tensor_parallel)
    for kind in ("pipeline", "expert"):
        if (size := getattr(profile.run, f"{kind}_parallel_size")) is not None:
            yield f"{kind} parallel size", str(size)
    yield "batch size per GPU", _integer(profile.run.samples_per_step)
    yield from _work(analysis, tensor_parallel)
    root, backward = profile.modules[""], latencies.phases.get("backward")
    # The forward of the mean step; the root's, where no step has one.
    seconds = latencies.phases.get(
        "forward", None if root.forward.seconds is None else root.forward.seconds.median
    )
    yield "fwd latency", short_units.duration(seconds)
    rate = (
        None
        if not profile.is_counted or analysis.is_staged
        else _per_second(root.forward.flops, seconds)
    )
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", short_units.rate(rate)
    goes_backward = "backward" in latencies.phases or bool(root.backward.calls)
    of_both, flops_of_both = _flops_of_both(analysis)
    if goes_backward:
        what, flops = _flops_back(analysis)
        both = None if backward is None or seconds is None else seconds + backward
        yield "bwd latency", short_units.duration(backward)
        yield (
            f"bwd FLOPS per GPU = {what} / bwd latency",
            short_units.rate(_per_second(flops, backward)),
        )
        yield (
            f"fwd+bwd FLOPS per GPU = {of_both} / (fwd+bwd latency)",
            short_units.rate(_per_second(flops_of_both, both)),
        )
    if "optimizer" in latencies.phases or root.optimizer.calls:
        yield "step latency", short_units.duration(latencies.phases.get("optimizer"))
    if goes_backward or "optimizer" in latencies.phases:
        yield "iter latency", short_units.duration(latencies.mean)
        yield (
            f"FLOPS per GPU = {of_both} / iter latency",
            short_units.rate(_per_second(flops_of_both, latencies.mean)),
        )
    per_gpu = latencies.samples_per_second
    if replicas is None:
        yield "samples/second per GPU", _rounded(per_gpu)
    else:
        yield "samples/second", _rounded(None if per_gpu is None else per_gpu * replicas)


def _work(analysis: Analysis, tensor_parallel: int | None) -> _Lines:
    """Parameters, MACs and flops: of this GPU, and of the model."""
    profile, root = analysis.profile, analysis.profile.modules[""]
    if analysis.is_staged:
        macs = analysis.unsharded_macs
        yield "params of model, its stages together", short_units.params(root.parameters)
        yield (
            "fwd MACs of model, its stages together",
            short_units.macs(macs.get("forward", root.forward.macs)),
        )
        of_stages = (
            "fwd flops of model, its stages together",
            short_units.flops(root.forward.flops),
        )
        yield _twice(macs.get("forward")) if macs else of_stages
        return
    experts = next((note.values for note in notes_with("experts", profile.notes)), None)
    if experts is not None:
        yield "expert tensor parallelism enabled", str(bool(experts["tensor_parallel"]))
    yield "params per GPU", short_units.params(root.local_parameters)
    if experts is not None:
        shared, routed = int(experts["non_expert_parameters"]), int(experts["expert_parameters"])
        yield "params of model", short_units.params(shared + routed)
        yield "   non-expert params of model", short_units.params(shared)
        yield "   expert params of model", short_units.params(routed)
    elif root.local_parameters == root.parameters:
        of_model = None if tensor_parallel is None else root.parameters * tensor_parallel
        yield "params of model = params per GPU * mp_size", short_units.params(of_model)
    else:
        yield "params of model, which is sharded", short_units.params(root.parameters)
    if not profile.is_counted:
        yield from (("fwd MACs per GPU", UNKNOWN), ("fwd flops per GPU", UNKNOWN))
        return
    yield "fwd MACs per GPU", short_units.macs(root.forward.macs)
    yield "fwd flops per GPU", short_units.flops(root.forward.flops)
    yield _flops_of_model(analysis, tensor_parallel)


def _flops_of_model(analysis: Analysis, tensor_parallel: int | None) -> tuple[str, str]:
    """Torch's own tensor parallelism splits some work and repeats the rest, so the rank's work times its size is not the model's."""
    root, macs = analysis.profile.modules[""], analysis.unsharded_macs
    if macs or (tensor_parallel != 1 and root.local_parameters != root.parameters):
        return _twice(macs.get("forward", root.forward.logical_macs))
    flops = None if tensor_parallel is None else root.forward.flops * tensor_parallel
    return "fwd flops of model = fwd flops per GPU * mp_size", short_units.flops(flops)


def _twice(macs: int | None) -> tuple[str, str]:
    return "fwd flops of model = 2 * fwd MACs of model", short_units.flops(
        None if macs is None else 2 * macs
    )


def _flops_back(analysis: Analysis) -> tuple[str, float | None]:
    root, factor = analysis.profile.modules[""], _assumed_factor(analysis.profile)
    if factor is not None:
        return f"{factor:g} * fwd flops per GPU", factor * root.forward.flops
    if not root.backward.calls or analysis.is_staged:
        return "bwd flops per GPU", None
    label = "bwd+recompute flops" if root.recompute.flops else "bwd flops per GPU"
    return label, root.backward.flops + root.recompute.flops


def _flops_of_both(analysis: Analysis) -> tuple[str, float | None]:
    root, factor = analysis.profile.modules[""], _assumed_factor(analysis.profile)
    if factor is not None:
        return f"{factor + 1:g} * fwd flops per GPU", (factor + 1) * root.forward.flops
    label, back = _flops_back(analysis)
    return f"fwd+{label}", None if back is None else root.forward.flops + back


def _assumed_factor(profile: Profile) -> float | None:
    """Backward in forwards, where it ran and was not counted."""
    return next(
        (float(note.values["forwards"]) for note in notes_with("backward_assumed", profile.notes)),
        None,
    )


def _per_second(flops: float | None, seconds: float | None) -> float | None:
    return None if flops is None or not seconds else flops / seconds


def _integer(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _rounded(value: float | None) -> str:
    return UNKNOWN if value is None else f"{round(value, 2)}"


_OF_SPEED = frozenset({"CPU time", "observer", "MFU", "HFU", "executed"})
# codes of notes
_SHOWN_ELSEWHERE = frozenset({"generated", "experts", "backward_assumed"})
# operators of a trace
_LISTED = 5
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}


def extra_lines(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """Label and value of each line; a line without a label continues the one above."""
    profile = analysis.profile
    yield from _further_work(analysis)
    yield from _generated(profile, latencies)
    yield from _further_latencies(analysis, latencies)
    report = report_of(analysis)
    yield from ((fact.label, fact.said) for fact in report.speed if fact.name in _OF_SPEED)
    yield from ((fact.label, fact.said) for fact in report.model if fact.name == "peak live memory")
    if profile.trace is not None:
        yield from _traced(profile.trace)
    above = ""
    for fact in (each for each in report.remarks if each.name not in _SHOWN_ELSEWHERE):
        yield "" if fact.label == above else fact.label, plain(fact.said)
        above = fact.label or above
    if profile.run.partial:
        silent = any(rank.status != "ok" for rank in profile.ranks)
        yield (
            "partial",
            f"what was watched ended by an exception or before its time{', or not all ranks answered' if silent else ''}",
        )


def _traced(trace: Trace) -> _Lines:
    """The traces' files, and the operators with the most own time."""
    for rank, file in trace.files.items():
        yield "trace" if len(trace.files) == 1 else f"trace of rank {rank}", plain(file)
    on_device = any(each.self_device_seconds for each in trace.operators)
    for index, each in enumerate(trace.by_own_time(on_device=on_device)[:_LISTED]):
        own = each.self_device_seconds if on_device else each.self_host_seconds
        label = (
            ""
            if index
            else f"most self time, {'on the device' if on_device else 'on the host'}, as traced, in a batch"
        )
        calls = units.count(trace.per_batch(each.calls))
        yield label, f"{plain(each.name)}  {units.duration(trace.per_batch(own))}, calls: {calls}"


def _further_work(analysis: Analysis) -> _Lines:
    """The work that DeepSpeed's lines leave out."""
    root, whose = analysis.profile.modules[""], "of model" if analysis.is_staged else "per GPU"
    if root.forward.executed_macs != root.forward.macs:
        yield (
            f"fwd MACs {whose} that the masks leave to be executed",
            units.count(root.forward.executed_macs),
        )
    for label, work in (("bwd", root.backward), ("recompute", root.recompute)):
        if work.calls:
            yield f"{label} MACs {whose}", units.count(work.macs)
            yield f"{label} flops {whose}", units.count(work.flops)
    for phase, macs in analysis.unsharded_macs.items():
        if not (phase == "forward" and analysis.is_staged):
            yield (
                f"{_SHORT.get(phase, phase)} MACs of model, on this rank's batch",
                units.count(macs),
            )
    if root.optimizer.flops:
        yield f"step flops {whose}", units.count(root.optimizer.flops)


def _generated(profile: Profile, latencies: StepTimes) -> _Lines:
    """The two parts of a generation.

    Prefill, which is one call for the prompt, and decode, which is a call for each further token.
    """
    for values in (note.values for note in notes_with("generated", profile.notes)):
        seconds = latencies.phases
        for part in ("prefill", "decode"):
            yield f"{part} MACs per GPU", units.count(float(values[f"{part}_macs"]))
            took = seconds.get(part)
            yield (
                f"{part} FLOPS per GPU",
                short_units.rate(float(values[f"{part}_flops"]) / took if took else None),
            )
        calls, samples = int(values["decode_calls"]), profile.run.samples_per_step
        decode, forward = seconds.get("decode"), seconds.get("forward")
        yield "decode calls", units.count(calls)
        yield (
            "decode latency of one call",
            units.duration(decode / calls if decode and calls else None),
        )
        if samples and decode and forward:
            yield "decode tokens/second per GPU", f"{calls * samples / decode:.2f}"
            yield "tokens/second per GPU", f"{(calls + 1) * samples / forward:.2f}"


def _further_latencies(analysis: Analysis, latencies: StepTimes) -> _Lines:
    """Each phase with its share of the step, and what that rests on."""
    for name, seconds in latencies.phases.items():
        share = f", {units.percent(latencies.share(seconds))} of the step" if latencies.mean else ""
        host = (
            f", {units.duration(latencies.host_phases[name])} on the host"
            if name in latencies.host_phases
            else ""
        )
        yield f"{name} latency", f"{units.duration(seconds)}{share}{host}"
    if (
        latencies.tokens_per_second is not None and "prefill" not in latencies.phases
        # of a generation, these are the prompt's
    ):
        yield "tokens/second per GPU", f"{latencies.tokens_per_second:.2f}"
    clean, ratio, median = (
        analysis.step_times.steps,
        analysis.profile.run.observer_ratio,
        latencies.seconds,
    )
    if analysis.profile.steps and median is not None:
        around = (
            f", {units.duration(median.low)} to {units.duration(median.high)}"
            if median.n > 1
            else ""
        )
        yield "the median step and its quartiles", f"{units.duration(median.median)}{around}"
        yield (
            "the latencies rest on",
            counted(clean, "unprofiled step") if clean else "the counted pass alone",
        )
    if ratio is not None and not clean:
        rest = "measured counting overhead is subtracted, a few µs per operator remain"
        yield "observer's cost: counting made the pass", f"{ratio:.2f} x as long; {rest}"
