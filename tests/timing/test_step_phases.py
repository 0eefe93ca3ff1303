"""Self times of nested phases, on a clock that the test advances."""

import itertools
from collections.abc import Callable

import pytest
import torch

from lflops.timing.clock import StreamClock
from lflops.timing.step_phases import BETWEEN, MarkedPhases
from tests.support.fake_clock import StillClock


def whole_seconds(phases: MarkedPhases, clock: StillClock, script: str) -> dict[str, float]:
    """The phases of one step.

    A letter enters its phase, `)` leaves the innermost, and a digit lets that many seconds pass.
    """
    names = {"d": "data", "o": "optimizer", "f": "forward", "b": "backward", "c": "clip"}
    for sign in script:
        if sign.isdigit():
            clock.advance(int(sign))
        elif sign == ")":
            phases.leave()
        else:
            phases.enter(names[sign])
    return phases.seconds(phases.end())


@pytest.fixture
def clock() -> StillClock:
    """At 0."""
    return StillClock()


@pytest.fixture
def phases(clock: StillClock) -> MarkedPhases:
    """At the beginning of a step."""
    phases = MarkedPhases(clock)
    phases.begin()
    return phases


def test_a_phase_has_its_time_less_that_of_the_phases_within_it(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """A step of Lightning's: forward and backward run in the closure that the optimizer is given."""
    expected = {
        "other": 3.0,
        "data": 4.0,
        "optimizer": 9.0,
        "forward": 2.0,
        "backward": 6.0,
        "clip": 5.0,
    }
    seconds = whole_seconds(phases, clock, "1d4)1o1f2)b6)c5)8)1")
    assert expected == seconds
    assert sum(expected.values()) == clock.now


def test_a_phase_that_comes_twice_is_added_up(phases: MarkedPhases, clock: StillClock) -> None:
    """Two micro-batches, and a forward within a forward."""
    assert {"other": 0.0, "forward": 9.0, "backward": 5.0} == whole_seconds(
        phases, clock, "f1f1)1)b2)f6)b3)"
    )


def test_a_step_that_ends_within_a_phase_leaves_the_rest_of_it_to_the_next(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """2 s of 5 in the first step, 3 in the second."""
    assert {"other": 1.0, "data": 2.0} == whole_seconds(phases, clock, "1d2")
    assert {"data": 3.0, "other": 1.0} == whole_seconds(phases, clock, "3)1")


def test_the_wait_at_the_end_of_backward_is_a_part_of_it(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """3 s of 5, in two passes; a step in which nobody told of it does not know."""
    for work, wait in ((1, 2), (1, 1)):
        phases.enter("backward")
        clock.advance(work)
        phases.wait()
        clock.advance(wait)
        phases.leave()
    step = phases.end()
    assert ({"backward": 5.0, "other": 0.0}, 3.0) == (phases.seconds(step), phases.waiting(step))
    assert phases.waiting(phases.end()) is None


def test_what_is_between_backward_and_the_optimizer_has_a_name(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """3 s, where a loop clips.

    4 before another forward and 5 before a clip that is named are other.
    """
    found = whole_seconds(phases, clock, "f1)b2)4f1)b2)3o1)b1)5c1)o1)")
    assert {
        "other": 9.0,
        "forward": 2.0,
        "backward": 5.0,
        BETWEEN: 3.0,
        "clip": 1.0,
        "optimizer": 2.0,
    } == found
    assert ["forward", "backward", "clip", BETWEEN, "optimizer", "other"] == [*found]


def test_time_before_a_step_begins_is_in_none(phases: MarkedPhases, clock: StillClock) -> None:
    """What ran since the last one ended is forgotten, and a phase that runs still goes on."""
    phases.enter("data")
    clock.advance(7)
    phases.begin()
    clock.advance(1)
    assert {"data": 1.0} == phases.seconds(phases.end())


def test_a_phase_that_is_left_by_an_exception_is_not_running(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """Nor is what ran within it; its time goes on to the next mark, for none was made."""
    phases.enter("optimizer")
    phases.enter("forward")
    clock.advance(1)
    phases.drop()
    phases.drop()
    assert "other" == phases._running
    clock.advance(1)
    assert {"other": 3.0, "optimizer": 0.0, "forward": 2.0, "backward": 4.0} == whole_seconds(
        phases, clock, "b4)3"
    )


SCRIPTS = ["".join(script) for script in itertools.product(("1f2)", "b3c1)2)", "d1)"), repeat=3)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_phases_of_a_step_add_up_to_it(
    phases: MarkedPhases, clock: StillClock, script: str
) -> None:
    """Whatever they are, and in whatever order."""
    assert sum(whole_seconds(phases, clock, script).values()) == clock.now


class Late:
    """A mark that has not come yet, as an event that the stream has not reached."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize(("mark", "expected"), [(lambda: 0.0, True), (Late, False)])
def test_a_mark_that_has_not_come_is_not_read(
    clock: StillClock, mark: Callable[[], object], expected: bool
) -> None:
    """A moment of the host's has come at once."""
    clock.mark = mark  # type: ignore[assignment,method-assign]
    phases = MarkedPhases(clock)
    phases.begin()
    assert expected is phases.is_readable(phases.end())


@pytest.mark.gpu
def test_on_cuda_a_phase_is_the_time_of_the_stream(cuda: torch.device) -> None:
    """The host is done with a product's launch long before the stream is done with the product."""
    phases = MarkedPhases(StreamClock(cuda))
    x = torch.ones(8192, 8192, device=cuda)
    torch.mm(x, x)
    phases.begin()
    phases.enter("forward")
    torch.mm(x, x)
    phases.leave()
    phases.enter("backward")
    for _ in range(4):
        torch.mm(x, x)
    phases.leave()
    stretch = phases.end()
    torch.cuda.synchronize()
    assert phases.is_readable(stretch)
    seconds = phases.seconds(stretch)
    assert 3 < seconds["backward"] / seconds["forward"] < 5
