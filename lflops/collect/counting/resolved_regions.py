"""The sums of a step with those of its compiled graphs, each in the rows of the graph's modules."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from lflops.collect.counting.compiled_regions import RegionCall, number_of_region, row_of_region
from lflops.collect.counting.graph_counts import UncountableError, count_graph
from lflops.collect.counting.totals import Counts, Resolved, Totals, Transfers
from lflops.collect.model.module_tree import ModuleTree
from lflops.profile.notes import Note

__all__ = ["resolve"]

COMPILED = "torch.compile"
"""The name under which a graph of unknown work is listed."""
PHASES_OF_BACKWARD = frozenset({"backward", "recompute"})


def resolve(totals: Totals, regions: Sequence[RegionCall], tree: ModuleTree, *, traffic: bool = True) -> Resolved:
    """Count the graphs, and put them in the place of those of their operators that were seen.

    Args:
        totals: The step's sums, in which each call of a graph has a row of its own.
        regions: The calls.
        tree: All rows.
        traffic: Whether bytes are counted.
    """
    outside, inside = _divided(totals)
    resolved = Resolved(outside)
    unknown: Counter[str] = Counter()
    different: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number, call in enumerate(regions):
        seen = inside.pop(number, Totals())
        call.went_backward |= not call.is_one_node and any(phase == "backward" for _, _, phase, _ in seen.cells)
        resolved.is_memory_known &= call.sees_all
        try:
            counted = count_graph(call, tree, traffic=traffic)
        except UncountableError as error:
            resolved.totals.merge(_as_seen(seen, call))
            if not call.sees_all:
                unknown[str(error)] += 1
            continue
        found = _in_phase_of(counted.totals, call)
        macs, most = _macs(seen, of_backward=False), _macs(found, of_backward=False)
        if call.sees_all and macs != most:
            resolved.totals.merge(_as_seen(seen, call))
            continue
        if macs > most:
            different[call.row][0] += macs
            different[call.row][1] += most
        else:
            _add_recompute(found, seen, call.row)
        resolved.totals.merge(found)
        if call.phase == "forward":
            resolved.calls.update(counted.calls)
    for rest in inside.values():
        resolved.totals.merge(_as_seen(rest, None))
    resolved.notes += [Note(code="compiled_uncounted", subject=why, values={"calls": calls}) for why, calls in unknown.items()]
    for row, (macs, most) in different.items():
        resolved.notes.append(Note(code="compiled_differs", subject=row, values={"seen": macs, "counted": most}))
    return resolved


def _divided(totals: Totals) -> tuple[Totals, dict[int, Totals]]:
    """What was seen outside of compiled graphs, and in each call of one."""
    outside = Totals(
        failures=totals.failures,
        upper_bounds=totals.upper_bounds,
        counted_inside=totals.counted_inside,
        calls_in_hooks=totals.calls_in_hooks,
        dense_masks=totals.dense_masks,
    )
    inside: defaultdict[int, Totals] = defaultdict(Totals)

    def of(row: str) -> Totals:
        number = number_of_region(row)
        return outside if number is None else inside[number]

    for cell, counts in totals.cells.items():
        of(cell[0]).cells[cell] = counts
    for entry, sums in totals.uncounted.items():
        of(entry[0]).uncounted[entry] = sums
    for collective, sums in totals.collectives.items():
        of(collective[0]).collectives[collective] = sums
    for wait in totals.waits:
        of(wait.row).waits.add(wait)
    for key, macs in totals.logical_difference.items():
        of(key.row).logical_difference[key] = macs
    return outside, dict(inside)


def _as_seen(seen: Totals, call: RegionCall | None) -> Totals:
    """What was seen of a graph, in the row that called it. What was not seen is listed."""
    found = seen.moved(lambda row, phase: (row_of_region(row), phase))
    if call is not None and not call.sees_all:
        for phase in (call.phase, "backward") if call.went_backward else (call.phase,):
            found.uncounted[call.row, COMPILED, phase].add(Transfers(1, call.bytes))
    return found


def _in_phase_of(totals: Totals, call: RegionCall) -> Totals:
    """The sums with the phase in which the graph ran in place of forward."""
    return totals if call.phase == "forward" else totals.moved(lambda row, phase: (row, call.phase if phase == "forward" else phase))


def _add_recompute(found: Totals, seen: Totals, row: str) -> None:
    """Add the products that ran in backward, and that are not in the graph: compiled code computes them again."""
    macs = _macs(seen, of_backward=True) - _macs(found, of_backward=True)
    if macs > 0:
        dtypes = Counter[Any]()
        for (_, _, phase, dtype), counts in seen.cells.items():
            dtypes[dtype] += counts.macs if phase in PHASES_OF_BACKWARD else 0
        cell = found.cells[row, COMPILED, "recompute", dtypes.most_common(1)[0][0]]
        cell.add(Counts(calls=1, macs=macs, executed_macs=macs, flops=2 * macs))


def _macs(totals: Totals, *, of_backward: bool) -> int:
    return sum(counts.macs for (_, _, phase, _), counts in totals.cells.items() if (phase in PHASES_OF_BACKWARD) == of_backward)
