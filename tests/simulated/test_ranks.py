"""DistributedDataParallel over the two simulated devices, a process each.

A slow rank is named, and equal ones are not accused.
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


@pytest.fixture(scope="module")
def trainings() -> list[Any]:
    """For each training, what rank 0 has printed."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.simulated.ddp_rank",
                str(rank),
                port,
                *map(str, SLOWER),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=600) for rank in ranks]
    assert [0, 0] == [rank.returncode for rank in ranks], [err[-3000:] for _, err in printed]
    found: list[Any] = json.loads(printed[0][0].splitlines()[-1])
    return found


def test_a_rank_with_a_slow_device_is_named(trainings: list[Any]) -> None:
    """Rank 1's kernels take half as long again: five products of 0.839 ms a step.

    Rank 0 waits for that at the end of backward.
    """
    ((window,), _) = trainings
    assert [[1, "", "all"]] == window["rows"]
    assert window["waiting"] == pytest.approx(0.5 * 5 * PRODUCT, rel=0.05)
    assert window["seconds"] == pytest.approx(1.5 * 5 * PRODUCT, rel=0.05)
    assert window["phases"]["forward"] == pytest.approx(2 * PRODUCT, rel=0.02)


def test_equal_ranks_are_not_accused(trainings: list[Any]) -> None:
    """Nobody waits."""
    (_, (window,)) = trainings
    assert [] == window["rows"]
    assert window["waiting"] == pytest.approx(0, abs=0.1 * PRODUCT)
