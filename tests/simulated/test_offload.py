"""FSDP2 with its shards on the host.

What a simulated device really holds, and what an estimate says of it.
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
BLOCK = (
    2 * 4 * WIDTH * WIDTH * 4
)  # bytes of two products from `WIDTH` to four times as many and back, in float32
ROUNDED = 512  # the device's allocator hands out multiples of so many bytes

POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Wide(nn.Module):
    """Two products, with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The second product's result."""
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


class Stack(nn.Module):
    """Equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The head's result."""
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Gathers:
    """A collective of FSDP2's that carries nothing, and notes what is allocated when its buffer is there."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._seen.append(torch.accelerator.memory_allocated(FIRST))
        return buffer

    def __call__(self, **_: Any) -> None:
        """Nothing comes from ranks that do not exist."""


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A group of ranks of which there is one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def really_held(ranks: int, policy: MixedPrecisionPolicy) -> tuple[int, list[int]]:
    """Of the third step of torch's own FSDP2.

    The peak that the device counts, and what is allocated at each gathering of parameters.
    """
    gathered: list[int] = []
    with fake_ranks(ranks):
        mesh, model = init_device_mesh(FIRST.type, (ranks,)), Stack().to(FIRST)
        for part in (*model.blocks, model):
            shards: Any = fully_shard(
                part, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)
            )
            shards.set_custom_all_gather(Gathers(gathered))
            shards.set_custom_reduce_scatter(Gathers([]))
        optimizer = torch.optim.AdamW(model.parameters())
        # what other tests have left is no part of the difference
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
    """The same step, on tensors without memory."""
    how: dict[str, Any] = {
        "backward": True,
        "optimizer": "adamw",
        "mesh": {"data": ranks},
        "mixed": policy,
        "round_to": ROUNDED,
    }
    subject = lambda: Subject(Stack(), (torch.zeros(ROWS, WIDTH),), {}, Tensor.sum)  # noqa: E731
    memory = Estimator(caller="estimate", offload=offload, **how).run(subject).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_holds_what_was_estimated(ranks: int, policy: str) -> None:
    """To the byte, at the peak and at each gathering.

    With the rank's shard, which is copied to the device for it.

    The loop keeps the loss while it goes backward, a number, and the estimate lets it go.
    """
    peak, gathered = really_held(ranks, POLICIES[policy])
    memory = estimated(ranks, POLICIES[policy], offload=True)
    assert peak - ROUNDED == memory.peak_bytes
    in_forward = BLOCKS + 1
    assert [*gathered[:in_forward], *(each - ROUNDED for each in gathered[in_forward:])] == [
        each.live_bytes for each in memory.timeline if each.operator == "fsdp::all_gather_copy_in"
    ]
    assert (0, 0) == (
        memory.most_by_category["optimizer_state"],
        memory.most_by_category["gradients"],
    )


def test_without_it_the_device_holds_the_shards_as_well() -> None:
    """Weights, moments and, at the peak, at least the gradient of one block.

    The half of each on one of two ranks.
    """
    offloaded, held = (
        estimated(2, POLICIES["float32"], offload=offload).peak_bytes for offload in (True, False)
    )
    assert held - offloaded > 3 * BLOCKS * BLOCK // 2
