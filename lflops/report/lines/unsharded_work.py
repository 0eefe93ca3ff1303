"""The work of the whole model, where one rank does only a part of it."""

from lflops.profile.model import Profile, Work
from lflops.profile.records import PHASES

__all__ = ["whole_macs"]


def whole_macs(profile: Profile) -> dict[str, int | None]:
    """MACs of the model in each phase that has some; nothing where the rank's own are all of them.

    What is not known is `None`, where the ranks are known to share a batch, or each to hold a part of the parameters.
    """
    root, tensor_parallel = profile.modules[""], profile.run.tensor_parallel_size
    works: dict[str, Work] = {phase: work for phase in PHASES if (work := root.work(phase)).macs or work.logical_macs}
    whole: dict[str, int | None] = {phase: work.logical_macs for phase, work in works.items()}
    shared = root.local_parameters != root.parameters or tensor_parallel not in {None, 1}
    differs = any(macs is not None and macs != works[phase].macs for phase, macs in whole.items())
    return whole if differs or (shared and None in whole.values()) else {}
