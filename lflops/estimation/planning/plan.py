"""`plan`: find the fastest mesh, micro batch and activation checkpointing that fit into memory.

A pipeline stage is estimated like a model with fewer blocks, under the 1F1B schedule. Within a
stage, FSDP2 is assumed to keep the weights gathered for the whole step
(`reshard_after_forward=False`), and the gradients unsharded until the end of the step.
"""

import dataclasses
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
from lflops.estimation.estimate import Estimator, Subject, subject_of
from lflops.estimation.mesh import DIMENSIONS
from lflops.estimation.optimizer_step import MakesOptimizer, makes_optimizer
from lflops.estimation.planning.block_trials import memory_of
from lflops.estimation.planning.work_sheets import (
    Case,
    InBlock,
    MomentKey,
    OutsideBlocks,
    Sheet,
    WorkSheets,
    dimension_of,
    moved,
    peak_of,
)
from lflops.estimation.prediction import DEVICES_PER_HOST, Prediction, predict, why_not
from lflops.hardware.chips import Hardware, named
from lflops.inputs.arguments import check_whole, describe
from lflops.memory.peak import MemoryFit, memory_fit
from lflops.profile.profile import Communication, ModuleProfile, Profile


class Stage(NamedTuple):
    """The part of a model that one pipeline stage runs.

    All stages are assumed to have as many blocks as the largest one.

    Attributes:
        runs_before: Whether the stage also runs the modules before the blocks, such as an
            embedding.
        runs_after: Whether the stage also runs the modules after the blocks, such as the output
            layer.
        share: Number of parameters outside the blocks that belong to this stage, as a fraction of
            all parameters outside the blocks.
        in_flight: Maximum number of micro batches that have finished forward but not backward.
        buffers: Number of buffers for sending and receiving. A buffer is as large as the output of
            a stage for one micro batch.
    """

    runs_before: bool
    runs_after: bool
    share: float
    in_flight: int
    buffers: int

    def runs(self, place: InBlock | OutsideBlocks) -> bool:
        """Return whether the stage runs the operators at a place of the model.

        The place is in a block, before the blocks, or after the blocks. Every stage has blocks.
        """
        if isinstance(place, InBlock):
            return True
        return self.runs_after if place.after_blocks else self.runs_before


def stages_of(
    sheet: Sheet, modules: Mapping[str, ModuleProfile], number: int, micro_batches: int
) -> Iterator[Stage]:
    """Yield the stages of a pipeline that can have the highest peak memory.

    These are the first, the second and the last of `number` stages. The stages between the second
    and the last stage need less memory than the second stage.

    Args:
        sheet: The sheet of the model, a table with its work and memory.
        modules: The modules of the model, keyed by name.
        number: Number of stages.
        micro_batches: Number of micro batches in a step.
    """
    before: set[str] = set()
    after: set[str] = set()
    for key in sheet:
        if not isinstance(key, MomentKey) or isinstance(key.place, InBlock):
            continue
        if key.with_gradients and key.phase == "forward":
            holder = modules[key.module].owner or key.module
            if key.place.after_blocks:
                after.add(holder)
            else:
                before.add(holder)

    def parameters(names: Iterable[str]) -> int:
        return sum(modules[name].self_parameters for name in names)

    total = parameters(before | after) or 1
    in_flight = min(number, micro_batches)
    yield Stage(
        runs_before=True,
        runs_after=False,
        share=parameters(before) / total,
        in_flight=in_flight,
        buffers=micro_batches + in_flight,
    )
    if number > 2:
        in_flight = min(number - 1, micro_batches)
        yield Stage(
            runs_before=False,
            runs_after=False,
            share=0.0,
            in_flight=in_flight,
            buffers=2 * micro_batches + in_flight,
        )
    yield Stage(
        runs_before=False,
        runs_after=True,
        share=parameters(after) / total,
        in_flight=1,
        buffers=micro_batches,
    )


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
    """Return the peak bytes of a rank in a pipeline stage.

    A sheet is a table with the work and memory of a model.

    Args:
        stage: The stage.
        sheet: The sheet of a model with as many blocks as the stage, and with all modules outside
            the blocks.
        one: The sheet of a model with one block.
        none: The sheet of a model without blocks.
        blocks: Number of blocks in the stage.
        ranks: Number of ranks over which FSDP2 shards the stage.
        gathered: Bytes of a gathered weight, divided by the total bytes of its shards: 0.5 if FSDP2
            gathers in half precision, otherwise 1.
        sent: Bytes that a stage sends to the next stage for one micro batch.
    """
    weights = one["parameters"] - none["parameters"]
    gradients = one["gradients"] - none["gradients"]
    activations = one["activations"] - none["activations"]
    missing = 1 - stage.share
    optimizer_peak = peak_of(sheet, phase="optimizer")
    optimizer_peak -= missing * peak_of(none, phase="optimizer")
    passes_peak = 0.0
    for key, value in sheet.items():
        if isinstance(key, MomentKey) and not key.with_gradients and stage.runs(key.place):
            passes_peak = max(passes_peak, value)
    # The gradients of the running block are already part of `passes_peak`.
    unsharded = (blocks - 1) * (gathered * weights + gradients) + stage.share * none["gradients"]
    in_flight = (stage.in_flight - 1) * blocks * activations + stage.buffers * sent
    elsewhere = missing * (none["parameters"] + none["optimizer_state"])
    return max(optimizer_peak, passes_peak + unsharded * ranks + in_flight - elsewhere)


PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "bf16-mixed": (None, "bf16"),
    "16-mixed": (None, "fp16"),
    "bf16-true": ("bf16", None),
    "16-true": ("fp16", None),
    "32-true": (None, None),
}
"""For each Lightning precision, the dtype of the parameters and the dtype of matmuls.

The dtype of the parameters is `None` if they keep their dtype. The dtype of matmuls is `None` if it
is the same as the dtype of the parameters.
"""

Mesh = Mapping[str, int]
# Meshes that shard a model in the same way, but over more or fewer ranks.
Family = Sequence[Mesh]

# Maximum number of configurations that are checked with an estimate of the whole model.
CHECKED = 3
# Two predictions are a tie if the overlap of their intervals has at least this share of the shorter
# interval.
TIE = 0.8
# Communication or recomputation is mentioned only if it takes at least this share of a step.
MINOR = 0.02
_PIPELINE_NOT_FITTED = "the prediction does not cover communication between pipeline stages"


class Corners(NamedTuple):
    """The three meshes for which estimates are made, to cover all meshes of a family.

    A family is a list of meshes that shard a model in the same way, but over more or fewer ranks.
    The results for all meshes of the family are interpolated between these three.

    Attributes:
        low: The mesh with many shards and the fewest ranks of tensor parallelism.
        few_shards: The mesh with few shards and the fewest ranks of tensor parallelism.
        wide: The mesh with many shards and the most ranks of tensor parallelism.
    """

    low: Mesh
    few_shards: Mesh
    wide: Mesh


class Configuration(Struct, frozen=True, kw_only=True):
    """One way to train with the given batch on the given GPUs.

    Attributes:
        name: Name of the mesh, such as `HSDP 8x8` for 8 replicas of 8 shards.
        mesh: Number of ranks in each dimension, as in `lflops.estimate`.
        checkpointing: The activation checkpointing of every block.
        micro_batch: Number of samples that a rank processes in one forward and backward.
        accumulation: Number of micro batches in a step.
        memory_fit: The memory that the configuration needs, and whether it fits on the chip.
        predicted: Time of a step with all its micro batches, or `None` if it is not predicted.
        why_not: Reason why no time is predicted, or `None` if a time is predicted.
        least_seconds: A lower bound on the step time, or `None` if unknown.
        tensor_seconds: Part of the lower bound that is spent in collectives of tensor parallelism,
            at the bandwidth of the links. Nothing overlaps with these collectives.
        bubble_seconds: Part of the lower bound in which a pipeline stage waits, assuming 1F1B and
            stages with equal work.
        reason: Text with the time that is spent on communication, recomputation or waiting, such as
            `1.2 s of exposed communication`; empty if this time is short.
        place: Position in the ranking by predicted time, 1 for the fastest. Configurations with
            nearly the same time share a place. 0 if no time is predicted.
    """

    name: str
    mesh: Mesh
    checkpointing: Policy
    micro_batch: int
    accumulation: int
    memory_fit: MemoryFit
    predicted: Prediction | None
    why_not: str | None
    least_seconds: float | None
    tensor_seconds: float
    bubble_seconds: float
    reason: str
    place: int = 0


class Plan(Struct, frozen=True, kw_only=True):
    """The result of `plan`: the training configurations that fit into memory.

    Attributes:
        hardware: Name of the chip.
        gpus: Number of GPUs.
        batch: Number of samples in a step, over all GPUs.
        configurations: Configurations that fit and have a predicted time, sorted by this time.
        not_predicted: All other configurations that fit, sorted by the lower bound on their time.
        left_out: The reason why a mesh or configuration does not fit or does not run, keyed by its
            name.
        estimates: Number of estimates that were made.
        profile: Estimate of one micro batch of the whole model, for the first configuration that
            fits and is not a pipeline. `None` if there is no such configuration.
    """

    hardware: str
    gpus: int
    batch: int
    configurations: tuple[Configuration, ...]
    not_predicted: tuple[Configuration, ...]
    left_out: Mapping[str, str]
    estimates: int
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
    progress: Callable[[int], object] | None = None,
) -> Plan:
    """Find the configurations that fit on a chip, and rank them by predicted step time.

    A configuration is a mesh, a micro batch and the activation checkpointing of all blocks. Meshes
    are DDP, FSDP2 and HSDP. FSDP2 and HSDP are also combined with tensor parallelism if the model
    has a `tp_plan`, and with a pipeline if the blocks of the model are equal. The results for all
    configurations are computed from a few estimates of models with fewer blocks. The whole model is
    then estimated only for the first configuration that fits and is not a pipeline. No device
    memory is allocated.

    Args:
        build: Function that takes a number of samples and returns `(model, batch)` or
            `(model, batch, loss)`, as for `lflops estimate`.
        batch: Number of samples in a step, over all GPUs. Each rank processes its share in micro
            batches and accumulates their gradients.
        gpus: Number of GPUs.
        hardware: The chip, as in `estimate`. Its memory must be known.
        optimizer: Name of an optimizer, or a function that takes a list of parameters and returns
            an optimizer, as in `estimate`.
        precision: A precision of Lightning: `bf16-mixed`, `16-mixed`, `bf16-true`, `16-true` or
            `32-true`. With a mixed precision, FSDP2 computes in that dtype and reduces in float32.
            Meshes without FSDP2 use autocast.
        network: Bandwidth from a GPU to other hosts in bytes/s. `None` uses the bandwidth of the
            vendor's reference hosts.
        devices_per_host: Number of GPUs in a host. Tensor parallelism stays within a host.
        progress: Function that is called before each estimate, with the number of estimates so far.

    Raises:
        CountError: An argument is wrong, no mesh divides the batch, or some code needs the value of
            a tensor.
        HardwareError: The chip is unknown.
    """
    caller = "plan"
    check_whole(caller, "gpus", gpus, least=1)
    check_whole(caller, "batch", batch, least=1)
    check_whole(caller, "devices_per_host", devices_per_host, least=1)
    if precision not in PRECISIONS:
        raise CountError(
            f"{caller}: precision={describe(precision)}: pass one of {', '.join(PRECISIONS)}"
        )
    if not callable(build):
        raise CountError(
            f"{caller}: build={describe(build)}: "
            "pass a function that takes the number of samples and returns (model, batch) or "
            "(model, batch, loss)"
        )
    makes = makes_optimizer(caller, optimizer)
    if makes is None:
        raise CountError(
            f"{caller}: optimizer=None: "
            "pass a name such as 'adamw', or a function that takes parameters and returns an "
            "optimizer"
        )
    chip = named(hardware) if isinstance(hardware, str) else hardware
    dtype, computing = PRECISIONS[precision]
    if computing is None:
        changes = Changes(dtype=dtype)
        fsdp_precision = mixed_precision(None, None)
        gathered = 1.0
    else:
        changes = Changes(dtype=dtype, precision=precision)
        fsdp_precision = mixed_precision(computing, "fp32")
        gathered = 0.5

    def estimator(mesh: Mesh) -> Estimator:
        mixed = fsdp_precision if "data" in mesh else None
        return Estimator(
            caller=caller, backward=True, optimizer=makes, hardware=chip, mesh=mesh, mixed=mixed
        )

    def make(samples: int, mesh: Mesh) -> Subject:
        subject = subject_of(caller, build(samples))
        if "data" in mesh:
            # FSDP2 casts by itself.
            return dataclasses.replace(changes, precision=None).applied(caller, subject)
        return changes.applied(caller, subject)

    sheets = WorkSheets(estimator, make, progress=progress)
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
    """The search for the configurations of one model that fit on one chip.

    `gathered` is the number of bytes of a gathered weight, divided by the total bytes of its
    shards: 0.5 if FSDP2 gathers in half precision, otherwise 1.
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
        self._sheets = sheets
        self._chip = chip
        self._gpus = gpus
        self._batch = batch
        self._network = network
        self._per_host = per_host
        self._gathered = gathered
        self._left_out: dict[str, str] = {}
        # Bytes that gradient accumulation adds to the peak, keyed by mesh, checkpointing and micro
        # batch.
        self._accumulated: dict[tuple[str, Policy, int], float] = {}

    def plan(self) -> Plan:
        # `_room` raises an error if the memory of the chip is unknown.
        self._room(0)
        found: list[Configuration] = []
        for family in self._families():
            found += self._of_family(family)
        ranked = _ranked(found)
        others = [each for each in found if each.predicted is None]
        others.sort(key=lambda each: each.least_seconds or 0.0)
        profile = self._check(ranked or others)
        return Plan(
            hardware=self._chip.name,
            gpus=self._gpus,
            batch=self._batch,
            configurations=tuple(ranked),
            not_predicted=tuple(others),
            left_out=self._left_out,
            estimates=self._sheets.estimates,
            profile=profile,
        )

    def _families(self) -> list[Family]:
        gpus = self._gpus
        degrees = [ranks for ranks in _divisors(gpus) if ranks <= self._per_host or ranks == 1]
        fewest_data_ranks = gpus // degrees[-1]
        if all(self._batch % (gpus // ranks) for ranks in degrees):
            raise CountError(
                f"plan: batch={self._batch}: no mesh of {gpus} GPUs can divide this batch evenly: "
                f"pass a multiple of {fewest_data_ranks}"
            )
        unsharded: Mesh = {}
        if gpus > 1:
            unsharded = {"replica": gpus}
        # The first estimate shows the blocks and the attention heads of the model.
        self._sheets.sheet(Case("none", 1, unsharded))
        degrees = list(filter(self._divides, degrees))
        stages = list(filter(self._cuts, _divisors(gpus)))
        families: list[Family] = [[unsharded]]
        if gpus in degrees[1:]:
            families.append([{"tensor": gpus}])
        families.append(_sharded(gpus, degrees[:1], stages))
        families.append(_sharded(gpus, degrees[1:], stages))
        return families

    def _divides(self, ranks: int) -> bool:
        """Return whether tensor parallelism can divide the model over this number of ranks.

        If it cannot, the reason is added to `Plan.left_out`.
        """
        if ranks == 1:
            return True
        if not self._sheets.has_tensor_plan:
            self._left_out[f"TP {ranks}"] = "the model has no tp_plan"
            return False
        for name, number in self._sheets.heads.items():
            if number % ranks:
                self._left_out[f"TP {ranks}"] = (
                    f"the model's {number} {name} cannot be split over {ranks} ranks"
                )
                return False
        return True

    def _cuts(self, stages: int) -> bool:
        """Return whether the model has enough blocks for this number of pipeline stages.

        If it does not, the reason is added to `Plan.left_out`.
        """
        depth = self._sheets.depth
        if stages <= max(depth, 1):
            return True
        reason = "a pipeline needs at least 10 equal blocks"
        if depth:
            reason = f"the model's {depth} blocks are too few for {stages} stages"
        self._left_out[f"PP {stages}"] = reason
        return False

    def _of_family(self, family: Family) -> list[Configuration]:
        """Return the configurations that fit, for all meshes of a family that divide the batch.

        A family is a list of meshes that shard the model in the same way, but over more or fewer
        ranks. If the model fails under tensor parallelism, the meshes with the most ranks of tensor
        parallelism are left out, and the remaining meshes are tried again.
        """
        meshes: list[Mesh] = []
        for mesh in family:
            ranks = _data_ranks(mesh)
            if self._batch % ranks:
                self._left_out[name_of(mesh)] = (
                    f"a batch of {self._batch} cannot be split evenly over {ranks} data-parallel "
                    "ranks"
                )
            else:
                meshes.append(mesh)
        while meshes:
            corners = _corners(meshes)
            found: list[Configuration] = []
            try:
                for mesh in meshes:
                    found += self._of_mesh(corners, mesh)
            except Exception as error:
                degree = max(mesh.get("tensor", 1) for mesh in meshes)
                if degree == 1:
                    raise
                message = str(error).partition("\n")[0].removeprefix("plan: ")
                self._left_out[f"TP {degree}"] = (
                    f"the model fails with tensor parallelism: {message or type(error).__name__}"
                )
                meshes = [mesh for mesh in meshes if mesh["tensor"] < degree]
            else:
                return found
        return []

    def _of_mesh(self, corners: Corners, mesh: Mesh) -> list[Configuration]:
        """Return the configurations of a mesh that fit into memory.

        If a micro batch of one sample does not fit with a checkpointing policy, larger micro
        batches are not tried with this policy.
        """
        if "pipeline" not in mesh:
            needs = self._room(peak_of(self._sheet(corners, "none", 1, mesh), phase="optimizer"))
            if needs.verdict == "does not fit":
                needed = units.size(needs.needed_bytes)
                self._left_out[name_of(mesh)] = (
                    f"parameters, gradients and optimizer state alone need {needed}"
                )
                return []
        found: list[Configuration] = []
        needed_by_one: list[int] = []
        samples = self._batch // _data_ranks(mesh)
        policies = POLICIES if self._sheets.blocks else POLICIES[:1]
        for policy in policies:
            needs = self._room(self._peak(corners, policy, 1, mesh, accumulates=False))
            needed_by_one.append(needs.needed_bytes)
            if needs.verdict == "does not fit":
                continue
            for micro_batch in _divisors(samples):
                accumulates = micro_batch < samples
                peak = self._peak(corners, policy, micro_batch, mesh, accumulates=accumulates)
                needs = self._room(peak)
                if needs.verdict == "does not fit":
                    continue
                sheet = self._sheet(corners, policy, micro_batch, mesh)
                self._accumulated[name_of(mesh), policy, micro_batch] = peak - peak_of(sheet)
                profile = self._sheets.profile(sheet, mesh)
                found.append(self._configuration(mesh, policy, micro_batch, profile, needs))
        if not found:
            needed = units.size(min(needed_by_one))
            self._left_out[name_of(mesh)] = f"a micro batch of one sample needs at least {needed}"
        return found

    def _configuration(
        self, mesh: Mesh, policy: Policy, micro_batch: int, profile: Profile, needs: MemoryFit
    ) -> Configuration:
        accumulation = self._batch // _data_ranks(mesh) // micro_batch
        stages = mesh.get("pipeline", 1)
        tensor = 0.0
        if "tensor" in mesh:
            tensor = sum(map(self._tensor_seconds, profile.communication)) / stages
        bound = lower_bound(profile, self._chip)
        least_seconds = None
        # The lower bound of one micro batch in one stage.
        micro_seconds = tensor
        if bound is not None:
            optimizer = bound.by_phase.get("optimizer", 0.0) / stages
            micro_seconds = bound.seconds / stages - optimizer + tensor
            least_seconds = optimizer + micro_seconds * (accumulation + stages - 1)
        bubble = micro_seconds * (stages - 1)
        predicted = None
        why: str | None = _PIPELINE_NOT_FITTED
        if stages == 1:
            predicted = predict(
                profile,
                self._chip,
                network=self._network,
                devices_per_host=self._per_host,
                accumulation=accumulation,
            )
            why = None
            if predicted is None:
                why = why_not(profile, self._chip)
        if predicted is None:
            reason = _bound_reason(tensor * accumulation, bubble)
        else:
            reason = _predicted_reason(predicted, recomputes=policy != "none")
            predicted = replace(predicted, by_module={})
        return Configuration(
            name=name_of(mesh),
            mesh=mesh,
            checkpointing=policy,
            micro_batch=micro_batch,
            accumulation=accumulation,
            memory_fit=needs,
            predicted=predicted,
            why_not=why,
            least_seconds=least_seconds,
            tensor_seconds=tensor * accumulation,
            bubble_seconds=bubble,
            reason=reason,
        )

    def _tensor_seconds(self, call: Communication) -> float:
        """Return the seconds of a collective of tensor parallelism.

        The data moves at the bandwidth between the GPUs of a host. For any other collective, return
        0, because it may run while the GPU computes.
        """
        link = self._chip.link_bytes_per_second
        ranks = call.group_size
        if link is None or not ranks or dimension_of(call.collective) != "tensor":
            return 0.0
        is_all_reduce = "reduce" in call.collective and "scatter" not in call.collective
        rounds = 2 if is_all_reduce else 1
        return call.bytes * (ranks - 1) / ranks * rounds / link

    def _sheet(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, depth: int | None = None
    ) -> Sheet:
        """Return the sheet (work and memory) of a mesh for a micro batch of any size.

        The sheet is extrapolated from the sheets for one and for two samples. Their difference is
        added once for each further sample. The difference does not depend on the number of shards,
        so it is computed for the number of shards of `corners.low`, for which estimates exist.

        With `depth`, the sheet is for a model with this number of blocks, and has only the memory.
        """
        sheet = self._one_mesh(corners, policy, 1, mesh, depth)
        if samples == 1:
            return sheet
        if "data" in mesh:
            mesh = {**mesh, "data": corners.low["data"]}
        one = self._one_mesh(corners, policy, 1, mesh, depth)
        two = self._one_mesh(corners, policy, 2, mesh, depth)
        return moved(sheet, one, two, samples - 1)

    def _one_mesh(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, depth: int | None
    ) -> Sheet:
        """Return the sheet (work and memory) of a mesh, interpolated between `corners`.

        The corners are the meshes for which estimates are made. The interpolation is linear in 1/N,
        where N is the number of ranks of tensor parallelism, and in 1/M, where M is the number of
        ranks over which FSDP2 shards the weights.
        """
        low = corners.low
        few_shards = corners.few_shards
        ranks = mesh.get("tensor", 1)
        fewest = low.get("tensor", 1)
        most = corners.wide.get("tensor", 1)
        first = self._sheets.sheet(Case(policy, samples, low), depth)
        sheet = first
        if most > fewest:
            wide = self._sheets.sheet(Case(policy, samples, corners.wide), depth)
            share = (1 / ranks - 1 / fewest) / (1 / most - 1 / fewest)
            sheet = moved(first, first, wide, share)
        if mesh.get("data") != low.get("data"):
            few = self._sheets.sheet(Case(policy, samples, few_shards), depth)
            distance = 1 / mesh["data"] - 1 / low["data"]
            share = distance / (1 / few_shards["data"] - 1 / low["data"]) * fewest / ranks
            sheet = moved(sheet, first, few, share)
        return sheet

    def _peak(
        self, corners: Corners, policy: Policy, samples: int, mesh: Mesh, *, accumulates: bool
    ) -> float:
        """Return the peak bytes of a rank for a mesh and a micro batch of any size.

        With a pipeline, this is the highest peak of all stages. If `accumulates` is true, gradients
        of several micro batches are accumulated.
        """
        if "pipeline" not in mesh:
            return peak_of(self._sheet(corners, policy, samples, mesh), accumulates=accumulates)
        blocks = -(-self._sheets.depth // mesh["pipeline"])
        sheet = self._sheet(corners, policy, samples, mesh, blocks)
        one = self._sheet(corners, policy, samples, mesh, 1)
        none = self._sheet(corners, policy, samples, mesh, 0)
        # With full checkpointing, a block keeps only its input. The last block of a stage sends a
        # tensor of the same size to the next stage. The size of this tensor is the difference
        # between the activations of two blocks and of one block.
        keeps_least = POLICIES[-1] if self._sheets.blocks else POLICIES[0]
        kept_by_one = self._sheet(corners, keeps_least, 1, mesh, 1)["activations"]
        kept_by_two = self._sheet(corners, keeps_least, 1, mesh, 2)["activations"]
        micro_batches = self._batch // _data_ranks(mesh) // samples
        stages = stages_of(sheet, self._sheets.template.modules, mesh["pipeline"], micro_batches)
        peaks = []
        for stage in stages:
            peak = stage_peak(
                stage,
                sheet,
                one,
                none,
                blocks=blocks,
                ranks=mesh["data"],
                gathered=self._gathered,
                sent=(kept_by_two - kept_by_one) * samples,
            )
            peaks.append(peak)
        return max(peaks)

    def _room(self, peak: float, reserved: int | None = None) -> MemoryFit:
        found = memory_fit(int(peak), self._chip, ranks=self._gpus, reserved_bytes=reserved)
        if found is None:
            raise CountError(
                f"plan: hardware={self._chip.name!r}: the memory of this chip is unknown: "
                "pass an lflops.Hardware with memory_bytes"
            )
        return found

    def _check(self, configurations: list[Configuration]) -> Profile | None:
        """Estimate the whole model for the first configurations, until a configuration fits.

        Returns the estimate of the configuration that fits, or `None` if there is none.
        Configurations that turn out not to fit are removed from the list. At most `CHECKED`
        configurations are estimated, and none with a pipeline.
        """
        candidates = [each for each in configurations if "pipeline" not in each.mesh]
        for each in candidates[:CHECKED]:
            profile = self._sheets.whole(Case(each.checkpointing, each.micro_batch, each.mesh))
            added = self._accumulated[each.name, each.checkpointing, each.micro_batch]
            memory = memory_of(profile)
            reserved = None
            if memory.reserved is not None:
                reserved = int(memory.reserved.reserved_bytes + added)
            needs = self._room(memory.peak_bytes + added, reserved)
            place = configurations.index(each)
            if needs.verdict != "does not fit":
                configurations[place] = replace(each, memory_fit=needs)
                return profile
            name = (
                f"{each.name}, checkpointing {each.checkpointing}, micro batch {each.micro_batch}"
            )
            needed = units.size(needs.needed_bytes)
            self._left_out[name] = f"a full estimate shows that a step needs {needed}"
            del configurations[place]
        return None


def _sharded(gpus: int, tensors: Iterable[int], stages: Iterable[int]) -> Family:
    """Return all FSDP2 and HSDP meshes for the given tensor-parallel and pipeline sizes.

    Pipelines with one data-parallel rank per stage are included. In such a pipeline, FSDP2 shards
    nothing, and only sets the dtype of the computation.

    Args:
        gpus: Number of GPUs of each mesh.
        tensors: Tensor-parallel sizes to try.
        stages: Pipeline sizes to try.
    """
    meshes: list[Mesh] = []
    for sizes in product(stages, _divisors(gpus), _divisors(gpus), tensors):
        pipeline, replicas, shards, _ = sizes
        is_one_rank_stage = pipeline > 1 and replicas == 1
        if prod(sizes) != gpus or not (shards > 1 or is_one_rank_stage):
            continue
        named_sizes = zip(DIMENSIONS, sizes, strict=True)
        meshes.append({name: size for name, size in named_sizes if size > 1 or name == "data"})
    return meshes


def _corners(meshes: Family) -> Corners:
    """Choose the meshes for which estimates are made, to cover all meshes of a family."""
    if "data" not in meshes[0]:
        return Corners(meshes[0], meshes[0], meshes[0])
    shards = [mesh["data"] for mesh in meshes]
    few = max(min(shards), 2)
    many = max(*shards, 2)
    # A mesh with one shard is extrapolated from meshes with two and with at least four shards.
    if 1 in shards:
        many = max(many, 4)
    low: Mesh = {"replica": 2, "data": many}
    few_shards: Mesh = {"replica": 2, "data": few}
    degrees = [mesh["tensor"] for mesh in meshes if "tensor" in mesh]
    if not degrees:
        return Corners(low, few_shards, low)
    fewest = min(degrees)
    return Corners(
        low={**low, "tensor": fewest},
        few_shards={**few_shards, "tensor": fewest},
        wide={**low, "tensor": max(degrees)},
    )


def _data_ranks(mesh: Mesh) -> int:
    """Return the number of data-parallel ranks of a mesh, which process different samples."""
    return mesh.get("replica", 1) * mesh.get("data", 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def name_of(mesh: Mesh) -> str:
    """Return the name of a mesh, such as `HSDP 8x8` or `PP 2 x FSDP2 8 x TP 8`.

    `HSDP 2x8` has 2 replicas of 8 shards.
    """
    parts: list[str] = []
    if "pipeline" in mesh:
        parts.append(f"PP {mesh['pipeline']}")
    if "data" in mesh:
        replicas = mesh.get("replica")
        if replicas:
            parts.append(f"HSDP {replicas}x{mesh['data']}")
        else:
            parts.append(f"FSDP2 {mesh['data']}")
    elif "replica" in mesh:
        parts.append(f"DDP {mesh['replica']}")
    if "tensor" in mesh:
        parts.append(f"TP {mesh['tensor']}")
    return " x ".join(parts) or "one GPU"


def _ranked(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Sort configurations by predicted time, and set the `place` of each configuration.

    Configurations with nearly the same interval of the predicted time share a place. Configurations
    without a predicted time are left out.
    """
    ranked: list[Configuration] = []
    first: Prediction | None = None
    place = 0
    known = [(each.predicted, each) for each in configurations if each.predicted is not None]
    for predicted, each in sorted(known, key=lambda pair: pair[0].seconds):
        if first is None or not _is_tie(first, predicted):
            first = predicted
            place = len(ranked) + 1
        ranked.append(replace(each, place=place))
    return ranked


def _is_tie(one: Prediction, other: Prediction) -> bool:
    shared = min(one.high, other.high) - max(one.low, other.low)
    return shared >= TIE * min(one.high - one.low, other.high - other.low)


def _bound_reason(tensor: float, bubble: float) -> str:
    """Describe the seconds of pipeline bubble and of collectives in a lower bound of the step time.

    `tensor` has the seconds of collectives of tensor parallelism. The text is empty if both are 0.
    """
    parts = []
    if bubble:
        parts.append(f"at least {units.duration(bubble)} of pipeline bubble")
    if tensor:
        parts.append(f"at least {units.duration(tensor)} of exposed tensor-parallel collectives")
    return " and ".join(parts)


def _predicted_reason(predicted: Prediction, *, recomputes: bool) -> str:
    """Describe the times of communication and recomputation in a predicted step time.

    The longer time comes first. Times below the share `MINOR` of the step are left out.
    """
    parts = [(predicted.by_kind.get("communication", 0.0), "exposed communication")]
    if recomputes:
        parts.append((predicted.recomputed, "recomputation"))
    named_parts = []
    for seconds, name in sorted(parts, reverse=True):
        if seconds >= MINOR * predicted.seconds:
            named_parts.append(f"{units.duration(seconds)} of {name}")
    return " and ".join(named_parts)
