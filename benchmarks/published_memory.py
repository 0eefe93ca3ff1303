"""Predict LitGPT's published memory peaks.

Each fine-tuning run is rebuilt with LitGPT's model code and loop, and predicted on fake tensors.

`published_memory.py predict LITGPT TORCHTITAN` predicts the configurations in checkouts: of LitGPT
at 03ffc55, with the table in `config_hub/finetune/README.md`, and of torchtitan at ba2469780, with
a table of December 2024 in `benchmarks/`. `published_memory.py compare` prints the predictions next
to the rows in `published_memory.toml`, and writes them to RESULTS.md.
"""

import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

import lflops
from lflops.estimation.changes import Changes, mixed_precision
from lflops.estimation.estimate import Estimator, Subject
from lflops.memory.peak import CUBLAS_BYTES, memory_fit_of

PREDICTED, PUBLISHED = (
    Path(__file__).with_name(f"published_memory{name}.toml") for name in ("_predicted", "")
)
CHIP = "A10G"
# The unit of the table, which has `torch.cuda.max_memory_allocated() / 1e9`.
GB = 10**9
# From this number of elements, bitsandbytes puts the state of a paged optimizer outside the memory
# that torch counts.
LEAST_PAGED = 100_000


class Dequantized(torch.autograd.Function):
    """The matmul with a 4-bit weight, as bitsandbytes 0.42 computes it.

    It creates the whole weight in forward and in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> Tensor:
        """Compute the matmul. The input is saved, although backward does not need it."""
        ctx.kept, ctx.shape = (x, weight), shape
        return nn.functional.linear(x, _dequantized(shape, x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return gradient @ _dequantized(ctx.shape, gradient), None, None, None


def _dequantized(shape: tuple[int, int], like: Tensor) -> Tensor:
    """Create the whole weight in float16, the dtype before quantization, and cast it."""
    return torch.empty(shape, dtype=torch.float16, device=like.device).to(like.dtype)


class FourBitLinear(nn.Module):
    """A linear layer whose weight is stored in bitsandbytes' nf4 format.

    An element needs half a byte. Each 64 elements have a scale in float32. There is one table of 16
    values.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **_: Any) -> None:  # noqa: FBT001, FBT002 - as torch's own
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        elements = in_features * out_features
        self.weight = nn.Parameter(
            torch.empty((elements + 1) // 2, 1, dtype=torch.uint8), requires_grad=False
        )
        self.scales = nn.Buffer(torch.empty(-(-elements // 64), dtype=torch.float32))
        self.values = nn.Buffer(torch.empty(16, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the matmul with the dequantized weight."""
        product: Tensor = Dequantized.apply(
            x, self.weight, (self.out_features, self.in_features), self.bias
        )
        return product


class PagedAdamW(torch.optim.Optimizer):
    """bitsandbytes' optimizer with this name.

    Its moments are in single precision. For large parameters, they are in memory that torch does
    not count.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Create the moments. The kernel needs no temporary tensors."""
        del closure
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.numel() < LEAST_PAGED and each not in self.state:
                    self.state[each] = {
                        name: torch.zeros_like(each, dtype=torch.float32)
                        for name in ("state1", "state2")
                    }


class Run:
    """A fine-tuning run, as its YAML file configures it."""

    def __init__(self, folder: Path, name: str) -> None:
        sys.path.insert(0, str(folder))
        settings = yaml.safe_load((folder / "config_hub" / "finetune" / f"{name}.yaml").read_text())
        train = settings["train"]
        self.checkpoint = settings["checkpoint_dir"].rpartition("/")[2]
        self.is_full, self.quantized = name.endswith("/full"), settings.get("quantize") == "bnb.nf4"
        self.adapters = {key: value for key, value in settings.items() if key.startswith("lora_")}
        self.devices = int(settings["devices"])
        self.samples, self.tokens = int(train["micro_batch_size"]), int(train["max_seq_length"])
        self.accumulates = int(train["global_batch_size"]) // (self.samples * self.devices) > 1
        self.decay = settings["optimizer"]["init_args"]["weight_decay"]

    def build(self) -> nn.Module:
        """Build the model as LitGPT does. Its optimizer is `model.updates`."""
        import litgpt.lora
        import litgpt.model

        of = litgpt.model if self.is_full else litgpt.lora
        config = of.Config.from_name(self.checkpoint, **({} if self.is_full else self.adapters))
        torch.set_default_dtype(torch.bfloat16)
        linear = nn.Linear
        try:
            nn.Linear = FourBitLinear if self.quantized else linear  # type: ignore[misc]
            model: Any = of.GPT(config)
        finally:
            nn.Linear = linear  # type: ignore[misc]
            torch.set_default_dtype(torch.float32)
        model.max_seq_length = self.tokens
        if not self.is_full:
            litgpt.lora.mark_only_lora_as_trainable(model)
        if self.devices > 1:
            mesh = init_device_mesh("cpu", (self.devices,))
            for block in model.transformer.h:
                vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        adamw = partial(
            torch.optim.AdamW, lr=2e-4, weight_decay=self.decay, betas=(0.9, 0.95), foreach=True
        )
        vars(model)["updates"] = (PagedAdamW if self.quantized else adamw)(model.parameters())
        return model  # type: ignore[no-any-return]

    def fit(self, model: Any, ids: Tensor) -> None:
        """Run LitGPT's loop.

        The logits stay alive until the next iteration has its own logits, so they exist during the
        optimizer's step and the validation. Fabric's precision casts the logits to float32. In the
        third iteration, gradients, optimizer state and the previous logits exist at the same time.
        """
        from litgpt.utils import chunked_cross_entropy

        chunks = {} if self.is_full else {"lm_head_chunk_size": 128}
        for iteration in range(3 if self.accumulates else 2):
            if self.devices > 1:
                model.set_requires_gradient_sync(iteration != 1)
            logits = _in_float32(model(ids, **chunks))
            if self.is_full:
                loss = chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:])
            else:
                logits[-1] = logits[-1][..., :-1, :]
                loss = chunked_cross_entropy(logits, ids[..., 1:])
            loss.backward()
            if iteration != 1 or not self.accumulates:
                model.updates.step()
                model.updates.zero_grad()
        with torch.no_grad():
            model.eval()
            validated = _in_float32(model(ids))
            chunked_cross_entropy(validated[..., :-1, :], ids[..., 1:], chunk_size=0)
            model.train()

    def predict(self) -> lflops.Profile:
        """Estimate the training of one rank."""
        ids = torch.zeros(self.samples, self.tokens, dtype=torch.long)
        mesh = {"data": self.devices} if self.devices > 1 else None
        return lflops.estimate(
            self.build, ids, step=self.fit, hardware=CHIP, round_to=512, mesh=mesh
        )


def _in_float32(logits: Any) -> Any:
    return [each.float() for each in logits] if isinstance(logits, list) else logits.float()


def predicted(folder: Path) -> Iterator[str]:
    """Yield a TOML table for each configuration."""
    for path in sorted((folder / "config_hub" / "finetune").glob("*/*.yaml")):
        name = f"{path.parent.name}/{path.stem}"
        profile = Run(folder, name).predict()
        memory, room = profile.memory, memory_fit_of(profile, profile.run.hardware)
        if memory is None or room is None:
            raise ValueError(name)
        row = f'["{name}"]\npeak_gb = {(memory.peak_bytes + CUBLAS_BYTES) / GB:.2f}\nverdict = "{room.verdict}"\n'
        print(row, flush=True)
        yield row


def compare() -> None:
    """Compare each published row with its prediction, and write the section."""
    predictions, published = (tomllib.loads(path.read_text()) for path in (PREDICTED, PUBLISHED))
    lines, errors, verdicts = [], [], []
    for name, row in published.items():
        ours = predictions[name]
        if row["peak_gb"] == "OOM":
            error = "right" if ours["verdict"] == "does not fit" else "wrong"
            verdicts.append(error)
        else:
            errors.append(ours["peak_gb"] / row["peak_gb"] - 1)
            error = f"{errors[-1]:+.1%}"
        lines.append(
            f"| {name} | {ours['peak_gb']:.2f} | {row['peak_gb']} | {error} | {ours['verdict']} | {row.get('unknown', '')} |"
        )
    sizes = sorted(map(abs, errors))
    summary = f"Median error {statistics.median(sizes):.1%}, {sum(each <= 0.1 for each in sizes)} of {len(sizes)} rows within 10 %"
    record(
        Path(__file__).name,
        "LitGPT's table",
        [
            "Each fine-tuning by LitGPT's own code, on fake tensors. The predictions of all its configurations are in",
            "`published_memory_predicted.toml`. A sequence is taken to have 512 tokens, the most that a YAML allows.",
            "",
            "| fine-tuning | predicted GB | published GB | error | on an A10G | what the row does not tell |",
            "|---|--:|--:|--:|---|---|",
            *lines,
            "",
            f"{summary}; out of memory: {verdicts.count('right')} of {len(verdicts)} right.",
            "",
            *titan_rows(),
        ],
    )


RANKS = {
    8: {"eager": 82.4, "compiled": 77.0, "compiled, float8": 76.8},
    128: {"eager": 67.0, "compiled": 62.0, "compiled, float8": 61.8},
}
"""GiB that torchtitan reserved on each rank, by the number of ranks.

The run is Llama 3 8B with a batch of 2 x 8,192 tokens, checkpointing of selected operators, and
bfloat16.
"""


def titan(folder: Path, ranks: int) -> lflops.Profile:
    """Estimate one rank of torchtitan's model.

    The options are those of `--fsdp N --mp bf16 --reduce fp32 --ac selective-op --optimizer adamw`.
    """
    sys.path.insert(0, str(folder))
    with mock.patch.dict(
        sys.modules,
        dict.fromkeys(("triton", "triton.language", "torchtitan.utils"), mock.MagicMock()),
    ):
        from torchtitan.models.llama import Transformer, llama3_configs
    settings = llama3_configs["8B"]
    settings.norm_type, settings.vocab_size, settings.max_seq_len = "rmsnorm", 128_256, 8192
    Transformer.init_weights = lambda *_, **__: None
    ids = torch.zeros(2, settings.max_seq_len, dtype=torch.long)
    changes = Changes(policy="selective-op")

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    estimator = Estimator(
        caller="torchtitan",
        backward=True,
        optimizer="adamw",
        hardware="H100",
        allocator="expandable_segments:True",
        mesh={"data": ranks},
        mixed=mixed_precision("bf16", "fp32"),
    )
    return estimator.run(
        lambda: changes.applied("torchtitan", Subject(Transformer(settings), (ids,), {}, loss))
    )


def titan_rows() -> Iterator[str]:
    """Yield the predicted rows of torchtitan."""
    found = tomllib.loads(PREDICTED.read_text())
    yield "This table shows torchtitan's Llama 3 8B with FSDP2 on H100s, in GiB per rank. torchtitan publishes the reserved memory."
    yield "The predictions are the reserved memory of the simulated allocator:"
    yield from (
        "",
        "| ranks | how | predicted, eager | published | error |",
        "|--:|---|--:|--:|--:|",
    )
    for ranks, rows in RANKS.items():
        ours = found[f"torchtitan {ranks}"]["reserved_gib"]
        for how, published in rows.items():
            yield f"| {ranks} | {how} | {ours:.1f} | {published:.1f} | {ours / published - 1:+.1%} |"
    yield ""
    yield "It is unknown how much memory compiled code and float8 save, so these rows are predicted as eager code."
    yield "The other rows of torchtitan are not predicted: they use context parallelism, float8 under tensor parallelism, or pipelines on 512 GPUs."


def predicted_titan(folder: Path) -> Iterator[str]:
    """Yield a TOML table for each number of ranks."""
    for ranks in RANKS:
        memory = titan(folder, ranks).memory
        if memory is None or memory.reserved is None:
            raise ValueError(ranks)
        yield f'["torchtitan {ranks}"]\nreserved_gib = {memory.reserved.reserved_bytes / 2**30:.2f}\n'


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["predict", litgpt, torchtitan]:
            PREDICTED.write_text(
                "\n".join([*predicted(Path(litgpt)), *predicted_titan(Path(torchtitan))])
            )
        case ["compare"]:
            compare()
        case _:
            sys.exit(__doc__)
