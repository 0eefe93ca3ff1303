"""`plan`: on which mesh, with which micro batch and recomputing what a model trains the fastest, of what fits into memory."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analyze.memory.room import Room, room
from lflops.analyze.speed.prediction import DEVICES_PER_HOST, Prediction, predict, why_not
from lflops.analyze.speed.roofline import lower_bound
from lflops.collect.estimate.changes import POLICIES, Changes, Policy, mixed_precision
from lflops.collect.estimate.estimate import Estimator, Subject, subject_of
from lflops.collect.estimate.optimizer_step import MakesOptimizer, makes_optimizer
from lflops.collect.inputs.arguments import check_whole, describe
from lflops.errors import CountError
from lflops.hardware.chips import Hardware, named
from lflops.planning.block_trials import memory_of
from lflops.planning.work_sheets import Case, Sheet, WorkSheets, dimension_of, moved, peak_of
from lflops.profile.model import Communication, Profile

PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "bf16-mixed": (None, "bf16"),
    "16-mixed": (None, "fp16"),
    "bf16-true": ("bf16", None),
    "16-true": ("fp16", None),
    "32-true": (None, None),
}
"""By Lightning's words the dtype of parameters, and that of products where it is another one."""

Mesh = Mapping[str, int]

CHECKED = 3  # estimates of whole models, at most
TIE = 0.8  # of an interval: two that share as much are a tie
MINOR = 0.02  # of a step: what takes less is no reason


class Configuration(Struct, frozen=True, kw_only=True):
    """One way to train the global batch.

    Attributes:
        name: As `HSDP 8x8`, replicas before shards.
        mesh: Ranks by dimension, as `lflops.estimate` takes them.
        micro_batch: Samples of a rank at once.
        accumulation: Micro batches of a step.
        room: What it needs of the chip's memory, and whether that fits.
        predicted: The time of a step with all its micro batches; `None` where nothing was fitted, for which `why_not` has the reason.
        least_seconds: A lower bound of that time.
        tensor_seconds: The part of it in collectives of tensor parallelism at the bandwidth of the links, which nothing hides.
        rank: Its place by time. Those with the same are a tie. 0 where nothing is predicted.
        reason: What its time goes to besides the model's own work.
    """

    name: str
    mesh: Mesh
    checkpointing: Policy
    micro_batch: int
    accumulation: int
    room: Room
    predicted: Prediction | None
    why_not: str | None
    least_seconds: float | None
    tensor_seconds: float
    reason: str
    rank: int = 0


class Plan(Struct, frozen=True, kw_only=True):
    """The configurations that fit.

    Attributes:
        batch: Samples of a step, over all GPUs.
        configurations: Those whose time is predicted, the fastest first.
        not_predicted: The others, by their lower bound.
        left_out: What does not fit or does not run, and why.
        estimates: How many estimates were made.
        profile: The estimate of the first configuration that fits, as a whole; of one micro batch. `None` where none does.
    """

    hardware: str
    gpus: int
    batch: int
    configurations: tuple[Configuration, ...]
    not_predicted: tuple[Configuration, ...]
    left_out: Mapping[str, str]
    estimates: int
    profile: Profile | None = None


class _Family(NamedTuple):
    """Meshes whose ranks do the same work on shards of other sizes. `estimated` are two of them by one over their ranks, or one."""

    estimated: Mapping[float, Mesh]
    meshes: Mapping[float, Mesh]


def plan(
    build: Callable[[int], Any],
    batch: int,
    *,
    gpus: int,
    hardware: Hardware | str,
    optimizer: MakesOptimizer | str = "adamw",
    precision: str = "bf16-mixed",
    network: float | None = None,
    devices_per_host: int = DEVICES_PER_HOST,
    progress: bool = False,
) -> Plan:
    """Find the meshes, micro batches and checkpointing that fit on a chip, and rank them by the predicted time of a step.

    Meshes are DDP, FSDP2, HSDP, and FSDP2 with tensor parallelism where the model has a `tp_plan`. Checkpointing is the same in all blocks.
    A few estimates of folded models show all of them; the first one that fits is estimated as a whole. Nothing is allocated.

    Args:
        build: From a number of samples to `(model, batch)` or `(model, batch, loss)`, as `lflops estimate` takes it.
        batch: The samples of a step over all GPUs. Each rank has its share, in micro batches whose gradients are accumulated.
        gpus: How many there are.
        hardware: The chip, as in `estimate`; its memory has to be known.
        optimizer: A name, or a function from a list of parameters, as in `estimate`.
        precision: Lightning's word: `bf16-mixed`, `16-mixed`, `bf16-true`, `16-true` or `32-true`. If mixed, FSDP2 computes in that dtype
            and reduces in float32; other ranks use autocast.
        network: What a GPU sends to other hosts, bytes/s; `None` is that of the vendor's own hosts.
        devices_per_host: How many GPUs share a host. Tensor parallelism stays within one.
        progress: Whether to write the number of estimates to stderr.

    Raises:
        CountError: An argument is wrong, no mesh divides the batch, or some code needs the value of a tensor.
        HardwareError: The chip is unknown.
    """
    caller = "plan"
    for name, value in (("batch", batch), ("gpus", gpus), ("devices_per_host", devices_per_host)):
        check_whole(caller, name, value, least=1)
    if precision not in PRECISIONS:
        raise CountError(f"{caller}: precision={describe(precision)}: give one of {', '.join(PRECISIONS)}")
    if not callable(build):
        raise CountError(f"{caller}: build={describe(build)}: give a function from a number of samples to (model, batch) or more")
    makes = makes_optimizer(caller, optimizer)
    if makes is None:
        raise CountError(f"{caller}: optimizer=None: give a name, as 'adamw', or a function from parameters to an optimizer")
    chip = named(hardware) if isinstance(hardware, str) else hardware
    dtype, computing = PRECISIONS[precision]
    changes = Changes(dtype=dtype, precision=precision if computing else None)

    def estimator(mesh: Mesh) -> Estimator:
        mixed = mixed_precision(computing, "fp32" if computing else None) if "data" in mesh else None
        return Estimator(caller=caller, backward=True, optimizer=makes, hardware=chip, mesh=mesh, mixed=mixed)

    def subject(samples: int) -> Subject:
        return changes.applied(caller, subject_of(caller, build(samples)))

    def context(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if "data" in mesh else changes.autocast()

    if room(0, chip) is None:
        raise CountError(f"plan: hardware={chip.name!r}: its memory is unknown: give an lflops.Hardware with memory_bytes")
    sheets = WorkSheets(estimator, subject, context, progress=progress)
    return _Search(sheets, chip, gpus=gpus, batch=batch, network=network, per_host=devices_per_host).plan()


class _Search:
    """The search for configurations on one chip."""

    def __init__(self, sheets: WorkSheets, chip: Hardware, *, gpus: int, batch: int, network: float | None, per_host: int) -> None:
        self._sheets, self._chip, self._gpus, self._batch, self._per_host = sheets, chip, gpus, batch, per_host
        self._network: dict[str, Any] = {"network": network, "devices_per_host": per_host}
        self._left_out: dict[str, str] = {}
        self._accumulated: dict[str, float] = {}  # bytes that accumulating adds to the peak, by configuration

    def plan(self) -> Plan:
        found: list[Configuration] = []
        families = [_dividing(family, self._batch) for family in _families(self._gpus, self._per_host)]
        for family, indivisible in families:
            for mesh in indivisible:
                self._left_out[name_of(mesh)] = f"its {_data_ranks(mesh)} ranks do not divide a batch of {self._batch}"
            try:
                found += self._of_family(family)
            except Exception as error:
                if not any("tensor" in mesh for mesh in family.meshes.values()):
                    raise
                wrong = str(error).splitlines()[0].removeprefix("plan: ") if str(error) else type(error).__name__
                self._left_out |= dict.fromkeys(map(name_of, family.meshes.values()), wrong)
        if not any(family.meshes for family, _ in families):
            least = min(_data_ranks(mesh) for _, meshes in families for mesh in meshes)
            raise CountError(f"plan: batch={self._batch}: no mesh of gpus={self._gpus} divides it: give a multiple of {least}")
        ranked = _ranked(each for each in found if each.predicted is not None)
        others = sorted((each for each in found if each.predicted is None), key=lambda each: each.least_seconds or 0.0)
        profile = self._check(ranked or others)
        its: Any = {"hardware": self._chip.name, "gpus": self._gpus, "batch": self._batch, "estimates": self._sheets.estimates}
        return Plan(configurations=tuple(ranked), not_predicted=tuple(others), left_out=self._left_out, profile=profile, **its)

    def _of_family(self, family: _Family) -> list[Configuration]:
        """Those that fit. What does not fit with one sample is not estimated with two."""
        found: list[Configuration] = []
        least: dict[float, int] = {}
        for x, mesh in family.meshes.items():
            needs = self._room(peak_of(self._sheet(family, "none", 1, x), phase="optimizer"))
            if needs.verdict == "does not fit":
                self._left_out[name_of(mesh)] = f"parameters, gradients and optimizer alone need {units.size(needs.needed_bytes)}"
            else:
                least[x] = 1 << 62
        for policy in (POLICIES if self._sheets.blocks else POLICIES[:1]) if least else ():
            for x, lowest in least.items():
                one = self._sheet(family, policy, 1, x)
                needs = self._room(peak_of(one))
                least[x] = min(lowest, needs.needed_bytes)
                if needs.verdict != "does not fit":
                    found += self._of_mesh(family, policy, x, one)
        for x, needed in least.items():
            if not any(each.mesh == family.meshes[x] for each in found):
                self._left_out[name_of(family.meshes[x])] = f"a micro batch of one sample needs {units.size(needed)} or more"
        return found

    def _of_mesh(self, family: _Family, policy: Policy, x: float, one: Sheet) -> Iterator[Configuration]:
        mesh = family.meshes[x]
        samples = self._batch // _data_ranks(mesh)
        for micro in _divisors(samples):
            sheet = one if micro == 1 else self._more_samples(family, policy, x, one, micro)
            peak = peak_of(sheet, accumulates=micro < samples)
            needs = self._room(peak)
            if needs.verdict != "does not fit":
                self._accumulated[_key(mesh, policy, micro)] = peak - peak_of(sheet)
                yield self._configuration(mesh, policy, micro, self._sheets.profile(sheet, mesh), needs)

    def _configuration(self, mesh: Mesh, policy: Policy, micro: int, profile: Profile, needs: Room) -> Configuration:
        accumulation = self._batch // _data_ranks(mesh) // micro
        predicted = predict(profile, self._chip, accumulation=accumulation, **self._network)
        tensor = accumulation * sum(map(self._least_transfer, profile.communication)) if "tensor" in mesh else 0.0
        bound = lower_bound(profile, self._chip)
        once = 0.0 if bound is None else bound.by_phase.get("optimizer", 0.0)
        return Configuration(
            name=name_of(mesh),
            mesh=mesh,
            checkpointing=policy,
            micro_batch=micro,
            accumulation=accumulation,
            room=needs,
            predicted=None if predicted is None else replace(predicted, by_module={}),
            why_not=None if predicted is not None else why_not(profile, self._chip),
            least_seconds=None if bound is None else once + (bound.seconds - once) * accumulation + tensor,
            tensor_seconds=tensor,
            reason=_reason(predicted, tensor, recomputes=policy != "none"),
        )

    def _least_transfer(self, each: Communication) -> float:
        """Seconds of a collective of tensor parallelism at the bandwidth of the links; 0 of others, which may be hidden."""
        link, ranks = self._chip.link_bytes_per_second, each.group_size
        if link is None or not ranks or dimension_of(each.collective) != "tensor":
            return 0.0
        return each.bytes * (ranks - 1) / ranks * (2 if "reduce" in each.collective and "scatter" not in each.collective else 1) / link

    def _sheet(self, family: _Family, policy: Policy, samples: int, x: float) -> Sheet:
        low, high = min(family.estimated), max(family.estimated)
        sheets = {each: self._sheets.sheet(Case(policy, samples, family.estimated[each])) for each in (low, high)}
        return moved(sheets[low], sheets[low], sheets[high], (x - low) / (high - low)) if high > low else sheets[low]

    def _more_samples(self, family: _Family, policy: Policy, x: float, one: Sheet, samples: int) -> Sheet:
        """The sheet of more samples. Where only weights are sharded, a sample adds the same on any number of ranks."""
        if any("tensor" in mesh for mesh in family.meshes.values()):
            return moved(one, one, self._sheet(family, policy, 2, x), samples - 1)
        x = min(family.estimated)
        low, more = (self._sheets.sheet(Case(policy, number, family.estimated[x])) for number in (1, 2))
        return moved(one, low, more, samples - 1)

    def _room(self, peak: float, reserved: float | None = None) -> Room:
        found = room(int(peak), self._chip, ranks=self._gpus, reserved_bytes=None if reserved is None else int(reserved))
        if found is None:
            raise CountError(f"plan: the memory of {self._chip.name} is unknown")
        return found

    def _check(self, configurations: list[Configuration]) -> Profile | None:
        """The whole estimate of the first that fits by it; those before are taken out. At most three are estimated."""
        for _ in configurations[:CHECKED]:
            first = configurations[0]
            profile = self._sheets.whole(Case(first.checkpointing, first.micro_batch, first.mesh))
            added = self._accumulated[_key(first.mesh, first.checkpointing, first.micro_batch)]
            memory = memory_of(profile)
            reserved = None if memory.reserved is None else memory.reserved.reserved_bytes + added
            needs = self._room(memory.peak_bytes + added, reserved)
            if needs.verdict != "does not fit":
                configurations[0] = replace(first, room=needs)
                return profile
            how = f"{name_of(first.mesh)}, checkpointing {first.checkpointing}, micro batch {first.micro_batch}"
            self._left_out[how] = f"the whole estimate needs {units.size(needs.needed_bytes)}"
            del configurations[0]
        return None


def _families(gpus: int, per_host: int) -> Iterator[_Family]:
    if gpus == 1:
        yield _Family({0.0: {}}, {0.0: {}})
        return
    yield _Family({0.0: {"replica": gpus}}, {0.0: {"replica": gpus}})
    shards = _divisors(gpus)[1:]
    meshes = {1 / data: {"replica": gpus // data, "data": data} for data in shards[:-1]} | {1 / gpus: {"data": gpus}}
    yield _Family({1 / data: {"replica": 2, "data": data} for data in {shards[0], gpus}}, meshes)
    tensors = [ranks for ranks in shards if ranks <= per_host]
    both = {1 / ranks: {"data": gpus // ranks, "tensor": ranks} for ranks in tensors if ranks < gpus}
    if both:
        yield _Family({x: both[x] for x in {min(both), max(both)}}, both)
    if gpus in tensors:
        yield _Family({0.0: {"tensor": gpus}}, {0.0: {"tensor": gpus}})


def _dividing(family: _Family, batch: int) -> tuple[_Family, list[Mesh]]:
    """The family of the meshes that divide the batch, and the other meshes."""
    meshes = {x: mesh for x, mesh in family.meshes.items() if not batch % _data_ranks(mesh)}
    return family._replace(meshes=meshes), [mesh for mesh in family.meshes.values() if mesh not in meshes.values()]


def _data_ranks(mesh: Mesh) -> int:
    """Ranks with different samples."""
    return mesh.get("replica", 1) * mesh.get("data", 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _key(mesh: Mesh, policy: Policy, micro: int) -> str:
    return f"{name_of(mesh)} {policy} {micro}"


def name_of(mesh: Mesh) -> str:
    """A mesh in words, as `HSDP 8x8`, with replicas before shards, or `FSDP2 8 x TP 8`."""
    replicas, data, tensor = (mesh.get(name) for name in ("replica", "data", "tensor"))
    sharded = f"HSDP {replicas}x{data}" if replicas and data else f"FSDP2 {data}" if data else f"DDP {replicas}" if replicas else ""
    return " x ".join(filter(None, (sharded, f"TP {tensor}" if tensor else ""))) or "one GPU"


def _ranked(configurations: Iterable[Configuration]) -> list[Configuration]:
    """The fastest first. A tie is one whose interval is nearly that of the first with its rank."""
    ranked: list[Configuration] = []
    first: Prediction | None = None
    known = [(each.predicted, each) for each in configurations if each.predicted is not None]
    for predicted, each in sorted(known, key=lambda pair: pair[0].seconds):
        if first is None or not _is_tie(first, predicted):
            first, rank = predicted, len(ranked) + 1
        ranked.append(replace(each, rank=rank))
    return ranked


def _is_tie(one: Prediction, other: Prediction) -> bool:
    shared = min(one.high, other.high) - max(one.low, other.low)
    return shared >= TIE * min(one.high - one.low, other.high - other.low)


def _reason(predicted: Prediction | None, tensor: float, *, recomputes: bool) -> str:
    """What takes time besides the model's own work."""
    if tensor:
        return f"at least {units.duration(tensor)} of tensor parallelism's collectives, which nothing hides"
    if predicted is None:
        return ""
    parts = {
        "communication that is not hidden": predicted.by_kind.get("communication", 0.0),
        "recomputing": predicted.recomputed * recomputes,
    }
    named_parts = sorted(((seconds, name) for name, seconds in parts.items() if seconds >= MINOR * predicted.seconds), reverse=True)
    return ", ".join(f"{units.duration(seconds)} of {name}" for seconds, name in named_parts) or "little besides the model's own work"
