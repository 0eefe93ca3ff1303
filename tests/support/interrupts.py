"""Raise KeyboardInterrupt at every line of lflops that runs during training.

For each line, record the exception that reaches the user, and anything that is left behind.

A Python trace function raises KeyboardInterrupt when a line is about to run. Each training run is a
function. It is run once to find the lines that it executes, and then once for each of these lines.
"""

import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.autograd.profiler import profile

import lflops
from lflops.attribution.hooks import LISTENERS
from tests.support.process_state import Facts, Same, differences, global_hooks, modes, process

__all__ = [
    "NOT_REACHED",
    "Outcome",
    "Place",
    "interrupt_each",
    "lines_in_a_child",
    "lines_of",
    "look",
    "outcome_of",
]

PACKAGE = str(Path(lflops.__file__).parent)
LONGEST = 120.0
"""Seconds that one training run may take."""
NOT_REACHED = "(not reached)"
"""Value of `Outcome.came_out` for a training run that ended without running the line."""

Place = tuple[str, int]
"""A line of lflops: the path of the file within the package, and the line number."""

Train = Callable[[], object]


class Outcome(NamedTuple):
    """The result of a training run that was interrupted.

    Attributes:
        place: The line before which it was interrupted.
        came_out: Name of the class of the exception that reached the user; empty if none did.
        left: Differences between the state of the process before and after the training run.
    """

    place: Place
    came_out: str
    left: list[str]


@contextmanager
def traced(at_line: Callable[[Place], None], only: Place | None = None) -> Iterator[None]:
    """Call a function before each line of lflops that this thread runs.

    If `only` is given, only functions that contain this line are traced, which is faster.
    """
    within = PACKAGE if only is None else str(Path(PACKAGE, only[0]))

    def local(frame: Any, event: str, _arg: object) -> Any:
        if event == "line":
            at_line((frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_lineno))
        return local

    def called(frame: Any, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(within):
            return None
        if only is None:
            return local
        lines = {line for *_, line in code.co_lines()}
        return local if only[1] in lines else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(train: Train) -> list[Place]:
    """Return the lines of lflops that a training run executes, in the order of their first run."""
    seen: dict[Place, None] = {}
    with traced(seen.setdefault):
        train()
    return list(seen)


def lines_in_a_child(train: Train, *, once: bool = False) -> tuple[list[Place], list[Place]]:
    """Find the lines of two training runs in one child process.

    Args:
        train: The training run.
        once: Whether a process can train only once. There is then no second training run.

    Returns:
        The lines of the second training run, and the lines that only the first one executes.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        first = lines_of(train)
        second = [] if once else lines_of(train)
        with os.fdopen(writing, "w") as pipe:
            json.dump([first, second], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        first_lines, second_lines = json.load(pipe)
    os.waitpid(child, 0)
    cold = [(file, number) for file, number in first_lines]
    warm = [(file, number) for file, number in second_lines]
    known = set(warm)
    return warm, [each for each in cold if each not in known]


def look() -> Facts:
    """Return facts about this process that change if lflops leaves something behind.

    Facts that also change without lflops are left out.
    """
    unstable = {
        "threads",
        "files",
        "signals",
        "sys.settrace",
        "weakref.finalize",
        "atexit",
        "environment",
        "logging",
    }
    all_facts = process() | modes() | global_hooks()
    facts = {name: value for name, value in all_facts.items() if name not in unstable}
    dynamo = sys.modules.get("torch._dynamo.callback")
    callbacks = []
    if dynamo is not None:
        callbacks = [Same(each) for each in dynamo.callback_handler.start_callbacks]
    return facts | {
        "listeners": list(map(Same, LISTENERS)),
        "profilers": Same(profile._prepare_trace),
        "torch.compile's callbacks": callbacks,
    }


def outcome_of(train: Train, place: Place, look_at: Callable[[], Facts] = look) -> Outcome:
    """Train, and raise `KeyboardInterrupt` before the line runs for the first time."""
    planted: list[bool] = []

    def at_line(now: Place) -> None:
        if now == place and not planted:
            planted.append(True)
            raise KeyboardInterrupt

    before = look_at()
    handler = signal.getsignal(signal.SIGINT)
    came_out = ""
    try:
        with traced(at_line, place):
            train()
    except BaseException as error:  # noqa: BLE001 - any exception that reaches the user is recorded
        came_out = type(error).__name__
    finally:
        # After an interrupt, Lightning sets a handler that ignores the signal.
        signal.signal(signal.SIGINT, handler)
    for thread in threading.enumerate():
        if thread.name.startswith("lflops"):
            thread.join(30)
    return Outcome(place, came_out if planted else NOT_REACHED, differences(before, look_at()))


def interrupt_each(
    train: Train,
    places: Sequence[Place],
    *,
    cold: bool = False,
    once: bool = False,
    look_at: Callable[[], Facts] = look,
) -> Iterator[Outcome]:
    """Yield the outcome of an interrupt at each of these lines. The training runs in children.

    A child continues with the next line unless the interrupt has left something behind.

    Args:
        train: The training run.
        places: The lines.
        cold: Whether only the first training run of a process executes these lines. Then the child
            does not train first without an interrupt. One child can still reach many of these
            lines, because a module is imported again if its import was interrupted. A new child
            starts for a line that was not reached.
        once: Whether a process can train only once. Each line then has a separate child.
        look_at: Returns the facts that are compared before and after.
    """
    waiting = list(places)
    while waiting:
        for_child = waiting[:1] if once else waiting[:]
        for outcome in _in_a_child(train, for_child, look_at, cold=cold):
            waiting.pop(0)
            yield outcome


def _in_a_child(
    train: Train, places: Sequence[Place], look_at: Callable[[], Facts], *, cold: bool
) -> Iterator[Outcome]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _report(train, places, look_at, writing, cold=cold)
    os.close(writing)
    answered = 0
    with os.fdopen(reading) as pipe:
        while answered < len(places):
            ready, _, _ = select.select([pipe], [], [], LONGEST)
            line = pipe.readline() if ready else ""
            if not line:
                break
            answered += 1
            (file, number), came_out, left = json.loads(line)
            yield Outcome((file, number), came_out, left)
    _end(child)
    if not answered:
        yield Outcome(places[0], "(died or hung)", [])


def _report(
    train: Train, places: Sequence[Place], look_at: Callable[[], Facts], writing: int, *, cold: bool
) -> NoReturn:
    """Write a line of JSON for each outcome. This is the child process.

    It ends when an interrupt has left something behind, or when a cold line was not reached.
    """
    try:
        os.setsid()
        # Existing objects need not be searched by each garbage collection.
        gc.freeze()
        with os.fdopen(writing, "w", buffering=1) as pipe:
            if not cold:
                train()
            for number, place in enumerate(places):
                outcome = outcome_of(train, place, look_at)
                if cold and number and outcome.came_out == NOT_REACHED:
                    break
                pipe.write(json.dumps(outcome) + "\n")
                if outcome.left:
                    break
    except BaseException:  # noqa: BLE001 - the parent notices that the child has ended
        traceback.print_exc()
    os._exit(0)


def _end(child: int) -> None:
    """Wait for a child to end, and kill its process group after five seconds."""
    end = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
