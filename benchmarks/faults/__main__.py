"""Train with one planted fault or none, and keep the files of lflops and the cost of the fault.

python -m benchmarks.faults DIR [--kinds data_waits nothing] [--seeds 0 1 2 3] [--minutes 20]

The runs are watched in the same way as by a user. Each training run has the folder `DIR/KIND-SEED`
with the files of lflops and `truth.json`. Runs with an existing folder are not repeated. Rules may
be tuned on even seeds; odd seeds are for the report. The cost of a fault is the difference of two
mean steps: of the watched run, without the steps of the window, and of the same run without the
fault and without lflops.
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
    """Run all training runs that do not exist yet."""
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
