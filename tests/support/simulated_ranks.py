"""Simulate the step times of many ranks that wait for each other, with planted stragglers.

The times have noise like those of a cluster.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lflops.profile.records import ModulePhase

__all__ = ["LAYERS", "Plant", "Simulation", "ddp", "fsdp", "patterns", "staged", "tensor_parallel"]

LAYERS = 8
DATA = ModulePhase("", "data")
OPTIMIZER = ModulePhase("", "optimizer")
OTHER = ModulePhase("", "other")
SYNC = ModulePhase("", "sync")
ROOT = ModulePhase("", "backward")
TRANSFER = 1e-3
"""Seconds of a collective after the last rank has arrived."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A planted straggler.

    Attributes:
        rank: The slow rank.
        place: The place in which it needs more time; `None` for none.
        seconds: Additional seconds in this place.
        every: The place is slow in each step whose number is a multiple of this.
        factor: Factor by which the rank is slower in all modules, as with a slow device.
    """

    rank: int
    place: ModulePhase | None = None
    seconds: float = 0.0
    every: int = 1
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The places that all ranks go through in each step, with random noise.

    Attributes:
        program: The places in order: module and phase, the usual seconds, and whether the place
            ends with a collective.
        jitter: Standard deviation of the noise of each place in each step, as a share.
        drift: Standard deviation of the differences between ranks, and of the changes of a rank's
            speed from step to step, as a share.
        tail: Probability that a place is interrupted. The interruption takes a millisecond or, with
            decreasing probability, longer.
    """

    program: Sequence[tuple[ModulePhase, float, bool]]
    jitter: float = 0.02
    drift: float = 0.005
    tail: float = 0.002

    @property
    def waits(self) -> frozenset[ModulePhase]:
        """The places in which ranks wait for each other."""
        return frozenset(place for place, _, collective in self.program if collective)

    def run(
        self, ranks: int, steps: int, seed: int, plants: Sequence[Plant] = ()
    ) -> dict[int, list[Mapping[ModulePhase, float]]]:
        """Return for each rank the seconds of each place in each step.

        A collective ends on all ranks at the same time, after the last rank has arrived.
        """
        draw = random.Random(seed)  # noqa: S311 - the times must be reproducible
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
                    noise = 1 + abs(draw.gauss(0, self.jitter))
                    seconds = base * speed[rank] * slow[rank] * noise
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
    """Return the additional seconds of a rank in a place that usually takes `seconds`."""
    more = 0.0
    for plant in plants:
        if plant.rank == rank:
            if plant.place == place and step % plant.every == 0:
                more += plant.seconds
            if place.fqn:
                more += (plant.factor - 1) * seconds
    return more


def patterns() -> dict[str, str]:
    """Return the pattern of each layer and of its parts, with a star instead of the number."""
    found = {}
    for number in range(LAYERS):
        for part in ("", ".attention", ".mlp"):
            found[f"layers.{number}{part}"] = f"layers.*{part}"
    return found


Place = tuple[ModulePhase, float, bool]
"""A place with its seconds, and whether it ends with a collective."""

UPDATE: tuple[Place, ...] = ((OPTIMIZER, 3e-3, False), (OTHER, 1e-3, False), (SYNC, 1e-5, True))
"""The last places of each step."""


def _layer(number: int, name: str, phase: str) -> ModulePhase:
    return ModulePhase(f"layers.{number}{name}", phase)


def _forward(*parts: str) -> list[Place]:
    """Return the places of forward: the parts of each layer in order.

    The empty part is the layer itself, which only runs a collective.
    """
    places = []
    for number in range(LAYERS):
        for part in parts:
            places.append((_layer(number, part, "forward"), 2e-3 if part else 1e-4, not part))
    return places


def _backward(*parts: str) -> list[Place]:
    """Return the places of backward, from the last layer to the first."""
    places = []
    for number in reversed(range(LAYERS)):
        for part in parts:
            places.append((_layer(number, part, "backward"), 4e-3 if part else 1e-4, not part))
    return places


def ddp() -> Simulation:
    """Return a DDP run, in which gradients are reduced at the end of backward.

    The ranks also wait for each other at the end of each step. The 8 layers take 96 ms.
    """
    forward = _forward(".attention", ".mlp")
    backward = _backward(".mlp", ".attention")
    return Simulation(
        program=[(DATA, 1e-3, False), *forward, *backward, (ROOT, 1e-4, True), *UPDATE]
    )


def fsdp() -> Simulation:
    """Return an FSDP run, which gathers the parameters of a layer before forward and backward."""
    forward = _forward("", ".attention", ".mlp")
    backward = _backward("", ".mlp", ".attention")
    return Simulation(
        program=[(DATA, 1e-3, False), *forward, *backward, (ROOT, 1e-4, True), *UPDATE]
    )


def tensor_parallel() -> Simulation:
    """Return a tensor-parallel run, in which each layer ends with an all-reduce.

    This is so in forward and in backward. The gradients are not reduced.
    """
    forward = _forward(".attention", ".mlp", "")
    backward = _backward(".mlp", ".attention", "")
    return Simulation(program=[(DATA, 1e-3, False), *forward, *backward, *UPDATE])


def staged(
    stages: int, steps: int, seed: int, plants: Sequence[Plant] = ()
) -> dict[int, list[Mapping[ModulePhase, float]]]:
    """Return the times of a pipeline without overlap.

    Each stage is a rank with an equal part of the layers. It waits in forward while the other
    stages work.
    """
    simulation = Simulation(program=())
    draw = random.Random(seed)  # noqa: S311 - the times must be reproducible
    own = LAYERS // stages
    times: dict[int, list[Mapping[ModulePhase, float]]] = {rank: [] for rank in range(stages)}
    for step in range(steps):
        took: list[dict[ModulePhase, float]] = []
        for rank in range(stages):
            layers = range(rank * own, (rank + 1) * own)
            bases = {_layer(n, "", "forward"): 2e-3 for n in layers}
            bases |= {_layer(n, "", "backward"): 4e-3 for n in layers}
            bases[OPTIMIZER] = 3e-3
            of_rank = {}
            for place, base in bases.items():
                seconds = base * (1 + abs(draw.gauss(0, simulation.jitter)))
                of_rank[place] = seconds + _planted(plants, rank, place, step, seconds)
            took.append(of_rank)
        whole = sum(sum(each.values()) for each in took)
        for rank in range(stages):
            waited = whole - sum(took[rank].values())
            times[rank].append(took[rank] | {ModulePhase("", "forward"): waited})
    return times
