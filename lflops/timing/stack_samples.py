"""Sample the Python stack of the training thread, to name the user's function that takes the time.

Module timing shows which phase and which module take the time, but not which function, such as a
loss, a metric or the code that makes a batch. So in a few steps, a thread reads the stack of the
training thread about every millisecond. It can do so only when it gets Python's global lock: when
the training thread releases the lock, or at the end of Python's switch interval. Usually, this
interval is 5 ms, so that all samples of Python code that takes 4 ms would be at its end. So the
interval is shorter while samples are taken. Each sample is weighted by the time since the previous
sample.
"""

import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from lflops.attribution.user_hooks import LIBRARY_FOLDERS
from lflops.profile.records import MainFunction, ModulePhase
from lflops.timing.step_phases import PhaseMarks, named_phases

INTERVAL = 0.001
"""Seconds between two samples."""

SWITCH_INTERVAL = 0.0005
"""Python's switch interval while samples are taken, in seconds."""

AT_FULL_RATE = 1000
"""Number of samples of a step after which the interval becomes longer and longer."""

FEWEST_SAMPLES = 4
"""A function is the main function of a phase only if at least this many samples are in it."""

MAIN_SHARE = 0.5
"""A function is the main function of a phase if it takes at least this share of the phase."""

COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Names of code that belongs to the function around it."""

WITH_MODULES = frozenset({"forward", "backward", "inference"})
"""Phases whose time is divided among modules."""

WITHOUT_LOOP = frozenset({"data", "transfer", "optimizer", "backward"})
"""Phases in which the line of the training loop is no news, such as the call of `backward`."""

MOST_FUNCTIONS = 20
"""Maximum number of main functions in a profile. The functions with the longest phases are kept."""


class Call(NamedTuple):
    """A call of a function of the user that was running when a sample was taken.

    Attributes:
        line: The line of the function that was running.
        is_loop: Whether the function contains the training loop, or calls it.
    """

    code: CodeType
    line: int
    is_loop: bool


class StackSample(NamedTuple):
    """The stack of the training thread at one moment.

    Attributes:
        moment: The moment in nanoseconds, on the host clock.
        module: Name of the module that was running, or empty outside modules.
        calls: The running calls of the user's functions, the innermost first.
    """

    moment: int
    module: str
    calls: tuple[Call, ...]


class StackSampler:
    """Takes samples of the thread that calls `start`, until `stop` is called.

    Args:
        clock: Returns the current moment in nanoseconds.
        running_module: Returns the name of the module that is running, or "" outside modules.
    """

    def __init__(self, clock: Callable[[], int], running_module: Callable[[], str]) -> None:
        self._clock = clock
        self._running_module = running_module
        self._samples: list[StackSample] = []
        self._home = 0
        # The instruction at which each function on the stack was when `start` was called, by the id
        # of its code. A function that is still there has called the loop, but is not part of it.
        self._started_at: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._usual_interval = 0.0
        self._stopping = threading.Event()

    def start(self) -> None:
        """Take samples of the calling thread from now on. Does nothing if it already does so."""
        if self._thread is not None:
            return
        self._home = threading.get_ident()
        self._started_at = {}
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the public way makes a list
        while frame is not None:
            self._started_at.setdefault(id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        self._stopping = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(self._stopping,), name="lflops: stack samples", daemon=True
        )
        # Starting a thread fails if the system allows no further thread.
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread
            self._usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(self._usual_interval, SWITCH_INTERVAL))

    def stop(self) -> None:
        """Take no more samples. Can be called repeatedly."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            # Python rounds down to whole microseconds.
            sys.setswitchinterval(self._usual_interval + 5e-7)
            self._started_at = {}

    def take_samples(self) -> list[StackSample]:
        """Return the samples since the last call of this method."""
        number = len(self._samples)
        samples = self._samples[:number]
        del self._samples[:number]
        return samples

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(INTERVAL * max(1.0, len(self._samples) / AT_FULL_RATE)):
            frame = sys._current_frames().get(self._home)  # noqa: SLF001 - the documented function
            if frame is None:
                return
            calls = self._users_calls(frame)
            # A frame keeps the local variables of its function alive.
            del frame
            self._samples.append(StackSample(self._clock(), self._running_module(), calls))

    def _users_calls(self, innermost: FrameType) -> tuple[Call, ...]:
        """Return the calls of the user's functions in the stack, up to the training loop."""
        calls: list[Call] = []
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            began = self._started_at.get(id(code))
            if began == frame.f_lasti:
                break
            if is_users(code.co_filename) and code.co_name not in COMPREHENSIONS:
                calls.append(Call(code, frame.f_lineno, is_loop=began is not None))
            frame = frame.f_back
        return tuple(calls)


@cache
def is_users(filename: str) -> bool:
    """Return whether a source file is neither from an installed package nor from Python itself."""
    if filename.startswith("<"):
        return filename == "<stdin>" or filename.startswith("<ipython")
    path = Path(filename)
    if not path.is_absolute():
        return True
    if any(part in LIBRARY_FOLDERS for part in path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _OF_PYTHON_AND_LFLOPS)


_OF_PYTHON_AND_LFLOPS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    str(Path(__file__).parents[1]),
)


class _Place:
    """The samples of one phase and module.

    Attributes:
        samples: Number of samples.
        nanoseconds: The time of all samples.
        functions: The time of each function, including the functions that it calls.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.nanoseconds = 0
        self.functions: dict[CodeType, _Function] = {}

    def add(self, calls: Iterable[Call], nanoseconds: int) -> None:
        self.samples += 1
        self.nanoseconds += nanoseconds
        seen: set[CodeType] = set()
        for depth, call in enumerate(calls):
            # In a recursion, only the innermost call counts.
            if call.code not in seen:
                seen.add(call.code)
                function = self.functions.setdefault(call.code, _Function())
                function.add(call.line, nanoseconds, depth)

    def main_function(self) -> "tuple[CodeType, _Function] | None":
        """Return the innermost function with most of the time, or `None` if there is none."""
        main: tuple[CodeType, _Function] | None = None
        for code, function in self.functions.items():
            is_main = function.nanoseconds >= MAIN_SHARE * self.nanoseconds > 0
            if not is_main or function.samples < FEWEST_SAMPLES:
                continue
            if main is None or function.mean_depth < main[1].mean_depth:
                main = (code, function)
        return main


class _Function:
    """The samples in which a function was running.

    Attributes:
        lines: The nanoseconds of each line.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.nanoseconds = 0
        self.lines: dict[int, int] = {}
        self._depths = 0

    def add(self, line: int, nanoseconds: int, depth: int) -> None:
        self.samples += 1
        self.nanoseconds += nanoseconds
        self.lines[line] = self.lines.get(line, 0) + nanoseconds
        self._depths += depth

    @property
    def mean_depth(self) -> float:
        """The mean number of the user's functions that it was calling, directly or indirectly."""
        return self._depths / self.samples


class FunctionTimes:
    """Finds the main function of each phase and module, from the samples of several steps.

    Args:
        names: Phases that have another name in the profile.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._places: dict[ModulePhase, _Place] = {}

    def add(self, samples: Sequence[StackSample], step: PhaseMarks) -> None:
        """Add the samples of a step. `step` has the marks of its phases on the host clock."""
        marks, innermost, end = step
        phases = named_phases(innermost)
        previous = 0
        for sample in samples:
            number = bisect_right(marks, sample.moment) - 1
            if number < 0 or sample.moment > end:
                continue
            nanoseconds = sample.moment - max(marks[number], previous)
            previous = sample.moment
            phase = self._names.get(phases[number], phases[number])
            module = sample.module if phase in WITH_MODULES else ""
            calls: Iterable[Call] = sample.calls
            if phase in WITHOUT_LOOP or module:
                calls = takewhile(lambda call: not call.is_loop, calls)
            place = self._places.setdefault(ModulePhase(module, phase), _Place())
            place.add(calls, nanoseconds)

    def main_functions(self) -> tuple[MainFunction, ...]:
        """Return the main function of each phase and module that has one."""
        found = []
        longest = sorted(self._places.items(), key=lambda item: -item[1].nanoseconds)
        for (module, phase), place in longest:
            main = place.main_function()
            if main is not None:
                code, function = main
                found.append(
                    MainFunction(
                        phase=phase,
                        module=module,
                        name=code.co_qualname.rpartition("<locals>.")[2],
                        file=_shown(code.co_filename),
                        line=max(function.lines, key=function.lines.__getitem__),
                        samples=place.samples,
                        share=function.nanoseconds / place.nanoseconds,
                    )
                )
        return tuple(found[:MOST_FUNCTIONS])


def _shown(filename: str) -> str:
    """Return the path of a source file as it is reported."""
    path = Path(filename)
    if "ipykernel" in filename:
        return "notebook"
    # There is no working directory if it has been deleted.
    with suppress(OSError):
        path = path.resolve()
        if path.is_relative_to(Path.cwd()):
            return str(path.relative_to(Path.cwd()))
    return path.name
