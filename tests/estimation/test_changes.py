"""Test changes to a model, such as a dtype or a checkpointing policy, that users choose by name."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import lflops
from lflops.estimation.changes import Changes, CompiledLoss, Policy
from lflops.estimation.estimate import Estimator, Subject, subject_of
from lflops.estimation.from_config import builder_of
from lflops.estimation.prediction import why_not
from lflops.hardware.chips import lookup, named

WIDTH, ROWS, BLOCKS = 64, 32, 3


def estimated(policy: Policy) -> lflops.Profile:
    """Estimate blocks of four matmuls each under a checkpointing policy."""

    def build() -> Subject:
        blocks = []
        for _ in range(BLOCKS):
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
            blocks.append(nn.Sequential(*layers))
        model = nn.Sequential(*blocks)
        return Changes(policy=policy).applied(
            "estimate",
            Subject(model, (torch.zeros(ROWS, WIDTH, requires_grad=True),), {}, Tensor.sum),
        )

    return Estimator(caller="estimate", backward=True).run(build)


@pytest.mark.parametrize(
    ("policy", "again"), [("none", 0), ("selective", 0), ("selective-op", 1), ("full", 3)]
)
def test_every_second_product_is_computed_again(policy: Policy, again: int) -> None:
    """With "selective-op" one of a block's four matmuls is recomputed, and with "full" three.

    "selective-op" selects the second and the fourth matmul, but torch stops recomputing before the
    fourth, because backward does not need its result. For the same reason "full" does not recompute
    the fourth.
    """
    assert BLOCKS * again * ROWS * WIDTH * WIDTH == estimated(policy).total(phase="recompute")


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16"])
def test_a_dtype_has_short_names(name: str) -> None:
    """Short names such as "bf16" are accepted in any letter case."""
    subject = Changes(dtype=name).applied("estimate", Subject(nn.Linear(2, 2), (), {}, None))
    assert torch.bfloat16 is subject.model.weight.dtype


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("H100", "H100 SXM"), ("a100", "A100 SXM 80GB"), ("V100", "V100 SXM2 32GB")],
)
def test_a_family_is_its_usual_chip(asked: str, taken: str) -> None:
    """The name of a family means its most common chip, but only if a user passes it.

    A driver reports the whole name, so `lookup` does not guess: a wrong peak looks plausible.
    """
    assert (taken, None) == (named(asked).name, lookup(asked))


def test_a_family_that_nobody_knows_is_refused() -> None:
    """An unknown family is an error like any unknown chip."""
    given: Any = "H1000"
    with pytest.raises(lflops.HardwareError, match="is not in the table of chips"):
        named(given)


def layers(count: int) -> nn.Sequential:
    """Build `count` linear layers, each followed by a ReLU."""
    parts: list[nn.Module] = []
    for _ in range(count):
        parts.append(nn.Linear(WIDTH, WIDTH, bias=False))
        parts.append(nn.ReLU())
    return nn.Sequential(*parts)


def trained(
    build: Callable[[], nn.Module], changes: Changes | None = None, rows: int = ROWS, **options: Any
) -> lflops.Profile:
    """Estimate a step of SGD with momentum."""

    def subject() -> Subject:
        return (changes or Changes()).applied(
            "estimate", Subject(build(), (torch.zeros(rows, WIDTH),), {}, Tensor.sum)
        )

    momentum = {"optimizer": partial(torch.optim.SGD, momentum=0.9, foreach=False)}
    return Estimator(caller="estimate", backward=True, **momentum | options).run(subject)


def peak(profile: lflops.Profile) -> int:
    """Return the peak of live memory in bytes."""
    assert profile.memory is not None
    return profile.memory.peak_bytes


def test_an_optimizer_in_backward_holds_one_gradient_at_a_time() -> None:
    """The peak has weights, momentum and activations of all 20 layers, but only a few gradients.

    The work of the optimizer is the same as in a separate optimizer step.
    """
    together = trained(lambda: layers(20))
    in_turn = trained(lambda: layers(20), in_backward=True)
    weight = 4 * WIDTH * WIDTH
    row = 4 * ROWS * WIDTH
    assert 3 * 20 * weight < peak(together)
    assert 2 * 20 * weight + 20 * row < peak(in_turn) < 2 * 20 * weight + 20 * row + 3 * weight
    assert together.modules[""].optimizer.flops == in_turn.modules[""].optimizer.flops > 0


def test_an_optimizer_in_backward_needs_a_parameter_to_train() -> None:
    """A frozen model has no parameter to train."""
    with pytest.raises(
        lflops.CountError,
        match="no parameter requires a gradient: unfreeze the parameters that the optimizer",
    ):
        trained(lambda: layers(2).requires_grad_(requires_grad=False), in_backward=True)


def test_offloaded_activations_are_not_held() -> None:
    """Offloaded activations are not part of the peak; the work stays the same.

    Each of 20 layers keeps its input, the output of the ReLU before it. With eight times the rows,
    an input is four times as large as a weight.
    """
    rows = 8 * ROWS
    held = trained(lambda: layers(20), Changes(offload=False), rows=rows, optimizer=None)
    offloaded = trained(lambda: layers(20), Changes(offload=True), rows=rows, optimizer=None)
    weight = 4 * WIDTH * WIDTH
    activation = 4 * rows * WIDTH
    assert 20 * weight + 20 * activation < peak(held)
    # All weights and gradients, and the activations that one layer works on.
    assert peak(offloaded) < 40 * weight + 5 * activation
    for phase in ("forward", "backward"):
        assert held.total(phase=phase) == offloaded.total(phase=phase)


@pytest.mark.parametrize(
    ("kind", "scales"), [("nf4", 64 * 4 + 16 * 4), ("nf4-dq", 64 + 4 * (16 + 1 + 256 + 1))]
)
def test_weights_of_four_bits_are_half_a_byte_with_their_scales(kind: str, scales: int) -> None:
    """A quantized weight needs half a byte per element plus its scales.

    64 x 64 weights need 2,048 bytes, one scale per 64 weights and a table of 16 values. With
    "nf4-dq" a scale has 8 bits, and the scales need a table of 256 values, one scale and a mean.
    Both adapters of rank 2 together have 2 * 2 * 64 weights. The matmuls are the same, and each
    needs its whole weight in float32 while it runs.
    """

    def build() -> nn.Module:
        blocks = []
        for _ in range(BLOCKS):
            blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()))
        return nn.Sequential(*blocks)

    whole = trained(build, Changes(adapter_rank=2, quantized=None), optimizer=None)
    packed = trained(build, Changes(adapter_rank=2, quantized=kind), optimizer=None)
    assert whole.memory is not None
    assert packed.memory is not None
    whole_start = whole.memory.timeline[0].by_category
    packed_start = packed.memory.timeline[0].by_category
    assert whole_start is not None
    assert packed_start is not None
    adapters = 2 * 2 * WIDTH * 4
    assert BLOCKS * (4 * WIDTH * WIDTH + adapters) == whole_start.parameters
    assert BLOCKS * (WIDTH * WIDTH // 2 + adapters) == packed_start.parameters
    assert BLOCKS * scales == packed_start.other - whole_start.other
    assert BLOCKS * adapters // 4 == packed.modules[""].trainable_parameters
    for phase in ("forward", "backward"):
        assert whole.total(phase=phase) == packed.total(phase=phase) > 0
    matmuls = [moment for moment in packed.memory.timeline if moment.operator == "mm"]
    assert any(
        moment.live_bytes - packed_start.parameters - packed_start.other >= 4 * WIDTH * WIDTH
        for moment in matmuls
    )
    assert "the prediction does not cover the unpacking of quantized weights" in (
        why_not(replace(packed, op_counts=_in_bf16(packed)), named("H100")) or ""
    )


def _in_bf16(profile: lflops.Profile) -> tuple[Any, ...]:
    return tuple(replace(cell, dtype="bfloat16") for cell in profile.op_counts)


def test_a_chunked_loss_computes_the_same_and_recomputes_the_head(tmp_path: Path) -> None:
    """A loss in 8 chunks saves two copies of the logits, and recomputes the head in backward.

    The model is GPT-2 with a vocabulary of 4,096. The float32 logits of 2 x 64 tokens have 2 MiB; a
    chunk has an eighth of that.
    """
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 4096, "n_positions": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings})
    )
    build = builder_of(str(tmp_path), tokens=64)

    def estimate(changes: Changes) -> lflops.Profile:
        estimator = Estimator(caller="estimate", backward=True)
        return estimator.run(lambda: changes.applied("estimate", subject_of("estimate", build(2))))

    whole = estimate(Changes(chunks=None))
    chunked = estimate(Changes(chunks=8))
    head = 2 * 64 * 32 * 4096
    assert head == whole.modules["lm_head"].forward.macs == chunked.modules["lm_head"].forward.macs
    assert 0 == whole.modules["lm_head"].recompute.macs
    assert head == chunked.modules["lm_head"].recompute.macs
    logits = 4 * 2 * 64 * 4096
    assert peak(whole) - peak(chunked) > 2 * logits


def cross_entropy_in_float32(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss as transformers and torchtitan do."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@pytest.mark.skipif(
    " " in tempfile.gettempdir(),
    reason="inductor gives g++ its paths unquoted: it compiles in no folder with a space",
)
def test_a_compiled_loss_needs_what_inductor_s_code_allocates() -> None:
    """The estimate of a compiled loss is within 1 % of the memory that inductor's code allocates.

    The torch profiler measures this memory on a CPU, for 2 x 256 tokens and a vocabulary of 4,096
    in bfloat16.
    """
    logits = torch.randn(2, 256, 4096, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 4096, (2, 256))
    compiled = torch.compile(cross_entropy_in_float32)
    compiled(logits, labels).backward()
    logits.grad = None
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorder:
        compiled(logits, labels).backward()
    events = recorder.profiler.kineto_results.events()  # type: ignore[union-attr]
    in_order = sorted(events, key=methodcaller("start_ns"))
    allocated = [event.nbytes() for event in in_order if event.name() == "[memory]"]
    real = max(accumulate(allocated))

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.empty(2, 256, 4096, dtype=torch.bfloat16))

        def forward(self, labels: Tensor) -> Tensor:
            return CompiledLoss.apply(self.logits, labels)  # type: ignore[no-any-return,no-untyped-call]

    estimated = lflops.estimate(Head, torch.zeros(2, 256, dtype=torch.long), backward=True)
    # The logits and the labels, which exist before the profiler starts.
    held = 2 * 256 * 4096 * 2 + 2 * 256 * 8
    assert 2 * 256 * 4096 * 2 <= real < 1.01 * 2 * 256 * 4096 * 2
    assert peak(estimated) - held == pytest.approx(real, rel=0.01)


def test_a_compiled_loss_makes_nothing_of_the_logits_but_their_gradient(tmp_path: Path) -> None:
    """A compiled loss allocates only the gradient of the logits.

    The model is GPT-2 with a vocabulary of 4,096 in bfloat16. An eager loss also converts the
    logits to float32, and allocates further tensors of their size.
    """
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 4096, "n_positions": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings})
    )
    build = builder_of(str(tmp_path), tokens=64)

    def estimate(changes: Changes) -> lflops.Profile:
        estimator = Estimator(caller="estimate", backward=True)
        return estimator.run(lambda: changes.applied("estimate", subject_of("estimate", build(2))))

    eager = estimate(Changes(dtype="bf16", chunks=1))
    compiled = estimate(Changes(dtype="bf16", compiled_loss=True))
    divided = estimate(Changes(dtype="bf16", compiled_loss=True, chunks=8))
    # The number of elements of the logits.
    logits = 2 * 64 * 4096
    head = 2 * 64 * 32 * 4096
    assert head == eager.modules["lm_head"].forward.macs == compiled.modules["lm_head"].forward.macs
    assert (0, 0, head) == tuple(
        each.modules["lm_head"].recompute.macs for each in (eager, compiled, divided)
    )
    # The eager loss has three or four tensors of the size of the logits in float32: the logits,
    # their log-softmax and the gradients of both. The compiled loss has one in bfloat16.
    assert 6 * logits < peak(eager) - peak(compiled) < 14 * logits
    assert peak(divided) < peak(compiled)


def test_only_a_language_model_s_loss_is_chunked() -> None:
    """For any other model the error names its class."""
    with pytest.raises(
        lflops.CountError, match="Linear is not a transformers language model with labels"
    ):
        Changes(chunks=2).applied("estimate", Subject(nn.Linear(2, 2), (), {}, None))
