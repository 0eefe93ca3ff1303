"""Simulate tables of the steps of many ranks that wait for each other, with planted stragglers.

The steps have noise as on a cluster.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lflops.profile.records import ModulePhase

__all__ = ["LAYERS", "Plant", "Simulation", "ddp", "fsdp", "patterns", "staged", "tensor_parallel"]

LAYERS = 8
DATA, OPTIMIZER, OTHER, SYNC = (
    ModulePhase("", phase) for phase in ("data", "optimizer", "other", "sync")
)
ROOT = ModulePhase("", "backward")
TRANSFER = 1e-3
"""Seconds of a collective itself."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A culprit: seconds more in one place, in every so manieth step.

    Or so many times slower in all that the device does.
    """

    rank: int
    place: ModulePhase | None = None
    seconds: float = 0.0
    every: int = 1
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A program that all ranks run in each step.

    Places in their order, with their seconds, and whether a collective ends them.

    Attributes:
        jitter: Of each place in each step, a share of it.
        drift: Of a rank over the steps, and from rank to rank.
        tail: How often a place is hit by something that takes a millisecond or, more and more
            rarely, longer.
    """

    program: Sequence[tuple[ModulePhase, float, bool]]
    jitter: float = 0.02
    drift: float = 0.005
    tail: float = 0.002

    @property
    def waits(self) -> frozenset[ModulePhase]:
        """The places where ranks wait for each other."""
        return frozenset(place for place, _, collective in self.program if collective)

    def run(
        self, ranks: int, steps: int, seed: int, plants: Sequence[Plant] = ()
    ) -> dict[int, list[Mapping[ModulePhase, float]]]:
        """Seconds of each place in each step, by rank.

        A collective ends for all when the last rank has come.
        """
        draw = random.Random(seed)  # noqa: S311 - nothing is secret
        clocks = [0.0] * ranks
        speed = [1 + draw.gauss(0, self.drift) for _ in range(ranks)]
        slow = [1.0] * ranks
        times: dict[int, list[Mapping[ModulePhase, float]]] = {rank: [] for rank in range(ranks)}
        for step in range(steps):
            slow = [0.9 * each + 0.1 + draw.gauss(0, self.drift) for each in slow]
            took: list[dict[ModulePhase, float]] = [{} for _ in range(ranks)]
            for place, base, collective in self.program:
                arrived = list(clocks)
                for rank in range(ranks):
                    seconds = (
                        base * speed[rank] * slow[rank] * (1 + abs(draw.gauss(0, self.jitter)))
                    )
                    if draw.random() < self.tail:
                        seconds += 1e-3 * draw.paretovariate(1.5)
                    arrived[rank] += seconds + _planted(plants, rank, place, step, seconds)
                if collective:
                    arrived = [max(arrived) + TRANSFER] * ranks
                for rank in range(ranks):
                    took[rank][place] = took[rank].get(place, 0.0) + arrived[rank] - clocks[rank]
                clocks = arrived
            for rank in range(ranks):
                times[rank].append(took[rank])
        return times


def _planted(
    plants: Sequence[Plant], rank: int, place: ModulePhase, step: int, seconds: float
) -> float:
    more = 0.0
    for plant in plants:
        if plant.rank == rank:
            if plant.place == place and step % plant.every == 0:
                more += plant.seconds
            if place.fqn:
                more += (plant.factor - 1) * seconds
    return more


def patterns() -> dict[str, str]:
    """The names of the layers and their parts, with a star for their number."""
    return {
        f"layers.{number}{part}": f"layers.*{part}"
        for number in range(LAYERS)
        for part in ("", ".attention", ".mlp")
    }


UPDATE = ((OPTIMIZER, 3e-3, False), (OTHER, 1e-3, False), (SYNC, 1e-5, True))
"""How each step ends."""


def _layer(number: int, name: str, phase: str) -> ModulePhase:
    return ModulePhase(f"layers.{number}{name}", phase)


def ddp() -> Simulation:
    """Gradients are reduced at the end of backward.

    Lightning synchronizes each step. 8 layers: 96 ms.
    """
    forward = [
        (_layer(n, part, "forward"), 2e-3, False)
        for n in range(LAYERS)
        for part in (".attention", ".mlp")
    ]
    backward = [
        (_layer(n, part, "backward"), 4e-3, False)
        for n in reversed(range(LAYERS))
        for part in (".mlp", ".attention")
    ]
    return Simulation(
        program=[(DATA, 1e-3, False), *forward, *backward, (ROOT, 1e-4, True), *UPDATE]
    )


def fsdp() -> Simulation:
    """Each layer's parameters are gathered before its forward and its backward."""
    forward = [
        (_layer(n, part, "forward"), 2e-3 if part else 1e-4, not part)
        for n in range(LAYERS)
        for part in ("", ".attention", ".mlp")
    ]
    backward = [
        (_layer(n, part, "backward"), 4e-3 if part else 1e-4, not part)
        for n in reversed(range(LAYERS))
        for part in ("", ".mlp", ".attention")
    ]
    return Simulation(
        program=[(DATA, 1e-3, False), *forward, *backward, (ROOT, 1e-4, True), *UPDATE]
    )


def tensor_parallel() -> Simulation:
    """Each layer ends with an all-reduce, forward and backward; none comes with the gradients."""
    forward = [
        (_layer(n, part, "forward"), 2e-3 if part else 1e-4, not part)
        for n in range(LAYERS)
        for part in (".attention", ".mlp", "")
    ]
    backward = [
        (_layer(n, part, "backward"), 4e-3 if part else 1e-4, not part)
        for n in reversed(range(LAYERS))
        for part in (".mlp", ".attention", "")
    ]
    return Simulation(program=[(DATA, 1e-3, False), *forward, *backward, *UPDATE])


def staged(
    stages: int, steps: int, seed: int, plants: Sequence[Plant] = ()
) -> dict[int, list[Mapping[ModulePhase, float]]]:
    """A pipeline without overlap.

    Each stage has its part of the layers, and waits while the others work.
    """
    simulation = Simulation(program=())
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    own = LAYERS // stages
    times: dict[int, list[Mapping[ModulePhase, float]]] = {rank: [] for rank in range(stages)}
    for step in range(steps):
        took: list[dict[ModulePhase, float]] = []
        for rank in range(stages):
            layers = range(rank * own, (rank + 1) * own)
            bases = (
                {_layer(n, "", "forward"): 2e-3 for n in layers}
                | {_layer(n, "", "backward"): 4e-3 for n in layers}
                | {OPTIMIZER: 3e-3}
            )
            seconds = {
                place: base * (1 + abs(draw.gauss(0, simulation.jitter)))
                for place, base in bases.items()
            }
            took.append(
                {
                    place: each + _planted(plants, rank, place, step, each)
                    for place, each in seconds.items()
                }
            )
        whole = sum(sum(each.values()) for each in took)
        for rank in range(stages):
            times[rank].append(
                took[rank] | {ModulePhase("", "forward"): whole - sum(took[rank].values())}
            )
    return times
