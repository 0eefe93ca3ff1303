"""`plan`: on which mesh, with which micro batch and recomputing what a model trains the fastest, of what fits into memory."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analyze.memory.room import Room, room
from lflops.analyze.speed.prediction import DEVICES_PER_HOST, Prediction, predict, why_not
from lflops.analyze.speed.roofline import lower_bound
from lflops.collect.estimate.changes import POLICIES, Changes, Policy, mixed_precision
from lflops.collect.estimate.estimate import Estimator, subject_of
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
Family = Sequence[Mesh]  # whose ranks do the same work on shards of other sizes, those of the most ranks last

CHECKED = 3  # estimates of whole models, at most
TIE = 0.8  # of an interval: two that share as much are a tie
MINOR = 0.02  # of a step: what takes less is no reason


class Configuration(Struct, frozen=True, kw_only=True):
    """One way to train the global batch."""

    name: str  # as `HSDP 8x8`, replicas before shards
    mesh: Mesh  # ranks by dimension, as `lflops.estimate` takes them
    checkpointing: Policy
    micro_batch: int  # samples of a rank at once
    accumulation: int  # micro batches of a step
    room: Room  # what it needs of the chip's memory, and whether that fits
    # The time of a step with all its micro batches; `None` where nothing was fitted, for which `why_not` has the reason.
    predicted: Prediction | None
    why_not: str | None
    least_seconds: float | None  # A lower bound of that time
    tensor_seconds: float  # the part of it in collectives of tensor parallelism at the bandwidth of the links, which nothing hides
    reason: str  # what its time goes to besides the model's own work
    rank: int = 0  # Its place by time. Those with the same are a tie. 0 where nothing is predicted.


class Plan(Struct, frozen=True, kw_only=True):
    """The configurations that fit."""

    hardware: str
    gpus: int
    batch: int  # samples of a step, over all GPUs
    configurations: tuple[Configuration, ...]  # those whose time is predicted, the fastest first
    not_predicted: tuple[Configuration, ...]  # the others, by their lower bound
    left_out: Mapping[str, str]  # what does not fit or does not run, and why
    estimates: int  # how many estimates were made
    # The estimate of the first configuration that fits, as a whole; of one micro batch. `None` where none does.
    profile: Profile | None = None


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

    sheets = WorkSheets(
        estimator,
        lambda samples: changes.applied(caller, subject_of(caller, build(samples))),
        lambda mesh: contextlib.nullcontext() if "data" in mesh else changes.autocast(),
        progress=progress,
    )
    return _Search(sheets, chip, gpus=gpus, batch=batch, network=network, per_host=devices_per_host).plan()


class _Search:
    """The search for configurations on one chip."""

    def __init__(self, sheets: WorkSheets, chip: Hardware, *, gpus: int, batch: int, network: float | None, per_host: int) -> None:
        self._sheets, self._chip, self._gpus, self._batch, self._per_host = sheets, chip, gpus, batch, per_host
        self._network: dict[str, Any] = {"network": network, "devices_per_host": per_host}
        self._left_out: dict[str, str] = {}
        self._accumulated: dict[tuple[str, Policy, int], float] = {}  # bytes that accumulating adds to the peak, by configuration

    def plan(self) -> Plan:
        self._room(0)  # an error where the chip's memory is unknown
        families = _families(self._gpus, self._per_host)
        ranks = {name_of(mesh): _data_ranks(mesh) for family in families for mesh in family}
        batch, least = self._batch, min(ranks.values())
        indivisible = {name: f"its {each} ranks do not divide a batch of {batch}" for name, each in ranks.items() if batch % each}
        if len(indivisible) == len(ranks):
            raise CountError(f"plan: batch={batch}: no mesh of gpus={self._gpus} divides it: give a multiple of {least}")
        self._left_out |= indivisible
        found: list[Configuration] = []
        for family in families:
            meshes = {name: mesh for mesh in family if (name := name_of(mesh)) not in indivisible}
            try:
                found += [each for mesh in meshes.values() for each in self._of_mesh(family, mesh)]
            except Exception as error:
                if "tensor" not in family[0]:
                    raise
                wrong = str(error).splitlines()[0].removeprefix("plan: ") if str(error) else type(error).__name__
                self._left_out |= dict.fromkeys(meshes, wrong)
        ranked = _ranked(found)
        others = sorted((each for each in found if each.predicted is None), key=lambda each: each.least_seconds or 0.0)
        profile = self._check(ranked or others)
        its: Any = {"hardware": self._chip.name, "gpus": self._gpus, "batch": self._batch, "estimates": self._sheets.estimates}
        return Plan(configurations=tuple(ranked), not_predicted=tuple(others), left_out=self._left_out, profile=profile, **its)

    def _of_mesh(self, family: Family, mesh: Mesh) -> list[Configuration]:
        """Those that fit. What does not fit with one sample is not estimated with two."""
        needs = self._room(peak_of(self._sheet(family, "none", 1, mesh), phase="optimizer"))
        if needs.verdict == "does not fit":
            self._left_out[name_of(mesh)] = f"parameters, gradients and optimizer alone need {units.size(needs.needed_bytes)}"
            return []
        found: list[Configuration] = []
        needed: list[int] = []
        samples = self._batch // _data_ranks(mesh)
        for policy in POLICIES if self._sheets.blocks else POLICIES[:1]:
            one = self._sheet(family, policy, 1, mesh)
            needs = self._room(peak_of(one))
            needed.append(needs.needed_bytes)
            for micro in _divisors(samples) if needs.verdict != "does not fit" else ():
                sheet = one if micro == 1 else self._more_samples(family, policy, mesh, one, micro)
                peak = peak_of(sheet, accumulates=micro < samples)
                needs = self._room(peak)
                if needs.verdict != "does not fit":
                    self._accumulated[name_of(mesh), policy, micro] = peak - peak_of(sheet)
                    found.append(self._configuration(mesh, policy, micro, self._sheets.profile(sheet, mesh), needs))
        if not found:
            self._left_out[name_of(mesh)] = f"a micro batch of one sample needs {units.size(min(needed))} or more"
        return found

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

    def _sheet(self, family: Family, policy: Policy, samples: int, mesh: Mesh) -> Sheet:
        """A point on the line between the family's two ends, in one over the ranks."""
        low, high = (self._sheets.sheet(Case(policy, samples, _with_two_replicas(end))) for end in (family[-1], family[0]))
        x, least, most = map(_share, (mesh, family[-1], family[0]))
        return moved(low, low, high, (x - least) / (most - least)) if most > least else low

    def _more_samples(self, family: Family, policy: Policy, mesh: Mesh, one: Sheet, samples: int) -> Sheet:
        """The sheet of more samples. Where only weights are sharded, a sample adds the same on any number of ranks."""
        if "tensor" not in mesh:
            family, mesh = family[-1:], family[-1]
        low, more = (self._sheet(family, policy, number, mesh) for number in (1, 2))
        return moved(one, low, more, samples - 1)

    def _room(self, peak: float, reserved: float | None = None) -> Room:
        found = room(int(peak), self._chip, ranks=self._gpus, reserved_bytes=None if reserved is None else int(reserved))
        if found is None:
            raise CountError(f"plan: hardware={self._chip.name!r}: its memory is unknown: give an lflops.Hardware with memory_bytes")
        return found

    def _check(self, configurations: list[Configuration]) -> Profile | None:
        """The whole estimate of the first that fits by it; those before are taken out. At most three are estimated."""
        for _ in configurations[:CHECKED]:
            first = configurations[0]
            profile = self._sheets.whole(Case(first.checkpointing, first.micro_batch, first.mesh))
            added = self._accumulated[first.name, first.checkpointing, first.micro_batch]
            memory = memory_of(profile)
            reserved = None if memory.reserved is None else memory.reserved.reserved_bytes + added
            needs = self._room(memory.peak_bytes + added, reserved)
            if needs.verdict != "does not fit":
                configurations[0] = replace(first, room=needs)
                return profile
            how = f"{first.name}, checkpointing {first.checkpointing}, micro batch {first.micro_batch}"
            self._left_out[how] = f"the whole estimate needs {units.size(needs.needed_bytes)}"
            del configurations[0]
        return None


def _families(gpus: int, per_host: int) -> list[Family]:
    shards = _divisors(gpus)[1:]
    tensors = [ranks for ranks in shards if ranks <= per_host]
    families: list[Family] = [
        [{"replica": gpus} if gpus > 1 else {}],
        [{"data": data} if data == gpus else {"replica": gpus // data, "data": data} for data in shards],
        [{"data": gpus // ranks, "tensor": ranks} for ranks in tensors if ranks < gpus],
        [{"tensor": gpus}] if gpus in tensors else [],
    ]
    return [family for family in families if family]


def _with_two_replicas(mesh: Mesh) -> Mesh:
    """The mesh that is estimated for one of FSDP2 or HSDP; any other one itself."""
    return {"replica": 2, "data": mesh["data"]} if "data" in mesh and "tensor" not in mesh else mesh


def _share(mesh: Mesh) -> float:
    """The share of a tensor that a rank has."""
    return 1 / mesh.get("tensor", mesh.get("data", 1))


def _data_ranks(mesh: Mesh) -> int:
    """Ranks with different samples."""
    return mesh.get("replica", 1) * mesh.get("data", 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


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
    exposed = predicted.by_kind.get("communication", 0.0)
    parts = (exposed, "communication that is not hidden"), (predicted.recomputed * recomputes, "recomputing")
    shown = [
        f"{units.duration(seconds)} of {name}" for seconds, name in sorted(parts, reverse=True) if seconds >= MINOR * predicted.seconds
    ]
    return ", ".join(shown) or "little besides the model's own work"
