"""Compute the work of each operator in total and by module, and list unsupported operators."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add, attrgetter, itemgetter

from msgspec import Struct

from lflops.analysis.step_times import traced_seconds
from lflops.analysis.tree import WorkCounts, phases_of, share_of
from lflops.profile.profile import OpCount, Profile, UnsupportedCall
from lflops.profile.records import PHASES, Phase
from lflops.profile.series import grouped, ratio, sums

MODULES = 20
"""Maximum number of modules that are listed for an operator.

The modules in which the operator does the most work are listed.
"""


class Operator(Struct, frozen=True, kw_only=True):
    """The work of one operator in a phase, or in all phases together.

    Attributes:
        figures: The calls, MACs, FLOPs and bytes.
        share: The operator's share of the MACs. If the phase has no MACs, its share of the FLOPs.
    """

    operator: str
    figures: WorkCounts
    share: float | None


class OperatorRow(Struct, frozen=True, kw_only=True):
    """The work of one operator in one phase and dtype, or in all phases together.

    Attributes:
        phase: The phase, or `None` for all phases together.
        dtypes: The dtypes of the work. A row for one phase has a single dtype. Empty if the
            operator has no formula.
        figures: The work. If the operator has no formula, only its calls and bytes are known.
        is_counted: Whether the operator has a formula. If so, the totals include its work.
        share: Share of the phase's MACs or FLOPs. `None` if the operator has no formula.
        modules: Number of modules that ran the operator.
        by_module: Work of the operator in each of the `MODULES` modules where it does the most
            work, keyed by module name.
    """

    operator: str
    phase: Phase | None
    dtypes: tuple[str, ...]
    figures: WorkCounts
    is_counted: bool
    share: float | None
    modules: int
    by_module: Mapping[str, WorkCounts]


class UnsupportedOperator(Struct, frozen=True, kw_only=True):
    """An operator for which lflops has no formula, so no total includes its work.

    The numbers are sums over all modules and phases.

    Attributes:
        seconds: Self time per step in seconds, from a trace. `None` if it was not traced.
    """

    operator: str
    modules: tuple[str, ...]
    calls: int
    bytes: int
    seconds: float | None


def operators(profile: Profile, phase: Phase | None = "forward") -> tuple[Operator, ...]:
    """Return the work of each operator in a phase. `None` means all phases together.

    The operators are sorted by MACs, then by FLOPs, then by bytes, in descending order.
    """
    phases = phases_of(phase)
    cells = [cell for cell in profile.op_counts if cell.phase in phases]
    total = _Total(profile, phase)
    rows = []
    for operator, of_operator in grouped(cells, attrgetter("operator")).items():
        work = WorkCounts(**sums(of_operator, *_FIELDS))
        rows.append(Operator(operator=operator, figures=work, share=total.share(work)))
    return tuple(sorted(rows, key=lambda row: _most_first(row.figures)))


def operator_rows(profile: Profile) -> tuple[OperatorRow, ...]:
    """Return the rows of the table of operators.

    Each operator has one row for all phases together, and one row for each phase and dtype. The
    rows are in this order:

    1. Operators without a formula, all phases together.
    2. Operators without a formula, each phase and dtype.
    3. Operators with a formula, all phases together.
    4. Operators with a formula, each phase and dtype.

    Within each of these groups, the rows are sorted by work in descending order.
    """
    unsupported = list(map(_as_op_count, profile.unsupported))
    twice = _calls_in_two_phases(profile.op_counts)
    return (
        *_sorted(_rows(profile, unsupported, {}, is_counted=False)),
        *_sorted(_rows(profile, profile.op_counts, twice, is_counted=True)),
    )


def _as_op_count(entry: UnsupportedCall) -> OpCount:
    return OpCount(
        module=entry.module,
        operator=entry.operator,
        phase=entry.phase,
        dtype="",
        calls=entry.calls,
        bytes_moved=entry.bytes,
        macs=0,
        executed_macs=0,
        flops=0,
    )


def _calls_in_two_phases(cells: Sequence[OpCount]) -> dict[tuple[str, str], int]:
    """Return how many calls are counted in two phases, keyed by operator and module.

    A total over all phases must count these calls only once. For example, the backward of fused
    attention recomputes a matmul. The counter splits such a call in two: the FLOPs of this matmul
    count in the phase `recompute`, and the other FLOPs and all bytes count in `backward`.
    """
    recomputed = []
    backward = {}
    for cell in cells:
        if cell.phase == "recompute" and not cell.bytes_moved:
            recomputed.append(cell)
        elif cell.phase == "backward" and cell.bytes_moved:
            backward[cell.operator, cell.module, cell.dtype] = cell.calls
    twice: defaultdict[tuple[str, str], int] = defaultdict(int)
    for cell in recomputed:
        calls = backward.get((cell.operator, cell.module, cell.dtype), 0)
        twice[cell.operator, cell.module] += min(cell.calls, calls)
    return twice


def unsupported_operators(profile: Profile) -> tuple[UnsupportedOperator, ...]:
    """Return the operators without a formula, sorted by the bytes that they move, descending."""
    seconds = traced_seconds(profile, own=True)
    by_operator = grouped(profile.unsupported, attrgetter("operator"))
    rows = []
    for operator, entries in sorted(by_operator.items()):
        row = UnsupportedOperator(
            operator=operator,
            modules=tuple(grouped(entries, attrgetter("module"))),
            seconds=seconds.get(operator),
            **sums(entries, "calls", "bytes"),
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.bytes))


_FIELDS = WorkCounts.__struct_fields__
_COUNTS_OF = attrgetter(*_FIELDS)
_NOTHING = (0,) * len(_FIELDS)
_RANK_OF = itemgetter(*map(_FIELDS.index, ("macs", "flops", "bytes_moved")))

# The name of a module, and its counts in the order of `_FIELDS`.
_ModuleCounts = tuple[str, tuple[int, ...]]


def _rows(
    profile: Profile,
    cells: Sequence[OpCount],
    twice: Mapping[tuple[str, str], int],
    *,
    is_counted: bool,
) -> Iterator[OperatorRow]:
    """Yield the rows of each operator: first all phases together, then each phase and dtype.

    `twice` is the result of `_calls_in_two_phases`.
    """
    in_two_phases = {operator for operator, _ in twice}
    totals = {phase: _Total(profile, phase) for phase in (None, *PHASES)}

    def row(
        operator: str, phase: Phase | None, dtypes: Iterable[str], counted: list[_ModuleCounts]
    ) -> OperatorRow:
        figures, by_module = _total_and_largest(counted)
        share = None
        if is_counted:
            share = totals[phase].share(figures)
        return OperatorRow(
            operator=operator,
            phase=phase,
            dtypes=tuple(filter(None, dtypes)),
            figures=figures,
            is_counted=is_counted,
            share=share,
            modules=len(counted),
            by_module=by_module,
        )

    for operator, of_operator in grouped(cells, attrgetter("operator")).items():
        kinds: dict[tuple[Phase, str], list[OpCount]]
        kinds = grouped(of_operator, attrgetter("phase", "dtype"))
        by_kind = {}
        dtypes: dict[str, None] = {}
        for (phase, dtype), of_kind in kinds.items():
            by_kind[phase, dtype] = _by_module(of_kind)
            dtypes[dtype] = None
        if len(kinds) == 1 and operator not in in_two_phases:
            (everywhere,) = by_kind.values()
        else:
            everywhere = _by_module(of_operator, twice)
        yield row(operator, None, dtypes, everywhere)
        for (phase, dtype), counted in by_kind.items():
            yield row(operator, phase, (dtype,), counted)


def _by_module(
    cells: Sequence[OpCount], twice: Mapping[tuple[str, str], int] | None = None
) -> list[_ModuleCounts]:
    """Return the work of one operator in each module.

    `twice` is the result of `_calls_in_two_phases`. The calls in it are counted only once.
    """
    counted: list[_ModuleCounts] = []
    modules = set()
    for cell in cells:
        counted.append((cell.module, _COUNTS_OF(cell)))
        modules.add(cell.module)
    # If each entry of `cells` is in another module, there is nothing to add up.
    if not twice and len(modules) == len(cells):
        return counted
    total: dict[str, tuple[int, ...]] = {}
    for module, counts in counted:
        total[module] = tuple(map(add, total.get(module, _NOTHING), counts))
    if twice:
        for module, (calls, *others) in total.items():
            total[module] = (calls - twice.get((cells[0].operator, module), 0), *others)
    return list(total.items())


def _total_and_largest(
    counted: Sequence[_ModuleCounts],
) -> tuple[WorkCounts, dict[str, WorkCounts]]:
    """Return the sum over all modules, and the work of the `MODULES` modules with the most work."""
    # Many modules have the same counts, because layers repeat. Each `WorkCounts` is made only once.
    work: dict[tuple[int, ...], WorkCounts] = {}
    total = WorkCounts()
    for counts, modules in Counter(counts for _, counts in counted).items():
        work[counts] = WorkCounts(**dict(zip(_FIELDS, counts, strict=True)))
        total += work[counts] * modules
    ranked = sorted(counted, key=lambda item: _RANK_OF(item[1]), reverse=True)
    largest = {}
    for module, counts in ranked[:MODULES]:
        largest[module] = work[counts]
    return total, largest


class _Total:
    """The total MACs or FLOPs of a phase, or of all phases. Shares are relative to this total."""

    def __init__(self, profile: Profile, phase: Phase | None) -> None:
        self._metric = share_of(profile, phase)
        root = profile.modules[""]
        self._total = 0
        for name in phases_of(phase):
            self._total += getattr(root.work(name), self._metric)

    def share(self, work: WorkCounts) -> float | None:
        return ratio(getattr(work, self._metric), self._total)


def _sorted(rows: Iterable[OperatorRow]) -> list[OperatorRow]:
    return sorted(rows, key=lambda row: (row.phase is not None, *_most_first(row.figures)))


def _most_first(counts: WorkCounts) -> tuple[int, ...]:
    return -counts.macs, -counts.flops, -counts.bytes_moved
