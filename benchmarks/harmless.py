"""Check that lflops does not change a training run.

Pairs of equal training runs, with and without the monitor, are compared bit by bit.

The cases come from `tests/harmless/cases.py`, which combines loops, numbers of ranks, and features
of training runs. A regular expression selects some of the cases.
"""

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from results import record

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.harmless.case import Case, Verdict
from tests.harmless.cases import AXES, CASES
from tests.harmless.culprits import CULPRITS
from tests.harmless.judge import judge, prepare

OUTCOMES = ("equal", "different", "hung", "unsteady", "broken")
COLUMNS = ("cases", *OUTCOMES, "windows", "gave up")


def table(title: str, groups: Iterable[tuple[str, Sequence[Verdict]]]) -> Iterator[str]:
    """Yield a table of how the pairs of each group ended."""
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield f"|---|{'--:|' * len(COLUMNS)}"
    for name, verdicts in groups:
        ended = Counter(verdict.outcome for verdict in verdicts)
        numbers = [len(verdicts), *(ended[each] for each in OUTCOMES)]
        numbers += [
            sum(verdict.windows for verdict in verdicts),
            sum(bool(verdict.off) for verdict in verdicts),
        ]
        yield f"| {name} | {' | '.join(map(str, numbers))} |"


def lines(verdicts: Sequence[Verdict], seconds: float, processes: int) -> Iterator[str]:
    """Yield the lines of the section."""
    yield (
        f"{len(verdicts)} training runs were each made with and without the monitor, in separate processes, {processes} at a time. "
        f"This took {seconds:.0f} s."
    )
    yield (
        "The comparison includes losses, weights, gradients, the states of optimizers and schedulers, the output of loggers and callbacks, "
        "files, the next random numbers, the number of calls of the user's hooks and modules, printed text, exceptions, exit codes, and "
        "what remains in the process after the run."
    )
    yield ""
    by_driver: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: CASES[verdict.case].driver):
        by_driver.setdefault(CASES[verdict.case].driver, []).append(verdict)
    yield from table("loop", [*by_driver.items(), ("all", verdicts)])
    yield ""
    yield "*Windows* are the profiles that were written; *gave up* are training runs in which the monitor logged a warning and turned itself off."
    found = [verdict for verdict in verdicts if verdict.outcome != "equal"]
    if found:
        yield from ("", "| differs | how | first difference |", "|---|---|---|")
        yield from (
            f"| {each.case} | {each.outcome} | {_cell(each.difference)} |" for each in found
        )
    off = [verdict for verdict in verdicts if verdict.off]
    if off:
        yield from ("", "| gave up | because |", "|---|---|")
        yield from (
            f"| {each.case} | {_cell(each.off.partition('goes on: ')[2])} |" for each in off
        )


def by_axis(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a table with a row for each kind of traits. A run may be in several rows."""
    groups = []
    for axis, members in AXES.items():
        group = [verdict for verdict in verdicts if _has(CASES[verdict.case], members)]
        if group:
            groups.append((axis, group))
    yield from table("axis", groups)


def _has(case: Case, members: frozenset[str]) -> bool:
    return bool(
        members.intersection(case.traits) or members.intersection(name for name, _ in case.settings)
    )


def _cell(text: str) -> str:
    return (
        re.sub(r"(/[\w.+-]+)+/(?=[\w.+-])", "", text).replace("|", "\\|").replace("\n", " ")[:240]
    )


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "matching", nargs="?", default="", help="a regular expression that finds the names of cases"
    )
    parser.add_argument(
        "--by",
        default="lflops",
        choices=["lflops", *CULPRITS],
        help="a planted culprit in place of the monitor",
    )
    parser.add_argument("--processes", type=int, default=2, help="busy ones at a time")
    asked = parser.parse_args()
    chosen = [case for name, case in CASES.items() if re.search(asked.matching, name)]
    prepare()
    start, verdicts = time.monotonic(), list[Verdict]()
    for verdict in judge([(case, asked.by) for case in chosen], processes=asked.processes):
        verdicts.append(verdict)
        if verdict.outcome != "equal":
            print(f"{verdict.outcome}: {verdict.case}: {verdict.difference}", flush=True)
        if not len(verdicts) % 50:
            print(
                f"{len(verdicts)} of {len(chosen)} pairs, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    print("\n".join(by_axis(verdicts)))
    written = list(lines(verdicts, time.monotonic() - start, asked.processes))
    if asked.matching or asked.by != "lflops":
        print("\n".join(written))
    else:
        record("harmless.py", "Whether a training notices", written)
    sys.stdout.flush()
    # A normal exit would take long, because many libraries are loaded.
    os._exit(any(verdict.outcome != "equal" for verdict in verdicts))


if __name__ == "__main__":
    main()
