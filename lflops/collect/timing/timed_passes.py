"""Passes of a model, timed: clean ones for the total, hooked ones between them for its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lflops.boundary import Undo
from lflops.collect.model.call import ASIDE, Divide
from lflops.collect.timing.clock import Clock, CpuWatch, cpu_seconds
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import PassTimes, Stamp
from lflops.profile.steps import Step


@dataclass(frozen=True)
class Pass:
    """How to run one pass: `run` calls its argument where each further part begins; `first` is the name of the first part.

    `prepare` runs before each pass and is not timed.
    """

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
