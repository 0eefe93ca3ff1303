"""Test stragglers under DistributedDataParallel on two simulated devices, each in a process.

A slow rank must be found, and equal ranks must not be flagged.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.simulated.trainings import PRODUCT
from tests.support.ports import free_port
from tests.support.repository import ROOT

SLOWER = (1.5, 1.0)
"""For each training run, the factor by which kernels of rank 1 are slower."""


@pytest.fixture(scope="module")
def trainings() -> list[Any]:
    """Run `ddp_rank` on both ranks, and return the results that rank 0 prints."""
    port = str(free_port())
    program = [sys.executable, "-W", "ignore", "-m", "tests.simulated.ddp_rank"]
    slower = [str(each) for each in SLOWER]
    ranks = []
    for rank in ("0", "1"):
        process = subprocess.Popen(
            [*program, rank, port, *slower],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks.append(process)
    printed = [rank.communicate(timeout=600) for rank in ranks]
    assert [0, 0] == [rank.returncode for rank in ranks], [err[-3000:] for _, err in printed]
    found: list[Any] = json.loads(printed[0][0].splitlines()[-1])
    return found


def test_a_rank_with_a_slow_device_is_named(trainings: list[Any]) -> None:
    """If the kernels of rank 1 take 1.5 times as long, it is flagged without a single module.

    A step has 5 matmuls of 0.839 ms. Rank 0 waits for the additional half of them at the end of
    backward.
    """
    ((window,), _) = trainings
    assert [[1, "", "all"]] == window["rows"]
    assert window["waiting"] == pytest.approx(0.5 * 5 * PRODUCT, rel=0.05)
    assert window["seconds"] == pytest.approx(1.5 * 5 * PRODUCT, rel=0.05)
    assert window["phases"]["forward"] == pytest.approx(2 * PRODUCT, rel=0.02)


def test_equal_ranks_are_not_accused(trainings: list[Any]) -> None:
    """If both ranks are equally fast, none is flagged, and rank 0 does not wait."""
    (_, (window,)) = trainings
    assert [] == window["rows"]
    assert window["waiting"] == pytest.approx(0, abs=0.1 * PRODUCT)
