"""Test the times of modules in many structures of models and training loops.

Each structure is a case in another file of this folder, with the expected seconds next to it.
"""

import pytest

from tests.support.fake_clock import StillClock, use_clock
from tests.timing.structures import (
    checkpoints,
    conventions,
    derivatives,
    graphs,
    loops,
    losses,
    outputs,
    views,
)
from tests.timing.structures.harness import (
    Case,
    LoopCase,
    ModelCase,
    cases_of,
    durations,
    measured,
    monitored,
    seconds_of_modules,
)

FILES = [checkpoints, conventions, derivatives, graphs, loops, losses, outputs, views]
MODELS = cases_of(FILES, ModelCase)
LOOPS = cases_of(FILES, LoopCase)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that `lflops.monitor` and `lflops.measure` use in this test."""
    still = StillClock()
    use_clock(monkeypatch, still)
    monkeypatch.setattr("lflops.timing.measure.clock_of", lambda _device: still)
    return still


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_measure_gives_every_second_to_the_module_that_took_it(
    case: Case, clock: StillClock
) -> None:
    """`lflops.measure` reports the planted seconds of each module, and no other seconds."""
    profile = measured(case.build(clock))
    assert case.seconds == seconds_of_modules(profile)
    assert {case.seconds_of_step} == durations(profile)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_monitor_gives_every_second_to_the_module_that_took_it(
    case: Case, clock: StillClock
) -> None:
    """`lflops.monitor` reports the same seconds when the model is trained in a loop."""
    profile = monitored(case.build(clock).loop())
    assert case.seconds == seconds_of_modules(profile)
    assert {case.seconds_of_step} == durations(profile)


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.name)
def test_monitor_gives_every_second_of_a_loop_to_the_module_that_took_it(
    case: Case, clock: StillClock
) -> None:
    """`lflops.monitor` reports the planted seconds of each module in unusual training loops."""
    profile = monitored(case.build(clock))
    assert case.seconds == seconds_of_modules(profile)
    assert {case.seconds_of_step} == durations(profile)


def test_the_times_of_modules_on_other_threads_are_unknown(clock: StillClock) -> None:
    """A module that runs in a thread pool has no self seconds, rather than zero."""
    training = conventions.modules_in_a_thread_pool.build(clock)
    modules = measured(training).modules
    for name in ("left", "right"):
        assert modules[name].forward.self_seconds is None
        assert modules[name].backward.self_seconds is None
