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
MPT = {
    "mpt-1b": (2048, 16, 24),
    "mpt-7b": (4096, 32, 32),
    "mpt-30b": (7168, 56, 48),
}  # width, heads, blocks
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
    """A published training and its throughput."""

    model: str
    tokens: int  # of a sample
    gpus: int
    chip: str
    samples: int  # of a micro batch on one rank
    accumulation: int
    sharding: str  # full, or grad_op: parameters stay whole between forward and backward
    checkpointing: str
    tensor: int  # ranks of tensor parallelism
    compiled: bool
    tokens_per_second_per_gpu: float
    parameters: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        shared = self.samples * self.accumulation * self.tokens
        return shared / (self.tokens_per_second_per_gpu * self.tensor)

    @property
    def is_held_out(self) -> bool:
        """Whether no figure may be fitted to it."""
        return self.model in LLAMA

    @property
    def file(self) -> str:
        """The name of its estimate, which rows share that have the same work."""
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
    """All that are published in bfloat16."""
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
    """MPT's block, with its biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward part, each with its residual."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return y


class Mpt(nn.Module):
    """MPT with learned positions; its head is the embedding."""

    def __init__(self, width: int, heads: int, blocks: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(MPT_VOCABULARY, width),
            nn.Embedding(tokens, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of all positions."""
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits


def estimated(row: Row) -> lflops.Profile:
    """A step of one rank: one micro batch and the optimizer."""
    changes = Changes(policy=row.checkpointing)  # type: ignore[arg-type]
    mesh = {"data": row.gpus // row.tensor} | ({"tensor": row.tensor} if row.tensor > 1 else {})

    def mpt() -> Subject:
        ids = torch.zeros(row.samples, row.tokens, dtype=torch.long)
        model = Mpt(*MPT[row.model], row.tokens)
        _check(model, row)
        if row.sharding == "grad_op":  # what `mesh` does, but for keeping the parameters
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
    """Rows whose estimate is not in the folder, one of each; what is in it is kept."""
    yield from {row.file: row for row in rows() if not (folder / row.file).exists()}.values()
