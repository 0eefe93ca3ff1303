"""A `Profile` from the sums of a count: rows with own and inclusive work, parameters, notes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import asdict, replace
from torch import nn

from lflops.flop_counter.totals import Counts, Totals, Transfers
from lflops.inputs.devices import multiplies_in_tf32
from lflops.inputs.tensors import dtype_name
from lflops.model.module_tree import ModuleTree, ParameterSize, parameter_sizes
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import (
    COUNTS,
    OP_COUNT_FIELDS,
    SCHEMA_VERSION,
    Communication,
    DtypeShare,
    Memory,
    ModuleProfile,
    OpCount,
    Profile,
    Run,
    UnsupportedCall,
    Work,
)
from lflops.profile.records import PHASES, ModulePhase
from lflops.profile.series import dtype_of, gathered, grouped, sum_known, sums

# characters of a module's `extra_repr`
LONGEST_DETAIL = 200


@dataclass(frozen=True, kw_only=True)
class CountedPass:
    """Everything collected in one pass."""

    tree: ModuleTree
    calls: Counter[str]
    totals: Totals
    memory: Memory | None
    peaks: Mapping[str, int] = field(
        default_factory=dict
        # the most bytes alive while each row ran
    )
    # rows whose own work is left out
    ignored: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()


def build_profile(collected: CountedPass, run: Run, *, tf32: bool) -> Profile:
    """The profile; on a chip with TF32, with the float32 that torch lets it multiply so.

    Its dtype is that of most MACs.
    """
    totals = collected.totals
    for row, module in _scripted(collected.tree):
        calls = collected.calls[row]
        graph = getattr(module, "inlined_graph", None) if calls else None
        for operator, weights in () if graph is None else _below_dispatcher(graph):
            totals.unsupported[row, operator, "forward"].add(Transfers(calls, calls * weights))
    op_counts = tuple(
        OpCount(
            module=row,
            operator=operator,
            phase=phase,
            dtype="tf32"
            if narrow and dtype is torch.float32 and counts.macs
            else ""
            if dtype is None
            else dtype_name(dtype),
            **{name: getattr(counts, name) for name in OP_COUNT_FIELDS},
        )
        for (row, operator, phase, dtype), counts in totals.op_counts.items()
        if row not in collected.ignored
        for narrow in [tf32 and multiplies_in_tf32(operator)]
    )
    unsupported = tuple(
        UnsupportedCall(module=row, operator=operator, phase=phase, **asdict(transfers))
        for (row, operator, phase), transfers in totals.unsupported.items()
        if row not in collected.ignored
    )
    communication = tuple(
        Communication(
            module=row,
            phase=phase,
            collective=collective,
            group=group,
            group_size=group_size,
            **asdict(transfers),
        )
        for (row, phase, collective, group, group_size), transfers in totals.collectives.items()
        if row not in collected.ignored
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        run=replace(run, dtype=dtype_of(op_counts) or run.dtype),
        modules=_modules(collected, communication),
        op_counts=op_counts,
        unsupported=unsupported,
        communication=communication,
        waits=tuple(sorted(totals.waits)),
        memory=collected.memory,
        notes=collected.notes + tuple(_notes(collected)),
    )


def _scripted(tree: ModuleTree) -> Iterator[tuple[str, nn.Module]]:
    rows: set[str] = set()
    for row, module in tree.modules.items():
        if isinstance(module, torch.jit.ScriptModule) and rows.isdisjoint(ancestry(row)):
            rows.add(row)
            yield row, module


def _modules(
    collected: CountedPass, communication: Iterable[Communication]
) -> dict[str, ModuleProfile]:
    tree = collected.tree
    own: defaultdict[ModulePhase, Counts] = defaultdict(Counts)
    for (row, _, phase, _), counts in collected.totals.op_counts.items():
        if row not in collected.ignored:
            own[ModulePhase(row, phase)].add(counts)
    for each in communication:
        own[ModulePhase(each.module, each.phase)].add(
            Counts(calls=each.calls, comm_bytes=each.bytes)
        )
    inclusive: defaultdict[ModulePhase, Counts] = defaultdict(Counts)
    for key, counts in own.items():
        for above in ancestry(key.fqn):
            inclusive[ModulePhase(above, key.phase)].add(counts)
    difference, own_difference = _logical_differences(collected)
    parameters, owners = _parameters(tree)
    rows = {
        above: None
        for row in (*tree.modules, *collected.calls, *collected.totals.rows())
        for above in reversed(ancestry(row))
    }
    return {
        row: _module(
            row,
            collected,
            parameters.get(row, []),
            owners.get(row),
            {
                str(phase): _work(
                    inclusive[key], own[key], difference.get(key, 0), own_difference.get(key, 0)
                )
                for phase, key in ((phase, ModulePhase(row, phase)) for phase in PHASES)
            },
        )
        for row in rows
    }


def _module(
    row: str,
    collected: CountedPass,
    parameters: Sequence[ParameterSize],
    owner: str | None,
    work: Mapping[str, Work],
) -> ModuleProfile:
    """The row with the parameters here and below."""
    module = collected.tree.modules.get(row)
    trainable = [each for each in parameters if each.stored_in.requires_grad]
    by_dtype = grouped(parameters, lambda each: dtype_name(each.stored_in.dtype))
    return ModuleProfile(
        class_name=type(module).__name__
        if module is not None
        else _kind_without_module(row, collected),
        depth=len(ancestry(row)) - 1,
        calls=collected.calls[row],
        compiled=row in collected.tree.compiled,
        owner=owner,
        parameters=_elements(parameters),
        trainable_parameters=_elements(trainable),
        parameter_bytes=_bytes(parameters),
        trainable_parameter_bytes=_bytes(trainable),
        self_parameters=_elements(each for each in parameters if each.row == row),
        local_parameters=sum(each.local_elements for each in parameters),
        local_parameter_bytes=sum(
            each.local_elements * each.stored_in.element_size() for each in parameters
        ),
        dtypes={
            dtype: DtypeShare(parameters=_elements(those), bytes=_bytes(those))
            for dtype, those in by_dtype.items()
        },
        peak_bytes=collected.peaks.get(row),
        detail="" if module is None else _detail(module),
        **work,
    )


def _elements(parameters: Iterable[ParameterSize]) -> int:
    return sum(each.elements for each in parameters)


def _bytes(parameters: Iterable[ParameterSize]) -> int:
    return sum(each.elements * each.stored_in.element_size() for each in parameters)


def _detail(module: nn.Module) -> str:
    try:
        detail = " ".join(str(module.extra_repr()).split())
    except Exception:  # noqa: BLE001 - the user's code must not end a count
        return ""
    return detail if len(detail) <= LONGEST_DETAIL else f"{detail[: LONGEST_DETAIL - 1]}…"


def _kind_without_module(row: str, collected: CountedPass) -> str:
    """The kind of a row without a module.

    A named scope, or a container above a further name of a shared module.
    """
    inside = (name for name in collected.tree.modules if name.startswith(f"{row}."))
    return "" if not row or any(inside) else "scope"


def _logical_differences(
    collected: CountedPass,
) -> tuple[dict[ModulePhase, int | None], dict[ModulePhase, int | None]]:
    """Logical MACs less counted MACs: of each row with all rows below it, and of each row alone."""
    own = {
        key: macs
        for key, macs in collected.totals.logical_difference.items()
        if key.fqn not in collected.ignored
    }
    inclusive = gathered(
        (ModulePhase(above, phase), macs)
        for (row, phase), macs in own.items()
        for above in ancestry(row)
    )
    return {key: sum_known(macs) for key, macs in inclusive.items()}, own


def _work(
    inclusive: Counts, own: Counts, difference: int | None, own_difference: int | None
) -> Work:
    counts = {name: getattr(inclusive, name) for name in COUNTS} | {
        f"self_{name}": getattr(own, name) for name in COUNTS
    }
    logical_macs, self_logical_macs = (
        sum_known((inclusive.macs, difference)),
        sum_known((own.macs, own_difference)),
    )
    return Work(**counts, logical_macs=logical_macs, self_logical_macs=self_logical_macs)


def _parameters(tree: ModuleTree) -> tuple[dict[str, list[ParameterSize]], dict[str, str]]:
    parameters = gathered(
        (row, size) for size in parameter_sizes(tree) for row in ancestry(size.row)
    )
    owned = (
        (row, tree.owner(parameter))
        for row, module in tree.modules.items()
        for parameter in module.parameters(recurse=False)
    )
    return parameters, {row: owner for row, owner in owned if owner != row}


def _notes(collected: CountedPass) -> Iterable[Note]:
    for row in sorted(collected.ignored):
        ignored = [counts for (of, *_), counts in collected.totals.op_counts.items() if of == row]
        yield Note(code="ignored", subject=row, values=sums(ignored, "calls", "macs", "flops"))
    for row, module in _scripted(collected.tree):
        if any(True for _ in module.children()):
            yield Note(code="scripted", subject=row, values={})
    yield from _notes_of_operators(collected.totals)


def _notes_of_operators(totals: Totals) -> Iterable[Note]:
    if totals.calls_in_hooks:
        yield Note(code="communication_hook", subject="", values={"calls": totals.calls_in_hooks})
    for operator, error in totals.failures.items():
        yield Note(code="formula_failed", subject=operator, values={"error": error})
    for operator, calls in totals.upper_bounds.items():
        yield Note(code="upper_bound", subject=operator, values={"calls": calls})
    for operator, masks in totals.dense_masks.items():
        values = {"calls": masks.calls, "computed": masks.computed, "within": masks.within}
        yield Note(code="dense_mask", subject=operator, values=values)
    for operator, calls in (+totals.counted_inside).items():
        yield Note(code="counted_inside", subject=operator, values={"calls": calls})


BELOW = (
    "prim::mkldnn_",
    "prim::MKLDNN",
    "prim::TensorExpr",
    "prim::CudaFusion",
    "prim::FusionGroup",
    "prim::StaticSubgraph",
)
"""How the names of nodes begin that call kernels at once."""

PACKED = "prim::ConstantMKLDNNTensor"


def _below_dispatcher(block: Any) -> Iterator[tuple[str, int]]:
    """Each such node of a scripted module's graph.

    Its name, and the bytes of the weights that are known to it.
    """
    for node in block.nodes():
        name = node.kind()
        if name.startswith(BELOW):
            yield name, sum(_weight_bytes(value.node()) for value in node.inputs())
        else:
            for inner in node.blocks():
                yield from _below_dispatcher(inner)


def _weight_bytes(node: Any) -> int:
    if node.kind() != PACKED or not node.hasAttribute("value"):
        return 0
    weight = node.t("value")
    return int(weight.numel() * weight.element_size())
