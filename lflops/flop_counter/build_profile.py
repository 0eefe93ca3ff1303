"""Build a `Profile` from the counted work of a step.

The profile lists the work of each module together with its submodules (inclusive work) and without
its submodules (self work). Notes in the profile explain the numbers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
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
from lflops.profile.series import dtype_of, grouped, sum_known, sums

LONGEST_DETAIL = 200
"""Maximum number of characters of a module's `extra_repr` in a profile."""


@dataclass(frozen=True, kw_only=True)
class CountedPass:
    """Everything that was collected while a step was counted.

    Attributes:
        tree: The modules of the model.
        calls: The number of calls of each module.
        totals: The counted work by module and phase.
        memory: The memory timeline, or `None` if allocations were not recorded.
        peaks: For each module, the maximum live bytes while the module ran.
        ignored: The modules that the caller asked to ignore. Their self work is left out of the
            profile.
        notes: Additional notes for the profile.
    """

    tree: ModuleTree
    calls: Counter[str]
    totals: Totals
    memory: Memory | None
    peaks: Mapping[str, int] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()


def build_profile(collected: CountedPass, run: Run, *, tf32: bool) -> Profile:
    """Build the profile of a counted step.

    If `tf32` is true and torch's settings allow TF32, float32 matmuls are listed with the dtype
    `tf32`. The dtype of the profile is the dtype in which most MACs were computed.
    """
    totals = collected.totals
    _add_scripted(collected)
    op_counts = tuple(_op_counts(collected, tf32=tf32))
    communication = tuple(_communication(collected))
    return Profile(
        schema_version=SCHEMA_VERSION,
        run=replace(run, dtype=dtype_of(op_counts) or run.dtype),
        modules=_modules(collected, communication),
        op_counts=op_counts,
        unsupported=tuple(_unsupported(collected)),
        communication=communication,
        waits=tuple(sorted(totals.waits)),
        memory=collected.memory,
        notes=collected.notes + tuple(_notes(collected)),
    )


def _unsupported(collected: CountedPass) -> Iterator[UnsupportedCall]:
    for (fqn, operator, phase), transfers in collected.totals.unsupported.items():
        if fqn not in collected.ignored:
            yield UnsupportedCall(
                module=fqn,
                operator=operator,
                phase=phase,
                calls=transfers.calls,
                bytes=transfers.bytes,
            )


def _communication(collected: CountedPass) -> Iterator[Communication]:
    for key, transfers in collected.totals.collectives.items():
        fqn, phase, collective, group, group_size = key
        if fqn not in collected.ignored:
            yield Communication(
                module=fqn,
                phase=phase,
                collective=collective,
                group=group,
                group_size=group_size,
                calls=transfers.calls,
                bytes=transfers.bytes,
            )


def _add_scripted(collected: CountedPass) -> None:
    """Add TorchScript operators that bypass torch's dispatcher to the unsupported operators.

    The dispatch mode does not see these operators.
    """
    for fqn, module in _scripted(collected.tree):
        calls = collected.calls[fqn]
        graph = None
        if calls:
            graph = getattr(module, "inlined_graph", None)
        if graph is None:
            continue
        for operator, weights in _below_dispatcher(graph):
            transfers = Transfers(calls, calls * weights)
            collected.totals.unsupported[fqn, operator, "forward"].add(transfers)


def _op_counts(collected: CountedPass, *, tf32: bool) -> Iterator[OpCount]:
    for (fqn, operator, phase, dtype), counts in collected.totals.op_counts.items():
        if fqn in collected.ignored:
            continue
        name = "" if dtype is None else dtype_name(dtype)
        is_float32_matmul = dtype is torch.float32 and counts.macs > 0
        if tf32 and is_float32_matmul and multiplies_in_tf32(operator):
            name = "tf32"
        numbers = {field: getattr(counts, field) for field in OP_COUNT_FIELDS}
        yield OpCount(module=fqn, operator=operator, phase=phase, dtype=name, **numbers)


def _scripted(tree: ModuleTree) -> Iterator[tuple[str, nn.Module]]:
    """Yield the TorchScript modules that are not inside another TorchScript module."""
    scripted: set[str] = set()
    for fqn, module in tree.modules.items():
        if isinstance(module, torch.jit.ScriptModule) and scripted.isdisjoint(ancestry(fqn)):
            scripted.add(fqn)
            yield fqn, module


def _modules(
    collected: CountedPass, communication: Iterable[Communication]
) -> dict[str, ModuleProfile]:
    """Build the profile of each module, in the order of the modules in the model."""
    tree = collected.tree
    self_counts = _self_counts(collected, communication)
    inclusive: defaultdict[ModulePhase, Counts] = defaultdict(Counts)
    for key, counts in self_counts.items():
        for ancestor in ancestry(key.fqn):
            inclusive[ModulePhase(ancestor, key.phase)].add(counts)
    differences = _logical_differences(collected)
    parameters, owners = _parameters(tree)

    modules: dict[str, ModuleProfile] = {}
    for name in (*tree.modules, *collected.calls, *collected.totals.module_names()):
        for fqn in reversed(ancestry(name)):
            if fqn in modules:
                continue
            work = {}
            for phase in PHASES:
                key = ModulePhase(fqn, phase)
                work[str(phase)] = _work(inclusive[key], self_counts[key], differences, key)
            modules[fqn] = _module(fqn, collected, parameters.get(fqn, []), owners.get(fqn), work)
    return modules


def _self_counts(
    collected: CountedPass, communication: Iterable[Communication]
) -> defaultdict[ModulePhase, Counts]:
    """Return the self work of each module and phase, without ignored modules."""
    self_counts: defaultdict[ModulePhase, Counts] = defaultdict(Counts)
    for (fqn, _, phase, _), counts in collected.totals.op_counts.items():
        if fqn not in collected.ignored:
            self_counts[ModulePhase(fqn, phase)].add(counts)
    for call in communication:
        counts = Counts(calls=call.calls, comm_bytes=call.bytes)
        self_counts[ModulePhase(call.module, call.phase)].add(counts)
    return self_counts


def _module(
    fqn: str,
    collected: CountedPass,
    parameters: Sequence[ParameterSize],
    owner: str | None,
    work: Mapping[str, Work],
) -> ModuleProfile:
    """Build the profile of one module.

    Args:
        fqn: The name of the module.
        collected: Everything that was collected while the step was counted.
        parameters: The parameters of the module and its submodules.
        owner: The module that owns a shared parameter of this module, if any.
        work: The work of the module, keyed by phase.
    """
    module = collected.tree.modules.get(fqn)
    if module is None:
        class_name = _class_name_without_module(fqn, collected)
        detail = ""
    else:
        class_name = type(module).__name__
        detail = _detail(module)
    trainable = [each for each in parameters if each.stored_in.requires_grad]
    by_dtype = grouped(parameters, lambda each: dtype_name(each.stored_in.dtype))
    dtypes = {}
    for dtype, of_dtype in by_dtype.items():
        dtypes[dtype] = DtypeShare(parameters=_elements(of_dtype), bytes=_bytes(of_dtype))
    return ModuleProfile(
        class_name=class_name,
        depth=len(ancestry(fqn)) - 1,
        calls=collected.calls[fqn],
        compiled=fqn in collected.tree.compiled,
        owner=owner,
        parameters=_elements(parameters),
        trainable_parameters=_elements(trainable),
        parameter_bytes=_bytes(parameters),
        trainable_parameter_bytes=_bytes(trainable),
        self_parameters=sum(each.elements for each in parameters if each.fqn == fqn),
        local_parameters=sum(each.local_elements for each in parameters),
        local_parameter_bytes=sum(
            each.local_elements * each.stored_in.element_size() for each in parameters
        ),
        dtypes=dtypes,
        peak_bytes=collected.peaks.get(fqn),
        detail=detail,
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
    if len(detail) > LONGEST_DETAIL:
        return f"{detail[: LONGEST_DETAIL - 1]}…"
    return detail


def _class_name_without_module(fqn: str, collected: CountedPass) -> str:
    """Return the class name to list for a name that does not belong to a module of the model.

    A scope that the user named has the class name `scope`. The root, and a name such as `decoder`
    that is only a prefix of module names, have an empty class name.
    """
    is_parent = any(name.startswith(f"{fqn}.") for name in collected.tree.modules)
    if not fqn or is_parent:
        return ""
    return "scope"


class _Differences(NamedTuple):
    """The differences of logical MACs minus counted MACs, by module and phase.

    Logical MACs are the MACs of the whole model, which is sharded over several ranks. Counted MACs
    are the MACs of this rank. A difference is `None` if the logical MACs are unknown.

    Attributes:
        inclusive: The difference for each module together with its submodules.
        of_self: The difference for each module without its submodules.
    """

    inclusive: dict[ModulePhase, int | None]
    of_self: dict[ModulePhase, int | None]


def _logical_differences(collected: CountedPass) -> _Differences:
    inclusive: defaultdict[ModulePhase, list[int | None]] = defaultdict(list)
    of_self: dict[ModulePhase, int | None] = {}
    for key, macs in collected.totals.logical_difference.items():
        if key.fqn in collected.ignored:
            continue
        of_self[key] = macs
        for ancestor in ancestry(key.fqn):
            inclusive[ModulePhase(ancestor, key.phase)].append(macs)
    sums_of = {key: sum_known(differences) for key, differences in inclusive.items()}
    return _Differences(sums_of, of_self)


def _work(
    inclusive: Counts, self_counts: Counts, differences: _Differences, key: ModulePhase
) -> Work:
    counts = {}
    for name in COUNTS:
        counts[name] = getattr(inclusive, name)
        counts[f"self_{name}"] = getattr(self_counts, name)
    logical_macs = sum_known((inclusive.macs, differences.inclusive.get(key, 0)))
    self_logical_macs = sum_known((self_counts.macs, differences.of_self.get(key, 0)))
    return Work(**counts, logical_macs=logical_macs, self_logical_macs=self_logical_macs)


def _parameters(tree: ModuleTree) -> tuple[dict[str, list[ParameterSize]], dict[str, str]]:
    """Return the parameters of each module, and the owners of shared parameters.

    The first dict has, for each module, the parameters of the module and its submodules. The second
    dict has only modules with a parameter that another module owns, and maps them to this owner.
    """
    parameters: defaultdict[str, list[ParameterSize]] = defaultdict(list)
    for size in parameter_sizes(tree):
        for fqn in ancestry(size.fqn):
            parameters[fqn].append(size)
    owners = {}
    for fqn, module in tree.modules.items():
        for parameter in module.parameters(recurse=False):
            owner = tree.owner(parameter)
            if owner != fqn:
                owners[fqn] = owner
    return parameters, owners


def _notes(collected: CountedPass) -> Iterator[Note]:
    op_counts = collected.totals.op_counts
    for fqn in sorted(collected.ignored):
        ignored = [counts for key, counts in op_counts.items() if key[0] == fqn]
        yield Note(code="ignored", subject=fqn, values=sums(ignored, "calls", "macs", "flops"))
    for fqn, module in _scripted(collected.tree):
        if next(module.children(), None) is not None:
            yield Note(code="scripted", subject=fqn, values={})
    yield from _notes_of_operators(collected.totals)


def _notes_of_operators(totals: Totals) -> Iterator[Note]:
    if totals.calls_in_hooks:
        yield Note(code="communication_hook", subject="", values={"calls": totals.calls_in_hooks})
    for operator, error in totals.failures.items():
        yield Note(code="formula_failed", subject=operator, values={"error": error})
    for operator, calls in totals.upper_bounds.items():
        yield Note(code="upper_bound", subject=operator, values={"calls": calls})
    for operator, masks in totals.dense_masks.items():
        values = {"calls": masks.calls, "computed": masks.computed, "within": masks.within}
        yield Note(code="dense_mask", subject=operator, values=values)
    for operator, calls in totals.counted_inside.items():
        yield Note(code="counted_inside", subject=operator, values={"calls": calls})


BELOW = (
    "prim::mkldnn_",
    "prim::MKLDNN",
    "prim::TensorExpr",
    "prim::CudaFusion",
    "prim::FusionGroup",
    "prim::StaticSubgraph",
)
"""Prefixes of the kinds of TorchScript graph nodes that call kernels without torch's dispatcher."""

PACKED = "prim::ConstantMKLDNNTensor"
"""The kind of TorchScript graph nodes that hold a weight in oneDNN's packed layout."""


def _below_dispatcher(block: Any) -> Iterator[tuple[str, int]]:
    """Yield the nodes of a TorchScript graph that call kernels without torch's dispatcher.

    For each node, yield its kind and the size of its packed weights in bytes.
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
