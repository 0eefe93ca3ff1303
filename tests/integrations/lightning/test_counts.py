"""Test that the monitor counts a step exactly: the numbers are worked out by hand.

They also equal those of `lflops.count` for the same batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.monitoring.schedule import Schedule
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
    ROWS,
    WIDTH,
    Classifier,
    fit,
    watching,
)
from tests.support.profile_checks import consistent

pytestmark = [*LIGHTNINGS_WARNINGS, pytest.mark.filterwarnings("ignore:Using `torch.compile")]

BODY = ROWS * WIDTH * WIDTH
"""MACs of `body.0` in the forward of a batch. Backward has as many: its input needs no gradient."""
HEAD = ROWS * WIDTH * CLASSES
"""MACs of `head` in the forward of a batch. Backward has twice as many."""
PARAMETERS = {"body.0": WIDTH * WIDTH + WIDTH, "head": WIDTH * CLASSES + CLASSES}


def self_macs(profile: Profile, phase: Phase) -> dict[str, int]:
    """Return the self MACs of the modules that have any."""
    modules = consistent(profile).modules
    own = {name: module.work(phase).self_macs for name, module in modules.items()}
    return {name: macs for name, macs in own.items() if macs}


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "clipped": {"gradient_clip_val": 0.1},
    "checkpointing": {"enable_checkpointing": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_counted_to_the_last_product(options: dict[str, Any]) -> None:
    """MACs of forward and backward belong to the right modules, and each module is called once.

    Precision, clipping and checkpoints do not change this. The counting step is the seventh one.
    """
    monitor = watching()
    fit(Classifier(), monitor, **options)
    (profile,) = monitor.profiles
    assert {"body.0": BODY, "head": HEAD} == self_macs(profile, "forward")
    assert {"body.0": BODY, "head": 2 * HEAD} == self_macs(profile, "backward")
    assert [6] == [step.index for step in profile.steps if step.kind == "counting"]
    assert {"": 0, "body": 1, "body.0": 1, "body.1": 1, "body.2": 1, "head": 1} == {
        name: module.calls for name, module in profile.modules.items()
    }


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_what_count_counts(autocast: bool) -> None:
    """The op counts of forward and backward equal those of `lflops.count`, with three exceptions.

    Lightning divides the loss by the number of accumulated batches, in forward and in backward, and
    creates the first gradient.
    """
    model = Classifier()
    monitor = watching()
    fit(model, monitor, precision="bf16-mixed" if autocast else "32-true")
    x = torch.zeros(ROWS, WIDTH)
    y = torch.zeros(ROWS, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        counted = lflops.count(
            model.train(), x, backward=True, loss=lambda out: F.cross_entropy(out, y)
        )

    def forward_and_backward(profile: Profile) -> set[Any]:
        return {cell for cell in profile.op_counts if cell.phase in {"forward", "backward"}}

    differing = forward_and_backward(monitor.profiles[0]) ^ forward_and_backward(counted)
    of_lightning = {("", "div", "forward"), ("", "div", "backward"), ("", "ones_like", "forward")}
    assert of_lightning == {(cell.module, cell.operator, cell.phase) for cell in differing}


def test_gradients_accumulated_over_three_batches_are_counted_as_one_step() -> None:
    """With gradient accumulation over 3 batches, a step has three times the MACs and one update."""
    monitor = watching()
    fit(Classifier(), monitor, batches=60, accumulate_grad_batches=3)
    (profile,) = monitor.profiles
    assert {"body.0": 3 * BODY, "head": 3 * HEAD} == self_macs(profile, "forward")
    assert {"body.0": 3 * BODY, "head": 6 * HEAD} == self_macs(profile, "backward")
    once = watching()
    fit(Classifier(), once)
    assert self_flops(once.profiles[0], "optimizer") == self_flops(profile, "optimizer")
    assert 3 * once.profiles[0].modules["body.0"].calls == profile.modules["body.0"].calls
    assert (3, 3 * ROWS) == (profile.run.accumulation, profile.run.samples_per_step)
    assert {3 * ROWS} == {step.samples for step in profile.steps}


def self_flops(profile: Profile, phase: Phase) -> dict[str, int]:
    """Return the self FLOPs of the modules that have any."""
    own = {name: module.work(phase).self_flops for name, module in profile.modules.items()}
    return {name: flops for name, flops in own.items() if flops}


def test_the_optimizers_work_is_that_of_the_parameters_owners() -> None:
    """FLOPs of the optimizer belong to the modules with the parameters.

    SGD without momentum has one FLOP for each parameter.
    """

    class Descending(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = watching()
    fit(Descending(), monitor)
    assert self_flops(monitor.profiles[0], "optimizer") == PARAMETERS


def test_clipping_is_other() -> None:
    """FLOPs of gradient clipping have the phase "other" and belong to no module.

    Without clipping, this model has no FLOPs in "other".
    """
    plain = watching()
    clipped = watching()
    fit(Classifier(), plain)
    fit(Classifier(), clipped, gradient_clip_val=0.1)
    assert {} == self_flops(plain.profiles[0], "other")
    assert {""} == self_flops(clipped.profiles[0], "other").keys()


def test_the_loss_and_what_prepares_the_batch_are_the_models_own() -> None:
    """Operators in `training_step` outside of modules are forward work of the model itself.

    This includes operators before the first module is called, and operators without gradients.
    """

    class Prepared(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            scaled = x @ torch.ones(WIDTH, WIDTH)
            loss = super().training_step((scaled, y), batch_idx)
            (x @ torch.ones(WIDTH, 1)).sum()
            return loss

    monitor = watching()
    fit(Prepared(), monitor)
    assert {"": BODY + ROWS * WIDTH, "body.0": BODY, "head": HEAD} == self_macs(
        monitor.profiles[0], "forward"
    )
    assert {} == self_macs(monitor.profiles[0], "other")


def test_what_other_hooks_compute_is_other() -> None:
    """Operators in other hooks of the user, for example to average weights, count as "other"."""

    class Averaging(Classifier):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            torch.ones(2, 3) @ torch.ones(3, 5)

    monitor = watching()
    fit(Averaging(), monitor)
    assert {"": 2 * 3 * 5} == self_macs(monitor.profiles[0], "other")


def test_clipping_by_hand_is_other() -> None:
    """In manual optimization, clipping in `training_step` after backward has the phase "other"."""

    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()

    monitor = watching()
    clipped = watching()
    fit(ByHand(), monitor)
    fit(Classifier(), clipped, gradient_clip_val=0.1)
    phases: tuple[Phase, ...] = ("optimizer", "other")
    for phase in phases:
        assert self_flops(clipped.profiles[0], phase) == self_flops(monitor.profiles[0], phase)


def test_what_activation_checkpointing_computes_again_is_recompute() -> None:
    """With activation checkpointing, the second forward of the body has the phase "recompute"."""

    class Checkpointed(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            hidden = checkpoint(self.body, x.requires_grad_(), use_reentrant=False)
            return F.cross_entropy(self.head(hidden), y)

    monitor = watching()
    fit(Checkpointed(), monitor)
    assert {"body.0": BODY} == self_macs(monitor.profiles[0], "recompute")


def test_the_memory_of_the_step_is_there() -> None:
    """The profile has the memory of the parameters and a plausible peak.

    The peak is at least 4 times the parameters: Adam keeps two numbers for each parameter, and each
    parameter has a gradient.
    """
    monitor = watching()
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert profile.memory is not None
    size = 4 * sum(PARAMETERS.values())
    assert size == profile.memory.by_category["parameters"]
    assert profile.memory.peak_bytes >= 4 * size
    assert profile.memory.peak_bytes == profile.modules[""].peak_bytes


def test_modules_that_are_ignored_are_in_no_total() -> None:
    """With `ignore_modules`, a module is left out of the totals, as in `lflops.count`."""
    monitor = watching(ignore_modules=["head"])
    fit(Classifier(), monitor)
    assert {"body.0": BODY} == self_macs(monitor.profiles[0], "forward")


class Growing(torch.utils.data.IterableDataset[Any]):
    """Batches with the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        for size in self.sizes:
            yield torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)


def batches(sizes: list[int]) -> Any:
    """Return a loader of batches with the given sizes."""
    return torch.utils.data.DataLoader(Growing(sizes), batch_size=None)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4] * 9, ["counting", "unprofiled", "unprofiled"]),
        ([4, 4, 4, 4, 2, 2, 4, 4, 4], ["counting", "counting", "unprofiled"]),
    ],
)
def test_a_window_counts_again_where_shapes_are_new(sizes: list[int], expected: list[str]) -> None:
    """A window has a counting step only if no earlier window counted the same shapes.

    The steps 1, 4 and 7 would be the counting steps of three windows. The MACs of each window are
    those of its batch size.
    """
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=1, repeat=3))
    fit(Classifier(), monitor, data=batches(sizes))
    kinds: dict[int, str] = {}
    for profile in monitor.profiles:
        kinds.update({step.index: step.kind for step in profile.steps})
    assert expected == [kinds[index] for index in (1, 4, 7)]
    head_macs = [profile.modules["head"].forward.macs for profile in monitor.profiles]
    rows = [macs // (WIDTH * CLASSES) for macs in head_macs]
    assert [sizes[index] for index in (1, 4, 7)] == rows


def test_a_profile_that_was_counted_elsewhere_is_taken() -> None:
    """With `count=profile`, the counts come from that profile, and there is no counting step.

    The facts about the run still come from the run.
    """
    counted = lflops.count(Classifier(), torch.zeros(ROWS, WIDTH))
    monitor = watching(count=counted)
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert counted.op_counts == profile.op_counts
    assert {"unprofiled", "module_timing"} == {step.kind for step in profile.steps}
    assert "training" == profile.run.kind
    assert "train" == profile.run.stage
    assert "32-true" == profile.run.precision


def test_a_profile_of_another_model_is_refused() -> None:
    """With `count=profile`, a profile without the modules of the model raises an error."""
    monitor = watching(count=lflops.count(nn.Linear(3, 4), torch.zeros(ROWS, 3)))
    with pytest.raises(
        MisconfigurationException,
        match="count: the profile belongs to another model, because it has no module '",
    ):
        fit(Classifier(), monitor)


def test_without_counting_there_are_times_and_no_work() -> None:
    """With `count=False`, the profile has times and parameters, but no MACs, and a note says so."""
    monitor = watching(count=False, schedule=Schedule(warmup=0))
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert 0 == profile.total(phase="all")
    assert sum(PARAMETERS.values()) == profile.modules[""].parameters
    # Whether module-timing steps differ much from unprofiled steps depends on the machine.
    assert ["not_counted"] == [note.code for note in profile.notes if note.code != "time_scaled"]
    assert {"unprofiled", "module_timing"} == {step.kind for step in profile.steps}


DTYPES: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "float32"),
    "bf16-mixed": ({"precision": "bf16-mixed"}, "bfloat16"),
    "bf16-true": ({"precision": "bf16-true"}, "bfloat16"),
    "64-true": ({"precision": "64-true"}, "float64"),
}


@pytest.mark.parametrize(("options", "dtype"), DTYPES.values(), ids=DTYPES)
def test_the_runs_dtype_is_what_its_products_are_in(options: dict[str, Any], dtype: str) -> None:
    """The dtype of a run is that of its matmuls, with and without autocast."""
    monitor = watching()
    fit(Classifier(), monitor, **options)
    run = monitor.profiles[0].run
    assert dtype == run.dtype
    assert options.get("precision", "32-true") == run.precision


COMPILED: dict[str, Callable[[Classifier], Any]] = {
    "a part": lambda model: setattr(model, "body", torch.compile(model.body, backend="eager")),
    "in place": lambda model: model.head.compile(backend="eager"),
}


# torch 2.15's compiler causes this warning itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_is_counted_as_it_is_written(
    compile_: Callable[[Classifier], Any],
) -> None:
    """A compiled module is counted by the original names of its modules."""
    torch.compiler.reset()
    model = Classifier()
    monitor = watching()
    compile_(model)
    fit(model, monitor)
    (profile,) = monitor.profiles
    assert {"body.0": BODY, "head": HEAD} == self_macs(profile, "forward")
    assert {"body.0": BODY, "head": 2 * HEAD} == self_macs(profile, "backward")
    assert [] == [note.code for note in profile.notes if note.code.startswith("compiled")]
    torch.compiler.reset()
