"""The tests of this folder run in a process of their own, as the simulated devices change a process for good.

The process that pytest was started in only passes on what they say. It starts the other one with
the first of them, for all that it runs.
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
"""Names the file for the results, in the process that has the devices."""

_told: dict[
    str, tuple[str, str]
] = {}  # of each test that has run: its outcome, and why it failed or was skipped


def pytest_configure(config: pytest.Config) -> None:
    """In the process that has the devices, load them first.

    Torch starts its threads with the first backward.
    """
    if WITHIN in os.environ:
        simulated.load()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note what a test says, for the process that asked."""
    report: Any = yield
    if WITHIN in os.environ and (report.when == "call" or not report.passed):
        with Path(os.environ[WITHIN]).open("a", encoding="utf-8") as results:
            why = report.longrepr[2] if report.skipped else report.longreprtext
            results.write(json.dumps([item.nodeid, report.outcome, why]) + "\n")
    return report  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> bool | None:
    """Set up this folder's fixtures only where the devices are."""
    if WITHIN in os.environ or not fixturedef.baseid.startswith(HERE.relative_to(ROOT).as_posix()):
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Say what the test has said in the other process."""
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
        crashed = f"{library.name}: the process ended with {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        _told.update({item.nodeid: ("failed", crashed) for item in items})
        _told.update(
            {
                nodeid: (outcome, why)
                for nodeid, outcome, why in map(json.loads, results.read_text("utf-8").splitlines())
            }
        )


@pytest.fixture(autouse=True)
def _as_planted_by_default() -> Iterator[None]:
    """No test sees what another one has planted, or what was found out about it."""
    if WITHIN in os.environ:
        event_seconds.cache_clear()
    yield
    if WITHIN in os.environ:
        simulated.reset()
        event_seconds.cache_clear()
