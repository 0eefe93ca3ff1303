"""Test the ledger of a run as the page receives it."""

from pathlib import Path
from typing import Any

from msgspec import json

from lflops.ledger.account import CATEGORIES, CAUSES
from lflops.ledger.ledger_file import load_run
from lflops.report.payload.payload import ledger_shown
from tests.support.ledgers import write_resumed_run


def test_the_page_gets_the_ledger_and_the_words_for_it(tmp_path: Path) -> None:
    """The page receives the ledger, a title, and the words for categories and causes.

    The run takes 60 s with two starts.
    """
    write_resumed_run(tmp_path)
    found: dict[str, Any] = json.decode(json.encode(ledger_shown(load_run(tmp_path))))
    assert "1 min 0 s in 2 starts, 20 steps, rank 0 of 1" == found["title"]
    assert 60 == found["ledger"]["total"]
    assert CATEGORIES == found["categories"]
    assert CAUSES == found["causes"]
