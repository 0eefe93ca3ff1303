"""The rule about modules that spend their time in operators without matmuls, or in other code."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lflops import units
from lflops.analysis.tree import TIMED_PHASES, BusyModules
from lflops.findings.evidence import StepEvidence
from lflops.findings.own_operators import FIX_OF_SLOW_OPERATOR, MANY_CALLS, OwnOperators
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.findings.rules.gradient_hooks import GradientHooks, hooked_patterns
from lflops.findings.rules.python_code import PythonCode, in_brackets, python_seconds

MAIN_SHARE = 0.5
"""If one of several repeated modules takes at least this share of their time, it is named alone."""

TIMES_ITS_PART = 1.5
"""A module that is named alone takes at least this many times as long as the mean of all.

One of two equal modules always takes half of their time.
"""

LONG_BACKWARD = 1e-3
"""Python code in a module's backward can be an issue if a call takes at least this many seconds."""


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """The code that one or several equal modules run themselves, outside their submodules.

    Attributes:
        operators: The operators of this code, in forward and backward.
        calls: Number of calls of the modules in a step.
        more_in_forward: Seconds by which forward of this code takes longer than backward.
        hooked_share: See `StepEvidence.hooked_shares`. The time of these hooks is included.
    """

    operators: OwnOperators
    calls: int
    more_in_forward: float
    hooked_share: float

    @property
    def slower(self) -> str:
        return "forward" if self.more_in_forward >= 0 else "backward"

    @property
    def has_loop(self) -> bool:
        return self.operators.calls >= MANY_CALLS * max(self.calls, 1)

    @property
    def has_one_operator(self) -> bool:
        """Return whether the code has only one operator, apart from its backward."""
        return sum("backward" not in name for name in self.operators.names) == 1

    def has_hooks(self, seconds: float) -> bool:
        """Return whether forward hooks may take most of the given seconds.

        Either the module or most of its submodules have hooks, or some submodules have hooks and
        the trace does not show what else takes the time.
        """
        is_seen = not self.operators.traced or self.operators.are_traced(seconds)
        return self.hooked_share >= MAIN_SHARE or (self.hooked_share > 0 and not is_seen)

    def is_in_hooks(self, seconds: float, explained: float) -> bool:
        """Return whether forward hooks seem to take most of the given seconds.

        Forward hooks have no backward, in contrast to most operators of a module. `explained` are
        the seconds in forward that other findings report.
        """
        is_forward = self.more_in_forward - explained >= MAIN_SHARE * seconds
        return is_forward and self.has_hooks(seconds)

    def operators_in(self, seconds: float, *, is_in_hooks: bool) -> str:
        """Return the end of the sentence about `seconds` in this code, which names its operators.

        If hooks take most of the time, operators of unknown time are not named.
        """
        if is_in_hooks and self.operators.are_suspected(seconds):
            return ""
        return self.operators.within(seconds)

    def is_python(self, seconds: float) -> bool:
        """Return whether Python code of the user takes most of the given seconds in backward."""
        is_long = seconds >= LONG_BACKWARD * max(self.calls, 1)
        in_backward = self.slower == "backward"
        return in_backward and is_long and not self.operators.explains(seconds)


class NoMatmuls(StepRule):
    """A module spends time in operators without matmuls, such as norms and activations.

    lflops reports this only if the chip's peak is unknown. It is an issue only on a CPU, and only
    if Python code of the user takes most of the time. lflops concludes this in two cases: if most of
    the time is in backward, but not in operators; or if most of the time is in forward, and the
    submodules have forward hooks.
    """

    name = "no_products"
    threshold = Threshold(share=0.10, reported=0.05)
    title = "operators without matmuls in {modules}"
    title_of_hooks = "forward hooks in {modules}"
    title_of_other_code = "Python code in {modules}"
    sentence = "{Cost} is spent in {where}{class} itself{hooks}{operators}."
    sentence_of_class = (
        "{Cost} is spent in {number} modules of the class {class}, such as {where}"
        "{hooks}{operators}."
    )
    fix = "Fuse the operators of {where}, for example with torch.compile"
    fix_of_one_operator = (
        "Fuse the operator of {where} with the operators before and after it, for example with "
        "torch.compile"
    )
    fix_of_slow_operator = FIX_OF_SLOW_OPERATOR
    fix_if_unknown = (
        "To see what takes the time, name parts of the forward of {where} with lflops.scope, and "
        "look for Python loops"
    )
    fix_of_other_code = (
        "Look for Python code, locks, and access to files or the network in the {pass} of {where}"
    )
    fix_of_loop = (
        "{where} makes {calls} operator calls in a step. Replace Python loops by operators on "
        "whole tensors, or compile {where}, for example with torch.compile"
    )
    fix_of_loops = (
        "The {modules} make {calls} operator calls in a step. Replace Python loops by operators on "
        "whole tensors, or compile these modules, for example with torch.compile"
    )
    fix_of_hooks = "Let the forward hooks on {where} or its layers work only every N steps"
    fix_of_hooks_of_several = "Let the forward hooks on the {modules} work only every N steps"

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.breakdown is not None or step.are_module_times_unreliable:
            return
        explained = set()
        in_python: Mapping[str, float] = {}
        for each in earlier:
            if not each.rule.is_reported(each, step):
                continue
            if isinstance(each.rule, PythonCode):
                in_python = python_seconds(step, earlier)
                continue
            explained.add(step.patterns.get(each.module, each.module))
            if isinstance(each.rule, GradientHooks):
                explained |= hooked_patterns(step)
        patterns = _patterns_with_operators(step) - explained
        by_class: dict[str, list[BusyModules]] = {}
        for modules in step.busiest:
            if modules.pattern in patterns and not modules.macs:
                # Scopes have no class.
                group = modules.pattern if modules.kind == "scope" else modules.kind
                by_class.setdefault(group, []).append(modules)
        for equal in by_class.values():
            yield self._candidate(equal, step, in_python)

    def _candidate(
        self, equal: Sequence[BusyModules], step: StepEvidence, in_python: Mapping[str, float]
    ) -> Candidate:
        """Return the candidate about modules of the same class, which may have several patterns.

        `in_python` has the seconds by pattern that have a finding of their own.
        """
        main = equal[0]
        patterns = [modules.pattern for modules in equal]
        places = patterns
        seconds = sum(modules.seconds for modules in equal)
        elsewhere = sum(in_python.get(pattern, 0.0) for pattern in patterns)
        is_several = len(equal) > 1 or main.modules > 1
        number = sum(modules.modules for modules in equal)
        least_share = max(MAIN_SHARE, TIMES_ITS_PART / number)
        if is_several and main.slowest_seconds >= least_share * seconds:
            places = [main.slowest]
            seconds = main.slowest_seconds
            elsewhere = in_python.get(main.pattern, 0.0) * seconds / main.seconds
        elsewhere += sum(step.sleeping_in(place) for place in places)
        seconds -= elsewhere
        code = own_code(places, step)
        is_in_hooks = code.is_in_hooks(seconds, elsewhere)
        is_python = code.is_python(seconds)
        is_one_place = len(places) == 1
        facts: Facts = {
            "class": in_brackets(main.kind, places[0]) if is_one_place else main.kind,
            "number": number,
            "modules": places[0] if is_one_place else f"{number} {main.kind} modules",
            "is_one_place": is_one_place,
            "operators": code.operators_in(seconds, is_in_hooks=is_in_hooks),
            "pass": code.slower,
            "hooks": " or in forward hooks" if code.has_hooks(seconds) else "",
            "calls": units.count(code.operators.calls),
            "slow_operator": code.operators.slow_operator(seconds),
            "is_python": is_in_hooks or is_python,
            "title": self._title_of(is_python=is_python, is_in_hooks=is_in_hooks),
            "fix": self._fix_of(code, seconds, step, is_in_hooks=is_in_hooks),
        }
        times = code.operators.times(seconds)
        return Candidate(rule=self, seconds=seconds, module=places[0], facts=facts, operators=times)

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.sentence if candidate.facts["is_one_place"] else self.sentence_of_class

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        return step.is_on_cpu and bool(candidate.facts["is_python"])

    def title_for(self, candidate: Candidate) -> str:
        return str(candidate.facts["title"])

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        fix = str(candidate.facts["fix"])
        if candidate.facts["is_one_place"]:
            return fix
        of_several = {
            self.fix_of_loop: self.fix_of_loops,
            self.fix_of_hooks: self.fix_of_hooks_of_several,
        }
        return of_several.get(fix, fix.replace("{where}", "the {modules}"))

    def _title_of(self, *, is_python: bool, is_in_hooks: bool) -> str:
        if is_in_hooks:
            return self.title_of_hooks
        return self.title_of_other_code if is_python else self.title

    def _fix_of(
        self, code: OwnCode, seconds: float, step: StepEvidence, *, is_in_hooks: bool
    ) -> str:
        if is_in_hooks:
            return self.fix_of_hooks
        if not code.operators.explains(seconds):
            return self.fix_of_other_code
        if code.has_loop:
            return self.fix_of_loop
        if code.operators.traced and not code.operators.are_traced(seconds):
            return self.fix_if_unknown
        if code.operators.slow_operator(seconds):
            return self.fix_of_slow_operator
        fix = self.fix_of_one_operator if code.has_one_operator else self.fix
        return fix if step.can_fuse else ""


def own_code(places: Iterable[str], step: StepEvidence) -> OwnCode:
    """Return what modules do outside their submodules.

    A place is the name of a module, or a pattern such as `layers.*` for all modules that match it.
    """
    names: list[str] = []
    for place in places:
        names += [place] if place in step.profile.modules else step.modules_at(place)
    calls = 0
    more_in_forward = 0.0
    for name in names:
        module = step.profile.modules[name]
        calls += module.calls
        for work, sign in ((module.forward, 1), (module.backward, -1)):
            if work.self_seconds is not None:
                more_in_forward += sign * work.self_seconds.median
    return OwnCode(
        operators=step.operator_times.of(names, {"forward", "backward"}),
        calls=calls,
        more_in_forward=more_in_forward,
        hooked_share=_hooked_share(names, step),
    )


def _hooked_share(names: Sequence[str], step: StepEvidence) -> float:
    """Return the mean of `StepEvidence.hooked_shares`, weighted by the time of each module."""
    seconds = {}
    for name in names:
        own = step.profile.modules[name].forward.self_seconds
        seconds[name] = 0.0 if own is None else own.median
    whole = sum(seconds.values())
    if not whole:
        return max((step.hooked_shares.get(name, 0.0) for name in names), default=0.0)
    hooked = sum(step.hooked_shares.get(name, 0.0) * seconds[name] for name in names)
    return hooked / whole


def _patterns_with_operators(step: StepEvidence) -> set[str]:
    """Return the patterns (`layers.*.mlp`) of modules that run operators outside their submodules.

    Compiled modules are left out, because their self time is unknown.
    """
    patterns = set()
    for name, module in step.profile.modules.items():
        runs_operators = any(module.work(phase).self_calls for phase in TIMED_PHASES)
        if name and runs_operators and not module.compiled:
            patterns.add(step.patterns[name])
    return patterns
