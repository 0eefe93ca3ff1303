"""Find repeated modules that run more operators, or use a wider dtype, than the other repeats.

Repeats are modules of one class with names that differ only in numbers, such as `layers.0.mlp` and
`layers.1.mlp`. They have the same pattern: `layers.*.mlp`.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from lflops.analysis.module_outliers import explaining
from lflops.analysis.tree import total_seconds
from lflops.profile.module_names import ancestry
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASS_PHASES
from lflops.profile.series import grouped

FEWEST_MODULES = 3
"""Repeated modules are compared only if at least this many of them have the same pattern."""

LEAST_RATIO = 1.5
"""A module is slow if it takes this many times the median time of modules with its pattern."""

MANY_MORE_CALLS = 2
"""A module does more work if it calls this many times as many operators as the other repeats."""

DOUBLE_PRECISION = {"float64", "complex128"}

LARGE_CALL_BYTES = 1 << 17
"""Least bytes that a call moves on average, if its time depends on the size of its tensors."""

DTYPE_BITS = {"float64": 64, "float32": 32, "tf32": 32, "bfloat16": 16, "float16": 16}


class UnlikeRepeat(Struct, frozen=True, kw_only=True):
    """A repeated module that takes longer than the other repeats because it does different work.

    Repeats are modules with the same pattern, such as `layers.*.mlp`.

    Attributes:
        module: The name of the module.
        others: Number of the other repeats.
        excess_seconds: Seconds per step by which the module's time exceeds the median of all
            repeats.
        calls: Number of operator calls of the module per step.
        usual_calls: Median number of operator calls of the other repeats, per step.
        dtype: The widest dtype of the module's matmuls. Empty if the module runs no matmuls.
        usual_dtype: The most frequent `dtype` among the other repeats.
    """

    module: str
    others: int
    excess_seconds: float
    calls: int
    usual_calls: float
    dtype: str
    usual_dtype: str

    @property
    def has_wider_dtype(self) -> bool:
        return DTYPE_BITS.get(self.dtype, 0) > DTYPE_BITS.get(self.usual_dtype, 64)

    @property
    def has_more_calls(self) -> bool:
        return self.usual_calls > 0 and self.calls >= MANY_MORE_CALLS * self.usual_calls


def unlike_repeats(
    profile: Profile,
    patterns: Mapping[str, str],
    children: Mapping[str, Sequence[str]],
    least_seconds: float,
) -> list[UnlikeRepeat]:
    """Find repeated modules that are slow because they do different work.

    If a submodule explains the excess time of a module, only the submodule is returned.

    Args:
        profile: The profile.
        patterns: The pattern of each module's name. Modules with the same pattern are repeats.
        children: Names of the modules directly below each module.
        least_seconds: A module is returned only if it takes at least this many seconds per step
            longer than the median repeat.
    """
    dtypes = _widest_dtypes(profile)
    seconds = _known_seconds(profile, patterns)
    found: dict[str, UnlikeRepeat] = {}
    excesses: dict[str, float] = {}
    for names in grouped(seconds, patterns.__getitem__).values():
        if len(names) < FEWEST_MODULES:
            continue
        usual = statistics.median(seconds[name] for name in names)
        for name in names:
            excess = seconds[name] - usual
            if excess < least_seconds or seconds[name] < LEAST_RATIO * usual:
                continue
            repeat = _compared(name, names, excess, profile.modules, dtypes)
            if repeat.has_wider_dtype or repeat.has_more_calls:
                found[name] = repeat
                excesses[name] = excess
    return [found[name] for name in explaining(excesses, children)]


def _known_seconds(profile: Profile, patterns: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds per step of each repeated module whose time is known."""
    seconds: dict[str, float] = {}
    for name, pattern in patterns.items():
        took = total_seconds(profile.modules[name])
        if pattern != name and took is not None:
            seconds[name] = took
    return seconds


def _compared(
    name: str,
    repeats: Iterable[str],
    excess: float,
    modules: Mapping[str, ModuleProfile],
    dtypes: Mapping[str, str],
) -> UnlikeRepeat:
    calls_of_others = []
    dtypes_of_others = []
    for other in repeats:
        if other != name:
            calls_of_others.append(_calls(modules[other]))
            dtypes_of_others.append(dtypes.get(other, ""))
    return UnlikeRepeat(
        module=name,
        others=len(calls_of_others),
        excess_seconds=excess,
        calls=_calls(modules[name]),
        usual_calls=statistics.median(calls_of_others),
        dtype=dtypes.get(name, ""),
        usual_dtype=statistics.mode(dtypes_of_others),
    )


def _calls(module: ModuleProfile) -> int:
    return module.forward.calls + module.backward.calls + module.recompute.calls


def _widest_dtypes(profile: Profile) -> dict[str, str]:
    """Return the widest dtype of the matmuls in each module, including its submodules."""
    widest: dict[str, str] = {}
    for module, dtype in _dtypes_of_matmuls(profile):
        for above in ancestry(module):
            widest[above] = max(widest.get(above, dtype), dtype, key=DTYPE_BITS.__getitem__)
    return widest


def _dtypes_of_matmuls(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the module and the dtype of each operator that performs a matmul."""
    for count in profile.op_counts:
        if count.macs and count.dtype in DTYPE_BITS:
            yield count.module, count.dtype


def modules_multiplying_in(profile: Profile, dtype: str) -> Iterable[str]:
    """Return the modules that run matmuls in `dtype` themselves, sorted by name.

    Matmuls in their submodules do not count.
    """
    return sorted({module for module, used in _dtypes_of_matmuls(profile) if used == dtype})


def modules_in_double_precision(profile: Profile) -> list[str]:
    """Return the modules whose own operators mostly run in double precision, sorted by name.

    A module belongs to them if operators with a float64 or complex128 result move at least half of
    its bytes. These operators must be large, because small ones take about as long in float32.
    """
    moved: Counter[str] = Counter()
    moved_in_double: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for count in profile.op_counts:
        if count.phase in PASS_PHASES:
            moved[count.module] += count.bytes_moved
            if count.dtype in DOUBLE_PRECISION:
                moved_in_double[count.module] += count.bytes_moved
                calls[count.module] += count.calls
    found = []
    for module, nbytes in moved_in_double.items():
        is_large = nbytes >= LARGE_CALL_BYTES * calls[module]
        if is_large and nbytes >= moved[module] / 2:
            found.append(module)
    return sorted(found)
