"""Fixtures, the pytest options and hooks, and the process settings that all tests share."""

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from lflops import garbage
from lflops.cli import progress
from lflops.hardware import chips
from lflops.monitoring.window import live_metrics, window
from lflops.trace import annotate_in_background
from tests.support import stack_sampling
from tests.support.browser import CHROMIUM
from tests.support.process_state import settle
from tests.support.shared_starts import scope_of, shares_first
from tests.support.warm_python import WarmPython

# No garbage collection while the tests are imported. When collection is over, all existing objects
# are frozen (see `pytest_collection_finish`), because searching them took a twelfth of the time of
# all tests.
gc.disable()

# Hypothesis tries the same examples in every run, and no example fails because it was slow. So the
# result of a test does not depend on luck.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# Torch uses one thread in this process and in the processes that tests start. With models as small
# as these, more threads only wait for each other when all cores are busy.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


# Programs that tests start use their default output, whatever the developer's environment says.
for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "PYTHONUNBUFFERED"):
    os.environ.pop(name, None)

# A process with all tests has millions of objects. When other programs run too, a search for
# profilers among these objects takes longer than the one second that it may take in a training run.
garbage.LONGEST = 60.0

# Loggers of tests get all points of their curves. On a busy machine, a logger can take longer than
# lflops accepts, and then it would leave out points.
live_metrics.SLOW_LOGGERS = 60.0

# On a busy machine, a command can take longer than a few seconds, and tests read its error line.
progress.FIRST_SECONDS = 600.0

# The process that annotates a trace competes with all workers for the CPU, and tests wait for it. At
# a niceness of 19, the tests of one file took 172 s in a run of all tests, and at 0 they took 46 s.
annotate_in_background.NICENESS = 0

# Windows of tests have exactly the steps of their schedule. How many steps sample stacks depends on
# the time of the steps, so only tests with the fixture `samples_stacks` have such steps.
stack_sampling.turn_off()

# An empty table of chips replaces the table of the developer who runs the tests.
os.environ["LFLOPS_CHIPS"] = os.devnull


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores that this process may use, plus two.

    A worker spends a third of its time waiting for processes that its test has started.
    """
    return len(os.sched_getaffinity(0)) + 2


class SharedStarts(LoadScopeScheduling):
    """Run all tests of a file on one worker, and also all files that share a slow start."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Use the scheduler that keeps files with a shared slow start together."""
    return SharedStarts(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shuffle`, which helps to find tests that depend on what earlier tests leave behind."""
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the tests in a random order with this seed"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with a shared slow start first, or shuffle all tests if `--shuffle` is passed."""
    seed = config.getoption("--shuffle")
    if seed is None:
        items.sort(key=lambda item: shares_first(item.nodeid))
    else:
        random.Random(seed).shuffle(items)  # noqa: S311 - an order is no secret


def pytest_collection_finish() -> None:
    """Turn garbage collection on for the tests, but only for objects that they create."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def cuda() -> torch.device:
    """Return a CUDA device, or skip the test if there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture
def samples_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows request stack-sampling steps, as they do outside tests."""
    monkeypatch.setattr(window, "LEAST_SAMPLED_SECONDS", stack_sampling.USUAL)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Yield a `WarmPython`, which runs each script in a new process that has imported torch."""
    with WarmPython() as python:
        yield python


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[None]:
    """Clean up after earlier tests, and pause garbage collection during the tests of a module.

    The tests compare the open files, threads and other state of the process before and after a
    call, so nothing of earlier tests may disappear in between.
    """
    settle()
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000_000)
    yield
    gc.set_threshold(*threshold)


@pytest.fixture(autouse=True)
def _usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print with the default width, even if the developer's environment sets `COLUMNS`."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _no_chip_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each test, forget the files of chips that the test has passed as `hardware`."""
    monkeypatch.setattr(chips, "_given", {})


@pytest.fixture(autouse=True)
def _same_niceness() -> Iterator[None]:
    """Check that the test has not raised the niceness of its process.

    A process cannot lower it again, so all later tests would run slowly next to other programs.
    """
    before = os.nice(0)
    yield
    assert before == os.nice(0), (
        "the test has changed the niceness of its process: run the code that does this in a child"
    )


@pytest.hookimpl(wrapper=True)
def pytest_unconfigure(config: pytest.Config) -> Iterator[None]:
    """If there is no Chromium, print as the last line how to run the skipped browser tests."""
    yield
    if CHROMIUM is None and not hasattr(config, "workerinput"):
        print(  # noqa: T201
            "Skipped: the browser tests of the page, as there is no Chromium here. "
            "To run them: apt-get install chromium"
        )
