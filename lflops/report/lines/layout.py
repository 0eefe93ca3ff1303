"""A report's facts as lines of text, for a terminal and for the log."""

from collections.abc import Iterator, Sequence

from lflops import units
from lflops.report.lines.report import Fact, Report


def verdict_lines(report: Report) -> Iterator[tuple[str, str]]:
    """Label and text: the verdict, why, what next, and how far to trust it."""
    said = report.verdict
    for label, lines in (("verdict", [said.said]), ("why", said.why), ("next", said.next), ("trust", [said.trust])):
        yield from (("" if index else label, line) for index, line in enumerate(lines) if line)


def speed_lines(facts: Sequence[Fact]) -> Iterator[tuple[str, str]]:
    """Label and text; parts are indented below their whole, and numbers stand below each other."""
    depth: dict[str, int] = {}
    width = max((len(fact.text) for fact in facts), default=0)
    one = facts[0].label if facts else ""
    for fact in facts:
        depth[fact.name] = depth.get(fact.of, -1) + 1
        share = "" if fact.share is None else f"{units.percent(fact.share):>7} of the {one}"
        rest = ", ".join(filter(None, (share, fact.remark)))
        yield f"{'  ' * depth[fact.name]}{fact.label}", f"{fact.text:>{width}}  {rest}".rstrip()
