"""Test the times of steps, phases and modules against the planned times of a simulated device.

The host is far ahead of the device, slower than the device, or uses two streams.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lflops import Schedule
from lflops.analysis.step_times import step_times
from lflops.profile.steps import Step
from lflops.timing.clock import HostClock, event_seconds
from tests.simulated.trainings import HIDDEN, PRODUCT, RATE, ROWS, WIDTH, Layers, Trained, train
from tests.support import simulated
from tests.support.simulated import FIRST, SECOND


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the host's clock by the simulated one, and let a matmul take 0.839 ms."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    simulated.plan(macs_per_second=RATE)


def clean(trained: Trained) -> list[Step]:
    """Return the unprofiled steps without marks."""
    return [step for step in trained.profile.steps if step.kind == "unprofiled" and not step.marks]


def seconds(trained: Trained, module: str, phase: str) -> float:
    """Return the median time of a module in a phase."""
    spread = getattr(trained.profile.modules[module], phase).seconds
    assert spread is not None
    return float(spread.median)


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_with_the_host_far_ahead_times_are_the_planted_ones(device: torch.device) -> None:
    """If the device is the bottleneck, modules, phases and steps have the planned times.

    Forward has 2 matmuls and backward 3. The host is busy for less than 5 % of the step. This holds
    for the current device and for another one.
    """
    trained = train(Layers(), device=device)
    for module, forward, backward in (("up", 1, 1), ("down", 1, 2)):
        assert seconds(trained, module, "forward") == pytest.approx(forward * PRODUCT, rel=0.02)
        assert seconds(trained, module, "backward") == pytest.approx(backward * PRODUCT, rel=0.02)
    for step in clean(trained):
        assert step.phases["forward"] == pytest.approx(2 * PRODUCT, rel=0.02)
        assert step.phases["backward"] == pytest.approx(3 * PRODUCT, rel=0.02)
        assert step.seconds == pytest.approx(sum(step.phases.values()))
        assert sum(step.host_phases.values()) < 0.05 * sum(step.phases.values())


def test_a_loop_that_calls_only_methods_of_its_model_has_a_forward() -> None:
    """If a loop calls only a method of its model, forward is detected from the second step on.

    In the first step, forward is part of "other".
    """
    trained = train(Layers(), call=Layers.forward)
    for module, forward, backward in (("up", 1, 1), ("down", 1, 2)):
        assert seconds(trained, module, "forward") == pytest.approx(forward * PRODUCT, rel=0.02)
        assert seconds(trained, module, "backward") == pytest.approx(backward * PRODUCT, rel=0.02)
    with_phases = [step for step in trained.profile.steps if step.phases]
    assert [0] == [step.index for step in with_phases if "forward" not in step.phases]
    for step in clean(trained):
        assert step.phases["forward"] == pytest.approx(2 * PRODUCT, rel=0.02)
        assert step.phases["backward"] == pytest.approx(3 * PRODUCT, rel=0.02)


def test_the_optimizer_takes_what_its_kernels_take() -> None:
    """The optimizer takes the time to move its bytes, at 10⁹ bytes per second.

    SGD adds each gradient with `add.out`, which has three arguments and a result. Each of them has
    4 bytes for each parameter.
    """
    simulated.plan(macs_per_second=RATE, bytes_per_second=1e9)
    parameters = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN
    expected = 4 * 4 * parameters / 1e9
    for step in clean(train(Layers())):
        assert step.phases["optimizer"] == pytest.approx(expected, rel=0.02)


def test_no_step_that_is_clean_waits_for_the_device() -> None:
    """Unprofiled steps never wait for the device, except for the first step.

    In the first step, lflops checks whether events have times. In step 9, the loop itself reads a
    value from the device, and this wait is counted, so the test can fail.
    """

    def read_a_value(step: int) -> None:
        if step == 9:
            torch.ones(1, device=FIRST).item()

    trained = train(Layers(), steps=11, each_step=read_a_value)
    unprofiled = [step.index for step in trained.profile.steps if step.kind == "unprofiled"]
    assert 5 <= len(unprofiled)
    assert 1 == trained.waited[9]
    assert {0} == {trained.waited[index] for index in unprofiled if index not in {0, 9}}


def test_with_the_host_behind_a_module_takes_what_its_launches_take() -> None:
    """If the host is the bottleneck, the time of a module is that of its launches.

    A launch takes 1 ms on the host, and a matmul 0.8 µs on the device. The forward of a layer is
    one launch. The times of steps and phases equal those of the host.
    """
    simulated.plan(launch=1e-3, macs_per_second=1e13)
    trained = train(Layers())
    for module in ("up", "down"):
        assert seconds(trained, module, "forward") == pytest.approx(1e-3, rel=0.02)
    for step in clean(trained):
        assert step.phases["forward"] == pytest.approx(step.host_phases["forward"], rel=0.02)
        assert step.seconds == pytest.approx(sum(step.host_phases.values()), rel=0.02)


def test_where_events_are_dear_the_phases_of_one_step_in_eight_are_marked() -> None:
    """If timing events are expensive, only every eighth unprofiled step records its phases.

    An event takes 120 µs on the host, like on an Intel XPU. A step that records phases has six
    events more than other steps, which have only the event at the end. The mean phases still add up
    to the step: forward has 2 of 5 matmuls. Module-timing steps all have phases.
    """
    event = 120e-6
    ends = [simulated.now()]
    simulated.plan(macs_per_second=RATE, event=event)
    event_seconds.cache_clear()
    trained = train(
        Layers(),
        steps=40,
        schedule=Schedule(wait=30, warmup=1, active=3, repeat=1),
        each_step=lambda _: ends.append(simulated.now()),
    )
    steps = clean(trained)
    assert {8, 16, 24} == {step.index for step in steps if step.phases}
    host_seconds = [after - before for before, after in pairwise(ends)]
    assert host_seconds[16] - host_seconds[17] == pytest.approx(6 * event, rel=0.02)
    for step in steps:
        assert step.seconds == pytest.approx(5 * PRODUCT, rel=0.02)
    timed = [step for step in trained.profile.steps if step.kind == "module_timing"]
    assert 3 == len(timed)
    for step in timed:
        assert step.phases
    times = step_times(trained.profile)
    assert times.mean is not None
    assert times.phases["forward"] == pytest.approx(2 / 5 * times.mean, rel=0.02)
    assert times.mean == pytest.approx(sum(times.phases.values()))
    for module, forward, backward in (("up", 1, 1), ("down", 1, 2)):
        assert seconds(trained, module, "forward") == pytest.approx(forward * PRODUCT, rel=0.02)
        assert seconds(trained, module, "backward") == pytest.approx(backward * PRODUCT, rel=0.02)


class Overlapping(nn.Module):
    """Two layers with the same input, the second one on a separate stream, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(WIDTH, HIDDEN)
        self.aside = nn.Linear(WIDTH, HIDDEN)
        self.last = nn.Linear(HIDDEN, WIDTH)
        self.stream = torch.Stream(FIRST)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(FIRST)
        self.stream.wait_stream(main)
        y = self.here(x)
        with self.stream:
            z = self.aside(x)
        main.wait_stream(self.stream)
        return self.last(y + z)


def test_layers_on_two_streams_share_the_time_in_which_both_run() -> None:
    """If layers run at the same time, their times are scaled so that they add up to the phase.

    In forward, two of three matmuls run at the same time, so the phase takes the time of two, and
    each layer gets 2/3 of its matmul. In backward, four matmuls take the time of three.
    """
    trained = train(Overlapping())
    for module in ("here", "aside", "last"):
        assert seconds(trained, module, "forward") == pytest.approx(2 / 3 * PRODUCT, rel=0.03)
    for module, products in (("here", 1), ("aside", 1), ("last", 2)):
        assert seconds(trained, module, "backward") == pytest.approx(
            products * 3 / 4 * PRODUCT, rel=0.03
        )


class Prefetching(Layers):
    """Copies a tensor on a separate stream while the layers run, and does not wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Stream(FIRST)
        self.next = torch.ones(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with self.stream:
            self.next.to(FIRST, non_blocking=True)
        return super().forward(x)


def test_copies_that_overlap_cost_the_step_nothing() -> None:
    """A copy that overlaps with layers makes neither the step nor a layer longer.

    Each copy takes 2 ms. The copy of the batch, which does not overlap, makes the step longer.
    """
    simulated.plan_kernel("copy to device", 2e-3)
    for model in (Layers(), Prefetching()):
        trained = train(model)
        assert clean(trained)[-1].seconds == pytest.approx(2e-3 + 5 * PRODUCT, rel=0.02)
        assert seconds(trained, "up", "forward") == pytest.approx(PRODUCT, rel=0.02)
