"""One training that is run with and without a monitor, and its name."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

__all__ = ["Case", "Facts", "Run", "Verdict", "Watch", "crossed"]

Facts = dict[str, Any]
"""What became of a training, by name.

Values are compared and pickled, so they are texts, numbers, and lists of them.
"""


@dataclass(frozen=True)
class Watch:
    """How a training is watched.

    Attributes:
        by: "nobody", "lflops", or the name of a planted culprit.
        settings: Of lflops' monitor.
    """

    by: str = "nobody"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        driver: The loop that runs it.
        ranks: Processes.
        traits: What is special about it: names of the driver's traits, applied in this order.
        settings: Of the monitor, where they are not the usual ones.
    """

    driver: str
    ranks: int
    traits: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Its driver, its ranks, its traits."""
        settings = [f"{key}={value}" for key, value in self.settings]
        return f"{self.driver} {self.ranks}: {', '.join((*(self.traits or ('plain',)), *settings))}"


def crossed(
    driver: str, ranks: Iterable[int], *axes: Iterable[str], **settings: Any
) -> Iterator[Case]:
    """A case for each combination of the axes.

    An axis is names of traits; the empty name is none.
    """
    for count, *traits in product(ranks, *axes):
        yield Case(driver, count, tuple(filter(None, traits)), tuple(settings.items()))


Run = Callable[[Case, Watch], Facts]
"""Runs a case in this process, which is one of its ranks."""


@dataclass(frozen=True)
class Verdict:
    """Of one pair.

    Attributes:
        case: Its name.
        by: Who watched.
        outcome: "equal", "different", "hung", or "unsteady" where two runs that nobody watched
            differ as well.
        difference: The first one, with both values.
        off: What the monitor warned of as it gave up, if it did.
        windows: How many profiles it has written.
        alone: How the training ends where nobody watches, if not orderly.
        seconds: That both runs took.
        differing: The names of all facts that differ.
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
