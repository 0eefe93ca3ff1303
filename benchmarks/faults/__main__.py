"""Train with one fault or with none, watched as a user watches, and keep the profiles, the ledger and what the fault really costs.

python -m benchmarks.faults DIR [--kinds data_waits nothing] [--seeds 0 1 2 3] [--minutes 20]

Each training has its folder, `DIR/KIND-SEED`: what lflops wrote, and `truth.json`. Those that are
there are not run again. Rules may be tuned on even seeds; odd ones are for the report. What a fault
costs is the mean step of the watched training, without the steps of the window, over that of the
same training without the fault and unwatched.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

from benchmarks.faults.kinds import KINDS
from benchmarks.faults.training import in_processes


def main() -> None:
    """Train all that are not there yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    for seed in given.seeds:
        for name in given.kinds:
            folder = given.folder.absolute() / f"{name}-{seed}"
            if (folder / "truth.json").exists() or time.monotonic() > until:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            with_fault = in_processes(KINDS[name], name, seed, folder)
            without = in_processes(KINDS[name], name, seed, None)
            if with_fault is None or without is None:
                print(f"failed: {name} {seed}", file=sys.stderr, flush=True)
                continue
            truth = with_fault | {"without": without["step"], "load": os.getloadavg()[0]}
            (folder / "truth.json").write_text(json.dumps(truth, indent=2))
            cost = truth["step"] - truth["without"]
            print(
                f"{name} {seed}: {truth['loop']}, {truth['model']}, {1e3 * truth['step']:.1f} ms, {1e3 * cost:.1f} of them the fault",
                flush=True,
            )


if __name__ == "__main__":
    main()
