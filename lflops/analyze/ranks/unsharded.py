"""The work of the whole model where one rank does only a part of it: under tensor parallelism, sharding or pipeline stages."""

from lflops.profile.model import Profile, Work
from lflops.profile.notes import notes_with
from lflops.profile.records import PHASES

__all__ = ["is_staged", "unsharded_macs"]


def unsharded_macs(profile: Profile) -> dict[str, int | None]:
    """The model's MACs in each phase that has any; empty where this rank does all of them.

    A phase is `None` where they are unknown: the ranks are known to share a batch, or each to hold a part of the parameters.
    """
    root, tensor_parallel = profile.modules[""], profile.run.tensor_parallel_size
    works: dict[str, Work] = {phase: work for phase in PHASES if (work := root.work(phase)).macs or work.logical_macs}
    logical: dict[str, int | None] = {phase: work.logical_macs for phase, work in works.items()}
    is_sharded = root.local_parameters != root.parameters or tensor_parallel not in {None, 1}
    differs = any(macs is not None and macs != works[phase].macs for phase, macs in logical.items())
    return logical if differs or (is_sharded and None in logical.values()) else {}


def is_staged(profile: Profile) -> bool:
    """Whether the root adds up ranks that run different modules, as pipeline stages: one GPU does only a part of its work."""
    return any(note.values.get("rows_of_others") for note in notes_with("ranks_differ", profile.notes))
