"""Estimate the time of the operators that a module runs itself, without the time of Python code.

A trace has one time for all calls of an operator in the step. Each module gets a share of this
time: its share of the bytes or of the MACs of these calls, whichever is larger. Without a trace,
only an upper bound is known.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lflops import units
from lflops.analysis.step_times import traced_seconds
from lflops.profile.module_names import plain
from lflops.profile.notes import notes_with
from lflops.profile.profile import OpCount, Profile, UnsupportedCall
from lflops.profile.records import Phase
from lflops.profile.series import scaled

SECONDS_PER_CALL = 30e-6
"""Upper bound of the time of an operator call, including the line of Python that calls it."""

SECONDS_PER_BYTE = 1 / 0.5e9
"""Upper bound of the time per byte of a slow operator on a CPU, such as pooling."""

SECONDS_PER_BYTE_ON_DEVICE = 1 / 50e9
"""Upper bound of the time per byte of a slow operator on a device."""

SECONDS_PER_FLOP = 1e-9
"""Upper bound of the time per FLOP of a pointwise operator on a CPU."""

IMPLEMENTED_BY = {
    "relu": ("clamp_min",),
    "relu_": ("clamp_min_",),
    "convolution": (
        "mkldnn_convolution",
        "_slow_conv2d_forward",
        "slow_conv3d_forward",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
        "_conv_depthwise2d",
        "conv_depthwise3d",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "miopen_convolution",
        "miopen_convolution_transpose",
        "mps_convolution",
    ),
}
"""For some operators, the names of the other operators that they call to do their work.

Some traces contain only the name of the operator that is called.
"""

LEAST_SHOWN = 1e-6
"""The sentence of a finding shows the time of an operator only if it is at least this many seconds.
"""

OPERATORS_SHARE = 0.5
"""Operators explain the time of a finding only if they take at least this share of it.

The bounds of operators that are not in the trace count as well.
"""

TRACED_SHARE = 0.25
"""Operators are listed with their times only if the trace shows this share of a finding's time."""

NOT_FUSED = (
    "_linalg_",
    "linalg_cholesky",
    "linalg_eig",
    "linalg_householder",
    "linalg_inv",
    "linalg_lu",
    "linalg_matrix_exp",
    "linalg_qr",
    "linalg_solve",
    "_fft",
    "sort",
    "topk",
    "unique",
    "_unique",
    "cholesky",
)
"""No compiler fuses the operators whose names begin like this, such as matrix decompositions."""

FIX_OF_SLOW_OPERATOR = "Call {slow_operator} less often, or use a cheaper computation instead"
"""Template of the advice on an operator that no compiler fuses."""

MANY_CALLS = 200
"""If each call of a module calls this many operators, the module probably loops in Python."""

MOST_NAMES = 3
"""Maximum number of operators that the sentence of a finding names."""

ATEN = "aten::"


@dataclass(frozen=True, kw_only=True)
class OwnOperators:
    """The operators that some modules run themselves, outside their submodules, in some phases.

    Attributes:
        traced: Seconds per step of each operator that is in the trace, keyed by operator.
        names: Names of all operators. First come the operators in the trace, then the others. Both
            groups are in descending order of time.
        seconds: Seconds per step that all operators together need, including the time to call them.
            An operator that is not in the trace counts with an upper bound. Times in the
            trace are multiplied by the factor by which an unprofiled step takes longer.
        calls: Number of calls of all operators in a step.
        are_known: Whether no operator is missing in `seconds`. An unsupported operator is missing
            if it is not in the trace, because its work is unknown.
    """

    traced: Mapping[str, float]
    names: tuple[str, ...]
    seconds: float
    calls: int = 0
    are_known: bool = True

    def explains(self, seconds: float) -> bool:
        """Return whether the operators take at least `OPERATORS_SHARE` of the given seconds.

        If the time of operators is unknown, for example without a trace, the result is true.
        """
        is_unknown = not self.traced or not self.are_known
        return is_unknown or self.seconds >= OPERATORS_SHARE * seconds

    def are_traced(self, seconds: float) -> bool:
        """Return whether the trace shows at least `TRACED_SHARE` of the given seconds."""
        return sum(self.traced.values()) >= TRACED_SHARE * seconds > 0

    def are_suspected(self, seconds: float) -> bool:
        """Return whether operators may take the given seconds, but the trace does not show it."""
        return self.explains(seconds) and not self.are_traced(seconds)

    def slow_operator(self, seconds: float) -> str:
        """Return the operator that takes most of the given seconds, if no compiler can fuse it.

        Otherwise, returns the empty string.
        """
        for name, took in self.traced.items():
            if took >= OPERATORS_SHARE * seconds and name.startswith(NOT_FUSED):
                return name
        return ""

    def fitted_into(self, seconds: float) -> "OwnOperators":
        """Return a copy in which the traced times are scaled to add up to at most `seconds`.

        Operators take longer while they are traced, so they could seem to take longer than the
        module that runs them.
        """
        total = sum(self.traced.values())
        if total <= seconds:
            return self
        return replace(self, traced=scaled(self.traced, seconds / total))

    def within(self, seconds: float) -> str:
        """Return the end of the sentence that says that a module itself takes `seconds`.

        If the operators explain the seconds, the text lists them with their times, which add up to
        at most `seconds`: `, in relu (7.3 ms)`. Otherwise, it has only their total time. Without a
        trace, or if most of the operators' time is not in the trace, it lists the operators in
        brackets, because it is unknown whether they took the time. The text is empty if there are
        no operators.
        """
        if not self.names:
            return ""
        if not self.explains(seconds):
            return f", but operators take only {units.percent(self.seconds / seconds)} of this time"
        if not self.are_traced(seconds):
            return f" (operators: {replace(self, traced={}).listed()})"
        return f", in {self.fitted_into(seconds).listed()}"

    def times(self, seconds: float) -> dict[str, float]:
        """Return the seconds of the operators that `within(seconds)` lists with their time."""
        times: dict[str, float] = {}
        if self.explains(seconds) and self.are_traced(seconds):
            fitted = self.fitted_into(seconds).traced
            for name in self.names[:MOST_NAMES]:
                if fitted.get(name, 0.0) >= LEAST_SHOWN:
                    times[name] = fitted[name]
        return times

    def listed(self) -> str:
        """Return the operators as text: `max_pool2d_with_indices (21 ms) and relu (7.3 ms)`."""
        parts = []
        for name in self.names[:MOST_NAMES]:
            seconds = self.traced.get(name, 0.0)
            parts.append(with_time(name, seconds) if seconds >= LEAST_SHOWN else plain(name))
        if len(self.names) > MOST_NAMES:
            parts.append("others")
        if len(parts) < 2:
            return "".join(parts)
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


def with_time(operator: str, seconds: float) -> str:
    """Format an operator and its time, such as `relu (7.30 ms)`."""
    return f"{plain(operator)} ({units.duration(seconds)})"


class OperatorTimes:
    """The times of the operators of a profile, by module."""

    def __init__(self, profile: Profile, contention: float = 1.0) -> None:
        """Read the traced seconds and the work of each operator.

        Args:
            profile: The profile.
            contention: Factor by which operators take longer because of other programs.
        """
        self._contention = contention
        # By phase, the factor by which the times of modules were multiplied to match unprofiled
        # steps. Their operators take as much longer.
        self._factors: dict[str, float] = {}
        for note in notes_with("time_scaled", profile.notes):
            for phase, factor in note.values.items():
                self._factors[phase] = float(factor)
        self._is_on_cpu = profile.run.device_type in {"cpu", None}
        self._by_module: dict[str, list[OpCount]] = {}
        self._unsupported: dict[str, list[UnsupportedCall]] = {}
        # The bytes moved and the MACs of each operator, over all modules.
        self._moved = Counter[str]()
        self._macs = Counter[str]()
        for call in profile.unsupported:
            self._unsupported.setdefault(call.module, []).append(call)
            self._moved[_name(call)] += call.bytes
        for count in profile.op_counts:
            name = _name(count)
            self._by_module.setdefault(count.module, []).append(count)
            self._moved[name] += count.bytes_moved
            self._macs[name] += count.macs
        self._known: dict[str, float] = {}
        for name, seconds in traced_seconds(profile).items():
            self._known[name.removeprefix(ATEN)] = seconds

    def of(self, modules: Iterable[str], phases: Collection[Phase]) -> OwnOperators:
        """Return the operators that `modules` run themselves, outside submodules, in `phases`."""
        calls = 0
        traced: dict[str, float] = {}
        needed: dict[str, float] = {}
        are_known = True
        for module in modules:
            for call in self._unsupported.get(module, ()):
                if call.phase not in phases:
                    continue
                calls += call.calls
                name = _name(call)
                took = self._traced_share(name, call.bytes, 0)
                if took is None:
                    are_known = False
                    needed.setdefault(name, 0.0)
                else:
                    traced[name] = traced.get(name, 0.0) + took
                    needed[name] = needed.get(name, 0.0) + took * self._factor(call.phase)
            for count in self._by_module.get(module, ()):
                if count.phase not in phases:
                    continue
                calls += count.calls
                name = _name(count)
                took = self._traced_share(name, count.bytes_moved, count.macs)
                if took is None:
                    took = self._most_seconds(count)
                else:
                    traced[name] = traced.get(name, 0.0) + took
                needed[name] = needed.get(name, 0.0) + took * self._factor(count.phase)
        names = sorted(needed, key=lambda name: (name not in traced, -needed[name]))
        seconds = sum(needed.values()) + calls * SECONDS_PER_CALL * self._contention
        return OwnOperators(
            traced=traced,
            names=tuple(names),
            seconds=seconds,
            calls=calls,
            are_known=are_known,
        )

    def _factor(self, phase: str) -> float:
        """Return the factor by which operators take longer in an unprofiled step than in the trace.

        Other programs may have slowed down the step. Or this phase took longer in unprofiled steps
        than in the window, so that the times of modules were scaled up.
        """
        return max(self._contention, self._factors.get(phase, 1.0))

    def _traced_share(self, name: str, moved: int, macs: int) -> float | None:
        """Estimate the seconds per step of some calls of an operator, from the trace.

        The trace has one time for all calls of an operator. The result is the share of the calls
        that move `moved` bytes and have `macs` MACs. It is `None` if the operator is not in the
        trace.
        """
        recorded = []
        for each in (name, *IMPLEMENTED_BY.get(name, ())):
            if each in self._known:
                recorded.append(self._known[each])
        all_moved = self._moved[name]
        if not recorded or not all_moved:
            return None
        share = moved / all_moved
        all_macs = self._macs[name]
        if all_macs:
            share = max(share, macs / all_macs)
        return sum(recorded) * share

    def _most_seconds(self, count: OpCount) -> float:
        """Return an upper bound on the seconds of an operator that is not in the trace.

        The bound holds for operators without matmuls.
        """
        if not self._is_on_cpu:
            return count.bytes_moved * SECONDS_PER_BYTE_ON_DEVICE
        return count.bytes_moved * SECONDS_PER_BYTE + count.flops * SECONDS_PER_FLOP


def _name(call: OpCount | UnsupportedCall) -> str:
    return call.operator.removeprefix(ATEN)
