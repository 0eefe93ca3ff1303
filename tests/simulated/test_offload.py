"""Test the memory estimate for FSDP2 with its shards on the host, against a simulated device.

`really_held` runs FSDP2 on the device, and `estimated` estimates the same step.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lflops.estimation.estimate import Estimator, Subject
from lflops.profile.profile import Memory
from tests.support.simulated import FIRST

WIDTH, ROWS, BLOCKS = 128, 16, 4
BLOCK = 2 * 4 * WIDTH * WIDTH * 4
"""Bytes of the weights of a block in float32: from `WIDTH` to four times as many, and back."""
ROUNDED = 512
"""The allocator of the device rounds sizes up to a multiple of this number of bytes."""

POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Wide(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the second layer."""
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


class Stack(nn.Module):
    """`BLOCKS` equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the head."""
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Gathers:
    """A collective for FSDP2 that does nothing.

    When its buffer is allocated, it appends the allocated bytes of the device to `seen`.
    """

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffer, and record the allocated bytes."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._seen.append(torch.accelerator.memory_allocated(FIRST))
        return buffer

    def __call__(self, **_: Any) -> None:
        """Do nothing: the other ranks do not exist."""


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Return a context with a process group of which only rank 0 exists."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def really_held(ranks: int, policy: MixedPrecisionPolicy) -> tuple[int, list[int]]:
    """Run three steps with FSDP2, and return memory figures of the third step.

    Returns:
        The peak of the device in bytes, and the bytes at each all-gather of parameters.
    """
    gathered: list[int] = []
    with fake_ranks(ranks):
        mesh = init_device_mesh(FIRST.type, (ranks,))
        model = Stack().to(FIRST)
        for part in (*model.blocks, model):
            shards: Any = fully_shard(
                part, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)
            )
            shards.set_custom_all_gather(Gathers(gathered))
            shards.set_custom_reduce_scatter(Gathers([]))
        optimizer = torch.optim.AdamW(model.parameters())
        # Memory that other tests still hold is subtracted.
        gc.collect()
        elsewhere = torch.accelerator.memory_allocated(FIRST)
        x = torch.zeros(ROWS, WIDTH).to(FIRST)
        for _ in range(3):
            gc.collect()
            gathered.clear()
            torch.accelerator.reset_peak_memory_stats(FIRST)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.accelerator.max_memory_allocated(FIRST)
        assert {"cpu"} == {each.device.type for each in model.parameters()}
    return peak - elsewhere, [each - elsewhere for each in gathered]


def estimated(ranks: int, policy: MixedPrecisionPolicy, *, offload: bool) -> Memory:
    """Estimate the memory of the same step with tensors that have no memory."""

    def subject() -> Subject:
        return Subject(Stack(), (torch.zeros(ROWS, WIDTH),), {}, Tensor.sum)

    estimator = Estimator(
        caller="estimate",
        offload=offload,
        backward=True,
        optimizer="adamw",
        mesh={"data": ranks},
        mixed=policy,
        round_to=ROUNDED,
    )
    memory = estimator.run(subject).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_holds_what_was_estimated(ranks: int, policy: str) -> None:
    """The estimate is exact to the byte, at the peak and at each all-gather of parameters.

    Each all-gather includes the rank's shard, which is copied to the device. The real loop also
    keeps the loss during backward, which is one number and takes `ROUNDED` bytes. The estimate does
    not keep it. Optimizer states and gradients are on the host.
    """
    peak, gathered = really_held(ranks, POLICIES[policy])
    memory = estimated(ranks, POLICIES[policy], offload=True)
    loss = ROUNDED
    assert peak - loss == memory.peak_bytes
    in_forward = BLOCKS + 1
    expected = gathered[:in_forward] + [each - loss for each in gathered[in_forward:]]
    gathers = [each for each in memory.timeline if each.operator == "fsdp::all_gather_copy_in"]
    assert expected == [each.live_bytes for each in gathers]
    assert 0 == memory.most_by_category["optimizer_state"]
    assert 0 == memory.most_by_category["gradients"]


def test_without_it_the_device_holds_the_shards_as_well() -> None:
    """Without offloading, the device also holds the rank's shards: weights and two moments.

    With two ranks, these are half of three times the blocks. At the peak, there is at least one
    gradient in addition, so the difference is larger.
    """
    offloaded = estimated(2, POLICIES["float32"], offload=True).peak_bytes
    held = estimated(2, POLICIES["float32"], offload=False).peak_bytes
    assert held - offloaded > 3 * BLOCKS * BLOCK // 2
