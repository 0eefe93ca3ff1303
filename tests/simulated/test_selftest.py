"""`lflops selftest` on a simulated device, and with a planted culprit for each thing that it can find."""

from pathlib import Path

import pytest

from lflops.attribution import module_tracker
from lflops.cli.main import main
from lflops.selftest import SelfTest, self_test
from lflops.timing.clock import HostClock, StreamClock
from tests.support import simulated


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock is the simulated one."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))


def outcomes(result: SelfTest) -> dict[str, bool | None]:
    """Each check, and whether it passed."""
    return {check.name: check.passed for check in result.checks}


@pytest.mark.parametrize("device", [None, "simulated:1"])
def test_all_is_right(device: str | None) -> None:
    """On the accelerator without being named, and on the second one."""
    result = self_test(device)
    assert {True} == set(outcomes(result).values())
    assert (device or "simulated:0", "Simulated Accelerator") == (result.device, result.device_name)


def test_events_without_times_are_not_offered() -> None:
    """That is no mistake: the host's clock is used."""
    simulated.plan_events(timed=False)
    result = self_test("simulated")
    assert {"clock": None} == {
        name: passed for name, passed in outcomes(result).items() if not passed
    }
    assert result.passed


def test_a_clock_that_goes_twice_as_fast_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A planted culprit. The exit status says so."""
    right = StreamClock.seconds
    monkeypatch.setattr(StreamClock, "seconds", lambda *given: 2 * right(*given))
    assert {"forward"} == {
        name for name, passed in outcomes(self_test("simulated")).items() if passed is False
    }
    assert 1 == main(["selftest", "-o", str(tmp_path / "sent.json")])


def test_work_of_the_wrong_module_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one: on a device's thread it is forgotten that a pass is within one that recomputes."""
    monkeypatch.setattr(module_tracker, "in_inner_backward", lambda: False)
    assert {"work by module"} == {
        name for name, passed in outcomes(self_test("simulated")).items() if passed is False
    }
