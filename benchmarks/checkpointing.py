"""Check that `best_checkpointing` finds the best choice, and measure how long it takes.

The result is compared with every possible choice for 12 blocks, and the search is timed for Llama
405B.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

import lflops
from lflops.estimation.changes import checkpointed
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.planning.block_chain import cheapest_choice
from lflops.estimation.planning.block_trials import BlockTrials, policies_of

ROWS, HIDDEN, GIB = 32, 8, 2**30
WIDTHS = [64 * (3 + 5 * place % 12) for place in range(12)]
BUDGETS = 8


class Block(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the MLP to the input."""
        return x + self.down(torch.relu(self.up(x)))


def every_choice(blocks: int) -> Iterator[str]:
    """Compare the search with estimates of every choice, for several memory budgets.

    Yields the lines of a table.
    """
    model = nn.Sequential(*(Block(width) for width in WIDTHS[:blocks]))
    subject = Subject(model, (torch.zeros(ROWS, HIDDEN),), {}, lambda out: out.square().mean())
    estimator = Estimator(caller="benchmark", backward=True)
    peaks, flops = {}, {}
    with estimator.started() as run:
        trials = BlockTrials(estimator, run, lambda: subject)
        chain = trials.chain(fold=False)
        if chain is None:
            raise RuntimeError("there is no chain")
        for choices in product(("none", "full"), repeat=blocks):
            policies = policies_of(trials.units, choices)
            with checkpointed({name: model.get_submodule(name) for name in policies}, policies):
                profile = run(lambda: subject)
            peaks[choices] = profile.memory.peak_bytes if profile.memory is not None else 0
            flops[choices] = sum(
                cell.flops for cell in profile.op_counts if cell.phase == "recompute"
            )
    wrong = sum(chain.peak(choices) != peak for choices, peak in peaks.items())
    yield f"{blocks} blocks of different widths: {len(peaks):,} estimates."
    yield f"In {wrong:,} of them the predicted peak is another than the estimated one."
    yield ""
    yield "| budget | least FLOPs of all choices | FLOPs of the search's choice | its peak |"
    yield "|--:|--:|--:|--:|"
    lowest, highest = min(peaks.values()), max(peaks.values())
    for part in range(BUDGETS):
        budget = lowest + (highest - lowest) * part // (BUDGETS - 1)
        found = cheapest_choice(chain, ("none", "full"), budget)
        least = min(cost for choices, cost in flops.items() if peaks[choices] <= budget)
        yield (
            f"| {budget:,} | {least:,} | {flops[found]:,} | {peaks[found]:,} |"
            if found
            else f"| {budget:,} | {least:,} | none | |"
        )


def llama() -> Iterator[str]:
    """Measure the search for Llama 3.1 405B. Yields the plan, and the time that it takes."""
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    ids = torch.zeros(4, 4096, dtype=torch.long)
    start, cpu_start = time.perf_counter(), time.process_time()
    plan = lflops.best_checkpointing(
        lambda: LlamaForCausalLM(config).to(torch.bfloat16).train(),
        kwargs={"input_ids": ids, "labels": ids},
        loss=lambda out: out.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        memory_bytes=3200 * GIB,
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    yield "Llama 3.1 405B in bfloat16 with fused AdamW, 4 × 4,096 tokens on one device, for 3,200 GiB:"
    yield f"{plan.estimates} estimates in {seconds:.1f} s, of which {cpu_seconds:.1f} s on a processor."
    yield f"Predicted {plan.predicted_bytes:,} bytes, estimated {plan.peak_bytes:,}."
    yield ""
    yield from ("```", plan.table(), "```")


def main() -> None:
    """Write the section."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--blocks", type=int, default=12)
    blocks = arguments.parse_args().blocks
    record("checkpointing.py", "What to recompute", [*llama(), "", *every_choice(blocks)])


if __name__ == "__main__":
    main()
