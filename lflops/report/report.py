"""The report of a profile.

Every fact of the first screen once, by a name, with its number, its text and what it rests on.

Terminal, log, page, DeepSpeed's text and loggers draw this value and compute nothing of it again.
So a fact reads the same wherever it is, and parts add up to their whole in every view: shares are
of the summed clean steps, seconds of the mean one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from msgspec import Struct

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.step_breakdown import IN_MODULES, StepBreakdown
from lflops.analysis.step_times import StepTimes
from lflops.analysis.utilization import MODEL_PHASES, Utilization
from lflops.findings.registry import part_rule
from lflops.profile.module_names import added_up, fold_repeats, plain
from lflops.profile.notes import are_times_far_off, notes_with, sentence
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PHASES
from lflops.profile.steps import WITHIN_FORWARD
from lflops.report.ranks import ranks
from lflops.report.text import WORDS, counted, plus_minus, shortened
from lflops.report.verdict import Verdict, verdict

Unit = Literal["s", "share", "of peak", "FLOP/s", "/s", "bytes", "count", "factor", "text"]

_TEXT: Mapping[Unit, Callable[[float | None], str]] = {
    "s": units.duration,
    "share": units.percent,
    "of peak": units.of_peak,
    "FLOP/s": lambda value: units.rate(value, "FLOP/s"),
    "/s": units.rate,
    "bytes": units.size,
    "count": units.count,
    "factor": lambda value: units.UNKNOWN if value is None else f"{value:.2f}×",
}
_KINDS = WORDS["kinds"]
_LISTED = 12
_UNCALLED = 4
_SHORT_NAME = 60
_LEADING_MODULES = 3
# timing modules makes no step faster
_FASTER = 0.9
_IN_TRUST = {
    "not_counted",
    "time_scaled",
    "few_clean_steps",
    # remarks that the line of trust makes in other words
}


class Fact(Struct, frozen=True, kw_only=True):
    """One fact."""

    # what programs ask for it by
    name: str
    # what readers see
    label: str
    # in SI units; `None` is unknown, and what is no number
    value: float | None = None
    # what the value is in
    unit: Unit = "text"
    # the value as every drawing writes it
    text: str
    # what it rests on, and its spread
    remark: str = ""
    # the name of the fact that this is a part of
    of: str = ""
    # of the summed clean steps
    share: float | None = None
    # whether it makes the figures less reliable
    is_caveat: bool = False

    @property
    def said(self) -> str:
        """Its text, and what that rests on."""
        return ", ".join(filter(None, (self.text, self.remark)))


class Part(Struct, frozen=True, kw_only=True):
    """A part of the step."""

    # of the breakdown's part
    name: str
    # what readers see
    label: str
    # of the mean clean step
    seconds: float
    # of the summed clean steps
    share: float
    # both
    text: str
    # what it is, as the rest of "20 % of the step is", and where
    what: str
    # what usually shortens it
    advice: str
    # The modules that have the most of it, repeated ones as their pattern, with their shares of the
    # step
    modules: tuple[tuple[str, float], ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """What is known of a step, in the order in which it is read."""

    # how fast, why, what next, and how far to trust it
    verdict: Verdict
    # what was profiled, on what, and its parameters
    subject: tuple[Fact, ...]
    speed: tuple[
        Fact, ...
        # the step with its phases, rates, MFU, and what the observer cost; empty where no step was
        # timed
    ]
    model: tuple[
        Fact, ...
        # memory, parameters and MACs, and of a plan its least time and whether it fits
    ]
    breakdown: tuple[
        Part, ...
        # the parts of the step, the largest first; empty where the peak is unknown
    ]
    # why it is
    why_no_breakdown: str
    remarks: tuple[
        Fact, ...
        # all that is in no figure: the allocator, ranks, unsupported operators, uncalled modules, notes
    ]

    def fact(self, name: str) -> Fact | None:
        return next(
            (fact for fact in (*self.speed, *self.model, *self.subject) if fact.name == name), None
        )

    def value(self, name: str) -> float | None:
        """The number of a fact; `None` where it is unknown."""
        fact = self.fact(name)
        return None if fact is None else fact.value


_MADE: WeakKeyDictionary[Analysis, Report] = WeakKeyDictionary()
"""Of each analysis that is still in use: all of its drawings are of one value."""


def report_of(analysis: Analysis) -> Report:
    """The report of a profile, made once."""
    made = _MADE.get(analysis)
    if made is None:
        breakdown = tuple(_breakdown(analysis))
        remarks = tuple(_remarks(analysis))
        made = _MADE[analysis] = Report(
            verdict=verdict(
                analysis,
                sum(remark.is_caveat and remark.name not in _IN_TRUST for remark in remarks),
            ),
            subject=tuple(_subject(analysis.profile)),
            speed=tuple(_speed(analysis)),
            model=tuple(_model(analysis)),
            breakdown=breakdown,
            why_no_breakdown="" if breakdown else _why_no_breakdown(analysis),
            remarks=remarks,
        )
    return made


def _fact(name: str, value: float | None, unit: Unit, remark: str = "", **more: Any) -> Fact:
    return Fact(
        **(
            {
                "name": name,
                "label": name,
                "value": value,
                "unit": unit,
                "text": _TEXT[unit](value),
                "remark": remark,
            }
            | more
        )
    )


def _text(label: str, text: str, *, caveat: bool = False) -> Fact:
    return Fact(name=label.replace(" ", "_"), label=label, text=text, is_caveat=caveat)


def _speed(analysis: Analysis) -> Iterator[Fact]:
    if all(step.seconds is None or step.kind == "counting" for step in analysis.profile.steps):
        return
    run, times = analysis.profile.run, analysis.step_times
    one, several = ("step", "steps") if run.kind == "training" else ("pass", "passes")
    if times.seconds is None:
        yield _fact(one, None, "s", f"no unprofiled {several}")
        return
    yield _fact(one, times.mean, "s", _rests_on(analysis, one, several))
    yield from _phases(times, one)
    for name, rate in (
        ("samples/s", times.samples_per_second),
        ("tokens/s", times.tokens_per_second),
    ):
        if rate is not None:
            yield _fact(name, rate, "/s")
        elif name == "samples/s":
            yield _fact(name, None, "/s", "the samples of a batch are unknown: pass units=")
    yield from _reached(analysis)
    if times.cpu_seconds is not None:
        in_kernel = (
            f", {units.duration(times.system_seconds.median)} of it in the kernel"
            if times.system_seconds
            else ""
        )
        factor = _TEXT["factor"](
            times.cpu_seconds.median / times.seconds.median if times.seconds.median else None
        )
        yield _fact(
            "CPU time",
            times.cpu_seconds.median,
            "s",
            f"{factor} the time of the median {one}{in_kernel}",
        )
    if run.observer_ratio is not None:
        faster = (
            "; something else slowed the unprofiled ones" if run.observer_ratio < _FASTER else ""
        )
        remark = f"{several} timed by module over unprofiled {several}{faster}"
        yield _fact("observer", run.observer_ratio, "factor", remark, label="cost of timing")


def _rests_on(analysis: Analysis, one: str, several: str) -> str:
    times, numbers = (
        analysis.step_times,
        [
            step.index
            for step in analysis.profile.steps
            if step.is_unprofiled and step.seconds is not None
        ],
    )
    if times.seconds is None or times.steps == 1:
        return f"of one unprofiled {one}"
    spread = f" ± {plus_minus(times.spread)}" if times.spread is not None else ""
    which = f"of the {several} {min(numbers):,} to {max(numbers):,}" if one == "step" else several
    return f"mean of {units.count(times.steps)} {which}; median {units.duration(times.seconds.median)}{spread}"


def _phases(times: StepTimes, one: str) -> Iterator[Fact]:
    """The parts of the mean step with their shares, which add up to it.

    Those of a forward below it.
    """
    for name, seconds in times.parts.items():
        yield _phase(times, name, seconds, of=one)
        for part in WITHIN_FORWARD if name == "forward" else ():
            if part in times.phases:
                yield _phase(times, part, times.phases[part], of=name)
        if name == "backward" and times.waiting:
            yield _fact(
                "waiting",
                times.waiting,
                "s",
                "for gradients of other ranks",
                of=name,
                share=times.share(times.waiting),
            )


def _phase(times: StepTimes, name: str, seconds: float, *, of: str) -> Fact:
    host = (
        f"{units.duration(times.host_phases[name])} on the host"
        if name in times.host_phases
        else ""
    )
    return _fact(name, seconds, "s", host, of=of, share=times.share(seconds))


def _reached(analysis: Analysis) -> Iterator[Fact]:
    reached, root = analysis.utilization, analysis.profile.modules[""]
    ran = " and ".join(phase for phase in MODEL_PHASES if root.work(phase).macs) or "forward"
    rate = reached.flops_per_second
    yield _fact(
        "achieved", rate, "FLOP/s", "nothing was counted" if rate is None else f"2 × MACs of {ran}"
    )
    yield _fact("MFU", reached.mfu, "of peak", _peak(reached, analysis.profile))
    if units.percent(reached.hfu) != units.percent(reached.mfu):
        yield _fact("HFU", reached.hfu, "of peak", "with recomputed MACs")
    if units.percent(reached.executed) != units.percent(reached.hfu):
        known = "without the MACs that masks skip, each at the peak of its dtype"
        unknown = "some MACs are in a dtype without a known peak"
        yield _fact(
            "executed", reached.executed, "of peak", unknown if reached.executed is None else known
        )


def _peak(reached: Utilization, profile: Profile) -> str:
    """The peak that the share is of, or why it is unknown."""
    run = profile.run
    if reached.hardware is None and len(chips := _chips(profile)) > 1:
        return f"the ranks have different chips, which have no common peak: {', '.join(chips)}"
    if reached.hardware is None:
        return f'the peak of {run.device_name} is not known: hardware="measure" measures it'
    if reached.peak_flops_per_second is None:
        return f"the peak of {reached.hardware} for {reached.dtype or run.dtype or 'an unknown dtype'} is not known"
    return f"of {units.rate(reached.peak_flops_per_second, 'FLOP/s')} ({reached.hardware}, {reached.dtype} dense)"


def _model(analysis: Analysis) -> Iterator[Fact]:
    profile, root = analysis.profile, analysis.profile.modules[""]
    if (bound := analysis.lower_bound) is not None and analysis.step_times.seconds is None:
        yield _fact("least time", bound.seconds, "s", f"a step can take on {bound.hardware}")
    room = analysis.room
    fits = (
        "" if room is None else f"{room.verdict}: {room.chip} has {units.size(room.usable_bytes)}"
    )
    if room is not None and profile.run.kind == "estimate":
        yield _fact("memory needed", room.needed_bytes, "bytes", fits)
        fits = ""
    yield _fact(
        "peak live memory",
        analysis.peak_bytes,
        "bytes",
        "; ".join(filter(None, (_by_category(profile), _no_memory_because(analysis), fits))),
    )
    sized = f"{units.count(root.parameters)} in {units.size(root.parameter_bytes)}"
    yield _fact("parameters", root.parameters, "count", ", ".join(_parameters(root)), text=sized)
    if profile.is_counted:
        macs = {phase: root.work(phase).macs for phase in PHASES}
        ran = ", ".join(f"{phase} {units.count(count)}" for phase, count in macs.items() if count)
        yield _fact("MACs", sum(macs.values()), "count", ran)


def _no_memory_because(analysis: Analysis) -> str:
    """Why the peak of live memory is unknown."""
    if analysis.peak_bytes is not None:
        return ""
    if not analysis.profile.is_counted:
        return "no step was counted"
    has_compiled_module = any(module.compiled for module in analysis.profile.modules.values())
    if has_compiled_module or any(notes_with("compiled_unsupported", analysis.profile.notes)):
        return "compiled code allocated memory that was not seen; run it eagerly to see it"
    return ""


def _by_category(profile: Profile) -> str:
    held = {} if profile.memory is None else profile.memory.by_category
    largest = sorted(held.items(), key=lambda item: -item[1])
    held_by = ", ".join(
        f"{category.replace('_', ' ')} {units.size(size)}" for category, size in largest if size
    )
    return f"of these {held_by}" if held_by else ""


def _parameters(root: ModuleProfile) -> Iterator[str]:
    if root.trainable_parameters != root.parameters:
        share = units.percent(root.trainable_parameters / root.parameters)
        yield f"{units.count(root.trainable_parameters)} trainable in {units.size(root.trainable_parameter_bytes)} ({share})"
    elif root.parameters:
        yield "all trainable"
    if len(root.dtypes) == 1:
        yield f"all {next(iter(root.dtypes))}"
    else:
        yield from (
            f"{units.count(share.parameters)} {dtype} in {units.size(share.bytes)}"
            for dtype, share in root.dtypes.items()
        )
    if root.local_parameters != root.parameters:
        yield f"{units.count(root.local_parameters)} in {units.size(root.local_parameter_bytes)} on this rank"


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
            what=rule.phrase_for(analysis.evidence),
            advice=rule.advise_in("", analysis.evidence),
            modules=tuple(_modules_of(analysis, breakdown, name)),
        )


def _modules_of(analysis: Analysis, breakdown: StepBreakdown, part: str) -> list[tuple[str, float]]:
    """The modules with the largest shares of the step in a part of the breakdown.

    None where their times are no measure.
    """
    modules = {} if are_times_far_off(analysis.profile.notes) else breakdown.modules
    shares = {
        module: parts[part]
        for module, parts in modules.items()
        if part in IN_MODULES and parts[part]
    }
    return sorted(added_up(shares, analysis.patterns).items(), key=lambda item: -item[1])[
        :_LEADING_MODULES
    ]


def _why_no_breakdown(analysis: Analysis) -> str:
    if not analysis.profile.is_counted:
        return "nothing was counted"
    if analysis.step_times.seconds is None:
        return "no unprofiled step was timed"
    return (
        f'what {analysis.profile.run.device_name} can do in the dtypes that were multiplied is not known; profile with hardware="measure", '
        "with a name that lflops hardware lists, or with your own lflops.Hardware"
    )


def _subject(profile: Profile) -> Iterator[Fact]:
    run = profile.run
    when = [
        f"{name} {at}"
        for name, at in (("step", run.step), ("window", run.window))
        if at is not None
    ]
    ranks = counted(run.world_size, "rank") if run.world_size > 1 else None
    # Positional inputs are named by their number, which would read as one more size.
    shapes = [
        f"{'' if name.isdecimal() else name} {'×'.join(map(str, shape)) or 'scalar'}".strip()
        for name, shape in run.shapes.items()
    ]
    yield _text(
        "profiled",
        _listed(_root(profile), _passes(profile), *when, "partial" if run.partial else None),
    )
    yield _text("device", _listed(_device(profile), run.dtype, run.precision, ranks))
    yield _text(
        "created", run.created.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")
    )
    inputs = [", ".join(shapes), _units_of_batch(profile)]
    yield _text("inputs", "; ".join(filter(None, inputs)) or units.UNKNOWN)


def _units_of_batch(profile: Profile) -> str:
    """The samples and tokens of a step with their sources, or how to pass them.

    Tokens are missing only where an embedding looks something up.
    """
    run = profile.run
    has_embedding = any("embedding" in each.operator for each in profile.op_counts)
    parts = []
    missing = []
    for unit, number, source in (
        ("sample", run.samples_per_step, run.samples_from),
        ("token", run.tokens_per_step, ", ".join(map(_input_name, run.tokens_from))),
    ):
        if number is None:
            if unit == "sample" or has_embedding:
                missing.append(f"{unit}s")
        else:
            plural = "" if number == 1 else "s"
            where = f" (from {source})" if source else ""
            parts.append(f"{number:,} {unit}{plural}{where}")
    if missing and run.kind in {"training", "measure"}:
        parts.append(f"{' and '.join(missing)} {units.UNKNOWN} (pass units=)")
    return ", ".join(parts)


def _input_name(name: str) -> str:
    """The name of an input; positional inputs are named by their number."""
    return f"input {name}" if name.isdecimal() else name


def _device(profile: Profile) -> str:
    """Name the device of the figures.

    An estimate ran on none, and its figures are those of the chip that it was asked for.
    """
    run = profile.run
    if run.kind != "estimate":
        return f"{' and '.join(_chips(profile))} on {run.host}"
    return f"{run.hardware.name if run.hardware else 'no device'}, estimated on {run.host}"


def _chips(profile: Profile) -> list[str]:
    """The chips of all ranks, each once."""
    return list(dict.fromkeys(rank.device for rank in profile.ranks if rank.device)) or [
        profile.run.device_name
    ]


def _root(profile: Profile) -> str:
    """The root's class; where the root is no module, the classes directly below it."""
    kinds = list(
        dict.fromkeys(
            module.class_name
            for name, module in profile.modules.items()
            if name and "." not in name
        )
    )
    if kind := profile.modules[""].class_name:
        return kind
    named = [
        *kinds[:_LISTED],
        *([f"{len(kinds) - _LISTED} more kinds"] if len(kinds) > _LISTED else []),
    ]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def _passes(profile: Profile) -> str:
    """How it was profiled.

    A root with another number of calls than one was counted over as many passes.
    """
    if profile.run.kind == "training" and profile.run.stage not in {None, "train"}:
        return f"training, {profile.run.stage}"
    calls = profile.modules[""].calls
    if profile.run.kind != "count" or calls == 1:
        return _KINDS[profile.run.kind]
    return f"counted, {units.count(calls)} forward passes added up" if calls else "counted"


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) or units.UNKNOWN


def _remarks(analysis: Analysis) -> Iterator[Fact]:
    profile, run = analysis.profile, analysis.profile.run
    if run.allocated_bytes is not None:
        reserved = f"reserved {units.size(run.reserved_bytes)}"
        yield _text("allocator's peak", f"{units.size(run.allocated_bytes)}, {reserved}")
    for label, value in ranks(analysis):
        yield _text(label, value)
    if profile.is_counted:
        for line, is_doubt in unsupported(analysis):
            yield _text("not counted", line, caveat=is_doubt)
    if analysis.uncalled and profile.is_counted:
        yield _text("never called", _never_called(analysis), caveat=True)
    for note in profile.notes:
        yield Fact(name=note.code, label="note", text=sentence(note), is_caveat=True)


def unsupported(analysis: Analysis, most: int = _LISTED) -> Iterable[tuple[str, bool]]:
    """A line for each operator without a formula, and whether it makes the totals less reliable.

    The first few, then the others.
    """
    rows = analysis.unsupported
    if not rows:
        yield "nothing: every operator that ran has a formula", False
    longest = max((len(row.operator) for row in rows[:most]), default=0)
    for row in rows[:most]:
        where = (
            counted(len(row.modules), "module")
            if len(row.modules) > 1
            else row.modules[0] or "the model itself"
        )
        took = "" if row.seconds is None else f", {units.duration(row.seconds)}"
        yield (
            f"{row.operator:<{longest}}  {counted(row.calls, 'call')} in {where}, {units.size(row.bytes)}{took}",
            True,
        )
    if left := rows[most:]:
        calls, moved = (
            counted(sum(row.calls for row in left), "call"),
            units.size(sum(row.bytes for row in left)),
        )
        yield f"and {counted(len(left), 'more operator')}  {calls}, {moved}", True


def _never_called(analysis: Analysis) -> str:
    """The uppermost modules, repeated ones as their pattern; those below them only as a number."""
    uncalled = set(analysis.uncalled)
    top = [
        name for name in analysis.uncalled if not name or name.rpartition(".")[0] not in uncalled
    ]
    labels: list[str] = []
    for label, names in fold_repeats(top, lambda name: (name,), analysis.patterns):
        is_spelled_out = len(names) == 1 or set(label) <= {
            "*",
            ".",
            # a pattern without a word in it would say nothing
        }
        kind = analysis.profile.modules[""].class_name
        if is_spelled_out:
            labels += [shortened(name or kind or "all of it", _SHORT_NAME) for name in names]
        else:
            labels.append(f"{shortened(label, _SHORT_NAME)} ×{len(names)}")
    below = len(uncalled) - len(top)
    ends = [
        f"{len(labels) - _UNCALLED} more" if len(labels) > _UNCALLED else "",
        f"{below} below {'it' if len(top) == 1 else 'them'}" if below else "",
    ]
    return plain(" and ".join([", ".join(labels[:_UNCALLED]), *filter(None, ends)]))


def speed_lines(facts: Sequence[Fact]) -> Iterator[tuple[str, str]]:
    """Label and text; parts are indented below their whole, and numbers stand below each other."""
    depth: dict[str, int] = {}
    width = max((len(fact.text) for fact in facts), default=0)
    one = facts[0].label if facts else ""
    for fact in facts:
        depth[fact.name] = depth.get(fact.of, -1) + 1
        share = "" if fact.share is None else f"{units.percent(fact.share):>7} of the {one}"
        rest = ", ".join(filter(None, (share, fact.remark)))
        yield f"{'  ' * depth[fact.name]}{fact.label}", f"{fact.text:>{width}}  {rest}".rstrip()
