"""`plan`: on which mesh, with which micro batch and recomputing what a model trains the fastest, of what fits into memory.

A pipeline's stages are as sheets of the model with fewer blocks, under 1F1B. FSDP2's weights stay
gathered through its step there (`reshard_after_forward=False`), and its gradients are whole until
the end.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.analysis.roofline import lower_bound
from lflops.errors import CountError
from lflops.estimation.changes import POLICIES, Changes, Policy, mixed_precision
from lflops.estimation.estimate import Estimator, subject_of
from lflops.estimation.mesh import DIMENSIONS
from lflops.estimation.optimizer_step import MakesOptimizer, makes_optimizer
from lflops.estimation.planning.block_trials import memory_of
from lflops.estimation.planning.work_sheets import (
    Case,
    Sheet,
    WorkSheets,
    dimension_of,
    moved,
    peak_of,
)
from lflops.estimation.prediction import DEVICES_PER_HOST, Prediction, predict, why_not
from lflops.hardware.chips import Hardware, named
from lflops.inputs.arguments import check_whole, describe
from lflops.memory.peak import MemoryFit, room
from lflops.profile.profile import Communication, ModuleProfile, Profile


class Stage(NamedTuple):
    """A stage that has as many blocks as any."""

    ends: tuple[
        bool, ...
        # what it has besides blocks: what runs before them is False, after them True
    ]
    # of the parameters that are in no block
    share: float
    # micro batches between their forward and their backward, at most
    in_flight: int
    # what a micro batch sends to the next stage is allocated so many times
    buffers: int


def stages_of(
    sheet: Sheet, modules: Mapping[str, ModuleProfile], number: int, micro_batches: int
) -> Iterator[Stage]:
    """The first, the second and the last stage of so many."""
    rows: dict[bool, set[str]] = {
        False: set(),
        True: set(),
        # that hold parameters, by whether they run after the blocks
    }
    for kind, *key in sheet:
        if kind == "bytes" and key[0][0] == "" and key[-1] == "forward":
            rows[key[0][1:2] == (True,)].add(modules[key[1]].owner or key[1])
    before, after, every = (
        sum(modules[row].self_parameters for row in some)
        for some in (rows[False], rows[True], rows[False] | rows[True])
    )
    first, second = min(number, micro_batches), min(number - 1, micro_batches)
    yield Stage((False,), before / (every or 1), first, micro_batches + first)
    if number > 2:
        yield Stage((), 0.0, second, 2 * micro_batches + second)
    yield Stage((True,), after / (every or 1), 1, micro_batches)


def stage_peak(
    stage: Stage,
    sheet: Sheet,
    one: Sheet,
    none: Sheet,
    *,
    blocks: int,
    ranks: int,
    gathered: float,
    sent: float,
) -> float:
    """The most bytes alive in a stage, from the sheet of its blocks with all that is in no block, and those with one block and none."""
    # FSDP2 shards over so many `ranks`. A weight that it has gathered has `gathered` times the
    # bytes of its shards. A micro batch has `sent` bytes at the end of a stage.
    weights, gradients, kept = (
        one[name,] - none[name,]
        for name in ("parameters", "gradients", "activations")
        # of a block
    )
    lacks = 1 - stage.share
    step = peak_of(sheet, phase="optimizer") - lacks * peak_of(none, phase="optimizer")
    peaks = (
        (key[0], value)
        for (kind, *key), value in sheet.items()
        if kind == "bytes without gradients"
    )
    passes = (
        value for where, value in peaks if where[0] != "" or (where[1:2] == (True,)) in stage.ends
    )
    whole = (blocks - 1) * (gathered * weights + gradients) + stage.share * none[
        "gradients",
        # besides those of the block at work
    ]
    more = (stage.in_flight - 1) * blocks * kept + stage.buffers * sent
    return max(
        step,
        max(passes)
        + whole * ranks
        + more
        - lacks * (none["parameters",] + none["optimizer_state",]),
    )


PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "bf16-mixed": (None, "bf16"),
    "16-mixed": (None, "fp16"),
    "bf16-true": ("bf16", None),
    "16-true": ("fp16", None),
    "32-true": (None, None),
}
"""By Lightning's words the dtype of parameters, and that of products where it is another one."""

Mesh = Mapping[str, int]
# whose ranks do the same work on parts of other sizes
Family = Sequence[Mesh]
Corners = tuple[Mesh, Mesh, Mesh]

# estimates of whole models, at most
CHECKED = 3
# of an interval: two that share as much are a tie
TIE = 0.8
# of a step: what takes less is no reason
MINOR = 0.02
_SENDS = "what stages of a pipeline send each other was not fitted"


class Configuration(Struct, frozen=True, kw_only=True):
    """One way to train the global batch."""

    # as `HSDP 8x8`, replicas before shards
    name: str
    # ranks by dimension, as `lflops.estimate` takes them
    mesh: Mesh
    checkpointing: Policy
    # samples of a rank at once
    micro_batch: int
    # micro batches of a step
    accumulation: int
    # what it needs of the chip's memory, and whether that fits
    room: MemoryFit
    # The time of a step with all its micro batches; `None` where nothing was fitted, for which
    # `why_not` has the reason.
    predicted: Prediction | None
    why_not: str | None
    # A lower bound of that time
    least_seconds: float | None
    # the part of it in collectives of tensor parallelism at the bandwidth of the links, which
    # nothing hides
    tensor_seconds: float
    # the part of it in which a stage of a pipeline waits, with stages of equal work under 1F1B
    bubble_seconds: float
    # what its time goes to besides the model's own work
    reason: str
    # Its place by time. Those with the same are a tie. 0 where nothing is predicted.
    rank: int = 0


class Plan(Struct, frozen=True, kw_only=True):
    """The configurations that fit."""

    hardware: str
    gpus: int
    # samples of a step, over all GPUs
    batch: int
    # those whose time is predicted, the fastest first
    configurations: tuple[Configuration, ...]
    # the others, by their lower bound
    not_predicted: tuple[Configuration, ...]
    # what does not fit or does not run, and why
    left_out: Mapping[str, str]
    # how many estimates were made
    estimates: int
    # The estimate of the first configuration that fits, as a whole; of one micro batch. `None`
    # where none does.
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

    Meshes are DDP, FSDP2 and HSDP, each of the last two also with tensor parallelism where the
    model has a `tp_plan`, and as a pipeline where its blocks are equal. Checkpointing is the same
    in all blocks. A few estimates of folded models show all of them; the first one that fits is
    estimated as a whole, if it is no pipeline. Nothing is allocated.

    Args:
        build: From a number of samples to `(model, batch)` or `(model, batch, loss)`, as `lflops
            estimate` takes it.
        batch: The samples of a step over all GPUs. Each rank has its share, in micro batches whose
            gradients are accumulated.
        gpus: How many there are.
        hardware: The chip, as in `estimate`; its memory has to be known.
        optimizer: A name, or a function from a list of parameters, as in `estimate`.
        precision: Lightning's word: `bf16-mixed`, `16-mixed`, `bf16-true`, `16-true` or `32-true`.
            If mixed, FSDP2 computes in that dtype and reduces in float32; other ranks use autocast.
        network: What a GPU sends to other hosts, bytes/s; `None` is that of the vendor's own hosts.
        devices_per_host: How many GPUs share a host. Tensor parallelism stays within one.
        progress: Whether to write the number of estimates to stderr.

    Raises:
        CountError: An argument is wrong, no mesh divides the batch, or some code needs the value of
            a tensor.
        HardwareError: The chip is unknown.
    """
    caller = "plan"
    for name, value in (("gpus", gpus), ("batch", batch), ("devices_per_host", devices_per_host)):
        check_whole(caller, name, value, least=1)
    if precision not in PRECISIONS:
        raise CountError(
            f"{caller}: precision={describe(precision)}: give one of {', '.join(PRECISIONS)}"
        )
    if not callable(build):
        raise CountError(
            f"{caller}: build={describe(build)}: give a function from a number of samples to (model, batch) or more"
        )
    makes = makes_optimizer(caller, optimizer)
    if makes is None:
        raise CountError(
            f"{caller}: optimizer=None: give a name, as 'adamw', or a function from parameters to an optimizer"
        )
    chip = named(hardware) if isinstance(hardware, str) else hardware
    dtype, computing = PRECISIONS[precision]
    changes = Changes(dtype=dtype, precision=precision if computing else None)

    def estimator(mesh: Mesh) -> Estimator:
        mixed = (
            mixed_precision(computing, "fp32" if computing else None) if "data" in mesh else None
        )
        return Estimator(
            caller=caller, backward=True, optimizer=makes, hardware=chip, mesh=mesh, mixed=mixed
        )

    sheets = WorkSheets(
        estimator,
        lambda samples: changes.applied(caller, subject_of(caller, build(samples))),
        lambda mesh: contextlib.nullcontext() if "data" in mesh else changes.autocast(),
        progress=progress,
    )
    gathered = 0.5 if computing else 1.0
    return _Search(
        sheets,
        chip,
        gpus=gpus,
        batch=batch,
        network=network,
        per_host=devices_per_host,
        gathered=gathered,
    ).plan()


class _Search:
    """The search for configurations on one chip.

    `gathered` are the bytes of a weight that FSDP2 has gathered, over those of its shards.
    """

    def __init__(
        self,
        sheets: WorkSheets,
        chip: Hardware,
        *,
        gpus: int,
        batch: int,
        network: float | None,
        per_host: int,
        gathered: float,
    ) -> None:
        self._sheets, self._chip, self._gpus, self._batch, self._gathered = (
            sheets,
            chip,
            gpus,
            batch,
            gathered,
        )
        self._network: dict[str, Any] = {"network": network, "devices_per_host": per_host}
        self._tensors = [ranks for ranks in _divisors(gpus) if ranks <= per_host or ranks == 1]
        self._left_out: dict[str, str] = {}
        self._accumulated: dict[
            tuple[str, Policy, int], float
            # bytes that accumulating adds to the peak, by configuration
        ] = {}

    def plan(self) -> Plan:
        # an error where the chip's memory is unknown
        self._room(0)
        gpus, batch = self._gpus, self._batch
        if all(batch % (gpus // ranks) for ranks in self._tensors):
            least = gpus // self._tensors[-1]
            raise CountError(
                f"plan: batch={batch}: no mesh of gpus={gpus} divides it: give a multiple of {least}"
            )
        unsharded: Mesh = {"replica": gpus} if gpus > 1 else {}
        # shows what the model is made of
        self._sheets.sheet(Case("none", 1, unsharded))
        tensors, stages = (
            list(filter(self._divides, self._tensors)),
            list(filter(self._cuts, _divisors(gpus))),
        )
        alone = [[{"tensor": gpus}]] if gpus in tensors[1:] else []
        families: list[Family] = [
            [unsharded],
            *alone,
            *(_sharded(gpus, some, stages) for some in (tensors[:1], tensors[1:])),
        ]
        found = [each for family in families for each in self._of_family(family)]
        ranked = _ranked(found)
        others = sorted(
            (each for each in found if each.predicted is None),
            key=lambda each: each.least_seconds or 0.0,
        )
        profile = self._check(ranked or others)
        its: Any = {
            "hardware": self._chip.name,
            "gpus": gpus,
            "batch": batch,
            "estimates": self._sheets.estimates,
        }
        return Plan(
            configurations=tuple(ranked),
            not_predicted=tuple(others),
            left_out=self._left_out,
            profile=profile,
            **its,
        )

    def _divides(self, ranks: int) -> bool:
        """Whether tensor parallelism divides the model over so many ranks; why not, is left out."""
        heads = next(
            (
                f"{ranks} ranks do not divide its {many} {what}"
                for what, many in self._sheets.heads.items()
                if many % ranks
            ),
            "",
        )
        wrong = (
            heads
            if self._sheets.has_tensor_plan
            else "the model has no tp_plan, which says how ranks divide it"
        )
        if ranks > 1 and wrong:
            self._left_out[f"TP {ranks}"] = wrong
        return ranks == 1 or not wrong

    def _cuts(self, stages: int) -> bool:
        """Whether the model has blocks for so many stages; why not, is left out."""
        depth = self._sheets.depth
        if stages > max(depth, 1):
            wrong = (
                f"its {depth} blocks do not fill {stages} stages"
                if depth
                else "its blocks are not one run of 10 equal ones or more"
            )
            self._left_out[f"PP {stages}"] = wrong
        return stages <= max(depth, 1)

    def _of_family(self, family: Family) -> list[Configuration]:
        """Those of meshes that divide the batch.

        Of tensor parallelism, the highest degree is left out as long as some code fails.
        """
        for mesh in family:
            if self._batch % _data_ranks(mesh):
                self._left_out[name_of(mesh)] = (
                    f"its {_data_ranks(mesh)} ranks do not divide a batch of {self._batch}"
                )
        meshes = [mesh for mesh in family if not self._batch % _data_ranks(mesh)]
        while meshes:
            try:
                return [each for mesh in meshes for each in self._of_mesh(_corners(meshes), mesh)]
            except Exception as error:
                if (most := max(mesh.get("tensor", 1) for mesh in meshes)) == 1:
                    raise
                wrong = str(error).partition("\n")[0].removeprefix("plan: ") or type(error).__name__
                self._left_out[f"TP {most}"] = f"the model does not run so divided: {wrong}"
                meshes = [mesh for mesh in meshes if mesh["tensor"] < most]
        return []

    def _of_mesh(self, corners: Corners, mesh: Mesh) -> list[Configuration]:
        """Those that fit. What does not fit with one sample is not estimated with two."""
        needs = self._room(
            0
            if "pipeline" in mesh
            else peak_of(self._sheet(corners, "none", 1, mesh), phase="optimizer")
        )
        if needs.verdict == "does not fit":
            self._left_out[name_of(mesh)] = (
                f"parameters, gradients and optimizer alone need {units.size(needs.needed_bytes)}"
            )
            return []
        found: list[Configuration] = []
        needed: list[int] = []
        samples = self._batch // _data_ranks(mesh)
        for policy in POLICIES if self._sheets.blocks else POLICIES[:1]:
            needs = self._room(self._peak(corners, policy, 1, mesh, accumulates=False))
            needed.append(needs.needed_bytes)
            for micro in _divisors(samples) if needs.verdict != "does not fit" else ():
                peak = self._peak(corners, policy, micro, mesh, accumulates=micro < samples)
                needs = self._room(peak)
                if needs.verdict != "does not fit":
                    sheet = self._sheet(corners, policy, micro, mesh)
                    self._accumulated[name_of(mesh), policy, micro] = peak - peak_of(sheet)
                    found.append(
                        self._configuration(
                            mesh, policy, micro, self._sheets.profile(sheet, mesh), needs
                        )
                    )
        if not found:
            self._left_out[name_of(mesh)] = (
                f"a micro batch of one sample needs {units.size(min(needed))} or more"
            )
        return found

    def _configuration(
        self, mesh: Mesh, policy: Policy, micro: int, profile: Profile, needs: MemoryFit
    ) -> Configuration:
        accumulation, stages = self._batch // _data_ranks(mesh) // micro, mesh.get("pipeline", 1)
        predicted = (
            None
            if stages > 1
            else predict(profile, self._chip, accumulation=accumulation, **self._network)
        )
        tensor = (
            sum(map(self._least_transfer, profile.communication)) / stages
            if "tensor" in mesh
            else 0.0
        )
        bound = lower_bound(profile, self._chip)
        optimizer = 0.0 if bound is None else bound.by_phase.get("optimizer", 0.0) / stages
        once = (
            tensor if bound is None else bound.seconds / stages - optimizer + tensor
            # a micro batch in a stage
        )
        return Configuration(
            name=name_of(mesh),
            mesh=mesh,
            checkpointing=policy,
            micro_batch=micro,
            accumulation=accumulation,
            room=needs,
            predicted=None if predicted is None else replace(predicted, by_module={}),
            why_not=_SENDS
            if stages > 1
            else None
            if predicted is not None
            else why_not(profile, self._chip),
            least_seconds=None if bound is None else optimizer + once * (accumulation + stages - 1),
            tensor_seconds=tensor * accumulation,
            bubble_seconds=once * (stages - 1),
            reason=_reason(
                predicted, tensor * accumulation, once * (stages - 1), recomputes=policy != "none"
            ),
        )

    def _least_transfer(self, each: Communication) -> float:
        """Seconds of a collective of tensor parallelism at the bandwidth of the links.

        0 of others, which may be hidden.
        """
        link, ranks = self._chip.link_bytes_per_second, each.group_size
        if link is None or not ranks or dimension_of(each.collective) != "tensor":
            return 0.0
        return (
            each.bytes
            * (ranks - 1)
            / ranks
            * (2 if "reduce" in each.collective and "scatter" not in each.collective else 1)
            / link
        )

    def _sheet(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, depth: int | None = None
    ) -> Sheet:
        """A sheet of any samples.

        Where only weights are sharded, a sample adds the same on any number of ranks.
        """
        sheet = self._corner(corners, policy, 1, mesh, depth)
        if samples == 1:
            return sheet
        same = {**mesh, "data": corners[0]["data"]} if "data" in mesh else mesh
        low, more = (self._corner(corners, policy, number, same, depth) for number in (1, 2))
        return moved(sheet, low, more, samples - 1)

    def _corner(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, depth: int | None
    ) -> Sheet:
        """A point on the plane through the corners, in one over the ranks that share an operator and one over those that share a weight."""
        low, few, wide = corners
        ranks, least, most = (each.get("tensor", 1) for each in (mesh, low, wide))
        sheet = first = self._sheets.sheet(Case(policy, samples, low), depth)
        if most > least:
            share = (1 / ranks - 1 / least) / (1 / most - 1 / least)
            sheet = moved(
                first, first, self._sheets.sheet(Case(policy, samples, wide), depth), share
            )
        if mesh.get("data") != low.get("data"):
            share = (
                (1 / mesh["data"] - 1 / low["data"])
                / (1 / few["data"] - 1 / low["data"])
                * least
                / ranks
            )
            sheet = moved(
                sheet, first, self._sheets.sheet(Case(policy, samples, few), depth), share
            )
        return sheet

    def _peak(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, *, accumulates: bool
    ) -> float:
        """The most bytes alive, in a pipeline in the stage that has the most."""
        if "pipeline" not in mesh:
            return peak_of(self._sheet(corners, policy, samples, mesh), accumulates=accumulates)
        blocks, micro_batches = (
            -(-self._sheets.depth // mesh["pipeline"]),
            self._batch // _data_ranks(mesh) // samples,
        )
        sheet, one, none = (
            self._sheet(corners, policy, samples, mesh, depth) for depth in (blocks, 1, 0)
        )
        least = POLICIES[
            -1 if self._sheets.blocks else 0
            # with which a block keeps its input alone
        ]
        first, second = (
            self._sheet(corners, least, 1, mesh, depth)["activations",] for depth in (1, 2)
        )
        its: Any = {
            "blocks": blocks,
            "ranks": mesh["data"],
            "gathered": self._gathered,
            "sent": (second - first) * samples,
        }
        stages = stages_of(sheet, self._sheets.template.modules, mesh["pipeline"], micro_batches)
        return max(stage_peak(stage, sheet, one, none, **its) for stage in stages)

    def _room(self, peak: float, reserved: float | None = None) -> MemoryFit:
        found = room(
            int(peak),
            self._chip,
            ranks=self._gpus,
            reserved_bytes=None if reserved is None else int(reserved),
        )
        if found is None:
            raise CountError(
                f"plan: hardware={self._chip.name!r}: its memory is unknown: give an lflops.Hardware with memory_bytes"
            )
        return found

    def _check(self, configurations: list[Configuration]) -> Profile | None:
        """The whole estimate of the first that fits by it and is no pipeline; those before are taken out.

        At most three are estimated.
        """
        for first in [each for each in configurations if "pipeline" not in each.mesh][:CHECKED]:
            profile = self._sheets.whole(Case(first.checkpointing, first.micro_batch, first.mesh))
            added = self._accumulated[first.name, first.checkpointing, first.micro_batch]
            memory = memory_of(profile)
            reserved = None if memory.reserved is None else memory.reserved.reserved_bytes + added
            needs = self._room(memory.peak_bytes + added, reserved)
            place = configurations.index(first)
            if needs.verdict != "does not fit":
                configurations[place] = replace(first, room=needs)
                return profile
            how = f"{first.name}, checkpointing {first.checkpointing}, micro batch {first.micro_batch}"
            self._left_out[how] = f"the whole estimate needs {units.size(needs.needed_bytes)}"
            del configurations[place]
        return None


def _sharded(gpus: int, tensors: Iterable[int], stages: Iterable[int]) -> Family:
    """Meshes of FSDP2 and HSDP.

    In a stage of one rank FSDP2 has nothing to shard, and computes in its dtype.
    """
    every = product(stages, _divisors(gpus), _divisors(gpus), tensors)
    return [
        {
            name: size
            for name, size in zip(DIMENSIONS, sizes, strict=True)
            if size > 1 or name == "data"
        }
        for sizes in every
        if prod(sizes) == gpus and (sizes[2] > 1 or sizes[0] > 1 == sizes[1])
    ]


def _corners(meshes: Family) -> Corners:
    """The meshes that are estimated.

    Of many shards, of few, and of many with the most ranks of tensor parallelism.
    """
    if "data" not in meshes[0]:
        return meshes[0], meshes[0], meshes[0]
    shards = sorted(max(mesh["data"], 2) for mesh in meshes)
    many = max(shards[-1], 4) if any(mesh["data"] == 1 for mesh in meshes) else shards[-1]
    tensors = sorted({mesh["tensor"] for mesh in meshes if "tensor" in mesh}) or [0]
    corners = (many, tensors[0]), (shards[0], tensors[0]), (many, tensors[-1])
    low, few, wide = (
        {"replica": 2, "data": data} | ({"tensor": tensor} if tensor else {})
        for data, tensor in corners
    )
    return low, few, wide


def _data_ranks(mesh: Mesh) -> int:
    """Ranks with different samples."""
    return mesh.get("replica", 1) * mesh.get("data", 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def name_of(mesh: Mesh) -> str:
    """A mesh in words, as `HSDP 8x8`, with replicas before shards, or `PP 2 x FSDP2 8 x TP 8`."""
    stages, replicas, data, tensor = (mesh.get(name) for name in DIMENSIONS)
    sharded = (
        f"HSDP {replicas}x{data}"
        if replicas and data
        else f"FSDP2 {data}"
        if data
        else f"DDP {replicas}"
        if replicas
        else ""
    )
    parts = f"PP {stages}" if stages else "", sharded, f"TP {tensor}" if tensor else ""
    return " x ".join(filter(None, parts)) or "one GPU"


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


def _reason(predicted: Prediction | None, tensor: float, bubble: float, *, recomputes: bool) -> str:
    """What takes time besides the model's own work."""
    least = (
        (bubble, "a pipeline's bubble"),
        (tensor, "tensor parallelism's collectives, which nothing hides"),
    )
    if predicted is None:
        return " and ".join(
            f"at least {units.duration(seconds)} of {name}" for seconds, name in least if seconds
        )
    exposed = predicted.by_kind.get("communication", 0.0)
    parts = (
        (exposed, "communication that is not hidden"),
        (predicted.recomputed * recomputes, "recomputing"),
    )
    shown = [
        f"{units.duration(seconds)} of {name}"
        for seconds, name in sorted(parts, reverse=True)
        if seconds >= MINOR * predicted.seconds
    ]
    return ", ".join(shown) or "little besides the model's own work"
