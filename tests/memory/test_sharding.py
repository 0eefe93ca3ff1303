"""What each rank needs under ZeRO.

A model of two blocks and a head by hand, and a real one under `fully_shard`, as stage 3 is.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import lflops
from lflops.hardware.chips import Hardware
from lflops.memory.peak import Sharded, sharded
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import ByCategory
from tests.support.profile_builders import module_profile, profile, small_memory, weights

RANKS = 4
ROWS: dict[
    str, dict[str, Any]
] = {  # parameters in float32: 1000 in all, of which 200 are the head's
    "": weights(0, 1000),
    "layers": weights(0, 800),
    "layers.0": weights(300),
    "layers.1": weights(500),
    "head": weights(200),
}
SIZES = ("parameter_bytes", "trainable_parameter_bytes", "local_parameter_bytes")

ALL, STATE, BLOCK, HEAD = 4000, 8000, 2000, 800
"""Bytes: parameters, AdamW's state of two floats each, the larger block, the head."""

TIMELINE = (  # parameters, gradients, state, activations, temporary, other; and the most until the next
    Moment(
        "mm",
        "layers.1",
        "forward",
        ALL + STATE + 700 + 10,
        0,
        ByCategory(ALL, 0, STATE, 700, 0, 10),
        ALL + STATE + 900 + 10,
    ),
    Moment(
        "mm",
        "head",
        "backward",
        ALL + STATE + 920 + 10,
        1,
        ByCategory(ALL, 0, STATE, 900, 20, 10),
        ALL + STATE + HEAD + 930 + 10,
    ),
    Moment(
        "mm",
        "layers.0",
        "backward",
        ALL + STATE + 3630,
        2,
        ByCategory(ALL, 3520, STATE, 100, 0, 10),
        ALL + STATE + 3630,
    ),
    Moment(
        "_foreach_div",
        "",
        "optimizer",
        4010 + 4 * ALL,
        3,
        ByCategory(ALL, ALL, STATE, 0, 4000, 10),
        4010 + 4 * ALL,
    ),
)


def trained() -> Profile:
    """A step of that model."""
    rows = {
        name: {**row, **dict.fromkeys(SIZES, 4 * row["parameters"])} for name, row in ROWS.items()
    }
    return profile(rows, (), memory=replace(small_memory(), timeline=TIMELINE))


def parts(peak: Sharded) -> tuple[int, ...]:
    """Parameters, gradients, state, gathered and the rest."""
    return (
        peak.parameter_bytes,
        peak.gradient_bytes,
        peak.optimizer_state_bytes,
        peak.gathered_bytes,
        peak.rest_bytes,
    )


def test_each_strategy_has_the_peak_of_its_own_moment() -> None:
    """Worked out by hand, each the highest of the four moments."""
    peaks = {peak.strategy: peak for peak in sharded(trained(), RANKS)}
    expected = {
        # The optimizer's state and its temporary tensors in quarters, and 10 bytes of others.
        "ZeRO-1": ("optimizer", (ALL, ALL, STATE // 4, 0, 1010)),
        # Gradients in quarters. In backward of the first block they are fewer, but the larger
        # block's are whole, which tips it.
        "ZeRO-2": ("backward", (ALL, 0, STATE // 4, BLOCK, 1740)),
        # Parameters in quarters. In backward of a block: the head and its gradient, two blocks, and
        # the blocks' gradients so far, which are less than two blocks'.
        "ZeRO-3": (
            "backward",
            (ALL // 4, 3520 // 4, STATE // 4, HEAD + HEAD + 2 * BLOCK + 3520 - HEAD, 110),
        ),
    }
    assert expected == {name: (peak.phase, parts(peak)) for name, peak in peaks.items()}
    assert all(peak.total_bytes == sum(parts(peak)) for peak in peaks.values())


def test_one_rank_gathers_nothing() -> None:
    """And divides nothing: all strategies are the step as it is."""
    assert {(ALL, ALL, STATE, 0, 4010)} == {parts(peak) for peak in sharded(trained(), 1)}


def test_each_strategy_fits_or_does_not() -> None:
    """A MiB is less than the driver's context; 8 GiB are plenty. Without a chip nothing is said."""
    nothing = Hardware("none", {"bf16": 1.0}, memory_bytes=2**20)
    plenty = Hardware("plenty", {"bf16": 1.0}, memory_bytes=2**33)
    assert [{"does not fit"}, {"fits"}] == [
        {
            peak.memory_fit.verdict
            for peak in sharded(trained(), RANKS, chip)
            if peak.memory_fit is not None
        }
        for chip in (nothing, plenty)
    ]
    assert {None} == {peak.memory_fit for peak in sharded(trained(), RANKS)}


def test_without_memory_nothing_is_known_and_no_ranks_are_an_error() -> None:
    """A model that is sharded already is one too: its memory is a rank's."""
    assert () == sharded(profile(ROWS, ()), RANKS)
    with pytest.raises(ValueError, match="ranks=0: pass at least 1"):
        sharded(trained(), 0)
    rows = dict(trained().modules) | {
        "": module_profile(parameters=1000, parameter_bytes=ALL, local_parameter_bytes=ALL // 4)
    }
    with pytest.raises(ValueError, match="is sharded already"):
        sharded(replace(trained(), modules=rows), RANKS)


class Blocks(nn.Module):
    """Blocks of layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture
def one_of_four() -> Iterator[None]:
    """A rank whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("samples", [8, 64, 512])
def test_zero_3_by_arithmetic_is_near_a_model_that_is_sharded_for_real(samples: int) -> None:
    """At most one block's parameters above it, and never below by more than 1 %, whatever the largest part is."""

    def whole_model() -> nn.Module:
        return Blocks()

    def in_shards() -> nn.Module:
        mesh, model = init_device_mesh("cpu", (RANKS,)), Blocks()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model

    how: dict[str, Any] = {
        "backward": True,
        "loss": lambda out: out.sum(),
        "optimizer": torch.optim.AdamW,
    }
    whole, real = (
        lflops.estimate(build, torch.zeros(samples, 64), **how)
        for build in (whole_model, in_shards)
    )
    assert real.memory is not None
    found = sharded(whole, RANKS)[-1].total_bytes
    block = whole.modules["blocks.0"].parameter_bytes
    assert -0.01 * found <= found - real.memory.peak_bytes <= block
