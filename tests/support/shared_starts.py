"""List test files that share a slow start, such as a browser.

All files of such a group run on one worker, and before the other files.
"""

from collections.abc import Mapping
from functools import cache

from tests.support.repository import ROOT

STARTS: Mapping[str, tuple[str, ...]] = {
    "a forkserver": ("tests.support.processes", "tests.support.trainer_ranks"),
    "a warm Python": ("tests.support.warm_python", "warm_python:"),
    "the simulated devices": (
        "tests.support.simulated",
        "tests.support import simulated",
        "tests.simulated",
    ),
    "a browser": ("tests.support.browser",),
}
"""Names of things that take seconds to start, and words in the test files that use them.

Each of them starts once for all of its files.
"""


@cache
def scope_of(file: str) -> str:
    """Return the slow start that a test file shares with other files, or the file's own name."""
    path = ROOT / file
    # A file that a test has written is not in the repository.
    text = path.read_text("utf-8") if path.exists() else ""
    for name, words in STARTS.items():
        if any(word in text for word in words):
            return name
    return file


def shares_first(nodeid: str) -> int:
    """Return a sort key that puts tests with a shared slow start first, group by group."""
    scope = scope_of(nodeid.partition("::")[0])
    return list(STARTS).index(scope) if scope in STARTS else len(STARTS)
