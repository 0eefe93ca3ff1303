"""Clocks of a device: its events where they have times, else the host's clock, which waits.

And which marks may wait.
"""

import pytest
import torch

from lflops.errors import CountError
from lflops.timing.clock import HostClock, StreamClock, WaitingClock, clock_of, seconds_of
from lflops.timing.module_hooks import hook_overhead
from lflops.timing.step_phases import LoggedPhases
from tests.support import simulated
from tests.support.phase_events import Events
from tests.support.simulated import FIRST, SECOND


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock is the simulated one."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))


def test_a_device_has_its_events_and_nobody_waits_for_a_mark() -> None:
    """A kernel of 3 ms, 5 µs after the mark before it, while the host goes on."""
    clock, x = clock_of(FIRST), torch.ones(8, 8, device=FIRST)
    assert isinstance(clock, StreamClock)
    torch.accelerator.synchronize(FIRST)
    before = simulated.synchronisations()
    simulated.plan_kernel("mm", 3e-3)
    start = clock.mark()
    x @ x
    end = clock.mark()
    assert (before, False) == (simulated.synchronisations(), end.query())
    clock.settle()
    assert clock.seconds(start, end) == pytest.approx(3e-3 + simulated.LAUNCH)


@pytest.mark.parametrize(
    "device", [SECOND, torch.device("privateuseone")], ids=["by number", "the current one"]
)
def test_marks_are_of_the_clock_s_device(device: torch.device) -> None:
    """Between them the user makes the other device the current one.

    It is 3 ms all the same, and the other device is not waited for.
    """
    simulated.plan_kernel("mm", 3e-3)
    on_first, on_second = (torch.ones(8, 8, device=each) for each in (FIRST, SECOND))
    with torch.accelerator.device_index(SECOND.index):
        clock = clock_of(device)
    for each in (FIRST, SECOND):
        torch.accelerator.synchronize(each)
    start = clock.mark()
    on_second @ on_second
    for _ in range(5):
        on_first @ on_first
    end = clock.mark()
    clock.settle()
    assert clock.seconds(start, end) == pytest.approx(3e-3 + simulated.LAUNCH)
    assert not torch.accelerator.current_stream(FIRST).query()


def test_marks_of_the_current_device_would_be_of_two() -> None:
    """The planted culprit: events on two devices, whose times cannot be compared."""
    first, second = StreamClock(FIRST), StreamClock(SECOND)
    start, end = first.mark(), second.mark()
    first.settle()
    second.settle()
    with pytest.raises(RuntimeError, match="events of two devices"):
        first.seconds(start, end)


def test_where_events_have_no_times_a_mark_waits() -> None:
    """The time of the host from one wait to the next: 3 ms for a kernel, and what its launch takes."""
    simulated.plan_events(timed=False)
    simulated.plan_kernel("mm", 3e-3)
    clock, x = clock_of(FIRST), torch.ones(8, 8, device=FIRST)
    assert isinstance(clock, WaitingClock)
    assert seconds_of(clock, lambda: x @ x) == pytest.approx(3e-3 + simulated.LAUNCH)


def test_where_a_mark_waits_the_phases_of_a_step_are_the_host_s() -> None:
    """Two phases whose kernels take 3 ms each.

    The host has launched them after 5 µs each, and waits once, at the step's end.
    """
    simulated.plan_events(timed=False)
    simulated.plan_kernel("mm", 3e-3)
    x, events = torch.ones(8, 8, device=FIRST), Events(HostClock.mark)
    phases = LoggedPhases(events.log, "train", clock_of(FIRST))
    phases.connect()
    phases.begin()
    before = simulated.synchronisations()
    for phase in ("forward", "backward"):
        events.enter(phase)
        x @ x
        events.leave()
    step = phases.end()
    assert before + 1 == simulated.synchronisations()
    assert phases.total(step) == pytest.approx(6e-3 + simulated.LAUNCH)
    seconds = phases.seconds(step)
    assert [5e-6, 5e-6] == [pytest.approx(seconds[phase]) for phase in ("forward", "backward")]
    assert sum(seconds.values()) == pytest.approx(phases.total(step))


def test_the_overhead_of_hooks_is_what_their_marks_leave_out() -> None:
    """A hook marks a moment of 1 µs as it begins and as it ends, so the half that comes before its own mark is in no other time."""
    overhead = hook_overhead(clock_of(FIRST))
    for seconds in vars(overhead).values():
        assert 0 <= seconds <= 2 * simulated.EVENT


def test_a_device_that_torch_cannot_wait_for_has_no_clock() -> None:
    """As `meta`, whose tensors have no memory."""
    with pytest.raises(
        CountError,
        match="the tensors are on 'meta': times can be measured on 'cpu' and on devices that torch can ",
    ):
        clock_of(torch.device("meta"))
