"""Judge the findings of `lflops.explain` in training runs with known faults.

Reports how often the findings are right, which are wrong, and the saving if a fault is fixed.

python -m benchmarks.faults.judge DIR... [--half tuned|report] [--record]

Rules may be tuned on even seeds; odd seeds are for the report. A training run counts as faulty if
its fault costs at least 5 % of the step, or if the fault is not about time. The cost is the planted
time, or otherwise the difference on the stopwatch. A verdict is right if its first finding is the
fault.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import lflops
from benchmarks.results import record
from lflops.report.explanation import Explanation

# Faults that cost a smaller share of the step need not be found.
LEAST = 0.05
# Ranges of the share of CPU time that a training run lost to other programs, by their upper bounds.
LOST = {
    0.1: "0 to 10 %",
    0.5: "10 to 50 %",
    math.inf: "50 % or more",
}
TIMELESS = {
    "busy machine",
    "memory grows",
    "frozen",
    "eval mode",
    "threads",
    "find unused parameters",
    "padding",
    "unused work",
}
"""Faults whose cost is not the difference of two step times."""

ACCEPTED = {
    "data": {"data"},
    "outside": {"outside"},
    "slow module": {"slow"},
    "tiny operators": {"calls", "slow"},
    "wide dtype": {"dtype"},
    "recompute": {"recompute", "recomputed"},
    "unused work": {"unused"},
    "frozen": {"frozen"},
    "eval mode": {"eval_mode"},
    "padding": {"padding"},
    "hooks": {"python", "anomaly_mode"},
    "backward twice": {"backward_twice"},
    "clip": {"clip"},
    "optimizer": {"optimizer"},
    "outside all phases": {"other"},
    "logging": {"logging", "other"},
    "checkpoint": {"checkpoint"},
    "validation": {"validation"},
    "garbage collection": {"gc"},
    "compilation": {"compilation"},
    "graph breaks": {"graph_breaks"},
    "threads": {"threads"},
    "busy machine": {"busy", "not_scheduled"},
    "another thread": {"thread"},
    "memory grows": {"memory"},
    "ranks take turns": {"turns"},
    "small buckets": {"communication"},
    "find unused parameters": {"find_unused"},
    "communication": {"communication"},
}
"""For each label, the causes that count as the fault.

For the labels `slow rank: ...`, the rank counts instead.
"""


class Training:
    """A training run with a known fault, and the findings of lflops."""

    def __init__(self, folder: Path) -> None:
        self.truth: dict[str, Any] = json.loads((folder / "truth.json").read_text())
        self.found: Explanation = lflops.explain(folder)
        self.word: str = self.truth["word"]
        self.faults = [each for each in self.found.findings if each.is_issue]

    @property
    def cost(self) -> float:
        """Return the seconds of the fault in a step: as planted, or else as measured."""
        return float(self.truth["planted"] or self.truth["step"] - self.truth["without"])

    @property
    def is_asked(self) -> bool:
        """Return whether the fault is large enough to be found."""
        return bool(self.word) and (
            self.word in TIMELESS or self.cost >= LEAST * self.truth["step"]
        )

    def is_it(self, finding: Any) -> bool:
        """Return whether a finding is the fault."""
        if self.word.startswith("slow rank"):
            return finding.cause == "rank" and finding.rank == 1
        is_there = not self.truth["module"] or self.truth["module"] in finding.module
        return finding.cause in ACCEPTED[self.word] and is_there

    @property
    def is_first(self) -> bool:
        """Return whether the first finding is the fault.

        For a busy machine without findings, return whether lflops reports that the machine is busy.
        """
        if self.word == "busy machine" and not self.faults:
            return self.found.status == "cannot tell" and "busy" in self.found.because
        return bool(self.faults) and bool(self.word) and self.is_it(self.faults[0])


def table(trainings: list[Training]) -> Iterator[str]:
    """Yield the lines of a table by label, and the totals."""
    asked = [each for each in trainings if each.is_asked]
    by_word: dict[str, list[Training]] = defaultdict(list)
    for each in asked:
        by_word[each.word].append(each)
    yield "| planted | trainings | first | among the findings | said else | promised / reached |"
    yield "|---|--:|--:|--:|---|--:|"
    for word, rows in sorted(by_word.items()):
        there = [[finding for finding in each.faults if each.is_it(finding)] for each in rows]
        promised = [found[0].seconds if found else None for found in there]
        ratios = [
            seconds / each.cost
            for each, seconds in zip(rows, promised, strict=True)
            if seconds and each.cost > 0
        ]
        wrong = Counter(
            each.faults[0].cause if each.faults else each.found.status
            for each in rows
            if not each.is_first
        )
        said = ", ".join(f"{cause} {times}" for cause, times in wrong.most_common())
        ratio = f"{median(ratios):.2f}" if ratios else "–"
        yield f"| {word} | {len(rows)} | {sum(each.is_first for each in rows)} | {sum(map(bool, there))} | {said} | {ratio} |"
    first, named = sum(each.is_first for each in asked), [each for each in asked if each.faults]
    # For a busy machine, the report "cannot tell" is right, but it is not a finding.
    right = sum(each.is_first for each in named)
    clean = [each for each in trainings if not each.word]
    accused = [each for each in clean if each.faults]
    yield ""
    yield f"Recall: {first} of {len(asked)} faults come first ({share(first, len(asked))})."
    of = len(named) + len(accused)
    yield f"Precision: of {of} trainings of which anything is said, {right} have it right ({share(right, of)})."
    yield f"Clean: {len(accused)} of {len(clean)} are accused."
    for each in accused:
        yield f"- {each.truth['kind']}, seed {each.truth['seed']}: {each.faults[0].said}"
    yield ""
    yield from by_lost_time(asked)


def by_lost_time(asked: list[Training]) -> Iterator[str]:
    """Yield how many faults are the first finding, by the lost share of CPU time.

    This is the share that other programs used while modules were timed.
    """
    groups: dict[str, list[Training]] = defaultdict(list)
    for each in asked:
        lost = each.found.figures.get("lost_cpu_share")
        groups[
            "an unknown share"
            if lost is None
            else next(said for below, said in LOST.items() if lost < below)
        ].append(each)
    for said, among in sorted(groups.items()):
        silent = sum(each.found.status == "cannot tell" and not each.faults for each in among)
        yield f"- Others had {said}: {sum(each.is_first for each in among)} of {len(among)} come first, {silent} are *cannot tell*."


def by_cause(trainings: list[Training]) -> Iterator[str]:
    """Yield how often each cause is right when it is the first finding."""
    first: dict[str, list[bool]] = defaultdict(list)
    for each in trainings:
        if each.faults and (each.is_asked or not each.word):
            first[each.faults[0].cause].append(each.is_first)
    yield from ("", "| first finding | said | right |", "|---|--:|--:|")
    for cause, right in sorted(first.items()):
        yield f"| {cause} | {len(right)} | {sum(right)} |"


def share(part: int, whole: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def main() -> None:
    """Judge all training runs in the folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="one table each, as of a quiet and a busy machine",
    )
    parser.add_argument("--half", choices=("tuned", "report"), default="tuned")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    lines = []
    for folder in given.folders:
        found = map(Training, sorted(file.parent for file in folder.glob("*/truth.json")))
        trainings = [each for each in found if each.truth["seed"] % 2 == (given.half == "report")]
        loads = [each.truth["load"] for each in trainings]
        seeds = ", ".join(str(each) for each in sorted({each.truth["seed"] for each in trainings}))
        on = f"{len(trainings)} trainings of seeds {seeds}, on a machine with a load of {min(loads):.0f} to {max(loads):.0f}."
        lines += [on, "", *table(trainings), *by_cause(trainings), ""]
    if given.record:
        record("faults", "Known faults, and what is said of them", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
