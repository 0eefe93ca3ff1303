"""Memory of a simulated device: what its allocator counts, and the report where there is none left."""

from pathlib import Path

import pytest
import torch

from lflops.inputs.devices import allocator_stats, memory_of
from lflops.timing.clock import HostClock
from tests.simulated.trainings import HIDDEN, ROWS, WIDTH, Layers, train
from tests.support import simulated
from tests.support.simulated import FIRST, SECOND


@pytest.fixture(autouse=True)
def _emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of other tests."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    torch.accelerator.empty_cache()
    for device in (FIRST, SECOND):
        torch.accelerator.reset_peak_memory_stats(device)
        torch.accelerator.reset_accumulated_memory_stats(device)


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_the_peaks_are_those_of_the_training_s_device(device: torch.device) -> None:
    """Whichever one is current.

    At the peak there are the parameters, their gradients, and what backward needs.
    """
    held = torch.accelerator.memory_allocated(device)
    run = train(Layers(), device=device, steps=14).profile.run
    assert torch.accelerator.max_memory_allocated(device) == run.allocated_bytes
    assert torch.accelerator.max_memory_reserved(device) == run.reserved_bytes
    assert run.allocated_bytes is not None
    assert (
        2 * 4 * 2 * WIDTH * HIDDEN
        < run.allocated_bytes - held
        < 2 * 4 * 2 * WIDTH * HIDDEN + 8 * 4 * ROWS * HIDDEN
    )
    assert 0 == allocator_stats(device)["num_alloc_retries"]


def test_free_memory_is_that_of_the_device() -> None:
    """A limit of 1 MiB beyond what is reserved."""
    reserved = torch.accelerator.memory_reserved(FIRST)
    simulated.plan_device(0, limit=reserved + (1 << 20))
    assert (1 << 20, reserved + (1 << 20)) == memory_of(FIRST)


def test_a_training_that_runs_out_of_memory_is_explained(tmp_path: Path) -> None:
    """The thirteenth batch has 256 times as many rows.

    The report says where it was, and what was alive in the counted step.
    """

    def limited(step: int) -> None:
        if step == 11:
            simulated.plan_device(0, limit=torch.accelerator.memory_reserved(FIRST) + (24 << 20))

    rows = [ROWS] * 12 + [256 * ROWS] * 8
    with pytest.raises(torch.OutOfMemoryError, match="simulated:0 is out of memory"):
        train(Layers(), rows=rows.__getitem__, each_step=limited, folder=tmp_path, on_oom=True)
    text = (tmp_path / "oom-12-rank0.txt").read_text("utf-8")
    assert "simulated:0 is out of memory: tried to allocate 33554432 bytes" in text
    assert "step 12, forward, module up" in text
    assert "1.00 MiB" in next(line for line in text.splitlines() if line.endswith("gradients"))
