"""Find the coordinates of each rank, and the work of the whole model.

A rank has one coordinate for each known kind of parallelism. For example, `{"data": 3, "tensor":
0}` is the fourth rank in data parallelism and the first rank in tensor parallelism. With tensor
parallelism, a rank executes only a part of the model. If the sharded tensors of the rank do not
show the work of the whole model, this work is copied from a profile of the unsharded model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.distributed import is_available

from lflops.errors import CountError
from lflops.inputs.arguments import describe
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import ModuleProfile, Profile, Run, Work, with_works
from lflops.profile.records import PASS_PHASES, ModulePhase, Phase

KINDS = ("data", "tensor", "pipeline", "expert")
"""The kinds of parallelism whose size is a field of `Run`, such as `data_parallel_size`.

For other kinds, such as context parallelism, ranks have coordinates, but `Run` has no size.
"""

_NAMES = {
    "data": (
        "data",
        "dp",
        "ddp",
        "fsdp",
        "replicate",
        "replica",
        "shard",
        "dp_replicate",
        "dp_shard",
        "hsdp",
    ),
    "tensor": ("tensor", "tp", "model", "mp"),
    "pipeline": ("pipeline", "pp", "stage"),
    "expert": ("expert", "ep"),
    "context": ("context", "cp"),
    "sequence": ("sequence", "sp"),
}
"""For each kind of parallelism, the names that dimensions of device meshes have.

A name can also end with `_parallel`, such as `data_parallel`.
"""

_NEEDED_FUNCTION = (
    "pass a function that takes a rank and returns the coordinates of this rank, such as "
    '{"data": 0, "tensor": 1}; coordinates count from 0'
)


class Topology(Struct, frozen=True, kw_only=True):
    """The coordinates of the ranks in each kind of parallelism, as far as this process knows them.

    Attributes:
        coordinates: The coordinates of each rank, by kind of parallelism. A rank is missing if this
            process cannot find its coordinates.
        sizes: Number of different coordinates in each kind of parallelism.
        node: Name of the node of this process; `None` if unknown.
    """

    world_size: int
    coordinates: Mapping[int, Mapping[str, int]]
    sizes: Mapping[str, int]
    node: str | None = None

    def of(self, run: Run) -> Run:
        """Return `run` with the world size, and with the known size of each kind of parallelism."""
        sizes = {}
        for kind in KINDS:
            if kind in self.sizes:
                sizes[f"{kind}_parallel_size"] = self.sizes[kind]
        return replace(run, world_size=self.world_size, **sizes)


class _Mesh(NamedTuple):
    """A device mesh: the size of each kind of parallelism, and the coordinates of each rank."""

    sizes: dict[str, int]
    coordinates: dict[int, dict[str, int]]


def topology_of(
    world_size: int,
    rank: int,
    *,
    function: Callable[[int], Mapping[str, int]] | None = None,
    mesh: Any = None,
    model: nn.Module | None = None,
    sampler: Mapping[str, int] | None = None,
    node: str | None = None,
) -> Topology:
    """Find the coordinates of the ranks from several sources.

    The sources are `function`, `mesh`, `model` and `sampler`, in this order. A later source only
    adds kinds of parallelism that no earlier source has.

    Args:
        world_size: Number of ranks.
        rank: This rank.
        function: A function that takes a rank and returns its coordinates, such as `{"data": 0,
            "tensor": 1}`. If it is passed, no other source is read.
        mesh: The device mesh of the strategy. Its dimensions have names such as `("data_parallel",
            "tensor_parallel")`.
        model: The model. Its parameters may be distributed over device meshes.
        sampler: The `num_replicas` and `rank` of the distributed sampler.
        node: The name of this rank's node.
    """
    if function is not None:
        asked = _coordinates_from(function, world_size)
        return Topology(world_size=world_size, coordinates=asked, sizes=_sizes_of(asked), node=node)
    coordinates: dict[int, dict[str, int]] = {}
    sizes = {"data": 1, "tensor": 1} if world_size == 1 else {}
    for each in _meshes(mesh, model):
        new_kinds = [kind for kind in each.sizes if kind not in sizes]
        for kind in new_kinds:
            sizes[kind] = each.sizes[kind]
        for mesh_rank, at in each.coordinates.items():
            known = coordinates.setdefault(mesh_rank, {})
            for kind in new_kinds:
                known[kind] = at[kind]
    if "data" not in sizes and sampler and "num_replicas" in sampler:
        sizes["data"] = sampler["num_replicas"]
        coordinates.setdefault(rank, {})["data"] = sampler.get("rank", 0)
    # If all ranks are used for other kinds of parallelism, all ranks have the same batch.
    if "data" not in sizes and math.prod(sizes.values()) == world_size:
        sizes["data"] = 1
        for number in range(world_size):
            coordinates.setdefault(number, {})["data"] = 0
    return Topology(world_size=world_size, coordinates=coordinates, sizes=sizes, node=node)


def _coordinates_from(function: Any, world_size: int) -> dict[int, dict[str, int]]:
    """Call the user's function for every rank, and check what it returns."""
    if not callable(function):
        raise CountError(f"topology={describe(function)}: {_NEEDED_FUNCTION}")
    coordinates: dict[int, dict[str, int]] = {}
    for rank in range(world_size):
        try:
            of_rank = function(rank)
        except Exception as error:
            raise CountError(
                f"topology({rank}) raised {type(error).__name__}: {error}: {_NEEDED_FUNCTION}"
            ) from error
        if not _are_coordinates(of_rank):
            raise CountError(f"topology({rank}) is {describe(of_rank)}: {_NEEDED_FUNCTION}")
        coordinates[rank] = {_kind(kind): at for kind, at in of_rank.items()}
        if coordinates[rank].keys() != coordinates[0].keys():
            raise CountError(
                f"topology({rank}) has {_listed(coordinates[rank])}, but topology(0) has "
                f"{_listed(coordinates[0])}: return the same keys for all ranks"
            )
    return coordinates


def _sizes_of(coordinates: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Return the number of different coordinates in each kind of parallelism.

    Raises:
        CountError: The coordinates do not count from 0 without gaps.
    """
    sizes = {}
    for kind in coordinates[0]:
        values = {at[kind] for at in coordinates.values()}
        if values != set(range(len(values))):
            raise CountError(
                f"topology: the coordinates of {kind!r} are {_listed(sorted(values))}:"
                f" {_NEEDED_FUNCTION}"
            )
        sizes[kind] = len(values)
    return sizes


def _are_coordinates(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    for kind, at in value.items():
        if not isinstance(kind, str) or type(at) is not int or at < 0:
            return False
    return True


def _meshes(mesh: Any, model: nn.Module | None) -> Iterator[_Mesh]:
    """Yield the mesh of the strategy, then the meshes of the model's parameters."""
    if mesh is not None and getattr(mesh, "mesh_dim_names", None):
        yield _mesh(mesh, mesh.mesh_dim_names)
    if model is None or not is_available():
        return
    seen: list[Any] = []
    for parameter in model.parameters():
        of_parameter = getattr(parameter, "device_mesh", None)
        if of_parameter is None or of_parameter in seen:
            continue
        seen.append(of_parameter)
        names = _kinds_of_parameters(model, of_parameter)
        if names:
            yield _mesh(of_parameter, names)


def _kinds_of_parameters(model: nn.Module, mesh: Any) -> list[str]:
    """Return the kind of parallelism of each mesh dimension; empty if unknown.

    `mesh` is the device mesh over which a parameter of the model is sharded. The kinds are usually
    read from the names of the dimensions. In a model that uses `fully_shard`, a dimension without a
    known name is for data parallelism. In other models, a mesh with a single dimension and no name
    is assumed to be for tensor parallelism.
    """
    names = list(mesh.mesh_dim_names or ())
    kinds = [_kind(name) for name in names]
    if names and _NAMES.keys() >= set(kinds):
        return kinds
    # Importing FSDP takes a second, and most runs do not need it.
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        if not names:
            return ["data"] * mesh.ndim
        for dimension, kind in enumerate(kinds):
            if kind not in _NAMES:
                kinds[dimension] = "data"
        return kinds
    if names:
        return kinds
    return ["tensor"] if mesh.ndim == 1 else []


def _mesh(mesh: Any, names: Iterable[str]) -> _Mesh:
    """Return a device mesh's size in each kind of parallelism, and the coordinates of its ranks.

    Dimensions for the same kind of parallelism, such as `dp_replicate` and `dp_shard`, are joined
    into one dimension in row-major order.
    """
    shape = [int(size) for size in mesh.mesh.shape]
    kinds = [_kind(name) for name in names]
    sizes: dict[str, int] = {}
    for kind, size in zip(kinds, shape, strict=True):
        sizes[kind] = sizes.get(kind, 1) * size
    coordinates: dict[int, dict[str, int]] = {}
    for place in product(*map(range, shape)):
        at: dict[str, int] = {}
        for kind, index, size in zip(kinds, place, shape, strict=True):
            at[kind] = at.get(kind, 0) * size + index
        coordinates[int(mesh.mesh[place])] = at
    return _Mesh(sizes, coordinates)


def _kind(name: str) -> str:
    """Return the kind of parallelism that the name of a mesh dimension stands for."""
    plain = name.lower().removesuffix("_parallel")
    for kind, names in _NAMES.items():
        if plain in names:
            return kind
    return name


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def check_logical(caller: str, logical: object) -> None:
    """Check the argument `logical` of a public function: a `Profile` or `None`.

    Args:
        caller: Beginning of the error message, such as "count: ".
        logical: The argument.

    Raises:
        CountError: The argument has another type.
    """
    if logical is not None and not isinstance(logical, Profile):
        raise CountError(
            f"{caller}logical={describe(logical)}: pass the Profile of the unsharded model on a"
            " rank's batch, or None"
        )


def with_logical(profile: Profile, whole: Profile) -> Profile:
    """Return a rank's profile in which unknown logical MACs are filled in.

    Logical MACs are the MACs of the whole model, not only of one rank. They are copied from
    `whole`, a profile of the unsharded model. If the two profiles contradict each other in a phase,
    this phase is left unchanged and a note is added.
    """
    works: dict[ModulePhase, Work] = {}
    notes = []
    for phase in PASS_PHASES:
        known = {}
        for row, module in profile.modules.items():
            known[row] = module.work(phase).self_logical_macs
        if None not in known.values():
            continue
        unsharded = {}
        for row, module in whole.modules.items():
            unsharded[row] = module.work(phase).self_macs
        different = _first_difference(known, unsharded)
        if different is not None:
            notes.append(Note(code="logical_differs", subject=different, values={"phase": phase}))
            continue
        works.update(_logical_works(profile.modules, phase, unsharded))
    modules = with_works(profile.modules, works)
    return replace(profile, modules=modules, notes=(*profile.notes, *notes))


def _first_difference(known: Mapping[str, int | None], unsharded: Mapping[str, int]) -> str | None:
    """Return the name of the first module that contradicts the unsharded model, or `None`.

    `known` has the MACs that each of the rank's modules would have without sharding, or `None`.
    `unsharded` has the MACs of the modules of the unsharded model. Neither includes submodules. A
    module contradicts the unsharded model if the two values differ, or if its MACs are unknown and
    the unsharded model does not contain it.
    """
    for row, macs in known.items():
        if macs is None and row not in unsharded:
            return row
        if macs is not None and macs != unsharded.get(row, 0):
            return row
    return None


def _logical_works(
    modules: Mapping[str, ModuleProfile], phase: Phase, unsharded: Mapping[str, int]
) -> dict[ModulePhase, Work]:
    """Return the work of all modules in one phase, with logical MACs from the unsharded model.

    `unsharded` has the self MACs of each module of the unsharded model.
    """
    inclusive = dict.fromkeys(modules, 0)
    for row in modules:
        for above in ancestry(row):
            inclusive[above] += unsharded.get(row, 0)
    works = {}
    for row, module in modules.items():
        works[ModulePhase(row, phase)] = replace(
            module.work(phase),
            logical_macs=inclusive[row],
            self_logical_macs=unsharded.get(row, 0),
        )
    return works
