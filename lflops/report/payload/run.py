"""The ledger of a run as the page draws it."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, json

from lflops.ledger.account import CATEGORIES, CAUSES, Ledger
from lflops.ledger.run import load_run
from lflops.report.lines.ledger import end_lines, headline


class RunShown(Struct, frozen=True, kw_only=True):
    """A ledger, with what its page says of it."""

    title: str
    said: tuple[str, ...]  # the losses that are worth a line
    ledger: Ledger
    categories: Mapping[str, str]  # how each is called
    causes: Mapping[str, str]


def run_shown(ledger: Ledger) -> RunShown:
    said = tuple(line.strip() for line in end_lines(ledger, None)[1:])
    return RunShown(title=headline(ledger), said=said, ledger=ledger, categories=CATEGORIES, causes=CAUSES)


def encoded_run(folder: Path) -> bytes:
    """The last run in a folder, as JSON; a `ProfileError` where there is no ledger, or it cannot be read."""
    return json.encode(run_shown(load_run(folder)))
