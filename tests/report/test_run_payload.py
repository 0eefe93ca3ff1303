"""The ledger of a run as the page gets it, of two starts."""

from pathlib import Path
from typing import Any

from msgspec import json

from lflops.ledger.account import CATEGORIES, CAUSES
from lflops.ledger.ledger_file import load_run
from lflops.report.payload.payload import ledger_shown
from tests.support.ledgers import write_resumed_run


def test_the_page_gets_the_ledger_and_the_words_for_it(tmp_path: Path) -> None:
    """60 s, of which 10 s are down."""
    write_resumed_run(tmp_path)
    found: dict[str, Any] = json.decode(json.encode(ledger_shown(load_run(tmp_path))))
    assert ("1 min 0 s in 2 starts, 20 steps, rank 0 of 1", 60) == (
        found["title"],
        found["ledger"]["total"],
    )
    assert (CATEGORIES, CAUSES) == (found["categories"], found["causes"])
