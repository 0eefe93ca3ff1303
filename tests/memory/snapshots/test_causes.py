"""Test planted causes of running out of memory: the first line of the report names each cause."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from lflops.hardware.chips import Hardware
from lflops.memory.snapshots.explain import (
    EXPLANATIONS,
    Cause,
    CauseCode,
    ExplainedMemory,
    explain,
    explain_snapshot,
    explained_lines,
    remedies,
)
from lflops.memory.snapshots.read import snapshot_of
from tests.support.memory_snapshots import (
    BACKWARD,
    BUILD,
    CALL,
    IN_CLOSURE,
    LIGHTNING_STEP,
    STATE,
    TORCH,
    UPDATE,
    Recorder,
    Stack,
    forward,
    loss,
)

MIB = 2**20
GIB = 2**30
LAYERS = 4
WEIGHT = 256 * MIB
CHIP = Hardware("a chip of 80 GiB", {"bf16": 1.0}, memory_bytes=80 * GIB, usable_bytes=79 * GIB)


def model() -> Recorder:
    """Record a GiB of parameters in four layers."""
    recorder = Recorder()
    recorder.allocate(WEIGHT, BUILD, LAYERS)
    return recorder


def forward_pass(
    recorder: Recorder, nbytes: int = 100 * MIB, caller: str = "training_step"
) -> list[int]:
    """Record a forward pass: a tensor, one activation for each layer and line, and a loss."""
    made = recorder.allocate(2 * MIB, forward(20, caller))
    for _ in range(LAYERS):
        for line in (31, 32):
            made += recorder.allocate(nbytes, forward(line, caller))
    return made + recorder.allocate(512, loss(14))


def backward_pass(recorder: Recorder, activations: list[int]) -> list[int]:
    """Record a backward pass: it frees the activations and allocates a gradient per parameter."""
    gradients = recorder.allocate(WEIGHT, BACKWARD, LAYERS)
    recorder.free(activations)
    return gradients


def update(recorder: Recorder, *, first: bool, state: int = 2 * WEIGHT) -> None:
    """Record an AdamW step, which allocates its state in the first step."""
    if first:
        recorder.allocate(state, STATE, LAYERS)
    recorder.free(recorder.allocate(WEIGHT, UPDATE, LAYERS))


def steps(recorder: Recorder, number: int, **how: Any) -> None:
    """Record complete training steps that leak nothing."""
    for step in range(number):
        gradients = backward_pass(recorder, forward_pass(recorder))
        update(recorder, first=step == 0, **how)
        recorder.free(gradients)


def list_of_outputs() -> Recorder:
    """Record steps that keep their logits of 900 MiB in a list."""
    recorder = model()
    for step in range(8):
        recorder.allocate(900 * MIB, forward(40))
        gradients = backward_pass(recorder, forward_pass(recorder))
        update(recorder, first=step == 0)
        recorder.free(gradients)
    recorder.fail(900 * MIB, forward(40))
    return recorder


def sum_of_losses() -> Recorder:
    """Record forward passes whose losses are summed with their graphs, without a backward pass."""
    recorder = model()
    for _ in range(9):
        forward_pass(recorder)
    recorder.fail(100 * MIB, forward(31))
    return recorder


def retained_graph() -> Recorder:
    """Record a graph of 3,200 MiB that is kept while the next one is built."""
    recorder = model()
    steps(recorder, 2)
    kept = forward_pass(recorder, 400 * MIB)
    recorder.free(recorder.allocate(WEIGHT, BACKWARD, LAYERS))
    update(recorder, first=False)
    recorder.allocate(2 * MIB, forward(20))
    recorder.allocate(400 * MIB, forward(31), 2)
    recorder.fail(400 * MIB, forward(32))
    assert kept
    return recorder


def too_large_a_batch() -> Recorder:
    """Record 12 GiB of activations of one pass, next to a GiB of parameters."""
    recorder = model()
    for _ in range(24):
        for line in (31, 32):
            recorder.allocate(256 * MIB, forward(line))
    recorder.fail(256 * MIB, forward(31))
    return recorder


def state_in_single_precision() -> Recorder:
    """Record 8 GiB of optimizer state for a GiB of parameters in half precision."""
    recorder = model()
    backward_pass(recorder, forward_pass(recorder))
    recorder.allocate(2 * GIB, STATE, LAYERS)
    recorder.fail(512 * MIB, UPDATE)
    return recorder


def gradients_through_forward() -> Recorder:
    """Record gradients that are not set to None: a GiB of them is alive in the next forward."""
    recorder = model()
    backward_pass(recorder, forward_pass(recorder))
    update(recorder, first=True, state=WEIGHT)
    recorder.allocate(2 * MIB, forward(20))
    recorder.allocate(100 * MIB, forward(31), 4)
    recorder.fail(100 * MIB, forward(32))
    return recorder


def validation_with_a_graph() -> Recorder:
    """Record a validation that keeps its activations of 6,400 MiB."""
    recorder = model()
    steps(recorder, 1)
    for _ in range(2):
        forward_pass(recorder, 400 * MIB, "validation_step")
    recorder.fail(400 * MIB, forward(31, "validation_step"))
    return recorder


def fragments() -> Recorder:
    """Record 8 GiB of which 4 are free in pieces of 64 MiB, and a request of 512 MiB."""
    recorder = model()
    recorder.cache(8 * GIB, 64)
    recorder.fail(512 * MIB, forward(31), device_free=100 * MIB)
    return recorder


def logits() -> Recorder:
    """Record a request of 8 GiB by the loss, for a vocabulary of 128,000 in single precision."""
    recorder = model()
    steps(recorder, 1)
    forward_pass(recorder)
    recorder.fail(8 * GIB, loss(14), device_free=3 * GIB)
    return recorder


def another_process() -> Recorder:
    """Record a device of 79 GiB on which another process uses about 40 GiB."""
    recorder = model()
    steps(recorder, 1)
    recorder.allocate(30 * GIB, forward(31), 1)
    recorder.fail(10 * GIB, forward(32), device_free=5 * GIB)
    return recorder


def moving_average() -> Recorder:
    """Record a deep copy of the parameters in single precision, 2 GiB."""
    recorder = model()
    copied = [
        ("/usr/lib/python3.11/copy.py", 143, "deepcopy"),
        ("/app/ema.py", 9, "__init__"),
        ("/app/train.py", 5, "main"),
    ]
    recorder.allocate(2 * WEIGHT, copied, LAYERS)
    forward_pass(recorder)
    recorder.fail(512 * MIB, forward(32))
    return recorder


def batches_on_the_device() -> Recorder:
    """Record 8 GiB that the script itself made, outside the model.

    They may be anything, but they are no results of passes.
    """
    recorder = model()
    recorder.allocate(GIB, [("/app/train.py", 3, "load")], 8)
    forward_pass(recorder)
    recorder.fail(512 * MIB, forward(32))
    return recorder


def large_updates() -> Recorder:
    """Record 12 GiB of an optimizer step that works on lists of all parameters.

    Backward also holds 1 GiB.
    """
    recorder = model()
    gradients = backward_pass(recorder, forward_pass(recorder))
    recorder.allocate(GIB, BACKWARD)
    recorder.free(gradients)
    recorder.allocate(2 * GIB, UPDATE, 6)
    recorder.fail(GIB, UPDATE)
    return recorder


def large_gradients_of_activations() -> Recorder:
    """Record 12 GiB of temporary tensors in backward; none has the size of a parameter."""
    recorder = model()
    forward_pass(recorder)
    recorder.allocate(2 * GIB, BACKWARD, 6)
    recorder.fail(GIB, BACKWARD)
    return recorder


def kept_by_a_hook(*, room: int = 70 * GIB) -> Recorder:
    """Record a Lightning run in which a forward hook keeps 256 MiB more in each step.

    In the ninth step the process reaches its limit. `room` is the free memory of the device.
    """
    called: Stack = [
        CALL,
        ("/app/model.py", 74, "forward"),
        CALL,
        ("/app/model.py", 79, "loss"),
        ("/app/train.py", 12, "training_step"),
    ]
    layer: Stack = [(f"{TORCH}/nn/modules/linear.py", 134, "forward"), *called, *IN_CLOSURE]
    hook: Stack = [("/app/train.py", 30, "keep"), (CALL[0], 1832, "inner"), *called, *IN_CLOSURE]
    # In a counting step the dispatch mode runs the operator, and the hooks on all modules make
    # torch call the module from another line.
    counted: Stack = [
        ("/lib/lflops/flop_counter/dispatch_mode.py", 91, "__torch_dispatch__"),
        hook[0],
        (CALL[0], 1845, "inner"),
        *hook[2:],
    ]
    error: Stack = [(f"{TORCH}/nn/functional.py", 3900, "mse_loss"), *called[3:], *IN_CLOSURE]
    recorder = model()
    gradients: list[int] = []
    for step in range(9):
        batch = recorder.allocate(16 * MIB, [("/app/train.py", 5, "transfer_batch_to_device")])
        activations = recorder.allocate(64 * MIB, layer, 4)
        recorder.allocate(256 * MIB, counted if step == 2 else hook)
        if step == 8:
            break
        # The loop keeps the loss for its log.
        recorder.allocate(4, error)
        recorder.free(gradients)
        gradients = backward_pass(recorder, activations)
        if step == 0:
            recorder.allocate(
                2 * WEIGHT,
                [(f"{TORCH}/optim/adam.py", 175, "_init_group"), *LIGHTNING_STEP],
                LAYERS,
            )
        recorder.free(
            recorder.allocate(
                WEIGHT, [(f"{TORCH}/optim/adam.py", 600, "_multi_tensor_adam"), *LIGHTNING_STEP]
            )
        )
        recorder.free(batch)
    recorder.fail(64 * MIB, layer, device_free=room)
    return recorder


PLANTED: dict[str, tuple[Callable[[], Recorder], CauseCode, str]] = {
    "outputs in a list": (
        list_of_outputs,
        "kept_results",
        "Results of 8 earlier forward passes are kept: 7.03 GiB",
    ),
    "a hook, and a limit": (
        kept_by_a_hook,
        "process_limit",
        "This process reached its own memory limit, although the device had 70.00 GiB free. Results",
    ),
    "a hook": (
        lambda: kept_by_a_hook(room=0),
        "kept_results",
        "Results of 8 earlier forward passes are kept: 2.00 GiB, and 256.00 MiB more in each pass (train.py:30 keep)",
    ),
    "losses with their graphs": (
        sum_of_losses,
        "kept_graphs",
        "The graphs of 9 earlier forward passes are still alive and hold 7.05 GiB",
    ),
    "a retained graph": (
        retained_graph,
        "retained_graph",
        "The graph of an earlier forward pass is still alive and holds 3.13 GiB",
    ),
    "too large a batch": (
        too_large_a_batch,
        "activations",
        "Activations of this batch are the largest part of the memory: 12.00 GiB",
    ),
    "state in single precision": (
        state_in_single_precision,
        "optimizer_state",
        "The optimizer state is the largest part of the memory: 8.00 GiB",
    ),
    "gradients through forward": (
        gradients_through_forward,
        "kept_gradients",
        "Gradients of an earlier step are still alive during forward and hold 1.00 GiB",
    ),
    "validation with a graph": (
        validation_with_a_graph,
        "validation_graph",
        "Validation builds a graph and keeps 6.25 GiB",
    ),
    "fragments": (
        fragments,
        "fragmentation",
        "Memory is fragmented: 4.00 GiB is reserved but unused",
    ),
    "logits": (logits, "huge_tensor", "One tensor takes 8.00 GiB (train.py:14 training_step)"),
    "another process": (another_process, "other_process", "Another process holds 4"),
    "what the script made": (
        batches_on_the_device,
        "other",
        "Tensors that were created outside the model are the largest part of the memory: 8.00 GiB",
    ),
    "an update": (
        large_updates,
        "optimizer_temporary",
        "Temporary tensors of the optimizer step are the largest part of the memory: 12.00 GiB",
    ),
    "a backward": (
        large_gradients_of_activations,
        "temporary",
        "Temporary tensors of backward are the largest part of the memory: 12.00 GiB",
    ),
    "a moving average": (
        moving_average,
        "model_copy",
        "A copy of the model takes 2.00 GiB (ema.py:9 __init__)",
    ),
}


def explained(recorder: Recorder) -> ExplainedMemory:
    """Return the explanation for a device of the following size.

    It has the reserved and the free bytes, and a GiB for the CUDA context.
    """
    snapshot = snapshot_of(recorder.snapshot())
    free = snapshot.trace[-1].device_free if snapshot.trace else None
    reserved = sum(segment.size for segment in snapshot.segments)
    return explain(snapshot, total=reserved + (free or 0) + GIB)


@pytest.mark.parametrize(("plant", "code", "first"), PLANTED.values(), ids=PLANTED)
def test_the_first_line_names_the_cause(
    plant: Callable[[], Recorder], code: CauseCode, first: str
) -> None:
    """The first line names the cause, and the first remedy belongs to it.

    At least 95 % of the bytes have a name.
    """
    if code == "other_process":
        found = explain(snapshot_of(plant().snapshot()), CHIP)
    else:
        found = explained(plant())
    lines = list(explained_lines(found))
    assert code == found.causes[0].code
    assert lines[0].startswith(first)
    assert EXPLANATIONS[code].remedy in lines[lines.index("what would free memory") + 1]
    assert found.named_share >= 0.95
    assert found.requested_bytes == sum(found.by_category.values())
    assert found.requested_bytes == sum(each.bytes for each in found.holders)


def test_each_byte_is_promised_once() -> None:
    """No byte is promised by two remedies.

    If all activations belong to kept graphs, checkpointing is not recommended for them. If a kept
    graph has 4 of 6 GiB, 2 GiB are left.
    """
    found = explained(sum_of_losses())
    assert ["7.05 GiB", "1.00 GiB"] == [each.partition(":")[0] for each in remedies(found)]
    kept = (Cause(code="retained_graph", bytes=4 * GIB), Cause(code="activations", bytes=6 * GIB))
    both = replace(found, causes=kept, by_category={**found.by_category, "activations": 6 * GIB})
    assert ["4.00 GiB", "2.00 GiB"] == [each.partition(":")[0] for each in remedies(both)]


def test_a_healthy_training_has_no_leak() -> None:
    """Five steps without a leak have no cause except the largest category."""
    recorder = model()
    steps(recorder, 5)
    found = explained(recorder)
    assert not found.ran_out
    assert 5 == found.forward_passes
    # The last step has not ended, because nothing was allocated after it.
    assert 4 == found.optimizer_steps
    largest = {
        "optimizer_state",
        "parameters",
        "gradients",
        "temporary",
        "optimizer_temporary",
        "activations",
    }
    assert largest >= {cause.code for cause in found.causes}


def test_the_peak_is_that_of_the_trace_where_memory_did_not_run_out() -> None:
    """If memory did not run out, the peak of the trace is explained.

    It is in the optimizer step: a GiB each of parameters, gradients and temporary tensors, and two
    GiB of state.
    """
    recorder = model()
    steps(recorder, 3)
    found = explained(recorder)
    assert 5 * GIB == found.requested_bytes
    expected = {"parameters": GIB, "gradients": GIB, "temporary": GIB, "optimizer_state": 2 * GIB}
    assert expected == {
        category: nbytes for category, nbytes in found.by_category.items() if nbytes
    }


def test_what_is_older_than_the_recording_is_unknown_and_said_so() -> None:
    """Parameters that are older than the recording are unknown.

    Gradients of their sizes are recognized nevertheless.
    """
    recorder = model()
    recorder.forget()
    gradients = backward_pass(recorder, forward_pass(recorder))
    assert gradients
    found = explained(recorder)
    assert GIB == found.by_category["unknown"]
    assert GIB == found.by_category["gradients"]
    # At the peak all activations are alive: 802 MiB, and a loss of 512 bytes.
    assert found.named_share == pytest.approx(1 - GIB / (2 * GIB + 802 * MIB + 512))


def test_without_the_chip_another_process_is_not_guessed() -> None:
    """Without the memory of the chip, another process is not a possible cause."""
    found = explain(snapshot_of(another_process().snapshot()))
    assert "other_process" not in {cause.code for cause in found.causes}


def test_how_much_was_missing_is_told_where_it_is_known() -> None:
    """8 GiB were requested and 3 GiB were free, so 5 GiB were missing."""
    found = explained(logits())
    assert 8 * GIB == found.failed_bytes
    assert 3 * GIB == found.device_free_bytes
    assert 5 * GIB == found.missing_bytes


def test_what_lightning_runs_in_a_closure_is_not_the_optimizers() -> None:
    """Forward and backward inside Lightning's closure do not count as the optimizer step.

    Gradients have the parameters' GiB, and state has two. Activations have 9 * 256 + 4 * 64 MiB,
    and eight losses. A batch has 16 MiB.
    """
    found = explained(kept_by_a_hook())
    assert 9 == found.forward_passes
    assert 8 == found.optimizer_steps
    expected = {
        "parameters": GIB,
        "gradients": GIB,
        "optimizer_state": 2 * GIB,
        "other": 16 * MIB,
        "activations": (9 * 256 + 4 * 64) * MIB + 8 * 4,
    }
    assert expected == {
        category: nbytes for category, nbytes in found.by_category.items() if nbytes
    }


@pytest.mark.parametrize("room", [64 * MIB, 84 * MIB - 1, 84 * MIB])
def test_a_limit_was_reached_only_where_the_device_had_room(room: int) -> None:
    """The cause is the process limit only if the device had enough free memory for the request.

    64 MiB were requested, and torch may reserve 20 MiB more. If less is free, the cause is the 40
    GiB of other processes.
    """
    snapshot = snapshot_of(kept_by_a_hook(room=room).snapshot())
    reserved = sum(segment.size for segment in snapshot.segments)
    found = explain(snapshot, total=reserved + room + 40 * GIB)
    codes = {cause.code for cause in found.causes}
    expected = "other_process" if room < 84 * MIB else "process_limit"
    assert {expected} == codes & {"other_process", "process_limit"}


def test_a_known_limit_says_how_much_was_missing() -> None:
    """With a known limit, the missing bytes are known.

    64 MiB are requested, and the limit leaves 20 MiB. Without a known limit both values are None.
    """
    content = kept_by_a_hook().snapshot()
    reserved = sum(segment["total_size"] for segment in content["segments"])
    found = explain_snapshot(content, None, 80 * GIB, reserved + 20 * MIB)
    assert 44 * MIB == found.missing_bytes
    assert reserved + 20 * MIB == found.allowed_bytes
    assert any(
        line.startswith("reserved 6.52 GiB (limit 6.54 GiB), ") for line in explained_lines(found)
    )
    unknown = explain_snapshot(content, None, 80 * GIB, 80 * GIB)
    assert unknown.missing_bytes is None
    assert unknown.allowed_bytes is None


def test_every_cause_has_a_sentence() -> None:
    """Every cause has an explanation, and every explanation has a cause."""
    assert set(get_args(CauseCode)) == set(EXPLANATIONS)
