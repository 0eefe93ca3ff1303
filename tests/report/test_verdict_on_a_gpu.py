"""What is said of trainings on an H100, each with one fault or with none: profiles of `benchmarks/gpu_faults.py`, by torch 2.11.

Some rules were made by them, so they prove none. Memory and timelines were taken out, and nothing else.
"""

import gzip
import json
from pathlib import Path

import pytest

import lflops
from lflops.analyze.analysis import analyze
from lflops.report.explanation import explain

TRAININGS = json.loads(gzip.decompress(Path(__file__).with_name("h100_trainings.json.gz").read_bytes()))

FIRST = {
    "nothing": "",
    "loader_sleeps": "data",
    "reads_scalars": "idle",  # `.item()` in forward
    "tiny_operators": "calls",
    "one_layer_in_fp64": "dtype",
    "checkpoints_all": "idle",  # the host is too slow for this device; then `recomputed`
    "optimizer_by_tensor": "optimizer",
    "clips_by_tensor": "clip",
    "copies_pageable_memory": "copy",
    "empties_the_cache": "idle",
    "batch_of_one": "idle",
}


def profile(name: str, folder: Path) -> lflops.Profile:
    """One of them."""
    path = folder / "train.profile.json"
    path.write_text(json.dumps(TRAININGS[name]))
    return lflops.load(path)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_fault_is_the_planted_one(name: str, tmp_path: Path) -> None:
    """Or none."""
    given = profile(name, tmp_path)
    faults = [each for each in explain(given).findings if each.is_fault]
    assert FIRST[name] == (faults[0].cause if faults else "")
    assert all(each.right is None for each in faults)  # nobody has counted that on a GPU
    parts = analyze(given).budget
    assert parts is not None
    assert pytest.approx(1.0) == sum(parts.parts.values())


def test_recomputing_is_told_next_to_an_idle_device(tmp_path: Path) -> None:
    """A second forward of 4.75 ms."""
    found = [each for each in explain(profile("checkpoints_all", tmp_path)).findings if each.is_fault]
    assert ["idle", "recomputed"] == [each.cause for each in found]
    assert found[1].seconds == pytest.approx(4.75e-3, rel=0.01)


def test_a_large_copy_makes_no_layer_faster_than_the_peak(tmp_path: Path) -> None:
    """The products are those of the other trainings."""
    given = profile("copies_pageable_memory", tmp_path)
    assert not lflops.utilization(given).is_peak_too_low
