"""Test the planned memory of pipeline stages against estimates of stages under torch's schedule."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lflops.estimation.changes import Policy, mixed_precision, recompute
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.planning.plan import _corners, _Search, _sharded
from lflops.estimation.planning.work_sheets import Case, WorkSheets
from tests.estimation.planning.test_plan import BLOCKS, H100, TOKENS, WIDTH, Model, sheets

STAGES = 4
MICRO_BATCHES = 5
SAMPLES = 4
INPUT = SAMPLES * TOKENS * WIDTH * 4
"""Bytes of one micro batch of the model's input, in single precision.

The estimate of a stage holds the inputs of all micro batches.
"""

HALF = mixed_precision("bf16", "fp32")


class Part(Model):
    """One stage of the model."""

    def __init__(self, rank: int, policy: Policy) -> None:
        super().__init__(blocks=BLOCKS // STAGES)
        for block in self.blocks:
            recompute(block, policy)
        if rank:
            self.first = nn.Identity()
        if rank < STAGES - 1:
            self.last = nn.Identity()
        self.is_last = rank == STAGES - 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor that the stage sends, or the output of the model."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.last(x)) if self.is_last else x


class Step:
    """A training step by torch's 1F1B schedule, which is built in the first call."""

    def __init__(self) -> None:
        self._schedule: Schedule1F1B | None = None

    def __call__(self, part: nn.Module, x: Tensor) -> None:
        """Run forward and backward of all micro batches."""
        mesh = init_device_mesh(
            "cpu",
            (STAGES, distributed.get_world_size() // STAGES),
            mesh_dim_names=("pipeline", "data"),
        )
        rank = mesh["pipeline"].get_local_rank()
        if self._schedule is None:
            # Stages after the first one receive activations in bfloat16.
            received = torch.zeros(
                SAMPLES,
                TOKENS,
                WIDTH,
                dtype=torch.bfloat16 if rank else torch.float32,
                requires_grad=rank > 0,
            )
            returned = torch.zeros(
                SAMPLES,
                TOKENS,
                8 if rank == STAGES - 1 else WIDTH,
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            group: Any = mesh["pipeline"].get_group()
            stage = PipelineStage(
                part,
                rank,
                STAGES,
                torch.device("cpu"),
                input_args=received,
                output_args=returned,
                group=group,
            )
            self._schedule = Schedule1F1B(
                stage, MICRO_BATCHES, loss_fn=lambda out, _: out.square().mean()
            )
        if rank:
            self._schedule.step(target=x if rank == STAGES - 1 else None)
        else:
            self._schedule.step(x)


def stage_bytes(rank: int, data: int, policy: Policy) -> int:
    """Return the peak of a stage with the input of only one micro batch.

    The weights of the stage stay gathered.
    """

    def make() -> Subject:
        part = Part(rank, policy)
        mesh = init_device_mesh("cpu", (STAGES, data), mesh_dim_names=("pipeline", "data"))
        for each in (*part.blocks, part):
            fully_shard(each, mesh=mesh["data"], mp_policy=HALF, reshard_after_forward=False)
        batch = torch.zeros(MICRO_BATCHES * SAMPLES, TOKENS, WIDTH)
        return Subject(part, (batch,), {}, None, step=Step())

    mesh: Mapping[str, int] = {"pipeline": STAGES, "data": data}
    estimator = Estimator(
        caller="test",
        backward=True,
        optimizer="adamw",
        hardware=H100,
        mesh=mesh,
        rank=rank * data,
    )
    memory = estimator.run(make).memory
    assert memory is not None
    return memory.peak_bytes - (MICRO_BATCHES - 1) * INPUT


@cache
def known() -> WorkSheets:
    """Return the work sheets of the model, which several tests share.

    They have an estimate of the model already.
    """
    made = sheets()
    made.sheet(Case("none", 1, {"replica": 2, "data": 2}))
    return made


@pytest.mark.parametrize(("data", "policy"), [(4, "none"), (2, "selective"), (1, "full")])
def test_the_fullest_stage_needs_what_it_has_under_torchs_own_schedule(
    data: int, policy: Policy
) -> None:
    """The planned memory is within 4 % of the fullest of the first, the second and the last stage.

    Each of the four stages has three of the model's 12 blocks.
    """
    gpus = 16
    batch = MICRO_BATCHES * SAMPLES * data
    search = _Search(known(), H100, gpus=gpus, batch=batch, network=None, per_host=8, gathered=0.5)
    family = [*_sharded(gpus, [1], [1]), {"pipeline": 16, "data": 1}]
    peak = search._peak(
        _corners(family), policy, SAMPLES, {"pipeline": STAGES, "data": data}, accumulates=True
    )
    fullest = max(stage_bytes(rank, data, policy) for rank in (0, 1, STAGES - 1))
    assert peak == pytest.approx(fullest, rel=0.04)
