"""Measure the cost of counting: a counting step as a multiple of a plain step.

torch's FlopCounterMode is measured as well. All kinds of steps alternate in one process, so that
slow moments of the machine affect all of them equally. A ratio is the median over all rounds.
"""

import argparse
import contextlib
from collections.abc import Callable

import torch
from results import in_turn, record
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.count import Counting

NOISE = 0.2
"""Least share that FlopCounterMode must add to a step for a comparison with it.

Below this share, the noise of the machine is larger than the difference.
"""
THIN = {
    "hidden_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 1000,
}


def step_of(
    config: BertConfig, batch: int, length: int
) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Return a model and its training step."""
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (batch, length))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return model, step


def ratios(
    model: torch.nn.Module, step: Callable[[], None], rounds: int, *, cpu: bool
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a plain step, and the ratio to it of each way to count."""
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "plain": contextlib.nullcontext,
        "FlopCounterMode": lambda: FlopCounterMode(display=False),
        "lflops: MACs, FLOPs, scopes": lambda: Counting(
            {"": model}, options=CountOptions(traffic=False, memory=False)
        ),
        "lflops: all that `count` collects": lambda: Counting({"": model}),
    }
    return in_turn(ways, step, rounds, cpu=cpu)


def main() -> None:
    """Measure the two models, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="least CPU time in place of medians of seconds; prints, and records nothing",
    )
    rounds, cpu = (given := parser.parse_args()).rounds, given.cpu
    lines = [
        "| training step (AdamW) | plain | counted by | ratio to plain | extra, FlopCounterMode's = 1 |",
        "|---|--:|---|--:|--:|",
    ]
    cases = [
        # Launches dominate such a small step. Several threads would only slow each other down.
        (
            "BERT, 12 layers, hidden 48, batch 1, length 16, one thread (launch-bound)",
            BertConfig(**THIN),
            1,
            16,
            1,
            rounds,
        ),
        (
            "BERT-base, batch 4, length 128",
            BertConfig(),
            4,
            128,
            torch.get_num_threads(),
            max(rounds // 2, 5),
        ),
    ]
    for title, config, batch, length, threads, times in cases:
        torch.set_num_threads(threads)
        model, step = step_of(config, batch, length)
        plain, found = ratios(model, step, times, cpu=cpu)
        torchs = found["FlopCounterMode"] - 1
        for name, ratio in found.items():
            share = f"{(ratio - 1) / torchs:.2f}" if torchs > NOISE else "–"
            lines.append(f"| {title} | {plain * 1e3:.1f} ms | {name} | {ratio:.2f} | {share} |")
    lines += [
        "",
        f"Medians of {rounds} rounds (half of them for BERT-base), all kinds of step in turn in one process.",
    ]
    if cpu:
        print("\n".join(lines[:-2]), f"Least CPU time of {rounds} rounds.", sep="\n")
        return
    record("overhead.py", "What counting costs", lines)


if __name__ == "__main__":
    main()
