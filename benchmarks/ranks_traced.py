"""Does waiting that is inferred agree with the traces?

Are a run's merged phases the same each time? Trainings over gloo, delays planted.

The model and the delays are those of `ranks.py`. Traced and hooked steps are different steps of one
run. The files of the traces are read here by themselves: the n-th collective of a rank is the n-th
of the others, and what it takes longer than on the rank that came last is waiting.

python benchmarks/ranks_traced.py [--runs 10] [--milliseconds 20]
"""

import argparse
import bisect
import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import KINDS, WAIT, Case, Ranks, profiled
from results import record

import lflops

TRACED = [
    *(
        (2, strategy, kind)
        for strategy in ("ddp", "fsdp", "tensor parallel")
        for kind in ("forward", "backward", "data")
    ),
    *((4, strategy, "forward") for strategy in ("ddp", "fsdp", "tensor parallel")),
]
PHASES = ("data", "forward", "backward", "optimizer")


class Traced(NamedTuple):
    """What a run says of its longest wait that traces know, and its first row.

    The waiting of each rank in the trace files.
    """

    place: str
    for_rank: int
    inferred: float
    traced: float
    in_files: dict[int, float]
    named: tuple[str, str, int] | None


def traced(case: Case, folder: str) -> Traced | None:
    """A traced training; `None` on all ranks but the first."""
    profile = profiled(case, Path(folder), trace=True)
    if profile is None or profile.trace is None or profile.rank_comparison is None:
        return None
    waits = [wait for wait in profile.rank_comparison.waits if wait.traced_seconds is not None]
    longest = max(waits, key=lambda wait: wait.seconds)
    rows = lflops.stragglers(profile).rows
    return Traced(
        f"{longest.module or '(root)'} {longest.phase}",
        longest.for_rank,
        longest.seconds,
        longest.traced_seconds or 0.0,
        waiting(profile.trace.files),
        (rows[0].module, rows[0].phase, rows[0].slow_rank) if rows else None,
    )


def waiting(files: Mapping[str, str]) -> dict[int, float]:
    """Seconds that each rank waits in the median step, from the files alone.

    Lightning's own broadcasts are left out.
    """
    ranks = {int(rank): collectives(Path(file)) for rank, file in files.items()}
    shortest = [
        [min(each) for each in zip(*step, strict=True)]
        for step in zip(*ranks.values(), strict=True)
    ]
    return {
        rank: statistics.median(
            sum(took) - sum(least) for took, least in zip(steps, shortest, strict=True)
        )
        for rank, steps in ranks.items()
    }


def collectives(file: Path) -> list[list[float]]:
    """Seconds of each in each step, in the order of their beginnings."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    begins = sorted(
        float(event["ts"])
        for event in events
        if event["name"].startswith("ProfilerStep#") and event["ph"] == "X"
    )
    ran = [
        event
        for event in events
        if event["name"].startswith("gloo:") and event["name"] != "gloo:broadcast"
    ]
    steps: list[list[float]] = [[] for _ in begins]
    for event in sorted(ran, key=lambda event: float(event["ts"])):
        steps[bisect.bisect_right(begins, float(event["ts"])) - 1].append(float(event["dur"]) / 1e6)
    return steps


def phases(case: Case, folder: str) -> dict[str, float] | None:
    """The medians of the merged clean steps' phases."""
    profile = profiled(case, Path(folder))
    if profile is None:
        return None
    clean = [
        step.phases for step in profile.steps if step.is_unprofiled and step.index >= WAIT // 2
    ]
    return {phase: statistics.median(each[phase] for each in clean) for phase in PHASES}


def agreement(seconds: float) -> Iterator[str]:
    """A line for each traced run."""
    yield "| ranks | strategy | planted | longest wait | inferred | in the traces, mean | all collectives of the median step | first row |"
    yield "|--:|---|---|---|--:|--:|--:|---|"
    off: list[float] = []
    for world in sorted({ranks for ranks, _, _ in TRACED}):
        group = Ranks(world)
        try:
            with tempfile.TemporaryDirectory() as folder:
                group.run(
                    traced, Case("ddp", "none", seconds, world, 0), folder
                )  # the first training of a process is slow
            for ranks, strategy, kind in TRACED:
                if ranks != world:
                    continue
                case = Case(strategy, kind, seconds, ranks, ranks - 1)
                with tempfile.TemporaryDirectory() as folder:
                    found, *_ = group.run(traced, case, folder)
                others = statistics.median(
                    waited for rank, waited in found.in_files.items() if rank != found.for_rank
                )
                off.append(abs(found.inferred - found.traced) / found.traced)
                first = (
                    "right"
                    if found.named == (*(KINDS[kind] or ("", "")), case.slow_rank)
                    else found.named
                )
                yield (
                    f"| {ranks} | {strategy} | {kind}, rank {case.slow_rank} | {found.place}, for rank {found.for_rank} "
                    f"| {1e3 * found.inferred:.1f} ms | {1e3 * found.traced:.1f} ms | {1e3 * others:.1f} ms | {first} |"
                )
        finally:
            group.end()
    yield ""
    yield f"Inferred against traced: off by {100 * statistics.median(off):.1f} % in the median, {100 * max(off):.1f} % at most."
    yield "The means in the traces hold what the machine's other programs took of single steps."


def same_phases(runs: int) -> Iterator[str]:
    """A line for each run with a delay of 50 ms in the data loader of rank 1."""
    yield f"| run | {' | '.join(PHASES)} |"
    yield f"|--:|{'--:|' * len(PHASES)}"
    group, found = Ranks(2), []
    try:
        for number in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                each, *_ = group.run(phases, Case("ddp", "data", 50e-3, 2, 1), folder)
            found.append(each)
            yield f"| {number + 1} | {' | '.join(f'{1e3 * each[phase]:.1f} ms' for phase in PHASES)} |"
    finally:
        group.end()
    yield ""
    yield spread_of([each["data"] for each in found])


def spread_of(data: Sequence[float]) -> str:
    """How far the runs differ."""
    inside = sum(50e-3 <= each <= 60e-3 for each in data)
    return f"The wait for data is 50 to 60 ms in {inside} of {len(data)} runs: {1e3 * min(data):.1f} to {1e3 * max(data):.1f} ms."


def main() -> None:
    """Train, and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--milliseconds", type=float, default=20)
    given = parser.parse_args()
    lines = [
        f"One rank takes {given.milliseconds:.0f} ms longer; all ranks trace. How long the median of the others waits for it a step:",
        "inferred from steps without a trace; known from the collectives in the traces, a mean over the traced steps; and all collectives",
        "of the median step, from the files.",
        "All processes share the machine's cores with other programs.",
        "",
        *agreement(given.milliseconds / 1e3),
        "",
        "Medians of the merged clean steps, under DDP with 50 ms planted in the data loader of one of two ranks:",
        "",
        *same_phases(given.runs),
    ]
    record("ranks_traced.py", "Waiting in traces, and the same phases in each run", lines)


if __name__ == "__main__":
    main()
