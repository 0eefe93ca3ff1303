"""Times of steps, phases and modules against planted ones.

With the host far ahead, the host behind, and two streams.
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
    """The host's clock is the simulated one, and a product takes 0.839 ms."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    simulated.plan(macs_per_second=RATE)


def clean(trained: Trained) -> list[Step]:
    """The clean steps, without the cold ones."""
    return [step for step in trained.profile.steps if step.kind == "unprofiled" and not step.marks]


def seconds(trained: Trained, module: str, phase: str) -> float:
    """The median time of a module."""
    spread = getattr(trained.profile.modules[module], phase).seconds
    assert spread is not None
    return float(spread.median)


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_with_the_host_far_ahead_times_are_the_planted_ones(device: torch.device) -> None:
    """Of each module in forward and backward, of phases and of the step.

    On the current device, and on one that is not.
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
    """As `model.loss(x)`, which calls layers.

    The first step tells that, so only in that one forward is `other`.
    """
    trained = train(Layers(), call=Layers.forward)
    for module, forward, backward in (("up", 1, 1), ("down", 1, 2)):
        assert seconds(trained, module, "forward") == pytest.approx(forward * PRODUCT, rel=0.02)
        assert seconds(trained, module, "backward") == pytest.approx(backward * PRODUCT, rel=0.02)
    assert [0] == [
        step.index for step in trained.profile.steps if step.phases and "forward" not in step.phases
    ]
    for step in clean(trained):
        assert step.phases["forward"] == pytest.approx(2 * PRODUCT, rel=0.02)
        assert step.phases["backward"] == pytest.approx(3 * PRODUCT, rel=0.02)


def test_the_optimizer_takes_what_its_kernels_take() -> None:
    """SGD adds each gradient by `add.out`, which has three arguments and a result of 4 bytes for each parameter, at 10^9 bytes a second."""
    simulated.plan(macs_per_second=RATE, bytes_per_second=1e9)
    parameters = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN
    for step in clean(train(Layers())):
        assert step.phases["optimizer"] == pytest.approx(4 * 4 * parameters / 1e9, rel=0.02)


def test_no_step_that_is_clean_waits_for_the_device() -> None:
    """But for the first, which tries out whether events have times.

    The planted culprit reads a value in the tenth step, and is seen.
    """
    trained = train(
        Layers(), steps=11, each_step=lambda step: step == 9 and torch.ones(1, device=FIRST).item()
    )
    waited = {
        step.index: trained.waited[step.index - 1]
        for step in trained.profile.steps
        if step.kind == "unprofiled"
    }
    assert 5 <= len(waited)
    assert 1 == trained.waited[9]
    assert {0} == {number for index, number in waited.items() if index > 1}


def test_with_the_host_behind_a_module_takes_what_its_launches_take() -> None:
    """A launch takes 1 ms of the host, a product 0.8 µs.

    A layer's forward is one launch, and its backward the launches of its kernels.
    """
    simulated.plan(launch=1e-3, macs_per_second=1e13)
    trained = train(Layers())
    for module in ("up", "down"):
        assert seconds(trained, module, "forward") == pytest.approx(1e-3, rel=0.02)
    for step in clean(trained):
        assert step.phases["forward"] == pytest.approx(step.host_phases["forward"], rel=0.02)
        assert step.seconds == pytest.approx(sum(step.host_phases.values()), rel=0.02)


def test_where_events_are_dear_the_phases_of_one_step_in_eight_are_marked() -> None:
    """An event takes 120 µs of the host, as one of Intel's XPU.

    A step that is marked has six more than the one at its end.

    Forward is two products of five, and backward three, whichever steps are marked.
    """
    event, host = 120e-6, [simulated.now()]
    simulated.plan(macs_per_second=RATE, event=event)
    event_seconds.cache_clear()
    trained = train(
        Layers(),
        steps=40,
        schedule=Schedule(wait=30, warmup=1, active=3, repeat=1),
        each_step=lambda _: host.append(simulated.now()),
    )
    steps = clean(trained)
    assert {8, 16, 24} == {step.index for step in steps if step.phases}
    took = [after - before for before, after in pairwise(host)]
    assert took[16] - took[17] == pytest.approx(6 * event, rel=0.02)
    for step in steps:
        assert step.seconds == pytest.approx(5 * PRODUCT, rel=0.02)
    assert [True] * 3 == [
        bool(step.phases) for step in trained.profile.steps if step.kind == "module_timing"
    ]
    times = step_times(trained.profile)
    assert times.mean is not None
    assert times.phases["forward"] == pytest.approx(2 / 5 * times.mean, rel=0.02)
    assert times.mean == pytest.approx(sum(times.phases.values()))
    for module, forward, backward in (("up", 1, 1), ("down", 1, 2)):
        assert seconds(trained, module, "forward") == pytest.approx(forward * PRODUCT, rel=0.02)
        assert seconds(trained, module, "backward") == pytest.approx(backward * PRODUCT, rel=0.02)


class Overlapping(nn.Module):
    """Two layers of the same input, the second on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.aside = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
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
    """In forward two products run at once, then one: 2 of 3 products' time is shared by three layers.

    In backward 3 of 4.
    """
    trained = train(Overlapping())
    for module in ("here", "aside", "last"):
        assert seconds(trained, module, "forward") == pytest.approx(2 / 3 * PRODUCT, rel=0.03)
    for module, products in (("here", 1), ("aside", 1), ("last", 2)):
        assert seconds(trained, module, "backward") == pytest.approx(
            products * 3 / 4 * PRODUCT, rel=0.03
        )


class Prefetching(Layers):
    """Copies a large tensor on a stream of its own while the layers run; nobody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.next = torch.Stream(FIRST), torch.ones(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with self.stream:
            self.next.to(FIRST, non_blocking=True)
        return super().forward(x)


def test_copies_that_overlap_cost_the_step_nothing() -> None:
    """Each copy takes 2 ms.

    That of the batch makes the step longer, the other one does not, and neither makes a layer
    longer.
    """
    simulated.plan_kernel("copy to device", 2e-3)
    for model in (Layers(), Prefetching()):
        trained = train(model)
        assert clean(trained)[-1].seconds == pytest.approx(2e-3 + 5 * PRODUCT, rel=0.02)
        assert seconds(trained, "up", "forward") == pytest.approx(PRODUCT, rel=0.02)
