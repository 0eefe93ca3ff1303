"""Describe a training run that runs with and without a monitor, and the verdict on it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

__all__ = ["Case", "Facts", "Run", "Verdict", "Watch", "crossed"]

Facts = dict[str, Any]
"""The results of a training run, by name.

The values are compared and pickled, so they are strings, numbers, and lists of them.
"""


@dataclass(frozen=True)
class Watch:
    """The monitor of a training run.

    Attributes:
        by: "lflops", the name of a planted culprit, or "nobody" for a run without a monitor.
        settings: Settings of the lflops monitor.
    """

    by: str = "nobody"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        driver: Name of the driver, which has the loop.
        ranks: Number of processes.
        traits: Names of the driver's traits that change the run, in the order of their application.
        settings: Settings of the lflops monitor that differ from the usual ones.
    """

    driver: str
    ranks: int
    traits: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The name of the case: its driver, its ranks, its traits and its settings."""
        parts = list(self.traits) or ["plain"]
        parts += [f"{key}={value}" for key, value in self.settings]
        return f"{self.driver} {self.ranks}: {', '.join(parts)}"


def crossed(
    driver: str, ranks: Iterable[int], *axes: Iterable[str], **settings: Any
) -> Iterator[Case]:
    """Yield a case for each number of ranks and each combination of traits.

    An axis is a list of trait names, of which each case has one. The empty name means no trait.
    """
    for count, *traits in product(ranks, *axes):
        yield Case(driver, count, tuple(filter(None, traits)), tuple(settings.items()))


Run = Callable[[Case, Watch], Facts]
"""A function that runs a case in the current process, which is one of the case's ranks."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of a monitored run with the same run without a monitor.

    Attributes:
        case: Name of the case.
        by: The monitor: "lflops" or the name of a culprit.
        outcome: "equal", "different", "hung", "broken" if the run fails without a monitor, or
            "unsteady" if two runs without a monitor also differ.
        difference: The first difference, with both values.
        off: The warning of lflops if it turned itself off.
        windows: Number of profiles that lflops wrote.
        alone: The error with which the run ends without a monitor. Empty if there is none.
        seconds: Duration of both runs.
        differing: Names of all facts that differ.
    """

    case: str
    by: str
    outcome: str
    difference: str = ""
    off: str = ""
    windows: int = 0
    alone: str = ""
    seconds: float = 0.0
    differing: tuple[str, ...] = ()
