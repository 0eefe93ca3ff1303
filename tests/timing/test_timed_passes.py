"""In which order passes run, what is kept of them, and when their marks are read."""

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
    """Stops a test that reads a mark before the clock has settled since."""

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
    """A part, and a memory of who watched it."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock
        self.part = Part(clock, 1, 2)
        self.passes: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(
            "module_timing" if module_module._global_forward_pre_hooks else "unprofiled"
        )
        return self.part(x)


def timed(
    model: Model,
    run: Callable[[Divide], None],
    *,
    warmup: int,
    repeats: int,
    first: str = "forward",
) -> TimedPasses:
    """Passes of a model."""
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
    """What is compiled in the first pass is compiled without hooks.

    What is thrown away has none, and is no step.
    """
    model = Model(Unsettled())
    passes = timed(model, lambda _: model(torch.ones(2)), warmup=warmup, repeats=repeats)
    order = ORDERS[repeats]
    assert ["unprofiled"] * warmup + [
        each.replace("thrown away", "unprofiled") for each in order
    ] == model.passes
    kept = [each for each in order if each != "thrown away"]
    assert list(enumerate(kept)) == [(step.index, step.kind) for step in passes.steps]
    assert repeats == len(passes.hooked) == kept.count("unprofiled") == kept.count("module_timing")


def test_passes_to_warm_up_are_in_no_figure() -> None:
    """Each pass takes a second less than the one before.

    9 and 8 are thrown away, 7 is clean, 6 is hooked.
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
    """The clock settles a single time, at the end: nothing waits for a device in between."""
    clock = Unsettled()
    model = Model(clock)
    timed(model, lambda _: model(torch.ones(2)), warmup=1, repeats=3)
    assert [1 + 6 + 1] == clock.settled


def test_a_clock_that_is_read_too_early_is_seen_to_be() -> None:
    """The clock of these tests can fail."""
    clock = Unsettled()
    start = clock.mark()
    with pytest.raises(AssertionError, match="before it settled"):
        clock.seconds(start, start)
    clock.settle()
    clock.advance(1)
    with pytest.raises(AssertionError, match="before it settled"):
        clock.seconds(start, clock.mark())


def test_a_step_says_how_long_its_parts_took() -> None:
    """A second forward, two backward.

    What is run aside between them, and before each pass, is in neither and not in their sum.
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
    """Those that are not backward are all forward to who watches."""
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
    """The difference between two readings, of its own and of the system's for it.

    Samples and marks are for others to add.
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
    """The third pass is the first that is hooked."""
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
