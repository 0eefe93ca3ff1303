"""The simulated device keeps to what is planted, as a real one keeps to its physics.

Nothing of lflops runs here.
"""

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.support import simulated
from tests.support.simulated import FIRST

MACS = 128**3
"""Of a product of two matrices of 128 by 128."""


def square(device: torch.device = FIRST) -> Tensor:
    """A matrix of ones."""
    return torch.ones(128, 128, device=device)


def event() -> torch.Event:
    """One that is timed, on the current stream, now."""
    made = torch.Event(FIRST, enable_timing=True)
    made.record()
    return made


def ran(name: str) -> list[simulated.Kernel]:
    """The kernels of a name."""
    return [kernel for kernel in simulated.kernels() if kernel.name == name]


def test_a_product_takes_what_is_planted() -> None:
    """2,097,152 MACs at 2^31 a second: 0.9765625 ms. The result is that of the CPU."""
    simulated.plan(macs_per_second=2**31)
    x = square()
    simulated.forget_kernels()
    y = x @ x
    (kernel,) = ran("mm")
    assert kernel.end - kernel.start == pytest.approx(MACS / 2**31, abs=2e-9)
    assert torch.equal(y.cpu(), torch.full((128, 128), 128.0))


def test_the_host_runs_ahead_until_it_waits() -> None:
    """Ten kernels of a millisecond are launched in 50 µs, and nobody has waited.

    Then somebody does: 10 ms since the first.
    """
    simulated.plan_kernel("mm", 1e-3)
    x = square()
    torch.accelerator.synchronize()
    before, start, begin = simulated.synchronisations(), simulated.now(), event()
    for _ in range(10):
        x @ x
    end = event()
    assert simulated.now() - start == pytest.approx(10 * simulated.LAUNCH + 2 * simulated.EVENT)
    assert not end.query()
    assert before == simulated.synchronisations()
    end.synchronize()
    assert before + 1 == simulated.synchronisations()
    first = simulated.EVENT + simulated.LAUNCH  # until the first kernel is launched
    assert simulated.now() - start == pytest.approx(10e-3 + first)
    assert begin.elapsed_time(end) == pytest.approx(10.0 + simulated.LAUNCH * 1e3, rel=1e-6)


def test_a_device_waits_for_a_host_that_is_behind() -> None:
    """Kernels of 1 µs, launched every 5 µs: each begins 5 µs after the one before."""
    simulated.plan_kernel("mm", 1e-6)
    x = square()
    simulated.forget_kernels()
    for _ in range(3):
        x @ x
    starts = [kernel.start for kernel in ran("mm")]
    assert [5e-6, 5e-6] == [pytest.approx(after - before) for before, after in pairwise(starts)]


def test_two_streams_run_at_once_and_one_waits_for_an_event() -> None:
    """On a second stream a kernel begins as it is launched.

    Where it waits for the first stream, after it.
    """
    simulated.plan_kernel("mm", 1e-3)
    x = square()
    torch.accelerator.synchronize()
    simulated.forget_kernels()
    other = torch.Stream(FIRST)
    x @ x
    with other:
        x @ x
    first, second = ran("mm")
    assert second.start - first.start == pytest.approx(simulated.LAUNCH)
    done = torch.accelerator.current_stream(FIRST).record_event()
    other.wait_event(done)
    with other:
        x @ x
    assert ran("mm")[-1].start == pytest.approx(max(first.end, second.end))
    torch.accelerator.synchronize()


def test_backward_runs_on_the_device_s_thread() -> None:
    """One for each device, and neither is the thread that called it."""
    threads = []
    for device in simulated.DEVICES:
        model = nn.Linear(8, 8).to(device)
        loss = model(torch.ones(4, 8, device=device)).sum()
        simulated.forget_kernels()
        loss.backward()
        threads.append({kernel.host_thread for kernel in ran("mm")})
    assert 2 == len(set.union(*threads))
    assert threading.get_native_id() not in set.union(*threads)


def test_a_training_ends_as_on_the_cpu_and_waits_for_nothing() -> None:
    """Five steps of AdamW, within a rounding of the CPU's."""
    torch.manual_seed(0)
    made = [
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    made[1].to(FIRST)
    batch = torch.randn(8, 16)
    waited = []
    for model, device in zip(made, (torch.device("cpu"), FIRST), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = simulated.synchronisations()
        for _ in range(5):
            model(batch.to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        waited.append(simulated.synchronisations() - before)
    assert [0, 0] == waited
    for ours, theirs in zip(made[1].parameters(), made[0].parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_to_read_a_value_waits_for_the_device() -> None:
    """`item` and a blocking copy: once each."""
    x = square()
    before = simulated.synchronisations()
    assert 1.0 == x[0, 0].item()
    x.cpu()
    assert before + 2 == simulated.synchronisations()


def test_memory_is_kept_for_the_next_tensor_until_the_limit() -> None:
    """64 KiB are allocated, freed, and used again.

    Beyond the limit the allocator gives back what it keeps, and then gives up.
    """
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    before, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    x = square()
    assert 128 * 128 * 4 == torch.accelerator.memory_allocated() - before
    del x
    assert 0 == torch.accelerator.memory_allocated() - before
    assert 128 * 128 * 4 == torch.accelerator.memory_reserved() - reserved
    y = square()
    assert 128 * 128 * 4 == y.nbytes == torch.accelerator.memory_reserved() - reserved
    assert 128 * 128 * 4 == torch.accelerator.max_memory_allocated() - before
    simulated.plan_device(0, limit=reserved + 100_000)
    with pytest.raises(
        torch.OutOfMemoryError, match="simulated:0 is out of memory: tried to allocate 65536 bytes"
    ):
        square()
    assert 1 == torch.accelerator.memory_stats()["num_ooms"]


def test_random_numbers_are_those_of_the_seed() -> None:
    """Of both devices, by `torch.manual_seed` and by a generator."""
    torch.manual_seed(3)
    first = [torch.randn(4, device=device).cpu() for device in simulated.DEVICES]
    torch.manual_seed(3)
    assert torch.equal(first[0], torch.randn(4, device=FIRST).cpu())
    assert torch.equal(first[0], first[1])
    generator = torch.Generator(FIRST).manual_seed(3)
    assert torch.equal(first[0], torch.randn(4, device=FIRST, generator=generator).cpu())


def test_a_slower_device_is_slower() -> None:
    """The planted culprit of a slow rank: one and a half times as long."""
    simulated.plan_kernel("mm", 1e-3)
    simulated.plan_device(1, slower=1.5)
    both = [square(device) for device in simulated.DEVICES]
    simulated.forget_kernels()
    for x in both:
        x @ x
    assert [1e-3, 1.5e-3] == [pytest.approx(kernel.end - kernel.start) for kernel in ran("mm")]
