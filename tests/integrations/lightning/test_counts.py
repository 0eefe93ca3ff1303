"""What the monitor counts in a step is what `count` counts on the same batch, and what can be worked out with a pencil."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.schedule import Schedule
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

BODY, HEAD = ROWS * WIDTH * WIDTH, ROWS * WIDTH * CLASSES
"""MACs of a batch in the two layers' forward.

The body's input needs no gradient, so its backward is once that; the head's is twice.
"""
PARAMETERS = {"body.0": WIDTH * WIDTH + WIDTH, "head": WIDTH * CLASSES + CLASSES}


def self_macs(profile: Profile, phase: Phase) -> dict[str, int]:
    """The MACs of every row's own that has any."""
    own = {
        name: module.work(phase).self_macs for name, module in consistent(profile).modules.items()
    }
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
    """By the module that it belongs to, forward and backward; the seventh batch is the counted one."""
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
    """OpCount by cell, the model's and the loss's.

    Beside them Lightning divides the loss by the batches accumulated, and begins backward.
    """
    model, monitor = Classifier(), watching()
    fit(model, monitor, precision="bf16-mixed" if autocast else "32-true")
    x, y = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        profile = lflops.count(
            model.train(), x, backward=True, loss=lambda out: F.cross_entropy(out, y)
        )

    def forward_and_backward(profile: Profile) -> set[Any]:
        return {cell for cell in profile.op_counts if cell.phase in {"forward", "backward"}}

    monitors, counts = forward_and_backward(monitor.profiles[0]), forward_and_backward(profile)
    beside = {("", "div", "forward"), ("", "div", "backward"), ("", "ones_like", "forward")}
    assert beside == {(cell.module, cell.operator, cell.phase) for cell in monitors ^ counts}


def test_gradients_accumulated_over_three_batches_are_counted_as_one_step() -> None:
    """Three times the products, one update."""
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
    """The FLOPs of every row's own that has any."""
    own = {name: module.work(phase).self_flops for name, module in profile.modules.items()}
    return {name: flops for name, flops in own.items() if flops}


def test_the_optimizers_work_is_that_of_the_parameters_owners() -> None:
    """Plain descent adds to each element once."""

    class Descending(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = watching()
    fit(Descending(), monitor)
    assert self_flops(monitor.profiles[0], "optimizer") == PARAMETERS


def test_clipping_is_other() -> None:
    """Nothing else of this model's is, and it belongs to no module."""
    plain, clipped = watching(), watching()
    fit(Classifier(), plain)
    fit(Classifier(), clipped, gradient_clip_val=0.1)
    assert {} == self_flops(plain.profiles[0], "other")
    assert {""} == self_flops(clipped.profiles[0], "other").keys()


def test_the_loss_and_what_prepares_the_batch_are_the_models_own() -> None:
    """Whatever runs in training_step outside of a module is forward, also before the first one, and where nothing is differentiable."""

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
    """An average of the weights, kept at the end of each batch by the user."""

    class Averaging(Classifier):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            torch.ones(2, 3) @ torch.ones(3, 5)

    monitor = watching()
    fit(Averaging(), monitor)
    assert {"": 2 * 3 * 5} == self_macs(monitor.profiles[0], "other")


def test_clipping_by_hand_is_other() -> None:
    """In manual optimization it runs in training_step, behind backward."""

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

    monitor, clipped = watching(), watching()
    fit(ByHand(), monitor)
    fit(Classifier(), clipped, gradient_clip_val=0.1)
    phases: tuple[Phase, ...] = ("optimizer", "other")
    for phase in phases:
        assert self_flops(clipped.profiles[0], phase) == self_flops(monitor.profiles[0], phase)


def test_what_activation_checkpointing_computes_again_is_recompute() -> None:
    """The body, once more."""

    class Checkpointed(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(
                self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=False)), y
            )

    monitor = watching()
    fit(Checkpointed(), monitor)
    assert {"body.0": BODY} == self_macs(monitor.profiles[0], "recompute")


def test_the_memory_of_the_step_is_there() -> None:
    """Adam keeps two numbers for each parameter, and there is a gradient for each; 4 bytes each."""
    monitor = watching()
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert profile.memory is not None
    size = 4 * sum(PARAMETERS.values())
    assert size == profile.memory.by_category["parameters"]
    assert profile.memory.peak_bytes >= 4 * size
    assert profile.memory.peak_bytes == profile.modules[""].peak_bytes


def test_modules_that_are_ignored_are_in_no_total() -> None:
    """By their names, as `count` takes them."""
    monitor = watching(ignore_modules=["head"])
    fit(Classifier(), monitor)
    assert {"body.0": BODY} == self_macs(monitor.profiles[0], "forward")


class Growing(torch.utils.data.IterableDataset[Any]):
    """Batches of the sizes given."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        for size in self.sizes:
            yield torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)


def batches(sizes: list[int]) -> Any:
    """A loader of batches as they are."""
    return torch.utils.data.DataLoader(Growing(sizes), batch_size=None)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4] * 9, ["counting", "unprofiled", "unprofiled"]),
        ([4, 4, 4, 4, 2, 2, 4, 4, 4], ["counting", "counting", "unprofiled"]),
    ],
)
def test_a_window_counts_again_where_shapes_are_new(sizes: list[int], expected: list[str]) -> None:
    """Three windows, each of which would count its second step.

    What was counted of the same shapes is taken.
    """
    monitor = watching(schedule=Schedule(wait=1, warmup=1, active=1, repeat=3))
    fit(Classifier(), monitor, data=batches(sizes))
    kinds = {step.index: step.kind for profile in monitor.profiles for step in profile.steps}
    assert expected == [kinds[index] for index in (1, 4, 7)]
    rows = [
        profile.modules["head"].forward.macs // (WIDTH * CLASSES) for profile in monitor.profiles
    ]
    assert [sizes[index] for index in (1, 4, 7)] == rows


def test_a_profile_that_was_counted_elsewhere_is_taken() -> None:
    """No step is counted, and the run's facts are the run's."""
    counted = lflops.count(Classifier(), torch.zeros(ROWS, WIDTH))
    monitor = watching(count=counted)
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert counted.op_counts == profile.op_counts
    assert {"unprofiled", "module_timing"} == {step.kind for step in profile.steps}
    assert ("training", "train", "32-true") == (
        profile.run.kind,
        profile.run.stage,
        profile.run.precision,
    )


def test_a_profile_of_another_model_is_refused() -> None:
    """It has not the module's parts."""
    monitor = watching(count=lflops.count(nn.Linear(3, 4), torch.zeros(ROWS, 3)))
    with pytest.raises(
        MisconfigurationException,
        match="count: the profile belongs to another model, because it has no module '",
    ):
        fit(Classifier(), monitor)


def test_without_counting_there_are_times_and_no_work() -> None:
    """And a note that says so; the parameters are known all the same."""
    monitor = watching(count=False, schedule=Schedule(warmup=0))
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert (0, sum(PARAMETERS.values())) == (
        profile.total(phase="all"),
        profile.modules[""].parameters,
    )
    # How far the hooked steps were off the clean ones is this machine's affair.
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
    """Autocast or not."""
    monitor = watching()
    fit(Classifier(), monitor, **options)
    assert (dtype, options.get("precision", "32-true")) == (
        monitor.profiles[0].run.dtype,
        monitor.profiles[0].run.precision,
    )


COMPILED: dict[str, Callable[[Classifier], Any]] = {
    "a part": lambda model: setattr(model, "body", torch.compile(model.body, backend="eager")),
    "in place": lambda model: model.head.compile(backend="eager"),
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch 2.15's compiler of itself
@pytest.mark.parametrize("compile_", COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_is_counted_as_it_is_written(
    compile_: Callable[[Classifier], Any],
) -> None:
    """Module by module, in the names of the model."""
    torch.compiler.reset()
    model, monitor = Classifier(), watching()
    compile_(model)
    fit(model, monitor)
    (profile,) = monitor.profiles
    assert {"body.0": BODY, "head": HEAD} == self_macs(profile, "forward")
    assert {"body.0": BODY, "head": 2 * HEAD} == self_macs(profile, "backward")
    assert [] == [note.code for note in profile.notes if note.code.startswith("compiled")]
    torch.compiler.reset()
