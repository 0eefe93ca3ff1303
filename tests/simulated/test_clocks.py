"""Test the clocks of a device, and which of their marks wait for the device.

If the events of a device have times, its clock uses them and never waits. Otherwise, the host's
clock is used, and each mark waits for the device.
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
    """Replace the host's clock by the simulated one."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))


def test_a_device_has_its_events_and_nobody_waits_for_a_mark() -> None:
    """A device with timed events has a `StreamClock`, whose marks do not wait for the device.

    The kernel of 3 ms begins 5 µs after the first mark, when it is launched. After the second mark,
    it is still running.
    """
    clock = clock_of(FIRST)
    x = torch.ones(8, 8, device=FIRST)
    assert isinstance(clock, StreamClock)
    torch.accelerator.synchronize(FIRST)
    before = simulated.synchronisations()
    simulated.plan_kernel("mm", 3e-3)
    start = clock.mark()
    x @ x
    end = clock.mark()
    assert before == simulated.synchronisations()
    assert not end.query()
    clock.settle()
    assert clock.seconds(start, end) == pytest.approx(3e-3 + simulated.LAUNCH)


@pytest.mark.parametrize(
    "device", [SECOND, torch.device("privateuseone")], ids=["by number", "the current one"]
)
def test_marks_are_of_the_clock_s_device(device: torch.device) -> None:
    """A clock marks events on its own device, although another device is current later.

    The time between its marks is 3 ms, and the clock does not wait for the other device.
    """
    simulated.plan_kernel("mm", 3e-3)
    on_first = torch.ones(8, 8, device=FIRST)
    on_second = torch.ones(8, 8, device=SECOND)
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
    """Marks on two devices cannot be compared, so the test above would detect a wrong device."""
    first = StreamClock(FIRST)
    second = StreamClock(SECOND)
    start = first.mark()
    end = second.mark()
    first.settle()
    second.settle()
    with pytest.raises(RuntimeError, match="events of two devices"):
        first.seconds(start, end)


def test_where_events_have_no_times_a_mark_waits() -> None:
    """If events have no times, each mark waits for the device, and times are those of the host.

    Between two marks, the host launches a kernel and waits 3 ms for it.
    """
    simulated.plan_events(timed=False)
    simulated.plan_kernel("mm", 3e-3)
    clock = clock_of(FIRST)
    x = torch.ones(8, 8, device=FIRST)
    assert isinstance(clock, WaitingClock)
    assert seconds_of(clock, lambda: x @ x) == pytest.approx(3e-3 + simulated.LAUNCH)


def test_where_a_mark_waits_the_phases_of_a_step_are_the_host_s() -> None:
    """If marks wait, a step waits only once, at its end, and its phases are those of the host.

    The host launches two kernels of 3 ms, which takes 5 µs in each phase. At the end of the step,
    it waits for both.
    """
    simulated.plan_events(timed=False)
    simulated.plan_kernel("mm", 3e-3)
    x = torch.ones(8, 8, device=FIRST)
    events = Events(HostClock.mark)
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
    assert pytest.approx(5e-6) == seconds["forward"]
    assert pytest.approx(5e-6) == seconds["backward"]
    assert sum(seconds.values()) == pytest.approx(phases.total(step))


def test_the_overhead_of_hooks_is_what_their_marks_leave_out() -> None:
    """The overhead of hooks is at most the time of their two marks, which take 1 µs each.

    A hook makes a mark when it begins and when it ends. The time before its first mark is part of
    no other measurement.
    """
    overhead = hook_overhead(clock_of(FIRST))
    for seconds in vars(overhead).values():
        assert 0 <= seconds <= 2 * simulated.EVENT


def test_a_device_that_torch_cannot_wait_for_has_no_clock() -> None:
    """For `meta`, whose tensors have no memory, an error lists the possible devices."""
    message = "the tensors are on 'meta', where lflops cannot measure times: use 'cpu' or a device"
    with pytest.raises(CountError, match=message):
        clock_of(torch.device("meta"))
