"""Test `lflops diff` with two traces."""

import json
from pathlib import Path

import pytest

from lflops.cli.main import main
from tests.support.traces_by_hand import TraceByHand


def written(path: Path, kernel: int) -> Path:
    """Write a trace of three steps, and return its path.

    Each step takes 1000 ns plus `kernel` ns, in which the kernel of a matmul runs.
    """
    trace = TraceByHand(deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    for number in range(3):
        begin = number * (1000 + kernel)
        trace.step(number, begin, begin + 1000 + kernel)
        trace.operator("aten::mm", begin, begin + 50)
        trace.kernel("gemm", begin + 100, begin + 100 + kernel, launch=(begin + 10, begin + 20))
    return trace.write(path)


def test_the_change_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines say that the matmul takes 600 ns instead of 200 ns."""
    files = [str(written(tmp_path / f"{kernel}.pt.trace.json.gz", kernel)) for kernel in (200, 600)]
    assert 0 == main(["diff", *files])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "A step takes 1.60 µs instead of 1.20 µs (+33.3 %).",
        "Changes on the device: computing +400 ns.",
        "Changes of operators: mm +400 ns.",
    ]
    assert ["gemm", "200", "ns", "600", "ns", "+400", "ns", "+200.0", "%"] in [
        line.split() for line in lines
    ]


def test_a_broken_limit_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1 if the step is too slow, and 2 if a limit cannot be checked."""
    files = [str(written(tmp_path / f"{kernel}.json.gz", kernel)) for kernel in (200, 600)]
    assert 1 == main(["diff", *files, "--max-regress", "10%"])
    assert "limit violated    max regress: 33.3 %, 10.0 % allowed" in capsys.readouterr().out
    assert 0 == main(["diff", *files, "--max-regress", "40%", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [False] == [limit["is_broken"] for limit in found["limits"]]
    assert {"name": "window", "before": 1200.0, "after": 1600.0} == found["window"]
    assert 2 == main(["diff", *files, "--max-memory", "1GiB"])
    assert "record it with profile_memory=True" in capsys.readouterr().err


def test_a_trace_and_a_profile_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace and a profile cannot be compared: the error is one line."""
    trace = written(tmp_path / "a.pt.trace.json", 100)
    profile = tmp_path / "profile.json"
    profile.write_text('{"schema_version": "2.0"}')
    assert 2 == main(["diff", str(trace), str(profile)])
    assert 1 == len(capsys.readouterr().err.splitlines())
