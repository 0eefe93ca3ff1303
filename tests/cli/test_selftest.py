"""Test `lflops selftest` on a CPU: checks that need a device are left out.

The file and the terminal have the same results.
"""

from pathlib import Path

import msgspec
import pytest

from lflops.cli.main import main
from lflops.selftest import SelfTest


def test_on_a_cpu_the_work_is_right_and_no_device_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock of the host and the work by module pass. All other checks need a device."""
    path = tmp_path / "sent.json"
    assert 0 == main(["selftest", "--device", "cpu", "-o", str(path)])
    result = msgspec.json.decode(path.read_bytes(), type=SelfTest)
    expected = {
        "clock": True,
        "allocator": None,
        "memory": None,
        "traces": None,
        "work by module": True,
        "peak of a step": None,
    }
    assert (True, "cpu", expected) == (
        result.passed,
        result.device,
        {check.name: check.passed for check in result.checks},
    )
    lines = capsys.readouterr().out.splitlines()
    assert f"results written to {path}" == lines[-1]
    assert ["right", *["unavailable"] * 3, "right", "unavailable"] == [
        line[18:].split()[0] for line in lines[1:-1]
    ]


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the device that torch does not have."""
    assert 2 == main(["selftest", "--device", "abacus"])
    assert (
        "device='abacus': torch cannot use this device on this machine" in capsys.readouterr().err
    )
