"""Check estimated memory against measurements.

The references are published measurements, and training runs in processes with a memory limit.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

import lflops
from lflops.estimation.changes import CompiledLoss, add_adapters, offload_activations
from lflops.estimation.optimizer_step import AdamIn8Bits
from lflops.memory.peak import sharded
from lflops.profile.profile import Memory
from tests.support.limited_trainings import CASES, loss_of, map_every_tensor, trains
from tests.support.published_models import LLAMA_8B, LlamaModel, MixedPrecisionAdam, PublishedLayer

GIB, MIB, GB = 2**30, 2**20, 10**9
MARGIN = 0.05
"""The share of the limit that stays free in the training runs.

CUDA's context and fragmentation need a larger margin. A process on a CPU has neither.
"""

SHARES = (0.96, 1.04, 1.06, 1.3)
"""Limits, as shares of the estimated peak."""


def memory(profile: lflops.Profile) -> Memory:
    """Return the memory of a profile, which must have been counted."""
    if profile.memory is None:
        raise ValueError("memory was not counted")
    return profile.memory


class Row(NamedTuple):
    """One training run in a table of torchtune.

    Attributes:
        title: The name of the row.
        published: The published peak in GiB.
        build: Function that creates the model.
        loss: Function from logits to a scalar.
        optimizer: The argument `optimizer` of `lflops.estimate`.
        rest: The differences to the published run, which explain the remaining difference.
    """

    title: str
    published: float
    build: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    optimizer: Any
    rest: str


IDS = torch.zeros(2, 4096, dtype=torch.long)
CHUNKS = 8


def llama(**how: Any) -> nn.Module:
    """Create Llama 3.2 3B in bfloat16. Its table of rotations stays in float32."""
    model = LlamaModel(**how)
    rotations = model.rotations
    model.to(torch.bfloat16).rotations = rotations
    return model


def offloaded(model: nn.Module) -> nn.Module:
    """Offload the activations of a model to the host."""
    offload_activations(model)
    return model


def adapted(rank: int, quantized: str | None = None, **how: Any) -> nn.Module:
    """Create a frozen model with adapters on all linear layers of its blocks."""
    model = llama(**how)
    add_adapters("torchtune", model, rank, quantized)
    return model


def stepping(
    makes: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None, **how: Any
) -> nn.Module:
    """Create a model whose parameters are updated as soon as their gradients exist."""
    model = llama(**how)
    for parameter in model.parameters():
        optimizer = (makes or fused)([parameter])

        def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    return model


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create AdamW with its state in the dtype of the parameters."""
    return torch.optim.AdamW(parameters, fused=True)


def whole_loss(logits: Tensor) -> Tensor:
    """Return the loss of all logits at once."""
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def chunked_loss(of_chunk: Callable[[Tensor, Tensor], Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that adds the losses of chunks."""

    def loss(chunks: list[Tensor]) -> Tensor:
        labels = IDS[:, : sum(each.shape[1] for each in chunks)]
        return torch.stack(
            [
                of_chunk(a.flatten(0, 1), b.flatten())
                for a, b in zip(chunks, labels.chunk(CHUNKS, 1), strict=True)
            ]
        ).sum()

    return loss


def eager_chunk(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a chunk's loss in single precision, as torchtune computes it without compilation."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


COMPILED = "blocks as written, not as compiled; the loss keeps bfloat16 logits and a statistic a token, as its compiled kernel does"
ROWS = (
    Row("packed data, nothing else", 60.0, llama, whole_loss, fused, "as published"),
    Row(
        "+ compile, chunked cross-entropy, activation checkpointing",
        24.9,
        lambda: llama(recomputes=True, chunks=CHUNKS),
        chunked_loss(CompiledLoss.apply),
        fused,
        COMPILED,
    ),
    Row(
        "the same, with the loss as written",
        24.9,
        lambda: llama(recomputes=True, chunks=CHUNKS),
        chunked_loss(eager_chunk),
        fused,
        "as above; 8 chunks' log-probabilities in single precision, 3.91 GiB, which the compiled loss does not keep",
    ),
    Row(
        "+ optimizer in backward",
        23.1,
        lambda: stepping(recomputes=True, chunks=CHUNKS),
        chunked_loss(CompiledLoss.apply),
        # This optimizer receives no gradients. With an optimizer, two steps are estimated, and the
        # second step has the state of AdamW.
        "sgd",
        COMPILED,
    ),
    Row(
        "+ activation offloading",
        21.8,
        lambda: offloaded(stepping(recomputes=True, chunks=CHUNKS)),
        chunked_loss(CompiledLoss.apply),
        "sgd",
        COMPILED,
    ),
    Row(
        "+ 8-bit AdamW",
        17.6,
        lambda: offloaded(stepping(AdamIn8Bits, recomputes=True, chunks=CHUNKS)),
        chunked_loss(CompiledLoss.apply),
        "sgd",
        "as above; bitsandbytes' storage, where torchtune's recipe may have had torchao's",
    ),
    Row(
        "LoRA",
        8.5,
        lambda: offloaded(adapted(64, recomputes=True, chunks=CHUNKS)),
        chunked_loss(CompiledLoss.apply),
        fused,
        "as above; rank 64 at all linear layers of the blocks, of which torchtune's has all but two",
    ),
)


EIGHT: dict[str, Any] = {"sizes": LLAMA_8B, "recomputes": True, "chunks": CHUNKS}
ROWS_8B = (
    Row(
        "full, on an RTX 4090",
        18.9,
        lambda: stepping(torch.optim.SGD, **EIGHT),
        chunked_loss(CompiledLoss.apply),
        "sgd",
        "blocks as written, not as compiled; optimizer in backward; the paged state of the optimizer is in no allocator's figure",
    ),
    Row(
        "LoRA, on an RTX 4090",
        16.2,
        lambda: adapted(8, **EIGHT),
        chunked_loss(CompiledLoss.apply),
        fused,
        "blocks as written; adapters at all linear layers of the blocks, of which torchtune's has all but two",
    ),
    Row(
        "QLoRA, on an RTX 4090",
        7.4,
        lambda: adapted(8, "nf4-dq", **EIGHT),
        chunked_loss(CompiledLoss.apply),
        fused,
        "as above; bitsandbytes' storage, where torchtune has torchao's",
    ),
)


def torchtune_8b() -> Iterator[str]:
    """Yield the rows on one GPU in the table of models in torchtune's README."""
    yield "**torchtune, Llama 3.1 8B.** The published figures are from the"
    yield "[README](https://github.com/meta-pytorch/torchtune#memory-and-training-speed): batch size 2, sequences packed to 2,048 tokens,"
    yield "everything in bfloat16, compiled, with activation checkpointing. The head does not share its weight with the embedding."
    yield ""
    yield from table(ROWS_8B, IDS[:, :2048])


def torchtune() -> Iterator[str]:
    """Yield the rows of the table in torchtune's README of November 2024."""
    yield "**torchtune, Llama 3.2 3B.** The published figures are the peaks of active memory in GiB, from the"
    yield "[README](https://github.com/pytorch/torchtune#optimization-flags): full fine-tuning on an A100, batch size 2, sequences packed"
    yield "to 4,096 tokens, everything in bfloat16. For the estimate, the model is written in plain torch"
    yield "(`tests/support/published_models.py`). It has 3,212,749,824 parameters, tied embeddings, RMSNorm and rotary positions in"
    yield "float32, keys and values repeated to 24 heads, and flash attention. AdamW is fused, and its state is in bfloat16. With `foreach`,"
    yield "AdamW would need 5 copies of the parameters, 29.9 GiB, which is more than the published peaks below 25 GiB. torchtune's packed"
    yield "batches use a block mask in flex attention, and the estimate uses a causal mask. Both keep query, key, value, the result and one"
    yield "statistic for each row."
    yield ""
    yield from table(ROWS, IDS)


def table(rows: Iterable[Row], ids: Tensor) -> Iterator[str]:
    """Yield a table of predicted and published training runs on batches of token ids."""
    yield "| training | published | lflops | difference | parameters, gradients, state, activations, other | what is not as published |"
    yield "|---|--:|--:|--:|---|---|"
    for row in rows:
        found = memory(
            lflops.estimate(
                row.build,
                (ids, ids),
                backward=True,
                loss=row.loss,
                optimizer=row.optimizer,
                hardware="NVIDIA A100-SXM4-80GB",
                round_to=512,
            )
        )
        kinds = found.by_category
        parts = [
            kinds[name] for name in ("parameters", "gradients", "optimizer_state", "activations")
        ]
        split = ", ".join(f"{part / GIB:.2f}" for part in (*parts, found.peak_bytes - sum(parts)))
        peak = found.peak_bytes / GIB
        yield f"| {row.title} | {row.published} | {peak:.2f} | {peak / row.published - 1:+.1%} | {split} | {row.rest} |"


WIDTH, DEPTH, RANKS = 10_000, 75, 64
ZERO = (120.0, 31.4, 16.6, 1.9)


def products() -> nn.Module:
    """Create blocks with one linear layer each."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(DEPTH))
    ).to(torch.bfloat16)


def zero() -> Iterator[str]:
    """Yield the example in the ZeRO paper."""
    profile = lflops.estimate(
        products,
        torch.zeros(1, WIDTH, dtype=torch.bfloat16),
        backward=True,
        optimizer=MixedPrecisionAdam,
    )
    yield "**ZeRO** ([Rajbhandari et al., 2019](https://arxiv.org/abs/1910.02054), figure 1). The example in the paper has"
    yield "7.5 G parameters on 64 devices, and Adam in mixed precision: for each parameter, 2 bytes for the parameter, 2 bytes for the"
    yield "gradient and 12 bytes for the optimizer state. The estimated model has 75 blocks with one linear layer of 10,000 × 10,000, and a"
    yield "batch of one row. All figures are in GB of 10^9 bytes. The paper only adds parameters, gradients and optimizer state. The last two"
    yield "columns have all other memory of a rank."
    yield ""
    yield "| | published | parameters, gradients and state by lflops | difference | a rank's peak | gathered parameters, buffers | the rest |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for each, published in zip(sharded(profile, RANKS), ZERO, strict=True):
        states = each.parameter_bytes + each.gradient_bytes + each.optimizer_state_bytes
        sizes = " | ".join(
            f"{size / GB:.2f}" for size in (each.total_bytes, each.gathered_bytes, each.rest_bytes)
        )
        yield f"| {each.strategy} | {published} | {states / GB:.2f} | {states / GB / published - 1:+.1%} | {sizes} |"
    yield ""
    yield "The table shows parameters, gradients and state at the moment of the peak. If the peak is in backward, some gradients do not"
    yield "exist yet, which explains the small negative differences. For DDP, the column for gathered parameters has the gradient buckets,"
    yield "which are as large as all gradients."
    yield "`tests/estimation/test_mesh.py` compares FSDP2 with real processes."


def korthikanti() -> Iterator[str]:
    """Yield the activations of a transformer layer."""
    yield "**A transformer layer's activations** ([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198), section 4.1):"
    yield "s·b·h·(34 + 5·a·s/h) bytes for a layer in bfloat16 that is built as in the paper. s is the sequence length, b the batch size,"
    yield "h the hidden size, and a the number of heads. torch also keeps the mean and the standard deviation of each row in two layer norms,"
    yield "with 2 bytes each. The paper ignores these statistics. The estimate includes the result of the layer, but not its input. The paper"
    yield "includes the input, which has the same size, but not the result. Masks of dropout have one byte per element, as in the paper."
    yield ""
    yield "| s, b, h, a | published | lflops | statistics | difference without the statistics |"
    yield "|---|--:|--:|--:|--:|"
    for s, b, h, a in ((2048, 4, 6144, 64), (2048, 1, 12288, 96), (512, 8, 1024, 16)):
        x = torch.empty(b, s, h, dtype=torch.bfloat16, requires_grad=True, device="meta")
        layer = partial(PublishedLayer, h, a)
        found = memory(
            lflops.estimate(
                lambda layer=layer: layer().to(torch.bfloat16), x, backward=True, loss=torch.sum
            )
        )
        kept = next(
            each.by_category
            for each in found.timeline
            if each.operator == "sum" and each.phase == "forward"
        )
        if kept is None:
            raise ValueError("the timeline has no categories")
        published, statistics = s * b * h * 34 + 5 * a * s * s * b, 2 * 2 * s * b * 2
        left = kept.activations - statistics - published
        yield f"| {s}, {b}, {h}, {a} | {published:,} | {kept.activations:,} | {statistics:,} | {left:,} |"


def limited() -> Iterator[str]:
    """Yield training runs around a memory limit."""
    map_every_tensor()
    yield "**Trainings around a limit.** Does a training of two steps end in a process that gets no more memory?"
    yield f"`fits(limit, margin={MARGIN})` answers before. The kernel enforces the limit (`RLIMIT_DATA`), and malloc maps each tensor by"
    yield "itself, so that nothing of lflops counts. The limit comes on top of what the process has after the same training without one:"
    yield "what libraries keep is outside of it (`tests/support/limited_trainings.py`). A training that was refused is also tried in 95 %"
    yield "of the limit."
    yield ""
    yield "| training | estimated peak | limit | it fits | it trains | in 95 % of the limit |"
    yield "|---|--:|--:|---|---|---|"
    wrong, answers = 0, {True: "yes", False: "no"}
    for name, case in CASES.items():
        found = memory(
            lflops.estimate(
                case.build,
                case.batch(case.samples),
                backward=True,
                loss=loss_of,
                optimizer=case.optimizer,
            )
        )
        for share in SHARES:
            limit = int(found.peak_bytes * share)
            fits, ends = found.fits(limit, margin=MARGIN), trains(name, limit)
            spare = None if fits else trains(name, int(limit * (1 - MARGIN)))
            wrong += (fits and not ends) or bool(spare)
            last = "" if spare is None else answers[spare]
            yield f"| {name} | {found.peak_bytes / MIB:.1f} MiB | {limit / MIB:.1f} MiB | {answers[fits]} | {answers[ends]} | {last} |"
    yield ""
    yield f"Of {len(CASES) * len(SHARES)} answers {wrong} are wrong: a training that was called fitting and did not train, or one that was"
    yield "refused and trains with 5 % to spare."


def main() -> None:
    """Write the tables."""
    # These runs are forks of this process, so they come first, while the process is small.
    trainings = list(limited())
    record(
        "memory.py",
        "Memory",
        [*torchtune(), "", *torchtune_8b(), "", *zero(), "", *korthikanti(), "", *trainings],
    )


if __name__ == "__main__":
    main()
