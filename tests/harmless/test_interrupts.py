"""Test Ctrl-C at many lines of lflops: the user gets the exception, and nothing is left behind.

`benchmarks/interrupts.py` interrupts every line.
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
"""Code that makes lflops leave its global hooks behind."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are interrupted in forks")


def outcomes(first: int, every: int, culprit: str = "") -> Counter[str]:
    """Interrupt each line with the index `first + n * every`, and count the outcomes.

    An outcome is the exception that the user got, and the names of things that were left behind.
    """
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
    """The user gets `KeyboardInterrupt`, and nothing is left behind.

    One of ninety lines is interrupted, in the files of lflops that install something.
    """
    found = outcomes(7, 90)
    assert {"KeyboardInterrupt"} == found.keys()
    assert found.total() >= 15


def test_a_hook_that_is_left_is_found() -> None:
    """The test above can fail: a hook that is not removed is found."""
    assert any("hooks on every module" in each for each in outcomes(0, 1300, CULPRIT))
