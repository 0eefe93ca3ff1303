"""The work of the whole model, told by ranks that do parts of it.

From what an operator's tensors are parts of, or not at all.
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
"""Divides by two; `hidden` and `tokens` do not."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes in one group."""
    with Ranks(world, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


def local(profile: Profile, phase: Phase) -> dict[str, int]:
    """MACs of each row itself on this rank."""
    return {
        row: work.self_macs
        for row, module in profile.modules.items()
        if (work := module.work(phase)).self_macs
    }


def logical(profile: Profile, phase: Phase) -> dict[str, int | None]:
    """The same of the whole model, and at the root all of it."""
    rows = {
        row: module.work(phase).self_logical_macs for row, module in profile.modules.items() if row
    }
    return {row: macs for row, macs in rows.items() if macs != 0} | {
        "": profile.modules[""].work(phase).logical_macs
    }


def mesh() -> object:
    """Of both ranks."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


class Layers(nn.Module):
    """Two layers to spread over ranks, and a head that each rank has whole."""

    def __init__(self, columns: int = wide) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, columns)
        self.down = nn.Linear(columns, hidden)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


up, head = tokens * hidden * wide, tokens * hidden * 3
"""`down` has as many as `up`."""


def counted(model: nn.Module, **options: object) -> Profile:
    """One pass forward and backward, on an input that has a gradient."""
    return lflops.count(model, sequence(requires_grad=True), backward=True, **options)  # type: ignore[arg-type]


def spread() -> Profile:
    """By columns, then by rows, and the head not at all."""
    return counted(
        parallelize_module(Layers(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    )


def test_of_a_spread_layer_each_rank_has_half_and_tells_the_whole(two: Ranks) -> None:
    """Forward, and backward twice as much; of the head each rank has the whole."""
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
    """Under inference mode torch takes a linear layer apart only once its tensors are known to be spread."""
    model = parallelize_module(
        Layers(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    with torch.inference_mode():
        return lflops.count(model, sequence())


def test_without_gradients_it_is_the_same(two: Ranks) -> None:
    """Forward alone."""
    for profile in two.run(spread_without_gradients):
        assert {"up": up // 2, "down": up // 2, "head": head} == local(profile, "forward")
        assert {"up": up, "down": up, "head": head, "": 2 * up + head} == logical(
            profile, "forward"
        )


def replicated() -> Profile:
    """Every parameter is a tensor of both ranks, of which each has all."""
    return counted(distribute_module(Layers(), mesh(), None, _into, _out_of))


def _into(_: nn.Module, inputs: tuple[Tensor], __: object) -> tuple[Tensor]:
    return (distribute_tensor(inputs[0], mesh(), [Replicate()]),)  # type: ignore[arg-type]


def _out_of(_: nn.Module, outputs: Tensor, __: object) -> Tensor:
    return outputs.to_local()  # type: ignore[attr-defined, no-any-return]


def test_what_every_rank_does_is_once_in_the_model(two: Ranks) -> None:
    """Its own work is the whole, not twice that."""
    for profile in two.run(replicated):
        for phase in ("forward", "backward"):
            assert {"up", "down", "head"} == local(profile, phase).keys()
            assert {**local(profile, phase), "": sum(local(profile, phase).values())} == logical(
                profile, phase
            )


def five_columns() -> Profile:
    """The first layer has so many for four ranks; of its result each rank has all."""
    mesh = init_device_mesh("cpu", (4,))
    return counted(
        parallelize_module(Layers(5), mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    )


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[Profile]:
    """What each of four ranks has of five columns."""
    with Ranks(4, tmp_path_factory.mktemp("four")) as four:
        return four.run(five_columns)


def test_uneven_and_empty_parts_are_told_as_the_whole(uneven: list[Profile]) -> None:
    """Two, two, one and none of five columns."""
    a_column, whole, profiles = tokens * hidden, tokens * hidden * 5, uneven
    assert [2 * a_column, 2 * a_column, a_column, 0] == [
        profile.modules["up"].forward.self_macs for profile in profiles
    ]
    assert [4 * a_column, 4 * a_column, 2 * a_column, 0] == [
        profile.modules["up"].backward.self_macs for profile in profiles
    ]
    for profile in profiles:
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
    """The summary's figures by their labels."""
    return {
        line[:70].strip().removesuffix(":"): line[72:]
        for line in summary(analyze(profile)).splitlines()
        if line[70:72] == "  "
    }


MODELS_FLOPS = "fwd flops of model = 2 * fwd MACs of model"


def test_a_summary_tells_of_a_gpu_and_of_the_model(two: Ranks) -> None:
    """A GPU has 120 + 120 + 90 MACs forward and twice that backward, the model 240 + 240 + 90."""
    told = lines(lflops.merge(two.run(spread)))
    assert ("330 MACs", "660") == (told["fwd MACs per GPU"], told["bwd MACs per GPU"])
    assert ("570", "1.14 k") == tuple(
        told[f"{phase} MACs of model, on this rank's batch"] for phase in ("fwd", "bwd")
    )
    assert "1.14 K" == told[MODELS_FLOPS]


def test_a_summary_of_uneven_ranks_shows_the_one_with_most_to_do(uneven: list[Profile]) -> None:
    """60 + 150 + 90 MACs forward, the model 150 + 150 + 90.

    Both ways the ranks have 900, 900, 810 and 720.
    """
    told = lines(lflops.merge(uneven))
    assert ("300 MACs", "390", "780") == (
        told["fwd MACs per GPU"],
        told["fwd MACs of model, on this rank's batch"],
        told[MODELS_FLOPS],
    )
    assert "3.33 k MACs forward and backward, 720 to 900 on each" == told["all ranks"]


def test_where_the_whole_is_not_known_the_summary_has_a_dash(two: Ranks) -> None:
    """Of each phase of the model; of the GPU it is known."""
    told = lines(lflops.merge(two.run(spread_attention)))
    assert [UNKNOWN] * 3 == [
        told[MODELS_FLOPS],
        *(told[f"{phase} MACs of model, on this rank's batch"] for phase in ("fwd", "bwd")),
    ]
    assert UNKNOWN != told["fwd MACs per GPU"]


class Recomputed(Layers):
    """Of which nothing is kept for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def spread_and_recomputed() -> Profile:
    """The forward runs again within backward, but for its last layer's product."""
    return counted(
        parallelize_module(
            Recomputed(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    )


def test_what_is_recomputed_is_told_too(two: Ranks) -> None:
    """Recomputation ends when the last tensor that backward needs is there.

    That is the head's input.
    """
    for profile in two.run(spread_and_recomputed):
        assert {"up": up, "down": up, "": 2 * up} == {
            row: macs for row, macs in logical(profile, "recompute").items() if row != "head"
        }
        assert {"up": 2 * up, "down": 2 * up, "head": 2 * head, "": 4 * up + 2 * head} == logical(
            profile, "backward"
        )


def fully_sharded() -> Profile:
    """Each rank has a batch of its own and, while it needs them, whole weights."""
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
    """Of two steps, behind the first of which every shard was seen by the optimizer."""
    for profile in two.run(fully_sharded):
        assert {"up": 2 * up, "down": 2 * up, "head": 2 * head, "": 4 * up + 2 * head} == logical(
            profile, "forward"
        )
        for phase in PHASES:
            assert {**local(profile, phase), "": profile.modules[""].work(phase).macs} == logical(
                profile, phase
            )


class Attention(nn.Module):
    """Four heads, or as many of them as the rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, 4 * wide) for _ in range(3))
        self.out = nn.Linear(4 * wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, wide)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def spread_attention() -> Profile:
    """As it is done everywhere.

    The layers know that they are spread, what is between them does not.
    """
    plan = {**dict.fromkeys(("0.q", "0.k", "0.v"), ColwiseParallel()), "0.out": RowwiseParallel()}
    return counted(parallelize_module(nn.Sequential(Attention(), Layers()), mesh(), plan))


def test_of_what_is_done_on_parts_that_do_not_say_so_nobody_knows_the_whole(two: Ranks) -> None:
    """Neither of the attention itself, nor of anything that it is in.

    Of the layers around it, it is known.
    """
    layer = tokens * hidden * 4 * wide
    for profile in two.run(spread_attention):
        assert 0 < profile.modules["0"].forward.self_macs
        known = {f"0.{name}": layer for name in ("q", "k", "v", "out")} | {
            "1.up": up,
            "1.down": up,
            "1.head": head,
        }
        for phase, times in (("forward", 1), ("backward", 2)):
            assert {
                "0": None,
                "": None,
                **{row: times * macs for row, macs in known.items()},
            } == logical(profile, phase)
            assert times * (2 * up + head) == profile.modules["1"].work(phase).logical_macs


def attention_in_one_piece(batch: int = 2) -> Profile:
    """What a single rank would do."""
    x = torch.randn(batch, tokens // 2, hidden, requires_grad=True)
    return lflops.count(nn.Sequential(Attention(), Layers()), x, backward=True)


def spread_attention_told() -> Profile:
    """Beside a count of the whole."""
    plan = {**dict.fromkeys(("0.q", "0.k", "0.v"), ColwiseParallel()), "0.out": RowwiseParallel()}
    return counted(
        parallelize_module(nn.Sequential(Attention(), Layers()), mesh(), plan),
        logical=attention_in_one_piece(),
    )


def test_a_count_in_one_piece_tells_what_the_parts_do_not(two: Ranks) -> None:
    """Two sequences of three tokens, four heads of eight.

    QKᵀ and PV have 2 * 4 * 3 * 3 * 8 MACs each; no other row's are changed.
    """
    layer, once = tokens * hidden * 4 * wide, 2 * 4 * 3 * 3 * 8
    rows = {f"0.{name}": layer for name in ("q", "k", "v", "out")} | {
        "1.up": up,
        "1.down": up,
        "1.head": head,
    }
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
    """Beside a count of half the batch."""
    plan = {**dict.fromkeys(("0.q", "0.k", "0.v"), ColwiseParallel()), "0.out": RowwiseParallel()}
    return counted(
        parallelize_module(nn.Sequential(Attention(), Layers()), mesh(), plan),
        logical=attention_in_one_piece(1),
    )


def test_a_count_of_another_batch_tells_nothing(two: Ranks) -> None:
    """A note says where it differs from what is known."""
    for profile in two.run(spread_attention_mistold):
        assert (None, None) == tuple(
            profile.modules[""].work(phase).logical_macs for phase in ("forward", "backward")
        )
        said = "the profile passed as logical= is ignored, because it does not match this model or batch: it differs in"
        assert [f"{said} {phase} of 0.q" for phase in ("forward", "backward")] == [
            sentence(note) for note in profile.notes
        ]


@pytest.mark.parametrize("function", [lflops.count, lflops.measure])
def test_what_is_no_profile_is_refused(function: Any) -> None:
    """Before anything runs."""
    with pytest.raises(
        CountError,
        match="logical=5: pass the Profile of the unsharded model on a rank's batch, or None",
    ):
        function(Layers(), sequence(), logical=5)
    with pytest.raises(CountError, match="counting: logical='no'"):
        lflops.counting(Layers(), logical="no")  # type: ignore[arg-type]


def spread_attention_unfollowed() -> Profile:
    """As if no part were known for one."""
    PartialTensors.in_any = lambda *_: False  # type: ignore[method-assign, assignment]
    return spread_attention()


def test_if_parts_were_not_followed_a_wrong_number_would_be_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The check above can fail: half of the attention would be given for all of it."""
    with Ranks(world, tmp_path_factory.mktemp("unfollowed")) as ranks:
        for profile in ranks.run(spread_attention_unfollowed):
            assert (
                profile.modules["0"].forward.self_macs
                == profile.modules["0"].forward.self_logical_macs
            )


class OwnPart(nn.Module):
    """Multiplies with what the rank has of a weight, as layers of experts do, and then with all of one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(wide, hidden))
        self.whole = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + (x @ self.experts.to_local().bfloat16().float().t()).sum()  # type: ignore[operator]


def own_part() -> Profile:
    """Four rows of the weight on each rank."""
    model = OwnPart()
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh(), [Shard(0)]))  # type: ignore[arg-type]
    return counted(model)


def test_a_ranks_own_part_of_a_weight_says_nothing_of_the_whole(two: Ranks) -> None:
    """Also once it is another dtype; of what has all of its weight it is known."""
    for profile in two.run(own_part):
        assert tokens * hidden * wide // 2 == profile.modules[""].forward.self_macs
        assert {"whole": head, "": None} == logical(profile, "forward")
        assert {"whole": 2 * head, "": None} == logical(profile, "backward")
