"""Where each rank stands.

Its data-, tensor-, pipeline- and expert-parallel coordinates, and how large each of these groups
is.

Where sharded tensors do not tell the work of the whole model, it comes from a count of the same
model in one piece.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.distributed import is_available

from lflops.errors import CountError
from lflops.inputs.arguments import describe
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import Profile, Run, with_works
from lflops.profile.records import PASS_PHASES, ModulePhase, Phase
from lflops.profile.series import summed

KINDS = (
    "data",
    "tensor",
    "pipeline",
    "expert",
    # whose sizes a run tells; a further kind, as `context`, has coordinates alone
)

_NAMES = {
    **dict.fromkeys(
        ("data", "dp", "ddp", "fsdp", "replicate", "shard", "dp_replicate", "dp_shard", "hsdp"),
        "data",
    ),
    **dict.fromkeys(("tensor", "tp", "model", "mp"), "tensor"),
    **dict.fromkeys(("pipeline", "pp", "stage"), "pipeline"),
    **dict.fromkeys(("expert", "ep"), "expert"),
    **dict.fromkeys(("context", "cp"), "context"),
    **dict.fromkeys(("sequence", "sp"), "sequence"),
}
"""What dimensions are called, with or without `_parallel` behind it."""


class Topology(Struct, frozen=True, kw_only=True):
    """The coordinates of ranks by kind of parallelism, as far as they are known here."""

    world_size: int
    coordinates: Mapping[
        int, Mapping[str, int]
        # by rank, then by kind; a rank that is not in it may tell its own
    ]
    # how many coordinates each kind has
    sizes: Mapping[str, int]
    node: str | None = None

    def of(self, run: Run) -> Run:
        """The run's facts with the sizes that are known here."""
        return replace(
            run,
            world_size=self.world_size,
            **{f"{kind}_parallel_size": self.sizes[kind] for kind in KINDS if kind in self.sizes},
        )


def topology_of(
    world_size: int,
    rank: int,
    *,
    # A rank to its coordinates, as `{"data": 0, "tensor": 1}`; no other source is asked then
    function: Callable[[int], Mapping[str, int]] | None = None,
    # the strategy's, its dimensions named as `("data_parallel", "tensor_parallel")`
    mesh: Any = None,
    # its parameters may be spread over meshes
    model: nn.Module | None = None,
    sampler: Mapping[str, int]
    # `num_replicas` and `rank`: over how many ranks batches are distributed
    | None = None,
    node: str | None = None,
) -> Topology:
    """Ask each source in turn; a later one fills what the earlier ones leave unknown."""
    if function is not None:
        asked = _asked(function, world_size)
        sizes = {kind: len({each[kind] for each in asked.values()}) for kind in asked[0]}
        return Topology(world_size=world_size, coordinates=asked, sizes=sizes, node=node)
    found: dict[int, dict[str, int]] = {}
    sizes = {"data": 1, "tensor": 1} if world_size == 1 else {}
    for told, ranks in _mesh_coordinates(mesh, model):
        fresh = {kind: size for kind, size in told.items() if kind not in sizes}
        sizes |= fresh
        for each, at in ranks.items():
            found.setdefault(each, {}).update({kind: at[kind] for kind in fresh})
    if "data" not in sizes and sampler and "num_replicas" in sampler:
        sizes["data"] = sampler["num_replicas"]
        found.setdefault(rank, {})["data"] = sampler.get("rank", 0)
    # all ranks have one batch
    if "data" not in sizes and math.prod(sizes.values()) == world_size:
        sizes["data"] = 1
        for each in range(world_size):
            found.setdefault(each, {})["data"] = 0
    return Topology(world_size=world_size, coordinates=found, sizes=sizes, node=node)


def _asked(function: Any, world_size: int) -> dict[int, dict[str, int]]:
    """The coordinates that the user's function returns for every rank, validated."""
    taken = 'a function from a rank to its coordinates, as {"data": 0, "tensor": 1}, each counted from 0'
    if not callable(function):
        raise CountError(f"topology={describe(function)}: give {taken}")
    found: dict[int, dict[str, int]] = {}
    for rank in range(world_size):
        try:
            told = function(rank)
        except Exception as error:
            raise CountError(
                f"topology({rank}) raised {type(error).__name__}: {error}: give {taken}"
            ) from error
        if not isinstance(told, Mapping) or not all(
            isinstance(kind, str) and type(at) is int and at >= 0 for kind, at in told.items()
        ):
            raise CountError(f"topology({rank}) is {describe(told)}: give {taken}")
        found[rank] = {_kind(kind): at for kind, at in told.items()}
        if found[rank].keys() != found[0].keys():
            raise CountError(
                f"topology({rank}) has {_listed(found[rank])}, topology(0) {_listed(found[0])}: give all ranks the same ones"
            )
    for kind in found[0]:
        given = {each[kind] for each in found.values()}
        if given != set(range(len(given))):
            raise CountError(
                f"topology: of {kind!r} the ranks have {_listed(sorted(given))}: give {taken}"
            )
    return found


def _mesh_coordinates(
    mesh: Any, model: nn.Module | None
) -> Iterator[tuple[dict[str, int], dict[int, dict[str, int]]]]:
    """The sizes and the coordinates of each mesh by kind, the strategy's first."""
    if mesh is not None and getattr(mesh, "mesh_dim_names", None):
        yield _of_mesh(mesh, mesh.mesh_dim_names)
    if model is None or not is_available():
        return
    seen: list[Any] = []
    for parameter in model.parameters():
        spread = getattr(parameter, "device_mesh", None)
        if spread is None or any(spread == each for each in seen):
            continue
        seen.append(spread)
        if names := spread.mesh_dim_names or _unnamed(model, spread.ndim):
            yield _of_mesh(spread, names)


def _unnamed(model: nn.Module, dimensions: int) -> list[str]:
    """The use of a mesh without names.

    That of `fully_shard` for data, in one dimension or two; another in one dimension for tensors.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        # with a second of other modules, which most runs do not need
    )

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return ["data"] * dimensions
    return ["tensor"] if dimensions == 1 else []


def _of_mesh(mesh: Any, names: Iterable[str]) -> tuple[dict[str, int], dict[int, dict[str, int]]]:
    """Sizes and coordinates by kind.

    Dimensions of one kind, as replicas of shards, are flattened in row-major order.
    """
    sizes: dict[str, int] = {}
    kinds = [_kind(name) for name in names]
    for kind, size in zip(kinds, mesh.mesh.shape, strict=True):
        sizes[kind] = sizes.get(kind, 1) * int(size)
    ranks: dict[int, dict[str, int]] = {}
    for place in product(*map(range, mesh.mesh.shape)):
        at: dict[str, int] = {}
        for kind, index, size in zip(kinds, place, mesh.mesh.shape, strict=True):
            at[kind] = at.get(kind, 0) * int(size) + index
        ranks[int(mesh.mesh[place])] = at
    return sizes, ranks


def _kind(name: str) -> str:
    return _NAMES.get(name.lower().removesuffix("_parallel"), name)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def check_logical(caller: str, logical: object) -> None:
    """Raise a `CountError` unless it is a profile, or nothing."""
    if logical is not None and not isinstance(logical, Profile):
        raise CountError(
            f"{caller}logical={describe(logical)}: give the Profile of the unsharded model on a rank's batch, or None"
        )


def with_logical(profile: Profile, whole: Profile) -> Profile:
    """The rank's profile with the MACs of the model in one piece where it knew none, in each phase in which they agree otherwise."""
    own: dict[Phase, dict[str, int]] = {}
    notes = []
    for phase in PASS_PHASES:
        known = {
            row: module.work(phase).self_logical_macs for row, module in profile.modules.items()
        }
        if None not in known.values():
            continue
        theirs = {row: module.work(phase).self_macs for row, module in whole.modules.items()}
        strange = [
            row
            for row, macs in known.items()
            if (row not in theirs if macs is None else macs != theirs.get(row, 0))
        ]
        if strange:
            notes.append(Note(code="logical_differs", subject=strange[0], values={"phase": phase}))
        else:
            own[phase] = {row: theirs.get(row, 0) for row in known}
    below = summed(
        ((above, phase), macs)
        for phase, rows in own.items()
        for row, macs in rows.items()
        for above in ancestry(row)
    )
    works = {
        ModulePhase(row, phase): replace(
            profile.modules[row].work(phase), logical_macs=below[row, phase], self_logical_macs=macs
        )
        for phase, rows in own.items()
        for row, macs in rows.items()
    }
    return replace(
        profile, modules=with_works(profile.modules, works), notes=(*profile.notes, *notes)
    )
