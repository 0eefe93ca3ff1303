"""From running sums to a `Profile`: rows, inclusive figures, parameters, notes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lflops.collect.counting.totals import Totals
from lflops.collect.inputs.tensors import dtype_name
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.model.parameter_sizes import holdings
from lflops.profile.model import (
    COUNTS,
    SCHEMA_VERSION,
    Cell,
    Communication,
    DtypeShare,
    Memory,
    ModuleProfile,
    Profile,
    Run,
    Uncounted,
    Work,
)
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.records import PHASES, ModulePhase

__all__ = ["CountedPass", "build_profile"]

LONGEST_DETAIL = 200
"""Letters of what a module says of itself."""


@dataclass(frozen=True, kw_only=True)
class CountedPass:
    """All that a pass gathered.

    Attributes:
        peaks: The most bytes alive while each row ran.
        ignored: Rows whose own work is left out.
    """

    tree: ModuleTree
    calls: Counter[str]
    tally: Totals
    memory: Memory | None
    peaks: Mapping[str, int] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()


@dataclass
class _Parameters:
    """The parameters at or below a row."""

    count: int = 0
    trainable: int = 0
    bytes: int = 0
    trainable_bytes: int = 0
    own: int = 0
    local: int = 0
    local_bytes: int = 0
    dtypes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))


def build_profile(collected: CountedPass, run: Run) -> Profile:
    """Put a profile together."""
    tally = collected.tally
    cells = tuple(
        Cell(
            module=row,
            operator=operator,
            phase=phase,
            dtype="" if dtype is None else dtype_name(dtype),
            calls=sums[0],
            macs=sums[1],
            executed_macs=sums[2],
            flops=sums[3],
            bytes_moved=sums[4],
        )
        for (row, operator, phase, dtype), sums in tally.cells.items()
        if row not in collected.ignored
    )
    uncounted = tuple(
        Uncounted(module=row, operator=operator, phase=phase, calls=calls, bytes=moved)
        for (row, operator, phase), (calls, moved) in tally.uncounted.items()
        if row not in collected.ignored
    )
    communication = tuple(
        Communication(module=row, phase=phase, collective=collective, group=group, group_size=group_size, calls=calls, bytes=carried)
        for (row, phase, collective, group, group_size), (calls, carried) in tally.collectives.items()
        if row not in collected.ignored
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        run=run,
        modules=_modules(collected, cells, communication),
        cells=cells,
        uncounted=uncounted,
        communication=communication,
        memory=collected.memory,
        notes=collected.notes + tuple(_notes(collected)),
    )


def _modules(collected: CountedPass, cells: Iterable[Cell], communication: Iterable[Communication]) -> dict[str, ModuleProfile]:
    tree = collected.tree
    own: dict[ModulePhase, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for cell in cells:
        figures = (cell.calls, cell.macs, cell.executed_macs, cell.flops, cell.bytes_moved, 0)
        _add(own[ModulePhase(cell.module, cell.phase)], figures)
    for each in communication:
        _add(own[ModulePhase(each.module, each.phase)], (each.calls, 0, 0, 0, 0, each.bytes))
    below: dict[ModulePhase, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for (row, phase), sums in own.items():
        for above in ancestry(row):
            _add(below[ModulePhase(above, phase)], sums)
    beyond, own_beyond = _beyond(collected)
    parameters, elsewhere = _parameters(tree)
    rows = {above: None for row in (*tree.modules, *collected.calls, *collected.tally.rows()) for above in reversed(ancestry(row))}
    return {
        row: _module(
            row,
            collected,
            parameters.get(row, _Parameters()),
            elsewhere.get(row),
            {
                str(phase): _work(below[at], own[at], beyond.get(at, 0), own_beyond.get(at, 0))
                for phase, at in ((phase, ModulePhase(row, phase)) for phase in PHASES)
            },
        )
        for row in rows
    }


def _module(row: str, collected: CountedPass, parameters: _Parameters, owner: str | None, work: Mapping[str, Work]) -> ModuleProfile:
    module = collected.tree.modules.get(row)
    return ModuleProfile(
        kind=type(module).__name__ if module is not None else _kind_without_module(row, collected),
        depth=len(ancestry(row)) - 1,
        calls=collected.calls[row],
        compiled=row in collected.tree.compiled,
        owner=owner,
        parameters=parameters.count,
        trainable_parameters=parameters.trainable,
        parameter_bytes=parameters.bytes,
        trainable_parameter_bytes=parameters.trainable_bytes,
        own_parameters=parameters.own,
        local_parameters=parameters.local,
        local_parameter_bytes=parameters.local_bytes,
        dtypes={dtype: DtypeShare(parameters=count, bytes=size) for dtype, (count, size) in parameters.dtypes.items()},
        peak_bytes=collected.peaks.get(row),
        detail="" if module is None else _detail(module),
        **work,
    )


def _detail(module: nn.Module) -> str:
    """What the module's class has to say of it, on one line; nothing where saying it fails."""
    try:
        said = " ".join(str(module.extra_repr()).split())
    except Exception:  # noqa: BLE001 - the user's code, which nobody asked for here
        return ""
    return said if len(said) <= LONGEST_DETAIL else f"{said[: LONGEST_DETAIL - 1]}…"


def _kind_without_module(row: str, collected: CountedPass) -> str:
    """A named part of a step; or a container on the way to a further name of a shared module."""
    inside = (name for name in collected.tree.modules if name.startswith(f"{row}."))
    return "" if not row or any(inside) else "scope"


def _beyond(collected: CountedPass) -> tuple[dict[ModulePhase, int | None], dict[ModulePhase, int | None]]:
    """What the whole model has beyond the work of this rank, in the rows and below them, and in the rows alone."""
    own = {place: macs for place, macs in collected.tally.beyond.items() if place.row not in collected.ignored}
    below: dict[ModulePhase, int | None] = {}
    for (row, phase), macs in own.items():
        for above in ancestry(row):
            place = ModulePhase(above, phase)
            before = below.get(place, 0)
            below[place] = None if before is None or macs is None else before + macs
    return below, own


def _work(below: list[int], own: list[int], beyond: int | None, own_beyond: int | None) -> Work:
    figures: dict[str, Any] = dict(zip(COUNTS, below, strict=True))
    figures |= {f"own_{name}": value for name, value in zip(COUNTS, own, strict=True)}
    figures["logical_macs"] = None if beyond is None else figures["macs"] + beyond
    figures["own_logical_macs"] = None if own_beyond is None else figures["own_macs"] + own_beyond
    return Work(**figures)


def _parameters(tree: ModuleTree) -> tuple[dict[str, _Parameters], dict[str, str]]:
    """What each row holds, and for rows that hold somebody else's parameters, whose."""
    held: dict[str, _Parameters] = defaultdict(_Parameters)
    for owner, parameter, whole, here in holdings(tree):
        each = parameter.element_size()
        held[owner].own += whole
        for row in ancestry(owner):
            sums = held[row]
            sums.count += whole
            sums.bytes += whole * each
            if parameter.requires_grad:
                sums.trainable += whole
                sums.trainable_bytes += whole * each
            sums.local += here
            sums.local_bytes += here * each
            _add(sums.dtypes[dtype_name(parameter.dtype)], (whole, whole * each))
    elsewhere = {}
    for row, module in tree.modules.items():
        for parameter in module.parameters(recurse=False):
            owner = tree.owner(parameter)
            if owner != row:
                elsewhere[row] = owner
    return held, elsewhere


def _notes(collected: CountedPass) -> Iterable[Note]:
    for row in sorted(collected.ignored):
        sums = [0] * 5
        for key, cell in collected.tally.cells.items():
            if key[0] == row:
                _add(sums, cell)
        yield Note(code="ignored", subject=row, values={"calls": sums[0], "macs": sums[1], "flops": sums[3]})
    scripted: set[str] = set()
    for row, module in collected.tree.modules.items():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.children()) and scripted.isdisjoint(ancestry(row)):
            scripted.add(row)
            yield Note(code="scripted", subject=row, values={})
    for operator, error in collected.tally.failures.items():
        yield Note(code="formula_failed", subject=operator, values={"error": error})


def _add(sums: list[int], more: Iterable[int]) -> None:
    for place, value in enumerate(more):
        sums[place] += value
