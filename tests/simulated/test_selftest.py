"""Test `lflops selftest` on a simulated device: it passes, and it detects planted errors."""

from pathlib import Path

import pytest

from lflops.attribution import module_tracker
from lflops.cli.main import main
from lflops.selftest import SelfTest, self_test
from lflops.timing.clock import HostClock, StreamClock
from tests.support import simulated


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the host's clock by the simulated one."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))


def outcomes(result: SelfTest) -> dict[str, bool | None]:
    """Return for each check whether it passed. `None` means that it did not apply."""
    return {check.name: check.passed for check in result.checks}


def failed(result: SelfTest) -> set[str]:
    """Return the names of the checks that failed."""
    return {name for name, passed in outcomes(result).items() if passed is False}


@pytest.mark.parametrize("device", [None, "simulated:1"])
def test_all_is_right(device: str | None) -> None:
    """All checks pass on the default device, which is the accelerator, and on the second device."""
    result = self_test(device)
    assert {True} == set(outcomes(result).values())
    assert (device or "simulated:0") == result.device
    assert "Simulated Accelerator" == result.device_name


def test_events_without_times_are_not_offered() -> None:
    """If events have no times, the check of the clock does not apply, and the self-test passes.

    lflops uses the host's clock in this case.
    """
    simulated.plan_events(timed=False)
    result = self_test("simulated")
    not_passed = {name: passed for name, passed in outcomes(result).items() if not passed}
    assert {"clock": None} == not_passed
    assert result.passed


def test_a_clock_that_goes_twice_as_fast_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If all measured times are doubled, the check "forward" fails, and the exit status is 1."""
    right = StreamClock.seconds
    monkeypatch.setattr(StreamClock, "seconds", lambda *given: 2 * right(*given))
    assert {"forward"} == failed(self_test("simulated"))
    assert 1 == main(["selftest", "-o", str(tmp_path / "sent.json")])


def test_work_of_the_wrong_module_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nested backward passes are not recognized, the check "work by module" fails.

    Reentrant checkpoints run a backward inside another one, on the thread of the device.
    """
    monkeypatch.setattr(module_tracker, "in_inner_backward", lambda: False)
    assert {"work by module"} == failed(self_test("simulated"))
