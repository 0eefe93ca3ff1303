"""Test that an estimate of one rank of a mesh equals what torch's own wrappers do.

It is compared with wrappers applied by hand on a fake process group, and with real processes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import lflops
from lflops.estimation import estimate as estimate_file
from lflops.estimation.changes import Changes, mixed_precision
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.mesh import FIRST, LATER, assigned
from lflops.memory.allocator.simulation import Request, Simulated, simulate
from lflops.profile.profile import Memory, Profile
from tests.support import rank_memory
from tests.support.processes import Ranks
from tests.support.rank_memory import (
    CASES,
    MICROBATCHES,
    SCHEDULES,
    LiveStorages,
    Size,
    estimated_stage,
    rank_peak,
    stage_peak,
)

WIDTH = 64
WIDE = 256
SAMPLES = 32
BLOCKS = 3
FLOAT = 4
BATCH = torch.zeros(SAMPLES, WIDTH)
SUM = 4
"""Bytes of the number with which backward starts; the count of a loop includes it."""

FUSED = partial(torch.optim.AdamW, fused=True)
"""An optimizer with one operator per step, so it is estimated faster than the others.

The cases of `test_real_processes_hold_what_was_estimated` have an optimizer with several operators
for each parameter.
"""

pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives do not say what their results look like, and an estimate says so",
)


class Blocks(nn.Module):
    """Blocks of two layers, a head, and a tensor-parallel plan in the format of transformers."""

    tp_plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise", "head": "colwise_rep"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(BLOCKS):
            self.blocks.append(
                nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
            )
        self.head = nn.Linear(WIDTH, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def whole() -> nn.Module:
    """Build the model on one rank."""
    return Blocks()


def in_shards(*sizes: int) -> nn.Module:
    """Shard the model with `fully_shard`, block by block; two sizes mean HSDP."""
    names = ("replica", "data")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = Blocks()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def in_columns_and_rows(ranks: int) -> nn.Module:
    """Divide the model with `parallelize_module`."""
    from torch.distributed.tensor import Replicate

    plan = {
        "blocks.*.0": ColwiseParallel(),
        "blocks.*.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(Blocks(), init_device_mesh("cpu", (ranks,)), plan)  # type: ignore[arg-type]


def estimated(build: Callable[[], nn.Module] = whole, **how: Any) -> Profile:
    """Estimate a training step with AdamW."""
    return lflops.estimate(
        build, BATCH, backward=True, loss=lambda out: out.sum(), optimizer=FUSED, **how
    )


def memory(profile: Profile) -> Memory:
    """Return the memory of the profile, which must have one."""
    assert profile.memory is not None
    return profile.memory


def trained(build: Callable[[], nn.Module]) -> Profile:
    """Return the profile of the third step of a real training run."""
    model = build()
    optimizer = FUSED(model.parameters())
    for _ in range(3):
        with lflops.counting(model) as counted:
            model(BATCH).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return counted.profile


MESHES: dict[str, tuple[dict[str, int], Callable[[], nn.Module]]] = {
    "FSDP2": ({"data": 4}, partial(in_shards, 4)),
    "HSDP": ({"replica": 2, "data": 2}, partial(in_shards, 2, 2)),
    "tensor parallel": ({"tensor": 4}, partial(in_columns_and_rows, 4)),
}


@pytest.mark.parametrize(("mesh", "by_hand"), MESHES.values(), ids=MESHES)
def test_a_mesh_is_the_wrapper_applied_by_hand(
    mesh: dict[str, int], by_hand: Callable[[], nn.Module]
) -> None:
    """`mesh=` gives the same work and memory at every operator as the wrapper applied by hand.

    No process group is left open.
    """
    found = estimated(mesh=mesh)
    assert not distributed.is_initialized()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        expected = estimated(by_hand)
    finally:
        distributed.destroy_process_group()
    assert (expected.op_counts, expected.communication) == (found.op_counts, found.communication)
    assert memory(expected).timeline == memory(found).timeline
    assert memory(expected).peak_bytes == memory(found).peak_bytes


def test_autocast_ends_before_backward_and_forgets_its_casts() -> None:
    """With mixed precision, an estimate of a sharded step has the peak of a real step.

    As in a Trainer, autocast ends before backward and drops its cached casts. A fake group replaces
    the other ranks, but the tensors of this rank are real. Only the estimate includes the batch.
    """
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = in_shards(4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with lflops.counting(model) as counted:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(BATCH).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        distributed.destroy_process_group()
    estimator = Estimator(
        caller="test", backward=True, optimizer=torch.optim.AdamW, mesh={"data": 4}
    )
    found = estimator.run(
        lambda: Changes(precision="bf16-mixed").applied(
            "test", Subject(Blocks(), (BATCH,), {}, torch.sum)
        )
    )
    real = memory(counted.profile).peak_bytes
    assert abs(memory(found).peak_bytes - BATCH.nbytes - real) <= NUMBERS


def test_shapes_that_a_sharded_operator_infers_are_no_work_of_the_step() -> None:
    """Tensors that DTensor allocates to infer a shape are not in the memory of the step.

    To infer a shape, DTensor allocates the whole tensors and runs the operator once more.
    """
    steps: list[Profile] = []
    Estimator(
        caller="test",
        backward=True,
        optimizer=torch.optim.AdamW,
        hardware="H100 SXM",
        mesh={"data": 4},
        watch=lambda step: steps.append(step.profile),
    ).run(lambda: Subject(Blocks(), (BATCH,), {}, torch.sum))
    peaks = []
    for step in steps:
        moments = [each for each in memory(step).timeline if each.phase == "optimizer"]
        assert "empty_strided" not in {each.operator for each in moments}
        peaks.append(max(each.highest_bytes for each in moments))
    # Only in the first step are there shapes to infer, and both steps update equal lists.
    assert peaks[0] == peaks[1]


SMALL = Size(width=64, wide=256, blocks=3, samples=32)
NUMBERS = 32
"""Tolerance in bytes for single numbers that a real step holds.

They are the sum, the number with which backward starts, and AdamW's step counts.
"""


STAGE = Size(width=64, wide=512, blocks=3, samples=1024)
SENT = STAGE.samples // MICROBATCHES * STAGE.width * FLOAT
"""Bytes of one sent output: gloo holds it until the schedule waits for the send."""


# torch warns about the return values of blocks that hold local parts of tensors.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("world", [2, 4])
def test_real_processes_hold_what_was_estimated(world: int, tmp_path: Path) -> None:
    """Live bytes at the peak of real gloo ranks match the estimates of all strategies.

    `LiveStorages` measures them by looking at all storages, without lflops; on two ranks the count
    of lflops must agree as well. Only the estimate includes the batch. Each strategy has a
    different peak, so that a mixed-up strategy would fail.
    """
    builds: dict[str, Callable[[], nn.Module]] = {
        "data": partial(in_shards, 2),
        "tensor": partial(in_columns_and_rows, 2),
    }
    cases = {name: case for name, case in CASES.items() if world == case.least}
    stages: dict[str, Any] = {}
    counted: dict[str, Any] = {}
    held: dict[str, Any] = {}
    with Ranks(world, tmp_path) as ranks:
        if world == 2:
            for name in SCHEDULES:
                stages[name] = ranks.run(partial(stage_peak, name, STAGE))
            for name, build in builds.items():
                counted[name] = ranks.run(partial(trained, build))
        for name in cases:
            held[name] = ranks.run(partial(rank_peak, name, SMALL, world))  # type: ignore[arg-type]
    estimates = {name: case.estimated(SMALL, world) for name, case in cases.items()}
    for name, peaks in stages.items():
        for rank, peak in enumerate(peaks):
            more = peak - estimated_stage(name, STAGE, world, rank).peak_bytes
            sends = name == "1F1B" and rank < world - 1
            most = SENT if sends else 0
            assert -NUMBERS <= more <= most + NUMBERS, (name, rank, more)
            assert more < 0.01 * peak
    for name, peaks in held.items():
        assert world == len(peaks)
        assert all(abs(peak - estimates[name]) <= NUMBERS for peak in peaks), name
    assert len(estimates) == len({round(each / 1000) for each in estimates.values()})
    for name, profiles in counted.items():
        found = memory(estimated(mesh={name: world})).peak_bytes - BATCH.nbytes
        for profile in profiles:
            more = memory(profile).peak_bytes - found
            # On a busy machine gloo's thread may still hold a block's result, which is as large as
            # the batch.
            assert min(abs(more), abs(more - BATCH.nbytes)) <= SUM, (name, more)


@pytest.mark.parametrize(("lets_go", "peak"), [(True, 0), (False, 400)])
def test_what_a_thread_of_gloo_lets_go_of_late_is_no_peak(
    lets_go: bool, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LiveStorages` checks tensors that were passed to a collective again, before it counts them.

    100 float32 numbers were passed. They are either gone when they are checked again, or still
    there.
    """
    held = [torch.zeros(100)]
    storages = LiveStorages()
    storages.hold(held)
    storages.given(held)
    monkeypatch.setattr(rank_memory.time, "sleep", lambda _: held.clear() if lets_go else None)
    storages.look()
    assert peak == storages.peak


# torch warns about the return values of blocks that hold local parts of tensors.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_rank_is_named_in_the_run() -> None:
    """The run of a profile contains the strategy and its sizes.

    A tensor-parallel rank executes half of each matmul. An FSDP2 rank executes all matmuls of its
    batch.
    """
    macs = SAMPLES * (BLOCKS * 2 * WIDTH * WIDE + WIDTH * WIDE)
    both = estimated(mesh={"data": 2, "tensor": 2})
    tensor = estimated(mesh={"tensor": 2})
    alone = estimated(mesh=None)
    assert macs // 2 == both.total()
    assert macs // 2 == tensor.total()
    assert macs == alone.total()
    assert "fsdp2, tensor parallel" == both.run.strategy
    assert 4 == both.run.world_size
    assert 2 == both.run.data_parallel_size
    assert 2 == both.run.tensor_parallel_size
    assert "tensor parallel" == tensor.run.strategy
    assert 2 == tensor.run.world_size
    assert 1 == tensor.run.data_parallel_size
    assert 2 == tensor.run.tensor_parallel_size


def test_shards_in_float32_compute_in_bfloat16_as_the_policy_says() -> None:
    """A mixed-precision policy gives the same peak as `fully_shard` by hand with this policy.

    This peak is lower than the peak without a policy.
    """
    policy = mixed_precision("BF16", "fp32")

    def by_hand() -> nn.Module:
        mesh = init_device_mesh("cpu", (4,))
        model = Blocks()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model

    how: dict[str, Any] = {
        "caller": "estimate",
        "backward": True,
        "optimizer": torch.optim.AdamW,
        "mesh": {"data": 4},
    }

    def subject() -> Subject:
        return Subject(Blocks(), (BATCH,), {}, lambda out: out.sum())

    expected = memory(estimated(by_hand, mesh={"data": 4})).peak_bytes
    mixed = memory(Estimator(**how, mixed=policy).run(subject)).peak_bytes
    plain = memory(Estimator(**how, mixed=None).run(subject)).peak_bytes
    assert expected == mixed < plain


def test_moments_of_eight_bits_are_of_the_shard() -> None:
    """8-bit moments are allocated for the rank's shard only.

    A rank of 8 has 8,192 of 256 x 256 weights. They need two bytes each, and two scales per 256
    weights.
    """

    def build() -> nn.Module:
        blocks = []
        for _ in range(4):
            blocks.append(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()))
        return nn.Sequential(*blocks)

    found = lflops.estimate(
        build, torch.zeros(4, 256), backward=True, optimizer="adamw8bit", mesh={"data": 8}
    )
    assert 4 * (2 * 8192 + 2 * 32 * FLOAT) == memory(found).most_by_category["optimizer_state"]


def test_buffers_of_collectives_are_of_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered parameters and reduced gradients are allocated on two further streams.

    If the user applies `fully_shard` by hand, all requests belong to the compute stream.
    """
    seen: list[set[int]] = []

    def simulated(requests: list[Request], *_: Any) -> Simulated:
        seen.append({each.stream for each in requests})
        return simulate(requests)

    monkeypatch.setattr(estimate_file, "simulate", simulated)
    for build in (whole, partial(in_shards, 4)):
        estimated(build, mesh={"data": 4}, allocator="expandable_segments:True")
    assert [{0, 1, 2}, {0}] == seen


def test_replicas_alone_have_buckets_as_large_as_the_gradients() -> None:
    """DDP's buckets need as many bytes as the parameters, and a note contains them.

    Here they fit into one bucket, because the first bucket holds up to one MiB.
    """
    alone = estimated()
    replicated = estimated(mesh={"replica": 4})
    parameters = (BLOCKS * (2 * WIDTH * WIDE + WIDE + WIDTH) + (WIDTH + 1) * WIDE) * FLOAT
    assert parameters == memory(replicated).peak_bytes - memory(alone).peak_bytes
    gradients = memory(alone).by_category["gradients"]
    assert parameters == memory(replicated).by_category["gradients"] - gradients
    assert "ddp" == replicated.run.strategy
    assert 4 == replicated.run.world_size
    assert 4 == replicated.run.data_parallel_size
    assert [{"buckets": 1, "bytes": parameters}] == [
        note.values for note in replicated.notes if note.code == "ddp_buckets"
    ]
    assert [parameters] == [each.bytes for each in replicated.communication]
    assert not any(note.code == "ddp_buckets" for note in alone.notes)


def test_buckets_are_those_of_torch() -> None:
    """The buckets equal those of torch's own function.

    Torch's function gets the gradients in the order in which they become ready. The sizes lie
    around both limits, in two dtypes.
    """
    sizes = [100, FIRST // 4 - 100, FIRST // 4, 7, LATER // 4, LATER // 8, LATER // 8 + 1, 3]
    dtypes = [torch.float32, torch.bfloat16]
    parameters = [
        nn.Parameter(torch.empty(size, device="meta", dtype=dtypes[place % 3 == 2]))
        for place, size in enumerate(reversed(sizes))
    ]
    ready = parameters[::-1]
    found, _ = distributed._compute_bucket_assignment_by_size(ready, [FIRST, LATER])
    names = {id(each): place for place, each in enumerate(ready)}
    assert sorted(found) == sorted(
        [names[id(each)] for each in bucket] for bucket in assigned(parameters)
    )


def test_a_model_that_the_function_divided_stays_so() -> None:
    """If the user's function already sharded the model, its options are kept.

    Here the parameters stay gathered after forward. At its end, all blocks except the root's own
    parameters are gathered.
    """

    def kept() -> nn.Module:
        return CASES["FSDP2, not resharded after forward"].wrap(Blocks(), 4)

    def most_parameters(profile: Profile) -> int:
        moments = memory(profile).timeline
        return max(each.by_category.parameters for each in moments if each.by_category)

    by_default = estimated(whole, mesh={"data": 4})
    by_hand = estimated(kept, mesh={"data": 4})
    assert "fsdp2" == by_hand.run.strategy
    assert 4 == by_hand.run.world_size
    more = most_parameters(by_hand) - most_parameters(by_default)
    assert (BLOCKS - 1) * (2 * WIDTH * WIDE + WIDE + WIDTH) * FLOAT <= more


class Planless(nn.Linear):
    """A layer without a tensor-parallel plan."""


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no mesh": (
        whole,
        8,
        "mesh=8: pass a dictionary such as {'data': 8, 'tensor': 4}",
    ),
    "an unknown dimension": (
        whole,
        {"stage": 2},
        "the dimensions are 'pipeline', 'replica', 'data', 'tensor'",
    ),
    "a pipeline without a schedule": (
        whole,
        {"pipeline": 2},
        "pass step=, a function that runs your pipeline schedule",
    ),
    "no ranks": (whole, {"data": 0}, r"mesh\['data'\]=0: pass a whole number of ranks"),
    "half a rank": (whole, {"data": 1.5}, r"mesh\['data'\]=1.5"),
    "replicas of DTensors": (
        whole,
        {"replica": 2, "tensor": 2},
        "DistributedDataParallel, but this does not support tensor parallelism: pass 'data' instead",
    ),
    "a module": (Blocks(), {"data": 2}, "divides the model, so the model must not be built yet"),
    "no plan": (
        lambda: Planless(WIDTH, 2),
        {"tensor": 2},
        "Planless has no tp_plan: apply parallelize_module",
    ),
}


@pytest.mark.parametrize(("model", "mesh", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_mesh_is_named(model: Any, mesh: Any, said: str) -> None:
    """The error contains the accepted values, and no process group is left open."""
    with pytest.raises(lflops.CountError, match=said):
        estimated(model, mesh=mesh)
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("schedule", "stages", "kept"),
    [("GPipe", 2, 4), ("GPipe", 6, 4), ("1F1B", 2, 2), ("1F1B", 3, 3), ("1F1B", 4, 4)],
)
def test_the_first_of_p_stages_keeps_as_many_microbatches_as_its_schedule(
    schedule: str, stages: int, kept: int
) -> None:
    """Of m microbatches, GPipe keeps m and 1F1B keeps min(p, m).

    For each kept microbatch, a block keeps two wide activations and a narrow one. Each microbatch
    also has a buffer for the gradient of its output.
    """
    rows = STAGE.samples // MICROBATCHES
    microbatch = STAGE.blocks * rows * (2 * STAGE.wide + STAGE.width) * FLOAT
    found = estimated_stage(schedule, STAGE, stages, 0)
    assert kept * microbatch + MICROBATCHES * SENT == found.most_by_category["activations"]


def test_a_backward_inside_of_forward_has_one_set_of_gradients() -> None:
    """If forward itself runs a backward pass, both backward passes add to the same gradients.

    The estimate has the peak that a real step has.
    """

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sum().backward()
            return super().forward(x)

    def twice() -> nn.Module:
        return Twice(*(nn.Linear(WIDE, WIDE) for _ in range(BLOCKS)))

    x = torch.zeros(SAMPLES, WIDE)
    found = memory(lflops.estimate(twice, x, backward=True, loss=lambda out: out.sum()))
    with LiveStorages() as storages:
        model, x = twice(), x.clone()
        storages.peak = 0
        model(x).sum().backward()
    assert abs(found.peak_bytes - storages.peak) <= NUMBERS


STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"step": 1}, "step=1: pass a function"),
    "backward as well": ({"step": print, "backward": True}, "leave backward= out"),
    "a loss as well": ({"step": print, "loss": torch.sum}, "leave loss= out"),
    "a rank of none": (
        {"rank": 1},
        "rank=1: without a mesh, the only rank is 0: pass mesh= as well",
    ),
    "a rank too far": ({"rank": 2, "mesh": {"data": 2}}, "has ranks 0 to 1"),
    "shapes not given": (
        {"step": lambda *_: _shapeless(), "mesh": {"pipeline": 2}, "rank": 1},
        "input_args and output_args",
    ),
}


def _shapeless() -> None:
    """Run a stage that needs its shapes from another stage."""
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, torch.device("cpu"))
    ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum()).step(target=BATCH)


@pytest.mark.parametrize(("how", "said"), STEPS.values(), ids=STEPS)
def test_a_wrong_step_is_named(how: dict[str, Any], said: str) -> None:
    """The error says what to do."""
    with pytest.raises(lflops.CountError, match=said):
        lflops.estimate(whole, BATCH, **how)


class Stage(nn.Linear):
    """A layer that sends its shape to the next rank, as the stages of torch's pipelines do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in torch
        distributed.send_object_list([input.shape], dst=1)
        return super().forward(input)


def test_a_stage_of_a_pipeline_is_named() -> None:
    """The error says that the stage sends Python objects, and what to pass instead."""
    with pytest.raises(
        lflops.CountError,
        match=r"send_object_list.*sends Python objects to other ranks.*input_args and output_args",
    ):
        lflops.estimate(lambda: Stage(WIDTH, 2), BATCH, mesh={"replica": 2})
    assert not distributed.is_initialized()


def test_heads_that_cannot_be_split_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of heads come from a configuration like those of transformers."""
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(Blocks, "config", config, raising=False)
    assert estimated(mesh={"tensor": 2}).total()
    with pytest.raises(lflops.CountError, match="Blocks has 2 key/value heads, which tensor para"):
        estimated(mesh={"tensor": 4})


def test_an_unknown_style_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A style of a later transformers version, for example, is an error."""
    monkeypatch.setattr(Blocks, "tp_plan", {"head": "diagonal"})
    with pytest.raises(lflops.CountError, match="tp_plan has the style 'diagonal'"):
        estimated(mesh={"tensor": 2})


def test_within_a_group_of_the_users_there_is_no_mesh() -> None:
    """`mesh=` inside an open process group is an error, and the group stays open."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(
            lflops.CountError,
            match="needs its own process group, but a process group is already initialized",
        ):
            estimated(mesh={"data": 2})
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
