"""Test that a training run with a monitor has the same results as without a monitor.

These are some of the cases in `tests/harmless/cases.py`. `make harmless` runs all of them.
"""

import json
import subprocess
import sys

import pytest

from tests.harmless.case import Verdict
from tests.support.repository import ROOT

SECONDS = 300

CHOSEN = (
    # Lightning ranks log while wrappers of the strategy's methods are installed and removed.
    "Lightning 2: log sync_dist, in validation_step",
    "Lightning 2: log, two epochs, track=False",
    "Lightning 1: looks at the strategy, two epochs, track=False",
    # transformers: the flags of its control, its log history, its ranks.
    "transformers 1: logs each step",
    "transformers 2: plain",
    # Control flow operators in the counting step.
    "your own loop 1: cond",
    "your own loop 1: map",
    # Unusual batches and outputs.
    "Lightning 1: batch integer COO",
    "Lightning 1: batch integer CSR",
    "Lightning 1: batch 0-d attention_mask",
    "your own loop 1: batch lazy",
    "your own loop 1: output opaque object",
    "your own loop 1: output dict subclass",
    # The user's hooks on modules, and the user's code between steps.
    "your own loop 1: global module hooks",
    "your own loop 1: saved tensors hooks",
    "your own loop 1: pickled on the way",
    # Other kinds of cases.
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
"""For each culprit (a monitor that harms the run): a case, and a fact that must then differ."""

HANGS = {"sleeps": "your own loop 1: raises", "waits for others": "Accelerate 2: accumulated"}
"""For each culprit that never returns: a case."""


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], Verdict]:
    """The verdicts of all cases, by the name of the monitor or culprit and of the case.

    One process, the judge, runs all cases, because it takes long to import all drivers.
    """
    culprits = [f"{by}={name}" for by, name in HANGS.items()]
    culprits += [f"{by}={name}" for by, (name, _) in FOUND.items()]
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
    """No fact differs, and lflops did not turn itself off.

    At least one window was closed, so lflops really profiled the run.
    """
    verdict = verdicts["lflops", name]
    assert ("equal", "", "") == (verdict.outcome, verdict.difference, verdict.off)
    assert verdict.windows


@pytest.mark.parametrize("by", FOUND)
def test_what_harms_a_training_is_found(by: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    """The test above can fail: for each culprit, the expected fact differs."""
    name, fact = FOUND[by]
    verdict = verdicts[by, name]
    assert "different" == verdict.outcome
    assert fact in verdict.differing


@pytest.mark.parametrize("by", HANGS)
def test_what_hangs_is_ended(by: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    """A run that hangs is killed, and the report names the file in which it waits."""
    verdict = verdicts[by, HANGS[by]]
    assert "hung" == verdict.outcome
    assert "culprits.py" in verdict.difference
