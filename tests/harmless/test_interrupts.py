"""Ctrl-C at lines all over lflops: the same exception arrives, and nothing is left.

`benchmarks/interrupts.py` takes every line.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.support.repository import ROOT

PROGRAM = """
import sys, torch
sys.path.insert(0, "benchmarks")
import interrupts
from tests.support.interrupts import interrupt_each, lines_in_a_child
torch.set_num_threads(1)
{culprit}
warm, _ = lines_in_a_child(interrupts.plain_without_trace)
rooms = (
    "error_guard", "integrations/loops", "monitoring/", "timing/", "ledger/", "attribution", "flop_counter/count.py"
)
places = [each for each in warm if each[0].startswith(rooms)]
for outcome in interrupt_each(interrupts.plain_without_trace, places[{first}::{every}], look_at=interrupts.look_at_all):
    print(outcome.came_out, *outcome.left, sep="|")
"""
CULPRIT = """
from lflops.attribution import hooks
hooks.remove_hook = lambda *_: None
"""
"""Global hooks that an undo forgets."""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="trainings are interrupted in forks"
)


def outcomes(first: int, every: int, culprit: str = "") -> Counter[str]:
    """What came out and what was left, of every so-manieth line from the first."""
    program = PROGRAM.format(first=first, every=every, culprit=culprit)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return Counter(ran.stdout.splitlines())


def test_an_interrupt_at_any_line_arrives_and_leaves_nothing() -> None:
    """One of ninety lines, in the rooms where something is installed."""
    found = outcomes(7, 90)
    assert {"KeyboardInterrupt"} == found.keys()
    assert found.total() >= 15


def test_a_hook_that_is_left_is_found() -> None:
    """The check above can fail."""
    assert any("hooks on every module" in each for each in outcomes(0, 1300, CULPRIT))
