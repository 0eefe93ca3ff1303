"""Estimate the work of published training runs.

Each run is rebuilt, and one of its ranks is estimated on fake tensors.

`rows.csv` has the published step times in bfloat16:

    mpt-*       mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48 (Apache-2.0)
    llama3-*    pytorch/torchtitan, benchmarks/*.md at b5bcd76 (BSD-3-Clause)

No rate is fitted to a row of Llama. The rows of MPT are for development: results for them are for
models and chips that were left out of the fit, one at a time.
"""

import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lflops
from lflops.estimation.changes import Changes, mixed_precision
from lflops.estimation.estimate import Estimator, Subject, subject_of
from lflops.estimation.from_config import builder_of

ROWS = Path(__file__).with_name("rows.csv")
# Width, heads and blocks of each model.
MPT = {
    "mpt-1b": (2048, 16, 24),
    "mpt-7b": (4096, 32, 32),
    "mpt-30b": (7168, 56, 48),
}
MPT_VOCABULARY = 50368
LLAMA = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
LLAMA_SHARED = {
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "architectures": ["LlamaForCausalLM"],
}


class Row(NamedTuple):
    """A published training run and its throughput.

    Attributes:
        model: Name of the model.
        tokens: Number of tokens in a sample.
        gpus: Number of GPUs.
        chip: Name of the chip.
        samples: Number of samples in a micro batch on one rank.
        accumulation: Number of micro batches in a step.
        sharding: "full" or "grad_op". With "grad_op", parameters stay whole between forward and
            backward.
        checkpointing: Checkpointing policy.
        tensor: Number of tensor-parallel ranks.
        compiled: Whether the blocks are compiled.
        tokens_per_second_per_gpu: The published throughput.
        parameters: Number of parameters.
    """

    model: str
    tokens: int
    gpus: int
    chip: str
    samples: int
    accumulation: int
    sharding: str
    checkpointing: str
    tensor: int
    compiled: bool
    tokens_per_second_per_gpu: float
    parameters: int

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        shared = self.samples * self.accumulation * self.tokens
        return shared / (self.tokens_per_second_per_gpu * self.tensor)

    @property
    def is_held_out(self) -> bool:
        """Return whether no rate may be fitted to this row."""
        return self.model in LLAMA

    @property
    def file(self) -> str:
        """Return the name of the file with its estimate. Rows with the same work share a file."""
        of = (
            self.model,
            self.tokens,
            self.gpus,
            self.chip.split()[0],
            self.samples,
            self.sharding,
            self.checkpointing,
            self.tensor,
        )
        return "-".join(map(str, of)) + ("-compiled" if self.compiled else "") + ".json"


def rows() -> list[Row]:
    """Return all rows, which are published runs in bfloat16."""
    with ROWS.open(newline="") as file:
        return [
            Row(
                **{
                    name: kind(value)
                    for (name, value), kind in zip(
                        each.items(), Row.__annotations__.values(), strict=True
                    )
                }
            )
            for each in csv.DictReader(file)
        ]


class Block(nn.Module):
    """A block of MPT, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and a feed-forward network, each with a residual connection."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return y


class Mpt(nn.Module):
    """MPT with learned positions. The head uses the weight of the embedding."""

    def __init__(self, width: int, heads: int, blocks: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(MPT_VOCABULARY, width),
            nn.Embedding(tokens, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of all positions."""
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits


def estimated(row: Row) -> lflops.Profile:
    """Estimate a step of one rank, with one micro batch and the optimizer."""
    changes = Changes(policy=row.checkpointing)  # type: ignore[arg-type]
    mesh = {"data": row.gpus // row.tensor} | ({"tensor": row.tensor} if row.tensor > 1 else {})

    def mpt() -> Subject:
        ids = torch.zeros(row.samples, row.tokens, dtype=torch.long)
        model = Mpt(*MPT[row.model], row.tokens)
        _check(model, row)
        if row.sharding == "grad_op":
            # This does the same as `mesh`, but keeps the parameters whole after forward.
            ranks, mixed = (
                init_device_mesh("cpu", (row.gpus,)),
                MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
            )
            for each in (*model.blocks, model):
                fully_shard(each, mesh=ranks, mp_policy=mixed, reshard_after_forward=False)

        def loss(logits: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

        return Subject(model, (ids,), {}, loss)

    def llama() -> Subject:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(
                json.dumps({"model_type": "llama", **LLAMA[row.model], **LLAMA_SHARED})
            )
            subject = subject_of(row.model, builder_of(folder, tokens=row.tokens)(row.samples))
        _check(subject.model, row)
        if row.compiled:
            for block in subject.model.model.layers:  # type: ignore[union-attr]
                block.compile()  # type: ignore[operator, union-attr]
        return subject

    is_mpt = row.model in MPT
    estimator = Estimator(
        caller=row.model,
        backward=True,
        optimizer="adamw",
        hardware=row.chip,
        mesh=mesh,
        mixed=mixed_precision("bf16", "bf16" if is_mpt else "fp32"),
    )
    return estimator.run(lambda: changes.applied(row.model, mpt() if is_mpt else llama()))


def _check(model: nn.Module, row: Row) -> None:
    found = sum(each.numel() for each in model.parameters())
    if found != row.parameters:
        raise ValueError(f"{row.model} has {found:,} parameters; the table says {row.parameters:,}")


def missing(folder: Path) -> Iterator[Row]:
    """Yield one row for each estimate that is not in the folder."""
    yield from {row.file: row for row in rows() if not (folder / row.file).exists()}.values()
