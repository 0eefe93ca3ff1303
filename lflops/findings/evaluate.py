"""Evaluate all rules, and choose and order their findings.

A finding is one reason why a step or a run takes as long as it does.
"""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.finding import Finding, ordered
from lflops.findings.registry import (
    LAST_RULES,
    MODULE_RULES,
    RANK_RULES,
    RUN_RULES,
    SETTING_RULES,
    WORK_RULES,
    part_rule,
)
from lflops.findings.rule import Candidate, StepRule
from lflops.findings.rules.slow_rank import without_rank_costs
from lflops.findings.run_rule import RunEvidence
from lflops.findings.step_parts import step_parts


def findings_of_step(step: StepEvidence) -> tuple[Finding, ...]:
    """Return the findings about a step, in the order in which reports show them.

    `ordered` defines this order: issues and expensive overhead come first, then the findings that
    only show where the time goes. If no unprofiled step was timed, there are no findings.
    """
    findings = []
    for candidate in candidates_of_step(step):
        finding = candidate.rule.finding(candidate, step)
        if finding is not None:
            findings.append(finding)
    return tuple(ordered(findings))


def candidates_of_step(step: StepEvidence) -> list[Candidate]:
    """Evaluate all rules about a step, and return the candidates that are large enough to report.

    A candidate is a possible finding. Candidates with unknown cost come first, then the others from
    the highest cost to the lowest, and then the candidates of `LAST_RULES`. No time is reported
    twice: if a slow rank or a module is a candidate, its cost is subtracted from the part of the
    step (such as the data wait) that contains this cost.
    """
    if not step.mean:
        return []
    settings = _detect(SETTING_RULES, step, [])
    slow_ranks = _detect(RANK_RULES, step, settings)
    in_modules = _detect(MODULE_RULES, step, [*settings, *slow_ranks])
    parts = _candidates_of_parts(step, in_modules)
    located = without_rank_costs([*in_modules, *parts], slow_ranks)
    found = [*settings, *slow_ranks, *located]
    found += _detect(WORK_RULES, step, found)
    reported = [candidate for candidate in found if candidate.rule.is_reported(candidate, step)]
    reported.sort(key=_unknown_cost_first)
    return reported + _detect(LAST_RULES, step, reported)


def _detect(
    rules: Iterable[StepRule], step: StepEvidence, earlier: Sequence[Candidate]
) -> list[Candidate]:
    """Evaluate rules in their order, and return their candidates.

    Each rule receives the `earlier` candidates, and the candidates of the rules before it.
    """
    found: list[Candidate] = []
    for rule in rules:
        found += rule.detect(step, [*earlier, *found])
    return found


def _candidates_of_parts(
    step: StepEvidence, in_modules: Sequence[Candidate]
) -> Iterable[Candidate]:
    for name, part in step_parts(step, in_modules).items():
        yield Candidate(
            rule=part_rule(name),
            seconds=part.seconds,
            module=part.module,
            is_rest=part.is_rest,
        )


def _unknown_cost_first(candidate: Candidate) -> tuple[bool, float]:
    return candidate.seconds is not None, -(candidate.seconds or 0.0)


def findings_of_run(run: RunEvidence) -> list[Finding]:
    """Return the findings about a whole run, in the order of `RUN_RULES`."""
    findings: list[Finding] = []
    for rule in RUN_RULES:
        findings += rule.findings(run)
    return findings
