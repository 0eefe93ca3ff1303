"""The settings of a monitor, and a parser for settings in a line such as `wait=2,active=5`."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote

from torch import nn

from lflops.errors import CountError, HardwareError, ScheduleError
from lflops.hardware.chips import Hardware, named, names
from lflops.inputs.arguments import describe, is_whole
from lflops.monitoring.inputs.training import STAGES
from lflops.monitoring.schedule import Schedule
from lflops.profile.profile import Profile
from lflops.ranks.collect.topology import check_logical
from lflops.trace.record.tracer import ACTIVITIES, Activity

P = ParamSpec("P")
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Settings:
    """The arguments of every monitor. `FlopsMonitor` documents them."""

    schedule: Schedule = Schedule()
    _: KW_ONLY
    stages: Sequence[str] = ("train",)
    count: bool | Profile = True
    trace: bool = True
    trace_ranks: str | Sequence[int] = "zero"
    activities: Sequence[Activity] = ("cpu", "device")
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    compiled: str = "row"
    module_depth: int = -1
    top_modules: int = 3
    detailed: bool = False
    ignore_modules: Iterable[str | type[nn.Module]] = ()
    output_file: str | PathLike[str] | None = None
    hardware: Hardware | str | None = "auto"
    track: bool = True
    units: Callable[[Any], Any] | None = None
    topology: Callable[[int], Mapping[str, int]] | None = None
    logical: Profile | None = None
    gather_timeout: float = 30.0
    html: bool = True
    ledger: bool = True
    module_scalars: int = 0
    dirpath: str | PathLike[str] | None = None
    on_error: str = "warn"
    on_oom: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ScheduleError(f"schedule={describe(self.schedule)}: pass an lflops.Schedule")
        if not self.schedule.warmup and self.count is True:
            raise ScheduleError(
                "warmup=0 leaves no step for counting: pass warmup >= 1, or count=False"
            )
        if not isinstance(self.hardware, Hardware | str | None):
            raise HardwareError(
                f"hardware={describe(self.hardware)}: pass 'auto', 'measure', a chip's name,"
                " the path of a TOML file, an lflops.Hardware, or None"
            )
        if not isinstance(self.hardware, str):
            return
        if self.hardware in {"auto", "measure"}:
            # This reads the user's table of chips, and raises an error if the table is wrong.
            names()
        else:
            named(self.hardware)

    def check(self) -> None:
        """Check the arguments that `__post_init__` does not check.

        Raises:
            CountError: An argument is wrong; the message has its name, its value and the valid
                values.
        """
        for name, is_valid, valid in self._rules():
            if not is_valid:
                raise CountError(f"{name}={describe(getattr(self, name))}: pass {valid}")
        if self.looks_inside_compiled and not self.trace:
            raise CountError(
                "compiled='modules' needs a trace, but trace=False: pass trace=True, or "
                "compiled='row'"
            )
        check_logical("", self.logical)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """For each argument, yield its name, whether its value is valid, and the valid values."""
        given: dict[str, Any] = vars(self)
        for name in (
            "trace",
            "record_shapes",
            "profile_memory",
            "with_stack",
            "detailed",
            "track",
            "html",
            "ledger",
            "on_oom",
        ):
            yield name, isinstance(given[name], bool), "True or False"
        for name, words in (("compiled", ("row", "modules")), ("on_error", ("warn", "raise"))):
            yield name, given[name] in words, " or ".join(map(repr, words))
        for name, known, least in (("stages", STAGES, 0), ("activities", ACTIVITIES, 1)):
            is_some = (
                _is_list(given[name])
                and len(given[name]) >= least
                and all(each in known for each in given[name])
            )
            yield name, is_some, f"a tuple or a list with some of {', '.join(map(repr, known))}"
        for name in ("output_file", "dirpath"):
            yield name, isinstance(given[name], str | PathLike | None), "a path, or None"
        for name, least in (("module_depth", -1), ("top_modules", 0), ("module_scalars", 0)):
            yield name, is_whole(given[name], least), f"a whole number, {least} or more"
        yield (
            "count",
            isinstance(given["count"], bool | Profile),
            "True, False, or a Profile from lflops.count or lflops.counting",
        )
        functions = {
            "units": "a batch and returns {'samples': n, 'tokens': n}",
            "topology": "a rank and returns its coordinates, such as {'data': 0, 'tensor': 1}",
        }
        for name, what in functions.items():
            yield (
                name,
                given[name] is None or callable(given[name]),
                f"a function that takes {what}, or None",
            )
        timeout = given["gather_timeout"]
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        yield "gather_timeout", is_number and 0 < timeout < math.inf, "a number of seconds above 0"
        ranks = given["trace_ranks"]
        are_ranks = all(map(is_whole, ranks)) if _is_list(ranks) else ranks in ("zero", "all")
        yield "trace_ranks", are_ranks, "'zero', 'all', or a list of ranks"

    def try_folder(self) -> None:
        """Check that files can be written to `dirpath`.

        If the folder does not exist yet, its nearest existing parent is checked. The check leaves
        no files behind. The main process calls this method before the run.

        Raises:
            CountError: No file can be written to the folder.
        """
        if self.dirpath is None:
            return
        folder = Path(self.dirpath).absolute()
        try:
            existing = next(each for each in (folder, *folder.parents) if each.exists())
            with TemporaryDirectory(dir=existing):
                pass
        except OSError as error:
            raise CountError(
                f"dirpath={str(self.dirpath)!r}: {error.strerror}:"
                " pass a folder in which files can be created"
            ) from error

    @property
    def looks_inside_compiled(self) -> bool:
        """Return whether the time in compiled code is divided among modules."""
        return self.compiled == "modules"

    def traces_on(self, rank: int) -> bool:
        if isinstance(self.trace_ranks, str):
            return self.trace_ranks == "all" or rank == 0
        return rank in self.trace_ranks


def takes(
    kind: Callable[P, Settings],
) -> Callable[[Callable[[Owner, Settings], None]], Callable[Concatenate[Owner, P], None]]:
    """Decorate an `__init__(self, settings)` so that callers pass the arguments of `Settings`.

    The decorated `__init__` creates a `Settings` object from these arguments. So their names, types
    and defaults are defined only in `Settings`.
    """

    def around(init: Callable[[Owner, Settings], None]) -> Callable[Concatenate[Owner, P], None]:
        instance, *_ = inspect.signature(init).parameters.values()
        of_settings = inspect.signature(kind)
        signature = of_settings.replace(parameters=[instance, *of_settings.parameters.values()])

        @functools.wraps(init)
        def from_arguments(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            # The error of a wrong argument names the caller's class, not `Settings`.
            signature.bind(self, *args, **kwargs)
            init(self, kind(*args, **kwargs))

        # `help` and Lightning's CLI read this signature.
        vars(from_arguments)["__signature__"] = signature
        return from_arguments

    return around


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def settings_of(line: str) -> dict[str, Any]:
    """Read the arguments of a monitor from one line, such as `wait=2,active=5`, and check them.

    Commas separate the settings, but a value may contain commas too. A value is parsed as the type
    of the argument's default. In `dirpath`, `%2C` means a comma, as in a URL. The fields of the
    schedule, such as `wait`, are written like other arguments. If the line contains neither a field
    of the schedule nor `stages`, no window is scheduled: windows open only on request.

    Raises:
        LflopsError: A name is unknown, or a value is wrong.
    """
    schedule_defaults = {field.name: field.default for field in fields(Schedule)}
    defaults = schedule_defaults | {field.name: field.default for field in fields(Settings)}
    known = [name for name in defaults if name not in OBJECTS]
    given: dict[str, Any] = {}
    for setting in filter(None, re.split(r",(?=[^,=]*=)", line)):
        name, equals, text = map(str.strip, setting.partition("="))
        if name not in known:
            raise CountError(f"{name!r} is not a setting: use one of {', '.join(known)}")
        valid, read = _reader_of(defaults[name])
        if not equals:
            raise CountError(f"the setting {name!r} has no value: pass {valid}, as in {name}=…")
        try:
            given[name] = _SPECIAL.get(name, read)(text)
        except (KeyError, ValueError) as error:
            raise CountError(f"{name}={text!r}: pass {valid}") from error
    schedule = {name: given.pop(name) for name in schedule_defaults if name in given}
    if schedule:
        settings = given | {"schedule": Schedule(**schedule)}
    else:
        settings = {"stages": ()} | given
    Settings(**settings).check()
    return settings


OBJECTS = {"schedule", "units", "topology", "logical"}
"""The arguments whose values cannot be written as text."""

SWITCHES = {"true": True, "1": True, "false": False, "0": False}


def _reader_of(default: Any) -> tuple[str, Callable[[str], Any]]:
    """Return a description of an argument's valid values, and a function that parses one value.

    Both depend only on the type of the argument's default.
    """
    if isinstance(default, bool):
        return "true or false", lambda text: SWITCHES[text.lower()]
    if isinstance(default, int):
        return "a whole number", int
    if isinstance(default, float):
        return "a number", float
    if isinstance(default, tuple):
        return "one word, or several words separated by commas", _several
    return "a text, or none", lambda text: None if text.lower() == "none" else text


def _several(text: str) -> tuple[str, ...]:
    return tuple(map(str.strip, text.split(",")))


def _ranks(text: str) -> str | list[int]:
    """Parse `trace_ranks`: a word such as `zero`, or ranks separated by commas."""
    ranks = _several(text)
    if all(map(str.isdigit, ranks)):
        return [int(rank) for rank in ranks]
    return text.lower()


def _folder(text: str) -> str | None:
    """Parse `dirpath`, in which characters may be percent-encoded as in a URL."""
    if text.lower() == "none":
        return None
    # A path may have bytes that are not UTF-8.
    return unquote(text, errors="surrogateescape")


_SPECIAL: dict[str, Callable[[str], Any]] = {"trace_ranks": _ranks, "dirpath": _folder}
"""Parsers for settings that cannot be parsed as the type of their default."""
