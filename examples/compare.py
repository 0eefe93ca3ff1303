"""Compare a training step with a saved baseline, for example in CI.

If a limit is violated, the exit status is 1.

python examples/compare.py --baseline good.profile.json   # the first call records the baseline
python examples/compare.py --baseline good.profile.json --max-memory 5%
python examples/compare.py --baseline good.profile.json --max-regress 3% --min-mfu 0.35
"""

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import torch
from torch import nn

import lflops


def build(hidden: int) -> nn.Module:
    """Build the model to measure."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 8)
    )


def main() -> int:
    """Measure the model, and compare the profile with the baseline if there is one."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", type=Path, default=Path("good.profile.json"))
    parser.add_argument(
        "--hidden",
        type=int,
        default=256,
        help="width of the hidden layers; a larger width violates the limits",
    )
    parser.add_argument("--repeats", type=int, default=30)
    given, limits = parser.parse_known_args()

    profile = lflops.measure(
        build(given.hidden), torch.randn(128, 64), backward=True, repeats=given.repeats
    )
    if not given.baseline.exists():
        profile.save(given.baseline)
        print(f"recorded the baseline {given.baseline}")
        return 0
    now = given.baseline.with_suffix(".now.json")
    profile.save(now)
    shell = [sys.executable, "-m", "lflops", "diff", str(given.baseline), str(now), *limits]
    return subprocess.run(shell, check=False).returncode  # noqa: S603 - the command is built above


if __name__ == "__main__":
    sys.exit(main())
