"""Run the tests of this folder in a separate process, because simulated devices cannot be unloaded.

The first of these tests that the original pytest process reaches starts a second pytest process.
This runs all selected tests of the folder and writes their outcomes to a file. The original process
reports these outcomes as its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lflops.timing.clock import event_seconds
from tests.support import simulated
from tests.support.repository import ROOT

HERE = Path(__file__).parent
WITHIN = "LFLOPS_TESTS_SIMULATED"
"""Environment variable with the path of the file for outcomes, set only in the second process."""

_told: dict[str, tuple[str, str]] = {}
"""Outcomes by test: the outcome, and the reason for a failure or a skip."""


def pytest_configure(config: pytest.Config) -> None:
    """Load the devices in the second process, before any test.

    Torch starts a thread for each device in the first backward, so they must be loaded before.
    """
    if WITHIN in os.environ:
        simulated.load()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write the outcome of a test to the file, in the second process."""
    report: Any = yield
    is_outcome = report.when == "call" or not report.passed
    if WITHIN in os.environ and is_outcome:
        why = report.longrepr[2] if report.skipped else report.longreprtext
        with Path(os.environ[WITHIN]).open("a", encoding="utf-8") as results:
            results.write(json.dumps([item.nodeid, report.outcome, why]) + "\n")
    return report  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> bool | None:
    """Set up the fixtures of this folder only in the second process."""
    if WITHIN in os.environ or not fixturedef.baseid.startswith(HERE.relative_to(ROOT).as_posix()):
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report the outcome of a test from the second process, which is started if necessary."""
    if WITHIN in os.environ:
        return None
    if simulated.MISSING is not None:
        pytest.skip(simulated.MISSING)
    if pyfuncitem.nodeid not in _told:
        _run([item for item in pyfuncitem.session.items if item.path.is_relative_to(HERE)])
    outcome, why = _told[pyfuncitem.nodeid]
    if outcome == "skipped":
        pytest.skip(why)
    if outcome == "failed":
        pytest.fail(why, pytrace=False)
    return True


def _run(items: list[pytest.Item]) -> None:
    """Run the tests in the second process, and store their outcomes in `_told`.

    Tests without an outcome count as failed, because the process crashed.
    """
    library = simulated.built()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            *(item.nodeid for item in items),
        ]
        environment = os.environ | {WITHIN: str(results), "PYTEST_ADDOPTS": ""}
        environment.pop("PYTEST_XDIST_WORKER", None)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
        )
        output = f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        crashed = f"{library.name}: the process ended with {done.returncode}\n{output}"
        for item in items:
            _told[item.nodeid] = ("failed", crashed)
        for line in results.read_text("utf-8").splitlines():
            nodeid, outcome, why = json.loads(line)
            _told[nodeid] = (outcome, why)


@pytest.fixture(autouse=True)
def _as_planted_by_default() -> Iterator[None]:
    """Reset the devices to their defaults after each test, and forget the measured event times."""
    if WITHIN in os.environ:
        event_seconds.cache_clear()
    yield
    if WITHIN in os.environ:
        simulated.reset()
        event_seconds.cache_clear()
