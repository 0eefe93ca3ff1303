"""Test the registry of rules, and the page that is generated from it."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable

from docs.site_pages import TABLES
from lflops.findings import rules as folder
from lflops.findings.registry import all_rules, issue_share, part_rule
from lflops.findings.rule import Rule


def test_the_page_of_findings_has_every_rule() -> None:
    """The name of each rule is a heading, with the rule's documentation and fix below it."""
    page = TABLES["findings"]()
    for name, rules in all_rules().items():
        _, _, section = page.partition(f"## `{name}`\n")
        section = section.partition("\n## ")[0]
        assert "**Counts as an issue**: " in section
        for rule in rules:
            assert (type(rule).__doc__ or "").strip().splitlines()[0] in section
        assert any(rule.fix for rule in rules) == ("**What to do**: " in section)


def test_no_placeholder_is_left_in_the_page() -> None:
    """The page shows words instead of placeholders such as `{cost}`."""
    assert "{" not in TABLES["findings"]()


def test_every_rule_has_its_own_name_and_documentation() -> None:
    """The docstring of a rule's class is its documentation."""
    for name, rules in all_rules().items():
        assert name
        for rule in rules:
            assert (type(rule).__doc__ or "").strip()


def test_a_phase_that_users_name_has_a_general_rule() -> None:
    """A rule is made for any phase, and its findings are never an issue."""
    rule = part_rule("augmentation")
    assert "augmentation" == rule.name
    assert None is rule.threshold.share


def test_the_threshold_of_a_rule_is_found_by_its_name() -> None:
    """Waiting for data is an issue from 9 % of the step. A name without a rule has no threshold."""
    assert 0.09 == issue_share("data")
    assert None is issue_share("augmentation")


def unregistered(defined: Iterable[type[Rule]]) -> set[str]:
    """Return the names of the concrete rule classes without an instance in the registry.

    Classes without the attribute `name` are base classes and are left out.
    """
    registered: list[type[Rule]] = []
    for rules in all_rules().values():
        registered += [type(rule) for rule in rules]
    missing = set()
    for kind in defined:
        is_base = not getattr(kind, "name", "") or inspect.isabstract(kind)
        is_registered = any(issubclass(other, kind) for other in registered)
        if not is_base and not is_registered:
            missing.add(kind.__name__)
    return missing


def test_every_rule_is_registered() -> None:
    """A rule class that is missing from the registry would never run."""
    defined: set[type[Rule]] = set()
    for module in pkgutil.iter_modules(folder.__path__):
        file = importlib.import_module(f"{folder.__name__}.{module.name}")
        for value in vars(file).values():
            if inspect.isclass(value) and issubclass(value, Rule):
                defined.add(value)
    assert len(defined) > len(all_rules())
    assert unregistered(defined) == set()


def test_a_rule_that_is_not_registered_is_found() -> None:
    """`unregistered` finds a missing rule, so the test above can fail."""

    class Forgotten(type(part_rule("augmentation"))):  # type: ignore[misc]
        """A rule without a place in the registry."""

        name = "forgotten"

    assert unregistered([Forgotten]) == {"Forgotten"}
