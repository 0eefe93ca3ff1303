"""List test files that share a slow start.

The files of a group run on one worker, and begin first.
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
"""What takes seconds to start, and the words in a test's file that tell of it.

It starts once for all of these files, on one worker.
"""


@cache
def scope_of(file: str) -> str:
    """What the file's tests share with other files, or the file itself."""
    path = ROOT / file
    text = (
        path.read_text("utf-8") if path.exists() else ""
    )  # a file that a test has written lies elsewhere
    return next(
        (name for name, words in STARTS.items() if any(word in text for word in words)), file
    )


def shares_first(nodeid: str) -> int:
    """A test's place by what it shares; what shares nothing comes last."""
    scope = scope_of(nodeid.partition("::")[0])
    return list(STARTS).index(scope) if scope in STARTS else len(STARTS)
