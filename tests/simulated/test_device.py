"""Test the simulated device itself: its times, streams, threads and memory are as planned.

These tests do not use lflops.
"""

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.support import simulated
from tests.support.simulated import FIRST

MACS = 128**3
"""MACs of a matmul of two 128 × 128 matrices."""


def square(device: torch.device = FIRST) -> Tensor:
    """Return a 128 × 128 matrix of ones."""
    return torch.ones(128, 128, device=device)


def event() -> torch.Event:
    """Record a timed event on the current stream."""
    made = torch.Event(FIRST, enable_timing=True)
    made.record()
    return made


def ran(name: str) -> list[simulated.Kernel]:
    """Return the kernels with a name that ran."""
    return [kernel for kernel in simulated.kernels() if kernel.name == name]


def test_a_product_takes_what_is_planted() -> None:
    """A matmul takes the planned time, and has the same result as on the CPU.

    2,097,152 MACs at 2³¹ MACs per second take 0.9765625 ms.
    """
    simulated.plan(macs_per_second=2**31)
    x = square()
    simulated.forget_kernels()
    y = x @ x
    (kernel,) = ran("mm")
    assert kernel.end - kernel.start == pytest.approx(MACS / 2**31, abs=2e-9)
    assert torch.equal(y.cpu(), torch.full((128, 128), 128.0))


def test_the_host_runs_ahead_until_it_waits() -> None:
    """The host launches kernels without waiting, until it synchronizes with an event.

    It launches 10 kernels of 1 ms in 50 µs. When it then waits, 10 ms have passed since the first
    kernel began.
    """
    simulated.plan_kernel("mm", 1e-3)
    x = square()
    torch.accelerator.synchronize()
    before = simulated.synchronisations()
    start = simulated.now()
    begin = event()
    for _ in range(10):
        x @ x
    end = event()
    assert simulated.now() - start == pytest.approx(10 * simulated.LAUNCH + 2 * simulated.EVENT)
    assert not end.query()
    assert before == simulated.synchronisations()
    end.synchronize()
    assert before + 1 == simulated.synchronisations()
    # the time until the first kernel is launched
    first = simulated.EVENT + simulated.LAUNCH
    assert simulated.now() - start == pytest.approx(10e-3 + first)
    assert begin.elapsed_time(end) == pytest.approx(10.0 + simulated.LAUNCH * 1e3, rel=1e-6)


def test_a_device_waits_for_a_host_that_is_behind() -> None:
    """If kernels take less time than their launches, each begins when it is launched.

    Kernels of 1 µs are launched every 5 µs.
    """
    simulated.plan_kernel("mm", 1e-6)
    x = square()
    simulated.forget_kernels()
    for _ in range(3):
        x @ x
    starts = [kernel.start for kernel in ran("mm")]
    assert 3 == len(starts)
    for before, after in pairwise(starts):
        assert 5e-6 == pytest.approx(after - before)


def test_two_streams_run_at_once_and_one_waits_for_an_event() -> None:
    """A kernel on a second stream begins when it is launched, unless it waits for an event.

    After `wait_event`, it begins when the kernel on the first stream has ended.
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
    """Each device has a thread for backward, which differs from the thread that calls backward."""
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
    """Five steps of AdamW give the same weights as on the CPU, up to rounding, and never wait."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))

    torch.manual_seed(0)
    on_cpu = make()
    on_device = make()
    on_device.load_state_dict(on_cpu.state_dict())
    on_device.to(FIRST)
    batch = torch.randn(8, 16)
    waited = []
    for model, device in ((on_cpu, torch.device("cpu")), (on_device, FIRST)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = simulated.synchronisations()
        for _ in range(5):
            model(batch.to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        waited.append(simulated.synchronisations() - before)
    assert [0, 0] == waited
    for ours, theirs in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_to_read_a_value_waits_for_the_device() -> None:
    """`item` and a blocking copy each wait once for the device."""
    x = square()
    before = simulated.synchronisations()
    assert 1.0 == x[0, 0].item()
    x.cpu()
    assert before + 2 == simulated.synchronisations()


def test_memory_is_kept_for_the_next_tensor_until_the_limit() -> None:
    """Freed memory stays reserved and is used again, and an allocation beyond the limit fails.

    A matrix has 64 KiB. Before the allocator fails, it releases the memory that it has reserved.
    """
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    before = torch.accelerator.memory_allocated()
    reserved = torch.accelerator.memory_reserved()
    size = 128 * 128 * 4
    x = square()
    assert size == torch.accelerator.memory_allocated() - before
    del x
    assert 0 == torch.accelerator.memory_allocated() - before
    assert size == torch.accelerator.memory_reserved() - reserved
    y = square()
    assert size == y.nbytes
    assert size == torch.accelerator.memory_reserved() - reserved
    assert size == torch.accelerator.max_memory_allocated() - before
    simulated.plan_device(0, limit=reserved + 100_000)
    message = "simulated:0 is out of memory: tried to allocate 65536 bytes"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        square()
    assert 1 == torch.accelerator.memory_stats()["num_ooms"]


def test_random_numbers_are_those_of_the_seed() -> None:
    """Both devices draw the numbers of the seed, from `torch.manual_seed` or a generator."""
    torch.manual_seed(3)
    first = [torch.randn(4, device=device).cpu() for device in simulated.DEVICES]
    torch.manual_seed(3)
    assert torch.equal(first[0], torch.randn(4, device=FIRST).cpu())
    assert torch.equal(first[0], first[1])
    generator = torch.Generator(FIRST).manual_seed(3)
    assert torch.equal(first[0], torch.randn(4, device=FIRST, generator=generator).cpu())


def test_a_slower_device_is_slower() -> None:
    """A device that is planned to be slower by a factor of 1.5 takes 1.5 times as long."""
    simulated.plan_kernel("mm", 1e-3)
    simulated.plan_device(1, slower=1.5)
    both = [square(device) for device in simulated.DEVICES]
    simulated.forget_kernels()
    for x in both:
        x @ x
    usual, slow = ran("mm")
    assert 1e-3 == pytest.approx(usual.end - usual.start)
    assert 1.5e-3 == pytest.approx(slow.end - slow.start)
