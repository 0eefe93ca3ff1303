"""What a monitor was asked for, in one value, and how it is read from a line as `wait=2,active=5`, which the variable `LFLOPS` has."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from lflops.collect.count import Ignored
from lflops.collect.inputs.arguments import describe, is_whole
from lflops.collect.kineto.tracer import ACTIVITIES, Activity
from lflops.collect.ranks.topology import check_logical
from lflops.errors import CountError, HardwareError, ScheduleError
from lflops.hardware.chips import Hardware, named, names
from lflops.profile.model import Profile
from lflops.schedule import Schedule
from lflops.session.inputs.training import STAGES

DEFAULT_SCHEDULE = Schedule()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `FlopsMonitor`, which says what they mean, with the same defaults."""

    schedule: Schedule = DEFAULT_SCHEDULE
    stages: Collection[str] = ("train",)
    count: bool | Profile = True
    logical: Profile | None = None
    topology: Callable[[int], Mapping[str, int]] | None = None
    trace: bool = True
    trace_ranks: str | Collection[int] = "zero"
    activities: Collection[Activity] = ACTIVITIES
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    compiled: str = "row"
    module_depth: int = -1
    top_modules: int = 3
    detailed: bool = False
    ignore_modules: Ignored = ()
    output_file: str | PathLike[str] | None = None
    hardware: Hardware | str | None = "auto"
    track: bool = True
    html: bool = True
    ledger: bool = True
    module_scalars: int = 5
    units: Callable[[Any], Any] | None = None
    dirpath: str | PathLike[str] | None = None
    gather_timeout: float = 30.0
    on_error: str = "warn"
    on_oom: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ScheduleError(f"schedule={describe(self.schedule)}: give an lflops.Schedule")
        if not self.schedule.warmup and self.count is True:
            raise ScheduleError("warmup=0 leaves no step to count in: give warmup >= 1, or count=False")
        if not isinstance(self.hardware, Hardware | str | None):
            raise HardwareError(
                f"hardware={describe(self.hardware)}: give 'auto', 'measure', a chip's name, a TOML file, an lflops.Hardware, or None"
            )
        if isinstance(self.hardware, str):
            named(self.hardware) if self.hardware not in {"auto", "measure"} else names()  # which reads the user's table

    def check(self) -> None:
        """Raise a `CountError` unless the others can be; it names one that cannot, its value and what is taken."""
        for name, is_right, taken in self._rules():
            if not is_right:
                raise CountError(f"{name}={describe(getattr(self, name))}: give {taken}")
        if self.looks_inside_compiled and not self.trace:
            raise CountError("trace=False leaves nothing to divide compiled code by: give trace=True, or compiled='row'")
        check_logical("", self.logical)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """For each argument, whether its value can be, and what is taken."""
        given: dict[str, Any] = vars(self)
        for name in ("trace", "record_shapes", "profile_memory", "with_stack", "detailed", "track", "html", "ledger", "on_oom"):
            yield name, isinstance(given[name], bool), "True or False"
        for name, words in (("compiled", ("row", "modules")), ("on_error", ("warn", "raise"))):
            yield name, given[name] in words, " or ".join(map(repr, words))
        for name, known, least in (("stages", STAGES, 0), ("activities", ACTIVITIES, 1)):
            is_some = _is_list(given[name]) and len(given[name]) >= least and all(each in known for each in given[name])
            yield name, is_some, f"some of {', '.join(map(repr, known))}, in a tuple or a list"
        for name in ("output_file", "dirpath"):
            yield name, isinstance(given[name], str | PathLike | None), "a path, or None"
        for name, least in (("module_depth", -1), ("top_modules", 0), ("module_scalars", 0)):
            yield name, is_whole(given[name], least), f"a whole number, {least} or more"
        yield "count", isinstance(given["count"], bool | Profile), "True, False, or a Profile that was counted elsewhere"
        functions = {"units": "a batch to {'samples': n, 'tokens': n}", "topology": "a rank to its coordinates"}
        for name, what in functions.items():
            yield name, given[name] is None or callable(given[name]), f"a function from {what}, or None"
        timeout, ranks = given["gather_timeout"], given["trace_ranks"]
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        yield "gather_timeout", is_number and 0 < timeout < math.inf, "seconds, more than 0"
        are_ranks = all(map(is_whole, ranks)) if _is_list(ranks) else ranks in ("zero", "all")
        yield "trace_ranks", are_ranks, "'zero', 'all', or a list of ranks"

    def try_folder(self) -> None:
        """Check that files can be written to `dirpath`, and leave nothing of the trial. The main process does so before the run."""
        if self.dirpath is None:
            return
        folder = Path(self.dirpath).absolute()
        try:
            with TemporaryDirectory(dir=next(each for each in (folder, *folder.parents) if each.exists())):
                pass
        except OSError as error:
            raise CountError(f"dirpath={str(self.dirpath)!r}: {error.strerror}: give a folder that can be written") from error

    @property
    def looks_inside_compiled(self) -> bool:
        """Whether the time inside of compiled code is to be divided over modules."""
        return self.compiled == "modules"

    def traces_on(self, rank: int) -> bool:
        if isinstance(self.trace_ranks, str):
            return self.trace_ranks == "all" or rank == 0
        return rank in self.trace_ranks


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def settings_of(line: str) -> dict[str, Any]:
    """The arguments of a monitor that was asked for from outside, each of them checked.

    A window opens only when it is asked for, unless the line has a field of the schedule, or stages. An `LflopsError` where a name is not
    known, or its value cannot be.
    """
    given = arguments_of(line, Settings.__init__)
    settings = given if "schedule" in given else {"stages": ()} | given
    Settings(**settings).check()
    return settings


def arguments_of(line: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments in a line of names and values, for a function that makes a monitor, by the annotations of what it takes.

    A value may be several, with commas between them. The fields of the schedule are named as the function's own arguments are. A
    `CountError` where a name is not known or its value cannot be.
    """
    of_schedule = get_type_hints(Schedule)
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    settings = {name: reading for name, hint in (of_schedule | hints).items() if (reading := _reading(hint))}
    given: dict[str, Any] = {}
    for setting in filter(None, re.split(r",(?=[^,=]*=)", line)):
        name, equals, text = map(str.strip, setting.partition("="))
        if name not in settings:
            raise CountError(f"{name!r} is no setting; these are: {', '.join(settings)}")
        if not equals:
            raise CountError(f"{name} has no value: give {settings[name].taken}, as in {name}=…")
        try:
            given[name] = settings[name].read(text)
        except ValueError as error:
            raise CountError(f"{name}={text!r}: give {settings[name].taken}") from error
    schedule = {name: given.pop(name) for name in of_schedule if name in given}
    return given | ({"schedule": Schedule(**schedule)} if schedule else {})


class Reading(NamedTuple):
    """How a text becomes a value: what is taken, in words, and a function that raises `ValueError` on all else."""

    taken: str
    read: Callable[[str], Any]


def _reading(hint: Any) -> Reading | None:
    """How to read what is annotated so; `None` where no text can say it."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of({str(option).lower(): option for option in inner})
    if origin in {Union, UnionType}:
        return _first_of(inner)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return _several(_reading(inner[0]), list if origin is list else tuple)
    return None


def _one_of(words: dict[str, Any]) -> Reading:
    def read(text: str) -> Any:
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]

    return Reading(" or ".join(words), read)


def _first_of(hints: tuple[Any, ...]) -> Reading | None:
    """One after the other: `None` first, and text last, for any is one. That it may be `None` is no reason to have a setting."""
    nothing = [PLAIN[NoneType]] if NoneType in hints else []
    something = [reading for hint in hints if hint not in {NoneType, str} and (reading := _reading(hint))]
    something += [PLAIN[str]] if str in hints else []

    def read(text: str) -> Any:
        for each in nothing + something:
            try:
                return each.read(text)
            except ValueError:
                continue
        raise ValueError(text)

    return Reading(" or ".join(each.taken for each in something + nothing), read) if something else None


def _several(one: Reading | None, made: type) -> Reading | None:
    if one is None:
        return None
    read = one.read
    return Reading(f"{one.taken}, or several with commas between them", lambda line: made(read(text.strip()) for text in line.split(",")))


PLAIN = {
    NoneType: _one_of({"none": None}),
    bool: Reading("true or false", _one_of({"true": True, "1": True, "false": False, "0": False}).read),
    int: Reading("a whole number", int),
    float: Reading("a number", float),
    str: Reading("text", str),
}
