"""Test `time_passes`: the order of the passes, their results, and when their marks are read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_module

from lflops.model.module_tree import ModuleTree
from lflops.timing.measure import ASIDE, Divide, Pass, TimedPasses, time_passes
from lflops.timing.module_hooks import ModuleTimer
from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Part


class Unsettled(StillClock):
    """A clock that fails a test which reads a mark before the clock has settled.

    Attributes:
        settled: The moments at which the clock has settled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[float] = []

    def settle(self) -> None:
        self.settled.append(self.now)

    def seconds(self, start: float, end: float) -> float:
        assert self.settled, "read before it settled"
        assert end <= self.settled[-1], "read before it settled"
        return super().seconds(start, end)


class Model(nn.Module):
    """A model with one part, which takes 1 s forward and 2 s backward.

    Attributes:
        passes: The kind of each pass so far: with hooks (`module_timing`) or without.
    """

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock
        self.part = Part(clock, 1, 2)
        self.passes: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        has_hooks = bool(module_module._global_forward_pre_hooks)
        self.passes.append("module_timing" if has_hooks else "unprofiled")
        return self.part(x)


def timed(
    model: Model,
    run: Callable[[Divide], None],
    *,
    warmup: int,
    repeats: int,
    first: str = "forward",
) -> TimedPasses:
    """Time passes of a model."""
    spans = ModuleTimer(ModuleTree({"": model}), model.clock)
    return time_passes(Pass(run, first=first), spans, model.clock, warmup=warmup, repeats=repeats)


ORDERS = {
    1: ["unprofiled", "module_timing"],
    2: ["unprofiled", "module_timing", "module_timing", "thrown away", "unprofiled"],
    3: [
        "unprofiled",
        "unprofiled",
        "module_timing",
        "module_timing",
        "module_timing",
        "thrown away",
        "unprofiled",
    ],
}


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("repeats", ORDERS)
def test_clean_passes_stand_around_the_hooked_ones_and_one_of_them_is_the_first(
    repeats: int, warmup: int
) -> None:
    """Unprofiled passes run before and after the hooked passes.

    An unprofiled pass is the first, so that code is compiled without hooks. The first pass after
    the hooked passes runs without hooks, but is thrown away.
    """
    model = Model(Unsettled())
    passes = timed(model, lambda _: model(torch.ones(2)), warmup=warmup, repeats=repeats)
    order = ORDERS[repeats]
    expected = [each.replace("thrown away", "unprofiled") for each in order]
    assert ["unprofiled"] * warmup + expected == model.passes
    kept = [each for each in order if each != "thrown away"]
    assert list(enumerate(kept)) == [(step.index, step.kind) for step in passes.steps]
    assert repeats == len(passes.hooked) == kept.count("unprofiled") == kept.count("module_timing")


def test_passes_to_warm_up_are_in_no_figure() -> None:
    """Warm-up passes are in no result.

    Each pass takes a second less than the previous pass. The passes of 9 and 8 s are the warm-up,
    the pass of 7 s is unprofiled, and the pass of 6 s is hooked.
    """
    model = Model(Unsettled())
    seconds = iter(range(9, 0, -1))

    def run(_: Divide) -> None:
        model.part.seconds = float(next(seconds)), 0.0
        model(torch.ones(2))

    passes = timed(model, run, warmup=2, repeats=1)
    assert [7, 6] == [step.seconds for step in passes.steps]
    assert [6] == [sum(lap["forward"].self_seconds.values()) for lap in passes.hooked]


def test_marks_are_read_once_all_passes_are_over() -> None:
    """The clock settles only once, at the end, so that no pass waits for the device.

    Each of these passes takes 1 s: one of warm-up, six that are kept and one that is thrown away.
    """
    clock = Unsettled()
    model = Model(clock)
    timed(model, lambda _: model(torch.ones(2)), warmup=1, repeats=3)
    assert [1 + 6 + 1] == clock.settled


def test_a_clock_that_is_read_too_early_is_seen_to_be() -> None:
    """The clock of these tests detects marks that are read too early."""
    clock = Unsettled()
    start = clock.mark()
    with pytest.raises(AssertionError, match="before it settled"):
        clock.seconds(start, start)
    clock.settle()
    clock.advance(1)
    with pytest.raises(AssertionError, match="before it settled"):
        clock.seconds(start, clock.mark())


def test_a_step_says_how_long_its_parts_took() -> None:
    """A step has the time of each part: 1 s forward and 2 s backward.

    The 16 s of the part `ASIDE` between them and the 64 s of `prepare` before each pass are not
    included. Each pass takes 64 + 1 + 16 + 2 = 83 s.
    """
    model = Model(Unsettled())
    prepared: list[float] = []

    def prepare() -> None:
        prepared.append(model.clock.now)
        model.clock.advance(64)

    def run(divide: Divide) -> None:
        out = model(torch.ones(2)).sum()
        divide(ASIDE)
        model.clock.advance(16)
        divide("backward", [out])
        out.backward()

    spans = ModuleTimer(ModuleTree({"": model}), model.clock)
    passes = time_passes(
        Pass(run, first="forward", prepare=prepare), spans, model.clock, warmup=1, repeats=1
    )
    assert [0, 83, 166] == prepared
    assert [{"forward": 1, "backward": 2}] * 2 == [step.phases for step in passes.steps]
    assert [3, 3] == [step.seconds for step in passes.steps]
    (lap,) = passes.hooked
    assert {"forward": 1, "backward": 2} == {
        part: sum(each.self_seconds.values()) for part, each in lap.items()
    }


def test_parts_are_called_what_they_are_called() -> None:
    """The parts of a step have the names that the pass gives them.

    For the times of modules, all parts except backward belong to forward.
    """
    model = Model(Unsettled())

    def run(divide: Divide) -> None:
        model(torch.ones(2))
        divide("decode")
        model(torch.ones(2))
        model(torch.ones(2))

    passes = timed(model, run, warmup=0, repeats=1, first="prefill")
    assert [{"prefill": 1, "decode": 2}] * 2 == [step.phases for step in passes.steps]
    assert [{"forward": 3}] == [
        {part: sum(each.self_seconds.values()) for part, each in lap.items()}
        for lap in passes.hooked
    ]


def test_a_step_says_what_the_process_used_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the user and system CPU time of the process: the differences of two readings.

    `time_passes` adds no samples, tokens or marks.
    """
    model = Model(Unsettled())
    readings = iter([(1.0, 10.0), (3.0, 15.0), (3.0, 15.0), (3.5, 15.0)])
    monkeypatch.setattr("lflops.timing.measure.cpu_seconds", lambda: next(readings))
    passes = timed(model, lambda _: model(torch.ones(2)), warmup=0, repeats=1)
    assert [(2, 5), (0.5, 0)] == [(step.cpu_user, step.cpu_system) for step in passes.steps]
    assert [(None, None, ())] * 2 == [
        (step.samples, step.tokens, step.marks) for step in passes.steps
    ]


def test_a_pass_that_fails_leaves_no_hook() -> None:
    """If a hooked pass fails, its hooks are removed. The third pass is the first hooked one."""
    model = Model(Unsettled())

    def run(_: Divide) -> None:
        model(torch.ones(2))
        if len(model.passes) == 3:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        timed(model, run, warmup=1, repeats=1)
    assert ["unprofiled", "unprofiled", "module_timing"] == model.passes
    model(torch.ones(2))
    assert model.passes[-1] == "unprofiled"
