"""Changes to a model by the names that people give them."""

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
    """Blocks of four products each."""

    def build() -> Subject:
        layers = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))  # noqa: E731
        model = nn.Sequential(*(layers() for _ in range(BLOCKS)))
        return Changes(policy=policy).applied(
            "estimate",
            Subject(model, (torch.zeros(ROWS, WIDTH, requires_grad=True),), {}, Tensor.sum),
        )

    return Estimator(caller="estimate", backward=True).run(build)


@pytest.mark.parametrize(
    ("policy", "again"), [("none", 0), ("selective", 0), ("selective-op", 1), ("full", 3)]
)
def test_every_second_product_is_computed_again(policy: Policy, again: int) -> None:
    """Of the four of each block: the second and the fourth.

    Torch stops before the fourth, whose result nothing needs.
    """
    assert BLOCKS * again * ROWS * WIDTH * WIDTH == estimated(policy).total(phase="recompute")


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16"])
def test_a_dtype_has_short_names(name: str) -> None:
    """In any letter case."""
    subject = Changes(dtype=name).applied("estimate", Subject(nn.Linear(2, 2), (), {}, None))
    assert torch.bfloat16 is subject.model.weight.dtype


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("H100", "H100 SXM"), ("a100", "A100 SXM 80GB"), ("V100", "V100 SXM2 32GB")],
)
def test_a_family_is_its_usual_chip(asked: str, taken: str) -> None:
    """Only where a person gives a name.

    A driver's is whole, and a wrong peak looks like a right one.
    """
    assert (taken, None) == (named(asked).name, lookup(asked))


def test_a_family_that_nobody_knows_is_refused() -> None:
    """As every unknown chip."""
    given: Any = "H1000"
    with pytest.raises(lflops.HardwareError, match="is not in the table of chips"):
        named(given)


def layers(count: int) -> nn.Sequential:
    """So many products and ReLUs in turn."""
    return nn.Sequential(
        *(part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()))
    )


def trained(
    build: Callable[[], nn.Module], changes: Changes | None = None, rows: int = ROWS, **options: Any
) -> lflops.Profile:
    """A step of SGD with momentum."""

    def subject() -> Subject:
        return (changes or Changes()).applied(
            "estimate", Subject(build(), (torch.zeros(rows, WIDTH),), {}, Tensor.sum)
        )

    momentum = {"optimizer": partial(torch.optim.SGD, momentum=0.9, foreach=False)}
    return Estimator(caller="estimate", backward=True, **momentum | options).run(subject)


def peak(profile: lflops.Profile) -> int:
    """Bytes alive."""
    assert profile.memory is not None
    return profile.memory.peak_bytes


def test_an_optimizer_in_backward_holds_one_gradient_at_a_time() -> None:
    """Weights and moments of 20 layers are there all the time, and as backward begins the activations, but never all gradients.

    The work of the optimizer is the same.
    """
    together, in_turn = trained(lambda: layers(20)), trained(lambda: layers(20), in_backward=True)
    weight, row = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    assert 3 * 20 * weight < peak(together)
    assert 2 * 20 * weight + 20 * row < peak(in_turn) < 2 * 20 * weight + 20 * row + 3 * weight
    assert together.modules[""].optimizer.flops == in_turn.modules[""].optimizer.flops > 0


def test_an_optimizer_in_backward_needs_a_parameter_to_train() -> None:
    """A frozen model has none."""
    with pytest.raises(
        lflops.CountError,
        match="no parameter requires a gradient: unfreeze the parameters that the optimizer",
    ):
        trained(lambda: layers(2).requires_grad_(requires_grad=False), in_backward=True)


def test_offloaded_activations_are_not_held() -> None:
    """Each of 20 layers keeps its input, which is the ReLU's output before it.

    With eight times the rows that is four times its weight.
    """
    rows = 8 * ROWS
    held, offloaded = (
        trained(lambda: layers(20), Changes(offload=offload), rows=rows, optimizer=None)
        for offload in (False, True)
    )
    weight, each = 4 * WIDTH * WIDTH, 4 * rows * WIDTH
    assert 20 * weight + 20 * each < peak(held)
    assert (
        peak(offloaded) < 40 * weight + 5 * each
    )  # with all gradients, and what one layer works on
    for phase in ("forward", "backward"):
        assert held.total(phase=phase) == offloaded.total(phase=phase)


@pytest.mark.parametrize(
    ("kind", "scales"), [("nf4", 64 * 4 + 16 * 4), ("nf4-dq", 64 + 4 * (16 + 1 + 256 + 1))]
)
def test_weights_of_four_bits_are_half_a_byte_with_their_scales(kind: str, scales: int) -> None:
    """Of 64 x 64 weights: 2,048 bytes, and a scale for 64 of them.

    In 8 bits these have 256 values, a scale of their own and a mean.

    Both adapters of rank 2 have 128 weights. The product is the same, and it needs a whole weight
    for as long as it runs.
    """
    build = lambda: nn.Sequential(  # noqa: E731
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS))
    )
    whole, packed = (
        trained(build, Changes(adapter_rank=2, quantized=each), optimizer=None)
        for each in (None, kind)
    )
    before = [
        each.memory.timeline[0].by_category for each in (whole, packed) if each.memory is not None
    ]
    adapters = 2 * 2 * WIDTH * 4
    assert [BLOCKS * (4 * WIDTH * WIDTH + adapters), BLOCKS * (WIDTH * WIDTH // 2 + adapters)] == [
        each.parameters for each in before
    ]
    assert BLOCKS * scales == before[1].other - before[0].other
    assert BLOCKS * adapters // 4 == packed.modules[""].trainable_parameters
    for phase in ("forward", "backward"):
        assert whole.total(phase=phase) == packed.total(phase=phase) > 0
    products = (
        [each for each in packed.memory.timeline if each.operator == "mm"]
        if packed.memory is not None
        else []
    )
    assert any(
        each.live_bytes - before[1].parameters - before[1].other >= 4 * WIDTH * WIDTH
        for each in products
    )
    assert "the prediction does not cover the unpacking of quantized weights" in (
        why_not(replace(packed, op_counts=_in_bf16(packed)), named("H100")) or ""
    )


def _in_bf16(profile: lflops.Profile) -> tuple[Any, ...]:
    return tuple(replace(cell, dtype="bfloat16") for cell in profile.op_counts)


def test_a_chunked_loss_computes_the_same_and_recomputes_the_head(tmp_path: Path) -> None:
    """GPT-2 with a vocabulary of 4,096.

    Logits in float32 of 2 x 64 tokens are 2 MiB; in 8 parts they are an eighth of that.
    """
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 4096, "n_positions": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings})
    )
    build = builder_of(str(tmp_path), tokens=64)
    whole, chunked = (
        Estimator(caller="estimate", backward=True).run(
            lambda chunks=chunks: Changes(chunks=chunks).applied(
                "estimate", subject_of("estimate", build(2))
            )
        )
        for chunks in (None, 8)
    )
    head = 2 * 64 * 32 * 4096
    assert head == whole.modules["lm_head"].forward.macs == chunked.modules["lm_head"].forward.macs
    assert (0, head) == (
        whole.modules["lm_head"].recompute.macs,
        chunked.modules["lm_head"].recompute.macs,
    )
    logits = 4 * 2 * 64 * 4096
    assert peak(whole) - peak(chunked) > 2 * logits


def cross_entropy_in_float32(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers and torchtitan compute it."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@pytest.mark.skipif(
    " " in tempfile.gettempdir(),
    reason="inductor gives g++ its paths unquoted: it compiles in no folder with a space",
)
def test_a_compiled_loss_needs_what_inductor_s_code_allocates() -> None:
    """Which torch's own profiler sees, run on a CPU: 2 x 256 tokens and 4,096 words in bfloat16."""
    logits = torch.randn(2, 256, 4096, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 4096, (2, 256))
    compiled = torch.compile(cross_entropy_in_float32)
    compiled(logits, labels).backward()
    logits.grad = None
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorder:
        compiled(logits, labels).backward()
    allocated = [
        event.nbytes()
        for event in sorted(recorder.profiler.kineto_results.events(), key=methodcaller("start_ns"))
        if event.name() == "[memory]"
    ]  # type: ignore[union-attr]
    real = max(accumulate(allocated))

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.empty(2, 256, 4096, dtype=torch.bfloat16))

        def forward(self, labels: Tensor) -> Tensor:
            return CompiledLoss.apply(self.logits, labels)  # type: ignore[no-any-return,no-untyped-call]

    estimated = lflops.estimate(Head, torch.zeros(2, 256, dtype=torch.long), backward=True)
    held = 2 * 256 * 4096 * 2 + 2 * 256 * 8  # the logits and the labels, which were there before
    assert 2 * 256 * 4096 * 2 <= real < 1.01 * 2 * 256 * 4096 * 2
    assert peak(estimated) - held == pytest.approx(real, rel=0.01)


def test_a_compiled_loss_makes_nothing_of_the_logits_but_their_gradient(tmp_path: Path) -> None:
    """GPT-2 with a vocabulary of 4,096 in bfloat16.

    An eager loss makes float32 of the logits, and as much of them again.
    """
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 4096, "n_positions": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings})
    )
    build = builder_of(str(tmp_path), tokens=64)
    eager, compiled, divided = (
        Estimator(caller="estimate", backward=True).run(
            lambda how=how: Changes(dtype="bf16", **how).applied(
                "estimate", subject_of("estimate", build(2))
            )
        )
        for how in ({"chunks": 1}, {"compiled_loss": True}, {"compiled_loss": True, "chunks": 8})
    )
    logits = 2 * 64 * 4096  # elements
    head = 2 * 64 * 32 * 4096
    assert head == eager.modules["lm_head"].forward.macs == compiled.modules["lm_head"].forward.macs
    assert (0, 0, head) == tuple(
        each.modules["lm_head"].recompute.macs for each in (eager, compiled, divided)
    )
    # In float32 the logits, their logarithmic softmax and its gradient, which is there with the one
    # of the float32 logits; or 2 bytes each.
    assert 6 * logits < peak(eager) - peak(compiled) < 14 * logits
    assert peak(divided) < peak(compiled)


def test_only_a_language_model_s_loss_is_chunked() -> None:
    """Another one is named."""
    with pytest.raises(
        lflops.CountError, match="Linear is not a transformers language model with labels"
    ):
        Changes(chunks=2).applied("estimate", Subject(nn.Linear(2, 2), (), {}, None))
