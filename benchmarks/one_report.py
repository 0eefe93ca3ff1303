"""Whether all drawings of a report say the same.

Profiles of real trainings, each drawn everywhere and read back.

The trainings are those of `tests/harmless/cases.py`. Half of them know a peak, so that there is a
budget.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace as changed
from results import record

sys.path.insert(0, str(Path(__file__).parents[1]))

import lflops
from lflops.hardware.chips import Hardware
from tests.harmless.case import Case
from tests.harmless.cases import CASES
from tests.harmless.judge import judge, prepare
from tests.support.report_claims import claims, disagreements, wrong_sums

CHOSEN = (
    r"1: (plain|accumulated|manual|compiled|LBFGS|attention|LSTM|recomputed|cond|validated|two epochs|batch packed sequence|GPT-2|log|SGD"
    r"|stream|two models|curves|clipped|SWA|workers|no optimizer|epochs|plain, trace=True, html=True)$"
    r"|2: (plain|log|FSDP2|tensor parallel|no_sync, accumulated|validated|plain, trace=True, html=True)$|4: (plain|log|FSDP2|validated)$"
)
PEAK = Hardware("a peak for the test", {"fp32": 2e10}, 1e10)


class Reader:
    """Reads each profile as it is, and with a peak; keeps what was wrong."""

    def __init__(self) -> None:
        self.read: Counter[tuple[str, int]] = Counter()
        self.trainings: set[str] = set()
        self.facts = 0
        self.wrong: list[str] = []

    def __call__(self, case: Case, path: Path) -> None:
        """One file of a training."""
        measured = lflops.load(path)
        for profile in (measured, changed(measured, run=changed(measured.run, hardware=PEAK))):
            claimed = claims(profile)
            self.facts += sum(map(len, claimed.values()))
            wrong = [*disagreements(profile, claimed), *wrong_sums(profile)]
            self.wrong += [f"{case.name}: {each}" for each in wrong]
        self.read[case.driver, case.ranks] += 1
        self.trainings.add(case.name)


def lines(reader: Reader) -> Iterator[str]:
    """The section."""
    yield (
        f"{len(reader.trainings)} trainings with {sum(reader.read.values())} windows. Each profile is drawn as it is and with a peak; "
        "terminal, log, page, DeepSpeed's text, CSV and curves are read back and compared with the report, and parts with their sums."
    )
    yield ""
    yield "| loop | ranks | windows |"
    yield "|---|--:|--:|"
    for (driver, ranks), windows in sorted(reader.read.items()):
        yield f"| {driver} | {ranks} | {windows} |"
    yield ""
    yield f"{reader.facts:,} facts were read from terminal, log and page. Wrong: {len(reader.wrong)}."
    yield from (f"* {each}" for each in reader.wrong)


def main() -> None:
    """Train, read, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--matching",
        default=CHOSEN,
        help="a regular expression that is found in the names of the trainings",
    )
    chosen = [
        (CASES[name], "lflops") for name in CASES if re.search(parser.parse_args().matching, name)
    ]
    prepare()
    reader = Reader()
    for verdict in judge(chosen, read=reader):
        print(verdict.case, verdict.outcome, verdict.windows, file=sys.stderr, flush=True)
    record("one_report.py", "One report", list(lines(reader)))


if __name__ == "__main__":
    main()
