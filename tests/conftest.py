"""What tests ask for by name."""

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
from lflops.hardware import chips
from tests.support.browser import CHROMIUM
from tests.support.process_state import settle
from tests.support.shared_starts import scope_of, shares_first
from tests.support.warm_python import WarmPython

# What is loaded with the tests stays, and is looked through for garbage by no test: that took a
# twelfth of all their time.
gc.disable()

# The same examples on every day, and none judged by how long it took: a pass is no matter of luck.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# One thread here and in what the tests start, however many cores there are: in models as small more
# get in each other's way, and wait for each other at full load.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


# The programs that tests start print as they do where nobody says otherwise.
for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "PYTHONUNBUFFERED"):
    os.environ.pop(name, None)

# A process with all tests has millions of objects. Beside other programs, a search for profilers
# among them takes longer than a training run is made to wait.
garbage.LONGEST = 60.0

# An empty table: the chips of who runs the tests are not those of the tests.
os.environ["LFLOPS_CHIPS"] = os.devnull


def pytest_xdist_auto_num_workers() -> int:
    """Two workers more than there are cores for us.

    A third of the time, a worker waits for processes that its test has started.
    """
    return len(os.sched_getaffinity(0)) + 2


class SharedStarts(LoadScopeScheduling):
    """A file's tests run on one worker, and so do all files that share what takes long to start."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests together that share what takes long to start."""
    return SharedStarts(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests run in another order, to find those that need what others leave."""
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the tests in an order of this number's"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long to start, unless another order was asked for."""
    seed = config.getoption("--shuffle")
    if seed is None:
        items.sort(key=lambda item: shares_first(item.nodeid))
    else:
        random.Random(seed).shuffle(items)  # noqa: S311 - an order is no secret


def pytest_collection_finish() -> None:
    """From here on garbage is collected as everywhere, among what the tests themselves make."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; a test that asks for one is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs scripts in a process each, which need not load torch: that was done once for all."""
    with WarmPython() as python:
        yield python


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[None]:
    """What earlier tests have left goes before a module's tests compare what is open, and no garbage is collected while they do."""
    settle()
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000_000)
    yield
    gc.set_threshold(*threshold)


@pytest.fixture(autouse=True)
def _usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is as wide as where nobody says otherwise.

    Whoever runs the tests may have said so.
    """
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _no_chip_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after each test, the files of chips that it has passed as `hardware`."""
    monkeypatch.setattr(chips, "_given", {})


@pytest.fixture(autouse=True)
def _same_niceness() -> Iterator[None]:
    """No test makes the process nicer.

    It would stay so, and all that come after it would wait for other programs.
    """
    before = os.nice(0)
    yield
    assert before == os.nice(0), (
        "the test has changed the niceness of its process: let it run what does that in another one"
    )


@pytest.hookimpl(wrapper=True)
def pytest_unconfigure(config: pytest.Config) -> Iterator[None]:
    """Print as the last line that the browser tests were skipped, and how to get the browser."""
    yield
    if CHROMIUM is None and not hasattr(config, "workerinput"):
        print(  # noqa: T201
            "Skipped: the browser tests of the page, as there is no Chromium here. To run them: apt-get install chromium"
        )
