"""The blocks of a model: its repeated parts, which checkpointing recomputes and FSDP shards one by one."""

from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry

__all__ = ["blocks_of"]


def blocks_of(profile: Profile) -> list[str]:
    """The modules that their container numbers, outside of any other."""
    numbered = [row for row in profile.modules if row.rpartition(".")[2].isdecimal()]
    return [row for row in numbered if not any(above.rpartition(".")[2].isdecimal() for above in ancestry(row)[1:])]
