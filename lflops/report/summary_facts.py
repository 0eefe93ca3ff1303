"""Build the report of a profile: a list of facts, each with a name, a value, a text and a remark.

The terminal, the log, the page and the loggers show these facts, and compute nothing themselves, so
all of them show the same numbers. The seconds of the step and of its parts are means over the
unprofiled steps (steps in which lflops only reads a clock). All shares are relative to the mean
unprofiled step. So in every output, the parts add up to the whole step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

from msgspec import Struct

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.operators import UnsupportedOperator
from lflops.analysis.step_breakdown import IN_MODULES, StepBreakdown
from lflops.analysis.step_times import StepTimes, with_recompute
from lflops.analysis.utilization import MODEL_PHASES, Utilization
from lflops.findings.registry import part_rule
from lflops.profile.module_names import added_up, fold_repeats, parent_of, plain
from lflops.profile.notes import are_times_far_off, notes_with, sentence
from lflops.profile.profile import ModuleProfile, Profile, Run
from lflops.profile.records import PHASES, median_of
from lflops.profile.series import ratio
from lflops.profile.settings_advice import how_to_measure_peak, how_to_pass_units
from lflops.profile.steps import WITHIN_FORWARD, Step
from lflops.report.ranks import ranks
from lflops.report.text import WORDS, counted, joined, phase_label, plus_minus, shortened
from lflops.report.verdict import Verdict, verdict

Unit = Literal["s", "share", "of peak", "FLOP/s", "/s", "bytes", "count", "factor", "text"]


def _factor(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.2f}×"


def _flops_per_second(value: float | None) -> str:
    return units.rate(value, "FLOP/s")


_TEXT_OF_UNIT: Mapping[Unit, Callable[[float | None], str]] = {
    "s": units.duration,
    "share": units.percent,
    "of peak": units.of_peak,
    "FLOP/s": _flops_per_second,
    "/s": units.rate,
    "bytes": units.size,
    "count": units.count,
    "factor": _factor,
}

_LISTED = 12
"""Maximum number of unsupported operators, and of classes, that are listed by name."""

_UNCALLED = 4
"""Maximum number of names in the list of modules that were never called."""

_LEAST_RECOMPUTED = 0.05
"""HFU is shown only if it is larger than MFU by at least this share of MFU."""

_SHORT_NAME = 60
"""Maximum number of characters of a module's name in a list. Longer names are shortened."""

_LEADING_MODULES = 3
"""Maximum number of modules that are listed for a part of the step."""

_FASTER = 0.9
"""If module-timing steps take less than this fraction of an unprofiled step, a remark says so.

In module-timing steps, hooks time each module. This cannot make a step faster, so something else
slowed down the unprofiled steps.
"""

_SAID_BY_VERDICT = {"not_counted", "time_scaled", "few_unprofiled_steps"}
"""Names of remarks that the confidence line of the verdict already states in other words.

The number of notes in the confidence line does not include these remarks.
"""


class Fact(Struct, frozen=True, kw_only=True):
    """One fact of a report, for example the step time or MFU.

    Attributes:
        name: The name that programs use to look up the fact.
        label: The name that readers see.
        value: The number in base units such as seconds and bytes. `None` if it is unknown, or if
            the fact is not a number.
        unit: The unit of the value.
        text: The formatted value, which is the same in all outputs.
        remark: How the value was obtained, and how much it varies.
        of: The name of the fact that this fact is a part of. Empty if it is not a part.
        share: The share of the step. `None` if the fact is not a time within the step.
        is_caveat: Whether the fact makes the figures of the report less reliable.
    """

    name: str
    label: str
    value: float | None = None
    unit: Unit = "text"
    text: str
    remark: str = ""
    of: str = ""
    share: float | None = None
    is_caveat: bool = False

    @property
    def said(self) -> str:
        """The text with the remark."""
        return joined(self.text, self.remark)


class Part(Struct, frozen=True, kw_only=True):
    """A part of the step, such as a phase or a part of the step breakdown.

    Attributes:
        name: The name that programs use to look up the part.
        label: The name that readers see.
        seconds: Mean seconds per unprofiled step.
        share: Share of the step.
        text: The seconds and the share as text.
        advice: Common ways to shorten the part. Empty for a phase.
        modules: The names of the modules with the most time in the part, each with this time as a
            share of the step. Identical modules are one entry with a name such as `layers.*`.
    """

    name: str
    label: str
    seconds: float
    share: float
    text: str
    advice: str
    modules: tuple[tuple[str, float], ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """The known facts about a step, in the order in which a reader sees them.

    Attributes:
        verdict: The time of the step, the reasons for it, advice on what to do next, and the
            confidence.
        subject: The profiled model, the device, and the inputs.
        speed: The time of the step and of its phases, throughput, MFU, and the overhead of
            measuring. Empty if no step was timed.
        model: Memory, parameters and MACs. For an estimate, also the least time of a step and
            whether the model fits into memory.
        breakdown: The step breakdown, the largest part first. Empty if the peak is unknown.
        why_no_breakdown: Reason why the breakdown is empty. Empty if there is a breakdown.
        remarks: Further facts: the allocator, ranks, unsupported operators, modules that were never
            called, and notes.
    """

    verdict: Verdict
    subject: tuple[Fact, ...]
    speed: tuple[Fact, ...]
    model: tuple[Fact, ...]
    breakdown: tuple[Part, ...]
    why_no_breakdown: str
    remarks: tuple[Fact, ...]

    def fact(self, name: str) -> Fact | None:
        """Return the fact with this name in `speed`, `model` or `subject`, or `None`."""
        for fact in (*self.speed, *self.model, *self.subject):
            if fact.name == name:
                return fact
        return None

    def value(self, name: str) -> float | None:
        """Return the value of `fact(name)`, or `None` if it is unknown or not a number."""
        fact = self.fact(name)
        return None if fact is None else fact.value


_MADE: WeakKeyDictionary[Analysis, Report] = WeakKeyDictionary()
"""The report of each analysis that is still in use, so that each report is built only once."""


def report_of(analysis: Analysis) -> Report:
    """Return the report of a profile. Calls with the same analysis return the same report."""
    made = _MADE.get(analysis)
    if made is None:
        made = _MADE[analysis] = _report(analysis)
    return made


def _report(analysis: Analysis) -> Report:
    breakdown = tuple(_breakdown(analysis))
    remarks = tuple(_remarks(analysis))
    caveats = 0
    for remark in remarks:
        if remark.is_caveat and remark.name not in _SAID_BY_VERDICT:
            caveats += 1
    return Report(
        verdict=verdict(analysis, caveats),
        subject=tuple(_subject(analysis.profile)),
        speed=tuple(_speed(analysis)),
        model=tuple(_model(analysis)),
        breakdown=breakdown,
        why_no_breakdown="" if breakdown else _why_no_breakdown(analysis),
        remarks=remarks,
    )


def _fact(
    name: str,
    value: float | None,
    unit: Unit,
    remark: str = "",
    *,
    label: str = "",
    text: str = "",
    of: str = "",
    share: float | None = None,
) -> Fact:
    """Make a fact with a number.

    By default, its label is its name, and its text is the formatted number.
    """
    return Fact(
        name=name,
        label=label or name,
        value=value,
        unit=unit,
        text=text or _TEXT_OF_UNIT[unit](value),
        remark=remark,
        of=of,
        share=share,
    )


def _text(label: str, text: str, *, caveat: bool = False) -> Fact:
    return Fact(name=label.replace(" ", "_"), label=label, text=text, is_caveat=caveat)


def _is_timed(step: Step) -> bool:
    return step.seconds is not None and step.kind != "counting"


def _speed(analysis: Analysis) -> Iterator[Fact]:
    if not any(map(_is_timed, analysis.profile.steps)):
        return
    times = analysis.step_times
    unit = analysis.evidence.unit
    several = _several(unit)
    if times.seconds is None:
        yield _fact(unit, None, "s", f"no unprofiled {several}")
        return
    yield _fact(unit, times.mean, "s", _basis_of_step(analysis))
    yield from _phases(times, unit, has_derivatives=_has_derivatives_in_forward(analysis))
    remark = ""
    if times.samples_per_second is None:
        advice = how_to_pass_units(analysis.profile.run)
        remark = f"the number of samples per batch is unknown: {advice}"
    yield _fact("samples/s", times.samples_per_second, "/s", remark)
    if times.tokens_per_second is not None:
        yield _fact("tokens/s", times.tokens_per_second, "/s")
    yield from _reached(analysis)
    yield from _cpu_time(times, unit)
    ratio = analysis.profile.run.observer_ratio
    if ratio is not None:
        remark = f"time of module-timing {several} relative to unprofiled {several}"
        if ratio < _FASTER:
            remark += f"; something other than lflops slowed down the unprofiled {several}"
        yield _fact("observer", ratio, "factor", remark, label="cost of timing")


def _several(unit: str) -> str:
    return "steps" if unit == "step" else "passes"


def _basis_of_step(analysis: Analysis) -> str:
    """Describe the steps from which the mean was computed: their number, median and spread."""
    times = analysis.step_times
    unit = analysis.evidence.unit
    if times.seconds is None or times.steps == 1:
        return f"of one unprofiled {unit}"
    several = _several(unit)
    if unit == "step":
        several = f"unprofiled steps ({_unprofiled_steps(analysis)})"
    spread = ""
    if times.spread is not None:
        spread = f" ± {plus_minus(times.spread)}"
    median = units.duration(times.seconds.median)
    return f"mean of {units.count(times.steps)} {several}; median {median}{spread}"


def _unprofiled_steps(analysis: Analysis) -> str:
    """List the numbers of the unprofiled steps that are in the mean, such as `2 to 5, 13`."""
    ranges: list[range] = []
    for step in analysis.profile.steps:
        if not step.is_unprofiled or step.seconds is None:
            continue
        if ranges and ranges[-1].stop == step.index:
            ranges[-1] = range(ranges[-1].start, step.index + 1)
        else:
            ranges.append(range(step.index, step.index + 1))
    if len(ranges) > MOST_RANGES:
        return f"between {ranges[0].start:,} and {ranges[-1][-1]:,}"
    return ", ".join(map(_first_to_last, ranges))


MOST_RANGES = 3
"""If there are more ranges of unprofiled steps, only the first and the last step are named."""


FEWEST_IN_RANGE = 3
"""Fewer consecutive steps are listed one by one."""


def _first_to_last(steps: range) -> str:
    if len(steps) < FEWEST_IN_RANGE:
        return ", ".join(f"{step:,}" for step in steps)
    return f"{steps.start:,} to {steps[-1]:,}"


def _phases(times: StepTimes, unit: str, *, has_derivatives: bool) -> Iterator[Fact]:
    """Yield the time of each phase, and the times of parts of forward and backward.

    The times of the phases add up to the time of the step. The time of a part is included in the
    time of its phase.
    """
    for name, seconds in with_recompute(times.parts, times.recomputed_share).items():
        remark = ""
        if name == "forward" and has_derivatives:
            remark = "with backward work that torch.autograd.grad runs in this phase"
        yield _phase(times, name, seconds, remark, of=unit)
        if name == "forward":
            for part in WITHIN_FORWARD:
                if part in times.phases:
                    yield _phase(times, part, times.phases[part], "", of=name)
        if name == "backward" and times.waiting:
            yield _fact(
                "waiting",
                times.waiting,
                "s",
                "for gradients of other ranks",
                of=name,
                share=times.share(times.waiting),
            )


def _has_derivatives_in_forward(analysis: Analysis) -> bool:
    """Return whether `torch.autograd.grad` runs backward work of modules in the phase forward."""
    profile = analysis.profile
    of_modules = median_of(profile.modules[""].backward.seconds)
    in_phase = analysis.step_times.phases.get("backward")
    if not profile.run.takes_derivatives or of_modules is None or in_phase is None:
        return False
    return of_modules > LONGER_THAN_PHASE * in_phase


LONGER_THAN_PHASE = 1.25
"""Backward of modules is partly in forward if it takes this many times as long as its phase."""


def _phase(times: StepTimes, name: str, seconds: float, remark: str, *, of: str) -> Fact:
    on_host = ""
    if name in times.host_phases:
        on_host = f"{units.duration(times.host_phases[name])} on the host"
    share = times.share(seconds)
    remark = joined(on_host, remark, separator="; ")
    return _fact(name, seconds, "s", remark, label=phase_label(name), of=of, share=share)


def _reached(analysis: Analysis) -> Iterator[Fact]:
    """Yield the achieved FLOP/s, and MFU, HFU and the executed share of the peak."""
    reached = analysis.utilization
    root = analysis.profile.modules[""]
    rate = reached.flops_per_second
    phases = " and ".join(phase for phase in MODEL_PHASES if root.work(phase).macs)
    basis = "no work was counted" if rate is None else f"2 × MACs of {phases or 'forward'}"
    yield _fact("achieved", rate, "FLOP/s", basis)
    yield _fact("MFU", reached.mfu, "of peak", _peak(reached, analysis.profile))
    if _is_more(reached.hfu, reached.mfu):
        yield _fact("HFU", reached.hfu, "of peak", "including recomputed MACs")
    if units.percent(reached.executed) != units.percent(reached.hfu):
        basis = (
            "without the MACs that are skipped because of masks, and with each dtype at its own "
            "peak"
        )
        if reached.executed is None:
            basis = "the peak is unknown for the dtype of some MACs"
        yield _fact("executed", reached.executed, "of peak", basis)


def _is_more(hfu: float | None, mfu: float | None) -> bool:
    """Return whether HFU is so much larger than MFU that the report shows HFU.

    A small difference is not shown, because fused attention always recomputes a little.
    """
    return hfu is not None and mfu is not None and hfu >= (1 + _LEAST_RECOMPUTED) * mfu


def _peak(reached: Utilization, profile: Profile) -> str:
    """Describe the peak that MFU is relative to, or the reason why the peak is unknown."""
    run = profile.run
    if reached.hardware is None:
        chips = device_names(profile)
        if len(chips) > 1:
            names = ", ".join(chips)
            return f"the ranks use different chips, so there is no common peak: {names}"
        return f"the peak of {run.device_name} is unknown: {how_to_measure_peak(run)} to measure it"
    if reached.peak_flops_per_second is None:
        dtype = reached.dtype or run.dtype or "an unknown dtype"
        return f"the peak of {reached.hardware} for {dtype} is unknown"
    peak = units.rate(reached.peak_flops_per_second, "FLOP/s")
    return f"of {peak} ({reached.hardware}, {reached.dtype} dense)"


def _cpu_time(times: StepTimes, unit: str) -> Iterator[Fact]:
    if times.cpu_seconds is None or times.seconds is None:
        return
    cpu = times.cpu_seconds.median
    median = times.seconds.median
    remark = f"{_factor(ratio(cpu, median))} the time of the median {unit}"
    if times.system_seconds:
        remark += f", {units.duration(times.system_seconds.median)} of it in the operating system"
    yield _fact("CPU time", cpu, "s", remark)


def _model(analysis: Analysis) -> Iterator[Fact]:
    profile = analysis.profile
    root = profile.modules[""]
    bound = analysis.lower_bound
    if bound is not None and analysis.step_times.seconds is None:
        yield _fact("least time", bound.seconds, "s", f"for a step on {bound.hardware}")
    fit = analysis.memory_fit
    fits = ""
    if fit is not None:
        fits = f"{fit.verdict}: {fit.chip} has {units.size(fit.usable_bytes)}"
        if profile.run.kind == "estimate":
            yield _fact("memory needed", fit.needed_bytes, "bytes", fits)
            fits = ""
    remark = joined(_by_category(profile), _no_memory_because(analysis), fits, separator="; ")
    yield _fact("peak live memory", analysis.peak_bytes, "bytes", remark)
    size = f"{units.count(root.parameters)} in {units.size(root.parameter_bytes)}"
    remark = ", ".join(_parameters(root))
    yield _fact("parameters", root.parameters, "count", remark, text=size)
    if profile.is_counted:
        total = 0
        ran = []
        for phase in PHASES:
            macs = root.work(phase).macs
            total += macs
            if macs:
                ran.append(f"{phase} {units.count(macs)}")
        yield _fact("MACs", total, "count", ", ".join(ran))


def _no_memory_because(analysis: Analysis) -> str:
    """Describe why the peak of live memory is unknown. Return "" if it is known."""
    if analysis.peak_bytes is not None:
        return ""
    if not analysis.profile.is_counted:
        return "no step was counted"
    has_compiled_module = any(module.compiled for module in analysis.profile.modules.values())
    if has_compiled_module or any(notes_with("compiled_unsupported", analysis.profile.notes)):
        return (
            "lflops cannot see memory that compiled code allocates; to see this memory, run the "
            "code eagerly"
        )
    return ""


def _by_category(profile: Profile) -> str:
    """List the sizes of the categories of memory at the peak, the largest first."""
    if profile.memory is None:
        return ""
    sizes = profile.memory.by_category
    parts = []
    for category in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[category]:
            parts.append(f"{category.replace('_', ' ')} {units.size(sizes[category])}")
    if not parts:
        return ""
    return f"of these {', '.join(parts)}"


def _parameters(root: ModuleProfile) -> Iterator[str]:
    if root.trainable_parameters != root.parameters:
        share = units.percent(root.trainable_parameters / root.parameters)
        size = units.size(root.trainable_parameter_bytes)
        yield f"{units.count(root.trainable_parameters)} trainable in {size} ({share})"
    elif root.parameters:
        yield "all trainable"
    if len(root.dtypes) == 1:
        yield f"all {next(iter(root.dtypes))}"
    else:
        for dtype, share_of_dtype in root.dtypes.items():
            number = units.count(share_of_dtype.parameters)
            yield f"{number} {dtype} in {units.size(share_of_dtype.bytes)}"
    if root.local_parameters != root.parameters:
        size = units.size(root.local_parameter_bytes)
        yield f"{units.count(root.local_parameters)} in {size} on this rank"


def _breakdown(analysis: Analysis) -> Iterator[Part]:
    breakdown = analysis.breakdown
    if breakdown is None:
        return
    for name, share in sorted(breakdown.parts.items(), key=lambda part: -part[1]):
        seconds = share * breakdown.seconds
        rule = part_rule(name)
        yield Part(
            name=name,
            label=rule.label_of_part(),
            seconds=seconds,
            share=share,
            text=f"{units.percent(share)}, {units.duration(seconds)}",
            advice=rule.advise_in("", analysis.evidence),
            modules=tuple(_modules_of(analysis, breakdown, name)),
        )


def _modules_of(analysis: Analysis, breakdown: StepBreakdown, part: str) -> list[tuple[str, float]]:
    """Return the names of the modules with the most time in a part of the step breakdown.

    Each name comes with the module's time in this part, as a share of the step. The result is empty
    if module times are unreliable.
    """
    if part not in IN_MODULES or are_times_far_off(analysis.profile.notes):
        return []
    shares = {}
    for module, parts in breakdown.modules.items():
        if parts[part]:
            shares[module] = parts[part]
    folded = added_up(shares, analysis.patterns)
    return sorted(folded.items(), key=lambda item: -item[1])[:_LEADING_MODULES]


def _why_no_breakdown(analysis: Analysis) -> str:
    if not analysis.profile.is_counted:
        return "no work was counted"
    if analysis.step_times.seconds is None:
        return "no unprofiled step was timed"
    run = analysis.profile.run
    return (
        f"the peak of {run.device_name} is unknown for the dtypes of the matmuls; "
        f"{how_to_measure_peak(run)}, or instead of `measure` a name from the output of "
        "`lflops hardware`"
    )


def _subject(profile: Profile) -> Iterator[Fact]:
    run = profile.run
    step = None
    if run.step is not None:
        step = f"step {run.step}"
    window = None
    if run.window is not None:
        window = f"window {run.window}"
    partial = "partial" if run.partial else None
    yield _text("profiled", _listed(_root(profile), _passes(profile), step, window, partial))
    number_of_ranks = None
    if run.world_size > 1:
        number_of_ranks = counted(run.world_size, "rank")
    yield _text("device", _listed(_device(profile), run.dtype, run.precision, number_of_ranks))
    created = run.created.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")
    yield _text("created", created)
    inputs = joined(", ".join(_shapes(run)), _units_of_batch(profile), separator="; ")
    yield _text("inputs", inputs or units.UNKNOWN)


def _shapes(run: Run) -> Iterator[str]:
    for name, shape in run.shapes.items():
        size = "×".join(map(str, shape)) or "scalar"
        # Positional inputs are named by a number, which would look like a size.
        yield size if name.isdecimal() else f"{name} {size}"


def _units_of_batch(profile: Profile) -> str:
    """Describe how many samples and tokens a step has, and from which inputs they were counted.

    If a number is unknown, describe how to pass it.
    """
    run = profile.run
    parts = []
    missing = []
    if run.samples_per_step is not None:
        source = run.samples_from or ""
        if (run.accumulation or 1) > 1:
            source = joined(f"{run.accumulation} batches", source, separator=": ")
        parts.append(_with_source(run.samples_per_step, "sample", source))
    else:
        missing.append("samples")
    if run.tokens_per_step is not None:
        sources = ", ".join(map(_input_name, run.tokens_from))
        parts.append(_with_source(run.tokens_per_step, "token", sources))
    elif any("embedding" in each.operator for each in profile.op_counts):
        # Only a model with an embedding has tokens.
        missing.append("tokens")
    if missing and run.kind in {"training", "measure"}:
        parts.append(f"{' and '.join(missing)} {units.UNKNOWN} ({how_to_pass_units(run)})")
    return ", ".join(parts)


def _with_source(number: int, unit: str, source: str) -> str:
    plural = "" if number == 1 else "s"
    origin = f" (from {source})" if source else ""
    return f"{number:,} {unit}{plural}{origin}"


def _input_name(name: str) -> str:
    """Return a readable name of an input, such as `input 0` for a positional input."""
    return f"input {name}" if name.isdecimal() else name


def _device(profile: Profile) -> str:
    """Describe the profiled device or, for an estimate, the chip that the estimate is for."""
    run = profile.run
    if run.kind != "estimate":
        return f"{' and '.join(device_names(profile))} on {run.host}"
    chip = run.hardware.name if run.hardware else "no device"
    return f"{chip}, estimated on {run.host}"


def device_names(profile: Profile) -> list[str]:
    """Return the names of the chips of all ranks, without duplicates."""
    chips = list(dict.fromkeys(rank.device for rank in profile.ranks if rank.device))
    return chips or [profile.run.device_name]


def _root(profile: Profile) -> str:
    """Return the class of the root module.

    If the root is not a module, return the classes of the modules directly below it.
    """
    root = profile.modules[""].class_name
    if root:
        return root
    classes: dict[str, None] = {}
    for name, module in profile.modules.items():
        if name and "." not in name:
            classes[module.class_name] = None
    named = list(classes)[:_LISTED]
    if len(classes) > _LISTED:
        named.append(f"{len(classes) - _LISTED} more classes")
    return joined(", ".join(named[:-1]), *named[-1:], separator=" and ")


def _passes(profile: Profile) -> str:
    """Describe how the profile was made, for example in training or by counting a forward pass."""
    run = profile.run
    if run.kind == "training" and run.stage not in {None, "train"}:
        return f"training, {run.stage}"
    calls = profile.modules[""].calls
    if run.kind != "count" or calls == 1:
        return WORDS["kinds"][run.kind]
    # Code can be counted although no root module was called.
    if not calls:
        return "counted"
    return f"counted, sum of {units.count(calls)} forward passes"


def _listed(*parts: str | None) -> str:
    return joined(*parts) or units.UNKNOWN


def _remarks(analysis: Analysis) -> Iterator[Fact]:
    profile = analysis.profile
    run = profile.run
    if run.allocated_bytes is not None:
        reserved = f"{units.size(run.reserved_bytes)} reserved"
        text = f"{units.size(run.allocated_bytes)} allocated, {reserved}"
        yield _text("allocator's peak", text)
    for label, value in ranks(analysis):
        yield _text(label, value)
    if profile.is_counted:
        for line in unsupported_lines(analysis.unsupported):
            yield _text("not counted", line, caveat=True)
        if not analysis.unsupported:
            yield _text("not counted", "nothing: every operator that ran has a formula")
        if analysis.uncalled:
            yield _text("never called", _never_called(analysis), caveat=True)
    for note in profile.notes:
        yield Fact(name=note.code, label="note", text=sentence(note), is_caveat=True)


def unsupported_lines(
    operators: Sequence[UnsupportedOperator], most: int = _LISTED
) -> Iterator[str]:
    """Yield a line for each of the first `most` unsupported operators, and one for the rest."""
    listed = operators[:most]
    width = max((len(operator.operator) for operator in listed), default=0)
    for operator in listed:
        modules = operator.modules
        where = modules[0] or "the model itself"
        if len(modules) > 1:
            where = counted(len(modules), "module")
        calls = counted(operator.calls, "call")
        line = f"{calls} in {where}, {units.size(operator.bytes)} moved"
        if operator.seconds is not None:
            line += f", {units.duration(operator.seconds)}"
        yield f"{operator.operator:<{width}}  {line}"
    rest = operators[most:]
    if rest:
        calls = counted(sum(operator.calls for operator in rest), "call")
        size = units.size(sum(operator.bytes for operator in rest))
        yield f"and {counted(len(rest), 'more operator')}  {calls}, {size} moved"


def _never_called(analysis: Analysis) -> str:
    """List the modules that were never called.

    Only the outermost of these modules are listed by name. For modules inside them, only the number
    is given. Identical modules are one entry, such as `layers.* ×12`.
    """
    uncalled = set(analysis.uncalled)
    top = []
    for name in analysis.uncalled:
        if not name or parent_of(name) not in uncalled:
            top.append(name)
    root = analysis.profile.modules[""].class_name or "the whole model"
    labels: list[str] = []
    for label, names in fold_repeats(top, lambda name: (name,), analysis.patterns):
        has_words = bool(set(label) - {"*", "."})
        if len(names) > 1 and has_words:
            labels.append(f"{shortened(label, _SHORT_NAME)} ×{len(names)}")
        else:
            labels += [shortened(name or root, _SHORT_NAME) for name in names]
    more = ""
    if len(labels) > _UNCALLED:
        more = f"{len(labels) - _UNCALLED} more"
    number_below = len(uncalled) - len(top)
    below = ""
    if number_below:
        their = "its" if len(top) == 1 else "their"
        below = f"{number_below} of {their} submodules"
    return plain(joined(", ".join(labels[:_UNCALLED]), more, below, separator=" and "))


def speed_lines(facts: Sequence[Fact]) -> Iterator[tuple[str, str]]:
    """Yield the label and text of each fact about the time of the step.

    If a fact is a part of another fact, its label is indented. All numbers are aligned.
    """
    if not facts:
        return
    whole = facts[0].label
    width = max(len(fact.text) for fact in facts)
    depths: dict[str, int] = {}
    for fact in facts:
        depth = depths.get(fact.of, -1) + 1
        depths[fact.name] = depth
        share = ""
        if fact.share is not None:
            share = f"{units.percent(fact.share):>7} of the {whole}"
        rest = joined(share, fact.remark)
        yield f"{'  ' * depth}{fact.label}", f"{fact.text:>{width}}  {rest}".rstrip()
