"""Predict the time of a step before it runs, from an estimate of its work.

The prediction assumes:

- On the device, an operator takes the longer of two times: the time of its matmuls at a share of
  the peak, and the time to move its bytes at a share of the bandwidth. A launch adds to this time.
- FSDP2 gathers the parameters of a block while the previous block computes, and reduces the
  gradients of a block while the next block computes.
- DDP reduces buckets of gradients during backward.
- Collectives slow down the computation with which they overlap.
- Each collective waits for the slowest of its ranks. The wait grows with the number of ranks.

The shares and other rates are in `prediction.toml`, and are the same for all models. They were
fitted to published step times of well-tuned training runs, so they do not include a slow data
loader, logging or a busy host. No rates of hosts were fitted. Therefore a step is not predicted if
the host's calls might take longer than the device's work. Tensor and expert parallelism, pipelines,
compiled code, mixtures of experts, convolutions and fine-tuning with frozen weights are not
predicted either.

A prediction has an interval that should contain the measured time. The interval is wider for a step
that differs from the steps to which the rates were fitted. `Prediction.widened` has the reasons.
"""

import functools
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from lflops import units
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of, name_of_peak
from lflops.profile.module_names import ancestry
from lflops.profile.notes import notes_with
from lflops.profile.profile import Communication, OpCount, Profile
from lflops.profile.records import step_phase

DEVICES_PER_HOST = 8

# The collectives of FSDP2, and the collective that DDP and replicas of shards use. No other
# collectives were fitted.
_GATHERS = "_allgather_base_"
_SCATTERS = "_reduce_scatter_base_"
_REDUCES = "allreduce_"
_FITTED_COLLECTIVES = frozenset({_GATHERS, _SCATTERS, _REDUCES})
_FITTED_DTYPES = ("bf16", "fp16")
# A step is predicted only if three shares are at least this large: the share of MACs in a fitted
# dtype, of MACs outside convolutions, and of parameters that are trained.
_MOSTLY = 0.95
# Pattern in the class names of experts and of their routers.
_EXPERTS = re.compile("experts|moe|router", re.IGNORECASE)


class Family(Struct, frozen=True, forbid_unknown_fields=True):
    """The rates that all chips of one architecture share.

    Attributes:
        chips: Names of the chips.
        not_fitted: Names of those `chips` for which no step time was measured. They use the rates
            that were fitted to step times of the other chips.
        product: Share of the peak FLOP/s that matmuls reach.
        attention: Share of the peak FLOP/s that fused attention reaches.
        network_bytes_per_second: Bandwidth from a device to other hosts, for the vendor's reference
            hosts.
    """

    chips: tuple[str, ...]
    product: float
    attention: float
    network_bytes_per_second: float
    not_fitted: tuple[str, ...] = ()


class Widening(Struct, frozen=True, forbid_unknown_fields=True):
    """Factors that widen the interval of a prediction.

    They are for a step that differs from the published steps, to which the rates were fitted. The
    two ends of the interval are ratios to the
    predicted time, such as 0.8 and 1.25. The factors that apply to a step are multiplied, and both
    ratios are raised to the power of the product. For example, a product of 2 turns 0.8 and 1.25
    into 0.64 and 1.56.

    Attributes:
        source: Factor for every step that a user predicts, because the user's code and versions
            differ from the published measurements.
        chip: Factor for a chip without a measured step time.
        setting: Factor for a step without FSDP2, and for a model that is smaller or larger than all
            published models.
        fewest_parameters: Number of parameters of the smallest published model.
        most_parameters: Number of parameters of the largest published model.
    """

    source: float = 1.0
    chip: float = 1.0
    setting: float = 1.0
    fewest_parameters: float = 0.0
    most_parameters: float = math.inf


class Rates(Struct, frozen=True, forbid_unknown_fields=True):
    """The rates from which a step time is predicted. `prediction.toml` names their sources.

    Attributes:
        families: Rates by architecture.
        bandwidth: Share of the memory bandwidth that operators reach.
        link: Share of the link and network bandwidth that collectives achieve.
        contention: Slowdown of computation that overlaps with collectives, as a share of the
            collectives' time.
        lag_seconds: Seconds that a collective waits for its slowest rank, divided by the number of
            ranks that take part.
        launch_seconds: Seconds on the device for each call of an operator, in addition to its work.
        host_seconds: Seconds on the host for each call of an operator. A step in which the host
            takes longer than the device is not predicted.
        low: Lower end of the interval, as a ratio to the predicted time. The interval contains 80 %
            of the published step times. To find the interval, each step was predicted with rates
            that were fitted to the steps of all other models.
        high: Upper end of the interval, as a ratio to the predicted time.
        widening: Factors that widen the interval for a step that differs from the published steps.
    """

    families: Mapping[str, Family]
    bandwidth: float
    link: float
    contention: float
    lag_seconds: float
    launch_seconds: float
    host_seconds: float
    low: float
    high: float
    widening: Widening = Widening()

    def family(self, chip: Hardware) -> Family | None:
        """Return the family of a chip, or `None` if no family contains the chip."""
        for family in self.families.values():
            if chip.name in family.chips:
                return family
        return None


class Prediction(Struct, frozen=True, kw_only=True):
    """The predicted time of a step, with an interval that should contain the measured time.

    Attributes:
        hardware: Name of the chip.
        seconds: The predicted time, in seconds.
        low: Lower end of the interval, in seconds.
        high: Upper end of the interval, in seconds.
        by_kind: The seconds of `matmuls`, `attention`, `memory` (operators that move bytes), and
            `communication` that is not overlapped.
        by_phase: The seconds of `forward`, `backward` with recomputation, `optimizer` and `other`.
        by_module: The seconds of each module together with all modules below it.
        recomputed: The part of `backward` in which the device recomputes activations, in seconds.
        widened: Reasons why the interval is wider than for the steps to which the rates were
            fitted.
    """

    hardware: str
    seconds: float
    low: float
    high: float
    by_kind: Mapping[str, float]
    by_phase: Mapping[str, float]
    by_module: Mapping[str, float]
    recomputed: float = 0.0
    widened: tuple[str, ...] = ()


@functools.cache
def fitted() -> Rates:
    """Return the rates in `prediction.toml`, which were fitted to published step times."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Rates)


def why_not(profile: Profile, chip: Hardware | None, rates: Rates | None = None) -> str | None:
    """Return the reason why `predict` cannot predict a step, or `None` if it can."""
    return next(_reasons(profile, chip, rates or fitted()), None)


def _reasons(profile: Profile, chip: Hardware | None, rates: Rates) -> Iterator[str]:
    if chip is None or chip.bandwidth_bytes_per_second is None:
        yield "the chip or its memory bandwidth is unknown"
        return
    family = rates.family(chip)
    if family is None:
        known: list[str] = []
        for each in rates.families.values():
            known += each.chips
        yield f"the prediction does not cover the chip {chip.name}, only {', '.join(known)}"
        return
    yield from _dtype_reasons(profile)
    yield from _kind_reasons(profile)
    unknown = {call.collective for call in profile.communication} - _FITTED_COLLECTIVES
    if unknown:
        yield f"the prediction does not cover the collective {min(unknown)}"
        return
    if not any(op.phase == "backward" for op in profile.op_counts):
        yield "the step only runs forward, and the prediction covers only training steps"
    calls = sum(op.calls for op in profile.op_counts)
    if calls * rates.host_seconds > _Step(profile, chip, family, rates).prediction().seconds:
        yield (
            f"launching the {calls:,} operators may take the host longer than running them takes "
            "the device, and the prediction ignores the speed of the host"
        )


def _kind_reasons(profile: Profile) -> Iterator[str]:
    """Yield reasons why a kind of model or training run, such as LoRA, is not predicted."""
    if any(notes_with("cpu_offload", profile.notes)):
        yield "the prediction does not cover copies between the host and the device"
    if "uint8" in profile.modules[""].dtypes:
        yield "the prediction does not cover the unpacking of quantized weights"
    if any(module.compiled for module in profile.modules.values()):
        yield "the prediction does not cover compiled code"
    if any(_EXPERTS.search(module.class_name) for module in profile.modules.values()):
        yield "the prediction does not cover mixtures of experts"
    root = profile.modules[""]
    if root.trainable_parameters < _MOSTLY * root.parameters:
        yield "the prediction does not cover training with frozen weights, such as LoRA"
    macs = 0
    convolution_macs = 0
    for op in profile.op_counts:
        macs += op.macs
        if "convolution" in op.operator:
            convolution_macs += op.macs
    if convolution_macs > (1 - _MOSTLY) * macs:
        yield "the prediction does not cover convolutions"


def _dtype_reasons(profile: Profile) -> Iterator[str]:
    macs = 0
    fitted_macs = 0
    other = None
    for op in profile.op_counts:
        if not op.executed_macs:
            continue
        dtype = name_of_peak(op.dtype)
        macs += op.executed_macs
        if dtype in _FITTED_DTYPES:
            fitted_macs += op.executed_macs
        else:
            other = other or dtype or "another dtype"
    if not macs:
        yield "the step has no matmuls"
    if fitted_macs < _MOSTLY * macs:
        yield f"the prediction does not cover matmuls in {other}, only in bf16 and fp16"


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

    Args:
        profile: The result of `lflops.estimate` or `lflops.count`. It includes the mesh.
        hardware: The chip; `None` uses the chip of the profile.
        network: Bandwidth from a device to other hosts in bytes/s. `None` uses the bandwidth of the
            vendor's reference hosts.
        devices_per_host: Number of devices in a host. Links inside a host are faster than the
            network.
        accumulation: Number of micro batches in a step. The profile contains one micro batch. FSDP2
            gathers and reduces in each micro batch; DDP reduces only in the last micro batch.
        rates: Custom rates; `None` uses the fitted rates of lflops.

    Returns:
        The prediction, or `None` if the step is not predicted. `why_not` then returns the reason.
    """
    rates = rates or fitted()
    chip = chip_of(profile, hardware)
    if chip is None:
        return None
    family = rates.family(chip)
    if family is None or why_not(profile, chip, rates) is not None:
        return None
    return _Step(profile, chip, family, rates, network, devices_per_host).prediction(accumulation)


class _Overlap(NamedTuple):
    """The time of the collectives that run next to the computation of one module in one phase.

    Attributes:
        unit: Name of the module, for example a block, whose parameters FSDP2 gathers in one
            collective. Empty for the rest of the model.
        phase: The phase of the step.
        exposed: Seconds of the collectives in which nothing computes. They make the step longer.
        hidden: Seconds of the collectives that overlap with computation.
    """

    unit: str
    phase: str
    exposed: float
    hidden: float


# Seconds of computation, keyed by module and phase.
_Computing = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class _Step:
    """Computes the prediction of one step on a chip from its profile and the rates."""

    profile: Profile
    chip: Hardware
    family: Family
    rates: Rates
    network: float | None = None
    devices_per_host: int = DEVICES_PER_HOST

    def prediction(self, accumulation: int = 1) -> Prediction:
        kinds: defaultdict[str, float] = defaultdict(float)
        phases: defaultdict[str, float] = defaultdict(float)
        modules = dict.fromkeys(self.profile.modules, 0.0)

        def add(kind: str, phase: str, module: str, seconds: float) -> None:
            kinds[kind] += seconds
            phases[phase] += seconds
            for name in ancestry(module):
                modules[name] += seconds

        units = self._gathered_units()
        # DDP gathers no units, and communicates only once in a step.
        exchanges = accumulation if units else 1
        computing: defaultdict[tuple[str, str], float] = defaultdict(float)
        recomputed = 0.0
        for op in self.profile.op_counts:
            kind, seconds = self._device(op)
            phase = step_phase(op.phase)
            computing[_unit_of(op.module, units), phase] += seconds
            if op.phase != "optimizer":
                seconds *= accumulation
            if op.phase == "recompute":
                recomputed += seconds
            add(kind, phase, op.module, seconds)
        for (unit, phase), seconds in self._waits(computing).items():
            add("communication", phase, unit, seconds * exchanges)
        total = sum(phases.values())
        width = 1.0
        widened: list[str] = []
        for reason, factor in self._distances():
            width *= factor
            if factor > 1:
                widened.append(reason)
        return Prediction(
            hardware=self.chip.name,
            seconds=total,
            low=total * self.rates.low**width,
            high=total * self.rates.high**width,
            by_kind={kind: seconds for kind, seconds in kinds.items() if seconds},
            by_phase=dict(phases),
            by_module=modules,
            recomputed=recomputed,
            widened=tuple(widened),
        )

    def _gathered_units(self) -> set[str]:
        """Return the modules whose parameters FSDP2 gathers in forward."""
        units: set[str] = set()
        for call in self.profile.communication:
            if call.collective == _GATHERS and call.phase == "forward":
                units.add(call.module)
        return units

    def _is_sharded(self) -> bool:
        """Return whether FSDP gathers the parameters."""
        return any(call.collective == _GATHERS for call in self.profile.communication)

    def _distances(self) -> Iterator[tuple[str, float]]:
        """Yield each difference between this step and the steps to which the rates were fitted.

        Each difference is a pair of a text and the factor by which it widens the interval.
        """
        widening = self.rates.widening
        yield "the prediction was fitted to runs with other code and versions", widening.source
        if self.chip.name in self.family.not_fitted:
            yield f"the prediction was fitted to no run on {self.chip.name}", widening.chip
        if not self._is_sharded():
            yield "the prediction was fitted only to runs with FSDP", widening.setting
        parameters = self.profile.modules[""].parameters
        fewest = widening.fewest_parameters
        most = widening.most_parameters
        if not fewest <= parameters <= most:
            sizes = f"{units.count(fewest)} to {units.count(most)}"
            yield (
                f"the prediction was fitted only to models with {sizes} parameters",
                widening.setting,
            )

    def _device(self, op: OpCount) -> tuple[str, float]:
        """Return the kind of an operator, and the seconds of all its calls on the device.

        The kind is `matmuls`, `attention`, or `memory` for operators that only move bytes.
        """
        bandwidth = (self.chip.bandwidth_bytes_per_second or 1.0) * self.rates.bandwidth
        seconds = op.bytes_moved / bandwidth
        kind = "memory"
        if op.executed_macs:
            kind = "attention" if "attention" in op.operator else "matmuls"
            share = self.family.attention if kind == "attention" else self.family.product
            peaks = self.chip.peak_flops_per_second
            peak = peaks.get(name_of_peak(op.dtype) or "", peaks["bf16"])
            seconds = max(2 * op.executed_macs / (peak * share), seconds)
        return kind, seconds + op.calls * self.rates.launch_seconds

    def _waits(self, computing: _Computing) -> dict[tuple[str, str], float]:
        """Return the seconds by which collectives make the step longer, keyed by module and phase.

        These seconds have three parts: the waits for the slowest ranks, the time of collectives in
        which nothing computes, and the time by which the other collectives slow down the
        computation.

        `computing` has the seconds of computation.
        """
        waits: defaultdict[tuple[str, str], float] = defaultdict(float)
        gathers: defaultdict[str, float] = defaultdict(float)
        gathered_again = 0.0
        reduced = 0.0
        buckets: list[float] = []
        is_sharded = self._is_sharded()
        for call in self.profile.communication:
            seconds = self._transfer(call)
            lag = call.calls * self._ranks_of(call) * self.rates.lag_seconds
            waits[call.module, step_phase(call.phase)] += lag
            if call.collective == _GATHERS and call.phase == "forward":
                gathers[call.module] += seconds
            elif call.collective == _GATHERS:
                gathered_again += seconds
            elif call.collective == _SCATTERS or is_sharded:
                reduced += seconds
            else:
                buckets += [seconds / call.calls] * call.calls
        overlaps = [*_sharded(gathers, gathered_again, reduced, computing)]
        if buckets:
            overlaps.append(_ddp(buckets, computing))
        for each in overlaps:
            waits[each.unit, each.phase] += each.exposed + self.rates.contention * each.hidden
        return dict(waits)

    def _ranks_of(self, call: Communication) -> int:
        return call.group_size or self.profile.run.world_size

    def _transfer(self, call: Communication) -> float:
        """Return the seconds that all calls of a collective need to send their data.

        The data is sent around a ring of ranks, so the slowest connection of the ring determines
        the time.
        """
        ranks = self._ranks_of(call)
        network = self.network or self.family.network_bytes_per_second
        is_reduced = call.collective == _REDUCES
        # Replicas are the outermost dimension of the mesh.
        stride = self.profile.run.world_size // ranks if is_reduced else 1
        ranks_of_host = max(min(ranks, self.devices_per_host // stride), 1)
        bandwidth = self.chip.link_bytes_per_second or network
        if ranks_of_host < ranks:
            bandwidth = min(bandwidth, network * ranks_of_host)
        rounds = 2 if is_reduced else 1
        sent = call.bytes * (ranks - 1) / ranks * rounds
        return sent / (bandwidth * self.rates.link)


def _unit_of(module: str, units: set[str]) -> str:
    """Return the module in `units` that contains a module; empty if there is none."""
    for name in ancestry(module):
        if name in units:
            return name
    return ""


def _ddp(buckets: Sequence[float], computing: _Computing) -> _Overlap:
    """Compute how much of DDP's communication overlaps with backward.

    DDP reduces a bucket of gradients while backward computes the gradients of the next bucket. The
    reduction of the last bucket overlaps with nothing. `buckets` has the seconds that the reduction
    of each bucket takes.
    """
    total = sum(buckets)
    in_backward: list[float] = []
    for (_, phase), seconds in computing.items():
        if phase == "backward":
            in_backward.append(seconds)
    exposed = max(buckets[-1], total - sum(in_backward) * (1 - 1 / len(buckets)))
    return _Overlap("", "backward", exposed, total - exposed)


def _sharded(
    gathers: Mapping[str, float], gathered_again: float, reduced: float, computing: _Computing
) -> Iterator[_Overlap]:
    """Compute how much of FSDP2's communication overlaps with computation.

    A unit is a module whose parameters FSDP2 gathers in one collective, such as a block. FSDP2
    gathers the next unit while a unit computes. In backward, hooks of other modules start the
    collectives, so the profile does not show which unit a collective gathers or reduces. The total
    time of these collectives is therefore divided among the units, in proportion to the time of
    each unit's gathers in forward. The parameters outside the blocks stay gathered, so they are not
    gathered again in backward.

    Args:
        gathers: Seconds of gathers in forward, keyed by unit, in the order of forward.
        gathered_again: Seconds of gathers in backward.
        reduced: Seconds of reductions.
        computing: Seconds of computation, keyed by unit and phase.
    """
    blocks = [unit for unit in gathers if unit]
    in_blocks = sum(gathers[unit] for unit in blocks)
    in_all = sum(gathers.values())

    def gather_again(unit: str) -> float:
        return gathered_again * gathers[unit] / in_blocks if in_blocks else 0.0

    def reduction(unit: str) -> float:
        return reduced * gathers.get(unit, 0.0) / in_all if in_all else 0.0

    def overlap(unit: str, phase: str, transfers: float) -> _Overlap:
        exposed = max(transfers - computing.get((unit, phase), 0.0), 0.0)
        return _Overlap(unit, phase, exposed, transfers - exposed)

    # While the first gathers and the last reductions run, nothing computes, so they overlap with
    # nothing.
    for unit in ("", *blocks[:1]):
        yield _Overlap(unit, "forward", gathers.get(unit, 0.0), 0.0)
    for unit, following in pairwise(blocks):
        yield overlap(unit, "forward", gathers[following])
    if blocks:
        yield overlap("", "backward", gather_again(blocks[-1]))
    for place, unit in enumerate(blocks):
        transfers = gather_again(blocks[place - 1]) if place else 0.0
        if place + 1 < len(blocks):
            transfers += reduction(blocks[place + 1])
        yield overlap(unit, "backward", transfers)
    for unit in (*blocks[:1], ""):
        yield _Overlap(unit, "backward", reduction(unit), 0.0)
