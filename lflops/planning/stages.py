"""The memory of a pipeline's stages, from sheets of the model with fewer blocks: what torch's own schedule keeps under 1F1B.

FSDP2's weights stay gathered through the step (`reshard_after_forward=False`), and its gradients are whole until the step's end.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lflops.planning.work_sheets import Sheet, peak_of
from lflops.profile.model import ModuleProfile


class Stage(NamedTuple):
    """A stage that has as many blocks as any."""

    ends: tuple[bool, ...]  # what it has besides blocks: what runs before them is False, after them True
    share: float  # of the parameters that are in no block
    in_flight: int  # micro batches between their forward and their backward, at most
    buffers: int  # what a micro batch sends to the next stage is allocated so many times


def stages_of(sheet: Sheet, modules: Mapping[str, ModuleProfile], number: int, micro_batches: int) -> Iterator[Stage]:
    """The first, the second and the last stage of so many."""
    rows: dict[bool, set[str]] = {False: set(), True: set()}  # that hold parameters, by whether they run after the blocks
    for kind, *key in sheet:
        if kind == "bytes" and key[0][0] == "" and key[-1] == "forward":
            rows[key[0][1:2] == (True,)].add(modules[key[1]].owner or key[1])
    before, after, every = (
        sum(modules[row].own_parameters for row in some) for some in (rows[False], rows[True], rows[False] | rows[True])
    )
    first, second = min(number, micro_batches), min(number - 1, micro_batches)
    yield Stage((False,), before / (every or 1), first, micro_batches + first)
    if number > 2:
        yield Stage((), 0.0, second, 2 * micro_batches + second)
    yield Stage((True,), after / (every or 1), 1, micro_batches)


def stage_peak(stage: Stage, sheet: Sheet, one: Sheet, none: Sheet, *, blocks: int, ranks: int, gathered: float, sent: float) -> float:
    """The most bytes alive in a stage, from the sheet of its blocks with all that is in no block, and those with one block and with none.

    FSDP2 shards over so many `ranks`. A weight that it has gathered has `gathered` times the bytes of its shards. A micro batch has `sent`
    bytes at the end of a stage.
    """
    weights, gradients, kept = (one[name,] - none[name,] for name in ("parameters", "gradients", "activations"))  # of a block
    lacks = 1 - stage.share
    step = peak_of(sheet, phase="optimizer") - lacks * peak_of(none, phase="optimizer")
    passes = (value for (kind, *key), value in sheet.items() if kind == "bytes without gradients" and _runs(stage, key[0]))
    whole = (blocks - 1) * (gathered * weights + gradients) + stage.share * none["gradients",]  # besides those of the block at work
    more = (stage.in_flight - 1) * blocks * kept + stage.buffers * sent
    return max(step, max(passes) + whole * ranks + more - lacks * (none["parameters",] + none["optimizer_state",]))


def _runs(stage: Stage, where: tuple[Any, ...]) -> bool:
    return where[0] != "" or (where[1:2] == (True,)) in stage.ends
