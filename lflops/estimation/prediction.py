"""The time of a step before it runs.

The work of an estimate at rates that were fitted to published step times.

- On the device an operator takes as long as its products at a share of the peak, or its bytes at a
  share of the bandwidth, and a launch.
- FSDP2 gathers a block's parameters while the block before it computes, and reduces its gradients
  while the next one does.
- DDP reduces buckets of gradients while backward goes on.
- Each collective waits for the slowest of its ranks, the longer the more there are.

Where the calls of the host take longer than the device, launches bound the step, which is not
predicted: no hosts were fitted. Collectives that are hidden slow down what hides them. The rates
are few, the same for all models, and in `prediction.toml`. They are those of tuned trainings: a
slow loader, logging or a busy host is not in them. Tensor and expert parallelism, pipelines and
compiled code are not predicted, as they were not fitted.
"""

import functools
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of, name_of_peak
from lflops.profile.module_names import ancestry
from lflops.profile.notes import notes_with
from lflops.profile.profile import Communication, OpCount, Profile
from lflops.profile.records import step_phase

DEVICES_PER_HOST = 8

_GATHERS, _SCATTERS, _REDUCES = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
"""FSDP2's collectives, and that of DDP and of replicas of shards. Others were not fitted."""
_HALVES = ("bf16", "fp16")
# of the products: so many have to be in a dtype that was fitted
_MOSTLY = 0.95


class Family(Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of chips of one architecture, as shares of their peak."""

    chips: tuple[str, ...]
    # of the peak, in products of matrices
    product: float
    # of the peak, in fused attention
    attention: float
    # of a device to other hosts, in the vendor's own hosts
    network_bytes_per_second: float


class Rates(Struct, frozen=True, forbid_unknown_fields=True):
    """What a step time follows from besides its work.

    `prediction.toml`, whose lines say where each is from.
    """

    families: Mapping[str, Family]
    # share of the memory's bandwidth
    bandwidth: float
    # share of the bandwidth of links and networks
    link: float
    # of the seconds of hidden collectives, by which what hides them takes longer
    contention: float
    # of each collective, for each of its ranks
    lag_seconds: float
    # on the device, of each call
    launch_seconds: float
    host_seconds: (
        # of each call: where they take longer than the device, nothing is predicted
        float
    )
    # of measured over predicted seconds: with `high` the interval of 80 % of the trainings that
    # were not fitted
    low: float
    high: float

    def family(self, chip: Hardware) -> Family | None:
        """The family that a chip is of; `None` where nothing was fitted."""
        return next((each for each in self.families.values() if chip.name in each.chips), None)


class Prediction(Struct, frozen=True, kw_only=True):
    """The time of a step before it runs."""

    # the chip's name
    hardware: str
    seconds: float
    # with `high` the interval that holds 80 % of the trainings that were not fitted
    low: float
    high: float
    # What the seconds go to: `products`, `attention`, `memory` (operators that move bytes), and
    # `communication` that nothing hides.
    by_kind: Mapping[str, float]
    by_phase: Mapping[
        str, float
        # `forward`, `backward` with what is recomputed, `optimizer`, `other`
    ]
    # of each row and all below it
    by_module: Mapping[str, float]
    # the part of `backward` in which the device computes again
    recomputed: float = 0.0


@functools.cache
def fitted() -> Rates:
    """The rates that lflops ships."""
    return msgspec.convert(
        tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")), Rates
    )


def why_not(profile: Profile, chip: Hardware | None, rates: Rates | None = None) -> str | None:
    """Why a step's time is not predicted; `None` where it is."""
    return next(_reasons(profile, chip, rates or fitted()), None)


def _reasons(profile: Profile, chip: Hardware | None, rates: Rates) -> Iterator[str]:
    family = None if chip is None else rates.family(chip)
    if chip is None or chip.bandwidth_bytes_per_second is None:
        yield "the chip is unknown"
        return
    if family is None:
        known = ", ".join(name for family in rates.families.values() for name in family.chips)
        yield f"no step times were fitted on {chip.name}, but on {known}"
        return
    products = [
        (name_of_peak(cell.dtype), cell.executed_macs)
        for cell in profile.op_counts
        if cell.executed_macs
    ]
    macs = sum(number for _, number in products)
    if not macs:
        yield "it has no products of matrices"
    if sum(number for name, number in products if name in _HALVES) < _MOSTLY * macs:
        other = next(name or "another dtype" for name, _ in products if name not in _HALVES)
        yield f"products in {other} were not fitted, but in bf16 and fp16"
    unfitted = {
        "copies from and to the host were not fitted": any(
            notes_with("cpu_offload", profile.notes)
        ),
        "unpacking quantized weights was not fitted": "uint8" in profile.modules[""].dtypes,
        "compiled code was not fitted": any(module.compiled for module in profile.modules.values()),
    }
    yield from (reason for reason, is_so in unfitted.items() if is_so)
    unknown = {each.collective for each in profile.communication} - {_GATHERS, _SCATTERS, _REDUCES}
    if unknown:
        yield f"{min(unknown)} between ranks was not fitted"
        return
    if not any(cell.phase == "backward" for cell in profile.op_counts):
        yield "it only goes forward, and trainings were fitted"
    calls = sum(cell.calls for cell in profile.op_counts)
    if calls * rates.host_seconds > _Step(profile, chip, family, rates).prediction().seconds:
        yield f"the host's {calls:,} calls may take longer than the device's work, and how fast hosts are was not fitted"


def predict(
    profile: Profile,
    hardware: Hardware | str | None = None,
    *,
    network: float | None = None,
    devices_per_host: int = DEVICES_PER_HOST,
    accumulation: int = 1,
    rates: Rates | None = None,
) -> Prediction | None:
    """Predict the seconds of a step from its work.

    `None` where nothing was fitted, for which `why_not` has the reason.

    Args:
        profile: Of `lflops.estimate` or `lflops.count`, with its mesh.
        hardware: The chip; `None` is that of the profile.
        network: What a device sends to other hosts, bytes/s; `None` is that of the vendor's own
            hosts.
        devices_per_host: How many devices share a host, whose links are faster than the network.
        accumulation: Micro batches of a step, of which the profile has one. Under FSDP2 each
            gathers and reduces; DDP's last one reduces.
        rates: Your own; `None` are those that lflops ships.
    """
    rates = rates or fitted()
    chip = chip_of(profile, hardware)
    family = None if chip is None else rates.family(chip)
    if chip is None or family is None or why_not(profile, chip, rates) is not None:
        return None
    return _Step(profile, chip, family, rates, network, devices_per_host).prediction(accumulation)


@dataclass(frozen=True)
class _Step:
    """A step on a chip."""

    profile: Profile
    chip: Hardware
    family: Family
    rates: Rates
    network: float | None = None
    devices_per_host: int = DEVICES_PER_HOST

    def prediction(self, accumulation: int = 1) -> Prediction:
        profile, rates, recomputed = self.profile, self.rates, 0.0
        kinds: defaultdict[str, float] = defaultdict(float)
        phases: defaultdict[str, float] = defaultdict(float)
        modules = dict.fromkeys(profile.modules, 0.0)
        units = {
            each.module
            for each in profile.communication
            if each.collective == _GATHERS and each.phase == "forward"
        }
        computing: defaultdict[tuple[str, str], float] = defaultdict(float)
        for cell in profile.op_counts:
            kind, seconds = self._device(cell)
            above = ancestry(cell.module)
            computing[
                next((each for each in above if each in units), ""), step_phase(cell.phase)
            ] += seconds
            seconds *= 1 if cell.phase == "optimizer" else accumulation
            kinds[kind] += seconds
            phases[step_phase(cell.phase)] += seconds
            recomputed += seconds if cell.phase == "recompute" else 0.0
            for row in above:
                modules[row] += seconds
        for (unit, phase), once in self._waits(computing).items():
            seconds = once * (accumulation if units else 1)
            kinds["communication"] += seconds
            phases[phase] += seconds
            for row in ancestry(unit):
                modules[row] += seconds
        total = sum(phases.values())
        return Prediction(
            hardware=self.chip.name,
            seconds=total,
            low=total * rates.low,
            high=total * rates.high,
            by_kind={kind: seconds for kind, seconds in kinds.items() if seconds},
            by_phase=dict(phases),
            by_module=modules,
            recomputed=recomputed,
        )

    def _device(self, cell: OpCount) -> tuple[str, float]:
        """What bounds an operator, and its seconds on the device."""
        rates, chip = self.rates, self.chip
        moving = cell.bytes_moved / ((chip.bandwidth_bytes_per_second or 1.0) * rates.bandwidth)
        kind, seconds = "memory", moving
        if cell.executed_macs:
            is_attention = "attention" in cell.operator
            share = self.family.attention if is_attention else self.family.product
            peak = chip.peak_flops_per_second.get(
                name_of_peak(cell.dtype) or "", chip.peak_flops_per_second["bf16"]
            )
            computing = 2 * cell.executed_macs / (peak * share)
            kind, seconds = ("attention" if is_attention else "products"), max(computing, moving)
        return kind, seconds + cell.calls * rates.launch_seconds

    def _waits(self, computing: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """Seconds by module and phase in which nothing hides a collective, and by which hidden ones slow down what hides them."""
        waits: defaultdict[tuple[str, str], float] = defaultdict(float)
        # in forward, by unit
        gathers: defaultdict[str, float] = defaultdict(float)
        again = scattered = 0.0
        buckets: list[float] = []
        is_sharded = any(each.collective == _GATHERS for each in self.profile.communication)
        for each in self.profile.communication:
            seconds = self._transfer(each)
            waits[each.module, step_phase(each.phase)] += (
                each.calls * self._ranks_of(each) * self.rates.lag_seconds
            )
            if each.collective == _GATHERS and each.phase == "forward":
                gathers[each.module] += seconds
            elif each.collective == _GATHERS:
                again += seconds
            elif each.collective == _SCATTERS or is_sharded:
                scattered += seconds
            else:
                buckets += [seconds / each.calls] * each.calls
        hidden = [*self._sharded(gathers, again, scattered, computing)]
        if buckets:
            backward = sum(
                seconds for (_, phase), seconds in computing.items() if phase == "backward"
            )
            exposed = max(buckets[-1], sum(buckets) - backward * (1 - 1 / len(buckets)))
            hidden.append(("", "backward", exposed, sum(buckets) - exposed))
        for unit, phase, exposed, behind in hidden:
            waits[unit, phase] += exposed + self.rates.contention * behind
        return dict(waits)

    @staticmethod
    def _sharded(
        gathers: Mapping[str, float],
        again: float,
        scattered: float,
        computing: Mapping[tuple[str, str], float],
    ) -> Iterator[tuple[str, str, float, float]]:
        """Of FSDP2's units in the order of forward: the seconds that are exposed and hidden."""
        # In backward, hooks of other modules issue the collectives, so that each unit has them by
        # its share of what forward gathers. The model's own parameters stay gathered.
        blocks = [unit for unit in gathers if unit]
        in_blocks, in_all = sum(gathers[unit] for unit in blocks), sum(gathers.values())

        def gathered_again(unit: str) -> float:
            return again * gathers[unit] / in_blocks if in_blocks else 0.0

        def reduced(unit: str) -> float:
            return scattered * gathers.get(unit, 0.0) / in_all if in_all else 0.0

        def beside(unit: str, phase: str, transfers: float) -> tuple[str, str, float, float]:
            exposed = max(transfers - computing.get((unit, phase), 0.0), 0.0)
            return unit, phase, exposed, transfers - exposed

        for unit in ("", *blocks[:1]):
            # nothing runs before
            yield unit, "forward", gathers.get(unit, 0.0), 0.0
        for unit, after in pairwise(blocks):
            yield beside(unit, "forward", gathers[after])
        for last in blocks[-1:]:
            yield beside("", "backward", gathered_again(last))
        for place, unit in enumerate(blocks):
            gathered = gathered_again(blocks[place - 1]) if place else 0.0
            yield beside(
                unit, "backward", gathered + sum(map(reduced, blocks[place + 1 : place + 2]))
            )
        for unit in (*blocks[:1], ""):
            # nothing runs after
            yield unit, "backward", reduced(unit), 0.0

    def _ranks_of(self, each: Communication) -> int:
        return each.group_size or self.profile.run.world_size

    def _transfer(self, each: Communication) -> float:
        """Seconds of collectives of one kind in one place.

        What a ring sends over the slowest part of its way.
        """
        run, size, network = (
            self.profile.run,
            self._ranks_of(each),
            self.network or self.family.network_bytes_per_second,
        )
        is_reduced = each.collective == _REDUCES
        # replicas are the outermost
        stride = run.world_size // size if is_reduced else 1
        within = max(min(size, self.devices_per_host // stride), 1)
        link = self.chip.link_bytes_per_second or network
        bandwidth = link if within == size else min(link, network * within)
        sent = each.bytes * (size - 1) / size * (2 if is_reduced else 1)
        return sent / (bandwidth * self.rates.link)
