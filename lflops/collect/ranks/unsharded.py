"""The work of the whole model where tensors that are spread over ranks do not tell it: from a count of the same model in one piece."""

from typing import Any

from msgspec.structs import replace

from lflops.collect.inputs.arguments import describe
from lflops.errors import CountError
from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.records import Phase
from lflops.profile.series import summed

_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")


def check_logical(caller: str, logical: object) -> None:
    """Raise a `CountError` unless it is a profile, or nothing."""
    if logical is not None and not isinstance(logical, Profile):
        raise CountError(f"{caller}logical={describe(logical)}: give the Profile of the unsharded model on a rank's batch, or None")


def with_logical(profile: Profile, whole: Profile) -> Profile:
    """The rank's profile with the MACs of the model in one piece where it knew none, in each phase in which they agree otherwise."""
    own: dict[Phase, dict[str, int]] = {}
    notes = []
    for phase in _PHASES:
        known = {row: module.work(phase).own_logical_macs for row, module in profile.modules.items()}
        if None not in known.values():
            continue
        theirs = {row: module.work(phase).own_macs for row, module in whole.modules.items()}
        strange = [row for row, macs in known.items() if (row not in theirs if macs is None else macs != theirs.get(row, 0))]
        if strange:
            notes.append(Note(code="logical_differs", subject=strange[0], values={"phase": phase}))
        else:
            own[phase] = {row: theirs.get(row, 0) for row in known}
    below = summed(((above, phase), macs) for phase, rows in own.items() for row, macs in rows.items() for above in ancestry(row))
    modules = {}
    for row, module in profile.modules.items():
        works: dict[str, Any] = {
            phase: replace(module.work(phase), logical_macs=below[row, phase], own_logical_macs=rows[row]) for phase, rows in own.items()
        }
        modules[row] = replace(module, **works)
    return replace(profile, modules=modules, notes=(*profile.notes, *notes))
