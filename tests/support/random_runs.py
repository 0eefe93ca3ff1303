"""Write random runs: a window and a ledger in one folder."""

import random
from pathlib import Path

from lflops.ledger.account import StepGroup
from lflops.profile.profile import Profile
from tests.report.test_one_report import by_chance
from tests.support.ledgers import row, write_start


def write_random_run(folder: Path, seed: int) -> Profile:
    """Write a training run of 5 to 60 steps with other work and one window, and return its profile.

    The same seed writes the same run.
    """
    chance = random.Random(seed)  # noqa: S311 - the run must be reproducible
    window = _training(seed)
    groups = [_group(chance, number) for number in range(chance.randint(5, 60))]
    spent = {"start_up": chance.uniform(0.1, 20), "lflops": chance.uniform(0.01, 2)}
    for name in ("validation", "checkpoint_save", "logging"):
        if chance.random() < 0.5:
            spent[name] = chance.uniform(0.001, 5)
    for group in groups:
        for phase, seconds in group.spent.items():
            name = f"training/{phase}"
            spent[name] = spent.get(name, 0.0) + seconds
    last = row(sum(spent.values()), spent, step=len(groups), ended="finished")
    write_start(folder, 1, [last], steps=groups)
    window.save(folder / "train-0-4.profile.json")
    return window


def _training(seed: int) -> Profile:
    """Return the random profile of this seed, or of a later seed if it is not of a training run."""
    while True:
        found = by_chance(seed)
        if found.run.kind == "training":
            return found
        seed += 1000


def _group(chance: random.Random, number: int) -> StepGroup:
    spent = {
        "data": chance.choice((1e-4, 1e-4, 0.5)),
        "forward": chance.uniform(0.05, 0.4),
        "backward": chance.uniform(0.05, 0.4),
        "optimizer": chance.uniform(1e-3, 0.1),
        "other": chance.uniform(0, 0.02),
    }
    return StepGroup(first=number, last=number, spent=spent, longest=sum(spent.values()))
