"""Train one client in this process, and write the measurements of the stopwatches.

python -m benchmarks.clients.worker CLIENT FOLDER [--watched] [--fault NAME --seconds S] [--phases]
"""

import argparse
import importlib
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients import step_logging
from benchmarks.clients.client import Run, seed_everything
from benchmarks.clients.stopwatch import FaultTimer, PhaseTimer, StepCounter

RESULT = "truth.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write `truth.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("client")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--fault")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--phases", action="store_true")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    os.chdir(given.folder)
    start = time.perf_counter()

    module = importlib.import_module(f"benchmarks.clients.packages.{given.client}")
    steps = StepCounter()
    faults = FaultTimer(given.fault, given.seconds, steps)
    run = Run(
        client=module.CLIENT,
        folder=given.folder,
        is_watched=given.watched,
        fault=given.fault,
        faults=faults,
        steps=steps,
        phases=PhaseTimer(steps) if given.phases else None,
    )
    step_logging.RUNS.append(run)
    # Some packages draw random numbers when they are imported.
    for name in module.CLIENT.imports:
        importlib.import_module(name)
    seed_everything()
    steps.start()
    if run.phases is not None:
        run.phases.start()
    module.train(run)

    truth = {
        "digest": run.result,
        "steps": len(steps),
        "median step": steps.median_seconds,
        "mean step": steps.mean_seconds,
        "calls": faults.calls,
        "planted": faults.seconds_per_step,
        "planted to the end": faults.seconds_per_step_to_the_end,
        "module": run.module,
        "phases": run.phases.shares if run.phases is not None else None,
        "seconds": time.perf_counter() - start,
    }
    (given.folder / RESULT).write_text(json.dumps(truth, indent=2))


if __name__ == "__main__":
    main()
