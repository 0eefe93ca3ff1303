"""Does a rank hold what was estimated?

One rank's estimated peak against real processes over gloo, by their storages.
"""

import logging
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record
from torch.optim import SGD, AdamW

from tests.support.processes import Ranks
from tests.support.rank_memory import CASES, Size, rank_peak

WORLDS = (2, 4)
SIZES = {
    "wide": Size(width=512, wide=2048, blocks=4, samples=64),
    "long": Size(width=128, wide=512, blocks=6, samples=4096),
}
"""Mostly parameters, and mostly activations."""
OPTIMIZERS = (AdamW, SGD)
HEAD = [
    "| strategy | ranks | model | optimizer | estimated, MiB | held, MiB | difference, bytes |",
    "|---|--:|---|---|--:|--:|--:|",
]


def rows() -> list[tuple[str, int, str, str, int, list[int]]]:
    """For each case the estimated peak and that of each rank."""
    found = []
    for world in WORLDS:
        cases = {name: case for name, case in CASES.items() if world >= case.least}
        with tempfile.TemporaryDirectory() as folder, Ranks(world, Path(folder)) as ranks:
            for name, case in cases.items():
                for model, size in SIZES.items():
                    for optimizer in OPTIMIZERS:
                        real = ranks.run(partial(rank_peak, name, size, world, optimizer))
                        estimated = case.estimated(size, world, optimizer)
                        found.append((name, world, model, optimizer.__name__, estimated, real))
                        print(*found[-1], file=sys.stderr, flush=True)
    return found


def section(found: list[tuple[str, int, str, str, int, list[int]]]) -> list[str]:
    """The section's lines: the largest difference, and the table."""
    table, largest, share = [], 0, 0.0
    for name, world, model, optimizer, estimated, real in found:
        far = max(real, key=lambda each: abs(each - estimated))
        largest, share = max(largest, abs(estimated - far)), max(share, abs(estimated / far - 1))
        table.append(
            f"| {name} | {world} | {model} | {optimizer} | {estimated / 2**20:.2f} | {far / 2**20:.2f} | {estimated - far} |"
        )
    sizes = "; ".join(
        f"*{name}*: {each.blocks} blocks, {each.width} to {each.wide}, {each.samples} samples"
        for name, each in SIZES.items()
    )
    return [
        f"The largest difference is {largest} bytes, {100 * share:.5f} %. Real ranks are processes over gloo that make three steps.",
        "The bytes of all their storages are summed before and after every operator, and the rank farthest off is listed.",
        "What gloo copies for itself is not among them: its reduce-scatter copies the gradients of a block.",
        f"Models are {sizes}.",
        "",
        *HEAD,
        *table,
    ]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    record("memory_ranks.py", "One rank's memory", section(rows()))
