"""Plans of small models.

Their memory against whole estimates, and orders and figures that follow by hand.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import lflops
from lflops.cli.main import main
from lflops.estimation.changes import Policy, mixed_precision
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

WIDTH, TOKENS, BLOCKS = (
    2048,
    1024,
    12,
)  # of work that takes a chip longer than its host, and of more blocks than are estimated
H100 = named("H100 SXM")


class Block(nn.Module):
    """Two layers beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input and what the layers make of it."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between two layers."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """All, one after the other."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.last(x))  # FSDP2 warns of a view


def build(samples: int) -> Any:
    """The model, its batch and a loss."""
    return Model(), torch.zeros(samples, TOKENS, WIDTH), lambda out: out.square().mean()


def small(memory: float) -> Hardware:
    """An H100 with less memory."""
    return dataclasses.replace(H100, memory_bytes=int(memory), usable_bytes=None)


@cache
def planned() -> Plan:
    """Two GPUs with 16 samples."""
    return plan(build, 16, gpus=2, hardware="H100 SXM", devices_per_host=1)


def estimator(mesh: Mapping[str, int], precision: str = "bf16") -> Estimator:
    """As the plan estimates."""
    return Estimator(
        caller="test",
        backward=True,
        optimizer="adamw",
        hardware=H100,
        mesh=mesh,
        mixed=mixed_precision(precision, "fp32") if "data" in mesh else None,
    )


def sheets() -> WorkSheets:
    """Of the model, in single precision without FSDP2."""
    return WorkSheets(
        estimator,
        lambda samples, _: subject_of("test", build(samples)),
    )


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "mesh", [{}, {"replica": 4}, {"data": 4}, {"replica": 2, "data": 2}], ids=name_of
)
def test_lines_through_small_estimates_reach_the_peak_and_the_time_of_a_whole_one(
    mesh: Mapping[str, int], policy: Policy
) -> None:
    """Five samples of 12 blocks, from one and two samples of four and five.

    The bytes within 0.5 %, the time within 0.1 %.
    """
    tried = sheets()
    corner = {"replica": 2, **mesh} if "data" in mesh else mesh
    one, two = (tried.sheet(Case(policy, samples, corner)) for samples in (1, 2))
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
    """Two micro batches in a step of the estimate's own have that peak, or up to 2 % less."""

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
    """It does the same and less."""
    seconds = {
        (each.name, each.micro_batch, each.checkpointing): each.predicted.seconds
        for each in planned().configurations
        if each.predicted
    }
    pairs = [
        (seconds[name, micro, "none"], full)
        for (name, micro, policy), full in seconds.items()
        if policy == "full"
    ]
    assert pairs
    assert all(none < full for none, full in pairs)


def test_the_first_is_estimated_as_a_whole_and_fits() -> None:
    """Its memory is that of `lflops.estimate`."""
    first, profile = planned().configurations[0], planned().profile
    assert profile is not None
    assert profile.memory is not None
    assert first.memory_fit.tensor_bytes == profile.memory.peak_bytes
    assert (first.place, first.memory_fit.verdict) == (1, "fits")
    assert first.micro_batch * first.accumulation * 2 == 16
    assert "of exposed communication" in first.reason or "model's work" in first.reason


def test_what_does_not_fit_is_left_out_with_the_bytes_that_it_needs() -> None:
    """DDP holds four copies of the parameters in single precision.

    They, their gradients and AdamW's two moments.
    """
    parameters = WIDTH * WIDTH + WIDTH + 8 * WIDTH + 8 + BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
    weights = 16 * parameters
    besides = CONTEXT_BYTES + 2 * CUBLAS_BYTES + NCCL_BYTES
    found = plan(build, 4, gpus=2, hardware=small((weights + besides) / USABLE), devices_per_host=1)
    assert "parameters, gradients and optimizer alone need" in found.left_out["DDP 2"]
    assert "FSDP2 2" in {each.name for each in (*found.configurations, *found.not_predicted)}
    assert "DDP 2" in {each.name for each in planned().configurations}


def test_nothing_fits_into_no_memory() -> None:
    """And each mesh says why."""
    found = plan(build, 8, gpus=2, hardware=small(3e9), devices_per_host=1)
    assert ((), (), None) == (found.configurations, found.not_predicted, found.profile)
    assert {"DDP 2", "FSDP2 2"} <= found.left_out.keys()


def predicted(low: float, seconds: float, high: float) -> Prediction:
    """One with such an interval."""
    return Prediction(
        hardware="", seconds=seconds, low=low, high=high, by_kind={}, by_phase={}, by_module={}
    )


def test_a_tie_shares_four_fifths_of_the_interval() -> None:
    """Of 10 s to 20 s another may begin at 12 s, and not at 13 s."""
    assert _is_tie(predicted(10, 15, 20), predicted(12, 16, 22))
    assert not _is_tie(predicted(10, 15, 20), predicted(13, 16, 23))


def test_ties_share_a_place_and_the_next_one_counts_them() -> None:
    """1, 1, 3."""
    first = planned().configurations[0]
    times = [predicted(10, 15, 20), predicted(15, 22, 30), predicted(10.5, 15.5, 20.5)]
    ranked = _ranked([replace(first, predicted=each) for each in times])
    assert [(15, 1), (15.5, 1), (22, 3)] == [
        (each.predicted.seconds, each.place) for each in ranked if each.predicted
    ]


def test_another_chip_has_lower_bounds_and_the_reason() -> None:
    """Nothing was fitted on it."""
    found = plan(
        build,
        4,
        gpus=1,
        hardware=Hardware("other", {"fp32": 1e14, "bf16": 1e14}, 1e12, memory_bytes=80 * 10**9),
    )
    assert () == found.configurations
    assert all(
        each.why_not
        and "the prediction does not cover other" in each.why_not
        and each.least_seconds
        for each in found.not_predicted
    )


def test_more_micro_batches_repeat_all_but_the_optimizer() -> None:
    """Of a layer without an optimizer three take three times as long."""
    once, thrice = (
        predict(linear(), round_chip(peak=1e12), rates=RATES, accumulation=number)
        for number in (1, 3)
    )
    assert once is not None
    assert thrice is not None
    assert thrice.seconds == pytest.approx(3 * once.seconds)


def test_the_shell_draws_the_plan(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints it as JSON, without the profile, which is a file of its own."""
    monkeypatch.setattr("lflops.estimation.planning.plan.plan", lambda *_, **__: planned())
    monkeypatch.chdir(tmp_path)
    command = ["plan", f"{__name__}:build", "--gpus", "2", "--hardware", "H100 SXM"]
    assert 0 == main([*command, "--save", "first.json"])
    drawn = capfdbinary.readouterr().out.decode()
    assert "2 GPUs of H100 SXM, 16 samples a step" in drawn
    assert all(
        each in drawn
        for each in (
            "samples/s",
            "FSDP2 2",
            "interval",
            "Configurations that tie have the same place",
            "Expert parallelism is not planned",
        )
    )
    assert planned().profile == lflops.load("first.json")
    assert 0 == main([*command, "--json"])
    found = json.loads(capfdbinary.readouterr().out)
    assert (found["configurations"][0]["place"], found["tokens_of_a_sample"]) == (1, None)
    assert "profile" not in found


class Planned(Model):
    """A model that says how tensor parallelism divides it."""

    tp_plan: Mapping[str, str] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_tensor_parallelism_has_a_lower_bound_and_its_collectives() -> None:
    """Of 2 ranks, in bfloat16.

    Each block's output is reduced in forward and its input's gradient in backward, a half of it
    twice over.
    """
    row = next(
        each
        for each in planned_on_four()
        if (each.mesh, each.checkpointing, each.accumulation)
        == ({"data": 2, "tensor": 2}, "none", 1)
    )
    assert H100.link_bytes_per_second is not None
    seconds = BLOCKS * 2 * row.micro_batch * TOKENS * WIDTH * 2 / H100.link_bytes_per_second
    assert row.least_seconds is not None
    assert row.least_seconds > row.tensor_seconds == pytest.approx(seconds, rel=0.01)
    assert lflops.units.duration(seconds) in row.reason
    assert re.search(r"the prediction does not cover \w+ between ranks", row.why_not or "")


def test_pipelines_have_a_bound_with_their_bubble_and_the_reason() -> None:
    """Stages of equal work: of M micro batches in P stages the bubble is P - 1 of M + P - 1 micro batches.

    It is planned besides HSDP.
    """
    rows = [each for each in planned_on_four() if "pipeline" in each.mesh]
    assert {"PP 2 x FSDP2 2", "PP 4 x FSDP2 1"} == {
        each.name for each in rows if "tensor" not in each.mesh
    }
    assert all(
        each.predicted is None
        and each.why_not == "the prediction does not cover communication between pipeline stages"
        for each in rows
    )
    for each in rows:
        stages, optimizer = each.mesh["pipeline"], (each.least_seconds or 0.0)
        micro_batch = each.bubble_seconds / (stages - 1)
        optimizer -= micro_batch * (each.accumulation + stages - 1)
        assert 0 < optimizer < 0.2 * (each.least_seconds or 0.0)
        assert "of pipeline bubble" in each.reason


@cache
def planned_on_four() -> tuple[Configuration, ...]:
    """What is not predicted of four GPUs, of a model that tensor parallelism divides."""
    return plan(
        lambda samples: (Planned(), *build(samples)[1:]),
        8,
        gpus=4,
        hardware="H100 SXM",
        devices_per_host=2,
    ).not_predicted


def test_hsdp_and_pipelines_go_with_tensor_parallelism() -> None:
    """Each mesh has all GPUs."""
    meshes = _sharded(8, [2], [1, 2])
    assert {"FSDP2 4 x TP 2", "HSDP 2x2 x TP 2", "PP 2 x FSDP2 2 x TP 2"} == set(
        map(name_of, meshes)
    )
    assert {"PP 2 x FSDP2 1 x TP 2", "FSDP2 2 x TP 2"} == set(
        map(name_of, _sharded(4, [2], [1, 2]))
    )


def test_the_plane_through_three_meshes_reaches_the_bytes_of_a_whole_one() -> None:
    """Five samples on two replicas of four shards in two parts, from shards of two and eight, in two parts and in four."""

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
    """Six heads of attention, on two ranks and on four."""
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=6)

    def headed(samples: int) -> Any:
        model = Planned()
        model.config = config  # type: ignore[assignment]
        return model, *build(samples)[1:]

    tried = WorkSheets(
        estimator,
        lambda samples, _: subject_of("test", headed(samples)),
    )
    tried.sheet(Case("none", 1, {}))
    search = _Search(tried, H100, gpus=4, batch=8, network=None, per_host=4, gathered=0.5)
    assert [1, 2] == list(filter(search._divides, [1, 2, 4]))
    assert search._left_out == {"TP 4": "its 6 attention heads cannot be split over 4 ranks"}


def test_without_a_plan_for_it_tensor_parallelism_is_left_out() -> None:
    """And pipelines of more stages than blocks, or of few blocks."""
    assert planned_alone().left_out == {
        "TP 2": "the model has no tp_plan",
        "PP 2": "pipelines need at least 10 blocks, all equal",
    }


def planned_alone() -> Plan:
    """A model of four blocks on two GPUs of one host."""
    return plan(
        lambda samples: (Model(blocks=4), *build(samples)[1:]), 2, gpus=2, hardware="H100 SXM"
    )


def test_the_shell_names_a_wrong_number(capfd: pytest.CaptureFixture[str]) -> None:
    """With its value and what is taken."""
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
            "plan: batch=3: no mesh of gpus=4 can divide it evenly: pass a multiple of 4",
        ),
        ({"precision": "half"}, "plan: precision='half': pass one of bf16-mixed"),
        ({"optimizer": None}, "plan: optimizer=None: pass a name"),
        ({"optimizer": "adamx"}, "plan: optimizer='adamx': pass one of"),
        ({"build": 3}, "plan: build=3: pass a function"),
        (
            {"hardware": Hardware("bare", {"bf16": 1e12}, 1e12)},
            "plan: hardware='bare': its memory is unknown",
        ),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(given: Any, message: str) -> None:
    """With its value and what is taken."""
    arguments = {"build": build, "batch": 8, "gpus": 4, "hardware": "H100 SXM"} | given
    with pytest.raises(lflops.CountError) as error:
        plan(arguments.pop("build"), arguments.pop("batch"), **arguments)
    assert message in str(error.value)


def test_a_configuration_is_a_value() -> None:
    """It can be written as JSON, without the modules' times."""
    first: Configuration = planned().configurations[0]
    assert first.predicted is not None
    assert {} == first.predicted.by_module
