"""An estimate of one rank of a mesh is what torch's own wrappers do.

By hand here, and in real processes.
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

WIDTH, WIDE, SAMPLES, BLOCKS, FLOAT = 64, 256, 32, 3, 4
BATCH = torch.zeros(SAMPLES, WIDTH)
SUM = 4
"""Bytes of the number that backward starts from, which a loop's count sees as well."""

pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives do not say what their results look like, and an estimate says so",
)


class Blocks(nn.Module):
    """Blocks of two layers, a head, and a plan for tensor parallelism in transformers' words."""

    tp_plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise", "head": "colwise_rep"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(layers() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def whole() -> nn.Module:
    """On one rank."""
    return Blocks()


def in_shards(*sizes: int) -> nn.Module:
    """By `fully_shard`, block by block."""
    names = ("replica", "data")[-len(sizes) :]
    mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=names), Blocks()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def in_columns_and_rows(ranks: int) -> nn.Module:
    """By `parallelize_module`."""
    from torch.distributed.tensor import Replicate

    plan = {
        "blocks.*.0": ColwiseParallel(),
        "blocks.*.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(Blocks(), init_device_mesh("cpu", (ranks,)), plan)  # type: ignore[arg-type]


def estimated(build: Callable[[], nn.Module] = whole, **how: Any) -> Profile:
    """A step with AdamW."""
    return lflops.estimate(
        build, BATCH, backward=True, loss=lambda out: out.sum(), optimizer=torch.optim.AdamW, **how
    )


def memory(profile: Profile) -> Memory:
    """That was counted."""
    assert profile.memory is not None
    return profile.memory


def trained(build: Callable[[], nn.Module]) -> Profile:
    """The third step of a real training."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
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
    """To the byte and the MAC, at every operator; and no process group is left open."""
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
    """As in a Trainer: the estimate of a sharded step has the peak of the step that runs.

    A fake group stands for the other ranks, but this rank's tensors are real. The estimate has the
    batch, which the count of a loop does not see.
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
    """To infer a shape, DTensor allocates the whole tensors and runs the operator once more."""
    steps: list[Profile] = []
    Estimator(
        caller="test",
        backward=True,
        optimizer=torch.optim.AdamW,
        hardware="H100 SXM",
        mesh={"data": 4},
        watch=steps.append,
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
"""Bytes of single numbers that a real step holds for a while.

The sum, what it starts from, AdamW's step counts.
"""


STAGE = Size(width=64, wide=256, blocks=6, samples=1024)
SENT = STAGE.samples // MICROBATCHES * STAGE.width * FLOAT
"""Bytes of an output that gloo still holds after it was sent, until the schedule lets the send go."""


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # torch's, of what a block of local parts returns
@pytest.mark.parametrize("world", [2, 4])
def test_real_processes_hold_what_was_estimated(world: int, tmp_path: Path) -> None:
    """Live bytes of gloo's ranks at the peak, by a look at all storages that is none of lflops.

    On two ranks by lflops's count, too.

    The estimate has the batch, which a loop's count does not see. Each strategy has a peak of its
    own, so a mixed-up one would be seen.
    """
    builds: dict[str, Callable[[], nn.Module]] = {
        "data": partial(in_shards, 2),
        "tensor": partial(in_columns_and_rows, 2),
    }
    staged = SCHEDULES if world == 2 else ()
    with Ranks(world, tmp_path) as ranks:
        stages = {name: ranks.run(partial(stage_peak, name, STAGE)) for name in staged}
        real = {
            name: ranks.run(partial(trained, build)) for name, build in builds.items() if world == 2
        }
        cases = {name: case for name, case in CASES.items() if world == case.least}
        held: dict[str, Any] = {
            name: ranks.run(partial(rank_peak, name, SMALL, world)) for name in cases
        }  # type: ignore[arg-type]
    estimates = {name: case.estimated(SMALL, world) for name, case in cases.items()}
    for name, peaks in stages.items():
        more = [
            peak - estimated_stage(name, STAGE, world, rank).peak_bytes
            for rank, peak in enumerate(peaks)
        ]
        sent = [SENT if name == "1F1B" and rank < world - 1 else 0 for rank in range(world)]
        assert all(
            -NUMBERS <= each <= most + NUMBERS for each, most in zip(more, sent, strict=True)
        ), (name, more)
        assert all(each < 0.01 * peak for each, peak in zip(more, peaks, strict=True))
    for name, peaks in held.items():
        assert [0] * world == [max(abs(peak - estimates[name]) - NUMBERS, 0) for peak in peaks], (
            name
        )
    assert len(estimates) == len({round(each / 1000) for each in estimates.values()})
    for name, profiles in real.items():
        found = memory(estimated(mesh={name: world})).peak_bytes - BATCH.nbytes
        more = [memory(each).peak_bytes - found for each in profiles]
        # Beside other programs gloo's thread may not have let go of a result of a block yet, which
        # is as large as the batch.
        assert all(min(abs(each), abs(each - BATCH.nbytes)) <= SUM for each in more), (name, more)


@pytest.mark.parametrize(("lets_go", "peak"), [(True, 0), (False, 400)])
def test_what_a_thread_of_gloo_lets_go_of_late_is_no_peak(
    lets_go: bool, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred float32 that a collective was given.

    Gone when they are looked for again, or still there.
    """
    held = [torch.zeros(100)]
    storages = LiveStorages()
    storages.hold(held)
    storages.given(held)
    monkeypatch.setattr(rank_memory.time, "sleep", lambda _: held.clear() if lets_go else None)
    storages.look()
    assert peak == storages.peak


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # torch's, of what a block of local parts returns
def test_a_rank_is_named_in_the_run() -> None:
    """By hand: a rank of tensor parallelism multiplies a half of each product.

    FSDP2 all of its batch.
    """
    macs = SAMPLES * (BLOCKS * 2 * WIDTH * WIDE + WIDTH * WIDE)
    both, tensor, alone = (
        estimated(mesh=mesh) for mesh in ({"data": 2, "tensor": 2}, {"tensor": 2}, None)
    )
    assert [macs // 2, macs // 2, macs] == [each.total() for each in (both, tensor, alone)]
    assert [("fsdp2, tensor parallel", 4, 2, 2), ("tensor parallel", 2, 1, 2)] == [
        (
            each.run.strategy,
            each.run.world_size,
            each.run.data_parallel_size,
            each.run.tensor_parallel_size,
        )
        for each in (both, tensor)
    ]


def test_shards_in_float32_compute_in_bfloat16_as_the_policy_says() -> None:
    """As `fully_shard` by hand with the same policy.

    And each collective's buffers are on their stream.
    """
    policy = mixed_precision("BF16", "fp32")

    def by_hand() -> nn.Module:
        mesh, model = init_device_mesh("cpu", (4,)), Blocks()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model

    how: dict[str, Any] = {
        "caller": "estimate",
        "backward": True,
        "optimizer": torch.optim.AdamW,
        "mesh": {"data": 4},
    }
    subject = lambda: Subject(Blocks(), (BATCH,), {}, lambda out: out.sum())  # noqa: E731
    mixed, plain = (Estimator(**how, mixed=each).run(subject) for each in (policy, None))
    peaks = [
        memory(each).peak_bytes for each in (estimated(by_hand, mesh={"data": 4}), mixed, plain)
    ]
    assert peaks[0] == peaks[1] < peaks[2]


def test_moments_of_eight_bits_are_of_the_shard() -> None:
    """Of 256 x 256 weights a rank of 8 has 8,192.

    Two bytes of each, and two scales for 256 of them.
    """
    build = lambda: nn.Sequential(  # noqa: E731
        *(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(4))
    )
    found = lflops.estimate(
        build, torch.zeros(4, 256), backward=True, optimizer="adamw8bit", mesh={"data": 8}
    )
    assert 4 * (2 * 8192 + 2 * 32 * FLOAT) == memory(found).most_by_category["optimizer_state"]


def test_buffers_of_collectives_are_of_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered of one, reduced gradients of another.

    By hand all is of the stream that computes.
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
    """By hand: of the parameters' bytes once more, in one bucket below a MiB; a note has them.

    A frozen layer needs none.
    """
    alone, replicated = estimated(), estimated(mesh={"replica": 4})
    parameters = (BLOCKS * (2 * WIDTH * WIDE + WIDE + WIDTH) + (WIDTH + 1) * WIDE) * FLOAT
    assert parameters == memory(replicated).peak_bytes - memory(alone).peak_bytes
    assert (
        parameters
        == memory(replicated).by_category["gradients"] - memory(alone).by_category["gradients"]
    )
    assert ("ddp", 4, 4) == (
        replicated.run.strategy,
        replicated.run.world_size,
        replicated.run.data_parallel_size,
    )
    assert [{"buckets": 1, "bytes": parameters}] == [
        note.values for note in replicated.notes if note.code == "ddp_buckets"
    ]
    assert [parameters] == [each.bytes for each in replicated.communication]
    assert not any(note.code == "ddp_buckets" for note in alone.notes)


def test_buckets_are_those_of_torch() -> None:
    """Sizes around both limits, in two dtypes.

    Torch's own rule, in the order in which gradients become ready.
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
    """Shards that stay gathered after forward.

    The parameters of all blocks but the root's own are there at the end of it.
    """

    def kept() -> nn.Module:
        return CASES["FSDP2, not resharded after forward"].wrap(Blocks(), 4)

    by_default, by_hand = (estimated(each, mesh={"data": 4}) for each in (whole, kept))
    assert ("fsdp2", 4) == (by_hand.run.strategy, by_hand.run.world_size)
    gathered = [
        max(each.by_category.parameters for each in memory(of).timeline if each.by_category)
        for of in (by_default, by_hand)
    ]
    assert (BLOCKS - 1) * (2 * WIDTH * WIDE + WIDE + WIDTH) * FLOAT <= gathered[1] - gathered[0]


class Planless(nn.Linear):
    """Has no plan."""


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no mesh": (
        whole,
        8,
        "mesh=8: pass the number of ranks of 'pipeline', 'replica', 'data', 'tensor'",
    ),
    "an unknown dimension": (
        whole,
        {"stage": 2},
        "pass the number of ranks of 'pipeline', 'replica', 'data', 'tensor'",
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
        "DistributedDataParallel does not support DTensors, pass 'data' instead of 'replica'",
    ),
    "a module": (Blocks(), {"data": 2}, "divides the model: pass a function that builds it"),
    "no plan": (
        lambda: Planless(WIDTH, 2),
        {"tensor": 2},
        "Planless has no tp_plan: apply parallelize_module",
    ),
}


@pytest.mark.parametrize(("model", "mesh", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_mesh_is_named(model: Any, mesh: Any, said: str) -> None:
    """With what is taken; nothing is left open."""
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
    """By hand: of m microbatches GPipe keeps m and 1F1B min(p, m), each with two wide layers and one narrow in a block.

    Each microbatch has a buffer for its output's gradient as well.
    """
    rows = STAGE.samples // MICROBATCHES
    microbatch = STAGE.blocks * rows * (2 * STAGE.wide + STAGE.width) * FLOAT
    found = estimated_stage(schedule, STAGE, stages, 0)
    assert kept * microbatch + MICROBATCHES * SENT == found.most_by_category["activations"]


def test_a_backward_inside_of_forward_has_one_set_of_gradients() -> None:
    """As many bytes as a real pass has, whose passes backward both add to the same gradients."""

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
    "a rank of none": ({"rank": 1}, "rank=1: pass mesh= as well"),
    "a rank too far": ({"rank": 2, "mesh": {"data": 2}}, "has ranks 0 to 1"),
    "shapes not given": (
        {"step": lambda *_: _shapeless(), "mesh": {"pipeline": 2}, "rank": 1},
        "input_args and output_args",
    ),
}


def _shapeless() -> None:
    """A stage whose shapes another stage would have to send."""
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, torch.device("cpu"))
    ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum()).step(target=BATCH)


@pytest.mark.parametrize(("how", "said"), STEPS.values(), ids=STEPS)
def test_a_wrong_step_is_named(how: dict[str, Any], said: str) -> None:
    """With what to do."""
    with pytest.raises(lflops.CountError, match=said):
        lflops.estimate(whole, BATCH, **how)


class Stage(nn.Linear):
    """Tells the next rank its shape, as the stages of torch's pipelines do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in torch
        distributed.send_object_list([input.shape], dst=1)
        return super().forward(input)


def test_a_stage_of_a_pipeline_is_named() -> None:
    """With its line, and what to give in its place."""
    with pytest.raises(
        lflops.CountError,
        match=r"send_object_list.*sends Python objects to other ranks.*input_args and output_args",
    ):
        lflops.estimate(lambda: Stage(WIDTH, 2), BATCH, mesh={"replica": 2})
    assert not distributed.is_initialized()


def test_heads_that_cannot_be_split_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' configurations have them."""
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(Blocks, "config", config, raising=False)
    assert estimated(mesh={"tensor": 2}).total()
    with pytest.raises(lflops.CountError, match="Blocks has 2 key/value heads, which tensor para"):
        estimated(mesh={"tensor": 4})


def test_an_unknown_style_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a later transformers has."""
    monkeypatch.setattr(Blocks, "tp_plan", {"head": "diagonal"})
    with pytest.raises(lflops.CountError, match="tp_plan has 'diagonal'"):
        estimated(mesh={"tensor": 2})


def test_within_a_group_of_the_users_there_is_no_mesh() -> None:
    """It is not closed."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(
            lflops.CountError, match="needs its own process group, but one is already initialized"
        ):
            estimated(mesh={"data": 2})
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
