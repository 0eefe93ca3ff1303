"""Test the memory that each rank needs under ZeRO.

The tests use a model of two blocks and a head by hand, and a real model under `fully_shard`, which
corresponds to stage 3.
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
# 1000 parameters in float32, 200 of them in the head.
ROWS: dict[str, dict[str, Any]] = {
    "": weights(0, 1000),
    "layers": weights(0, 800),
    "layers.0": weights(300),
    "layers.1": weights(500),
    "head": weights(200),
}
SIZES = ("parameter_bytes", "trainable_parameter_bytes", "local_parameter_bytes")

ALL = 4000
"""Bytes of all parameters."""

STATE = 8000
"""Bytes of AdamW's state, two floats for each parameter."""

BLOCK = 2000
"""Bytes of the larger block's parameters."""

HEAD = 800
"""Bytes of the head's parameters."""

# The numbers of a `ByCategory` are parameters, gradients, state, activations, temporary and other.
# The last number of a `Moment` is the highest live memory until the next moment.
TIMELINE = (
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
    """Return the profile of a training step of the model."""
    rows = {}
    for name, row in ROWS.items():
        rows[name] = {**row, **dict.fromkeys(SIZES, 4 * row["parameters"])}
    return profile(rows, (), memory=replace(small_memory(), timeline=TIMELINE))


def parts(peak: Sharded) -> tuple[int, ...]:
    """Return the bytes of parameters, gradients, state, gathered parameters and the rest."""
    return (
        peak.parameter_bytes,
        peak.gradient_bytes,
        peak.optimizer_state_bytes,
        peak.gathered_bytes,
        peak.rest_bytes,
    )


def test_each_strategy_has_the_peak_of_its_own_moment() -> None:
    """Each strategy's peak is the highest of the four moments of `TIMELINE`, worked out by hand."""
    peaks = {peak.strategy: peak for peak in sharded(trained(), RANKS)}
    expected = {
        # State and temporary tensors of the optimizer are divided by four. The rest is a quarter of
        # 4000 temporary bytes, and 10 other bytes.
        "ZeRO-1": ("optimizer", (ALL, ALL, STATE // 4, 0, 1010)),
        # Gradients are divided by four. The peak is in backward, where the gradients of the larger
        # block are whole.
        "ZeRO-2": ("backward", (ALL, 0, STATE // 4, BLOCK, 1740)),
        # Parameters are divided by four. The peak is in backward of a block. The head and its
        # gradient, two blocks, and the blocks' gradients so far are gathered; these gradients are
        # smaller than two blocks.
        "ZeRO-3": (
            "backward",
            (ALL // 4, 3520 // 4, STATE // 4, HEAD + HEAD + 2 * BLOCK + 3520 - HEAD, 110),
        ),
    }
    assert expected == {name: (peak.phase, parts(peak)) for name, peak in peaks.items()}
    assert all(peak.total_bytes == sum(parts(peak)) for peak in peaks.values())


def test_one_rank_gathers_nothing() -> None:
    """With one rank nothing is divided or gathered, so all strategies equal the real step."""
    assert {(ALL, ALL, STATE, 0, 4010)} == {parts(peak) for peak in sharded(trained(), 1)}


def test_each_strategy_fits_or_does_not() -> None:
    """With a chip each strategy has a verdict.

    1 MiB is less than the CUDA context, and 8 GiB are enough. Without a chip there is no verdict.
    """
    nothing = Hardware("none", {"bf16": 1.0}, memory_bytes=2**20)
    plenty = Hardware("plenty", {"bf16": 1.0}, memory_bytes=2**33)

    def verdicts(chip: Hardware) -> set[str]:
        fits = [peak.memory_fit for peak in sharded(trained(), RANKS, chip)]
        return {fit.verdict for fit in fits if fit is not None}

    assert {"does not fit"} == verdicts(nothing)
    assert {"fits"} == verdicts(plenty)
    assert {None} == {peak.memory_fit for peak in sharded(trained(), RANKS)}


def test_without_memory_nothing_is_known_and_no_ranks_are_an_error() -> None:
    """Without counted memory the result is empty; 0 ranks are an error.

    A model that is already sharded is an error too, because its memory is that of one rank.
    """
    assert () == sharded(profile(ROWS, ()), RANKS)
    with pytest.raises(ValueError, match="ranks=0: pass at least 1"):
        sharded(trained(), 0)
    rows = dict(trained().modules) | {
        "": module_profile(parameters=1000, parameter_bytes=ALL, local_parameter_bytes=ALL // 4)
    }
    with pytest.raises(ValueError, match="is already sharded"):
        sharded(replace(trained(), modules=rows), RANKS)


class Blocks(nn.Module):
    """Blocks of two layers, and a head."""

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
    """Open a process group of four ranks whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("samples", [8, 64, 512])
def test_zero_3_by_arithmetic_is_near_a_model_that_is_sharded_for_real(samples: int) -> None:
    """The computed peak of ZeRO-3 is near an estimate of the model under `fully_shard`.

    It is at most one block's parameters above it, and at most 1 % below, whichever part of the
    memory is the largest.
    """

    def whole_model() -> nn.Module:
        return Blocks()

    def in_shards() -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,))
        model = Blocks()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model

    how: dict[str, Any] = {
        "backward": True,
        "loss": lambda out: out.sum(),
        "optimizer": torch.optim.AdamW,
    }
    whole = lflops.estimate(whole_model, torch.zeros(samples, 64), **how)
    real = lflops.estimate(in_shards, torch.zeros(samples, 64), **how)
    assert real.memory is not None
    found = sharded(whole, RANKS)[-1].total_bytes
    block = whole.modules["blocks.0"].parameter_bytes
    assert -0.01 * found <= found - real.memory.peak_bytes <= block
