"""Test how ranks that execute parts of a model find the work of the whole (unsharded) model.

They find it from the sharded tensors of each operator. If these do not show it, it is unknown.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lflops
from lflops import Profile
from lflops.analysis.analysis import analyze
from lflops.errors import CountError
from lflops.flop_counter.sharded_tensors import PartialTensors
from lflops.integrations.deepspeed.text.summary import summary
from lflops.profile.notes import sentence
from lflops.profile.records import PHASES, Phase
from lflops.units import UNKNOWN
from tests.support.processes import Ranks
from tests.support.small_models import hidden, sequence, tokens

world = 2
wide = 8
"""A width that is divisible by two, unlike `hidden` and `tokens`."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return two processes in one group."""
    with Ranks(world, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


def local(profile: Profile, phase: Phase) -> dict[str, int]:
    """Return the self MACs of each module on this rank, without modules that have none."""
    macs = {}
    for row, module in profile.modules.items():
        self_macs = module.work(phase).self_macs
        if self_macs:
            macs[row] = self_macs
    return macs


def logical(profile: Profile, phase: Phase) -> dict[str, int | None]:
    """Return the self MACs of each module in the whole model, without modules that have none.

    The value of the root is the total of the whole model. `None` means that it is unknown.
    """
    macs = {}
    for row, module in profile.modules.items():
        self_macs = module.work(phase).self_logical_macs
        if row and self_macs != 0:
            macs[row] = self_macs
    macs[""] = profile.modules[""].work(phase).logical_macs
    return macs


def mesh() -> object:
    """Return a mesh of both ranks."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


class Layers(nn.Module):
    """Two layers to shard over ranks, and a head that each rank has completely."""

    def __init__(self, columns: int = wide) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, columns)
        self.down = nn.Linear(columns, hidden)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


up = tokens * hidden * wide
"""MACs of the layer `up`. The layer `down` has as many."""

head = tokens * hidden * 3
"""MACs of the head."""


def counted(model: nn.Module, **options: Any) -> Profile:
    """Count one pass forward and backward, with an input that requires a gradient."""
    return lflops.count(model, sequence(requires_grad=True), backward=True, **options)


def spread() -> Profile:
    """Count a model with `up` sharded by columns, `down` sharded by rows, and a complete head."""
    return counted(
        parallelize_module(Layers(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    )


def test_of_a_spread_layer_each_rank_has_half_and_tells_the_whole(two: Ranks) -> None:
    """Each rank executes half of a sharded layer, and finds the work of the whole layer.

    The head is not sharded. Backward has twice the work of forward.
    """
    for profile in two.run(spread):
        assert {"up": up // 2, "down": up // 2, "head": head} == local(profile, "forward")
        assert {"up": up, "down": up, "head": 2 * head} == local(profile, "backward")
        assert {"up": up, "down": up, "head": head, "": 2 * up + head} == logical(
            profile, "forward"
        )
        assert {"up": 2 * up, "down": 2 * up, "head": 2 * head, "": 4 * up + 2 * head} == logical(
            profile, "backward"
        )


def spread_without_gradients() -> Profile:
    """Count the sharded model in inference mode.

    In this mode, torch decomposes a linear layer only after it has seen that its tensors are
    sharded.
    """
    model = parallelize_module(
        Layers(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    with torch.inference_mode():
        return lflops.count(model, sequence())


def test_without_gradients_it_is_the_same(two: Ranks) -> None:
    """In inference mode, the work of forward is the same as with gradients."""
    for profile in two.run(spread_without_gradients):
        assert {"up": up // 2, "down": up // 2, "head": head} == local(profile, "forward")
        assert {"up": up, "down": up, "head": head, "": 2 * up + head} == logical(
            profile, "forward"
        )


def replicated() -> Profile:
    """Count a model whose parameters are distributed tensors, with a full copy on each rank."""
    return counted(distribute_module(Layers(), mesh(), None, _into, _out_of))


def _into(_: nn.Module, inputs: tuple[Tensor], __: object) -> tuple[Tensor]:
    return (distribute_tensor(inputs[0], mesh(), [Replicate()]),)  # type: ignore[arg-type]


def _out_of(_: nn.Module, outputs: Tensor, __: object) -> Tensor:
    return outputs.to_local()  # type: ignore[attr-defined, no-any-return]


def test_what_every_rank_does_is_once_in_the_model(two: Ranks) -> None:
    """If each rank does all of the work, the work of the whole model is that of one rank."""
    for profile in two.run(replicated):
        for phase in ("forward", "backward"):
            assert {"up", "down", "head"} == local(profile, phase).keys()
            assert {**local(profile, phase), "": sum(local(profile, phase).values())} == logical(
                profile, phase
            )


def five_columns() -> Profile:
    """Count a model whose first layer has five columns on four ranks, and a replicated output."""
    mesh = init_device_mesh("cpu", (4,))
    return counted(
        parallelize_module(Layers(5), mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    )


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[Profile]:
    """Return the profiles of four ranks with five columns."""
    with Ranks(4, tmp_path_factory.mktemp("four")) as four:
        return four.run(five_columns)


def test_uneven_and_empty_parts_are_told_as_the_whole(uneven: list[Profile]) -> None:
    """All ranks find the work of the whole layer, even if their parts differ in size.

    The four ranks have two, two, one and none of five columns.
    """
    a_column = tokens * hidden
    whole = 5 * a_column
    assert [2 * a_column, 2 * a_column, a_column, 0] == [
        profile.modules["up"].forward.self_macs for profile in uneven
    ]
    assert [4 * a_column, 4 * a_column, 2 * a_column, 0] == [
        profile.modules["up"].backward.self_macs for profile in uneven
    ]
    for profile in uneven:
        assert {"up": whole, "down": whole, "head": head, "": 2 * whole + head} == logical(
            profile, "forward"
        )
        assert {
            "up": 2 * whole,
            "down": 2 * whole,
            "head": 2 * head,
            "": 4 * whole + 2 * head,
        } == logical(profile, "backward")


def lines(profile: Profile) -> dict[str, str]:
    """Return the values of the summary by their labels."""
    return {
        line[:70].strip().removesuffix(":"): line[72:]
        for line in summary(analyze(profile)).splitlines()
        if line[70:72] == "  "
    }


MODELS_FLOPS = "fwd flops of model = 2 * fwd MACs of model"


def test_a_summary_tells_of_a_gpu_and_of_the_model(two: Ranks) -> None:
    """The summary has the work of a GPU and of the whole model.

    In forward, a GPU has 120 + 120 + 90 MACs and the model 240 + 240 + 90. Backward has twice as
    many.
    """
    told = lines(lflops.merge(two.run(spread)))
    assert ("330 MACs", "660") == (told["fwd MACs per GPU"], told["bwd MACs per GPU"])
    assert "570" == told["fwd MACs of the model, on this rank's batch"]
    assert "1.14 k" == told["bwd MACs of the model, on this rank's batch"]
    assert "1.14 K" == told[MODELS_FLOPS]


def test_a_summary_of_uneven_ranks_shows_the_one_with_most_to_do(uneven: list[Profile]) -> None:
    """The summary of uneven ranks shows the rank with the most work.

    In forward, this rank has 60 + 150 + 90 MACs and the model 150 + 150 + 90. In forward and
    backward together, the ranks have 900, 900, 810 and 720 MACs.
    """
    told = lines(lflops.merge(uneven))
    assert "300 MACs" == told["fwd MACs per GPU"]
    assert "390" == told["fwd MACs of the model, on this rank's batch"]
    assert "780" == told[MODELS_FLOPS]
    assert "3.33 k MACs in forward and backward, 720 to 900 per rank" == told["all ranks"]


def test_where_the_whole_is_not_known_the_summary_has_a_dash(two: Ranks) -> None:
    """If the work of the whole model is unknown, the summary has a dash for each of its values.

    The work of the GPU is known.
    """
    told = lines(lflops.merge(two.run(spread_attention)))
    assert UNKNOWN == told[MODELS_FLOPS]
    assert UNKNOWN == told["fwd MACs of the model, on this rank's batch"]
    assert UNKNOWN == told["bwd MACs of the model, on this rank's batch"]
    assert UNKNOWN != told["fwd MACs per GPU"]


class Recomputed(Layers):
    """The same layers in a checkpoint, so that backward computes them again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def spread_and_recomputed() -> Profile:
    """Count the sharded model with a checkpoint.

    Forward runs again within backward, except for the matmul of its last layer.
    """
    return counted(
        parallelize_module(
            Recomputed(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    )


def test_what_is_recomputed_is_told_too(two: Ranks) -> None:
    """The work of the whole model is also known for recomputation.

    Recomputation ends with the last tensor that backward needs, which is the input of the head.
    """
    for profile in two.run(spread_and_recomputed):
        assert {"up": up, "down": up, "": 2 * up} == {
            row: macs for row, macs in logical(profile, "recompute").items() if row != "head"
        }
        assert {"up": 2 * up, "down": 2 * up, "head": 2 * head, "": 4 * up + 2 * head} == logical(
            profile, "backward"
        )


def fully_sharded() -> Profile:
    """Count two steps of a model under FSDP.

    Each rank has its own batch. While it needs a weight, it has the whole weight.
    """
    model = Layers()
    for module in (model.up, model.down, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    with lflops.counting(model) as both:
        for _ in range(2):
            model(sequence(requires_grad=True)).sum().backward()
            optimizer.step()
    return both.profile


def test_of_sharded_data_the_whole_is_the_ranks_own_batch(two: Ranks) -> None:
    """Under FSDP, the work of the whole model is the work of a rank on its own batch.

    This also holds in the second step, after the optimizer has used every shard.
    """
    for profile in two.run(fully_sharded):
        assert {"up": 2 * up, "down": 2 * up, "head": 2 * head, "": 4 * up + 2 * head} == logical(
            profile, "forward"
        )
        for phase in PHASES:
            assert {**local(profile, phase), "": profile.modules[""].work(phase).macs} == logical(
                profile, phase
            )


class Attention(nn.Module):
    """Attention with four heads, or with the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, 4 * wide)
        self.k = nn.Linear(hidden, 4 * wide)
        self.v = nn.Linear(hidden, 4 * wide)
        self.out = nn.Linear(4 * wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, wide)).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        )
        return self.out(attended.transpose(1, 2).flatten(2))


def sharded_attention() -> nn.Module:
    """Return a model whose attention is sharded by heads.

    The weights of the layers are sharded tensors. The tensors between the layers are plain tensors.
    """
    plan = {
        "0.q": ColwiseParallel(),
        "0.k": ColwiseParallel(),
        "0.v": ColwiseParallel(),
        "0.out": RowwiseParallel(),
    }
    return parallelize_module(nn.Sequential(Attention(), Layers()), mesh(), plan)


def spread_attention() -> Profile:
    """Count the model with sharded attention."""
    return counted(sharded_attention())


def test_of_what_is_done_on_parts_that_do_not_say_so_nobody_knows_the_whole(two: Ranks) -> None:
    """The whole work of an operator on plain tensors that are parts is unknown.

    Here, it is the work of the attention itself, and so of all modules that contain it. The work of
    the sharded layers is known.
    """
    layer = tokens * hidden * 4 * wide
    known = {"0.q": layer, "0.k": layer, "0.v": layer, "0.out": layer}
    known |= {"1.up": up, "1.down": up, "1.head": head}
    for profile in two.run(spread_attention):
        assert 0 < profile.modules["0"].forward.self_macs
        for phase, times in (("forward", 1), ("backward", 2)):
            expected: dict[str, int | None] = {"0": None, "": None}
            for row, macs in known.items():
                expected[row] = times * macs
            assert expected == logical(profile, phase)
            assert times * (2 * up + head) == profile.modules["1"].work(phase).logical_macs


def attention_in_one_piece(batch: int = 2) -> Profile:
    """Count the unsharded model, as on a single rank."""
    x = torch.randn(batch, tokens // 2, hidden, requires_grad=True)
    return lflops.count(nn.Sequential(Attention(), Layers()), x, backward=True)


def spread_attention_told() -> Profile:
    """Count the model with sharded attention, and pass the profile of the unsharded model."""
    return counted(sharded_attention(), logical=attention_in_one_piece())


def test_a_count_in_one_piece_tells_what_the_parts_do_not(two: Ranks) -> None:
    """A profile of the unsharded model gives the work that the sharded tensors do not show.

    There are two sequences of three tokens, and four heads of width eight. So QKᵀ and PV have
    2 * 4 * 3 * 3 * 8 MACs each in the whole model; this rank executes half of them, as much as one
    of the two matmuls. The work of the other modules is as before.
    """
    layer = tokens * hidden * 4 * wide
    once = 2 * 4 * 3 * 3 * 8
    rows = {"0.q": layer, "0.k": layer, "0.v": layer, "0.out": layer}
    rows |= {"1.up": up, "1.down": up, "1.head": head}
    for profile in two.run(spread_attention_told):
        assert once == profile.modules["0"].forward.self_macs
        assert {"0": 2 * once, **rows, "": 2 * once + sum(rows.values())} == logical(
            profile, "forward"
        )
        whole = attention_in_one_piece()
        for phase in ("forward", "backward"):
            assert {row: each.work(phase).macs for row, each in whole.modules.items()} == {
                row: each.work(phase).logical_macs for row, each in profile.modules.items()
            }
        assert () == profile.notes


def spread_attention_mistold() -> Profile:
    """Count the model with sharded attention, and pass an unsharded profile of half the batch."""
    return counted(sharded_attention(), logical=attention_in_one_piece(1))


def test_a_count_of_another_batch_tells_nothing(two: Ranks) -> None:
    """A profile of another batch is ignored, and notes say where it differs from the known work."""
    for profile in two.run(spread_attention_mistold):
        root = profile.modules[""]
        assert (None, None) == (root.forward.logical_macs, root.backward.logical_macs)
        said = (
            "the profile passed as logical= is ignored, because it does not match this model or "
            "batch: the work differs in"
        )
        assert [f"{said} {phase} of 0.q" for phase in ("forward", "backward")] == [
            sentence(note) for note in profile.notes
        ]


@pytest.mark.parametrize("function", [lflops.count, lflops.measure])
def test_what_is_no_profile_is_refused(function: Any) -> None:
    """A value for `logical` that is no profile is an error."""
    with pytest.raises(
        CountError,
        match="logical=5: pass the Profile of the unsharded model on a rank's batch, or None",
    ):
        function(Layers(), sequence(), logical=5)
    with pytest.raises(CountError, match="counting: logical='no'"):
        lflops.counting(Layers(), logical="no")  # type: ignore[arg-type]


def spread_attention_unfollowed() -> Profile:
    """Count the model with sharded attention as if no tensor were known to be a part."""
    PartialTensors.in_any = lambda *_: False  # type: ignore[method-assign, assignment]
    return spread_attention()


def test_if_parts_were_not_followed_a_wrong_number_would_be_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """If partial tensors were not followed, half of the attention would count as all of it.

    This shows that the test with unknown work above would fail in this case.
    """
    with Ranks(world, tmp_path_factory.mktemp("unfollowed")) as ranks:
        for profile in ranks.run(spread_attention_unfollowed):
            attention = profile.modules["0"].forward
            assert attention.self_macs == attention.self_logical_macs


class OwnPart(nn.Module):
    """A module with a matmul on this rank's part of a weight, as in experts, and a whole layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(wide, hidden))
        self.whole = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        part = self.experts.to_local().bfloat16().float()  # type: ignore[operator]
        return self.whole(x) + (x @ part.t()).sum()


def own_part() -> Profile:
    """Count `OwnPart` with four rows of the weight on each rank."""
    model = OwnPart()
    experts = distribute_tensor(model.experts.detach(), mesh(), [Shard(0)])
    model.experts = nn.Parameter(experts)
    return counted(model)


def test_a_ranks_own_part_of_a_weight_says_nothing_of_the_whole(two: Ranks) -> None:
    """If an operator uses only this rank's part of a weight, its whole work is unknown.

    This also holds if the part was converted to another dtype. The work of the other layer is
    known.
    """
    for profile in two.run(own_part):
        assert tokens * hidden * wide // 2 == profile.modules[""].forward.self_macs
        assert {"whole": head, "": None} == logical(profile, "forward")
        assert {"whole": 2 * head, "": None} == logical(profile, "backward")
