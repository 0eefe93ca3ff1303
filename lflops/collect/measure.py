"""`measure`: one pass is counted, others are timed. Text generation likewise: what the prompt costs, and what each further token does."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from lflops.boundary import Undo
from lflops.collect.attribution.hooks import after_each_call
from lflops.collect.calibration.calibrate import hardware_of
from lflops.collect.count import Counting, Ignored, counted
from lflops.collect.inputs.arguments import check_whole
from lflops.collect.inputs.batch import Units, units_of
from lflops.collect.inputs.tensors import device_of
from lflops.collect.model.call import ASIDE, Divide, ModelCall
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.ranks.topology import check_logical
from lflops.collect.timing.attach_times import attach_module_times
from lflops.collect.timing.clock import Clock, CpuWatch, clock_of, cpu_seconds
from lflops.collect.timing.hook_overhead import hook_overhead
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import PassTimes, Stamp
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.steps import Step


@dataclass(frozen=True)
class Pass:
    """How to run one pass: `run` calls its argument where a further part begins, `first` names the first. `prepare` is not timed."""

    run: Callable[[Divide], None]
    first: str
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class TimedPasses:
    """A step for each pass, and for each hooked pass the times of its parts."""

    steps: tuple[Step, ...]
    hooked: tuple[Mapping[str, PassTimes], ...]


@dataclass(frozen=True)
class _Timed:
    """A pass that is over: the names of its parts, the marks between them, the CPU time that the process used, and what it lost."""

    kind: str
    parts: list[str]
    marks: list[Any]
    cpu: tuple[float, float]
    stamps: Mapping[str, list[Stamp]] = field(default_factory=dict)
    cpu_lost: float | None = None


def time_passes(one: Pass, timer: ModuleTimer, clock: Clock, *, warmup: int, repeats: int) -> TimedPasses:
    """Run `warmup` passes untimed, then `repeats` clean ones, half of them before and half after as many hooked ones.

    So a machine that slows down slows both. A clean pass comes first: what is compiled is compiled without hooks. The first pass after
    the hooked ones has their caches, so it is thrown away. The marks are read at the end: nothing waits for a device.
    """
    _thrown_away(one, warmup)
    before = [_clean(one, clock) for _ in range((repeats + 1) // 2)]
    hooked = [_hooked(one, timer, clock) for _ in range(repeats)]
    _thrown_away(one, min(repeats // 2, 1))
    after = [_clean(one, clock) for _ in range(repeats // 2)]
    clock.settle()
    steps = tuple(_step(index, each, clock) for index, each in enumerate([*before, *hooked, *after]))
    return TimedPasses(steps=steps, hooked=tuple(timer.pass_times(each.stamps) for each in hooked))


def _thrown_away(one: Pass, times: int) -> None:
    for _ in range(times):
        one.prepare()
        one.run(lambda *_: None)


def _clean(one: Pass, clock: Clock) -> _Timed:
    parts, marks = [one.first], []

    def divide(part: str, _results: Any = None, /) -> None:
        parts.append(part)
        marks.append(clock.mark())

    one.prepare()
    before = cpu_seconds()
    marks.append(clock.mark())
    one.run(divide)
    marks.append(clock.mark())
    return _Timed("clean", parts, marks, _since(before))


def _hooked(one: Pass, timer: ModuleTimer, clock: Clock) -> _Timed:
    parts, marks = [one.first], []

    def divide(part: str, results: Any = None, /) -> None:
        parts.append(part)
        marks.append(clock.mark())
        if part == ASIDE:
            timer.set_aside()
        elif part == "backward":
            timer.begin_backward(results)

    one.prepare()
    with Undo() as undo:
        timer.install(undo)
        watch, before = CpuWatch(), cpu_seconds()
        marks.append(clock.mark())
        timer.begin()
        one.run(divide)
        stamps = timer.end()
        marks.append(clock.mark())
        return _Timed("hooked", parts, marks, _since(before), stamps, watch.lost())


def _step(index: int, given: _Timed, clock: Clock) -> Step:
    ends = zip(given.marks, given.marks[1:], strict=False)
    phases = {part: clock.seconds(*each) for part, each in zip(given.parts, ends, strict=True) if part != ASIDE}
    user, system = given.cpu
    return Step(
        index=index,
        kind="clean" if given.kind == "clean" else "hooked",
        seconds=sum(phases.values()),
        phases=phases,
        cpu_user=user,
        cpu_system=system,
        cpu_lost=given.cpu_lost,
    )


def _since(before: tuple[float, float]) -> tuple[float, float]:
    user, system = cpu_seconds()
    return user - before[0], system - before[1]


def measure(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    warmup: int = 3,
    repeats: int = 10,
    ignore: Ignored = (),
    hardware: Hardware | str | None = "auto",
    units: Units | None = None,
    logical: Profile | None = None,
) -> Profile:
    """Count one pass, then time others: clean ones for the total, hooked ones to divide it over the modules.

    Afterwards the model's gradients, buffers, mode and the random numbers are what they were.

    Args:
        model: As in `count`; so are `args`, `kwargs`, `backward`, `loss` and `ignore`.
        args: Its positional arguments; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: Output to a scalar; without it, the sum of the floating outputs.
        warmup: Passes that are thrown away first.
        repeats: Clean passes, and hooked ones, that are kept.
        ignore: Names or classes of modules whose own work and time are left out of every total.
        hardware: What the device can do: `"auto"` looks its name up, `"measure"` measures it, else a chip by name or in a TOML file, your
            own figures, or `None`.
        units: Samples and tokens of the batch, as `{"samples": 8, "tokens": 1024}` or a function of the model's arguments that gives
            that; `None` finds them in the shapes.
        logical: As in `count`.

    Raises:
        CountError: An argument is wrong, or times cannot be taken where the model is.
        HardwareError: The chip is not known, or cannot be measured.
    """
    check_logical("measure: ", logical)
    call = ModelCall.of("measure", model, args, kwargs, backward=backward, loss=loss)
    check_whole("measure", "warmup", warmup, least=0)
    check_whole("measure", "repeats", repeats, least=1)
    device = device_of([*call.model.parameters(), *call.model.buffers(), *call.inputs()])
    clock, chip = clock_of(device), hardware_of(hardware, device)
    batch = units_of("measure", units, call.args, call.kwargs)
    with call.untouched():
        profile = counted(call, ignore, logical)
        profile = replace(profile, run=replace(profile.run, hardware=chip, **batch))
        run = Pass(call.run, first="forward", prepare=call.prepare)
        return _timed(profile, run, call.model, clock, warmup=warmup, repeats=repeats)


def _timed(profile: Profile, run: Pass, model: nn.Module, clock: Clock, *, warmup: int, repeats: int) -> Profile:
    """A counted profile with the time that runs of the same take."""
    timer, overhead = ModuleTimer(ModuleTree({"": model}), clock), hook_overhead(clock)
    facts = replace(profile.run, kind="measure")
    passes = time_passes(run, timer, clock, warmup=warmup, repeats=repeats)
    steps = tuple(replace(step, samples=facts.samples_per_step, tokens=facts.tokens_per_step) for step in passes.steps)
    return attach_module_times(replace(profile, run=facts, steps=steps), passes.hooked, overhead)[0]


def measure_generate(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 1,
    repeats: int = 5,
    ignore: Ignored = (),
) -> Profile:
    """What `measure` does, of `model.generate(*args, **kwargs)`.

    Prefill is all up to the end of the first call of the model itself, decode is the rest. A note has the work of both, each step has
    the time. A model that is called only once has neither.
    """
    call = ModelCall.of("measure_generate", model, args, kwargs, backward=False, loss=None)
    clock = clock_of(device_of([*model.parameters(), *model.buffers(), *call.inputs()]))
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    called = getattr(generate, "__self__", model)  # a module that torch.compile wrapped calls itself, not the wrapper

    def run(divide: Divide) -> None:
        calls = itertools.count(1)
        with after_each_call(called, lambda: divide("decode") if next(calls) == 1 else None):
            generate(*call.args, **call.kwargs)

    with call.untouched():
        counting = Counting({"": model}, phase="forward", ignore=ignore, batch=(call.args, call.kwargs), eager=True)
        work_after_calls: list[tuple[int, int]] = []
        with counting, after_each_call(called, lambda: work_after_calls.append(counting.so_far())):
            generate(*call.args, **call.kwargs)
        generated, passes = _with_generated(counting.profile, work_after_calls), Pass(run, first="prefill", prepare=call.prepare)
        profile = _timed(generated, passes, model, clock, warmup=warmup, repeats=repeats)
    # All of generating is forward; prefill and decode stay where there are both.
    phases = [{"forward": sum(step.phases.values()), **(step.phases if len(work_after_calls) > 1 else {})} for step in profile.steps]
    return replace(profile, steps=tuple(replace(step, phases=each) for step, each in zip(profile.steps, phases, strict=True)))


def _with_generated(profile: Profile, work_after_calls: list[tuple[int, int]]) -> Profile:
    """Add the work of prefill and decode, where the model was called more than once."""
    if len(work_after_calls) < 2:
        return profile
    macs, flops = work_after_calls[0]
    samples = profile.run.samples_per_step
    run = replace(profile.run, tokens_per_step=None if samples is None else samples * len(work_after_calls))  # one a call for each sample
    forward = profile.modules[""].forward
    values = {
        "prefill_macs": macs,
        "prefill_flops": flops,
        "decode_macs": forward.macs - macs,
        "decode_flops": forward.flops - flops,
        "decode_calls": len(work_after_calls) - 1,
    }
    return replace(profile, run=run, notes=(*profile.notes, Note(code="generated", subject="", values=values)))
