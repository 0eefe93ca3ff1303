"""Compare the latency that `get_model_profile` prints with a plain timing loop.

Runs the functions of lflops and of DeepSpeed on five models.
"""

import argparse
import contextlib
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed.profiling.flops_profiler import get_model_profile as deepspeeds
from results import keep_freed_memory, record

from lflops.integrations.deepspeed.api import get_model_profile as ours
from tests.support.alexnet import AlexNet

PASSES = 9
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

Case = tuple[nn.Module, Mapping[str, Any]]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield models of common sizes with small batches.

    The last model has many tiny layers, so launches dominate its time.
    """
    images = torch.randn(2, 3, 224, 224)
    ids = torch.randint(50257, (1, 128))
    yield "AlexNet, 2 images", (AlexNet(), {"x": images})
    yield (
        "GPT-2, 128 tokens",
        (GPT2LMHeadModel(GPT2Config()), {"input_ids": ids, "use_cache": False}),
    )
    yield "ViT-Base, 2 images", (ViTForImageClassification(ViTConfig()), {"pixel_values": images})
    yield (
        "MobileNetV2, 2 images",
        (MobileNetV2ForImageClassification(MobileNetV2Config()), {"pixel_values": images}),
    )
    layers = [layer for _ in range(100) for layer in (nn.Linear(8, 8), nn.ReLU())]
    yield (
        "100 tiny layers, each with a ReLU",
        (nn.Sequential(*layers), {"input": torch.randn(4, 8)}),
    )


def plain(case: Case) -> float:
    """Return the median seconds of a loop around the model."""
    model, batch = case
    seconds = []
    for _ in range(PASSES + 2):
        start = time.perf_counter()
        model(**batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def printed(profile: Callable[..., object], case: Case) -> float:
    """Return the seconds of forward that a report prints."""
    model, batch = case
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
        path = Path(folder) / "report.txt"
        profile(model, kwargs=dict(batch), warm_up=2, detailed=False, output_file=str(path))
        number, unit = re.findall(r"fwd latency: +([\d.]+) (\w+)", path.read_text())[0]
    return float(number) * SECONDS[unit]


def main() -> None:
    """Measure all three ways alternately on each model, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    lines = ["| model | plain loop | lflops prints | DeepSpeed prints |", "|---|--:|--:|--:|"]
    for title, case in cases():
        case[0].eval()
        found = []
        for _ in range(rounds):
            before = plain(case)
            found.append((before, printed(ours, case), printed(deepspeeds, case), plain(case)))
        truth, lflops, deepspeed = (
            statistics.median(each)
            for each in zip(
                *(((a + b) / 2, mine, theirs) for a, mine, theirs, b in found), strict=True
            )
        )
        ratios = [
            statistics.median(
                value / ((a + b) / 2) - 1 for a, *values, b in found for value in [values[place]]
            )
            for place in (0, 1)
        ]
        cells = [
            f"{seconds * 1e3:.2f} ms ({ratio:+.1%})"
            for seconds, ratio in zip((lflops, deepspeed), ratios, strict=True)
        ]
        lines.append(f"| {title} | {truth * 1e3:.2f} ms | {' | '.join(cells)} |")
    lines += [
        "",
        f"All times are medians of {rounds} rounds. In each round, the plain loop ({PASSES} passes) runs before and after lflops and",
        "DeepSpeed. The percentages are the medians of the differences in each round. One thread, evaluation mode; autograd records",
        "gradients, as in DeepSpeed's profiler.",
    ]
    record("latency.py", "The latency that is printed", lines)


if __name__ == "__main__":
    main()
