"""Test the timeline of a traced step, with events written by hand. Times are in nanoseconds."""

from lflops.profile.records import Call, Phase
from lflops.trace.record.events import recorded
from lflops.trace.record.step_timeline import timelines_of
from lflops.trace.recorded import NODE
from tests.support.kineto_events import Event

BEGIN = 1_000


def step(number: int, start: int, end: int) -> Event:
    """Return a step of the profiler."""
    return Event(f"ProfilerStep#{number}", BEGIN + start, BEGIN + end, is_named=True)


def call(row: str, phase: Phase, start: int, end: int, thread: int = 0) -> Call:
    """Return a call of a module."""
    return Call(row, phase, BEGIN + start, BEGIN + end, 0, innermost=True, thread=thread)


def test_the_step_of_median_length_is_shown() -> None:
    """The step of median length is shown first.

    The steps take 100, 500 and 200 ns. The last one begins at 700 ns and has two batches: a batch
    that ends no step is part of the next step.
    """
    steps = [step(0, 0, 100), step(1, 150, 650), step(2, 700, 800), step(3, 800, 900)]
    calls = [call("early", "forward", 10, 90), call("late", "forward", 710, 750)]
    found, *_ = timelines_of(recorded(steps), calls, [True, True, False, True])
    assert found is not None
    assert 200 == found.length
    assert [("", 10), ("late", 10)] == [(each.fqn, each.start) for each in found.slices]
    assert [] == list(timelines_of(recorded(steps), calls, [False] * 4))


def test_phases_and_calls_are_slices() -> None:
    """Phases and calls of modules are slices.

    Forward lasts from 10 to 60 and contains modules. Backward runs on another thread. Both are in
    one lane, because the first thread waits for the second.
    """
    marks = [
        (BEGIN + 0, "data"),
        (BEGIN + 10, "forward"),
        (BEGIN + 60, "other"),
        (BEGIN + 65, "backward"),
        (BEGIN + 95, "other"),
    ]
    calls = [
        call("a", "forward", 20, 50),
        call("a.x", "forward", 30, 40),
        call("a", "backward", 70, 90, thread=1),
    ]
    found, *_ = timelines_of(recorded([step(0, 0, 100)]), calls, [True], marks)
    assert found is not None
    assert [
        ("", "data", 0, 10, 0),
        ("", "forward", 10, 50, 0),
        ("a", "forward", 20, 30, 1),
        ("a.x", "forward", 30, 10, 2),
        ("", "backward", 65, 30, 0),
        ("a", "backward", 70, 20, 1),
    ] == [(each.fqn, each.phase, each.start, each.length, each.depth) for each in found.slices]
    assert {0} == {each.lane for each in found.slices}


def test_threads_that_run_at_once_have_lanes() -> None:
    """Two threads that run modules at the same time have separate lanes."""
    calls = [call("a", "forward", 0, 50), call("b", "forward", 10, 60, thread=1)]
    found, *_ = timelines_of(recorded([step(0, 0, 100)]), calls, [True])
    assert found is not None
    assert {("a", 0), ("b", 1)} == {(each.fqn, each.lane) for each in found.slices if each.fqn}


def test_operators_are_the_outermost_and_kernels_those_of_the_device() -> None:
    """A timeline has the outermost operators, and the kernels of the device.

    Autograd nodes, and operators that other operators call, are left out. Each stream has a lane.
    """
    events = [
        step(0, 0, 100),
        Event("aten::linear", BEGIN + 5, BEGIN + 20),
        Event("aten::addmm", BEGIN + 6, BEGIN + 19),
        Event(f"{NODE}MulBackward0", BEGIN + 30, BEGIN + 50),
        Event("MulBackward0", BEGIN + 31, BEGIN + 49),
        Event("aten::mul", BEGIN + 32, BEGIN + 48, thread=2),
        Event("gemm", BEGIN + 12, BEGIN + 42, thread=7, is_on_device=True),
        Event("copy", BEGIN + 43, BEGIN + 44, thread=20, is_on_device=True),
        Event("aten::late", BEGIN + 100, BEGIN + 110),
    ]
    found, *_ = timelines_of(recorded(events), [], [True])
    assert found is not None
    assert [("aten::linear", 5, 15, 0), ("aten::mul", 32, 16, 1)] == [
        (each.name, each.start, each.length, each.lane) for each in found.operators
    ]
    assert [("gemm", 12, 30, 0), ("copy", 43, 1, 1)] == [
        (each.name, each.start, each.length, each.lane) for each in found.kernels
    ]
