"""Test the self times of nested phases, on a clock that the test advances."""

import itertools
from collections.abc import Callable

import pytest
import torch

from lflops.timing.clock import StreamClock
from lflops.timing.step_phases import BETWEEN, MarkedPhases
from tests.support.fake_clock import StillClock


def whole_seconds(phases: MarkedPhases, clock: StillClock, script: str) -> dict[str, float]:
    """Run the step that the characters of `script` describe, and return the seconds of its phases.

    A letter enters the phase in `names`, `)` leaves the innermost phase, and a digit advances the
    clock by that many seconds.
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
    """Return a clock at 0."""
    return StillClock()


@pytest.fixture
def phases(clock: StillClock) -> MarkedPhases:
    """Return phases at the beginning of a step."""
    phases = MarkedPhases(clock)
    phases.begin()
    return phases


def test_a_phase_has_its_time_less_that_of_the_phases_within_it(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """The time of a phase excludes the phases within it, so all phases add up to the step.

    The script is a step of Lightning: forward and backward run in the closure that is passed to the
    optimizer.
    """
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
    """The times of a phase that occurs several times are added up.

    The step has two micro-batches, and a forward within a forward.
    """
    assert {"other": 0.0, "forward": 9.0, "backward": 5.0} == whole_seconds(
        phases, clock, "f1f1)1)b2)f6)b3)"
    )


def test_a_step_that_ends_within_a_phase_leaves_the_rest_of_it_to_the_next(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """A phase that continues over the end of a step is divided between the two steps.

    Of 5 s, 2 s are in the first step and 3 s in the second.
    """
    assert {"other": 1.0, "data": 2.0} == whole_seconds(phases, clock, "1d2")
    assert {"data": 3.0, "other": 1.0} == whole_seconds(phases, clock, "3)1")


def test_the_wait_at_the_end_of_backward_is_a_part_of_it(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """The wait at the end of backward is a part of backward, and is also known separately.

    In two backward passes, 3 of 5 s are the wait. In a step without a call of `wait`, the wait is
    unknown.
    """
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
    """The time between backward and the optimizer is the phase `BETWEEN`.

    It is 3 s; a custom loop clips gradients in this time. The 4 s between backward and another
    forward, and the 5 s between backward and the phase `clip`, belong to `other`.
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
    """`begin` drops the time since the last step ended. A phase that is running continues."""
    phases.enter("data")
    clock.advance(7)
    phases.begin()
    clock.advance(1)
    assert {"data": 1.0} == phases.seconds(phases.end())


def test_a_phase_that_is_left_by_an_exception_is_not_running(
    phases: MarkedPhases, clock: StillClock
) -> None:
    """An exception ends a phase and the phases within it, without a mark.

    So the innermost phase, forward, lasts until the next mark: 1 s before the exception and 1 s
    after it.
    """
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
    """The phases add up to the step, whatever they are and in whatever order."""
    assert sum(whole_seconds(phases, clock, script).values()) == clock.now


class Late:
    """A mark that is not ready, like an event that the stream has not reached yet."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize(("mark", "expected"), [(lambda: 0.0, True), (Late, False)])
def test_a_mark_that_has_not_come_is_not_read(
    clock: StillClock, mark: Callable[[], object], expected: bool
) -> None:
    """A step with a mark that is not ready cannot be read. A mark of the host clock is ready."""
    clock.mark = mark  # type: ignore[assignment,method-assign]
    phases = MarkedPhases(clock)
    phases.begin()
    assert expected is phases.is_readable(phases.end())


@pytest.mark.gpu
def test_on_cuda_a_phase_is_the_time_of_the_stream(cuda: torch.device) -> None:
    """On CUDA, a phase has the time of the stream, not of the host.

    The host launches a matmul long before the stream has finished it. Backward has four times as
    many matmuls as forward.
    """
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
