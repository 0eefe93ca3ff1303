"""Test plans of small models.

Memory is compared with whole estimates; orders and numbers are worked out by hand.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import lflops
from lflops.cli.main import main
from lflops.estimation.changes import POLICIES, Changes, Policy, mixed_precision
from lflops.estimation.estimate import Estimator, Subject, subject_of
from lflops.estimation.planning.plan import (
    Configuration,
    Plan,
    _corners,
    _is_tie,
    _ranked,
    _Search,
    _sharded,
    name_of,
    plan,
)
from lflops.estimation.planning.work_sheets import Case, WorkSheets, moved, peak_of
from lflops.estimation.prediction import Prediction, predict
from lflops.hardware.chips import Hardware, named
from lflops.memory.peak import CONTEXT_BYTES, CUBLAS_BYTES, NCCL_BYTES, USABLE
from tests.estimation.test_prediction import RATES, chip as round_chip, linear

# A step of this size takes longer on the chip than its launches take on the host.
WIDTH = 2048
TOKENS = 1024

# More blocks than a plan estimates.
BLOCKS = 12

# Fewer layers than a pipeline needs. With so many, the state of a training run needs more bytes
# than its activations.
LAYERS = 8

H100 = named("H100 SXM")

FUSED = partial(torch.optim.AdamW, fused=True)
"""An optimizer with one operator per step, so it is estimated faster than one with `foreach`."""


class Block(nn.Module):
    """Two layers beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Without biases, FSDP2 shards and gathers half as many parameters.
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between two layers."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 8, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Call all layers, one after the other."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        # The ReLU is only here because FSDP2 warns if the output is a view.
        return torch.relu(self.last(x))


def build(samples: int) -> Any:
    """Return the model, a batch and a loss."""
    return Model(), torch.zeros(samples, TOKENS, WIDTH), lambda out: out.square().mean()


def build_layers(samples: int) -> Any:
    """Return a model of a few layers, a batch and a loss.

    Nothing in this model can be checkpointed, so a plan needs few estimates.
    """
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    # The ReLU is only here because FSDP2 warns if the output is a view.
    model = nn.Sequential(*layers, nn.ReLU())
    return model, torch.zeros(samples, TOKENS, WIDTH), lambda out: out.square().mean()


def small(memory: float) -> Hardware:
    """Return an H100 with less memory."""
    return dataclasses.replace(H100, memory_bytes=int(memory), usable_bytes=None)


@cache
def planned_layers() -> Plan:
    """Plan the model of a few layers on two GPUs of one host."""
    return plan(build_layers, 4, gpus=2, hardware="H100 SXM", optimizer=FUSED)


def estimator(mesh: Mapping[str, int], precision: str = "bf16") -> Estimator:
    """Return an estimator with the settings that a plan uses."""
    return Estimator(
        caller="test",
        backward=True,
        optimizer="adamw",
        hardware=H100,
        mesh=mesh,
        mixed=mixed_precision(precision, "fp32") if "data" in mesh else None,
    )


@cache
def sheets() -> WorkSheets:
    """Return the work sheets of the model. With DDP and FSDP2, it uses mixed precision.

    All tests share them, so each case is estimated once.
    """

    def make(samples: int, mesh: Mapping[str, int]) -> Subject:
        subject = subject_of("test", build(samples))
        if set(mesh) == {"replica"}:
            return Changes(precision="bf16-mixed").applied("test", subject)
        # Without a mesh, the model is in single precision, and FSDP2 casts by itself.
        return subject

    return WorkSheets(estimator, make)


@cache
def planned() -> Plan:
    """Plan two GPUs with 16 samples, from the work sheets that all tests share."""
    search = _Search(sheets(), H100, gpus=2, batch=16, network=None, per_host=1, gathered=0.5)
    return search.plan()


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "mesh", [{}, {"replica": 2}, {"data": 4}, {"replica": 2, "data": 2}], ids=name_of
)
def test_lines_through_small_estimates_reach_the_peak_and_the_time_of_a_whole_one(
    mesh: Mapping[str, int], policy: Policy
) -> None:
    """Extrapolated bytes are within 0.5 % of a whole estimate, and the time is within 0.1 %.

    Five samples of 12 blocks are extrapolated from one and two samples of four and five blocks.
    """
    tried = sheets()
    corner = {"replica": 2, **mesh} if "data" in mesh else mesh
    one = tried.sheet(Case(policy, 1, corner))
    two = tried.sheet(Case(policy, 2, corner))
    sheet = moved(one, one, two, 4.0)
    whole = tried.whole(Case(policy, 5, mesh))
    assert whole.memory is not None
    assert whole.memory.peak_bytes == pytest.approx(peak_of(sheet), rel=0.005)
    if "data" in mesh:
        found, expected = predict(tried.profile(sheet, mesh), H100), predict(whole, H100)
        assert found is not None
        assert expected is not None
        assert expected.seconds == pytest.approx(found.seconds, rel=0.001)


@pytest.mark.parametrize("mesh", [{}, {"data": 4}], ids=name_of)
def test_gradients_of_earlier_micro_batches_stay_in_memory(mesh: Mapping[str, int]) -> None:
    """The peak with accumulated gradients is the peak of two micro batches, or up to 2 % higher.

    A custom step runs the two micro batches in one estimate.
    """

    def twice(model: nn.Module, x: Tensor) -> None:
        for _ in range(2):
            model(x).square().mean().backward()

    def make() -> Subject:
        model, x, _ = build(3)
        return Subject(model, (x,), {}, None, step=twice)

    tried = sheets()
    sheet = tried.sheet(Case("none", 3, mesh))
    whole = estimator(mesh).run(make)
    assert whole.memory is not None
    assert (
        0.98 * peak_of(sheet, accumulates=True)
        <= whole.memory.peak_bytes
        <= peak_of(sheet, accumulates=True)
    )
    assert peak_of(sheet, accumulates=True) > 1.02 * peak_of(sheet)


def test_of_two_configurations_that_differ_in_recomputing_alone_the_one_without_is_faster() -> None:
    """Without recomputation a configuration does less work, so it is faster."""
    seconds = {
        (each.name, each.micro_batch, each.checkpointing): each.predicted.seconds
        for each in planned().configurations
        if each.predicted
    }
    compared = 0
    for (name, micro_batch, policy), full in seconds.items():
        if policy == "full":
            assert seconds[name, micro_batch, "none"] < full
            compared += 1
    assert compared > 0


def test_the_first_is_estimated_as_a_whole_and_fits() -> None:
    """The memory of the first configuration comes from a whole estimate, and fits."""
    first, profile = planned().configurations[0], planned().profile
    assert profile is not None
    assert profile.memory is not None
    assert first.memory_fit.tensor_bytes == profile.memory.peak_bytes
    assert (first.place, first.memory_fit.verdict) == (1, "fits")
    assert first.micro_batch * first.accumulation * 2 == 16
    assert "of exposed communication" in first.reason or "model's work" in first.reason


def test_what_does_not_fit_is_left_out_with_the_bytes_that_it_needs() -> None:
    """DDP is left out with a reason if its state alone does not fit.

    On each rank DDP holds parameters, gradients and AdamW's two moments: four copies of the
    parameters in single precision.
    """
    weights = 16 * LAYERS * WIDTH * WIDTH
    besides = CONTEXT_BYTES + 2 * CUBLAS_BYTES + NCCL_BYTES
    chip = small((weights + besides) / USABLE)
    found = plan(build_layers, 4, gpus=2, hardware=chip, optimizer=FUSED)
    assert "parameters, gradients and optimizer state alone need" in found.left_out["DDP 2"]
    assert "FSDP2 2" in {each.name for each in (*found.configurations, *found.not_predicted)}
    more = planned_layers()
    assert "DDP 2" in {each.name for each in (*more.configurations, *more.not_predicted)}


def test_nothing_fits_into_no_memory() -> None:
    """If no mesh fits, the plan is empty, and each mesh is left out with a reason."""
    found = plan(build_layers, 8, gpus=2, hardware=small(1e9), devices_per_host=1)
    assert () == found.configurations
    assert () == found.not_predicted
    assert found.profile is None
    assert {"DDP 2", "FSDP2 2"} <= found.left_out.keys()


def predicted(low: float, seconds: float, high: float) -> Prediction:
    """Return a prediction with this interval."""
    return Prediction(
        hardware="", seconds=seconds, low=low, high=high, by_kind={}, by_phase={}, by_module={}
    )


def test_a_tie_shares_four_fifths_of_the_interval() -> None:
    """Two predictions tie if their intervals share at least four fifths.

    An interval from 10 s to 20 s ties with one that begins at 12 s, but not with one that begins at
    13 s.
    """
    assert _is_tie(predicted(10, 15, 20), predicted(12, 16, 22))
    assert not _is_tie(predicted(10, 15, 20), predicted(13, 16, 23))


def test_ties_share_a_place_and_the_next_one_counts_them() -> None:
    """With two ties in first place, the places are 1, 1 and 3."""
    first = planned().configurations[0]
    times = [predicted(10, 15, 20), predicted(15, 22, 30), predicted(10.5, 15.5, 20.5)]
    ranked = _ranked([replace(first, predicted=each) for each in times])
    assert [(15, 1), (15.5, 1), (22, 3)] == [
        (each.predicted.seconds, each.place) for each in ranked if each.predicted
    ]


def test_another_chip_has_lower_bounds_and_the_reason() -> None:
    """A chip that was not fitted gets lower bounds of the time instead of predictions."""
    found = plan(
        build_layers,
        4,
        gpus=1,
        hardware=Hardware("other", {"fp32": 1e14, "bf16": 1e14}, 1e12, memory_bytes=80 * 10**9),
    )
    assert () == found.configurations
    for each in found.not_predicted:
        assert each.why_not
        assert "the prediction does not cover the chip other" in each.why_not
        assert each.least_seconds


def test_more_micro_batches_repeat_all_but_the_optimizer() -> None:
    """Three micro batches of a layer without an optimizer need three times the time of one."""
    chip = round_chip(peak=1e12)
    once = predict(linear(), chip, rates=RATES, accumulation=1)
    thrice = predict(linear(), chip, rates=RATES, accumulation=3)
    assert once is not None
    assert thrice is not None
    assert thrice.seconds == pytest.approx(3 * once.seconds)


def test_the_shell_draws_the_plan(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints the plan as text or as JSON, and saves the profile to a separate file."""
    monkeypatch.setattr("lflops.estimation.planning.plan.plan", lambda *_, **__: planned())
    monkeypatch.chdir(tmp_path)
    command = ["plan", f"{__name__}:build", "--gpus", "2", "--hardware", "H100 SXM"]
    assert 0 == main([*command, "--save", "first.json"])
    drawn = capfdbinary.readouterr().out.decode()
    assert "2 GPUs (H100 SXM), 16 samples per step" in drawn
    assert all(
        each in drawn
        for each in (
            "samples/s",
            "FSDP2 2",
            "interval",
            "Configurations that tie have the same place",
            "Plans contain no expert parallelism",
        )
    )
    assert planned().profile == lflops.load("first.json")
    assert 0 == main([*command, "--json"])
    found = json.loads(capfdbinary.readouterr().out)
    assert (found["configurations"][0]["place"], found["tokens_of_a_sample"]) == (1, None)
    assert "profile" not in found


class Planned(Model):
    """A model with a tensor-parallel plan."""

    tp_plan: Mapping[str, str] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_tensor_parallelism_has_a_lower_bound_and_its_collectives() -> None:
    """Tensor parallelism gets a lower bound that includes the time of its collectives.

    On two ranks in bfloat16, each block reduces its output in forward and the gradient of its input
    in backward. An all-reduce sends half of the bytes twice.
    """
    wanted = ({"data": 2, "tensor": 2}, "none", 1)
    row = next(
        each
        for each in planned_on_four()
        if (each.mesh, each.checkpointing, each.accumulation) == wanted
    )
    assert H100.link_bytes_per_second is not None
    seconds = BLOCKS * 2 * row.micro_batch * TOKENS * WIDTH * 2 / H100.link_bytes_per_second
    assert row.least_seconds is not None
    assert row.least_seconds > row.tensor_seconds == pytest.approx(seconds, rel=0.01)
    assert lflops.units.duration(seconds) in row.reason
    assert re.search(r"the prediction does not cover the collective \w+", row.why_not or "")


def test_pipelines_have_a_bound_with_their_bubble_and_the_reason() -> None:
    """Pipelines get a lower bound that includes the pipeline bubble.

    With stages of equal work, M micro batches and P stages, P - 1 of M + P - 1 slots are the
    bubble. Pipelines are planned together with FSDP2. On two GPUs, they are also planned with all
    kinds of checkpointing.
    """
    rows = [
        each for each in (*planned_on_four(), *planned().not_predicted) if "pipeline" in each.mesh
    ]
    assert {"PP 2 x FSDP2 2", "PP 4 x FSDP2 1", "PP 2 x FSDP2 1"} == {
        each.name for each in rows if "tensor" not in each.mesh
    }
    assert set(POLICIES) == {each.checkpointing for each in rows}
    assert all(
        each.predicted is None
        and each.why_not == "the prediction does not cover communication between pipeline stages"
        for each in rows
    )
    for each in rows:
        stages = each.mesh["pipeline"]
        least_seconds = each.least_seconds or 0.0
        micro_batch = each.bubble_seconds / (stages - 1)
        # The rest of the bound is the optimizer step.
        optimizer = least_seconds - micro_batch * (each.accumulation + stages - 1)
        assert 0 < optimizer < 0.2 * least_seconds
        assert "of pipeline bubble" in each.reason


@cache
def planned_on_four() -> tuple[Configuration, ...]:
    """Return the configurations of four GPUs that are not predicted.

    The model has a tensor-parallel plan, and its blocks are not checkpointed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lflops.estimation.planning.plan.POLICIES", ("none",))
        found = plan(
            lambda samples: (Planned(), *build(samples)[1:]),
            4,
            gpus=4,
            hardware="H100 SXM",
            optimizer=FUSED,
            devices_per_host=2,
        )
    return found.not_predicted


def test_hsdp_and_pipelines_go_with_tensor_parallelism() -> None:
    """Tensor parallelism is combined with FSDP2, HSDP and pipelines.

    Each mesh uses all GPUs.
    """
    meshes = _sharded(8, [2], [1, 2])
    assert {"FSDP2 4 x TP 2", "HSDP 2x2 x TP 2", "PP 2 x FSDP2 2 x TP 2"} == set(
        map(name_of, meshes)
    )
    assert {"PP 2 x FSDP2 1 x TP 2", "FSDP2 2 x TP 2"} == set(
        map(name_of, _sharded(4, [2], [1, 2]))
    )


def test_the_plane_through_three_meshes_reaches_the_bytes_of_a_whole_one() -> None:
    """The peak of a mesh is extrapolated from three other meshes, within 1 % of a whole estimate.

    The extrapolated mesh has two replicas of four shards and two tensor-parallel ranks, with five
    samples. The other meshes have two or eight shards, and two or four tensor-parallel ranks.
    """

    def make(samples: int, _: Mapping[str, int]) -> Subject:
        return subject_of("test", (Planned(), *build(samples)[1:]))

    tried = WorkSheets(estimator, make)
    search = _Search(tried, H100, gpus=16, batch=40, network=None, per_host=4, gathered=0.5)
    mesh = {"replica": 2, "data": 4, "tensor": 2}
    peak = search._peak(_corners(_sharded(16, [2, 4], [1])), "none", 5, mesh, accumulates=False)
    memory = tried.whole(Case("none", 5, mesh)).memory
    assert memory is not None
    assert memory.peak_bytes == pytest.approx(peak, rel=0.01)


def test_a_degree_that_heads_do_not_divide_is_left_out_in_a_sentence_before_an_estimate() -> None:
    """Six attention heads can be split over two ranks, but not over four.

    The degree 4 is left out with a sentence, before any estimate.
    """
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=6)

    def headed(samples: int) -> Any:
        model = Planned(blocks=1)
        model.config = config  # type: ignore[assignment]
        return model, *build(samples)[1:]

    tried = WorkSheets(
        estimator,
        lambda samples, _: subject_of("test", headed(samples)),
    )
    tried.sheet(Case("none", 1, {}))
    search = _Search(tried, H100, gpus=4, batch=8, network=None, per_host=4, gathered=0.5)
    assert [1, 2] == list(filter(search._divides, [1, 2, 4]))
    assert search._left_out == {
        "TP 4": "the model's 6 attention heads cannot be split over 4 ranks"
    }


def test_without_a_plan_for_it_tensor_parallelism_is_left_out() -> None:
    """Without a `tp_plan` tensor parallelism is left out.

    Pipelines are left out if the model has too few blocks.
    """
    assert planned_layers().left_out == {
        "TP 2": "the model has no tp_plan",
        "PP 2": "a pipeline needs at least 10 equal blocks",
    }


def test_the_shell_names_a_wrong_number(capfd: pytest.CaptureFixture[str]) -> None:
    """The error contains the wrong value and the accepted values."""
    assert 2 == main(["plan", f"{__name__}:build", "--gpus", "0", "--hardware", "H100 SXM"])
    assert "plan: gpus=0: pass a whole number, at least 1" in capfd.readouterr().err
    assert 2 == main(["plan", f"{__name__}:build", "--gpus", "x", "--hardware", "H100 SXM"])
    assert "(lflops plan --help)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "plan: batch=0: pass a whole number, at least 1"),
        ({"gpus": 2.5}, "plan: gpus=2.5: pass a whole number, at least 1"),
        (
            {"batch": 3, "devices_per_host": 1},
            "plan: batch=3: no mesh of 4 GPUs can divide this batch evenly: pass a multiple of 4",
        ),
        ({"precision": "half"}, "plan: precision='half': pass one of bf16-mixed"),
        ({"optimizer": None}, "plan: optimizer=None: pass a name"),
        ({"optimizer": "adamx"}, "plan: optimizer='adamx': pass one of"),
        ({"build": 3}, "plan: build=3: pass a function"),
        (
            {"hardware": Hardware("bare", {"bf16": 1e12}, 1e12)},
            "plan: hardware='bare': the memory of this chip is unknown",
        ),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(given: Any, message: str) -> None:
    """The error contains the wrong value and the accepted values."""
    arguments = {"build": build, "batch": 8, "gpus": 4, "hardware": "H100 SXM"} | given
    with pytest.raises(lflops.CountError) as error:
        plan(arguments.pop("build"), arguments.pop("batch"), **arguments)
    assert message in str(error.value)


def test_a_configuration_is_a_value() -> None:
    """The prediction of a configuration has no times of modules, so its JSON stays small."""
    first: Configuration = planned().configurations[0]
    assert first.predicted is not None
    assert {} == first.predicted.by_module
