"""Check estimates against published figures and real training runs.

The training runs use the CPU's allocator. Models that are too large for any machine are estimated
as well.
"""

import argparse
import gc
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

import lflops
from lflops import Profile
from lflops.profile.profile import Memory
from tests.support.cpu_allocator import allocated

Batch = Mapping[str, Tensor]
Step = Callable[[], None]
Case = tuple[Callable[[], nn.Module], Callable[[], Batch]]
MIB = 2**20
LAYERS, HIDDEN, HEADS, KEY_HEADS, WIDE, WORDS, LENGTH = 80, 8192, 64, 8, 28672, 128256, 4096


def tokens(words: int, samples: int, length: int) -> Callable[[], Batch]:
    """Return a function that creates a batch for a language model. Each token is its own label."""

    def make() -> Batch:
        ids = torch.randint(words, (samples, length))
        return {"input_ids": ids, "labels": ids}

    return make


def images(samples: int) -> Callable[[], Batch]:
    """Return a function that creates a batch for an image classifier."""
    return lambda: {
        "pixel_values": torch.randn(samples, 3, 224, 224),
        "labels": torch.randint(2, (samples,)),
    }


def checkpointed_llama() -> nn.Module:
    """Create a Llama of about 160 million parameters that checkpoints every layer."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    return model


CASES: dict[str, Case] = {
    "BERT-base, batch 8, length 128": (
        lambda: BertForMaskedLM(BertConfig()),
        tokens(30522, 8, 128),
    ),
    "GPT-2, batch 4, length 256": (
        lambda: GPT2LMHeadModel(GPT2Config(use_cache=False)),
        tokens(50257, 4, 256),
    ),
    "ResNet-50, batch 16": (lambda: ResNetForImageClassification(ResNetConfig()), images(16)),
    "ViT-base, batch 8": (lambda: ViTForImageClassification(ViTConfig()), images(8)),
    "Llama, 8 layers of 1024, checkpointed, batch 4, length 512": (
        checkpointed_llama,
        tokens(32000, 4, 512),
    ),
}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def bert() -> Iterator[str]:
    """Estimate BERT-base, for which others have published figures. Yields the lines of a table."""
    batch = tokens(30522, 32, 128)
    build = lambda: BertForMaskedLM(BertConfig())  # noqa: E731 - what `estimate` takes
    with torch.no_grad():
        forward = lflops.estimate(build, kwargs={"input_ids": batch()["input_ids"]})
    sgd, adamw = (
        lflops.estimate(
            build, kwargs=batch(), backward=True, loss=lambda out: out.loss, optimizer=each
        )
        for each in OPTIMIZERS.values()
    )
    root = forward.modules[""]
    yield "| BERT-base for masked LM, batch 32, length 128, float32 | |"
    yield "|---|--:|"
    yield f"| parameters | {root.parameters:,} = {root.parameter_bytes / MIB:.2f} MiB |"
    yield f"| matmuls of forward | {2 * root.forward.macs / 1e9:.2f} GFLOP |"
    for title, profile in (
        ("forward alone", forward),
        ("training with SGD", sgd),
        ("training with AdamW", adamw),
    ):
        parts = ", ".join(
            f"{name.replace('_', ' ')} {size / MIB:.1f}"
            for name, size in memory(profile).by_category.items()
            if size
        )
        yield f"| peak, {title} | {memory(profile).peak_bytes / MIB:.1f} MiB: {parts} |"


def memory(profile: Profile) -> Memory:
    """Return the memory of a profile, which must have been counted."""
    if profile.memory is None:
        raise ValueError("memory was not counted")
    return profile.memory


def training(
    build: Callable[[], nn.Module], batch: Batch, optimizer: Callable[..., torch.optim.Optimizer]
) -> Callable[[], Step]:
    """Return a function that creates a model with its optimizer, and returns its training step."""

    def begin() -> Step:
        model = build().train()
        stepper = optimizer(model.parameters())

        def step() -> None:
            model(**batch).loss.backward()
            stepper.step()
            stepper.zero_grad()

        return step

    return begin


def real() -> Iterator[str]:
    """Compare estimated peaks with the peaks of two real steps. Yields the lines of a table."""
    yield "| training step | optimizer | allocated at most | estimated | off by | estimating took |"
    yield "|---|---|--:|--:|--:|--:|"
    for title, (build, batch) in CASES.items():
        for name, optimizer in OPTIMIZERS.items():
            # The batch is created before the profiler starts, so the profiler does not count it.
            inputs = batch()
            held = sum(
                each.untyped_storage().nbytes()
                for each in {id(each): each for each in inputs.values()}.values()
            )
            with tempfile.TemporaryDirectory() as folder:
                most = max(allocated(training(build, inputs, optimizer), Path(folder))) + held
            start = time.perf_counter()
            found = lflops.estimate(
                lambda build=build: build().train(),
                kwargs=inputs,
                backward=True,
                loss=lambda out: out.loss,
                optimizer=optimizer,
            )
            seconds, peak = time.perf_counter() - start, memory(found).peak_bytes
            yield f"| {title} | {name} | {most / MIB:.1f} MiB | {peak / MIB:.1f} MiB | {peak / most - 1:+.2%} | {seconds:.1f} s |"


def on_cuda() -> Iterator[str]:
    """Compare estimated peaks with CUDA's allocator, if there is a GPU.

    The estimates do not use the GPU, only the name of its chip.
    """
    if not torch.cuda.is_available():
        yield "Against `torch.cuda.max_memory_allocated`, each tensor rounded up to 512 bytes: not run on CUDA."
        return
    chip = torch.cuda.get_device_name()
    yield f"| training step on {chip} | dtype | optimizer | allocated at most | asked for | estimated, rounded up to 512 bytes | off by |"
    yield "|---|---|---|--:|--:|--:|--:|"
    for title, (build, batch) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for name, optimizer in OPTIMIZERS.items():
                inputs = cast(batch(), dtype)
                most, asked = allocated_on_cuda(build, inputs, optimizer, dtype)
                found = lflops.estimate(
                    lambda build=build, dtype=dtype: build().to(dtype).train(),
                    kwargs=inputs,
                    backward=True,
                    loss=lambda out: out.loss,
                    optimizer=optimizer,
                    hardware=chip if lflops.hardware.lookup(chip) else None,
                    round_to=512,
                )
                peak = memory(found).peak_bytes
                sizes = " | ".join(f"{each / MIB:.1f} MiB" for each in (most, asked, peak))
                yield f"| {title} | {str(dtype).removeprefix('torch.')} | {name} | {sizes} | {peak / most - 1:+.2%} |"
    yield ""
    yield "Two steps each; the batch is in all figures, cuBLAS's workspace in none. What was asked for is not rounded. What is left are"
    yield "workspaces of other kernels, and blocks of the cache that were handed out whole."


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Convert the floating-point values of a batch to a dtype. Tokens stay unchanged."""
    return {
        name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()
    }


def allocated_on_cuda(
    build: Callable[[], nn.Module],
    batch: Batch,
    optimizer: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Return the peak of allocated bytes and the peak of requested bytes in two steps."""
    warm = torch.ones(8, 8, device="cuda", dtype=dtype)
    # This allocates cuBLAS's workspaces of both threads, which stay allocated.
    (warm.requires_grad_() @ warm).sum().backward()
    del warm
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, asked_before = (
        torch.cuda.memory_stats()[f"{each}_bytes.all.current"]
        for each in ("allocated", "requested")
    )
    step = training(
        lambda: build().to("cuda", dtype),
        {name: each.cuda() for name, each in batch.items()},
        optimizer,
    )()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return after["allocated_bytes.all.peak"] - before, after[
        "requested_bytes.all.peak"
    ] - asked_before


def llama() -> nn.Module:
    """Create a Llama of 70 billion parameters."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def mixture() -> nn.Module:
    """Create DeepSeek-V3, with 671 billion parameters and 256 experts per layer."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)).to(torch.bfloat16)


def large() -> Iterator[str]:
    """Estimate models that are larger than this machine's memory.

    Yields the lines of a table with the time and the memory that the estimates need.
    """
    heads = HIDDEN + 2 * KEY_HEADS * HIDDEN // HEADS
    a_layer = HIDDEN * (heads + HIDDEN + 3 * WIDE)
    by_formula = 2 * (
        LENGTH * (LAYERS * a_layer + HIDDEN * WORDS) + LAYERS * 2 * LENGTH * LENGTH * HIDDEN
    )
    yield "| forward and backward, bfloat16, batch 1 | parameters | forward | peak | took | more memory than before |"
    yield "|---|--:|--:|--:|--:|--:|"
    # The first estimate imports modules, which must not be part of the measured time.
    lflops.estimate(nn.Linear(2, 2), torch.ones(1, 2), backward=True)
    for title, build, length in (
        ("Llama-70B, length 4096", llama, LENGTH),
        ("DeepSeek-V3, length 512", mixture, 512),
    ):
        batch, before, start = tokens(100, 1, length)(), resident(), time.perf_counter()
        profile = lflops.estimate(build, kwargs=batch, backward=True, loss=lambda out: out.loss)
        seconds, more = time.perf_counter() - start, resident() - before
        root = profile.modules[""]
        yield (
            f"| {title} | {root.parameters / 1e9:.2f} G | {2 * root.forward.macs:,} FLOP | {memory(profile).peak_bytes / 2**30:,.1f} GiB "
            f"| {seconds:.1f} s | {more / MIB:.0f} MiB |"
        )
        if build is llama:
            total = 2 * sum(root.work(phase).macs for phase in ("forward", "backward", "recompute"))
            said = (
                "to the last digit"
                if (2 * root.forward.macs, 2 * root.backward.macs) == (by_formula, 2 * by_formula)
                else "NOT"
            )
    yield ""
    yield f"Llama's forward is the formula's {by_formula:,} FLOP {said}, its backward twice that; with attention's recompute {total:,}."


def small_gpt() -> nn.Module:
    """Create a GPT-2 of about 16 million parameters."""
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=8, use_cache=False)).train()


def limited() -> Iterator[str]:
    """Check `largest_batch` with real training runs in processes with limited memory.

    The batch that it returns should fit, and a batch of one and a half times its size should not.
    """
    room = 1 << 30
    how = {"loss": lambda out: out.loss, "optimizer": torch.optim.AdamW}
    found = lflops.largest_batch(
        small_gpt, lambda samples: tokens(50257, samples, 128)(), memory_bytes=room, **how
    )
    one = memory(
        lflops.estimate(small_gpt, kwargs=tokens(50257, 1, 128)(), backward=True, **how)
    ).peak_bytes
    own = int(trained(1).stdout) - one
    yield f"For a small GPT-2 with AdamW and 1 GiB of memory, `largest_batch` returns {found} samples. To check this, real training runs of two"
    yield f"steps ran in processes with limited address space: 1.05 GiB, plus {own / MIB:.0f} MiB for everything that is not in the estimate, as"
    yield "measured with one sample."
    yield ""
    yield "| samples | estimated | trains |"
    yield "|--:|--:|---|"
    for samples in (found, found * 3 // 2):
        peak = memory(
            lflops.estimate(small_gpt, kwargs=tokens(50257, samples, 128)(), backward=True, **how)
        ).peak_bytes
        process = trained(samples, own + room * 105 // 100)
        said = (
            "yes"
            if process.returncode == 0
            else f"no: {process.stderr.strip().splitlines()[-1][:60]}"
        )
        yield f"| {samples} | {peak / MIB:.1f} MiB | {said} |"


def trained(samples: int, limit: int = -1) -> subprocess.CompletedProcess[str]:
    """Run a process that trains on some samples, with a limit on its address space.

    The process prints the peak of its address space in bytes.
    """
    command = [sys.executable, __file__, "--train", str(samples), "--limit", str(limit)]
    return subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - ourselves


def train(samples: int, limit: int) -> None:
    """Train in the process that `trained` starts."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    step = training(small_gpt, tokens(50257, samples, 128)(), torch.optim.AdamW)()
    for _ in range(2):
        step()
    print(int(Path("/proc/self/status").read_text().split("VmPeak:")[1].split()[0]) * 1024)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--without-real",
        action="store_true",
        help="Leave the real trainings out: they take minutes and 8 GB.",
    )
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if options.train is not None:
        train(options.train, options.limit)
        return
    lines = [*large(), "", *bert()]
    if not options.without_real:
        left = "Each run has two steps. Both figures include the batch. The differences are workspaces of kernels, mainly of convolutions."
        lines += ["", *limited(), "", *real(), "", left]
    lines += ["", *on_cuda()]
    record("estimate.py", "Estimates", lines)


if __name__ == "__main__":
    main()
