"""Test Ctrl-C at many lines of lflops: the user gets the exception, and nothing is left behind.

`benchmarks/interrupts.py` interrupts every line.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.support.repository import ROOT

PROGRAM = """
import json, sys, torch
sys.path.insert(0, "benchmarks")
import interrupts
from lflops.attribution import hooks
from tests.support.interrupts import interrupt_each, lines_in_a_child
torch.set_num_threads(1)
warm, _ = lines_in_a_child(interrupts.plain_without_trace)
rooms = (
    "error_guard", "integrations/loops", "monitoring/", "timing/", "ledger/", "attribution", "flop_counter/count.py"
)
places = [each for each in warm if each[0].startswith(rooms)]

def outcomes(chosen):
    found = []
    for each in interrupt_each(interrupts.plain_without_trace, chosen, look_at=interrupts.look_at_all):
        found.append("|".join([each.came_out, *each.left]))
    return found

usual = outcomes(places[7::90])
# Now lflops leaves its global hooks behind.
hooks.remove_hook = lambda *_: None
print(json.dumps([usual, outcomes(places[::1300])]))
"""
"""A program that interrupts every ninetieth line, and then a few lines of a faulty lflops.

It prints the outcomes of both as JSON. An outcome is the exception that the user got, and the names
of things that were left behind.
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are interrupted in forks")


@cache
def outcomes() -> tuple[list[str], list[str]]:
    """Return the outcomes with lflops as it is, and those with a hook that is not removed."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    usual, faulty = json.loads(ran.stdout.splitlines()[-1])
    return usual, faulty


def test_an_interrupt_at_any_line_arrives_and_leaves_nothing() -> None:
    """The user gets `KeyboardInterrupt`, and nothing is left behind.

    One of ninety lines is interrupted, in the files of lflops that install something.
    """
    usual, _ = outcomes()
    assert {"KeyboardInterrupt"} == set(usual)
    assert len(usual) >= 15


def test_a_hook_that_is_left_is_found() -> None:
    """The test above can fail: a hook that is not removed is found."""
    _, faulty = outcomes()
    assert any("hooks on every module" in each for each in faulty)
