"""Test the memory of a simulated device: allocator statistics and the out-of-memory report."""

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
    """Replace the host's clock by the simulated one, and reset all memory statistics."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    torch.accelerator.empty_cache()
    for device in (FIRST, SECOND):
        torch.accelerator.reset_peak_memory_stats(device)
        torch.accelerator.reset_accumulated_memory_stats(device)


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_the_peaks_are_those_of_the_training_s_device(device: torch.device) -> None:
    """The peaks in the profile are those of the device that trains, also if another one is current.

    At the peak, the device holds the weights of both layers, as many gradients, and at most 8
    activations for backward.
    """
    held = torch.accelerator.memory_allocated(device)
    run = train(Layers(), device=device, steps=14).profile.run
    assert torch.accelerator.max_memory_allocated(device) == run.allocated_bytes
    assert torch.accelerator.max_memory_reserved(device) == run.reserved_bytes
    assert run.allocated_bytes is not None
    weights = 4 * 2 * WIDTH * HIDDEN
    activation = 4 * ROWS * HIDDEN
    assert 2 * weights < run.allocated_bytes - held < 2 * weights + 8 * activation
    assert 0 == allocator_stats(device)["num_alloc_retries"]


def test_free_memory_is_that_of_the_device() -> None:
    """`memory_of` returns free and total memory: here 1 MiB is free beyond the reserved memory."""
    reserved = torch.accelerator.memory_reserved(FIRST)
    simulated.plan_device(0, limit=reserved + (1 << 20))
    assert (1 << 20, reserved + (1 << 20)) == memory_of(FIRST)


def test_a_training_that_runs_out_of_memory_is_explained(tmp_path: Path) -> None:
    """The report has the step, phase and module of the error, and the memory of the counting step.

    The batch of step 12 has 256 times as many rows and does not fit. The gradients of two layers
    are 1 MiB.
    """

    def limited(step: int) -> None:
        if step == 11:
            simulated.plan_device(0, limit=torch.accelerator.memory_reserved(FIRST) + (24 << 20))

    rows = [ROWS] * 12 + [256 * ROWS] * 8
    with pytest.raises(torch.OutOfMemoryError, match="simulated:0 is out of memory"):
        train(Layers(), rows=rows.__getitem__, each_step=limited, folder=tmp_path, on_oom=True)
    text = (tmp_path / "oom-12-rank0.txt").read_text("utf-8")
    assert "simulated:0 is out of memory: tried to allocate 33554432 bytes" in text
    assert "memory ran out in step 12, in forward, in up" in text
    assert "1.00 MiB" in next(line for line in text.splitlines() if line.endswith("gradients"))
