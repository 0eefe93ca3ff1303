"""Why memory ran out: each known cause with the bytes that it explains, the one that explains the failure first."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from lflops.profile.series import summed
from lflops.snapshots.holders import CATEGORIES, Alive, Category, Peak, category_of, line_of

CauseCode = Literal[
    "other_process",
    "fragmentation",
    "kept_graphs",
    "retained_graph",
    "kept_results",
    "validation_graph",
    "kept_gradients",
    "model_copy",
    "huge_tensor",
    "optimizer_state",
    "activations",
    "parameters",
    "gradients",
    "temporary",
    "unknown",
]

EVALUATION = ("validation_step", "test_step", "validate", "evaluate", "evaluation", "evaluation_step", "eval_step", "valid_step")
LEAST_SHARE = 0.1  # of what is alive: less does not name the cause

HUGE_SHARE = 0.2
MANY = 3  # forward passes whose results are still there: two may be pipelining, or a graph that was kept by accident


class Cause(Struct, frozen=True, kw_only=True):
    """One cause."""

    code: CauseCode
    bytes: int  # what it explains: that much would be free without it
    count: int = 0  # how many passes, tensors or pieces it is about
    line: str = ""  # the line of code that made most of it; empty where unknown


class _Case(NamedTuple):
    peak: Peak
    categories: Mapping[int, Category]
    failed: int  # bytes that were asked for in vain, 0 where memory did not run out
    unused: int  # reserved bytes that no tensor has
    total: int | None  # bytes of the device that the process could have; `None` is unknown

    def of(self, category: Category) -> list[Alive]:
        return [each for place, each in enumerate(self.peak.alive) if self.categories[place] == category]


def causes_of(peak: Peak, parameter_sizes: frozenset[int], total: int | None = None) -> tuple[Cause, ...]:
    """The causes, the one to look at first first; the sizes and the total, which a process sees of the device, are in bytes.

    A particular one, a leak for instance, goes before the largest category where it explains a tenth of the memory and the failed request.
    """
    categories = {place: category_of(each, parameter_sizes) for place, each in enumerate(peak.alive)}
    failed = peak.ran_out.size if peak.ran_out is not None else 0
    case = _Case(peak, categories, failed, max(peak.reserved - peak.bytes, 0), total)
    particular = [cause for rule in _RULES if (cause := rule(case)) is not None]
    least = max(LEAST_SHARE * (peak.bytes + failed), min(failed, peak.bytes))
    ruling = sorted((each for each in particular if each.bytes >= least), key=lambda each: -each.bytes)
    general = [
        _held("kept_results" if category == "other" else category, case.of(category)) for category in CATEGORIES if category != "copy"
    ]
    largest = sorted((each for each in general if each is not None), key=lambda each: -each.bytes)
    return (*ruling, *largest, *(each for each in particular if each not in ruling))


def _other_process(case: _Case) -> Cause | None:
    """The device has less free than this process leaves it."""
    if case.total is None or case.peak.ran_out is None or case.peak.ran_out.device_free is None:
        return None
    elsewhere = case.total - case.peak.ran_out.device_free - case.peak.reserved
    # What the process itself has besides the allocator: CUDA's context and libraries.
    return Cause(code="other_process", bytes=elsewhere) if elsewhere > OUTSIDE_ALLOCATOR else None


OUTSIDE_ALLOCATOR = 3 * 2**30  # bytes that a process may have besides the allocator: CUDA's context, NCCL's buffers, libraries


def _fragmentation(case: _Case) -> Cause | None:
    """What was asked for is free, but not in one piece."""
    if case.failed and case.unused >= case.failed and case.unused >= LEAST_SHARE * case.peak.reserved:
        return Cause(code="fragmentation", bytes=case.unused)
    return None


def _kept_passes(case: _Case) -> Cause | None:
    """Activations of forward passes that are over."""
    old = [each for each in case.of("activations") if each.passes_ago and not _is_evaluation(each)]
    passes = len({each.passes_ago for each in old})
    if passes < MANY:
        return _held("retained_graph", old, passes)
    stacks = Counter(each.stack for each in old)
    now = {each.stack for each in case.of("activations") if not each.passes_ago}
    # Of a whole graph most of what one pass makes is kept; of results kept in a list only one line's.
    whole = len(stacks) > 2 or 1 < len(stacks) >= len(now)
    return _held("kept_graphs" if whole else "kept_results", old, passes)


def _validation_graph(case: _Case) -> Cause | None:
    """Activations that a validation keeps for a backward that never comes."""
    held = [each for each in case.of("activations") if _is_evaluation(each)]
    return _held("validation_graph", held, len({each.passes_ago for each in held}))


def _is_evaluation(alive: Alive) -> bool:
    return any(frame.function in EVALUATION for frame in alive.stack)


def _kept_gradients(case: _Case) -> Cause | None:
    """Gradients that have outlived an optimizer's step."""
    held = [each for each in case.of("gradients") if each.steps_ago]
    return Cause(code="kept_gradients", bytes=sum(each.bytes for each in held), count=len(held)) if held else None


def _model_copy(case: _Case) -> Cause | None:
    """A second model: an EMA, a reference, a deep copy."""
    return _held("model_copy", case.of("copy"))


def _huge_tensor(case: _Case) -> Cause | None:
    """One tensor that is a fifth of all: the one that failed, or the largest."""
    total = case.peak.bytes + case.failed
    largest = max(case.peak.alive, key=lambda each: each.bytes, default=None)
    if case.peak.ran_out is not None and case.failed >= HUGE_SHARE * total and (largest is None or case.failed >= largest.bytes):
        return Cause(code="huge_tensor", bytes=case.failed, count=1, line=line_of(case.peak.ran_out.stack))
    if largest is not None and largest.bytes >= HUGE_SHARE * total and category_of(largest) == "activations":
        alike = [each for each in case.peak.alive if each.bytes == largest.bytes]
        return Cause(code="huge_tensor", bytes=largest.bytes, count=len(alike), line=line_of(largest.stack))
    return None


def _held(code: CauseCode, held: list[Alive], count: int | None = None) -> Cause | None:
    """A cause that explains some allocations, with the line that made the most bytes of them; `None` where there are none."""
    if not held:
        return None
    lines = summed((line_of(each.stack), each.bytes) for each in held)
    most = max(lines, key=lines.__getitem__)
    return Cause(code=code, bytes=sum(lines.values()), count=len(held) if count is None else count, line=most)


_RULES: tuple[Callable[[_Case], Cause | None], ...] = (
    _other_process,
    _fragmentation,
    _kept_passes,
    _validation_graph,
    _kept_gradients,
    _model_copy,
    _huge_tensor,
)
