"""A training does not notice that it is watched.

These are some of the cases of the whole matrix, which `make harmless` runs.
"""

import json
import subprocess
import sys

import pytest

from tests.harmless.case import Verdict
from tests.support.repository import ROOT

SECONDS = 300

CHOSEN = (
    # Ranks of Lightning log, while wrappers of the strategy's methods come and go.
    "Lightning 2: log sync_dist, in validation_step",
    "Lightning 2: log, two epochs, track=False",
    "Lightning 1: looks at the strategy, two epochs, track=False",
    # transformers: its control's flags, its history, its ranks.
    "transformers 1: logs each step",
    "transformers 2: plain",
    # Control flow in the counted step.
    "your own loop 1: cond",
    "your own loop 1: map",
    # Batches and outputs that nobody expects.
    "Lightning 1: batch integer COO",
    "Lightning 1: batch integer CSR",
    "Lightning 1: batch 0-d attention_mask",
    "your own loop 1: batch lazy",
    "your own loop 1: output opaque object",
    "your own loop 1: output dict subclass",
    # What the user has on the modules, and does between the steps.
    "your own loop 1: global module hooks",
    "your own loop 1: saved tensors hooks",
    "your own loop 1: pickled on the way",
    # A spread.
    "your own loop 1: raises",
    "Lightning 1: checkpoint of the best",
    "Lightning 1: manual",
    "Accelerate 2: accumulated",
    "Fabric 1: clipped",
)

FOUND = {
    "draws": ("your own loop 1: raises", "random numbers: torch"),
    "moves": ("your own loop 1: raises", "weights: body.0.weight"),
    "leaves a hook": ("your own loop 1: raises", "hooks on every module"),
    "calls the model": ("your own loop 1: global module hooks", "calls of hooks"),
    "leaves an attribute": ("your own loop 1: raises", "module: "),
    "leaves a mode": ("your own loop 1: raises", "left in the process"),
    "clears a flag": ("transformers 1: logs each step", "log_history"),
    "replaces reduce": ("Lightning 2: log sync_dist, in validation_step", "outcome (rank 0)"),
    "raises": ("your own loop 1: raises", "outcome"),
    "changes the exit": ("your own loop 1: raises", "status"),
}
"""What harms a training, in which case, and a fact that shows it."""

HANGS = {"sleeps": "your own loop 1: raises", "waits for others": "Accelerate 2: accumulated"}


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], Verdict]:
    """What the judge, a process that loads all drivers once, finds of all of them."""
    culprits = [f"{by}={name}" for by, name in HANGS.items()] + [
        f"{by}={name}" for by, (name, _) in FOUND.items()
    ]
    command = [sys.executable, "-m", "tests.harmless.judge", *culprits, *CHOSEN]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    found = [Verdict(**json.loads(line)) for line in ended.stdout.splitlines()]
    assert len(culprits) + len(CHOSEN) == len(found), ended.stderr
    return {(verdict.by, verdict.case): verdict for verdict in found}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_watched_training_is_the_same_one(
    name: str, verdicts: dict[tuple[str, str], Verdict]
) -> None:
    """In each of them a window was closed, so the monitor has really watched."""
    verdict = verdicts["lflops", name]
    assert ("equal", "", "") == (verdict.outcome, verdict.difference, verdict.off)
    assert verdict.windows


@pytest.mark.parametrize("by", FOUND)
def test_what_harms_a_training_is_found(by: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    """The check above can fail: of each of these, a fact that it must show differs."""
    name, fact = FOUND[by]
    verdict = verdicts[by, name]
    assert "different" == verdict.outcome
    assert fact in verdict.differing


@pytest.mark.parametrize("by", HANGS)
def test_what_hangs_is_ended(by: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    """With all its processes; and the report names the line that it waits in."""
    verdict = verdicts[by, HANGS[by]]
    assert "hung" == verdict.outcome
    assert "culprits.py" in verdict.difference
