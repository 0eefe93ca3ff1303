"""What a monitor was asked for, in one value."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lflops.collect.count import Ignored
from lflops.collect.inputs.arguments import describe
from lflops.collect.kineto.tracer import ACTIVITIES, Activity
from lflops.collect.ranks.unsharded import check_logical
from lflops.errors import CountError, HardwareError, ScheduleError
from lflops.hardware.chips import Hardware, named, names
from lflops.profile.model import Profile
from lflops.schedule import Schedule
from lflops.session.inputs.training import STAGES

__all__ = ["DEFAULT_SCHEDULE", "Settings"]

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
    activities: Collection[Activity] = ("cpu", "cuda")
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
        self._check_hardware()

    def check(self) -> None:
        """Raise a `CountError` unless the others can be; it names one that cannot, its value and what is taken."""
        for name in ("trace", "record_shapes", "profile_memory", "with_stack", "detailed", "track", "html", "on_oom"):
            if not isinstance(getattr(self, name), bool):
                raise CountError(f"{name}={describe(getattr(self, name))}: give True or False")
        self._check_choices()
        self._check_ranks()
        self._check_paths()
        if not isinstance(self.count, bool | Profile):
            raise CountError(f"count={describe(self.count)}: give True, False, or a Profile that was counted elsewhere")
        check_logical("", self.logical)
        for name, least in (("module_depth", -1), ("top_modules", 0), ("module_scalars", 0)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CountError(f"{name}={describe(value)}: give a whole number, {least} or more")
        if self.units is not None and not callable(self.units):
            raise CountError(f"units={describe(self.units)}: give a function from a batch to {{'samples': n, 'tokens': n}}, or None")
        if self.on_error not in {"warn", "raise"}:
            raise CountError(f"on_error={self.on_error!r}: give 'warn' or 'raise'")

    def try_folder(self) -> None:
        """See that files can be written to `dirpath`, and leave nothing of the trial. The main process does so before the run."""
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
        """Whether this rank is one of those that trace."""
        if isinstance(self.trace_ranks, str):
            return self.trace_ranks == "all" or rank == 0
        return rank in self.trace_ranks

    def _check_choices(self) -> None:
        if self.compiled not in ("row", "modules"):
            raise CountError(f"compiled={describe(self.compiled)}: give 'row' or 'modules'")
        if self.looks_inside_compiled and not self.trace:
            raise CountError("trace=False leaves nothing to divide compiled code by: give trace=True, or compiled='row'")
        for name, known in (("stages", STAGES), ("activities", tuple(ACTIVITIES))):
            value: object = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Collection) or not value or any(each not in known for each in value):
                raise CountError(f"{name}={describe(value)}: give some of {', '.join(map(repr, known))}, in a tuple or a list")

    def _check_paths(self) -> None:
        for name in ("output_file", "dirpath"):
            if not isinstance(getattr(self, name), str | PathLike | None):
                raise CountError(f"{name}={describe(getattr(self, name))}: give a path, or None")

    def _check_ranks(self) -> None:
        if self.topology is not None and not callable(self.topology):
            raise CountError(f"topology={describe(self.topology)}: give a function from a rank to its coordinates, or None")
        timeout: object = self.gather_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise CountError(f"gather_timeout={describe(timeout)}: give seconds, more than 0")
        ranks: object = self.trace_ranks
        if isinstance(ranks, str):
            if ranks not in {"zero", "all"}:
                raise CountError(f"trace_ranks={ranks!r}: give 'zero', 'all', or a list of ranks")
        elif not isinstance(ranks, Collection) or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in ranks):
            raise CountError(f"trace_ranks={describe(ranks)}: give 'zero', 'all', or a list of ranks")

    def _check_hardware(self) -> None:
        if not isinstance(self.hardware, Hardware | str | None):
            raise HardwareError(
                f"hardware={describe(self.hardware)}: give 'auto', 'measure', a chip's name, a TOML file, an lflops.Hardware, or None"
            )
        if isinstance(self.hardware, str):
            named(self.hardware) if self.hardware not in {"auto", "measure"} else names()  # which reads the user's table
