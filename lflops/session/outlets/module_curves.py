"""Curves of single modules: of the busiest few, once there are windows enough to draw a line through."""

from collections.abc import Iterable, Mapping
from operator import attrgetter

from lflops.analyze.analysis import Analysis
from lflops.profile.model import ModuleProfile, Phase, Profile

__all__ = ["FEWEST_WINDOWS", "ModuleCurves", "module_scalars"]

FEWEST_WINDOWS = 3
"""Two points are no curve."""

LEARNING: tuple[Phase, ...] = ("forward", "backward")

Point = tuple[dict[tuple[str, str], float], int]
"""Values by figure and modules, and the step that they are logged at."""


class ModuleCurves:
    """The curves of one stage, of so many modules; those that repeat are one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._windows = 0
        self._names: tuple[str, ...] = ()
        self._held_back: list[Point] = []

    def points(self, analysis: Analysis, step: int) -> list[Point]:
        """The points to log now: nothing before the third window, and then those of the first two as well."""
        if not self._names:
            self._names = tuple(each.pattern for each in analysis.busiest[: self._number])
        self._windows += 1
        self._held_back.append((module_scalars(analysis.profile, analysis.patterns, self._names), step))
        if self._windows < FEWEST_WINDOWS:
            return []
        points, self._held_back = self._held_back, []
        return points


def module_scalars(profile: Profile, patterns: Mapping[str, str], names: Iterable[str]) -> dict[tuple[str, str], float]:
    """Times and TFLOP/s of modules themselves, by figure and pattern; modules of one pattern are added up. What is unknown is left out."""
    scalars: dict[tuple[str, str], float] = {}
    rows_of: dict[str, list[ModuleProfile]] = {pattern: [] for pattern in names}
    for name, row in profile.modules.items():
        if (pattern := patterns[name]) in rows_of:
            rows_of[pattern].append(row)
    for pattern, rows in rows_of.items():
        label, total = pattern or "root", 0.0
        for phase in LEARNING:
            seconds = [each.median for each in map(attrgetter(f"{phase}.own_seconds"), rows) if each is not None]
            if seconds:
                scalars[f"{phase}_ms", label] = sum(seconds) * 1e3
                total += sum(seconds)
        if total and profile.is_counted:
            macs = sum(sum(map(attrgetter(f"{phase}.own_macs"), rows)) for phase in LEARNING)
            scalars["tflops", label] = 2 * macs / total / 1e12
    return scalars
