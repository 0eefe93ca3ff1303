"""Raise KeyboardInterrupt at every line of lflops that runs during training.

Records the exception that reaches the user, and anything that remains.

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
"""Seconds that one training may take."""
NOT_REACHED = "(not reached)"
"""What comes out of a training that ended before its line."""

Place = tuple[str, int]
"""A file of the package and a line in it."""

Train = Callable[[], object]


class Outcome(NamedTuple):
    """What became of a training that was interrupted.

    Attributes:
        place: Where.
        came_out: The exception's class; empty if there was none.
        left: What is there that was not there before.
    """

    place: Place
    came_out: str
    left: list[str]


@contextmanager
def traced(at_line: Callable[[Place], None], only: Place | None = None) -> Iterator[None]:
    """Call a function before each line of the package that this thread runs.

    Given one line, where code that has it runs.
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
        return local if only is None or only[1] in {line for *_, line in code.co_lines()} else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(train: Train) -> list[Place]:
    """The lines that a training runs, in the order in which they first run."""
    seen: dict[Place, None] = {}
    with traced(seen.setdefault):
        train()
    return list(seen)


def lines_in_a_child(train: Train, *, once: bool = False) -> tuple[list[Place], list[Place]]:
    """The lines of a training in a process that trained before, and those that only the first one in a process runs.

    Args:
        train: The training.
        once: Whether a process can train but once, so that all lines are the first one's.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump([lines_of(train), [] if once else lines_of(train)], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        cold, warm = ([(file, number) for file, number in lines] for lines in json.load(pipe))
    os.waitpid(child, 0)
    return warm, [each for each in cold if each not in set(warm)]


def look() -> Facts:
    """What lflops could leave behind in this process."""
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
    facts = {
        name: value
        for name, value in {**process(), **modes(), **global_hooks()}.items()
        if name not in unstable
    }
    dynamo = sys.modules.get("torch._dynamo.callback")
    callbacks = (
        [] if dynamo is None else [Same(each) for each in dynamo.callback_handler.start_callbacks]
    )
    return facts | {
        "listeners": list(map(Same, LISTENERS)),
        "profilers": Same(profile._prepare_trace),
        "torch.compile's callbacks": callbacks,
    }


def outcome_of(train: Train, place: Place, look_at: Callable[[], Facts] = look) -> Outcome:
    """Train, with an interrupt before the first run of that line."""
    planted: list[bool] = []

    def at_line(now: Place) -> None:
        if now == place and not planted:
            planted.append(True)
            raise KeyboardInterrupt

    before, handler = look_at(), signal.getsignal(signal.SIGINT)
    came_out = ""
    try:
        with traced(at_line, place):
            train()
    except BaseException as error:  # noqa: BLE001 - it is what this is about
        came_out = type(error).__name__
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it once it was interrupted
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
    """The outcome at each place, from child processes.

    One goes on to the next place unless something was left.

    Args:
        train: What is interrupted.
        places: The lines.
        cold: Whether these are lines that only a first training runs. A module whose import was
            interrupted is imported again, so that one child reaches many of them; a line that it
            does not reach has a child to itself.
        once: Whether a process can train but once.
        look_at: What could be left.
    """
    waiting = list(places)
    while waiting:
        for outcome in _in_a_child(train, waiting[:1] if once else waiting[:], look_at, cold=cold):
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
    """Write a line for each outcome, in the child, until something is left, or a line that only a first training runs is not reached."""
    try:
        os.setsid()
        gc.freeze()  # what is loaded need not be looked through, nor copied, each time
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
    except BaseException:  # noqa: BLE001 - the parent sees that it is gone
        traceback.print_exc()
    os._exit(0)


def _end(child: int) -> None:
    """Wait for a child to end, and after five seconds end it."""
    end = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
