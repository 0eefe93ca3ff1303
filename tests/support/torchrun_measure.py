"""Measure a batch on each rank. This script is started by torchrun.

The batches of the ranks have different sizes. The argument is the folder for the profiles.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import lflops
from tests.support.small_models import Block, between_linears, hidden, length

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = DistributedDataParallel(between_linears(Block()))
    profile = lflops.measure(
        model,
        torch.randn(1 + rank, length, hidden),
        backward=True,
        warmup=1,
        repeats=3,
        hardware=None,
    )
    profile.save(Path(sys.argv[1]) / f"rank{rank}.profile.json")
    distributed.destroy_process_group()
